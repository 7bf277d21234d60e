"""The Hopper family's decisions: what is legal, which configs, at what cost. Pure Python, no GPU."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from benchmarks import cases
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.kernels.wgrad.im2col import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, conv_output_spatial
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests.problems import random_case, seeded

LEGAL = [case for case in (*cases.WGRAD_CASES, *cases.SMALL_CASES) if FAMILY.refusal(case.problem()) is None]
PLAIN = next(case for case in cases.SMALL_CASES if case.name == "plain")


def problem(**changes: Any) -> ConvWgradProblem:
    """The plain case with other case parameters."""
    return dataclasses.replace(PLAIN, **changes).problem()


def spatial(size: tuple[int, ...], kernel: tuple[int, ...], **changes: Any) -> ConvWgradProblem:
    """A problem of any rank with a 64-channel input and output; by default without padding."""
    ones = (1,) * len(size)
    fields = {
        "batch": 2, "input_spatial": size, "output_spatial": (), "kernel_spatial": kernel, "in_channels": 64,
        "out_channels": 64, "window_strides": ones, "padding": ((0, 0),) * len(size), "lhs_dilation": ones,
        "rhs_dilation": ones, "feature_group_count": 1, "dtype": "bfloat16", "out_dtype": "bfloat16", **changes,
    }  # fmt: skip
    made = ConvWgradProblem(**fields)
    geometry = (made.window_strides, made.padding, made.lhs_dilation, made.rhs_dilation)
    return dataclasses.replace(made, output_spatial=conv_output_spatial(size, kernel, *geometry))


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
    *(
        (
            problem(in_channels=128, out_channels=384, groups=2),
            problem(in_channels=c, out_channels=k, groups=2),
            f"feature_group_count 2 with {c // 2} input and {k // 2} output channels each; accepted: multiples of 64",
        )
        for c, k in ((64, 128), (128, 64), (256, 144), (144, 256))
    ),
    (
        problem(),
        dataclasses.replace(problem(), batch_group_count=2),
        "batch_group_count 2; accepted: 1",
    ),
    (problem(), dataclasses.replace(problem(), lhs_dilation=(1, 2)), "lhs_dilation (1, 2); accepted: 1"),
    (problem(), problem(batch=0), f"0 output pixels; accepted: 1 to {2**31 - 65}"),
    (problem(), problem(kernel=(14, 14), padding=((0, 0), (0, 0))), "0 output pixels; accepted"),
]


@pytest.mark.parametrize(("legal", "illegal", "reason"), EDGES)
def test_limit_is_where_it_is_said_to_be(legal: ConvWgradProblem, illegal: ConvWgradProblem, reason: str) -> None:
    assert FAMILY.refusal(legal) is None
    assert str(FAMILY.refusal(illegal)).startswith(reason)
    # A legal problem's plan is one that the launcher takes; an illegal one is refused with any config as well.
    assert reason in str(FAMILY.refusal(illegal, Config(64, 64, 4, False, 1), DEFAULT_CUDA))


def test_an_input_of_no_pixels_is_not_legal() -> None:
    empty = problem(height=0, padding=((2, 2), (1, 1)))
    assert empty.reduction_size > 0
    assert FAMILY.refusal(empty) is not None


def matrix(rows: int, in_channels: int = 8, out_channels: int = 8, **changes: Any) -> ConvWgradProblem:
    channels = {"in_channels": in_channels, "out_channels": out_channels}
    return dataclasses.replace(problem(batch=1, height=1, width=rows, kernel=(1, 1), **channels), **changes)


def test_extents_fit_32_bit_integers() -> None:
    most = 2**31 - 1
    assert FAMILY.refusal(matrix(most - 64)) is None
    assert FAMILY.refusal(matrix(most - 63)) == f"{most - 63} output pixels; accepted: 1 to {most - 64}"
    assert FAMILY.refusal(matrix(64, 2**15, 2**16 - 8)) is None
    assert FAMILY.refusal(matrix(64, 2**15, 2**16)) == f"{2**31} weights; accepted: 1 to {most - 1024}"


def test_input_coordinates_fit_32_bit_integers() -> None:
    """Of the 64 pixels beyond the output, too, that a block of them may reach."""
    row = lambda width: spatial((1, width), (1, 1), batch=1, window_strides=(1, 8))  # noqa: E731
    assert FAMILY.refusal(row(8 * (2**28 - 65))) is None
    reason = FAMILY.refusal(row(8 * (2**28 - 64)))
    assert reason == f"padded input of up to {2**31 + 1} pixels in spatial dimension 1; accepted: at most {2**31 - 1}"


def test_groups_fit_the_grid() -> None:
    most = 65535
    assert FAMILY.refusal(matrix(64, 64 * most, 64 * most, feature_group_count=most)) is None
    beyond = matrix(64, 64 * (most + 1), 64 * (most + 1), feature_group_count=most + 1)
    assert FAMILY.refusal(beyond) == "feature_group_count 65536; accepted: 1 to 65535"


def at(axis: int, value: Any, other: Any, rank: int = 3) -> tuple[Any, ...]:
    return tuple(value if i == axis else other for i in range(rank))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_limits_of_three_dimensions(axis: int) -> None:
    size, kernel = (40, 40, 40), (3, 3, 3)

    def padded(low: int, high: int) -> ConvWgradProblem:
        return spatial(size, kernel, padding=at(axis, (low, high), (1, 1)))

    def stretched(window: int, dilation: int) -> ConvWgradProblem:
        reach = (window - 1) * dilation
        pads, dilations = at(axis, (0, reach - 10), (1, 1)), at(axis, dilation, 1)
        return spatial(size, at(axis, window, 3), padding=pads, rhs_dilation=dilations)

    where = f"in spatial dimension {axis}; accepted"
    for legal, illegal, reason in [
        (padded(16, 1), padded(17, 1), f"padding 17 {where}: -15 to 16"),
        (padded(-15, 1), padded(-16, 1), f"padding -16 {where}: -15 to 16"),
        (padded(1, 17), padded(1, 18), "padding 18 less the dilated window's reach 2 in spatial"),
        (padded(1, -14), padded(1, -15), "padding -15 less the dilated window's reach 2 in spatial"),
        (stretched(2, 31), stretched(2, 32), f"dilated window's reach 32 {where}: at most 31"),
        (stretched(32, 1), stretched(33, 1), f"dilated window's reach 32 {where}: at most 31"),
        (
            spatial(size, kernel, window_strides=at(axis, 8, 1)),
            spatial(size, kernel, window_strides=at(axis, 9, 1)),
            f"window stride 9 {where}: at most 8",
        ),
    ]:
        assert FAMILY.refusal(legal) is None
        assert str(FAMILY.refusal(illegal)).startswith(reason)


def test_one_dimension_has_the_limits_of_two() -> None:
    for change, other, reason in [
        ({"padding": ((128, 0),)}, {"padding": ((129, 0),)}, "padding 129 in spatial dimension 0; accepted: -127 to"),
        ({"window_strides": (8,)}, {"window_strides": (9,)}, "window stride 9 in spatial dimension 0; accepted"),
        (
            {"rhs_dilation": (127,), "padding": ((0, 254),)},
            {"rhs_dilation": (128,), "padding": ((0, 254),)},
            "dilated window's reach 256 in spatial dimension 0; accepted: at most 255",
        ),
    ]:
        assert FAMILY.refusal(spatial((400,), (3,), **change)) is None
        assert str(FAMILY.refusal(spatial((400,), (3,), **other))).startswith(reason)


# ---- dimensions in which nothing moves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "batch", "size", "kernel"),
    [
        (spatial((30,), (3,)), 2, (1, 30), (1, 3)),
        (spatial((7, 30), (3, 3)), 2, (7, 30), (3, 3)),
        (spatial((7, 30), (1, 3)), 14, (1, 30), (1, 3)),
        (spatial((7, 30), (3, 1)), 2, (7, 30), (3, 1)),
        (spatial((5, 7, 30), (2, 3, 3)), 2, (5, 7, 30), (2, 3, 3)),
        (spatial((5, 7, 30), (1, 3, 3)), 10, (7, 30), (3, 3)),
        (spatial((5, 7, 30), (3, 1, 1)), 2, (5, 210), (3, 1)),
        (spatial((5, 7, 30), (3, 1, 3)), 2, (5, 7, 30), (3, 1, 3)),
        (spatial((5, 7, 30), (1, 1, 3)), 70, (1, 30), (1, 3)),
        (spatial((5, 7, 30), (1, 3, 1)), 10, (7, 30), (3, 1)),
        (spatial((5, 7, 30), (1, 1, 1)), 2 * 5 * 7 * 30, (1, 1), (1, 1)),
        (spatial((5, 7, 30), (1, 3, 3), window_strides=(2, 1, 1)), 2, (5, 7, 30), (1, 3, 3)),
        (spatial((5, 7, 30), (1, 3, 3), padding=((1, 0), (1, 1), (1, 1))), 2, (5, 7, 30), (1, 3, 3)),
    ],
    ids=str,
)
def test_folding(given: ConvWgradProblem, batch: int, size: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    folded = im2col.folded(given)
    folded.validate()
    assert (folded.batch, folded.input_spatial, folded.kernel_spatial) == (batch, size, kernel)
    assert (folded.gemm_shape, folded.bytes_moved) == (given.gemm_shape, given.bytes_moved)
    assert im2col.folded(folded) == folded
    assert dict(FAMILY.source(given, Config(64, 64, 4, False, 1)).defines)["RANK3"] == (len(size) == 3)


def test_folded_dimensions_have_no_limits() -> None:
    long = spatial((3, 1000, 30), (1, 1, 3), rhs_dilation=(99, 99, 99), padding=((0, 0), (0, 0), (0, 200)))
    assert FAMILY.refusal(long) is None
    assert im2col.is_matrix_product(spatial((3, 4, 5), (1, 1, 1)))
    assert not im2col.is_matrix_product(spatial((3, 4, 5), (1, 1, 1), window_strides=(1, 2, 1)))


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
    reason = FAMILY.refusal(problem(), None, target)
    if legal:
        assert reason is None
    else:
        capability = re.escape(target.compute_capability)
        assert re.fullmatch(
            rf"needs a GPU of compute capability 9\.0 \(Hopper\), not {target.device_kind} \({capability}\)",
            str(reason),
        )


def test_matrix_products_are_free_of_im2cols_limits() -> None:
    assert im2col.is_matrix_product(problem(kernel=(1, 1)))
    assert im2col.is_matrix_product(problem(kernel=(1, 1), dilation=(300, 300)))
    assert FAMILY.refusal(problem(kernel=(1, 1), dilation=(300, 300))) is None
    for change in ({"stride": (2, 1)}, {"padding": ((0, 1), (0, 0))}, {"kernel": (1, 2)}):
        assert not im2col.is_matrix_product(problem(**{"kernel": (1, 1), **change})), change


def test_config_limits() -> None:
    p = problem()  # 288 pixels: 5 blocks
    good = Config(128, 128, 6, False, 5)
    assert FAMILY.refusal(p, good) is None
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
        assert str(FAMILY.refusal(p, dataclasses.replace(good, **change))).startswith(reason), change
    for change in (*({"stages": 2}, {"stages": 7}, {"swap": True}, {"splits": 1}, {"splits": 2}, {"splits": 3}),):
        assert FAMILY.refusal(p, dataclasses.replace(good, **change)) is None, change


@pytest.mark.parametrize("tile", im2col.TILES, ids=str)
def test_ring_holds_the_16_bit_tile(tile: tuple[int, int]) -> None:
    fewest, deepest = im2col.MIN_STAGES, im2col.max_stages(*tile)
    assert tile[0] * tile[1] * 2 <= fewest * Config(*tile, fewest, False, 1).stage_bytes
    assert fewest <= deepest
    for stages in range(1, 10):
        reason = FAMILY.refusal(problem(), Config(*tile, stages, False, 1))
        if fewest <= stages <= deepest:
            assert reason is None
        else:
            assert reason == f"stages {stages}; accepted with this tile: {fewest} to {deepest}"


def test_grid_limits_splits() -> None:
    wide = matrix(64 * 65536)
    config = Config(64, 64, 8, False, 65535)
    assert "accepted for 65536 blocks of pixels: 1 to 65535" in str(
        FAMILY.refusal(wide, dataclasses.replace(config, splits=65536))
    )
    assert FAMILY.refusal(matrix(64 * 65535), config) is None


# ---- splits and tiles ----------------------------------------------------------------------------------------------


def test_whole_splits_leaves_no_split_empty() -> None:
    with seeded(1) as rng:
        for _ in range(3000):
            p = matrix(int(rng.integers(1, 20_000)))
            wanted = int(rng.integers(1, 400))
            splits = split_k.whole_splits(im2col.k_tiles(p), wanted)
            blocks = im2col.k_tiles(p)
            assert blocks == math.ceil(p.reduction_size / 64)
            assert 1 <= splits <= min(wanted, blocks)
            # As the kernel cuts them: split s has blocks [s, s + 1) * per_split.
            per_split = math.ceil(blocks / splits)
            sizes = [min(blocks, (s + 1) * per_split) - s * per_split for s in range(splits)]
            assert min(sizes) >= 1
            assert sum(sizes) == blocks
            assert split_k.whole_splits(im2col.k_tiles(p), splits) == splits
            # The nearest: nothing between it and what was wanted is legal.
            for other in range(splits + 1, min(wanted, blocks) + 1):
                assert (other - 1) * math.ceil(blocks / other) >= blocks, (splits, other, blocks)


def test_tile_counts_cover_the_output_and_no_more() -> None:
    with seeded(2) as rng:
        for _ in range(500):
            p = random_case(rng).problem()
            groups = int(rng.integers(1, 4))
            if groups > 1:
                channels = {"in_channels": groups * 64 * int(rng.integers(1, 5)), "out_channels": groups * 192}
                p = dataclasses.replace(p, feature_group_count=groups, **channels)
            tile = im2col.TILES[rng.integers(len(im2col.TILES))]
            config = Config(*tile, 4, bool(rng.integers(2)), 1)
            # 64-channel slots of (tap, channel) on one side, output channels on the other.
            slots = sum(len(range(0, p.in_channels // groups, 64)) for _ in range(p.taps))
            sides = [slots * 64, p.out_channels // groups]
            if config.swap:
                sides.reverse()
            expected = tuple(len(range(0, side, size)) for side, size in zip(sides, tile, strict=True))
            assert im2col.tile_counts(p, config) == expected, (p, config)


def work_of_block(p: ConvWgradProblem, config: Config, index: int, rest: int) -> tuple[int, int, int]:
    """(tile, kt, kt_end): the device code's function of that name, under TAIL."""
    blocks = im2col.k_tiles(p)
    if index < config.whole_tiles:
        return index, 0, blocks
    split, tile = divmod(index - config.whole_tiles, rest)
    each = math.ceil(blocks / config.splits)
    return config.whole_tiles + tile, split * each, min((split + 1) * each, blocks)


