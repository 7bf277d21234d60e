"""Passes of convolutions that a traced function leaves to lax: its convolutions, and what lax's transpose rules made of
them. Each is one equation.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jax import lax
from jax import numpy as jnp
from jax.extend import core

from jax_splitk.ops.convolution import Convolution, of_equation
from jax_splitk.problems.conv_passes import ConvFpropProblem, canonical, transposed
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, Pairs, dilated
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat


@dataclasses.dataclass(frozen=True)
class _Equation:
    """A convolution of lax.

    Attributes:
      conv: its parameters.
      lhs, rhs, out: shapes, in the order of the dimension numbers.
      dtype, out_dtype: those of lhs and of the result.
    """

    conv: Convolution
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    dtype: str
    out_dtype: str

    @functools.cached_property
    def window(self) -> "_Window":
        """How the window of the forward convolution moves, if the equation is a forward convolution."""
        conv = self.conv
        sizes = (self.lhs[2:], self.rhs[2:], self.out[2:])
        return (*sizes, conv.window_strides, conv.lhs_dilation, conv.rhs_dilation, _low(conv))

    def problem(self, kind: type[ConvProblem], window: "_Window", padding: Pairs, **fields: Any) -> ConvProblem:
        """The problem of a pass with this window and padding."""
        arithmetic = {"dtype": self.dtype, "out_dtype": self.out_dtype, "precision": self.conv.precision}
        return kind(padding=padding, **arithmetic, **dict(zip(_FIELDS, window, strict=False)), **fields)


# How a forward convolution's window moves: these fields of its problem, and the low sides of the padding.
_FIELDS = ("input_spatial", "kernel_spatial", "output_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
_Window = tuple[tuple[int, ...], ...]


def passes(equations: Sequence[core.JaxprEqn]) -> Iterator[Problem]:
    """The problem of each equation that computes one.

    A weight gradient contracts the batch, so the first dimension of its lhs plays the input features. Convolutions of
    arrays whose first dimension holds channels are not told apart. An input gradient's weight was reversed just before.
    If another operation came between, an input gradient without strides is taken for the forward pass that it also is.
    """
    found = [(eqn, _equation(eqn)) for eqn in equations if eqn.primitive is lax.conv_general_dilated_p]
    convolutions = [(eqn, each) for eqn, each in found if _compat.is_known(*each.lhs, *each.rhs, *each.out)]
    paddings = {each.window: each.conv.padding for _, each in convolutions}
    reversed_arrays = {id(var) for eqn in equations if eqn.primitive is lax.rev_p for var in eqn.outvars}
    for eqn, each in convolutions:
        if each.conv.dimension_numbers.lhs_spec[1] == 0:
            problem = _weight_gradient(each, paddings)
        elif id(eqn.invars[1]) in reversed_arrays:
            problem = _input_gradient(each, paddings)
        else:
            problem = _forward(each)
        problem = canonical(problem)
        try:
            problem.validate()
        except ValueError:  # of other dtypes, or another pass after all
            continue
        yield problem


def _equation(eqn: core.JaxprEqn) -> _Equation:
    avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    conv = of_equation(eqn)
    pairs = zip(avals, conv.dimension_numbers, strict=True)
    lhs, rhs, out = (tuple(aval.shape[axis] for axis in spec) for aval, spec in pairs)
    return _Equation(conv, lhs, rhs, out, jnp.dtype(avals[0].dtype).name, jnp.dtype(avals[2].dtype).name)


def _low(conv: Convolution) -> tuple[int, ...]:
    """The low sides of the padding."""
    return tuple(low for low, _ in cast(Pairs, conv.padding))


def _least_padding(window: _Window) -> Pairs:
    """The padding with the least high side that gives the output's size: the convolution may have had up to a stride
    more."""
    size, kernel, output, strides, lhs_dilation, rhs_dilation, low_padding = window
    sizes = zip(dilated(size, lhs_dilation), dilated(kernel, rhs_dilation), output, strides, low_padding, strict=True)
    return tuple((low, (out - 1) * stride + taps - n - low) for n, taps, out, stride, low in sizes)


def _forward(eqn: _Equation) -> ConvProblem:
    return eqn.problem(
        ConvFpropProblem,
        eqn.window,
        cast(Pairs, eqn.conv.padding),
        batch=eqn.lhs[0],
        in_channels=eqn.lhs[1],
        out_channels=eqn.rhs[0],
        feature_group_count=eqn.conv.feature_group_count,
        batch_group_count=eqn.conv.batch_group_count,
    )


def _input_gradient(eqn: _Equation, paddings: Mapping[_Window, Any]) -> ConvProblem:
    """The equation as the input gradient of another convolution.

    Input gradients of several paddings have the same shapes: the high side of the padding is taken from the forward
    pass in `paddings`, if it is there.
    """
    problem = transposed(_forward(eqn))
    window = (*(getattr(problem, name) for name in _FIELDS), tuple(low for low, _ in problem.padding))
    return dataclasses.replace(problem, padding=paddings.get(window, problem.padding))


def _weight_gradient(eqn: _Equation, paddings: Mapping[_Window, Any]) -> ConvProblem:
    """The equation as a weight gradient: the first two dimensions of each of its arrays have changed places, and so
    have strides and the window's dilation, and feature groups and batch groups. The high padding is that of the forward
    convolution."""
    conv = eqn.conv
    moves = (conv.rhs_dilation, conv.lhs_dilation, conv.window_strides)
    window = (eqn.lhs[2:], eqn.out[2:], eqn.rhs[2:], *moves, _low(conv))
    return eqn.problem(
        ConvWgradProblem,
        window,
        paddings.get(window) or _least_padding(window),
        batch=eqn.lhs[1],
        in_channels=eqn.lhs[0],
        out_channels=eqn.rhs[0],
        feature_group_count=conv.batch_group_count,
        batch_group_count=conv.feature_group_count,
    )
