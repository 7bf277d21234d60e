"""The product of a float activation and a quantized weight."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.ops import quantized_primitive, residuals
from jax_splitk.problems import quantized_matmul as problems
from jax_splitk.problems import quantized_reference
from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.problems.quantized_reference import Layout, Leaves
from jax_splitk.quantized.array import ZERO_INTEGERS
from jax_splitk.quantized.packing import PackedWeight, checked, per_feature
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import dtype_of
from jax_splitk.tuning.options import Options, settled

_X_DTYPES = (*problems.X_DTYPES, "float32")


def quantized_matmul(
    x: jax.Array,
    w: Any,
    *,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Any = None,
    transposed: PackedWeight | None = None,
) -> jax.Array:
    """x @ w for a quantized weight w, summed in float32.

    Runs under jit, vmap (over x, w or both), scan, remat and shard_map. Reverse-mode differentiation, as with every
    `jax.custom_vjp`, with respect to x, the scales and floating zero points, each computed only where it is asked for:
    x's for adapters on a frozen weight (QLoRA, arXiv:2305.14314), those of scales and zero points for
    quantization-aware training. Integer leaves have cotangents of dtype float0, and those that packing made floats
    (integer zero points) cotangents of 0.

    Kernels take a PackedWeight and an x of 16 or 8 bits; which one computes the product, or XLA, is decided at
    lowering, as for `conv_wgrad`, under the `jax_splitk.options` in force, and `jax_splitk.explain` and
    `jax_splitk.tune` see it. Leading dimensions of x and a batch of activations under vmap make one product of more
    rows; a batch of weights runs a kernel for each, one after the other. Everything else is XLA's, as the log and
    `jax_splitk.explain` say, and so is every cotangent but the one that `transposed` is for. XLA dequantizes the weight
    and multiplies: in x's dtype where that is also the result's, with the weight rounded to it, else in float32.

    Args:
      x: [..., k] of dtype bfloat16, float16, float8_e4m3fn or float32.
      w: [k, features], quantized along axis 0: a QuantizedArray, a PackedWeight (the same values in the order of the
        kernels), a qwix QArray or an AQT QTensor.
      preferred_element_type: dtype of the result: bfloat16, float16 or float32; None for x's, bfloat16 for
        float8_e4m3fn.
      implementation, config: as in `conv_wgrad`.
      transposed: a second weight, `prepack(quantize(w.T, ...))` of shape [features, k], that stands for w in the
        cotangent of x, so that a kernel can compute it: the groups of w lie along what that product does not sum
        over, so its own packing serves no kernel there. It is quantized by itself, hence as close to the unquantized
        weight as w is, but not equal to w; nothing is differentiated with respect to it. Not used where the result
        is float32. None for XLA's product with w itself.

    Returns:
      [..., features]. The cotangent of an x of dtype float8_e4m3fn saturates at 448.

    Raises:
      TypeError: dtypes other than those above, a weight of another type, a config of no known family, or with a field
        of another type than its family's.
      ValueError: shapes that do not belong together, an unknown implementation, a config that is not legal.
      NotImplementedError: an explicit implementation or config that cannot serve; names the limit. What only the
        device can tell is raised at lowering.
      FrozenCacheMiss: at lowering, no tuning decision under `JAX_SPLITK_CACHE_MODE=frozen`.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64))
      >>> jax_splitk.quantized_matmul(jnp.ones((8, 128), jnp.bfloat16), w).shape
      (8, 256)
    """
    options = settled("quantized_matmul", Options(config, implementation))
    x = jnp.asarray(x)
    if x.dtype.name not in _X_DTYPES:
        raise TypeError(f"x of dtype {x.dtype}; accepted: {', '.join(_X_DTYPES)}")
    leaves, layout = _leaves(w)
    k, features = layout.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x of shape {x.shape} and w of shape {layout.shape}; accepted: x of [..., {k}]")
    preferred = quantized_reference.widened(x.dtype) if preferred_element_type is None else preferred_element_type
    out_dtype = dtype_of("preferred_element_type", preferred, OUT_DTYPES)
    back_leaves, back = (None, None) if transposed is None else _back(transposed, layout, options)
    _check_limit(x, layout, options)
    x, *arguments = _compat.vary_alike((x, *leaves, back_leaves))
    integer_zeros = isinstance(w, PackedWeight) and w.zero_dtype in ZERO_INTEGERS
    call = _Call(layout, x.dtype, out_dtype, options, back, integer_zeros)
    out = _matmul_jitted(call, x.reshape(-1, k), *arguments)
    return out.reshape(*x.shape[:-1], features)


@dataclasses.dataclass(frozen=True)
class _Back:
    """Everything static about the product with the transposed weight."""

    layout: Layout
    options: Options


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything static about one product."""

    layout: Layout
    x_dtype: np.dtype
    out_dtype: np.dtype
    options: Options
    back: _Back | None
    integer_zeros: bool  # before packing made them floats


def _leaves(w: Any) -> tuple[Leaves, Layout]:
    """(elements or words, scale, zero point) of a weight, and what they are."""
    if isinstance(w, PackedWeight):
        checked(w)
        zero_point = None if w.zero_point is None else jnp.asarray(w.zero_point)
        layout = Layout(w.shape, w.qtype, w.group_size, w.layout)
        return (jnp.asarray(w.words), jnp.asarray(w.scale), zero_point), layout
    if not hasattr(w, "qvalue"):
        accepted = "QuantizedArray, PackedWeight, a qwix QArray, an AQT QTensor"
        raise TypeError(f"w of type {type(w).__name__}; accepted: {accepted}")
    q = per_feature(w)
    layout = Layout((q.shape[0], q.shape[1]), str(q.qtype), q.group_size, None)
    return (q.qvalue, q.scale, q.zero_point), layout


