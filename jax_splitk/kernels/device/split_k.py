"""Parallel split-k: fp32 partial sums of every split in the workspace, added in a fixed order by a second kernel.

The host's side of `split_k.cuh`. The second kernel is launched with programmatic dependent launch: its blocks are
resident, and wait, while the first kernel ends.
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan

OUT_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}  # macro OUT
REDUCE_THREADS = 256
MAX_LANES = 32
MAX_GRID_Y = 65535  # of a launch: splits, or tiles
FILL = 132 * 1024  # threads that keep the machine busy
LINE_FLOATS = 32  # of an L2 line
DISCARD_BYTES = 4 << 20


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


# ---- splits --------------------------------------------------------------------------------------------------------


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


def least_splits(problem: ConvWgradProblem, blocks: int, chain: int) -> int:
    """Fewest splits for the accuracy that is promised, of at most `chain` blocks each, and none of them empty.

    The tensor cores truncate their fp32 sums, an error that grows with the number of additions in a row. A float32
    result keeps it; in a 16-bit one rounding hides it.
    """
    return 1 if problem.out_dtype != "float32" else -(-blocks // max(1, chain))


# ---- partial sums --------------------------------------------------------------------------------------------------


def stride(problem: ConvWgradProblem) -> int:
    """Elements from one split's partial sums to the next's: the output's, in whole float4."""
    return -(-math.prod(problem.out_shape) // 4) * 4


def workspace_bytes(problem: ConvWgradProblem, splits: int) -> int:
    """None when there is a single split, which writes the output itself."""
    return 0 if splits == 1 else splits * stride(problem) * 4


def discards(problem: ConvWgradProblem, splits: int) -> bool:
    """Whether the reduction of so many splits may give up the partial sums' lines in the L2 (macro DISCARD), and they
    are so many that it is worth the instructions. It is where memory is the limit: 2% of 1x1 convolutions; it costs 1%
    of others."""
    return stride(problem) % LINE_FLOATS == 0 and workspace_bytes(problem, splits) >= DISCARD_BYTES


def reduce_lanes(chunks: int, splits: int) -> int:
    """Threads that share the splits of each of so many float4: several where the output is small."""
    lanes = 1
    while lanes < MAX_LANES and lanes * 4 <= splits and chunks * lanes < FILL:
        lanes *= 2
    return lanes


# ---- the plan ------------------------------------------------------------------------------------------------------


def type_macros(problem: ConvWgradProblem) -> dict[str, int]:
    """Of inputs of 16 bits and of the result."""
    return {"ELEMENT_BF16": int(problem.dtype == "bfloat16"), "OUT": OUT_CODES[problem.out_dtype]}


def buffers(problem: ConvWgradProblem, workspace: int) -> tuple[plan.Buffer, ...]:
    """lhs, g, dW and a workspace of so many bytes: numbers 0 to 3."""
    item, out_item = jnp.dtype(problem.dtype).itemsize, jnp.dtype(problem.out_dtype).itemsize
    sizes = (
        math.prod(problem.lhs_shape) * item,
        math.prod(problem.g_shape) * item,
        math.prod(problem.out_shape) * out_item,
        workspace,
    )
    return tuple(plan.Buffer(size, 16) for size in sizes)


def reduce_launch(problem: ConvWgradProblem, splits: int) -> plan.Launch:
    """The launch of `reduce_splits`, from the workspace into dW."""
    size = math.prod(problem.out_shape)
    lanes = reduce_lanes(size // 4, splits)
    columns = REDUCE_THREADS // lanes
    return plan.Launch(
        kernel="reduce_splits",
        grid=(-(-size // (4 * columns)), 1, 1),
        block=(REDUCE_THREADS, 1, 1),
        params=(plan.Pointer(3), plan.Pointer(2), ReduceArgs(size, stride(problem), splits, lanes).param()),
        programmatic=True,
    )


# TEMP
def splits_limit(*a, **k):
    return splits_refusal(*a, **k)


def type_limit(p, d):
    from jax_splitk.kernels.wgrad import refusals

    return refusals.dtypes(p, d)


def launches(problem, splits, *, grid, threads, params, shared_bytes, cluster=(1, 1, 1)):
    split = splits > 1
    main = plan.Launch(
        "wgrad_partial" if split else "wgrad_direct",
        grid,
        (threads, 1, 1),
        (*params, plan.Pointer(3 if split else 2)),
        shared_bytes,
        cluster,
    )
    return (main, reduce_launch(problem, splits)) if split else (main,)
