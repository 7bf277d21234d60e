"""The halo family's decisions and geometry: what is legal, how the work is cut. No GPU."""

import dataclasses
import math
from typing import Any

import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import halo
from jax_splitk.kernels.wgrad.halo import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import DevicePlan, Int32Struct
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests.problems import seeded

PLAIN = Case("plain", 4, 16, 32, 64, 64, (3, 3))
LEGAL = [case for case in (*cases.WGRAD_CASES, *cases.SMALL_CASES) if FAMILY.refusal(case.problem()) is None]


def divisor(name: str) -> tuple[str, str, str]:
    return name, f"{name}: multiplier", f"{name}: shift"


ARGS = (
    *("channels", "out_channels", "filter_h", "filter_w"),
    *(*divisor("groups_w"), *divisor("slots"), *divisor("k_blocks"), "out_h", "tile_p"),
    *(*divisor("in_image"), *divisor("tiles_q"), "pitch", "pad_h", "pad_w", "dilation_h", "dilation_w"),
    *("units_per_tile", "units_per_split", "buffers", "splits", "lanes"),
)


def problem(**changes: Any) -> ConvWgradProblem:
    return dataclasses.replace(PLAIN, **changes).problem()


VALID = ((0, 0), (0, 0))
EDGES = [
    (problem(), dataclasses.replace(problem(), window_strides=(2, 1)), "window_strides (2, 1); accepted: 1"),
    (problem(), dataclasses.replace(problem(), lhs_dilation=(1, 2)), "lhs_dilation (1, 2); accepted: 1"),
    (problem(in_channels=72), problem(in_channels=68), "68 input and 64 output channels; accepted: multiples of 8"),
    (problem(out_channels=8), problem(out_channels=12), "64 input and 12 output channels; accepted: multiples of 8"),
    (problem(kernel=(3, 2)), problem(kernel=(3, 1)), "a filter 1 wide; accepted: at least 2"),
    (problem(dtype="float16"), problem(dtype="float32"), "dtype float32; accepted: bfloat16, float16"),
    (problem(width=24), problem(width=28), "output of 16x28; accepted: a width of whole 16 pixels"),
    (problem(width=24), problem(width=24, height=15), "output of 15x24; accepted: a width of whole 16 pixels"),
    (problem(height=15), problem(height=15, width=30), "output of 15x30; accepted: a width of whole 16 pixels"),
    (problem(groups=1), problem(groups=2), "feature_group_count 2, batch_group_count 1; accepted: 1"),
    (problem(batch=1), problem(batch=0), "accepted: no empty dimension"),
    (
        problem(width=16 + 2 * 124, kernel=(3, 3), dilation=(1, 124), padding=VALID),
        problem(width=16 + 2 * 125, kernel=(3, 3), dilation=(1, 125), padding=VALID),
        "no strip of it and its halo fits in shared memory",
    ),
    (  # 16 rows of output, 64 more that a strip may reach, 3 of the filter
        problem(padding=((2**31 - 1 - 83, 2 - (2**31 - 1 - 83)), (1, 1))),
        problem(padding=((2**31 - 83, 2 - (2**31 - 83)), (1, 1))),
        "padded input of up to 2147483648 pixels in spatial dimension 0; accepted: at most 2147483647",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), EDGES, ids=[reason for _, _, reason in EDGES])
def test_both_sides_of_each_limit(good: ConvWgradProblem, bad: ConvWgradProblem, reason: str) -> None:
    assert FAMILY.refusal(good) is None
    assert reason in (FAMILY.refusal(bad) or "")


def test_needs_hopper() -> None:
    assert FAMILY.refusal(problem(), None, DEFAULT_CUDA) is None
    assert "8.0" in (FAMILY.refusal(problem(), None, Target("cuda", "NVIDIA A100", "8.0", 108)) or "")


CONFIG = Config(tile_p=8, tile_q=32, taps_h=3, taps_w=3, splits=2)
ILLEGAL = [
    ({"tile_q": 12}, "tile_q 12; accepted: divisors of 32 in multiples of 8"),
    ({"tile_q": 24}, "tile_q 24; accepted: divisors of 32"),
    ({"tile_p": 0}, "tile_p 0 of 16 rows"),
    ({"tile_q": 8, "tile_p": 3}, "tile_p 3 of 16 rows; accepted with tile_q 8: even numbers"),
    ({"taps_h": 4}, "taps 4x3; accepted: at most 3x3"),
    ({"taps_w": 0}, "taps 3x0; accepted: at most 3x3"),
    ({"tile_p": 63}, "65 rows; accepted: at most 64"),
    ({"tile_p": 40}, "bytes of shared memory; accepted: at most 231424"),
    ({"splits": 9}, "splits 9; accepted for 8 strips: 1 to 8"),
    ({"splits": 0}, "splits 0; accepted for 8 strips: 1 to 8"),
    ({"splits": 5}, "splits 5 leaves some of 8 strips' splits empty; use 4"),
]