def test_tail_covers_every_block_of_every_tile_once() -> None:
    with seeded(34) as rng:
        for _ in range(60):
            p = random_case(rng).problem()
            variant = list(im2col.variants())[int(rng.integers(0, 20))]
            tiles = math.prod(im2col.tile_counts(p, variant))
            splits = split_k.whole_splits(im2col.k_tiles(p), int(rng.integers(2, 9)))
            if tiles < 2 or splits == 1:
                continue
            config = dataclasses.replace(variant, splits=splits, whole_tiles=int(rng.integers(1, tiles)))
            assert FAMILY.refusal(p, config) is None
            made, rest = FAMILY.plan(p, config), tiles - config.whole_tiles
            main, reduce = made.launches
            assert (main.kernel, reduce.kernel, reduce.programmatic) == ("wgrad_tail", "reduce_tail", True)
            seen = [work_of_block(p, config, index, rest) for index in range(main.grid[0])]
            covered = sorted((tile, kt) for tile, begin, end in seen for kt in range(begin, end))
            assert covered == [(tile, kt) for tile in range(tiles) for kt in range(im2col.k_tiles(p))]
            assert made.workspace_bytes == rest * splits * config.tile_m * config.tile_n * 4
            assert reduce.grid[0] * reduce.block[0] * im2col.TAIL_CHUNKS * 4 == config.tile_m * config.tile_n
            assert reduce.grid[1] == rest


