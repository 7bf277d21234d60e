"""The tf32 family's device code, its arithmetic in NumPy. No GPU."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad.tf32 import FAMILY, Config, view
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, random_problems, tf32_model
from tests.problems import conv, seeded


def test_a_strided_1x1_filter_reads_only_the_pixels_that_count() -> None:
    problem = functools.partial(conv, (16, 32), batch=4, dtype="float32")
    v = view(problem((1, 1), stride=(2, 4)))
    assert (v.stride, v.size, v.lhs_strides) == ((1, 1), (8, 8), (4 * 64, 2 * 32 * 64, 16 * 32 * 64))
    v = view(problem((3, 3), stride=2, padding=1))
    assert (v.stride, v.size) == ((2, 2), (16, 32))
    v = view(problem((3, 1), stride=2, rhs_dilation=(4, 1), padding=((2, 2), (-2, 0))))
    assert (v.stride, v.dilation, v.pad, v.size) == ((1, 1), (2, 1), (1, -1), (8, 16))


MODELLED = [
    (Case("plain", 2, 5, 8, 4, 36, (3, 3)), Config(3, 3, 1, 64, 1, 5, 8, 3, 2)),
    (Case("two_images", 3, 4, 12, 8, 8, (3, 3)), Config(3, 3, 1, 32, 2, 4, 12, 2, 2)),
    (Case("stride_2", 2, 9, 15, 68, 8, (3, 3), stride=(2, 2)), Config(3, 3, 1, 32, 2, 3, 8, 2, 2)),
    (Case("stride_3", 2, 9, 23, 8, 8, (3, 2), stride=(3, 3)), Config(3, 2, 1, 32, 1, 3, 8, 3, 1)),
    (Case("stride_4", 2, 9, 50, 16, 200, (1, 3), stride=(1, 4)), Config(1, 3, 1, 192, 2, 3, 16, 2, 2)),
    (Case("14_wide", 6, 4, 14, 68, 8, (3, 3)), Config(3, 3, 1, 32, 4, 4, 14, 3, 2)),
    (Case("7_wide", 9, 5, 7, 8, 36, (3, 3)), Config(3, 3, 1, 64, 8, 5, 7, 3, 2)),
    (Case("7_wide_stride_2", 9, 5, 14, 8, 8, (3, 3), stride=(2, 2)), Config(3, 3, 1, 32, 8, 3, 7, 2, 2)),
    (Case("mixed_ragged", 3, 5, 17, 8, 36, (3, 3), dilation=(1, 2)), Config(3, 3, 1, 64, 8, 5, 9, 2, 2)),
    (Case("ragged", 2, 7, 13, 12, 20, (3, 3)), Config(3, 3, 1, 64, 1, 4, 16, 3, 2)),
    (Case("5x5", 1, 6, 9, 4, 8, (5, 5), dilation=(2, 1)), Config(3, 3, 1, 32, 1, 6, 16, 3, 1)),
    (Case("1x1", 2, 8, 9, 132, 132, (1, 1)), Config(1, 1, 2, 128, 1, 1, 48, 3, 2)),
    (Case("1x1_stride_2", 2, 9, 9, 132, 8, (1, 1), stride=(2, 2)), Config(1, 1, 3, 32, 2, 5, 8, 3, 1)),
    (Case("cropped", 3, 12, 12, 72, 96, (2, 3), padding=((0, 1), (3, -1))), Config(2, 3, 1, 96, 2, 12, 12, 4, 2)),
]  # fmt: skip


def check_model(p: ConvWgradProblem, config: Config, rng: np.random.Generator) -> None:
    assert FAMILY.refusal(p, config) is None
    x, dy = (rng.integers(-3, 4, shape).astype(np.float64) for shape in (p.lhs_shape, p.g_shape))
    sums = tf32_model.sums(p, config, x, dy)
    assert not np.isnan(sums).any()
    np.testing.assert_array_equal(sums.sum(axis=0), float64.conv_wgrad_on_host(p, x, dy), err_msg=f"{p} {config}")


@pytest.mark.parametrize(("case", "config"), MODELLED, ids=[case.name for case, _ in MODELLED])
def test_every_product_is_added_once_where_it_belongs(case: Case, config: Config) -> None:
    with seeded(71) as rng:
        check_model(dataclasses.replace(case, dtype="float32").problem(), config, rng)


def test_candidates_of_random_problems_are_exact_in_the_model() -> None:
    with seeded(72) as rng:
        for p in itertools.islice((p for p in random_problems.draws(rng, "tf32") if p.flops < 2e6), 12):
            found = FAMILY.candidates(p, DEFAULT_CUDA)
            check_model(p, found[int(rng.integers(len(found)))], rng)


def test_boxes_are_within_tmas_limits() -> None:
    cases_ = (dataclasses.replace(case, dtype="float32") for case in cases.WGRAD_CASES)
    for p in (p for p in (case.problem() for case in cases_) if FAMILY.refusal(p) is None):
        for config in FAMILY.candidates(p, DEFAULT_CUDA):
            for tensor_map in FAMILY.plan(p, config).maps:
                assert isinstance(tensor_map, TiledMap)
                assert tensor_map.box[0] * 4 == 128
                assert max(tensor_map.box) <= 256
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
