"""A grouped matrix product, as kernels see it: a frozen, hashable, canonical description."""

import dataclasses
from typing import Any, Literal

from jax_splitk.problems.conv_wgrad import DTYPES, PRECISIONS
from jax_splitk.problems.dot_general import E4M3
from jax_splitk.problems.problem import ArrayTypes, brief_dtypes, nbytes, require_fields
from jax_splitk.runtime.arguments import require

Mode = Literal["forward", "rhs_gradient"]
MODES: tuple[Mode, ...] = ("forward", "rhs_gradient")
# The orders of rhs's dimensions in memory that a forward product may have.
RHS_ORDERS = ("gkn", "gnk")


@dataclasses.dataclass(frozen=True)
class RaggedDotProblem:
    """One pass of `lax.ragged_dot`: a matrix product for each group of neighbouring rows.

    Group i is rows start[i] to start[i] + size[i] of the operands, where start[i] is the sum of the sizes before it. A
    negative size counts as 0, and rows at and beyond m belong to no group, whatever the sizes are.

    "forward": lhs [m, k] and rhs [groups, k, n] give out [m, n]. Row r of group i is lhs[r] @ rhs[i]; rows of no group
    are zeros. The lhs gradient is a forward product of the cotangent and of rhs with k and n swapped, which is the same
    array in the other `rhs_order`.

    "rhs_gradient": lhs [m, k] and rhs [m, n] give out [groups, k, n], whose matrix i is the sum over the rows r of
    group i of the outer products of lhs[r] and rhs[r]: zeros for an empty group.

    Rows of no group never affect the result, even if they hold NaN.

    Operands in the order of the custom call's buffers: lhs, rhs, group_sizes (int32 [groups]). With `total_groups`
    group_sizes is int32 [total_groups], and group_offset (int32 [1]) follows: group i of this problem is then group
    group_offset + i of group_sizes, and it is empty if that group does not exist.

    Attributes:
      mode: "forward" or "rhs_gradient".
      groups: matrices of a forward product's rhs, or of a rhs gradient's result.
      m: rows of lhs.
      k: columns of lhs.
      n: columns of the other matrices.
      dtype: of lhs and rhs.
      out_dtype: of the result. Sums are float32, or float64 where one of the dtypes is.
      precision: "default", "high" or "highest"; for float32 operands, and "highest" for a rhs gradient of 16-bit parts
        of such operands (`ragged_parts`), whose sums are then as exact as float32.
      rhs_order: the dimensions of a forward product's rhs in memory, the last one contiguous; "gkn" or "gnk". "gkn" for
        a rhs gradient.
      total_groups: the groups of group_sizes where group_offset is an operand; 0 where it is not.
    """

    mode: Mode
    groups: int
    m: int
    k: int
    n: int
    dtype: str
    out_dtype: str
    precision: str = "default"
    rhs_order: str = "gkn"
    total_groups: int = 0

    op = "ragged_dot"

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and belong together: for problems that come from
        files or command lines."""
        choices: dict[str, Any] = {
            "mode": MODES,
            "dtype": (*DTYPES, E4M3),
            "out_dtype": DTYPES,
            "precision": PRECISIONS,
            "rhs_order": RHS_ORDERS if self.mode == "forward" else RHS_ORDERS[:1],
        }
        require_fields(self, dict.fromkeys(("groups", "m", "k", "n", "total_groups"), 0), choices)
        valid = self.total_groups == 0 or self.total_groups >= self.groups
        require(valid, f"total_groups={self.total_groups}", f"0, or at least groups={self.groups}")

    @property
    def has_offset(self) -> bool:
        """Whether group_offset is an operand."""
        return self.total_groups != 0

    @property
    def size_count(self) -> int:
        """Elements of group_sizes."""
        return self.total_groups if self.has_offset else self.groups

    @property
    def lhs_shape(self) -> tuple[int, int]:
        return (self.m, self.k)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        """The shape of rhs in memory."""
        if self.mode == "rhs_gradient":
            return (self.m, self.n)
        return (self.groups, self.k, self.n) if self.rhs_order == "gkn" else (self.groups, self.n, self.k)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.m, self.n) if self.mode == "forward" else (self.groups, self.k, self.n)

    @property
    def operand_types(self) -> ArrayTypes:
        sizes = ((self.size_count,), "int32")
        offset = (((1,), "int32"),) if self.has_offset else ()
        return (self.lhs_shape, self.dtype), (self.rhs_shape, self.dtype), sizes, *offset

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform serves the problem; None if one may."""
        sizes = (self.groups, self.m, self.k, self.n)
        if any(isinstance(size, int) and size == 0 for size in sizes):
            return f"an empty product, {self.m}x{self.k} by {self.groups} of {self.k}x{self.n}"
        return None

    @property
    def rows(self) -> int:
        """Rows that are multiplied if sizes are even and their sum is m."""
        return -(-self.m * self.groups // self.total_groups) if self.has_offset else self.m

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: the rows of the groups and the matrices that have rows read
        once, the output written once."""
        read = self.rows * self.k
        read += min(self.groups, self.rows) * self.k * self.n if self.mode == "forward" else self.rows * self.n
        sizes, *rest = self.operand_types[2:]
        others = (sizes, *rest, (self.out_shape, self.out_dtype))
        return nbytes((read,), self.dtype) + sum(nbytes(*array) for array in others)

    def __str__(self) -> str:
        order = f" {self.rhs_order}" if self.mode == "forward" else ""
        of = f" of {self.total_groups}" if self.has_offset else ""
        precision = "" if self.precision == "default" else f" {self.precision}"
        sizes = f"{self.m}x{self.k}x{self.n} {self.groups}{of} groups"
        return f"ragged_dot {self.mode} {self.dtype}->{self.out_dtype} {sizes}{order}{precision}"

    @property
    def brief(self) -> str:
        """The pass, rows, k, n and groups."""
        mode = self.mode.replace("_", " ")
        dtypes = brief_dtypes(self.dtype, self.out_dtype)
        return f"ragged_dot {mode} {self.m} x {self.k} x {self.n}, {self.groups} groups, {dtypes}"
