"""Grouped and depthwise convolutions of every geometry that their families take: usual ones, and small odd ones."""

import dataclasses
import itertools
from typing import Any

from benchmarks.cases import VALID, Case, Pairs
from tests.problems import conv

NETWORKS = (
    Case("convnext_56", 64, 56, 56, 96, 96, (7, 7), groups=96),
    Case("convnext_28", 64, 28, 28, 192, 192, (7, 7), groups=192),
    Case("convnext_14", 64, 14, 14, 384, 384, (7, 7), groups=384),
    Case("convnext_7", 64, 7, 7, 768, 768, (7, 7), groups=768),
    Case("mobilenet_112", 64, 112, 112, 32, 32, (3, 3), groups=32),
    Case("mobilenet_112s2", 64, 112, 112, 96, 96, (3, 3), (2, 2), groups=96),
    Case("mobilenet_28", 64, 28, 28, 192, 192, (3, 3), groups=192),
    Case("efficientnet_28s2", 64, 28, 28, 240, 240, (5, 5), (2, 2), groups=240),
    Case("efficientnet_14", 64, 14, 14, 672, 672, (5, 5), groups=672),
)


def _odd(
    name: str,
    size: tuple[int, int],
    kernel: tuple[int, int],
    *,
    batch: int = 3,
    channels: int = 16,
    multiplier: int = 1,
    stride: tuple[int, int] = (1, 1),
    padding: Pairs | None = None,
    dilation: tuple[int, int] = (1, 1),
) -> Case:
    out_channels = channels * multiplier
    return Case(
        name, batch, *size, channels, out_channels, kernel, stride, channels, padding=padding, dilation=dilation
    )


DEPTHWISE = (
    _odd("plain", (12, 12), (3, 3)),
    _odd("one_pixel", (1, 1), (1, 1), batch=1),
    _odd("pixels", (1, 1), (1, 1), batch=37, channels=24),
    _odd("one_image", (17, 56), (7, 7), batch=1, channels=8),
    _odd("valid", (11, 19), (5, 3), padding=((0, 0), (0, 0))),
    _odd("one_output", (7, 7), (7, 7), padding=((0, 0), (0, 0))),
    _odd("asymmetric", (9, 13), (4, 6), padding=((0, 3), (5, 0))),
    _odd("wide_padding", (5, 6), (3, 5), padding=((9, 11), (7, 30))),
    _odd("negative_padding", (14, 21), (3, 3), padding=((-2, 1), (1, -3))),
    _odd("tiles", (6, 100), (3, 7), channels=8),
    _odd("two_tiles", (6, 65), (3, 3), channels=40),
    _odd("tall", (130, 5), (7, 3), channels=8),
    _odd("one_row_taps", (5, 40), (1, 5)),
    _odd("one_column_taps", (23, 9), (9, 1)),
    _odd("stride2", (12, 12), (3, 3), stride=(2, 2), padding=((0, 1), (0, 1))),
    _odd("stride2_odd", (13, 15), (5, 5), stride=(2, 2), channels=24),
    _odd("stride_3x1", (17, 14), (7, 3), stride=(3, 1)),
    _odd("stride8", (33, 150), (9, 9), stride=(8, 8), channels=8),
    _odd("stride_beyond_kernel", (16, 16), (2, 2), stride=(4, 5), padding=((0, 0), (0, 0))),
    _odd("dilation2", (15, 30), (7, 7), dilation=(2, 2)),
    _odd("dilation_3x6", (30, 40), (3, 4), dilation=(3, 6)),
    _odd("dilation_3_of_7", (10, 40), (3, 7), dilation=(1, 3)),
    _odd("dilation_3_of_5", (9, 30), (3, 5), dilation=(2, 3)),
    _odd("dilation_3_stride2", (9, 41), (3, 7), stride=(1, 2), dilation=(1, 3)),
    _odd("dilation_stride", (25, 31), (5, 5), dilation=(2, 4), stride=(4, 2)),
    _odd("11x11", (23, 25), (11, 11), channels=8),
    _odd("31x13", (40, 20), (31, 13), batch=1, channels=8),
    _odd("kernel_beyond_image", (5, 5), (9, 9), batch=9),
    _odd("multiplier2", (12, 20), (3, 3), channels=24, multiplier=2),
    _odd("multiplier3", (12, 20), (5, 5), channels=8, multiplier=3),
    _odd("batch_below_images", (14, 14), (7, 7), batch=1, channels=32),
    _odd("seven", (7, 7), (7, 7), batch=6, channels=48),
    # Rows of one segment, with zeros beside them in all kinds of places.
    _odd("seven_stride3x1", (19, 7), (7, 7), batch=5, stride=(3, 1), channels=24),
    _odd("fourteen_stride2x1", (15, 14), (3, 7), batch=5, stride=(2, 1), channels=40),
    _odd("fourteen_stride1x2", (9, 14), (3, 5), stride=(1, 2)),
    _odd("zeros_left", (6, 13), (3, 7), padding=((1, 1), (6, 0))),
    _odd("zeros_right", (6, 14), (3, 7), padding=((1, 1), (0, 6))),
    _odd("even_zeros", (9, 7), (3, 5), batch=5, channels=32),
    _odd("one_zero", (9, 7), (3, 3), batch=5, channels=32),
    _odd("zeros_dilated", (9, 11), (3, 4), dilation=(1, 3), padding=((1, 1), (5, 4))),
    _odd("few_columns", (9, 2), (3, 9), padding=((1, 1), (8, 4)), channels=8),
)


