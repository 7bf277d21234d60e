"""Kernel family: weight gradients of grouped convolutions with few channels per group, on Hopper by TMA tiles and
mma.sync (device code: grouped/wgrad.cu, which defines unit, bundle, block, octet, strip, job and slice).

A thread block computes all filter taps of one block of channels, with the sums in its registers; of a long
filter it computes a part of the columns. A 1D convolution is seen as a 2D one over images of height 1. Groups of any
other width than `GROUP_CHANNELS` are padded to whole blocks: a TMA box begins at a multiple of 8 channels, and sums
with channels of neighbouring groups are not stored.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import box_map, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import Geometry, axis_macros, bytes_touched, equal_parts, geometry
from jax_splitk.kernels.base.split import SplitFamily, nearby, whole_fours
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import lines_of_row
from jax_splitk.kernels.grouped import multiprocessor as sm
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Launch, MapParam, TiledMap
from jax_splitk.runtime.target import Target

GROUP_CHANNELS = (2, 4, 8, 16, 32, 64)  # groups that fill blocks
MAX_GROUP = 256
IN_BLOCKS, OUT_BLOCKS = (8, 16, 32), (8, 16, 32, 64)  # channels of a thread block: a TMA box of 16 to 128 bytes
UNIT = 8  # channels of a row of ldmatrix's matrices
OCTET = 8  # pixels of one of ldmatrix's matrices
MAX_KERNEL = 16  # rows, and columns of a part
MAX_BOX = 256  # extent of a TMA box
MAX_ROWS = 32  # a strip's rows are unrolled
MAX_WARPS = 16
MAX_ACCUMULATORS = 96  # of a thread, where a job can be made smaller
MAX_STAGES = 6
# MMAs for each accumulator in a float32 result's split.
MAX_FLOAT32_CHAIN = 1024
_ROWS = 16  # at most, of a candidate
_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      in_block, out_block: input and output channels of a thread block: whole bundles, or a part of one.
      images, rows, columns: output pixels of a tile; `columns` is the image's width or a multiple of 8 below it.
      slices: warps that divide the pixels of a tile among themselves.
      stages: depth of the shared-memory pipeline, in tiles.
      splits: parts of the tiles; none may be empty.
    """

    in_block: int
    out_block: int
    images: int
    rows: int
    columns: int
    slices: int
    stages: int
    splits: int


def is_padded(p: ConvWgradProblem) -> bool:
    """Whether the blocks of a group's channels may reach beyond the group."""
    return not {*p.group_channels} <= {*GROUP_CHANNELS}


