"""Functions of jax.numpy and jax.lax that take quantized weights, too: what `intercept` puts in their place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.ops.quantized_einsum import quantized_dot_general, quantized_einsum
from jax_splitk.quantized.array import dequantize, is_weight, unwrapped
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.quantized.permuted import PermutedWeight

_NAMES = ("dot", "einsum", "matmul", "tensordot")


def functions(
    for_arrays: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> dict[tuple[Any, str], Callable[..., Any]]:
    """The functions that take quantized weights, by the module and the name of those for arrays. `for_arrays`: the name
    and the function -> the function that computes products of arrays."""
    plain = {(jnp, name): getattr(jnp, name) for name in _NAMES} | {(lax, "dot_general"): lax.dot_general}
    return {at: functools.partial(_product, for_arrays(at[1], theirs), _OURS[at[1]]) for at, theirs in plain.items()}


def _product(theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.Array:
    """Theirs, unless an operand is a quantized weight. XLA dequantizes one that is not packed."""
    given = [unwrapped(arg) if is_weight(arg) else arg for arg in args]
    if any(isinstance(arg, PackedWeight | PermutedWeight) for arg in given):
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name == "axes"}
        return ours(*given, **kwargs)
    if all(new is old for new, old in zip(given, args, strict=True)) and not any(map(is_weight, given)):
        return theirs(*args, **kwargs)
    dtypes = [arg.dtype for arg in given if hasattr(arg, "dtype") and not is_weight(arg)]
    return theirs(
        *(dequantize(arg, dtypes[0] if dtypes else None) if is_weight(arg) else arg for arg in given), **kwargs
    )


def _einsum(subscripts: str, *operands: Any, precision: Any = None, optimize: Any = None, **kwargs: Any) -> jax.Array:
    del precision, optimize  # without effect: there is one product
    return quantized_einsum(subscripts, *operands, **kwargs)


def _tensordot(a: Any, b: Any, axes: Any = 2, precision: Any = None, **kwargs: Any) -> jax.Array:
    if isinstance(axes, int):
        of_a, of_b = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        of_a, of_b = ((one,) if isinstance(one, int) else tuple(one) for one in axes)
    numbers = ((tuple(i % a.ndim for i in of_a), tuple(i % b.ndim for i in of_b)), ((), ()))
    return quantized_dot_general(a, b, numbers, precision, **kwargs)


def _dot(a: Any, b: Any, precision: Any = None, **kwargs: Any) -> jax.Array:
    return _contracted(a, b, precision, kwargs)


def _matmul(a: Any, b: Any, precision: Any = None, **kwargs: Any) -> jax.Array:
    stacked = isinstance(b, PackedWeight) and b.stack
    return a @ b if stacked and not kwargs else _contracted(a, b, precision, kwargs)


def _contracted(a: Any, b: Any, precision: Any, kwargs: dict[str, Any]) -> jax.Array:
    """The product over the last axis of `a` and the last but one of `b`."""
    if isinstance(a, PermutedWeight) or isinstance(b, PermutedWeight):
        return a @ b
    numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return quantized_dot_general(a, b, numbers, precision, **kwargs)


_OURS: dict[str, Callable[..., Any]] = {
    "dot": _dot,
    "dot_general": quantized_dot_general,
    "einsum": _einsum,
    "matmul": _matmul,
    "tensordot": _tensordot,
}
