"""Public convolution operations."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.ops import residuals
from jax_splitk.ops.conv_primitive import conv_wgrad_p
from jax_splitk.problems.conv_reference import lax_precision, precision_name
from jax_splitk.problems.conv_wgrad import DTYPES, Pairs, conv_output_spatial, dilated
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import dtype_of, integer
from jax_splitk.tuning.options import Options, check_options, merged

Padding = str | Sequence[tuple[int, int]]


def _integers(name: str, value: Sequence[int] | None, count: int, least: int = 1) -> tuple[int, ...]:
    """`count` integers; None is refused."""
    values = ()
    with contextlib.suppress(TypeError):
        values = tuple(operator.index(v) for v in (() if value is None else value))
    if len(values) != count or any(v < least for v in values):
        raise ValueError(f"{name}={value!r}; accepted: {count} integers of at least {least}")
    return values


def _dilation(name: str, value: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """An integer for each dimension; None for ones."""
    return (1,) * rank if value is None else _integers(name, value, rank)


def _groups(feature_group_count: int, batch_group_count: int) -> tuple[int, int]:
    """Both counts, of which only one may be above 1."""
    feature_groups, batch_groups = integer(feature_group_count) or 0, integer(batch_group_count) or 0
    if feature_groups < 1:
        raise ValueError(f"feature_group_count={feature_group_count!r}; accepted: an integer of at least 1")
    if batch_groups < 1:
        raise ValueError(f"batch_group_count={batch_group_count!r}; accepted: an integer of at least 1")
    if min(feature_groups, batch_groups) > 1:
        both = f"feature_group_count={feature_groups}, batch_group_count={batch_groups}"
        raise ValueError(f"{both}; accepted: only one of them above 1")
    return feature_groups, batch_groups


def _float_dtype(name: str, value: DTypeLike) -> np.dtype:
    """A dtype of `DTYPES`. As everywhere in JAX, float64 is float32, with a warning, unless jax_enable_x64 is set."""
    dtype = dtype_of(name, value, DTYPES)
    # Python's float names no size, so JAX does not warn.
    return jnp.dtype(jnp.result_type(float if value is float else dtype))


def _padding(padding: Padding, rank: int) -> str | Pairs:
    """A known word, or pairs of integers."""
    words = ("SAME", "SAME_LOWER", "VALID")
    if isinstance(padding, str):
        if padding.upper() in words:
            return padding.upper()
    else:
        with contextlib.suppress(TypeError, ValueError):
            pairs = tuple((operator.index(low), operator.index(high)) for low, high in padding)
            if len(pairs) == rank:
                return pairs
    raise ValueError(
        f"padding={padding!r}; accepted: {', '.join(map(repr, words[:2]))}, 'VALID' or {rank} pairs (low, high)"
    )


def _padding_pairs(
    padding: str | Pairs,
    input_spatial: tuple[int, ...],
    kernel_spatial: tuple[int, ...],
    window_strides: tuple[int, ...],
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
) -> Pairs:
    if not isinstance(padding, str):
        return padding
    if any(d != 1 for d in lhs_dilation):
        raise ValueError(f"padding={padding!r} with lhs_dilation={lhs_dilation}; accepted: explicit pairs")
    window = dilated(kernel_spatial, rhs_dilation)
    pairs = lax.padtype_to_pads(input_spatial, window, window_strides, padding)
    if not _compat.is_known(*(side for pair in pairs for side in pair)):
        raise ValueError(
            f"padding={padding!r} of an input of symbolic sizes {input_spatial} at strides {window_strides} is not "
            "known; accepted: explicit pairs, or sizes that are multiples of the strides, as 2*h is of 2"
        )
    return tuple((int(low), int(high)) for low, high in pairs)


def _output_spatial(
    input_spatial: tuple[Any, ...],
    kernel_spatial: tuple[int, ...],
    window_strides: tuple[int, ...],
    padding: Pairs,
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
) -> tuple[Any, ...]:
    """`conv_output_spatial`, where the input's sizes may be symbolic."""
    if _compat.is_known(*input_spatial):
        return conv_output_spatial(input_spatial, kernel_spatial, window_strides, padding, lhs_dilation, rhs_dilation)
    lhs, rhs = (jax.ShapeDtypeStruct((1, 1, *sizes), jnp.float32) for sizes in (input_spatial, kernel_spatial))
    forward = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
    )
    return jax.eval_shape(forward, lhs, rhs).shape[2:]


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
    implementation: str | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """Gradient of a convolution with respect to its weight (its "rhs"), with a split reduction.

    For `out = lax.conv_general_dilated(lhs, rhs, ...)` and a cotangent `g` of `out` it computes the cotangent of
    `rhs`: `dW[r, s, c, k] = sum over n, p, q of lhs[n, p*stride - pad + r*dilation, ..., c] * g[n, p, q, k]`,
    accumulated in float32 at least, in an order that the config alone determines: every kernel gives the same bits on
    every run. Works under jit, grad (of any order), vmap, scan, remat and shard_map.

    Args:
      lhs: the convolution's input, e.g. [N, H, W, C], of dtype bfloat16, float16, float32 or float64. The H200
        kernels take all but float64; what no kernel takes runs as XLA's convolution.
      g: the cotangent of the convolution's output, e.g. [N, P, Q, K], of lhs's dtype.
      rhs_shape: shape of the weight, in the order that `dimension_numbers` gives it, e.g. (R, S, C/groups, K).
      window_strides, padding, rhs_dilation, lhs_dilation, dimension_numbers, feature_group_count, batch_group_count,
        precision: the forward convolution's, as in `jax.lax.conv_general_dilated`. As there, dimension_numbers=None
        means NCHW and OIHW; ("NHWC", "HWIO", "NHWC") needs no transposes.
      preferred_element_type: dtype of the result, one of those above; None for lhs's. float32 from 16-bit inputs
        keeps the full sums.
      config: a kernel family's `Config`, to bypass selection.
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
    """
    options = merged(Options(config, implementation, workspace_limit_bytes))
    return _conv_wgrad(
        lhs,
        g,
        rhs_shape,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
    )


