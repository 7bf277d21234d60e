"""The second way of depthwise/passes.py: forward passes and input gradients of any filter, which is read in blocks of
taps (device code: depthwise/blocked.cu).

A thread has the sums of some columns of the output in registers, and only one block of taps at a time. So the filter
may have any size and dilation, and several channels may be added to one, as the gradient of a multiplier needs it.
"""

import dataclasses
import functools
import math

from jax_splitk.kernels.base import passes
from jax_splitk.kernels.base.family import limits_refusal
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, equal_parts, geometry, moved
from jax_splitk.kernels.base.passes import output_blocks
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.work import Work
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.target import Target

FILE = "depthwise/blocked.cu"
THREADS = 256  # blocked.cu has the same
COLUMNS = (1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 32)
_MAX_STEP = 16
_MAX_BLOCK = 16  # taps, unless an input's dilation needs a multiple of more
_MAX_SUMMED = 16  # neighbouring threads load so many channels apart
_MAX_REGISTERS = 168  # of a thread, as `registers` counts them
_LANES = 32


@dataclasses.dataclass(frozen=True)
class Axes:
    """The forward pass as the device code sees it: the last axis is the one along which the filter is longest.

    Attributes:
      order: the axes of memory in the order of the device code.
      block: taps of a block.
      step: distance of neighbouring columns of a thread.
      summed: channels of the input that are added to one.
      multiplier: output channels of an input channel.
    """

    g: Geometry
    order: tuple[int, ...]
    block: int
    step: int
    summed: int
    multiplier: int


