"""Output tiles of 64-row blocks by WGMMA, and the pipeline that feeds them: the host's side of `wgmma_tile.cuh`."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

ROW_BYTES = 128  # a row of shared memory, the swizzle's width, for each row and column of the tile
SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 2 * 1024  # alignment of the pipeline and barriers
BARRIER_BYTES = 1024  # of these; static shared memory, which a launch does not ask for
MAX_COLUMNS = 256  # of a WGMMA
MIN_STAGES, MAX_STAGES = 2, 8  # more gain nothing, or cost 5% (measured)

# Stages that are not being loaded: the one that is multiplied, until all consumers are done with it (the best fit to
# 1,900 times of im2col passes).
HELD = 1.4

# Most sums of a thread that holds each twice (of a chain, and of all), by thread blocks that share an SM.
MAX_CHAINED_SUMS = {1: 64, 2: 32}

BOX = 64  # elements along m or n of a box of an operand that is not K-major

# (tile_m, tile_n): rows of one or more 64-row blocks per consumer warpgroup, columns of one WGMMA.
TILES = (
    *itertools.product((64, 128), (64, 128, 192, 256)),
    *itertools.product((192,), (64, 128, 192)),
    *itertools.product((256,), (64, 128)),
)
_STEP = 16  # of columns of other tiles: a warp stores two 8x8 matrices beside each other


@dataclasses.dataclass(frozen=True)
class WgmmaTile:
    """Common fields of configs for such kernels.

    Attributes:
      tile_m, tile_n: output tile of a thread block (elements); see `TILES`.
      stages: depth of the shared-memory pipeline, in blocks of the reduction.
    """

    tile_m: int
    tile_n: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + rows_of(self.tile_n)) * ROW_BYTES

    @property
    def depth(self) -> int:
        """Elements of the reduction in a stage, `ROW_BYTES` long."""
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
        """Threads of the producer and the consumers."""
        return 128 * (self.consumers + 1)

    @property
    def thread_sums(self) -> int:
        """Sums of a consumer's thread."""
        return self.tile_m // 64 // self.consumers * self.tile_n // 2

    @property
    def may_chain(self) -> bool:
        """Whether a thread has enough registers to hold its sums twice."""
        return self.thread_sums <= MAX_CHAINED_SUMS[self.blocks_per_sm]

    @property
    def blocks_per_sm(self) -> int:
        """2 if shared memory and, at 128 registers a thread, the accumulators allow it."""
        return 2 if self.consumers == 1 and self.tile_n <= 192 and 2 * self.shared_bytes <= SHARED_BYTES else 1

    def stage_work(self, stages: int, chain: int, together: int, filled: float = 1.0) -> dict[str, float]:
        """Fields of the Work for `stages` stages of a multiprocessor, which `together` thread blocks share, each in a
        chain of `chain` stages: products, their operands, and loads that are waited for. `filled`: the share of a
        stage's instructions that there are."""
        # A WGMMA reads 64 rows and its columns.
        read = filled * (self.depth * self.tile_m // 64) * (64 + self.tile_n) * ROW_BYTES
        # A thread block has as many loads under way as stages, minus `HELD`. Its first loads do not wait.
        waiting = max(0.0, 1 - self.stages / chain) / ((self.stages - HELD) * together)
        return {
            "tensor_clocks": filled * stages * self.depth * self.tile_m * self.tile_n / 32,
            "shared_bytes": stages * (read + self.stage_bytes),
            "l2_bytes": stages * self.stage_bytes,
            "waits": stages * waiting,
        }


def rows_of(tile_n: int) -> int:
    """The rows of a stage for `tile_n` columns (N_ROWS in the device code). More than 32 columns take whole boxes of
    `BOX` rows."""
    return tile_n if tile_n <= BOX // 2 else -(-tile_n // BOX) * BOX


def fitted_tiles(columns: int) -> list[tuple[int, int]]:
    """Tiles just wide enough for `columns`. Empty if `TILES` has that width, and for at most 32 or more than 240."""
    tile_n = -(-columns // _STEP) * _STEP
    if tile_n % BOX == 0 or not BOX // 2 < tile_n < MAX_COLUMNS:
        return []
    return [(tile_m, tile_n) for tile_m in (64, 128, 192, 256) if tile_n <= max(n for m, n in TILES if m == tile_m)]


def max_stages(tile_m: int, tile_n: int, blocks_per_sm: int = 1) -> int:
    """The deepest pipeline that fits in shared memory and is useful."""
    room = (SHARED_BYTES // blocks_per_sm - RESERVED_BYTES) // ((tile_m + rows_of(tile_n)) * ROW_BYTES)
    return min(MAX_STAGES, room)


def depths(tile_m: int, tile_n: int, config: type[WgmmaTile] = WgmmaTile) -> list[int]:
    """Numbers of stages that are worth a try: the most that one thread block can have and, if two may share an SM, the
    most that each of two can have."""
    one, two = (max_stages(tile_m, tile_n, blocks) for blocks in (1, 2))
    return sorted({one, two} if config(tile_m, tile_n, two).blocks_per_sm == 2 else {one})


def lines_of_row(step: int, row: int = ROW_BYTES) -> float:
    """Lines of 128 bytes that TMA touches in the mean for a row of `row` bytes, if rows begin at multiples of `step`
    bytes. A row that does not begin at a multiple of 32 bytes counts twice."""
    if math.gcd(step, ROW_BYTES) >= row:
        return 1
    return (1 + row / ROW_BYTES) * (1 if step % 32 == 0 else 2)


def tile_refusal(tile: WgmmaTile, tiles: Sequence[tuple[int, int]] = TILES) -> str | None:
    """Why the tile is not one of `tiles`; None if it is."""
    if (tile.tile_m, tile.tile_n) in tiles:
        return None
    return f"tile {tile.tile_m}x{tile.tile_n}; accepted: {', '.join(f'{m}x{n}' for m, n in tiles)}"
