"""The `quantized_ragged_dot_epilogue` primitive: a grouped product with a stack of quantized weights, and
activation(sum + bias) with a bias of each weight.

Operands are those of `quantized_ragged_dot`, then the bias, if there is one: [groups, n], or [groups, 2, n / 2] with a
gated activation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import batching

from jax_splitk.ops import epilogue_call
from jax_splitk.ops.call import Primitive
from jax_splitk.ops.epilogue_call import WithEpilogue
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.ops.quantized_ragged_call import QuantizedRaggedCall
from jax_splitk.ops.quantized_ragged_gradient import batch, tangent_terms
from jax_splitk.ops.ragged_call import local_groups
from jax_splitk.problems import quantized_ragged_reference as reference
from jax_splitk.problems.epilogue import finished
from jax_splitk.problems.problem import as_base
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem, problem_product
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import _compat
from jax_splitk.runtime.computation import one_computation

quantized_ragged_epilogue_p = Primitive("quantized_ragged_dot_epilogue")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RaggedEpilogueCall(WithEpilogue, QuantizedRaggedCall):
    """A grouped product with a stack of quantized weights, and its epilogue."""

    primitive = quantized_ragged_epilogue_p
    problem_type: ClassVar[type[QuantizedRaggedDotProblem]] = QuantizedRaggedEpilogueProblem

    @property
    def columns(self) -> int:
        return super().columns // 2 if self.gated else super().columns

    def rest(self, operands: Sequence[Any]) -> Sequence[Any]:
        """group_sizes, group_offset if there is one, and the bias."""
        return operands[len(operands) - 1 - self.has_offset - self.bias :]

    @property
    def product(self) -> QuantizedRaggedCall:
        return as_base(QuantizedRaggedCall, self)

    def problem(self, avals: Sequence[Any]) -> QuantizedRaggedDotProblem:
        alone = super().problem(self.own(avals))
        bias_dtype = jnp.dtype(avals[-1].dtype).name if self.bias else "none"
        return QuantizedRaggedEpilogueProblem(**vars(alone), bias_dtype=bias_dtype, activation=self.activation)

    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        return self._after(_of_rows, sums, *rest)

    def composed_for_jet(self, *operands: jax.Array) -> jax.Array:
        """The bias of each row is a grouped product: jet differentiates no arithmetic of integers."""
        grouped = self.grouped(None)

        def of_rows(m: int, bias: jax.Array, sizes: jax.Array, *offset: jax.Array) -> jax.Array:
            each, total = bias.reshape(bias.shape[0], 1, -1), sizes.shape[0] if offset else 0
            counts = (each.shape[0], m, 1, each.shape[2])
            problem = RaggedDotProblem("forward", *counts, "float32", "float32", "highest", total_groups=total)
            rows = grouped(problem, jnp.ones((m, 1), jnp.float32), each, sizes, *offset)
            return rows.reshape(m, *bias.shape[1:])

        return self._after(of_rows, self.product.bind(*self.own(operands)), *self.rest(operands))

    def _after(self, of_rows: Callable[..., jax.Array], sums: jax.Array, *rest: jax.Array) -> jax.Array:
        """`after`, with a function of (number of rows, bias, *groups) that gives the bias of each row."""
        bias = None
        if self.bias:
            *groups, bias = rest
            bias = of_rows(sums.shape[0], bias.astype(jnp.float32), *groups)
        return finished(sums, bias, self.activation, None, self.out_dtype)

    def tangent_terms(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return tangent_terms(primals, tangents, self.product)

    def rule(self, avals: Sequence[Any]) -> Rule:
        """As without an epilogue. A sum over devices with some of the weights each is that of the results. If k is
        divided, the products are summed, and XLA computes the epilogue from the sum."""
        rule = self.product.rule(self.own(avals))
        more = (("g", *(("pair",) if self.gated else ()), "n"),) if self.bias else ()

        def divided(parts: Mapping[str, int]) -> QuantizedRaggedCall:
            return (self.product if "k" in parts else self)._divided(parts)

        def localized(operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
            assert rule.localized is not None
            own = rule.localized(self.own(operands), place)
            return own if "k" in place.parts else (*own, *operands[len(operands) - self.bias :])

        def finish(sums: jax.Array, operands: Sequence[jax.Array], place: Place) -> jax.Array:
            if "k" not in place.parts:
                return sums
            rest, bias = self.rest(operands), ()
            if self.bias:
                *rest, own = rest
                bias = (place.whole("g", own),)
            # The weights of all devices, of the device's rows.
            parts = {name: count for name, count in place.parts.items() if name != "g"}
            groups = local_groups(sums.shape[0], 0, rest, dataclasses.replace(place, parts=parts))
            return self.after(sums, *groups, *bias)

        return Rule((*rule.operands, *more), rule.result, rule.units, divided, finish, localized)

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        del problem  # it may be that of the product alone, which a kernel of this platform serves
        grouped = self.grouped(None if out is None else _compat.explicit_sharding(out))

        def function(*operands: jax.Array) -> jax.Array:
            whole: Any = self.problem(operands)
            return problem_product(whole, *operands, grouped=grouped)

        return function


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@one_computation(0)
def _of_rows(m: int, bias: jax.Array, *groups: jax.Array) -> jax.Array:
    """The bias of each of m rows, in float32. Its cotangent is a product with the rows' groups: a sum in a fixed order,
    which the transpose of a gather is not."""
    return reference.of_rows(bias, m, *groups)


@functools.partial(_of_rows.defjvp, symbolic_zeros=True)  # none for group_sizes, which have no tangent
def _of_rows_jvp(m: int, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _of_rows(m, *primals), _tangent_of_rows(m, tangents[0], *primals[1:])


@one_computation(0)
def _tangent_of_rows(m: int, dot: jax.Array, *groups: jax.Array) -> jax.Array:
    member = reference.of_rows(jnp.eye(dot.shape[0], dtype=dot.dtype), m, *groups)
    found = lax.dot_general(member, dot, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    has_one = reference.of_rows(jnp.ones((dot.shape[0], *[1] * (dot.ndim - 1)), bool), m, *groups)
    return jnp.where(has_one, found, jnp.zeros_like(found))


batching.primitive_batchers[quantized_ragged_epilogue_p] = batch
epilogue_call.define(quantized_ragged_epilogue_p)
