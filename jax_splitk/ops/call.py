"""The primitive of an operation, and its one parameter: a frozen dataclass that says what is asked of the operands.

An equation of ours prints as `conv_wgrad[call=ConvWgrad(...)] x g`. Every rule of JAX (type, batching, partitioning,
checkpoint policies, lowering) is a method of the call, or a function that takes it.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from jax.extend import core

from jax_splitk.ops.partitioning import Rule
from jax_splitk.runtime import _compat
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.tuning.options import Options

# How many results each function here remembers that derives something from an equation. A program has dozens.
MEMORY = 4096


class Primitive(core.Primitive):
    """A primitive of ours, whose name is that of the operation. `lowering.define` completes it.

    Attributes:
      scope: a part of the names of all its operations, in HLO and in profiles.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scope = f"jax_splitk.{name.removeprefix('jax_splitk_')}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Call(abc.ABC):
    """The only parameter of a primitive.

    Its methods take `avals`, the operands or their types.

    Attributes:
      out_dtype: the name of the result's dtype.
      options: the caller's.
    """

    out_dtype: str
    options: Options

    primitive: ClassVar[core.Primitive]

    def bind(self, *operands: Any) -> jax.Array:
        """The result of operands which are made to vary over the same axes of a mesh."""
        return self.primitive.bind(*_compat.vary_alike(operands), call=self)

    @abc.abstractmethod
    def type_of(self, *avals: Any) -> Any:
        """The result's type, sharded where a mesh has explicit axes."""

    @abc.abstractmethod
    def problem(self, avals: Sequence[Any]) -> Any:
        """What kernels compute, in canonical form."""

    @abc.abstractmethod
    def rule(self, avals: Sequence[Any]) -> Rule | str:
        """How the operation is divided among devices, or why it is not."""

    @abc.abstractmethod
    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        """The function of the operands in plain lax, for the result's type `out`.

        `problem` is None for an equation that is lax's: the function is then what lax would trace.
        """

    @abc.abstractmethod
    def with_kernel(self, problem: Any, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array] | None:
        """The function of the operands around the custom call that computes `problem`, for the result's type `out`.

        None if operands and result of the custom call are the primitive's.
        """

    @abc.abstractmethod
    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The operand types and the parameters of lax's equation, as a policy of `jax.checkpoint` sees them."""

    def __repr__(self) -> str:
        return shown(self)


def call_of(eqn: core.JaxprEqn) -> Any:
    """The call of an equation of ours."""
    (call,) = eqn.params.values()
    return call


def shown(value: Any) -> str:
    """The text of a dataclass in a jaxpr, without fields that have their default."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    said = (f"{name}={shown(each)}" for name, each in given.items() if each != defaults[name])
    return f"{type(value).__name__}({', '.join(said)})"
