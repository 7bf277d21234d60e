"""The Hopper family's decisions: what is legal, which configs, at what cost. Pure Python, no GPU."""

import dataclasses
import math
import re
from typing import Any

import pytest

from benchmarks import cases
from jax_splitk.kernels import wgrad_sm90
from jax_splitk.kernels.wgrad_sm90 import Config, supports
from jax_splitk.problem import ConvWgradProblem, conv_output_spatial
from jax_splitk.target import DEFAULT_CUDA, Target
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.problems import random_case, seeded

LEGAL = [case for case in (*cases.WGRAD_CASES, *cases.SMALL_CASES) if supports(case.problem()) is None]
PLAIN = next(case for case in cases.SMALL_CASES if case.name == "plain")


def problem(**changes: Any) -> ConvWgradProblem:
    """The plain case with other case parameters."""
    return dataclasses.replace(PLAIN, **changes).problem()


# ---- what is legal -------------------------------------------------------------------------------------------------


def padded(low: int, high: int, axis: int, size: int = 64) -> ConvWgradProblem:
    pads = ((low, high), (1, 1)) if axis == 0 else ((1, 1), (low, high))
    return problem(height=size, width=size, padding=pads)


def stretched(kernel: int, dilation: int, axis: int, high: int) -> ConvWgradProblem:
    """A window that reaches (kernel - 1) * dilation along one axis, with that high padding."""
    pick = lambda value, other: (value, other) if axis == 0 else (other, value)  # noqa: E731
    return problem(
        height=300, width=300, kernel=pick(kernel, 3), dilation=pick(dilation, 1), padding=pick((0, high), (1, 1))
    )


EDGES = [
    *(
        (
            problem(height=30, width=30, stride=(8, 1) if axis == 0 else (1, 8)),
            problem(height=30, width=30, stride=(9, 1) if axis == 0 else (1, 9)),
            f"window stride 9 in spatial dimension {axis}; accepted: at most 8",
        )
        for axis in (0, 1)
    ),
    *(
        (padded(128, 1, axis), padded(129, 1, axis), f"padding 129 in spatial dimension {axis}; accepted: -127 to 128")
        for axis in (0, 1)
    ),
    *(
        (
            padded(-127, 1, axis, 200),
            padded(-128, 1, axis, 200),
            f"padding -128 in spatial dimension {axis}; accepted: -127 to 128",
        )
        for axis in (0, 1)
    ),
    *(
        (
            padded(1, 129, axis),  # less the 3x3 window's reach of 2: 127
            padded(1, 130, axis),
            f"padding 130 less the dilated window's reach 2 in spatial dimension {axis}; accepted: -128 to 127",
        )
        for axis in (0, 1)
    ),
    *(
        (
            padded(1, -126, axis, 200),
            padded(1, -127, axis, 200),
            f"padding -127 less the dilated window's reach 2 in spatial dimension {axis}; accepted: -128 to 127",
        )
        for axis in (0, 1)
    ),
    *(
        (
            stretched(2, 255, axis, 200),
            stretched(2, 256, axis, 200),
            f"dilated window's reach 256 in spatial dimension {axis}; accepted: at most 255",
        )
        for axis in (0, 1)
    ),
    (stretched(18, 15, 0, 200), stretched(17, 16, 0, 200), "dilated window's reach 256 in spatial dimension 0"),
    *(
        (
            problem(in_channels=8, out_channels=16),
            problem(in_channels=c, out_channels=k),
            f"{c} input and {k} output channels; accepted: multiples of 8",
        )
        for c, k in ((12, 16), (16, 12), (3, 64), (64, 1), (7, 9))
    ),
    (
        problem(dtype="float16"),
        problem(dtype="float32"),
        "dtype float32; accepted: bfloat16, float16",
    ),
    (problem(), problem(dtype="float8_e4m3fn"), "dtype float8_e4m3fn; accepted: bfloat16, float16"),
    *(
        (
            dataclasses.replace(problem(), out_dtype=good),
            dataclasses.replace(problem(), out_dtype="float64"),
            "preferred_element_type float64; accepted: float32, bfloat16, float16",
        )
        for good in ("float32", "bfloat16", "float16")
    ),
    (problem(), problem(groups=2), "feature_group_count 2, batch_group_count 1; accepted: 1"),
    (
        problem(),
        dataclasses.replace(problem(), batch_group_count=2),
        "feature_group_count 1, batch_group_count 2; accepted: 1",
    ),
    (problem(), dataclasses.replace(problem(), lhs_dilation=(1, 2)), "lhs_dilation (1, 2); accepted: 1"),
    (problem(), problem(batch=0), f"0 output pixels; accepted: 1 to {2**31 - 65}"),
    (problem(), problem(kernel=(14, 14), padding=((0, 0), (0, 0))), "0 output pixels; accepted"),
]


