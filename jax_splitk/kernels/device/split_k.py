"""Parallel split-k: fp32 partial sums of every split in the workspace, added in a fixed order by a second kernel.

The host's side of `split_k.cuh`. The second kernel is launched with programmatic dependent launch: its blocks are
resident, and wait, while the first kernel ends.
"""

import dataclasses

from jax_splitk.kernels.device.structs import Struct

OUT_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}  # macro OUT
REDUCE_THREADS = 256
MAX_LANES = 32
MAX_GRID_Y = 65535  # of a launch: splits, or tiles
FILL = 132 * 1024  # threads that keep the machine busy


@dataclasses.dataclass(frozen=True)
class ReduceArgs(Struct):
    """Of `reduce_splits`.

    Attributes:
      size: elements of the output.
      stride: elements from one split's partial sums to the next's, a multiple of 4.
      lanes: threads of a block that share one element's splits; a power of 2.
    """

    size: int
    stride: int
    splits: int
    lanes: int


def splits_refusal(splits: int, blocks: int, what: str, least: int = 1) -> str | None:
    """Why a reduction over so many blocks, which are `what`, cannot be cut so; None where it can.

    No split may be without a block. `least` is 0 where that is a schedule of its own.
    """
    most = min(blocks, MAX_GRID_Y)
    if not least <= splits <= most:
        return f"splits {splits}; accepted for {blocks} {what}: {least} to {most}"
    nearest = whole_splits(blocks, splits)
    if splits and nearest != splits:
        return f"splits {splits} leaves some of {blocks} {what}' splits empty; use {nearest}"
    return None


def whole_splits(blocks: int, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves none of them without a block of the
    reduction."""
    return -(-blocks // -(-blocks // max(1, min(splits, blocks))))


def reduce_lanes(chunks: int, splits: int) -> int:
    """Threads that share the splits of each of so many float4: several where the output is small."""
    lanes = 1
    while lanes < MAX_LANES and lanes * 4 <= splits and chunks * lanes < FILL:
        lanes *= 2
    return lanes
# TEMP
from jax_splitk.runtime import plan
def splits_limit(*a, **k): return splits_refusal(*a, **k)
def type_limit(p, d):
    from jax_splitk.kernels.wgrad import refusals
    return refusals.dtypes(p, d)
def _fam():
    from jax_splitk.kernels.wgrad import grouped
    return grouped.FAMILY
def least_splits(problem, blocks, chain): return 1 if problem.out_dtype != "float32" else -(-blocks // max(1, chain))
def workspace_bytes(problem, splits):
    from jax_splitk.kernels.wgrad import family
    return 0 if splits == 1 else splits * family.partial_stride(problem) * 4
def discards(problem, splits):
    from jax_splitk.kernels.wgrad import family
    return family.partial_stride(problem) % 32 == 0 and workspace_bytes(problem, splits) >= 4 << 20
def buffers(problem, ws):
    import math
    from jax import numpy as jnp
    item, out_item = jnp.dtype(problem.dtype).itemsize, jnp.dtype(problem.out_dtype).itemsize
    sizes = (math.prod(problem.lhs_shape) * item, math.prod(problem.g_shape) * item, math.prod(problem.out_shape) * out_item, ws)
    return tuple(plan.Buffer(size, 16) for size in sizes)
def launches(problem, splits, *, grid, threads, params, shared_bytes, cluster=(1, 1, 1)):
    import math
    from jax_splitk.kernels.wgrad import family
    split = splits > 1
    main = plan.Launch("wgrad_partial" if split else "wgrad_direct", grid, (threads, 1, 1), (*params, plan.Pointer(3 if split else 2)), shared_bytes, cluster)
    size = math.prod(problem.out_shape); lanes = reduce_lanes(size // 4, splits); columns = REDUCE_THREADS // lanes
    r = plan.Launch(kernel="reduce_splits", grid=(-(-size // (4 * columns)), 1, 1), block=(REDUCE_THREADS, 1, 1), params=(plan.Pointer(3), plan.Pointer(2), ReduceArgs(size, family.partial_stride(problem), splits, lanes).param()), programmatic=True)
    return (main, r) if split else (main,)
