"""Random operands, without compiling a generator for each problem."""

import functools
import math
from collections.abc import Sequence

import jax
from jax import numpy as jnp

# Elements that are drawn together: powers of two up to this, and its multiples.
_MOST = 2**26

Wanted = Sequence[tuple[tuple[int, ...], str]]


def normals(wanted: Wanted, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normally distributed arrays of these shapes and dtypes.

    XLA takes half a second on an H200 to compile a generator, and less than a tenth of that to cut what it gave.
    """
    dtypes = dict.fromkeys(dtype for _, dtype in wanted)
    drawn = {dtype: _drawn(key, _rounded(_total(wanted, dtype)), dtype) for dtype in dtypes}
    return _cut(drawn, tuple(wanted))


def _total(wanted: Wanted, dtype: str) -> int:
    return sum(math.prod(shape) for shape, of in wanted if of == dtype)


def _rounded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length() if count <= _MOST else -(-count // _MOST) * _MOST


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, count: int, dtype: str) -> jax.Array:
    return jax.random.normal(key, (count,), jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=1)
def _cut(drawn: dict[str, jax.Array], wanted: Wanted) -> tuple[jax.Array, ...]:
    begin, found = dict.fromkeys(drawn, 0), []
    for shape, dtype in wanted:
        end = begin[dtype] + math.prod(shape)
        found.append(drawn[dtype][begin[dtype] : end].reshape(shape))
        begin[dtype] = end
    return tuple(found)
