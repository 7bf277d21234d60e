"""Grouped products with quantized weights in plain lax: dequantize all weights, then multiply. The fallback runs it,
and kernels are checked against it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.problems import quantized_reference, ragged_reference
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_reference import Layout, Leaves
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.quantized.packing import TILE, tiles

# (problem, lhs, rhs, group_sizes[, group_offset]) -> the result of a forward product.
Grouped = Callable[..., jax.Array]


def ragged_dot(problem: QuantizedRaggedDotProblem, *operands: jax.Array, grouped: Grouped) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers.

    Args:
      grouped: computes the product with dequantized weights.
    """
    return product(*parts(problem, *operands), problem.out_dtype, grouped)


def parts(
    problem: QuantizedRaggedDotProblem, *operands: jax.Array
) -> tuple[Layout, jax.Array, Leaves, Sequence[jax.Array]]:
    """The layout of a weight, and `split` of a problem's operands."""
    p = problem
    layout = Layout((p.k, p.n), p.qtype, p.group_size, p.layout or None, p.channel_dtype != "none")
    return layout, *split(layout, p.zero_dtype != "none", operands)


def split(layout: Layout, has_zero: bool, operands: Sequence[Any]) -> tuple[Any, Leaves, Sequence[Any]]:
    """(lhs, the leaves of the weights, group_sizes and group_offset) from a call's operands."""
    end = 3 + has_zero + layout.channel
    return operands[0], quantized_reference.leaves_of(layout, operands[1:end]), operands[end:]


def dequantized(layout: Layout, leaves: Leaves) -> jax.Array:
    """The dequantized weights, [groups, k, n] in float32."""
    return jax.vmap(functools.partial(quantized_reference.dequantized, layout))(leaves)


def product(
    layout: Layout,
    lhs: jax.Array,
    leaves: Leaves,
    rest: Sequence[jax.Array],
    out_dtype: Any,
    grouped: Grouped,
    *,
    transposed: bool = False,
    rounded: bool = True,
) -> jax.Array:
    """The rows of lhs times their groups' weights, in out_dtype.

    Dtypes are those of `quantized_reference.product`: if lhs and the result have the same 16-bit dtype, the weights are
    rounded to it, else the product is one of float32.

    Args:
      leaves: of the stack.
      rest: group_sizes and, if there is one, group_offset.
      transposed: whether lhs [m, n] is multiplied with the transposed weights.
      rounded: False for the sums in float32 that would be rounded to out_dtype.
    """
    weight, out = dequantized(layout, leaves), jnp.dtype(out_dtype)
    a = lhs.astype(jnp.bfloat16) if lhs.dtype.itemsize == 1 else lhs  # exact
    if a.dtype != out:
        a = a.astype(jnp.float32)
    factor = None
    if a.dtype == jnp.float16:
        # A power of two for each column of each weight brings it into float16's range.
        axis = 2 if transposed else 1
        factor = quantized_reference.float16_factor(weight, axis)
        weight, factor = weight / factor, factor.squeeze(axis)
    k, n = layout.shape[::-1] if transposed else layout.shape
    problem = RaggedDotProblem(
        mode="forward",
        groups=weight.shape[0],
        m=a.shape[0],
        k=k,
        n=n,
        dtype=a.dtype.name,
        out_dtype=out.name if rounded and factor is None else "float32",
        precision="highest" if a.dtype == jnp.float32 else "default",
        rhs_order="gnk" if transposed else "gkn",
        total_groups=rest[0].shape[0] if len(rest) > 1 else 0,
    )
    result = grouped(problem, a, weight.astype(a.dtype), *rest)
    if factor is not None:
        result = result * of_rows(factor, a.shape[0], *rest)
    return result.astype(out) if rounded else result


def of_rows(each: jax.Array, m: int, sizes: jax.Array, *offset: jax.Array) -> jax.Array:
    """What belongs to the weight of each row, [m, ...], from what belongs to each weight, [groups, ...]; zeros for a
    row that has none."""
    groups, ends = each.shape[0], sum(ragged_reference.bounds(sizes, m))
    group = jnp.searchsorted(ends, jnp.arange(m, dtype=jnp.int32), side="right").astype(jnp.int32)
    weight = group - offset[0][0] if offset else group
    has_one = (group < sizes.shape[0]) & (weight >= 0) & (weight < groups)
    found = each[jnp.clip(weight, 0, groups - 1)]
    return jnp.where(has_one.reshape(m, *[1] * (each.ndim - 1)), found, jnp.zeros_like(found))


def random_operands(problem: QuantizedRaggedDotProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Operands of one call: weights as for `quantized_matmul`, sizes as for `ragged_dot`."""
    p, of_tiles = problem, tiles(problem.n)
    # The tiles of all weights as those of a wide one.
    wide = dataclasses.replace(p.product, features=p.groups * of_tiles * TILE)
    lhs, *weight = quantized_reference.random_operands(wide, seed)
    stacked = (x.reshape(p.groups, of_tiles, *x.shape[1:]) for x in weight)
    return lhs, *stacked, *ragged_reference.random_sizes(p.dequantized(p.dtype, p.out_dtype), seed)
