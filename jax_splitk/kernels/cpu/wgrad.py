"""The `host` weight gradient: split-k over XLA's CPU threads (see ffi/host_wgrad.cc).

The method is the usual one of im2col and a matrix product (Chellapilla, Puri, Simard 2006, "High performance
convolutional neural networks for document processing"), for a block of output pixels at a time. The long reduction over
output pixels is cut into splits. A second pass adds their partial sums in order, as in CUTLASS's parallel split-k.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jax_splitk.kernels.base import host, refusals
from jax_splitk.kernels.base.family import field_refusal
from jax_splitk.kernels.base.geometry import geometry
from jax_splitk.kernels.base.host import HostFamily, Product
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import Target

# ffi/host_wgrad.cc has the same.
_ROW_BLOCK = 96

# And ffi/host_convolution.h.
_MIN_BLOCK, _MAX_BLOCK = 8, 4096

_SPAN_CHANNELS = 32

# A dense convolution with overlapping windows is left to XLA from this product of input and output channels on.
_WIDE = 8192


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the work: `splits` partial sums of the reduction, `block` of its pixels loaded at a time.
    `splits` alone determines the bits of the result.
    """

    splits: int
    block: int


def _most_splits(problem: ConvWgradProblem) -> int:
    return min(max(problem.reduction_size, 1), host.MAX_SPLITS)


def _span(problem: ConvWgradProblem) -> int:
    """How many small groups are computed together, so that their channels fill a vector; most of these products are not
    used."""
    groups, channels = problem.feature_group_count, max(*problem.group_channels, 1)
    return max(span for span in range(1, max(1, _SPAN_CHANNELS // channels) + 1) if groups % span == 0)


def geometry_refusal(problem: ConvProblem) -> str | None:
    """Why this geometry cannot be computed here in any pass."""
    reason = refusals.dtypes(problem, tuple(OUT_CODES)) or refusals.batch_groups(problem)
    if (reason := reason or refusals.rank(problem, (1, 2, 3))) is not None:
        return reason
    largest = max(*problem.lhs_shape, *problem.g_shape, *problem.rhs_shape)
    attributes = (problem.window_strides, problem.lhs_dilation, problem.rhs_dilation, *problem.padding)
    largest = max(largest, *(abs(value) for values in attributes for value in values))
    if largest > host.INT32_MAX:
        return f"a size, stride, dilation or padding of {largest}; accepted: at most {host.INT32_MAX}"
    return None


def cut_refusal(config: Any, most: int) -> str | None:
    """Why a config's `splits` (at most `most`) or `block` is not accepted."""
    return field_refusal(config, splits=range(1, most + 1), block=range(_MIN_BLOCK, _MAX_BLOCK + 1))


def geometry_attribute(p: ConvProblem) -> np.ndarray:
    """The attribute for `Geometry` of ffi/host_convolution.h."""
    g = geometry(p, 3)
    sizes = (p.batch, p.in_channels, p.out_channels, *g.size, *g.out, *g.kernel)
    steps = (p.feature_group_count, *g.stride, *g.lhs_dilation, *g.dilation, *g.pad)
    return np.array((*sizes, *steps), np.int64)


class WgradHost(HostFamily[ConvWgradProblem, Config]):
    """Products and sums are always float32, whatever `problem.precision` says."""

    name = "wgrad_host"
    ABI = 3
    handler = HOST_WGRAD_TARGET

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return geometry_refusal(problem)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        return cut_refusal(config, _most_splits(problem))

    def why_xla_untuned(self, problem: ConvWgradProblem) -> str | None:
        """Problems for which XLA is mostly faster."""
        m, _, rows = problem.gemm_shape
        if rows * m * problem.out_channels < 256:
            return "the problem is so small that the call itself takes most of the time"
        overlap = math.prod(problem.kernel_spatial) > math.prod(problem.window_strides)
        plain = problem.feature_group_count == 1 and problem.rank < 3 and set(problem.lhs_dilation) == {1}
        channels, most = problem.in_channels * problem.out_channels, math.prod(problem.window_strides) * _WIDE
        if not (overlap and plain) or channels < most:
            return None
        sizes = f"input channels * output channels = {problem.in_channels} * {problem.out_channels} = {channels}"
        return f"{sizes} of a dense convolution are faster on XLA:CPU; preferred below {most}"

    def divisions(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """`splits` are powers of two and multiples of the number of threads."""
        count = target.cores
        splits = {2**i for i in range(9)} | {count, 2 * count, 4 * count}
        # A split shorter than its block would only waste workspace.
        rows = problem.reduction_size
        return [Config(s, b) for s in sorted(splits) for b in (64, 128, 256) if s == 1 or s * b <= rows]

    def product(self, problem: ConvWgradProblem, config: Config) -> Product:
        m, n, k = problem.gemm_shape
        span, groups = _span(problem), problem.feature_group_count
        return Product(span * m, k, span * n, groups // span, config.splits, config.block, _ROW_BLOCK, span)

    def attributes(self, problem: ConvWgradProblem) -> dict[str, Any]:
        return {
            "geometry": geometry_attribute(problem),
            "span": np.int64(_span(problem)),
        }


FAMILY = WgradHost(Config)
