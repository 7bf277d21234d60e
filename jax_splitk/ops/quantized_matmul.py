"""The product of a float activation and a quantized weight."""

import math
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_splitk.ops.epilogue_arguments import WeightAxes, epilogue_operands, unjoined
from jax_splitk.ops.norm_arguments import check_norm, norm_scale_operand
from jax_splitk.ops.quantized_epilogue import EpilogueCall
from jax_splitk.ops.quantized_primitive import QuantizedCall
from jax_splitk.problems import quantized_matmul as problems
from jax_splitk.problems import quantized_reference
from jax_splitk.problems.dot_general import Activation
from jax_splitk.problems.epilogue import GATED, GatedActivation
from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.problems.quantized_reference import Layout, Leaves
from jax_splitk.quantized.array import ZERO_INTEGERS, Weight, is_weight, unwrapped
from jax_splitk.quantized.formats import BYTE_SCALES
from jax_splitk.quantized.matrix import features_of
from jax_splitk.quantized.packed_weight import PackedWeight, checked, per_feature
from jax_splitk.quantized.permuted import PermutedWeight
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import dtype_of
from jax_splitk.runtime.computation import one_computation
from jax_splitk.tuning.options import Implementation, Options, rounding_dtype, settled

_X_DTYPES = (*problems.X_DTYPES, "float32")


