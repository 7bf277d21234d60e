"""Kernel family: forward passes and input gradients of grouped convolutions with few channels per group, on Hopper by
TMA boxes and mma.sync (device code: grouped/passes.cu, which defines unit, bundle, strip, block of rows and step).

There are few products, so memory bounds the time. A thread block slides down images, so that it reads the input only
once, apart from pixels that tiles share. It multiplies 16 channels at a time. If groups are smaller, weights between
different groups are zeros.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator

from jax import numpy as jnp

from jax_splitk.kernels.base import passes, refusals
from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal, limits_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, geometry
from jax_splitk.kernels.base.passes import forward, of_both_passes, output_blocks
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.epilogue import conv_finishes, conv_macros, conv_params
from jax_splitk.kernels.device.split_k import MAX_GRID_Y, OUT_CODES
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import lines_of_row
from jax_splitk.kernels.grouped import multiprocessor as sm
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import Launch, MapParam, Pointer, TiledMap, tensor_map_strides
from jax_splitk.runtime.target import Target

UNIT = 16  # channels of an MMA's k, and of two of its n
STRIP = 16  # pixels of an MMA's m
WEIGHTS_BYTES = UNIT * UNIT * 2  # of a unit of the input and one of the output, for one tap
BLOCKS = (32, 64)  # input channels of a thread block: a TMA box of 64 or 128 bytes
_WEIGHT_BOXES = (16, 32, 64)  # channels of a box of weights
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a box's row
_SWIZZLE_BYTES = 1024  # of its pattern, at a multiple of which boxes lie
_TMA_RESULTS, _COPIED_RESULTS = 3, 2  # blocks of rows in shared memory: one is written to, the others stored
_LINE_BYTES = 128  # of a pixel: lines begin at multiples of them then
_MAX_STRIDE = 4
_MAX_BOX = 256  # extent of a TMA box
_MAX_WARPS = 15  # consumers
_MAX_STAGES = 12
_MAX_PRODUCTS = 4096  # of the device code, in which all are unrolled
_MAX_THREAD_REGISTERS = 240
_MAX_CANDIDATES, _MAX_OF_KIND = 40, 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How a pass is computed. Blocks of rows and columns have one row or column, except in an input gradient with
    strides.

    Attributes:
      in_block: input channels of a thread block.
      images, rows, columns: images, blocks of rows and blocks of columns of a tile.
      units: units of 16 output channels of a warp.
      strips: strips of 16 pixels of a warp.
      stages: depth of the shared-memory pipeline.
      workers: thread blocks that share the tiles of a block of channels.
    """

    in_block: int
    images: int
    rows: int
    columns: int
    units: int
    strips: int
    stages: int
    workers: int


