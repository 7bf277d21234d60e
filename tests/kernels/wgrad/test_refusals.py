"""The refusals of each family of weight gradients on Hopper: the last value that it serves, and the next."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.kernels.contraction import halo, patch
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise import wgrad_any as depthwise_any
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests.kernels.wgrad.edges import TILED
from tests.problems import conv, of_families

# test_adapted.py has the refusals of those that use another family's kernels.
FAMILIES = [family for family in kernels.families("conv_wgrad", "cuda") if not isinstance(family, Adapted)]
MOST = 2**31 - 1
FAR = depthwise.MAX_EXTENT
Fields = dict[str, Any]

# A problem that the family serves; padding None is half of the kernel.
BASES: dict[Family, Fields] = {
    depthwise.FAMILY: {"size": (12, 12), "kernel": (3, 3), "channels": (16, 16), "groups": 16, "batch": 3},
    grouped.FAMILY: {"size": (12, 12), "kernel": (3, 3), "channels": (32, 32), "groups": 8},
    tf32.FAMILY: {"size": (16, 32), "kernel": (3, 3), "batch": 4, "dtype": "float32"},
    halo.FAMILY: {"size": (16, 32), "kernel": (3, 3), "batch": 4},
    gather.FAMILY: {"size": (12, 12), "kernel": (3, 3), "channels": (3, 64)},
    im2col.FAMILY: {"size": (12, 12), "kernel": (3, 3)},
    depthwise_any.FAMILY: {"size": (9, 10), "kernel": (3, 3), "channels": (4, 4), "groups": 4},
    patch.WGRAD: {"size": (12, 12), "kernel": (3, 3), "channels": (8, 64), "stride": 3, "padding": 0},
}
# Any config of the family: refusals of the problem come before those of the config.
CONFIGS: dict[Family, Any] = {
    depthwise.FAMILY: depthwise.Config(8, 1, 1, 1),
    grouped.FAMILY: grouped.Config(32, 32, 1, 4, 8, 1, 2, 1),
    tf32.FAMILY: tf32.Config(3, 3, 1, 64, 1, 8, 32, 4, 4),
    halo.FAMILY: halo.Config(8, 32, 2),
    gather.FAMILY: gather.Config(1, 1, 64, 1, 8, 8, 3, 2, 1),
    im2col.FAMILY: im2col.Config(64, 64, 4, False, 1),
    depthwise_any.FAMILY: depthwise_any.Config(4, 4, 8, 4, 1),
    patch.WGRAD: tma.Config(64, 64, 5),
}


def problem(family: Family, **changes: Any) -> ConvWgradProblem:
    return conv(**{"padding": None, **BASES[family], **changes})


def by_name(families: Any) -> Any:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


# ---- what all refuse -----------------------------------------------------------------------------------------------


@by_name(FAMILIES)
def test_what_no_family_serves(family: Family) -> None:
    for changes, reason in (
        ({"dtype": "float64"}, "dtype float64; accepted: "),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn; accepted: "),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted: float32, bfloat16, float16"),
        ({"batch_group_count": 2}, "batch_group_count 2; accepted: "),
        ({"batch": 0}, "accepted: "),
        ({"size": (0, 32), "padding": ((2, 2), (1, 1))}, "input"),
    ):
        p = problem(family, **changes)
        assert reason in str(family.refusal(p)), changes
        assert family.refusal(p, CONFIGS[family], DEFAULT_CUDA) == family.refusal(p), changes
    served = problem(family)
    for out_dtype in ("float32", "bfloat16", "float16"):
        assert family.refusal(dataclasses.replace(served, out_dtype=out_dtype)) is None
    assert family.candidates(served, DEFAULT_CUDA)


@by_name(FAMILIES)
def test_only_hopper(family: Family) -> None:
    p = problem(family)
    for device, capability in (("NVIDIA H100 PCIe", "9.0"), ("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0")):
        refused = f"needs a GPU of compute capability 9.0 (Hopper), not {device} ({capability})"
        found = family.refusal(p, None, Target("cuda", device, capability, 114))
        assert found == (None if capability == "9.0" else refused)
    assert family.refusal(p, None, DEFAULT_CUDA) is None
    assert "needs a GPU" in str(family.refusal(p, None, Target("cpu", "cpu", "9.0", 2)))


@by_name([family for family in FAMILIES if family is not gather.FAMILY])
def test_only_one_family_serves_dilated_inputs(family: Family) -> None:
    assert family.refusal(problem(family, lhs_dilation=(1, 2))) == "lhs_dilation (1, 2); accepted: 1"
    assert gather.FAMILY.refusal(problem(gather.FAMILY, lhs_dilation=(1, 2))) is None


@pytest.mark.parametrize(("family", "ranks"), [
    (depthwise.FAMILY, "1, 2"), (grouped.FAMILY, "1, 2"), (tf32.FAMILY, "1, 2"), (halo.FAMILY, "2"),
    (gather.FAMILY, "1, 2, 3"), (im2col.FAMILY, "1, 2, 3"), (depthwise_any.FAMILY, "1, 2, 3"),
], ids=str)  # fmt: skip
def test_ranks(family: Family, ranks: str) -> None:
    for rank in (1, 2, 3):
        refused = family.refusal(problem(family, size=(32,) * rank, kernel=(3,) * rank))
        assert refused == (None if str(rank) in ranks else f"{rank} spatial dimensions; accepted: {ranks}")


# ---- limits of problems --------------------------------------------------------------------------------------------


def at(rank: int, axis: int, value: Any, other: Any) -> tuple[Any, ...]:
    return tuple(value if i == axis else other for i in range(rank))


def im2col_edges() -> Iterator[tuple[Fields, Fields, str]]:
    """The limits of TMA's im2col mode, on small problems."""
    for rank, long, lower, upper, reach in ((1, 400, -128, 127, 255), (2, 300, -128, 127, 255), (3, 40, -16, 15, 31)):
        for axis in range(rank):
            where = f"in spatial dimension {axis}; accepted:"

            def windows(
                window: int = 3, axis: int = axis, rank: int = rank, long: int = long, **changes: Any
            ) -> Fields:
                """Fields that give a filter of size `window` along the axis."""
                others = {"padding": (1, 1), "stride": 1, "rhs_dilation": 1}
                given = {name: at(rank, axis, changes.get(name, other), other) for name, other in others.items()}
                size, kernel = at(rank, axis, long, 12 if rank == 2 else 6), at(rank, axis, window, 3)
                return {"size": size, "kernel": kernel, "channels": (24, 40), **given}

            # The corners of the box of window origins; with three taps the high one is its padding less 2.
            limits = f"{where} {-upper} to {-lower}"
            less = f"less the dilated window's reach 2 {where} {lower} to {upper}"
            for pads, beyond, reason in (
                ((-lower, 1), (1 - lower, 1), f"padding {1 - lower} {limits}"),
                ((-upper, 1), (-upper - 1, 1), f"padding {-upper - 1} {limits}"),
                ((1, upper + 2), (1, upper + 3), f"padding {upper + 3} {less}"),
                ((1, lower + 2), (1, lower + 1), f"padding {lower + 1} {less}"),
            ):
                yield windows(padding=pads), windows(padding=beyond), reason
            reason = f"dilated window's reach {reach + 1} {where} at most {reach}"
            pads = (0, reach - 10)
            yield (*(windows(2, rhs_dilation=d, padding=pads) for d in (reach, reach + 1)), reason)  # type: ignore[misc]
            yield windows(stride=8), windows(stride=9), f"window stride 9 {where} at most 8"
    taps = (18, 15), (17, 16)  # one dilation, and many taps
    good, bad = ({"size": (300, 12), "kernel": (n, 3), "rhs_dilation": (d, 1), "padding": ((0, 150), (1, 1))}
                 for n, d in taps)  # fmt: skip
    yield good, bad, "dilated window's reach 256 in spatial dimension 0"
    good, bad = ({"size": (6, 6, 40), "kernel": (3, 3, n), "padding": ((1, 1), (1, 1), (0, 20))} for n in (32, 33))
    yield good, bad, "dilated window's reach 32 in spatial dimension 2"


