"""The tf32 family's decisions, its device code's arithmetic in NumPy. No GPU."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import tf32
from jax_splitk.kernels.wgrad.tf32 import FAMILY, Config, view
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests import float64, tf32_model
from tests.problems import seeded

PLAIN = Case("plain", 4, 16, 32, 64, 64, (3, 3), dtype="float32")
SUITE = [case for case in cases.WGRAD_CASES if case.dtype == "float32"]
LEGAL = [*SUITE, *(dataclasses.replace(case, dtype="float32") for case in cases.WGRAD_CASES)]
LEGAL = [case for case in LEGAL if FAMILY.refusal(case.problem()) is None]


def problem(**changes: Any) -> ConvWgradProblem:
    return dataclasses.replace(PLAIN, **changes).problem()


EDGES = [
    (problem(), dataclasses.replace(problem(), lhs_dilation=(1, 2)), "lhs_dilation (1, 2); accepted: 1"),
    (problem(in_channels=68), problem(in_channels=66), "66 input and 64 output channels; accepted: multiples of 4"),
    (problem(out_channels=4), problem(out_channels=6), "64 input and 6 output channels; accepted: multiples of 4"),
    (problem(), problem(dtype="bfloat16"), "dtype bfloat16; accepted: float32"),
    (
        dataclasses.replace(problem(), precision="high"),
        dataclasses.replace(problem(), precision="default,highest"),
        "precision default,highest; accepted: default, high",
    ),
    (problem(groups=1), problem(groups=2), "feature_group_count 2, batch_group_count 1; accepted: 1"),
    (problem(batch=1), problem(batch=0), "accepted: no empty dimension"),
    (problem(width=400, stride=(1, 71)), problem(width=400, stride=(1, 73)), "window_strides (1, 73); 4 columns"),
]


@pytest.mark.parametrize(("good", "bad", "reason"), EDGES, ids=[reason for _, _, reason in EDGES])
def test_both_sides_of_each_limit(good: ConvWgradProblem, bad: ConvWgradProblem, reason: str) -> None:
    assert FAMILY.refusal(good) is None
    assert reason in (FAMILY.refusal(bad) or "")


def test_needs_hopper_and_at_most_two_spatial_dimensions() -> None:
    assert FAMILY.refusal(problem(), None, DEFAULT_CUDA) is None
    assert "8.0" in (FAMILY.refusal(problem(), None, Target("cuda", "NVIDIA A100", "8.0", 108)) or "")
    line = ConvWgradProblem(2, (30,), (30,), (3,), 8, 8, (1,), ((1, 1),), (1,), (1,), 1, "float32", "float32")
    assert FAMILY.refusal(line) is None
    ones = {f: (*getattr(line, f), 1, 1) for f in ("input_spatial", "output_spatial", "kernel_spatial")}
    ones |= {f: (1, 1, 1) for f in ("window_strides", "lhs_dilation", "rhs_dilation")}
    volume = dataclasses.replace(line, **ones, padding=((1, 1), (0, 0), (0, 0)))
    assert "3 spatial dimensions; accepted: 1, 2" in (FAMILY.refusal(volume) or "")


CONFIG = Config(taps_h=3, taps_w=3, blocks=1, tile_n=64, images=1, tile_p=8, tile_q=32, stages=4, splits=4)
ILLEGAL = [
    ({"taps_h": 4}, "taps_h 4; accepted: 1 to 3"),
    ({"taps_w": 3, "blocks": 2}, "taps_w 3 and blocks 2; accepted: products of 1 to 4"),
    ({"tile_n": 48}, "tile_n 48; accepted: 32, 64"),
    ({"tile_n": 96}, "tile_n 96 and 3 filter rows make 144 sums a thread; accepted with 3 warpgroups: at most 96"),
    ({"stages": 1}, "stages 1; accepted: 2 to 8"),
    ({"stages": 8, "tile_q": 64}, "bytes of shared memory; accepted: at most 231424"),
    ({"tile_q": 28}, "images 1 and tile_q 28; accepted: multiples of 4 columns or at least 7, products that are"),
    ({"tile_q": 6, "images": 4}, "images 4 and tile_q 6; accepted: multiples of 4 columns or at least 7, products"),
    ({"tile_q": 68, "images": 2}, "images 2 and tile_q 68; accepted"),
    ({"tile_p": 0}, "tile_p 0; accepted: 1 to "),
    ({"tile_p": 2**31}, "tile_p 2147483648; accepted: 1 to "),
    ({"splits": 9}, "splits 9; accepted for 8 strips: 1 to 8"),
    ({"splits": 5}, "splits 5 leaves some of 8 strips' splits empty; use 4"),
]


@pytest.mark.parametrize(("changes", "reason"), ILLEGAL, ids=[reason for _, reason in ILLEGAL])
def test_illegal_configs(changes: dict[str, int], reason: str) -> None:
    assert FAMILY.refusal(problem(), CONFIG) is None
    assert reason in (FAMILY.refusal(problem(), dataclasses.replace(CONFIG, **changes)) or "")


def test_barriers_of_very_dilated_filters_must_fit() -> None:
    """Beside the most of dynamic shared memory there is little more than a KiB for them."""
    config = Config(taps_h=2, taps_w=2, blocks=1, tile_n=32, images=1, tile_p=6, tile_q=24, stages=6, splits=1)
    reasons = {}
    for dilation in (40, 54):
        case = Case("x", 2, 3 * dilation, 24, 32, 32, (3, 3), dilation=(dilation, 1), padding=((0, 0), (1, 1)))
        reasons[dilation] = FAMILY.refusal(dataclasses.replace(case, dtype="float32").problem(), config)
    assert "bytes of barriers" not in (reasons[40] or "")
    assert (
        reasons[54] == "filter rows that reach over 54 input rows take 1040 bytes of barriers; accepted: at most 1024"
    )


@pytest.mark.parametrize("shape", [(400, 224, 224), (512, 224, 224)])
def test_images_of_any_number_have_candidates(shape: tuple[int, int, int]) -> None:
    """A 1x1 convolution sees them as one tall image, whose sums must still be cut into short chains."""
    p = Case("tall", *shape, 64, 64, (1, 1), dtype="float32").problem()
    assert FAMILY.refusal(p) is None
    assert FAMILY.candidates(p, DEFAULT_CUDA)


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_candidates_and_neighbours(case: Case) -> None:
    for out_dtype in ("bfloat16", "float32"):
        p = case.problem(out_dtype)
        found = FAMILY.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(found) <= tf32.MAX_CANDIDATES
        assert len(set(found)) == len(found)
        for config in found:
            assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None
            assert 1e-6 < FAMILY.estimate(p, config, DEFAULT_CUDA) < 1
            assert config not in FAMILY.neighbours(p, config, DEFAULT_CUDA)
            if out_dtype == "float32":
                strips = -(-FAMILY.reduction_blocks(p, config) // config.splits)
                assert strips == 1 or strips * config.tile_p * config.pixels <= tf32.MAX_FLOAT32_CHAIN
        legal = [c for c in FAMILY.neighbours(p, found[0], DEFAULT_CUDA) if FAMILY.refusal(p, c) is None]
        assert legal


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_fills_the_machine_and_is_predicted_faster_than_xla(case: Case) -> None:
    p = case.problem()
    best = FAMILY.candidates(p, DEFAULT_CUDA)[0]
    blocks = math.prod(tf32.tile_counts(p, best)) * best.splits
    assert 0.95 * DEFAULT_CUDA.cores <= blocks <= DEFAULT_CUDA.cores
    assert case.xla_us is not None
    assert FAMILY.estimate(p, best, DEFAULT_CUDA) * 1e6 < case.xla_us


def test_wide_strides_have_candidates() -> None:
    for stride in (9, 20, 33, 71):
        p = problem(width=400, stride=(1, stride), batch=1)
        assert FAMILY.candidates(p, DEFAULT_CUDA)


# ---- the device code's arithmetic ----------------------------------------------------------------------------------


def test_a_strided_1x1_filter_reads_only_the_pixels_that_count() -> None:
    v = view(problem(kernel=(1, 1), stride=(2, 4)))
    assert (v.stride, v.size, v.lhs_strides) == ((1, 1), (8, 8), (4 * 64, 2 * 32 * 64, 16 * 32 * 64))
    v = view(problem(kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1))))
    assert (v.stride, v.size) == ((2, 2), (16, 32))
    v = view(problem(kernel=(3, 1), stride=(2, 2), dilation=(4, 1), padding=((2, 2), (-2, 0))))
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
        done = 0
        while done < 12:
            (r, s), (sh, sw), (dh, dw) = (rng.integers(1, most, 2).tolist() for most in (6, 4, 3))
            (top, bottom), (left, right) = rng.integers(-2, 4, (2, 2)).tolist()
            case = Case(
                "random", int(rng.integers(1, 6)), int(rng.integers(1, 14)), int(rng.integers(1, 30)),
                4 * int(rng.integers(1, 20)), 4 * int(rng.integers(1, 12)), (r, s), stride=(sh, sw), dilation=(dh, dw),
                padding=((top, bottom), (left, right)), dtype="float32",
            )  # fmt: skip
            p = case.problem()
            if FAMILY.refusal(p) is not None:
                continue
            found = FAMILY.candidates(p, DEFAULT_CUDA)
            check_model(p, found[int(rng.integers(len(found)))], rng)
            done += 1


def test_boxes_are_within_tmas_limits() -> None:
    for case in LEGAL:
        p = case.problem()
        for config in FAMILY.candidates(p, DEFAULT_CUDA):
            for tensor_map in FAMILY.plan(p, config).maps:
                assert isinstance(tensor_map, TiledMap)
                assert tensor_map.box[0] * 4 == 128
                assert max(tensor_map.box) <= 256
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
