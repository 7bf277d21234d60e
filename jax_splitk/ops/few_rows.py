"""Products of few rows with a weight that XLA would copy first: a slice of a stack, in the body of a loop.

XLA:GPU copies such a slice for most of its own products, and hands it to a custom call in place. `intercept(few_rows=
True)` routes these products to the kernels, and `explain` lists those that are lax's.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core

from jax_splitk import kernels
from jax_splitk.ops.dot_calls import DotCall
from jax_splitk.ops.equations import inner
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.problems.dot_reference import lax_dot_general
from jax_splitk.problems.problem import nbytes
from jax_splitk.runtime import _compat
from jax_splitk.tuning.options import Options, current

# A copy of less takes under a microsecond.
LEAST_BYTES = 2**20

_DTYPES = ("bfloat16", "float16", E4M3)

# What keeps an operand a slice of the stack: it moves nothing in memory.
_VIEWS = ("reshape", "squeeze", "expand_dims")
_SIGNATURE = inspect.signature(lax_dot_general)


def options_of_copied() -> Options:
    """The options of a product whose weight XLA would copy."""
    return dataclasses.replace(current().of_another_pass(), copied_operand=True)


def _call(lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred: Any) -> DotCall | None:
    """The product of arrays or their types, if kernels of few rows serve it and its weight is worth it; else None."""
    dtype, wanted = jnp.dtype(lhs.dtype), None if preferred is None else jnp.dtype(preferred).name
    if rhs.dtype != dtype or dtype.name not in _DTYPES or (dtype.name == E4M3 and wanted is None):
        return None
    if precision not in (None, lax.Precision.DEFAULT) or not _compat.is_known(*lhs.shape, *rhs.shape):
        return None
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    numbers = (tuple(lhs_contracting), tuple(rhs_contracting)), (tuple(lhs_batch), tuple(rhs_batch))
    call = DotCall(
        dimensions=numbers, out_dtype=wanted or dtype.name, compute_dtype=dtype.name, options=options_of_copied()
    )
    return call if _is_worth(call.problem((lhs, rhs))) else None


def _is_worth(problem: DotProblem) -> bool:
    is_large = nbytes(problem.rhs_shape, problem.dtype) >= LEAST_BYTES
    families = (family for family in kernels.families("dot_general", "cuda") if family.few_rows)
    return problem.batch == 1 and is_large and any(family.refusal(problem) is None for family in families)


# ---- functions of lax and jax.numpy ----------------------------------------------------------------------------------


def _dot_general(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`lax.dot_general`."""
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        lhs, rhs = (jnp.asarray(given[name]) for name in ("lhs", "rhs"))
        numbers, preferred = given["dimension_numbers"], given.get("preferred_element_type")
        plain = given.get("out_sharding") is None
        call = _call(lhs, rhs, numbers, given.get("precision"), preferred) if plain else None
    except (TypeError, ValueError, IndexError):  # wrong arguments: lax raises its error
        return theirs(*args, **kwargs)
    return theirs(*args, **kwargs) if call is None else call.bind(lhs, rhs)


def _matmul(theirs: Callable[..., Any], a: Any, b: Any, **kwargs: Any) -> Any:
    """`jnp.matmul`, `jnp.dot` and `a @ b`, with a matrix as the second operand."""
    if np.ndim(b) != 2 or np.ndim(a) < 1:
        return theirs(a, b, **kwargs)
    numbers = (((np.ndim(a) - 1,), (0,)), ((), ()))
    return _dot_general(lambda *_, **__: theirs(a, b, **kwargs), a, b, numbers, **kwargs)


def _in_einsum(*args: Any, **kwargs: Any) -> Any:
    return _dot_general(lax_dot_general, *args, **kwargs)


def _einsum(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`jnp.einsum`, which takes the function that multiplies."""
    return theirs(*args, **{"_dot_general": _in_einsum, **kwargs})


# By name: (the function that it replaces, its arguments) -> the product.
ROUTES: dict[str, Callable[..., Any]] = {
    "dot": _matmul,
    "dot_general": _dot_general,
    "einsum": _einsum,
    "matmul": _matmul,
}


# ---- in a trace ------------------------------------------------------------------------------------------------------


def copied_products(jaxpr: core.Jaxpr) -> Iterator[DotProblem]:
    """The problem of each product of few rows in the body of a loop whose weight is a slice of a stack: of an array
    that `lax.scan` scans over, or that the body slices by an index that it computes."""
    yield from _products(jaxpr, set(), looped=False)[0]


def _products(jaxpr: core.Jaxpr, slices: set[Any], *, looped: bool) -> tuple[list[DotProblem], set[Any]]:
    """(the products, the variables that are slices of stacks)"""
    found: list[DotProblem] = []
    for eqn in jaxpr.eqns:
        of_slices = [isinstance(var, core.Var) and var in slices for var in eqn.invars]
        name = eqn.primitive.name
        if eqn.primitive is lax.dot_general_p and of_slices[1]:
            found += _problem(eqn)
        elif (name in _VIEWS and of_slices[0]) or (name == "dynamic_slice" and looped):
            slices.update(eqn.outvars)
        for body in inner(eqn):
            if name in ("scan", "while"):
                found += _products(body, _scanned(eqn, body) if name == "scan" else set(), looped=True)[0]
                continue
            pairs = zip(reversed(body.invars), reversed(of_slices), strict=False)
            products, inside = _products(body, {var for var, of_slice in pairs if of_slice}, looped=looped)
            found += products
            if len(body.outvars) == len(eqn.outvars):
                results = zip(body.outvars, eqn.outvars, strict=True)
                slices.update(out for var, out in results if isinstance(var, core.Var) and var in inside)
    return found, slices


def _scanned(eqn: core.JaxprEqn, body: core.Jaxpr) -> set[Any]:
    """The parameters of a scan's body that are slices of scanned arrays: they have a dimension less."""
    pairs = zip(body.invars, eqn.invars, strict=True)
    return {var for var, given in pairs if len(_shape(var)) + 1 == len(_shape(given))}


def _shape(var: Any) -> tuple[Any, ...]:
    return getattr(var.aval, "shape", ())


def _problem(eqn: core.JaxprEqn) -> list[DotProblem]:
    lhs, rhs = (var.aval for var in eqn.invars)
    call = _of_equation(lhs, rhs, **eqn.params)
    return [] if call is None else [call.problem((lhs, rhs))]


def _of_equation(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    **_: Any,
) -> DotCall | None:
    """Our call that computes what an equation of lax does; None if there is none. `precision` may be a pair."""
    precisions = {precision} if not isinstance(precision, tuple) else set(precision)
    if out_sharding is not None or not precisions <= {None, lax.Precision.DEFAULT}:
        return None
    return _call(lhs, rhs, dimension_numbers, None, preferred_element_type)


def copy_bytes(problem: DotProblem) -> int:
    """Bytes that a copy of the weight reads and writes."""
    return 2 * math.prod(problem.rhs_shape) * jnp.dtype(problem.dtype).itemsize