IM2COL = list(im2col_edges())


def row(pixels: int, channels: tuple[int, int] = (8, 8), **fields: Any) -> Fields:
    """A matrix product over `pixels` pixels."""
    return {"size": (pixels,), "kernel": (1,), "channels": channels, "batch": 1, **fields}


# A family's last legal value, the next value, and the reason of its refusal.
EDGES: dict[Family, list[tuple[Fields, Fields, str]]] = {
    depthwise.FAMILY: [
        ({"channels": (16, 48)}, {"groups": 8}, "feature_group_count 8, batch_group_count 1; accepted: 16 (the input"),
        ({"channels": (8, 8), "groups": 8}, {"channels": (12, 12), "groups": 12}, "12 input and 12 output channels"),
        *(
            ({"size": (90, 90), "stride": at(2, axis, 8, 1)}, {"size": (90, 90), "stride": at(2, axis, 9, 1)},
             f"window strides {at(2, axis, 9, 1)}; accepted: at most 8")
            for axis in (0, 1)
        ),
        ({"size": (1, FAR), "kernel": (1, 1), "batch": 1}, {"size": (1, FAR + 1), "kernel": (1, 1), "batch": 1},
         f"1 images: up to {FAR + 1} rows or columns; accepted: at most {FAR}"),
        ({"size": (1, 8), "kernel": (1, 1), "batch": FAR}, {"size": (1, 9), "kernel": (1, 1), "batch": FAR},
         f"{FAR} images: up to {2 * FAR} rows or columns; accepted: at most {FAR}"),
        ({"size": (4, 12), "kernel": (1, 3), "padding": ((FAR, 3 - FAR), (1, 1))},
         {"size": (4, 12), "kernel": (1, 3), "padding": ((FAR + 1, 2 - FAR), (1, 1))}, "padded by"),
        ({"kernel": (1, 2), "rhs_dilation": (1, FAR), "padding": ((0, 0), (0, FAR))},
         {"kernel": (1, 2), "rhs_dilation": (1, FAR + 1), "padding": ((0, 0), (0, FAR + 1))},
         f"dilation (1, {FAR + 1}), 3 images: up to "),
    ],
    grouped.FAMILY: [
        ({}, {"groups": 1}, "feature_group_count 1; accepted: at least 2"),
        ({}, {"groups": 32},
         "1 input and 1 output channels per group; accepted: 2 to 256, and not multiples of 64 above it"),
        ({"groups": 16}, {"groups": 16, "channels": (32, 16)}, "2 input and 1 output channels per group"),
        ({"groups": 2, "channels": (128, 128)}, {"groups": 2, "channels": (256, 128)}, "128 input and 64 output"),
        ({"groups": 2, "channels": (512, 48)}, {"groups": 2, "channels": (528, 48)}, "264 input and 24 output"),
        ({}, {"channels": (28, 28), "groups": 7}, "28 input and 28 output channels; accepted"),
        ({"size": (20, 20), "kernel": (16, 17)}, {"size": (20, 20), "kernel": (17, 3)},
         "a filter of (17, 3); accepted: up to 16 rows"),
        ({"size": (12, 400), "stride": (1, 36)}, {"size": (12, 400), "stride": (1, 37)},
         "window strides (1, 37), dilation (1, 1): with the smallest tile rows 1, columns 8: 3x264 pixels of input; "),
        ({"size": (600, 12), "rhs_dilation": (127, 1)}, {"size": (600, 12), "rhs_dilation": (128, 1)},
         "rows 1, columns 8: 257x16 pixels of input; accepted: at most 256 a side"),
        ({"size": (300, 300), "kernel": (2, 2), "rhs_dilation": 60},
         {"size": (300, 300), "kernel": (2, 2), "rhs_dilation": 120},
         "498688 bytes of shared memory; accepted: at most 231936"),
    ],
    tf32.FAMILY: [
        ({"channels": (68, 4)}, {"channels": (66, 4)}, "66 input and 4 output channels; accepted: multiples of 4"),
        ({"channels": (68, 4)}, {"channels": (68, 6)}, "68 input and 6 output channels; accepted: multiples of 4"),
        ({}, {"dtype": "bfloat16"}, "dtype bfloat16; accepted: float32"),
        ({"precision": "high"}, {"precision": "default,highest"}, "precision default,highest; accepted: default, high"),
        ({}, {"groups": 2}, "feature_group_count 2, batch_group_count 1; accepted: 1"),
        ({"size": (16, 400), "stride": (1, 71)}, {"size": (16, 400), "stride": (1, 73)},
         "window strides (1, 73), dilation (1, 1): with the smallest tile stages 2 take 235520 bytes"),
    ],
    halo.FAMILY: [
        ({}, {"stride": (2, 1)}, "window_strides (2, 1); accepted: 1"),
        ({"channels": (72, 8)}, {"channels": (68, 8)}, "68 input and 8 output channels; accepted: multiples of 8"),
        ({"channels": (72, 8)}, {"channels": (72, 12)}, "72 input and 12 output channels; accepted: multiples of 8"),
        ({"kernel": (3, 2), "padding": ((1, 1), (0, 1))}, {"kernel": (3, 1)}, "a filter 1 wide; accepted: at least 2"),
        ({"dtype": "float16"}, {"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
        ({"size": (16, 24)}, {"size": (16, 28)}, "output of 16x28; accepted: a width of whole 16 pixels"),
        ({"size": (16, 24)}, {"size": (15, 24)}, "output of 15x24; accepted: a width of whole 16 pixels"),
        ({"size": (15, 32)}, {"size": (15, 30)}, "output of 15x30; accepted: a width of whole 16 pixels"),
        ({}, {"groups": 2}, "feature_group_count 2, batch_group_count 1; accepted: 1"),
        ({"size": (16, 16 + 2 * 124), "rhs_dilation": (1, 124), "padding": 0},
         {"size": (16, 16 + 2 * 125), "rhs_dilation": (1, 125), "padding": 0},
         "with the smallest tile rows of 258 pixels; accepted: at most 256"),
        # 16 rows of output, 64 more that a strip may reach, 3 of the filter.
        ({"padding": ((MOST - 83, 2 - (MOST - 83)), (1, 1))}, {"padding": ((MOST - 82, 2 - (MOST - 82)), (1, 1))},
         f"padded input of up to {2**31} pixels in spatial dimension 0; accepted: at most {MOST}"),
    ],
    gather.FAMILY: [
        ({"dtype": "float32"}, {"groups": 2, "channels": (6, 64)}, "feature_group_count 2, batch_group_count 1"),
        ({"size": (2**16, 2**15 - 1), "kernel": (1, 1), "stride": 99, "batch": 1},
         {"size": (2**16, 2**15), "kernel": (1, 1), "stride": 99, "batch": 1},
         f"{2**31} input pixels; accepted: at most {MOST}"),
        (row(64, (2**14, 2**16 - 8)), row(64, (2**15, 2**16)), f"{2**31} weights; accepted: 1 to {MOST - 1024}"),
        (row(1000, (2**20, 1)), row(1000, (2**21, 1)),
         f"padded input of up to {(1000 + 256 + 1) * 2**21} elements in spatial dimension 0; accepted: at most"),
        ({"size": (330, 330), "kernel": (12, 12), "channels": (8, 8)},
         {"size": (330, 330), "kernel": (300, 300), "channels": (8, 8)}, "the window's input takes "),
        ({"batch": 1}, {"batch": 0}, f"0 output pixels; accepted: 1 to {MOST - 256**2}"),
    ],
    im2col.FAMILY: [
        *IM2COL,
        *(
            ({"channels": (8, 16)}, {"channels": (c, k)},
             f"{c} input and {k} output channels; accepted: multiples of 8")
            for c, k in ((12, 16), (16, 12), (3, 64), (64, 1), (7, 9))
        ),
        ({"dtype": "float16"}, {"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
        *(
            ({"channels": (80, 96), "groups": 2}, {"channels": (c, k), "groups": 2},
             f"feature_group_count 2 with {c // 2} input and {k // 2} output channels each; accepted: multiples of 8")
            for c, k in ((64, 128), (128, 64), (256, 136), (88, 256))
        ),
        ({}, {"kernel": (14, 14), "padding": 0}, "0 output pixels; accepted"),
        (row(MOST - 64), row(MOST - 63), f"{MOST - 63} output pixels; accepted: 1 to {MOST - 64}"),
        (row(64, (2**15, 2**16 - 8)), row(64, (2**15, 2**16)), f"{2**31} weights; accepted: 1 to {MOST - 1024}"),
        # Coordinates fit 32 bits, those of the 64 pixels beyond the output, too, that a block of them may reach.
        (row(8 * (2**28 - 65), stride=8), row(8 * (2**28 - 64), stride=8),
         f"padded input of up to {2**31 + 1} pixels in spatial dimension "),
        (row(64, (64 * 65535, 64 * 65535), groups=65535), row(64, (64 * 65536, 64 * 65536), groups=65536),
         "feature_group_count 65536; accepted: 1 to 65535"),
        ({"size": (12, 400), "kernel": (1, 1), "rhs_dilation": 300}, {"size": (12, 400), "kernel": (1, 2),
          "rhs_dilation": 300}, "reach 300"),
    ],
    depthwise_any.FAMILY: [
        ({"channels": (5, 15), "groups": 5}, {"groups": 2}, "feature_group_count 2, batch_group_count 1; accepted: 4"),
        ({"channels": (2, 2), "groups": 2}, {"channels": (1, 1), "groups": 1}, "feature_group_count 1, "),
        ({"size": (10,), "kernel": (3,), "channels": (8, 8), "groups": 8}, {"channels": (8, 8), "groups": 8},
         "8 channels of bfloat16 in 2D; accepted: problems that wgrad_depthwise refuses"),
        ({"stride": (4, 1)}, {"stride": (5, 1)}, "window strides (5, 1); accepted: up to 4"),
        (row(2**24 - 1, (4, 4)), row(2**24, (4, 4)), "accepted: sizes up to 16777215, 1073741823 output pixels"),
        (row(64, (4, 4), batch=2**24 - 1), row(65, (4, 4), batch=2**24 - 1), "1073741823 output pixels"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "last", "beyond", "reason"), of_families(EDGES))
def test_limit_is_where_it_is_said_to_be(family: Family, last: Fields, beyond: Fields, reason: str) -> None:
    assert family.refusal(problem(family, **last)) is None
    refused = problem(family, **beyond)
    assert reason in str(family.refusal(refused))
    assert family.refusal(refused, CONFIGS[family], DEFAULT_CUDA) == family.refusal(refused)


# ---- limits of configs ---------------------------------------------------------------------------------------------

# A family's problem, a legal config, illegal changes with their reasons, and legal changes.
LIMITS: list[tuple[Family, Fields, Any, list[tuple[Fields, str]], list[Fields]]] = [
    (
        depthwise.FAMILY, {}, depthwise.Config(16, 1, 2, 2),  # 12 rows of one group of images: 2 blocks
        [
            ({"channels": 24}, "channels 24; accepted: 8, 16, 32"),
            ({"segments": 3}, "segments 3; accepted: 1, 2, 4"),
            ({"stages": 0}, "stages 0; accepted with these channels and segments: 1 to "),
            ({"stages": 7}, "stages 7; accepted with these channels and segments: 1 to "),
            ({"splits": 0}, "splits 0; accepted for 2 blocks of rows: 1 to 2"),
            ({"splits": 3}, "splits 3; accepted for 2 blocks of rows: 1 to 2"),
        ],
        [{"stages": 1}, {"splits": 1}, {"channels": 8}, {"channels": 32, "stages": 1}],
    ),
    (
        depthwise.FAMILY, {"batch": 20}, depthwise.Config(16, 1, 2, 4), [({"splits": 6}, "leaves some of")], [],
    ),
    *(
        (
            depthwise.FAMILY, {"kernel": (3, most + extra), "out_dtype": out}, depthwise.Config(16, 4, 1, 1),
            [({"channels": 32}, f"channels 32 with {most + 1} taps in a row; accepted: at most {most}")] * extra,
            [{"channels": 32}] * (1 - extra),
        )
        for (out, most), extra in itertools.product((("bfloat16", 5), ("float32", 3)), (0, 1))
    ),
    (
        depthwise.FAMILY, {"rhs_dilation": (1, 4), "out_dtype": "bfloat16"}, depthwise.Config(16, 4, 1, 1),
        [({"channels": 32}, "channels 32 with taps 8 columns apart; accepted: at most 6")], [],
    ),
    (
        depthwise.FAMILY, {"channels": (16, 32)}, depthwise.Config(16, 4, 1, 1),
        [({"channels": 32}, "channels 32 with 2 output channels")], [],
    ),
    (depthwise.FAMILY, {"size": (12, 500), "stride": (1, 8)}, depthwise.Config(16, 4, 1, 1), [], []),
    (
        grouped.FAMILY, {"size": (20, 20), "batch": 3}, grouped.Config(32, 32, 2, 5, 16, 2, 3, 5),  # 2 x 4 x 2 tiles
        [
            ({"in_block": 16}, "in_block 16, out_block 32; accepted with these groups: 32x32, 16x16, 8x8"),
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
        ],
        [
            {"rows": 20, "stages": 2, "splits": 4}, {"columns": 8, "slices": 1}, {"columns": 20}, {"splits": 16},
            {"slices": 1},
        ],
    ),
    (
        grouped.FAMILY, {"size": (14, 14), "channels": (128, 128), "groups": 2},
        grouped.Config(32, 32, 1, 7, 14, 1, 2, 1),
        [({"in_block": 64, "out_block": 64}, "in_block 64, out_block 64; accepted with these groups: 32x64,")], [],
    ),
    (
        tf32.FAMILY, {}, tf32.Config(3, 3, 1, 64, 1, 8, 32, 4, 4),
        [
            ({"taps_h": 2}, "taps_h 2; accepted: 3, 1"),
            ({"taps_w": 4}, "taps_w 4; accepted: 1 to 3"),
            ({"taps_w": 3, "blocks": 2}, "taps_w 3 and blocks 2; accepted: products of 1 to 4"),
            ({"tile_n": 48}, "tile_n 48; accepted: 32, 64"),
            ({"tile_n": 96}, "tile_n 96 and 3 filter rows make 144 sums a thread; accepted with 3 warpgroups: at most"),
            ({"stages": 1}, "stages 1; accepted: 2 to 8"),
            ({"stages": 8, "tile_q": 64}, "bytes of shared memory; accepted: at most 231424"),
            ({"tile_q": 28}, "images 1 and tile_q 28; accepted: multiples of 4 columns or at least 7, products that"),
            ({"tile_q": 6, "images": 4}, "images 4 and tile_q 6; accepted: multiples of 4 columns or at least 7"),
            ({"tile_q": 68, "images": 2}, "images 2 and tile_q 68; accepted"),
            ({"tile_p": 0}, "tile_p 0; accepted: 1 to "),
            ({"tile_p": 2**31}, "tile_p 2147483648; accepted: 1 to "),
            ({"splits": 9}, "splits 9; accepted for 8 strips: 1 to 8"),
            ({"splits": 5}, "splits 5 leaves some of 8 strips' splits empty; use 4"),
        ],
        [],
    ),
    (
        # Beside the largest dynamic shared memory, little more than a KiB is left for barriers.
        tf32.FAMILY, {"size": (108, 24), "channels": (32, 32), "rhs_dilation": (27, 1), "padding": ((0, 0), (1, 1))},
        tf32.Config(1, 2, 1, 32, 1, 6, 24, 2, 1),
        [({"taps_h": 3, "stages": 6},
          "filter rows that reach over 54 input rows take 1040 bytes of barriers; accepted: at most 1024")],
        [],
    ),
    (
        halo.FAMILY, {}, halo.Config(8, 32, 2),
        [
            ({"tile_q": 12}, "tile_q 12; accepted: divisors of 32 in multiples of 8"),
            ({"tile_q": 24}, "tile_q 24; accepted: divisors of 32"),
            ({"tile_p": 0}, "tile_p 0 of 16 rows"),
            ({"tile_q": 8, "tile_p": 3}, "tile_p 3 of 16 rows; accepted with tile_q 8: even numbers"),
            ({"tile_p": 63}, "65 rows; accepted: at most 64"),
            ({"tile_p": 40}, "bytes of shared memory; accepted: at most 231424"),
            ({"splits": 9}, "splits 9; accepted for 8 strips: 1 to 8"),
            ({"splits": 0}, "splits 0; accepted for 8 strips: 1 to 8"),
            ({"splits": 5}, "splits 5 leaves some of 8 strips' splits empty; use 4"),
        ],
        [],
    ),
    (
        gather.FAMILY, {"channels": (72, 64)}, gather.Config(2, 1, 64, 1, 8, 8, 72, 3, 4),  # 2 x 2 x 2 tiles of 64
        [
            ({"consumers": 0}, "consumers 0; accepted: 1 to 4"),
            ({"consumers": 5}, "consumers 5; accepted: 1 to 4"),
            ({"blocks": 0}, "blocks 0; accepted: 1 to 4"),
            ({"blocks": 5}, "blocks 5; accepted: 1 to 4"),
            ({"tile_n": 80}, "tile_n 80; accepted: 8, 16, 32, 64, 96, 128, 192, 256"),
            ({"stages": 1}, "stages 1; accepted: 2 to 4"),
            ({"stages": 5}, "stages 5; accepted: 2 to 4"),
            ({"images": 0}, "images 0, tile_p 8 and tile_q 8; accepted: products of 32 to 256"),
            ({"tile_p": 3}, "images 1, tile_p 3 and tile_q 8; accepted: products of 32 to 256"),
            ({"tile_p": 2}, "images 1, tile_p 2 and tile_q 8; accepted: products of 32 to 256"),
            ({"tile_q": 64}, "images 1, tile_p 8 and tile_q 64; accepted: products of 32 to 256"),
            ({"tile_q": 12}, "images 1, tile_p 8 and tile_q 12; accepted: eights of pixels"),
            ({"images": 16, "tile_p": 3, "tile_q": 4}, "images 16, tile_p 3 and tile_q 4; accepted: eights of pixels"),
            ({"blocks": 4, "tile_n": 128}, "4 blocks by tile_n 128 take about"),
            ({"slice": 20}, "slice 20; accepted for 72 channels: 72, 40, 24, 16, 8"),
            ({"tile_q": 32, "stages": 4}, "stages 4 take"),
            ({"splits": 0}, "splits 0; accepted for 8 tiles of pixels: 1 to 8"),
            ({"splits": 9}, "splits 9; accepted for 8 tiles of pixels: 1 to 8"),
            ({"splits": 5}, "splits 5 leaves some of 8 tiles of pixels' splits empty; use 4"),
        ],
        [],
    ),
    (
        im2col.FAMILY, {}, im2col.Config(128, 128, 6, False, 5),  # 288 pixels: 5 blocks
        [
            ({"tile_m": 64, "tile_n": 320}, "tile 64x320; accepted: 64x64, "),
            ({"tile_m": 256, "tile_n": 256}, "tile 256x256; accepted: 64x64, "),
            ({"stages": 1}, "stages 1; accepted with this tile: 2 to 7"),
            ({"stages": 8}, "stages 8; accepted with this tile: 2 to 7"),
            ({"swap": 1}, "swap 1; accepted: True or False"),
            ({"splits": 0}, "splits 0; accepted for 5 blocks of pixels: 1 to 5"),
            ({"splits": 6}, "splits 6; accepted for 5 blocks of pixels: 1 to 5"),
            ({"splits": 4}, "splits 4 leaves some of 5 blocks of pixels' splits empty; use 3"),
            # Deeper pipelines gain nothing.
            ({"tile_m": 64, "tile_n": 64, "stages": 9}, "stages 9; accepted with this tile: 2 to 8"),
        ],
        [{"stages": 2}, {"stages": 7}, {"swap": True}, {"splits": 1}, {"splits": 2}, {"splits": 3}],
    ),
    (
        im2col.FAMILY, row(64 * 65536), im2col.Config(64, 64, 8, False, 32768),
        [({"splits": 65536}, "accepted for 65536 blocks of pixels: 1 to 65535")], [],
    ),
    (
        im2col.FAMILY, {"channels": (256, 256), "batch": 16}, im2col.Config(128, 128, 4, False, 2, whole_tiles=20),
        [
            ({"whole_tiles": 36}, "whole_tiles 36; accepted for 36 tiles: 0, or 1 to 35"),
            ({"whole_tiles": -1}, "whole_tiles -1; accepted for 36 tiles: 0, or 1 to 35"),
            ({"splits": 1}, "whole_tiles 20; accepted except with several splits of a single group: 0"),
        ],
        [{"whole_tiles": 35}],
    ),
    (
        im2col.FAMILY, row(128, (16448, 16384)), im2col.Config(64, 64, 4, False, 2, whole_tiles=257),
        [({"whole_tiles": 256}, "whole_tiles 256; accepted for 65792 tiles: 0, or 257 to 65791")], [],
    ),
    (
        depthwise_any.FAMILY, {"size": (16, 16, 40), "kernel": (3, 3, 3), "dtype": "float32"},
        depthwise_any.Config(4, 4, 8, 4, 1),
        [
            ({"columns": 5}, "columns 5; accepted: 1, 2, 3"),
            ({"columns": 16}, "columns 16 take about 242 registers; accepted: up to 224"),
            ({"columns": 12, "warps": 12}, "columns 12 take about 202 registers; accepted: up to 168"),
            ({"splits": 81}, "splits 81; accepted for 80 rounds of strips: 1 to 80"),
        ],
        [{"splits": 80}, {"splits": 79}, {"columns": 12}],
    ),
    (
        depthwise_any.FAMILY, {"size": (9, 3)}, depthwise_any.Config(3, 4, 8, 4, 1),
        [({"columns": 4}, "columns 4; accepted: at most the output's 3")], [],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields", "config", "refused", "legal"), LIMITS, ids=[f"{f.name}-{fields}" for f, fields, *_ in LIMITS]
)
def test_limits_of_configs(
    family: Family, fields: Fields, config: Any, refused: list[tuple[Fields, str]], legal: list[Fields]
) -> None:
    p = problem(family, **fields)
    for changes in ({}, *legal):
        assert family.refusal(p, dataclasses.replace(config, **changes)) is None, changes
    for changes, reason in refused:
        assert reason in str(family.refusal(p, dataclasses.replace(config, **changes))), changes


@pytest.mark.parametrize("name", TILED)
def test_the_next_extents_are_refused(name: str) -> None:
    edge = TILED[name]
    p, beyond = edge.problem(edge.last), edge.problem(edge.last + 1)
    assert edge.family.refusal(p, edge.config, DEFAULT_CUDA) is None
    # If no config serves the next value, the refusal says so; else it names this reason.
    reasons = (edge.family.problem_refusal(beyond), edge.family.config_refusal(beyond, edge.config))
    assert any(edge.reason in str(reason) for reason in reasons)
