"""The passes of a convolution as those of another one, whose lhs is this one's g.

With unit strides the gradient of the input is a forward convolution of g with a mirrored weight. Strides of the one are
`lhs_dilation` of the other: a transposed convolution is the gradient of an input. The gradient of its weight is that of
a convolution with strides, mirrored.
"""

import dataclasses
from typing import Any

from jax_splitk.problems.conv_wgrad import ConvProblem, dilated
from jax_splitk.runtime import _compat


class ConvFpropProblem(ConvProblem):
    """A convolution's output g, from lhs and rhs."""

    op = "conv_fprop"
    operands = ("lhs", "rhs")
    result = "g"


class ConvDgradProblem(ConvProblem):
    """The gradient of a convolution's input: lhs's cotangent, from g and rhs."""

    op = "conv_dgrad"
    operands = ("g", "rhs")
    result = "lhs"


PASSES: tuple[type[ConvProblem], ...] = (ConvFpropProblem, ConvDgradProblem)

# Fields that change places where lhs and g do.
_OTHER_WAY = (("input_spatial", "output_spatial"), ("in_channels", "out_channels"), ("window_strides", "lhs_dilation"))


def canonical(problem: Any) -> Any:
    """A problem of any pass with at least one spatial dimension, batch groups as feature groups, a single tap not
    dilated, and what dilates its lhs without a stride as a pass of the other convolution."""
    if problem.rank == 0:
        windows = dict.fromkeys(("window_strides", "lhs_dilation", "rhs_dilation"), (1,))
        pixels = dict.fromkeys(("input_spatial", "output_spatial", "kernel_spatial"), (1,))
        problem = dataclasses.replace(problem, padding=((0, 0),), **windows, **pixels)
    taps = zip(problem.kernel_spatial, problem.rhs_dilation, strict=True)
    problem = dataclasses.replace(problem, rhs_dilation=tuple(1 if n == 1 else dilation for n, dilation in taps))
    groups = problem.batch_group_count
    if groups > 1:
        batch, channels = problem.batch // groups, problem.in_channels * groups
        problem = dataclasses.replace(
            problem, batch=batch, in_channels=channels, feature_group_count=groups, batch_group_count=1
        )
    known = _compat.is_known(*problem.input_spatial, *problem.output_spatial)  # else it is XLA's
    return other_way(problem) if is_transposed(problem) and known else problem


def is_transposed(of: Any) -> bool:
    """Whether a problem, or the parameters of a convolution, are of one that dilates its lhs without a stride."""
    return set(of.lhs_dilation) != {1} and set(of.window_strides) == {1}


def other_way(problem: ConvProblem) -> ConvProblem:
    """The same sums as a pass of another convolution, whose weight is `mirrored`: what was its lhs is its g. Forward
    pass and input gradient change places."""
    fprop, dgrad = PASSES
    other = {fprop: dgrad, dgrad: fprop}
    base = dilated(problem.output_spatial, problem.window_strides)
    window = dilated(problem.kernel_spatial, problem.rhs_dilation)
    sizes = zip(problem.input_spatial, problem.lhs_dilation, problem.padding, base, window, strict=True)
    # From the first tap to the last they change places; the high side is what gives the size.
    pairs = tuple(
        (taps - 1 - low, (size - 1) * dilation + 1 - count + low) for size, dilation, (low, _), count, taps in sizes
    )
    fields: dict[str, Any] = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    swapped = {a: fields[b] for pair in _OTHER_WAY for a, b in (pair, pair[::-1])}
    kind = type(problem)
    return other.get(kind, kind)(**{**fields, **swapped, "padding": pairs})
