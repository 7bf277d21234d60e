"""Kernel family: grouped products with a stack of packed weights on Hopper (device code: quantized/tiled.cu with
EXPERTS, see quantized/experts.cuh).

Each group of rows of the activation is multiplied with a quantized weight of its own, as in a mixture of experts. A
bias of each weight and an activation may follow. The inner loop, the tiles and the epilogue are those of
quantized_tiled. Group sizes stay on the device: each thread block finds the tiles that there are. Weights whose groups
have no rows are not read.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from jax_splitk.kernels.base.family import ModelledFamily
from jax_splitk.kernels.base.named import NamedByFormat
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.split_k import whole_splits
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import dequantize, tiled, tiles
from jax_splitk.kernels.quantized.schedule import MAX_UNITS, SPLITS
from jax_splitk.kernels.quantized.tiles import BARRIER_BYTES, BLOCK_K, CHUNK_BYTES, WARPGROUP_M, k_blocks, tile_bytes
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

MAX_GROUPS = 1024  # whose ends and tiles are in shared memory
MAX_BLOCKS = 1024  # persistent thread blocks
MAX_GRID = 2**20  # thread blocks of clusters
SUM_STEP = 4  # rows of x at whose multiples copies of their sums begin
_ROOM = 64  # groups for which a kernel has room, in multiples of this: one kernel serves many problems
_KEPT = 3  # candidates of each tile


@dataclasses.dataclass(frozen=True)
class Config:
    """How a grouped product with packed weights is computed.

    Attributes:
      tile_m, tile_n: output tile of a thread block, features by rows of a group.
      stages: depth of the shared-memory pipeline, in blocks of 128 k.
      blocks: persistent thread blocks. With splits, one for each range of each tile that any group sizes may make.
      cut: whether the k blocks of the tiles that are left after whole rounds are cut into equal ranges, one for each
        thread block, whose sums are added from the workspace.
      splits: above 1, every tile has this number of equal ranges, whose thread blocks form a cluster and add their sums
        in shared memory.
      k_warpgroups: warpgroups that share 64 features, and take turns with the k blocks of a range; 1, or 2 with splits.
    """

    tile_m: int
    tile_n: int
    stages: int
    blocks: int
    cut: bool = False
    splits: int = 1
    k_warpgroups: int = 1

    @property
    def tile(self) -> tiles.Config:
        """The config of quantized_tiled with the same tiles."""
        splits = {"splits": self.splits, "k_warpgroups": self.k_warpgroups}
        return tiles.Config(self.tile_m, self.tile_n, self.stages, self.blocks, **splits)


class _Tiles(tiled.Tiled):
    """The tiles of quantized_tiled, in thread blocks that also hold what they know of `room` groups."""

    def __init__(self, room: int) -> None:
        super().__init__(tiles.Config)
        self.table_bytes = 8 * room + 64  # struct Tiles

    def x_sums_bytes(self, problem: QuantizedMatmulProblem, tile_n: int) -> int:
        return super().x_sums_bytes(problem, tile_n) // tile_n * (tile_n + SUM_STEP)

    def fixed_bytes(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> int:
        return super().fixed_bytes(problem, config) + self.table_bytes

    def blocks_per_sm(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> int:
        """Allows 3 thread blocks of the smallest tile. Few experts have few tiles, most of which then run at the same
        time."""
        smallest = config.warpgroups == 1 and config.tile_n == tiled.TILES_N[0]
        if smallest and config.stages <= self.max_stages(problem, config, 3):
            return 3
        return super().blocks_per_sm(problem, config)


@functools.cache
def _tiles(room: int) -> _Tiles:
    return _Tiles(room)


def _room(problem: QuantizedRaggedDotProblem) -> int:
    return -(-problem.size_count // _ROOM) * _ROOM


def tiles_of(problem: QuantizedRaggedDotProblem) -> _Tiles:
    """What the problem's tiles need, by the product with one weight."""
    return _tiles(_room(problem))