@pytest.mark.parametrize(("legal", "illegal", "reason"), EDGES)
def test_limit_is_where_it_is_said_to_be(legal: ConvWgradProblem, illegal: ConvWgradProblem, reason: str) -> None:
    assert supports(legal) is None
    assert str(supports(illegal)).startswith(reason)
    # A legal problem's plan is one that the launcher takes; an illegal one is refused with any config as well.
    assert reason in str(supports(illegal, Config(64, 64, 4, False, 1), DEFAULT_CUDA))


def test_an_input_of_no_pixels_is_not_legal() -> None:
    empty = problem(height=0, padding=((2, 2), (1, 1)))
    assert empty.reduction_size > 0
    assert supports(empty) is not None


def matrix(rows: int, in_channels: int = 8, out_channels: int = 8) -> ConvWgradProblem:
    return problem(batch=1, height=1, width=rows, in_channels=in_channels, out_channels=out_channels, kernel=(1, 1))


def test_extents_fit_32_bit_integers() -> None:
    most = 2**31 - 1
    assert supports(matrix(most - 64)) is None
    assert supports(matrix(most - 63)) == f"{most - 63} output pixels; accepted: 1 to {most - 64}"
    assert supports(matrix(64, 2**15, 2**16 - 8)) is None
    assert supports(matrix(64, 2**15, 2**16)) == f"{2**31} weights; accepted: 1 to {most}"


@pytest.mark.parametrize("rank", [1, 3])
def test_only_two_spatial_dimensions(rank: int) -> None:
    ones = (1,) * rank
    other = ConvWgradProblem(
        2, (8,) * rank, (8,) * rank, ones, 64, 64, ones, ((0, 0),) * rank, ones, ones, 1, "bfloat16", "float32"
    )
    assert supports(other) == f"{rank} spatial dimensions; accepted: 2"


@pytest.mark.parametrize(
    ("target", "legal"),
    [
        (DEFAULT_CUDA, True),
        (Target("cuda", "NVIDIA H100 PCIe", "9.0", 114), True),
        (Target("cuda", "NVIDIA A100-SXM4-80GB", "8.0", 108), False),
        (Target("cuda", "NVIDIA B200", "10.0", 148), False),
        (Target("cpu", "cpu", "9.0", 2), False),
    ],
)
def test_only_hopper(target: Target, legal: bool) -> None:
    reason = supports(problem(), None, target)
    if legal:
        assert reason is None
    else:
        capability = re.escape(target.compute_capability)
        assert re.fullmatch(
            rf"needs a GPU of compute capability 9\.0 \(Hopper\), not {target.device_kind} \({capability}\)",
            str(reason),
        )


def test_matrix_products_are_free_of_im2cols_limits() -> None:
    assert wgrad_sm90.is_matrix_product(problem(kernel=(1, 1)))
    assert wgrad_sm90.is_matrix_product(problem(kernel=(1, 1), dilation=(300, 300)))
    assert supports(problem(kernel=(1, 1), dilation=(300, 300))) is None
    for change in ({"stride": (2, 1)}, {"padding": ((0, 1), (0, 0))}, {"kernel": (1, 2)}):
        assert not wgrad_sm90.is_matrix_product(problem(**{"kernel": (1, 1), **change})), change


