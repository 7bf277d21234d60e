"""Kernel family: weight gradients of depthwise convolutions on Hopper, in fp32 on the CUDA cores (device code:
wgrad/depthwise_any.cu). In three dimensions, of float32, and of any number of channels: what wgrad/depthwise.py refuses.

A thread slides down an image, or along it where that is one row, with the sums of all taps in registers.
"""

import dataclasses
import functools
import itertools
import math

from jax import numpy as jnp

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.family import field_macros, field_refusal, varied
from jax_splitk.kernels.wgrad import refusals
from jax_splitk.kernels.wgrad.family import Kernel, RankedFamily, nearby
from jax_splitk.kernels.wgrad.geometry import Geometry, axis_macros, bytes_touched, geometry
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Pointer
from jax_splitk.runtime.target import Target

_COLUMNS = (1, 2, 3, 4, 6, 7, 8, 12, 16)
_ROWS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 256)
_LANES = (1, 2, 4, 8, 16, 32)
_WARPS = (4, 8, 12)
_MAX_KERNEL, _MAX_TAPS, _MAX_STRIDE = 7, 49, 4
_MAX_WINDOW = 8  # rows of g; with more, of an image of two dimensions, each row of taps loads its own row of x
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 232  # of a thread, as `_registers` counts them
_MAX_SIZE = 2**24 - 1
_MAX_CHAIN = 2**14  # products that a thread adds up for a float32 result


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      columns: of a thread's strip, at most the output's.
      rows: steps that a thread takes before its next strip; each is a row of the strip, or `columns` columns of an
        image of one row.
      lanes: neighbouring words of channels of a thread block; threads beside them have other strips.
      warps: of a thread block.
      splits: parts into which the strips are cut; none may be empty.
    """

    columns: int
    rows: int
    lanes: int
    warps: int
    splits: int

    @property
    def strips(self) -> int:
        """That a thread block works on side by side."""
        return 32 * self.warps // self.lanes


@functools.lru_cache(maxsize=4096)
def _seen(p: ConvWgradProblem) -> Geometry:
    """As the device code sees it. What slides is the middle dimension; where it is 1, the last one."""
    g = geometry(p, 3)
    if g.size[0] == g.kernel[0] == g.out[0] == 1 and _window(g) > _MAX_WINDOW:
        given = {name: value for name, value in vars(g).items() if isinstance(value, tuple)}
        return dataclasses.replace(g, **{name: (h, d, w) for name, (d, h, w) in given.items()})
    return g


def _window(g: Geometry) -> int:
    """Rows of g that a row of x meets, as far as they must be kept."""
    return g.reach[1] // g.stride[1] + 1


def _is_along_w(g: Geometry) -> bool:
    return g.kernel[1] == g.out[1] == 1


def _channels(p: ConvWgradProblem) -> int:
    """Of a word: two of 16 bits where pixels are whole words."""
    paired = p.in_channels == p.out_channels and p.in_channels % 2 == 0
    return 2 if paired and jnp.dtype(p.dtype).itemsize == 2 else 1


def _words(p: ConvWgradProblem) -> int:
    return p.out_channels // _channels(p)


def _strips(p: ConvWgradProblem, config: Config) -> tuple[int, int]:
    """Of a plane: side by side, and one after the other."""
    g = _seen(p)
    across = -(-g.out[2] // config.columns)
    return (1, -(-across // config.rows)) if _is_along_w(g) else (across, -(-g.out[1] // config.rows))


def _items(p: ConvWgradProblem, config: Config) -> int:
    g = _seen(p)
    return g.batch * g.out[0] * math.prod(_strips(p, config))


def _read(g: Geometry, axis: int, outputs: int) -> int:
    """Pixels of x that so many pixels of g meet along an axis."""
    taps = range(g.kernel[axis])
    return len({i * g.stride[axis] + t * g.dilation[axis] for i in range(outputs) for t in taps})


def _loaded(g: Geometry, config: Config) -> tuple[int, int]:
    """Words of x that a step loads, and those of one row."""
    rows = len({t * g.dilation[1] % g.stride[1] for t in range(g.kernel[1])})
    read = _read(g, 2, config.columns)
    return g.kernel[0] * rows * read, read


def _registers(p: ConvWgradProblem, config: Config) -> int:
    """Sums, g's rows, what is loaded and what is multiplied, and the rest."""
    g, channels = _seen(p), _channels(p)
    loaded, read = _loaded(g, config)
    sums = p.taps + _window(g) * config.columns
    return sums * channels + loaded + read * (channels + 1) + config.columns + 36


