"""Configs of dense passes (`im2col`), and how long their tiles take.

Two ways to walk over the tiles: a thread block for each of them, or persistent thread blocks (`workers`), of which each
computes one tile after the other, so that nothing waits for the end of a tile: its results are stored while the next
one is multiplied and the one after that is loaded ("persistent" kernels in CUTLASS's documentation).
"""

import dataclasses

from jax_splitk.kernels.device import split_tile
from jax_splitk.kernels.device.split_tile import SplitTile
from jax_splitk.kernels.device.wgmma_tile import MAX_STAGES, RESERVED_BYTES, ROW_BYTES, SHARED_BYTES, TileCosts

# Tiles of two consumers whose sums fit into half of the registers.
TWO_CONSUMERS = ((128, 64), (128, 32), (256, 32), (128, 16), (256, 16))


@dataclasses.dataclass(frozen=True)
class Costs(split_tile.Costs):
    """The cost model's constants.

    Attributes:
      shared_bytes_per_sm: a second, of shared memory, which TMA writes and WGMMA reads.
      handover_bytes_per_sm: a second, of sums that a persistent thread block leaves to the warps that store them.
    """

    shared_bytes_per_sm: float
    handover_bytes_per_sm: float


@dataclasses.dataclass(frozen=True)
class Config(SplitTile):
    """How a pass is computed: see `SplitTile`.

    Attributes:
      swap: False puts pixels on the tile's M side and output channels on N; True the reverse.
      workers: persistent thread blocks, which share the tiles; 0: as many thread blocks as tiles.
    """

    swap: bool = False
    workers: int = 0

    @property
    def pixels(self) -> int:
        """Of a tile."""
        return self.tile_n if self.swap else self.tile_m

    @property
    def channels(self) -> int:
        """Of a tile: those of the output."""
        return self.tile_m if self.swap else self.tile_n

    @property
    def teams(self) -> int:
        """Of consumers, which take turns at the tiles."""
        return 2 if self.workers and self.consumers == 1 else 1

    @property
    def threads(self) -> int:
        return 128 * (self.consumers * self.teams + 1)

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + self.result_bytes

    @property
    def result_bytes(self) -> int:
        """Of shared memory, beside the stages: the results of a tile that are stored while the next is multiplied."""
        return self.teams * self.tile_m * self.tile_n * 2 if self.workers else 0

    @property
    def blocks_per_sm(self) -> int:
        """2 also of a tile with two consumers: reductions are short, and the products of one thread block hide what the
        other begins and ends with."""
        if self.workers:
            return 1
        fits = 2 * self.shared_bytes <= SHARED_BYTES
        return 2 if (self.tile_m, self.tile_n) in TWO_CONSUMERS and fits else super().blocks_per_sm

    @property
    def most_stages(self) -> int:
        """Of a persistent thread block."""
        return min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES - self.result_bytes) // self.stage_bytes)

    def step_seconds(self, costs: TileCosts, more_bytes: float = 0.0) -> float:
        """Predicted of a stage: the slowest of the tensor cores, the L2, and shared memory, which TMA writes, and from
        which each product reads both operands."""
        assert isinstance(costs, Costs)
        mma = self.tile_m * self.tile_n * ROW_BYTES / costs.mma_flops_per_sm
        if self.consumers * self.teams * self.blocks_per_sm == 1:
            mma /= costs.one_warpgroup
        read = self.tile_m // 64 * (64 + self.tile_n) * ROW_BYTES
        shared = (read + self.stage_bytes) / costs.shared_bytes_per_sm
        return max(mma, shared, (self.stage_bytes + more_bytes) / costs.l2_bytes_per_sm)

    def handover_seconds(self, costs: Costs) -> float:
        """Predicted: for so long nothing is multiplied at the end of a tile."""
        return self.tile_m * self.tile_n * 4 / costs.handover_bytes_per_sm if self.teams == 1 else 0.0