def _conv_wgrad(
    lhs: jax.Array,
    g: jax.Array,
    rhs_shape: Sequence[int],
    *,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    options: Options,
) -> jax.Array:
    """`conv_wgrad` with its options settled."""
    check_options("conv_wgrad", options)
    lhs, g = jnp.asarray(lhs), jnp.asarray(g)
    if lhs.dtype != g.dtype or lhs.dtype.name not in DTYPES:
        raise TypeError(f"lhs is {lhs.dtype} and g is {g.dtype}; accepted: one of {', '.join(DTYPES)} for both")
    if g.ndim != lhs.ndim or lhs.ndim < 2:
        raise ValueError(f"lhs of shape {lhs.shape} and g of shape {g.shape}; accepted: one rank of at least 2")
    rhs_shape = _integers("rhs_shape", rhs_shape, lhs.ndim, least=0)
    specs = lax.conv_dimension_numbers(lhs.shape, rhs_shape, dimension_numbers)
    rank = lhs.ndim - 2
    window_strides = _integers("window_strides", window_strides, rank)
    lhs_dilation = _dilation("lhs_dilation", lhs_dilation, rank)
    rhs_dilation = _dilation("rhs_dilation", rhs_dilation, rank)
    batch, in_channels, *input_spatial = (lhs.shape[i] for i in specs.lhs_spec)
    out_channels, group_channels, *kernel_spatial = (rhs_shape[i] for i in specs.rhs_spec)
    if min(kernel_spatial, default=1) < 1:
        raise ValueError(f"rhs_shape={rhs_shape} with a kernel of {kernel_spatial}; accepted: sizes of at least 1")
    feature_group_count, batch_group_count = _groups(feature_group_count, batch_group_count)
    if group_channels * feature_group_count != in_channels:
        whole = in_channels % feature_group_count == 0
        accepted = in_channels // feature_group_count if whole else f"groups that divide the {in_channels}"
        raise ValueError(
            f"rhs_shape={rhs_shape} has {group_channels} input channels a group and lhs {lhs.shape} has {in_channels} "
            f"in feature_group_count={feature_group_count} groups; accepted: {accepted}"
        )
    groups = feature_group_count * batch_group_count
    if out_channels % groups or batch % batch_group_count:
        raise ValueError(f"{out_channels} output channels and batch {batch} in {groups} groups; accepted: whole groups")
    pairs = _padding_pairs(
        _padding(padding, rank), tuple(input_spatial), tuple(kernel_spatial), window_strides, lhs_dilation, rhs_dilation
    )
    output_spatial = _output_spatial(
        tuple(input_spatial), tuple(kernel_spatial), window_strides, pairs, lhs_dilation, rhs_dilation
    )
    # By dictionary, not by array: a batch may be symbolic (jax.export).
    sizes = dict(zip(specs.out_spec, (batch // batch_group_count, out_channels, *output_spatial), strict=True))
    expected = tuple(sizes[axis] for axis in range(lhs.ndim))
    if tuple(g.shape) != expected:
        raise ValueError(f"g has shape {tuple(g.shape)}; the convolution's output has {expected}")
    preferred = preferred_element_type
    out_dtype = lhs.dtype if preferred is None else _float_dtype("preferred_element_type", preferred)
    return conv_wgrad_p.bind(
        _compat.vary_like(lhs, g),
        _compat.vary_like(g, lhs),
        rhs_shape=rhs_shape,
        window_strides=window_strides,
        padding=pairs,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=specs,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision_name(precision),
        out_dtype=out_dtype.name,
        options=options,
    )


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
    *,
    compute_dtype: DTypeLike | None = None,
    config: Any = None,
    implementation: str | None = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` whose weight gradient is computed by `conv_wgrad`.

    The forward convolution and the input gradient are lax's. Reverse-mode differentiation only, as with every
    `jax.custom_vjp`. The first eleven parameters are lax's, in lax's order; lax's twelfth, out_sharding, and with it
    explicit sharding of channels, is not served.

    Args:
      compute_dtype: bfloat16, float16, float32 or float64, to which lhs and rhs are converted before the convolution;
        None for their own, which must then be one of these. With a float32 `rhs` (a master weight) and
        compute_dtype=bfloat16, the weight gradient is float32 and holds the kernel's fp32 sums unrounded, and rhs is
        not differentiated through a cast. The cotangent of the output is converted to compute_dtype.
      config, implementation, workspace_limit_bytes: as in `conv_wgrad`, for the weight gradient.

    Returns:
      The convolution, of dtype preferred_element_type, else compute_dtype, else lhs's.

    Raises:
      ValueError, TypeError, NotImplementedError, FrozenCacheMiss: as lax's function and `conv_wgrad` do.
    """
    options = merged(Options(config, implementation, workspace_limit_bytes))
    check_options("conv_wgrad", options)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if compute_dtype is not None:
        compute = _float_dtype("compute_dtype", compute_dtype)
        if jnp.iscomplexobj(lhs) or jnp.iscomplexobj(rhs):
            raise TypeError(f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; accepted: real numbers")
    elif lhs.dtype != rhs.dtype or lhs.dtype.name not in DTYPES:
        accepted = f"one of {', '.join(DTYPES)} for both, or compute_dtype="
        raise TypeError(f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; accepted: {accepted}")
    else:
        compute = lhs.dtype
    preferred = preferred_element_type
    out = None if preferred is None else _float_dtype("preferred_element_type", preferred)
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise ValueError(f"lhs of shape {lhs.shape} and rhs of shape {rhs.shape}; accepted: one rank of at least 2")
    feature_group_count, batch_group_count = _groups(feature_group_count, batch_group_count)
    specs = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    forward = _Forward(
        window_strides=_integers("window_strides", window_strides, lhs.ndim - 2),
        padding=_padding(padding, lhs.ndim - 2),
        lhs_dilation=_dilation("lhs_dilation", lhs_dilation, lhs.ndim - 2),
        rhs_dilation=_dilation("rhs_dilation", rhs_dilation, lhs.ndim - 2),
        dimension_numbers=specs,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision_name(precision),
    )
    lhs, rhs = _compat.vary_like(lhs, rhs), _compat.vary_like(rhs, lhs)
    # The backward pass may hold neither operand, so their types go along.
    types = (jax.typeof(lhs), jax.typeof(rhs))
    return _conv(_Conv(forward, compute, out, types, options), lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The forward convolution's parameters, hashable."""

    window_strides: tuple[int, ...]
    padding: str | Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: str

    def lax_arguments(self) -> dict[str, Any]:
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**arguments, "precision": lax_precision(self.precision)}

    def __call__(self, lhs: jax.Array, rhs: jax.Array, out: np.dtype | None = None) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **self.lax_arguments(), preferred_element_type=out)


@dataclasses.dataclass(frozen=True)
class _Conv:
    """Everything static about one call of `conv_general_dilated`."""

    forward: _Forward
    compute_dtype: np.dtype
    out_dtype: np.dtype | None
    types: tuple[Any, Any]
    options: Options


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(conv: _Conv, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return conv.forward(lhs.astype(conv.compute_dtype), rhs.astype(conv.compute_dtype), conv.out_dtype)


def _conv_fwd(conv: _Conv, lhs: Any, rhs: Any) -> tuple[jax.Array, Any]:
    small_lhs, small_rhs = lhs.value.astype(conv.compute_dtype), rhs.value.astype(conv.compute_dtype)
    out = conv.forward(small_lhs, small_rhs, conv.out_dtype)
    # An operand is kept only where somebody differentiates with respect to the other one.
    return out, (residuals.kept(small_lhs, rhs.perturbed), residuals.kept(small_rhs, lhs.perturbed))


def _conv_bwd(conv: _Conv, operands: Any, g: Any) -> tuple[jax.Array | None, jax.Array | None]:
    lhs, rhs = operands
    lhs_type, rhs_type = conv.types
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None
    g = g.astype(conv.compute_dtype)
    d_lhs = d_rhs = None
    if residuals.is_kept(rhs):
        transpose = jax.linear_transpose(lambda x: conv.forward(x, rhs), lhs_type.update(dtype=conv.compute_dtype))
        d_lhs = transpose(g)[0].astype(lhs_type.dtype)
    if residuals.is_kept(lhs):
        wanted = rhs_type.dtype if rhs_type.dtype.name in DTYPES else conv.compute_dtype
        d_rhs = _conv_wgrad(
            lhs,
            g,
            rhs_type.shape,
            preferred_element_type=wanted,
            options=conv.options,
            **conv.forward.lax_arguments(),
        ).astype(rhs_type.dtype)
    return d_lhs, d_rhs


_conv.defvjp(_conv_fwd, _conv_bwd, symbolic_zeros=True)
