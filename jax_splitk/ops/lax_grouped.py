"""Grouped products that a traced function leaves to lax: calls of `lax.ragged_dot`, and their gradients."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jax import numpy as jnp
from jax.extend import core

from jax_splitk.problems.conv_reference import precision_name
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_layout import is_batch, layout
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import wider


def grouped_products(equations: Iterable[core.JaxprEqn]) -> Iterator[RaggedDotProblem]:
    """The problem of each such equation, once for each element of its batch."""
    for eqn in equations:
        if eqn.primitive.name != "ragged_dot_general":  # which jax.lax does not show
            continue
        lhs, rhs, sizes, out = (_aval(var) for var in (*eqn.invars[:3], *eqn.outvars))
        (numbers, precision), known = _parameters(**eqn.params), (*lhs.shape, *rhs.shape, *sizes.shape)
        if is_batch(numbers) or not _compat.is_known(*known):
            continue
        found, dtype = layout(lhs.shape, rhs.shape, sizes.shape, numbers), wider(lhs.dtype, rhs.dtype)
        problem = RaggedDotProblem(
            mode=found.mode,
            groups=found.groups,
            m=found.lhs.shape[-2],
            k=found.lhs.shape[-1],
            n=found.rhs.shape[-2 if found.rhs_order == "gnk" else -1],
            dtype=dtype.name,
            out_dtype=jnp.dtype(out.dtype).name,
            precision=precision_name(precision) if dtype == jnp.float32 else "default",
            rhs_order=found.rhs_order,
        )
        try:
            problem.validate()
        except ValueError:  # of other dtypes
            continue
        yield from [problem] * math.prod(found.lhs.shape[:-2])


def _parameters(ragged_dot_dimension_numbers: Any, precision: Any, **_: Any) -> tuple[Any, Any]:
    """The parameters of lax's equation that a problem depends on."""
    return ragged_dot_dimension_numbers, precision


def _aval(var: Any) -> Any:
    return var.aval