def test_tail_limits() -> None:
    p = problem(in_channels=256, out_channels=256, batch=16)
    config = Config(128, 128, 4, False, 2, whole_tiles=20)
    tiles = math.prod(im2col.tile_counts(p, config))
    assert FAMILY.refusal(p, config) is None
    assert FAMILY.refusal(p, dataclasses.replace(config, whole_tiles=tiles - 1)) is None
    for changes in ({"whole_tiles": tiles}, {"whole_tiles": -1}):
        reason = FAMILY.refusal(p, dataclasses.replace(config, **changes)) or ""
        assert f"whole_tiles {changes['whole_tiles']}; accepted for {tiles} tiles: 0 to {tiles - 1}" == reason
    reason = FAMILY.refusal(p, dataclasses.replace(config, splits=1))
    assert reason == "whole_tiles 20; accepted but for several splits of one group: 0"


def test_tail_fits_the_grid() -> None:
    p = matrix(128, 16448, 16384)
    config = Config(64, 64, 4, False, 2, whole_tiles=257)
    assert math.prod(im2col.tile_counts(p, config)) == 65535 + 257
    assert FAMILY.refusal(p, config) is None
    reason = FAMILY.refusal(p, dataclasses.replace(config, whole_tiles=256))
    assert reason == "whole_tiles 256; accepted for 65792 tiles: 0, or at least 257"


