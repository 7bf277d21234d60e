"""Output tiles of 64-row blocks by WGMMA, and the pipeline that feeds them: the host's side of `wgmma_tile.cuh`."""

import dataclasses
import itertools
from collections.abc import Sequence

ROW_BYTES = 128  # of shared memory: the swizzle; of a stage, for each row and column of the tile
SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 2 * 1024  # alignment of the pipeline and barriers
MIN_STAGES, MAX_STAGES = 2, 8  # more gain nothing, or cost 5% (measured)

# Stages that nothing is loaded into: the one that is multiplied, until all consumers are through with it (what fitted
# 1,900 times of im2col passes best).
HELD = 1.4

# Sums of a thread where it has each twice, of a chain and of all; by thread blocks that share an SM.
MAX_CHAINED_SUMS = {1: 64, 2: 32}

# (tile_m, tile_n): rows of one or more 64-row blocks per consumer warpgroup, columns of one WGMMA.
TILES = (
    *itertools.product((64, 128), (64, 128, 192, 256)),
    *itertools.product((192,), (64, 128, 192)),
    *itertools.product((256,), (64, 128)),
)


@dataclasses.dataclass(frozen=True)
class TileCosts:
    """The cost model's constants of a stage.

    Attributes:
      mma_flops_per_sm: a second, of the tensor cores and 16-bit operands.
      one_warpgroup: part of that rate where a single consumer warpgroup issues.
      narrow: part of it where several warpgroups share 64 columns: each of their WGMMAs reads 4 KiB of shared memory in
        32 clocks, all that it gives.
      l2_bytes_per_sm: a second, loaded by an SM.
      shadow: part of the shorter of arithmetic and loads that is not hidden by the longer.
      latency_seconds: from where a stage is free until what is loaded into it is there, but for its bytes' time.
    """

    mma_flops_per_sm: float
    one_warpgroup: float
    narrow: float
    l2_bytes_per_sm: float
    shadow: float
    latency_seconds: float


@dataclasses.dataclass(frozen=True)
class WgmmaTile:
    """What configs of such kernels begin with.

    Attributes:
      tile_m, tile_n: output tile of a thread block (elements); see `TILES`.
      stages: depth of the shared-memory pipeline, in blocks of the reduction.
    """

    tile_m: int
    tile_n: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * ROW_BYTES

    @property
    def depth(self) -> int:
        """`ROW_BYTES` of the reduction in a stage."""
        return 1

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + RESERVED_BYTES

    @property
    def consumers(self) -> int:
        """Consumer warpgroups (CONSUMERS in the device code)."""
        return 2 if self.tile_m == 256 and self.tile_n <= 128 else self.tile_m // 64

    @property
    def threads(self) -> int:
        """The producer's and the consumers'."""
        return 128 * (self.consumers + 1)

    @property
    def thread_sums(self) -> int:
        """Of a consumer's thread."""
        return self.tile_m // 64 // self.consumers * self.tile_n // 2

    @property
    def may_chain(self) -> bool:
        """Whether a thread has the registers for its sums twice."""
        return self.thread_sums <= MAX_CHAINED_SUMS[self.blocks_per_sm]

    @property
    def blocks_per_sm(self) -> int:
        """2 where shared memory and, at 128 registers a thread, the accumulators allow it."""
        return 2 if self.consumers == 1 and self.tile_n <= 192 and 2 * self.shared_bytes <= SHARED_BYTES else 1

    def step_seconds(self, costs: TileCosts, more_bytes: float = 0.0) -> float:
        """Predicted of a stage: the slower of tensor-core and L2 rate, and a part of the other.

        Args:
          more_bytes: by which its loads are slower than their bytes say.
        """
        # Twice as wide elements are multiplied half as fast, and half as many are in a row.
        mma = self.depth * self.tile_m * self.tile_n * ROW_BYTES / costs.mma_flops_per_sm
        # A WGMMA's operands are 16 k of 64 rows and of its columns, at 128 bytes of shared memory a clock.
        mma *= max(1.0, (64 + self.tile_n) / (2 * self.tile_n))
        if self.consumers == 1:
            mma /= costs.one_warpgroup
        elif self.tile_n <= 64:
            mma /= costs.narrow
        load = (self.stage_bytes + more_bytes) / costs.l2_bytes_per_sm
        return max(mma, load) + costs.shadow * min(mma, load)

    def waiting_seconds(self, costs: TileCosts, step: float, chain: int, together: int) -> float:
        """Predicted of a stage of the multiprocessor, where so many thread blocks share it, of `chain` stages each: its
        `step`, or what its loads take, of which a thread block has so many under way as it has stages, less `HELD`. The
        first ones wait for none."""
        under_way = (self.stages - HELD) * together
        loads = (costs.latency_seconds + self.stage_bytes / costs.l2_bytes_per_sm) / under_way
        return step + max(0.0, 1 - self.stages / chain) * max(0.0, loads - step)


def max_stages(tile_m: int, tile_n: int, blocks_per_sm: int = 1) -> int:
    """The deepest pipeline that fits in shared memory and is of use."""
    room = (SHARED_BYTES // blocks_per_sm - RESERVED_BYTES) // ((tile_m + tile_n) * ROW_BYTES)
    return min(MAX_STAGES, room)


def depths(tile_m: int, tile_n: int, config: type[WgmmaTile] = WgmmaTile) -> list[int]:
    """Stages that are worth a try: as many as fit one or, where they may share it, two thread blocks of an SM."""
    one, two = (max_stages(tile_m, tile_n, blocks) for blocks in (1, 2))
    return sorted({one, two} if config(tile_m, tile_n, two).blocks_per_sm == 2 else {one})


def tile_refusal(tile: WgmmaTile, tiles: Sequence[tuple[int, int]] = TILES) -> str | None:
    """Why the tile is none of these; None where it is."""
    if (tile.tile_m, tile.tile_n) in tiles:
        return None
    return f"tile {tile.tile_m}x{tile.tile_n}; accepted: {', '.join(f'{m}x{n}' for m, n in tiles)}"
