"""The order in which the kernels read a quantized weight, and its inverse.

One layout serves every kernel, for any number of activation rows. A weight [k, features] is cut into contiguous tiles
of 64 features (rows of the product's A operand) by 64 k. In a tile, 32 lanes hold four blocks of 16 rows as the tensor
cores take A from registers (PTX ISA, mma.m16n8k16 and wgmma.m64nNk16, 16-bit types): lane 4g + t holds rows g and g + 8
and, of each 16 k, the four 2t, 2t + 1, 2t + 8, 2t + 9, in 32-bit registers of two neighbouring k.

4-bit: one 16-byte load a lane; its word j holds the 16 k from 16j on. The two elements of a register are 16 bits apart,
so `(w >> 4i) & 0x000f000f | 0x43004300` is register i as bfloat16 128 + code (Kim et al., arXiv:2211.10017). For fp16
the masks 0x000f000f and 0x00f000f0 on w and w >> 8 make registers 0 to 3 (the second of each times 16). For e4m3,
`w & 0x0f0f0f0f` is row g and `(w >> 4) & 0x0f0f0f0f` row g + 8 with k in the order 2t, 2t + 8, 2t + 1, 2t + 9.

8-bit: two loads; load h holds the 16 k from 32h and from 32h + 16 on, a word for each row, its bytes in that same order
of k, so that `(w >> 8i) & 0x00ff00ff` is a pair of neighbouring k.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized.formats import Format, as_bytes, from_bytes

LAYOUT_VERSION = 1
_Shape3 = tuple[int, int, int]
TILE = 64
# A joined weight has blocks of so many features of gate and of up in turn: rows g and g + 8, which one lane has.
GATE_BLOCK = 8

# How the two dimensions of a tile split, k first, then features, and the order of the parts in memory. The last parts,
# which make 8 nibbles or 4 bytes, lie in one word, from its low bits up; the last part varies fastest.
#   k = 32 kh + 16 kj + 8 octet + 2 t + e;  feature = 16 block + 8 half + g
_SPLIT_K, _SPLIT_FEATURES = (2, 2, 2, 4, 2), (4, 2, 8)
_KT, _KH, _KJ, _OCTET, _T, _E, _MT, _BLOCK, _HALF, _G = range(10)
_ORDER = {
    4: (_MT, _KT, _BLOCK, _G, _T, _KH, _KJ, _E, _OCTET, _HALF),
    8: (_MT, _KT, _BLOCK, _KH, _G, _T, _KJ, _HALF, _E, _OCTET),
}


def tiles(size: int) -> int:
    """The number of tiles of 64 that hold `size` features or k."""
    return -(-size // TILE)


def cuts(shape: tuple[int, int], group_size: int) -> tuple[int, int]:
    """The largest numbers of equal parts into which k and features of a packed weight can be cut at bounds of tiles and
    groups; 1 for a padded dimension."""
    k, features = shape
    unit = TILE if group_size == k else math.lcm(TILE, group_size)
    return (1 if k % unit else k // unit), (1 if features % TILE else features // TILE)


def packed_groups(k: int, group_size: int) -> int:
    """Groups in packed scales: those of the padded k, or the one group of a weight quantized per channel."""
    return 1 if group_size == k else tiles(k) * TILE // group_size


def packed_shapes(shape: tuple[int, int], bits: int, group_size: int) -> tuple[_Shape3, _Shape3]:
    """Shapes of the packed words and scales of a weight [k, features]."""
    k, features = shape
    words = (tiles(features), tiles(k), TILE * TILE * bits // 32)
    return words, (tiles(features), packed_groups(k, group_size), TILE)


def pack_codes(fmt: Format, codes: jax.Array) -> jax.Array:
    """uint32 codes [k, features] to words [tiles of features, tiles of k, words]."""
    k, features = codes.shape
    kt, mt = tiles(k), tiles(features)
    padding = ((0, kt * TILE - k), (0, mt * TILE - features))
    codes = jnp.pad(codes, padding, constant_values=np.uint32(fmt.zero_code))
    codes = codes.reshape(kt, *_SPLIT_K, mt, *_SPLIT_FEATURES).transpose(_ORDER[fmt.bits])
    codes = codes.reshape(mt, kt, TILE * TILE * fmt.bits // 32, 32 // fmt.bits) << _shifts(fmt)
    return jnp.sum(codes, axis=-1, dtype=jnp.uint32)


def unpack_codes(fmt: Format, words: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `pack_codes`."""
    k, features = shape
    mt, kt, _ = words.shape
    codes = (words[..., None] >> _shifts(fmt)) & jnp.uint32(2**fmt.bits - 1)
    sizes = (kt, *_SPLIT_K, mt, *_SPLIT_FEATURES)
    codes = codes.reshape([sizes[part] for part in _ORDER[fmt.bits]]).transpose(np.argsort(_ORDER[fmt.bits]))
    return codes.reshape(kt * TILE, mt * TILE)[:k, :features]


def pack_groups(x: Any, k: int, group_size: int) -> Any:
    """Scales or zero points [groups, features] to [tiles of features, padded groups, 64], for arrays of JAX or NumPy.
    It is the adjoint of its inverse. Padding has the bits of 0."""
    groups, features = x.shape
    mt, padded = tiles(features), packed_groups(k, group_size)
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    y = pad(as_bytes(x), ((0, padded - groups), (0, mt * TILE - features)))
    y = y.reshape(padded, mt, *_SPLIT_FEATURES).transpose(1, 0, 2, 4, 3).reshape(mt, padded, TILE)
    return from_bytes(y, x.dtype)


def unpack_groups(x: jax.Array, groups: int, features: int) -> jax.Array:
    """The inverse of `pack_groups`."""
    mt, padded, _ = x.shape
    block, half, g = _SPLIT_FEATURES
    y = as_bytes(x).reshape(mt, padded, block, g, half).transpose(1, 0, 2, 4, 3).reshape(padded, mt * TILE)
    return from_bytes(y[:groups, :features], x.dtype)


def _shifts(fmt: Format) -> jax.Array:
    """The shifts of a word's codes, along the last of four axes."""
    return jnp.arange(0, 32, fmt.bits, dtype=jnp.uint32).reshape(1, 1, 1, -1)
