"""The `conv_fprop` primitive: lax's convolution, whose cotangents are `conv_dgrad` and `conv_wgrad`.

It is linear in each operand. It takes operands of any floating dtypes and converts them to its `compute_dtype`, so that
a cotangent has its operand's dtype without a conversion that is differentiated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad

from jax_splitk.ops import partitioning
from jax_splitk.ops.conv_primitives import bind_dgrad, bind_wgrad, conv_fprop_p, define, rule_of
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.runtime import _compat

_rule_of = rule_of(ConvFpropProblem)


def _lax(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], out_sharding: Any = None) -> jax.Array:
    lhs, rhs = (x.astype(params["compute_dtype"]) for x in (lhs, rhs))
    return params["convolution"](lhs, rhs, params["out_dtype"], out_sharding)


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    lhs, rhs = (x.update(dtype=jnp.dtype(params["compute_dtype"]), weak_type=False) for x in (lhs, rhs))
    out_type, out_dtype, sharding = params["convolution"].out_type, params["out_dtype"], params["out_sharding"]
    if params["options"].quiet or sharding is not None:
        return out_type(lhs, rhs, out_dtype, sharding)
    # By explicit axes lax is strict where the rule decides.
    out = out_type(*(_compat.like(x, x.shape, x.dtype) for x in (lhs, rhs)), out_dtype, None)
    return partitioning.with_explicit_sharding(out, _rule_of, (lhs, rhs), params)


# ---- differentiation -------------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    # What a transpose keeps of an operand is its conversion, which may be smaller.
    lhs, rhs = (x.astype(params["compute_dtype"]) for x in primals)
    params["options"] = dataclasses.replace(params["options"], alone=False)
    out = conv_fprop_p.bind(lhs, rhs, **params)
    lhs_dot, rhs_dot = tangents
    terms = []
    if not isinstance(lhs_dot, ad.Zero):
        terms.append(conv_fprop_p.bind(lhs_dot, rhs, **params))
    if not isinstance(rhs_dot, ad.Zero):
        terms.append(conv_fprop_p.bind(lhs, rhs_dot, **params))
    return out, sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, lhs: Any, rhs: Any, **params: Any) -> tuple[Any, Any]:
    if isinstance(ct, ad.Zero):
        return None, None
    conv, compute_dtype, wgrad_options = (params[name] for name in ("convolution", "compute_dtype", "wgrad_options"))
    ct = ct.astype(compute_dtype)
    if ad.is_undefined_primal(lhs):
        sharding, options = _compat.explicit_sharding(lhs.aval), params["options"].of_another_pass()
        operands = (ct, rhs.astype(compute_dtype), lhs.aval.shape)
        d_lhs = bind_dgrad(conv, *operands, compute_dtype, sharding, options, wgrad_options)
        return d_lhs.astype(lhs.aval.dtype), None
    out_dtype = rhs.aval.dtype if rhs.aval.dtype.name in DTYPES else compute_dtype
    d_rhs = bind_wgrad(conv, lhs.astype(compute_dtype), ct, rhs.aval.shape, out_dtype, wgrad_options)
    return None, _compat.placed_like(d_rhs.astype(rhs.aval.dtype), rhs.aval)


ad.primitive_jvps[conv_fprop_p] = _jvp
ad.primitive_transposes[conv_fprop_p] = _transpose


# ---- lowering --------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del out
    return lambda lhs, rhs: _lax(lhs, rhs, params, params["out_sharding"] if problem is None else None)


define(conv_fprop_p, ConvFpropProblem, _abstract_eval, _with_xla)