def bundle(p: ConvWgradProblem) -> tuple[int, int, int]:
    """(groups, input channels, output channels) of a bundle: one group, if groups are padded."""
    group_in, group_out = p.group_channels
    if is_padded(p):
        return 1, group_in, group_out
    groups = max(1, UNIT // group_in, UNIT // group_out)
    return groups, groups * group_in, groups * group_out


@functools.lru_cache(maxsize=4096)
def seen(p: ConvWgradProblem) -> Geometry:
    """The geometry with a thread block's part of the filter: all rows, and a part of the columns if these are many."""
    g = geometry(p, 2)
    return dataclasses.replace(g, kernel=(g.kernel[0], equal_parts(g.kernel[1], MAX_KERNEL)[0]))


def _column_parts(p: ConvWgradProblem) -> int:
    return -(-geometry(p, 2).kernel[1] // seen(p).kernel[1])


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A thread block's work. The device code has the fields as macros.

    Attributes:
      in_parts, out_parts: blocks along the input and the output channels of a bundle.
      sum_rows: input channels with which an output channel of the block has sums: at most those of its group, or all
        of the block if groups are padded.
      x_height, x_width, dy_width: pixels of a tile's boxes; widths in whole octets.
      dy_offset: offset of dY in a stage, in bytes.
      strips: pairs of octets of a tile's row.
      reuse: whether a row of X is loaded once, for all tap rows.
      warp_in, warp_out, warp_columns: a warp's job: units of X and of dY of one bundle, and tap columns.
      bundles: bundles of the block; 1 if the block is a part of a bundle.
      in_jobs, out_jobs, column_jobs: parts of a bundle's units of X and of dY, and of the tap columns.
    """

    in_parts: int
    out_parts: int
    sum_rows: int
    x_height: int
    x_width: int
    dy_width: int
    dy_offset: int
    stage_bytes: int
    strips: int
    reuse: bool
    warp_in: int
    warp_out: int
    warp_columns: int
    bundles: int
    in_jobs: int
    out_jobs: int
    column_jobs: int

    @property
    def jobs(self) -> int:
        return self.bundles * self.in_jobs * self.out_jobs * self.column_jobs

    @property
    def pairs(self) -> int:
        """The number of pairs of units of X that a warp has in a job."""
        return -(-self.warp_in * self.warp_columns // 2)


@functools.lru_cache(maxsize=4096)
def tiling(p: ConvWgradProblem, config: Config) -> Tiling:
    """The tiling with the largest jobs whose accumulators leave room for other registers."""
    g, (_, bundle_in, bundle_out) = seen(p), bundle(p)
    pixels = config.images * config.rows
    x_height = (config.rows - 1) * g.stride[0] + g.reach[0] + 1
    x_width = sm.above((config.columns - 1) * g.stride[1] + g.reach[1] + 1, OCTET)
    dy_width = sm.above(config.columns, OCTET)
    x_bytes = sm.above(config.images * x_height * x_width * config.in_block * 2, 1024)
    bundles = 1 if is_padded(p) else max(1, config.in_block // bundle_in)
    in_units, out_units = config.in_block // UNIT // bundles, config.out_block // UNIT // bundles
    warp_in, warp_out, columns = min(2, in_units), min(4, out_units), g.kernel[1]
    while g.kernel[0] * -(-warp_in * columns // 2) * warp_out * 4 > MAX_ACCUMULATORS and (warp_out > 1 or columns > 1):
        if warp_out > 1:
            warp_out //= 2
        else:
            columns = -(-columns // 2)
    return Tiling(
        in_parts=-(-(_covered(bundle_in) if is_padded(p) else bundle_in) // config.in_block),
        out_parts=-(-(_covered(bundle_out) if is_padded(p) else bundle_out) // config.out_block),
        sum_rows=config.in_block if is_padded(p) else min(config.in_block, p.group_channels[0]),
        x_height=x_height,
        x_width=x_width,
        dy_width=dy_width,
        dy_offset=x_bytes,
        stage_bytes=x_bytes + sm.above(pixels * dy_width * config.out_block * 2, 1024),
        strips=-(-(dy_width // OCTET * config.images) // 2),
        reuse=g.stride[0] == g.dilation[0] == 1 and g.kernel[0] > 1,
        **{"warp_in": warp_in, "warp_out": warp_out, "warp_columns": columns, "bundles": bundles},
        in_jobs=in_units // warp_in,
        out_jobs=out_units // warp_out,
        column_jobs=-(-g.kernel[1] // columns),
    )


def registers(p: ConvWgradProblem, t: Tiling) -> int:
    """The most registers of a thread: accumulators, rows of dY, two rows of X, addresses and others."""
    height = seen(p).kernel[0]
    rows = height if t.reuse else 1
    count = height * t.pairs * t.warp_out * 4 + 2 * rows * t.warp_out + 8 * t.pairs + 2 * (t.pairs + t.warp_out) + 28
    return sm.above(count, 8)


def shared_bytes(p: ConvWgradProblem, config: Config) -> int:
    """Bytes of the pipeline, whose space the slices' sums use at the end."""
    t = tiling(p, config)
    sums = math.prod(seen(p).kernel) * t.sum_rows * config.out_block * 4
    return max(config.stages * t.stage_bytes, config.slices * sums) + sm.ALIGNMENT_BYTES


def _group_refusal(p: ConvWgradProblem) -> str | None:
    if p.feature_group_count == 1:
        return "feature_group_count 1; accepted: at least 2"
    group_in, group_out = p.group_channels
    largest = GROUP_CHANNELS[-1]
    if not is_padded(p) or (
        min(group_in, group_out) > 1
        and max(group_in, group_out) <= MAX_GROUP
        and (group_in % largest or group_out % largest)  # else WGMMA's tiles are full
    ):
        return None
    given = f"{group_in} input and {group_out} output channels per group"
    return f"{given}; accepted: 2 to {MAX_GROUP}, and not multiples of {largest} above it"


def _filter_refusal(p: ConvWgradProblem) -> str | None:
    if geometry(p, 2).kernel[0] <= MAX_KERNEL:
        return None
    return f"a filter of {p.kernel_spatial}; accepted: up to {MAX_KERNEL} rows"


def _covered(channels: int) -> int:
    """The channels of a padded group, and those between the multiple of 8 at which its first box begins and the group,
    at most."""
    return channels + UNIT - math.gcd(channels, UNIT)


def _smallest(p: ConvWgradProblem) -> Config:
    """The config with the least shared memory, with one split."""
    block = min(_blocks(p), key=sum)
    return Config(*block, images=1, rows=1, columns=min(OCTET, geometry(p, 2).out[1]), slices=1, stages=2, splits=1)


def _blocks(p: ConvWgradProblem) -> list[tuple[int, int]]:
    """The legal (in_block, out_block), largest first."""
    _, bundle_in, bundle_out = bundle(p)
    if is_padded(p):
        ins, outs = (
            [block for block in blocks if block < n] + [block for block in blocks if block >= n][:1]
            for blocks, n in ((IN_BLOCKS, _covered(bundle_in)), (OUT_BLOCKS, _covered(bundle_out)))
        )
        return sorted(itertools.product(ins, outs), key=lambda block: (-sum(block), -block[0]))
    whole = [(i, o) for i in IN_BLOCKS for o in OUT_BLOCKS if i % bundle_in == 0 and i * bundle_out == o * bundle_in]
    parts = [(i, o) for i in IN_BLOCKS for o in OUT_BLOCKS if bundle_in % i == 0 and bundle_out % o == 0]
    return sorted({*whole, *parts}, key=lambda block: (-sum(block), -block[0]))


def _row_counts(out_h: int) -> list[int]:
    """Divisors of the height from 4 on; if there are none, heights that nearly divide it."""
    if out_h <= 4:
        return [out_h]
    exact = [rows for rows in range(4, _ROWS + 1) if out_h % rows == 0]
    return exact or sorted({-(-out_h // -(-out_h // rows)) for rows in (4, 8, _ROWS)})


def _column_counts(out_w: int) -> list[int]:
    whole = [out_w] if out_w <= _COLUMNS else []
    parts = {sm.above(-(-out_w // -(-out_w // width)), OCTET) for width in (_COLUMNS, 32, 16)}
    return whole + sorted((width for width in parts if width < out_w), reverse=True)


# ---- cost model ----------------------------------------------------------------------------------------------------


def _lines(p: ConvWgradProblem, block: int, each: int, channels: int) -> float:
    """Lines that TMA touches for a pixel of a block of channels. Blocks begin at a bundle of `each` channels, or are
    parts of it."""
    first = block if not is_padded(p) and block % each == 0 else math.gcd(block, each)
    return lines_of_row(2 * math.gcd(first, channels), 2 * block)


def tile_work(p: ConvWgradProblem, config: Config) -> tuple[Mapping[str, float], float]:
    """The work of a tile: the part that its warps share, and the turns of its slowest warp."""
    g, t = seen(p), tiling(p, config)
    strips, steps = t.jobs * t.strips, t.jobs * t.strips * config.rows
    x_rows = t.x_height if t.reuse else config.rows * g.kernel[0]
    row_mmas = g.kernel[0] * t.pairs * t.warp_out  # of a strip's row
    # Rows of ldmatrix that a stride brings to the same banks.
    conflicts = math.gcd(g.stride[1], 8)
    wavefronts = strips * x_rows * t.pairs * 4 * conflicts + steps * t.warp_out * 2
    loads = strips * x_rows * t.pairs + steps * -(-t.warp_out // 2)
    of_x = t.x_height * t.x_width * _lines(p, config.in_block, bundle(p)[1], p.in_channels)
    of_dy = config.rows * t.dy_width * _lines(p, config.out_block, bundle(p)[2], p.out_channels)
    shared_by_all = {
        "tensor_clocks": steps * row_mmas,
        "shared_bytes": wavefronts * 128 + t.stage_bytes,
        "instructions": steps * row_mmas + 3 * loads + strips * (40 + 4 * t.pairs),
        "l2_bytes": t.stage_bytes,
        "rows": config.images * (of_x + of_dy),
    }
    of_warp = -(-t.strips // config.slices)
    return shared_by_all, 1 + of_warp * (x_rows / 3 + config.rows * row_mmas / 12)


class Grouped(SplitFamily[ConvWgradProblem, Config]):
    """Preferred whenever it is legal: XLA's grouped weight gradients run at a fraction of the memory's rate."""

    name = "wgrad_grouped"
    ABI = 1
    file = "grouped/wgrad.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        reason = refusals.batch_groups(problem) or refusals.operands(problem, (1, 2), _group_refusal)
        reason = reason or refusals.input_pixels(problem) or refusals.output_pixels(problem)
        reason = reason or refusals.weights(problem) or refusals.padded_input(problem, MAX_BOX)
        return reason or _filter_refusal(problem) or self.smallest_refusal(problem, _smallest(problem))

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        out_h, out_w = geometry(problem, 2).out
        block = (config.in_block, config.out_block)
        if block not in _blocks(problem):
            accepted = ", ".join(f"{i}x{o}" for i, o in _blocks(problem))
            return f"in_block {block[0]}, out_block {block[1]}; accepted with these groups: {accepted}"
        reason = field_refusal(
            config,
            images=range(1, min(problem.batch, MAX_BOX) + 1),
            rows=range(1, min(out_h, MAX_ROWS) + 1),
            stages=range(2, MAX_STAGES + 1),
        )
        if reason is not None:
            return reason
        if config.columns != out_w and (config.columns < 1 or config.columns % OCTET or config.columns > out_w):
            return f"columns {config.columns}; accepted: {out_w}, or a multiple of {OCTET} below it"
        t = tiling(problem, config)
        if max(t.x_height, t.x_width, t.dy_width) > MAX_BOX:
            tile = f"rows {config.rows}, columns {config.columns}"
            return f"{tile}: {t.x_height}x{t.x_width} pixels of input; accepted: at most {MAX_BOX} a side"
        warps = t.jobs * config.slices
        if not (1 <= config.slices <= t.strips and warps <= MAX_WARPS):
            accepted = f"1 to {t.strips}, and at most {MAX_WARPS} warps"
            return f"slices {config.slices}, with {t.jobs} jobs each; accepted: {accepted}"
        if (reason := sm.registers_refusal(warps, registers(problem, t))) is not None:
            return reason
        if (needed := shared_bytes(problem, config)) > sm.SHARED_BYTES:
            return f"{needed} bytes of shared memory; accepted: at most {sm.SHARED_BYTES}"
        return split_k.splits_refusal(config.splits, self.reduction_blocks(problem, config), "tiles", uneven=True)

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int, int]:
        """Numbers of blocks along bundles, along a bundle's input and output channels, and of parts of the filter."""
        bundles, t = problem.feature_group_count // bundle(problem)[0], tiling(problem, config)
        return -(-bundles // t.bundles), t.in_parts, t.out_parts, _column_parts(problem)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
        """Numbers of tiles of pixels along groups of images, rows and columns."""
        out_h, out_w = geometry(problem, 2).out
        return -(-problem.batch // config.images), -(-out_h // config.rows), -(-out_w // config.columns)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        return MAX_FLOAT32_CHAIN // (-(-tiling(problem, config).strips // config.slices) * config.rows)

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        t = tiling(problem, config)
        return sm.blocks_per_sm(shared_bytes(problem, config), t.jobs * config.slices, registers(problem, t))

    def in_waves(self, problem: ConvWgradProblem, config: Config, target: Target, most: int = 2) -> Iterator[Config]:
        """Configs with the splits that fill half a wave, one and two waves. Splits need not be equal."""
        wave, least = self.wave(problem, config, target), self.least_splits(problem, config)
        all_tiles = min(self.reduction_blocks(problem, config), split_k.MAX_GRID_Y)
        wanted = {round(wave / 2), *(int(wave * waves) for waves in range(1, most + 1))}
        yield from varied(config, splits=sorted({min(max(s, least, 1), all_tiles) for s in wanted}))

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """Legal configs with one split, the most promising first."""
        # Blocks of 64 or 128 bytes a pixel where the bundles allow it; smaller ones may have less padding.
        found = (
            self._variants_of(problem, 16 if is_padded(problem) else 32)
            or self._variants_of(problem, UNIT)
            or [_smallest(problem)]
        )
        of = {c: variant for variant in found for c in self.in_waves(problem, variant, target)}
        return list(dict.fromkeys(of[c] for c in self.by_estimate(problem, of, target)))

    def _variants_of(self, problem: ConvWgradProblem, least: int) -> list[Config]:
        """Variants with blocks of at least `least` channels, if bundles have so many."""
        (out_h, out_w), (_, bundle_in, bundle_out) = geometry(problem, 2).out, bundle(problem)
        blocks = [
            (i, o)
            for i, o in _blocks(problem)
            if min(least, bundle_in) <= i <= problem.in_channels and min(least, bundle_out) <= o <= problem.out_channels
            if max(i, o) >= least
        ]
        tiles = itertools.product(blocks, _row_counts(out_h), _column_counts(out_w), (1, 2, 4))
        shapes = (Config(*block, images, rows, columns, 1, 2, 1) for block, rows, columns, images in tiles)
        return [config for shape in shapes for config in self._with_slices(problem, shape)]

    def _with_slices(self, problem: ConvWgradProblem, config: Config) -> Iterator[Config]:
        """Configs with up to 16 warps, and pipelines that leave room for one to three thread blocks an SM."""
        t = tiling(problem, config)
        jobs, strips = t.jobs, t.strips
        for slices in sorted({1, *(warps // jobs for warps in (4, 8, 12, 16) if warps % jobs == 0)}):
            # Slices take whole strips: no more than a quarter of the warps may wait.
            if slices > strips or strips < 0.75 * -(-strips // slices) * slices:
                continue
            depths = {sm.pipeline_bytes(together) // t.stage_bytes for together in (1, 2, 3)}
            for stages in sorted({min(4, depth) for depth in depths if depth >= 2}):
                sliced = dataclasses.replace(config, slices=slices, stages=stages)
                if self.config_refusal(problem, sliced) is None:
                    yield sliced

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """One stage or slice more or less, other images and rows, and other split counts: nearby, doubled and
        halved."""
        wanted, least = nearby(config.splits, self.wave(problem, config, target)), self.least_splits(problem, config)
        sizes = {"slices": config.slices, "images": config.images, "rows": config.rows}
        found = varied(config, splits=[s for s in sorted(wanted) if s >= least])
        found += varied(config, stages=(config.stages - 1, config.stages + 1))
        found += varied(config, **{field: (value // 2, value * 2) for field, value in sizes.items()})
        if config.images > 1:  # less is left to do once the last tile has come
            half = dataclasses.replace(config, images=config.images // 2, stages=min(2 * config.stages, MAX_STAGES))
            found += varied(half, slices=sorted({1, min(config.slices, tiling(problem, half).strips)}))
        return found

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        """Also counts pixels and channels beyond the problem."""
        blocks = self.thread_blocks(problem, config) * config.splits
        each = -(-self.reduction_blocks(problem, config) // config.splits)
        sharing = -(-blocks // target.cores)  # thread blocks of the busiest SM
        together = min(self.blocks_per_sm(problem, config), sharing)
        shared_by_all, turns = tile_work(problem, config)
        return Work(
            **{name: sharing * each * value for name, value in shared_by_all.items()},
            turns=sharing * each * turns / together,
            memory_bytes=bytes_touched(problem),
            memory_share=min(1.0, blocks / target.cores),
            waves=self.waves(problem, config, target),
            **self.reduction_work(problem, config),
        )

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to the window, the groups and the image's tiles, not to splits."""
        p, g, t = problem, seen(problem), tiling(problem, config)
        groups, bundle_in, bundle_out = bundle(p)
        _, tiles_h, tiles_w = self.block_counts(p, config)
        return {
            **super().macros(problem, config),
            **axis_macros(KERNEL=g.kernel, STRIDE=g.stride, DILATION=g.dilation),
            **dict(zip(("GROUP_IN", "GROUP_OUT"), p.group_channels, strict=True)),
            **{"BUNDLE": groups, "BUNDLE_IN": bundle_in, "BUNDLE_OUT": bundle_out, "PADDED": int(is_padded(p))},
            **field_macros(config, "in_block", "out_block", "images", "rows", "columns", "slices", "stages"),
            **field_macros(t),
            **{"FILTER_W": geometry(p, 2).kernel[1], "COLUMN_PARTS": _column_parts(p)},
            "RAGGED": int(g.out[0] % config.rows != 0),
            "TILES_H": tiles_h,
            "TILES_W": tiles_w,
        }

    def maps(self, problem: ConvWgradProblem, config: Config) -> tuple[TiledMap, ...]:
        p, g, t = problem, seen(problem), tiling(problem, config)
        x_box = (config.in_block, t.x_width, t.x_height, config.images)
        dy_box = (config.out_block, t.dy_width, config.rows, config.images)
        return (
            box_map(p, 0, (p.batch, *g.size, p.in_channels), x_box),
            box_map(p, 1, (p.batch, *g.out, p.out_channels), dy_box),
        )

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        p, g = problem, geometry(problem, 2)
        each, more = divmod(self.reduction_blocks(p, config), config.splits)
        stride = whole_fours(self.partial_size(p, config)) if config.splits > 1 else 0
        return Struct(
            "Args",
            {
                "out_channels": p.out_channels,
                "stride": stride,  # from split to split
                "out": g.out,
                "pad": g.pad,
                "each": each,  # tiles of a split
                "more": more,  # of the splits, the first, have another one
            },
        )

    def main(self, problem: ConvWgradProblem, config: Config) -> Launch:
        threads = 32 * (tiling(problem, config).jobs * config.slices + 1)
        params = MapParam(0), MapParam(1), self._args(problem, config)
        return self.launch(problem, config, threads, shared_bytes(problem, config), *params)


FAMILY = Grouped(Config)
