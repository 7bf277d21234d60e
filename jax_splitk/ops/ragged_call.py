"""The `ragged_dot` primitive and its parameter: a grouped product with a batch.

Operands are lhs, rhs, group_sizes (int32) and optionally group_offset (int32 [1]), as in `RaggedDotProblem`, each with
some of the batch dimensions in front. The result has all batch dimensions. Lowering makes the choice for one element of
the batch: a kernel runs once for each element, one after the other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.ops import partitioning
from jax_splitk.ops.call import Call, Primitive
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.problems.ragged_dot import Mode, RaggedDotProblem
from jax_splitk.problems.ragged_parts import InParts
from jax_splitk.problems.ragged_reference import Batch, batched, bounds
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

ragged_dot_p = Primitive("jax_splitk_ragged_dot")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RaggedDotCall(Call):
    """One pass of a grouped product.

    Attributes:
      mode, groups, rhs_order: as in `RaggedDotProblem`.
      has_offset: whether group_offset is an operand.
      compute_dtype: dtype to which lhs and rhs are rounded.
      precision: as in `RaggedDotProblem`.
      batch: the batch dimensions of lhs, of rhs and of group_sizes, in ascending order.
    """

    mode: Mode
    groups: int
    rhs_order: str
    has_offset: bool
    compute_dtype: str
    precision: str
    batch: Batch

    primitive = ragged_dot_p

    @property
    def is_forward(self) -> bool:
        return self.mode == "forward"

    @property
    def rank(self) -> int:
        """Number of batch dimensions."""
        return len({dim for dims in self.batch for dim in dims})

    def batch_shape(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        given = zip(avals, self.batch, strict=False)
        sizes = {dim: x.shape[place] for x, dims in given for place, dim in enumerate(dims)}
        return tuple(sizes[dim] for dim in range(len(sizes)))

    def problem(self, avals: Sequence[Any]) -> RaggedDotProblem:
        """The problem of one element of the batch."""
        lhs, rhs, sizes = (tuple(map(_compat.static_or_symbolic, x.shape)) for x in avals[:3])
        return RaggedDotProblem(
            mode=self.mode,
            groups=rhs[-3] if self.is_forward else self.groups,
            m=lhs[-2],
            k=lhs[-1],
            n=rhs[-2 if self.rhs_order == "gnk" else -1],
            dtype=self.compute_dtype,
            out_dtype=self.out_dtype,
            precision=self.precision,
            rhs_order=self.rhs_order,
            total_groups=sizes[-1] if self.has_offset else 0,
        )

    def type_of(self, *avals: Any) -> Any:
        shape = (*self.batch_shape(avals), *self.problem(avals).out_shape)
        varying = next((x for x in avals if _compat.aval_vma(x)), avals[0])
        return partitioning.with_explicit_sharding(_compat.like(varying, shape, self.out_dtype), self, avals)

    # ---- among devices -----------------------------------------------------------------------------------------------

    def rule(self, avals: Sequence[Any]) -> Rule:
        """Every dimension may be divided. A device with some of the groups gets their offset. A device with some of the
        rows gets its part of each group. If a contracting dimension, or the groups of a forward product, are divided,
        the devices' results are summed."""
        problem = self.problem(avals)
        names = [tuple(f"b{dim}" for dim in dims) for dims in self.batch]
        matrices = tuple(problem.rhs_order) if self.is_forward else ("m", "n")
        operands = ((*names[0], "m", "k"), (*names[1], *matrices), (*names[2], "sizes"))
        result = (*(f"b{dim}" for dim in range(self.rank)), *(("m", "n") if self.is_forward else ("g", "k", "n")))
        units = {f"b{dim}": size for dim, size in enumerate(self.batch_shape(avals))}
        units |= {"g": problem.groups, "m": problem.m, "k": problem.k, "n": problem.n}
        offset = (("offset",),) if self.has_offset else ()
        divided: Any = self._divided  # of the parts alone: the primitive's rule adds the other parameters
        return Rule((*operands, *offset), result, units, divided, localized=self._localized)

    def _divided(self, parts: Mapping[str, int]) -> "RaggedDotCall":
        several = parts.get("g", 1) > 1
        return dataclasses.replace(self, groups=self.groups // parts.get("g", 1), has_offset=self.has_offset or several)

    def _localized(self, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
        """The operands of one device: sizes of its rows, the offset of its groups."""
        lhs, rhs, *rest = operands
        return lhs, rhs, *local_groups(lhs.shape[-2], self.groups, rest, place)

    # ---- lowering ----------------------------------------------------------------------------------------------------

    def in_lax(self, problem: RaggedDotProblem, out: Any) -> Callable[..., jax.Array]:
        """The call in plain lax, as a function of the operands."""
        del problem, out

        def product(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
            whole = self.problem((lhs, rhs, *rest))
            return batched(whole, self.batch, lhs.astype(whole.dtype), rhs.astype(whole.dtype), *rest)

        return product

    def with_kernel(self, problem: RaggedDotProblem, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array]:
        """The call as a function of the operands, with the custom call for one element of the batch, or for the parts
        of its float32 operands."""
        dims = (*self.batch, ())[: 3 + self.has_offset]

        def product(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
            if math.prod(out.shape[: self.rank]) == 0:
                return jnp.zeros(out.shape, out.dtype)
            whole = self.problem((lhs, rhs, *rest))
            kernel = functools.partial(execute.call, custom_call, problem)
            if problem != whole:
                kernel = functools.partial(InParts(whole), kernel)
            return _each(kernel, (lhs.astype(whole.dtype), rhs.astype(whole.dtype), *rest), dims, self.rank)

        return product

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The call as a `jax.checkpoint` policy sees it: a dense product of lhs and a matrix of rhs, since policies do
        not know lax's grouped product."""
        lhs, rhs = avals[:2]
        shared = [(self.batch[0].index(dim), self.batch[1].index(dim)) for dim in self.batch[0] if dim in self.batch[1]]
        rank = len(self.batch[1])
        if self.is_forward:  # without the groups
            rhs = _compat.like(rhs, (*rhs.shape[:rank], *rhs.shape[rank + 1 :]), rhs.dtype)
        k = rank + (self.rhs_order == "gnk")
        contracting = ((len(self.batch[0]) + self.is_forward,), (k,))
        numbers = (contracting, tuple(tuple(pair[i] for pair in shared) for i in range(2)))
        of_lax = {"dimension_numbers": numbers, "precision": None, "out_sharding": None}
        return (lhs, rhs), of_lax | {"preferred_element_type": jnp.dtype(self.out_dtype)}


def local_groups(rows: int, groups: int, rest: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """group_sizes and group_offset of one device, which has some of the rows ("m") or of the matrices ("g").

    Args:
      rows: of the device.
      groups: matrices of all devices.
      rest: group_sizes and, if there is one, group_offset, of all devices.
      place: of the device.
    """
    (sizes, *offset), parts = rest, place.parts
    if parts.get("m", 1) > 1:
        begin = place.index("m") * rows
        starts, counts = bounds(sizes, rows * parts["m"])
        inside = lambda row: jnp.clip(row - begin, 0, rows)  # noqa: E731
        sizes = inside(starts + counts) - inside(starts)
    if parts.get("g", 1) > 1:
        first = place.index("g") * (groups // parts["g"])
        offset = [first[None] if not offset else offset[0] + first]
    return sizes, *offset


def _each(
    function: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    dims: Sequence[tuple[int, ...]],
    rank: int,
    dim: int = 0,
) -> jax.Array:
    """The results of a function for each element of the batch, in a loop; operands without a dimension stay."""
    if dim == rank:
        return function(*operands)
    mapped = [i for i, those in enumerate(dims) if dim in those]

    def one(some: list[jax.Array]) -> jax.Array:
        given = dict(zip(mapped, some, strict=True))
        return _each(function, [given.get(i, x) for i, x in enumerate(operands)], dims, rank, dim + 1)

    return lax.map(one, [operands[i] for i in mapped])
