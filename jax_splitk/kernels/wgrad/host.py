"""The `host` weight gradient: split-k over XLA's CPU threads, on SciPy's sgemm (see ffi/host_wgrad.cc).

The method is the usual one of im2col and GEMM (Chellapilla, Puri, Simard 2006, "High performance
convolutional neural networks for document processing"), a block of output pixels at a time, with the long
reduction over output pixels cut into splits whose f32 partial sums a second pass adds in a fixed order, as in
CUTLASS's parallel split-k.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jax_splitk.kernels import host
from jax_splitk.kernels.host import HostFamily, aligned, ceil_div
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import Target

_DTYPES = ("float32", "bfloat16", "float16")

# The constants of the workspace formula; ffi/host_wgrad.cc has the same.
_TILE = 64
_CHUNK = 512
_TASKS = 32
_HALF_TASKS = 8
_MIN_BLOCK, _MAX_BLOCK = 8, 4096
_MIN_GEMM_OUT, _MIN_GEMM_IN = 4, 8

# Per second and core, as in kernels/host.py: flops and bytes.
_GEMM_RATE = 1.1e11
_DEPTHWISE_RATE = 1.5e10
_GATHER_RATE = 4e9
_PACK_RATE = 1.5e10

# Input times output channels from which a dense convolution whose windows overlap is left to XLA: 64 by 64, and 64 by
# 128 for 16 bits, which XLA converts, too.
_WIDE, _HALF_WIDE = 4096, 8192


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut: `splits` partial sums of the reduction, `block` of its rows packed at a time.

    The result is bitwise determined by the two, whatever the number of threads.
    """

    splits: int
    block: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Twin of `SetLayout` in ffi/host_wgrad.cc, which explains the fields and refuses any other size."""

    direct: bool
    slices: int
    slots: int
    partial_bytes: int
    slot_bytes: int
    total_bytes: int


def _layout(problem: ConvWgradProblem, config: Config) -> _Layout:
    m, n, _ = problem.gemm_shape
    groups = problem.feature_group_count
    direct = groups > 1 and n < _MIN_GEMM_OUT and problem.in_channels // groups < _MIN_GEMM_IN
    pieces = ceil_div(problem.out_channels if direct else m, _TILE)
    cuts = pieces if direct else pieces * groups
    tasks = _TASKS if problem.dtype == "float32" else _HALF_TASKS
    slices = max(1, min(cuts, ceil_div(tasks, config.splits)))
    slots = min(config.splits * slices, host.MAX_SLOTS)
    in_place = config.splits == 1 and problem.out_dtype == "float32"
    partial_bytes = 0 if in_place else aligned(4 * m * problem.out_channels)
    slot_bytes = aligned(16 * config.block if direct else 4 * config.block * min(m, _TILE))
    if not direct and problem.dtype != "float32":
        slot_bytes += aligned(4 * config.block * min(n, _CHUNK))
    total_bytes = host.ALIGN + config.splits * partial_bytes + slots * slot_bytes
    return _Layout(direct, slices, slots, partial_bytes, slot_bytes, total_bytes)


def _most_splits(problem: ConvWgradProblem) -> int:
    return min(max(problem.reduction_size, 1), host.MAX_SPLITS)


def _work_seconds(problem: ConvWgradProblem, config: Config, layout: _Layout) -> float:
    """What the first phase would take on one thread: products, packing, partial sums through caches."""
    m, n, rows = problem.gemm_shape
    groups = problem.feature_group_count
    blocks = config.splits * max(ceil_div(rows, config.splits * config.block), 1)
    seconds = blocks * 8 * m * problem.out_channels / host.PARTIAL_RATE
    if layout.direct:
        depthwise = n == 1 and problem.in_channels == groups
        return seconds + problem.flops / (_DEPTHWISE_RATE if depthwise else _GATHER_RATE)
    packed = 4 * rows * m * groups * ceil_div(n, _CHUNK)
    if problem.dtype != "float32":
        # Every slice of a group converts the group's g for itself.
        packed += 4 * rows * n * max(groups, layout.slices)
    return seconds + problem.flops / _GEMM_RATE + packed / _PACK_RATE


def _wide_refusal(problem: ConvWgradProblem) -> str | None:
    """Why XLA:CPU's own product is faster, None where it is not.

    As measured it is so for overlapping windows in one or two dimensions, where we copy each of them. Strides slow XLA
    down, and windows that do not overlap (1x1), input dilation and three dimensions much more.
    """
    overlap = math.prod(problem.kernel_spatial) > math.prod(problem.window_strides)
    if not overlap or problem.feature_group_count > 1 or problem.rank > 2 or set(problem.lhs_dilation) != {1}:
        return None
    most = math.prod(problem.window_strides) * (_WIDE if problem.dtype == "float32" else _HALF_WIDE)
    channels = problem.in_channels * problem.out_channels
    if channels < most:
        return None
    sizes = f"input channels * output channels = {problem.in_channels} * {problem.out_channels} = {channels}"
    return f"{sizes} of a dense {problem.dtype} convolution are faster on XLA:CPU; preferred below {most}"


class WgradHost(HostFamily[ConvWgradProblem, Config]):
    """Products and sums are always f32, whatever `problem.precision` says."""

    name = "wgrad_host"
    ABI = 1
    handler = HOST_WGRAD_TARGET

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        for argument in ("dtype", "out_dtype"):
            value = getattr(problem, argument)
            if value not in _DTYPES:
                return f"{argument}={value} is not one of {', '.join(_DTYPES)}."
        if problem.batch_group_count != 1:
            return f"batch_group_count={problem.batch_group_count}; only 1 is supported"
        if not 1 <= problem.rank <= 3:
            return f"The convolution has {problem.rank} spatial dimensions; 1 to 3 are supported"
        largest = max(*problem.lhs_shape, *problem.g_shape, *problem.out_shape)
        attributes = (problem.window_strides, problem.lhs_dilation, problem.rhs_dilation, *problem.padding)
        largest = max(largest, *(abs(value) for values in attributes for value in values))
        if largest > host.INT32_MAX:
            return f"A size, stride, dilation or padding is {largest}; BLAS's 32-bit integers allow {host.INT32_MAX}."
        return None

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        most = _most_splits(problem)
        if not 1 <= config.splits <= most:
            return f"splits={config.splits} is outside 1..{most} (the reduction size, at most {host.MAX_SPLITS})."
        if not _MIN_BLOCK <= config.block <= _MAX_BLOCK or config.block % _MIN_BLOCK:
            return f"block={config.block} is not a multiple of {_MIN_BLOCK} in {_MIN_BLOCK}..{_MAX_BLOCK}."
        return None

    def unmeasured_refusal(self, problem: ConvWgradProblem) -> str | None:
        """Where XLA is faster on most such problems.

        Measured on 2 cores over a grid of channels (3 to 640), sizes (4 to 56) and batches, as XLA's time over ours:
        1x1 filters 0.9 to 10, three dimensions and input dilation 2 to 14, few input channels 0.5 to 3.4. Dense 3x3 and
        5x5 filters of 16 to 64 channels 0.4 to 2.8, of more 0.4 to 1.3 (one image up to 2.8): the latter are XLA's, and
        those of 64 in float32.
        """
        m, _, rows = problem.gemm_shape
        wide = _wide_refusal(problem)
        if wide is None and rows * m * problem.out_channels < 256:
            return "the problem is so small that the call itself is what takes time"
        return wide

    def candidates(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """Powers of two and multiples of the thread count for `splits`."""
        count = target.cores
        splits = {2**i for i in range(9)} | {count, 2 * count, 4 * count}
        # The direct loop wants its rows in the first-level cache, sgemm wants long sums.
        blocks = (64, 128) if _layout(problem, Config(1, 128)).direct else (128, 256, 512)
        # A split shorter than its block would only waste workspace.
        rows = problem.reduction_size
        configs = [Config(s, b) for s in sorted(splits) for b in blocks if s == 1 or s * b <= rows]
        return [config for config in configs if self.config_refusal(problem, config) is None]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """Splits and block doubled and halved."""
        splits = host.halved_and_doubled(config.splits, _most_splits(problem))
        blocks = host.halved_and_doubled(config.block, _MAX_BLOCK, _MIN_BLOCK)
        found = [dataclasses.replace(config, splits=s) for s in splits]
        return found + [dataclasses.replace(config, block=b) for b in blocks]

    def estimate(self, problem: ConvWgradProblem, config: Config, target: Target) -> float:
        """The first phase's work, stretched by how unevenly its tasks fall on the threads, then the partials' sum."""
        layout = _layout(problem, config)
        m = problem.gemm_shape[0]
        cuts = (
            ceil_div(problem.out_channels, _TILE)
            if layout.direct
            else (ceil_div(m, _TILE) * problem.feature_group_count)
        )
        share = ceil_div(max(cuts, 1), layout.slices) / max(cuts, 1)
        if layout.direct:
            share = min(1.0, share * max(cuts, 1) * _TILE / max(problem.out_channels, 1))
        rounds = ceil_div(config.splits * layout.slices, min(target.cores, layout.slots))
        task = host.TASK_SECONDS + _work_seconds(problem, config, layout) * share / config.splits
        return host.CALL_SECONDS + rounds * task + host.sum_seconds((config.splits + 1) * layout.partial_bytes, target)

    def workspace_bytes(self, problem: ConvWgradProblem, config: Config) -> int:
        """The splits' partial sums, each thread's packing buffers, alignment slack."""
        return _layout(problem, config).total_bytes

    def attributes(self, problem: ConvWgradProblem, config: Config) -> dict[str, Any]:
        def ints(*values: int) -> np.ndarray:
            return np.array(values, dtype=np.int64)

        return {
            "window_strides": ints(*problem.window_strides),
            "padding": ints(*(value for pair in problem.padding for value in pair)),
            "lhs_dilation": ints(*problem.lhs_dilation),
            "rhs_dilation": ints(*problem.rhs_dilation),
            "feature_group_count": np.int64(problem.feature_group_count),
            "splits": np.int64(config.splits),
            "block": np.int64(config.block),
        }


FAMILY = WgradHost(Config)
