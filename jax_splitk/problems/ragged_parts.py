"""Grouped products of float32 numbers by kernels that multiply bfloat16.

A float32 number is the sum of three bfloat16 numbers, its parts. A product of two numbers is the sum of the products of
their parts, of which the smallest are left out, as in XLA's dot algorithms BF16_BF16_F32_X3 and BF16_BF16_F32_X6. One
product of 16-bit operands adds all of them in float32: the parts lie side by side along the dimension that is summed.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import _compat

# By precision, the parts of lhs and of rhs that are multiplied, the smallest products first: the tensor cores truncate
# their sums, and lose least of a small sum.
_THREE = ((1, 0), (0, 1), (0, 0))
_PAIRS = {"default": _THREE, "high": _THREE, "highest": ((2, 0), (0, 2), (1, 1), *_THREE)}

# By precision, the most elements of k that the tensor cores add in a row. More are summed in pieces, which XLA adds in
# float32. With 256 elements truncation costs no more than the rounding of a sum in float32.
_PIECE = {"default": 8192, "high": 8192, "highest": 256}
_MULTIPLE = 8  # of which kernels take k

_OUT_DTYPES = ("float32", "bfloat16", "float16")
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)

# A grouped product of the operands of a problem.
Product = Callable[..., jax.Array]


def split(x: jax.Array) -> list[jax.Array]:
    """Four bfloat16 arrays: the parts of a float32 array, the largest first, and the largest part once more.

    The parts of finite numbers from 2^-102 on add up to these numbers exactly. Numbers that are not finite have
    only zeros as parts; only the last array has them.
    """
    finite, found = jnp.isfinite(x), []
    rest = jnp.where(finite, x, 0)
    for _ in range(3):
        # XLA may remove a conversion to bfloat16 and back. It keeps `reduce_precision`.
        part = lax.reduce_precision(jnp.clip(rest, -_LARGEST, _LARGEST), 8, 7)
        found.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return [*found, jnp.where(finite, found[0], x.astype(jnp.bfloat16))]


@dataclasses.dataclass(frozen=True)
class InParts:
    """A grouped product of float32 operands, in terms of a product of their parts.

    Attributes:
      whole: the problem with float32 operands.
    """

    whole: RaggedDotProblem

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """The parts of lhs and of rhs that are multiplied."""
        return _PAIRS[self.whole.precision]

    @property
    def pieces(self) -> int:
        """The number of products that are added."""
        return -(-self.whole.k // _PIECE[self.whole.precision]) if self.whole.mode == "forward" else 1

    @property
    def _length(self) -> int:
        """Elements of k of a piece."""
        return -(-self.whole.k // (self.pieces * _MULTIPLE)) * _MULTIPLE

    @property
    def problem(self) -> RaggedDotProblem:
        """The product of a piece: k times as long for each pair of parts, or m for a gradient of rhs."""
        p, times = self.whole, len(self.pairs)
        if p.mode == "forward":
            out_dtype = p.out_dtype if self.pieces == 1 else "float32"
            return dataclasses.replace(
                p, k=self._length * times, dtype="bfloat16", out_dtype=out_dtype, precision="default"
            )
        precision = "highest" if p.precision == "highest" else "default"
        return dataclasses.replace(p, m=p.m * times, dtype="bfloat16", precision=precision)

    @property
    def note(self) -> str:
        """What is done with the operands, for `explain`."""
        pieces = f", in {self.pieces} pieces of k" if self.pieces > 1 else ""
        return f"float32 as {len(self.pairs)} products of bfloat16 parts{pieces}"

    def __call__(
        self, product: Product, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *group_offset: jax.Array
    ) -> jax.Array:
        """The result of `whole`, by a function that computes `problem`."""
        if self.whole.mode == "rhs_gradient":
            # The parts of a row follow each other: so they stay in the row's group.
            stacked = (jnp.stack(self._parts(x, i), 1) for i, x in enumerate((lhs, rhs)))
            left, right = (x.reshape(-1, x.shape[-1]) for x in stacked)
            return product(left, right, jnp.clip(group_sizes, 0, self.whole.m) * len(self.pairs), *group_offset)
        if self.pieces == 1:
            return self._piece(product, lhs, rhs, group_sizes, *group_offset)
        k_of_rhs, missing = self.whole.rhs_order.index("k"), self.pieces * self._length - self.whole.k
        lhs, rhs = _extended(lhs, 1, missing), _extended(rhs, k_of_rhs, missing)

        def add_piece(i: jax.Array, sums: jax.Array) -> jax.Array:
            left = lax.dynamic_slice_in_dim(lhs, i * self._length, self._length, 1)
            right = lax.dynamic_slice_in_dim(rhs, i * self._length, self._length, k_of_rhs)
            return sums + self._piece(product, left, right, group_sizes, *group_offset)

        zeros = _compat.vary_like(jnp.zeros(self.whole.out_shape, jnp.float32), lhs, rhs, group_sizes)
        return lax.fori_loop(0, self.pieces, add_piece, zeros).astype(self.whole.out_dtype)

    def _piece(self, product: Product, lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        k_of_rhs = self.whole.rhs_order.index("k")
        lhs, rhs = (_extended(x, axis, -x.shape[axis] % _MULTIPLE) for x, axis in ((lhs, 1), (rhs, k_of_rhs)))
        left = jnp.concatenate(self._parts(lhs, 0), 1)
        return product(left, jnp.concatenate(self._parts(rhs, 1), k_of_rhs), *rest)

    def _parts(self, x: jax.Array, operand: int) -> list[jax.Array]:
        """The part of an operand in each pair. Numbers that are not finite are in the last pair alone: there they are
        multiplied with the other numbers, and not with small parts of these, which may be zero."""
        *parts, largest = split(x)
        return [*(parts[pair[operand]] for pair in self.pairs[:-1]), largest]


def in_parts(problem: RaggedDotProblem) -> InParts | None:
    """The product in parts; None for other operands than float32, and for a single group: XLA multiplies each row with
    the matrix of every group, and one group is fast."""
    several = problem.groups > 1 or problem.has_offset
    return InParts(problem) if problem.dtype == "float32" and problem.out_dtype in _OUT_DTYPES and several else None


def _extended(x: jax.Array, axis: int, by: int) -> jax.Array:
    """The array with `by` zeros behind it along an axis."""
    return jnp.pad(x, [(0, by if i == axis else 0) for i in range(x.ndim)]) if by else x
