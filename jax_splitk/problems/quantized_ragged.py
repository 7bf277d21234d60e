"""A grouped product with a stack of packed weights: a frozen, hashable, canonical description."""

import dataclasses

from jax_splitk.problems.problem import ArrayTypes, brief_dtypes, nbytes, require_fields
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.quantized.packing import LAYOUT_VERSION
from jax_splitk.runtime.arguments import require


@dataclasses.dataclass(frozen=True)
class QuantizedRaggedDotProblem:
    """`jax_splitk.ragged_dot` of an activation lhs [m, k] and a stack of quantized weights [groups, k, n].

    Groups of rows are as in `RaggedDotProblem`: row r of group i gives lhs[r] @ weight[i], and rows of no group give
    zeros. Each weight is as in `QuantizedMatmulProblem`.

    Operands in the order of the custom call's buffers: lhs, words, scale, the zero point and the channel scale if there
    are any, group_sizes (int32) and, with `total_groups`, group_offset (int32 [1]). The weight's arrays have `groups`
    in front.

    Attributes:
      groups: weights of the stack.
      m: rows of lhs.
      k: columns of lhs.
      n: columns of each weight.
      dtype: of lhs.
      out_dtype: of the result.
      qtype, group_size, scale_dtype, zero_dtype, layout, channel_dtype: as in `QuantizedMatmulProblem`.
      total_groups: the groups of group_sizes where group_offset is an operand; 0 where it is not.
    """

    groups: int
    m: int
    k: int
    n: int
    dtype: str
    out_dtype: str
    qtype: str
    group_size: int
    scale_dtype: str
    zero_dtype: str = "none"
    layout: int = LAYOUT_VERSION
    channel_dtype: str = "none"
    total_groups: int = 0

    op = "quantized_ragged_dot"

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and belong together: for problems that come from
        files or command lines."""
        require_fields(self, dict.fromkeys(("groups", "m", "total_groups"), 0) | {"k": 1, "n": 1}, {})
        self.product.validate()
        valid = self.total_groups == 0 or self.total_groups >= self.groups
        require(valid, f"total_groups={self.total_groups}", f"0, or at least groups={self.groups}")

    @property
    def product(self) -> QuantizedMatmulProblem:
        """The product of all rows with one weight."""
        return QuantizedMatmulProblem(
            rows=self.m,
            k=self.k,
            features=self.n,
            x_dtype=self.dtype,
            out_dtype=self.out_dtype,
            qtype=self.qtype,
            group_size=self.group_size,
            scale_dtype=self.scale_dtype,
            zero_dtype=self.zero_dtype,
            layout=self.layout,
            channel_dtype=self.channel_dtype,
        )

    def dequantized(self, dtype: str, out_dtype: str) -> RaggedDotProblem:
        """The grouped product with the dequantized weights."""
        sizes = (self.groups, self.m, self.k, self.n)
        return RaggedDotProblem("forward", *sizes, dtype, out_dtype, "highest", total_groups=self.total_groups)

    @property
    def _whole(self) -> RaggedDotProblem:
        return self.dequantized(self.dtype, self.out_dtype)

    @property
    def has_offset(self) -> bool:
        """Whether group_offset is an operand."""
        return self.total_groups != 0

    @property
    def size_count(self) -> int:
        """Elements of group_sizes."""
        return self._whole.size_count

    @property
    def rows(self) -> int:
        """Rows that are multiplied if sizes are even and their sum is m."""
        return self._whole.rows

    @property
    def active(self) -> int:
        """The most groups that have rows."""
        return min(self.groups, self.m)

    @property
    def operand_types(self) -> ArrayTypes:
        lhs, *weight = self.product.operand_types
        stacked = (((self.groups, *shape), dtype) for shape, dtype in weight)
        return lhs, *stacked, *self._whole.operand_types[2:]

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.m, self.n)

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform serves the problem; None if one may."""
        return self._whole.refusal or self.product.refusal

    @property
    def flops(self) -> int:
        return self._whole.flops

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: the rows of the groups and the weights that have rows read
        once, the output written once."""
        p, one = self._whole, self.product
        arrays = [((self.m, self.k), self.dtype), (one.out_shape, self.out_dtype)]
        weight = one.bytes_moved - sum(nbytes(*array) for array in arrays)
        rows = nbytes((p.rows, self.k), self.dtype)
        sizes = sum(nbytes(*array) for array in p.operand_types[2:])
        return rows + min(self.groups, p.rows) * weight + sizes + nbytes(self.out_shape, self.out_dtype)

    def __str__(self) -> str:
        of = f" of {self.total_groups}" if self.has_offset else ""
        return (
            f"{self.op} {self.dtype}->{self.out_dtype} {self.m}x{self.k}x{self.n} {self.groups}{of} groups "
            f"{self.product.weight}"
        )

    @property
    def brief(self) -> str:
        """Rows, k, n and groups, and what the weights are made of."""
        weight, dtypes = self.product.brief_weight, brief_dtypes(self.dtype, self.out_dtype)
        return f"{self.op} {self.m} x {self.k} x {self.n}, {self.groups} groups, {weight}, {dtypes}"
