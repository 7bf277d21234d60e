"""The `conv_wgrad` primitive: its type, its transformation rules and its lowering.

It is bilinear in (lhs, g); its transposes are the other passes of the convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.conv_primitives import (
    as_written,
    between_layouts,
    bind_dgrad,
    bind_fprop,
    conv_wgrad_p,
    is_canonical,
    problem_of,
    rule_of,
)
from jax_splitk.ops.convolution import grouped
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import wider
from jax_splitk.runtime.plan import CustomCall

_rule_of = rule_of(ConvWgradProblem)


def _abstract_eval(lhs: Any, g: Any, **params: Any) -> Any:
    out = _compat.like(lhs if _compat.aval_vma(lhs) else g, params["rhs_shape"], params["out_dtype"])
    return partitioning.with_explicit_sharding(out, _rule_of, (lhs, g), params)


# ---- differentiation -----------------------------------------------------------------------------------------------


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_lhs(ct: jax.Array, lhs: Any, g: jax.Array, **params: Any) -> jax.Array:
    wide, options = wider(ct.dtype, g.dtype), params["options"].of_another_pass()
    operands = (g.astype(wide), ct.astype(wide), lhs.aval.shape)
    sharding, again = _compat.explicit_sharding(lhs.aval), options.of_another_pass(quiet=False)
    return bind_dgrad(params["convolution"], *operands, wide, sharding, options, again).astype(lhs.aval.dtype)


def _transpose_g(ct: jax.Array, lhs: jax.Array, g: Any, **params: Any) -> jax.Array:
    wide, options = wider(ct.dtype, lhs.dtype), params["options"].of_another_pass()
    types = (wide, wide, _compat.explicit_sharding(g.aval))
    again = options.of_another_pass(quiet=False)
    return bind_fprop(lhs, ct, params["convolution"], *types, options, again).astype(g.aval.dtype)


def _transpose_rhs(lhs: jax.Array, g: jax.Array, out: Any, params: dict[str, Any]) -> jax.Array:
    """The primitive's value by lax's own rule, which knows symbolic sizes."""
    wide = wider(lhs.dtype, out.dtype)
    transpose = jax.linear_transpose(lambda rhs: params["convolution"](lhs.astype(wide), rhs), out.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(out.dtype)


ad.defbilinear(conv_wgrad_p, _transpose_lhs, _transpose_g)


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One product more: one mapped operand widens the channels, two become groups. A config is for the product that
    the caller sees, so it gets a loop."""
    (lhs, g), (lhs_dim, g_dim) = args, dims
    conv, rhs_shape, specs = params["convolution"], params["rhs_shape"], params["convolution"].dimension_numbers
    size = g.shape[g_dim] if g_dim is not None else lhs.shape[lhs_dim or 0]
    if size == 0:
        empty = jnp.zeros((0, *rhs_shape), params["out_dtype"])
        return _compat.vary_like(empty, lhs, g), 0
    if params["options"].config is not None:
        lhs, g = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return lax.map(lambda pair: conv_wgrad_p.bind(*pair, **params), (lhs, g)), 0
    groups = conv.feature_group_count * conv.batch_group_count
    out_dim, in_dim = specs.rhs_spec[:2]
    if lhs_dim is None and g_dim is not None:
        g, widened = fold_into(g, g_dim, specs.out_spec[1], groups), out_dim
    elif lhs_dim is not None and g_dim is None:
        lhs, widened, groups = fold_into(lhs, lhs_dim, specs.lhs_spec[1], conv.feature_group_count), in_dim, 1
    else:
        conv, lhs = grouped(conv, lhs, lhs_dim or 0, size)
        g, widened, groups = fold_into(g, g_dim or 0, specs.out_spec[1]), out_dim, 1
    shape = tuple(n * size if i == widened else n for i, n in enumerate(rhs_shape))
    out = conv_wgrad_p.bind(lhs, g, **(params | {"convolution": conv, "rhs_shape": shape}))
    return unfold_from(out, widened, size, groups), widened


batching.primitive_batchers[conv_wgrad_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    if not _compat.is_known(*problem.input_spatial):
        return lambda lhs, g: _transpose_rhs(lhs, g, out, params)
    specs = params["convolution"].dimension_numbers

    def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
        written = cast(ConvWgradProblem, as_written(ConvWgradProblem, (lhs, g), params))
        return conv_reference.conv_wgrad(lhs, g, written, specs)

    return wgrad


def _with_kernel(
    problem: Any, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array] | None:
    if is_canonical(problem, params):
        return None
    run = lambda *operands: execute.call(custom_call, problem, *operands)  # noqa: E731
    return between_layouts(ConvWgradProblem, problem, params, out, run)


lowering.define(conv_wgrad_p, _abstract_eval, problem_of(ConvWgradProblem), _with_xla, _with_kernel, _rule_of)
