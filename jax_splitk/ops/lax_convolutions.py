"""Passes of convolutions that a traced function leaves to lax: its convolutions, and what lax's transpose rules made of
them. Each is one equation.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.extend import core

from jax_splitk.problems.conv_passes import ConvFpropProblem, canonical, other_way
from jax_splitk.problems.conv_reference import precision_name
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, Pairs, dilated
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat


def passes(equations: Sequence[core.JaxprEqn]) -> Iterator[Problem]:
    """The problem of each equation that computes one.

    A weight gradient contracts the batch, so the first dimension of its lhs plays the input features. Convolutions of
    arrays whose first dimension holds channels are not told apart. An input gradient's weight was reversed just before.
    Where something came between, one without strides is taken for the forward pass that it also is.
    """
    convolutions = [eqn for eqn in equations if eqn.primitive is lax.conv_general_dilated_p]
    convolutions = [eqn for eqn in convolutions if _compat.is_known(*(n for shape in _shapes(eqn) for n in shape))]
    paddings = {_forward_window(eqn): eqn.params["padding"] for eqn in convolutions}
    reversed_arrays = {id(var) for eqn in equations if eqn.primitive is lax.rev_p for var in eqn.outvars}
    for eqn in convolutions:
        if eqn.params["dimension_numbers"].lhs_spec[1] == 0:
            problem = _weight_gradient(eqn, paddings)
        elif id(eqn.invars[1]) in reversed_arrays:
            problem = _input_gradient(eqn, paddings)
        else:
            problem = _forward(eqn)
        problem = canonical(problem)
        try:
            problem.validate()
        except ValueError:  # of other dtypes, or another pass after all
            continue
        yield problem


# How a forward convolution's window moves: these fields of its problem, and the low sides of the padding.
_FIELDS = ("input_spatial", "kernel_spatial", "output_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
_Window = tuple[tuple[int, ...], ...]


def _least_padding(window: _Window) -> Pairs:
    """With the least high side that gives the output's size: the convolution may have had up to a stride more."""
    size, kernel, output, strides, lhs_dilation, rhs_dilation, low_padding = window
    sizes = zip(dilated(size, lhs_dilation), dilated(kernel, rhs_dilation), output, strides, low_padding, strict=True)
    return tuple((low, (out - 1) * stride + taps - n - low) for n, taps, out, stride, low in sizes)


def _shapes(eqn: core.JaxprEqn) -> list[tuple[int, ...]]:
    """Of lhs, rhs and result, each with its dimensions in the order of the dimension numbers."""
    shapes = (_aval(var).shape for var in (*eqn.invars, *eqn.outvars))
    specs = eqn.params["dimension_numbers"]
    return [tuple(shape[axis] for axis in spec) for shape, spec in zip(shapes, specs, strict=True)]


def _aval(var: Any) -> Any:
    return var.aval


def _arithmetic(eqn: core.JaxprEqn) -> dict[str, str]:
    dtype, out_dtype = (jnp.dtype(_aval(var).dtype).name for var in (eqn.invars[0], eqn.outvars[0]))
    return {"dtype": dtype, "out_dtype": out_dtype, "precision": precision_name(eqn.params["precision"])}


def _low(eqn: core.JaxprEqn) -> tuple[int, ...]:
    return tuple(low for low, _ in eqn.params["padding"])


def _forward_window(eqn: core.JaxprEqn) -> _Window:
    """Of an equation that is a forward convolution."""
    lhs, rhs, out = (shape[2:] for shape in _shapes(eqn))
    moves = (eqn.params["window_strides"], eqn.params["lhs_dilation"], eqn.params["rhs_dilation"])
    return (lhs, rhs, out, *moves, _low(eqn))


def _forward(eqn: core.JaxprEqn) -> ConvProblem:
    (batch, in_channels, *_), (out_channels, *_), _ = _shapes(eqn)
    groups = {name: eqn.params[name] for name in ("feature_group_count", "batch_group_count")}
    fields = dict(zip(_FIELDS, _forward_window(eqn), strict=False))
    return ConvFpropProblem(
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        padding=tuple((low, high) for low, high in eqn.params["padding"]),
        **_arithmetic(eqn),
        **groups,
        **fields,
    )


def _input_gradient(eqn: core.JaxprEqn, paddings: dict[_Window, Pairs]) -> ConvProblem:
    """The other pass of the forward convolution that the equation is. The high padding is that of the convolution whose
    gradient it is."""
    problem = other_way(_forward(eqn))
    window = (*(getattr(problem, name) for name in _FIELDS), tuple(low for low, _ in problem.padding))
    return dataclasses.replace(problem, padding=paddings.get(window, problem.padding))


def _weight_gradient(eqn: core.JaxprEqn, paddings: dict[_Window, Pairs]) -> ConvProblem:
    """In each of its arrays the first two dimensions have changed places, and so have strides and the window's
    dilation, feature groups and batch groups. The high padding is a forward convolution's."""
    params = eqn.params
    (in_channels, batch, *lhs), (out_channels, _, *g), (_, _, *kernel) = _shapes(eqn)
    moves = (params["rhs_dilation"], params["lhs_dilation"], params["window_strides"])
    window = (tuple(lhs), tuple(kernel), tuple(g), *moves, _low(eqn))
    return ConvWgradProblem(
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        padding=paddings.get(window) or _least_padding(window),
        feature_group_count=params["batch_group_count"],
        batch_group_count=params["feature_group_count"],
        **_arithmetic(eqn),
        **dict(zip(_FIELDS, window, strict=False)),
    )