def _back(transposed: Any, layout: Layout, options: Options) -> tuple[Leaves, _Back]:
    """`_leaves` of the weight that stands for w in the cotangent of x, and the rest."""
    if not isinstance(transposed, PackedWeight):
        raise TypeError(f"transposed of type {type(transposed).__name__}; accepted: PackedWeight, None")
    leaves, back_layout = _leaves(transposed)
    accepted = layout.shape[::-1]
    if back_layout.shape != accepted:
        raise ValueError(f"transposed of shape {back_layout.shape}; accepted: {accepted}, that of w.T")
    return leaves, _Back(back_layout, dataclasses.replace(options, config=None))


def _check_limit(x: jax.Array, layout: Layout, options: Options) -> None:
    limit = problems.refusal(x.shape, x.dtype.name, layout.shape, layout.version)
    if limit is not None and (options.config is not None or options.implementation not in (None, "xla")):
        given = f"implementation={options.implementation!r}" if options.config is None else f"config={options.config!r}"
        raise NotImplementedError(f"{given}: {limit}. Or use implementation=None or 'xla'.")


# ---- the product and its cotangents ----------------------------------------------------------------------------------


def _product_transposed(call: _Call, g: jax.Array, leaves: Leaves, back_leaves: Leaves | None) -> jax.Array:
    """g [n, features] @ w.T -> [n, k] of x's dtype."""
    if call.back is None or back_leaves is None or g.dtype.name not in problems.X_DTYPES:
        return quantized_reference.product_transposed(call.layout, g, leaves, call.x_dtype)
    return _by_transposed(call, call.back, g, leaves, back_leaves)


def _dx_by_transposed(call: _Call, back: _Back, g: jax.Array, leaves: Leaves, back_leaves: Leaves) -> jax.Array:
    """`_product_transposed` with the weight that stands for w's; differentiated, it is the product with w itself."""
    del leaves
    dx = quantized_primitive.bind(g, back_leaves, back.layout, quantized_reference.widened(call.x_dtype), back.options)
    return quantized_reference.to_cotangent(dx, call.x_dtype)


_by_transposed: Any = jax.custom_jvp(_dx_by_transposed, nondiff_argnums=(0, 1))


def _by_transposed_jvp(call: _Call, back: _Back, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (g, leaves, back_leaves), (g_dot, leaves_dot, _) = primals, tangents
    out = _by_transposed(call, back, g, leaves, back_leaves)
    terms = []
    if not isinstance(g_dot, jax.custom_derivatives.SymbolicZero):
        terms.append(_by_transposed(call, back, g_dot, leaves, back_leaves))
    floating = (1,) if call.integer_zeros else (1, 2)
    asked = [i for i in floating if not isinstance(leaves_dot[i], jax.custom_derivatives.SymbolicZero | None)]
    if asked:

        def of(*given: jax.Array) -> jax.Array:
            mixed = list(leaves)
            for i, leaf in zip(asked, given, strict=True):
                mixed[i] = leaf
            return quantized_reference.product_transposed(call.layout, g, (mixed[0], mixed[1], mixed[2]), call.x_dtype)

        terms.append(jax.jvp(of, tuple(leaves[i] for i in asked), tuple(leaves_dot[i] for i in asked))[1])
    return out, sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(out)


_by_transposed.defjvp(_by_transposed_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    call: _Call,
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    back_leaves: Leaves | None,
) -> jax.Array:
    del back_leaves
    return quantized_primitive.bind(x, (values, scale, zero_point), call.layout, call.out_dtype, call.options)


def _forward(call: _Call, x: Any, values: Any, scale: Any, zero_point: Any, back_leaves: Any) -> tuple[jax.Array, Any]:
    of_zero_point = zero_point is not None and not call.integer_zeros and zero_point.perturbed
    wanted = tuple(residuals.flag(asked) for asked in (x.perturbed, scale.perturbed, of_zero_point))
    leaves = (values.value, scale.value, None if zero_point is None else zero_point.value)
    back = None
    if back_leaves is not None:
        back = tuple(None if leaf is None else residuals.kept(leaf.value, x.perturbed) for leaf in back_leaves)
    # The activation is kept only for the weight's cotangents.
    kept = residuals.kept(x.value, scale.perturbed or of_zero_point)
    out = quantized_primitive.bind(x.value, leaves, call.layout, call.out_dtype, call.options)
    return out, (wanted, kept, leaves, back)


def _backward(call: _Call, forward: Any, g: Any) -> tuple[jax.Array | None, ...]:
    wanted, x, leaves, back_leaves = forward
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None
    _, scale, zero_point = leaves
    of_x, of_scale, of_zero_point = map(residuals.is_set, wanted)
    dx = _product_transposed(call, g, leaves, back_leaves) if of_x else None
    d_scale = d_zero_point = None
    if of_scale:
        d_scale = quantized_reference.scale_cotangent(call.layout, x, g, leaves)
        d_scale = quantized_reference.group_order(call.layout, d_scale, scale)
    if of_zero_point:
        d_zero_point = quantized_reference.zero_point_cotangent(call.layout, x, g, leaves)
        d_zero_point = quantized_reference.group_order(call.layout, d_zero_point, zero_point)
    return dx, None, d_scale, d_zero_point, None


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)
_matmul_jitted = jax.jit(_matmul, static_argnums=0)  # one computation also outside jit
