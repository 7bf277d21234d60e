"""Kernel family: depthwise forward passes and input gradients on Hopper, in fp32 on the CUDA cores (device code:
depthwise/passes.cu).

A thread slides down an image with the sums of the output rows that its row of the input reaches in registers. Strides
of an input gradient need no products with zeros: which tap meets which pixel is known at compile time.
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk.kernels.base import passes, refusals
from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, geometry
from jax_splitk.kernels.base.passes import of_both_passes, output_blocks
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.target import Target

_THREADS = 128  # depthwise.cu has the same
_COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_ROWS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128)
_MAX_KERNEL, _MAX_TAPS, _MAX_STRIDE = 7, 49, 4
_MAX_REGISTERS = 212  # most registers of a thread, as `_registers` counts them; above it some spill


@dataclasses.dataclass(frozen=True)
class Config:
    """How a thread computes its strip of the output.

    Attributes:
      columns: neighbouring columns, a multiple of the stride of an input gradient.
      rows: rows; for an input gradient, multiplied by its stride.
    """

    columns: int
    rows: int


def _forward(problem: ConvProblem) -> Geometry:
    return geometry(passes.forward(problem), 3)


def _word_channels(problem: ConvProblem) -> int:
    return 4 // jnp.dtype(problem.dtype).itemsize


def _strips(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """The numbers of strips along rows and along columns."""
    g = _forward(problem)
    columns = output_blocks(g, 2)[2] * g.lhs_dilation[2]
    return -(-output_blocks(g, 1)[2] // config.rows), -(-columns // config.columns)


def _items(problem: ConvProblem, config: Config) -> int:
    g = _forward(problem)
    return g.batch * g.out[0] * math.prod(_strips(problem, config)) * problem.in_channels // _word_channels(problem)


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


class DepthwiseConv(ModelledFamily[ConvProblem, Config]):
    """Serves one output channel for each input channel."""

    ABI = 1
    file = "depthwise/passes.cu"

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p, g = problem, _forward(problem)
        if (reason := refusals.dtypes(p, tuple(OUT_CODES)) or passes.depthwise_refusal(p)) is not None:
            return reason
        if p.in_channels % _word_channels(p):
            return f"{p.in_channels} channels of {p.dtype}; accepted: multiples of {_word_channels(p)}"
        if max(g.kernel) > _MAX_KERNEL or math.prod(g.kernel) > _MAX_TAPS:
            return f"a filter of {p.kernel_spatial}; accepted: sides up to {_MAX_KERNEL} and {_MAX_TAPS} taps"
        if (reason := passes.steps_refusal(g, _MAX_STRIDE) or passes.sizes_refusal(p, g)) is not None:
            return reason
        least = _items(p, Config(max(_COLUMNS), max(_ROWS)))
        if least > INT32_MAX:
            return f"{least} threads; accepted: up to {INT32_MAX}"
        return (
            None
            if self._fitting(p)
            else f"dilation {p.rhs_dilation}: the sums need more registers than a thread can have"
        )

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        up, registers = _forward(problem).lhs_dilation[2], _registers(problem, config)
        reason = field_refusal(config, columns=_COLUMNS, rows=_ROWS)
        if reason is None and config.columns % up:
            reason = f"columns {config.columns}; accepted: multiples of {up}"
        if reason is None and registers > _MAX_REGISTERS:
            reason = f"columns {config.columns} take about {registers} registers; accepted: up to {_MAX_REGISTERS}"
        if reason is None and (items := _items(problem, config)) > INT32_MAX:
            reason = f"{items} threads; accepted: up to {INT32_MAX}"
        return reason

    def _fitting(self, problem: ConvProblem) -> list[int]:
        """The legal numbers of columns."""
        rows = max(_ROWS)
        return [columns for columns in _COLUMNS if self.config_refusal(problem, Config(columns, rows)) is None]

    def candidates(self, problem: ConvProblem, target: Target) -> list[Config]:
        rows = output_blocks(_forward(problem), 1)[2]
        useful = [n for n in _ROWS if n < 2 * rows]
        found = [Config(columns, n) for columns in self._fitting(problem) for n in useful]
        return [config for config in found if self.config_refusal(problem, config) is None]

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        def near(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            at = values.index(value)
            return values[max(0, at - 1) : at + 2]

        found = varied(config, columns=near(_COLUMNS, config.columns), rows=near(_ROWS, config.rows))
        return [other for other in found if other != config]

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        """The work of a multiprocessor, if all have the same share."""
        g, channels = _forward(problem), _word_channels(problem)
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
            waves=waves,
        )

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        g, (strips_h, strips_w) = _forward(problem), _strips(problem, config)
        (base_h, offset_h, blocks), (base_w, offset_w, _) = output_blocks(g, 1), output_blocks(g, 2)
        return {
            "ELEMENT": OUT_CODES[problem.dtype],
            "OUT": OUT_CODES[problem.out_dtype],
            "WORDS": problem.in_channels // _word_channels(problem),
            "MIRRORED": int(not isinstance(problem, ConvFpropProblem)),
            **passes.geometry_macros(g),
            **{"BASE_H": base_h, "OFFSET_H": offset_h, "BLOCKS": blocks, "BASE_W": base_w, "OFFSET_W": offset_w},
            **{"STRIPS_H": strips_h, "STRIPS_W": strips_w},
            **field_macros(config),
        }

    def launches(self, problem: ConvProblem, config: Config) -> tuple[Launch, ...]:
        items = _items(problem, config)  # threads that compute something
        params = (Pointer(0), Pointer(1), Struct("Args", {"items": items}), Pointer(2))
        return (Launch(self.kernel_name(problem), (-(-items // _THREADS), 1, 1), (_THREADS, 1, 1), params),)


FPROP, DGRAD = of_both_passes(DepthwiseConv, "depthwise", Config)
