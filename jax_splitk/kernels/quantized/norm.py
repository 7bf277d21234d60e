"""The host's side of `quantized/norm.cuh`: activations that are normalized where a product has loaded them."""

from typing import TypeGuard

import numpy as np

from jax_splitk.kernels.device.structs import Field
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.plan import Pointer

MOST_ROWS = 32  # for more quantized_tiled is faster, whose x XLA normalizes
BYTES = 768  # NORM_BYTES of the device code
_CHUNK = 8  # elements that are multiplied at a time


def normalizes(problem: QuantizedMatmulProblem) -> TypeGuard[QuantizedEpilogueProblem]:
    return isinstance(problem, QuantizedEpilogueProblem) and problem.normalized


def refusal(problem: QuantizedMatmulProblem) -> str | None:
    """Why kernels cannot normalize x; None if they can, or if it is not asked for."""
    if not normalizes(problem):
        return None
    if problem.x_dtype != "bfloat16":  # x * scale, before it is divided by the root, could be beyond float16
        return f"normalized x of dtype {problem.x_dtype}; accepted: bfloat16"
    if problem.norm_scale_dtype not in ("none", "bfloat16"):
        return f"norm_scale of dtype {problem.norm_scale_dtype}; accepted: bfloat16"
    if problem.k % _CHUNK:
        return f"normalized x with k {problem.k}; accepted: multiples of {_CHUNK}"
    return f"{problem.rows} rows of normalized x; accepted: 1 to {MOST_ROWS}" if problem.rows > MOST_ROWS else None


def macros(problem: QuantizedMatmulProblem) -> dict[str, int]:
    return {"NORM": 1 + len(problem.norm_operands) if normalizes(problem) else 0}


def args(problem: QuantizedMatmulProblem) -> dict[str, Field]:
    """Fields of a kernel's struct: bits of floats."""
    if not normalizes(problem):
        return {}
    values = {"inverse_k": 1 / problem.k, "epsilon": float(problem.norm_epsilon)}
    return {name: int(np.float32(value).view(np.int32)) for name, value in values.items()}


def pointers(problem: QuantizedMatmulProblem) -> tuple[Pointer, ...]:
    """A kernel's last parameter, the scale, if it normalizes x. A missing one is replaced by x, which is not read."""
    if not normalizes(problem):
        return ()
    return (Pointer((len(problem.operand_types) - 1) * len(problem.norm_operands)),)