# `struct Args` of the device code.
DIVISORS = ("slots", "kernel_h", "kernel_w", "out_d", "out_h", "out_w", "columns")
ARGS = [
    *("channels", "out_channels", "taps", "pitch", "slots", "kernel_h", "kernel_w", "out_d", "out_h", "out_w"),
    *("stride_d", "stride_h", "stride_w", "pad_d", "pad_h", "pad_w", "dilation_d", "dilation_h", "dilation_w"),
    *("columns", "k_tiles", "k_tiles_per_split", "step", "step_n", "step_o", "step_p", "step_q"),
    *("x_once", "dy_once"),
]


def device_args(p: ConvWgradProblem, config: Config) -> dict[str, int]:
    """The values in the struct's order; of a divisor the first of its three words."""
    words = list(FAMILY.plan(p, config).launches[0].params[2].values)
    found = {}
    for name in ARGS:
        found[name], words = words[0], words[3 if name in DIVISORS else 1 :]
    assert not words
    return found


def split_blocks(p: ConvWgradProblem, config: Config, split: int) -> tuple[int, int, int]:
    """A split's first block of pixels, how many it has, and their distance: `work_of_block` in wgrad/im2col.cu."""
    args = device_args(p, config)
    each = args["k_tiles_per_split"]
    if im2col.is_matrix_product(p) and not config.whole_tiles:  # TURNS
        more = args["k_tiles"] - each * config.splits
        return split, each + (split < more), args["step"] // 64
    assert args["step"] == 64
    return split * each, min(each, args["k_tiles"] - split * each), 1


