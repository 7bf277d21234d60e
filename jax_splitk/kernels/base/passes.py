"""Shared by families of forward passes and input gradients. Both are forward passes of some convolution, with strides
or with a dilated input."""

import functools
from typing import Any, TypeVar

from jax_splitk.kernels.base.family import Family
from jax_splitk.kernels.base.geometry import Geometry, axis_macros
from jax_splitk.problems.conv_passes import ConvFpropProblem, transposed
from jax_splitk.problems.conv_wgrad import ConvProblem

MAX_SIZE = 2**24 - 1

_Family = TypeVar("_Family", bound=Family[Any, Any])


def of_both_passes(family: type[_Family], name: str, config: type[Any]) -> tuple[_Family, _Family]:
    """The families of forward passes and of input gradients, with this Config."""
    return family(config, name=f"fprop_{name}"), family(config, name=f"dgrad_{name}")


@functools.lru_cache(maxsize=4096)
def forward(problem: ConvProblem) -> ConvProblem:
    """The problem as a forward pass: `stride` and `lhs_dilation` are DOWN and UP of device code. The weight of an input
    gradient is mirrored."""
    return problem if isinstance(problem, ConvFpropProblem) else transposed(problem)


def steps_refusal(g: Geometry, most: int) -> str | None:
    """Why the strides are not served. Along an axis only one of two steps may be above 1: the window's stride, or the
    dilation of the input."""
    for steps in zip(g.stride, g.lhs_dilation, strict=True):
        if min(steps) > 1 or max(steps) > most:
            return f"stride {steps[0]} of an input dilated by {steps[1]}; accepted: one of them 1, 1 to {most}"
    return None


def depthwise_refusal(p: ConvProblem, multiplier: bool = False) -> str | None:
    """Why a problem is not depthwise: with one output channel for each input channel, or also with more of them."""
    groups = p.feature_group_count
    if p.batch_group_count == 1 and groups == p.in_channels and (multiplier or groups == p.out_channels):
        return None
    given = f"{p.in_channels} input and {p.out_channels} output channels in {groups} groups"
    return f"{given}; accepted: as many groups as input{'' if multiplier else ' and as output'} channels"


def sizes_refusal(p: ConvProblem, g: Geometry) -> str | None:
    """Why sizes are not served: coordinates and their distances are 32-bit integers."""
    sizes = (*p.lhs_shape, *p.g_shape)
    if 0 not in sizes and max(*sizes, *map(abs, g.pad), *g.reach) <= MAX_SIZE:
        return None
    return f"lhs {p.lhs_shape}, g {p.g_shape}, padding {p.padding}; accepted: sizes of 1 to {MAX_SIZE}"


def output_blocks(g: Geometry, axis: int) -> tuple[int, int, int]:
    """The macros BASE and OFFSET of an axis, and the number of blocks of UP rows (or columns) that have any of the
    output's."""
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
