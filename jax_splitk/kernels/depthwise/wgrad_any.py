"""Kernel family: weight gradients of depthwise convolutions on Hopper, in fp32 on the CUDA cores (device code:
depthwise/wgrad_any.cu). It serves 1D, and problems that depthwise/wgrad.py refuses: 3D, float32, any number of
channels.

A thread slides down an image, or along it if the image is one row, with the sums of all taps in registers.
"""

import dataclasses
import functools
import itertools
import math

from jax import numpy as jnp

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, bytes_touched, geometry
from jax_splitk.kernels.base.split import SplitFamily, nearby
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.target import Target

_COLUMNS = (1, 2, 3, 4, 6, 7, 8, 12, 16)
_ROWS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 256)
_LANES = (1, 2, 8, 16, 32)
_WARPS = (4, 8, 12)
_FIELDS = {"columns": _COLUMNS, "rows": _ROWS, "lanes": _LANES, "warps": _WARPS}
_MAX_KERNEL, _MAX_TAPS, _MAX_STRIDE = 7, 49, 4
_MAX_WINDOW = 8  # rows of g; for more, in two dimensions, each row of taps loads its own row of x
_MAX_REACH = 1024  # columns from a window's first to its last: the compiler goes through all
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 224  # of a thread, as `_registers` counts them
_MAX_SIZE, _MAX_ITEMS = 2**24 - 1, 2**30 - 1
_MAX_CHAIN = 2**14  # products that a thread adds up for a float32 result


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      columns: columns of a thread's strip, at most the output's.
      rows: steps that a thread takes before its next strip; each is a row of the strip, or `columns` columns of an
        image of one row.
      lanes: neighbouring words of channels of a thread block; other threads of a warp have other strips.
      warps: warps of a thread block.
      splits: parts of the strips; none may be empty.
    """

    columns: int
    rows: int
    lanes: int
    warps: int
    splits: int

    @property
    def strips(self) -> int:
        """Strips on which a thread block works side by side."""
        return 32 * self.warps // self.lanes


@functools.lru_cache(maxsize=4096)
def _seen(p: ConvWgradProblem) -> Geometry:
    """The geometry that the device code sees: a thread slides along the middle dimension or, if its size is 1, along
    the last one."""
    g = geometry(p, 3)
    if g.size[0] == g.kernel[0] == g.out[0] == 1 and _window(g) > _MAX_WINDOW:
        given = {name: value for name, value in vars(g).items() if isinstance(value, tuple)}
        return dataclasses.replace(g, **{name: (h, d, w) for name, (d, h, w) in given.items()})
    return g


def _window(g: Geometry) -> int:
    """Rows of g that a thread must keep, because a row of x multiplies them."""
    return g.reach[1] // g.stride[1] + 1


def _is_along_w(g: Geometry) -> bool:
    return g.kernel[1] == g.out[1] == 1


def _channels(p: ConvWgradProblem) -> int:
    """Channels of a word: two 16-bit channels if pixels are whole words."""
    paired = p.in_channels == p.out_channels and p.in_channels % 2 == 0
    return 2 if paired and jnp.dtype(p.dtype).itemsize == 2 else 1


def _words(p: ConvWgradProblem) -> int:
    return p.out_channels // _channels(p)


def _strips(p: ConvWgradProblem, config: Config) -> tuple[int, int]:
    """Strips of a plane: side by side, and one after the other."""
    g = _seen(p)
    across = 1 if _is_along_w(g) else -(-g.out[2] // config.columns)
    return across, -(-_steps(p, config.columns) // config.rows)


def _steps(p: ConvWgradProblem, columns: int) -> int:
    """Steps from one end of an image to the other."""
    g = _seen(p)
    return -(-g.out[2] // columns) if _is_along_w(g) else g.out[1]


def _items(p: ConvWgradProblem, config: Config) -> int:
    g = _seen(p)
    return g.batch * g.out[0] * math.prod(_strips(p, config))


def _read(g: Geometry, axis: int, outputs: int) -> int:
    """Pixels of x that `outputs` pixels of g need along an axis."""
    taps = range(g.kernel[axis])
    return len({i * g.stride[axis] + t * g.dilation[axis] for i in range(outputs) for t in taps})


def _loaded(g: Geometry, config: Config) -> int:
    """Words of x that a step loads."""
    rows = len({t * g.dilation[1] % g.stride[1] for t in range(g.kernel[1])})
    return g.kernel[0] * rows * _read(g, 2, config.columns)


def _registers(p: ConvWgradProblem, config: Config) -> int:
    """A thread's registers: sums, rows of g, words being loaded and multiplied, and others, as observed with ptxas."""
    g, loaded = _seen(p), _loaded(_seen(p), config)
    values = (p.taps + _window(g) * config.columns) * _channels(p) + 2 * loaded + config.columns
    return values + (28 if _window(g) == 1 else 40 + _window(g))