class DepthwiseAny(RankedFamily[Config]):
    """No GPU has run it yet."""

    name = "wgrad_depthwise_any"
    ABI = 1
    file = "wgrad/depthwise_any.cu"
    measured_only = True
    MAX_CANDIDATES = 48
    MAX_VARIANTS = 16

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        p, g = problem, _seen(problem)
        if p.feature_group_count != p.in_channels or p.batch_group_count != 1:
            groups = f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}"
            return f"{groups}; accepted: {p.in_channels} (the input channels), 1"
        if max(g.kernel) > _MAX_KERNEL or p.taps > _MAX_TAPS:
            return f"a filter of {p.kernel_spatial}; accepted: sides up to {_MAX_KERNEL} and {_MAX_TAPS} taps"
        if max(g.stride) > _MAX_STRIDE:
            return f"window strides {p.window_strides}; accepted: up to {_MAX_STRIDE}"
        sizes = (p.batch, *p.input_spatial, *p.output_spatial)
        if 0 in sizes or max(*sizes, p.out_channels, *map(abs, g.pad), *g.reach) > _MAX_SIZE:
            return f"lhs {p.lhs_shape}, g {p.g_shape}, padding {p.padding}; accepted: sizes of 1 to {_MAX_SIZE}"
        if (reason := refusals.dtypes(p, tuple(OUT_CODES)) or refusals.lhs_dilation(p) or refusals.weights(p)) is not None:
            return reason
        if _items(p, Config(1, max(_ROWS), 1, 1, 1)) > refusals.INT32_MAX:
            return f"g {p.g_shape}; accepted: up to {refusals.INT32_MAX} strips of a column"
        return None if self._fitting(p) else f"dilation {p.rhs_dilation}: the rows of g fit in no registers"

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        accepted = {"columns": _COLUMNS, "rows": _ROWS, "lanes": _LANES, "warps": _WARPS}
        if (reason := field_refusal(config, **accepted)) is not None:
            return reason
        if config.columns > (width := _seen(problem).out[2]):
            return f"columns {config.columns}; accepted: at most the output's {width}"
        most = min(_MAX_REGISTERS, _REGISTERS // (32 * config.warps) - 8)
        if (registers := _registers(problem, config)) > most:
            return f"columns {config.columns} take about {registers} registers; accepted: up to {most}"
        if (items := _items(problem, config)) > refusals.INT32_MAX - 2**22:
            return f"{items} strips; accepted: up to {refusals.INT32_MAX - 2**22}"
        return split_k.splits_refusal(config.splits, self.reduction_blocks(problem, config), "rounds of strips", uneven=True)

    def _fitting(self, p: ConvWgradProblem) -> list[int]:
        """Columns that are legal."""
        return [n for n in _COLUMNS if self.config_refusal(p, Config(n, max(_ROWS), 1, 4, 1)) is None]

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        return (-(-_words(problem) // config.lanes),)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        """Of as many strips as a thread block works on side by side."""
        return (-(-_items(problem, config) // config.strips),)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        """The CUDA cores round to nearest, but long sums of floats lose some."""
        return _MAX_CHAIN // (config.rows * config.columns)

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        registers = -(-_registers(problem, config) // 8) * 8
        return min(48 // config.warps, _REGISTERS // (32 * config.warps * registers))

    # ---- search ----------------------------------------------------------------------------------------------------

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """Of each number of columns, rows and warps, filling the machine."""
        g, words = _seen(problem), _words(problem)
        lanes = {min(max(_LANES), 1 << (words - 1).bit_length())} | {n for n in (8, 16) if words % n == 0}
        steps = -(-g.out[2] // max(_COLUMNS)) if _is_along_w(g) else g.out[1]
        rows = [n for n in _ROWS if n < 2 * steps]
        given = itertools.product(self._fitting(problem), rows, sorted(lanes), _WARPS)
        found = [self.filling(problem, Config(*each, splits=1), target) for each in given]
        legal = [config for config in found if self.config_refusal(problem, config) is None]
        return sorted(legal, key=lambda config: self.estimate(problem, config, target))

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        wanted = nearby(config.splits, self.wave(problem, config, target))
        changes = {name: _near(values, getattr(config, name)) for name, values in _FIELDS.items()}
        others = [self.filling(problem, other, target) for other in varied(config, **changes)]
        return self.other_splits(problem, config, wanted) + others

    def estimate(self, problem: ConvWgradProblem, config: Config, target: Target) -> float:
        """The largest of memory, L2, L1 and instructions, over how full the machine is, and the reduction. Not fitted
        to measurements."""
        g, channels = _seen(problem), _channels(problem)
        loaded, read = _loaded(g, config)
        pixels = math.prod(g.out) * g.batch * _words(problem)  # in words
        lead = 1 + (_window(g) - 1) / min(config.rows, g.out[1])
        lanes = _words(problem) / (-(-_words(problem) // config.lanes) * config.lanes)
        steps = pixels / config.columns * lead / lanes
        word = channels * jnp.dtype(problem.dtype).itemsize
        # Neighbours in the thread block share x's planes through the L1, and columns where planes are few.
        planes = min(config.strips, g.out[0])
        shared = min(max(1, config.strips // planes), math.prod(_strips(problem, config)))
        wide = _read(g, 2, config.columns * shared) / (config.columns * shared * g.stride[2])
        deep = _read(g, 0, planes) / (planes * g.stride[0])
        x_bytes = math.prod((*g.size, g.batch)) * problem.in_channels / channels * word
        l2 = (problem.bytes_moved + (lead * wide * deep - 1) * x_bytes) / 5.5e12
        l1 = steps * (loaded + config.columns) * word / (target.cores * 128 * 1.4e9)
        issued = steps * (problem.taps * config.columns * channels + 4 * loaded + 4 * config.columns + 30)
        arithmetic = issued / (target.cores * 128 * 1.7e9 * 0.8)
        rounds = self.reduction_blocks(problem, config)
        balance = -(-rounds // config.splits) * config.splits / rounds
        slots = target.cores * self.blocks_per_sm(problem, config)
        blocks = self.thread_blocks(problem, config) * config.splits
        waves = -(-blocks // slots)
        # Few warps have too few bytes in flight.
        flight = slots / waves * blocks / slots * config.warps * 32 * word * config.columns * 2
        latency = problem.bytes_moved / (flight / 1.2e-6)
        seconds = max(bytes_touched(problem) / 3.8e12, l2, l1, arithmetic, latency) * balance
        seconds *= max(1.0, waves * slots / blocks) if waves > 1 else 1.0
        reduce = 0.0 if config.splits == 1 else 1e-6 + 2 * self.workspace_bytes(problem, config) / 4e12
        return 4e-6 + seconds + 1.5e-6 * waves + reduce

    # ---- plan ------------------------------------------------------------------------------------------------------

    def kernel(self, problem: ConvWgradProblem, config: Config) -> Kernel:
        """Specialised to all but the batch and splits."""
        g = _seen(problem)
        return Kernel(
            threads=32 * config.warps,
            shared_bytes=0,
            macros={
                **field_macros(config, "columns", "rows", "lanes", "warps"),
                **axis_macros(
                    INPUT=g.size, OUTPUT=g.out, KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation, PAD=g.pad
                ),
                "CHANNELS": _channels(problem),
                "WORDS": _words(problem),
                "MULTIPLIER": problem.out_channels // problem.in_channels,
                "ALONG_W": int(_is_along_w(g)),
            },
            args={"items": _items(problem, config)},
            after=(Pointer(0), Pointer(1)),
        )


_FIELDS = {"columns": _COLUMNS, "rows": _ROWS, "lanes": _LANES, "warps": _WARPS}


def _near(values: tuple[int, ...], value: int) -> list[int]:
    at = values.index(value)
    return [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]


FAMILY = DepthwiseAny(Config)
