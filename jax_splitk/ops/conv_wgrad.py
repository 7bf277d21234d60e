"""The `conv_wgrad` primitive: its type, its transformation rules and its lowering.

It is bilinear in (lhs, g); its transposes are the other passes of the convolution.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.interpreters import ad

from jax_splitk.ops import partitioning
from jax_splitk.ops.conv_primitives import as_written, bind_dgrad, bind_fprop, conv_wgrad_p, define, rule_of
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import wider

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


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    if not _compat.is_known(*problem.input_spatial):
        return lambda lhs, g: _transpose_rhs(lhs, g, out, params)
    specs = params["convolution"].dimension_numbers

    def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
        written = cast(ConvWgradProblem, as_written(ConvWgradProblem, (lhs, g), params))
        return conv_reference.conv_wgrad(lhs, g, written, specs)

    return wgrad


define(conv_wgrad_p, ConvWgradProblem, _abstract_eval, _with_xla)
