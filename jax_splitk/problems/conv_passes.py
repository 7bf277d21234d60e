"""Each pass of a convolution as a pass of the transposed convolution, whose lhs is this one's g.

With unit strides the gradient of the input is a forward convolution of g with a mirrored weight. Strides of the one
convolution are `lhs_dilation` of the other. So what is called a transposed convolution is the gradient of an input, and
the gradient of its weight is that of a convolution with strides, mirrored.
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

_WINDOW = ("window_strides", "lhs_dilation", "rhs_dilation")
_SIZES = ("input_spatial", "output_spatial", "kernel_spatial")

# Fields that change places where lhs and g do.
_OTHER_WAY = (("input_spatial", "output_spatial"), ("in_channels", "out_channels"), ("window_strides", "lhs_dilation"))


def canonical(problem: Any) -> Any:
    """The problem in the form that kernels know.

    It has at least one spatial dimension, feature groups in place of batch groups, and no dilation of a single tap.
    A pass that dilates lhs and has no strides becomes a pass of the transposed convolution.
    """
    changed: dict[str, Any] = {}
    if problem.rank == 0:
        changed = dict.fromkeys((*_WINDOW, *_SIZES), (1,)) | {"padding": ((0, 0),)}
    elif 1 in problem.kernel_spatial and set(problem.rhs_dilation) != {1}:
        taps = zip(problem.kernel_spatial, problem.rhs_dilation, strict=True)
        changed = {"rhs_dilation": tuple(1 if n == 1 else dilation for n, dilation in taps)}
    if (groups := problem.batch_group_count) > 1:
        changed |= {"batch": problem.batch // groups, "in_channels": problem.in_channels * groups}
        changed |= {"feature_group_count": groups, "batch_group_count": 1}
    problem = dataclasses.replace(problem, **changed) if changed else problem
    known = _compat.is_known(*problem.input_spatial, *problem.output_spatial)  # else it is XLA's
    return transposed(problem) if is_transposed(problem) and known else problem


def is_transposed(of: Any) -> bool:
    """Whether a problem, or a convolution's parameters, dilate lhs and have no strides."""
    return set(of.lhs_dilation) != {1} and set(of.window_strides) == {1}


def transposed(problem: ConvProblem) -> ConvProblem:
    """The same sums as a pass of the transposed convolution: lhs and g change places, the weight is `mirrored`, and the
    forward pass becomes the input gradient and the other way round."""
    fprop, dgrad = PASSES
    other = {fprop: dgrad, dgrad: fprop}
    base = dilated(problem.output_spatial, problem.window_strides)
    window = dilated(problem.kernel_spatial, problem.rhs_dilation)
    sizes = zip(problem.input_spatial, problem.lhs_dilation, problem.padding, base, window, strict=True)
    # Padding is counted from the last tap in place of the first; the high side follows from the size.
    pairs = tuple(
        (taps - 1 - low, (size - 1) * dilation + 1 - count + low) for size, dilation, (low, _), count, taps in sizes
    )
    fields: dict[str, Any] = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    swapped = {a: fields[b] for pair in _OTHER_WAY for a, b in (pair, pair[::-1])}
    kind = type(problem)
    return other.get(kind, kind)(**{**fields, **swapped, "padding": pairs})
