"""Grouped products in NumPy, group by group in float64, and operands of such problems."""

from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_reference import DISTRIBUTIONS, group_sizes


def exactly(
    p: RaggedDotProblem, lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray, *offset: np.ndarray
) -> np.ndarray:
    """The result in float64."""
    out, (lhs, rhs) = np.zeros(p.out_shape), (x.astype(np.float64) for x in (lhs, rhs))
    first = int(offset[0][0]) if offset else 0
    for i, rows in enumerate(group_rows(p.m, sizes, first, p.groups)):
        if p.mode == "forward":
            out[rows] = lhs[rows] @ (rhs[i] if p.rhs_order == "gkn" else rhs[i].T)
        else:
            out[i] = lhs[rows].T @ rhs[rows]
    return out


def group_rows(m: int, sizes: Sequence[int] | np.ndarray, first: int, groups: int) -> list[slice]:
    """The rows of groups `first` on, as many as `groups`."""
    found, start = [], 0
    for size in sizes:
        end = min(m, start + max(0, int(size)))
        found.append(slice(start, end))
        start = end
    return [found[i] if 0 <= i < len(found) else slice(0, 0) for i in range(first, first + groups)]


def integers(p: RaggedDotProblem, rng: np.random.Generator, sizes: np.ndarray | None = None) -> list[np.ndarray]:
    """Operands in the problem's dtypes, small enough that sums are exact; sizes of any of the distributions, with a
    sum of at most m."""
    operands = [rng.integers(-2, 3, shape).astype(jnp.dtype(dtype)) for shape, dtype in p.operand_types[:2]]
    if sizes is None:
        kind, rest = str(rng.choice(DISTRIBUTIONS)), int(rng.integers(0, p.m + 1)) if rng.random() < 0.3 else 0
        sizes = group_sizes(kind, p.size_count, p.m - rest, int(rng.integers(2**31)))
    operands.append(np.asarray(sizes, np.int32))
    if p.has_offset:
        operands.append(np.array([rng.integers(-1, p.total_groups - p.groups + 2)], np.int32))
    return operands


def poisoned(p: RaggedDotProblem, operands: Sequence[np.ndarray], *, matrices: bool = True) -> list[np.ndarray]:
    """The operands with NaN in every row that belongs to no group, and in a forward product's `matrices` of groups
    without rows, with which lax multiplies zeros."""
    lhs, rhs = (np.array(x, copy=True) for x in operands[:2])
    first = int(operands[3][0]) if p.has_offset else 0
    groups = group_rows(p.m, operands[2], first, p.groups)
    free = np.ones(p.m, bool)
    for i, rows in enumerate(groups):
        free[rows] = False
        if matrices and p.mode == "forward" and rows.start == rows.stop:
            rhs[i] = np.nan
    lhs[free] = np.nan
    if p.mode == "rhs_gradient":
        rhs[free] = np.nan
    return [lhs, rhs, *operands[2:]]