@functools.lru_cache(maxsize=4096)
def bundle(p: ConvProblem) -> tuple[int, int]:
    """Input and output channels of a bundle in the forward pass."""
    each = forward(p).group_channels
    groups = math.lcm(*(UNIT // math.gcd(UNIT, channels) for channels in each))
    return groups * each[0], groups * each[1]


def halves(p: ConvProblem) -> bool:
    """Whether each 8 output channels sum over only 8 input channels, so that an MMA has a k of 8."""
    group_in, group_out = forward(p).group_channels
    return group_in == group_out and 8 % group_in == 0


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A thread block's work.

    Attributes:
      bundles: bundles of a thread block.
      blocks: blocks of channels.
      tiles: numbers of tiles along images, planes, rows and columns.
      step_rows, x_width: pixels of a step's box.
      weight_box: channels and rows of a box of weights; `weight_boxes`: how many along each.
      out_box: channels of a box of results; `result_box_bytes`: of one.
      slots: blocks of rows that have sums at a time.
      warps: consumers.
      resident: whether a warp keeps its weights in registers, if these suffice.
      products: products of a warp for a block of rows.
    """

    bundles: int
    blocks: int
    tiles: tuple[int, int, int, int]
    step_rows: int
    x_width: int
    stage_bytes: int
    weight_box: tuple[int, int]
    weight_boxes: tuple[int, int]
    weights_bytes: int
    out_box: int
    result_box_bytes: int
    result_bytes: int
    slots: int
    warps: int
    resident: bool
    products: int
    registers: int


def _step_rows(g: Geometry) -> set[int]:
    """Rows of a step that some row of taps reads."""
    return {tap * g.dilation[1] % g.stride[1] for tap in range(g.kernel[1])}


def _mirrored(p: ConvProblem) -> bool:
    return not isinstance(p, ConvFpropProblem)


def _weight_shape(p: ConvProblem) -> tuple[int, int]:
    """Columns and rows of the weight as a matrix."""
    q = forward(p)
    sides = (q.in_channels, q.group_channels[1]) if _mirrored(p) else (q.out_channels, q.group_channels[0])
    return sides[0], sides[1] * math.prod(geometry(q, 3).kernel)


def _weight_boxes(p: ConvProblem, bundles: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Channels and rows of a box of a thread block's weights, and the number of boxes along each."""
    columns, rows = bundles * bundle(p)[0 if _mirrored(p) else 1], _weight_shape(p)[1]
    width = min((box for box in _WEIGHT_BOXES if box >= columns), default=_WEIGHT_BOXES[-1])
    boxes = -(-rows // _MAX_BOX)
    height = sm.above(-(-rows // boxes), _SWIZZLE_BYTES // (2 * width))
    return (width, height), (-(-columns // width), boxes)


def _skipped(g: Geometry) -> int:
    """Pixels of a line's first block that lie before the output."""
    base, offset, _ = output_blocks(g, 2)
    return max(0, -(base * g.lhs_dilation[2] + offset))


def _sums(g: Geometry) -> int:
    """Sums of a block of columns that are under way: for each block of rows, those that an earlier step has begun.
    ptxas starts the others late if a warp has one strip and unit."""
    (_, down, _), (_, up_h, up_w) = g.stride, g.lhs_dilation
    ahead = [g.reach[1] - tap * g.dilation[1] for tap in range(g.kernel[1])]  # rows before a block's x comes first
    rows = {(slot, row % up_h) for row in ahead for slot in range(row // (down * up_h) + 1)}
    return len(rows) * len({tap * g.dilation[2] % up_w for tap in range(g.kernel[2])})


def _out_boxes(size: int) -> list[int]:
    """Possible elements of a box's row that have `size` bytes each."""
    return [row // size for row in _SWIZZLES if row // size <= 64]


@functools.lru_cache(maxsize=4096)
def tiling(p: ConvProblem, config: Config) -> Tiling:
    q = forward(p)
    g, (bundle_in, bundle_out) = geometry(q, 3), bundle(p)
    (_, up_h, up_w), taps, bundles = g.lhs_dilation, math.prod(g.kernel), max(1, config.in_block // bundle_in)
    in_units, out_units = bundle_in // UNIT, bundle_out // UNIT
    step_rows = 1 + max(_step_rows(g))
    x_width = (config.columns - 1) * g.stride[2] + g.reach[2] // up_w + 1
    slots = g.reach[1] // (g.stride[1] * up_h) + 1
    weight_box, weight_boxes = _weight_boxes(p, bundles)
    weights_bytes = math.prod(weight_box) * math.prod(weight_boxes) * 2
    out_channels, out_size = bundles * bundle_out, jnp.dtype(p.out_dtype).itemsize
    out_box = max(box for box in _out_boxes(out_size) if out_channels % box == 0)
    pixels = config.images * config.columns
    in_strips = sm.above(pixels, STRIP * config.strips)  # with those that no pixel of the tile is in
    result_rows = in_strips if up_h * up_w == 1 else up_h * up_w * sm.above(in_strips, config.columns)
    result_box_bytes = sm.above(result_rows * out_box * out_size, _SWIZZLE_BYTES)
    each = config.units * config.strips
    sums = 8 * each * (slots * up_h * up_w if each > 1 else _sums(g))
    addresses = config.strips * (step_rows * g.kernel[2] + (1 if out_size == 2 else 2))
    others = sums + addresses + 8 * config.strips + (18 if up_h * up_w == 1 else 26)
    with_weights = sm.above(others + (2 if halves(p) else 4) * taps * in_units * config.units, 8)
    warps = bundles * out_units // config.units * -(-pixels // (STRIP * config.strips))
    resident = with_weights <= _MAX_THREAD_REGISTERS and sm.fits_registers(warps, with_weights, 1)
    return Tiling(
        bundles,
        -(-q.in_channels // (bundles * bundle_in)),
        (
            -(-q.batch // config.images),
            g.out[0],
            -(-output_blocks(g, 1)[2] // config.rows),
            -(-output_blocks(g, 2)[2] // config.columns),
        ),
        step_rows,
        x_width,
        sm.above(config.images * step_rows * x_width * config.in_block * 2, _SWIZZLE_BYTES),
        weight_box,
        weight_boxes,
        weights_bytes if resident else bundles * out_units * in_units * taps * WEIGHTS_BYTES,
        out_box,
        result_box_bytes,
        out_channels // out_box * result_box_bytes,
        slots,
        warps,
        resident,
        2 * taps * in_units * config.units * config.strips,
        with_weights if resident else sm.above(others + 8, 8),
    )


_COPIED, _BOX, _LINES = 0, 1, 2  # macro STORED


def _stored(p: ConvProblem, t: Tiling) -> int:
    """How results are stored: by TMA; line by line by TMA, if blocks may begin before the output; or by threads, if
    lines are not aligned for TMA."""
    if math.prod(geometry(forward(p), 3).lhs_dilation) == 1:
        return _BOX
    return _LINES if t.out_box * jnp.dtype(p.out_dtype).itemsize == _LINE_BYTES else _COPIED


def _results(p: ConvProblem, t: Tiling) -> int:
    """Blocks of rows of results in shared memory."""
    return _COPIED_RESULTS if _stored(p, t) == _COPIED else _TMA_RESULTS


def shared_bytes(p: ConvProblem, config: Config) -> int:
    t = tiling(p, config)
    return config.stages * t.stage_bytes + _results(p, t) * t.result_bytes + t.weights_bytes + sm.ALIGNMENT_BYTES


def _in_blocks(p: ConvProblem) -> list[int]:
    """Blocks of input channels that hold whole bundles; a bundle of 48 has a box of 64."""
    smallest = min(block for block in BLOCKS if block >= bundle(p)[0])
    return [block for block in BLOCKS if block == smallest or block % bundle(p)[0] == 0]


def _units(p: ConvProblem, in_block: int) -> list[int]:
    """Units of a warp: a part of a bundle, or a power of two of whole bundles."""
    each, bundles = bundle(p)[1] // UNIT, max(1, in_block // bundle(p)[0])
    whole = [each << i for i in range(1, bundles.bit_length()) if bundles % (1 << i) == 0]
    return [units for units in range(1, each + 1) if each % units == 0] + whole


def _smallest(p: ConvProblem) -> Config:
    """The config with the least shared memory and the fewest registers."""
    g = geometry(forward(p), 3)
    columns = min(STRIP, output_blocks(g, 2)[2])
    return Config(_in_blocks(p)[0], 1, 1, columns, 1, 1, stages=2, workers=1)


# ---- cost model ----------------------------------------------------------------------------------------------------


_COPY_COST = 3.0  # time of copying a byte of results, relative to storing a byte of sums: fitted to 62 times


def _lines(channels: int, step: int, block: int, size: int = 2) -> float:
    """Lines that TMA touches for a pixel of a block of channels, the first of which is a multiple of `step`."""
    return lines_of_row(size * math.gcd(step, channels), size * block)


def _step_work(p: ConvProblem, config: Config) -> dict[str, float]:
    """The work of a thread block's block of rows on an SM."""
    g, t = geometry(forward(p), 3), tiling(p, config)
    planes = -(-g.kernel[0] // g.lhs_dilation[0])  # that meet the one of the output
    units = max(1, config.units * UNIT // bundle(p)[1]) * bundle(p)[0] // UNIT
    products = t.products * planes / g.kernel[0] * (2 / 3 if halves(p) else 1)
    loads = planes * len(_step_rows(g)) * g.kernel[2] * units * config.strips
    weights = 0 if t.resident else products / (2 * config.strips)
    stores = config.strips * config.units * math.prod(g.lhs_dilation[1:])
    size, by_tma = jnp.dtype(p.out_dtype).itemsize, _stored(p, t) != _COPIED
    out_bytes = t.warps * stores * UNIT * STRIP * size
    moved = planes * t.stage_bytes + out_bytes
    x_step, out_step = t.bundles * bundle(p)[0], math.gcd(t.bundles * bundle(p)[1], t.out_box)
    pixels = planes * config.images * t.step_rows * t.x_width
    lines = pixels * _lines(forward(p).in_channels, x_step, config.in_block)
    if by_tma:
        lines += out_bytes / (t.out_box * size) * _lines(forward(p).out_channels, out_step, t.out_box, size)
    conflicts = math.gcd(g.stride[2], 8)
    return {
        "tensor_clocks": t.warps * products,
        "shared_bytes": t.warps * 512 * (loads * conflicts + weights + stores) + moved,
        "instructions": t.warps * (products + 2 * loads + weights + 12 * stores + 30 * planes),
        "l2_bytes": moved,
        "rows": lines,
        # Threads copy results while nobody multiplies.
        "stored_bytes": 0 if by_tma else _COPY_COST * out_bytes,
        # A warp's turn: its barrier, its first load, and products that wait for each other.
        "turns": (2 * planes + products / 16) / _blocks_per_sm(p, config),
    }


def _blocks_per_sm(p: ConvProblem, config: Config) -> int:
    t = tiling(p, config)
    return sm.blocks_per_sm(shared_bytes(p, config), t.warps, t.registers)


class GroupedConv(ModelledFamily[ConvProblem, Config]):
    """Serves groups with few channels."""

    ABI = 1
    file = "grouped/passes.cu"

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p = problem
        if (reason := refusals.dtypes(p, refusals.HALVES)) is not None:
            return reason
        if p.batch_group_count != 1 or p.feature_group_count == 1:
            given = f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}"
            return f"{given}; accepted: at least 2 feature groups and no batch groups"
        q = forward(p)
        if max(q.group_channels) == 1 or max(bundle(p)[0], bundle(p)[1] // 4) > BLOCKS[-1]:
            groups, channels = bundle(p)[0] // q.group_channels[0], "{} of the input and {} of the output"
            return (
                f"{channels.format(*q.group_channels)} channels of a group, {channels.format(*bundle(p))} of {groups} "
                f"groups, the fewest with multiples of {UNIT} of both; accepted: not 1 of each, and up to {BLOCKS[-1]} "
                f"of the input and {4 * BLOCKS[-1]} of the output"
            )
        if p.in_channels % 8 or p.out_channels % 8:
            return f"{p.in_channels} input and {p.out_channels} output channels; accepted: multiples of 8"
        return self._extent_refusal(p)

    def _extent_refusal(self, p: ConvProblem) -> str | None:
        g = geometry(forward(p), 3)
        if (reason := passes.steps_refusal(g, _MAX_STRIDE) or passes.sizes_refusal(p, g)) is not None:
            return reason
        if (count := math.prod(p.rhs_shape)) > INT32_MAX:
            return f"{count} weights; accepted: up to {INT32_MAX}"
        reason = self.config_refusal(p, _smallest(p))
        return reason and f"a filter of {p.kernel_spatial}, dilated by {p.rhs_dilation}: {reason}"

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        g = geometry(forward(problem), 3)
        reason = field_refusal(config, in_block=_in_blocks(problem))
        if reason is not None:
            return reason
        reason = field_refusal(
            config,
            images=range(1, min(g.batch, _MAX_BOX) + 1),
            rows=range(1, output_blocks(g, 1)[2] + 1),
            columns=range(1, min(output_blocks(g, 2)[2], _MAX_BOX) + 1),
            units=_units(problem, config.in_block),
            strips=(1, 2),
            stages=range(2, _MAX_STAGES + 1),
        )
        return reason or self._tiling_refusal(problem, config)

    def _tiling_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        t, q = tiling(problem, config), forward(problem)
        g = geometry(q, 3)
        exceeded = limits_refusal(
            (t.x_width, "columns of the input", _MAX_BOX),
            (config.columns * g.lhs_dilation[2], "columns of the output", _MAX_BOX),
            (config.images * math.prod(q.g_shape[1:]), "elements of a tile's images", INT32_MAX),
            (math.prod(t.tiles), "tiles", INT32_MAX),
            (t.warps, "consumer warps", _MAX_WARPS),
            (t.registers, "registers of a thread", _MAX_THREAD_REGISTERS),
            (t.products * t.slots, "products of the device code", _MAX_PRODUCTS),
            (shared_bytes(problem, config), "bytes of shared memory", sm.SHARED_BYTES),
        )
        if exceeded is not None:
            tile = f"images {config.images}, rows {config.rows}, columns {config.columns}"
            return f"{tile}, strips {config.strips}, units {config.units}: {exceeded}"
        workers = range(1, min(math.prod(t.tiles), MAX_GRID_Y) + 1)
        return sm.registers_refusal(t.warps, t.registers) or field_refusal(config, workers=workers)

    def finishes(self, problem: ConvProblem, config: Config) -> bool:
        """XLA adds a residual: in the kernel it took longer, for want of registers."""
        return conv_finishes(problem) and problem.residual_dtype == "none"

    def blocks_per_sm(self, problem: ConvProblem, config: Config) -> int:
        return _blocks_per_sm(problem, config)

    def candidates(self, problem: ConvProblem, target: Target) -> list[Config]:
        """The best configs by the model, a few of each kind."""
        found = list(self._variants(problem, target)) or [_smallest(problem)]
        kind = operator.attrgetter("in_block", "units", "strips")
        return self.fastest_of_kinds(problem, found, kind, _MAX_OF_KIND, target)[:_MAX_CANDIDATES]

    def _variants(self, problem: ConvProblem, target: Target) -> Iterator[Config]:
        g = geometry(forward(problem), 3)
        (_, _, rows), (_, _, columns) = output_blocks(g, 1), output_blocks(g, 2)
        heights = sorted({-(-rows // parts) for parts in (1, 2, 4, 8) if rows >= 4 * parts or parts == 1})
        fewest = -(-columns * g.lhs_dilation[2] // _MAX_BOX)
        parts = range(max(fewest, -(-columns // 128)), -(-columns // 14) + 1)
        widths = sorted({-(-columns // count) for count in parts or (fewest,)})[-3:]
        pixels = itertools.product([i for i in (1, 2, 3, 4, 6, 8, 12, 16) if i <= g.batch], widths)
        for (images, width), strips in itertools.product(pixels, (1, 2)):
            if images > 1 and images * width > 256:
                continue
            for in_block in _in_blocks(problem):
                for units in _units(problem, in_block):
                    some = Config(in_block, images, 1, width, units, strips, stages=2, workers=1)
                    if self._tiling_refusal(problem, some) is None:
                        yield from self._of_heights(problem, some, heights, target)

    def _of_heights(self, p: ConvProblem, some: Config, heights: list[int], target: Target) -> Iterator[Config]:
        """Configs with pipelines that leave room for one to four thread blocks an SM, which share the tiles evenly."""
        t = tiling(p, some)
        fitting = (n for n in (1, 2, 3, 4) if sm.fits_registers(t.warps, t.registers, n))
        depths = {min(8, (sm.pipeline_bytes(n) - t.weights_bytes) // t.stage_bytes) for n in fitting}
        for rows, stages in itertools.product(heights, sorted(depth for depth in depths if depth >= 2)):
            config = dataclasses.replace(some, rows=rows, stages=stages)
            tiles, slots = math.prod(tiling(p, config).tiles), target.cores * _blocks_per_sm(p, config)
            each = -(-tiles // max(1, slots // t.blocks))
            config = dataclasses.replace(config, workers=min(-(-tiles // each), MAX_GRID_Y))
            if self.config_refusal(p, config) is None:
                yield config

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        halves = {"images": config.images, "rows": config.rows, "units": config.units, "strips": config.strips}
        found = varied(config, stages=(config.stages - 1, config.stages + 1))
        found += varied(config, workers=(config.workers // 2, config.workers * 2))
        return found + varied(config, **{field: (value // 2, value * 2) for field, value in halves.items()})

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        t = tiling(problem, config)
        blocks = (config.rows + t.slots - 1) * -(-math.prod(t.tiles) // config.workers)
        sharing = -(-t.blocks * config.workers // target.cores)  # thread blocks of the busiest SM
        together = min(sharing, _blocks_per_sm(problem, config))
        return Work(
            **{name: sharing * blocks * value for name, value in _step_work(problem, config).items()},
            memory_bytes=problem.bytes_moved,
            memory_share=min(1.0, t.blocks * config.workers * together / (2 * target.cores)),
            waves=-(-sharing // together),
        )

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        p = forward(problem)
        g, t = geometry(p, 3), tiling(problem, config)
        (base_h, offset_h, blocks_h), (base_w, offset_w, _) = output_blocks(g, 1), output_blocks(g, 2)
        (group_in, group_out), (bundle_in, bundle_out) = p.group_channels, bundle(problem)
        return {
            "ELEMENT": OUT_CODES[p.dtype],
            "OUT": OUT_CODES[p.out_dtype],
            "CTAS_PER_SM": _blocks_per_sm(problem, config),
            "MIRRORED": int(_mirrored(problem)),
            **{"IN_CHANNELS": p.in_channels, "OUT_CHANNELS": p.out_channels},
            **{"GROUP_IN": group_in, "GROUP_OUT": group_out, "BUNDLE_IN": bundle_in, "BUNDLE_OUT": bundle_out},
            **passes.geometry_macros(g),
            **axis_macros(BASE=(base_h, base_w), OFFSET=(offset_h, offset_w), TILES=t.tiles[2:]),
            **{"BLOCKS_H": blocks_h, "BUNDLES": t.bundles},
            **{"STEP_ROWS": t.step_rows, "X_WIDTH": t.x_width, "STAGE_BYTES": t.stage_bytes},
            **dict(zip(("WEIGHT_BOX", "WEIGHT_BOX_ROWS"), t.weight_box, strict=True)),
            **dict(zip(("WEIGHT_COLUMN_BOXES", "WEIGHT_ROW_BOXES"), t.weight_boxes, strict=True)),
            **{"OUT_BOX": t.out_box, "RESULT_BOX_BYTES": t.result_box_bytes, "RESULTS": _results(problem, t)},
            **{"STORED": _stored(problem, t), "SKIPPED": _skipped(g)},
            **{"RESIDENT": int(t.resident)},
            **{name: value for name, value in field_macros(config).items() if name != "WORKERS"},
            **conv_macros(problem),
        }

    def maps(self, problem: ConvProblem, config: Config) -> tuple[TiledMap, ...]:
        p, t = forward(problem), tiling(problem, config)
        g = geometry(p, 3)
        x, out = (p.in_channels, *g.size[::-1], g.batch), (p.out_channels, *g.out[::-1], g.batch)
        _, up_h, up_w = g.lhs_dilation
        by_line = _stored(problem, t) == _LINES
        rows, images = (1, 1) if by_line else (up_h, config.images)
        width, result = config.columns * up_w, len(problem.operand_types)
        return (
            _map(0, p.dtype, x, (config.in_block, t.x_width, t.step_rows, 1, config.images)),
            _map(1, p.dtype, _weight_shape(problem), t.weight_box),
            _map(result, p.out_dtype, out, (t.out_box, width, rows, 1, images)),
            _map(result, p.out_dtype, out, (t.out_box, width - _skipped(g) if by_line else width, rows, 1, images)),
        )

    def launches(self, problem: ConvProblem, config: Config) -> tuple[Launch, ...]:
        t, batch = tiling(problem, config), problem.batch
        args = Struct("Args", {"images": batch, "tiles": math.prod(t.tiles)})
        grid, block = (t.blocks, config.workers, 1), (32 * (t.warps + 1), 1, 1)
        operands = (MapParam(0), MapParam(1), MapParam(2), MapParam(3), Pointer(0), Pointer(1))
        params = (*operands, args, Pointer(len(problem.operand_types)), *conv_params(problem))
        return (Launch(self.kernel_name(problem), grid, block, params, shared_bytes(problem, config)),)


def _map(buffer: int, dtype: str, dims: tuple[int, ...], box: tuple[int, ...]) -> TiledMap:
    """The map of a packed array, with a swizzle as wide as the box's rows."""
    size = jnp.dtype(dtype).itemsize
    return TiledMap(buffer, dtype, dims, tensor_map_strides(dims, size), box, _SWIZZLES[box[0] * size])


FPROP, DGRAD = of_both_passes(GroupedConv, "grouped", Config)
