"""Packed weights: their type, packing and its inverse. `packing` has the order of the bytes."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from jax_splitk.quantized import description, slicing
from jax_splitk.quantized.array import (
    GROUP_SIZES,
    ZERO_INTEGERS,
    QuantizedArray,
    Weight,
    as_quantized,
    brief,
    default_dtype,
)
from jax_splitk.quantized.formats import (
    BYTE_SCALES,
    FLOAT_DTYPES,
    FORMATS,
    SCALE_DTYPES,
    as_bytes,
    from_4_bits,
    from_bytes,
    from_codes,
    to_4_bits,
    to_codes,
)
from jax_splitk.quantized.matrix import contracted_axes, features_of, from_matrix, group_tile, matrix_shape, to_matrix
from jax_splitk.quantized.packing import (
    LAYOUT_VERSION,
    TILE,
    cuts,
    pack_codes,
    pack_groups,
    packed_groups,
    packed_shapes,
    tiles,
    unpack_codes,
    unpack_groups,
)
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import integer, require
from jax_splitk.runtime.computation import one_computation

_STATIC = ("dims", "contracted", "qtype", "group_size", "zero_dtype", "layout")

register = functools.partial(description.register, names=(*description.PACKED, "guard"), static_names=_STATIC)


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Weight):
    """A quantized weight whose bytes are in the order that the kernels read; `prepack` makes it.

    It is a pytree. A stack of weights, such as the layers of a scan or the experts of a mixture, has leading dimensions
    in the leaves, so that vmap, scan and tree.map over them see one weight each. The leaves may be sharded: their
    dimensions after the stack divide the features and k (per-channel scales have no k). `jax_splitk.shardings` says
    how. Inside shard_map `shape` stays that of the whole weight.

    Attributes:
      words: uint32 [*stack, tiles of features, tiles of k, 512], of little-endian 32-bit words of eight 4-bit codes, or
        [..., 1024] of four 8-bit codes. Codes are the elements' bits, int4 as q + 8. Padding has the code of 0.
      scale: [*stack, tiles of features, groups, 64]; the 64 features of a tile in the order 16 block + 2 g + half for
        feature 16 block + 8 half + g, so that rows g and g + 8 are neighbours. Padding has scale 0 (E8M0: 2**-127).
      zero_point: None, or in the same order, if the zero points were integers of scale's dtype (scales of a byte:
        bfloat16).
      dims: shape of one weight, such as (k, features) or (heads, size, features); static, as are all that follow.
      contracted: the axes of `dims` that a product contracts, ascending.
      qtype: the name of the format.
      group_size: how many k share a scale; k itself per channel.
      zero_dtype: the dtype of the zero points before packing, or None.
      layout: version of this order.
      guard: a leaf of the stack's shape, which no product reads. Its rank makes JAX refuse a PartitionSpec of the
        weight's own axes, which would divide other axes in the leaves.
      channel_scale: None, or float32 [*stack, tiles of features, 1, 64] in the order of scale: a second scale of each
        feature.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "nf4", group_size=32))
      >>> isinstance(w, jax_splitk.PackedWeight), w.qtype, w.group_size, w.shape
      (True, 'nf4', 32, (128, 256))
    """

    words: Any
    scale: Any
    zero_point: Any
    dims: tuple[int, ...]
    contracted: tuple[int, ...]
    qtype: str
    group_size: int
    zero_dtype: str | None = None
    layout: int = LAYOUT_VERSION
    guard: Any = None
    channel_scale: Any = None

    def __post_init__(self) -> None:
        if self.guard is None and isinstance(self.words, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
            make = {np.ndarray: np.zeros, jax.ShapeDtypeStruct: jax.ShapeDtypeStruct}.get(type(self.words), jnp.zeros)
            object.__setattr__(self, "guard", make(self.stack, jnp.bool_))

    def __repr__(self) -> str:
        names = ("words", "scale", "zero_point", *["channel_scale"] * (self.channel_scale is not None))
        leaves = {name: getattr(self, name) for name in names}
        axes = "" if self.contracted == (0,) else f"contracted={self.contracted}, "
        static = f"shape={self.shape}, {axes}qtype={self.qtype!r}, group_size={self.group_size}"
        return f"PackedWeight({static}, {', '.join(f'{name}={brief(leaf)}' for name, leaf in leaves.items())})"

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Takes what pickle read. Raises ValueError if it has another layout."""
        _require_layout(fields.get("layout"))
        super().__setstate__(fields)

    @property
    def static(self) -> dict[str, Any]:
        """The fields that are no arrays, by name. A file stores them beside the arrays."""
        return {name: getattr(self, name) for name in _STATIC}

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading dimensions, which count weights."""
        return tuple(getattr(self.words, "shape", ()))[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of the stack of weights."""
        return (*self.stack, *self.dims)

    @property
    def matrix(self) -> tuple[int, int]:
        """(k, features) of one weight: the sizes of the contracted axes, and of the others, multiplied."""
        return matrix_shape(self.dims, self.contracted)

    @property
    def padded_matrix(self) -> tuple[int, int]:
        """`matrix` with the tiles of padding that `with_shards` adds: the shape that kernels multiply."""
        held = zip(self.matrix, self.words.shape[-2:-4:-1], strict=True)
        k, features = (count * TILE if count > tiles(size) else size for size, count in held)
        return k, features

    @property
    def padded_group(self) -> int:
        """`group_size` of the padded matrix: its k, if one scale serves all of k."""
        return self.padded_matrix[0] if self.group_size == self.matrix[0] else self.group_size

    def with_shards(self, shards: tuple[int, int]) -> "PackedWeight":
        """The same weight with so many tiles that devices can divide k and features equally.

        k of 2880 is 45 tiles of 64, which 8 devices cannot divide. With shards=(8, 1) there are 48. The product pads x
        with zeros and cuts the result, so `shape` and results stay the same.

        Args:
          shards: into how many parts of equal size k and features are to be divided.

        Raises ValueError for counts that are not positive.
        """
        counts = [integer(count) or 0 for count in shards] if isinstance(shards, tuple | list) else []
        accepted = "two positive integers: parts of k, parts of features"
        require(len(counts) == 2 and min(counts) > 0, f"shards={shards!r}", accepted)
        return _with_shards(self, (counts[0], counts[1]))

    def __getitem__(self, index: Any) -> "PackedWeight":
        """A part of the weight: any index of the stack, and slices of the other axes on bounds of tiles.

        A bound of the features is a multiple of 64 or their end, one of k a multiple of 64 and of the group size. Only
        the first axis of more than one element can be cut, of those that make k and of those that make features.

        Raises IndexError for any other index.
        """
        return slicing.indexed(self, index)

    def __iter__(self) -> Iterator["PackedWeight"]:
        """The weights of a stack. Without it Python would end a loop at the first IndexError, without an error."""
        if not self.stack:
            raise TypeError(f"iteration over a PackedWeight of shape {self.shape}; accepted: a stack of weights")
        return (self[i] for i in range(self.stack[0]))

    def reshape(self, *shape: Any) -> "PackedWeight":
        """The weight in another shape, whose axes make the same stack, k and features: [k, H * D] and [k, H, D].

        Raises ValueError for any other shape.
        """
        return slicing.reshaped(self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)

    def transpose(self, *axes: Any) -> "PackedWeight":
        """The weight with its axes in another order. The leaves do not change. Axes of the stack must stay in front.
        The contracted axes must keep their order among themselves, and so must the others. Without arguments all axes
        are reversed.

        Raises ValueError for any other order.
        """
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        return slicing.transposed(self, given or tuple(reversed(range(self.ndim))))

    @property
    def T(self) -> "PackedWeight":
        return self.transpose()

    def __matmul__(self, x: Any) -> Any:
        """`w @ x` of a weight whose last axis alone is contracted, such as [features, k], and x of [k] or [k, n]."""
        ndim = getattr(x, "ndim", None)
        if self.contracted != (len(self.dims) - 1,) or self.stack or isinstance(x, Weight) or ndim not in (1, 2):
            raise TypeError(
                f"PackedWeight @ {type(x).__name__}, w of shape {self.shape} that contracts {self.contracted}; "
                "accepted: x @ w, the activations x first, or w that contracts its last axis alone, x of [k] or [k, n]"
            )
        product = type(self).product(x.T, self)
        return product if ndim == 1 else jnp.moveaxis(product, 0, -1)

    @property
    def dtype(self) -> Any:
        """As of a QuantizedArray."""
        return default_dtype(self.scale.dtype, self.channel_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of words, scale, zero point and channel scale."""
        parts = (self.words, self.scale, self.zero_point, self.channel_scale)
        leaves = [leaf for leaf in parts if leaf is not None]
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def prepack(
    q: Any, *, axis: int | Sequence[int] | None = None, stack: int = 0, shards: tuple[int, int] | None = None
) -> PackedWeight:
    """Puts a quantized weight into the order that the kernels read, once, before it is used many times.

    Runs under jit and vmap on any platform. k and features are padded to multiples of 64 inside.

    Args:
      q: a QuantizedArray (or qwix QArray, AQT QTensor) of any rank, such as [k, features], whose groups run along the
        contracted axes, in row-major order if there are several. Scales that several features share are repeated for
        each feature. So are those of longer groups than the kernels': groups of 256 become two of 128.
      axis: the axis that a product contracts, or several, as in `quantize`. None: the first axis after the stack, of a
        weight of one or two dimensions. A weight of more dimensions needs it.
      stack: how many leading axes count weights: layers or experts.
      shards: into how many parts of equal size devices will divide k and features: see `PackedWeight.with_shards`.

    Raises:
      TypeError, ValueError: parts of `q` that do not fit together; axes outside `q`, or missing; groups that are no
        multiple of 16 elements; `shards` that are not two positive integers.

    Examples:
      >>> q = jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64, scale_dtype=jnp.bfloat16)
      >>> w = jax_splitk.prepack(q)
      >>> w.shape, w.words.shape, w.nbytes
      ((128, 256), (4, 2, 512), 17408)

      The kernels of eight layers that project four heads of 32:

      >>> q = jax_splitk.quantize(jnp.ones((8, 4, 32, 64)), "int4", group_size=32, axis=(1, 2))
      >>> w = jax_splitk.prepack(q, axis=(1, 2), stack=1)
      >>> w.shape, w[0].shape, w.words.shape
      ((8, 4, 32, 64), (4, 32, 64), (8, 1, 2, 512))
    """
    given = as_quantized(q)
    leading = integer(stack)
    if leading is None or not 0 <= leading < given.ndim:
        raise ValueError(f"stack={stack!r} of a weight of shape {given.shape}; accepted: 0 to {given.ndim - 1}")
    contracted = tuple(i - leading for i in contracted_axes(axis, given.ndim, "a weight", leading))
    pack = lambda q: _prepack(q, contracted)  # noqa: E731
    for _ in range(leading):
        pack = jax.vmap(pack)
    packed = pack(given)
    return packed if shards is None else packed.with_shards(shards)


@one_computation(1)
def _with_shards(w: PackedWeight, shards: tuple[int, int]) -> PackedWeight:
    fmt, group = FORMATS[w.qtype], w.padded_group
    unit = 1 if w.group_size == w.matrix[0] else math.lcm(TILE, group) // TILE
    more = []
    for size, has, count, cut, least in zip(
        w.matrix, w.words.shape[-2:-4:-1], shards, cuts(w.padded_matrix, group), (unit, 1), strict=True
    ):
        step = count * least
        wanted = max(has, tiles(size) + 1)  # one more: these are what says that x is to be padded
        more.append(0 if cut % count == 0 else -(-wanted // step) * step - has)
    more_k, more_features = more
    padding = [(0, 0)] * len(w.stack) + [(0, more_features)]
    zero_word = np.uint32(fmt.zero_code * (2**32 - 1) // (2**fmt.bits - 1))
    words = jnp.pad(w.words, [*padding, (0, more_k), (0, 0)], constant_values=zero_word)
    groups = packed_groups((w.words.shape[-2] + more_k) * TILE, group) - w.scale.shape[-2]
    padding += [(0, 0 if w.group_size == w.matrix[0] else groups), (0, 0)]
    padded = {"words": words, "scale": from_bytes(jnp.pad(as_bytes(w.scale), padding), w.scale.dtype)}
    if w.zero_point is not None:
        padded["zero_point"] = jnp.pad(w.zero_point, padding)
    if w.channel_scale is not None:
        padded["channel_scale"] = jnp.pad(w.channel_scale, [*padding[:-2], (0, 0), (0, 0)])
    return dataclasses.replace(w, **padded)


@one_computation(1)
def _prepack(q: QuantizedArray, contracted: tuple[int, ...]) -> PackedWeight:
    fmt, dims = FORMATS[str(q.qtype)], q.shape
    spread = _spread(q, contracted)
    k, group = matrix_shape(dims, contracted)[0], spread.group_size
    whole = group in (*GROUP_SIZES, k)
    kept = group if whole else next((size for size in reversed(GROUP_SIZES) if group % size == 0), 0)
    axes = "axis " + str(contracted[0]) if len(contracted) == 1 else f"axes {contracted}"
    # `quantize` along the other axis of a matrix makes such scales.
    other = "; quantize along the axis that a product x @ w contracts" if q.group_size > group else ""
    given = f"groups of {group} along {axes} of a weight of shape {dims}, scales of shape {q.scale.shape}"
    require(kept > 0, given, f"multiples of {GROUP_SIZES[0]}, or {k}{other}")

    def packed(x: jax.Array) -> jax.Array:
        y = jnp.repeat(to_matrix(as_bytes(x), contracted), group // kept, axis=0)
        return pack_groups(from_bytes(y, x.dtype), k, kept)

    zero_dtype = zero_point = None
    if spread.zero_point is not None:
        zero_dtype, zero_point = spread.zero_point.dtype.name, from_4_bits(spread.zero_point)
        if not jnp.issubdtype(zero_point.dtype, jnp.floating):
            byte = q.scale.dtype.name in BYTE_SCALES
            zero_point = zero_point.astype(jnp.bfloat16 if byte else q.scale.dtype)  # exact: integers of 8 bits
        zero_point = packed(zero_point)
    channel_scale = None
    if spread.channel_scale is not None:
        channel_scale = pack_groups(to_matrix(spread.channel_scale, contracted), k, k)
    words = pack_codes(fmt, to_matrix(to_codes(fmt, q.qvalue), contracted))
    static = (dims, contracted, fmt.name, kept, zero_dtype)
    return PackedWeight(words, packed(spread.scale), zero_point, *static, channel_scale=channel_scale)


def unpack(packed: PackedWeight) -> QuantizedArray:
    """Turns a packed weight back into a `QuantizedArray`: the exact inverse of `prepack`.

    Args:
      packed: a result of `prepack`, or a stack of them.

    Returns:
      The same elements and zero points, in an array of packed.shape, and a scale for each feature and group.

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
    unpacked = _unpack
    for _ in packed.stack:
        unpacked = jax.vmap(unpacked)
    return unpacked(packed)


