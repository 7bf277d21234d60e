"""The product of a float activation and a quantized weight."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk import _compat
from jax_splitk.quantized.array import differences, scaled
from jax_splitk.quantized.formats import FORMATS, from_codes
from jax_splitk.quantized.packing import (
    PackedWeight,
    checked,
    pack_groups,
    per_feature,
    unpack_codes,
    unpack_groups,
)

X_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float32")
OUT_DTYPES = ("bfloat16", "float16", "float32")


def quantized_matmul(
    x: jax.Array,
    w: Any,
    *,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array:
    """x @ w for a quantized weight w, summed in float32.

    Runs under jit, vmap (over x, w or both), scan, remat and shard_map. Reverse-mode differentiation, as with every
    `jax.custom_vjp`, with respect to x, the scales and floating zero points, each computed only where it is asked for:
    x's for adapters on a frozen weight (QLoRA, arXiv:2305.14314), those of scales and zero points for
    quantization-aware training. Integer leaves have cotangents of dtype float0.

    XLA's implementation, the only one so far, dequantizes the weight and multiplies: in x's dtype where that is also
    the result's, with the weight rounded to it, else in float32.

    Args:
      x: [..., k] of dtype bfloat16, float16, float8_e4m3fn or float32.
      w: [k, features], quantized along axis 0: a QuantizedArray, a PackedWeight (the same values in the order of the
        kernels), a qwix QArray or an AQT QTensor.
      preferred_element_type: dtype of the result: bfloat16, float16 or float32; None for x's, bfloat16 for
        float8_e4m3fn.
      implementation: None (the best available; always works) or "xla". "cutlass" and "host" have no kernel yet.
      config: None; no kernel has configurations yet.

    Returns:
      [..., features]. The cotangent of an x of dtype float8_e4m3fn saturates at 448.

    Raises:
      TypeError: dtypes other than those above, a weight of another type, a config.
      ValueError: shapes that do not belong together, an unknown implementation.
      NotImplementedError: an implementation that has no kernel.
    """
    if implementation in ("cutlass", "host"):
        raise NotImplementedError(
            f"implementation={implementation!r}: there is no such kernel for quantized_matmul; use None or 'xla'"
        )
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r}; accepted: None, 'cutlass', 'host', 'xla'")
    if config is not None:
        raise TypeError(f"config={config!r}; accepted: None, for no kernel of quantized_matmul has configurations")
    x = jnp.asarray(x)
    if x.dtype.name not in X_DTYPES:
        raise TypeError(f"x of dtype {x.dtype}; accepted: {', '.join(X_DTYPES)}")
    leaves, layout = _leaves(w)
    if x.ndim < 1 or x.shape[-1] != layout.shape[0]:
        raise ValueError(f"x of shape {x.shape} and w of shape {layout.shape}; accepted: x of [..., {layout.shape[0]}]")
    natural = jnp.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    out_dtype = jnp.dtype(natural if preferred_element_type is None else preferred_element_type)
    if out_dtype.name not in OUT_DTYPES:
        raise TypeError(f"preferred_element_type={preferred_element_type!r}; accepted: {', '.join(OUT_DTYPES)}")
    # All vary over the mesh axes that any varies over, so that AD sums their cotangents over them.
    operands = jax.tree.leaves((x, leaves))
    x, leaves = jax.tree.map(lambda leaf: _compat.vary_like(leaf, *operands), (x, leaves))
    call = _Call(layout, x.dtype, out_dtype)
    out = _matmul_jitted(call, x.reshape(-1, x.shape[-1]), *leaves)
    return out.reshape(*x.shape[:-1], layout.shape[1])


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What a weight's arrays mean."""

    shape: tuple[int, int]
    qtype: str
    group_size: int
    version: int | None  # of a PackedWeight's layout; None for a QuantizedArray


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything static about one product."""

    layout: _Layout
    x_dtype: np.dtype
    out_dtype: np.dtype


Leaves = tuple[jax.Array, jax.Array, jax.Array | None]


def _leaves(w: Any) -> tuple[Leaves, _Layout]:
    """(elements or words, scale, zero point) of a weight, and what they are."""
    if isinstance(w, PackedWeight):
        checked(w)
        zero_point = None if w.zero_point is None else jnp.asarray(w.zero_point)
        layout = _Layout(w.shape, w.qtype, w.group_size, w.layout)
        return (jnp.asarray(w.words), jnp.asarray(w.scale), zero_point), layout
    q = per_feature(w)
    layout = _Layout((q.shape[0], q.shape[1]), str(q.qtype), q.group_size, None)
    return (q.qvalue, q.scale, q.zero_point), layout


# ---- the product and its cotangents ----------------------------------------------------------------------------------


def _product(call: _Call, x: jax.Array, *leaves: Any) -> jax.Array:
    """x [n, k] @ w -> [n, features] of call.out_dtype. Kernels go below this function."""
    return _dot(x, _dequantized(call.layout, leaves), 0, call.out_dtype)


def _product_transposed(call: _Call, g: jax.Array, *leaves: Any) -> jax.Array:
    """g [n, features] @ w.T -> [n, k] of x's dtype. Kernels go below this function, too."""
    if call.x_dtype.itemsize > 1:
        return _dot(g, _dequantized(call.layout, leaves), 1, call.x_dtype)
    limit = float(jnp.finfo(call.x_dtype).max)  # beyond it lies only NaN
    dx = _dot(g, _dequantized(call.layout, leaves), 1, jnp.dtype(jnp.bfloat16))
    return jnp.clip(dx, -limit, limit).astype(call.x_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: _Call, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    return _product(call, x, values, scale, zero_point)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which cotangents somebody asks for."""

    x: bool
    scale: bool
    zero_point: bool


def _forward(call: _Call, x: Any, values: Any, scale: Any, zero_point: Any) -> tuple[jax.Array, Any]:
    wanted = _Wanted(x.perturbed, scale.perturbed, zero_point is not None and zero_point.perturbed)
    leaves = (values.value, scale.value, None if zero_point is None else zero_point.value)
    # The activation is kept only for the weight's cotangents.
    kept = x.value if wanted.scale or wanted.zero_point else None
    return _product(call, x.value, *leaves), (wanted, kept, leaves)


def _backward(call: _Call, residuals: Any, g: Any) -> tuple[jax.Array | None, ...]:
    wanted, x, leaves = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    _, scale, zero_point = leaves
    dx = _product_transposed(call, g, *leaves) if wanted.x else None
    d_scale = d_zero_point = None
    if wanted.scale:
        d_scale = _group_order(call.layout, _scale_cotangent(call.layout, x, g, leaves), scale)
    if wanted.zero_point:
        d_zero_point = _group_order(call.layout, _zero_point_cotangent(call.layout, x, g, leaves), zero_point)
    return dx, None, d_scale, d_zero_point


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)
_matmul_jitted = jax.jit(_matmul, static_argnums=0)  # one computation also outside jit


def _scale_cotangent(layout: _Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: the sum over each group of (q - zero_point) * dW, where dW = x.T @ g."""
    if x.dtype != g.dtype:
        x, g = x.astype(jnp.float32), g.astype(jnp.float32)
    d_weight = lax.dot_general(
        x, g, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    product = d_weight * _differences(layout, leaves)
    return product.reshape(-1, layout.group_size, layout.shape[1]).sum(1)


def _zero_point_cotangent(layout: _Layout, x: jax.Array, g: jax.Array, leaves: Leaves) -> jax.Array:
    """[groups, features] in float32: -scale times the sum of dW over each group, by sums of x over each group."""
    sums = x.astype(jnp.float32).reshape(x.shape[0], layout.shape[0] // layout.group_size, -1).sum(2)
    d_weight = lax.dot_general(sums, g.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return -_groups(layout, leaves[1]).astype(jnp.float32) * d_weight


# ---- weights of either layout ----------------------------------------------------------------------------------------


def _groups(layout: _Layout, x: jax.Array) -> jax.Array:
    """Scales or zero points as [groups, features]."""
    k, features = layout.shape
    return x if layout.version is None else unpack_groups(x, k // layout.group_size, features)


def _group_order(layout: _Layout, x: jax.Array, like: jax.Array) -> jax.Array:
    """[groups, features] in the layout's order and the dtype of the leaf `like`."""
    ordered = x if layout.version is None else pack_groups(x, layout.shape[0], layout.group_size)
    return ordered.astype(like.dtype)


def _differences(layout: _Layout, leaves: Leaves) -> jax.Array:
    """q - zero_point, [k, features] in float32."""
    values, _, zero_point = leaves
    fmt = FORMATS[layout.qtype]
    if layout.version is not None:
        values = from_codes(fmt, unpack_codes(fmt, values, layout.shape))
    return differences(fmt, values, None if zero_point is None else _groups(layout, zero_point))


def _dequantized(layout: _Layout, leaves: Leaves) -> jax.Array:
    """The weight, [k, features] in float32."""
    return scaled(_differences(layout, leaves), _groups(layout, leaves[1]))


def _dot(a: jax.Array, weight: jax.Array, axis: int, out_dtype: np.dtype) -> jax.Array:
    """a [n, c] times the float32 `weight`, summed over its `axis` of size c, in float32.

    Where a and the result are of one 16-bit dtype the weight is rounded to it, for the tensor cores' sake: an error no
    larger than that of rounding the result.
    """
    if a.dtype.itemsize == 1:
        a = a.astype(jnp.bfloat16)  # exact
    factor = None
    if a.dtype != out_dtype:
        a = a.astype(jnp.float32)
    elif a.dtype == jnp.float16:
        # Weights outside float16's range are brought into it by a power of two for each output.
        _, exponent = jnp.frexp(jnp.max(jnp.abs(weight), axis=axis, keepdims=True))
        factor = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, -120))
        weight = weight / factor
    out = lax.dot_general(
        a,
        weight.astype(a.dtype),
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (out if factor is None else out * factor.reshape(1, -1)).astype(out_dtype)
