"""Parallel split-k: fp32 partial sums of every split in the workspace, added in a fixed order by a second kernel.

The host's side of `split_k.cuh`. The second kernel is launched with programmatic dependent launch: its blocks are
resident, and wait, while the first kernel ends.
"""

import math
from collections.abc import Sequence

from jax_splitk import plan
from jax_splitk.problem import ConvWgradProblem

OUT_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}  # macro OUT
REDUCE_THREADS = 256
MAX_LANES = 32
FILL = 132 * 1024  # threads that keep the machine busy


def type_limit(problem: ConvWgradProblem, dtypes: Sequence[str]) -> str | None:
    """Why a family for inputs of `dtypes` cannot serve the problem's types; None where it can."""
    if problem.dtype not in dtypes:
        return f"dtype {problem.dtype}; accepted: {', '.join(dtypes)}"
    if problem.out_dtype not in OUT_CODES:
        return f"preferred_element_type {problem.out_dtype}; accepted: {', '.join(OUT_CODES)}"
    return None


def stride(problem: ConvWgradProblem) -> int:
    """Elements from one split's partial sums to the next's: the output's, in whole float4."""
    return -(-math.prod(problem.out_shape) // 4) * 4


def workspace_bytes(problem: ConvWgradProblem, splits: int) -> int:
    """None when there is a single split, which writes the output itself."""
    return 0 if splits == 1 else splits * stride(problem) * 4


def whole_splits(blocks: int, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves none of them without a block of the
    reduction."""
    return -(-blocks // -(-blocks // max(1, min(splits, blocks))))


def reduce_launch(problem: ConvWgradProblem, splits: int, partials: int = 3, out: int = 2) -> plan.Launch:
    """The launch of `reduce_splits`, from buffer `partials` into buffer `out`."""
    size = math.prod(problem.out_shape)
    # Where the output is small, several threads share an element's splits.
    lanes = 1
    while lanes < MAX_LANES and lanes * 4 <= splits and size // 4 * lanes < FILL:
        lanes *= 2
    columns = REDUCE_THREADS // lanes
    return plan.Launch(
        kernel="reduce_splits",
        grid=(-(-size // (4 * columns)), 1, 1),
        block=(REDUCE_THREADS, 1, 1),
        params=(plan.Pointer(partials), plan.Pointer(out), plan.Int32Struct((size, stride(problem), splits, lanes))),
        programmatic=True,
    )
