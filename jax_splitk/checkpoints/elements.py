"""Elements, groups and scales of stored weights, in traceable functions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized.array import QuantizedArray
from jax_splitk.quantized.formats import FORMATS, from_codes

# The nibbles of a byte: which begins at which bit.
LOW_FIRST, HIGH_FIRST = (0, 4), (4, 0)


def shifts(bits: int) -> tuple[int, ...]:
    """Where the elements of a 32-bit word begin, the low bits first."""
    return tuple(range(0, 32, bits))


def unpacked(words: jax.Array, bits: int, begins: Sequence[int], axis: int = -1) -> jax.Array:
    """The elements in words of 8 or 32 bits, as codes of 8 bits: `axis` grows by the number of elements in a word.

    Args:
      words: uint8, int32 or uint32.
      bits: bits of an element.
      begins: where the elements of a word begin, in the order of the result.
    """
    axis %= words.ndim
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32 if words.dtype.itemsize == 4 else jnp.uint8)
    where = jnp.asarray(begins, unsigned.dtype).reshape([-1 if i == axis + 1 else 1 for i in range(words.ndim + 1)])
    codes = (jnp.expand_dims(unsigned, axis + 1) >> where) & unsigned.dtype.type(2**bits - 1)
    sizes = (*words.shape[:axis], words.shape[axis] * len(begins), *words.shape[axis + 1 :])
    return codes.astype(jnp.uint8).reshape(sizes)


def quantized(qtype: str, codes: Any, scale: Any, zero_point: Any, groups: tuple[int, int]) -> QuantizedArray:
    """A weight [k, features] of its codes and of scales that serve tiles of `groups` = (along k, along features).

    The last tile of a dimension may be smaller. Then the tiles are divided, so that all have one size.
    """
    for axis, (size, tile) in enumerate(zip(codes.shape, groups, strict=True)):
        scale, zero_point = (None if x is None else _even(x, axis, size, tile) for x in (scale, zero_point))
    return QuantizedArray(from_codes(FORMATS[qtype], codes), scale, zero_point, qtype)


def _even(x: jax.Array, axis: int, size: int, tile: int) -> jax.Array:
    """Scales of tiles of `tile` elements, for tiles of one size that divide `size` elements."""
    if size % tile == 0 or x.shape[axis] == 1:
        return x
    part = math.gcd(size, tile)
    return jnp.take(x, np.arange(0, size, part) // tile, axis=axis)


def e2m1(words: Any, scales: Any, whole: Any, dtype: str, group: int) -> QuantizedArray:
    """A weight [k, features] of e2m1 elements [n, k / 2], two a byte, of scales [n, k / group], whose bytes are of
    `dtype`, and of a float32 scale of the whole weight, or None."""
    scale = jax.lax.bitcast_convert_type(scales.T, jnp.dtype(dtype))
    q = quantized("float4_e2m1fn", unpacked(words, 4, LOW_FIRST).T, scale, None, (group, 1))
    if whole is None:
        return q
    # One for each feature, so that weights with different ones can be joined.
    return dataclasses.replace(q, channel_scale=jnp.broadcast_to(whole, (1, len(words))))