@pytest.mark.parametrize("taps", [1, 2])
def test_splits_share_the_blocks_of_pixels(taps: int) -> None:
    """Each block is one split's, of a matrix product (splits take turns) and of others."""
    with seeded(8) as rng:
        for _ in range(300):
            p = spatial((int(rng.integers(100, 20_000)),), (taps,), batch=1)
            splits = split_k.whole_splits(im2col.k_tiles(p), int(rng.integers(1, 300)))
            config = Config(64, 64, 4, False, splits)
            assert FAMILY.refusal(p, config) is None
            assert im2col.takes_turns(p, config) == (taps == 1 and splits > 1)
            seen: list[int] = []
            for split in range(splits):
                first, count, step = split_blocks(p, config, split)
                assert 1 <= count <= math.ceil(im2col.k_tiles(p) / splits)
                assert step == (splits if taps == 1 else 1)
                seen += range(first, first + count * step, step)
            assert sorted(seen) == list(range(im2col.k_tiles(p)))


def test_blocks_of_splits_that_take_turns_start_within_32_bits() -> None:
    most = 2**31 - 1
    p = matrix(most - 64)
    config = Config(64, 64, 4, False, split_k.whole_splits(im2col.k_tiles(p), 60_000))
    assert FAMILY.refusal(p, config) is None
    first, count, step = split_blocks(p, config, config.splits - 1)
    assert 0 < (first + (count - 1) * step) * 64 < p.reduction_size < most