def quantized_matmul(
    x: jax.Array,
    w: Any,
    *,
    bias: jax.Array | None = None,
    activation: Activation | GatedActivation | None = None,
    residual: jax.Array | None = None,
    norm_epsilon: float | None = None,
    norm_scale: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """The product x @ w with a weight w of 4 or 8 bits, summed in float32. `x @ w` is this function, too.

    With an epilogue it is activation(x @ w + bias) + residual, computed in float32 of the whole sum and rounded once,
    in the kernel that computes the product. Under differentiation of an activation, x @ w is rounded to the result's
    dtype and kept, and XLA computes the epilogue. XLA also computes it from the rounded x @ w where devices divide k,
    and where the weight has tiles of padding in its features.

    With `norm_epsilon` the product is that of x / sqrt(mean(x**2) + norm_epsilon) * norm_scale, with the mean over all
    axes that the weight contracts (RMSNorm, arXiv:1910.07467), computed in float32 and rounded to x's dtype. With at
    most 32 rows of bfloat16 the kernel of the product does that itself: it rounds x * norm_scale, and divides the
    products' sums by the root. It takes a k that is a multiple of 8 and a scale of bfloat16. Else, and under
    differentiation, XLA normalizes x.

    Runs under jit, vmap (over x, w or both), scan, remat and shard_map. It can be differentiated with respect to x (in
    which it is linear), the scales and floating zero points, in forward and reverse mode and to any order. Adapters on
    a frozen weight (QLoRA, arXiv:2305.14314) need the gradient of x; quantization-aware training needs those of scales
    and zero points. Each is computed only if it is needed. Integer leaves have cotangents of dtype float0. Integer zero
    points, which packing turns into floats, have cotangents of 0.

    Kernels take a PackedWeight and an x of 16 or 8 bits. Lowering chooses a kernel or XLA, as for `conv_wgrad`, under
    the current `jax_splitk.options`. `jax_splitk.explain` and `jax_splitk.tune` see the operation. Leading dimensions
    of x and a batch of activations under vmap make one product of more rows; a batch of weights runs a kernel for each,
    one after the other. XLA computes all other products, as the log and `jax_splitk.explain` say. XLA dequantizes the
    weight and multiplies. If x and the result have the same dtype, it rounds the weight to it and multiplies in it,
    else in float32.

    With `compute_dtype=float8_e4m3fn` kernels may multiply in e4m3, for which tensor cores are twice as fast. The
    family `quantized_fp8` does so with many rows. It rounds x, each row over a power of two, and the weight with its
    scales and zero points, each feature over a power of two. Each of the two adds an error of about 2.7% (of the norm
    of a result of random operands), where int4 weights in groups of 64 have one of 10% from their quantization. Other
    families, XLA and derivatives do not round to e4m3.

    The cotangent of x is the product with the transpose of the same packed weight, rounded once to the dtype of the
    result's cotangent. It is an operation of its own, `quantized_matmul_transposed`, for which lowering chooses a
    kernel or XLA likewise, under the options of this call without its config. An implementation that cannot serve it is
    ignored. XLA computes the cotangents of scales and zero points.

    Args:
      x: [..., k] of dtype bfloat16, float16, float8_e4m3fn or float32. A packed weight that contracts several axes
        takes x of [..., *their sizes], and a stack of weights x of [*stack, ..., k].
      w: [k, features], quantized along axis 0: a QuantizedArray, a PackedWeight (the same values in the order of the
        kernels), a qwix QArray (also as PTQ's leaf holds it) or an AQT QTensor. A PackedWeight may have any rank. Or a
        PermutedWeight of either kind. Or a JoinedWeight, which a gated activation needs.
      bias: added to the product: [features], or [*stack, features] with a stack of weights; features is the shape of
        the axes that the product keeps. With a gated activation [2, features] or [*stack, 2, features]: the bias of the
        gate, and that of the other part. None: nothing is added.
      activation: "relu", "gelu" (`jax.nn.gelu`, by tanh), "gelu_exact" (with approximate=False) or "silu". Or a gated
        one of a JoinedWeight, of x @ gate and x @ up: "swiglu" (silu(gate) * up), "geglu" (gelu(gate) * up), or
        "swigluoai", gpt-oss's: gate * sigmoid(1.702 * gate) * (up + 1), with the gate at most 7 and up from -7 to 7.
        None: no activation.
      residual: added last, of the result's shape. None: nothing is added.
      norm_epsilon: a number of at least 0. None: x is multiplied as it is.
      norm_scale: of x's last axis, or axes: those that the weight contracts; or of these with *stack in front. Of
        dtype bfloat16, float16 or float32. None: 1.
      preferred_element_type: dtype of the result: bfloat16, float16 or float32; None for x's, bfloat16 for
        float8_e4m3fn.
      compute_dtype: float8_e4m3fn: kernels may round x and the weight to it. None: what `jax_splitk.options` says, by
        default not.
      implementation: as in `conv_wgrad`.
      config: as in `conv_wgrad`.

    Returns:
      [..., features], or [*stack, ..., *kept sizes]; of a JoinedWeight the features of one part. The cotangent of an x
      of dtype float8_e4m3fn saturates at 448.

    Raises:
      TypeError: dtypes other than those above, a weight of another type, a config of an unknown family, or a config
        with a field of a wrong type.
      ValueError: shapes that do not fit together, an unknown implementation, a config that is not legal, a negative
        or infinite norm_epsilon, a norm_scale without norm_epsilon.
      NotImplementedError: an explicit implementation or config that cannot serve; the message names the limit. Limits
        that depend on the device raise it at lowering.
      FrozenCacheMiss: at lowering with `JAX_SPLITK_CACHE_MODE=frozen`, if there is no tuning decision.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64))
      >>> jax_splitk.quantized_matmul(jnp.ones((8, 128), jnp.bfloat16), w).shape
      (8, 256)
    """
    dtype = rounding_dtype("compute_dtype", compute_dtype)
    options = settled("quantized_matmul", Options(config, implementation, compute_dtype=dtype))
    _check_order(x, w)
    check_norm(norm_epsilon, norm_scale)
    x, norm_scale, w = _in_order(x, norm_scale, w)
    w = unjoined("w", w, activation)
    leaves, layout, of_w = weight_leaves(w)
    middle = _middle_sizes(x, of_w)
    preferred = quantized_reference.widened(x.dtype) if preferred_element_type is None else preferred_element_type
    out_dtype = dtype_of("preferred_element_type", preferred, OUT_DTYPES)
    _check_limit(x, layout, options)
    k, features = math.prod(of_w.contracted), math.prod(of_w.kept)
    shape = (*of_w.stack, *middle, *((features // 2,) if activation in GATED else of_w.kept))
    after = epilogue_operands(bias, residual, of_w, shape, activation)
    scale = [] if norm_scale is None else [norm_scale_operand(norm_scale, of_w)]
    x, leaves, after, scale = _compat.vary_alike((x, leaves, after, scale))
    matrices = x.reshape(*of_w.stack, math.prod(middle), k)
    call = EpilogueCall(
        layout=layout,
        out_dtype=out_dtype.name,
        options=options,
        activation=activation or "none",
        bias=bias is not None,
        residual=residual is not None,
        norm_epsilon=None if norm_epsilon is None else float(norm_epsilon),
        norm_scale=norm_scale is not None,
    )
    if call.norm_epsilon is not None and layout.shape != (k, features):
        (matrices,), scale = call.normalized_first(matrices, *scale), []
        call = call.with_x_as_it_is
    matrices = resized(matrices, layout.shape[0])
    if not call.is_product and layout.shape[1] == features:
        return _matmul(call, matrices, leaves, [*after, *scale]).reshape(shape)
    out = resized(_matmul(call.product, matrices, leaves, []), features)
    return (out if call.is_product else call.around(out, *after)).reshape(shape)


def resized(x: jax.Array, size: int) -> jax.Array:
    """`x` with its last dimension cut, or padded with zeros, to `size`: what a weight with tiles of padding needs."""
    if x.shape[-1] == size:
        return x
    sharding = _compat.explicit_sharding(jax.typeof(x))
    if sharding is not None and size % (x.shape[-1] // sharding.shard_shape(x.shape)[-1]):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[: x.ndim - 1], None))

    def cut_or_padded(x: jax.Array) -> jax.Array:
        return x[..., :size] if size < x.shape[-1] else jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, size - x.shape[-1])])

    return _compat.over_auto_axes(cut_or_padded, sharding)(x)


Weight.product = staticmethod(quantized_matmul)  # here, since a weight's own module lies below its products


def _check_order(x: Any, w: Any) -> None:
    """Raises TypeError if a weight is passed in place of the activations."""
    if is_weight(x):
        kinds = f"x of type {type(x).__name__} and w of type {type(w).__name__}"
        raise TypeError(f"{kinds}; accepted: quantized_matmul(x, w), the activations x first, then the weight w")


def _in_order(x: Any, scale: Any, w: Any) -> tuple[jax.Array, Any, Any]:
    """The activations and their scale in the order of a weight's rows, and that weight."""
    if not isinstance(w, PermutedWeight):
        return jnp.asarray(x), scale, w
    in_order = None if scale is None else w.activations(jnp.broadcast_to(scale, w.order.shape))
    return w.activations(x), in_order, w.weight


def _middle_sizes(x: jax.Array, of_w: WeightAxes) -> tuple[int, ...]:
    """The sizes of the axes of x that the result keeps. Raises TypeError for an x of another dtype, ValueError for a
    shape that does not fit the weight."""
    if x.dtype.name not in _X_DTYPES:
        raise TypeError(f"x of dtype {x.dtype}; accepted: {', '.join(_X_DTYPES)}")
    depth, inner = len(of_w.stack), len(of_w.contracted)
    if x.ndim < depth + inner or (x.shape[:depth], x.shape[x.ndim - inner :]) != (of_w.stack, of_w.contracted):
        expected = ", ".join(map(str, (*of_w.stack, "...", *of_w.contracted)))
        raise ValueError(f"x of shape {x.shape} and w of shape {of_w.shape}; accepted: x of [{expected}]")
    return x.shape[depth : x.ndim - inner]


def weight_leaves(w: Any) -> tuple[Leaves, Layout, WeightAxes]:
    """The leaves of a weight, its layout, and the sizes of its axes."""
    w = unwrapped(w)
    if isinstance(w, PackedWeight):
        w = checked(w)
        zero_point = None if w.zero_point is None else jnp.asarray(w.zero_point)
        if w.zero_dtype in ZERO_INTEGERS:  # floats since packing
            zero_point = jax.lax.stop_gradient(zero_point)
        channel_scale = None if w.channel_scale is None else jnp.asarray(w.channel_scale)
        layout = Layout(w.padded_matrix, w.qtype, w.padded_group, w.layout, channel_scale is not None)
        contracted, kept = (
            tuple(w.dims[i] for i in axes) for axes in (w.contracted, features_of(len(w.dims), w.contracted))
        )
        return (
            (jnp.asarray(w.words), constant(jnp.asarray(w.scale)), zero_point, channel_scale),
            layout,
            WeightAxes(w.stack, contracted, kept, w.shape),
        )
    if not hasattr(w, "qvalue"):
        accepted = "QuantizedArray, PackedWeight, a qwix QArray, an AQT QTensor"
        if hasattr(w, "shape"):
            accepted += "; to pack an array once: jax_splitk.prepack(jax_splitk.quantize(w, 'int4', group_size=64))"
        raise TypeError(f"w of type {type(w).__name__}; accepted: {accepted}")
    q = per_feature(w)
    k, features = q.shape
    layout = Layout((k, features), str(q.qtype), q.group_size, None, q.channel_scale is not None)
    leaves = (q.qvalue, constant(q.scale), q.zero_point, q.channel_scale)
    return leaves, layout, WeightAxes((), (k,), (features,), q.shape)


def constant(scale: jax.Array) -> jax.Array:
    """Scales, without a gradient if they have a byte: E8M0 has neither signs nor 0."""
    return jax.lax.stop_gradient(scale) if scale.dtype.name in BYTE_SCALES else scale


def _check_limit(x: jax.Array, layout: Layout, options: Options) -> None:
    limit = problems.refusal(x.shape, x.dtype.name, layout.shape, layout.version)
    if limit is not None and (options.config is not None or options.implementation not in (None, "xla")):
        given = f"implementation={options.implementation!r}" if options.config is None else f"config={options.config!r}"
        raise NotImplementedError(f"{given}: {limit}. Or use implementation=None or 'xla'.")


@one_computation(0)
def _matmul(call: QuantizedCall, x: jax.Array, leaves: Leaves, after: list[jax.Array]) -> jax.Array:
    return call.bind(x, *[leaf for leaf in leaves if leaf is not None], *after)
