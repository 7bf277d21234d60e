"""Whole tiles and ranges of k: how quantized_tiled and quantized_fp8 divide the output's tiles among workers.

A worker is a thread block, or a cluster whose blocks have neighbouring tiles and load their rows of x together.
"""

import dataclasses

from jax_splitk.kernels.device.split_k import whole_splits

MAX_UNITS = (2**31 - 1) // 2  # k blocks of all tiles, which the device code counts
MAX_SPLITS = 8  # thread blocks of a cluster that shares a tile
SPLITS = (2, 3, 4, 5, 6, 8)  # that are tried


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what.

    Attributes:
      tiles: the output's tiles of a worker's size.
      k_blocks: k blocks of a tile, each of 128 k.
      workers: thread blocks or clusters.
      whole_tiles: whole tiles that each worker computes. The k blocks of all other tiles, laid end to end, are cut into
        equal ranges, one for each worker.
    """

    tiles: int
    k_blocks: int
    workers: int
    whole_tiles: int

    @property
    def units(self) -> int:
        """k blocks of all tiles."""
        return self.tiles * self.k_blocks

    @property
    def rest(self) -> int:
        """Tiles that are cut into ranges."""
        return self.tiles - self.whole_tiles * self.workers

    @property
    def range_blocks(self) -> int:
        """k blocks of a range; 0 without ranges."""
        return -(-self.rest * self.k_blocks // self.workers)

    def last_range(self, splits: int) -> int:
        """k blocks of the last of a tile's `splits` ranges: it has the fewest."""
        return self.k_blocks - (splits - 1) * self.range_blocks

    @property
    def is_cut(self) -> bool:
        """Whether any tile has more than one range."""
        return self.rest > 0 and self.range_blocks % self.k_blocks != 0

    @property
    def blocks_each(self) -> int:
        """k blocks of a worker."""
        return self.whole_tiles * self.k_blocks + self.range_blocks

    @property
    def pieces(self) -> int:
        """The largest number of tiles on which a worker works."""
        return self.whole_tiles + -(-self.range_blocks // self.k_blocks)

    def without_idle(self) -> "Schedule":
        """The schedule with the largest number of workers, at most its own, that leaves no worker without work."""
        found = dataclasses.replace(self, workers=max(1, min(self.workers, self.units)))
        if found.whole_tiles:
            return found
        return dataclasses.replace(found, workers=-(-found.units // found.range_blocks))

    def refusal(self, splits: int, worker_blocks: int, k_warpgroups: int) -> str | None:
        """Why the schedule is not legal, None if it is. A worker has `worker_blocks` thread blocks. With `splits`
        above 1 each tile has that many ranges, and `k_warpgroups` share a block's range."""
        if self.units > MAX_UNITS:
            return f"{self.units} blocks of this tile and 128 k; accepted: at most {MAX_UNITS}"
        return self._refusal_of_splits(splits, k_warpgroups) if splits > 1 else self._refusal_of_ranges(worker_blocks)

    def _refusal_of_splits(self, splits: int, k_warpgroups: int) -> str | None:
        nearest = whole_splits(self.k_blocks, splits)
        if nearest != splits:
            return f"splits {splits} leaves some of {self.k_blocks} k blocks' ranges empty; use {nearest}"
        wanted = self.tiles * splits
        if (self.workers, self.whole_tiles) != (wanted, 0):
            given = f"blocks {self.workers} and whole_tiles {self.whole_tiles} with splits {splits}"
            return f"{given}; accepted: {wanted} and 0"
        if self.last_range(splits) < k_warpgroups:
            return f"k_warpgroups {k_warpgroups} of ranges down to {self.last_range(splits)} k blocks; accepted: 1"
        return None

    def _refusal_of_ranges(self, each: int) -> str | None:
        blocks, of = self.workers * each, f"{self.tiles} tiles of {self.k_blocks} k blocks"
        if not 1 <= self.workers <= self.units:
            return f"blocks {blocks}; accepted for {of}: {each} to {self.units * each}"
        if not 0 <= self.whole_tiles * self.workers <= self.tiles:
            most = self.tiles // self.workers
            given = f"whole_tiles {self.whole_tiles} of {self.workers} workers"
            return f"{given}; accepted for {self.tiles} tiles: 0 to {most}"
        nearest = self.without_idle().workers
        if self.whole_tiles == 0 and nearest != self.workers:
            return f"blocks {blocks} leaves some without any of {self.units} k blocks; use {nearest * each}"
        return None


def schedules(tiles: int, k_blocks: int, resident: int) -> list[Schedule]:
    """Ways to divide the tiles among workers, of which `resident` run at a time, besides one worker for each tile."""
    rounds, each = tiles // resident, -(-tiles // resident)
    found = []
    if each > 1 and tiles % each == 0:
        found.append((tiles // each, each))
    # Ranges for all tiles, or for those after some whole ones.
    found += [(resident, whole) for whole in sorted({0, max(0, rounds - 1), rounds})]
    # Each tile cut into the same number of ranges.
    found += [(tiles * splits, 0) for splits in range(2, resident // tiles + 1) if k_blocks % splits == 0]
    return [Schedule(tiles, k_blocks, workers, whole).without_idle() for workers, whole in found]
