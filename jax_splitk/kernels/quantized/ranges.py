"""Whole tiles and ranges of k: how quantized_tiled and quantized_fp8 give the output's tiles to thread blocks.

The host's side of `ranges.cuh`. A worker is a thread block, or a cluster whose blocks have neighbouring tiles.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

from jax_splitk.kernels.device.split_k import whole_splits
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import plan

BLOCK_K = 128  # two tiles of the packed weight
SLOT = 64  # features of a warpgroup
REDUCE_COLUMNS = 16  # rows of x of a thread block of reduce_ranges
INT32_MAX = 2**31 - 1
MAX_UNITS = INT32_MAX // 2
MAX_SPLITS = 8  # thread blocks of a cluster that shares a tile
SPLITS = (2, 3, 4, 5, 6, 8)  # that are tried
CHUNK_BYTES = SLOT * REDUCE_COLUMNS * 4  # of the sums that such blocks send to each other
MAX_N_TILES = 4  # tiles along the rows, known at compile time up to so many

_Config = TypeVar("_Config")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what.

    Attributes:
      tiles: of the output, a worker's.
      k_blocks: of a tile, each of 128 k.
      workers: thread blocks or clusters.
      waves: whole tiles that each worker computes; the k blocks of all other tiles are cut into equal ranges, one for
        each worker.
    """

    tiles: int
    k_blocks: int
    workers: int
    waves: int

    @property
    def units(self) -> int:
        """k blocks of all tiles."""
        return self.tiles * self.k_blocks

    @property
    def rest(self) -> int:
        """Tiles that are cut into ranges."""
        return self.tiles - self.waves * self.workers

    @property
    def range_blocks(self) -> int:
        """k blocks of a range; 0 without ranges."""
        return -(-self.rest * self.k_blocks // self.workers)

    @property
    def is_cut(self) -> bool:
        """Whether any tile has more than one range."""
        return self.rest > 0 and self.range_blocks % self.k_blocks != 0

    def defines(self, splits: int) -> tuple[tuple[str, int], ...]:
        """Macros of the device code: the k blocks of each thread block of a cluster that shares a tile. 0 without such
        clusters, so that all sizes share a compilation."""
        ranges = (self.range_blocks, self.last_range(splits)) if splits > 1 else (0, 0)
        return tuple(zip(("RANGE", "LAST_RANGE"), ranges, strict=True))

    def last_range(self, splits: int) -> int:
        """k blocks of the last thread block of a cluster that shares a tile: it has the fewest."""
        return self.k_blocks - (splits - 1) * self.range_blocks

    def cluster_limit(self, field: str, splits: int, parts: int) -> str | None:
        """Why the tiles cannot be cut into `splits` ranges each, which a cluster has, None where they can; `field` is
        the config's that says so."""
        if not 2 <= splits <= MAX_SPLITS:
            return f"{field} {splits}; accepted: 1 to {MAX_SPLITS}"
        nearest = whole_splits(self.k_blocks, splits)
        if nearest != splits:
            return f"{field} {splits} leaves some of {self.k_blocks} k blocks' ranges empty; use {nearest}"
        if (self.workers, self.waves) != (self.tiles * splits, 0):
            each = f"{self.tiles * splits} and 0 waves"
            return f"blocks {self.workers} and {self.waves} waves with clusters of {splits}; accepted: {each}"
        if self.last_range(splits) < parts:
            return f"parts {parts} of ranges down to {self.last_range(splits)} k blocks; accepted: 1"
        return None

    @property
    def blocks_each(self) -> int:
        """k blocks of a worker."""
        return self.waves * self.k_blocks + self.range_blocks

    @property
    def pieces(self) -> int:
        """Tiles that a worker takes part in, at most."""
        return self.waves + -(-self.range_blocks // self.k_blocks)

    def whole(self) -> "Schedule":
        """This one with the nearest number of workers not above its own that leaves none without work."""
        found = dataclasses.replace(self, workers=max(1, min(self.workers, self.units)))
        if found.waves:
            return found
        return dataclasses.replace(found, workers=-(-found.units // found.range_blocks))

    def units_limit(self) -> str | None:
        """Why the device code cannot count the k blocks; None where it can."""
        if self.units > MAX_UNITS:
            return f"{self.units} blocks of this tile and 128 k; accepted: at most {MAX_UNITS}"
        return None

    def limit(self, blocks: int, cluster: int, accepted: str, workers: str) -> str | None:
        """Why the schedule is not legal, None where it is; `blocks` in clusters of `cluster` are its `workers`."""
        if blocks % cluster or not 1 <= self.workers <= self.units:
            return f"blocks {blocks}; accepted for {self.tiles} tiles of {self.k_blocks} k blocks: {accepted}"
        if not 0 <= self.waves * self.workers <= self.tiles:
            most = self.tiles // self.workers
            return f"waves {self.waves} of {self.workers} {workers}; accepted for {self.tiles} tiles: 0 to {most}"
        nearest = self.whole().workers
        if self.waves == 0 and nearest != self.workers:
            return f"blocks {blocks} leaves some without any of {self.units} k blocks; use {nearest * cluster}"
        return None


def schedules(tiles: int, k_blocks: int, resident: int) -> list[Schedule]:
    """Ways to give tiles to workers, of which `resident` run at a time, beside one worker for each tile."""
    waves, each = tiles // resident, -(-tiles // resident)
    found = []
    if each > 1 and tiles % each == 0:
        found.append((tiles // each, each))
    # Ranges for all tiles, or for those after some whole waves.
    found += [(resident, whole) for whole in sorted({0, max(0, waves - 1), waves})]
    # Each tile cut into the same number of ranges.
    found += [(tiles * splits, 0) for splits in range(2, resident // tiles + 1) if k_blocks % splits == 0]
    return [Schedule(tiles, k_blocks, workers, waves).whole() for workers, waves in found]


def candidates(
    variants: Iterable[_Config],
    schedules: Callable[[_Config], list[_Config]],
    seconds: Callable[[_Config], float],
    count: int,
) -> list[_Config]:
    """Of every variant the few schedules that the model puts first; the most promising first."""
    found: dict[_Config, float] = {}
    for variant in variants:
        times = {config: seconds(config) for config in schedules(variant)}
        found |= {config: times[config] for config in sorted(times, key=times.__getitem__)[:count]}
    return sorted(found, key=found.__getitem__)


def k_blocks(problem: QuantizedMatmulProblem) -> int:
    return -(-problem.k // BLOCK_K)


def received_bytes(tile_m: int, tile_n: int, splits: int) -> int:
    """Of the ring of a thread block, for the sums of its cluster's blocks."""
    chunks = tile_m // SLOT * tile_n // REDUCE_COLUMNS
    return -(-chunks // splits) * splits * CHUNK_BYTES


def part_bytes(tile_m: int, tile_n: int, parts: int) -> int:
    """Shared memory for sums on their way from one part to the other."""
    return (parts - 1) * tile_m // SLOT * tile_n // REDUCE_COLUMNS * CHUNK_BYTES


def size_limit(p: QuantizedMatmulProblem) -> str | None:
    """Why the device code cannot count the problem's rows, k or features; None where it can."""
    for what, size in (("rows of x", p.rows), ("k", p.k), ("features", p.features)):
        if not 0 < size <= INT32_MAX - 256:
            return f"{size} {what}; accepted: 1 to {INT32_MAX - 256}"
    return None


def defines(p: QuantizedMatmulProblem, n_tiles: int) -> tuple[tuple[str, int], ...]:
    """Macros of the device code that follow from the sizes: `n_tiles` along the rows where they are few, and whether
    rows of the output, and the weight's k, end where its accesses do."""
    return (
        ("N_TILES", n_tiles if n_tiles <= MAX_N_TILES else 0),
        ("EIGHTS", int(p.features % 8 == 0)),
        ("WHOLE", int(p.k_tiles % 2 == 0)),
    )


def args(p: QuantizedMatmulProblem, tiles: tuple[int, int], schedule: Schedule) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order: `struct Schedule`, and whether every word is read once."""
    packed = (p.feature_tiles, p.k_tiles, p.groups, schedule.k_blocks)
    once = int(tiles[1] == 1)
    return plan.Int32Struct((p.rows, p.features, *packed, *tiles, schedule.waves, schedule.range_blocks, once))


def reduce_launch(
    args: plan.Int32Struct, schedule: Schedule, tile: tuple[int, int], partials: plan.Pointer, out: plan.Pointer
) -> plan.Launch:
    """The launch of reduce_ranges, for a worker's tile of so many features by rows of x."""
    features, rows = tile
    before = plan.Int32Struct((schedule.waves * schedule.workers,))
    return plan.Launch(
        kernel="reduce_ranges",
        grid=(schedule.rest * (rows // REDUCE_COLUMNS) * (features // SLOT), 1, 1),
        block=(128, 1, 1),
        params=(args, before, partials, out),
        programmatic=True,
    )
