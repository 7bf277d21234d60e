"""A convolution and its epilogue: activation(sum + bias) + residual, or activation(sum + bias + residual), computed in
float32 and rounded once."""

import dataclasses
import functools
from typing import Any

from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.epilogue import in_words
from jax_splitk.problems.problem import ArrayTypes, as_base


@dataclasses.dataclass(frozen=True)
class ConvEpilogueProblem(ConvFpropProblem):
    """A forward pass whose kernel computes an epilogue, too. Decisions are those of `convolution`: a family that can
    computes the epilogue with the config that was chosen without it.

    Attributes:
      bias_dtype: dtype of the bias, [out_channels]; "none" without a bias.
      activation: a name of `ACTIVATIONS`, or "none".
      residual_dtype: dtype of the residual, which has the output's shape; "none" without a residual.
      activation_last: whether the residual is added before the activation.
    """

    bias_dtype: str = "none"
    activation: str = "none"
    residual_dtype: str = "none"
    activation_last: bool = False

    @functools.cached_property
    def convolution(self) -> ConvFpropProblem:
        """The same convolution without its epilogue."""
        return as_base(ConvFpropProblem, self)

    @property
    def bias(self) -> str:
        """Over which dimension of the product the bias goes: "n" for the output channels; "none" without a bias."""
        return "none" if self.bias_dtype == "none" else "n"

    @property
    def epilogue(self) -> str:
        """The epilogue in words."""
        words = in_words(self.bias_dtype, self.activation, self.residual_dtype)
        return f"{words} before the activation" if self.activation_last else words

    @property
    def operand_types(self) -> ArrayTypes:
        more = (((self.out_channels,), self.bias_dtype), (self.out_shape, self.residual_dtype))
        return *super().operand_types, *(array for array in more if array[1] != "none")

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.epilogue})"

    @property
    def brief(self) -> str:
        return f"{super().brief}, {self.epilogue}"


def with_epilogue(problem: ConvProblem, **epilogue: Any) -> ConvProblem:
    """A canonical forward pass with an epilogue, by the fields of `ConvEpilogueProblem`. A transposed convolution is an
    input gradient, and is returned without one: XLA computes its epilogue."""
    if type(problem) is not ConvFpropProblem:
        return problem
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    return ConvEpilogueProblem(**fields, **epilogue)


def decisive(problem: Any) -> Any:
    """The problem for which a kernel is chosen: a convolution's without its epilogue, which takes too little time to
    change the choice. Other problems are their own."""
    return problem.convolution if isinstance(problem, ConvEpilogueProblem) else problem
