"""What families of forward passes and input gradients share: either is the forward pass of some convolution, with
strides or with a dilated input."""

import functools

from jax_splitk.kernels.wgrad.geometry import Geometry, axis_macros
from jax_splitk.problems.conv_passes import ConvFpropProblem, other_way
from jax_splitk.problems.conv_wgrad import ConvProblem


@functools.lru_cache(maxsize=4096)
def forward(problem: ConvProblem) -> ConvProblem:
    """As a forward pass: `stride` and `lhs_dilation` are DOWN and UP of device code. Of an input gradient the weight
    is mirrored."""
    return problem if isinstance(problem, ConvFpropProblem) else other_way(problem)


def steps_refusal(g: Geometry, most: int) -> str | None:
    """Why strides are not served, of the output or of the input, of which only one may be above 1 along an axis."""
    for steps in zip(g.stride, g.lhs_dilation, strict=True):
        if min(steps) > 1 or max(steps) > most:
            return f"stride {steps[0]} of an input dilated by {steps[1]}; accepted: one of them 1, 1 to {most}"
    return None


def output_blocks(g: Geometry, axis: int) -> tuple[int, int, int]:
    """BASE, OFFSET and how many blocks of UP rows (or columns) reach the output."""
    up = g.lhs_dilation[axis]
    offset = g.pad[axis] - g.reach[axis] if up > 1 else 0
    base = -offset // up
    return base, offset, -(-(g.out[axis] - base * up - offset) // up)


def geometry_macros(g: Geometry) -> dict[str, int]:
    """Sizes, filter and steps along each axis."""
    return axis_macros(
        INPUT=g.size,
        OUTPUT=g.out,
        KERNEL=g.kernel,
        DOWN=g.stride,
        UP=g.lhs_dilation,
        DILATION=g.dilation,
        PAD=g.pad,
    )