SEQUENCES = (
    conv((40,), (4,), (8, 8), batch=9, padding=((3, 0),), groups=8),
    conv((300,), (4,), (24, 24), padding=((3, 0),), groups=24),
    conv((61,), (5,), (16, 16), batch=3, padding=2, stride=2, groups=16),
    conv((61,), (3,), (16, 16), batch=3, padding=((4, 0),), rhs_dilation=2, groups=16),
)

# Filters that are wrapped into rows of 8 taps.
LONG_SEQUENCES = (
    conv((61,), (31,), (16, 16), batch=5, padding=15, groups=16),
    conv((200,), (64,), (8, 8), batch=9, padding=((63, 0),), groups=8),
    conv((90,), (10,), (24, 24), padding=((-3, 2),), groups=24),
    conv((300,), (95,), (8, 24), batch=3, padding=47, groups=8),  # two blocks of taps, three channels for each input
    conv((5, 33), (1, 11), (16, 16), batch=3, padding=((0, 0), (5, 5)), groups=16),
    conv((7,), (20,), (16, 16), batch=2, padding=((19, 30),), groups=16),
)


def grouped_case(size: tuple[int, int], per_group: tuple[int, int], groups: int, **changes: Any) -> Case:
    base = Case("grouped", 2, *size, per_group[0] * groups, per_group[1] * groups, (3, 3), groups=groups)
    return dataclasses.replace(base, **changes)


# Every pairing of channels, odd windows, and sizes that leave tails everywhere.
GROUPED: dict[str, Case] = {
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
    "valid": grouped_case((12, 12), (8, 8), 4, padding=VALID),
    "asymmetric": grouped_case((12, 9), (8, 8), 4, padding=((0, 2), (3, 1))),
    "negative_padding": grouped_case((12, 12), (8, 8), 4, padding=((-1, 1), (1, -2))),
    "wide_padding": grouped_case((6, 6), (8, 8), 4, padding=((4, 3), (5, 6))),
    "stride2": grouped_case((13, 15), (4, 4), 8, stride=(2, 2)),
    "stride2_16": grouped_case((14, 14), (16, 16), 4, stride=(2, 2)),
    "stride_2x1": grouped_case((12, 12), (8, 8), 4, stride=(2, 1)),
    "stride_1x2": grouped_case((12, 12), (8, 8), 4, stride=(1, 2)),
    "stride3": grouped_case((17, 14), (8, 8), 4, stride=(3, 3)),
    "stride_beyond_kernel": grouped_case((16, 16), (8, 8), 4, kernel=(2, 2), stride=(4, 4), padding=VALID),
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
