"""The plans of the grouped family."""

import dataclasses

from benchmarks import cases
from jax_splitk.kernels.grouped.wgrad import FAMILY
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import conv


def test_a_line_is_an_image_of_height_one() -> None:
    p = conv((100,), (5,), (32, 32), batch=3, padding=1, groups=8)
    for config in FAMILY.candidates(p, DEFAULT_CUDA):
        x, dy = FAMILY.plan(p, config).maps
        assert (x.dims, dy.dims) == ((32, 100, 1, 3), (32, 98, 1, 3))
        assert config.rows == 1


def test_code_does_not_depend_on_the_batch() -> None:
    for case in cases.find(["grouped"]):
        p = case.problem()
        config = FAMILY.candidates(p, DEFAULT_CUDA)[0]
        assert FAMILY.source(dataclasses.replace(p, batch=p.batch + 1), config) == FAMILY.source(p, config)
