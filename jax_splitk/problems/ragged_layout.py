"""From `lax.ragged_dot_general`'s dimension numbers to a grouped product with a batch, and back.

lax has three modes, by the kind of lhs's ragged dimension. If it is not contracted, the product is "forward"; if it is
contracted, "rhs_gradient". If it is a batch dimension, lax computes a plain `dot_general`, which ignores the groups.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from jax_splitk.problems.dot_layout import free_dimensions
from jax_splitk.problems.ragged_dot import Mode


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of the product: a transpose of lax's, then a reshape."""

    transpose: tuple[int, ...]
    shape: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class RaggedLayout:
    """A grouped product, and how lax's operands become the operands of this product.

    Attributes:
      mode, rhs_order: as in `RaggedDotProblem`.
      groups: matrices of rhs, or of the result.
      lhs: [*batch, m, k].
      rhs: [*batch, groups, k, n] (or in the other order), [*batch, m, n] of a rhs gradient.
      batch: of lhs, rhs and group_sizes, which batch dimensions they have; group_sizes is lax's own.
      rows_each: rows of the product for each of lax's, by which group_sizes are multiplied.
      summed: dimensions of the batch over which the result is summed: they are contracted, but not ragged.
      split: the result's shape with lax's dimensions, once it is summed.
      transpose: of these, to lax's order.
    """

    mode: Mode
    rhs_order: Literal["gkn", "gnk"]
    groups: Any
    lhs: Operand
    rhs: Operand
    batch: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    rows_each: Any
    summed: tuple[int, ...]
    split: tuple[Any, ...]
    transpose: tuple[int, ...]


def is_batch(numbers: Any) -> bool:
    """Whether the ragged dimension is a batch dimension."""
    _, (lhs_batch, _) = numbers.dot_dimension_numbers
    return numbers.lhs_ragged_dimensions[0] in lhs_batch


def layout(lhs: Sequence[Any], rhs: Sequence[Any], group_sizes: Sequence[Any], numbers: Any) -> RaggedLayout:
    """The product for operands of these shapes, which lax accepts, and whose ragged dimension is none of the batch.

    Args:
      numbers: a `lax.RaggedDotDimensionNumbers`.
    """
    (lhs_contracting, _), _ = numbers.dot_dimension_numbers
    if numbers.lhs_ragged_dimensions[0] in lhs_contracting:
        return _rhs_gradient(lhs, rhs, group_sizes, numbers)
    return _forward(lhs, rhs, group_sizes, numbers)


def _size(shape: Sequence[Any], dims: Sequence[int]) -> Any:
    return math.prod(shape[i] for i in dims)


def _forward(lhs: Sequence[Any], rhs: Sequence[Any], group_sizes: Sequence[Any], numbers: Any) -> RaggedLayout:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,), (group,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    free = free_dimensions(len(lhs), lhs_contracting, lhs_batch)
    place = free.index(ragged)
    # If outer dimensions share group sizes, each size counts the rows of all of them together, as for inner dimensions.
    outer, inner = (free[:place], free[place + 1 :]) if len(group_sizes) > 1 else ((), _without(free, ragged))
    columns = free_dimensions(len(rhs), rhs_contracting, (*rhs_batch, group))
    # The order of the reduction is free: take the order in lhs.
    pairs = sorted(zip(lhs_contracting, rhs_contracting, strict=True))
    k_of_lhs, k_of_rhs = ([pair[i] for pair in pairs] for i in range(2))
    in_place = (*rhs_batch, group, *columns, *k_of_rhs) == tuple(range(len(rhs)))
    transposed = bool(columns) and (in_place or (bool(k_of_rhs) and min(columns) < min(k_of_rhs)))
    matrix = (columns, k_of_rhs) if transposed else (k_of_rhs, columns)
    rows, k = _size(lhs, (ragged, *inner)), _size(lhs, k_of_lhs)
    batch = tuple(range(len(lhs_batch) + len(outer)))
    in_front = tuple(lhs[i] for i in (*lhs_batch, *outer))
    order = (*lhs_batch, *outer, ragged, *inner)  # of the result's dimensions, by lhs's
    wanted = (*lhs_batch, *free)
    return RaggedLayout(
        mode="forward",
        rhs_order="gnk" if transposed else "gkn",
        groups=rhs[group],
        lhs=Operand((*order, *k_of_lhs), (*in_front, rows, k)),
        rhs=Operand(
            (*rhs_batch, group, *matrix[0], *matrix[1]),
            (*(rhs[i] for i in (*rhs_batch, group)), *(_size(rhs, dims) for dims in matrix)),
        ),
        batch=(batch, batch[: len(lhs_batch)], batch if len(group_sizes) > 1 else ()),
        rows_each=_size(lhs, inner),
        summed=(),
        split=(*(lhs[i] for i in order), *(rhs[i] for i in columns)),
        transpose=(*(order.index(i) for i in wanted), *range(len(order), len(order) + len(columns))),
    )


def _rhs_gradient(lhs: Sequence[Any], rhs: Sequence[Any], group_sizes: Sequence[Any], numbers: Any) -> RaggedLayout:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    place = lhs_contracting.index(ragged)
    outer = tuple(range(place)) if len(group_sizes) > 1 else ()
    rows = (place, *(i for i in range(len(lhs_contracting)) if i != place and i not in outer))
    several = len(lhs_batch) + len(outer)

    def operand(shape: Sequence[Any], contracting: Sequence[int], batch: Sequence[int]) -> tuple[Operand, list[Any]]:
        columns = free_dimensions(len(shape), contracting, batch)
        in_front, of_rows = (*batch, *(contracting[i] for i in outer)), [contracting[i] for i in rows]
        sizes = (*(shape[i] for i in in_front), _size(shape, of_rows), _size(shape, columns))
        return Operand((*in_front, *of_rows, *columns), sizes), [shape[i] for i in columns]

    (of_lhs, lhs_columns) = operand(lhs, lhs_contracting, lhs_batch)
    (of_rhs, rhs_columns) = operand(rhs, rhs_contracting, rhs_batch)
    batch = tuple(range(several))
    split = (*(lhs[i] for i in lhs_batch), group_sizes[-1], *lhs_columns, *rhs_columns)
    groups = len(lhs_batch)  # where they are in it
    return RaggedLayout(
        mode="rhs_gradient",
        rhs_order="gkn",
        groups=group_sizes[-1],
        lhs=of_lhs,
        rhs=of_rhs,
        batch=(batch, batch, batch if len(group_sizes) > 1 else ()),
        rows_each=_size(lhs, [lhs_contracting[i] for i in rows[1:]]),
        summed=batch[len(lhs_batch) :],
        split=split,
        transpose=(groups, *range(groups), *range(groups + 1, len(split))),
    )


def _without(dims: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(i for i in dims if i != dim)
