"""Kernel family: depthwise forward passes and input gradients on Hopper's tensor cores, as products with the Toeplitz
matrices of the filter's rows (device code: depthwise/toeplitz.cu, which defines tile, window, chunk, line, step and
stage).

An MMA has 2048 products, of which 128 times the taps of a row are useful: 44% for a row of 7. This is still faster than
the CUDA cores, and reads each element from shared memory only twice for any number of taps.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from jax import numpy as jnp

from jax_splitk.kernels.base import passes, refusals
from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal, limits_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, geometry
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.target import Target

_WINDOWS = 16  # an MMA's m
_STEPS, _PLANES, _AHEAD = (1, 2, 4), (1, 2), (1, 2, 4)
_SLIDING_ROWS = 8  # of the output in a thread block, and of taps that a warp holds, where the taps slide
_MAX_STRIDE = 2
_MAX_REGISTERS = 240  # of a thread, as `Tiling` counts them
_MAX_PRODUCTS = 1024  # of a stage, in which all are unrolled
_SHARED_BYTES = 227 * 1024  # of a thread block
_SM_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 1024  # of an SM for each thread block, by Hopper
_REGISTERS = 65536  # of an SM
_MAX_CANDIDATES, _MAX_OF_KIND = 32, 4
# Pitches of channels and of eights of channels, modulo 8, by eights of a thread block.
_PITCHES = {1: (4, 0), 2: (2, 4), 4: (1, 2)}


@dataclasses.dataclass(frozen=True)
class Config:
    """How a pass is computed.

    Attributes:
      channels: channels of a thread block.
      tiles: tiles of 8 columns of a thread block, which has as many lines as give at most 16 windows.
      rows, planes: rows and planes of the output in a line.
      step: rows of the output between two barriers.
      ahead: stages whose loads are under way.
      tall: whether lines are strips of all images on top of each other, with padding between two images that serves
        both.
      turns: with 2, half of the warps multiply while the others load and store.
    """

    channels: int
    tiles: int
    rows: int
    planes: int
    step: int
    ahead: int = 2
    tall: bool = False
    turns: int = 1


@dataclasses.dataclass(frozen=True)
class Way:
    """What a warp's registers hold.

    Attributes:
      each: channels of a warp.
      channels: choices of a thread block's channels.
      slides: whether they hold sums of a block's rows, and some rows of taps, instead of all taps and the sums of some
        rows.
    """

    each: int
    channels: tuple[int, ...]
    slides: bool = False


_WAYS = Way(2, (16, 32)), Way(1, (8,)), Way(1, (8, 16), slides=True)  # for taller and taller filters


@functools.lru_cache(maxsize=4096)
def _forward(problem: ConvProblem) -> Geometry:
    """The forward pass's geometry. If the images are single rows, they are seen as the rows of one image."""
    g = geometry(passes.forward(problem), 3)
    if g.size[:2] == g.out[:2] == g.kernel[:2] == (1, 1) and g.pad[:2] == (0, 0):
        rows = (1, g.batch)
        return dataclasses.replace(g, batch=1, size=(*rows, g.size[2]), out=(*rows, g.out[2]))
    return g


