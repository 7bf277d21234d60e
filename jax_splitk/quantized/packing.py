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

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from jax_splitk.quantized.array import GROUP_SIZES, ZERO_INTEGERS, QuantizedArray, Weight, as_quantized, brief
from jax_splitk.quantized.formats import FORMATS, SCALE_DTYPES, Format, from_codes, to_codes
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import require
from jax_splitk.runtime.computation import one_computation

LAYOUT_VERSION = 1
_Shape3 = tuple[int, int, int]
TILE = 64

# How the two dimensions of a tile split, k first, then features, and the order of the parts in memory. The last parts,
# which make 8 nibbles or 4 bytes, lie in one word, from its low bits up; the last part varies fastest.
#   k = 32 kh + 16 kj + 8 octet + 2 t + e;  feature = 16 block + 8 half + g
_SPLIT_K, _SPLIT_FEATURES = (2, 2, 2, 4, 2), (4, 2, 8)
_KT, _KH, _KJ, _OCTET, _T, _E, _MT, _BLOCK, _HALF, _G = range(10)
_ORDER = {
    4: (_MT, _KT, _BLOCK, _G, _T, _KH, _KJ, _E, _OCTET, _HALF),
    8: (_MT, _KT, _BLOCK, _KH, _G, _T, _KJ, _HALF, _E, _OCTET),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "scale", "zero_point"],
    meta_fields=["shape", "qtype", "group_size", "zero_dtype", "layout"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Weight):
    """A quantized weight [k, features] whose bytes are in the order that the kernels read; `prepack` makes it.

    It is a pytree. Under vmap or scan the leaves have leading dimensions, and `shape` is the shape of one weight. The
    leaves may be sharded. Their first dimension divides the features, their second divides k (per-channel scales have
    no k). Inside shard_map `shape` stays the shape of the whole weight.

    Attributes:
      words: uint32 [tiles of features, tiles of k, 512], of little-endian 32-bit words of eight 4-bit codes, or [...,
        1024] of four 8-bit codes. Codes are the elements' bits, int4 as q + 8. Padding has the code of 0.
      scale: [tiles of features, groups, 64]; the 64 features of a tile in the order 16 block + 2 g + half for feature
        16 block + 8 half + g, so that rows g and g + 8 are neighbours. Padding has scale 0.
      zero_point: None, or in the same order, of scale's dtype if the zero points were integers.
      shape: (k, features), static, as are all that follow.
      qtype: the name of the format.
      group_size: how many k share a scale; k itself per channel.
      zero_dtype: the dtype of the zero points before packing, or None.
      layout: version of this order.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "nf4", group_size=32))
      >>> isinstance(w, jax_splitk.PackedWeight), w.qtype, w.group_size
      (True, 'nf4', 32)
    """

    words: Any
    scale: Any
    zero_point: Any
    shape: tuple[int, int]
    qtype: str
    group_size: int
    zero_dtype: str | None = None
    layout: int = LAYOUT_VERSION

    def __repr__(self) -> str:
        leaves = {name: getattr(self, name) for name in ("words", "scale", "zero_point")}
        static = f"shape={self.shape}, qtype={self.qtype!r}, group_size={self.group_size}"
        return f"PackedWeight({static}, {', '.join(f'{name}={brief(leaf)}' for name, leaf in leaves.items())})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The scale's dtype."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def prepack(q: Any) -> PackedWeight:
    """Puts a quantized weight into the order that the kernels read, once, before it is used many times.

    Runs under jit on any platform; `jax.vmap(prepack)` packs a batch. k and features are padded to multiples of 64
    inside.

    Args:
      q: a QuantizedArray (or qwix QArray, AQT QTensor) [k, features] with groups of 32, 64 or 128 along axis 0, or per
        channel. Scales that several features share are repeated for each feature.

    Raises:
      TypeError, ValueError: parts of `q` that do not fit together; a rank other than 2; other groups.

    Examples:
      >>> q = jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64, scale_dtype=jnp.bfloat16)
      >>> w = jax_splitk.prepack(q)
      >>> w.shape, w.words.shape, w.nbytes
      ((128, 256), (4, 2, 512), 17408)
    """
    given = as_quantized(q)
    spread = _spread(given)
    k = spread.shape[0]
    along = given.group_size // spread.group_size
    along_k = f"{', '.join(map(str, sorted({*GROUP_SIZES, k})))} along axis 0"
    # `quantize(..., axis=1)` makes such scales.
    other = "; quantize with axis=0, the axis that a product x @ w contracts" if along > 1 else ""
    require(
        spread.group_size in (*GROUP_SIZES, k),
        f"groups of {spread.group_size} along axis 0 and {along} along axis 1",
        f"{along_k}{other}",
    )
    return _prepack(spread)


