"""A matrix product as `lax.dot_general` has it: its value, its type, its problem, how it is divided and batched."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems import dot_layout
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions
from jax_splitk.problems.dot_reference import lax_dot_general, wide_dtype
from jax_splitk.runtime import _compat


def with_lax(lhs: jax.Array, rhs: jax.Array, out_dtype: Any, params: dict[str, Any]) -> jax.Array:
    """The product in plain lax."""
    dtype = params["compute_dtype"]
    wide = wide_dtype(dtype, out_dtype)  # lax does not narrow
    precision = params["precision"]
    out = lax_dot_general(
        lhs.astype(dtype), rhs.astype(dtype), params["dimensions"], precision=precision, preferred_element_type=wide
    )
    return out.astype(out_dtype)


def rule_of(avals: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Every dimension may be divided; a contracting one that is leaves a sum."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimensions"]
    names: list[dict[int, str]] = []
    pairs = ((lhs_contracting, lhs_batch, "m"), (rhs_contracting, rhs_batch, "n"))
    for aval, (contracting, batch, letter) in zip(avals, pairs, strict=True):
        free = free_dimensions(aval.ndim, contracting, batch)
        named = (("k", contracting), ("b", batch), (letter, free))
        names.append({dim: f"{kind}{place}" for kind, dims in named for place, dim in enumerate(dims)})
    operands = tuple(tuple(of[dim] for dim in sorted(of)) for of in names)
    of_result = (f"b{i}" for i in range(len(lhs_batch)))
    result = (*of_result, *(name for dims in operands for name in dims if name[0] in "mn"))
    units = {name: aval.shape[dim] for aval, of in zip(avals, names, strict=True) for dim, name in of.items()}
    return Rule(operands, result, units, lambda params, parts: params)


def type_of(lhs: Any, rhs: Any, params: dict[str, Any]) -> Any:
    """Without a sharding."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimensions"]
    of_lhs = (*lhs_batch, *free_dimensions(lhs.ndim, lhs_contracting, lhs_batch))
    of_rhs = free_dimensions(rhs.ndim, rhs_contracting, rhs_batch)
    shape = (*(lhs.shape[i] for i in of_lhs), *(rhs.shape[i] for i in of_rhs))
    return _compat.like(lhs if _compat.aval_vma(lhs) else rhs, shape, params["out_dtype"])


def problem_of(avals: Sequence[Any], params: dict[str, Any]) -> DotProblem:
    """The canonical problem of an equation, from the types of its operands and its parameters."""
    shapes = [tuple(_compat.static_or_symbolic(size) for size in aval.shape) for aval in avals]
    lhs, rhs = dot_layout.operands(shapes[0], shapes[1], params["dimensions"])
    return DotProblem(
        batch=lhs.size("b"),
        m=lhs.size("m"),
        n=rhs.size("n"),
        k=lhs.size("k"),
        lhs_order=lhs.order,
        rhs_order=rhs.order,
        dtype=params["compute_dtype"],
        out_dtype=params["out_dtype"],
        precision=params["precision"].name.lower() if params["compute_dtype"] == "float32" else "default",
    )


def with_mapped(
    dimensions: DimensionNumbers, ranks: tuple[int, int], mapped: tuple[int | None, int | None]
) -> tuple[DimensionNumbers, int]:
    """The dimensions of operands of these ranks that have a mapped one more, and where it is in the result."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimensions
    lhs_dim, rhs_dim = mapped
    after = lambda those, dim: tuple(i + (dim is not None and i >= dim) for i in those)  # noqa: E731
    contracting = (after(lhs_contracting, lhs_dim), after(rhs_contracting, rhs_dim))
    batch = (after(lhs_batch, lhs_dim), after(rhs_batch, rhs_dim))
    if lhs_dim is not None and rhs_dim is not None:
        return (contracting, ((lhs_dim, *batch[0]), (rhs_dim, *batch[1]))), 0
    lhs_free, rhs_free = (free_dimensions(ranks[i], contracting[i], batch[i]) for i in range(2))
    if lhs_dim is not None:
        return (contracting, batch), len(batch[0]) + lhs_free.index(lhs_dim)
    return (contracting, batch), len(batch[0]) + len(lhs_free) + rhs_free.index(rhs_dim or 0)


def as_of_problem(
    problem: DotProblem, lhs: jax.Array, rhs: jax.Array, dimensions: DimensionNumbers
) -> tuple[jax.Array, jax.Array]:
    """The operands as the problem has them."""

    def given(x: jax.Array, layout: dot_layout.Operand) -> jax.Array:
        moved = x if layout.transpose is None else x.transpose(layout.transpose)
        return moved.astype(problem.dtype).reshape(layout.shape)

    of_lhs, of_rhs = dot_layout.operands(lhs.shape, rhs.shape, dimensions)
    return given(lhs, of_lhs), given(rhs, of_rhs)
