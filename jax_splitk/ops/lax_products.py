"""Products with quantized weights that a traced function leaves to lax: dequantized arguments that are multiplied."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jax_splitk.ops.equations import inner
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime import _compat

# What moves or repeats elements but does not change them.
_MOVES = (
    *("convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "copy", "broadcast_in_dim"),
    "optimization_barrier",  # in `dequantize`
)
_SCALES, _SHIFTS = ("mul", "div"), ("sub", "add")


@dataclasses.dataclass(frozen=True)
class _Value:
    """What is known about the origin of a value.

    Attributes:
      qtype: the dtype of the quantized argument that it is made of, None for any other.
      size: its elements before they were repeated.
      scale: (dtype, size) of what it was multiplied by.
      shift: whether something was subtracted from it.
    """

    qtype: str | None
    size: int
    scale: tuple[str, int] | None = None
    shift: bool = False


def dequantized_products(jaxpr: core.Jaxpr) -> list[QuantizedMatmulProblem]:
    """The problem of each product of a matrix with an argument of a quantized dtype, converted and scaled before.

    The groups are told by the number of scales; one that is applied after the product counts as one for each channel.
    The problems are as the kernels would compute them, and need not be valid.
    """
    return _products(jaxpr, {})[0]


def _products(jaxpr: core.Jaxpr, given: Mapping[Any, _Value]) -> tuple[list[QuantizedMatmulProblem], list[_Value]]:
    """(the products, what is known of the results)"""
    known = {var: given.get(var) or _argument(var) for var in (*jaxpr.constvars, *jaxpr.invars)}
    look = lambda var: known.get(var) if isinstance(var, core.Var) else None  # noqa: E731
    found: list[QuantizedMatmulProblem] = []
    for eqn in jaxpr.eqns:
        operands = [look(var) or _other(var) for var in eqn.invars]
        results = [_other(var) for var in eqn.outvars]
        if eqn.primitive is lax.dot_general_p:
            found += _product(eqn, operands)
        elif eqn.primitive.name in _MOVES:
            results = operands
        elif eqn.primitive.name in (*_SCALES, *_SHIFTS):
            results = [_combined(eqn, operands)]
        for body in inner(eqn):
            # What a loop or a branch gets besides, its predicate for one, comes first.
            pairs = zip(reversed(body.invars), reversed(operands), strict=False)
            products, outs = _products(body, {var: _part(value, var) for var, value in pairs})
            found += products
            if len(outs) == len(results):
                results = [_part(value, var) for value, var in zip(outs, eqn.outvars, strict=True)]
        known.update(zip(eqn.outvars, results, strict=False))
    return found, [look(var) or _other(var) for var in jaxpr.outvars]


def _shape(var: Any) -> tuple[int, ...]:
    """The shape of a variable; () if it has none, or an unknown one."""
    shape = getattr(var.aval, "shape", ())
    return shape if _compat.is_known(*shape) else ()


def _dtype(var: Any) -> str:
    return str(getattr(var.aval, "dtype", ""))


def _other(var: Any) -> _Value:
    return _Value(None, math.prod(_shape(var)))


def _argument(var: Any) -> _Value:
    return _Value(_dtype(var) if _dtype(var) in FORMATS else None, math.prod(_shape(var)))


def _part(value: _Value, var: Any) -> _Value:
    """The value under another variable: the body of a loop sees a slice of it."""
    return dataclasses.replace(value, size=min(value.size, math.prod(_shape(var))))


def _dimension_numbers(dimension_numbers: Any, **_: Any) -> Any:
    """The dimension numbers among the parameters of lax's equation."""
    return dimension_numbers


def _combined(eqn: core.JaxprEqn, operands: Sequence[_Value]) -> _Value:
    """A quantized value times, or minus, another one."""
    name, (one, two) = eqn.primitive.name, operands
    at = int(one.qtype is None)
    quantized, other = operands[at], operands[1 - at]
    if quantized.qtype is None or (at == 1 and name in ("div", "sub")):
        return _other(eqn.outvars[0])
    if two.qtype is not None and at == 0 and name not in _SHIFTS:
        return _other(eqn.outvars[0])
    if name in _SHIFTS:
        return dataclasses.replace(quantized, shift=True)
    scale = (_dtype(eqn.invars[1 - at]), other.size)
    known = quantized.scale
    return dataclasses.replace(quantized, scale=scale if known is None or scale[1] > known[1] else known)


def _product(eqn: core.JaxprEqn, operands: Sequence[_Value]) -> list[QuantizedMatmulProblem]:
    """The problem, where exactly one operand is a quantized matrix."""
    contracted, batched = _dimension_numbers(**eqn.params)
    quantized = [i for i, value in enumerate(operands) if value.qtype is not None]
    if any(batched) or len(quantized) != 1 or not all(map(_shape, eqn.invars)):
        return []
    (at,) = quantized
    weight, shape, x = operands[at], _shape(eqn.invars[at]), eqn.invars[1 - at]
    if _dtype(eqn.invars[at]) == weight.qtype:
        return []  # not dequantized: a product of the hardware's own
    k = math.prod(shape[axis] for axis in contracted[at])
    features = math.prod(shape) // max(k, 1)
    if not k or not features or weight.size != k * features:
        return []  # of a part, or repeated
    scale_dtype, scales = weight.scale or (_dtype(x), 1)
    problem = QuantizedMatmulProblem(
        rows=math.prod(_shape(x)) // k,
        k=k,
        features=features,
        x_dtype=_dtype(x),
        out_dtype=_dtype(eqn.outvars[0]),
        qtype=str(weight.qtype),
        group_size=k // max(1, scales // features),
        scale_dtype=scale_dtype,
        zero_dtype=scale_dtype if weight.shift else "none",
    )
    return [problem]
