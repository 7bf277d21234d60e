"""How the tf32 family sees a problem, and its boxes. No GPU."""

import dataclasses
import functools

from benchmarks import cases
from jax_splitk.kernels.tf32.wgrad import FAMILY, view
from jax_splitk.runtime.plan import TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import conv


def test_a_strided_1x1_filter_reads_only_the_pixels_that_count() -> None:
    problem = functools.partial(conv, (16, 32), batch=4, dtype="float32")
    v = view(problem((1, 1), stride=(2, 4)))
    assert (v.stride, v.size, v.lhs_strides) == ((1, 1), (8, 8), (4 * 64, 2 * 32 * 64, 16 * 32 * 64))
    v = view(problem((3, 3), stride=2, padding=1))
    assert (v.stride, v.size) == ((2, 2), (16, 32))
    v = view(problem((3, 1), stride=2, rhs_dilation=(4, 1), padding=((2, 2), (-2, 0))))
    assert (v.stride, v.dilation, v.pad, v.size) == ((1, 1), (2, 1), (1, -1), (8, 16))


def test_boxes_are_within_tmas_limits() -> None:
    cases_ = (dataclasses.replace(case, dtype="float32") for case in cases.WGRAD_CASES)
    for p in (p for p in (case.problem() for case in cases_) if FAMILY.refusal(p) is None):
        for config in FAMILY.candidates(p, DEFAULT_CUDA):
            for tensor_map in FAMILY.plan(p, config).maps:
                assert isinstance(tensor_map, TiledMap)
                assert tensor_map.box[0] * 4 == 128
                assert max(tensor_map.box) <= 256
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
