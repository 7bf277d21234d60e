"""What a grouped product with a stack of packed weights and an epilogue computes."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import numpy as np

from jax_splitk.problems import quantized_ragged_reference
from jax_splitk.problems.epilogue import GATED, bias_shape, check_fields, finished, in_words
from jax_splitk.problems.problem import ArrayTypes, as_base, nbytes
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_ragged_reference import Grouped
from jax_splitk.problems.random_operands import normals


@dataclasses.dataclass(frozen=True)
class QuantizedRaggedEpilogueProblem(QuantizedRaggedDotProblem):
    """activation(lhs[r] @ weight[i] + bias[i]) for each row r of group i; rows of no group give zeros.

    Everything except the product is the epilogue. It is computed from the whole sums, in float32, and then rounded to
    `out_dtype`. A gated activation takes gate and up, which are blocks of 8 columns of each weight in turn. Then the
    result has half as many columns as a weight.

    The bias is the last operand.

    Attributes:
      bias_dtype: dtype of the bias, [groups, n], or with a gated activation [groups, 2, n / 2]; "none" without a bias.
      activation: a name of `ACTIVATIONS` or of `GATED`, or "none".
    """

    bias_dtype: str = "none"
    activation: str = "none"

    residual_dtype: ClassVar[str] = "none"  # there is none
    op = "quantized_ragged_dot_epilogue"

    def validate(self) -> None:
        super().validate()
        check_fields(self, "n")

    @property
    def gated(self) -> bool:
        """Whether the activation takes gate and up."""
        return self.activation in GATED

    @functools.cached_property
    def alone(self) -> QuantizedRaggedDotProblem:
        """The same grouped product without its epilogue."""
        return as_base(QuantizedRaggedDotProblem, self)

    @property
    def sums(self) -> QuantizedRaggedDotProblem:
        """The grouped product whose result the epilogue can be computed from."""
        return dataclasses.replace(self.alone, out_dtype="float32")

    def representatives(self) -> tuple[QuantizedRaggedDotProblem, ...]:
        """The grouped product alone. An epilogue takes too little time to change the choice."""
        return (self.alone,)

    @property
    def epilogue(self) -> str:
        """The epilogue in words."""
        return in_words(self.bias_dtype, self.activation)

    @property
    def epilogue_operands(self) -> ArrayTypes:
        """(shape, dtype) of the bias, if there is one."""
        shape = (self.groups, *bias_shape(self.activation, self.n))
        return () if self.bias_dtype == "none" else ((shape, self.bias_dtype),)

    @property
    def operand_types(self) -> ArrayTypes:
        return *super().operand_types, *self.epilogue_operands

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.m, self.n // 2 if self.gated else self.n)

    @property
    def bytes_moved(self) -> int:
        bias = sum(nbytes(shape[1:], dtype) for shape, dtype in self.epilogue_operands)
        return super().bytes_moved + min(self.groups, self.rows) * bias

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.epilogue})"

    @property
    def brief(self) -> str:
        return f"{super().brief}, {self.epilogue}"


def problem_product(problem: QuantizedRaggedEpilogueProblem, *operands: Any, grouped: Grouped) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers.

    Args:
      grouped: computes the product with dequantized weights.
    """
    p, own = problem, len(problem.alone.operand_types)
    layout, lhs, leaves, rest = quantized_ragged_reference.parts(p, *operands[:own])
    sums = quantized_ragged_reference.product(layout, lhs, leaves, rest, p.out_dtype, grouped, rounded=False)
    bias = None
    if p.bias_dtype != "none":
        bias = quantized_ragged_reference.of_rows(operands[own], p.m, *rest)
    return finished(sums, bias, p.activation, None, p.out_dtype)


def random_operands(problem: QuantizedRaggedEpilogueProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Those of the grouped product, and a bias of normally distributed numbers."""
    more = normals(problem.epilogue_operands, seed + 1)
    return *quantized_ragged_reference.random_operands(problem.alone, seed), *more
