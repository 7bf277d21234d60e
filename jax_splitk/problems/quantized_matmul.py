"""What a product with a packed quantized weight computes: a frozen, hashable, canonical description."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jax_splitk.problems.problem import LATER, ArrayTypes, brief_dtypes, nbytes, require_fields
from jax_splitk.quantized.array import GROUP_SIZES
from jax_splitk.quantized.formats import FLOAT_DTYPES, FORMATS, SCALE_DTYPES
from jax_splitk.quantized.packing import LAYOUT_VERSION, packed_groups, packed_shapes, tiles
from jax_splitk.runtime.arguments import require

X_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
OUT_DTYPES = ("bfloat16", "float16", "float32")
COMPUTE_DTYPES = ("float8_e4m3fn",)
# Rows that fill tiles of the kernels. Beyond 64 all tiles but the one of 16 rows are multiples of 32 rows.
_FULL_TILES = (8, 16, 32, 64, 96, 128, 192, 256)
_TILE_ROWS = 32
_NARROWEST_TILE = 16  # where there is more than one


def refusal(x_shape: Sequence[Any], x_dtype: str, w_shape: Sequence[Any], layout: int | None) -> str | None:
    """Why no kernel on any platform takes x [..., k] and w [k, features]; None if one may.

    `layout` is that of a packed weight, None for one that is not packed. A symbolic size is taken for a positive one.
    """
    if layout is None:
        return "kernels take packed weights; use jax_splitk.prepack, once"
    if x_dtype not in X_DTYPES:
        return f"x of dtype {x_dtype}; kernels take {', '.join(X_DTYPES)}"
    empty = [size for size in (*x_shape, *w_shape) if isinstance(size, int) and size == 0]
    return f"an empty product, x of shape {tuple(x_shape)} and w of shape {tuple(w_shape)}" if empty else None


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulProblem:
    """x @ w for an activation x [rows, k] and a packed weight w [k, features] (`prepack`, `LAYOUT_VERSION`).

    Products that are XLA's on every platform (see `refusal`) are described too, to appear where the others do.

    As the kernels see it, it is D[m, n] = sum over k of A[m, k] B[k, n] with A the transposed weight (m over features),
    B the transposed activation (n over rows). The result is [rows, features].

    Attributes:
      rows: n, number of activation rows.
      k: length of the reduction; any positive number. x's rows are contiguous, k elements apart.
      features: m.
      x_dtype, out_dtype: dtypes of x and of the result.
      qtype: the weight's format, a name in `FORMATS`.
      group_size: how many k share a scale: 16, 32, 64, 128, or k (per channel); any, for a weight that is not packed.
      scale_dtype: dtype of the scales.
      zero_dtype: dtype of the packed zero points, or "none".
      channel_dtype: "float32" if each feature has a second scale, else "none".
      layout: version of the packed order; 0 for a weight that is not packed.
      compute_dtype: "float8_e4m3fn" if kernels may round x and the weight to it, each row of x and each feature over a
        power of two; or "none".
    """

    rows: int
    k: int
    features: int
    x_dtype: str
    out_dtype: str
    qtype: str
    group_size: int
    scale_dtype: str
    zero_dtype: str = "none"
    layout: int = LAYOUT_VERSION
    channel_dtype: str = "none"
    compute_dtype: str = dataclasses.field(default="none", metadata=LATER)

    op = "quantized_matmul"
    transposed: ClassVar[bool] = False  # whether the product is with w.T

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and values.

        For problems that come from files or command lines, where only those that a kernel may compute are accepted;
        those that come from arrays are right by construction.
        """
        least = {"rows": 0, "k": 1, "features": 1, "group_size": 1}
        names = {
            "x_dtype": X_DTYPES,
            "out_dtype": OUT_DTYPES,
            "qtype": tuple(FORMATS),
            "scale_dtype": SCALE_DTYPES,
            "zero_dtype": ("none", *FLOAT_DTYPES),
            "channel_dtype": ("none", "float32"),
            "compute_dtype": ("none", *COMPUTE_DTYPES),
        }
        require_fields(self, least, names)
        valid = self.zero_dtype == "none" or FORMATS[self.qtype].integer
        require(valid, f"zero_dtype={self.zero_dtype!r} with {self.qtype}", "'none', for this format")
        valid = self.group_size in (*GROUP_SIZES, self.k)
        require(valid, f"group_size={self.group_size}", f"{', '.join(map(str, GROUP_SIZES))} or k={self.k}")
        require(self.k % self.group_size == 0, f"group_size={self.group_size}", f"a divisor of k={self.k}")
        require(self.layout == LAYOUT_VERSION, f"layout={self.layout!r}", f"{LAYOUT_VERSION}")

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform takes the operands; None if one may."""
        return refusal(self.x_shape, self.x_dtype, (self.k, self.features), self.layout or None)

    def representatives(self) -> tuple["QuantizedMatmulProblem", ...]:
        """Problems whose decision may hold for this one, the one that most others share first.

        The first one has as many rows as fill the next widest tile, or, above 256 rows, a multiple of a quarter of a
        power of two: 320, 384, 448, 512, 640. The second one fills the same tiles of any width: its rows are the next
        multiple of 32.
        """
        step = max(_TILE_ROWS, 1 << max(0, (self.rows - 1).bit_length() - 3))
        coarse = next((rows for rows in _FULL_TILES if rows >= self.rows), _ceil(self.rows, step))
        rows = (coarse, _ceil(self.rows, _TILE_ROWS)) if self.rows > _FULL_TILES[3] else (coarse,)
        return tuple(dataclasses.replace(self, rows=n) for n in dict.fromkeys(rows))

    def represented(self) -> Iterator["QuantizedMatmulProblem"]:
        """Problems that this one's decision may hold for: one for each number of tiles that their rows fill."""
        for rows in range(self.rows, 0, -_NARROWEST_TILE):
            problem = dataclasses.replace(self, rows=rows)
            if self not in problem.representatives():
                break
            yield problem

    @property
    def m(self) -> int:
        """The size of the weight's dimension that the product keeps."""
        return self.features

    @property
    def contracted(self) -> int:
        """The size of the dimension that the product sums over, which is contiguous in x."""
        return self.x_shape[1]

    @property
    def bits(self) -> int:
        """Bits of an element of the weight."""
        return FORMATS[self.qtype].bits

    @property
    def feature_tiles(self) -> int:
        """Tiles of 64 features in the packed weight."""
        return tiles(self.features)

    @property
    def k_tiles(self) -> int:
        """Tiles of 64 k in the packed weight."""
        return tiles(self.k)

    @property
    def groups(self) -> int:
        """Groups in the packed scales: those of the padded k, or one per channel."""
        return packed_groups(self.k, self.group_size)

    @property
    def operand_types(self) -> ArrayTypes:
        more = [(self.scale_shape, self.zero_dtype), (self.channel_shape, self.channel_dtype)]
        weight = [(self.words_shape, "uint32"), (self.scale_shape, self.scale_dtype)]
        return (self.x_shape, self.x_dtype), *weight, *(array for array in more if array[1] != "none")

    @property
    def x_shape(self) -> tuple[int, int]:
        return (self.rows, self.k)

    @property
    def words_shape(self) -> tuple[int, int, int]:
        """The shape of the packed elements, uint32."""
        return packed_shapes((self.k, self.features), self.bits, self.group_size)[0]

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """The shape of the packed scales and zero points."""
        return packed_shapes((self.k, self.features), self.bits, self.group_size)[1]

    @property
    def channel_shape(self) -> tuple[int, int, int]:
        """The shape of the packed channel scales: that of the scales of a weight with one group."""
        return packed_shapes((self.k, self.features), self.bits, self.k)[1]

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.rows, self.features)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.features

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: each input read once, the output written once."""
        groups = (self.groups, self.features)
        arrays = [(self.x_shape, self.x_dtype), (self.out_shape, self.out_dtype), (groups, self.scale_dtype)]
        more = [(groups, self.zero_dtype), ((self.features,), self.channel_dtype)]
        arrays += [array for array in more if array[1] != "none"]
        return self.k * self.features * self.bits // 8 + sum(nbytes(*array) for array in arrays)

    def __str__(self) -> str:
        x, w = f"{self.rows}x{self.contracted}", f"{self.k}x{self.features}"
        return f"{self.op} {self.x_dtype}->{self.out_dtype} x {x} w {w} {self.weight}"

    @property
    def weight(self) -> str:
        """What the weight is made of."""
        packed = "" if self.layout else "unpacked "
        zero = "" if self.zero_dtype == "none" else f" zero {self.zero_dtype}"
        channel = "" if self.channel_dtype == "none" else f" channel {self.channel_dtype}"
        rounded = "" if self.compute_dtype == "none" else f", multiplied in {self.compute_dtype}"
        return f"{packed}{self.qtype} group {self.group_size} scale {self.scale_dtype}{zero}{channel}{rounded}"

    @property
    def brief_weight(self) -> str:
        """The weight's format, and zero points."""
        zero = "" if self.zero_dtype == "none" else " with zero points"
        rounded = "" if self.compute_dtype == "none" else " in e4m3"
        return f"{self.qtype} by {self.group_size}{zero}{rounded}"

    @property
    def brief(self) -> str:
        """Rows, k and features, and what the weight is made of."""
        dtypes = brief_dtypes(self.x_dtype, self.out_dtype)
        return f"{self.op} {self.rows}, {self.contracted} -> {self.m}, {self.brief_weight}, {dtypes}"


def _ceil(value: int, step: int) -> int:
    """The next multiple."""
    return -(-value // step) * step
