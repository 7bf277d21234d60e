"""A matrix product with a batch, as kernels see it: a frozen, hashable, canonical description."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax

from jax_splitk.problems.conv_wgrad import DTYPES, PRECISIONS
from jax_splitk.problems.problem import ArrayTypes, brief_dtypes, nbytes, require_fields

# The orders of an operand's dimensions in memory that kernels read without a transpose: all but those whose last
# dimension is the batch.
LHS_ORDERS = ("bmk", "mbk", "bkm", "kbm")
RHS_ORDERS = ("bkn", "kbn", "bnk", "nbk")
E4M3 = "float8_e4m3fn"
BIASES = ("none", "m", "n")
Activation = Literal["relu", "gelu", "gelu_exact", "silu"]
# NaN stays NaN in all of them. Each is one computation, also outside jit: its constants are no transfers.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.jit(functools.partial(jax.nn.gelu, approximate=True)),
    "gelu_exact": jax.jit(functools.partial(jax.nn.gelu, approximate=False)),
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class DotProblem:
    """out[b, m, n] = activation(sum over k of lhs[b, m, k] * rhs[b, k, n] + bias[m or n]) + residual[b, m, n].

    Everything except the product is its epilogue. It is computed once, from the whole sum, in float32 (in float64 if
    any dtype is float64), and then rounded to `out_dtype`.

    Attributes:
      batch, m, n, k: sizes. Several dimensions of `lax.dot_general` that are neighbours in both operands are one here.
      lhs_order, rhs_order: the operands' dimensions in memory, the last one contiguous; see `LHS_ORDERS` and
        `RHS_ORDERS`. With a batch of 1 it is in front.
      dtype: dtype of both operands.
      out_dtype: dtype of the result, which is [batch, m, n].
      precision: "default", "high" or "highest"; for float32 operands.
      bias: "m" or "n" for one value of each row or column of the result, the same in all of the batch; "none" without a
        bias.
      bias_dtype: dtype of the bias; "none" without a bias.
      activation: a name of `ACTIVATIONS`, or "none".
      residual_dtype: dtype of the residual, which is added last; "none" without a residual.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs_order: str
    rhs_order: str
    dtype: str
    out_dtype: str
    precision: str = "default"
    bias: str = "none"
    bias_dtype: str = "none"
    activation: str = "none"
    residual_dtype: str = "none"

    op = "dot_general"

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and values: for problems that come from files or
        command lines."""
        choices = {
            "lhs_order": LHS_ORDERS,
            "rhs_order": RHS_ORDERS,
            "dtype": (*DTYPES, E4M3),
            "out_dtype": DTYPES,
            "precision": PRECISIONS,
            "bias": BIASES,
            "bias_dtype": ("none",) if self.bias == "none" else DTYPES,
            "activation": ("none", *ACTIVATIONS),
            "residual_dtype": ("none", *DTYPES),
        }
        require_fields(self, dict.fromkeys(("batch", "m", "n", "k"), 0), choices)

    @property
    def epilogue(self) -> str:
        """The epilogue in words; empty if there is none."""
        parts = (
            f"bias over {self.bias} in {self.bias_dtype}" if self.bias != "none" else "",
            self.activation if self.activation != "none" else "",
            f"residual in {self.residual_dtype}" if self.residual_dtype != "none" else "",
        )
        return ", ".join(filter(None, parts))

    @property
    def epilogue_dtype(self) -> str:
        """The dtype in which the epilogue is computed."""
        dtypes = (self.dtype, self.out_dtype, self.bias_dtype, self.residual_dtype)
        return "float64" if "float64" in dtypes else "float32"

    @property
    def product(self) -> "DotProblem":
        """The same product without its epilogue."""
        if not self.epilogue:
            return self
        none = {"bias": "none", "bias_dtype": "none", "activation": "none", "residual_dtype": "none"}
        return dataclasses.replace(self, out_dtype=self.epilogue_dtype, **none)

    @property
    def epilogue_operands(self) -> ArrayTypes:
        """(shape, dtype) of the bias and the residual, as far as there are any: operands after lhs and rhs."""
        bias = () if self.bias == "none" else (((self.m if self.bias == "m" else self.n,), self.bias_dtype),)
        return bias if self.residual_dtype == "none" else (*bias, (self.out_shape, self.residual_dtype))

    @property
    def operand_types(self) -> ArrayTypes:
        return (self.lhs_shape, self.dtype), (self.rhs_shape, self.dtype), *self.epilogue_operands

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        return self._shape(self.lhs_order)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        return self._shape(self.rhs_order)

    def _shape(self, order: str) -> tuple[int, ...]:
        sizes = {"b": self.batch, "m": self.m, "n": self.n, "k": self.k}
        return tuple(sizes[dimension] for dimension in order)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.batch, self.m, self.n)

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform takes it, None if one may."""
        sizes = (self.batch, self.m, self.n, self.k)
        empty = any(isinstance(size, int) and size == 0 for size in sizes)
        return f"an empty product, {self.batch} of {self.m}x{self.k} by {self.k}x{self.n}" if empty else None

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: each input read once, the output written once."""
        return sum(nbytes(*array) for array in (*self.operand_types, (self.out_shape, self.out_dtype)))

    def __str__(self) -> str:
        batch = f"{self.batch}x " if self.batch != 1 else ""
        order = "".join((self.lhs_order, ",", self.rhs_order))
        product = f"dot_general {self.dtype}->{self.out_dtype} {batch}{self.m}x{self.n}x{self.k} {order}"
        return f"{product} ({self.epilogue})" if self.epilogue else product

    @property
    def brief(self) -> str:
        """How many products, and m, n and k of each."""
        batch = f"{self.batch} of " if self.batch != 1 else ""
        epilogue = f", {self.epilogue}" if self.epilogue else ""
        dtypes = brief_dtypes(self.dtype, self.out_dtype)
        return f"dot_general {batch}{self.m} x {self.n} x {self.k}, {dtypes}{epilogue}"