def tiles_m(problem: QuantizedRaggedDotProblem, config: Config) -> int:
    return -(-problem.n // config.tile_m)


def most_tiles(problem: QuantizedRaggedDotProblem, config: Config) -> int:
    """The most tiles that any group sizes make."""
    along_rows = (problem.m + problem.active * (config.tile_n - 1)) // config.tile_n
    return along_rows * tiles_m(problem, config)


def split_tiles(problem: QuantizedRaggedDotProblem, config: Config, splits: int) -> Config:
    """The config with a cluster of `splits` thread blocks for each tile that there may be."""
    return dataclasses.replace(config, blocks=most_tiles(problem, config) * splits, cut=False, splits=splits)


# ---- workspace: a copy of x, sums of x, slots of partial sums --------------------------------------------------------


def _padded_rows(problem: QuantizedRaggedDotProblem, config: Config) -> int:
    """Rows that have sums of x: those that any tile's copies may have."""
    return -(-problem.m // SUM_STEP) * SUM_STEP + config.tile_n


def _prepared_bytes(problem: QuantizedRaggedDotProblem, config: Config) -> int:
    """Bytes of the copy of x and of the sums of x for zero points."""
    product, rows = problem.product, _padded_rows(problem, config)
    needed = tiled.needs_sums(product, config.tile_n)
    sums = k_blocks(product) * (BLOCK_K // tiled.period(product)) * rows * 4 if needed else 0
    return tiled.copy_bytes(product) + -(-sums // 256) * 256


class Experts(NamedByFormat, ModelledFamily[QuantizedRaggedDotProblem, Config]):
    """Preferred whenever it is legal: otherwise all weights are dequantized first, also those without rows."""

    name = "quantized_experts"
    ABI = 2
    file = "quantized/tiled.cu"

    # ---- legality ----------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: QuantizedRaggedDotProblem) -> str | None:
        p = problem
        if (reason := tiles_of(p).problem_refusal(p.product)) is not None:
            return reason
        if p.size_count > MAX_GROUPS:
            return f"{p.size_count} groups; accepted: at most {MAX_GROUPS}"
        if (count := p.groups * p.product.feature_tiles) > tiles.INT32_MAX // WARPGROUP_M:
            return f"{count} tiles of 64 features of all weights; accepted: at most {tiles.INT32_MAX // WARPGROUP_M}"
        return self._units_refusal(p, Config(*tiled.Tiled.counted_tile, 2, 1))

    def _units_refusal(self, p: QuantizedRaggedDotProblem, config: Config) -> str | None:
        if (units := most_tiles(p, config) * k_blocks(p.product)) > MAX_UNITS:
            return f"{units} blocks of this tile and 128 k; accepted: at most {MAX_UNITS}"
        return None

    def config_refusal(self, problem: QuantizedRaggedDotProblem, config: Config) -> str | None:
        reason = tiles_of(problem).tile_refusal(problem.product, config.tile)
        return reason or self._units_refusal(problem, config) or self._schedule_refusal(problem, config)

    def _schedule_refusal(self, problem: QuantizedRaggedDotProblem, config: Config) -> str | None:
        if config.cut not in (False, True):
            return f"cut {config.cut}; accepted: False, True"
        if config.splits == 1:
            accepted = 1 <= config.blocks <= MAX_BLOCKS
            return None if accepted else f"blocks {config.blocks}; accepted: 1 to {MAX_BLOCKS}"
        if config.cut:
            return f"cut {config.cut} with splits {config.splits}; accepted: False"
        steps = k_blocks(problem.product)
        if (nearest := whole_splits(steps, config.splits)) != config.splits:
            return f"splits {config.splits} leaves some of {steps} k blocks' ranges empty; use {nearest}"
        wanted = split_tiles(problem, config, config.splits).blocks
        if config.blocks != wanted or wanted > MAX_GRID:
            return f"blocks {config.blocks} with splits {config.splits}; accepted: {wanted}, at most {MAX_GRID}"
        if (last := self._ranges(problem, config)[1]) < config.k_warpgroups:
            return f"k_warpgroups {config.k_warpgroups} of ranges down to {last} k blocks; accepted: 1"
        return None

    def _ranges(self, problem: QuantizedRaggedDotProblem, config: Config) -> tuple[int, int]:
        """k blocks of a range of a cluster, and of its last one."""
        steps = k_blocks(problem.product)
        each = -(-steps // config.splits)
        return each, steps - (config.splits - 1) * each

    # ---- choices -----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: QuantizedRaggedDotProblem, config: Config) -> int:
        return tiles_of(problem).blocks_per_sm(problem.product, config.tile)

    def _widths(self, problem: QuantizedRaggedDotProblem) -> list[int]:
        """Widths for groups of equal size, and for some that are half or twice as large."""
        rows = -(-problem.rows // max(1, problem.active))
        fits = [i for i, n in enumerate(tiled.TILES_N) if n >= rows] or [len(tiled.TILES_N) - 1]
        near = tiled.TILES_N[max(0, fits[0] - 1) : fits[0] + 2]
        return [n for n in tiled.TILES_N if n in near or 64 <= n < rows]

    def _tiles(self, problem: QuantizedRaggedDotProblem) -> Iterator[tuple[Config, int]]:
        """Tiles with the deepest pipelines, and how many thread blocks share a multiprocessor."""
        family, product = tiles_of(problem), problem.product
        for tile_m, tile_n in itertools.product(tiled.TILES_M, self._widths(problem)):
            if tile_m // 2 >= problem.n and tile_m > WARPGROUP_M:
                continue  # half of it is padding
            for k_warpgroups, together in itertools.product((1, 2), (3, 2, 1)):
                tile = family.deepest(product, tiles.Config(tile_m, tile_n, 0, 0, k_warpgroups=k_warpgroups), together)
                enough = tile.stages >= tiles.MIN_STAGES[k_warpgroups]
                if enough and family.blocks_per_sm(product, tile) == together:
                    yield Config(tile_m, tile_n, tile.stages, 0, k_warpgroups=k_warpgroups), together

    def _schedules(
        self, problem: QuantizedRaggedDotProblem, tile: Config, together: int, target: Target
    ) -> Iterator[Config]:
        resident = min(MAX_BLOCKS, target.cores * together)
        for cut in (False, True):
            yield dataclasses.replace(tile, blocks=resident, cut=cut, splits=1)
        for splits in SPLITS:
            yield split_tiles(problem, tile, splits)

    def candidates(self, problem: QuantizedRaggedDotProblem, target: Target) -> list[Config]:
        """For every tile the few schedules that the model prefers, most promising first."""
        groups = [
            [c for c in self._schedules(problem, *each, target) if self.config_refusal(problem, c) is None]
            for each in self._tiles(problem)
        ]
        return self.best_of_each(problem, groups, _KEPT, target)

    def neighbours(self, problem: QuantizedRaggedDotProblem, config: Config, target: Target) -> list[Config]:
        """The config with one stage less for each k_warpgroup, and the tile's other schedules."""
        found = [dataclasses.replace(config, stages=config.stages - config.k_warpgroups)]
        found += self._schedules(problem, config, self.blocks_per_sm(problem, config), target)
        return [other for other in dict.fromkeys(found) if other != config]

    # ---- cost --------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: QuantizedRaggedDotProblem, config: Config) -> int:
        """Bytes of prepared data, and two slots of a tile for each range."""
        return _prepared_bytes(problem, config) + (2 * config.blocks * tile_bytes(config.tile) if config.cut else 0)

    def work(self, problem: QuantizedRaggedDotProblem, config: Config, target: Target) -> Work:
        """The work of the busiest multiprocessor, for groups of about the same size."""
        family, product, p = tiles_of(problem), problem.product, problem
        groups = max(1, min(p.active, p.rows))
        along_rows = p.rows / groups / config.tile_n
        count = groups * (1.0 if along_rows <= 1 else along_rows + 0.5) * tiles_m(p, config)
        resident = resident_blocks(target, config.splits, self.blocks_per_sm(p, config))
        workers = min(config.blocks, resident)
        together = min(self.blocks_per_sm(p, config), max(1, -(-workers // target.cores)))
        steps, rounds = k_blocks(product), 1.0
        if config.splits > 1:
            rounds = -(-count * config.splits // resident)
            blocks, pieces = rounds * self._ranges(p, config)[0], rounds
        elif config.cut:
            blocks, pieces = count * steps / workers + 1, count / workers + 1
        else:
            pieces = max(1.0, count / workers + (0.5 if count > workers else 0.0))
            blocks = pieces * steps
        blocks, pieces = blocks * together, pieces * together
        tensor, issued, turns = family.block_work(product, config.tile)
        stage = family.stage_bytes(product, config.tile)
        sums, prepared = tile_bytes(config.tile), family.prepared(product, config.tile)
        return Work(
            tensor_clocks=blocks * tensor,
            shared_bytes=blocks * (BLOCK_K * family.x_item * config.tile_n * config.tile.m_warpgroups + stage),
            l2_bytes=blocks * stage,
            instructions=blocks * issued,
            waits=2 * rounds + blocks / config.stages / together,  # the group sizes come first
            turns=(pieces * 8 + blocks / together * turns) / config.k_warpgroups,
            memory_bytes=p.bytes_moved + (4 * p.m * p.k if prepared else 0),
            memory_share=min(1.0, count * config.splits / workers) if not config.cut else 1.0,
            waves=rounds,
            stored_bytes=pieces * sums / config.splits + (config.k_warpgroups - 1) * sums,
            partial_bytes=4 * config.blocks * sums if config.cut else 0,
            launches=1 + config.cut + prepared,
            cluster=config.splits,
        )

    # ---- plan --------------------------------------------------------------------------------------------------------

    def macros(self, problem: QuantizedRaggedDotProblem, config: Config) -> dict[str, int]:
        ranges = self._ranges(problem, config) if config.splits > 1 else (0, 0)
        return {
            **tiles_of(problem).macros(problem.product, dataclasses.replace(config.tile, splits=1)),
            **dequantize.epilogue_macros(problem),
            "SPLITS": config.splits,
            "RANGE": ranges[0],
            "LAST_RANGE": ranges[1],
            "N_TILES": 0,
            "EXPERTS": _room(problem),
            "HAS_OFFSET": int(problem.has_offset),
            "CUT": int(config.cut),
        }

    def _args(self, problem: QuantizedRaggedDotProblem, config: Config) -> Struct:
        """Sizes of the output and of the packed weights; tiles along the features, and thread blocks."""
        p, one = problem, problem.product
        sizes = {"rows": p.m, "m": p.n, "m_tiles": one.feature_tiles, "k_tiles": one.k_tiles}
        sizes |= {"groups": one.groups, "k_blocks": k_blocks(one), "tiles_m": tiles_m(p, config)}
        sizes |= {"experts": p.size_count, "matrices": p.groups, "workers": config.blocks // config.splits}
        # once: a thread block alone reads a word, if groups have about the same size.
        more = {"once": int(p.rows <= p.active * config.tile_n), "padded_rows": _padded_rows(p, config)}
        return Struct("Args", {**sizes, **more})

    def structs(self, problem: QuantizedRaggedDotProblem, config: Config) -> list[Struct]:
        """Includes the struct of the kernel that prepares x, which the source always has."""
        return [*super().structs(problem, config), tiled.prepare_args(problem.product, _padded_rows(problem, config))]

    def maps(self, problem: QuantizedRaggedDotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        return (tiles_of(problem).x_map(problem.product, config.tile, len(problem.operand_types) + 1),)

    def launches(self, problem: QuantizedRaggedDotProblem, config: Config) -> tuple[plan.Launch, ...]:
        p, product, family = problem, problem.product, tiles_of(problem)
        operands, leaves = len(p.operand_types), len(product.operand_types)
        sizes, offset = plan.Pointer(leaves), plan.Pointer(leaves + p.has_offset)
        weight = plan.Pointer(1), plan.Pointer(2), dequantize.zero_pointer(product)
        out, workspace = plan.Pointer(operands), operands + 1
        partials, args = plan.Pointer(workspace, _prepared_bytes(p, config)), self._args(p, config)
        copy, sums = plan.Pointer(workspace), plan.Pointer(workspace, tiled.copy_bytes(product))
        first = ()
        if family.prepared(product, config.tile):
            name, rows = self.kernel_name(p, "_prepare"), _padded_rows(p, config)
            first = (tiled.prepare_launch(name, product, rows, copy, sums),)
        static_bytes = BARRIER_BYTES + family.table_bytes
        main = plan.Launch(
            kernel=self.kernel_name(p),
            grid=(config.blocks, 1, 1),
            block=(128 * (config.tile.warpgroups + 1), 1, 1),
            params=(
                *(plan.MapParam(0), args, sizes, offset, *weight, sums, out, partials),
                *(*dequantize.channel_pointers(product), *dequantize.epilogue_pointers(p)),
            ),
            shared_bytes=family.shared_bytes(product, config.tile) - static_bytes,
            cluster=(config.splits, 1, 1),
            programmatic=bool(first),
        )
        if not config.cut:
            return (*first, main)
        rest = min(config.blocks - 1, most_tiles(p, config))
        adds_slots = plan.Launch(
            kernel=self.kernel_name(p, "_reduce"),
            grid=(max(1, rest) * (tile_bytes(config.tile) // CHUNK_BYTES), 1, 1),
            block=(128, 1, 1),
            params=(args, sizes, offset, partials, out, *dequantize.epilogue_pointers(p)),
            programmatic=True,
        )
        return (*first, main, adds_slots)


FAMILY = Experts(Config)
