"""Arguments of the public functions: what they must be, in errors that name them and their values."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike


def dtype_of(name: str, value: Any, accepted: Sequence[str] | None = None) -> np.dtype:
    """The dtype that a user's `value` stands for; TypeError unless it is one of `accepted`, or floating for None."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) if accepted is None else dtype.name in accepted):
        names = "a floating dtype" if accepted is None else ", ".join(accepted)
        raise TypeError(f"{name}={value!r}; accepted: {names}")
    return dtype


def require(valid: bool, given: str, accepted: str, error: type[Exception] = ValueError) -> None:
    """Raises `error`, which says what was given and what is accepted, unless `valid`."""
    if not valid:
        raise error(f"{given}; accepted: {accepted}")


def quoted(names: Iterable[str]) -> str:
    """'one', 'other'"""
    return ", ".join(map(repr, names))


def wider(one: DTypeLike, other: DTypeLike) -> np.dtype:
    """The dtype that holds both, also where the user has JAX refuse implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(one, other)


def integer(value: Any) -> int | None:
    """`value` as an int; None for what is no integer, also for 2.0 and "2"."""
    try:
        return operator.index(value)
    except TypeError:
        return None
