"""The `dot_general` primitive and its parameters: a product, and its epilogue activation(sum + bias) + residual.

Operands are lhs, rhs, the bias and the residual, as far as there are any. A bias has the shape of the free dimensions
of lhs ("m") or rhs ("n"). Where an epilogue cannot go with the product (a bias that is mapped with both operands, an
activation that is differentiated, a platform without a kernel for it), XLA computes it from the sums of the product
alone. That is bilinear, and its transposes are products of the same kind (`dot_gradient`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.ops import partitioning
from jax_splitk.ops.call import MEMORY, Call, Primitive
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.problems import dot_layout
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions
from jax_splitk.problems.dot_reference import finished, lax_dot_general, wide_dtype
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

dot_general_p = Primitive("jax_splitk_dot_general")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The operations after a product, by the names of `DotProblem`."""

    bias: str = "none"
    activation: str = "none"
    residual: bool = False

    def named(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """(bias, residual) of the operands after lhs and rhs; None for one that is not there."""
        bias = None if self.bias == "none" else operands[0]
        return bias, operands[-1] if self.residual else None


NO_EPILOGUE = Epilogue()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DotCall(Call):
    """A product of lhs and rhs, which are rounded to `compute_dtype`, and its epilogue.

    Attributes:
      precision: that of lax's product.
    """

    dimensions: DimensionNumbers
    compute_dtype: str
    precision: lax.Precision = lax.Precision.DEFAULT
    epilogue: Epilogue = NO_EPILOGUE

    primitive = dot_general_p

    def free(self, operands: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The free dimensions of lhs and rhs."""
        contracting, batch = self.dimensions
        lhs, rhs = (free_dimensions(jnp.ndim(operands[i]), contracting[i], batch[i]) for i in range(2))
        return lhs, rhs

    def problem(self, avals: Sequence[Any]) -> DotProblem:
        lhs, rhs = ((tuple(_compat.static_or_symbolic(size) for size in x.shape)) for x in avals[:2])
        bias, residual = self.epilogue.named([jnp.dtype(x.dtype).name for x in avals[2:]])
        precision = self.precision.name.lower() if self.compute_dtype == "float32" else "default"
        arithmetic = (self.compute_dtype, self.out_dtype, precision)
        return _problem(lhs, rhs, self.dimensions, arithmetic, self.epilogue, bias or "none", residual or "none")

    def product(self, operands: Sequence[Any]) -> "DotCall":
        """The call of the product alone, whose sums are of the epilogue's dtype."""
        out_dtype = self.problem(operands).product.out_dtype
        return dataclasses.replace(self, epilogue=NO_EPILOGUE, out_dtype=out_dtype)

    def finished(self, sums: jax.Array, operands: Sequence[jax.Array]) -> jax.Array:
        """The result of all operands, from the sums of the product."""
        bias, residual = self.epilogue.named(operands[2:])
        if self.epilogue.bias == "m":
            bias = bias.reshape(*bias.shape, *[1] * len(self.free(operands)[1]))
        return finished(sums, bias, self.epilogue.activation, residual).astype(self.out_dtype)

    def composed(self, *operands: jax.Array) -> jax.Array:
        """The result by a product of its own, with the epilogue in plain lax."""
        sums = self.product(operands).bind(*operands[:2])
        with jax.named_scope(dot_general_p.scope):
            return self.finished(sums, operands)

    def type_of(self, *avals: Any) -> Any:
        lhs, rhs, (lhs_free, rhs_free) = *avals[:2], self.free(avals)
        of_lhs = (*self.dimensions[1][0], *lhs_free)
        shape = (*(lhs.shape[i] for i in of_lhs), *(rhs.shape[i] for i in rhs_free))
        out = _compat.like(lhs if _compat.aval_vma(lhs) else rhs, shape, self.out_dtype)
        return partitioning.with_explicit_sharding(out, self, avals)

    def rule(self, avals: Sequence[Any]) -> Rule:
        """Every dimension may be divided. If a contracting one is divided, the products are summed over the devices,
        and the epilogue is computed from the sum."""
        contracting, batch = self.dimensions
        names: list[dict[int, str]] = []
        for i, free in enumerate(self.free(avals)):
            named = (("k", contracting[i]), ("b", batch[i]), ("mn"[i], free))
            names.append({dim: f"{kind}{place}" for kind, dims in named for place, dim in enumerate(dims)})
        operands = tuple(tuple(of[dim] for dim in sorted(of)) for of in names)
        of_batch = (f"b{i}" for i in range(len(batch[0])))
        result = (*of_batch, *(name for dims in operands for name in dims if name[0] in "mn"))
        units = {name: x.shape[dim] for x, of in zip(avals[:2], names, strict=True) for dim, name in of.items()}
        bias = () if self.epilogue.bias == "none" else (tuple(x for x in result if x[0] == self.epilogue.bias),)
        residual = (result,) if self.epilogue.residual else ()

        def divided(parts: Mapping[str, int]) -> DotCall:
            return self.product(avals) if any(name[0] == "k" for name in parts) else self

        def finish(sums: jax.Array, operands: Sequence[jax.Array], place: Place) -> jax.Array:
            del place
            return self.finished(sums, operands)

        return Rule((*operands, *bias, *residual), result, units, divided, finish)

    def in_lax(self, problem: DotProblem | None, out: Any) -> Callable[..., jax.Array]:
        del problem, out

        def product_and_epilogue(*operands: jax.Array) -> jax.Array:
            return self.finished(self._product_in_lax(operands), operands)

        return product_and_epilogue

    def _product_in_lax(self, operands: Sequence[jax.Array]) -> jax.Array:
        lhs, rhs = (x.astype(self.compute_dtype) for x in operands[:2])
        out_dtype = self.problem(operands).product.out_dtype
        wide = wide_dtype(self.compute_dtype, out_dtype)  # lax does not narrow
        out = lax_dot_general(lhs, rhs, self.dimensions, precision=self.precision, preferred_element_type=wide)
        return out.astype(out_dtype)

    def with_kernel(self, problem: DotProblem, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array]:
        def between_reshapes(*operands: jax.Array) -> jax.Array:
            layouts = dot_layout.operands(operands[0].shape, operands[1].shape, self.dimensions)
            given = []
            for x, layout in zip(operands[:2], layouts, strict=True):
                moved = x if layout.transpose is None else x.transpose(layout.transpose)
                given.append(moved.astype(problem.dtype).reshape(layout.shape))
            # A product alone has no other operands.
            rest = [x.reshape(shape) for x, (shape, _) in zip(operands[2:], problem.epilogue_operands, strict=False)]
            result = execute.call(custom_call, problem, *given, *rest).reshape(out.shape)
            return result if problem.epilogue else self.finished(result, operands)

        return between_reshapes

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        of_lax = {"dimension_numbers": self.dimensions, "precision": self.precision, "out_sharding": None}
        return avals[:2], of_lax | {"preferred_element_type": jnp.dtype(self.out_dtype)}

    def with_mapped(self, ranks: tuple[int, int], mapped: tuple[int | None, int | None]) -> tuple["DotCall", int]:
        """The call for operands that have a mapped dimension besides these ranks, and the place of that dimension in
        the result."""
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = self.dimensions
        lhs_dim, rhs_dim = mapped
        after = lambda those, dim: tuple(i + (dim is not None and i >= dim) for i in those)  # noqa: E731
        contracting = (after(lhs_contracting, lhs_dim), after(rhs_contracting, rhs_dim))
        batch = (after(lhs_batch, lhs_dim), after(rhs_batch, rhs_dim))
        if lhs_dim is not None and rhs_dim is not None:
            batch = ((lhs_dim, *batch[0]), (rhs_dim, *batch[1]))
            return dataclasses.replace(self, dimensions=(contracting, batch)), 0
        lhs_free, rhs_free = (free_dimensions(ranks[i], contracting[i], batch[i]) for i in range(2))
        inner = lhs_free.index(lhs_dim) if lhs_dim is not None else len(lhs_free) + rhs_free.index(rhs_dim or 0)
        return dataclasses.replace(self, dimensions=(contracting, batch)), len(batch[0]) + inner


@functools.lru_cache(maxsize=MEMORY)
def _problem(
    lhs_shape: tuple[Any, ...],
    rhs_shape: tuple[Any, ...],
    dimensions: DimensionNumbers,
    arithmetic: tuple[str, str, str],
    epilogue: Epilogue,
    bias_dtype: str,
    residual_dtype: str,
) -> DotProblem:
    """The canonical problem of operands of these shapes; `arithmetic`: dtype, result's dtype, precision."""
    lhs, rhs = dot_layout.operands(lhs_shape, rhs_shape, dimensions)
    dtype, out_dtype, precision = arithmetic
    return DotProblem(
        batch=lhs.size("b"),
        m=lhs.size("m"),
        n=rhs.size("n"),
        k=lhs.size("k"),
        lhs_order=lhs.order,
        rhs_order=rhs.order,
        dtype=dtype,
        out_dtype=out_dtype,
        precision=precision,
        bias=epilogue.bias,
        bias_dtype=bias_dtype,
        activation=epilogue.activation,
        residual_dtype=residual_dtype,
    )
