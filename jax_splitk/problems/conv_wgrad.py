"""What is to be computed: frozen, hashable, canonical descriptions of problems."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from jax_splitk.problems.problem import MOST, ArrayTypes, brief_dtypes, nbytes, require_fields
from jax_splitk.runtime.arguments import quoted, require

Pairs = tuple[tuple[int, int], ...]

# Dtypes of a convolution's operands and of its weight gradient.
DTYPES = ("bfloat16", "float16", "float32", "float64")

PRECISIONS = ("default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """One pass of a convolution, in canonical layouts: two of its arrays are given, the third is computed.

    `lhs` is [batch, *input_spatial, in_channels] (NHWC), `rhs`, the weight, is
    [*kernel_spatial, in_channels / feature_group_count, out_channels] (HWIO), and `g`, the convolution's output or its
    cotangent, is [batch / batch_group_count, *output_spatial, out_channels]. Argument names and meanings are those of
    `jax.lax.conv_general_dilated` (the forward convolution's).

    Attributes:
      op: the operation's name.
      operands, result: which arrays are given, in the order of the custom call's buffers, and which is computed.
    """

    batch: int
    input_spatial: tuple[int, ...]
    output_spatial: tuple[int, ...]
    kernel_spatial: tuple[int, ...]
    in_channels: int
    out_channels: int
    window_strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    dtype: str
    out_dtype: str
    precision: str = "default"
    batch_group_count: int = 1

    op: ClassVar[str]
    operands: ClassVar[tuple[str, str]]
    result: ClassVar[str]

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and describe one convolution.

        For problems that come from files or command lines; those that come from arrays are right by construction.
        """
        rank = len(self.input_spatial) if isinstance(self.input_spatial, tuple) else 0
        require(1 <= rank <= 3, f"input_spatial={self.input_spatial!r}", "one to three integers of at least 0")
        window = ("kernel_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
        for name in ("input_spatial", "output_spatial", *window):
            value, least = getattr(self, name), int(name in window)
            valid = _integers(value, least) and len(value) == rank
            require(valid, f"{name}={value!r}", f"{rank} integers of at least {least}")
        sizes = ("in_channels", "out_channels", "feature_group_count", "batch_group_count")
        require_fields(self, {"batch": 0, **dict.fromkeys(sizes, 1)}, {"dtype": DTYPES, "out_dtype": DTYPES})
        pairs = self.padding if isinstance(self.padding, tuple) else ()
        valid = len(pairs) == rank and all(_integers(pair, None) and len(pair) == 2 for pair in pairs)
        require(valid, f"padding={self.padding!r}", f"{rank} pairs of integers")
        parts = self.precision.split(",") if isinstance(self.precision, str) else []
        valid = len(parts) in (1, 2) and len(set(parts)) == len(parts) and set(parts) <= set(PRECISIONS)
        require(valid, f"precision={self.precision!r}", f"{quoted(PRECISIONS)} or two different ones, 'lhs,rhs'")
        self._validate_groups()
        expected = conv_output_spatial(
            self.input_spatial,
            self.kernel_spatial,
            self.window_strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
        )
        if self.output_spatial != expected:
            raise ValueError(f"output_spatial={self.output_spatial}; the convolution gives {expected}")

    def _validate_groups(self) -> None:
        groups, batch_groups = self.feature_group_count, self.batch_group_count
        both, channels = f"feature_group_count={groups}, batch_group_count={batch_groups}", self.out_channels
        require(min(groups, batch_groups) == 1, both, "only one of them above 1")
        valid = self.in_channels % groups == 0 and channels % groups == 0
        require(valid, f"feature_group_count={groups}", "a divisor of the channels")
        valid = self.batch % batch_groups == 0 and channels % batch_groups == 0
        require(valid, f"batch_group_count={batch_groups}", "a divisor of the batch and of out_channels")

    @property
    def rank(self) -> int:
        """Number of spatial dimensions."""
        return len(self.input_spatial)

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        return (self.batch, *self.input_spatial, self.in_channels)

    @property
    def g_shape(self) -> tuple[int, ...]:
        return (self.batch // self.batch_group_count, *self.output_spatial, self.out_channels)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        return (*self.kernel_spatial, self.group_channels[0], self.out_channels)

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(getattr(self, f"{name}_shape") for name in self.operands)

    @property
    def operand_types(self) -> ArrayTypes:
        return tuple((shape, self.dtype) for shape in self.operand_shapes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return getattr(self, f"{self.result}_shape")

    @property
    def group_channels(self) -> tuple[int, int]:
        """(input, output) channels of a feature group."""
        return self.in_channels // self.feature_group_count, self.out_channels // self.feature_group_count

    @property
    def taps(self) -> int:
        """Filter taps, R*S."""
        return math.prod(self.kernel_spatial)

    @property
    def refusal(self) -> str | None:
        """None: each family says for itself what it refuses."""
        return None

    def representatives(self) -> tuple["ConvProblem", ...]:
        """Problems whose decision may hold for this one: the same sums with a filter without dilation. Padding must
        make up for the filter's reach, so that sizes stay the same."""
        if set(self.rhs_dilation) == {1}:
            return ()
        window = list(zip(self.padding, self.kernel_spatial, self.rhs_dilation, strict=True))
        if any(low % d or high % d or low + high != d * (taps - 1) for (low, high), taps, d in window if d > 1):
            return ()
        padding = tuple((low // d, high // d) for (low, high), _, d in window)
        return (dataclasses.replace(self, padding=padding, rhs_dilation=(1,) * self.rank),)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.g_shape) * self.taps * self.group_channels[0]

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: each input read once, the output written once."""
        return sum(nbytes(*array) for array in (*self.operand_types, (self.out_shape, self.out_dtype)))

    def __str__(self) -> str:
        sizes = {"lhs": self.lhs_shape, "g": self.g_shape, "kernel": self.kernel_spatial, "stride": self.window_strides}
        optional = {
            "lhs_dilation": self.lhs_dilation,
            "rhs_dilation": self.rhs_dilation,
            "groups": (self.feature_group_count,),
            "batch_groups": (self.batch_group_count,),
        }
        sizes |= {name: values for name, values in optional.items() if set(values) != {1}}
        said = [f"{name} {'x'.join(map(str, values))}" for name, values in sizes.items()]
        return " ".join([f"{self.op} {self.dtype}->{self.out_dtype}", *said])

    @property
    def brief(self) -> str:
        """The batch, the image, channels in and out, the filter, and strides, dilations and groups above 1."""
        image, taps = ("x".join(map(str, sizes)) for sizes in (self.input_spatial, self.kernel_spatial))
        moves = {"stride": self.window_strides, "lhs_dilation": self.lhs_dilation, "dilation": self.rhs_dilation}
        window = " ".join([taps, *(f"{said} {_once(values)}" for said, values in moves.items() if set(values) != {1})])
        counts = {"groups": self.feature_group_count, "batch groups": self.batch_group_count}
        groups = [f"{count} {said}" for said, count in counts.items() if count != 1]
        channels = f"{self.in_channels} -> {self.out_channels}"
        parts = (f"{self.op} {self.batch}", image, channels, window, *groups, brief_dtypes(self.dtype, self.out_dtype))
        return ", ".join(parts)


def _once(values: tuple[int, ...]) -> str:
    """One number where all are equal: "2" for (2, 2), "2x1" for (2, 1)."""
    return "x".join(map(str, values if len(set(values)) > 1 else values[:1]))


class ConvWgradProblem(ConvProblem):
    """The weight gradient of a convolution: rhs's cotangent, from lhs and g.

    As a matrix product it is D[m, n] = sum over k of A[k, m] B[k, n] with m over (filter tap, input channel),
    n over output channels and the long reduction k over (batch, output pixel): see `gemm_shape`.
    """

    op = "conv_wgrad"
    operands = ("lhs", "g")
    result = "rhs"

    @property
    def reduction_size(self) -> int:
        """Length of the reduction, N*P*Q."""
        return math.prod(self.g_shape[:-1])

    @property
    def gemm_shape(self) -> tuple[int, int, int]:
        """(M, N, K) of one group's matrix product: (taps * C/groups, out_channels/groups, N*P*Q)."""
        groups = self.feature_group_count
        return self.taps * self.in_channels // groups, self.out_channels // groups, self.reduction_size


def _integers(values: object, least: int | None) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is int and (least is None or value >= least) and abs(value) < MOST for value in values
    )


def conv_output_spatial(
    input_spatial: tuple[int, ...],
    kernel_spatial: tuple[int, ...],
    window_strides: tuple[int, ...],
    padding: Pairs,
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """Spatial shape of the forward convolution's output (as lax computes it)."""
    base, window = dilated(input_spatial, lhs_dilation), dilated(kernel_spatial, rhs_dilation)
    padded = [n + int(low) + int(high) for n, (low, high) in zip(base, padding, strict=True)]
    return tuple(max((n - w) // int(s) + 1, 0) for n, w, s in zip(padded, window, window_strides, strict=True))


def dilated(sizes: Sequence[int], dilations: Sequence[int]) -> tuple[int, ...]:
    """The sizes with dilation - 1 elements put between each two; 0 stays 0."""
    return tuple(max((int(n) - 1) * int(d) + 1, 0) for n, d in zip(sizes, dilations, strict=True))
