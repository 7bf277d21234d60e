"""The work of a kernel: families state it for a config, and the cost model sees nothing else."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of all launches of a plan. Figures are of the busiest multiprocessor unless they say otherwise.

    Attributes:
      tensor_clocks: clocks that the tensor cores need at their full rate.
      shared_bytes: bytes read and written in shared memory, including bank conflicts.
      l2_bytes: bytes loaded from the L2 or stored to it.
      instructions: instructions that its warps issue, besides tensor-core ones.
      rows: pieces of up to 128 bytes of a line that TMA loads or stores.
      waits: loads in sequence that nothing hides.
      turns: short waits in sequence of a thread block (at a barrier, or of a product for the one before).
      memory_bytes: bytes that the whole device moves.
      memory_share: part of the multiprocessors that move them.
      waves: waves of thread blocks, each of which fills its pipeline.
      stored_bytes: bytes of fp32 sums in epilogues, which nothing hides.
      partial_bytes: bytes of partial sums that the whole device writes and reads again.
      launches: number of kernels.
      cluster: thread blocks of a cluster that add their sums.
    """

    tensor_clocks: float = 0.0
    shared_bytes: float = 0.0
    l2_bytes: float = 0.0
    instructions: float = 0.0
    rows: float = 0.0
    waits: float = 0.0
    turns: float = 0.0
    memory_bytes: float = 0.0
    memory_share: float = 1.0
    waves: float = 1.0
    stored_bytes: float = 0.0
    partial_bytes: float = 0.0
    launches: float = 1.0
    cluster: float = 1.0
