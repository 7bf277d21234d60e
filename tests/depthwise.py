"""Depthwise convolutions of every geometry that the depthwise family takes: the usual ones and small odd ones."""

import dataclasses

from benchmarks.cases import Case, Pairs
from jax_splitk.problems.conv_wgrad import ConvWgradProblem

SUITE = (
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


ODD = (
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


def sequence(
    batch: int,
    width: int,
    channels: int,
    kernel: int,
    padding: tuple[int, int],
    *,
    stride: int = 1,
    dilation: int = 1,
    dtype: str = "bfloat16",
    out_dtype: str = "float32",
) -> ConvWgradProblem:
    """One spatial dimension."""
    out = (width + sum(padding) - (kernel - 1) * dilation - 1) // stride + 1
    return ConvWgradProblem(
        batch, (width,), (out,), (kernel,), channels, channels, (stride,), (padding,), (1,), (dilation,), channels,
        dtype, out_dtype,
    )  # fmt: skip


SEQUENCES = (
    sequence(9, 40, 8, 4, (3, 0)),
    sequence(2, 300, 24, 4, (3, 0)),
    sequence(3, 61, 16, 5, (2, 2), stride=2),
    sequence(3, 61, 16, 3, (4, 0), dilation=2),
)


def folded(p: ConvWgradProblem) -> ConvWgradProblem:
    """A sequence as images of one row."""
    return dataclasses.replace(
        p,
        input_spatial=(1, *p.input_spatial),
        output_spatial=(1, *p.output_spatial),
        kernel_spatial=(1, *p.kernel_spatial),
        window_strides=(1, *p.window_strides),
        padding=((0, 0), *p.padding),
        lhs_dilation=(1, 1),
        rhs_dilation=(1, *p.rhs_dilation),
    )
