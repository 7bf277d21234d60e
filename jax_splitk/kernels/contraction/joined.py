"""Neighbouring pixels of an image's row as one pixel with more channels, where that changes nothing but the view.

A window that begins at a multiple of some pixels, and has a multiple of them, is a smaller window over pixels that are
so much wider. Few channels then make longer rows of shared memory, with fewer zeros: 8 x 8 taps of 4 channels at stride
4 become 8 x 2 taps of 16 channels.
"""

import dataclasses
import functools
import math

from jax import numpy as jnp

from jax_splitk.kernels.base.passes import forward
from jax_splitk.kernels.device.wgmma_tile import ROW_BYTES, lines_of_row
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem

UNIT = 16  # bytes: what TMA loads, in units
_LEAST_ROW = 32  # bytes of an instruction's k
_LINE = 64  # bytes of shared memory that take as long as a line that TMA loads


@functools.lru_cache(maxsize=4096)
def joined(problem: ConvProblem) -> ConvProblem:
    """The problem as a forward pass, with pixels joined. Only float32 has them: in 16 bits the family gather serves few
    channels."""
    p = forward(problem)
    if not (isinstance(problem, ConvFpropProblem) and p.dtype == "float32" and p.rank > 0):
        return p
    if (p.feature_group_count, p.batch_group_count, p.lhs_dilation[-1], p.rhs_dilation[-1]) != (1, 1, 1, 1):
        return p
    size, kernel, stride = p.input_spatial[-1], p.kernel_spatial[-1], p.window_strides[-1]
    most = math.gcd(size, kernel, stride, p.padding[-1][0])
    pixel = p.in_channels * jnp.dtype(p.dtype).itemsize
    legal = [count for count in range(most, 0, -1) if most % count == 0 and count * pixel % UNIT == 0]
    if not legal:
        return p
    by = min(legal, key=lambda count: kernel // count * _cost(count * pixel))
    low, out = p.padding[-1][0] // by, p.output_spatial[-1]
    high = (out - 1) * (stride // by) + kernel // by - size // by - low
    return dataclasses.replace(
        p,
        input_spatial=(*p.input_spatial[:-1], size // by),
        kernel_spatial=(*p.kernel_spatial[:-1], kernel // by),
        window_strides=(*p.window_strides[:-1], stride // by),
        padding=(*p.padding[:-1], (low, high)),
        in_channels=p.in_channels * by,
    )


def _cost(size: int) -> float:
    """The cost of a pixel of `size` bytes at one tap: the lines that TMA loads, and the rows of shared memory."""
    row = min(ROW_BYTES, -(-size // _LEAST_ROW) * _LEAST_ROW)
    rows = -(-size // row)
    return rows * (lines_of_row(size) + row / _LINE)
