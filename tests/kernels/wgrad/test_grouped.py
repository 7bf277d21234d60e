"""The plans of the grouped family."""

import dataclasses
import math

from benchmarks import cases
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.grouped.wgrad import FAMILY, Config
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import conv
from tests.structs import arguments


def test_plan() -> None:
    p = conv((20, 31), (5, 2), (24, 48), batch=5, stride=(2, 1), padding=((4, 1), (7, 2)), groups=3)
    config = Config(8, 16, 2, 4, 16, 1, 2, 6)
    assert FAMILY.refusal(p, config) is None
    made = FAMILY.plan(p, config)
    main, _ = made.launches
    out_h, out_w = p.output_spatial
    each, more = divmod(3 * math.ceil(out_h / 4) * math.ceil(out_w / 16), 6)
    assert arguments(made) == {
        "out_channels": 48, "stride": 5 * 2 * 8 * 48, "out_h": out_h, "out_w": out_w, "pad_h": 4, "pad_w": 7,
        "each": each, "more": more,
    }  # fmt: skip
    assert main.grid == (3, 6, 1)
    assert main.block == (32 * (1 + grouped.tiling(p, config).jobs), 1, 1)
    x, dy = made.maps
    assert (x.dims, x.box, x.swizzle) == ((24, 31, 20, 5), (8, 24, 11, 2), 0)
    assert (dy.dims, dy.box, dy.swizzle) == ((48, out_w, out_h, 5), (16, 16, 4, 2), 1)


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
