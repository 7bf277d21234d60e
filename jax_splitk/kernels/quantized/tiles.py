"""Shared by quantized_fp8 and quantized_tiled, the kernel families whose thread blocks compute tiles of the output.

The host's side of `tiles.cuh` and `cluster_sums.cuh`: one Config, its legality, shared memory, search, cost and plan. A
family adds the parameters of its inner loop over a block of 128 k.
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias, TypeVar

from jax_splitk.kernels.base.family import ModelledFamily, field_refusal
from jax_splitk.kernels.base.named import NamedByFormat
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import dequantize, norm
from jax_splitk.kernels.quantized.schedule import MAX_SPLITS, MAX_UNITS, SPLITS, Schedule, schedules
from jax_splitk.problems.problem import nbytes
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized import packing
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

BLOCK_K = 128  # two tiles of the packed weight
WARPGROUP_M = 64  # m of a warpgroup
REDUCE_ROWS = 16  # rows of x of a thread block of the kernel that adds ranges
CHUNK_BYTES = WARPGROUP_M * REDUCE_ROWS * 4  # of the sums that a cluster's blocks send to each other
INT32_MAX = 2**31 - 1
MAX_N_TILES = 4  # tiles along the rows, known at compile time up to so many

SHARED_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of the pipeline
BARRIER_BYTES = 256  # static shared memory
STAGING_BYTES = 16 * 48  # of a warp's 16-bit results on their way to memory
MIN_STAGES = {1: 2, 2: 4}  # by k_warpgroups: each waits for its next stage before it gives back the one it has
SCHEDULES_KEPT = 3  # of each tile, in `candidates`
SPLIT_TILES_N = (32, 64)  # with two k_warpgroups
L2_BYTES = 36 << 20  # of operands that are found again, of some 50 MB


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles of a product with a quantized weight are computed.

    Attributes:
      tile_m, tile_n: output tile of a thread block, elements of a row of the result by rows of x.
      stages: depth of the shared-memory pipeline, in blocks of 128 k.
      blocks: thread blocks.
      whole_tiles: whole tiles that each thread block computes. The k blocks of all other tiles are cut into equal
        ranges, one for each thread block, whose sums are added from the workspace.
      splits: above 1, every tile has this number of equal ranges, whose thread blocks form a cluster and add their sums
        in shared memory.
      k_warpgroups: warpgroups that share 64 m, and take turns with the k blocks of a range; 1, or 2 with splits.
    """

    tile_m: int
    tile_n: int
    stages: int
    blocks: int
    whole_tiles: int = 0
    splits: int = 1
    k_warpgroups: int = 1

    @property
    def worker_blocks(self) -> int:
        """Thread blocks of a worker; see `Schedule`."""
        return 1

    @property
    def m_warpgroups(self) -> int:
        """tile_m in units of 64 (M_WARPGROUPS in the device code)."""
        return self.tile_m // WARPGROUP_M

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply (WARPGROUPS in the device code)."""
        return self.m_warpgroups * self.k_warpgroups


_Config = TypeVar("_Config", bound=Config)
Prepared: TypeAlias = tuple[tuple[plan.Param, ...], tuple[plan.Launch, ...]]


def k_blocks(problem: QuantizedMatmulProblem) -> int:
    """Blocks of the dimension that the product sums over, which kernels call k."""
    return -(-problem.contracted // BLOCK_K)


def tile_counts(problem: QuantizedMatmulProblem, config: Config) -> tuple[int, int]:
    """(a worker's tiles along m, tiles along the rows)."""
    return -(-problem.m // (config.tile_m * config.worker_blocks)), -(-problem.rows // config.tile_n)


def schedule(problem: QuantizedMatmulProblem, config: Config) -> Schedule:
    tiles = math.prod(tile_counts(problem, config))
    return Schedule(tiles, k_blocks(problem), config.blocks // config.worker_blocks, config.whole_tiles)


def _args(p: QuantizedMatmulProblem, config: Config) -> Struct:
    """Sizes of the output and of the packed weight; tiles, and the share of a worker (see `Schedule`)."""
    given, (tiles_m, tiles_n) = schedule(p, config), tile_counts(p, config)
    sizes = {"rows": p.rows, "m": p.m, "m_tiles": packing.tiles(p.m), "k_tiles": packing.tiles(p.contracted)}
    sizes |= {"groups": p.groups, "k_blocks": given.k_blocks, "tiles_m": tiles_m, "tiles_n": tiles_n}
    work = {"whole_tiles": given.whole_tiles, "range_blocks": given.range_blocks}
    return Struct("Args", {**sizes, **work, "once": int(tiles_n == 1)})  # once: a thread block alone reads a word


def is_cut(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether any tile has more than one range, so that partial sums are added from the workspace."""
    return config.splits == 1 and schedule(problem, config).is_cut


def whole_tiles(problem: QuantizedMatmulProblem, config: _Config) -> _Config:
    """The config with a thread block for each tile."""
    blocks = math.prod(tile_counts(problem, config)) * config.worker_blocks
    return dataclasses.replace(config, blocks=blocks, whole_tiles=1, splits=1)


def split_tiles(problem: QuantizedMatmulProblem, config: _Config, splits: int) -> _Config:
    """The config with a cluster of `splits` thread blocks for each tile."""
    blocks = math.prod(tile_counts(problem, config)) * splits
    return dataclasses.replace(config, blocks=blocks, whole_tiles=0, splits=splits)


def aligned(size: int) -> int:
    """Bytes of a part of the workspace, so that the next one begins at a multiple of 256."""
    return -(-size // 256) * 256


def tile_bytes(config: Config) -> int:
    """Bytes of a thread block's fp32 sums."""
    return config.tile_m * config.tile_n * 4


class TileFamily(NamedByFormat, ModelledFamily[QuantizedMatmulProblem, _Config]):
    """A kernel family whose inner loop computes tiles.

    Preferred whenever it is legal: XLA writes the dequantized weight to memory first.
    """

    x_dtypes: ClassVar[tuple[str, ...]]
    out_dtypes: ClassVar[tuple[str, ...]]
    tiles_m: ClassVar[tuple[int, ...]]
    tiles_n: ClassVar[tuple[int, ...]]
    x_item: ClassVar[int]  # bytes of an element of x in shared memory
    most_stages: ClassVar[tuple[int, int]]  # with one, and two, k_warpgroups
    k_warpgroups_tiles_m: ClassVar[tuple[int, ...]]  # of two k_warpgroups
    counted_tile: ClassVar[tuple[int, int]]  # one that every problem may have: its k blocks can be counted
    queues: ClassVar[bool]  # whether more thread blocks than run at a time, with a tile each, are worth a try

    # ---- shared memory -----------------------------------------------------------------------------------------------

    def x_sums_bytes(self, problem: QuantizedMatmulProblem, tile_n: int) -> int:
        """Bytes of a stage besides x, words, scales and zero points."""
        del problem, tile_n
        return 0

    def stage_bytes(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """STAGE_BYTES and EXTRA_BYTES of the device code."""
        x = BLOCK_K * self.x_item * config.tile_n
        weight = dequantize.block_bytes(problem, config.m_warpgroups, BLOCK_K)
        return x + weight + self.x_sums_bytes(problem, config.tile_n)

    def fixed_bytes(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """Shared memory besides the pipeline: results before they are stored, and sums that one k_warpgroup gives to
        the other."""
        staging = 0 if problem.out_dtype == "float32" else 4 * config.warpgroups * STAGING_BYTES
        return staging + (config.k_warpgroups - 1) * tile_bytes(config) + ALIGNMENT_BYTES + BARRIER_BYTES

    def shared_bytes(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """Shared memory of a thread block."""
        return config.stages * self.stage_bytes(problem, config) + self.fixed_bytes(problem, config)

    def max_stages(self, problem: QuantizedMatmulProblem, config: _Config, blocks_per_sm: int = 1) -> int:
        """The deepest pipeline that fits in shared memory; ignores `config.stages`."""
        # A KiB of each thread block is the system's.
        room = (SHARED_BYTES + 1024) // blocks_per_sm - 1024 - self.fixed_bytes(problem, config)
        most = min(self.most_stages[config.k_warpgroups - 1], room // self.stage_bytes(problem, config))
        return most // config.k_warpgroups * config.k_warpgroups

    def deepest(self, problem: QuantizedMatmulProblem, config: _Config, blocks_per_sm: int = 1) -> _Config:
        """The config with the deepest pipeline that fits."""
        return dataclasses.replace(config, stages=self.max_stages(problem, config, blocks_per_sm))

    def min_stages(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """The fewest stages that keep the pipeline moving, and can hold the sums that a cluster's blocks send to one of
        them."""
        if config.splits == 1:
            return MIN_STAGES[config.k_warpgroups]
        chunks = tile_bytes(config) // CHUNK_BYTES
        received = -(-chunks // config.splits) * config.splits * CHUNK_BYTES
        x_and_words = BLOCK_K * (self.x_item * config.tile_n + config.tile_m * problem.bits // 8)
        return max(MIN_STAGES[config.k_warpgroups], -(-received // x_and_words))

    def prepared_bytes(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """Bytes of the workspace before the partial sums."""
        del problem, config
        return 0

    def workspace_bytes(self, problem: QuantizedMatmulProblem, config: _Config) -> int:
        """Bytes of prepared data, and two slots of a tile for each range."""
        slots = 2 * config.blocks * tile_bytes(config) if is_cut(problem, config) else 0
        return self.prepared_bytes(problem, config) + slots

    # ---- legality ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def loop_problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        """Why the inner loop cannot serve the problem."""

    @abc.abstractmethod
    def loop_refusal(self, problem: QuantizedMatmulProblem, config: _Config) -> str | None:
        """Why the inner loop cannot compute such tiles, with `tiles_m`, `tiles_n` and k_warpgroups."""

    def problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        if problem.x_dtype not in self.x_dtypes:
            return f"x of dtype {problem.x_dtype}; accepted: {', '.join(self.x_dtypes)}"
        if norm.normalizes(problem):
            return "normalized x; accepted: x as it is"
        if problem.out_dtype not in self.out_dtypes:
            return f"preferred_element_type {problem.out_dtype}; accepted: {', '.join(self.out_dtypes)}"
        for what, size in (("rows of x", problem.rows), ("k", problem.k), ("features", problem.features)):
            if not 0 < size <= INT32_MAX - 256:
                return f"{size} {what}; accepted: 1 to {INT32_MAX - 256}"
        tile_m, tile_n = self.counted_tile
        units = k_blocks(problem) * -(-problem.m // tile_m) * -(-problem.rows // tile_n)
        if units > MAX_UNITS:
            m, k = ("k", "features") if problem.transposed else ("features", "k")
            return f"{units} blocks of {tile_m} {m}, {tile_n} rows and 128 {k}; accepted: at most {MAX_UNITS}"
        return self.loop_problem_refusal(problem)

    def config_refusal(self, problem: QuantizedMatmulProblem, config: _Config) -> str | None:
        return self.tile_refusal(problem, config) or schedule(problem, config).refusal(
            config.splits, config.worker_blocks, config.k_warpgroups
        )

    def tile_refusal(self, problem: QuantizedMatmulProblem, config: _Config) -> str | None:
        """Why the kernel cannot have such tiles, pipelines and clusters, whatever the schedule."""
        return (
            field_refusal(config, tile_m=self.tiles_m, tile_n=self.tiles_n, k_warpgroups=(1, 2))
            or self._cluster_refusal(problem, config)
            or self.loop_refusal(problem, config)
            or self._stages_refusal(problem, config)
        )

    def _stages_refusal(self, p: QuantizedMatmulProblem, config: _Config) -> str | None:
        least, most = self.min_stages(p, config), self.max_stages(p, config)
        if not least <= config.stages <= most:
            return f"stages {config.stages}; accepted with this tile: {least} to {most}"
        if config.stages % config.k_warpgroups:
            return f"stages {config.stages} with k_warpgroups {config.k_warpgroups}; accepted: multiples of it"
        return None

    def _cluster_refusal(self, p: QuantizedMatmulProblem, config: _Config) -> str | None:
        """Why the ranges of these tiles cannot form a cluster, or cannot have two k_warpgroups."""
        if not 1 <= config.splits <= MAX_SPLITS:
            return f"splits {config.splits}; accepted: 1 to {MAX_SPLITS}"
        if config.k_warpgroups == 1:
            return None
        if config.splits == 1:
            return f"k_warpgroups {config.k_warpgroups} without splits; accepted: 1"
        given = f"k_warpgroups {config.k_warpgroups} of tile {config.tile_m}x{config.tile_n}"
        if config.tile_m not in self.k_warpgroups_tiles_m or config.tile_n not in SPLIT_TILES_N:
            m, n = (", ".join(map(str, tiles)) for tiles in (self.k_warpgroups_tiles_m, SPLIT_TILES_N))
            return f"{given}; accepted: {m} by {n}"
        if self.max_stages(p, config) < MIN_STAGES[config.k_warpgroups]:
            return f"{given}; accepted with this weight: 1"
        return None

    # ---- choices -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def candidate_tiles(self, problem: QuantizedMatmulProblem) -> Iterator[_Config]:
        """The tiles that `candidates` considers, with a thread block for each tile."""

    @abc.abstractmethod
    def near_tiles(self, problem: QuantizedMatmulProblem, config: _Config) -> Iterable[tuple[_Config, bool]]:
        """The tiles that `neighbours` considers, and whether with all schedules. Only tiles, inner loop and stages
        matter."""

    def schedules(self, problem: QuantizedMatmulProblem, tile: _Config, target: Target) -> list[_Config]:
        """Legal ways to divide the tiles among thread blocks; `tile` has one thread block for each."""
        together = self.blocks_per_sm(problem, tile)
        workers, resident = tile.blocks // tile.worker_blocks, target.cores * together // tile.worker_blocks
        found = [tile] if self.queues or workers <= resident else []
        for other in schedules(workers, k_blocks(problem), resident):
            blocks = other.workers * tile.worker_blocks
            found.append(dataclasses.replace(tile, blocks=blocks, whole_tiles=other.whole_tiles))
        for splits in SPLITS:
            config = split_tiles(problem, tile, splits)
            if config.blocks <= resident_blocks(target, splits, together):
                found.append(config)
        return [config for config in dict.fromkeys(found) if self.config_refusal(problem, config) is None]

    def candidates(self, problem: QuantizedMatmulProblem, target: Target) -> list[_Config]:
        """For every tile the few schedules that the model prefers, most promising first."""
        tiles = (self.schedules(problem, tile, target) for tile in self.candidate_tiles(problem))
        return self.best_of_each(problem, tiles, SCHEDULES_KEPT, target)

    def neighbours(self, problem: QuantizedMatmulProblem, config: _Config, target: Target) -> list[_Config]:
        """A stage less for each k_warpgroup, and other schedules of the tile and of its neighbours."""
        found = [dataclasses.replace(config, stages=config.stages - config.k_warpgroups)]
        for tile, every in self.near_tiles(problem, config):
            others = self.schedules(problem, whole_tiles(problem, tile), target)
            found += others if every else others[:2]
        return [other for other in dict.fromkeys(found) if other != config]

    # ---- cost --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def block_work(self, problem: QuantizedMatmulProblem, config: _Config) -> tuple[float, float, float]:
        """(clocks of the tensor cores, instructions, turns) of a thread block's k block; see `Work`."""

    def prepared(self, problem: QuantizedMatmulProblem, config: _Config) -> bool:
        """Whether a kernel before this one prepares x."""
        del problem, config
        return False

    def operand_bytes(self, problem: QuantizedMatmulProblem) -> int:
        """Bytes of the kernel's operands, each counted once."""
        return problem.bytes_moved - nbytes(problem.out_shape, problem.out_dtype)

    def _reloaded_bytes(self, problem: QuantizedMatmulProblem, config: _Config, units: int) -> float:
        """Bytes that device memory moves again for thread blocks with ranges: they need the same k blocks at different
        times, and the L2 has kept only a part of these. `units`: k blocks of all tiles."""
        operands = self.operand_bytes(problem)
        again = units * config.worker_blocks * self.stage_bytes(problem, config) - operands
        lost = min(1.0, max(0.0, operands / L2_BYTES - 1))  # in turns, so that twice as much finds nothing again
        return max(0, again) * lost

    def together(self, problem: QuantizedMatmulProblem, config: _Config, target: Target) -> int:
        """Thread blocks that share the busiest multiprocessor."""
        alone = resident_blocks(target, config.splits)
        return min(self.blocks_per_sm(problem, config), -(-config.blocks // alone))

    def work(self, problem: QuantizedMatmulProblem, config: _Config, target: Target) -> Work:
        """The work of the busiest multiprocessor."""
        resident = resident_blocks(target, config.splits, self.blocks_per_sm(problem, config))
        rounds = -(-config.blocks // (resident // config.worker_blocks * config.worker_blocks))  # where not all fit
        given, is_cut_up = schedule(problem, config), is_cut(problem, config)
        together = self.together(problem, config, target)
        blocks = rounds * given.blocks_each * together
        pieces = rounds * given.pieces
        reloaded = self._reloaded_bytes(problem, config, given.units) if is_cut_up else 0.0
        tensor, issued, turns = self.block_work(problem, config)
        slots = config.blocks + given.rest * config.worker_blocks if is_cut_up else 0
        prepared = self.prepared(problem, config)
        stage = self.stage_bytes(problem, config)
        return Work(
            tensor_clocks=blocks * tensor,
            shared_bytes=blocks * (BLOCK_K * self.x_item * config.tile_n * config.m_warpgroups + stage),
            l2_bytes=blocks * stage,
            instructions=blocks * issued,
            waits=rounds + blocks / config.stages / together,
            turns=(pieces * 8 + blocks / together * turns) / config.k_warpgroups,
            memory_bytes=problem.bytes_moved
            + 0.4 * reloaded
            + (4 * problem.rows * problem.contracted if prepared else 0),
            waves=rounds,
            stored_bytes=pieces * tile_bytes(config) / config.splits + (config.k_warpgroups - 1) * tile_bytes(config),
            partial_bytes=2 * slots * tile_bytes(config),
            launches=1 + is_cut_up + prepared,
            cluster=max(config.splits, config.worker_blocks),
        )

    # ---- plan --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def loop_macros(self, problem: QuantizedMatmulProblem, config: _Config) -> dict[str, int]:
        """Macros of the inner loop."""

    @abc.abstractmethod
    def x_map(self, problem: QuantizedMatmulProblem, config: _Config, workspace: int) -> plan.TiledMap:
        """The map of x; `workspace` is the number of the workspace's buffer."""

    def prepare(self, problem: QuantizedMatmulProblem, config: _Config, workspace: int) -> Prepared:
        """The main kernel's parameters between scale and result, and the kernels that prepare the workspace."""
        del problem, config, workspace
        return (), ()

    def macros(self, problem: QuantizedMatmulProblem, config: _Config) -> dict[str, int]:
        """Macros. The code depends on sizes only by: whether the output's rows and the k that is summed over end at the
        accesses' ends, the number of tiles along the rows if it is small, and with splits the ranges of k."""
        given, n_tiles = schedule(problem, config), tile_counts(problem, config)[1]
        ranges = (given.range_blocks, given.last_range(config.splits)) if config.splits > 1 else (0, 0)
        return {
            **dequantize.macros(problem),
            "M_WARPGROUPS": config.m_warpgroups,
            "K_WARPGROUPS": config.k_warpgroups,
            "SPLITS": config.splits,
            "MULTICAST": config.worker_blocks,
            "RANGE": ranges[0],
            "LAST_RANGE": ranges[1],
            "TILE_N": config.tile_n,
            "STAGES": config.stages,
            "N_TILES": n_tiles if n_tiles <= MAX_N_TILES else 0,
            "EIGHTS": int(problem.m % 8 == 0),
            "WHOLE": int(packing.tiles(problem.contracted) % 2 == 0),
            "X_SUMS": int(self.x_sums_bytes(problem, config.tile_n) > 0),
            "EXPERTS": 0,
            **self.loop_macros(problem, config),
        }

    def maps(self, problem: QuantizedMatmulProblem, config: _Config) -> tuple[plan.TiledMap, ...]:
        return (self.x_map(problem, config, len(problem.operand_types) + 1),)

    def launches(self, problem: QuantizedMatmulProblem, config: _Config) -> tuple[plan.Launch, ...]:
        workspace = len(problem.operand_types) + 1
        out, partials = plan.Pointer(workspace - 1), plan.Pointer(workspace, self.prepared_bytes(problem, config))
        args = _args(problem, config)
        operands, first = self.prepare(problem, config, workspace)
        main = plan.Launch(
            kernel=self.kernel_name(problem),
            grid=(config.blocks, 1, 1),
            block=(128 * (config.warpgroups + 1), 1, 1),
            params=(
                *(plan.MapParam(0), args, plan.Pointer(1), plan.Pointer(2), *operands, out, partials),
                *dequantize.last_pointers(problem),
            ),
            shared_bytes=self.shared_bytes(problem, config) - BARRIER_BYTES,
            cluster=(config.worker_blocks * config.splits, 1, 1),
            programmatic=bool(first),
        )
        if not is_cut(problem, config):
            return (*first, main)
        given, parts = schedule(problem, config), config.worker_blocks * tile_bytes(config) // CHUNK_BYTES
        adds_slots = plan.Launch(
            kernel=self.kernel_name(problem, "_reduce"),
            grid=(given.rest * parts, 1, 1),
            block=(128, 1, 1),
            params=(
                *(args, plan.Int32Struct((given.whole_tiles * given.workers,)), partials, out),
                *dequantize.epilogue_pointers(problem),
            ),
            programmatic=True,
        )
        return (*first, main, adds_slots)
