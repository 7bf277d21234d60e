"""Grouped matrix products in plain lax. The fallback runs them, and kernels are checked against them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.dot_reference import wide_dtype
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.random_operands import Stretches

# lax's own functions, before `jax_splitk.intercept` or users replace them.
lax_ragged_dot = lax.ragged_dot
lax_ragged_dot_general = lax.ragged_dot_general

# The batch dimensions of lhs, of rhs and of group_sizes.
Batch = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

_BLOCK = 512  # rows

# How the rows of random operands are divided among the groups.
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
    return batched(problem, ((), (), ()), lhs, rhs, group_sizes, group_offset)


def batched(
    problem: RaggedDotProblem,
    batch: Batch,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """The results of a problem for operands with batch dimensions in front, as one `lax.ragged_dot_general`.

    Args:
      problem: the problem of one element of the batch.
      batch: of lhs, rhs and group_sizes, which batch dimensions they have, in ascending order. The result has all.
    """
    given = zip((lhs, rhs, group_sizes), batch, strict=True)
    length = {dim: x.shape[place] for x, dims in given for place, dim in enumerate(dims)}
    shape, rank = tuple(length[dim] for dim in range(len(length))), len(length)
    forward = problem.mode == "forward"
    starts, sizes = (_with_batch(x, batch[2], shape) for x in bounds(group_sizes, lhs.shape[-2]))
    lhs, rhs = _with_batch(lhs, batch[0], shape), rhs if forward else _with_batch(rhs, batch[1], shape)
    if group_offset is not None:
        starts, sizes = (_of_groups(x, group_offset, problem.groups) for x in (starts, sizes))
        # lax has no offset: move the groups' rows to the front, and the result's rows back.
        lhs = _moved(lhs, -starts[..., :1])
        rhs = rhs if forward else _moved(rhs, -starts[..., :1])
    shared = batch[1] if forward else tuple(range(rank))  # dimensions that both operands have
    others = tuple(dim for dim in range(rank) if dim not in shared)
    k_of_rhs = rank if not forward else len(shared) + problem.rhs_order.index("k")
    k_of_lhs = rank + forward
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((k_of_lhs,), (k_of_rhs,)), (shared, tuple(range(len(shared))))),
        lhs_ragged_dimensions=[rank],
        rhs_group_dimensions=[len(shared)] if forward else [],
    )
    out = lax_ragged_dot_general(
        lhs,
        rhs,
        sizes.transpose(*shared, *others, rank),
        numbers,
        precision=lax.Precision[problem.precision.upper()],
        preferred_element_type=wide_dtype(problem.dtype, problem.out_dtype),  # lax does not narrow
    ).astype(problem.out_dtype)
    if not forward:
        return jnp.moveaxis(out, 0, rank)
    places = (int(i) for i in np.argsort((*shared, *others)))
    out = out.transpose(*places, rank, rank + 1)
    return out if group_offset is None else _moved(out, starts[..., :1])


def by_blocks(
    problem: RaggedDotProblem,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """The result of a problem, block of rows by block of rows. It takes no more memory than operands and result, and
    multiplies each row once, while lax takes both for every group."""
    starts, sizes = bounds(group_sizes, problem.m)
    if group_offset is not None:
        starts, sizes = (_of_groups(x, group_offset, problem.groups) for x in (starts, sizes))
    forward, block = problem.mode == "forward", min(_BLOCK, problem.m)
    wide = wide_dtype(problem.dtype, problem.out_dtype)
    options = {"precision": lax.Precision[problem.precision.upper()], "preferred_element_type": wide}

    def add_block(i: jax.Array, begin: jax.Array, out: jax.Array) -> jax.Array:
        """Adds the block of rows of group i that begins at row `begin`. A last block overlaps the one before it."""
        first = jnp.minimum(begin, problem.m - block)
        row = first + jnp.arange(block)
        inside = ((row >= begin) & (row < starts[i] + sizes[i]))[:, None]
        x = jnp.where(inside, lax.dynamic_slice_in_dim(lhs, first, block), 0)
        if forward:
            found = jnp.einsum(f"mk,{problem.rhs_order[1:]}->mn", x, rhs[i], **options)
            before = lax.dynamic_slice_in_dim(out, first, block)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, found, before), first, 0)
        y = jnp.where(inside, lax.dynamic_slice_in_dim(rhs, first, block), 0)
        return out.at[i].add(jnp.einsum("mk,mn->kn", x, y, **options))

    def add_group(i: jax.Array, out: jax.Array) -> jax.Array:
        count = -(-sizes[i] // block)
        return lax.fori_loop(0, count, lambda j, out: add_block(i, starts[i] + j * block, out), out)

    zeros = jnp.zeros(problem.out_shape, wide)
    return lax.fori_loop(0, problem.groups, add_group, zeros).astype(problem.out_dtype)


def _with_batch(x: jax.Array, dims: Sequence[int], shape: tuple[int, ...]) -> jax.Array:
    """The operand, which has the batch dimensions `dims`, repeated over the others of a batch of shape `shape`."""
    whole = jnp.expand_dims(x, tuple(dim for dim in range(len(shape)) if dim not in dims))
    return jnp.broadcast_to(whole, (*shape, *whole.shape[len(shape) :]))


def _moved(x: jax.Array, by: jax.Array) -> jax.Array:
    """The array [..., m, k] with its rows rotated by `by` [..., 1] places."""
    m = x.shape[-2]
    own = lax.broadcasted_iota(jnp.int32, (*by.shape[:-1], m), by.ndim - 1)
    rows = jnp.remainder(own - by, jnp.asarray(m).astype(jnp.int32))
    return jnp.take_along_axis(x, rows[..., None], -2)


def bounds(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """(start, size) of each group, int32: no size is negative, no group ends behind row m, and no sum overflows.

    Args:
      group_sizes: [..., groups] of any integer dtype.
    """
    # The sums end at m, which is below 2^31, so that two of them do not overflow a uint32.
    rows, most = jnp.asarray(m).astype(jnp.uint32), min(jnp.iinfo(group_sizes.dtype).max, 2**31 - 1)
    clamped = jnp.clip(group_sizes, 0, most).astype(jnp.uint32)
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.minimum(clamped, rows), axis=-1)
    starts = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
    return starts.astype(jnp.int32), (ends - starts).astype(jnp.int32)


def _of_groups(values: jax.Array, group_offset: jax.Array, count: int) -> jax.Array:
    """`count` of the values [..., groups] from group_offset [1] on; 0 for groups that do not exist."""
    index = group_offset.astype(jnp.int32) + jnp.arange(count, dtype=jnp.int32)
    return jnp.where(index < 0, 0, values.at[..., index].get(mode="fill", fill_value=0))


def random_operands(problem: RaggedDotProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Operands of one call: normally distributed, and sizes whose sum is m. Three seeds in a row have sizes of the
    three `DISTRIBUTIONS`."""
    stretches = Stretches(seed)
    lhs, rhs = (stretches.normals(shape, dtype) for shape, dtype in problem.operand_types[:2])
    return lhs, rhs, *random_sizes(problem, seed)


def random_sizes(problem: RaggedDotProblem, seed: int) -> tuple[np.ndarray, ...]:
    """group_sizes whose sum is m and, if the problem has one, group_offset; see `random_operands`."""
    count = problem.size_count
    sizes = group_sizes(DISTRIBUTIONS[seed % len(DISTRIBUTIONS)], count, problem.m, seed)
    if not problem.has_offset:
        return (sizes,)
    offset = seed % max(1, count // max(1, problem.groups)) * problem.groups
    return sizes, np.array([offset], np.int32)


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
