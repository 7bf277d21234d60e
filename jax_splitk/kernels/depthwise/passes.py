"""Kernel family: depthwise forward passes and input gradients on Hopper, in fp32 on the CUDA cores (device code:
depthwise/passes.cu).

A thread slides down an image with the sums of the output rows that its row of the input reaches in registers. Strides
of an input gradient need no products with zeros: which tap meets which pixel is known at compile time.

Where a thread does not have the registers for all taps, it reads the filter in blocks of taps: depthwise/blocked.py.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from jax import numpy as jnp

from jax_splitk.kernels.base import passes, refusals
from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, geometry
from jax_splitk.kernels.base.passes import of_both_passes, output_blocks
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.depthwise import blocked, toeplitz
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target

_THREADS = 128  # depthwise.cu has the same
_COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_ROWS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128)
_MAX_KERNEL, _MAX_TAPS, _MAX_STRIDE = 7, 49, 4
_LEAST_COLUMNS = 4  # with fewer, a thread loads more than it multiplies
_MAX_REGISTERS = 212  # most registers of a thread, as `_registers` counts them; above it some spill


@dataclasses.dataclass(frozen=True)
class Config:
    """How a thread computes its strip of the output.

    Attributes:
      columns: neighbouring columns, a multiple of the stride of an input gradient.
      rows: rows; for an input gradient, multiplied by its stride. 1 if the filter is read in blocks.
    """

    columns: int
    rows: int


def _forward(problem: ConvProblem) -> Geometry:
    return geometry(passes.forward(problem), 3)


def _word_channels(problem: ConvProblem) -> int:
    """Channels of a word: two 16-bit channels if pixels are whole words."""
    paired = problem.in_channels == problem.out_channels and problem.in_channels % 2 == 0
    return 2 if paired and jnp.dtype(problem.dtype).itemsize == 2 else 1


def _strips(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """The numbers of strips along rows and along columns."""
    g = _forward(problem)
    columns = output_blocks(g, 2)[2] * g.lhs_dilation[2]
    return -(-output_blocks(g, 1)[2] // config.rows), -(-columns // config.columns)


def _items(problem: ConvProblem, config: Config) -> int:
    g = _forward(problem)
    words = passes.forward(problem).out_channels // _word_channels(problem)
    return g.batch * g.out[0] * math.prod(_strips(problem, config)) * words


def _window(g: Geometry) -> int:
    """Rows of sums in a thread's registers."""
    return g.reach[1] // g.stride[1] + g.lhs_dilation[1]


def _read(g: Geometry, config: Config) -> int:
    """Columns of the input that a thread reads."""
    up = g.lhs_dilation[2]
    return (config.columns - 1) * g.stride[2] // up + g.reach[2] // up + 1


def _registers(problem: ConvProblem, config: Config) -> int:
    """A thread's registers: sums, taps, loaded words, multiplied words, and others."""
    g, channels = _forward(problem), _word_channels(problem)
    rows = min(g.stride[1], g.kernel[1])
    words = _read(g, config) * (2 * rows - 1 + channels)
    return _window(g) * config.columns * channels + math.prod(g.kernel) + words + 24


@functools.lru_cache(maxsize=4096)
def _sliding_refusal(problem: ConvProblem) -> str | None:
    """Why a thread cannot slide with all taps in registers."""
    p, g = problem, _forward(problem)
    if p.in_channels < p.out_channels and not isinstance(p, ConvFpropProblem):
        return f"the gradient of {p.in_channels} channels from {p.out_channels}; accepted: as many"
    if max(g.kernel) > _MAX_KERNEL or math.prod(g.kernel) > _MAX_TAPS:
        return f"a filter of {p.kernel_spatial}; accepted: sides up to {_MAX_KERNEL} and {_MAX_TAPS} taps"
    if (reason := passes.steps_refusal(g, _MAX_STRIDE) or passes.sizes_refusal(p, g)) is not None:
        return reason
    if (fewest := _items(p, Config(max(_COLUMNS), max(_ROWS)))) > INT32_MAX:
        return f"{fewest} threads; accepted: up to {INT32_MAX}"
    least = min(_LEAST_COLUMNS, g.out[2])
    if any(_config_refusal(p, Config(columns, max(_ROWS))) is None for columns in _COLUMNS if columns >= least):
        return None
    return f"dilation {p.rhs_dilation}: the sums of {least} columns need more registers than a thread can have"


def _config_refusal(problem: ConvProblem, config: Config) -> str | None:
    """Why a config cannot compute a problem whose threads slide."""
    up, registers = _forward(problem).lhs_dilation[2], _registers(problem, config)
    reason = field_refusal(config, columns=_COLUMNS, rows=_ROWS)
    if reason is None and config.columns % up:
        reason = f"columns {config.columns}; accepted: multiples of {up}"
    if reason is None and registers > _MAX_REGISTERS:
        reason = f"columns {config.columns} take about {registers} registers; accepted: up to {_MAX_REGISTERS}"
    if reason is None and (items := _items(problem, config)) > INT32_MAX:
        reason = f"{items} threads; accepted: up to {INT32_MAX}"
    return reason


def _slides(problem: ConvProblem) -> bool:
    return _sliding_refusal(problem) is None


