"""What is to be computed: frozen, hashable, canonical descriptions of problems."""

import dataclasses
import math
from collections.abc import Sequence

from jax import numpy as jnp

Pairs = tuple[tuple[int, int], ...]

# Of a convolution's operands and of its weight gradient.
DTYPES = ("bfloat16", "float16", "float32", "float64")

PRECISIONS = ("default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class ConvWgradProblem:
    """The weight gradient of a convolution, in canonical layouts.

    `lhs` is [batch, *input_spatial, in_channels] (NHWC), `g`, the cotangent of the convolution's output, is
    [batch / batch_group_count, *output_spatial, out_channels], and the result is
    [*kernel_spatial, in_channels / feature_group_count, out_channels] (HWIO). Argument names and meanings are
    those of `jax.lax.conv_general_dilated` (the forward convolution's).

    As a matrix product it is D[m, n] = sum over k of A[k, m] B[k, n] with m over (filter tap, input channel),
    n over output channels and the long reduction k over (batch, output pixel): see `gemm_shape`.
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

    op = "conv_wgrad"

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and describe one convolution.

        For problems that come from files or command lines; those that come from arrays are right by construction.
        """
        rank = len(self.input_spatial) if isinstance(self.input_spatial, tuple) else 0
        vectors = ("output_spatial", "kernel_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
        counts = ("batch", "in_channels", "out_channels", "feature_group_count", "batch_group_count")
        if not 1 <= rank <= 3:
            raise ValueError(f"input_spatial={self.input_spatial!r}; accepted: one to three integers of at least 0")
        for name in ("input_spatial", *vectors):
            value = getattr(self, name)
            least = 0 if name in ("input_spatial", "output_spatial") else 1
            if not _integers(value, least) or len(value) != rank:
                raise ValueError(f"{name}={value!r}; accepted: {rank or 'one to three'} integers of at least {least}")
        for name in counts:
            least = 0 if name == "batch" else 1
            if not _integers((getattr(self, name),), least):
                raise ValueError(f"{name}={getattr(self, name)!r}; accepted: an integer of at least {least}")
        if (
            not isinstance(self.padding, tuple)
            or len(self.padding) != rank
            or not all(isinstance(pair, tuple) and len(pair) == 2 and _integers(pair, None) for pair in self.padding)
        ):
            raise ValueError(f"padding={self.padding!r}; accepted: {rank} pairs of integers")
        for name in ("dtype", "out_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in DTYPES:
                raise ValueError(f"{name}={value!r}; accepted: {', '.join(map(repr, DTYPES))}")
        parts = self.precision.split(",") if isinstance(self.precision, str) else []
        if len(parts) not in (1, 2) or len(set(parts)) != len(parts) or not set(parts) <= set(PRECISIONS):
            accepted = f"{', '.join(map(repr, PRECISIONS))} or two different ones, 'lhs,rhs'"
            raise ValueError(f"precision={self.precision!r}; accepted: {accepted}")
        if min(self.feature_group_count, self.batch_group_count) > 1:
            both = f"feature_group_count={self.feature_group_count}, batch_group_count={self.batch_group_count}"
            raise ValueError(f"{both}; accepted: only one of them above 1")
        if self.in_channels % self.feature_group_count or self.out_channels % self.feature_group_count:
            raise ValueError(f"feature_group_count={self.feature_group_count}; accepted: a divisor of the channels")
        if self.batch % self.batch_group_count or self.out_channels % self.batch_group_count:
            raise ValueError(
                f"batch_group_count={self.batch_group_count}; accepted: a divisor of the batch and of out_channels"
            )
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
    def out_shape(self) -> tuple[int, ...]:
        return (*self.kernel_spatial, self.group_channels[0], self.out_channels)

    @property
    def group_channels(self) -> tuple[int, int]:
        """(input, output) channels of a feature group."""
        return self.in_channels // self.feature_group_count, self.out_channels // self.feature_group_count

    @property
    def taps(self) -> int:
        """Filter taps, R*S."""
        return math.prod(self.kernel_spatial)

    @property
    def reduction_size(self) -> int:
        """Length of the reduction, N*P*Q."""
        return math.prod(self.g_shape[:-1])

    @property
    def gemm_shape(self) -> tuple[int, int, int]:
        """(M, N, K) of one group's matrix product: (taps * C/groups, out_channels/groups, N*P*Q)."""
        groups = self.feature_group_count
        return self.taps * self.in_channels // groups, self.out_channels // groups, self.reduction_size

    @property
    def limit(self) -> str | None:
        """Why no kernel on any platform takes it: each family says for itself."""
        return None

    @property
    def flops(self) -> int:
        m, n, k = self.gemm_shape
        return 2 * m * n * k * self.feature_group_count

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move: each input read once, the output written once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        inputs = (math.prod(self.lhs_shape) + math.prod(self.g_shape)) * itemsize
        return inputs + math.prod(self.out_shape) * jnp.dtype(self.out_dtype).itemsize

    def __str__(self) -> str:
        def times(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        text = (
            f"conv_wgrad {self.dtype}->{self.out_dtype} lhs {times(self.lhs_shape)} g {times(self.g_shape)} "
            f"kernel {times(self.kernel_spatial)} stride {times(self.window_strides)}"
        )
        if any(d != 1 for d in self.lhs_dilation):
            text += f" lhs_dilation {times(self.lhs_dilation)}"
        if any(d != 1 for d in self.rhs_dilation):
            text += f" rhs_dilation {times(self.rhs_dilation)}"
        if self.feature_group_count != 1:
            text += f" groups {self.feature_group_count}"
        if self.batch_group_count != 1:
            text += f" batch_groups {self.batch_group_count}"
        return text


def _integers(values: object, least: int | None) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is int and (least is None or value >= least) and abs(value) < 2**40 for value in values
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