class DepthwiseAny(SplitFamily[ConvWgradProblem, Config]):
    """Serves one input channel for each output channel, in fp32 on the CUDA cores, if `wgrad_depthwise` refuses the
    problem."""

    name = "wgrad_depthwise_any"
    ABI = 1
    file = "depthwise/wgrad_any.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        p, g = problem, _seen(problem)
        reason = refusals.dtypes(p, tuple(OUT_CODES)) or refusals.lhs_dilation(p) or refusals.empty_dimensions(p)
        if (reason := reason or refusals.depthwise_groups(p)) is not None:
            return reason
        if p.rank == 2 and depthwise.FAMILY.problem_refusal(p) is None:
            return f"{p.in_channels} channels of {p.dtype} in 2D; accepted: problems that wgrad_depthwise refuses"
        if max(g.kernel) > _MAX_KERNEL or p.taps > _MAX_TAPS:
            return f"a filter of {p.kernel_spatial}; accepted: sides up to {_MAX_KERNEL} and {_MAX_TAPS} taps"
        if max(g.stride) > _MAX_STRIDE:
            return f"window strides {p.window_strides}; accepted: up to {_MAX_STRIDE}"
        sizes = (*p.lhs_shape, *p.g_shape, *map(abs, g.pad), *g.reach)
        if max(sizes) > _MAX_SIZE or _items(p, Config(1, 1, 1, 1, 1)) > _MAX_ITEMS:
            said = f"lhs {p.lhs_shape}, g {p.g_shape}, padding {p.padding}, dilation {p.rhs_dilation}"
            return f"{said}; accepted: sizes up to {_MAX_SIZE}, {_MAX_ITEMS} output pixels"
        if g.reach[2] > _MAX_REACH:
            return f"dilation {p.rhs_dilation}: a window of {g.reach[2] + 1} columns; accepted: up to {_MAX_REACH + 1}"
        if not self._fitting(p):
            return (
                f"strides {p.window_strides}, dilation {p.rhs_dilation}: it needs more registers than a thread can have"
            )
        return refusals.weights(p)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, **_FIELDS)) is not None:
            return reason
        if config.columns > (width := _seen(problem).out[2]):
            return f"columns {config.columns}; accepted: at most the output's {width}"
        most = min(_MAX_REGISTERS, _REGISTERS // (256 * config.warps) * 8)
        if (registers := _registers(problem, config)) > most:
            return f"columns {config.columns} take about {registers} registers; accepted: up to {most}"
        rounds = self.reduction_blocks(problem, config)
        return split_k.splits_refusal(config.splits, rounds, "rounds of strips", uneven=True)

    def _fitting(self, p: ConvWgradProblem) -> list[int]:
        """The legal numbers of columns."""
        return [n for n in _COLUMNS if self.config_refusal(p, Config(n, max(_ROWS), 1, 4, 1)) is None]

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        return (-(-_words(problem) // config.lanes),)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        """Blocks with as many strips as a thread block works on side by side."""
        return (-(-_items(problem, config) // config.strips),)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        """The CUDA cores round to nearest, but long sums of floats lose accuracy."""
        return _MAX_CHAIN // (config.rows * config.columns)

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        registers = -(-_registers(problem, config) // 8) * 8
        return min(48 // config.warps, _REGISTERS // (32 * config.warps * registers))

    # ---- search ----------------------------------------------------------------------------------------------------

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """For each number of columns, lanes and warps, the best with the most rows that leave enough strips to fill the
        machine."""
        words, found = _words(problem), list[list[Config]]()
        lanes = {max(n for n in _LANES if n <= words), min((n for n in _LANES if n >= words), default=_LANES[-1])}
        if (whole := math.gcd(words, _LANES[-1])) >= 8:  # a sector of memory
            lanes.add(whole)
        for columns, lane, warps in itertools.product(self._fitting(problem), sorted(lanes), _WARPS):
            every = [Config(columns, rows, lane, warps, 1) for rows in _ROWS if rows < 2 * _steps(problem, columns)]
            if self.config_refusal(problem, every[0]) is None:
                full = [c for c in every if self.wave(problem, c, target) <= self.reduction_blocks(problem, c)]
                found.append([self.filling(problem, c, target) for c in full[-3:] or every[:1]])
        return self.best_of_each(problem, found, 1, target)

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        wanted = nearby(config.splits, self.wave(problem, config, target))
        others = varied(config, **{name: _near(values, getattr(config, name)) for name, values in _FIELDS.items()})
        legal = [c for c in others if self.config_refusal(problem, dataclasses.replace(c, splits=1)) is None]
        return self.other_splits(problem, config, wanted) + [self.filling(problem, c, target) for c in legal]

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        """The work of a multiprocessor, if all have the same share. The L1 counts as shared memory."""
        g, words, channels = _seen(problem), _words(problem), _channels(problem)
        word = channels * jnp.dtype(problem.dtype).itemsize
        loaded = _loaded(g, config)
        lead = 1 + (_window(g) - 1) / min(config.rows, g.out[1])
        used = words / (-(-words // config.lanes) * config.lanes)
        steps = g.batch * math.prod(g.out) * words / config.columns * lead / used
        # Strips side by side share planes of x through the L1, and where planes are few, columns.
        planes = min(config.strips, g.out[0])
        columns = config.columns * min(config.strips // planes, -(-g.out[2] // config.columns))
        again = lead * _read(g, 2, columns) / (columns * g.stride[2]) * _read(g, 0, planes) / (planes * g.stride[0])
        l2 = problem.bytes_moved + max(0.0, again - 1) * math.prod(problem.lhs_shape) * word / channels
        issued = steps * (problem.taps * config.columns * channels + 4 * (loaded + config.columns) + 30)

        rounds = self.reduction_blocks(problem, config)
        blocks = self.thread_blocks(problem, config) * config.splits
        slots, waves = target.cores * self.blocks_per_sm(problem, config), self.waves(problem, config, target)
        busy = target.cores * blocks / (waves * slots)
        balance = -(-rounds // config.splits) * config.splits / rounds
        run = min(config.lanes, words) * word  # neighbouring bytes
        return Work(
            shared_bytes=balance / busy * steps * (loaded + config.columns) * word,
            l2_bytes=balance * l2 / target.cores,
            instructions=balance / busy * issued / 32,
            waits=balance * steps / (min(blocks, slots) * config.warps * 32),
            memory_bytes=balance * bytes_touched(problem) * (1 + 16 / run),
            waves=waves,
            **self.reduction_work(problem, config),
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to everything but the batch and splits."""
        g = _seen(problem)
        return {
            **super().macros(problem, config),
            **field_macros(config, "columns", "rows", "lanes", "warps"),
            **axis_macros(INPUT=g.size, OUTPUT=g.out, KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation, PAD=g.pad),
            "CHANNELS": _channels(problem),
            "WORDS": _words(problem),
            "MULTIPLIER": problem.out_channels // problem.in_channels,
            "ALONG_W": int(_is_along_w(g)),
        }

    def main(self, problem: ConvWgradProblem, config: Config) -> Launch:
        params = Struct("Args", {"items": _items(problem, config)}), Pointer(0), Pointer(1)
        return self.launch(problem, config, 32 * config.warps, 0, *params)


def _near(values: tuple[int, ...], value: int) -> list[int]:
    at = values.index(value)
    return [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]


FAMILY = DepthwiseAny(Config)
