"""Checks of the public functions' arguments. Their errors name the argument, its value and the accepted values."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike


class Refusal(Exception):
    """An argument that an operation of this package does not take. Other functions, such as lax's, may take it."""


class RefusedValue(Refusal, ValueError):
    """An argument outside its range, or shapes that do not belong together."""


class RefusedType(Refusal, TypeError):
    """An argument of a type, or an array of a dtype, that is not accepted."""


class RefusedImplementation(Refusal, NotImplementedError):
    """An explicit `implementation` or `config` that cannot serve the operation."""


def dtype_of(name: str, value: Any, accepted: Sequence[str] | None = None) -> np.dtype:
    """The dtype that a user's `value` stands for; RefusedType unless it is one of `accepted`, or floating for None."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) if accepted is None else dtype.name in accepted):
        names = "a floating dtype" if accepted is None else ", ".join(accepted)
        raise RefusedType(f"{name}={value!r}; accepted: {names}")
    return dtype


def require(valid: bool, given: str, accepted: str, error: type[Exception] = RefusedValue) -> None:
    """Raises `error`, with the given value and the accepted ones, unless `valid`."""
    if not valid:
        raise error(f"{given}; accepted: {accepted}")


def quoted(names: Iterable[str]) -> str:
    """The words in quotes: 'one', 'other'."""
    return ", ".join(map(repr, names))


def wider(one: DTypeLike, other: DTypeLike) -> np.dtype:
    """The dtype that holds both, even if the user makes JAX refuse implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(one, other)


def integer(value: Any) -> int | None:
    """`value` as an int; None if it is not an integer, such as 2.0 or "2"."""
    try:
        return operator.index(value)
    except TypeError:
        return None
