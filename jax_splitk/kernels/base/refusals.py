"""Problems that several families of weight gradients cannot serve.

Each function returns the reason or None, so that `or` between them gives the first reason.
"""

import math
from collections.abc import Callable, Sequence

from jax import numpy as jnp

from jax_splitk.kernels.base.geometry import Geometry, geometry
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem

INT32_MAX = 2**31 - 1
MAX_WEIGHTS = INT32_MAX - 1024  # the reduction's last thread block reaches beyond them
HALVES = ("bfloat16", "float16")


def tf32(p: ConvProblem) -> str | None:
    """Checks that tf32 is precise enough for the products of float32."""
    if p.dtype == "float32" and "highest" in p.precision:
        return f"precision {p.precision!r}; accepted: 'default', 'high'"
    return None


def rank(p: ConvProblem, accepted: Sequence[int]) -> str | None:
    if p.rank in accepted:
        return None
    return f"{p.rank} spatial dimensions; accepted: {', '.join(map(str, accepted))}"


def dtypes(p: ConvProblem, accepted: Sequence[str]) -> str | None:
    """Checks the dtypes of the inputs and of the result."""
    if p.dtype not in accepted:
        return f"dtype {p.dtype}; accepted: {', '.join(accepted)}"
    if p.out_dtype not in OUT_CODES:
        return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(OUT_CODES)}"
    return None


def groups(p: ConvProblem) -> str | None:
    if p.feature_group_count == p.batch_group_count == 1:
        return None
    return f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}; accepted: 1"


def batch_groups(p: ConvProblem) -> str | None:
    return None if p.batch_group_count == 1 else f"batch_group_count {p.batch_group_count}; accepted: 1"


def depthwise_groups(p: ConvProblem) -> str | None:
    if 1 < p.feature_group_count == p.in_channels and p.batch_group_count == 1:
        return None
    groups = f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}"
    return f"{groups}; accepted: {p.in_channels} (the input channels, at least 2), 1"


def channels(p: ConvWgradProblem, multiple: int) -> str | None:
    if p.in_channels % multiple == p.out_channels % multiple == 0:
        return None
    return f"{p.in_channels} input and {p.out_channels} output channels; accepted: multiples of {multiple}"


def lhs_dilation(p: ConvProblem) -> str | None:
    return f"lhs_dilation {p.lhs_dilation}; accepted: 1" if any(d != 1 for d in p.lhs_dilation) else None


def operands(
    p: ConvWgradProblem,
    ranks: Sequence[int],
    groups: Callable[[ConvWgradProblem], str | None],
    accepted: Sequence[str] = HALVES,
) -> str | None:
    """Checks for kernels that load a pixel's channels in units of 16 bytes, apart from sizes."""
    reason = dtypes(p, accepted) or rank(p, ranks) or groups(p)
    return reason or channels(p, 16 // jnp.dtype(p.dtype).itemsize) or lhs_dilation(p)


def input_pixels(p: ConvWgradProblem) -> str | None:
    if 0 not in p.input_spatial:
        return None
    return f"input of {p.input_spatial} pixels; accepted: at least 1 in each dimension"


def output_pixels(p: ConvWgradProblem, most: int = INT32_MAX) -> str | None:
    return None if 0 < p.reduction_size <= most else f"{p.reduction_size} output pixels; accepted: 1 to {most}"


def empty_dimensions(p: ConvProblem) -> str | None:
    if 0 not in (p.batch, *p.output_spatial, *p.input_spatial):
        return None
    return f"batch {p.batch}, input {p.input_spatial}, output {p.output_spatial}; accepted: no empty dimension"


def padded_input(p: ConvWgradProblem, beyond: int) -> str | None:
    """Checks that coordinates up to `beyond` pixels past the end of the output are 32-bit integers."""
    return coordinates(geometry(p, p.rank), p.rank, beyond)


def coordinates(g: Geometry, rank: int, beyond: int, row: int | None = None) -> str | None:
    """Like `padded_input`, for a problem with `rank` dimensions. Coordinates of the last dimension count elements,
    `row` for each pixel."""
    last = len(g.out) - 1
    for axis, (out, stride) in enumerate(zip(g.out, g.stride, strict=True)):
        span = abs(g.pad[axis]) + (out + beyond) * stride + g.kernel[axis] * g.dilation[axis]
        span *= (row or 1) if axis == last else 1
        if span > INT32_MAX:
            unit, where = "elements" if row else "pixels", f"in spatial dimension {axis - last - 1 + rank}"
            return f"padded input of up to {span} {unit} {where}; accepted: at most {INT32_MAX}"
    return None


def gathered(p: ConvWgradProblem, g: Geometry, beyond: int) -> str | None:
    """Checks for kernels whose tiles may reach up to `beyond` pixels beyond the output of `g` in each dimension."""
    pixels = p.batch * math.prod(p.input_spatial)
    return (
        input_pixels(p)
        or (f"{pixels} input pixels; accepted: at most {INT32_MAX}" if pixels > INT32_MAX else None)
        or output_pixels(p, INT32_MAX - beyond**2)
        or weights(p)
        or coordinates(g, p.rank, beyond, row=p.in_channels)
    )


def weights(p: ConvWgradProblem) -> str | None:
    count = math.prod(p.out_shape)
    return None if 0 < count <= MAX_WEIGHTS else f"{count} weights; accepted: 1 to {MAX_WEIGHTS}"