class DepthwiseConv(ModelledFamily[ConvProblem, Config]):
    """Serves filters with one input channel."""

    ABI = 1
    file = "depthwise/passes.cu"

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        reason = refusals.dtypes(problem, tuple(OUT_CODES)) or passes.depthwise_refusal(problem, multiplier=True)
        if reason is not None or (reason := _sliding_refusal(problem)) is None:
            return reason
        if toeplitz.FPROP.problem_refusal(problem) is None and not toeplitz.is_sliding(problem):
            return f"{reason}, or a problem that the family toeplitz refuses"  # it has the tensor cores
        return blocked.refusal(problem, _word_channels(problem))

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        if _slides(problem):
            return _config_refusal(problem, config)
        reason = field_refusal(config, columns=blocked.COLUMNS, rows=(1,))
        return reason or blocked.config_refusal(problem, config.columns, _word_channels(problem))

    def candidates(self, problem: ConvProblem, target: Target) -> list[Config]:
        if not _slides(problem):
            return [Config(columns, 1) for columns in blocked.fitting(problem, _word_channels(problem))]
        rows = output_blocks(_forward(problem), 1)[2]
        useful = [n for n in _ROWS if n < 2 * rows]
        found = [Config(columns, n) for columns in _COLUMNS for n in useful]
        return [config for config in found if self.config_refusal(problem, config) is None]

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        def near(values: Sequence[int], value: int) -> Sequence[int]:
            at = values.index(value)
            return values[max(0, at - 1) : at + 2]

        if _slides(problem):
            found = varied(config, columns=near(_COLUMNS, config.columns), rows=near(_ROWS, config.rows))
        else:
            found = varied(config, columns=near(blocked.fitting(problem, _word_channels(problem)), config.columns))
        return [other for other in found if other != config]

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        """The work of a multiprocessor, if all have the same share."""
        g, channels = _forward(problem), _word_channels(problem)
        if not _slides(problem):
            return blocked.work(problem, config.columns, channels, target)
        window, up = _window(g), g.lhs_dilation[1]
        again = (config.rows + (window - up) / up) / config.rows  # rows above a strip
        read = _read(g, config) * g.lhs_dilation[2] / (config.columns * g.stride[2]) * again * g.kernel[0]
        x_bytes = 4.0 * math.prod((g.batch, *g.size)) * problem.in_channels / channels
        l2 = problem.bytes_moved + (read - 1) * x_bytes
        # A thread's instructions for a row of its strip. 16-bit channels are unpacked first.
        planes, rows = -(-g.kernel[0] // g.lhs_dilation[0]), min(g.stride[1], g.kernel[1])
        unpack = 4 * (channels - 1)
        products = math.prod(g.kernel[1:]) * (config.columns * channels / g.lhs_dilation[2] + unpack)
        loads = rows * _read(g, config) * (3 + unpack)
        row = planes * (products + loads) + config.columns * up * 6
        warps = _items(problem, config) / 32
        resident = target.cores * min(48, 2048 // (8 * -(-_registers(problem, config) // 8)))
        waves = math.ceil(warps / resident)
        partly = waves / (warps / resident)
        return Work(
            l2_bytes=l2 / target.cores,
            instructions=partly * warps * config.rows * again * row / target.cores,
            waits=waves * config.rows * again * planes / 4,
            memory_bytes=problem.bytes_moved,
        )

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        p, channels = passes.forward(problem), _word_channels(problem)
        common = {
            "ELEMENT": OUT_CODES[problem.dtype],
            "OUT": OUT_CODES[problem.out_dtype],
            "CHANNELS": channels,
            "WORDS": p.out_channels // channels,
            "MULTIPLIER": max(1, p.out_channels // p.in_channels),
            "MIRRORED": int(not isinstance(problem, ConvFpropProblem)),
        }
        if not _slides(problem):
            return common | blocked.macros(problem, config.columns, channels)
        g, (strips_h, strips_w) = _forward(problem), _strips(problem, config)
        (base_h, offset_h, blocks), (base_w, offset_w, _) = output_blocks(g, 1), output_blocks(g, 2)
        return {
            **common,
            **passes.geometry_macros(g),
            **{"BASE_H": base_h, "OFFSET_H": offset_h, "BLOCKS": blocks, "BASE_W": base_w, "OFFSET_W": offset_w},
            **{"STRIPS_H": strips_h, "STRIPS_W": strips_w},
            **field_macros(config),
        }

    def source(self, problem: ConvProblem, config: Config) -> Source:
        source = super().source(problem, config)
        return source if _slides(problem) else dataclasses.replace(source, file=blocked.FILE)

    def launches(self, problem: ConvProblem, config: Config) -> tuple[Launch, ...]:
        if _slides(problem):
            items, threads = _items(problem, config), _THREADS
        else:
            items, threads = blocked.items(problem, config.columns, _word_channels(problem)), blocked.THREADS
        params = (Pointer(0), Pointer(1), Struct("Args", {"items": items}), Pointer(2))
        return (Launch(self.kernel_name(problem), (-(-items // threads), 1, 1), (threads, 1, 1), params),)


FPROP, DGRAD = of_both_passes(DepthwiseConv, "depthwise", Config)