def _period(g: Geometry) -> int:
    """Rows of the output from one image to the next in tall lines. Rows that reach into the next image read the padding
    that both images share."""
    reached, pad = (g.out[1] - 1) * g.stride[1] + g.kernel[1], g.pad[1]
    rows = max(min(g.size[1] + pad, reached), reached - max(pad, 0))
    return max(g.out[1], -(-rows // g.stride[1]))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A thread block's work.

    Attributes:
      each: channels of a warp.
      lines, warps, strips, plane_blocks, columns, channel_blocks: numbers of lines and warps of a thread block, of
        strips and blocks of planes of an image, and of thread blocks along a row and along the channels.
      line_blocks: thread blocks along the lines.
      chunks, k_chunks: chunks of a line and of a window.
      units: units of 512 bytes in a row of the thread block.
      in_rows, out_rows: rows of a stage in all planes.
      in_pitches, out_pitches: distances, in units of 16 bytes, of neighbouring channels, of neighbouring groups of
        eight channels, and of neighbouring buffers.
      products: MMAs of a warp in a stage.
      registers: approximate registers of a thread.
    """

    each: int
    lines: int
    warps: int
    strips: int
    plane_blocks: int
    columns: int
    channel_blocks: int
    line_blocks: int
    chunks: int
    k_chunks: int
    units: int
    in_rows: int
    out_rows: int
    in_pitches: tuple[int, int, int]
    out_pitches: tuple[int, int, int]
    loads: int
    stages: int
    products: int
    registers: int
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Thread blocks."""
        return self.line_blocks * self.columns * self.channel_blocks


def _pitches(size: int, parts: int) -> tuple[int, int, int]:
    """Pitches for channels of `size` times 16 bytes."""
    of_channel, of_part = _PITCHES[parts]
    pitch = size + (of_channel - size) % 8
    return pitch, 8 * pitch + of_part, parts * (8 * pitch + of_part)


@functools.lru_cache(maxsize=4096)
def _way(p: ConvProblem) -> Way:
    """The first way that has the registers for the filter; the second one if no way has them."""
    g = _forward(p)
    can_slide = max(g.stride) == 1 and g.size[0] == g.kernel[0] == g.out[0] == 1
    ways = _WAYS if can_slide else _WAYS[:2]
    return next((w for w in ways if _limits_refusal(_tiling(p, _first(p, w), w)) is None), _WAYS[1])


def is_sliding(p: ConvProblem) -> bool:
    """Whether the filter is too tall for registers: then the CUDA cores may be faster."""
    return _way(p).slides


def tiling(p: ConvProblem, config: Config) -> Tiling:
    return _tiling(p, config, _way(p))


@functools.lru_cache(maxsize=4096)
def _tiling(p: ConvProblem, config: Config, way: Way) -> Tiling:
    g, parts, each = _forward(p), config.channels // 8, way.each
    (down_d, down_h, down_w), (kernel_d, kernel_h, kernel_w) = g.stride, g.kernel
    lines, warps = _WINDOWS // config.tiles, config.channels // each
    strips, plane_blocks = -(-g.out[1] // config.rows), -(-g.out[0] // config.planes)
    every_line = -(-g.batch * _period(g) // config.rows) if config.tall else g.batch * plane_blocks * strips
    k_chunks = -(-(7 * down_w + kernel_w) // 8)
    k_steps = -(-k_chunks // 2)
    chunks = -(-((config.tiles - 1) * down_w + k_chunks) // down_w) * down_w
    units = -(-chunks * lines * parts // 4)
    in_rows = config.step * down_h * ((config.planes - 1) * down_d + kernel_d)
    out_rows, halves = config.step * config.planes, jnp.dtype(p.out_dtype).itemsize // 2
    in_pitches = _pitches(in_rows * units * 4 // parts, parts)
    out_pitches = _pitches(out_rows * _WINDOWS, parts)
    window, loads = (kernel_h - 1) // down_h + 1, -(-in_rows * units // warps)
    rest = 24 + 4 * (in_rows * units % warps > 0) + 4 * (parts == 4) + 4 * (config.planes > 1)
    rest += 8 * (max(g.stride) > 1) + 4 * config.tall
    in_bytes, out_bytes = 32 * in_pitches[2], 32 * halves * out_pitches[2]
    if way.slides:
        sums, bands, products = 4 * config.step, 2 * config.step * k_steps, config.step**2 * k_steps
        buffers, taps = max(in_bytes, out_bytes // 2), 8 * kernel_h * (k_chunks + 1)
    else:
        sums, bands = 4 * config.planes * window, kernel_d * kernel_h * k_chunks
        products = config.step * each * config.planes * kernel_d * kernel_h * k_steps
        buffers, taps = in_bytes + out_bytes, math.prod(g.kernel)
    return Tiling(
        each,
        lines,
        warps,
        strips,
        plane_blocks,
        -(-g.out[2] // (8 * config.tiles)),
        -(-p.in_channels // config.channels),
        -(-every_line // lines),
        chunks,
        k_chunks,
        units,
        in_rows,
        out_rows,
        in_pitches,
        out_pitches,
        loads,
        -(-(config.rows + window - 1) // config.step),
        products,
        max(56, each * (sums + bands) + 2 * loads + rest),
        buffers + config.ahead * loads * warps * 512 + taps * config.channels * 2,
    )


def _blocks_per_sm(p: ConvProblem, config: Config) -> int:
    """Thread blocks of an SM, by shared memory and registers."""
    t = tiling(p, config)
    by_memory = _SM_SHARED_BYTES // (t.shared_bytes + _RESERVED_BYTES)
    by_registers = _REGISTERS // (32 * t.warps * -(-t.registers // 8) * 8)
    return min(by_memory, by_registers, 2048 // (32 * t.warps), 8)


def _shares(p: ConvProblem, config: Config, target: Target) -> list[int]:
    """Rows of tall lines for which thread blocks have equal shares, with one to four thread blocks for each SM."""
    g, t = _forward(p), tiling(p, config)
    if g.batch == 1 or t.plane_blocks > 1:
        return []
    beside, lead = t.columns * t.channel_blocks, (g.kernel[1] - 1) // g.stride[1]
    line_blocks = {target.cores * count // beside for count in range(1, 5)} - {0}
    least = (-(-g.batch * _period(g) // (t.lines * count)) for count in line_blocks)
    # A stage is STEP rows, be they of use or not.
    whole = {-(-(rows + lead) // config.step) * config.step - lead for rows in least}
    return sorted(rows for rows in whole if rows > lead)


def _rows(p: ConvProblem, way: Way) -> Sequence[int]:
    """Numbers of rows that a strip may have."""
    rows = _forward(p).out[1]
    return (min(rows, _SLIDING_ROWS),) if way.slides else range(1, rows + 1)


def _first(p: ConvProblem, way: Way) -> Config:
    """The way's config with the fewest registers and the least shared memory."""
    tiles, step = min(_WINDOWS, -(-_forward(p).out[2] // 8)), _SLIDING_ROWS if way.slides else 2
    return Config(way.channels[0], tiles, _rows(p, way)[-1], 1, step, _AHEAD[0])


def _smallest(p: ConvProblem) -> Config:
    return _first(p, _way(p))


def _limits_refusal(t: Tiling) -> str | None:
    return limits_refusal(
        (t.registers, "registers of a thread", _MAX_REGISTERS),
        (t.registers * t.warps * 32, "registers of a thread block", _REGISTERS),
        (t.products, "products of the device code", _MAX_PRODUCTS),
        (t.shared_bytes, "bytes of shared memory", _SHARED_BYTES),
        (t.blocks, "thread blocks", INT32_MAX // _WINDOWS),
    )


# ---- cost model ----------------------------------------------------------------------------------------------------


def _stage_work(p: ConvProblem, config: Config) -> dict[str, float]:
    """The work of a stage on an SM."""
    g, t, slides = _forward(p), tiling(p, config), is_sliding(p)
    halves, parts = jnp.dtype(p.out_dtype).itemsize // 2, config.channels // 8
    loaded, stored = t.in_rows * t.units, t.out_rows * 4 * parts  # of 512 bytes
    windows = t.each * t.in_rows * t.k_chunks / 2  # of a warp
    products, bands = float(t.products), 0.0
    if slides:
        products *= max(0.0, _rows_inside(g, config, t.stages)) / (t.stages * config.step)
        bands = 6.0 * config.step * t.k_chunks  # instructions that read them
    # Pixels: each touches a line of its own, whatever part of it the block's channels are.
    read = t.in_rows * t.lines * min(8 * t.chunks, g.size[2])
    written = t.out_rows * t.lines * min(8 * config.tiles, g.out[2])
    if slides:  # once for all stages
        stored, written = stored / t.stages, written / t.stages
    return {
        "tensor_clocks": t.warps * products,
        "shared_bytes": 512 * (t.warps * windows + 3 * loaded + 2 * halves * stored),
        "instructions": t.warps * (products + windows + bands + 30) + 12 * loaded + 16 * halves * stored,
        "rows": read + 2 * halves * written,
    }


@functools.lru_cache(maxsize=4096)
def _rows_inside(g: Geometry, config: Config, stages: int) -> float:
    """Rows of the input that a thread block multiplies where taps slide: those in the image; the mean over strips."""
    strips = range(0, g.out[1], config.rows)
    ends = (min(config.step * stages, g.size[1] + g.pad[1] - first) for first in strips)
    return sum(end - max(0, g.pad[1] - first) for first, end in zip(strips, ends, strict=True)) / len(strips)


class ToeplitzConv(ModelledFamily[ConvProblem, Config]):
    """Serves one input channel for each output channel, and unit dilations."""

    ABI = 2
    file = "depthwise/toeplitz.cu"

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p, g = problem, _forward(problem)
        if (reason := refusals.dtypes(p, refusals.HALVES) or passes.depthwise_refusal(p)) is not None:
            return reason
        if p.in_channels % 8:
            return f"{p.in_channels} channels; accepted: multiples of 8"
        if max(*g.lhs_dilation, *g.dilation) > 1:
            return f"an input dilated by {g.lhs_dilation}, a filter by {g.dilation}; accepted: by 1"
        if max(g.stride) > _MAX_STRIDE:
            return f"strides {g.stride}; accepted: 1 to {_MAX_STRIDE}"
        if (reason := passes.sizes_refusal(p, g)) is not None:
            return reason
        if (most := max(math.prod(shape) for shape in (p.lhs_shape, p.g_shape))) > 8 * INT32_MAX:
            return f"{most} elements; accepted: up to {8 * INT32_MAX}"
        reason = _limits_refusal(tiling(p, _smallest(p)))
        return reason and f"a filter of {p.kernel_spatial}: {reason}"

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        g, way = _forward(problem), _way(problem)
        reason = field_refusal(
            config,
            channels=way.channels,
            tiles=range(1, min(_WINDOWS, -(-g.out[2] // 8)) + 1),
            rows=range(1, g.batch * _period(g) + 1) if config.tall else _rows(problem, way),
            planes=[1] if way.slides else [n for n in _PLANES if n < 2 * g.out[0]],
            step=(_SLIDING_ROWS,) if way.slides else _STEPS,
            ahead=_AHEAD,
            turns=(1, 2),
        )
        if (reason := reason or self._layout_refusal(problem, config)) is not None:
            return reason
        reason = _limits_refusal(tiling(problem, config))
        return reason and f"{config}: {reason}"

    def _layout_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        g, t = _forward(problem), tiling(problem, config)
        if config.step == t.each == 1:
            return "step 1; accepted for filters of this height: 2, 4"
        if not config.tall:
            return None
        if is_sliding(problem):
            return f"tall lines for a filter of {g.kernel[1]} rows; accepted: no"
        if t.plane_blocks > 1:
            return f"tall lines of {t.plane_blocks} blocks of planes; accepted: 1"
        if config.step > (period := _period(g)):
            return f"step {config.step} of tall lines; accepted: up to an image's {period} rows"
        if (rows := (t.line_blocks * t.lines + 1) * config.rows + period) > INT32_MAX:
            return f"{rows} rows of tall lines; accepted: up to {INT32_MAX}"
        return None

    def blocks_per_sm(self, problem: ConvProblem, config: Config) -> int:
        return max(1, _blocks_per_sm(problem, config))

    def candidates(self, problem: ConvProblem, target: Target) -> list[Config]:
        """The best configs by the model, a few of each kind."""
        found = [c for c in self._variants(problem, target) if self.config_refusal(problem, c) is None]
        kind = operator.attrgetter("channels", "tiles", "tall")
        fastest = self.fastest_of_kinds(problem, found or [_smallest(problem)], kind, _MAX_OF_KIND, target)
        return fastest[:_MAX_CANDIDATES]

    def _variants(self, problem: ConvProblem, target: Target) -> Iterator[Config]:
        (planes, rows, width), most, way = _forward(problem).out, problem.in_channels, _way(problem)
        tiles = -(-width // 8)
        # Those that share a row evenly, and those that fill an MMA.
        even = {-(-tiles // parts) for parts in range(-(-tiles // _WINDOWS), tiles + 1)}
        widths = sorted({n for n in even if n <= _WINDOWS} | {n for n in (1, 2, 4, 8) if n <= tiles})[-6:]
        heights = sorted({-(-rows // parts) for parts in (1, 2, 3, 4, 6, 8) if rows >= 4 * parts or parts == 1})
        channels = [n for n in way.channels if n < 2 * most] or way.channels[:1]
        if way.slides:
            for block, count, ahead, turns in itertools.product(channels, widths, _AHEAD, (1, 2)):
                yield Config(block, count, _rows(problem, way)[0], 1, _SLIDING_ROWS, ahead, turns=turns)
            return
        depths = [n for n in _PLANES if n < 2 * planes]
        pairs = [(step, ahead) for step in _STEPS for ahead in _AHEAD if 2 <= step * ahead <= 8]
        for block, tiles, depth, (step, ahead) in itertools.product(channels, widths, depths, pairs):
            first = Config(block, tiles, 1, depth, step, ahead, turns=2)
            yield from varied(first, rows=heights)
            yield from varied(dataclasses.replace(first, tall=True), rows=_shares(problem, first, target))

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        fields = ("channels", "rows", "planes", "step", "ahead")
        halves = {field: (getattr(config, field) // 2, getattr(config, field) * 2) for field in fields}
        tiles = (config.tiles - 1, config.tiles + 1)
        others = varied(config, turns=(3 - config.turns,), tall=(not config.tall,))
        return [*others, *varied(config, tiles=tiles, **halves)]

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        t = tiling(problem, config)
        sharing = -(-t.blocks // target.cores)  # thread blocks of the busiest SM
        together = min(sharing, self.blocks_per_sm(problem, config))
        waves = -(-sharing // together)
        stages = t.stages * sharing
        return Work(
            **{name: stages * value for name, value in _stage_work(problem, config).items()},
            # A stage's loads have as many stages' time as they are ahead.
            waits=t.stages * waves / config.ahead,
            turns=t.stages * waves,
            memory_bytes=problem.bytes_moved,
            waves=waves,
        )

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        g, t = _forward(problem), tiling(problem, config)
        sizes = axis_macros(INPUT=g.size, OUTPUT=g.out, KERNEL=g.kernel, DOWN=g.stride, PAD=g.pad)
        pitches = ("CHANNEL", "PART", "BYTES")
        ins, outs = ((*pitches[:2], 16 * pitches[2]) for pitches in (t.in_pitches, t.out_pitches))
        return {
            "ELEMENT": OUT_CODES[problem.dtype],
            "OUT": OUT_CODES[problem.out_dtype],
            "EIGHTS": problem.in_channels // 8,
            "MIRRORED": int(not isinstance(problem, ConvFpropProblem)),
            **sizes,
            **field_macros(config),
            "EACH": t.each,
            **{"LINES": t.lines, "PERIOD": _period(g), "STRIPS": t.strips, "PLANE_BLOCKS": t.plane_blocks},
            **{"COLUMN_BLOCKS": t.columns, "CHANNEL_BLOCKS": t.channel_blocks},
            **{"CHUNKS": t.chunks, "K_CHUNKS": t.k_chunks, "UNITS": t.units},
            **{f"IN_{name}": value for name, value in zip(pitches, ins, strict=True)},
            **{f"OUT_{name}": value for name, value in zip(pitches, outs, strict=True)},
            **{"STAGES": t.stages, "CTAS_PER_SM": self.blocks_per_sm(problem, config)},
            "SLIDES": int(is_sliding(problem)),
        }

    def launches(self, problem: ConvProblem, config: Config) -> tuple[Launch, ...]:
        t = tiling(problem, config)
        params = (Pointer(0), Pointer(1), Struct("Args", {"images": _forward(problem).batch}), Pointer(2))
        return (Launch(self.kernel_name(problem), (t.blocks, 1, 1), (32 * t.warps, 1, 1), params, t.shared_bytes),)


FPROP, DGRAD = passes.of_both_passes(ToeplitzConv, "toeplitz", Config)