def test_config_limits() -> None:
    p = problem()  # 288 pixels: 5 blocks
    good = Config(128, 128, 6, False, 5)
    assert supports(p, good) is None
    for change, reason in [
        ({"tile_m": 64, "tile_n": 320}, "tile 64x320; accepted: 64x64, "),
        ({"tile_m": 256, "tile_n": 256}, "tile 256x256; accepted: 64x64, "),
        ({"stages": 1}, "stages 1; accepted with this tile: 2 to 7"),
        ({"stages": 8}, "stages 8; accepted with this tile: 2 to 7"),
        ({"swap": 1}, "swap 1; accepted: True or False"),
        ({"splits": 0}, "splits 0; accepted for 5 blocks of pixels: 1 to 5"),
        ({"splits": 6}, "splits 6; accepted for 5 blocks of pixels: 1 to 5"),
        ({"splits": 4}, "splits 4 leaves some of 5 blocks of pixels' splits empty; use 3"),
    ]:
        assert str(supports(p, dataclasses.replace(good, **change))).startswith(reason), change
    for change in ({"stages": 2}, {"stages": 7}, {"swap": True}, {"splits": 1}, {"splits": 2}, {"splits": 3}):
        assert supports(p, dataclasses.replace(good, **change)) is None, change


def test_grid_limits_splits() -> None:
    wide = matrix(64 * 65536)
    config = Config(64, 64, 8, False, 65535)
    assert "accepted for 65536 blocks of pixels: 1 to 65535" in str(
        supports(wide, dataclasses.replace(config, splits=65536))
    )
    assert supports(matrix(64 * 65535), config) is None


# ---- splits and tiles ----------------------------------------------------------------------------------------------


def test_whole_splits_leaves_no_split_empty() -> None:
    with seeded(1) as rng:
        for _ in range(3000):
            p = matrix(int(rng.integers(1, 20_000)))
            wanted = int(rng.integers(1, 400))
            splits = wgrad_sm90.whole_splits(p, wanted)
            blocks = wgrad_sm90.k_tiles(p)
            assert blocks == math.ceil(p.reduction_size / 64)
            assert 1 <= splits <= min(wanted, blocks)
            # As the kernel cuts them: split s has blocks [s, s + 1) * per_split.
            per_split = math.ceil(blocks / splits)
            sizes = [min(blocks, (s + 1) * per_split) - s * per_split for s in range(splits)]
            assert min(sizes) >= 1
            assert sum(sizes) == blocks
            assert wgrad_sm90.whole_splits(p, splits) == splits
            # The nearest: nothing between it and what was wanted is legal.
            for other in range(splits + 1, min(wanted, blocks) + 1):
                assert (other - 1) * math.ceil(blocks / other) >= blocks, (splits, other, blocks)


def test_tile_counts_cover_the_output_and_no_more() -> None:
    with seeded(2) as rng:
        for _ in range(500):
            p = random_case(rng).problem()
            tile = wgrad_sm90.TILES[rng.integers(len(wgrad_sm90.TILES))]
            config = Config(*tile, 4, bool(rng.integers(2)), 1)
            # 64-channel slots of (tap, channel) on one side, output channels on the other.
            slots = sum(len(range(0, p.in_channels, 64)) for _ in range(p.taps))
            sides = [slots * 64, p.out_channels]
            if config.swap:
                sides.reverse()
            expected = tuple(len(range(0, side, size)) for side, size in zip(sides, tile, strict=True))
            assert wgrad_sm90.tile_counts(p, config) == expected, (p, config)


# `struct Args` of the device code.
ARGS = [
    *("channels", "out_channels", "taps", "kernel_w"),
    *("out_h", "out_w", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "tiles_n"),
    *("k_tiles", "k_tiles_per_split", "step_n", "step_p", "step_q"),
]


def device_args(p: ConvWgradProblem, config: Config) -> dict[str, int]:
    return dict(zip(ARGS, wgrad_sm90.make_plan(p, config).launches[0].params[2].values, strict=True))


