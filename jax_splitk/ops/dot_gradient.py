"""Differentiation and batching of the `dot_general` primitive."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import checkpointing, lowering, taylor
from jax_splitk.ops.dot_calls import NO_EPILOGUE, DotCall, Epilogue, dot_general_p
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.tangents import summed
from jax_splitk.problems.dot_general import E4M3
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: DotCall) -> tuple[jax.Array, Any]:
    """An activation is differentiated at the sums, which are kept; all else is linear, and stays in the kernel."""
    primals = [jnp.asarray(x) for x in primals]  # JAX may give a number of Python
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    epilogue = call.epilogue
    if epilogue.activation != "none":

        def of_moving(*given: jax.Array) -> jax.Array:
            changed = {**dict(enumerate(primals)), **dict(zip(moving, given, strict=True))}
            return call.composed(*changed.values())

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    out = call.bind(*primals)
    terms: list[jax.Array] = []
    for i in moving:
        if i < 2:
            lhs, rhs = (tangents[0], primals[1]) if i == 0 else (primals[0], tangents[1])
            terms.append(dataclasses.replace(call, epilogue=NO_EPILOGUE).bind(lhs, rhs))
        elif i == 2 and epilogue.bias != "none":
            bias_alone = dataclasses.replace(call, epilogue=Epilogue(epilogue.bias))
            zeros = jnp.zeros_like(out, dtype=call.problem(primals).epilogue_dtype)
            terms.append(bias_alone.finished(zeros, (*primals[:2], tangents[i])))
        else:
            terms.append(tangents[i].astype(out.dtype))
    return out, summed(terms, out)


def _transpose(ct: Any, lhs: Any, rhs: Any, *rest: Any, call: DotCall) -> tuple[Any, ...]:
    """The cotangents of a product alone, which is what `_jvp` leaves to be transposed. The operand that is solved for
    is a placeholder that has only a type, `.aval`."""
    if rest or call.epilogue != NO_EPILOGUE:
        raise NotImplementedError("the transpose of a product with an epilogue, which is not linear")
    if isinstance(ct, ad.Zero):
        return None, None
    if ad.is_undefined_primal(lhs):
        with jax.named_scope("lhs_gradient"):
            return _cotangent(ct, lhs.aval, jnp.asarray(rhs), call.dimensions, call), None
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = call.dimensions
    free = free_dimensions(jnp.ndim(lhs), lhs_contracting, lhs_batch)
    # As the result of rhs's product with lhs.
    batch, last = len(lhs_batch), ct.ndim
    order = (*range(batch), *range(batch + len(free), last), *range(batch, batch + len(free)))
    swapped = ((rhs_contracting, lhs_contracting), (rhs_batch, lhs_batch))
    with jax.named_scope("rhs_gradient"):
        return None, _cotangent(ct, rhs.aval, jnp.asarray(lhs), swapped, call, order)


def _cotangent(
    ct: jax.Array,
    x: Any,
    y: jax.Array,
    dimensions: DimensionNumbers,
    call: DotCall,
    order: tuple[int, ...] | None = None,
) -> jax.Array:
    """The cotangent of x in the product of x and y, whose result has x's free dimensions first. `order` is where the
    dimensions of that result are in ct."""
    (x_contracting, y_contracting), (x_batch, y_batch) = dimensions
    x_free = free_dimensions(x.ndim, x_contracting, x_batch)
    y_free = free_dimensions(y.ndim, y_contracting, y_batch)
    places = tuple(range(ct.ndim)) if order is None else order
    batch = len(x_batch)
    ct_batch, ct_y = places[:batch], places[batch + len(x_free) :]
    in_y_order = tuple(x_contracting[i] for i in np.argsort(y_contracting))
    compute_dtype, out_dtype = call.compute_dtype, x.dtype.name
    if compute_dtype == E4M3:  # which bfloat16 holds, and a cotangent is not rounded to it before the product
        compute_dtype, out_dtype = "bfloat16", "float32"

    changed = {"compute_dtype": compute_dtype, "out_dtype": out_dtype, "options": call.options.without_config()}
    # The result is written in x's order where one of the two orders of the operands gives it.
    if in_y_order and x_free and in_y_order[0] < x_free[0]:
        numbers, operands = ((y_free, ct_y), (y_batch, ct_batch)), (y, ct)
        axes = (*x_batch, *in_y_order, *x_free)
    else:
        numbers, operands = ((ct_y, y_free), (ct_batch, y_batch)), (ct, y)
        axes = (*x_batch, *x_free, *in_y_order)
    out = dataclasses.replace(call, dimensions=numbers, **changed).bind(*operands)
    return out.transpose(tuple(int(i) for i in np.argsort(axes))).astype(x.dtype)


def _taylor(primals: Sequence[jax.Array], series: Sequence[Any], *, call: DotCall) -> Any:
    composed = taylor.composed(lambda *operands, call: call.composed(*operands))
    rule = taylor.bilinear if call.epilogue == NO_EPILOGUE else composed
    return rule(primals, series, call=call)


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, call: DotCall) -> tuple[jax.Array, int]:
    """An axis that both operands have becomes a batch dimension, and an axis that one operand has becomes a free
    dimension of it. An axis of the bias goes where the product's axis is."""
    args = [jnp.asarray(x) for x in args]  # one that is not mapped may be a number of Python
    lhs_dim, rhs_dim, epilogue = dims[0], dims[1], call.epilogue
    if call.options.config is not None:
        return one_by_one(args, dims, call), 0
    size = mapped_size(args, dims)
    bias, residual = epilogue.named(tuple(zip(args[2:], dims[2:], strict=True)))
    of_bias = (epilogue.bias == "m" and rhs_dim is None) or (epilogue.bias == "n" and lhs_dim is None)
    if (lhs_dim is None and rhs_dim is None) or (bias is not None and bias[1] is not None and not of_bias):
        return jax.vmap(call.composed, tuple(dims))(*args), 0
    call, place = call.with_mapped((args[0].ndim, args[1].ndim), (lhs_dim, rhs_dim))
    rest = []
    if bias is not None:
        free = call.free(args)[0 if epilogue.bias == "m" else 1]
        at = free.index(lhs_dim if epilogue.bias == "m" else rhs_dim) if of_bias else None
        rest.append(bias[0] if at is None else _with_dimension(bias, at, size))
    if residual is not None:
        rest.append(_with_dimension(residual, place, size))
    return call.bind(*args[:2], *rest), place


def _with_dimension(operand: tuple[jax.Array, int | None], place: int, size: int) -> jax.Array:
    """The operand with its mapped dimension at `place`; an operand that is not mapped is repeated along a new dimension
    there."""
    x, dim = operand
    if dim is not None:
        return jnp.moveaxis(x, dim, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    return jnp.broadcast_to(jnp.expand_dims(x, place), shape)


ad.primitive_jvps[dot_general_p] = _jvp
ad.primitive_transposes[dot_general_p] = _transpose
batching.primitive_batchers[dot_general_p] = _batch
taylor.define(dot_general_p, _taylor)
checkpointing.define(dot_general_p, lax.dot_general_p)
lowering.define(dot_general_p)