@one_computation()
def _unpack(packed: PackedWeight) -> QuantizedArray:
    dims, contracted, (k, features) = packed.dims, packed.contracted, packed.matrix
    fmt, groups = FORMATS[packed.qtype], k // packed.group_size
    tile = group_tile([dims[i] for i in contracted], packed.group_size)
    if tile is None:
        given = f"groups of {packed.group_size} of a PackedWeight of shape {dims}, contracted {contracted}"
        raise ValueError(f"{given}; accepted: whole rows of the last contracted axis, or parts of one (reshape it)")
    reach = dict(zip(contracted, tile, strict=True))
    counts = [n // reach.get(i, 1) for i, n in enumerate(dims)]

    def of_groups(x: jax.Array) -> jax.Array:
        return from_matrix(unpack_groups(x, groups, features), counts, contracted)

    channel_scale = packed.channel_scale
    if channel_scale is not None:
        ones = [1 if i in contracted else n for i, n in enumerate(dims)]
        channel_scale = from_matrix(unpack_groups(channel_scale, 1, features), ones, contracted)
    zero_point = None if packed.zero_point is None else to_4_bits(of_groups(packed.zero_point), packed.zero_dtype)
    codes = from_matrix(unpack_codes(fmt, packed.words, packed.matrix), dims, contracted)
    return QuantizedArray(from_codes(fmt, codes), of_groups(packed.scale), zero_point, fmt.name, channel_scale)


def per_feature(q: Any) -> QuantizedArray:
    """A quantized weight [k, features] whose scales (and zero points) are [groups, features].

    Raises ValueError for another rank, for k of 0, and for weights that `as_quantized` refuses.
    """
    q = as_quantized(q)
    given = f"a weight of shape {q.shape}"
    require(q.ndim == 2, given, "[k, features]; jax_splitk.prepack takes weights and stacks of any rank")
    return _spread(q, (0,))


def _spread(q: QuantizedArray, contracted: tuple[int, ...]) -> QuantizedArray:
    """The weight with a scale, and a channel scale if it has these, for each feature, and groups that are runs of k in
    row-major order. Raises ValueError if the channel scale changes along k."""
    k = matrix_shape(q.shape, contracted)[0]
    require(k > 0, f"a weight of shape {q.shape}", "k of at least 1")
    counts, whole = list(q.shape), True
    for i in reversed(contracted):
        if whole:
            counts[i] = q.scale.shape[i]
        whole = whole and counts[i] == 1

    zero_point = None if q.zero_point is None else _repeated(q.zero_point, counts)
    channel_scale = q.channel_scale
    if channel_scale is not None:
        sizes = [channel_scale.shape[i] for i in contracted]
        given = f"channel_scale of shape {channel_scale.shape} of a weight that contracts {contracted}"
        require(math.prod(sizes) == 1, given, "size 1 along these axes")
        of_features = [1 if i in contracted else n for i, n in enumerate(q.shape)]
        channel_scale = _repeated(channel_scale, of_features)
    return QuantizedArray(q.qvalue, _repeated(q.scale, counts), zero_point, q.qtype, channel_scale)


def _repeated(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """`x` with its elements repeated, so that it has this shape."""
    y = as_bytes(x)
    for i, count in enumerate(counts):
        if count != y.shape[i]:
            y = jnp.repeat(y, count // y.shape[i], axis=i)
    return from_bytes(y, x.dtype)


def checked(packed: PackedWeight) -> PackedWeight:
    """`packed`, if its leaves have the right dtypes (else TypeError) and fit its static part (else ValueError). Inside
    shard_map the leaves may be one device's part; the result's static part then describes that part."""
    require(isinstance(packed, PackedWeight), f"packed of type {type(packed).__name__}", "PackedWeight", TypeError)
    packed = _of_device(packed) if _compat.is_inside_shard_map() else packed
    k, _ = packed.matrix
    _require_layout(packed.layout)
    require(packed.qtype in FORMATS, f"a PackedWeight of qtype {packed.qtype!r}", ", ".join(FORMATS))
    given = f"a PackedWeight of shape {packed.shape}"
    group = packed.group_size
    valid = group in (*GROUP_SIZES, k) and group > 0 and k % group == 0
    sizes = ", ".join(map(str, GROUP_SIZES))
    require(valid, f"{given} with group_size {group}", f"{sizes} where it divides k, or k (at least 1)")
    whole, padded_group = packed.padded_matrix, packed.padded_group
    require(whole[0] % padded_group == 0, f"{given} in groups of {group} with k padded to {whole[0]}", "whole groups")
    of_one, stack = packed_shapes(whole, FORMATS[packed.qtype].bits, padded_group), packed.stack
    words, scale = ((*stack, *shape) for shape in of_one)
    zero_point = None if packed.zero_point is None else tuple(packed.zero_point.shape)
    shapes = (tuple(packed.words.shape), tuple(packed.scale.shape), zero_point)
    require(
        shapes in ((words, scale, None), (words, scale, scale)),
        f"{given} with words {shapes[0]}, scale {shapes[1]} and zero_point {zero_point}",
        f"{words}, {scale} and {scale} or None",
    )
    if packed.channel_scale is not None:
        expected = (*words[:-2], 1, TILE)
        given = f"{given} with channel_scale {packed.channel_scale.shape}"
        require(tuple(packed.channel_scale.shape) == expected, given, f"{expected} or None")
    accepted = {
        "words": ("uint32",),
        "scale": SCALE_DTYPES,
        "zero_point": FLOAT_DTYPES,
        "channel_scale": ("float32",),
    }
    for name, dtypes in accepted.items():
        leaf = getattr(packed, name)
        valid = leaf is None or leaf.dtype.name in dtypes
        require(
            valid, f"a PackedWeight with {name} of dtype {getattr(leaf, 'dtype', None)}", ", ".join(dtypes), TypeError
        )
    return packed


def _require_layout(layout: Any) -> None:
    require(layout == LAYOUT_VERSION, f"a PackedWeight of layout {layout}", f"{LAYOUT_VERSION}; pack it again")


def _of_device(packed: PackedWeight) -> PackedWeight:
    """The weight with the shape of its leaves, if they are an equal part of the whole weight's tiles; else unchanged.
    A part of a weight with tiles of padding (`with_shards`) counts the padding."""
    dims = list(packed.dims)
    axes = (packed.contracted, features_of(len(dims), packed.contracted))
    limits = cuts(packed.matrix, packed.group_size)
    every = zip(("k", "features"), packed.matrix, packed.words.shape[-2:-4:-1], limits, axes, strict=True)
    for name, size, has, cut, along in every:
        if has >= tiles(size):
            continue
        count, rest = divmod(tiles(size), has)
        accepted = ", ".join(str(n) for n in range(1, cut + 1) if cut % n == 0)
        given = f"{name} of a PackedWeight of shape {packed.shape}, groups of {packed.group_size}, in {count} parts"
        require(
            bool(rest) or cut % count == 0,
            given,
            f"{accepted} (whole tiles of {TILE} and whole groups, none of them padded), or PackedWeight.with_shards",
        )
        first = next((i for i in along if dims[i] > 1), along[0])
        inner = size // dims[first]
        part = has * TILE if rest else size // count
        require(part % inner == 0, f"{given} of {part}", f"multiples of {inner}, a single element of axis {first}")
        dims[first] = part // inner
    k = matrix_shape(dims, packed.contracted)[0]
    group = k if packed.group_size == packed.matrix[0] else packed.group_size
    return dataclasses.replace(packed, dims=tuple(dims), group_size=group)
