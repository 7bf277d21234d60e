"""What the primitives of products and convolutions with an epilogue share: activation(sum + bias) + residual.

Operands are those of the product, then those of the epilogue. Where an epilogue cannot go with the product (an
activation that is differentiated, a sum over devices, a platform without a kernel for it), XLA computes it from the
product alone.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad

from jax_splitk.ops import checkpointing, lowering, taylor
from jax_splitk.ops.call import Call, Primitive
from jax_splitk.ops.tangents import by_some, summed
from jax_splitk.problems.epilogue import GATED
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.computation import one_computation
from jax_splitk.runtime.plan import CustomCall


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class WithEpilogue(Call):
    """A product and its epilogue.

    Attributes:
      activation: a name of `ACTIVATIONS` or `GATED`, or "none".
      bias: whether it is an operand.
    """

    activation: str = "none"
    bias: bool = False

    problem_type: ClassVar[type[Any]]  # of the problems with an epilogue

    @property
    def is_product(self) -> bool:
        """Whether there is no epilogue."""
        return self.activation == "none" and self.after_count == 0

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def is_linear(self) -> bool:
        """Whether the result is linear in each of the product's operands, but for a constant."""
        return self.activation == "none"

    @property
    def after_count(self) -> int:
        """How many operands follow the product's."""
        return int(self.bias)

    def own(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The product's operands."""
        return operands[: len(operands) - self.after_count]

    def rest(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands that `after` takes."""
        return operands[len(operands) - self.after_count :]

    @property
    def differentiated(self) -> Self:
        """The call as its derivative computes it."""
        return self

    @property
    @abc.abstractmethod
    def product(self) -> Call:
        """The call of the product alone, with the same dtype."""

    @abc.abstractmethod
    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        """The result, from the product alone and some operands."""

    @abc.abstractmethod
    def tangent_terms(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """The terms of the product's tangent, from those of its operands."""

    def composed(self, *operands: jax.Array) -> jax.Array:
        """The result by a product of its own, rounded to the result's dtype, with the epilogue in plain lax."""
        return self.around(self.product.bind(*self.own(operands)), *self.rest(operands))

    def composed_for_jet(self, *operands: jax.Array) -> jax.Array:
        """`composed`, by operations that `jax.experimental.jet` can differentiate."""
        return self.composed(*operands)

    def around(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        """`after`, as XLA's operations beside a product that is already there."""
        primitive: Any = self.primitive
        with jax.named_scope(primitive.scope):
            sharding = _compat.explicit_sharding(jax.typeof(sums))
            return _compat.over_auto_axes(self.after, sharding)(sums, *rest)

    def with_kernel(self, problem: Any, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array] | None:
        product = self.product.with_kernel(problem, out, custom_call)
        if isinstance(problem, self.problem_type):
            return product
        return self.around_product(product or (lambda *own: execute.call(custom_call, problem, *own)))

    def around_product(self, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """The function of all operands whose product alone is `product`."""

        def function(*operands: jax.Array) -> jax.Array:
            return self.after(product(*self.own(operands)), *self.rest(operands))

        return function

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.product.as_lax(self.own(avals))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: WithEpilogue) -> tuple[jax.Array, Any]:
    """An activation is differentiated at the product, which is kept in the result's dtype. All else is linear, and
    stays in the kernel."""
    call = call.differentiated
    if not call.is_linear:
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*moved: jax.Array) -> jax.Array:
            return call.composed(*{**dict(enumerate(primals)), **dict(zip(moving, moved, strict=True))}.values())

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    out = call.bind(*primals)

    def after(*rest: jax.Array) -> jax.Array:
        return call.after(_zeros_like(out), *rest)

    terms = call.tangent_terms(call.own(primals), call.own(tangents))
    return out, summed([*terms, *by_some(after, call.rest(primals), call.rest(tangents))], out)


_zeros_like = one_computation()(jnp.zeros_like)


def _transpose(ct: Any, *operands: Any, call: WithEpilogue) -> list[Any]:
    """`_jvp` leaves products alone to be transposed."""
    del ct, operands, call
    raise NotImplementedError("the transpose of a product with an epilogue, which is not linear")


def _for_jet(*operands: jax.Array, call: WithEpilogue) -> jax.Array:
    return call.composed_for_jet(*operands)


def define(primitive: Primitive, lax_primitive: core.Primitive = lax.dot_general_p) -> None:
    """Gives the primitive of a product with an epilogue all its rules but that of vmap. `lax_primitive`: that of the
    product in lax."""
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    checkpointing.define(primitive, lax_primitive)
    taylor.define(primitive, taylor.composed(_for_jet))
    lowering.define(primitive)
