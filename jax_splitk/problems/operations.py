"""What checking, measuring and storing need to know of each operation: a line in `OPERATIONS` tunes a new one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.problems import conv_reference, dot_reference
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import problem_product
from jax_splitk.problems.random_operands import normals
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.quantized.packing import pack_groups


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
      problem: the type of its problems.
      random_operands: of (problem, key), the operands of one call in the order of the custom call's buffers.
      reference: of (problem, *operands), the result in plain lax. It is what XLA competes with, and for the problem
        with out_dtype="float32" what results are checked against.
      representatives: of a problem, those whose decision may hold for it, too.
      represented: of a problem, those that its decision may hold for, one for each kernel that it may need there.
    """

    problem: type[Any]
    random_operands: Callable[[Any, jax.Array], tuple[jax.Array, ...]]
    reference: Callable[..., jax.Array]
    representatives: Callable[[Any], Iterable[Any]] = lambda problem: ()
    represented: Callable[[Any], Iterable[Any]] = lambda problem: ()


def _conv_operands(problem: ConvProblem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normally distributed."""
    return normals([(shape, problem.dtype) for shape in problem.operand_shapes], key)


def _convolution(problem: type[ConvProblem], reference: Callable[..., jax.Array]) -> Operation:
    return Operation(problem, _conv_operands, lambda problem, x, y: reference(x, y, problem))


@functools.partial(jax.jit, static_argnums=0)
def _quantized_matmul_operands(problem: QuantizedMatmulProblem, key: jax.Array) -> tuple[jax.Array, ...]:
    """(x, words, scale[, zero_point]): every code of the format but NaN, and scales that make results of about 1."""
    keys = jax.random.split(key, 4)
    fmt = FORMATS[problem.qtype]
    x = jax.random.normal(keys[0], problem.x_shape).astype(problem.x_dtype)
    words = jax.random.bits(keys[1], problem.words_shape, jnp.uint32)
    if problem.qtype == "float8_e4m3fn":
        octets = jax.lax.bitcast_convert_type(words, jnp.uint8)
        octets = jnp.where(octets & 0x7F == 0x7F, jnp.uint8(0), octets)
        words = jax.lax.bitcast_convert_type(octets, jnp.uint32)
    groups = (problem.k // problem.group_size, problem.features)

    def packed(values: jax.Array, dtype: str) -> jax.Array:
        return pack_groups(values.astype(dtype), problem.k, problem.group_size)

    size = jnp.exp(0.25 * jax.random.normal(keys[2], groups)) / (fmt.high / 2 * math.sqrt(problem.k))
    scale = packed(size, problem.scale_dtype)
    if problem.zero_dtype == "none":
        return x, words, scale
    zeros = jax.random.randint(keys[3], groups, int(fmt.low), int(fmt.high) + 1)
    return x, words, scale, packed(zeros, problem.zero_dtype)


OPERATIONS: dict[str, Operation] = {
    "conv_fprop": _convolution(ConvFpropProblem, conv_reference.conv_fprop),
    "conv_dgrad": _convolution(ConvDgradProblem, conv_reference.conv_dgrad),
    "conv_wgrad": _convolution(ConvWgradProblem, conv_reference.conv_wgrad),
    "dot_general": Operation(DotProblem, dot_reference.random_operands, dot_reference.dot_general),
    "quantized_matmul": Operation(
        QuantizedMatmulProblem,
        _quantized_matmul_operands,
        problem_product,
        QuantizedMatmulProblem.representatives,
        QuantizedMatmulProblem.represented,
    ),
}
