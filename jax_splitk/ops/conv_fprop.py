"""The `conv_fprop` primitive: lax's convolution, whose cotangents are `conv_dgrad` and `conv_wgrad`.

It is linear in each operand. It takes operands of any floating dtypes and converts them to its `compute_dtype`, so that
a cotangent has its operand's dtype without a conversion that is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.conv_primitives import (
    between_layouts,
    bind_dgrad,
    bind_wgrad,
    conv_dgrad_p,
    conv_fprop_p,
    problem_of,
    rule_of,
)
from jax_splitk.ops.convolution import grouped
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

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


def _saved_as_laxs(saveable: Callable[..., Any], unknown: Sequence[bool], known: Sequence[bool], eqn: Any) -> Any:
    """Under `jax.checkpoint`: what a policy says of lax's convolution it says of this one."""
    if any(unknown):
        wanted = [x for x, held in zip(eqn.invars, known, strict=True) if not held and isinstance(x, core.Var)]
        return None, eqn, [True], [True], wanted
    saved = saveable(lax.conv_general_dilated_p, *(x.aval for x in eqn.invars), **eqn.params)
    if _compat.is_saveable(saved):
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], []


for primitive in (conv_fprop_p, conv_dgrad_p):
    pe.partial_eval_jaxpr_custom_rules[primitive] = _saved_as_laxs


# ---- batching --------------------------------------------------------------------------------------------------------


def _batch(axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One convolution more: a mapped input alone widens the batch, a mapped weight alone the output channels, and both
    together are groups."""
    (lhs, rhs), (lhs_dim, rhs_dim) = args, dims
    conv = params["convolution"]
    specs, out_groups = conv.dimension_numbers, 1
    size = lhs.shape[lhs_dim] if lhs_dim is not None else rhs.shape[rhs_dim or 0]
    if size == 0:
        return _empty(args, dims, params), 0
    if params["options"].config is not None:
        pair = tuple(batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return lax.map(lambda pair: conv_fprop_p.bind(*pair, **params), pair), 0
    if rhs_dim is None:
        lhs, out_dim = fold_into(lhs, lhs_dim or 0, specs.lhs_spec[0], conv.batch_group_count), specs.out_spec[0]
    elif lhs_dim is None:
        out_groups, out_dim = conv.feature_group_count * conv.batch_group_count, specs.out_spec[1]
        rhs = fold_into(rhs, rhs_dim, specs.rhs_spec[0], out_groups)
    else:
        conv, lhs = grouped(conv, lhs, lhs_dim, size)
        rhs, out_dim = fold_into(rhs, rhs_dim, specs.rhs_spec[0]), specs.out_spec[1]
    params |= {"convolution": conv, "out_sharding": _compat.mapped_sharding(params["out_sharding"], axis, out_dim)}
    return unfold_from(conv_fprop_p.bind(lhs, rhs, **params), out_dim, size, out_groups), out_dim


def _empty(args: Sequence[jax.Array], dims: Sequence[int | None], params: dict[str, Any]) -> jax.Array:
    """Results of no mapped operands."""
    shapes = ([n for i, n in enumerate(x.shape) if i != dim] for x, dim in zip(args, dims, strict=True))
    one = [jax.ShapeDtypeStruct(tuple(shape), x.dtype) for shape, x in zip(shapes, args, strict=True)]
    out = jax.eval_shape(lambda lhs, rhs: _lax(lhs, rhs, params), *one)
    return _compat.vary_like(jnp.zeros((0, *out.shape), out.dtype), *args)


batching.fancy_primitive_batchers[conv_fprop_p] = _batch


# ---- lowering --------------------------------------------------------------------------------------------------------


def _with_xla(problem: Any, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del out
    return lambda lhs, rhs: _lax(lhs, rhs, params, params["out_sharding"] if problem is None else None)


def _with_kernel(problem: Any, params: dict[str, Any], out: Any, custom_call: CustomCall) -> Callable[..., jax.Array]:
    run = lambda *operands: execute.call(custom_call, problem, *operands)  # noqa: E731
    return between_layouts(ConvFpropProblem, problem, params, out, run)


lowering.define(conv_fprop_p, _abstract_eval, problem_of(ConvFpropProblem), _with_xla, _with_kernel, _rule_of)
