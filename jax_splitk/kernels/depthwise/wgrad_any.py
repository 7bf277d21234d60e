"""Kernel family: weight gradients of depthwise convolutions on Hopper, in fp32 on the CUDA cores (device code:
depthwise/wgrad_any.cu). It serves 1D, and problems that depthwise/wgrad.py refuses: 3D, float32, any number of
channels.

A thread slides down an image, or along it if the image is one row, with the sums of all taps in registers. A filter
that is too large for this is cut into blocks of taps, each the work of other thread blocks.
"""

import dataclasses
import functools
import itertools
import math

from jax import numpy as jnp

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, bytes_touched, equal_parts, geometry, moved
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
_MAX_ROW = 16  # taps of a row of a block of a larger filter
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


@functools.lru_cache(maxsize=4096)
def _blocked(p: ConvWgradProblem) -> tuple[Geometry, tuple[int, ...]]:
    """The geometry that the device code sees, and the whole filter along its axes.

    The geometry's filter is a block of taps: the whole filter if a thread has the registers for it, else the block with
    which threads issue the fewest instructions.
    """
    g, channels = geometry(p, 3), _channels(p)
    whole = _placed(g, g.kernel)
    if max(g.kernel) <= _MAX_KERNEL and p.taps <= _MAX_TAPS and _fitting(whole[0], channels):
        return whole
    # Axes of size 1 come first, so that a thread's columns lie along an axis that has more.
    g = moved(g, sorted(range(3), key=lambda axis: not g.size[axis] == g.kernel[axis] == g.out[axis] == 1))
    found: list[tuple[float, int, tuple[Geometry, tuple[int, ...]]]] = []
    parts = [equal_parts(size, most) for size, most in zip(g.kernel, (_MAX_KERNEL, _MAX_KERNEL, _MAX_ROW), strict=True)]
    for kernel in itertools.product(*parts):
        block, filter_size = _placed(g, kernel)
        if math.prod(kernel) <= _MAX_TAPS and (columns := _fitting(block, channels)):
            best = min(columns[-1], 8)
            instructions = _instructions(block, best, channels) / best * _tap_blocks(block, filter_size)
            found.append((instructions, len(found), (block, filter_size)))
    return min(found)[2]  # a block of one tap always fits


def _placed(g: Geometry, kernel: tuple[int, ...]) -> tuple[Geometry, tuple[int, ...]]:
    """(the geometry with a block of taps as its filter, the whole filter), with the axis along which a thread slides in
    the middle: the middle one or, if its size is 1, the last one."""
    block = dataclasses.replace(g, kernel=kernel)
    if g.size[0] == g.kernel[0] == g.out[0] == 1 and _window(block) > _MAX_WINDOW:
        return moved(block, (1, 0, 2)), moved(g, (1, 0, 2)).kernel
    return block, g.kernel


def _seen(p: ConvWgradProblem) -> Geometry:
    return _blocked(p)[0]


