"""The `conv_dgrad` primitive: the gradient of a convolution's input, as lax's own transpose rule makes it.

It is bilinear in (g, rhs); its transposes are the other passes of the convolution.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad

from jax_splitk.ops import partitioning
from jax_splitk.ops.conv_primitives import between_layouts, bind_fprop, bind_wgrad, conv_dgrad_p, define, rule_of
from jax_splitk.problems.conv_passes import ConvDgradProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import wider

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


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    def transposed(g: jax.Array, rhs: jax.Array) -> jax.Array:
        of_g, of_rhs = jax.typeof(g), jax.typeof(rhs)
        lhs = _type(of_g, of_rhs, params, g.dtype)
        if problem is None and params["out_sharding"] is not None:
            lhs = lhs.update(sharding=params["out_sharding"])
        found = params["convolution"].transposed(g, lhs, rhs, _compat.explicit_sharding(of_g))
        return found.astype(params["out_dtype"])

    dtype = params["out_dtype"]
    if problem is None or problem.dtype == dtype or not _compat.is_known(*problem.input_spatial):
        return transposed
    run = functools.partial(OPERATIONS[problem.op].reference, problem)
    return between_layouts(ConvDgradProblem, problem, params, out, run)


define(conv_dgrad_p, ConvDgradProblem, _abstract_eval, _with_xla)
