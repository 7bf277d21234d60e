"""What vmap does with a mapped axis: it is folded into a dimension that the operation has anyway, or becomes a loop."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import batching


def fold_into(x: jax.Array, axis: int, into: int, groups: int = 1) -> jax.Array:
    """Moves the mapped `axis` into dimension `into` (counted without it), inside each of its `groups`."""
    x = jnp.moveaxis(x, axis, into)
    size, channels = x.shape[into], x.shape[into + 1]
    if groups > 1:
        x = x.reshape(*x.shape[: into + 1], groups, channels // groups, *x.shape[into + 2 :])
        x = jnp.moveaxis(x, into, into + 1)
        return x.reshape(*x.shape[:into], size * channels, *x.shape[into + 3 :])
    return x.reshape(*x.shape[:into], size * channels, *x.shape[into + 2 :])


def unfold_from(x: jax.Array, dim: int, size: int, groups: int = 1) -> jax.Array:
    """Inverse of `fold_into` of an axis of `size`, at least 1; the axis comes out at `dim`."""
    rest = x.shape[dim + 1 :]
    if groups > 1:
        channels = x.shape[dim] // size
        x = x.reshape(*x.shape[:dim], groups, size, channels // groups, *rest)
        return jnp.moveaxis(x, dim + 1, dim).reshape(*x.shape[:dim], size, channels, *rest)
    return x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *rest)


def mapped_size(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    return size


def one_by_one(operands: Sequence[jax.Array], dims: Sequence[int | None], call: Any) -> jax.Array:
    """The results along a mapped axis, computed in a loop; the axis is the first one of the result. An explicit config
    requires a loop, because it was made for the operation that the caller sees."""
    size = mapped_size(operands, dims)
    in_front = tuple(batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims, strict=True))
    return lax.map(lambda each: call.bind(*each), in_front)
