"""Kernel family: weight gradients of depthwise convolutions on Hopper, on the tensor cores (device code:
depthwise/wgrad.cu, which says how taps become products).

With a filter of 7 rows, 56 of a product's 128 elements are taps, which is enough, since memory is the limit. Strides
and dilations are reduced to unit stride: taps with the same residue form a class. A class reads every stride-th row and
column, and its taps are a fixed number of these apart. A long filter of one dimension is wrapped into rows of 8 taps.
"""

import dataclasses
import functools
import itertools
import math

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, bytes_touched, folded, geometry
from jax_splitk.kernels.base.split import SplitFamily, one_block_apart
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Struct, constants
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target

ROWS = 8  # of a block
_SCRATCH = 16 * 8 + 2  # floats of a product, so that those of several taps lie in different banks
PRODUCERS = 8  # warps that read and transpose
CHANNELS = (8, 16, 32)
SEGMENTS = (1, 2, 4)
MAX_STAGES = 6
MAX_ROW_REACH = 8  # a product has 16 rows of X for 8 of dY
# Limits of a row in registers: columns beyond a segment, and accumulators. They are lower for four channels a warp.
MAX_COLUMN_REACH = 12
MAX_COLUMN_TAPS = 9
MAX_WIDE_TAPS = 5
MAX_WIDE_TAPS_FLOAT32 = 3
MAX_WIDE_REACH = 6
MAX_TAPS_H = 9
SHARED_BYTES = 227 * 1024 - 256  # dynamic; the barriers are beside it
MAX_PLANES_BYTES = 160 * 1024  # more take what the loads have as L1 (148 KB: 5%, 223 KB: 50% slower on an H200)
WRAP = 8  # pixels, and taps, in a row of a wrapped line
MAX_STRIDE = 8
MAX_EXTENT = 2**28  # of coordinates: sums of a few of them are 32-bit integers
CHAIN = 2  # blocks, of four products, after which a float32 result's sums leave the tensor cores
MAX_FLOAT32_CHAIN = 256  # blocks of a float32 result's split


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      channels: channels of a thread block: 8, 16 or 32.
      segments: neighbouring segments of columns in a tile: 1, 2 or 4; a tile has as many images as make 4 segments.
      stages: depth of the shared-memory pipeline, in transposed blocks of 8 rows.
      splits: parts of the reduction over blocks of rows; none may be empty.
    """

    channels: int
    segments: int
    stages: int
    splits: int

    @property
    def images(self) -> int:
        return 4 // self.segments

    @property
    def warps(self) -> int:
        """Warps that multiply; other warps (`PRODUCERS`) read and transpose."""
        return 16 if self.channels == 16 else 8


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial dimension of the convolution, and the division of its taps.

    Tap t is in class t % step. Neighbouring taps of a class read rows (columns) that are `shift` apart, counted in
    strides. A class has up to `blocks` blocks of at most `size` taps each.
    """

    input: int
    output: int
    kernel: int
    stride: int
    pad: int
    dilation: int
    step: int
    shift: int
    size: int
    blocks: int

    @property
    def tap_blocks(self) -> int:
        return min(self.step, self.kernel) * self.blocks

    @property
    def reach(self) -> int:
        """Distance from the first tap of a block to the last."""
        return (self.size - 1) * self.shift

    @property
    def gap(self) -> int:
        """Rows of zeros between images that lie below each other, so that no tap reaches from one image into the next.

        This is the reach, minus the rows of padding above and below every image.
        """
        gap = 0
        for block in range(self.tap_blocks):
            tap = block // self.blocks + block % self.blocks * self.size * self.step
            if tap < self.kernel:
                start = tap * self.dilation - self.pad
                above = -(start // self.stride)
                below = self.output - 1 + self.reach - (self.input - 1 - start) // self.stride
                gap = max(gap, self.reach - max(0, min(above, below)))
        return gap


def _axis(most: tuple[int, int], input: int, output: int, kernel: int, stride: int, pad: int, dilation: int) -> Axis:
    """The axis, with blocks of at most `most[0]` taps that are at most `most[1]` rows (columns) apart."""
    common = math.gcd(stride, dilation)
    step, shift = stride // common, dilation // common
    longest = -(-kernel // step)
    blocks = -(-longest // min(most[0], 1 + most[1] // shift))
    size = -(-longest // blocks)
    return Axis(input, output, kernel, stride, pad, dilation, step, shift if size > 1 else 1, size, blocks)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The convolution as the kernel sees it, in two spatial dimensions.

    Attributes:
      batch: images.
      pitch: rows from one image to the next, under each other.
      wrap: pixels in a row of a wrapped line, 0 if images are not wrapped. The width has the input and output of
        the whole line.
    """

    batch: int
    height: Axis
    width: Axis
    pitch: int
    wrap: int = 0

    @property
    def tap_blocks(self) -> int:
        return self.height.tap_blocks * self.width.tap_blocks

    @property
    def row_pixels(self) -> int:
        """Pixels in a row of dY."""
        return self.wrap or self.width.output


@functools.lru_cache(maxsize=4096)
def axes(p: ConvWgradProblem) -> Axes:
    rows, columns = (MAX_ROW_REACH + 1, MAX_ROW_REACH), (MAX_COLUMN_TAPS, MAX_COLUMN_REACH)
    line = geometry(folded(p), 2)
    if _is_wrapped(line):
        pixels, taps = line.out[1], line.kernel[1]
        height = _axis((MAX_ROW_REACH, MAX_ROW_REACH), 1, -(-pixels // WRAP), -(-taps // WRAP), 1, 0, 1)
        width = _axis(columns, line.size[1], pixels, WRAP, 1, line.pad[1], 1)
        return Axes(line.batch, height, width, height.output + height.size, WRAP)
    g = geometry(p, 2)
    every = zip(g.size, g.out, g.kernel, g.stride, g.pad, g.dilation, strict=True)
    height, width = (_axis(most, *given) for most, given in zip((rows, columns), every, strict=True))
    return Axes(g.batch, height, width, height.output + height.gap)


def _is_wrapped(line: Geometry) -> bool:
    """Whether images are lines, and the taps more than a block has: each block of taps reads both operands again."""
    is_line = line.size[0] == line.kernel[0] == line.out[0] == 1
    return is_line and line.stride[1] == line.dilation[1] == 1 and line.kernel[1] > MAX_COLUMN_TAPS


@dataclasses.dataclass(frozen=True)
class Operand:
    """X or dY of a block of rows, in planes of shared memory. Lengths are in chunks of 16 bytes.

    A store (stmatrix) writes four matrices. Each has two channels, and four combinations of part, image and chunk. A
    quarter of a warp reads two rows of four segments: eight different banks of 16 bytes, always.

    Attributes:
      store_images, store_chunks: images, and chunks of 8 columns of a row, in a store.
      row_stores, stores: stores of a row of one image, and of all images.
      written: chunks of a row that are written.
      read_chunks, row_chunks: chunks of a row that a lane reads, and that all lanes read.
      row, image, channel, part: distances of neighbouring rows, images, channels, and groups of 8 channels.
    """

    store_images: int
    store_chunks: int
    row_stores: int
    stores: int
    written: int
    read_chunks: int
    row_chunks: int
    row: int
    image: int
    channel: int
    part: int
    plane_bytes: int

    @staticmethod
    def of(config: Config, segment: int, columns: int, read: int) -> "Operand":
        parts, images = config.channels // 8, config.images
        store_images = min(images, 4 // parts)
        store_chunks = 4 // (parts * store_images)
        row_stores = -(-chunks(segment, columns) // store_chunks)
        written, read_chunks = row_stores * store_chunks, chunks(segment, read)
        row_chunks = (config.segments - 1) * (segment // 8) + read_chunks
        row = max(written, row_chunks) | 1
        image = ROWS * row + {1: 2, 2: 4, 4: 0}[config.segments]
        channel = images * image + store_chunks
        part = 8 * channel + (2 if parts == 4 or images == 2 else 4)
        stores = images // store_images * row_stores
        cut = (store_images, store_chunks, row_stores, stores, written, read_chunks, row_chunks)
        return Operand(*cut, row, image, channel, part, parts * part * 16)


def chunks(segment: int, columns: int) -> int:
    """Chunks of 16 bytes that hold `columns` columns, in the order of `word_at` of the device code."""
    steps, words = segment // 4, -(-columns // 2)
    return words // (2 * steps) * (steps // 2) + min(-(-(words % (2 * steps)) // 2), steps // 2)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Values that follow from a problem and a config's channels and segments."""

    segment: int  # columns of a lane
    columns: int  # of dY in a tile
    used: int  # of these, in the image
    tiles: int  # in a row of dY
    x_pad: int  # columns of zeros, to the left of what is kept of X
    x_columns: int  # of X in a tile, from there on
    x: Operand
    y: Operand
    groups: int  # of channels
    blocks: int  # of the reduction
    sums_bytes: int  # of shared memory, after the planes
    epilogue_bytes: int  # in the planes' place

    @property
    def planes_bytes(self) -> int:
        return self.x.plane_bytes + self.y.plane_bytes

    def shared_bytes(self, stages: int) -> int:
        return max(stages * self.planes_bytes + self.sums_bytes, self.epilogue_bytes)

    @property
    def max_stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - self.sums_bytes) // self.planes_bytes)


@functools.lru_cache(maxsize=4096)
def tiling(p: ConvWgradProblem, config: Config) -> Tiling:
    channels, segments = config.channels, config.segments
    g = axes(p)
    width = g.row_pixels
    segment = 8 if width <= 8 and segments == 1 else 16
    columns = -(-width // -(-width // (segment * segments)))
    columns = -(-columns // 8) * 8
    tiles = -(-width // columns)
    used = min(columns, width)
    taps, reach = g.width.size, g.width.reach
    if g.wrap:
        reach = 0  # a lane has two rows of X
    x_pad, x_columns = _kept(g.width) if segments == 1 and tiles == 1 and not g.wrap else (0, used + reach)
    return Tiling(
        *(segment, columns, used, tiles, x_pad, x_columns),
        x=Operand.of(config, segment, x_columns, x_columns if segments == 1 else segment + reach),
        y=Operand.of(config, segment, used, segment),
        groups=-(-p.out_channels // channels),
        sums_bytes=512 * channels * taps if p.out_dtype == "float32" else 0,
        epilogue_bytes=4 * (_channel_sums(taps) * channels + config.warps * taps * _SCRATCH),
        blocks=-(-(-(-g.batch // config.images) * tiles * g.pitch - (g.pitch - g.height.output)) // ROWS),
    )


def _channel_sums(taps: int) -> int:
    """Floats for a channel with `taps` taps in a row; an odd number, so that channels start in different banks."""
    return MAX_TAPS_H * taps | 1


def _kept(width: Axis) -> tuple[int, int]:
    """The first column, and the number of columns, that shared memory keeps of a whole row of X with its padding.

    The first one is even, because a word has two columns. The padding can be left out only if every tap finds it in the
    same place: with one block of taps and unit stride.
    """
    columns = width.output + width.reach
    if width.stride > 1 or width.tap_blocks > 1 or not 0 <= width.pad <= width.reach:
        return 0, columns
    first = width.pad // 2 * 2
    return first, min(columns, width.pad + width.input) - first


def _extent_refusal(p: ConvWgradProblem) -> str | None:
    if max(p.window_strides) > MAX_STRIDE:
        return f"window strides {p.window_strides}; accepted: at most {MAX_STRIDE}"
    g, pads = axes(p), [abs(low) for low, _ in p.padding]
    rows = g.batch * max(g.height.input, g.pitch * -(-g.row_pixels // 8))
    columns = max(g.width.input, g.width.output * g.width.stride)
    largest = max(rows, g.pitch * g.height.stride, columns, *pads, *geometry(p, 2).reach)
    if largest <= MAX_EXTENT:
        return None
    said = f"input of {p.input_spatial} padded by {p.padding}, dilation {p.rhs_dilation}, {p.batch} images"
    return f"{said}: up to {largest} rows or columns; accepted: at most {MAX_EXTENT}"


class Depthwise(SplitFamily[ConvWgradProblem, Config]):
    """Preferred whenever it is legal: cuDNN reaches 10 to 14% of the memory's bandwidth on such problems."""

    name = "wgrad_depthwise"
    ABI = 3
    file = "depthwise/wgrad.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        reason = refusals.operands(problem, (1, 2), refusals.depthwise_groups) or refusals.empty_dimensions(problem)
        return reason or refusals.weights(problem) or _extent_refusal(problem)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, channels=CHANNELS, segments=SEGMENTS)) is not None:
            return reason
        g, t = axes(problem), tiling(problem, config)
        if g.wrap and config.segments > 1:
            return f"segments {config.segments} for a filter of {problem.taps} taps in one dimension; accepted: 1"
        if config.channels == 32:
            if problem.in_channels != problem.out_channels:
                each = problem.out_channels // problem.in_channels
                return f"channels 32 with {each} output channels for an input channel; accepted: 1"
            most = MAX_WIDE_TAPS_FLOAT32 if problem.out_dtype == "float32" else MAX_WIDE_TAPS
            if g.width.size > most:
                return f"channels 32 with {g.width.size} taps in a row; accepted: at most {most}"
            if g.width.reach > MAX_WIDE_REACH:
                return f"channels 32 with taps {g.width.reach} columns apart; accepted: at most {MAX_WIDE_REACH}"
        if not 1 <= config.stages <= t.max_stages:
            return f"stages {config.stages}; accepted with these channels and segments: 1 to {t.max_stages}"
        return split_k.splits_refusal(config.splits, t.blocks, "blocks of rows")

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int]:
        """Numbers of blocks of taps, and of channels."""
        return axes(problem).tap_blocks, tiling(problem, config).groups

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int]:
        return (tiling(problem, config).blocks,)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        return MAX_FLOAT32_CHAIN

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        found: list[Config] = []
        for channels, segments in itertools.product(CHANNELS, SEGMENTS):
            shallow = Config(channels, segments, 1, 1)
            t = tiling(problem, shallow)
            depths = {min(2, t.max_stages)} | ({3} if 3 * t.planes_bytes <= MAX_PLANES_BYTES else set())
            found += varied(shallow, stages=sorted(depths))
        return [config for config in found if self.config_refusal(problem, config) is None]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """A stage less or more, and other split counts: nearby, doubled and halved."""
        t = tiling(problem, config)
        wanted = {config.splits // 2, config.splits * 2} | one_block_apart(config.splits, t.blocks)
        depths = {config.stages - 1, config.stages + 1} & set(range(1, t.max_stages + 1))
        found = self.other_splits(problem, config, wanted)
        return found + varied(config, stages=sorted(depths))

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        g, t = axes(problem), tiling(problem, config)
        waves = self.waves(problem, config, target)
        steps = waves * (-(-t.blocks // config.splits) + 1)
        # Bytes that are written to the planes; that each lane reads from there, 16 at a time; and of float32 sums, both
        # ways.
        written = (t.x.stores + t.y.stores) * 512 * ROWS
        operands = (t.x.read_chunks + t.y.read_chunks) * 16 * 32 * config.channels
        products = g.width.size * t.segment // 4  # of a channel
        images = -(-g.batch // config.images) * config.images
        useful = g.row_pixels / (t.tiles * t.used) * g.height.output / g.pitch * g.batch / images
        pixels = useful * (2 * t.used + (g.width.reach if t.tiles > 1 else 0)) * ROWS * config.images
        return Work(
            tensor_clocks=steps * config.channels * products,
            shared_bytes=steps * (written + operands + 2 * t.sums_bytes / CHAIN),
            l2_bytes=steps * pixels * max(config.channels * 2, 32),
            instructions=steps * (pixels * 4 + config.channels * products * 2),
            waits=steps / config.stages,
            turns=steps * config.channels / config.warps * (1 + products / 12),  # a warp's channels follow each other
            memory_bytes=bytes_touched(problem),
            waves=waves,
            **self.reduction_work(problem, config),
        )

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to everything but the batch, stages and splits."""
        t, g = tiling(problem, config), axes(problem)
        return {
            **super().macros(problem, config),
            **field_macros(config, "channels", "segments", "images", "warps"),
            **field_macros(t, "segment", "columns", "used", "tiles", "x_pad", "x_columns"),
            **field_macros(g.height, name="{}_H"),
            **field_macros(g.width, name="{}_W"),
            **field_macros(problem, "in_channels", "out_channels"),
            "ROWS": ROWS,
            "PITCH": g.pitch,
            "WRAP": g.wrap,
            "FILTER": problem.taps,
            "MULTIPLIER": problem.out_channels // problem.in_channels,
            "TAP_BLOCKS_W": g.width.tap_blocks,
            "TAP_BLOCKS": g.tap_blocks,
            "PRODUCERS": PRODUCERS,
            "MAX_STAGES": MAX_STAGES,
            "CHAIN": CHAIN if problem.out_dtype == "float32" else 0,
            "STAGE_BYTES": t.planes_bytes,
            "SUMS": _channel_sums(g.width.size),
            "SCRATCH": _SCRATCH,
        }

    def source(self, problem: ConvWgradProblem, config: Config) -> Source:
        """The source, with the operands' layouts as structs of constants."""
        source, t = super().source(problem, config), tiling(problem, config)
        layouts = constants("X", vars(t.x)) + constants("Y", vars(t.y))
        return dataclasses.replace(source, structs=source.structs + layouts)

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        batch, blocks = axes(problem).batch, tiling(problem, config).blocks
        each = -(-blocks // config.splits)
        return Struct("Args", {"batch": batch, "blocks": blocks, "blocks_per_split": each, "stages": config.stages})

    def main(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        params = self._args(problem, config), plan.Pointer(0), plan.Pointer(1)
        return self.launch(
            problem,
            config,
            32 * (config.warps + PRODUCERS),
            tiling(problem, config).shared_bytes(config.stages),
            *params,
        )


FAMILY = Depthwise(Config)