def test_producers_walk_over_pixels_is_division() -> None:
    """`produce` in wgrad_sm90.cu divides once and then steps by 64 pixels with a carry for each digit."""
    with seeded(3) as rng:
        for _ in range(1500):
            size = int(rng.choice([3, 20, 100, 300]))
            out_h, out_w = (int(v) for v in rng.integers(1, size, 2))
            p = problem(
                batch=int(rng.integers(1, 400)), height=out_h, width=out_w, kernel=(3, 3), padding=((1, 1), (1, 1))
            )
            assert p.output_spatial == (out_h, out_w)
            splits = wgrad_sm90.whole_splits(p, int(rng.integers(1, 9)))
            args = dict(
                zip(
                    ARGS,
                    wgrad_sm90.make_plan(p, Config(64, 64, 4, False, splits)).launches[0].params[2].values,
                    strict=True,
                )
            )
            assert (args["out_h"], args["out_w"]) == (out_h, out_w)
            start = int(rng.integers(splits)) * args["k_tiles_per_split"]
            pixel = start * 64
            n, rest = divmod(pixel, out_h * out_w)
            row, q = divmod(rest, out_w)
            for _ in range(min(args["k_tiles_per_split"], 60)):
                assert (n, row, q) == (pixel // (out_h * out_w), pixel // out_w % out_h, pixel % out_w), (p, pixel)
                pixel += 64
                q += args["step_q"]
                if q >= out_w:
                    q -= out_w
                    row += 1
                row += args["step_p"]
                if row >= out_h:
                    row -= out_h
                    n += 1
                n += args["step_n"]


def test_args_are_the_device_codes_struct_in_its_order() -> None:
    p = problem(
        batch=3, height=20, width=31, in_channels=24, out_channels=136, kernel=(5, 2), stride=(2, 3),
        padding=((4, 1), (7, 2)), dilation=(2, 6),
    )  # fmt: skip
    config = Config(64, 128, 4, False, wgrad_sm90.whole_splits(p, 3))
    device_plan = wgrad_sm90.make_plan(p, config)
    struct = re.search(r"struct Args \{(.*?)\};", device_plan.source.text(), re.DOTALL)[1]
    declared = re.findall(r"\w+(?=[,;])", re.sub(r"//.*", "", struct))
    assert declared == ARGS
    args = device_args(p, config)
    out_h, out_w = p.output_spatial
    blocks = math.ceil(3 * out_h * out_w / 64)
    assert args == {
        "channels": 24, "out_channels": 136, "taps": 10, "kernel_w": 2, "out_h": out_h, "out_w": out_w,
        "stride_h": 2, "stride_w": 3, "pad_h": 4, "pad_w": 7, "dilation_h": 2, "dilation_w": 6, "tiles_n": 2,
        "k_tiles": blocks, "k_tiles_per_split": math.ceil(blocks / config.splits),
        "step_n": 64 // (out_h * out_w), "step_p": 64 % (out_h * out_w) // out_w, "step_q": 64 % out_w,
    }  # fmt: skip


# ---- candidates and the cost model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_candidates_are_legal_unique_and_of_known_code(case: cases.Case) -> None:
    p = case.problem()
    configs = wgrad_sm90.candidates(p, DEFAULT_CUDA)
    assert len(set(configs)) == len(configs) >= len(list(wgrad_sm90.variants()))
    variants = set(wgrad_sm90.variants())
    for config in configs:
        assert supports(p, config, DEFAULT_CUDA) is None, config
        assert (config.tile_m, config.tile_n, config.stages, config.swap) in variants
    assert {config.splits for config in configs} >= {1}
    if wgrad_sm90.k_tiles(p) >= 8 * DEFAULT_CUDA.cores:
        assert len({config.splits for config in configs}) > 5


def test_select_respects_the_workspace_limit_and_takes_the_best_within() -> None:
    with seeded(4) as rng:
        for _ in range(40):
            p = random_case(rng).problem("float32")
            limit = int(10 ** rng.uniform(3, 8))
            choice = select(p, DEFAULT_CUDA, Options(implementation="cutlass", workspace_limit_bytes=limit))
            legal = [c for c in wgrad_sm90.candidates(p, DEFAULT_CUDA) if wgrad_sm90.workspace_bytes(p, c) <= limit]
            assert choice.config in legal
            assert choice.workspace_bytes == wgrad_sm90.workspace_bytes(p, choice.config) <= limit
            best = min(wgrad_sm90.estimate(p, c, DEFAULT_CUDA) for c in legal)
            assert choice.estimated_seconds == best


def test_workspace_is_one_float_for_each_result_and_split() -> None:
    p = problem()
    for splits in (2, 3, 5):
        config = Config(64, 64, 4, False, splits)
        assert wgrad_sm90.workspace_bytes(p, config) == splits * 3 * 3 * 64 * 64 * 4
    assert wgrad_sm90.workspace_bytes(p, Config(64, 64, 4, False, 1)) == 0


def best_seconds(p: ConvWgradProblem, target: Target = DEFAULT_CUDA) -> float:
    return min(wgrad_sm90.estimate(p, c, target) for c in wgrad_sm90.candidates(p, target))


def test_estimate_is_positive_and_bounded_by_the_hardware() -> None:
    for case in LEGAL:
        p = case.problem()
        for config in wgrad_sm90.candidates(p, DEFAULT_CUDA):
            seconds = wgrad_sm90.estimate(p, config, DEFAULT_CUDA)
            assert math.isfinite(seconds)
            # No faster than the tensor cores (990 TFLOP/s) or the memory (4.8 TB/s) of an H200 could be, and no day.
            assert max(p.flops / 990e12, p.bytes_moved / 4.8e12) < seconds < 1, (case.name, config)


def test_more_work_never_takes_less_time() -> None:
    with seeded(5) as rng:
        for _ in range(25):
            case = random_case(rng)
            base = best_seconds(case.problem())
            for change in (
                {"batch": 2 * case.batch},
                {"in_channels": 2 * case.in_channels},
                {"out_channels": 2 * case.out_channels},
            ):
                grown = best_seconds(dataclasses.replace(case, **change).problem())
                assert grown >= base * (1 - 1e-9), (case, change)


def test_a_smaller_gpu_is_never_faster() -> None:
    for case in LEGAL[:12]:
        half = dataclasses.replace(DEFAULT_CUDA, cores=66)
        # Within the model's grain: memory is as fast, and fewer splits write fewer partial sums.
        assert best_seconds(case.problem(), half) >= 0.98 * best_seconds(case.problem())


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_chosen_config_wastes_less_than_half_of_the_tiles(case: cases.Case) -> None:
    p = case.problem()
    choice = select(p, DEFAULT_CUDA, Options(implementation="cutlass"))
    tiles = math.prod(wgrad_sm90.tile_counts(p, choice.config))
    # Channels come in boxes of 64: less than that is not the config's to waste.
    m = p.taps * math.ceil(p.in_channels / 64) * 64
    n = math.ceil(p.out_channels / 64) * 64
    assert tiles * choice.config.tile_m * choice.config.tile_n < 2 * m * n, choice.config


@pytest.mark.parametrize("case", [case for case in LEGAL if case.floor_us is not None], ids=lambda case: case.name)
def test_estimate_of_the_suite_is_near_what_the_hardware_allows(case: cases.Case) -> None:
    seconds = best_seconds(case.problem())
    assert 0.85 * case.floor_us < seconds * 1e6 < 2 * case.floor_us + 20


def test_small_outputs_with_long_reductions_are_split() -> None:
    case = next(case for case in cases.WGRAD_CASES if case.batch == 8 and case.in_channels == 64)
    choice = select(case.problem(), DEFAULT_CUDA, Options(implementation="cutlass"))
    tiles = math.prod(wgrad_sm90.tile_counts(case.problem(), choice.config))
    assert choice.config.splits > 1
    assert tiles * choice.config.splits >= DEFAULT_CUDA.cores // 2, "most of the machine would idle"


def test_shared_memory_of_every_variant_fits() -> None:
    for tile_m, tile_n, stages, swap in wgrad_sm90.variants():
        config = Config(tile_m, tile_n, stages, swap, 1)
        assert config.shared_bytes * config.ctas_per_sm <= 227 * 1024
        assert config.shared_bytes >= stages * (tile_m + tile_n) * 64 * 2 + 1024
        assert config.tile_m % (64 * config.consumers) == 0
    sharing = {Config(*variant, 1).ctas_per_sm for variant in wgrad_sm90.variants()}
    assert sharing == {1, 2}


def test_every_output_problem_agrees_with_its_geometry() -> None:
    """The suite's problems are consistent, else all of the above is about nothing."""
    for case in LEGAL:
        p = case.problem()
        geometry = (p.kernel_spatial, p.window_strides, p.padding, p.lhs_dilation, p.rhs_dilation)
        assert conv_output_spatial(p.input_spatial, *geometry) == p.output_spatial
