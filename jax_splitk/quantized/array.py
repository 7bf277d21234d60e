"""Quantized arrays: their type, quantization and its inverse."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.quantized import description
from jax_splitk.quantized.formats import (
    BYTE_SCALES,
    E8M0,
    FLOAT_DTYPES,
    FORMATS,
    SCALE_DTYPES,
    Format,
    QType,
    as_bytes,
    format_of,
    from_4_bits,
    from_bytes,
    nearest,
    rounded_up,
    to_float32,
    values,
)
from jax_splitk.quantized.matrix import contracted_axes, group_tile
from jax_splitk.runtime.arguments import dtype_of, integer, require
from jax_splitk.runtime.computation import one_computation

GROUP_SIZES = (16, 32, 64, 128)  # of packed weights
ZERO_INTEGERS = ("int4", "uint4", "int8", "uint8")


E4M3 = "float8_e4m3fn"


class Weight:
    """Base of all kinds of quantized weight. `x @ w` is `quantized_matmul(x, w)`; jax.numpy's functions take none."""

    __array_ufunc__ = None  # makes NumPy's arrays leave `x @ w` to `__rmatmul__`, as JAX's do
    product: ClassVar[Callable[[Any, Any], Any]]  # (x, w) -> x @ w; `ops.quantized_matmul` sets it
    shape: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __rmatmul__(self, other: Any) -> Any:
        return type(self).product(other, self)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Takes what pickle read. Earlier versions had no channel scales."""
        self.__dict__.update({description.CHANNEL: None, **fields})

    def __matmul__(self, other: Any) -> Any:
        raise TypeError(f"{type(self).__name__} @ {type(other).__name__}; accepted: x @ w, the activations x first")

    def __getitem__(self, index: Any) -> Any:
        """`w[...]`, which frameworks read variables by, is the weight itself."""
        if index is ...:
            return self
        # No IndexError, which would make iteration end at once.
        raise TypeError(f"index {index!r} of a {type(self).__name__}; accepted: ... (a PackedWeight can be indexed)")

    def astype(self: Any, dtype: DTypeLike) -> Any:
        """The weight with scales, and floating zero points, of this dtype: bfloat16, float16 or float32. Scales of a
        byte stay, and channel scales."""
        to = dtype_of("dtype", dtype, FLOAT_DTYPES)
        if self.scale.dtype.name in BYTE_SCALES:
            return self
        zero_point = self.zero_point
        if zero_point is not None and jnp.issubdtype(zero_point.dtype, jnp.floating):
            zero_point = zero_point.astype(to)
        return dataclasses.replace(self, scale=self.scale.astype(to), zero_point=zero_point)

    def __array__(self, *_: Any, **__: Any) -> Any:
        name = type(self).__name__
        dequantized = "dequantize(w)" if name == "QuantizedArray" else "dequantize(jax_splitk.unpack(w))"
        raise TypeError(
            f"{name} used as an array; accepted: x @ w, jax_splitk.quantized_matmul, quantized_dot_general and "
            f"quantized_einsum, or jax_splitk.{dequantized} for a float array"
        )


def default_dtype(scale_dtype: Any, channel_scale: Any) -> np.dtype:
    """The dtype of a weight's values: its scale's. Of scales of a byte that is a dtype which holds the values exactly:
    bfloat16, or float32 with a channel scale."""
    if channel_scale is not None:
        return jnp.dtype(jnp.float32)
    dtype = jnp.dtype(scale_dtype)
    return jnp.dtype(jnp.bfloat16) if dtype.name in BYTE_SCALES else dtype


def brief(leaf: Any) -> str:
    """An array in the form int4[64,8]; any other value by its type."""
    if leaf is None or isinstance(leaf, str | int):
        return repr(leaf)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


@functools.partial(description.register, names=description.PLAIN, static_names=("qtype",))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(Weight):
    """An array with elements of 4 or 8 bits, and scales: it stands for (qvalue - zero_point) * (scale * channel_scale).

    A pytree whose leaves are the arrays below. The convention is that of qwix's QArray: `scale` has qvalue's rank, and
    each of its dimensions divides qvalue's; one scale serves the tile of elements that the quotient of the shapes
    gives. A Dense kernel [k, features] quantized in groups of 64 has scales [k / 64, features].

    Attributes:
      qvalue: the elements, of the array's shape, of dtype int4, uint4, int8, float8_e4m3fn or float4_e2m1fn; for "nf4"
        uint4 indices into the table of NormalFloat4.
      scale: bfloat16, float16 or float32; or of a byte: float8_e8m0fnu (a power of two, MXFP4's), float8_e4m3fn
        (NVFP4's).
      zero_point: the element values that represent 0, of scale's shape and of dtype int4, uint4, int8, uint8 or one of
        scale's; None for
        0. Integer formats only. It need not be in the elements' range, but in its own dtype's: 16 of uint4 elements
        (GPTQ has it) is an int8 or uint8, since uint4 wraps to 0.
      qtype: the name of the format (static); None stands for the format of qvalue's dtype.
      channel_scale: None for 1, or a second scale, float32, of scale's rank, whose dimensions divide scale's: NVFP4's
        global scale. A product takes one that does not change along the contracted axes: a number for each feature.

    Examples:
      >>> q = jax_splitk.QuantizedArray(jnp.ones((64, 8), jnp.int8), jnp.full((2, 8), 0.5))
      >>> q.qtype, q.group_size, float(jax_splitk.dequantize(q)[0, 0])
      ('int8', 32, 0.5)
    """

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: str | None = None
    channel_scale: Any = None

    def __post_init__(self) -> None:
        if self.qtype is None and hasattr(self.qvalue, "dtype"):
            object.__setattr__(self, "qtype", jnp.dtype(self.qvalue.dtype).name)

    def __repr__(self) -> str:
        names = ("qvalue", "scale", "zero_point", "qtype", *["channel_scale"] * (self.channel_scale is not None))
        fields = {name: getattr(self, name) for name in names}
        return f"QuantizedArray({', '.join(f'{name}={brief(value)}' for name, value in fields.items())})"

    @property
    def static(self) -> dict[str, Any]:
        """The fields that are no arrays, by name. A file stores them beside the arrays."""
        return {"qtype": self.qtype}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.qvalue.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves on a device, where 4-bit elements are half a byte (JAX's own count says a byte)."""
        return sum(-(-math.prod(leaf.shape) * _bits(leaf.dtype) // 8) for leaf in jax.tree.leaves(self))

    @property
    def dtype(self) -> Any:
        """The dtype that `dequantize` returns by default: the scale's; bfloat16 for scales of a byte, and float32 with
        a channel scale."""
        return default_dtype(self.scale.dtype, self.channel_scale)

    @property
    def group_size(self) -> int:
        """How many elements share a scale."""
        return math.prod(n // s if s else 1 for n, s in zip(self.shape, self.scale.shape, strict=True))


def _bits(dtype: Any) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def unwrapped(w: Any) -> Any:
    """The quantized weight that a framework's object holds: a leaf of qwix's post-training quantization, a variable of
    Flax nnx, or a box of Flax linen. Any other value unchanged."""
    if isinstance(w, Weight):
        return w
    # A variable of nnx has the attributes of its value, too. The value of qwix's leaf is the leaf itself.
    held = w.get_raw_value() if hasattr(w, "get_raw_value") else getattr(w, "array", getattr(w, "value", None))
    held = unwrapped(held) if held is not None and held is not w else None
    return held if isinstance(held, Weight) or hasattr(held, "qvalue") else w


def is_weight(x: Any) -> bool:
    """Whether `x` is a quantized weight of any kind, or holds one."""
    x = unwrapped(x)
    return isinstance(x, Weight) or hasattr(x, "qvalue")


def as_quantized(w: Any) -> QuantizedArray:
    """Turns `w` into a QuantizedArray whose parts fit together. `w` is a QuantizedArray, or looks like a qwix QArray
    (or a leaf that holds one) or an AQT QTensor.

    Raises:
      TypeError: `w` is none of these, or one of its parts has a wrong dtype.
      ValueError: shapes that do not fit together; an AQT tensor with a bias, tiled or sparse.
    """
    w = unwrapped(w)
    if not (hasattr(w, "qvalue") and hasattr(w, "scale")):
        accepted = "QuantizedArray, a qwix QArray, an AQT QTensor"
        if hasattr(w, "words") and hasattr(w, "scale"):
            accepted += "; jax_splitk.unpack makes a QuantizedArray of a PackedWeight"
        elif hasattr(w, "shape"):
            accepted += "; jax_splitk.quantize makes a QuantizedArray of an array"
        raise TypeError(f"a weight of type {type(w).__name__}; accepted: {accepted}")
    scale, zero_point = w.scale, getattr(w, "zero_point", None)
    if isinstance(scale, list | tuple):  # AQT has a list of scales: their product
        if getattr(w, "bias", None) or getattr(w, "tiling_state", None) is not None or not scale:
            raise ValueError("an AQT QTensor with a bias, tiles or no scale; accepted: one with scales only")
        scale = math.prod(map(jnp.asarray, scale[1:]), start=jnp.asarray(scale[0]))
    if getattr(w, "sparsity_mask", None) is not None:
        raise ValueError("an AQT QTensor with a sparsity_mask; accepted: None (multiply qvalue by it)")
    qvalue, scale = jnp.asarray(w.qvalue), jnp.asarray(scale)
    zero_point = None if zero_point is None else jnp.asarray(zero_point)
    # qwix has further names for formats that use one of these dtypes. Only nf4 differs from its dtype.
    name = "nf4" if str(getattr(w, "qtype", None)) == "nf4" else qvalue.dtype.name
    if name not in FORMATS or qvalue.dtype != FORMATS[name].storage:
        stored = ", ".join(sorted({fmt.storage.name for fmt in FORMATS.values()}))
        raise TypeError(f"qvalue of dtype {qvalue.dtype} and qtype {name!r}; accepted: {stored} (uint4 for 'nf4')")
    require(scale.dtype.name in SCALE_DTYPES, f"scale of dtype {scale.dtype}", ", ".join(SCALE_DTYPES), TypeError)
    _require_divides(scale, "scale", qvalue, "qvalue")
    if zero_point is not None:
        given = f"zero_point of shape {zero_point.shape}"
        require(FORMATS[name].integer, f"{given} with {name}", "None, for this format")
        require(zero_point.shape == scale.shape, given, f"scale's shape {scale.shape}")
        accepted, dtype = (*ZERO_INTEGERS, *FLOAT_DTYPES), zero_point.dtype
        require(dtype.name in accepted, f"zero_point of dtype {dtype}", ", ".join(accepted), TypeError)
    channel_scale = getattr(w, "channel_scale", None)
    if channel_scale is not None:
        channel_scale = jnp.asarray(channel_scale)
        given = f"channel_scale of dtype {channel_scale.dtype}"
        require(channel_scale.dtype == jnp.float32, given, "float32", TypeError)
        _require_divides(channel_scale, "channel_scale", scale, "scale")
    return QuantizedArray(qvalue, scale, zero_point, name, channel_scale)


def _require_divides(x: jax.Array, name: str, of: jax.Array, of_name: str) -> None:
    """Raises ValueError unless each dimension of `x` divides that of `of`."""
    if x.ndim != of.ndim or any(n % s if s else n for n, s in zip(of.shape, x.shape, strict=True)):
        raise ValueError(f"{name} {x.shape} of {of_name} {of.shape}; accepted: the same rank, sizes that divide it")


def quantize(
    w: jax.Array,
    dtype: QType | np.dtype | type[Any],
    *,
    group_size: int | None,
    axis: int | Sequence[int] | None = None,
    symmetric: bool = True,
    scale_dtype: DTypeLike | None = None,
) -> QuantizedArray:
    """Quantizes an array to 4 or 8 bits an element, with a scale for each group of elements that a product adds up.

    A group's extreme values determine its scale.

    Symmetric: scale = max|w| / (high + 1/2) for integers, so that the last step of the range is used in full, and
    max|w| / high for floats. Asymmetric: the range from min(w, 0) to max(w, 0) on all 2**bits steps, with an integer
    zero point. These are qwix's "absmax" and "minmax". The scale is rounded up to `scale_dtype`, so no element is
    further than half a step of its format from its quantized value. A group of zeros has scale 1. A group with a NaN or
    an infinity has scale NaN, so all of its elements dequantize to NaN.

    Runs under jit and vmap. Differentiation treats the result as a constant.

    Args:
      w: a floating array of any rank, e.g. a Dense kernel [k, features]. float32 arithmetic at least.
      dtype: int4, uint4, int8, float8_e4m3fn, float4_e2m1fn, as dtype or name, or "nf4" (NormalFloat4 of QLoRA,
        arXiv:2305.14314).
      group_size: elements that share a scale: a multiple of 16 (packed weights have groups of 16, 32, 64, 128), their
        number along `axis`, or None for all (per channel).
      axis: the axis that a product contracts, or several: (0, 1) of a kernel [H, D, features]. Groups run along it,
        along several in row-major order. None: axis 0 of an array of one or two dimensions. An array of more
        dimensions needs it, and layers or experts in front are neither axis.
      symmetric: False for zero points; integer dtypes only. uint4 has no negative values without them, so it needs
        symmetric=False.
      scale_dtype: bfloat16, float16 or float32; None for w's dtype if it is one of these, else float32. Or a scale of
        a byte: float8_e8m0fnu, powers of two; float8_e4m3fn, which come with a channel scale that makes the largest
        scale of each feature 448. Scales outside its range, or outside 2**-126 to 2**126, are clipped: weights beyond
        the reach of the largest scale saturate.

    Returns:
      A QuantizedArray with w's shape, scales (and zero points, of the elements' dtype) of w's shape except for
      w.shape[axis] / group_size along `axis`. Along several axes, the size of each is divided by the group's reach.

    Raises:
      TypeError: `w` is not floating, `dtype` or `scale_dtype` is not one of the above, `symmetric` is not a bool.
      ValueError: `axis` or `group_size` no integer, out of range, missing or no divisor; groups that are no rectangle
        of several axes; `symmetric` with a format that has no such form.

    Examples:
      >>> q = jax_splitk.quantize(jnp.linspace(-1, 1, 64 * 2).reshape(64, 2), "int4", group_size=32)
      >>> q.qvalue.dtype, q.scale.shape, q.nbytes
      (dtype(int4), (2, 2), 80)
    """
    fmt = format_of(dtype)
    one = "an array (jax.tree.map quantizes each of a tree)"
    require(hasattr(w, "shape") or isinstance(w, list | tuple | float), f"w of type {type(w).__name__}", one, TypeError)
    w = jax.lax.stop_gradient(jnp.asarray(w))
    require(jnp.issubdtype(w.dtype, jnp.floating), f"w of dtype {w.dtype}", "a floating dtype", TypeError)
    tile = _tile(w.shape, axis, group_size)
    if scale_dtype is None:
        scale_dtype = w.dtype if w.dtype.name in FLOAT_DTYPES else jnp.float32
    scales = dtype_of("scale_dtype", scale_dtype, SCALE_DTYPES)
    require(isinstance(symmetric, bool), f"symmetric={symmetric!r}", "True or False", TypeError)
    unsigned = "symmetric=True with uint4, which has no negative values"
    require(not symmetric or fmt.name != "uint4", unsigned, "symmetric=False, or int4")
    valid = symmetric or fmt.integer
    require(valid, f"symmetric=False with {fmt.name}", "symmetric=True (only integers have zero points)")
    axes = contracted_axes(axis, w.ndim, "w") if scales.name == E4M3 else None
    return _quantize(w, fmt, tile, symmetric, scales.name, axes)


def _tile(shape: tuple[int, ...], axis: int | Sequence[int] | None, group_size: int | None) -> tuple[int, ...]:
    """How many elements along each axis share a scale, from the user's arguments."""
    axes = contracted_axes(axis, len(shape), "w")
    sizes = [shape[i] for i in axes]
    size = math.prod(sizes)
    group = size if group_size is None else integer(group_size) or 0
    reach = group_tile(sizes, group) if group > 0 and size % group == 0 else None
    along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes} of sizes {tuple(sizes)}"
    valid = reach is not None and (group == size or group % GROUP_SIZES[0] == 0)
    whole = "" if len(axes) == 1 else "; whole rows of the last of these axes, or parts of one"
    accepted = f"a multiple of {GROUP_SIZES[0]} that divides them, {size} or None for all (at least one){whole}"
    require(valid, f"group_size={group_size!r} of {size} elements along {along}", accepted)
    of_axis = dict(zip(axes, reach or (), strict=True))
    return tuple(of_axis.get(i, 1) for i in range(len(shape)))


@one_computation(1, 2, 3, 4, 5)
def _quantize(
    w: jax.Array,
    fmt: Format,
    tile: tuple[int, ...],
    symmetric: bool,
    scale_dtype: str,
    shared: tuple[int, ...] | None,
) -> QuantizedArray:
    """`quantize` with checked arguments; one computation, also outside jit. `shared`: the axes along which groups have
    one channel scale; None for no channel scale."""
    counts = tuple(n // t if t else 1 for n, t in zip(w.shape, tile, strict=True))
    dtype = w.dtype if w.dtype.itemsize > 4 else jnp.float32
    w = w if w.dtype.itemsize > 1 else w.astype(dtype)  # E8M0 has no negative values
    groups = w.reshape([part for pair in zip(counts, tile, strict=True) for part in pair])
    within = tuple(range(1, groups.ndim, 2))

    def largest(x: jax.Array) -> jax.Array:
        """The largest value of each group. XLA keeps a transposed copy of what it converts before a reduction."""
        return jnp.max(x, axis=within, keepdims=True).astype(dtype)

    # The largest magnitude of a group with a value that is not finite is not finite, either. Only the scale shows such
    # values: platforms convert them to different integers.
    zero_point = None
    if symmetric:
        span, steps = largest(jnp.abs(groups)), fmt.high + 0.5 if fmt.integer else fmt.high
        good = jnp.isfinite(span)
        span = jnp.where(good, span, 0)
    else:
        # Halve first, so that no group's range overflows.
        negative, positive = (jnp.maximum(largest(x), 0) / 2 for x in (-groups, groups))
        good = jnp.isfinite(negative + positive)
        negative, positive = jnp.where(good, negative, 0), jnp.where(good, positive, 0)
        span, steps = negative + positive, (fmt.high - fmt.low) / 2
        zero_point = nearest(fmt, fmt.low + 2 * steps * (negative / jnp.where(span == 0, 1, span)))
    size, channel_scale = span / steps, None
    if shared is not None:
        whole = jnp.max(size, axis=[2 * axis for axis in shared], keepdims=True)
        # Products of the least and of the largest scales are from 2**-126 to 2**126.
        info = jnp.finfo(scale_dtype)
        whole = jnp.clip(whole, 2.0**-126 / float(info.smallest_subnormal) * float(info.max), 2.0**126)
        channel_scale = rounded_up(whole / float(info.max), jnp.float32)
        size = size / channel_scale
    scale = rounded_up(jnp.where(span == 0, 1, size), scale_dtype)
    value = jnp.where(good, groups, 0).astype(dtype) / _effective(scale, channel_scale).astype(dtype)
    if zero_point is not None:
        value += zero_point.astype(dtype)
        zero_point = zero_point.reshape(counts)
    nan = np.uint8(255) if scale_dtype == E8M0 else np.array(np.nan, scale_dtype)
    scale = from_bytes(jnp.where(good, as_bytes(scale), nan).reshape(counts), scale_dtype)
    if channel_scale is not None:
        channel_scale = channel_scale.reshape(channel_scale.shape[::2])
    return QuantizedArray(nearest(fmt, value).reshape(w.shape), scale, zero_point, fmt.name, channel_scale)


def dequantize(q: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """Turns a quantized array back into a float array.

    Computes (q - zero_point) * (scale * channel_scale) in float32, and rounds to `dtype`. Differentiable with respect
    to scale (unless it has a byte), channel scale and a floating zero point.

    Args:
      q: a QuantizedArray, a qwix QArray or an AQT QTensor.
      dtype: a floating dtype; None for `q.dtype`.

    Raises:
      TypeError, ValueError: parts of `q` that do not fit together; see `QuantizedArray`.
      TypeError: `dtype` is not floating.

    Examples:
      >>> q = jax_splitk.quantize(jnp.ones((64, 2)), "int8", group_size=None)
      >>> jax_splitk.dequantize(q, jnp.bfloat16).dtype
      dtype(bfloat16)
    """
    q = as_quantized(q)
    out = q.dtype if dtype is None else dtype_of("dtype", dtype)
    return _dequantize(q, out.name)


@one_computation(1)
def _dequantize(q: QuantizedArray, dtype: str) -> jax.Array:
    difference = differences(FORMATS[str(q.qtype)], from_4_bits(q.qvalue), q.zero_point)
    return scaled(difference, _effective(q.scale, q.channel_scale)).astype(dtype)


def _effective(scale: jax.Array, channel_scale: jax.Array | None) -> jax.Array:
    """scale * channel_scale in float32."""
    scale = to_float32(scale)
    return scale if channel_scale is None else over_tiles(jnp.multiply, scale, channel_scale)


def differences(fmt: Format, qvalue: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """qvalue - zero_point in float32."""
    value = values(fmt, qvalue)
    return value if zero_point is None else over_tiles(jnp.subtract, value, from_4_bits(zero_point).astype(jnp.float32))


def scaled(difference: jax.Array, scale: jax.Array) -> jax.Array:
    """difference * scale, both of float32."""
    return over_tiles(jnp.multiply, difference, scale)


def over_tiles(op: Any, x: jax.Array, tiled: jax.Array) -> jax.Array:
    """op(x, y), where y repeats each element of `tiled` for its tile of `x`."""
    pairs = list(zip(x.shape, tiled.shape, strict=True))
    split = x.reshape([part for n, t in pairs for part in (t, n // t if t else 1)])
    spread = tiled.reshape([part for _, t in pairs for part in (t, 1)])
    return op(split, spread).reshape(x.shape)