@pytest.mark.parametrize(("changes", "reason"), ILLEGAL, ids=[reason for _, reason in ILLEGAL])
def test_illegal_configs(changes: dict[str, int], reason: str) -> None:
    assert FAMILY.refusal(problem(), CONFIG) is None
    assert reason in (FAMILY.refusal(problem(), dataclasses.replace(CONFIG, **changes)) or "")


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_candidates_and_neighbours(case: Case) -> None:
    for out_dtype in ("bfloat16", "float32"):
        p = case.problem(out_dtype)
        found = FAMILY.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(found) <= 60
        assert len(set(found)) == len(found)
        for config in found:
            assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None
            assert 1e-6 < FAMILY.estimate(p, config, DEFAULT_CUDA) < 1
            assert config not in FAMILY.neighbours(p, config, DEFAULT_CUDA)
        if out_dtype == "float32":
            near = [n for config in found for n in FAMILY.neighbours(p, config, DEFAULT_CUDA)]
            for config in (*found, *(n for n in near if FAMILY.refusal(p, n, DEFAULT_CUDA) is None)):
                units = math.ceil(halo.units_per_tile(p, config) / config.splits)
                pixels = units * config.tile_p * config.tile_q
                assert min(pixels, p.reduction_size) <= halo.MAX_FLOAT32_PIXELS


# ---- how the work is cut -------------------------------------------------------------------------------------------


def arguments(plan: DevicePlan) -> dict[str, int]:
    struct = plan.launches[0].params[2]
    assert isinstance(struct, Int32Struct)
    return dict(zip(ARGS, struct.values, strict=True))


def random_problem(rng: Any) -> ConvWgradProblem:
    while True:
        kernel = tuple(int(k) for k in rng.integers(1, 8, 2))
        case = Case(
            "random", int(rng.integers(1, 9)), int(rng.integers(1, 40)), int(rng.integers(1, 60)),
            8 * int(rng.integers(1, 30)), 8 * int(rng.integers(1, 30)), kernel, dilation=(1, int(rng.integers(1, 3))),
        )  # fmt: skip
        if FAMILY.refusal(case.problem()) is None:
            return case.problem()


def test_every_unit_is_one_splits_and_every_split_is_added() -> None:
    with seeded(61) as rng:
        for _ in range(40):
            p = random_problem(rng)
            configs = FAMILY.candidates(p, DEFAULT_CUDA)
            for config in (configs[int(i)] for i in rng.integers(0, len(configs), 4)):
                plan = FAMILY.plan(p, config)
                g, (main, *reductions) = arguments(plan), plan.launches
                count, units, each = halo.tiles(p, config), g["units_per_tile"], g["units_per_split"]
                assert main.grid == (count, config.splits, 1)
                splits = [range(i * each, min((i + 1) * each, units)) for i in range(config.splits)]
                assert [unit for split in splits for unit in split] == list(range(units))
                assert all(splits)
                assert plan.workspace_bytes == (config.splits > 1) * count * config.splits * config.tile_bytes
                assert len(reductions) == (config.splits > 1)
                for reduce in reductions:
                    assert reduce.grid[0] * reduce.block[0] == config.tile_bytes // 16 * g["lanes"]
                    assert reduce.grid[1] == count
                    assert reduce.programmatic


def test_tiles_cover_the_output_and_strips_the_pixels() -> None:
    with seeded(62) as rng:
        for _ in range(200):
            p = random_problem(rng)
            for config in FAMILY.candidates(p, DEFAULT_CUDA)[:5]:
                plan = FAMILY.plan(p, config)
                g = arguments(plan)
                rows = g["in_image"] // g["tiles_q"]
                groups = halo.tiles(p, config) // (g["slots"] * g["k_blocks"])
                assert groups * config.taps_h * config.taps_w >= p.taps
                assert g["slots"] * 64 >= p.in_channels > (g["slots"] - 1) * 64
                assert g["k_blocks"] * 64 >= p.out_channels > (g["k_blocks"] - 1) * 64
                assert rows * config.tile_p >= p.output_spatial[0] > (rows - 1) * config.tile_p
                assert g["tiles_q"] * config.tile_q == p.output_spatial[1]
                assert g["units_per_tile"] == p.batch * g["in_image"]
                assert all(math.prod(m.box) * 2 % 128 == 0 and max(m.box) <= 256 for m in plan.maps)
                # A block of 16 pixels lies in one row, or in two rows of a pair.
                assert config.tile_q % 16 == 0 or (config.tile_p % 2 == 0 and p.output_spatial[0] % 2 == 0)
