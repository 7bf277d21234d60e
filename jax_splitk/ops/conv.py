"""Public convolution operations."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_splitk.ops import conv_epilogue
from jax_splitk.ops import conv_gradient as _gradient  # noqa: F401 - the passes' rules
from jax_splitk.ops.conv_calls import ConvDgrad, ConvFprop, bind_wgrad, with_output_of
from jax_splitk.ops.convolution import Convolution, Padding, convolution, integers
from jax_splitk.problems.conv_reference import lax_conv
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.problems.dot_general import Activation
from jax_splitk.runtime.arguments import RefusedImplementation, RefusedType, RefusedValue, dtype_of, require
from jax_splitk.tuning import once
from jax_splitk.tuning.options import Implementation, Options, settled

_logger = logging.getLogger("jax_splitk")


def conv_wgrad(
    lhs: jax.Array,
    g: jax.Array,
    rhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_dilation: Sequence[int] | None = None,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    config: Any = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """The gradient of a convolution with respect to its weight (its "rhs").

    For `out = lax.conv_general_dilated(lhs, rhs, ...)` and a cotangent `g` of `out` it computes the cotangent of
    `rhs`: `dW[r, s, c, k] = sum over n, p, q of lhs[n, p*stride - pad + r*dilation, ..., c] * g[n, p, q, k]`,
    accumulated in float32 at least, in an order that the config alone determines: every kernel gives the same bits on
    every run. Works under jit (also of sharded arrays), grad (of any order), vmap, scan, remat and shard_map.

    Args:
      lhs: the convolution's input, e.g. [N, H, W, C], of dtype bfloat16, float16, float32 or float64. The H200
        kernels take all but float64; what no kernel takes runs as XLA's convolution.
      g: the cotangent of the convolution's output, e.g. [N, P, Q, K], of lhs's dtype.
      rhs_shape: shape of the weight, in the order that `dimension_numbers` gives it, e.g. (R, S, C/groups, K).
      window_strides: the forward convolution's, as all up to `feature_group_count`: see `jax.lax.conv_general_dilated`.
        An integer for each spatial dimension.
      padding: "SAME", "VALID", "SAME_LOWER" or a pair (low, high) for each spatial dimension.
      rhs_dilation: the distance of the filter's taps, for each spatial dimension; None for 1.
      dimension_numbers: the orders of dimensions. None means NCHW and OIHW, as in lax; ("NHWC", "HWIO", "NHWC") needs
        no transposes.
      feature_group_count: the number of groups of channels.
      preferred_element_type: dtype of the result, one of those above; None for lhs's. float32 from 16-bit inputs
        keeps the full sums.
      lhs_dilation: the distance of the input's pixels, for each spatial dimension; None for 1.
      batch_group_count: the number of groups of the batch, as in lax.
      precision: as in lax.
      config: a kernel family's `Config`, to bypass selection; None selects one.
      implementation: None (the best available; always works), "cutlass" (H200/H100 kernels), "host" (the CPU
        kernel) or "xla".
      workspace_limit_bytes: the most scratch memory a kernel may ask of XLA; None for 256 MiB.

    Returns:
      The weight gradient, of shape `rhs_shape`.

    Raises:
      ValueError: shapes that do not belong together, an argument outside its range, a config that is not legal.
      TypeError: dtypes that differ or are not among the above; a config of no known family, or with a field of another
        type than its family's.
      NotImplementedError: at lowering, an explicit `implementation` that cannot serve; names the limit.
      FrozenCacheMiss: at lowering, no tuning decision under `JAX_SPLITK_CACHE_MODE=frozen`.

    Examples:
      >>> lhs, g = jnp.ones((2, 8, 8, 4)), jnp.ones((2, 8, 8, 16))
      >>> numbers = ("NHWC", "HWIO", "NHWC")
      >>> jax_splitk.conv_wgrad(lhs, g, (3, 3, 4, 16), (1, 1), "SAME", dimension_numbers=numbers).shape
      (3, 3, 4, 16)
    """
    options = settled("conv_wgrad", Options(config, implementation, workspace_limit_bytes))
    lhs, g = jnp.asarray(lhs), jnp.asarray(g)
    _check_dtypes(lhs, "g", g)
    _check_ranks(lhs, "g", g)
    shape = integers("rhs_shape", rhs_shape, lhs.ndim, least=0)
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    conv = convolution(lhs.shape, shape, *geometry, feature_group_count, batch_group_count, precision)
    out_dtype = _float_dtype("preferred_element_type", preferred_element_type) or lhs.dtype
    return bind_wgrad(conv, lhs, g, shape, out_dtype, options)


def conv_fprop(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_dilation: Sequence[int] | None = None,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    activation_last: bool = False,
    config: Any = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """The forward pass of a convolution by itself, to choose its kernel: else use `conv_general_dilated`.

    `conv_general_dilated` uses it. With `lhs_dilation` and unit strides it is a transposed convolution, which is
    computed as the input gradient of another one: `explain` shows it as `conv_dgrad`. Its cotangents are `conv_dgrad`
    and `conv_wgrad`. Works under the transformations that `conv_wgrad` works under.

    Args:
      lhs: the convolution's input, e.g. [N, H, W, C], of dtype bfloat16, float16, float32 or float64.
      rhs: its weight, e.g. [R, S, C/groups, K], of lhs's dtype.
      window_strides: as all up to `feature_group_count` in `jax.lax.conv_general_dilated`.
      padding: "SAME", "VALID", "SAME_LOWER" or pairs.
      rhs_dilation: the distance of the filter's taps.
      dimension_numbers: the orders of dimensions; None means NCHW and OIHW.
      feature_group_count: the number of groups of channels.
      preferred_element_type: dtype of the result, one of those above; None for lhs's.
      lhs_dilation: the distance of the input's pixels; above 1 for a transposed convolution.
      batch_group_count: as in lax.
      precision: as in lax.
      bias: as in `conv_general_dilated`.
      activation: as in `conv_general_dilated`.
      residual: as in `conv_general_dilated`.
      activation_last: as in `conv_general_dilated`.
      config: as in `conv_wgrad`.
      implementation: as in `conv_wgrad`. XLA computes what no kernel takes, and what XLA computes faster.
      workspace_limit_bytes: as in `conv_wgrad`.

    Returns:
      The convolution, e.g. [N, P, Q, K].

    Raises:
      ValueError, TypeError, NotImplementedError, FrozenCacheMiss: as `conv_wgrad` does.

    Examples:
      >>> lhs, rhs = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 16))
      >>> numbers = ("NHWC", "HWIO", "NHWC")
      >>> jax_splitk.conv_fprop(lhs, rhs, (2, 2), "SAME", dimension_numbers=numbers).shape
      (2, 4, 4, 16)
    """
    options = settled("conv_fprop", Options(config, implementation, workspace_limit_bytes))
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    _check_operands(lhs, rhs, converted=False, or_else="")
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    conv = convolution(lhs.shape, rhs.shape, *geometry, feature_group_count, batch_group_count, precision)
    out_dtype = _float_dtype("preferred_element_type", preferred_element_type) or lhs.dtype
    call = ConvFprop(
        convolution=conv,
        compute_dtype=lhs.dtype.name,
        out_dtype=out_dtype.name,
        options=options,
        wgrad_options=options.of_another_pass(implied=False),
    )
    return conv_epilogue.bind(call, lhs, rhs, bias, activation, residual, activation_last)


def conv_dgrad(
    g: jax.Array,
    rhs: jax.Array,
    lhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_dilation: Sequence[int] | None = None,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    config: Any = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """The gradient of a convolution with respect to its input (its "lhs"): with strides, a transposed convolution.

    For `out = lax.conv_general_dilated(lhs, rhs, ...)` and a cotangent `g` of `out` it computes the cotangent of
    `lhs`. Its own gradients are `conv_fprop` and `conv_wgrad`. Works under the transformations that `conv_wgrad` works
    under.

    Args:
      g: the cotangent of the convolution's output, e.g. [N, P, Q, K], of dtype bfloat16, float16, float32 or float64.
      rhs: the weight, e.g. [R, S, C/groups, K], of g's dtype.
      lhs_shape: shape of the input, in the order that `dimension_numbers` gives it, e.g. (N, H, W, C).
      window_strides: the forward convolution's, as all up to `feature_group_count`: see `conv_wgrad`.
      padding: the forward convolution's.
      rhs_dilation: the forward convolution's.
      dimension_numbers: the forward convolution's, whose output is `g`.
      feature_group_count: the forward convolution's.
      preferred_element_type: dtype of the result, one of those above; None for g's.
      lhs_dilation: the forward convolution's.
      batch_group_count: the forward convolution's.
      precision: as in lax.
      config: as in `conv_wgrad`.
      implementation: as in `conv_wgrad`. XLA computes what no kernel takes, and what XLA computes faster.
      workspace_limit_bytes: as in `conv_wgrad`.

    Returns:
      The input gradient, of shape `lhs_shape`.

    Raises:
      ValueError, TypeError, NotImplementedError, FrozenCacheMiss: as `conv_wgrad` does.

    Examples:
      >>> g, rhs = jnp.ones((2, 4, 4, 16)), jnp.ones((3, 3, 4, 16))
      >>> numbers = ("NHWC", "HWIO", "NHWC")
      >>> jax_splitk.conv_dgrad(g, rhs, (2, 8, 8, 4), (2, 2), "SAME", dimension_numbers=numbers).shape
      (2, 8, 8, 4)
    """
    options = settled("conv_dgrad", Options(config, implementation, workspace_limit_bytes))
    g, rhs = jnp.asarray(g), jnp.asarray(rhs)
    _check_dtypes(g, "rhs", rhs, of="g")
    _check_ranks(g, "rhs", rhs, of="g")
    shape = integers("lhs_shape", lhs_shape, g.ndim, least=0)
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    conv = convolution(shape, rhs.shape, *geometry, feature_group_count, batch_group_count, precision)
    conv = with_output_of(conv, shape, rhs.shape, g.shape)
    out_dtype = _float_dtype("preferred_element_type", preferred_element_type) or g.dtype
    given = {"shape": shape, "out_dtype": out_dtype.name, "options": options}
    return ConvDgrad(convolution=conv, **given, wgrad_options=options.of_another_pass(implied=False)).bind(g, rhs)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    compute_dtype: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    activation_last: bool = False,
    config: Any = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """A convolution with the arguments of `jax.lax.conv_general_dilated`, with fast kernels for it and its gradients.

    The passes are `conv_fprop`, `conv_dgrad` and `conv_wgrad`; for each the fastest is chosen, XLA's among them. The
    first twelve parameters are lax's, in lax's order. If no kernel is faster, the forward pass and the input gradient
    are exactly lax's operations, and so is forward mode. Only an input whose padding crops one side of a dimension and
    extends the other is padded before, since XLA:CPU may compute wrong numbers. Works under every transformation of
    lax's: jit, grad and jvp (of any order), linear_transpose, checkpoint, vmap, scan and shard_map. Under vmap a mapped
    input widens the batch of one convolution and of one weight gradient, and a mapped weight makes groups (with a
    mapped input) or more output channels (without).

    With an epilogue the result is activation(convolution + bias) + residual, or with `activation_last`
    activation(convolution + bias + residual). The families fprop_im2col, fprop_patch, fprop_gather and fprop_grouped
    compute it in the kernel of the convolution, in float32 of the whole sum; fprop_grouped only without a residual. The
    kernel is chosen for the convolution alone. After other kernels XLA computes the epilogue, from the convolution
    rounded to the result's dtype. After its own convolution XLA gets lax's operations, and may fuse them. Under
    differentiation of an activation the rounded convolution is kept, and XLA computes the epilogue.

    For operands of other dtypes than `compute_dtype` accepts (integers, complex numbers, 8-bit floats), lax computes
    the convolution and its gradients, and the log says so. They take no epilogue.

    Args:
      lhs: the input, e.g. [N, H, W, C], of a real dtype where `compute_dtype` is given.
      rhs: the weight, e.g. [R, S, C/groups, K].
      window_strides: steps of the window, an integer for each spatial dimension.
      padding: "SAME", "VALID", "SAME_LOWER" or a pair (low, high) for each spatial dimension.
      lhs_dilation: the distance of the input's pixels, for each spatial dimension; None for 1.
      rhs_dilation: the distance of the filter's taps, for each spatial dimension; None for 1.
      dimension_numbers: the orders of dimensions. None means NCHW and OIHW; ("NHWC", "HWIO", "NHWC") needs no
        transposes.
      feature_group_count: the number of groups of channels.
      batch_group_count: the number of groups of the batch.
      precision: as in lax.
      preferred_element_type: dtype of the result; None for `compute_dtype`, or lhs's.
      out_sharding: for meshes with explicit axes, as in lax.
      compute_dtype: bfloat16, float16, float32 or float64, to which lhs and rhs are converted before the convolution;
        None for their own. With a float32 `rhs` (a master weight) and compute_dtype=bfloat16, the weight gradient is
        float32 and holds the kernel's fp32 sums unrounded, and rhs is not differentiated through a cast. The cotangent
        of the output is converted to compute_dtype.
      bias: added to the convolution: [output features], of a real floating dtype. None: nothing is added.
      activation: "relu", "gelu" (`jax.nn.gelu`, by tanh), "gelu_exact" (the same with approximate=False), "silu".
        None: no activation.
      residual: added last, of the result's shape and a real floating dtype. None: nothing is added.
      activation_last: whether the residual is added before the activation, as in a ResNet.
      config: as in `conv_wgrad`, for the weight gradient; under vmap for that of the one convolution of the batch.
      implementation: as in `conv_wgrad`, for the weight gradient. The other passes are chosen separately, except that
        "xla" holds for all three.
      workspace_limit_bytes: as in `conv_wgrad`, for each pass.

    Returns:
      The convolution, of dtype preferred_element_type, else compute_dtype, else lhs's.

    Raises:
      ValueError, TypeError, NotImplementedError, FrozenCacheMiss: as lax's function and `conv_wgrad` do.

    Examples:
      >>> x, w = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 16))
      >>> def loss(w):
      ...     y = jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
      ...     return jnp.sum(y)
      >>> jax.grad(loss)(w).shape
      (3, 3, 4, 16)
    """
    options = settled("conv_wgrad", Options(config, implementation, workspace_limit_bytes))
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    compute = _float_dtype("compute_dtype", compute_dtype)
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    arguments = (*geometry, feature_group_count, batch_group_count, precision)
    if compute is None and lhs.dtype == rhs.dtype and lhs.dtype.name not in DTYPES:
        _announce_lax(lhs.dtype, options)
        plain = bias is None and activation is None and residual is None
        epilogue = f"bias, activation or residual with operands of {lhs.dtype}"
        require(plain, epilogue, f"operands of {', '.join(DTYPES)}", RefusedType)
        return lax_conv(lhs, rhs, *arguments, preferred_element_type, out_sharding)
    _check_operands(lhs, rhs, converted=compute is not None)
    conv = convolution(lhs.shape, rhs.shape, *arguments)
    compute = compute or lhs.dtype
    out_dtype = _float_dtype("preferred_element_type", preferred_element_type) or compute
    if out_sharding is not None:
        out_sharding = _out_sharding(conv, lhs.astype(compute), rhs.astype(compute), out_sharding)
    call = ConvFprop(
        convolution=conv,
        compute_dtype=compute.name,
        out_dtype=out_dtype.name,
        out_sharding=out_sharding,
        options=options.of_another_pass(forward_only=True),
        wgrad_options=options,
    )
    return conv_epilogue.bind(call, lhs, rhs, bias, activation, residual, activation_last)


def _check_operands(lhs: jax.Array, rhs: jax.Array, converted: bool, or_else: str = ", or compute_dtype=") -> None:
    """Checks lhs and rhs of a forward convolution; `converted`: whether `compute_dtype` converts them."""
    if not converted:
        _check_dtypes(lhs, "rhs", rhs, or_else)
    elif jnp.iscomplexobj(lhs) or jnp.iscomplexobj(rhs):
        raise RefusedType(f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; accepted: real numbers")
    if lhs.ndim != rhs.ndim:
        same = "conv_general_dilated lhs and rhs must have the same number of dimensions"
        raise RefusedValue(f"{same}, but got {lhs.shape} and {rhs.shape}.")
    _check_ranks(lhs, "rhs", rhs)


def _announce_lax(dtype: np.dtype, options: Options) -> None:
    """Logs that lax computes operands of this dtype; NotImplementedError if a kernel was asked for explicitly."""
    why = f"operands of {dtype}; accepted: {', '.join(DTYPES)}"
    if options.implementation not in (None, "xla") or options.config is not None:
        given = f"implementation={options.implementation!r}" if options.config is None else f"config={options.config!r}"
        raise RefusedImplementation(f"{given} with {why}. Use implementation=None or implementation='xla'.")
    if once.state.is_first("announced", "conv_general_dilated", why):
        _logger.info("conv_general_dilated: lax's, with lax's gradients (%s)", why)


def _out_sharding(conv: Convolution, lhs: jax.Array, rhs: jax.Array, out_sharding: Any) -> Any:
    """The sharding of the result that lax derives from the argument and the mesh in force."""
    try:
        out = jax.make_jaxpr(lambda lhs, rhs: conv(lhs, rhs, out_sharding=out_sharding))(lhs, rhs).out_avals[0]
    except (TypeError, ValueError) as error:
        raise type(error)(f"out_sharding={out_sharding!r}: {error}") from None
    return out.sharding


def _check_dtypes(lhs: jax.Array, name: str, other: jax.Array, or_else: str = "", of: str = "lhs") -> None:
    if lhs.dtype != other.dtype or lhs.dtype.name not in DTYPES:
        accepted = f"one of {', '.join(DTYPES)} for both{or_else}"
        raise RefusedType(f"{of} is {lhs.dtype} and {name} is {other.dtype}; accepted: {accepted}")


def _check_ranks(lhs: jax.Array, name: str, other: jax.Array, of: str = "lhs") -> None:
    if lhs.ndim != other.ndim or lhs.ndim < 2:
        shapes = f"{of} of shape {lhs.shape} and {name} of shape {other.shape}"
        raise RefusedValue(f"{shapes}; accepted: one rank of at least 2")


def _float_dtype(name: str, value: DTypeLike | None) -> np.dtype | None:
    """A dtype of `DTYPES`. As everywhere in JAX, float64 is float32, with a warning, unless jax_enable_x64 is set."""
    if value is None:
        return None
    dtype = dtype_of(name, value, DTYPES)
    # Python's float names no size, so JAX does not warn.
    return jnp.dtype(jnp.result_type(float if value is float else dtype))
