"""How the implicit GEMM in TMA's im2col mode sees a problem, and divides its work."""

import dataclasses
import math

import numpy as np
import pytest

from jax_splitk.kernels.base.geometry import is_matrix_product
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.contraction.wgrad import FAMILY, Config
from jax_splitk.kernels.device.split_k import whole_splits
from jax_splitk.kernels.device.wgmma_tile import TILES
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests.problems import conv, random_case, seeded
from tests.structs import arguments

SMALL = Config(64, 64, 4, False, 1)


def matrix(rows: int, in_channels: int = 8, out_channels: int = 8) -> ConvWgradProblem:
    return conv((rows,), (1,), (in_channels, out_channels), batch=1)


# ---- dimensions in which nothing moves -----------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "batch", "size", "kernel"), [
    (conv((30,), (3,)), 2, (1, 30), (1, 3)),
    (conv((7, 30), (3, 3)), 2, (7, 30), (3, 3)),
    (conv((7, 30), (1, 3)), 14, (1, 30), (1, 3)),
    (conv((7, 30), (3, 1)), 2, (7, 30), (3, 1)),
    (conv((5, 7, 30), (2, 3, 3)), 2, (5, 7, 30), (2, 3, 3)),
    (conv((5, 7, 30), (1, 3, 3)), 10, (7, 30), (3, 3)),
    (conv((5, 7, 30), (3, 1, 1)), 2, (5, 210), (3, 1)),
    (conv((5, 7, 30), (3, 1, 3)), 2, (5, 7, 30), (3, 1, 3)),
    (conv((5, 7, 30), (1, 1, 3)), 70, (1, 30), (1, 3)),
    (conv((5, 7, 30), (1, 3, 1)), 10, (7, 30), (3, 1)),
    (conv((5, 7, 30), (1, 1, 1)), 2 * 5 * 7 * 30, (1, 1), (1, 1)),
    (conv((5, 7, 30), (1, 3, 3), stride=(2, 1, 1)), 2, (5, 7, 30), (1, 3, 3)),
    (conv((5, 7, 30), (1, 3, 3), padding=((1, 0), (1, 1), (1, 1))), 2, (5, 7, 30), (1, 3, 3)),
], ids=str)  # fmt: skip
def test_folding(given: ConvWgradProblem, batch: int, size: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    folded = im2col.folded(given)
    folded.validate()
    assert (folded.batch, folded.input_spatial, folded.kernel_spatial) == (batch, size, kernel)
    assert (folded.gemm_shape, folded.bytes_moved) == (given.gemm_shape, given.bytes_moved)
    assert im2col.folded(folded) == folded
    assert dict(FAMILY.source(given, SMALL).defines)["RANK3"] == (len(size) == 3)


def test_folded_dimensions_have_no_limits() -> None:
    long = conv((3, 1000, 30), (1, 1, 3), rhs_dilation=99, padding=((0, 0), (0, 0), (0, 200)))
    assert FAMILY.refusal(long) is None


def test_matrix_products() -> None:
    assert is_matrix_product(conv((3, 4, 5), (1, 1, 1)))
    assert is_matrix_product(conv((12, 12), (1, 1), rhs_dilation=300))
    for other in (
        conv((12, 12), (1, 1), stride=(2, 1)),
        conv((12, 12), (1, 1), padding=((0, 1), (0, 0))),
        conv((12, 12), (1, 2)),
        conv((3, 4, 5), (1, 1, 1), stride=(1, 2, 1)),
    ):
        assert not is_matrix_product(other), other


# ---- splits and tiles ----------------------------------------------------------------------------------------------


def test_whole_splits_leaves_no_split_empty() -> None:
    with seeded(1) as rng:
        for blocks, wanted in rng.integers(1, (400, 400), (1000, 2)).tolist():
            splits = whole_splits(blocks, wanted)
            assert 1 <= splits <= min(wanted, blocks)
            # As in the kernels, split s has blocks [s, s + 1) * per_split.
            per_split = math.ceil(blocks / splits)
            sizes = [min(blocks, (s + 1) * per_split) - s * per_split for s in range(splits)]
            assert min(sizes) >= 1
            assert sum(sizes) == blocks
            # The nearest legal number: no number between it and the wanted one is legal.
            for other in range(splits + 1, min(wanted, blocks) + 1):
                assert (other - 1) * math.ceil(blocks / other) >= blocks, (splits, other, blocks)


def test_tile_counts_cover_the_output_and_no_more() -> None:
    with seeded(2) as rng:
        for _ in range(300):
            p = random_case(rng).problem()
            groups = int(rng.integers(1, 4))
            if groups > 1:
                channels = {"in_channels": groups * 64 * int(rng.integers(1, 5)), "out_channels": groups * 192}
                p = dataclasses.replace(p, feature_group_count=groups, **channels)
            tile = TILES[rng.integers(len(TILES))]
            config = Config(*tile, 4, bool(rng.integers(2)), 1)
            # 64-channel slots of (tap, channel) on one side, output channels on the other.
            slots = sum(len(range(0, p.in_channels // groups, 64)) for _ in range(p.taps))
            sides = [slots * 64, p.out_channels // groups]
            if config.swap:
                sides.reverse()
            expected = tuple(len(range(0, side, size)) for side, size in zip(sides, tile, strict=True))
            assert im2col.FAMILY.tile_counts(p, config) == expected, (p, config)


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
            variant = FAMILY.with_splits(p, im2col.VARIANTS[int(rng.integers(0, 20))], int(rng.integers(2, 9)))
            tiles = math.prod(im2col.FAMILY.tile_counts(p, variant))
            if tiles < 2 or variant.splits == 1:
                continue
            config = dataclasses.replace(variant, whole_tiles=int(rng.integers(1, tiles)))
            assert FAMILY.refusal(p, config) is None
            made, rest = FAMILY.plan(p, config), tiles - config.whole_tiles
            main, reduce = made.launches
            assert (main.kernel, reduce.kernel, reduce.programmatic) == (
                "wgrad_im2col_tail",
                "wgrad_im2col_reduce_tail",
                True,
            )
            seen = [work_of_block(p, config, index, rest) for index in range(main.grid[0])]
            covered = sorted((tile, kt) for tile, begin, end in seen for kt in range(begin, end))
            assert covered == [(tile, kt) for tile in range(tiles) for kt in range(im2col.k_tiles(p))]
            assert made.workspace_bytes == rest * config.splits * config.tile_m * config.tile_n * 4
            assert reduce.grid[0] * reduce.block[0] * im2col.TAIL_CHUNKS * 4 == config.tile_m * config.tile_n
            assert reduce.grid[1] == rest


# ---- what the device code does with its arguments ------------------------------------------------------------------


def split_blocks(p: ConvWgradProblem, config: Config, split: int) -> tuple[int, int, int]:
    """A split's first block of pixels, how many it has, and their distance: `work_of_block` in contraction/wgrad.cu."""
    args = arguments(FAMILY.plan(p, config))
    each = args["k_tiles_per_split"]
    if is_matrix_product(p) and not config.whole_tiles:  # TURNS
        more = args["k_tiles"] - each * config.splits
        return split, each + (split < more), args["step"] // 64
    assert args["step"] == 64
    return split * each, min(each, args["k_tiles"] - split * each), 1


@pytest.mark.parametrize("taps", [1, 2])
def test_splits_share_the_blocks_of_pixels(taps: int) -> None:
    """Each block belongs to exactly one split, in a matrix product (where splits take turns) and in other problems."""
    with seeded(8) as rng:
        for _ in range(50):
            p = conv((int(rng.integers(100, 5_000)),), (taps,), batch=1)
            config = FAMILY.with_splits(p, SMALL, int(rng.integers(1, 60)))
            assert im2col.takes_turns(p, config) == (taps == 1 and config.splits > 1)
            seen: list[int] = []
            for split in range(config.splits):
                first, count, step = split_blocks(p, config, split)
                assert 1 <= count <= math.ceil(im2col.k_tiles(p) / config.splits)
                assert step == (config.splits if taps == 1 else 1)
                seen += range(first, first + count * step, step)
            assert sorted(seen) == list(range(im2col.k_tiles(p)))


def test_blocks_of_splits_that_take_turns_start_within_32_bits() -> None:
    most = 2**31 - 1
    p = matrix(most - 64)
    config = FAMILY.with_splits(p, SMALL, 60_000)
    assert FAMILY.refusal(p, config) is None
    first, count, step = split_blocks(p, config, config.splits - 1)
    assert 0 < (first + (count - 1) * step) * 64 < p.reduction_size < most


def test_what_one_tile_reads_need_not_stay_in_the_cache() -> None:
    """Tiles of X have different filter rows and channels, so one tile of dY reads X only once."""
    wide, tall, image = matrix(64 * 100, 64, 256), matrix(64 * 100, 256, 64), conv((64,), (3,), batch=100)
    for p, config, expected in (
        (wide, Config(64, 64, 8, True, 33), (0, 1)),
        (wide, Config(64, 64, 8, False, 33), (0, 1)),
        (wide, Config(64, 256, 5, False, 33), (1, 1)),
        (wide, Config(64, 64, 8, False, 1), (0, 0)),
        (wide, Config(64, 64, 8, False, 4, whole_tiles=1), (0, 0)),
        (tall, Config(64, 64, 8, True, 33), (1, 0)),
        (image, Config(64, 64, 8, True, 33), (0, 0)),
    ):
        args = arguments(FAMILY.plan(p, config))
        assert (args["x_once"], args["dy_once"]) == expected, config


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_producers_walk_over_pixels_is_division(rank: int) -> None:
    """`advance` in contraction/wgrad.cu steps by 64 pixels with a carry for each digit; only the start is divided."""
    with seeded(3) as rng:
        for _ in range(200):
            most = int(rng.choice([3, 20, 100, 300]))
            out = tuple(int(v) for v in rng.integers(1, most, rank))
            p = conv(out, (3,) * rank, batch=int(rng.integers(1, 400)), padding=1)
            assert p.output_spatial == out
            if FAMILY.refusal(p) is not None:
                continue
            config = FAMILY.with_splits(p, SMALL, int(rng.integers(1, 9)))
            args = arguments(FAMILY.plan(p, config))
            sizes = (args["out_d"], args["out_h"], args["out_w"])
            assert sizes == (1,) * (3 - rank) + out
            block, count, _ = split_blocks(p, config, int(rng.integers(config.splits)))
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


def test_arguments_and_map_of_three_dimensions_and_groups() -> None:
    p = conv(
        (9, 20, 31), (2, 5, 3), (128, 384), batch=3, stride=(1, 2, 3), padding=((1, 0), (4, 1), (7, 2)),
        rhs_dilation=(3, 2, 6), groups=2,
    )  # fmt: skip
    config = Config(64, 192, 4, True, 2)
    out_d, out_h, out_w = p.output_spatial
    blocks = math.ceil(3 * out_d * out_h * out_w / 64)
    device_plan = FAMILY.plan(p, config)
    assert arguments(device_plan) == {
        "channels": 64, "out_channels": 192, "taps": 30, "pitch": 384, "slots": 1, "kernel_h": 5, "kernel_w": 3,
        "out_d": out_d, "out_h": out_h, "out_w": out_w, "stride_d": 1, "stride_h": 2, "stride_w": 3,
        "pad_d": 1, "pad_h": 4, "pad_w": 7, "dilation_d": 3, "dilation_h": 2, "dilation_w": 6, "columns": 10,
        "k_tiles": blocks, "k_tiles_per_split": math.ceil(blocks / 2),
        "step": 64, "step_n": 0, "step_o": 64 // (out_h * out_w),
        "step_p": 64 % (out_h * out_w) // out_w, "step_q": 64 % out_w, "x_once": 0, "dy_once": 0,
    }  # fmt: skip
    x_map = device_plan.maps[0]
    assert (x_map.dims, x_map.element_strides) == ((128, 31, 20, 9, 3), (1, 3, 2, 1, 1))
    assert (x_map.lower, x_map.upper) == ((-7, -4, -1), (2 - 12, 1 - 8, 0 - 3))
    launch, _ = device_plan.launches
    assert (launch.kernel, launch.grid) == ("wgrad_im2col_partial", (30, 2, 2))
    assert dict(device_plan.source.defines)["RANK3"] == 1


def test_arguments_of_two_dimensions() -> None:
    p = conv((20, 31), (5, 2), (24, 136), batch=3, stride=(2, 3), padding=((4, 1), (7, 2)), rhs_dilation=(2, 6))
    args = arguments(FAMILY.plan(p, FAMILY.with_splits(p, Config(64, 128, 4, False, 1), 3)))
    out_h, out_w = p.output_spatial
    expected = {
        "channels": 24, "taps": 10, "slots": 1, "kernel_h": 5, "kernel_w": 2, "out_d": 1, "stride_d": 1, "stride_h": 2,
        "stride_w": 3, "pad_d": 0, "pad_h": 4, "pad_w": 7, "dilation_d": 1, "dilation_h": 2, "dilation_w": 6,
        "columns": 2, "step_n": 64 // (out_h * out_w), "step_p": 64 % (out_h * out_w) // out_w,
    }  # fmt: skip
    assert expected.items() <= args.items()
