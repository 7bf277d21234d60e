"""The `conv_dgrad` primitive: the gradient of a convolution's input, as lax's own transpose rule makes it.

It is bilinear in (g, rhs); its transposes are the other passes of the convolution.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.conv_primitives import between_layouts, bind_fprop, bind_wgrad, conv_dgrad_p, problem_of, rule_of
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.problems.conv_passes import ConvDgradProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import wider
from jax_splitk.runtime.plan import CustomCall

_rule_of = rule_of(ConvDgradProblem)


def _type(g: Any, rhs: Any, params: dict[str, Any], dtype: Any) -> Any:
    """Of the result, not sharded by explicit axes."""
    return _compat.like(g if _compat.aval_vma(g) else rhs, params["lhs_shape"], dtype)


def _abstract_eval(g: Any, rhs: Any, **params: Any) -> Any:
    out = _type(g, rhs, params, params["out_dtype"])
    if params["out_sharding"] is not None:
        return out.update(sharding=params["out_sharding"])
    return partitioning.with_explicit_sharding(out, _rule_of, (g, rhs), params)


# ---- differentiation -----------------------------------------------------------------------------------------------


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_g(ct: jax.Array, g: Any, rhs: jax.Array, **params: Any) -> jax.Array:
    wide, options = wider(ct.dtype, rhs.dtype), params["options"].of_another_pass()
    types = (wide, wide, _compat.explicit_sharding(g.aval))
    out = bind_fprop(ct, rhs, params["convolution"], *types, options, params["wgrad_options"].without_config())
    return out.astype(g.aval.dtype)


def _transpose_rhs(ct: jax.Array, g: jax.Array, rhs: Any, **params: Any) -> jax.Array:
    wide, options = wider(ct.dtype, g.dtype), params["wgrad_options"].without_config()
    operands = (ct.astype(wide), g.astype(wide), rhs.aval.shape)
    return _compat.placed_like(bind_wgrad(params["convolution"], *operands, rhs.aval.dtype, options), rhs.aval)


ad.defbilinear(conv_dgrad_p, _transpose_g, _transpose_rhs)


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One gradient more: a mapped g alone widens the batch, a mapped weight alone the input channels, and both together
    are groups. A config is for the gradient that the caller sees, so it gets a loop."""
    (g, rhs), (g_dim, rhs_dim) = args, dims
    conv, shape = params["convolution"], params["lhs_shape"]
    specs, groups = conv.dimension_numbers, 1
    batch_dim, channel_dim = specs.lhs_spec[:2]
    size = g.shape[g_dim] if g_dim is not None else rhs.shape[rhs_dim or 0]
    if size == 0:
        return _compat.vary_like(jnp.zeros((0, *shape), params["out_dtype"]), g, rhs), 0
    if params["options"].config is not None:
        pair = tuple(batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return lax.map(lambda pair: conv_dgrad_p.bind(*pair, **params), pair), 0
    if rhs_dim is None:
        # Where groups are of the batch, the output's batch is a part of each.
        g, widened, groups = fold_into(g, g_dim or 0, specs.out_spec[0]), batch_dim, conv.batch_group_count
    elif g_dim is None:
        rhs, widened, groups = fold_into(rhs, rhs_dim, specs.rhs_spec[1]), channel_dim, conv.feature_group_count
    else:
        g, rhs = fold_into(g, g_dim, specs.out_spec[1]), fold_into(rhs, rhs_dim, specs.rhs_spec[0])
        which = "batch_group_count" if conv.batch_group_count > 1 else "feature_group_count"
        conv = dataclasses.replace(conv, **{which: getattr(conv, which) * size})
        widened = batch_dim if conv.batch_group_count > 1 else channel_dim
    params["lhs_shape"] = tuple(n * size if i == widened else n for i, n in enumerate(shape))
    params |= {"convolution": conv, "out_sharding": _compat.mapped_sharding(params["out_sharding"], axis, widened)}
    return unfold_from(conv_dgrad_p.bind(g, rhs, **params), widened, size, groups), widened


batching.fancy_primitive_batchers[conv_dgrad_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    def transposed(g: jax.Array, rhs: jax.Array) -> jax.Array:
        of_g, of_rhs = jax.typeof(g), jax.typeof(rhs)
        lhs = _type(of_g, of_rhs, params, g.dtype)
        if problem is None and params["out_sharding"] is not None:
            lhs = lhs.update(sharding=params["out_sharding"])
        conv = lambda lhs: params["convolution"](lhs, rhs, out_sharding=_compat.explicit_sharding(of_g))  # noqa: E731
        return jax.linear_transpose(conv, lhs)(g)[0].astype(params["out_dtype"])

    dtype = params["out_dtype"]
    if problem is None or problem.dtype == dtype or not _compat.is_known(*problem.input_spatial):
        return transposed
    run = functools.partial(OPERATIONS[problem.op].reference, problem)
    return between_layouts(ConvDgradProblem, problem, params, out, run)


def _with_kernel(problem: Any, params: dict[str, Any], out: Any, custom_call: CustomCall) -> Callable[..., jax.Array]:
    run = lambda *operands: execute.call(custom_call, problem, *operands)  # noqa: E731
    return between_layouts(ConvDgradProblem, problem, params, out, run)


lowering.define(conv_dgrad_p, _abstract_eval, problem_of(ConvDgradProblem), _with_xla, _with_kernel, _rule_of)
