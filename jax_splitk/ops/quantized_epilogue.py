"""The `quantized_matmul_epilogue` primitive: a product with a quantized weight, and activation(sum + bias) + residual.

Operands are those of `quantized_matmul`, then the bias and the residual, as far as there are any, all with the same
leading batch dimensions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import numpy as jnp
from jax.interpreters import batching

from jax_splitk.ops import epilogue_call
from jax_splitk.ops.call import Primitive
from jax_splitk.ops.epilogue_call import WithEpilogue
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.ops.quantized_gradient import tangent_terms
from jax_splitk.ops.quantized_primitive import QuantizedCall, over_batch
from jax_splitk.problems.epilogue import finished, named
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem, problem_product
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem

quantized_epilogue_p = Primitive("quantized_matmul_epilogue")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EpilogueCall(WithEpilogue, QuantizedCall):
    """A product with a quantized weight, and its epilogue.

    Attributes:
      residual: whether it is an operand.
    """

    residual: bool = False

    primitive = quantized_epilogue_p
    problem_type: ClassVar[type[QuantizedMatmulProblem]] = QuantizedEpilogueProblem

    @property
    def after_count(self) -> int:
        return self.bias + self.residual

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
        """The product's operands, the bias and the residual; None for one that is not there."""
        return self.own(operands), *named(self.rest(operands), self.bias, self.residual)

    @property
    def product(self) -> QuantizedCall:
        return QuantizedCall(layout=self.layout, out_dtype=self.out_dtype, options=self.options)

    def problem(self, avals: Sequence[Any]) -> QuantizedMatmulProblem:
        own, bias, residual = self.split(avals)
        bias_dtype, residual_dtype = ("none" if x is None else jnp.dtype(x.dtype).name for x in (bias, residual))
        changes = {"bias_dtype": bias_dtype, "activation": self.activation, "residual_dtype": residual_dtype}
        return dataclasses.replace(super().problem(own), **changes)

    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        def of_one(sums: jax.Array, *rest: jax.Array) -> jax.Array:
            bias, residual = named(rest, self.bias, self.residual)
            return finished(sums, bias, self.activation, residual, self.out_dtype)

        return over_batch(of_one, sums)(sums, *rest)

    def tangent_terms(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return tangent_terms(primals, tangents, self.product)

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

        def localized(operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
            return self.own(operands) if self.contracted in place.parts else operands

        def finish(sums: jax.Array, operands: Sequence[jax.Array], place: Place) -> jax.Array:
            del place
            return self.after(sums, *self.rest(operands))

        return Rule((*rule.operands, *more), rule.result, rule.units, divided, finish, localized)

    def _size(self, name: str) -> int:
        size = super()._size(name)
        return size // 2 if name == self.kept and self.gated else size

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        if isinstance(problem, QuantizedEpilogueProblem):
            return over_batch(lambda *operands: problem_product(problem, *operands), out)
        return self.around_product(self.product.in_lax(problem, out))


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: EpilogueCall) -> tuple[jax.Array, int]:
    """A batch of activations, and of residuals with them, widens the rows. With a batch of weights all operands have
    it. A batch of the bias alone leaves the product as it is."""
    if call.options.config is not None:  # chosen for the rows that the caller sees
        return one_by_one(operands, dims, call), 0
    own = len(call.own(operands))
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


batching.primitive_batchers[quantized_epilogue_p] = _batch
epilogue_call.define(quantized_epilogue_p)
