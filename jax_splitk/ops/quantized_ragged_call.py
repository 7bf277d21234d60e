"""The `quantized_ragged_dot` primitive and its parameter.

Operands are lhs [m, k], the arrays of a stack of quantized weights with the stack's dimension in front, group_sizes
(int32) and optionally group_offset (int32 [1]), as in `QuantizedRaggedDotProblem`. Where no kernel serves, the weights
are dequantized, and `ragged_dot` multiplies with them: by its own kernels, where there are any.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.ops import partitioning
from jax_splitk.ops.call import Call, Primitive
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.ops.quantized_primitive import weight_axes
from jax_splitk.ops.ragged_call import RaggedDotCall, local_groups
from jax_splitk.problems import quantized_ragged_reference as reference
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_reference import Layout
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.quantized.packing import cuts
from jax_splitk.runtime import _compat
from jax_splitk.runtime.plan import CustomCall

quantized_ragged_dot_p = Primitive("jax_splitk_quantized_ragged_dot")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedRaggedCall(Call):
    """A grouped product with a stack of quantized weights.

    Attributes:
      layout: of one weight.
      has_zero: whether zero points are operands.
      has_offset: whether group_offset is an operand.
    """

    layout: Layout
    has_zero: bool
    has_offset: bool

    primitive = quantized_ragged_dot_p

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.layout.shape[1]

    def problem(self, avals: Sequence[Any]) -> QuantizedRaggedDotProblem:
        lhs, leaves, rest = reference.split(self.layout, self.has_zero, avals)
        layout = self.layout
        return QuantizedRaggedDotProblem(
            groups=_compat.static_or_symbolic(leaves[0].shape[0]),
            m=_compat.static_or_symbolic(lhs.shape[0]),
            k=layout.shape[0],
            n=layout.shape[1],
            dtype=lhs.dtype.name,
            out_dtype=self.out_dtype,
            **layout.fields(leaves),
            total_groups=_compat.static_or_symbolic(rest[0].shape[0]) if self.has_offset else 0,
        )

    def type_of(self, *avals: Any) -> Any:
        lhs = avals[0]
        out = _compat.like(lhs, (lhs.shape[0], self.columns), self.out_dtype)
        return partitioning.with_explicit_sharding(out, self, avals)

    # ---- among devices -----------------------------------------------------------------------------------------------

    def rule(self, avals: Sequence[Any]) -> Rule:
        """Rows, weights, features and k may be divided: rows and weights as in `ragged_dot`, features and k into parts
        that packing allows."""
        lhs, leaves, _ = reference.split(self.layout, self.has_zero, avals)
        layout = self.layout
        units: dict[str, Any] = {"m": lhs.shape[0], "g": leaves[0].shape[0]}
        if layout.version is None:
            units["n"] = layout.shape[1]
        else:
            units["k"], units["n"] = cuts(layout.shape, layout.group_size)
        weight = weight_axes(layout, leaves, ("g",), "n")
        operands = (("m", "k"), *weight, ("sizes",), *(("offset",),) * self.has_offset)
        divided: Any = self._divided

        def localized(operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
            lhs, (words, *_), rest = reference.split(self.layout, self.has_zero, operands)
            groups = words.shape[0] * place.parts.get("g", 1)
            return *operands[: -len(rest)], *local_groups(lhs.shape[0], groups, rest, place)

        return Rule(operands, ("m", "n"), units, divided, localized=localized)

    def _divided(self, parts: Mapping[str, int]) -> "QuantizedRaggedCall":
        layout = self.layout.divided(parts.get("k", 1), parts.get("n", 1))
        return dataclasses.replace(self, layout=layout, has_offset=self.has_offset or parts.get("g", 1) > 1)

    # ---- lowering ----------------------------------------------------------------------------------------------------

    def grouped(self, sharding: Any) -> Callable[..., jax.Array]:
        """The function of (problem, *operands) for the forward product with dequantized weights: `ragged_dot`, or lax's
        product where the result has a `sharding` by explicit axes. JAX 0.12 cannot lower an operation of ours that is
        partitioned inside of `auto_axes`."""
        options = self.options.of_another_pass(implied=False)
        if sharding is not None:
            options = dataclasses.replace(options, implementation="xla")
        return functools.partial(self._bind_grouped, options)

    def _bind_grouped(self, options: Any, problem: RaggedDotProblem, *operands: jax.Array) -> jax.Array:
        call = RaggedDotCall(
            mode=problem.mode,
            groups=problem.groups,
            rhs_order=problem.rhs_order,
            has_offset=problem.has_offset,
            compute_dtype=problem.dtype,
            out_dtype=problem.out_dtype,
            precision=problem.precision,
            batch=((), (), ()),
            options=options,
        )
        return call.bind(*operands)

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        del problem
        grouped = self.grouped(None if out is None else _compat.explicit_sharding(out))

        def product(*operands: jax.Array) -> jax.Array:
            lhs, leaves, rest = reference.split(self.layout, self.has_zero, operands)
            return reference.product(self.layout, lhs, leaves, rest, self.out_dtype, grouped)

        return product

    def with_kernel(
        self, problem: QuantizedRaggedDotProblem, out: Any, custom_call: CustomCall
    ) -> Callable[..., jax.Array] | None:
        return None

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The product of all rows with one dequantized weight."""
        lhs = avals[0]
        of_lax = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None, "out_sharding": None}
        weight = _compat.like(lhs, self.layout.shape, lhs.dtype)
        return (lhs, weight), of_lax | {"preferred_element_type": jnp.dtype(self.out_dtype)}
