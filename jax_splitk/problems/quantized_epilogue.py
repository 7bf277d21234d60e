"""What a product with a packed quantized weight and an epilogue computes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jax_splitk.problems import quantized_reference
from jax_splitk.problems.epilogue import GATED, bias_shape, check_fields, finished, in_words, named
from jax_splitk.problems.problem import ArrayTypes, as_base, nbytes
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.random_operands import normals


@dataclasses.dataclass(frozen=True)
class QuantizedEpilogueProblem(QuantizedMatmulProblem):
    """activation(x @ w + bias) + residual for an activation x [rows, k] and a packed weight w [k, features].

    Everything except the product is the epilogue. It is computed from the whole sums, in float32, and then rounded to
    `out_dtype`. A gated activation takes gate and up, which are blocks of 8 features of w in turn. Then the result has
    half as many columns as w.

    Attributes:
      bias_dtype: dtype of the bias, [features], or with a gated activation [2, features / 2]; "none" without a bias.
      activation: a name of `ACTIVATIONS` or of `GATED`, or "none".
      residual_dtype: dtype of the residual, which has the result's shape; "none" without a residual.
    """

    bias_dtype: str = "none"
    activation: str = "none"
    residual_dtype: str = "none"

    op = "quantized_matmul_epilogue"

    def validate(self) -> None:
        super().validate()
        check_fields(self, "features")

    @property
    def gated(self) -> bool:
        """Whether the activation takes gate and up."""
        return self.activation in GATED

    @functools.cached_property
    def product(self) -> QuantizedMatmulProblem:
        """The same product without its epilogue."""
        return as_base(QuantizedMatmulProblem, self)

    @property
    def sums(self) -> QuantizedMatmulProblem:
        """The product whose result the epilogue can be computed from."""
        return dataclasses.replace(self.product, out_dtype="float32")

    def representatives(self) -> tuple[QuantizedMatmulProblem, ...]:
        """The product's representatives with this epilogue, then the product alone and its representatives. An epilogue
        takes too little time to change the choice, so decisions for products hold for products with any epilogue."""
        alone = self.product
        return tuple(dict.fromkeys([*super().representatives(), *alone.representatives(), alone]))

    @property
    def epilogue(self) -> str:
        """The epilogue in words."""
        return in_words(self.bias_dtype, self.activation, self.residual_dtype)

    @property
    def epilogue_operands(self) -> ArrayTypes:
        """(shape, dtype) of the bias and the residual, as far as there are any."""
        of_bias = bias_shape(self.activation, self.features)
        arrays = ((of_bias, self.bias_dtype), (self.out_shape, self.residual_dtype))
        return tuple(array for array in arrays if array[1] != "none")

    @property
    def operand_types(self) -> ArrayTypes:
        return *super().operand_types, *self.epilogue_operands

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.rows, self.features // 2 if self.gated else self.features)

    @property
    def bytes_moved(self) -> int:
        return super().bytes_moved + sum(nbytes(*array) for array in self.epilogue_operands)

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.epilogue})"

    @property
    def brief(self) -> str:
        return f"{super().brief}, {self.epilogue}"


def problem_product(problem: QuantizedEpilogueProblem, *operands: Any) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers."""
    own = len(problem.product.operand_types)
    bias, residual = named(operands[own:], problem.bias_dtype != "none", problem.residual_dtype != "none")
    sums = quantized_reference.problem_sums(problem.product, *operands[:own])
    return finished(sums, bias, problem.activation, residual, problem.out_dtype)


def random_operands(problem: QuantizedEpilogueProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Those of the product, and a bias and a residual of normally distributed numbers."""
    more = normals(problem.epilogue_operands, seed + 1)
    return *quantized_reference.random_operands(problem.product, seed), *more
