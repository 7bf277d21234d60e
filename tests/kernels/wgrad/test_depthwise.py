"""How the depthwise family divides its work, its planes and its sums."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise.wgrad import FAMILY, Axis, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
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
    """The taps of each block, enumerated like the device code:"""
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
                    # The stride skips some of the rows between two taps of a block.
                    assert (b - a) * axis.dilation == axis.shift * axis.stride, p


def test_no_tap_reaches_from_one_image_into_the_next() -> None:
    """In the tall image, the rows that a block of taps reads under a row of dY belong to the same image, or are
    zeros."""
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
        assert main.kernel == f"wgrad_depthwise_{'direct' if splits == 1 else 'partial'}"
        assert [launch.kernel for launch in rest] == ["wgrad_depthwise_reduce_splits"] * (splits > 1)
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
    """Checks each operand: eight rows of 16 bytes of a matrix, and 16-byte loads by lane (row, segment) in quarters of
    a warp."""
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
