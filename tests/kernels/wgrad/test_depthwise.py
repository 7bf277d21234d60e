"""How the depthwise family divides its work, its planes and its sums."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise.wgrad import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.grouped import DEPTHWISE, LONG_SEQUENCES, NETWORKS, SEQUENCES
from tests.problems import conv

PROBLEMS = [*(case.problem() for case in (*NETWORKS, *DEPTHWISE)), *SEQUENCES, *LONG_SEQUENCES]


def problem(size: tuple[int, int], kernel: tuple[int, int], **changes: Any) -> ConvWgradProblem:
    return conv(size, kernel, **{"channels": (16, 16), "groups": 16, "batch": 3, "padding": None, **changes})


# ---- how the work is cut -------------------------------------------------------------------------------------------


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
