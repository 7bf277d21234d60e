"""What checks, measurements and caches need to know about each operation. A new operation is a line in `OPERATIONS`."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jax_splitk.problems import (
    conv_reference,
    dot_reference,
    quantized_epilogue,
    quantized_ragged_epilogue,
    quantized_ragged_reference,
    quantized_reference,
    ragged_reference,
)
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.random_operands import normals


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
      problem: the type of its problems.
      random_operands: function of (problem, seed): the operands of one call in the order of the custom call's buffers,
        on the host.
      reference: function of (problem, *operands): the result in plain lax. XLA competes with this function, and results
        are checked against it for the problem with out_dtype="float32".
      representatives: function of a problem: the problems whose decisions may hold for it, too.
      check: the same as `reference`, with less memory or time. If it is given, results are checked against it.
      kinds: how many kinds of random operands there are; seeds in a row draw one kind after the other. A candidate's
        time is the mean over all kinds.
      operand_error: function of a problem: the relative error of results by kernels that round operands which the
        reference does not round.
      represented: function of a problem: problems for which its decision may hold, one for each kernel that it may
        need. None of convolutions: a cache has the kernels of the dilations that were lowered with it.
      xla_is_bounded: whether XLA takes no longer for a problem than for its representatives.
    """

    problem: type[Any]
    random_operands: Callable[[Any, int], tuple[np.ndarray, ...]]
    reference: Callable[..., jax.Array]
    representatives: Callable[[Any], Iterable[Any]] = lambda problem: ()
    represented: Callable[[Any], Iterable[Any]] = lambda problem: ()
    check: Callable[..., jax.Array] | None = None
    kinds: int = 1
    operand_error: Callable[[Any], float] = lambda problem: 0.0
    xla_is_bounded: bool = True


def _convolution(problem: type[ConvProblem], reference: Callable[..., jax.Array]) -> Operation:
    def in_lax(problem: ConvProblem, x: jax.Array, y: jax.Array) -> jax.Array:
        return reference(x, y, problem)

    # XLA may take much longer for a dilated filter than for the representative, which has none.
    return Operation(problem, _normal_operands, in_lax, ConvProblem.representatives, xla_is_bounded=False)


def _normal_operands(problem: Problem, seed: int) -> tuple[np.ndarray, ...]:
    """Normally distributed operands."""
    return normals(problem.operand_types, seed)


OPERATIONS: dict[str, Operation] = {
    "conv_fprop": _convolution(ConvFpropProblem, conv_reference.conv_fprop),
    "conv_dgrad": _convolution(ConvDgradProblem, conv_reference.conv_dgrad),
    "conv_wgrad": _convolution(ConvWgradProblem, conv_reference.conv_wgrad),
    "dot_general": Operation(DotProblem, _normal_operands, dot_reference.dot_general),
    "quantized_matmul": Operation(
        QuantizedMatmulProblem,
        quantized_reference.random_operands,
        quantized_reference.problem_product,
        QuantizedMatmulProblem.representatives,
        QuantizedMatmulProblem.represented,
        operand_error=quantized_reference.operand_error,
    ),
    "quantized_ragged_dot": Operation(
        QuantizedRaggedDotProblem,
        quantized_ragged_reference.random_operands,
        functools.partial(quantized_ragged_reference.ragged_dot, grouped=ragged_reference.ragged_dot),
        check=functools.partial(quantized_ragged_reference.ragged_dot, grouped=ragged_reference.by_blocks),
        operand_error=lambda problem: quantized_reference.operand_error(problem.product),
        kinds=len(ragged_reference.DISTRIBUTIONS),
    ),
    "quantized_ragged_dot_epilogue": Operation(
        QuantizedRaggedEpilogueProblem,
        quantized_ragged_epilogue.random_operands,
        functools.partial(quantized_ragged_epilogue.problem_product, grouped=ragged_reference.ragged_dot),
        QuantizedRaggedEpilogueProblem.representatives,
        check=functools.partial(quantized_ragged_epilogue.problem_product, grouped=ragged_reference.by_blocks),
        operand_error=lambda problem: quantized_reference.operand_error(problem.product),
        kinds=len(ragged_reference.DISTRIBUTIONS),
    ),
    "quantized_matmul_epilogue": Operation(
        QuantizedEpilogueProblem,
        quantized_epilogue.random_operands,
        quantized_epilogue.problem_product,
        QuantizedEpilogueProblem.representatives,
        QuantizedEpilogueProblem.represented,
        operand_error=quantized_reference.operand_error,
    ),
    "quantized_matmul_transposed": Operation(
        QuantizedTransposedProblem,
        quantized_reference.random_operands,
        quantized_reference.problem_product,
        QuantizedTransposedProblem.representatives,
        QuantizedTransposedProblem.represented,
        operand_error=quantized_reference.operand_error,
    ),
    "ragged_dot": Operation(
        RaggedDotProblem,
        ragged_reference.random_operands,
        ragged_reference.ragged_dot,
        check=ragged_reference.by_blocks,
        kinds=len(ragged_reference.DISTRIBUTIONS),
    ),
}
