"""The matrix product and its epilogue in plain lax: what the fallback runs and what kernels are checked against."""

import jax
from jax import lax

from jax_splitk.problems.dot_general import ACTIVATIONS, E4M3, DotProblem
from jax_splitk.runtime.arguments import wider

# Taken when this module is imported: users may replace lax's by ours later.
lax_dot_general = lax.dot_general


def wide_dtype(dtype: str, out_dtype: str) -> str:
    """The dtype of lax's product, from which a result of `out_dtype` is rounded."""
    return out_dtype if dtype == E4M3 else wider(dtype, out_dtype).name


def finished(
    sums: jax.Array,
    bias: jax.Array | None,
    activation: str,
    residual: jax.Array | None,
    activation_last: bool = False,
) -> jax.Array:
    """The epilogue, in the dtype of the sums. The bias has the shape of their last dimensions, or ones there."""
    if bias is not None:
        leading = (1,) * (sums.ndim - bias.ndim)  # given, for the user may have JAX refuse to add dimensions
        sums = sums + bias.astype(sums.dtype).reshape(*leading, *bias.shape)
    activated = ACTIVATIONS.get(activation, lambda x: x)
    if residual is None:
        return activated(sums)
    residual = residual.astype(sums.dtype)
    return activated(sums + residual) if activation_last else activated(sums) + residual


def dot_general(problem: DotProblem, lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
    """The result [batch, m, n], from operands whose dimensions are in the problem's orders, and the operands of its
    epilogue."""
    if problem.epilogue:
        operands = list(rest)
        bias = None if problem.bias == "none" else operands.pop(0)
        bias = bias[:, None] if bias is not None and problem.bias == "m" else bias
        residual = None if problem.residual_dtype == "none" else operands.pop(0)
        sums = dot_general(problem.product, lhs, rhs)
        return finished(sums, bias, problem.activation, residual).astype(problem.out_dtype)
    left, right = problem.lhs_order, problem.rhs_order
    dimensions = (((left.index("k"),), (right.index("k"),)), ((left.index("b"),), (right.index("b"),)))
    # lax does not narrow: a result of fewer bits than the operands is converted afterwards.
    wide = wide_dtype(problem.dtype, problem.out_dtype)
    precision = lax.Precision[problem.precision.upper()]
    out = lax_dot_general(lhs, rhs, dimensions, precision=precision, preferred_element_type=wide)
    return out.astype(problem.out_dtype)
