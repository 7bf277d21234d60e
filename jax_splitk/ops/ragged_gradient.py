"""Differentiation and batching of the `ragged_dot` primitive.

It is bilinear in lhs and rhs, and its passes are each other's transposes: both cotangents of a "rhs_gradient" are
"forward" products, and a "forward" product has one of each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import checkpointing, lowering, tangents, taylor
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.ragged_call import RaggedDotCall, ragged_dot_p
from jax_splitk.problems.dot_general import E4M3
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import wider

# ---- differentiation -------------------------------------------------------------------------------------------------


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose(ct: Any, lhs: Any, rhs: Any, *rest: Any, call: RaggedDotCall) -> tuple[Any, ...]:
    nothing = (None,) * len(rest)
    if isinstance(ct, ad.Zero):
        return None, None, *nothing
    whole = tuple(range(call.rank))
    of_lhs, of_rhs, of_sizes = call.batch
    if ad.is_undefined_primal(lhs):
        with jax.named_scope("lhs_gradient"):
            if call.is_forward:
                order = "gnk" if call.rhs_order == "gkn" else "gkn"
                found = _cotangent(call, "forward", (ct, rhs), (whole, of_rhs, of_sizes), lhs.aval, 0, rest, order)
            else:
                found = _cotangent(call, "forward", (rhs, ct), (of_rhs, whole, of_sizes), lhs.aval, 0, rest, "gnk")
        return found, None, *nothing
    with jax.named_scope("rhs_gradient"):
        if not call.is_forward:
            found = _cotangent(call, "forward", (lhs, ct), (of_lhs, whole, of_sizes), rhs.aval, 1, rest)
        elif call.rhs_order == "gkn":
            found = _cotangent(call, "rhs_gradient", (lhs, ct), (of_lhs, whole, of_sizes), rhs.aval, 1, rest)
        else:
            found = _cotangent(call, "rhs_gradient", (ct, lhs), (whole, of_lhs, of_sizes), rhs.aval, 1, rest)
    return None, found, *nothing


def _cotangent(
    call: RaggedDotCall,
    mode: Any,
    operands: tuple[jax.Array, jax.Array],
    batch: Any,
    of: Any,
    place: int,
    rest: Sequence[jax.Array],
    rhs_order: str = "gkn",
) -> jax.Array:
    """The cotangent of an operand of type `of` at `place` among the operands of `call`, as another pass of these
    operands; summed over the dimensions of the batch that the operand lacks."""
    summed = tuple(dim for dim in range(call.rank) if dim not in call.batch[place])
    out_dtype, compute_dtype = of.dtype, call.compute_dtype
    if compute_dtype == E4M3:  # which bfloat16 holds, and a cotangent is not rounded to it before the product
        out_dtype, compute_dtype = jnp.dtype(jnp.float32), "bfloat16"
    if summed:
        out_dtype = wider(out_dtype, jnp.float32)
    another = dataclasses.replace(
        call,
        mode=mode,
        rhs_order=rhs_order,
        batch=batch,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype.name,
        options=call.options.without_config(),
    )
    out = another.bind(*operands, *rest)
    out = out.sum(summed) if summed else out
    return _compat.placed_like(out.astype(of.dtype), of)


ad.primitive_jvps[ragged_dot_p] = tangents.bilinear
ad.primitive_transposes[ragged_dot_p] = _transpose


taylor.define(ragged_dot_p, taylor.bilinear)


# ---- batching --------------------------------------------------------------------------------------------------------


def _batch(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, call: RaggedDotCall
) -> tuple[jax.Array, int | None]:
    """An axis that a single operand has joins its rows (lhs), or the columns that the result has of it. Any other axis
    becomes a dimension of the batch."""
    if all(dim is None for dim in dims):
        return call.bind(*args), None
    if call.options.config is not None or any(dim is not None for dim in dims[3:]):
        return one_by_one(args, dims, call), 0
    lhs, rhs, sizes, *offset = args
    mapped = tuple(i for i in range(3) if dims[i] is not None)
    if mapped == (0,):
        return _with_wider_lhs(call, lhs, dims[0], rhs, sizes, offset)
    if mapped == (1,) and not call.is_forward:
        return _with_wider_rhs(call, lhs, rhs, dims[1], sizes, offset)
    size = mapped_size(args, dims)
    in_front = [x if dim is None else batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True)]
    batch = tuple((*((0,) if i in mapped else ()), *(dim + 1 for dim in those)) for i, those in enumerate(call.batch))
    return dataclasses.replace(call, batch=batch).bind(*in_front), 0


def _with_wider_lhs(
    call: RaggedDotCall, lhs: jax.Array, dim: int | None, rhs: jax.Array, sizes: jax.Array, offset: Sequence[jax.Array]
) -> tuple[jax.Array, int]:
    """A mapped lhs alone: its rows stand next to each other, or its columns do."""
    size = lhs.shape[dim or 0]
    wide = jnp.moveaxis(lhs, dim or 0, -2)  # [..., m, size, k]
    *front, m, _, k = wide.shape
    if call.is_forward:
        sizes = jnp.clip(sizes, 0, m) * size
        out = call.bind(wide.reshape(*front, m * size, k), rhs, sizes, *offset)
        return out.reshape(*out.shape[:-2], m, size, out.shape[-1]), out.ndim - 1
    out = call.bind(wide.reshape(*front, m, size * k), rhs, sizes, *offset)
    return out.reshape(*out.shape[:-2], size, k, out.shape[-1]), out.ndim - 2


def _with_wider_rhs(
    call: RaggedDotCall, lhs: jax.Array, rhs: jax.Array, dim: int | None, sizes: jax.Array, offset: Sequence[jax.Array]
) -> tuple[jax.Array, int]:
    """A mapped rhs of a rhs gradient alone: its columns stand next to each other."""
    wide = jnp.moveaxis(rhs, dim or 0, -2)  # [..., m, size, n]
    *front, size, n = wide.shape
    out = call.bind(lhs, wide.reshape(*front, size * n), sizes, *offset)
    return out.reshape(*out.shape[:-1], size, n), out.ndim - 1


batching.primitive_batchers[ragged_dot_p] = _batch


checkpointing.define(ragged_dot_p, lax.dot_general_p)
lowering.define(ragged_dot_p)
