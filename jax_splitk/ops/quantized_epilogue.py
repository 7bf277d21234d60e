"""The `quantized_matmul_epilogue` primitive: a product of normalized activations and a quantized weight, and
activation(sum + bias) + residual.

Operands are those of `quantized_matmul`, then the bias, the residual and the scale of the normalized x, as far as there
are any, all with the same leading batch dimensions.
"""

import dataclasses
import functools
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
from jax_splitk.problems.norm import normalized
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem, problem_product
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

quantized_epilogue_p = Primitive("quantized_matmul_epilogue")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EpilogueCall(WithEpilogue, QuantizedCall):
    """A product with a quantized weight, and its epilogue.

    Attributes:
      residual: whether it is an operand.
      norm_epsilon: what is added to the mean square of a row of x (`norm.normalized`); None if x is not normalized.
      norm_scale: whether a scale of the normalized x is an operand.
    """

    residual: bool = False
    norm_epsilon: float | None = None
    norm_scale: bool = False

    primitive = quantized_epilogue_p
    problem_type: ClassVar[type[QuantizedMatmulProblem]] = QuantizedEpilogueProblem

    @property
    def after_count(self) -> int:
        return self.bias + self.residual + self.norm_scale

    @property
    def is_product(self) -> bool:
        return super().is_product and self.norm_epsilon is None

    @property
    def is_linear(self) -> bool:
        return super().is_linear and self.norm_epsilon is None

    @property
    def with_x_as_it_is(self) -> "EpilogueCall":
        """The call of an x that is normalized already."""
        return dataclasses.replace(self, norm_epsilon=None, norm_scale=False)

    def with_normalized_x(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """The operands of `with_x_as_it_is`. XLA normalizes x."""
        if self.norm_epsilon is None:
            return operands
        end = len(operands) - self.norm_scale
        return normalized(operands[0], self.norm_epsilon, *operands[end:]), *operands[1:end]

    def normalized_first(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """`with_normalized_x`, as XLA's operations of their own."""
        end = len(operands) - self.norm_scale
        sharding = _compat.explicit_sharding(jax.typeof(operands[0]))
        normalize = _compat.over_auto_axes(lambda x, *scale: self.with_normalized_x(x, *scale)[0], sharding)
        return normalize(operands[0], *operands[end:]), *operands[1:end]

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
        """The product's operands, the bias and the residual; None for one that is not there."""
        return self.own(operands), *self._named(self.rest(operands))

    def _named(self, rest: Sequence[Any]) -> tuple[Any, Any]:
        return named(rest[: self.bias + self.residual], self.bias, self.residual)

    @property
    def product(self) -> QuantizedCall:
        return QuantizedCall(layout=self.layout, out_dtype=self.out_dtype, options=self.options)

    def problem(self, avals: Sequence[Any]) -> QuantizedMatmulProblem:
        own, bias, residual = self.split(avals)
        scale = avals[-1] if self.norm_scale else None
        bias_dtype, residual_dtype, scale_dtype = (
            "none" if x is None else jnp.dtype(x.dtype).name for x in (bias, residual, scale)
        )
        changes = {"bias_dtype": bias_dtype, "activation": self.activation, "residual_dtype": residual_dtype}
        if self.norm_epsilon is not None:
            changes |= {"norm_epsilon": repr(self.norm_epsilon), "norm_scale_dtype": scale_dtype}
        return dataclasses.replace(super().problem(own), **changes)

    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        def of_one(sums: jax.Array, *rest: jax.Array) -> jax.Array:
            bias, residual = self._named(rest)
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
        more += ((*batch, self.contracted),) if self.norm_scale else ()
        units = dict(rule.units)
        if self.norm_epsilon is not None:
            units.pop(self.contracted, None)  # a row's mean square is that of all k

        def divided(parts: Mapping[str, int]) -> QuantizedCall:
            return (self.product if self.contracted in parts else self)._divided(parts)

        def localized(operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
            return self.own(operands) if self.contracted in place.parts else operands

        def finish(sums: jax.Array, operands: Sequence[jax.Array], place: Place) -> jax.Array:
            del place
            return self.after(sums, *self.rest(operands))

        return Rule((*rule.operands, *more), rule.result, units, divided, finish, localized)

    def _size(self, name: str) -> int:
        size = super()._size(name)
        return size // 2 if name == self.kept and self.gated else size

    def composed(self, *operands: jax.Array) -> jax.Array:
        """The same, of an x that XLA normalizes: what is around that product has rules of its own."""
        if self.norm_epsilon is None:
            return super().composed(*operands)
        plain = self.with_x_as_it_is
        return (plain.product if plain.is_product else plain).bind(*self.normalized_first(*operands))

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        if self._is_simpler(problem):
            function = self.with_x_as_it_is.in_lax(problem, out)
            return lambda *operands: function(*self.with_normalized_x(*operands))
        if isinstance(problem, QuantizedEpilogueProblem):
            return over_batch(lambda *operands: problem_product(problem, *operands), out)
        return self.around_product(self.product.in_lax(problem, out))

    def with_kernel(self, problem: Any, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array] | None:
        if not self._is_simpler(problem):
            return super().with_kernel(problem, out, custom_call)
        function = self.with_x_as_it_is.with_kernel(problem, out, custom_call)
        function = function or functools.partial(execute.call, custom_call, problem)
        return lambda *operands: function(*self.with_normalized_x(*operands))

    def _is_simpler(self, problem: Any) -> bool:
        """Whether the problem has an x that is normalized already, and this call's is not."""
        return self.norm_epsilon is not None and not getattr(problem, "normalized", False)


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
    vectors = [dims[own]] if call.bias else []
    vectors += [dims[-1]] if call.norm_scale else []
    if dims[0] is None or any(dim is not None for dim in vectors):
        return jax.vmap(call.composed, tuple(dims))(*operands), 0

    def widened(x: jax.Array) -> jax.Array:
        """[size, *batch, rows, columns] as [*batch, size * rows, columns]."""
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])

    with_rows = {0, own + call.bias} if call.residual else {0}
    given = [widened(in_front[i]) if i in with_rows else operands[i] for i in range(len(operands))]
    out = call.bind(*given)
    batch = out.ndim - 2
    return out.reshape(*out.shape[:batch], size, out.shape[-2] // size if size else 0, out.shape[-1]), batch


batching.primitive_batchers[quantized_epilogue_p] = _batch
epilogue_call.define(quantized_epilogue_p)
