"""Parallel split-k: fp32 partial sums of every split in the workspace, added in a fixed order by a second kernel.

The host's side of `split_k.cuh`. The second kernel is launched with programmatic dependent launch: its blocks are
resident, and wait, while the first kernel ends.
"""

from jax_splitk.kernels.device.structs import Struct

OUT_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}  # macros ELEMENT, OUT
REDUCE_THREADS = 256
MAX_LANES = 32
MAX_GRID_Y = 65535  # of a launch: splits, or tiles
FILL = 132 * 1024  # threads that keep the machine busy


def reduce_args(size: int, stride: int, splits: int) -> Struct:
    """The struct of the kernel that adds splits, for an output of `size` elements; `stride`: elements from one split's
    partial sums to the next's, a multiple of 4."""
    lanes = reduce_lanes(size // 4, splits)
    return Struct("ReduceArgs", {"size": size, "stride": stride, "splits": splits, "lanes": lanes})


def splits_refusal(splits: int, blocks: int, what: str, uneven: bool = False) -> str | None:
    """Why a reduction over `blocks` blocks, which a message calls `what`, cannot be cut into `splits` splits; None if
    it can. Each split needs a block. All splits but the last have equally many blocks; with `uneven`, the numbers
    differ by one at most.
    """
    most = min(blocks, MAX_GRID_Y)
    if not 1 <= splits <= most:
        return f"splits {splits}; accepted for {blocks} {what}: 1 to {most}"
    nearest = whole_splits(blocks, splits)
    if nearest != splits and not uneven:
        return f"splits {splits} leaves some of {blocks} {what}' splits empty; use {nearest}"
    return None


def whole_splits(blocks: int, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves none of them without a block of the
    reduction."""
    return -(-blocks // -(-blocks // max(1, min(splits, blocks))))


def reduce_lanes(chunks: int, splits: int) -> int:
    """Threads of a block that share the splits of each of `chunks` float4, a power of 2: several if the output is
    small."""
    lanes = 1
    while lanes < MAX_LANES and lanes * 4 <= splits and chunks * lanes < FILL:
        lanes *= 2
    return lanes