@one_computation()
def _prepack(q: QuantizedArray) -> PackedWeight:
    fmt, (k, features) = FORMATS[str(q.qtype)], q.shape
    zero_dtype = zero_point = None
    if q.zero_point is not None:
        zero_dtype, zero_point = q.zero_point.dtype.name, q.zero_point
        if not jnp.issubdtype(zero_point.dtype, jnp.floating):
            zero_point = zero_point.astype(q.scale.dtype)  # exact: integers of 8 bits
        zero_point = pack_groups(zero_point, k, q.group_size)
    return PackedWeight(
        pack_codes(fmt, to_codes(fmt, q.qvalue)),
        pack_groups(q.scale, k, q.group_size),
        zero_point,
        (k, features),
        fmt.name,
        q.group_size,
        zero_dtype,
    )


def unpack(packed: PackedWeight) -> QuantizedArray:
    """Turns a packed weight back into a `QuantizedArray`: the exact inverse of `prepack`.

    Args:
      packed: a result of `prepack`.

    Returns:
      The same elements and zero points, and a scale for each feature and group.

    Raises:
      TypeError, ValueError: `packed` is not a PackedWeight, its leaves do not fit together, or its zero points were
        changed to values outside their former dtype (not checked under jit).

    Examples:
      >>> q = jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64)
      >>> bool((jax_splitk.unpack(jax_splitk.prepack(q)).qvalue == q.qvalue).all())
      True
    """
    packed = checked(packed)
    zero_point: Any = packed.zero_point
    if packed.zero_dtype in ZERO_INTEGERS and not isinstance(zero_point, Tracer) and zero_point.size > 0:
        info, zeros = jnp.iinfo(packed.zero_dtype), np.asarray(zero_point, np.float32)
        exact = np.array_equal(zeros, np.clip(np.round(zeros), int(info.min), int(info.max)))
        accepted = f"integers from {info.min} to {info.max}"
        require(exact, f"zero_point from {zeros.min()} to {zeros.max()} with zero_dtype={info.dtype}", accepted)
    return _unpack(packed)


@one_computation()
def _unpack(packed: PackedWeight) -> QuantizedArray:
    k, features = packed.shape
    fmt, groups = FORMATS[packed.qtype], k // packed.group_size
    zero_point = packed.zero_point
    if zero_point is not None:
        zero_point = unpack_groups(zero_point, groups, features).astype(packed.zero_dtype)
    return QuantizedArray(
        from_codes(fmt, unpack_codes(fmt, packed.words, packed.shape)),
        unpack_groups(packed.scale, groups, features),
        zero_point,
        fmt.name,
    )


def per_feature(q: Any) -> QuantizedArray:
    """A quantized weight [k, features] whose scales (and zero points) are [groups, features].

    Raises ValueError for another rank, for k of 0, and for weights that `as_quantized` refuses.
    """
    return _spread(as_quantized(q))


def _spread(q: QuantizedArray) -> QuantizedArray:
    given = f"a weight of shape {q.shape}"
    require(q.ndim == 2, given, "[k, features] (jax.vmap for a batch of weights)")
    require(q.shape[0] > 0, given, "k of at least 1")
    if q.shape[1] == q.scale.shape[1]:
        return q
    repeats = q.shape[1] // q.scale.shape[1]
    spread = functools.partial(jnp.repeat, repeats=repeats, axis=1)
    zero_point = None if q.zero_point is None else spread(q.zero_point)
    return QuantizedArray(q.qvalue, spread(q.scale), zero_point, q.qtype)


