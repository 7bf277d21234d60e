"""The grouped family's decisions: what is legal, which configs, what the plan says. No GPU."""

import dataclasses
import itertools
import math
import re
from typing import Any

import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels.wgrad import grouped
from jax_splitk.kernels.wgrad.grouped import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, conv_output_spatial
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

SUITE = [case for case in cases.WGRAD_CASES if "grouped" in case.tags]


def grouped_case(size: tuple[int, int], per_group: tuple[int, int], groups: int, **changes: Any) -> Case:
    base = Case("grouped", 2, *size, per_group[0] * groups, per_group[1] * groups, (3, 3), groups=groups)
    return dataclasses.replace(base, **changes)


PLAIN = grouped_case((12, 12), (4, 4), 8)


def problem(out_dtype: str = "float32", **changes: Any) -> ConvWgradProblem:
    return dataclasses.replace(PLAIN, **changes).problem(out_dtype)


def line(length: int, taps: int) -> ConvWgradProblem:
    """A convolution over one dimension."""
    out = conv_output_spatial((length,), (taps,), (1,), ((1, 1),), (1,), (1,))
    return ConvWgradProblem(
        3, (length,), out, (taps,), 32, 32, (1,), ((1, 1),), (1,), (1,), 8, "bfloat16", "float32"
    )  # fmt: skip


# Every pairing of channels, odd windows, and sizes that leave tails everywhere.
ODD: dict[str, Case] = {
    **{
        f"g{i}x{o}": grouped_case((9, 11), (i, o), 4, batch=3)
        for i, o in itertools.product((2, 4, 8, 16, 32, 64), repeat=2)
        if i == o or (i * o <= 256 and max(i, o) <= 32)
    },
    "three_groups": grouped_case((9, 11), (8, 8), 3),
    "many_groups": grouped_case((7, 7), (4, 4), 22),
    "pairs": grouped_case((8, 9), (2, 2), 12),
    "small_image": grouped_case((3, 2), (8, 8), 4, batch=9),
    "one_image": grouped_case((17, 23), (16, 16), 2, batch=1),
    "wide": grouped_case((5, 150), (8, 8), 4),
    "tall": grouped_case((130, 5), (4, 4), 8),
    "valid": grouped_case((12, 12), (8, 8), 4, padding=cases.VALID),
    "asymmetric": grouped_case((12, 9), (8, 8), 4, padding=((0, 2), (3, 1))),
    "negative_padding": grouped_case((12, 12), (8, 8), 4, padding=((-1, 1), (1, -2))),
    "wide_padding": grouped_case((6, 6), (8, 8), 4, padding=((4, 3), (5, 6))),
    "stride2": grouped_case((13, 15), (4, 4), 8, stride=(2, 2)),
    "stride2_16": grouped_case((14, 14), (16, 16), 4, stride=(2, 2)),
    "stride_2x1": grouped_case((12, 12), (8, 8), 4, stride=(2, 1)),
    "stride_1x2": grouped_case((12, 12), (8, 8), 4, stride=(1, 2)),
    "stride3": grouped_case((17, 14), (8, 8), 4, stride=(3, 3)),
    "stride_beyond_kernel": grouped_case((16, 16), (8, 8), 4, kernel=(2, 2), stride=(4, 4), padding=cases.VALID),
    "dilation2": grouped_case((12, 12), (8, 8), 4, dilation=(2, 2)),
    "dilation_1x3": grouped_case((12, 14), (8, 8), 4, dilation=(1, 3)),
    "dilation_stride": grouped_case((15, 17), (16, 16), 2, dilation=(2, 2), stride=(2, 2)),
    "1x1": grouped_case((12, 12), (8, 8), 4, kernel=(1, 1)),
    "1x1_stride2": grouped_case((12, 12), (16, 16), 4, kernel=(1, 1), stride=(2, 2)),
    "1x7": grouped_case((12, 12), (8, 8), 4, kernel=(1, 7)),
    "7x1": grouped_case((12, 12), (8, 8), 4, kernel=(7, 1)),
    "5x3": grouped_case((11, 12), (16, 8), 4, kernel=(5, 3)),
    "5x5": grouped_case((12, 12), (16, 16), 4, kernel=(5, 5)),
    "7x7": grouped_case((14, 14), (4, 4), 8, kernel=(7, 7)),
    "7x7_stride2": grouped_case((20, 20), (8, 8), 4, kernel=(7, 7), stride=(2, 2)),
    "7x7_32": grouped_case((10, 10), (32, 32), 2, kernel=(7, 7)),
    "9x9": grouped_case((16, 16), (8, 8), 4, kernel=(9, 9)),
    "kernel_beyond_image": grouped_case((5, 5), (8, 8), 4, kernel=(7, 7)),
    "half": grouped_case((12, 12), (4, 8), 8, dtype="float16"),
}


