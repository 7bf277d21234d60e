"""The `dot_general` primitive: its type, its transformation rules and its lowering. It is bilinear, and its transposes
are products of the same kind."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems import dot_layout
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions
from jax_splitk.problems.dot_reference import wide_dtype
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

dot_general_p = lowering.Primitive("jax_splitk_dot_general")


def bind(lhs: jax.Array, rhs: jax.Array, dimensions: DimensionNumbers, out_dtype: Any, **params: Any) -> jax.Array:
    """The product of operands that are rounded to `compute_dtype`."""
    return dot_general_p.bind(lhs, rhs, dimensions=dimensions, out_dtype=jnp.dtype(out_dtype).name, **params)


def with_lax(lhs: jax.Array, rhs: jax.Array, out_dtype: Any, params: dict[str, Any]) -> jax.Array:
    """The product in plain lax."""
    dtype = params["compute_dtype"]
    wide = wide_dtype(dtype, out_dtype)  # lax does not narrow
    precision = params["precision"]
    out = lax.dot_general(
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


def type_of_product(lhs: Any, rhs: Any, params: dict[str, Any]) -> Any:
    """Without a sharding."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimensions"]
    of_lhs = (*lhs_batch, *free_dimensions(lhs.ndim, lhs_contracting, lhs_batch))
    of_rhs = free_dimensions(rhs.ndim, rhs_contracting, rhs_batch)
    shape = (*(lhs.shape[i] for i in of_lhs), *(rhs.shape[i] for i in of_rhs))
    return _compat.like(lhs if _compat.aval_vma(lhs) else rhs, shape, params["out_dtype"])


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    out = type_of_product(lhs, rhs, params)
    return partitioning.with_explicit_sharding(out, rule_of, (lhs, rhs), params)


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


# ---- differentiation -----------------------------------------------------------------------------------------------


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_lhs(ct: jax.Array, lhs: Any, rhs: jax.Array, **params: Any) -> jax.Array:
    return _cotangent(ct, lhs.aval, rhs, params["dimensions"], params)


def _transpose_rhs(ct: jax.Array, lhs: jax.Array, rhs: Any, **params: Any) -> jax.Array:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimensions"]
    free = free_dimensions(lhs.ndim, lhs_contracting, lhs_batch)
    # As the result of rhs's product with lhs.
    batch, last = len(lhs_batch), ct.ndim
    order = (*range(batch), *range(batch + len(free), last), *range(batch, batch + len(free)))
    swapped = ((rhs_contracting, lhs_contracting), (rhs_batch, lhs_batch))
    return _cotangent(ct, rhs.aval, lhs, swapped, params, tuple(order))


def _cotangent(
    ct: jax.Array,
    x: Any,
    y: jax.Array,
    dimensions: DimensionNumbers,
    params: dict[str, Any],
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
    params = {name: value for name, value in params.items() if name not in ("dimensions", "out_dtype")}
    params["options"] = params["options"].without_config()
    out_dtype = x.dtype
    if params["compute_dtype"] == E4M3:  # which bfloat16 holds, and a cotangent is not rounded to it before the product
        params["compute_dtype"], out_dtype = "bfloat16", "float32"
    # The result is written in x's order where one of the two orders of the operands gives it.
    if in_y_order and x_free and in_y_order[0] < x_free[0]:
        out = bind(y, ct, ((y_free, ct_y), (y_batch, ct_batch)), out_dtype, **params)
        axes = (*x_batch, *in_y_order, *x_free)
    else:
        out = bind(ct, y, ((ct_y, y_free), (ct_batch, y_batch)), out_dtype, **params)
        axes = (*x_batch, *x_free, *in_y_order)
    return out.transpose(tuple(int(i) for i in np.argsort(axes))).astype(x.dtype)


ad.defbilinear(dot_general_p, _transpose_lhs, _transpose_rhs)


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """Two batched operands have one more batch dimension, a single one has one more free dimension."""
    (lhs, rhs), (lhs_dim, rhs_dim) = args, dims
    if params["options"].config is not None:  # chosen for the product that the caller sees
        size = lhs.shape[lhs_dim] if lhs_dim is not None else rhs.shape[rhs_dim or 0]
        pair = (batching.bdim_at_front(lhs, lhs_dim, size), batching.bdim_at_front(rhs, rhs_dim, size))
        return lax.map(lambda pair: dot_general_p.bind(*pair, **params), pair), 0
    params["dimensions"], place = with_mapped(params["dimensions"], (lhs.ndim, rhs.ndim), (lhs_dim, rhs_dim))
    return dot_general_p.bind(lhs, rhs, **params), place


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


batching.primitive_batchers[dot_general_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: DotProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del problem, out
    return lambda lhs, rhs: with_lax(lhs, rhs, params["out_dtype"], params)


def _with_kernel(
    problem: DotProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array]:
    def between_reshapes(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        given = as_of_problem(problem, lhs, rhs, params["dimensions"])
        return execute.call(custom_call, problem, *given).reshape(out.shape)

    return between_reshapes


def as_of_problem(
    problem: DotProblem, lhs: jax.Array, rhs: jax.Array, dimensions: DimensionNumbers
) -> tuple[jax.Array, jax.Array]:
    """The operands as the problem has them."""

    def given(x: jax.Array, layout: dot_layout.Operand) -> jax.Array:
        moved = x if layout.transpose is None else x.transpose(layout.transpose)
        return moved.astype(problem.dtype).reshape(layout.shape)

    of_lhs, of_rhs = dot_layout.operands(lhs.shape, rhs.shape, dimensions)
    return given(lhs, of_lhs), given(rhs, of_rhs)


lowering.define(dot_general_p, _abstract_eval, problem_of, _with_xla, _with_kernel, rule_of)
