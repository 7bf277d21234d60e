"""How the depthwise family cuts its work, its addresses and its sums. No GPU."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import depthwise
from jax_splitk.kernels.wgrad.depthwise import FAMILY, Axis, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64
from tests.exhaustive import thinned
from tests.grouped import DEPTHWISE, NETWORKS, SEQUENCES
from tests.problems import conv, seeded
from tests.structs import arguments

PROBLEMS = [*(case.problem() for case in (*NETWORKS, *DEPTHWISE)), *SEQUENCES]
GEOMETRY = (
    *("PAD_H", "PAD_W", "DILATION_H", "DILATION_W", "SHIFT_H"),
    *("KERNEL_H", "STEP_H", "SIZE_H", "KERNEL_W", "STEP_W", "SIZE_W"),
)


def problem(size: tuple[int, int], kernel: tuple[int, int], **changes: Any) -> ConvWgradProblem:
    return conv(size, kernel, **{"channels": (16, 16), "groups": 16, "batch": 3, "padding": None, **changes})


# ---- how the work is cut -------------------------------------------------------------------------------------------


def taps_of_blocks(axis: Axis) -> list[list[int]]:
    """As the device code enumerates them: `Work::first`, `Work::r`."""
    found = []
    for block in range(axis.tap_blocks):
        first = block // axis.blocks + block % axis.blocks * axis.size * axis.step
        found.append([t for i in range(axis.size) if (t := first + i * axis.step) < axis.kernel])
    return found


def test_every_tap_is_in_one_block_and_a_block_fits_an_operand() -> None:
    for p in PROBLEMS:
        g = depthwise.axes(p)
        for axis, reach in ((g.height, depthwise.MAX_ROW_REACH), (g.width, depthwise.MAX_COLUMN_REACH)):
            blocks = taps_of_blocks(axis)
            assert sorted(t for block in blocks for t in block) == list(range(axis.kernel)), p
            assert axis.reach <= reach
            for block in blocks:
                for a, b in itertools.pairwise(block):
                    # What the stride leaves of the rows between two taps of a block.
                    assert (b - a) * axis.dilation == axis.shift * axis.stride, p


def test_no_tap_reaches_from_one_image_into_the_next() -> None:
    """Rows of the tall image: what a block of taps reads under a row of dY is its image's, or zeros in every image."""
    with seeded(1) as rng:
        for _ in range(300):
            kernel, stride, dilation = (int(v) for v in rng.integers(1, (12, 9, 5)))
            size, low, high = (int(v) for v in rng.integers((1, -3, -3), (40, 12, 12)))
            out = (size + low + high - (kernel - 1) * dilation - 1) // stride + 1
            if out < 1 or size + low + high < (kernel - 1) * dilation + 1:
                continue
            p = problem((size, 12), (kernel, 1), stride=(stride, 1), rhs_dilation=(dilation, 1),
                        padding=((low, high), (0, 0)))  # fmt: skip
            axis, pitch = depthwise.axes(p).height, depthwise.axes(p).pitch
            assert pitch == axis.output + axis.gap <= axis.output + axis.reach
            for taps in taps_of_blocks(axis):
                if not taps:
                    continue
                start = taps[0] * dilation - low
                inside = [0 <= start + i * stride < size for i in range(pitch + axis.reach + 1)]
                for i in range(pitch, out + axis.reach):
                    assert not inside[i], "a row of this image is read as the next one's"
                    assert not inside[i - pitch], "a row of the next image is read as this one's"