def _tap_blocks(block: Geometry, filter_size: tuple[int, ...]) -> int:
    return math.prod(-(-size // part) for size, part in zip(filter_size, block.kernel, strict=True))


def _teams(p: ConvWgradProblem, config: Config) -> int:
    """Blocks of taps of a thread block, each the work of some of its threads."""
    return math.gcd(_tap_blocks(*_blocked(p)), 32 * config.warps // config.lanes)


def _beside(p: ConvWgradProblem, config: Config) -> int:
    """Strips on which a thread block works side by side."""
    return 32 * config.warps // (config.lanes * _teams(p, config))


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


def _loaded(g: Geometry, columns: int) -> int:
    """Words of x that a step loads."""
    rows = len({t * g.dilation[1] % g.stride[1] for t in range(g.kernel[1])})
    return g.kernel[0] * rows * _read(g, 2, columns)


_STALLS = 1.4  # issue slots of an instruction: fitted to 1,000 times


def _instructions(g: Geometry, columns: int, channels: int) -> int:
    """Instructions of a thread's step."""
    return math.prod(g.kernel) * columns * channels + 4 * (_loaded(g, columns) + columns) + 30


def _registers(g: Geometry, columns: int, channels: int) -> int:
    """A thread's registers: sums, rows of g, words being loaded and multiplied, and others, as observed with ptxas."""
    values = (math.prod(g.kernel) + _window(g) * columns) * channels + 2 * _loaded(g, columns) + columns
    return values + (28 if _window(g) == 1 else 40 + _window(g))


def _fitting(g: Geometry, channels: int) -> list[int]:
    """The numbers of columns for which a thread has the registers."""
    if g.reach[2] > _MAX_REACH:
        return []
    return [n for n in _COLUMNS if n <= g.out[2] and _registers(g, n, channels) <= _MAX_REGISTERS]


class DepthwiseAny(SplitFamily[ConvWgradProblem, Config]):
    """Serves one input channel for each output channel, in fp32 on the CUDA cores, if `wgrad_depthwise` refuses the
    problem."""

    name = "wgrad_depthwise_any"
    ABI = 1
    file = "depthwise/wgrad_any.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        p = problem
        reason = refusals.dtypes(p, tuple(OUT_CODES)) or refusals.lhs_dilation(p) or refusals.empty_dimensions(p)
        if (reason := reason or refusals.depthwise_groups(p)) is not None:
            return reason
        if p.rank == 2 and depthwise.FAMILY.problem_refusal(p) is None:
            return f"{p.in_channels} channels of {p.dtype} in 2D; accepted: problems that wgrad_depthwise refuses"
        g = _seen(p)
        if max(g.stride) > _MAX_STRIDE:
            return f"window strides {p.window_strides}; accepted: up to {_MAX_STRIDE}"
        sizes = (*p.lhs_shape, *p.g_shape, *map(abs, g.pad), *geometry(p, 3).reach)
        if max(sizes) > _MAX_SIZE or _items(p, Config(1, 1, 1, 1, 1)) > _MAX_ITEMS:
            said = f"lhs {p.lhs_shape}, g {p.g_shape}, padding {p.padding}, dilation {p.rhs_dilation}"
            return f"{said}; accepted: sizes up to {_MAX_SIZE}, {_MAX_ITEMS} output pixels"
        return refusals.weights(p)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, **_FIELDS)) is not None:
            return reason
        if config.columns > (width := _seen(problem).out[2]):
            return f"columns {config.columns}; accepted: at most the output's {width}"
        most = min(_MAX_REGISTERS, _REGISTERS // (256 * config.warps) * 8)
        if (registers := self._registers(problem, config)) > most:
            return f"columns {config.columns} take about {registers} registers; accepted: up to {most}"
        rounds = self.reduction_blocks(problem, config)
        return split_k.splits_refusal(config.splits, rounds, "rounds of strips", uneven=True)

    def _registers(self, p: ConvWgradProblem, config: Config) -> int:
        return _registers(_seen(p), config.columns, _channels(p))

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        """Numbers of blocks of words, and of taps."""
        return -(-_words(problem) // config.lanes), _tap_blocks(*_blocked(problem)) // _teams(problem, config)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, ...]:
        """Blocks with as many strips as a thread block works on side by side."""
        return (-(-_items(problem, config) // _beside(problem, config)),)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        """The CUDA cores round to nearest, but long sums of floats lose accuracy."""
        return _MAX_CHAIN // (config.rows * config.columns)

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        registers = -(-self._registers(problem, config) // 8) * 8
        return min(48 // config.warps, _REGISTERS // (32 * config.warps * registers))

    # ---- search ----------------------------------------------------------------------------------------------------

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """For each number of columns, lanes and warps, the best with the most rows that leave enough strips to fill the
        machine."""
        words, found = _words(problem), list[list[Config]]()
        lanes = {max(n for n in _LANES if n <= words), min((n for n in _LANES if n >= words), default=_LANES[-1])}
        if (whole := math.gcd(words, _LANES[-1])) >= 8:  # a sector of memory
            lanes.add(whole)
        for columns, lane, warps in itertools.product(
            _fitting(_seen(problem), _channels(problem)), sorted(lanes), _WARPS
        ):
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
        loaded, tap_blocks = _loaded(g, config.columns), _tap_blocks(*_blocked(problem))
        lead = 1 + (_window(g) - 1) / min(config.rows, g.out[1])
        used = words / (-(-words // config.lanes) * config.lanes)
        steps = tap_blocks * g.batch * math.prod(g.out) * words / config.columns * lead / used
        # Strips side by side share planes of x through the L1, and where planes are few, columns.
        planes = min(_beside(problem, config), g.out[0])
        columns = config.columns * min(_beside(problem, config) // planes, -(-g.out[2] // config.columns))
        again = lead * _read(g, 2, columns) / (columns * g.stride[2]) * _read(g, 0, planes) / (planes * g.stride[0])
        reads = tap_blocks // _teams(problem, config)  # by thread blocks with other taps
        l2 = problem.bytes_moved + max(0.0, again * reads - 1) * math.prod(problem.lhs_shape) * word / channels
        l2 += (reads - 1) * math.prod(problem.g_shape) * word / channels
        issued = steps * _instructions(g, config.columns, channels)

        rounds = self.reduction_blocks(problem, config)
        blocks = self.thread_blocks(problem, config) * config.splits
        slots, waves = target.cores * self.blocks_per_sm(problem, config), self.waves(problem, config, target)
        busy = target.cores * blocks / (waves * slots)
        balance = -(-rounds // config.splits) * config.splits / rounds
        run = min(config.lanes, words) * word  # neighbouring bytes
        return Work(
            shared_bytes=balance / busy * steps * (loaded + config.columns) * word,
            l2_bytes=balance * l2 / target.cores,
            instructions=_STALLS * balance / busy * issued / 32,
            waits=balance * steps / (min(blocks, slots) * config.warps * 32),
            memory_bytes=balance * bytes_touched(problem) * (1 + 16 / run),
            waves=waves,
            **self.reduction_work(problem, config),
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to everything but the batch and splits."""
        g, filter_size = _blocked(problem)
        return {
            **super().macros(problem, config),
            **field_macros(config, "columns", "rows", "lanes", "warps"),
            **axis_macros(INPUT=g.size, OUTPUT=g.out, KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation, PAD=g.pad),
            **axis_macros(FILTER=filter_size),
            "CHANNELS": _channels(problem),
            "WORDS": _words(problem),
            "TEAMS": _teams(problem, config),
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
