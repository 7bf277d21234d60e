"""The `quantized_matmul` primitive, and the one of the product with the transposed weight: their types, batching and
lowering (`quantized_gradient` differentiates them).

Operands are x [n, k], or [n, features] for the transposed weight, and a packed weight's words, or the elements of one
that is not packed, its scale and, if it has them, its zero point and its channel scale, all with the same leading batch
dimensions. What no kernel takes (`problem.refusal`) is lowered to XLA's product, like any other fallback. A batch of
activations alone widens n. A batch of weights stays until lowering, where the choice is made for the product with one
of them: a kernel runs once for each (one after the other, each fills the device), XLA multiplies them all at once.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import batching

from jax_splitk.ops import checkpointing, lowering, partitioning
from jax_splitk.ops.call import Call, Primitive
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import Layout, Leaves, leaves_of, problem_product
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.quantized.packing import cuts
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

quantized_matmul_p = Primitive("quantized_matmul")
quantized_transposed_p = Primitive("quantized_matmul_transposed")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedCall(Call):
    """The product with a weight whose arrays `layout` describes."""

    layout: Layout

    primitive = quantized_matmul_p
    problem_type: ClassVar[type[QuantizedMatmulProblem]] = QuantizedMatmulProblem
    contracted: ClassVar[str] = "k"  # the weight's dimension that the product sums over
    kept: ClassVar[str] = "features"

    def in_chain(self, chained: bool) -> Self:
        """The call as a part of a chain, or by itself."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, chained=chained))

    def problem(self, avals: Sequence[Any]) -> QuantizedMatmulProblem:
        """The problem of the product with one weight, also where there is a batch of them."""
        layout = self.layout
        x = avals[0]
        return self.problem_type(
            rows=_compat.static_or_symbolic(x.shape[-2]),
            k=layout.shape[0],
            features=layout.shape[1],
            x_dtype=x.dtype.name,
            out_dtype=self.out_dtype,
            compute_dtype=self.options.compute_dtype or "none",
            **layout.fields(leaves_of(layout, avals[1:])),
        )

    def rule(self, avals: Sequence[Any]) -> Rule | str:
        """A product is divided over rows of x, and over features and k into parts that packing allows."""
        layout = self.layout
        x = avals[0]
        batch = tuple(f"weight{i}" for i in range(x.ndim - 2))
        units = {**dict(zip(batch, x.shape, strict=False)), "rows": x.shape[-2]}
        if layout.version is None:  # XLA's in any case; explicit axes ask for the result's sharding
            units[self.kept] = self._size(self.kept)
        else:
            units["k"], units["features"] = cuts(layout.shape, layout.group_size)
        weight = weight_axes(layout, leaves_of(layout, avals[1:]), batch, "features")
        x_dims, out_dims = ((*batch, "rows", name) for name in (self.contracted, self.kept))
        return Rule((x_dims, *weight), out_dims, units, self._divided)

    def _size(self, name: str) -> int:
        """The size of a dimension of the weight."""
        return self.layout.shape[("k", "features").index(name)]

    def _divided(self, parts: Mapping[str, int]) -> "QuantizedCall":
        """The call of one part."""
        return dataclasses.replace(self, layout=self.layout.divided(parts.get("k", 1), parts.get("features", 1)))

    def type_of(self, *avals: Any) -> Any:
        x = avals[0]
        out = _compat.like(x, (*x.shape[:-1], self._size(self.kept)), self.out_dtype)
        return partitioning.with_explicit_sharding(out, self, avals)

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        return over_batch(lambda *operands: problem_product(problem, *operands), out)

    def with_kernel(
        self, problem: QuantizedMatmulProblem, out: Any, custom_call: CustomCall
    ) -> Callable[..., jax.Array] | None:
        if out.ndim == 2:
            return None

        def one_by_one(*operands: jax.Array) -> jax.Array:
            function: Callable[..., jax.Array] = lambda *one: execute.call(custom_call, problem, *one)  # noqa: E731
            for _ in range(operands[0].ndim - 2):
                function = lambda *many, each=function: lax.map(lambda one: each(*one), many)  # noqa: E731
            return function(*operands)

        return one_by_one

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The product with the dequantized weight."""
        x, batch = avals[0], tuple(range(avals[0].ndim - 2))
        weight = _compat.like(x, (*x.shape[:-2], *self.layout.shape), x.dtype)
        numbers = (((x.ndim - 1,), (x.ndim - 2 + ("k", "features").index(self.contracted),)), (batch, batch))
        of_lax = {"dimension_numbers": numbers, "precision": None, "out_sharding": None}
        return (x, weight), of_lax | {"preferred_element_type": jnp.dtype(self.out_dtype)}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TransposedCall(QuantizedCall):
    """The product with the transpose of such a weight."""

    primitive = quantized_transposed_p
    problem_type = QuantizedTransposedProblem
    contracted = "features"
    kept = "k"


def weight_axes(layout: Layout, leaves: Leaves, before: tuple[str, ...], features: str) -> tuple[tuple[str, ...], ...]:
    """The names of the axes of each leaf that a weight has, for a `Rule`: those of leading dimensions, "k", and that of
    the features. The other names are axes that cannot be divided."""
    _, scale, zero_point, channel_scale = leaves
    if layout.version is None:
        words = groups = (*before, "k", features)
        channels = (*before, "channel", features)
    else:
        words = (*before, features, "k", "word")
        channels = (*before, features, "channel", "lane")
        groups = (*before, features, "k", "lane") if scale.shape[-2] > 1 else channels
    more = [axes for axes, leaf in ((groups, zero_point), (channels, channel_scale)) if leaf is not None]
    return words, groups, *more


def over_batch(function: Callable[..., jax.Array], x: Any) -> Callable[..., jax.Array]:
    """A function of matrices, over the leading dimensions that `x` has beyond two."""
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function


def define_batching(primitive: core.Primitive) -> None:
    """Gives a primitive of (x, operands that belong to the weight) its rule for vmap."""

    def batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: Call) -> tuple[jax.Array, int]:
        x, *leaves = operands
        x_dim, *leaf_dims = dims
        if x_dim is not None and leaf_dims == [None] * len(leaves):
            if call.options.config is not None:  # chosen for the rows that the caller sees
                return lax.map(lambda x: call.bind(x, *leaves), jnp.moveaxis(x, x_dim, 0)), 0
            x = jnp.moveaxis(x, x_dim, -3)
            *batch, size, rows, k = x.shape
            out = call.bind(x.reshape(*batch, size * rows, k), *leaves)
            return out.reshape(*batch, size, rows, out.shape[-1]), len(batch)
        (size,) = {operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
        in_front = [batching.bdim_at_front(operand, dim, size) for operand, dim in zip(operands, dims, strict=True)]
        return call.bind(*in_front), 0

    batching.primitive_batchers[primitive] = batch


for _primitive in (quantized_matmul_p, quantized_transposed_p):
    define_batching(_primitive)
    checkpointing.define(_primitive, lax.dot_general_p)
    lowering.define(_primitive)