def test_blocks_cover_all_rows_and_splits_all_blocks() -> None:
    with seeded(2) as rng:
        for p in PROBLEMS:
            for segments in (1, 2, 4):
                config = Config(8, segments, 1, 1)
                t, g = depthwise.tiling(p, config), depthwise.axes(p)
                assert t.columns % 8 == 0
                assert t.columns <= t.segment * segments
                assert (t.tiles - 1) * t.columns < g.width.output <= t.tiles * t.columns
                last = (math.ceil(p.batch / config.images) * t.tiles - 1) * g.pitch + g.height.output - 1
                assert last // 8 == t.blocks - 1
                splits = FAMILY.with_splits(p, config, int(rng.integers(1, 50))).splits
                each = math.ceil(t.blocks / splits)
                assert (splits - 1) * each < t.blocks <= splits * each


def test_arguments_and_macros() -> None:
    p = problem((40, 90), (5, 3), batch=5, channels=(24, 48), groups=24, stride=(2, 3), rhs_dilation=(4, 2),
                padding=((7, 1), (2, 4)))  # fmt: skip
    config = FAMILY.with_splits(p, Config(8, 2, 1, 1), 3)
    made, t = FAMILY.plan(p, config), depthwise.tiling(p, config)
    expected = {"batch": 5, "blocks": t.blocks, "blocks_per_split": math.ceil(t.blocks / config.splits), "stages": 1}
    assert arguments(made) == expected
    defines = dict(made.source.defines)
    assert {name: defines[name] for name in GEOMETRY} == {
        "PAD_H": 7, "PAD_W": 2, "DILATION_H": 4, "DILATION_W": 2, "SHIFT_H": 2,
        "KERNEL_H": 5, "STEP_H": 1, "SIZE_H": 5, "KERNEL_W": 3, "STEP_W": 3, "SIZE_W": 1,
    }  # fmt: skip


def test_plan() -> None:
    p = problem((40, 90), (5, 3), batch=4, stride=2)
    for splits in (1, 3):
        config = Config(16, 2, 2, splits)
        device_plan = FAMILY.plan(p, config)
        t, g = depthwise.tiling(p, config), depthwise.axes(p)
        main, *rest = device_plan.launches
        assert main.kernel == ("wgrad_direct" if splits == 1 else "wgrad_partial")
        assert [launch.kernel for launch in rest] == ["reduce_splits"] * (splits > 1)
        assert (main.grid, main.block) == ((g.tap_blocks, splits, 1), (768, 1, 1))
        assert main.shared_bytes == t.shared_bytes(2) <= depthwise.SHARED_BYTES
        assert device_plan.workspace_bytes == (0 if splits == 1 else splits * 5 * 3 * 16 * 4)
        assert not device_plan.maps
        assert dict(device_plan.source.defines)["PITCH"] == g.pitch


@pytest.mark.parametrize(("width", "kernel", "padding", "dilation", "kept"), [
    (14, 7, (3, 3), 1, (2, 15)),
    (7, 7, (3, 3), 1, (2, 8)),
    (7, 5, (2, 2), 1, (2, 7)),
    (7, 3, (1, 1), 1, (0, 8)),
    (16, 3, (2, 0), 1, (2, 16)),
    (14, 7, (6, 0), 1, (6, 14)),
    (14, 7, (0, 6), 1, (0, 14)),
    (14, 7, (1, 0), 1, (0, 15)),
    (14, 3, (2, 2), 2, (2, 14)),
    (13, 7, (7, 0), 1, (0, 20)),  # padding beyond the reach
    (14, 11, (5, 5), 1, (0, 19)),  # two blocks of taps
    (20, 7, (3, 3), 1, (0, 22)),  # two tiles
])  # fmt: skip
def test_columns_that_are_kept_of_a_row(
    width: int, kernel: int, padding: tuple[int, int], dilation: int, kept: tuple[int, int]
) -> None:
    p = problem((12, width), (3, kernel), padding=((1, 1), padding), rhs_dilation=(1, dilation))
    t = depthwise.tiling(p, Config(16, 1, 1, 1))
    assert (t.x_pad, t.x_columns) == kept
    wide = depthwise.tiling(p, Config(16, 4, 1, 1))
    assert (wide.x_pad, wide.x_columns) == (0, wide.used + depthwise.axes(p).width.reach)


