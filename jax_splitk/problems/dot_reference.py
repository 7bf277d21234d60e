"""The matrix product in plain lax: what the fallback runs and what kernels are checked against."""

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.dot_general import DotProblem

_PRECISIONS = {"default": lax.Precision.DEFAULT, "high": lax.Precision.HIGH, "highest": lax.Precision.HIGHEST}


def dot_general(problem: DotProblem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """[batch, m, n] of operands whose dimensions lie in the problem's orders."""
    left, right = problem.lhs_order, problem.rhs_order
    dimensions = (((left.index("k"),), (right.index("k"),)), ((left.index("b"),), (right.index("b"),)))
    # lax does not narrow: a result of fewer bits than the operands is converted afterwards.
    wide = jnp.promote_types(problem.dtype, problem.out_dtype)
    out = lax.dot_general(lhs, rhs, dimensions, precision=_PRECISIONS[problem.precision], preferred_element_type=wide)
    return out.astype(problem.out_dtype)


def random_operands(problem: DotProblem, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lhs, rhs), normally distributed."""
    one, two = jax.random.split(key)
    dtype = jnp.dtype(problem.dtype)
    return jax.random.normal(one, problem.lhs_shape, dtype), jax.random.normal(two, problem.rhs_shape, dtype)
