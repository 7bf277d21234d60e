"""The product with a quantized weight in plain lax: dequantize, then multiply. The fallback runs it, and kernels are
checked against it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.dot_reference import lax_dot_general
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.random_operands import Stretches
from jax_splitk.quantized.array import differences, scaled
from jax_splitk.quantized.formats import FORMATS, from_4_bits, from_codes, to_float32
from jax_splitk.quantized.packing import pack_groups, unpack_codes, unpack_groups


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of a weight's arrays."""

    shape: tuple[int, int]
    qtype: str
    group_size: int
    version: int | None  # of a PackedWeight's layout; None for a QuantizedArray
    channel: bool = False  # whether there are channel scales

    def fields(self, leaves: "Leaves") -> dict[str, Any]:
        """The fields of a problem that say what the weight is made of."""
        _, scale, *more = leaves
        zero_dtype, channel_dtype = ("none" if leaf is None else leaf.dtype.name for leaf in more)
        return {
            "qtype": self.qtype,
            "group_size": self.group_size,
            "scale_dtype": scale.dtype.name,
            "zero_dtype": zero_dtype,
            "layout": int(self.version or 0),
            "channel_dtype": channel_dtype,
        }

    def divided(self, k_parts: int, feature_parts: int) -> "Layout":
        """The layout of one of so many parts of equal size."""
        (k, features), group = self.shape, self.group_size
        part = k // k_parts
        group = part if group == k else group
        return dataclasses.replace(self, shape=(part, features // feature_parts), group_size=group)


# Elements or words, scale, zero point, channel scale.
Leaves = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def leaves_of(layout: Layout, operands: Sequence[Any]) -> Leaves:
    """A weight's leaves from a product's operands after x, which are those of the leaves that the weight has."""
    values, scale, *more = operands
    channel_scale = more.pop() if layout.channel else None
    return values, scale, more[0] if more else None, channel_scale


def problem_product(problem: QuantizedMatmulProblem, x: jax.Array, *operands: jax.Array) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers."""
    layout = _layout(problem)
    multiplied = product_transposed if problem.transposed else product
    return multiplied(layout, x, leaves_of(layout, operands), problem.out_dtype)


def problem_sums(problem: QuantizedMatmulProblem, x: jax.Array, *operands: jax.Array) -> jax.Array:
    """The result of a problem before it is rounded to the problem's out_dtype: in float32."""
    layout = _layout(problem)
    return _dot(x, dequantized(layout, leaves_of(layout, operands)), 0, jnp.dtype(problem.out_dtype))


def _layout(problem: QuantizedMatmulProblem) -> Layout:
    shape, channel = (problem.k, problem.features), problem.channel_dtype != "none"
    return Layout(shape, problem.qtype, problem.group_size, problem.layout or None, channel)


def product(layout: Layout, x: jax.Array, leaves: Leaves, out_dtype: Any) -> jax.Array:
    """x [n, k] @ w -> [n, features] of out_dtype."""
    dtype = jnp.dtype(out_dtype)
    return _dot(x, dequantized(layout, leaves), 0, dtype).astype(dtype)


def product_transposed(layout: Layout, g: jax.Array, leaves: Leaves, out_dtype: Any) -> jax.Array:
    """g [n, features] @ w.T -> [n, k] of out_dtype, the cotangent of an x of that dtype."""
    out = jnp.dtype(out_dtype)
    return to_cotangent(_dot(g, dequantized(layout, leaves), 1, widened(out)).astype(widened(out)), out)


def widened(dtype: np.dtype) -> np.dtype:
    """The dtype in which the cotangent of an x of `dtype` is computed."""
    return jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype


def to_cotangent(dx: jax.Array, dtype: np.dtype) -> jax.Array:
    """dx of dtype `widened(dtype)` in `dtype`."""
    if dtype.itemsize > 1:
        return dx
    limit = float(jnp.finfo(dtype).max)  # larger values would become NaN
    return jnp.clip(dx, -limit, limit).astype(dtype)


def cotangent(wrt: str, layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves, like: jax.Array) -> jax.Array:
    """The cotangent of the leaf with the name `wrt`, in the layout's order and the dtype of that leaf, `like`."""
    found = _COTANGENTS[wrt](layout, x, g, leaves)
    group = layout.shape[0] if wrt == "channel_scale" else layout.group_size
    return (found if layout.version is None else pack_groups(found, layout.shape[0], group)).astype(like.dtype)


def _scale_cotangent(layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: the sum over each group of (q - zero_point) * dW, where dW = x.T @ g."""
    return _over_groups(layout, _d_weight(x, g) * _differences(layout, leaves)) * _channels(layout, leaves)


def _channel_scale_cotangent(layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[1, features] in float32: the sum over k of (q - zero_point) * scale * dW."""
    by_group = _over_groups(layout, _d_weight(x, g) * _differences(layout, leaves))
    return jnp.sum(by_group * _groups(layout, to_float32(leaves[1])), axis=0, keepdims=True)


def _d_weight(x: jax.Array, g: jax.Array) -> jax.Array:
    """x.T @ g in float32."""
    if x.dtype != g.dtype:
        x, g = x.astype(jnp.float32), g.astype(jnp.float32)
    return lax_dot_general(
        x, g, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _over_groups(layout: Layout, per_element: jax.Array) -> jax.Array:
    """The sum over the k of each group."""
    return per_element.reshape(_group_count(layout), layout.group_size, layout.shape[1]).sum(1)


def _zero_point_cotangent(layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: -scale times the sum of dW over each group, by sums of x over each group."""
    sums = x.astype(jnp.float32).reshape(x.shape[0], _group_count(layout), layout.group_size).sum(2)
    d_weight = lax_dot_general(sums, g.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return -_scales(layout, leaves) * d_weight


_COTANGENTS = {
    "scale": _scale_cotangent,
    "zero_point": _zero_point_cotangent,
    "channel_scale": _channel_scale_cotangent,
}


def operand_error(problem: QuantizedMatmulProblem) -> float:
    """The relative error that results may have by kernels that round operands to e4m3, or the table of nf4 to the 16
    bits that they multiply."""
    if problem.compute_dtype == "float8_e4m3fn":
        return 2.0**-4
    if problem.qtype != "nf4":
        return 0.0
    return 2.0**-8 if problem.x_dtype == "bfloat16" else 2.0**-11


def random_operands(problem: QuantizedMatmulProblem, seed: int) -> tuple[np.ndarray, ...]:
    """(x, words, scale[, zero_point][, channel_scale]): every code of the format but NaN, and scales that make results
    of about 1."""
    stretches, fmt = Stretches(seed), FORMATS[problem.qtype]
    x, words = stretches.normals(problem.x_shape, problem.x_dtype), stretches.words(problem.words_shape)
    if problem.qtype == "float8_e4m3fn":
        octets = words.view(np.uint8)
        words = np.where(octets & 0x7F == 0x7F, np.uint8(0), octets).view(np.uint32)
    groups = (problem.k // problem.group_size, problem.features)

    def packed(values: np.ndarray, dtype: str, group: int = problem.group_size) -> np.ndarray:
        return pack_groups(values.astype(jnp.dtype(dtype)), problem.k, group)

    size = np.exp(0.25 * stretches.normals(groups, "float32"))
    factor, channels = 1 / (fmt.high / 2 * math.sqrt(problem.contracted)), problem.channel_dtype != "none"
    operands, more = (x, words, packed(size if channels else size * factor, problem.scale_dtype)), ()
    if problem.zero_dtype != "none":
        codes = stretches.words(groups).astype(np.int64) % (int(fmt.high) + 1 - int(fmt.low))
        more = (packed(codes + int(fmt.low), problem.zero_dtype),)
    if channels:
        channel_scale = factor * np.exp(0.25 * stretches.normals((1, problem.features), "float32"))
        more = (*more, packed(channel_scale, problem.channel_dtype, problem.k))
    return *operands, *more


def _group_count(layout: Layout) -> int:
    return layout.shape[0] // layout.group_size


def _groups(layout: Layout, x: jax.Array) -> jax.Array:
    """Scales or zero points as [groups, features]."""
    return x if layout.version is None else unpack_groups(x, _group_count(layout), layout.shape[1])


def _channels(layout: Layout, leaves: Leaves) -> jax.Array | float:
    """Channel scales as [1, features]; 1 for a weight without."""
    if (scale := leaves[3]) is None:
        return 1.0
    return scale if layout.version is None else unpack_groups(scale, 1, layout.shape[1])


def _scales(layout: Layout, leaves: Leaves) -> jax.Array:
    """The scale of each group and feature, [groups, features] in float32."""
    scale = _groups(layout, to_float32(leaves[1]))
    return scale if leaves[3] is None else scale * _channels(layout, leaves)


def _differences(layout: Layout, leaves: Leaves) -> jax.Array:
    """q - zero_point, [k, features] in float32."""
    values, _, zero_point, _ = leaves
    fmt = FORMATS[layout.qtype]
    values = from_4_bits(values) if layout.version is None else from_codes(fmt, unpack_codes(fmt, values, layout.shape))
    return differences(fmt, values, None if zero_point is None else _groups(layout, zero_point))


def dequantized(layout: Layout, leaves: Leaves) -> jax.Array:
    """The dequantized weight, [k, features] in float32."""
    return scaled(_differences(layout, leaves), _scales(layout, leaves))


def float16_factor(weight: jax.Array, axis: int) -> jax.Array:
    """A power of two for each output that brings weights into float16's range: divided by it, the largest weight along
    `axis` is 1 to 2. The axis stays, with size 1."""
    _, exponent = jnp.frexp(jnp.max(jnp.abs(weight), axis=axis, keepdims=True, initial=0))
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, -120))


def _dot(a: jax.Array, weight: jax.Array, axis: int, out_dtype: np.dtype) -> jax.Array:
    """a [n, c] times the float32 `weight`, summed over its `axis` of size c, in float32. The result will be rounded to
    `out_dtype`.

    If a and the result have the same 16-bit dtype, the weight is rounded to it for the tensor cores. This error is at
    most that of rounding the result.
    """
    if a.dtype.itemsize == 1:
        a = a.astype(jnp.bfloat16)  # exact
    factor = None
    if a.dtype != out_dtype:
        a = a.astype(jnp.float32)
    elif a.dtype == jnp.float16:
        factor = float16_factor(weight, axis)
        weight = weight / factor
    out = lax_dot_general(
        a,
        weight.astype(a.dtype),
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out if factor is None else out * factor.reshape(1, -1)
