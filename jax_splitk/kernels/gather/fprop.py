"""Kernel families: forward passes and input gradients with few or odd channels, such as a network's first convolution,
on Hopper (device code: gather/fprop.cu).

As in wgrad_gather, the input of a tile of pixels lies unchanged in shared memory, and the kernel gathers windows from
it into registers. The weights stay in shared memory while a thread block goes from tile to tile. A thread block has the
channels of one group.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import axis_macros
from jax_splitk.kernels.base.passes import forward, of_both_passes
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.epilogue import conv_finishes, conv_macros, conv_params
from jax_splitk.kernels.device.registers import consumer_registers, share_macros, wgmma_fits
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.structs import Divisor, Field, Struct
from jax_splitk.kernels.gather.layout import (
    CONTENTION,
    SHARED_BYTES,
    GatherTile,
    Layout,
    Volume,
    fits_twice,
    layout_of,
    volume,
    waits,
)
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

MAX_CHANNELS = {2: 16, 4: 64}  # by bytes of an element, where other kernels serve more
MAX_ODD_CHANNELS = 256
TILE_N = (16, 32, 64, 96, 128, 192, 256)  # columns of one WGMMA
MIN_CONSUMERS, MAX_CONSUMERS, MIN_STAGES, MAX_STAGES = 2, 4, 3, 4
MAX_STEPS, MAX_ROWS = 128, 1024
_ALIGNMENT_BYTES = 1024 + 16  # of the weights, and what the last window's filling reads
_WIDE_GROUP, _GROUPS_BY_TMA = 24, {2, 3, 4, 6, 8, 12, 16}  # groups of the families im2col and grouped
_OTHER_REGISTERS = 34
_MOST_GROUP, _EPILOGUE_GROUP = 4, 3  # products in a batch; an epilogue needs registers, too
_SPARE_COLUMNS = 16  # of a tile, for whose sums an epilogue needs the registers
# Time of stores of single results, relative to stores of eight. Stores of two and four take a half and a quarter of it.
_SINGLE_STORES = 24  # fitted to 278 times
_ROUNDING = 12  # instructions that round a product's four elements of a lane to tf32
_PIXEL_TILES, _MAX_CANDIDATES = 6, 40


@dataclasses.dataclass(frozen=True)
class Config(GatherTile):
    """How a forward pass is computed: see `GatherTile`; rows are pixels, at least the tile's.

    Attributes:
      stages: depth of the shared-memory pipeline.
    """

    stages: int


@functools.lru_cache(maxsize=4096)
def _gradient(p: ConvProblem) -> ConvWgradProblem:
    """The weight gradient of the forward pass that runs."""
    return ConvWgradProblem(**vars(decisive(forward(p))))


def _is_odd(p: ConvProblem) -> bool:
    """Whether TMA cannot load the channels, in units of 16 bytes; in 16 bits also those of the result."""
    if p.dtype == "float32":
        return forward(p).in_channels % 4 > 0
    return p.in_channels % (8 if isinstance(p, ConvFpropProblem) else 4) > 0 or p.out_channels % 8 > 0


def _groups_refusal(problem: ConvProblem) -> str | None:
    """Why groups are not served: the families grouped and im2col, or families of depthwise convolutions, serve them."""
    p, given = forward(problem), problem.group_channels
    if p.feature_group_count == 1:
        return None
    (channels, columns), halves = p.group_channels, p.dtype != "float32"
    by_tma = halves and p.in_channels % 8 == p.out_channels % 8 == 0
    wide = channels >= _WIDE_GROUP and channels % (16 if p.rank == 3 else 8 if halves else 4) == 0
    if min(given) > 1 and max(given) <= MAX_CHANNELS[4] and not wide and not (by_tma and {*given} <= _GROUPS_BY_TMA):
        return None
    groups = f"{p.feature_group_count} groups of {channels} channels to {columns}"
    return f"{groups}; accepted: 2 to {MAX_CHANNELS[4]} channels each that the families grouped and im2col refuse"


def _least_stages(p: ConvProblem) -> int:
    """With many channels three stages would leave no room for the weights."""
    return MIN_STAGES if _gradient(p).group_channels[0] <= MAX_CHANNELS[2] else 2


def _volume(p: ConvProblem) -> Volume:
    return volume(_gradient(p))


def _layout(v: Volume, config: Config) -> Layout:
    # The recorded times, of 16 bits without groups, are those of layouts for pixels as columns.
    return layout_of(v, config.tile, v.channels, in_rows=v.item == 4 or v.groups > 1)


def _steps(v: Volume, x: Layout) -> int:
    """Products of 32 bytes, with each segment filled up to a multiple of eight elements."""
    return -(-x.segments * -(-(x.parity + x.segment) // 8) * v.item // 4)


def _columns(v: Volume, config: Config) -> int:
    """Columns of tiles, in all groups."""
    return v.groups * -(-v.out_channels // config.tile_n)


def _stored_at_once(v: Volume) -> int:
    """Results of a pixel that are aligned together: the largest of 1, 2, 4 and 8 that divides the output channels."""
    return math.gcd(v.out_channels, 8)


def _turn_bytes(config: Config, out_dtype: str) -> int:
    """Bytes of a consumer warp's 16 rows of results."""
    together = config.tile_n if config.tile_n % 64 else 64  # columns that are stored at a time
    return 0 if out_dtype == "float32" else 16 * (together * 2 + 16)


