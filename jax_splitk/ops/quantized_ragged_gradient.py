"""Differentiation and batching of the `quantized_ragged_dot` primitive.

It is linear in lhs, and its weights are linear in each kind of scales and in the zero points. All cotangents are
grouped products with dequantized weights, [groups, k, n], which XLA writes to memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import checkpointing, lowering, tangents, taylor
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.quantized_ragged_call import QuantizedRaggedCall, quantized_ragged_dot_p
from jax_splitk.problems import quantized_ragged_reference as reference
from jax_splitk.problems.quantized_reference import to_cotangent, widened
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import _compat
from jax_splitk.runtime.computation import one_computation

# ---- differentiation -------------------------------------------------------------------------------------------------


def tangent_terms(primals: Sequence[Any], dots: Sequence[Any], call: QuantizedRaggedCall) -> list[jax.Array]:
    """The terms of the result's tangent."""
    lhs_dot, (_, *of_weight), _ = reference.split(call.layout, call.has_zero, dots)
    terms = [] if isinstance(lhs_dot, ad.Zero) else [call.bind(lhs_dot, *primals[1:])]
    moving = [i for i, dot in enumerate(of_weight) if dot is not None and not isinstance(dot, ad.Zero)]
    if moving:
        sharding = _compat.explicit_sharding(call.type_of(*map(jax.typeof, primals)))
        term = lambda *operands: _weight_term(call, tuple(moving), sharding, *operands)  # noqa: E731
        terms.append(_compat.over_auto_axes(term, sharding)(*primals, *(of_weight[i] for i in moving)))
    return terms


def _jvp(primals: Sequence[Any], dots: Sequence[Any], *, call: QuantizedRaggedCall) -> tuple[jax.Array, Any]:
    out = call.bind(*primals)
    return out, tangents.summed(tangent_terms(primals, dots, call), out)


@one_computation(0, 1, 2)
def _weight_term(call: QuantizedRaggedCall, moving: tuple[int, ...], sharding: Any, *operands: jax.Array) -> jax.Array:
    """The result's tangent by those of some of scales (0), zero points (1) and channel scales (2), which follow the
    operands: lhs times the tangent of the dequantized weights, in float32. `sharding`: see `grouped`."""
    given, moved = operands[: -len(moving)], operands[-len(moving) :]
    lhs, (values, *floats), rest = reference.split(call.layout, call.has_zero, given)
    dots = dict(zip(moving, moved, strict=True))

    def weights(*floats: Any) -> jax.Array:
        return reference.dequantized(call.layout, (values, *floats))  # pyright: ignore[reportArgumentType]

    (weight,) = tangents.by_some(weights, floats, [dots.get(i) for i in range(len(floats))])
    groups, k, n = weight.shape
    total = rest[0].shape[0] if call.has_offset else 0
    sizes = (groups, lhs.shape[0], k, n)
    problem = RaggedDotProblem("forward", *sizes, "float32", "float32", "highest", total_groups=total)
    return call.grouped(sharding)(problem, lhs.astype(jnp.float32), weight, *rest).astype(call.out_dtype)


def _transpose(ct: Any, lhs: Any, *others: Any, call: QuantizedRaggedCall) -> list[Any]:
    """lhs arrives as a placeholder that has only a type, `.aval`."""
    none = [None] * len(others)
    if isinstance(ct, ad.Zero):
        return [None, *none]
    dtype, sharding = lhs.aval.dtype, _compat.explicit_sharding(lhs.aval)
    automatic = _compat.over_auto_axes(lambda *given: _lhs_cotangent(call, dtype, sharding, *given), sharding)
    with jax.named_scope("lhs_gradient"):
        return [automatic(ct, *others), *none]


@one_computation(0, 1, 2)
def _lhs_cotangent(call: QuantizedRaggedCall, dtype: Any, sharding: Any, *operands: jax.Array) -> jax.Array:
    """The cotangent, in `dtype`, of the lhs, in whose place `operands` has that of the result. `sharding`: see
    `grouped`."""
    ct, leaves, rest = reference.split(call.layout, call.has_zero, operands)
    found = reference.product(call.layout, ct, leaves, rest, widened(dtype), call.grouped(sharding), transposed=True)
    return to_cotangent(found, dtype)


ad.primitive_jvps[quantized_ragged_dot_p] = _jvp
ad.primitive_transposes[quantized_ragged_dot_p] = _transpose


def _in_lax(*operands: jax.Array, call: QuantizedRaggedCall) -> jax.Array:
    return call.in_lax(None, None)(*operands)


taylor.define(quantized_ragged_dot_p, taylor.composed(_in_lax))


# ---- batching --------------------------------------------------------------------------------------------------------


def batch(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, call: QuantizedRaggedCall
) -> tuple[jax.Array, int | None]:
    """A mapped lhs alone has more rows; else the products are computed one after the other. Operands behind
    group_sizes, such as a bias, belong to the groups."""
    if all(dim is None for dim in dims):
        return call.bind(*args), None
    if call.options.config is not None or any(dim is not None for dim in dims[1:]):
        return one_by_one(args, dims, call), 0
    lhs, leaves, (sizes, *offset) = reference.split(call.layout, call.has_zero, args)
    size = mapped_size(args, dims)
    wide = batching.bdim_at_front(lhs, dims[0], size).swapaxes(0, 1)
    m, _, k = wide.shape
    of_weights = [leaf for leaf in leaves if leaf is not None]
    out = call.bind(wide.reshape(m * size, k), *of_weights, jnp.clip(sizes, 0, m) * size, *offset)
    return out.reshape(m, size, out.shape[-1]), 1


batching.primitive_batchers[quantized_ragged_dot_p] = batch


checkpointing.define(quantized_ragged_dot_p, lax.dot_general_p)
lowering.define(quantized_ragged_dot_p)