def test_zeros_beside_an_image_are_not_read_as_pixels() -> None:
    for case, x_stores in zip(NETWORKS[2:4], (4, 2), strict=True):  # instead of 6 and 4
        t = depthwise.tiling(case.problem(), Config(16, 1, 2, 1))
        assert (t.x.stores, t.y.stores) == (x_stores, x_stores)


def test_shared_memory_fits() -> None:
    for p in PROBLEMS:
        for config in FAMILY.candidates(p, DEFAULT_CUDA):
            t = depthwise.tiling(p, config)
            assert t.shared_bytes(config.stages) <= depthwise.SHARED_BYTES
            assert t.x.plane_bytes % 16 == t.y.plane_bytes % 16 == 0
            # The epilogue's sums and products take the planes' place.
            taps = depthwise.axes(p).width.size
            assert t.shared_bytes(1) >= 4 * config.channels * 9 * taps + 4 * config.warps * taps * 130


# ---- the kernel's arithmetic of addresses, here in NumPy -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """What loaders read of one operand, as `Operand` of the device code does: element (row p, column q, channel c) of
    image n is array[n, p * stride + h0, ...], or zero."""

    array: np.ndarray  # [n, h, w, c]
    strides: tuple[int, int]
    start: tuple[int, int]
    channel: int
    cut: bool  # zeros beyond the tile

    def planes(self, p: ConvWgradProblem, config: Config, operand: depthwise.Operand, block: int) -> np.ndarray:
        """Of 8 rows of the tall image, as columns in the planes' memory; NaN where nothing is written or cleared."""
        t, g, parts = depthwise.tiling(p, config), depthwise.axes(p), config.channels // 8
        store_images = min(config.images, 4 // parts)
        store_chunks = 4 // (parts * store_images)
        memory = np.full(operand.plane_bytes // 2, np.nan)
        row, store, lane = np.ogrid[:8, : operand.stores, :32]
        row_stores = operand.written // store_chunks
        first_image, first_chunk = store // row_stores * store_images, store % row_stores * store_chunks
        # As read: a lane's pixel, and its part of it.
        run, p_ = (block * 8 + row) // g.pitch, (block * 8 + row) % g.pitch
        i = lane % 4
        n = run // t.tiles * config.images + first_image + i // parts % store_images
        column = column_at(t.segment, (first_chunk + i // (parts * store_images)) * 8 + lane // 4)
        h = p_ * self.strides[0] + self.start[0]
        w = (run % t.tiles * t.columns + column) * self.strides[1] + self.start[1]
        channel = self.channel + i % parts * 8
        index = (n[..., None], h[..., None], w[..., None], channel[..., None] + np.arange(8))
        inside = np.all(
            np.broadcast_arrays(*((v >= 0) & (v < s) for v, s in zip(index, self.array.shape, strict=True))), 0
        )
        if self.cut:
            inside &= column[..., None] < t.columns
        clipped = tuple(np.clip(v, 0, size - 1) for v, size in zip(index, self.array.shape, strict=True))
        pixels = np.where(inside, self.array[clipped], 0).reshape(8, operand.stores, 8, 4, 8)
        # As written: matrix m has all lanes' channels 2m and 2m + 1, and a row for each of these and each i.
        m, k = np.ogrid[:4, :8]
        i, channel = k // 2, m * 2 + k % 2
        at = first_image[..., None] + i // parts % store_images
        at = at * operand.image + first_chunk[..., None] + i // (parts * store_images)
        at = at + i % parts * operand.part + channel * operand.channel + row[..., None] * operand.row
        to = at[..., None] * 8 + np.arange(8)
        assert len(np.unique(to)) == to.size, "written twice"
        memory[to] = np.moveaxis(pixels[:, :, :, i, channel], 2, -1)
        chunks = (config.segments - 1) * (t.segment // 8) + operand.read_chunks
        for c, i, r in itertools.product(range(config.channels), range(config.images), range(8)):
            base = (c // 8 * operand.part + c % 8 * operand.channel + i * operand.image + r * operand.row) * 8
            cleared = slice(base + operand.written * 8, base + chunks * 8)
            assert np.isnan(memory[cleared]).all(), "cleared and written"
            memory[cleared] = 0
        return memory


def column_at(segment: int, at: Any) -> Any:
    """As in the device code: the column that lies at a place of a row."""
    steps = segment // 4
    return (at // 2 % 2 * steps + at // 4 % steps) * 2 + at % 2 + at // (4 * steps) * 4 * steps


def runs(config: Config, t: depthwise.Tiling, operand: depthwise.Operand, memory: np.ndarray, c: int, size: int):
    """[row, segment, column] as the lanes of channel c's warp have it: `segment_of`, `word_at` of the device code. What
    they do not read is zeros."""
    row, segment, place = np.ogrid[:8, :4, : operand.read_chunks * 8]
    at = c // 8 * operand.part + c % 8 * operand.channel + segment // config.segments * operand.image
    at = at + row * operand.row + segment % config.segments * (t.segment // 8)
    places, steps = np.arange(size), t.segment // 4
    word = places // 2
    places = (word // (2 * steps) * 2 * steps + word % steps * 2 + word % (2 * steps) // steps) * 2 + places % 2
    np.testing.assert_array_equal(column_at(t.segment, places), np.arange(size))
    read = np.zeros((8, 4, max(operand.read_chunks * 8, places.max() + 1)))
    read[..., : operand.read_chunks * 8] = memory[at * 8 + place]
    return read[..., places]


def simulate(p: ConvWgradProblem, config: Config, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The weight gradient as the device code computes it, split by split."""
    t, g = depthwise.tiling(p, config), depthwise.axes(p)
    height, width, multiplier = g.height, g.width, p.out_channels // p.in_channels
    out = np.zeros((height.kernel, width.kernel, p.out_channels))
    each = -(-t.blocks // config.splits)
    for taps, group, split in itertools.product(range(g.tap_blocks), range(t.groups), range(config.splits)):
        block_h, block_w = taps // width.tap_blocks, taps % width.tap_blocks
        r0 = block_h // height.blocks + block_h % height.blocks * height.size * height.step
        s0 = block_w // width.blocks + block_w % width.blocks * width.size * width.step
        if r0 >= height.kernel or s0 >= width.kernel:
            continue
        k0 = group * config.channels
        c0 = k0 // multiplier & ~7
        start = (r0 * height.dilation - height.pad, s0 * width.dilation - width.pad + t.x_pad)
        x_block = Block(x, (height.stride, width.stride), start, c0, False)
        y_block = Block(y, (1, 1), (0, 0), k0, t.tiles > 1)
        begin, end = split * each, min((split + 1) * each, t.blocks)
        products = np.zeros((config.channels, width.size, 16, 8))
        upper = np.zeros((config.channels, 8, 4, t.segment))
        for turn in range(begin, end + 1):
            x_planes = x_block.planes(p, config, t.x, turn)
            y_planes = y_block.planes(p, config, t.y, turn) * (turn < end)
            for c in range(config.channels):
                x_channel = c if config.channels == 32 else (k0 + c) // multiplier - c0
                x_run = runs(config, t, t.x, x_planes, x_channel, t.segment + width.reach - t.x_pad)
                x_run = np.pad(x_run, ((0, 0), (0, 0), (t.x_pad, 0)))
                y_run = runs(config, t, t.y, y_planes, c, t.segment)
                both = np.concatenate((upper[c], y_run))
                upper[c] = y_run
                for s in range(width.size):
                    shifted = x_run[:, :, s * width.shift : s * width.shift + t.segment]
                    products[c, s] += np.einsum("itq,jtq->ij", both, shifted)
        for c, s, r in itertools.product(range(config.channels), range(width.size), range(height.size)):
            tap = (r0 + r * height.step, s0 + s * width.step, k0 + c)
            if all(i < size for i, size in zip(tap, out.shape, strict=True)):
                out[tap] += sum(products[c, s, 8 - r * height.shift + j, j] for j in range(8))
    return out.reshape(p.out_shape)


FEW_CHANNELS = {"batch": 1, "in_channels": 8, "out_channels": 8, "groups": 8}


@pytest.mark.parametrize("case", thinned(
    [*DEPTHWISE, *(dataclasses.replace(case, **FEW_CHANNELS) for case in NETWORKS[:4])], 8, lambda case: case.name
))  # fmt: skip
def test_addresses_and_sums_give_the_weight_gradient(case: Case) -> None:
    p = case.problem()
    with seeded(3) as rng:
        x = rng.integers(-2, 3, p.lhs_shape).astype(np.float64)
        y = rng.integers(-2, 3, p.g_shape).astype(np.float64)
        exact = float64.conv_wgrad_on_host(p, x, y)
        for channels, segments in ((8, 4), (8, 1), (16, 2), (16, 1), (32, 1), (32, 4)):
            config = Config(channels, segments, 1, 1)
            config = dataclasses.replace(config, splits=FAMILY.with_splits(p, config, 2).splits)
            if FAMILY.refusal(p, config) is None and (channels < 32 or p.out_channels > 16):
                np.testing.assert_array_equal(simulate(p, config, x, y), exact, err_msg=str(config))


# ---- candidates and the cost model ---------------------------------------------------------------------------------


def test_float32_results_are_summed_in_short_chains() -> None:
    case = dataclasses.replace(NETWORKS[0], batch=2048)
    for out, chained in (("float32", True), ("bfloat16", False)):
        p = case.problem(out)
        each = [
            math.ceil(depthwise.tiling(p, config).blocks / config.splits)
            for config in FAMILY.candidates(p, DEFAULT_CUDA)
        ]
        assert (max(each) <= depthwise.MAX_FLOAT32_CHAIN) is chained
        config = Config(16, 4, 2, 22)
        chain = dict(FAMILY.source(p, config).defines)["CHAIN"]
        assert chain == (depthwise.CHAIN if chained else 0)
        assert depthwise.CHAIN.bit_count() == 1, "a power of two"
        t = depthwise.tiling(p, config)
        assert t.sums_bytes == (16 * 7 * 32 * 16 if chained else 0)
        assert t.shared_bytes(t.max_stages) <= depthwise.SHARED_BYTES


def test_planes_have_no_bank_conflicts() -> None:
    """Of an operand: a matrix's eight rows of 16 bytes; 16-byte loads by lane (row, segment), in
    quarters of a warp."""
    lane = np.arange(32)
    for p in PROBLEMS:
        for channels, segments in itertools.product(depthwise.CHANNELS, (1, 2, 4)):
            config = Config(channels, segments, 1, 1)
            t, parts = depthwise.tiling(p, config), channels // 8
            images = min(config.images, 4 // parts)
            for operand in (t.x, t.y):
                assert operand.row >= max(operand.written, (segments - 1) * (t.segment // 8) + operand.read_chunks)
                assert operand.image >= 8 * operand.row
                assert operand.channel >= 4 // segments * operand.image
                assert operand.part >= 8 * operand.channel
                assert operand.plane_bytes == parts * operand.part * 16
                i = lane[:8] // 2
                rows = i % parts * operand.part + i // parts % images * operand.image + i // (parts * images)
                assert len(set((rows + lane[:8] % 2 * operand.channel) % 8)) == 8
                loads = lane // 4 * operand.row + lane % 4 // segments * operand.image
                loads += lane % 4 % segments * (t.segment // 8)
                for quarter in loads.reshape(4, 8):
                    assert len(set(quarter % 8)) == 8
