"""Grouped matrix products in plain lax: what the fallback runs and what kernels are checked against."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.dot_reference import wide_dtype
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.random_operands import Stretches

# As they are now: `jax_splitk.intercept`, and users, put ours in their place.
lax_ragged_dot_general = lax.ragged_dot_general

_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_ROWS_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

# How the rows of random operands are shared among the groups.
DISTRIBUTIONS = ("uniform", "skewed", "one_hot")


def ragged_dot(
    problem: RaggedDotProblem,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """The result of a problem, by `lax.ragged_dot_general`, which multiplies every row with the matrix of every group
    on CPUs and GPUs."""
    starts, sizes = bounds(group_sizes, problem.m)
    if group_offset is not None:
        starts, sizes = (_of_groups(x, group_offset, problem.groups) for x in (starts, sizes))
        # lax has no offset: the groups' rows go to the front, and those of the result back.
        lhs = jnp.roll(lhs, -starts[0], 0)
        rhs = jnp.roll(rhs, -starts[0], 0) if problem.mode == "rhs_gradient" else rhs
    forward = _ROWS if problem.rhs_order == "gkn" else _ROWS_TRANSPOSED
    out = lax_ragged_dot_general(
        lhs,
        rhs,
        sizes,
        forward if problem.mode == "forward" else _CONTRACTION,
        precision=lax.Precision[problem.precision.upper()],
        preferred_element_type=wide_dtype(problem.dtype, problem.out_dtype),  # lax does not narrow
    ).astype(problem.out_dtype)
    return out if group_offset is None or problem.mode == "rhs_gradient" else jnp.roll(out, starts[0], 0)


def bounds(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """(start, size) of each group, int32: no size is negative, no group ends behind row m, and no sum overflows.

    Args:
      group_sizes: [groups] of any integer dtype.
    """
    # The sums end at m, which is below 2^31, so that two of them do not overflow a uint32.
    rows, most = jnp.asarray(m).astype(jnp.uint32), min(jnp.iinfo(group_sizes.dtype).max, 2**31 - 1)
    clamped = jnp.clip(group_sizes, 0, most).astype(jnp.uint32)
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.minimum(clamped, rows))
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return starts.astype(jnp.int32), (ends - starts).astype(jnp.int32)


def _of_groups(values: jax.Array, group_offset: jax.Array, count: int) -> jax.Array:
    """`count` of the values from group_offset [1] on; 0 where there is none."""
    index = group_offset.astype(jnp.int32) + jnp.arange(count, dtype=jnp.int32)
    return jnp.where(index < 0, 0, values.at[index].get(mode="fill", fill_value=0))


def random_operands(problem: RaggedDotProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Operands of one call: normally distributed, and sizes whose sum is m. Three seeds in a row have sizes of the
    three `DISTRIBUTIONS`."""
    stretches = Stretches(seed)
    lhs, rhs = (stretches.normals(shape, dtype) for shape, dtype in problem.operand_types[:2])
    count = problem.size_count
    sizes = group_sizes(DISTRIBUTIONS[seed % len(DISTRIBUTIONS)], count, problem.m, seed)
    if not problem.has_offset:
        return lhs, rhs, sizes
    offset = seed % max(1, count // max(1, problem.groups)) * problem.groups
    return lhs, rhs, sizes, np.array([offset], np.int32)


def group_sizes(distribution: str, groups: int, m: int, seed: int) -> np.ndarray:
    """int32 [groups] whose sum is m.

    Args:
      distribution: "uniform": each row belongs to each group with the same probability; "skewed": with probabilities by
        Zipf's law, 1 / rank, of groups in random order; "one_hot": all rows belong to one group.
    """
    rng = np.random.default_rng(seed)
    weights = np.ones(groups)
    if distribution == "skewed":
        weights = rng.permutation(1 / np.arange(1, groups + 1))
    elif distribution == "one_hot":
        weights = np.arange(groups) == rng.integers(groups)
    return rng.multinomial(m, weights / weights.sum()).astype(np.int32)
