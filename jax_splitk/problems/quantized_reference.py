"""The product with a quantized weight in plain lax: dequantize, then multiply. The fallback runs it, and kernels are
checked against it."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.dot_reference import lax_dot_general
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.random_operands import Stretches
from jax_splitk.quantized.array import differences, scaled
from jax_splitk.quantized.formats import FORMATS, from_codes
from jax_splitk.quantized.packing import pack_groups, unpack_codes, unpack_groups


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of a weight's arrays."""

    shape: tuple[int, int]
    qtype: str
    group_size: int
    version: int | None  # of a PackedWeight's layout; None for a QuantizedArray


# Elements or words, scale, zero point.
Leaves = tuple[jax.Array, jax.Array, jax.Array | None]


def problem_product(
    problem: QuantizedMatmulProblem,
    x: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers."""
    layout = Layout((problem.k, problem.features), problem.qtype, problem.group_size, problem.layout or None)
    return product(layout, x, (words, scale, zero_point), problem.out_dtype)


def product(layout: Layout, x: jax.Array, leaves: Leaves, out_dtype: Any) -> jax.Array:
    """x [n, k] @ w -> [n, features] of out_dtype."""
    return _dot(x, _dequantized(layout, leaves), 0, jnp.dtype(out_dtype))


def product_transposed(layout: Layout, g: jax.Array, leaves: Leaves, out_dtype: Any) -> jax.Array:
    """g [n, features] @ w.T -> [n, k] of out_dtype, the cotangent of an x of that dtype."""
    out = jnp.dtype(out_dtype)
    return to_cotangent(_dot(g, _dequantized(layout, leaves), 1, widened(out)), out)


def widened(dtype: np.dtype) -> np.dtype:
    """The dtype in which the cotangent of an x of `dtype` is computed."""
    return jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype


def to_cotangent(dx: jax.Array, dtype: np.dtype) -> jax.Array:
    """dx of dtype `widened(dtype)` in `dtype`."""
    if dtype.itemsize > 1:
        return dx
    limit = float(jnp.finfo(dtype).max)  # larger values would become NaN
    return jnp.clip(dx, -limit, limit).astype(dtype)


def scale_cotangent(layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: the sum over each group of (q - zero_point) * dW, where dW = x.T @ g."""
    if x.dtype != g.dtype:
        x, g = x.astype(jnp.float32), g.astype(jnp.float32)
    d_weight = lax_dot_general(
        x, g, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    per_element = d_weight * _differences(layout, leaves)
    return per_element.reshape(_group_count(layout), layout.group_size, layout.shape[1]).sum(1)


def zero_point_cotangent(layout: Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: -scale times the sum of dW over each group, by sums of x over each group."""
    sums = x.astype(jnp.float32).reshape(x.shape[0], _group_count(layout), layout.group_size).sum(2)
    d_weight = lax_dot_general(sums, g.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return -_groups(layout, leaves[1]).astype(jnp.float32) * d_weight


def group_order(layout: Layout, x: jax.Array, like: jax.Array) -> jax.Array:
    """Values [groups, features] in the layout's order and the dtype of the leaf `like`."""
    ordered = x if layout.version is None else pack_groups(x, layout.shape[0], layout.group_size)
    return ordered.astype(like.dtype)


def random_operands(problem: QuantizedMatmulProblem, seed: int) -> tuple[np.ndarray, ...]:
    """(x, words, scale[, zero_point]): every code of the format but NaN, and scales that make results of about 1."""
    stretches, fmt = Stretches(seed), FORMATS[problem.qtype]
    x, words = stretches.normals(problem.x_shape, problem.x_dtype), stretches.words(problem.words_shape)
    if problem.qtype == "float8_e4m3fn":
        octets = words.view(np.uint8)
        words = np.where(octets & 0x7F == 0x7F, np.uint8(0), octets).view(np.uint32)
    groups = (problem.k // problem.group_size, problem.features)

    def packed(values: np.ndarray, dtype: str) -> np.ndarray:
        return pack_groups(values.astype(jnp.dtype(dtype)), problem.k, problem.group_size)

    size = np.exp(0.25 * stretches.normals(groups, "float32")) / (fmt.high / 2 * math.sqrt(problem.k))
    operands = x, words, packed(size, problem.scale_dtype)
    if problem.zero_dtype == "none":
        return operands
    codes = stretches.words(groups).astype(np.int64) % (int(fmt.high) + 1 - int(fmt.low))
    return *operands, packed(codes + int(fmt.low), problem.zero_dtype)


def _group_count(layout: Layout) -> int:
    return layout.shape[0] // layout.group_size


def _groups(layout: Layout, x: jax.Array) -> jax.Array:
    """Scales or zero points as [groups, features]."""
    return x if layout.version is None else unpack_groups(x, _group_count(layout), layout.shape[1])


def _differences(layout: Layout, leaves: Leaves) -> jax.Array:
    """q - zero_point, [k, features] in float32."""
    values, _, zero_point = leaves
    fmt = FORMATS[layout.qtype]
    if layout.version is not None:
        values = from_codes(fmt, unpack_codes(fmt, values, layout.shape))
    return differences(fmt, values, None if zero_point is None else _groups(layout, zero_point))


def _dequantized(layout: Layout, leaves: Leaves) -> jax.Array:
    """The dequantized weight, [k, features] in float32."""
    return scaled(_differences(layout, leaves), _groups(layout, leaves[1]))


def _dot(a: jax.Array, weight: jax.Array, axis: int, out_dtype: np.dtype) -> jax.Array:
    """a [n, c] times the float32 `weight`, summed over its `axis` of size c, in float32.

    If a and the result have the same 16-bit dtype, the weight is rounded to it for the tensor cores. This error is at
    most that of rounding the result.
    """
    if a.dtype.itemsize == 1:
        a = a.astype(jnp.bfloat16)  # exact
    factor = None
    if a.dtype != out_dtype:
        a = a.astype(jnp.float32)
    elif a.dtype == jnp.float16:
        # A power of two for each output brings weights into float16's range.
        _, exponent = jnp.frexp(jnp.max(jnp.abs(weight), axis=axis, keepdims=True, initial=0))
        factor = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, -120))
        weight = weight / factor
    out = lax_dot_general(
        a,
        weight.astype(a.dtype),
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (out if factor is None else out * factor.reshape(1, -1)).astype(out_dtype)
