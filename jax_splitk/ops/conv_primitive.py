"""The `conv_wgrad` primitive: its type, its transformation rules and its lowering.

It is bilinear in (lhs, g); its transposes are convolutions that lax already has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import wider
from jax_splitk.runtime.plan import CustomCall

conv_wgrad_p = core.Primitive("conv_wgrad")


def problem_of(avals: Sequence[Any], params: dict[str, Any]) -> ConvWgradProblem:
    """The canonical problem of an equation, from the types of its operands (lhs, g) and its parameters."""
    lhs, g = avals
    specs, rhs_shape = params["dimension_numbers"], params["rhs_shape"]
    # A symbolic dimension (jax.export) stays what it is.
    take = lambda shape, spec: tuple(_compat.static_or_symbolic(shape[i]) for i in spec)  # noqa: E731
    batch, in_channels, *input_spatial = take(lhs.shape, specs.lhs_spec)
    _, out_channels, *output_spatial = take(g.shape, specs.out_spec)
    _, _, *kernel_spatial = take(rhs_shape, specs.rhs_spec)
    return ConvWgradProblem(
        batch=batch,
        input_spatial=tuple(input_spatial),
        output_spatial=tuple(output_spatial),
        kernel_spatial=tuple(kernel_spatial),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        dtype=jnp.dtype(lhs.dtype).name,
        out_dtype=params["out_dtype"],
        precision=params["precision"],
    )


def _abstract_eval(lhs: Any, g: Any, **params: Any) -> Any:
    return _compat.like(lhs if _compat.aval_vma(lhs) else g, params["rhs_shape"], params["out_dtype"])


conv_wgrad_p.def_abstract_eval(_abstract_eval)


# ---- differentiation -----------------------------------------------------------------------------------------------


def _forward(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The convolution whose weight gradient the primitive is."""
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=params["dimension_numbers"],
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        precision=conv_reference.lax_precision(params["precision"]),
    )


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_lhs(ct: jax.Array, lhs: Any, g: jax.Array, **params: Any) -> jax.Array:
    wide = wider(ct.dtype, g.dtype)
    transpose = jax.linear_transpose(lambda x: _forward(x, ct.astype(wide), params), lhs.aval.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(lhs.aval.dtype)


def _transpose_g(ct: jax.Array, lhs: jax.Array, g: Any, **params: Any) -> jax.Array:
    wide = wider(ct.dtype, lhs.dtype)
    return _forward(lhs.astype(wide), ct.astype(wide), params).astype(g.aval.dtype)


def _transpose_rhs(lhs: jax.Array, g: jax.Array, out: Any, params: dict[str, Any]) -> jax.Array:
    """The primitive's value by lax's own rule, which knows symbolic sizes."""
    wide = wider(lhs.dtype, out.dtype)
    transpose = jax.linear_transpose(lambda rhs: _forward(lhs.astype(wide), rhs, params), out.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(out.dtype)


ad.defbilinear(conv_wgrad_p, _transpose_lhs, _transpose_g)


# ---- batching ------------------------------------------------------------------------------------------------------


def _fold_into(x: jax.Array, axis: int, into: int, groups: int) -> jax.Array:
    """Moves the batch `axis` into dimension `into` (counted without it), inside each of its feature groups."""
    x = jnp.moveaxis(x, axis, into)
    size, channels = x.shape[into], x.shape[into + 1]
    grouped = x.reshape(*x.shape[: into + 1], groups, channels // groups, *x.shape[into + 2 :])
    grouped = jnp.moveaxis(grouped, into, into + 1)
    return grouped.reshape(*x.shape[:into], size * channels, *x.shape[into + 2 :])


def _unfold_from(x: jax.Array, dim: int, size: int, channels: int, groups: int) -> jax.Array:
    """Inverse of `_fold_into` of `channels`; the batch, which may be empty, comes out in front."""
    split = x.reshape(*x.shape[:dim], groups, size, channels // groups, *x.shape[dim + 1 :])
    split = jnp.moveaxis(split, dim + 1, 0)
    return split.reshape(size, *x.shape[:dim], channels, *x.shape[dim + 1 :])


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One batched operand widens the channels of a single product; two make a loop over products."""
    (lhs, g), (lhs_dim, g_dim) = args, dims
    specs, rhs_shape = params["dimension_numbers"], params["rhs_shape"]
    groups = params["feature_group_count"]
    one_sided = params["batch_group_count"] == 1 and params["options"].config is None
    if one_sided and lhs_dim is None and g_dim is not None:
        size, out_dim = g.shape[g_dim], specs.rhs_spec[0]
        folded = _fold_into(g, g_dim, specs.out_spec[1], groups)
        params["rhs_shape"] = tuple(n * size if i == out_dim else n for i, n in enumerate(rhs_shape))
        out = conv_wgrad_p.bind(lhs, folded, **params)
        return _unfold_from(out, out_dim, size, rhs_shape[out_dim], groups), 0
    if one_sided and g_dim is None and lhs_dim is not None:
        size, in_dim = lhs.shape[lhs_dim], specs.rhs_spec[1]
        folded = _fold_into(lhs, lhs_dim, specs.lhs_spec[1], groups)
        params["rhs_shape"] = tuple(n * size if i == in_dim else n for i, n in enumerate(rhs_shape))
        out = conv_wgrad_p.bind(folded, g, **params)
        return _unfold_from(out, in_dim, size, rhs_shape[in_dim], 1), 0
    size = lhs.shape[lhs_dim] if lhs_dim is not None else g.shape[g_dim or 0]
    lhs = batching.bdim_at_front(lhs, lhs_dim, size)
    g = batching.bdim_at_front(g, g_dim, size)
    return lax.map(lambda pair: conv_wgrad_p.bind(*pair, **params), (lhs, g)), 0


batching.primitive_batchers[conv_wgrad_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _to_channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[0], *spec[2:], spec[1])


def _from_hwio(specs: lax.ConvDimensionNumbers) -> tuple[int, ...]:
    hwio = (*specs.rhs_spec[2:], specs.rhs_spec[1], specs.rhs_spec[0])
    return tuple(int(i) for i in np.argsort(hwio))


def canonicalize(lhs: jax.Array, g: jax.Array, specs: lax.ConvDimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """lhs and g as N, spatial..., C."""
    return lhs.transpose(_to_channels_last(specs.lhs_spec)), g.transpose(_to_channels_last(specs.out_spec))


def from_hwio(out: jax.Array, specs: lax.ConvDimensionNumbers) -> jax.Array:
    """Spatial..., I, O to the order of `rhs_spec`."""
    return out.transpose(_from_hwio(specs))


def _is_canonical(specs: lax.ConvDimensionNumbers) -> bool:
    """Whether neither moves anything."""
    orders = (_to_channels_last(specs.lhs_spec), _to_channels_last(specs.out_spec), _from_hwio(specs))
    return all(order == tuple(range(len(order))) for order in orders)


def _with_xla(problem: ConvWgradProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    if not _compat.is_known(*problem.input_spatial):
        return lambda lhs, g: _transpose_rhs(lhs, g, out, params)
    specs, sharding = params["dimension_numbers"], _compat.explicit_sharding(out)
    return lambda lhs, g: conv_reference.conv_wgrad(lhs, g, problem, specs, sharding)


def _with_kernel(
    problem: ConvWgradProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array] | None:
    del out
    specs = params["dimension_numbers"]
    if _is_canonical(specs):
        return None
    return lambda lhs, g: from_hwio(execute.call(custom_call, problem, *canonicalize(lhs, g, specs)), specs)


lowering.define(conv_wgrad_p, problem_of, _with_xla, _with_kernel)