def test_what_one_tile_reads_need_not_stay_in_the_cache() -> None:
    """As (X, dY): X's tiles are those of other filter rows and channels, so that one tile of dY reads X once."""
    p = matrix(64 * 100, 64, 256)
    for config, expected in (
        (Config(64, 64, 8, True, 33), (0, 1)),
        (Config(64, 64, 8, False, 33), (0, 1)),
        (Config(64, 256, 5, False, 33), (1, 1)),
        (Config(64, 64, 8, False, 1), (0, 0)),
        (Config(64, 64, 8, False, 4, whole_tiles=1), (0, 0)),
    ):
        args = device_args(p, config)
        assert (args["x_once"], args["dy_once"]) == expected, config
    args = device_args(matrix(64 * 100, 256, 64), Config(64, 64, 8, True, 33))
    assert (args["x_once"], args["dy_once"]) == (1, 0)
    args = device_args(spatial((64,), (3,), batch=100), Config(64, 64, 8, True, 33))
    assert (args["x_once"], args["dy_once"]) == (0, 0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_producers_walk_over_pixels_is_division(rank: int) -> None:
    """`advance` in wgrad/im2col.cu steps by 64 pixels with a carry for each digit; only the start is divided."""
    with seeded(3) as rng:
        for _ in range(700):
            most = int(rng.choice([3, 20, 100, 300]))
            out = tuple(int(v) for v in rng.integers(1, most, rank))
            p = spatial(out, (3,) * rank, batch=int(rng.integers(1, 400)), padding=((1, 1),) * rank)
            assert p.output_spatial == out
            if FAMILY.refusal(p) is not None:
                continue
            splits = split_k.whole_splits(im2col.k_tiles(p), int(rng.integers(1, 9)))
            config = Config(64, 64, 4, False, splits)
            args = device_args(p, config)
            sizes = (args["out_d"], args["out_h"], args["out_w"])
            assert sizes == (1,) * (3 - rank) + out
            block, count, _ = split_blocks(p, config, int(rng.integers(splits)))
            pixel, digits = block * 64, None
            for _ in range(min(count, 60)):
                expected = [int(v) for v in np.unravel_index(pixel, (p.batch, *sizes))]
                digits = digits or list(expected)
                assert digits == expected, (p, pixel)
                pixel += 64
                for i, name in ((3, "q"), (2, "p"), (1, "o")):
                    digits[i] += args[f"step_{name}"]
                    if digits[i] >= sizes[i - 1]:
                        digits[i] -= sizes[i - 1]
                        digits[i - 1] += 1
                digits[0] += args["step_n"]


def test_args_are_the_device_codes_struct_in_its_order() -> None:
    p = problem(
        batch=3, height=20, width=31, in_channels=24, out_channels=136, kernel=(5, 2), stride=(2, 3),
        padding=((4, 1), (7, 2)), dilation=(2, 6),
    )  # fmt: skip
    config = Config(64, 128, 4, False, split_k.whole_splits(im2col.k_tiles(p), 3))
    device_plan = FAMILY.plan(p, config)
    struct = re.search(r"struct Args \{(.*?)\};", device_plan.source.text(), re.DOTALL)[1]
    code = re.sub(r"//.*", "", struct)
    assert re.findall(r"\w+(?=[,;])", code) == ARGS
    divisors = [names for of, names in re.findall(r"(\w+) ([\w, ]+);", code) if of == "Divisor"]
    assert tuple(", ".join(divisors).split(", ")) == DIVISORS
    args = device_args(p, config)
    out_h, out_w = p.output_spatial
    blocks = math.ceil(3 * out_h * out_w / 64)
    assert args == {
        "channels": 24, "out_channels": 136, "taps": 10, "pitch": 136, "slots": 1, "kernel_h": 5, "kernel_w": 2,
        "out_d": 1, "out_h": out_h, "out_w": out_w, "stride_d": 1, "stride_h": 2, "stride_w": 3,
        "pad_d": 0, "pad_h": 4, "pad_w": 7, "dilation_d": 1, "dilation_h": 2, "dilation_w": 6, "columns": 2,
        "k_tiles": blocks, "k_tiles_per_split": math.ceil(blocks / config.splits),
        "step": 64, "step_n": 64 // (out_h * out_w), "step_o": 0,
        "step_p": 64 % (out_h * out_w) // out_w, "step_q": 64 % out_w, "x_once": 0, "dy_once": 0,
    }  # fmt: skip


def test_args_and_map_of_three_dimensions_and_groups() -> None:
    p = spatial(
        (9, 20, 31), (2, 5, 3), batch=3, in_channels=128, out_channels=384, window_strides=(1, 2, 3),
        padding=((1, 0), (4, 1), (7, 2)), rhs_dilation=(3, 2, 6), feature_group_count=2,
    )  # fmt: skip
    config = Config(64, 192, 4, True, 2)
    out_d, out_h, out_w = p.output_spatial
    blocks = math.ceil(3 * out_d * out_h * out_w / 64)
    assert device_args(p, config) == {
        "channels": 64, "out_channels": 192, "taps": 30, "pitch": 384, "slots": 1, "kernel_h": 5, "kernel_w": 3,
        "out_d": out_d, "out_h": out_h, "out_w": out_w, "stride_d": 1, "stride_h": 2, "stride_w": 3,
        "pad_d": 1, "pad_h": 4, "pad_w": 7, "dilation_d": 3, "dilation_h": 2, "dilation_w": 6, "columns": 10,
        "k_tiles": blocks, "k_tiles_per_split": math.ceil(blocks / 2),
        "step": 64, "step_n": 0, "step_o": 64 // (out_h * out_w),
        "step_p": 64 % (out_h * out_w) // out_w, "step_q": 64 % out_w, "x_once": 0, "dy_once": 0,
    }  # fmt: skip
    device_plan = FAMILY.plan(p, config)
    x_map = device_plan.maps[0]
    assert (x_map.dims, x_map.element_strides) == ((128, 31, 20, 9, 3), (1, 3, 2, 1, 1))
    assert (x_map.lower, x_map.upper) == ((-7, -4, -1), (2 - 12, 1 - 8, 0 - 3))
    launch, _ = device_plan.launches
    assert (launch.kernel, launch.grid) == ("wgrad_partial", (30, 2, 2))
    assert dict(device_plan.source.defines)["RANK3"] == 1
