"""Output tiles of 64-row blocks by WGMMA, and the pipeline that feeds them: the host's side of `wgmma_tile.cuh`."""

import dataclasses
import itertools
import math
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

    def stage_work(self, stages: int, chain: int, together: int) -> dict[str, float]:
        """What a Work has of so many stages of a multiprocessor, which `together` thread blocks share, of `chain` of
        them each: products, their operands, and loads that are waited for."""
        # A WGMMA reads 64 rows and its columns.
        read = self.depth * self.tile_m // 64 * (64 + self.tile_n) * ROW_BYTES
        # Of the loads of a stage as many are under way as a thread block has stages, less `HELD`. The first ones wait
        # for none.
        waiting = max(0.0, 1 - self.stages / chain) / ((self.stages - HELD) * together)
        return {
            "tensor_clocks": stages * self.depth * self.tile_m * self.tile_n / 32,
            "shared_bytes": stages * (read + self.stage_bytes),
            "l2_bytes": stages * self.stage_bytes,
            "waits": stages * waiting,
        }


def max_stages(tile_m: int, tile_n: int, blocks_per_sm: int = 1) -> int:
    """The deepest pipeline that fits in shared memory and is of use."""
    room = (SHARED_BYTES // blocks_per_sm - RESERVED_BYTES) // ((tile_m + tile_n) * ROW_BYTES)
    return min(MAX_STAGES, room)


def depths(tile_m: int, tile_n: int, config: type[WgmmaTile] = WgmmaTile) -> list[int]:
    """Stages that are worth a try: as many as fit one or, where they may share it, two thread blocks of an SM."""
    one, two = (max_stages(tile_m, tile_n, blocks) for blocks in (1, 2))
    return sorted({one, two} if config(tile_m, tile_n, two).blocks_per_sm == 2 else {one})


def lines_of_row(pitch: int) -> int:
    """Lines of 128 bytes that a row of as many touches, where rows are `pitch` bytes apart; two lines in parts of 32
    bytes count twice."""
    step = math.gcd(pitch, ROW_BYTES)
    return 1 if step == ROW_BYTES else 2 if step >= 32 else 4


def tile_refusal(tile: WgmmaTile, tiles: Sequence[tuple[int, int]] = TILES) -> str | None:
    """Why the tile is none of these; None where it is."""
    if (tile.tile_m, tile.tile_n) in tiles:
        return None
    return f"tile {tile.tile_m}x{tile.tile_n}; accepted: {', '.join(f'{m}x{n}' for m, n in tiles)}"
