"""Parallel split-k: fp32 partial sums of every split in the workspace, added in a fixed order by a second kernel.

The host's side of `split_k.cuh`. The second kernel is launched with programmatic dependent launch: its blocks are
resident, and wait, while the first kernel ends.
"""

import dataclasses

from jax_splitk.kernels.device.structs import Struct

OUT_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}  # macros ELEMENT, OUT
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
