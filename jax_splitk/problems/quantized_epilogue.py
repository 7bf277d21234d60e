"""What a product with a packed quantized weight, normalized activations and an epilogue computes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jax_splitk.problems import norm, quantized_reference
from jax_splitk.problems.epilogue import GATED, bias_shape, check_fields, finished, in_words, named
from jax_splitk.problems.problem import ArrayTypes, as_base, nbytes
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.random_operands import normals


@dataclasses.dataclass(frozen=True)
class QuantizedEpilogueProblem(QuantizedMatmulProblem):
    """activation(normalized(x) @ w + bias) + residual for an x [rows, k] and a packed weight w [k, features].

    What follows the product is the epilogue. It is computed from the whole sums, in float32, and then rounded to
    `out_dtype`. A gated activation takes gate and up, which are blocks of 8 features of w in turn. Then the result has
    half as many columns as w. `norm.normalized` says what a normalized x is.

    Attributes:
      bias_dtype: dtype of the bias, [features], or with a gated activation [2, features / 2]; "none" without a bias.
      activation: a name of `ACTIVATIONS` or of `GATED`, or "none".
      residual_dtype: dtype of the residual, which has the result's shape; "none" without a residual.
      norm_epsilon: what is added to the mean square of a row of x, as `repr` writes it; "none" if x is not normalized.
      norm_scale_dtype: dtype of the scale of the normalized x, [k]; "none" without one.
    """

    bias_dtype: str = "none"
    activation: str = "none"
    residual_dtype: str = "none"
    norm_epsilon: str = "none"
    norm_scale_dtype: str = "none"

    op = "quantized_matmul_epilogue"

    def validate(self) -> None:
        super().validate()
        check_fields(self, "features")
        norm.check_fields(self.norm_epsilon, self.norm_scale_dtype)

    @property
    def normalized(self) -> bool:
        """Whether x is normalized."""
        return self.norm_epsilon != "none"

    @functools.cached_property
    def with_x_as_it_is(self) -> "QuantizedEpilogueProblem":
        """The same product and epilogue of an x that is normalized already."""
        return dataclasses.replace(self, norm_epsilon="none", norm_scale_dtype="none")

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
        """The product's representatives with what is around it, then those of the product with its epilogue alone, then
        the product alone and its representatives. What is around a product takes too little time to change the choice,
        so decisions for products hold for products with any epilogue."""
        alone = self.product
        simpler = (*alone.representatives(), alone)
        if self.normalized and self.epilogue:
            simpler = self.with_x_as_it_is.representatives()
        return tuple(dict.fromkeys([*super().representatives(), *simpler]))

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
    def norm_operands(self) -> ArrayTypes:
        """(shape, dtype) of the scale of the normalized x, if there is one."""
        return () if self.norm_scale_dtype == "none" else (((self.k,), self.norm_scale_dtype),)

    @property
    def operand_types(self) -> ArrayTypes:
        return *super().operand_types, *self.epilogue_operands, *self.norm_operands

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.rows, self.features // 2 if self.gated else self.features)

    @property
    def bytes_moved(self) -> int:
        return super().bytes_moved + sum(nbytes(*array) for array in (*self.epilogue_operands, *self.norm_operands))

    @property
    def around(self) -> str:
        """The normalization and the epilogue in words."""
        return ", ".join(filter(None, (norm.in_words(self.norm_epsilon, self.norm_scale_dtype), self.epilogue)))

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.around})"

    @property
    def brief(self) -> str:
        return f"{super().brief}, {self.around}"


def problem_product(problem: QuantizedEpilogueProblem, *operands: Any) -> jax.Array:
    """The result of a problem, from operands in the order of the custom call's buffers."""
    own, end = len(problem.product.operand_types), len(operands) - len(problem.norm_operands)
    bias, residual = named(operands[own:end], problem.bias_dtype != "none", problem.residual_dtype != "none")
    x, *weight = operands[:own]
    if problem.normalized:
        x = norm.normalized(x, float(problem.norm_epsilon), *operands[end:])
    sums = quantized_reference.problem_sums(problem.product, x, *weight)
    return finished(sums, bias, problem.activation, residual, problem.out_dtype)


def random_operands(problem: QuantizedEpilogueProblem, seed: int) -> tuple[np.ndarray, ...]:
    """Those of the product, and a bias, a residual and a scale of normally distributed numbers."""
    more = normals((*problem.epilogue_operands, *problem.norm_operands), seed + 1)
    return *quantized_reference.random_operands(problem.product, seed), *more
