"""The host's side of `quantized/dequantize.cuh` and `quantized/scales.cuh`, which read packed weights."""

from jax import numpy as jnp

from jax_splitk.kernels.device import epilogue
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime import plan

FORMAT_CODES = {"int4": 0, "uint4": 1, "int8": 2, "float8_e4m3fn": 3, "float4_e2m1fn": 4, "nf4": 5}  # macro FORMAT
# Macros SCALE_TYPE, ZERO_TYPE.
TYPE_CODES = {**OUT_CODES, "none": -1, "float8_e8m0fnu": 3, "float8_e4m3fn": 4}
_WITH_EPILOGUE = (QuantizedEpilogueProblem, QuantizedRaggedEpilogueProblem)
SHORTEST_GROUP = 32  # of e4m3 products: the k of an instruction
E4M3_FORMATS = ("int4", "uint4", "float4_e2m1fn", "float8_e4m3fn")  # whose values are e4m3 but for a power of two


def per_channel(problem: QuantizedMatmulProblem) -> bool:
    return problem.group_size == problem.k


def has_zero(problem: QuantizedMatmulProblem) -> bool:
    return problem.zero_dtype != "none"


def has_channel_scale(problem: QuantizedMatmulProblem) -> bool:
    return problem.channel_dtype != "none"


def zero_pointer(problem: QuantizedMatmulProblem) -> plan.Pointer:
    """The parameter for zero points. Without them the kernel does not read what is there: the scales."""
    return plan.Pointer(3 if has_zero(problem) else 2)


def channel_pointers(problem: QuantizedMatmulProblem) -> tuple[plan.Pointer, ...]:
    """A kernel's last parameter, if the weight has channel scales."""
    return (plan.Pointer(3 + has_zero(problem)),) if has_channel_scale(problem) else ()


def last_pointers(problem: QuantizedMatmulProblem) -> tuple[plan.Pointer, ...]:
    """`channel_pointers`, then bias and residual if there is an epilogue. A missing one is replaced by x, which is not
    read."""
    return (*channel_pointers(problem), *epilogue_pointers(problem))


def epilogue_pointers(problem: Problem) -> tuple[plan.Pointer, ...]:
    """The bias and the residual, if the kernel has an epilogue."""
    if not isinstance(problem, _WITH_EPILOGUE) or not problem.epilogue:
        return ()
    count = len(problem.operand_types) - len(getattr(problem, "norm_operands", ()))
    bias, residual = problem.bias_dtype != "none", problem.residual_dtype != "none"
    return plan.Pointer((count - 1 - residual) * bias), plan.Pointer((count - 1) * residual)


def epilogue_macros(problem: Problem) -> dict[str, int]:
    """Macros of the epilogue, if the kernel has one."""
    if not isinstance(problem, _WITH_EPILOGUE) or not problem.epilogue:
        return {}
    bias = "none" if problem.bias_dtype == "none" else "n"
    return epilogue.macros(bias, problem.bias_dtype, problem.activation, problem.residual_dtype)


def macros(problem: QuantizedMatmulProblem) -> dict[str, int]:
    """Macros for the types, and for the groups (0: one for all k)."""
    return {
        "FORMAT": FORMAT_CODES[problem.qtype],
        "OUT": OUT_CODES[problem.out_dtype],
        "SCALE_TYPE": TYPE_CODES[problem.scale_dtype],
        "ZERO_TYPE": TYPE_CODES[problem.zero_dtype],
        "CHANNEL_SCALE": int(has_channel_scale(problem)),
        "GROUP": 0 if per_channel(problem) else problem.group_size,
        **epilogue_macros(problem),
    }


def weight_bytes(problem: QuantizedMatmulProblem, features: int, k: int) -> int:
    """Bytes of words, scales and zero points of a part of the weight, without per-channel scales."""
    groups = 0 if per_channel(problem) else k // problem.group_size
    return features * (k * problem.bits // 8 + groups * _group_item(problem))


def _group_item(problem: QuantizedMatmulProblem) -> int:
    """Bytes of a group's scale and zero point."""
    zero = jnp.dtype(problem.zero_dtype).itemsize if has_zero(problem) else 0
    return jnp.dtype(problem.scale_dtype).itemsize + zero


def block_bytes(problem: QuantizedMatmulProblem, m_tiles: int, contracted: int) -> int:
    """Bytes of words, scales and zero points of tiles of 64 in a row along m, and of whole tiles along the dimension
    that the product sums over, in shared memory. Tiles there that share a group have a copy of it each."""
    if not problem.transposed:
        return weight_bytes(problem, m_tiles * TILE, contracted)
    groups = 1 if per_channel(problem) else max(1, TILE // problem.group_size)
    channel = 4 if has_channel_scale(problem) else 0
    return m_tiles * contracted * (TILE * problem.bits // 8 + groups * _group_item(problem) + channel)


# Issue slots of a warp that decodes 64 values of each of 64 rows, by format: 1.75 times its instructions (fitted to
# 3,000 times), for each waits for the one before it.
ISSUE_SLOTS = {"int4": 70, "uint4": 70, "int8": 105, "float8_e4m3fn": 105, "float4_e2m1fn": 120, "nf4": 190}