@functools.lru_cache(maxsize=4096)
def axes(p: ConvProblem) -> Axes:
    q = passes.forward(p)
    g = geometry(q, 3)
    longest = max((2, 1, 0), key=lambda axis: g.kernel[axis])
    order = (*(axis for axis in range(3) if axis != longest), longest)
    seen = moved(g, order)
    kernel, up, dilation = seen.kernel[2], seen.lhs_dilation[2], seen.dilation[2]
    block = equal_parts(kernel, _MAX_BLOCK)[0]
    if block < kernel:  # a block's taps must meet the same columns of a dilated input as the first block's
        whole = up // math.gcd(up, dilation)
        block = -(-block // whole) * whole
    step = dilation // math.gcd(dilation, seen.stride[2]) if up == 1 else 1
    summed, multiplier = max(1, q.in_channels // q.out_channels), max(1, q.out_channels // q.in_channels)
    return Axes(seen, order, min(block, kernel), step, summed, multiplier)


def _read(a: Axes, columns: int, taps: int) -> int:
    """Columns of the input that a thread reads for a block of taps."""
    up, dilation = a.g.lhs_dilation[2], a.g.dilation[2]
    if up == 1:
        apart = a.step * a.g.stride[2] // dilation
        return len({j * apart + s for j in range(columns) for s in range(taps)})
    at = {j - s * dilation for j in range(columns) for s in range(taps)}
    return sum(i % up == 0 for i in at)


def _blocks(a: Axes) -> list[int]:
    """The taps of each block of a row of the filter."""
    whole, rest = divmod(a.g.kernel[2], a.block)
    return [a.block] * whole + ([rest] if rest else [])


def registers(p: ConvProblem, columns: int, channels: int) -> int:
    """A thread's registers: sums, taps, loaded words, and others."""
    a = axes(p)
    return (columns + a.block) * channels + _read(a, columns, a.block) + 40


def _strips(a: Axes, columns: int) -> int:
    blocks = output_blocks(a.g, 2)[2]
    return -(-blocks * a.g.lhs_dilation[2] // (a.step * columns)) * a.step


def _word_block(words: int) -> int:
    return -(-words // -(-words // _LANES))


def items(p: ConvProblem, columns: int, channels: int) -> int:
    """Threads, with those of no word in the last block of words."""
    a = axes(p)
    words = passes.forward(p).out_channels // channels
    whole = -(-words // _word_block(words)) * _word_block(words)
    return a.g.batch * math.prod(a.g.out[:2]) * _strips(a, columns) * whole


def refusal(p: ConvProblem, channels: int) -> str | None:
    """Why no config can compute the problem."""
    a = axes(p)
    if (reason := passes.steps_refusal(a.g, _MAX_STEP) or passes.sizes_refusal(p, a.g)) is not None:
        return reason
    if a.summed > _MAX_SUMMED:
        return f"the gradient of {p.in_channels} channels from {p.out_channels}; accepted: up to {_MAX_SUMMED} for each"
    if (count := math.prod(p.rhs_shape)) > INT32_MAX:
        return f"{count} weights; accepted: up to {INT32_MAX}"
    up = a.g.lhs_dilation[2]
    multiples = [columns for columns in COLUMNS if columns % up == 0]
    if not multiples:
        return f"lhs_dilation {up} along the filter's longest side; accepted: divisors of one of {COLUMNS}"
    return None if fitting(p, channels) else config_refusal(p, multiples[0], channels)


def fitting(p: ConvProblem, channels: int) -> list[int]:
    """The legal numbers of columns."""
    return [columns for columns in COLUMNS if config_refusal(p, columns, channels) is None]


def config_refusal(p: ConvProblem, columns: int, channels: int) -> str | None:
    up = axes(p).g.lhs_dilation[2]
    if columns % up:
        return f"columns {columns}; accepted: multiples of {up}"
    reason = limits_refusal(
        (registers(p, columns, channels), "registers of a thread", _MAX_REGISTERS),
        (items(p, columns, channels), "threads", INT32_MAX - THREADS),
    )
    return reason and f"columns {columns}: {reason}"


def work(p: ConvProblem, columns: int, channels: int, target: Target) -> Work:
    """The work of a multiprocessor, if all have the same share. The L1 counts as shared memory."""
    a = axes(p)
    g, threads = a.g, items(p, columns, channels)
    rows = a.summed * math.prod(g.kernel[:2]) / math.prod(g.lhs_dilation[:2])  # of the filter, for a thread
    blocks = _blocks(a)
    loads = sum(taps + _read(a, columns, taps) for taps in blocks)
    products = g.kernel[2] * columns * channels / g.lhs_dilation[2]
    row = products + loads * 2 * channels + 20 * len(blocks)
    # Rows of the output that share rows of the input through the L1.
    beside = min(g.out[1], max(1, THREADS // _word_block(passes.forward(p).out_channels // channels)))
    lines = (beside * g.stride[1] + g.kernel[1] - 1) / (beside * g.stride[1])
    across = 1.0 if beside == 1 else (columns * g.stride[2] + g.kernel[2] - 1) / (columns * g.stride[2])
    x_bytes = p.bytes_moved / 2
    warps = threads / _LANES
    resident = target.cores * min(64, 2048 // (8 * -(-registers(p, columns, channels) // 8)))
    waves = math.ceil(warps / resident)
    partly = waves / (warps / resident)
    return Work(
        shared_bytes=partly * threads * rows * loads * 4 * a.summed / target.cores,
        l2_bytes=(p.bytes_moved + (lines * across * g.kernel[0] - 1) * x_bytes) / target.cores,
        instructions=partly * warps * rows * row / target.cores,
        waits=waves * rows * len(blocks) / 4,
        memory_bytes=p.bytes_moved,
    )


def macros(p: ConvProblem, columns: int, channels: int) -> dict[str, int]:
    """Macros of the device code beside those that both ways have."""
    a = axes(p)
    base, offset, _ = output_blocks(a.g, 2)
    words = passes.forward(p).out_channels // channels

    def pitches(sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Distances of neighbours along the axes of the device code, of which `sizes` are the sizes."""
        placed = dict(zip(a.order, sizes, strict=True))
        return tuple(math.prod(placed[other] for other in range(axis + 1, 3)) for axis in a.order)

    return {
        **passes.geometry_macros(a.g),
        **axis_macros(X_PITCH=pitches(a.g.size), OUT_PITCH=pitches(a.g.out), TAP_PITCH=pitches(a.g.kernel)),
        **{"X_IMAGE": math.prod(a.g.size), "OUT_IMAGE": math.prod(a.g.out)},
        **{"BASE_W": base, "OFFSET_W": offset, "STRIPS": _strips(a, columns), "STEP": a.step},
        **{"BLOCK": a.block, "COLUMNS": columns, "SUMMED": a.summed, "WORD_BLOCK": _word_block(words)},
    }