def _shared_bytes(p: ConvProblem, config: Config) -> int:
    v = _volume(p)
    x = _layout(v, config)
    columns = config.tile_n if v.item == 4 else -(-config.tile_n // 64) * 64
    weights = columns * _steps(v, x) * 32
    turns = 4 * config.consumers * _turn_bytes(config, p.out_dtype)
    return weights + config.stages * x.stage_bytes(v, config.images) + turns + _ALIGNMENT_BYTES


def _group(config: Config, together: int) -> int:
    """Products in a batch: as many as registers allow for two alternating batches; 0 if there are too few registers."""
    if not wgmma_fits(config.tile_n, together, config.consumers):
        return 0
    room = consumer_registers(together, config.consumers) - config.tile_n // 2 - _OTHER_REGISTERS
    return max(0, min(_MOST_GROUP, room // 8))


def _blocks_per_sm(p: ConvProblem, config: Config) -> int:
    return 2 if fits_twice(_shared_bytes(p, config)) and _group(config, 2) else 1


@functools.lru_cache(maxsize=512)
def _pixel_tiles(v: Volume, rows: int) -> tuple[tuple[int, int, int], ...]:
    """(images, tile_p, tile_q) of at most `rows` pixels, with the least work, padding and input for each pixel."""
    found = {}
    widths = {8, 16, 32, 64, 128, v.out[2], -(-v.out[2] // 2), -(-v.out[2] // 4)}
    for q in sorted(w for w in widths if w <= rows):
        for p in {p for p in (1, 2, 4, 8, 16, v.out[1], rows // q) if p * q <= rows}:
            n = min(rows // (p * q), v.batch) if p >= v.out[1] else 1
            config = Config(1, 1, TILE_N[0], n, p, q, 2)
            x = _layout(v, config)
            covered = math.prod(config.block_counts(v)) * rows
            bytes_read = x.stage_bytes(v, n) / config.pixels
            found[n, p, q] = covered / (v.batch * math.prod(v.out)) * (100 + bytes_read)
    return tuple(sorted(found, key=lambda tile: (found[tile], tile))[:_PIXEL_TILES])


class Gather(ModelledFamily[ConvProblem, Config]):
    """Serves few or odd channels, and groups of any number. float32 is multiplied in tf32."""

    ABI = 2
    file = "gather/fprop.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p = _gradient(problem)
        reason = refusals.dtypes(p, (*refusals.HALVES, "float32")) or refusals.tf32(p)
        reason = reason or refusals.batch_groups(p) or _groups_refusal(problem)
        if reason is not None:
            return reason
        if p.feature_group_count > 1:
            return self._size_refusal(problem)
        odd = _is_odd(problem)
        if not (odd or p.dtype == "float32" or isinstance(problem, ConvFpropProblem)):
            given = f"{problem.in_channels} input and {problem.out_channels} output channels"
            return f"{given}; accepted: numbers that TMA cannot load"
        most = MAX_ODD_CHANNELS if odd else MAX_CHANNELS[_volume(problem).item]
        if p.in_channels > most:
            return f"{p.in_channels} channels of the input; accepted: 1 to {most}"
        return self._size_refusal(problem)

    def _size_refusal(self, problem: ConvProblem) -> str | None:
        p = _gradient(problem)
        most = 65535 * TILE_N[0] // p.feature_group_count
        if (columns := p.group_channels[1]) > most:
            return f"{columns} channels of a group's output; accepted: up to {most}"
        reason = refusals.gathered(p, _volume(problem), MAX_ROWS)
        if reason is None and next(self._variants(problem), None) is None:
            reason = f"a filter of {p.kernel_spatial}: its weights, or a tile's input, take too much shared memory"
        return reason

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        reason = field_refusal(
            config,
            consumers=range(MIN_CONSUMERS, MAX_CONSUMERS + 1),
            blocks=range(1, 9),
            tile_n=TILE_N,
            stages=range(_least_stages(problem), MAX_STAGES + 1),
        )
        if reason is not None:
            return reason
        if config.tile_m > MAX_ROWS:
            return f"{config.consumers} consumers of {config.blocks} blocks, {config.tile_m} rows; accepted: {MAX_ROWS}"
        if min(config.tile) < 1 or config.pixels > config.tile_m:
            given = f"images {config.images}, tile_p {config.tile_p} and tile_q {config.tile_q}"
            return f"{given}; accepted: products of 1 to {config.tile_m}"
        v = _volume(problem)
        if (steps := _steps(v, _layout(v, config))) > MAX_STEPS:
            return f"{steps} products of {32 // v.item} elements of the filter; accepted: up to {MAX_STEPS}"
        if not _group(config, 1):
            return (
                f"tile_n {config.tile_n} with {config.consumers} consumers; accepted: tiles that fit in their registers"
            )
        if (needed := _shared_bytes(problem, config)) > SHARED_BYTES:
            return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        return None

    def why_xla_untuned(self, problem: ConvProblem) -> str | None:
        """XLA is known to be slow for few channels of float32 alone."""
        channels = _gradient(problem).group_channels[0]
        if problem.dtype != "float32" or channels <= MAX_CHANNELS[4]:
            return None
        return f"{channels} channels of float32, more than {MAX_CHANNELS[4]}, were not measured"

    def finishes(self, problem: ConvProblem, config: Config) -> bool:
        """A residual of 16 bits is loaded to where results of 16 bits will be. Sums must leave some registers."""
        if not conv_finishes(problem):
            return False
        fits = wgmma_fits(config.tile_n + _SPARE_COLUMNS, _blocks_per_sm(problem, config), config.consumers)
        return fits and (problem.out_dtype == "float32" or problem.residual_dtype in ("none", *refusals.HALVES))

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: ConvProblem, config: Config) -> int:
        return _blocks_per_sm(problem, config)

    def _variants(self, problem: ConvProblem) -> Iterator[Config]:
        v = _volume(problem)
        consumer_counts = range(MIN_CONSUMERS, MAX_CONSUMERS + 1)
        for tile_n, consumers, blocks in itertools.product(v.column_tiles(TILE_N), consumer_counts, (1, 2, 4)):
            if not _group(Config(consumers, blocks, tile_n, 1, 1, 1, 2), 1):
                continue
            for tile in _pixel_tiles(v, 64 * consumers * blocks):
                for stages in range(MAX_STAGES, _least_stages(problem) - 1, -1):
                    config = Config(consumers, blocks, tile_n, *tile, stages)
                    if self.config_refusal(problem, config) is None:
                        yield config
                        if _blocks_per_sm(problem, config) == 2:
                            break

    def candidates(self, problem: ConvProblem, target: Target) -> Sequence[Config]:
        """The most promising by the model."""
        return _ranked(self, problem, target)

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        """A stage more or less, and tiles with twice or half the rows."""
        found = varied(config, stages=(config.stages - 1, config.stages + 1))
        found.append(dataclasses.replace(config, tile_p=config.tile_p * 2, blocks=config.blocks * 2))
        if config.tile_p % 2 == config.blocks % 2 == 0:
            found.append(dataclasses.replace(config, tile_p=config.tile_p // 2, blocks=config.blocks // 2))
        return found

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        v = _volume(problem)
        x, together = _layout(v, config), _blocks_per_sm(problem, config)
        steps, tiles = _steps(v, x), math.prod(config.block_counts(v)) * _columns(v, config)
        row_blocks = config.consumers * config.blocks
        # Rows of shared memory, and instructions, for the loads of a 64-row block's warps.
        loads = 16 * steps * (2 if v.item == 2 and not x.paired else 1)
        load_instructions = loads / 4
        if v.item == 4:
            load_instructions = steps * ((2 if x.paired else 4) + _ROUNDING)
        tensor = steps * max(16, config.tile_n / 2)
        shared = loads + steps * config.tile_n / 4 + config.tile_n * 2
        copies = x.stage_bytes(v, config.images) / x.granule
        stored = _stored_at_once(v)
        stores = config.tile_n * (1 if stored == 8 else _SINGLE_STORES / stored)
        turns = -(-tiles // (target.cores * together)) * together
        return Work(
            tensor_clocks=turns * row_blocks * tensor,
            shared_bytes=CONTENTION * turns * (row_blocks * shared * 128 + x.stage_bytes(v, config.images)),
            l2_bytes=turns * x.stage_bytes(v, config.images),
            instructions=turns * (copies + row_blocks * 4 * (load_instructions + steps + stores)),
            turns=turns * row_blocks * (steps + 4 + config.tile_n / 16) / (config.consumers * together),
            waits=0.0 if x.is_copied else turns * waits(x.stage_bytes(v, config.images) / v.item),
            memory_bytes=problem.bytes_moved,
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        v, together = _volume(problem), _blocks_per_sm(problem, config)
        x = _layout(v, config)
        names = ("consumers", "blocks", "tile_n", "stages", "tile_p", "tile_q")
        return {
            "ELEMENT": OUT_CODES[problem.dtype],
            "OUT": OUT_CODES[problem.out_dtype],
            "CTAS_PER_SM": together,
            **share_macros(together, config.consumers),
            **field_macros(config, *names),
            "TILE_IMAGES": config.images,
            "SLICE": v.channels,
            "STAGE_BYTES": x.stage_bytes(v, config.images),
            "GROUP": min(_group(config, together), _EPILOGUE_GROUP if conv_finishes(problem) else _MOST_GROUP),
            "TOGETHER": _stored_at_once(v),
            "GROUPED": int(v.groups > 1),
            "MIRRORED": int(not isinstance(problem, ConvFpropProblem)),
            **axis_macros(KERNEL=v.kernel, LHS=v.lhs_dilation),
            **field_macros(x),
            **conv_macros(problem),
        }

    def _args(self, problem: ConvProblem, config: Config) -> Struct:
        v = _volume(problem)
        counts = config.block_counts(v)
        tiles_n = _columns(v, config) // v.groups
        groups: dict[str, Field] = {"columns": v.out_channels, "tiles_n": Divisor.of(tiles_n)}
        return Struct(
            "Args",
            {
                "batch": v.batch,
                "in": v.size,
                "channels": v.channels * v.groups,
                "out_channels": v.out_channels * v.groups,
                "out": tuple(map(Divisor.of, v.out)),
                "stride": v.stride,
                "pad": v.pad,
                "tiles_h": Divisor.of(counts[2]),
                "tiles_w": Divisor.of(counts[3]),
                "tiles": math.prod(counts),  # of pixels
                **(groups if v.groups > 1 else {}),
            },
        )

    def launches(self, problem: ConvProblem, config: Config) -> tuple[Launch, ...]:
        """As many thread blocks as run on the machine at once; each goes from tile to tile."""
        tiles = math.prod(config.block_counts(_volume(problem)))
        tiles_n = _columns(_volume(problem), config)
        resident = DEFAULT_CUDA.cores * _blocks_per_sm(problem, config)
        grid = (min(tiles, max(1, resident // tiles_n)), tiles_n, 1)
        out = Pointer(len(problem.operand_types))
        params = (Pointer(0), Pointer(1), self._args(problem, config), out, *conv_params(problem))
        block = (128 * (config.consumers + 1), 1, 1)
        return (Launch(self.kernel_name(problem), grid, block, params, _shared_bytes(problem, config)),)


@functools.lru_cache(maxsize=512)
def _ranked(family: Gather, p: ConvProblem, target: Target) -> tuple[Config, ...]:
    return tuple(family.by_estimate(p, family._variants(p), target)[:_MAX_CANDIDATES])


FPROP, DGRAD = of_both_passes(Gather, "gather", Config)