def checked(packed: PackedWeight) -> PackedWeight:
    """`packed`, if its leaves have the right dtypes (else TypeError) and fit its static part (else ValueError). Inside
    shard_map the leaves may be one device's part; the result's static part then describes that part."""
    require(isinstance(packed, PackedWeight), f"packed of type {type(packed).__name__}", "PackedWeight", TypeError)
    packed = _of_device(packed) if _compat.is_inside_shard_map() else packed
    layout, (k, _) = packed.layout, packed.shape
    require(layout == LAYOUT_VERSION, f"a PackedWeight of layout {layout}", f"{LAYOUT_VERSION}; pack it again")
    require(packed.qtype in FORMATS, f"a PackedWeight of qtype {packed.qtype!r}", ", ".join(FORMATS))
    given = f"a PackedWeight of shape {packed.shape}"
    group = packed.group_size
    valid = group in (*GROUP_SIZES, k) and group > 0 and k % group == 0
    sizes = ", ".join(map(str, GROUP_SIZES))
    require(valid, f"{given} with group_size {group}", f"{sizes} where it divides k, or k (at least 1)")
    words, scale = packed_shapes(packed.shape, FORMATS[packed.qtype].bits, group)
    zero_point = None if packed.zero_point is None else tuple(packed.zero_point.shape)
    shapes = (tuple(packed.words.shape), tuple(packed.scale.shape), zero_point)
    require(
        shapes in ((words, scale, None), (words, scale, scale)),
        f"{given} with words {shapes[0]}, scale {shapes[1]} and zero_point {zero_point}",
        f"{words}, {scale} and {scale} or None (jax.vmap for a batch of weights)",
    )
    floats = [leaf.dtype for leaf in (packed.scale, packed.zero_point) if leaf is not None]
    if packed.words.dtype != jnp.uint32 or any(dtype.name not in SCALE_DTYPES for dtype in floats):
        raise TypeError(
            f"a PackedWeight with words of dtype {packed.words.dtype}, scale and zero_point of dtypes "
            f"{', '.join(map(str, floats))}; accepted: uint32, and {', '.join(SCALE_DTYPES)}"
        )
    return packed


def _of_device(packed: PackedWeight) -> PackedWeight:
    """The weight with the shape of its leaves, if they are an equal part of the whole weight's tiles; else
    unchanged."""
    (k, features), (feature_tiles, k_tiles, *_) = packed.shape, packed.words.shape
    if (k_tiles, feature_tiles) == (tiles(k), tiles(features)):
        return packed
    parts = {"k": tiles(k) / k_tiles, "features": tiles(features) / feature_tiles}
    for (name, count), cut in zip(parts.items(), cuts(packed.shape, packed.group_size), strict=True):
        accepted = ", ".join(str(n) for n in range(1, cut + 1) if cut % n == 0)
        given = f"{name} of a PackedWeight of shape {packed.shape}, groups of {packed.group_size}, in {count:g} parts"
        require(cut % count == 0, given, f"{accepted} (whole tiles of {TILE} and whole groups, none of them padded)")
    part, group = k // int(parts["k"]), packed.group_size
    shape = (part, features // int(parts["features"]))
    return dataclasses.replace(packed, shape=shape, group_size=part if group == k else group)


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
    It is the adjoint of its inverse."""
    groups, features = x.shape
    mt, padded = tiles(features), packed_groups(k, group_size)
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    x = pad(x, ((0, padded - groups), (0, mt * TILE - features)))
    return x.reshape(padded, mt, *_SPLIT_FEATURES).transpose(1, 0, 2, 4, 3).reshape(mt, padded, TILE)


def unpack_groups(x: jax.Array, groups: int, features: int) -> jax.Array:
    """The inverse of `pack_groups`."""
    mt, padded, _ = x.shape
    block, half, g = _SPLIT_FEATURES
    x = x.reshape(mt, padded, block, g, half).transpose(1, 0, 2, 4, 3).reshape(padded, mt * TILE)
    return x[:groups, :features]


def _shifts(fmt: Format) -> jax.Array:
    """The shifts of a word's codes, along the last of four axes."""
    return jnp.arange(0, 32, fmt.bits, dtype=jnp.uint32).reshape(1, 1, 1, -1)
