"""The `quantized_matmul_epilogue` primitive: a product with a quantized weight, and activation(sum + bias) + residual.

Operands are those of `quantized_matmul`, then the bias and the residual, as far as there are any, all with the same
leading batch dimensions. Where an epilogue cannot go with the product (an activation that is differentiated, a sum over
devices, a platform without a kernel for it), XLA computes it from the product alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import checkpointing, lowering, taylor
from jax_splitk.ops.call import Primitive
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.partitioning import Rule
from jax_splitk.ops.quantized_gradient import tangent_terms
from jax_splitk.ops.quantized_primitive import QuantizedCall, over_batch
from jax_splitk.ops.tangents import by_some, summed
from jax_splitk.problems.epilogue import GATED, finished
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem, named, problem_product
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

quantized_epilogue_p = Primitive("quantized_matmul_epilogue")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EpilogueCall(QuantizedCall):
    """A product with a quantized weight, and its epilogue.

    Attributes:
      activation: a name of `ACTIVATIONS` or `GATED`, or "none".
      bias, residual: whether they are operands.
    """

    activation: str = "none"
    bias: bool = False
    residual: bool = False

    primitive = quantized_epilogue_p
    problem_type: ClassVar[type[QuantizedMatmulProblem]] = QuantizedEpilogueProblem

    @property
    def is_product(self) -> bool:
        """Whether there is no epilogue."""
        return self.activation == "none" and not self.bias and not self.residual

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
        """The product's operands, the bias and the residual; None for one that is not there."""
        own, rest = self._own(operands)
        return own, *named(rest, self.bias, self.residual)

    def _own(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The product's operands, and the others."""
        own = len(operands) - self.bias - self.residual
        return operands[:own], operands[own:]

    @property
    def product(self) -> QuantizedCall:
        """The call of the product alone, with the same dtype."""
        return QuantizedCall(layout=self.layout, out_dtype=self.out_dtype, options=self.options)

    def problem(self, avals: Sequence[Any]) -> QuantizedMatmulProblem:
        own, bias, residual = self.split(avals)
        bias_dtype, residual_dtype = ("none" if x is None else jnp.dtype(x.dtype).name for x in (bias, residual))
        changes = {"bias_dtype": bias_dtype, "activation": self.activation, "residual_dtype": residual_dtype}
        return dataclasses.replace(super().problem(own), **changes)

    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        """The result, from the product alone and the operands after the weight."""

        def of_one(sums: jax.Array, *rest: jax.Array) -> jax.Array:
            bias, residual = named(rest, self.bias, self.residual)
            return finished(sums, bias, self.activation, residual, self.out_dtype)

        return over_batch(of_one, sums)(sums, *rest)

    def composed(self, *operands: jax.Array) -> jax.Array:
        """The result by a product of its own, rounded to the result's dtype, with the epilogue in plain lax."""
        own, rest = self._own(operands)
        return self.around(self.product.bind(*own), *rest)

    def around(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        """`after`, as XLA's operations beside a product that is already there."""
        with jax.named_scope(quantized_epilogue_p.scope):
            sharding = _compat.explicit_sharding(jax.typeof(sums))
            return _compat.over_auto_axes(self.after, sharding)(sums, *rest)

    def rule(self, avals: Sequence[Any]) -> Rule | str:
        """If k is divided, the products are summed over the devices, in the result's dtype, and XLA computes the
        epilogue from the sum."""
        own, bias, residual = self.split(avals)
        rule = super().rule(own)
        if isinstance(rule, str):
            return rule
        batch = rule.result[:-2]
        pair = ("pair",) if self.gated else ()
        more = () if bias is None else ((*batch, *pair, self.kept),)
        more += () if residual is None else (rule.result,)

        def divided(parts: Mapping[str, int]) -> QuantizedCall:
            return (self.product if self.contracted in parts else self)._divided(parts)

        def localized(operands: Sequence[jax.Array], parts: Mapping[str, int], _: Any) -> Sequence[jax.Array]:
            return self.split(operands)[0] if self.contracted in parts else operands

        def finish(sums: jax.Array, *operands: jax.Array) -> jax.Array:
            return self.after(sums, *self._own(operands)[1])

        return Rule((*rule.operands, *more), rule.result, rule.units, divided, finish, localized)

    def _size(self, name: str) -> int:
        size = super()._size(name)
        return size // 2 if name == self.kept and self.gated else size

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        if isinstance(problem, QuantizedEpilogueProblem):
            return over_batch(lambda *operands: problem_product(problem, *operands), out)
        return self._around(super().in_lax(problem, out))

    def with_kernel(
        self, problem: QuantizedMatmulProblem, out: Any, custom_call: CustomCall
    ) -> Callable[..., jax.Array] | None:
        product = super().with_kernel(problem, out, custom_call)
        if isinstance(problem, QuantizedEpilogueProblem):
            return product
        return self._around(product or (lambda *own: execute.call(custom_call, problem, *own)))

    def _around(self, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """The function of all operands whose product alone is `product`."""

        def function(*operands: jax.Array) -> jax.Array:
            own, rest = self._own(operands)
            return self.after(product(*own), *rest)

        return function

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return super().as_lax(self.split(avals)[0])


# ---- differentiation -------------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: EpilogueCall) -> tuple[jax.Array, Any]:
    """An activation is differentiated at the product, which is kept in the result's dtype. All else is linear, and
    stays in the kernel."""
    if call.activation != "none":
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*moved: jax.Array) -> jax.Array:
            return call.composed(*{**dict(enumerate(primals)), **dict(zip(moving, moved, strict=True))}.values())

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    out, own = call.bind(*primals), len(call.split(primals)[0])

    def after(*rest: jax.Array) -> jax.Array:
        return call.after(jnp.zeros_like(out), *rest)

    terms = tangent_terms(primals[:own], tangents[:own], call.product)
    return out, summed([*terms, *by_some(after, primals[own:], tangents[own:])], out)


def _transpose(ct: Any, *operands: Any, call: EpilogueCall) -> list[Any]:
    """`_jvp` leaves products alone to be transposed."""
    del ct, operands, call
    raise NotImplementedError("the transpose of a product with an epilogue, which is not linear")


def _in_lax(*operands: jax.Array, call: EpilogueCall) -> jax.Array:
    return call.composed(*operands)


# ---- batching --------------------------------------------------------------------------------------------------------


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: EpilogueCall) -> tuple[jax.Array, int]:
    """A batch of activations, and of residuals with them, widens the rows. With a batch of weights all operands have
    it. A batch of the bias alone leaves the product as it is."""
    if call.options.config is not None:  # chosen for the rows that the caller sees
        return one_by_one(operands, dims, call), 0
    own = len(call.split(operands)[0])
    size = mapped_size(operands, dims)
    in_front = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims, strict=True)]
    if any(dim is not None for dim in dims[1:own]):
        return call.bind(*in_front), 0
    bias_dim = dims[own] if call.bias else None
    if dims[0] is None or bias_dim is not None:
        return jax.vmap(call.composed, tuple(dims))(*operands), 0

    def widened(x: jax.Array) -> jax.Array:
        """[size, *batch, rows, columns] as [*batch, size * rows, columns]."""
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])

    last = len(operands) - 1
    given = [widened(in_front[i]) if i == 0 or (call.residual and i == last) else operands[i] for i in range(last + 1)]
    out = call.bind(*given)
    batch = out.ndim - 2
    return out.reshape(*out.shape[:batch], size, out.shape[-2] // size if size else 0, out.shape[-1]), batch


ad.primitive_jvps[quantized_epilogue_p] = _jvp
ad.primitive_transposes[quantized_epilogue_p] = _transpose
batching.primitive_batchers[quantized_epilogue_p] = _batch
checkpointing.define(quantized_epilogue_p, lax.dot_general_p)
taylor.define(quantized_epilogue_p, taylor.composed(_in_lax))
lowering.define(quantized_epilogue_p)