def spread(p: ConvWgradProblem, count: int) -> list[Config]:
    """That many of the variants, from the first to the last."""
    found = FAMILY.variants(p)
    return [found[i * (len(found) - 1) // max(1, count - 1)] for i in range(min(count, len(found)))]


# ---- what is legal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("legal", "illegal", "reason"),
    [
        (problem(), problem(groups=1), "feature_group_count 1; accepted: at least 2"),
        (problem(), problem(groups=32), "1 input and 1 output channels per group; accepted: 2, 4, 8, 16, 32, 64"),
        (problem(groups=16), problem(out_channels=16, groups=16), "2 input and 1 output channels per group"),
        (
            problem(in_channels=128, out_channels=128, groups=2),
            problem(in_channels=256, out_channels=128, groups=2),
            "128 input and 64 output channels per group; accepted: 2, 4, 8, 16, 32, 64",
        ),
        (problem(), problem(in_channels=48, groups=8), "6 input and 4 output channels per group"),
        (problem(), problem(in_channels=28, out_channels=28, groups=7), "28 input and 28 output channels; accepted"),
        (problem(dtype="float16"), problem(dtype="float32"), "dtype float32; accepted: bfloat16, float16"),
        (problem("float16"), problem("float64"), "preferred_element_type float64; accepted: float32, bfloat16, "),
        (
            problem(),
            dataclasses.replace(problem(), batch_group_count=2),
            "batch_group_count 2; accepted: 1",
        ),
        (problem(), dataclasses.replace(problem(), lhs_dilation=(1, 2)), "lhs_dilation (1, 2); accepted: 1"),
        (problem(), problem(batch=0), "0 output pixels; accepted: 1 to 2147483647"),
        (
            problem(kernel=(16, 3), height=20),
            problem(kernel=(17, 3), height=20),
            "kernel size 17 in spatial dimension 0; accepted: at most 16",
        ),
        (
            problem(kernel=(3, 16), width=20),
            problem(kernel=(3, 17), width=20),
            "kernel size 17 in spatial dimension 1; accepted: at most 16",
        ),
        (line(40, 16), line(40, 17), "kernel size 17 in spatial dimension 0; accepted: at most 16"),
        (
            problem(width=400, stride=(1, 36)),
            problem(width=400, stride=(1, 37)),
            "window stride (1, 37) and rhs_dilation (1, 1): 3x264 pixels of input for 8 of output; accepted",
        ),
        (
            problem(height=600, dilation=(127, 1)),
            problem(height=600, dilation=(128, 1)),
            "window stride (1, 1) and rhs_dilation (128, 1): 257x16 pixels of input for 8 of output; accepted",
        ),
        (
            problem(kernel=(2, 2), height=300, width=300, dilation=(60, 60)),
            problem(kernel=(2, 2), height=300, width=300, dilation=(120, 120)),
            "rhs_dilation (120, 120): 498688 bytes of shared memory for the smallest tile; accepted: at most 231936",
        ),
    ],
)
def test_limit_is_where_it_is_said_to_be(legal: ConvWgradProblem, illegal: ConvWgradProblem, reason: str) -> None:
    assert FAMILY.refusal(legal) is None
    assert FAMILY.candidates(legal, DEFAULT_CUDA)
    assert str(FAMILY.refusal(illegal)).startswith(reason)
    assert str(FAMILY.refusal(illegal, Config(32, 32, 1, 4, 8, 1, 2, 1), DEFAULT_CUDA)).startswith(reason)


def test_an_input_of_no_pixels_is_not_legal() -> None:
    assert "input of (0, 12) pixels" in str(FAMILY.refusal(problem(height=0, padding=((2, 2), (1, 1)))))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dimensions(rank: int) -> None:
    ones = (1,) * rank
    p = ConvWgradProblem(
        2, (8,) * rank, (8,) * rank, ones, 64, 64, ones, ((0, 0),) * rank, ones, ones, 8, "bfloat16", "float32"
    )
    assert FAMILY.refusal(p) == (None if rank < 3 else "3 spatial dimensions; accepted: 1, 2")


@pytest.mark.parametrize(
    ("target", "legal"),
    [
        (DEFAULT_CUDA, True),
        (Target("cuda", "NVIDIA H100 PCIe", "9.0", 114), True),
        (Target("cuda", "NVIDIA A100-SXM4-80GB", "8.0", 108), False),
        (Target("cpu", "cpu", "9.0", 2), False),
    ],
)
def test_only_hopper(target: Target, legal: bool) -> None:
    reason = FAMILY.refusal(problem(), None, target)
    assert (reason is None) == legal
    assert legal or str(reason).startswith("needs a GPU of compute capability 9.0 (Hopper), not ")


def test_config_limits() -> None:
    p = grouped_case((20, 20), (4, 4), 8, batch=3).problem("float32")
    good = Config(32, 32, 2, 5, 16, 2, 3, 5)  # 2 x 4 x 2 tiles
    assert FAMILY.refusal(p, good) is None
    for change, reason in [
        ({"in_block": 16}, "in_block 16, out_block 32; accepted with these groups: 64x64, 32x32, 16x16, 8x8"),
        ({"in_block": 24, "out_block": 24}, "in_block 24, out_block 24; accepted"),
        ({"images": 0}, "images 0; accepted: 1 to 3"),
        ({"images": 4}, "images 4; accepted: 1 to 3"),
        ({"rows": 0}, "rows 0; accepted: 1 to 20"),
        ({"rows": 21}, "rows 21; accepted: 1 to 20"),
        ({"columns": 12}, "columns 12; accepted: 20, or a multiple of 8 below it"),
        ({"columns": 24}, "columns 24; accepted: 20, or a multiple of 8 below it"),
        ({"slices": 0}, "slices 0, with 4 jobs each; accepted: 1 to 2, and at most 16 warps"),
        ({"slices": 3}, "slices 3, with 4 jobs each; accepted: 1 to 2, and at most 16 warps"),
        ({"stages": 1}, "stages 1; accepted: 2 to 6"),
        ({"stages": 7}, "stages 7; accepted: 2 to 6"),
        ({"rows": 20, "stages": 6}, "652288 bytes of shared memory; accepted: at most 231936"),
        ({"splits": 0}, "splits 0; accepted for 16 tiles: 1 to 16"),
        ({"splits": 17}, "splits 17; accepted for 16 tiles: 1 to 16"),
    ]:
        assert str(FAMILY.refusal(p, dataclasses.replace(good, **change))).startswith(reason), change
    for change in (
        {"rows": 20, "stages": 2, "splits": 4},
        {"columns": 8, "slices": 1},
        {"columns": 20},
        {"splits": 16},
        {"slices": 1},
    ):
        assert FAMILY.refusal(p, dataclasses.replace(good, **change)) is None, change


def test_smaller_tiles_in_a_deeper_ring_are_tried() -> None:
    near = FAMILY.neighbours(SUITE[1].problem(), Config(64, 64, 2, 7, 14, 2, 3, 16), DEFAULT_CUDA)
    assert Config(64, 64, 1, 7, 14, 1, 6, 16) in near


def test_registers_limit_warps() -> None:
    p = grouped_case((14, 14), (16, 16), 8).problem()
    assert FAMILY.refusal(p, Config(64, 64, 2, 7, 14, 2, 2, 1)) is None
    reason = FAMILY.refusal(grouped_case((14, 14), (64, 64), 2).problem(), Config(64, 64, 1, 7, 14, 1, 2, 1))
    assert re.fullmatch(r"16 warps of \d+ registers a thread; accepted: at most \d+ warps", str(reason))


def test_is_the_first_family_for_grouped_problems() -> None:
    for case in SUITE:
        serving = [f for f in kernels.families("conv_wgrad", "cuda") if f.refusal(case.problem()) is None]
        assert serving[0] is FAMILY


# ---- channels, tiles and the plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_blocks_and_jobs_cover_every_pair_of_a_group_once(case: Case) -> None:
    """As the device code's block_channels, job_at and store_job number them."""
    p = case.problem()
    group_in, group_out = p.group_channels
    _, bundle_in, bundle_out = grouped.bundle(p)
    taps_w = p.kernel_spatial[1]
    for config in {(c.in_block, c.out_block): c for c in FAMILY.variants(p)}.values():
        j = grouped.job(p, config)
        bundles = max(1, config.in_block // bundle_in)
        in_units, out_units = config.in_block // 8 // bundles, config.out_block // 8 // bundles
        in_parts, out_parts = max(1, bundle_in // config.in_block), max(1, bundle_out // config.out_block)
        seen = set()
        for block in range(FAMILY.thread_blocks(p, config)):
            part, first = block % (in_parts * out_parts), block // (in_parts * out_parts) * bundles
            c0 = first * bundle_in + part // out_parts * config.in_block
            k0 = first * bundle_out + part % out_parts * config.out_block
            jobs = itertools.product(
                range(bundles), range(in_units // j.in_units), range(out_units // j.out_units),
                range(-(-taps_w // j.columns)),
            )  # fmt: skip
            assert len(list(jobs)) == j.jobs
            for b in range(bundles):
                ins = range(c0 + b * in_units * 8, c0 + (b + 1) * in_units * 8)
                outs = range(k0 + b * out_units * 8, k0 + (b + 1) * out_units * 8)
                pairs = [(c, k) for c in ins for k in outs if k < p.out_channels and c // group_in == k // group_out]
                assert not seen & set(pairs)
                seen |= set(pairs)
        expected = {
            (c, k) for c in range(p.in_channels) for k in range(p.out_channels) if c // group_in == k // group_out
        }
        assert seen == expected


def test_plan_of_a_ragged_problem() -> None:
    case = grouped_case((20, 31), (8, 16), 3, batch=5, kernel=(5, 2), stride=(2, 1), padding=((4, 1), (7, 2)))
    p = case.problem("float32")
    config = Config(8, 16, 2, 4, 16, 1, 2, 6)
    assert FAMILY.refusal(p, config) is None
    device_plan = FAMILY.plan(p, config)
    main, reduce = device_plan.launches
    out_h, out_w = p.output_spatial
    tiles = (3, math.ceil(out_h / 4), math.ceil(out_w / 16))
    values = (48, 5 * 2 * 8 * 48, out_h, out_w, 4, 7, *divmod(math.prod(tiles), 6))
    assert main.params[2].values == values
    assert main.grid == (3, 6, 1)
    assert main.block == (32 * (1 + grouped.job(p, config).jobs), 1, 1)
    assert (main.kernel, reduce.kernel, reduce.programmatic) == ("wgrad_partial", "reduce_splits", True)
    x, dy = device_plan.maps
    assert (x.dims, x.box, x.swizzle) == ((24, 31, 20, 5), (8, 24, 11, 2), 0)
    assert (dy.dims, dy.box, dy.swizzle) == ((48, out_w, out_h, 5), (16, 16, 4, 2), 1)


def test_a_line_is_an_image_of_height_one() -> None:
    p = line(100, 5)
    for config in FAMILY.candidates(p, DEFAULT_CUDA):
        x, dy = FAMILY.plan(p, config).maps
        assert (x.dims, dy.dims) == ((32, 100, 1, 3), (32, 98, 1, 3))
        assert config.rows == 1


def test_workspace_is_one_float_for_each_result_and_split() -> None:
    p = problem()
    config = Config(32, 32, 1, 4, 12, 1, 2, 3)
    assert FAMILY.workspace_bytes(p, config) == 3 * 3 * 3 * 4 * 32 * 4
    assert FAMILY.workspace_bytes(p, dataclasses.replace(config, splits=1)) == 0
    assert FAMILY.plan(p, dataclasses.replace(config, splits=1)).launches[0].kernel == "wgrad_direct"


# ---- candidates and the cost model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*SUITE, *ODD.values()], ids=lambda case: str(case.problem()))
def test_candidates_are_legal_unique_and_few(case: Case) -> None:
    for out_dtype in ("bfloat16", "float32"):
        p = case.problem(out_dtype)
        configs = FAMILY.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(configs) <= 60
        assert len(set(configs)) == len(configs)
        for config in configs:
            assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None, config
            assert config.splits >= FAMILY.least_splits(p, config)
            assert FAMILY.blocks_per_sm(p, config) >= 1
        for config in configs[:3]:
            for near in FAMILY.neighbours(p, config, DEFAULT_CUDA):
                FAMILY.refusal(p, near, DEFAULT_CUDA)  # need not be legal, but must have an answer


def test_long_float32_sums_are_cut() -> None:
    p = grouped_case((56, 56), (4, 4), 32, batch=4096).problem("float32")
    config = Config(32, 32, 1, 8, 56, 4, 3, 1)
    least = FAMILY.least_splits(p, config)
    chain = math.ceil(4096 * 7 / least) * 8  # one strip a slice, 8 rows
    assert chain <= grouped.MAX_FLOAT32_CHAIN < math.ceil(4096 * 7 / (least - 1)) * 8
    assert FAMILY.least_splits(dataclasses.replace(p, out_dtype="bfloat16"), config) == 1


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_estimate_of_the_suite_is_near_what_the_hardware_allows(case: Case) -> None:
    p = case.problem()
    seconds = min(FAMILY.estimate(p, c, DEFAULT_CUDA) for c in FAMILY.candidates(p, DEFAULT_CUDA))
    assert case.floor_us is not None
    assert case.floor_us < seconds * 1e6 < 2 * case.floor_us + 10
    assert FAMILY.unmeasured_refusal(p) is None


def test_more_work_never_takes_less_time() -> None:
    def best(case: Case) -> float:
        p = case.problem()
        return min(FAMILY.estimate(p, c, DEFAULT_CUDA) for c in FAMILY.candidates(p, DEFAULT_CUDA))

    for case in SUITE:
        assert best(dataclasses.replace(case, batch=2 * case.batch)) > best(case)


def test_code_does_not_depend_on_splits_or_batch() -> None:
    for case in SUITE:
        p = case.problem()
        config = FAMILY.candidates(p, DEFAULT_CUDA)[0]
        other = dataclasses.replace(config, splits=config.splits + 1)
        source = FAMILY.source(p, config)
        assert FAMILY.source(dataclasses.replace(p, batch=p.batch + 1), other) == source
