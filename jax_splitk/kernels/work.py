"""What a kernel has to do: what families say of a config, and all that the cost model sees of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of all launches of a plan. Figures are of the busiest multiprocessor unless they say otherwise.

    Attributes:
      tensor_clocks: that the tensor cores need at their full rate.
      shared_bytes: read and written in shared memory, bank conflicts counted.
      l2_bytes: loaded from the L2 or stored to it.
      instructions: that its warps issue, beside tensor-core ones.
      rows: pieces of up to 128 bytes of a line that TMA loads or stores.
      waits: loads that nothing hides, one after another.
      turns: short waits (a barrier, a product for the one before) of a thread block, one after another.
      memory_bytes: that the whole device moves.
      memory_share: part of the multiprocessors that take part in that.
      waves: turns of thread blocks, each of which fills its pipeline.
      stored_bytes: of fp32 sums in epilogues, which nothing hides.
      partial_bytes: of partial sums that the whole device writes and reads again.
      launches: of kernels.
      cluster: thread blocks whose sums meet.
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
