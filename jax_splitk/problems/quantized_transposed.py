"""What a product with the transpose of a packed quantized weight computes."""

import dataclasses
from typing import ClassVar

from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem


@dataclasses.dataclass(frozen=True)
class QuantizedTransposedProblem(QuantizedMatmulProblem):
    """x @ w.T for an activation x [rows, features] and a packed weight w [k, features]; the result is [rows, k].

    With the cotangent of a product's result as x, it is the cotangent of that product's activation. It reads the words
    and scales of the forward product, so the fields that describe the weight are those of `QuantizedMatmulProblem`. The
    groups of the weight lie along k, which is a dimension of the result. So a scale cannot multiply sums: it multiplies
    the weight, which is then rounded to x's dtype.

    The kernels compute D = A B. A is the weight [k, features] and B the transposed activation [features, rows], so
    that D is [k, rows].
    """

    op = "quantized_matmul_transposed"
    transposed: ClassVar[bool] = True

    @property
    def x_shape(self) -> tuple[int, int]:
        return (self.rows, self.features)

    @property
    def m(self) -> int:
        return self.k

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.rows, self.k)

    @property
    def forward(self) -> QuantizedMatmulProblem:
        """The product x @ w of as many rows, with the same weight."""
        return QuantizedMatmulProblem(**vars(self))
