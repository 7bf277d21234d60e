// The sums of a tile that a cluster computes: each of its blocks has a range of the k blocks. Included after
// ranges.cuh and ring.cuh, where Args (Schedule, and `splits`, the cluster's size), STAGES and STAGE_BYTES
// are known.
//
// The tile's chunks belong to the blocks in turn. A block sends its sums to the chunks' owners, which add
// them in the order of the blocks. Sums land where the ring's next stages would go: a producer tells the
// whole cluster once its block has read what was there (`room`, one arrival of each block). `arrived` counts
// the bytes that come from the other blocks; one arrival is the producer's, which expects them, and one each
// consumer warp's, for what it keeps. Nobody leaves before all that is sent to it has come: the cluster needs
// no barrier but the first, for the initialisation of these.

// k blocks of a block of the cluster.
__device__ inline int blocks_of(const Args& g, int rank) {
  return rank < g.splits - 1 ? g.range : g.k_blocks - rank * g.range;
}

// Chunks of 64 features and 16 rows of x, in the accumulators' order; a block's lie slot by slot, a slot in
// the order of the blocks that they come from.
constexpr int CHUNK_BYTES = 4096, CHUNKS = CONSUMERS * STORE_CHUNKS;
static_assert(STAGE_BYTES % CHUNK_BYTES == 0, "a chunk does not lie across the end of the ring");

// Where a block's chunks begin in the ring: behind its last stage.
__device__ inline uint32_t landing(const Args& g, int rank) {
  return blocks_of(g, rank) % STAGES * STAGE_BYTES;
}

// Tells the cluster's blocks that this one's stages behind the last one have been read.
__device__ inline void offer_room(const Args& g, int rank, uint64_t* empty, uint64_t* room,
                                  uint64_t* arrived) {
  const int slots = (CHUNKS + g.splits - 1) / g.splits, mine = (CHUNKS - rank + g.splits - 1) / g.splits;
  FullBarrier::arrive_and_expect_tx(arrived, mine * (g.splits - 1) * CHUNK_BYTES);
  const int blocks = blocks_of(g, rank);
  int stage = blocks % STAGES;
  uint32_t phase = blocks / STAGES & 1;
  for (int bytes = slots * g.splits * CHUNK_BYTES; bytes > 0; bytes -= STAGE_BYTES) {
    EmptyBarrier::wait(&empty[stage], phase ^ 1);
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  for (int other = 0; other < g.splits; ++other) EmptyBarrier::arrive(room, other, 1);
}

// To a chunk's owner, whose `arrived` counts the bytes.
__device__ inline void send(uint32_t address, uint32_t arrived, int owner, const float* v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
          cute::set_block_rank(address, owner)),
      "r"(cute::set_block_rank(arrived, owner)), "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])),
      "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3]))
      : "memory");
}

__device__ inline void keep_chunk(uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}

// Sends this block's sums, adds and stores what it owns. All consumers take part.
__device__ inline void store_together(const Args& g, Output* out, uint32_t ring, uint32_t room,
                                      uint32_t arrived, uint32_t staging, const Place& at, int warpgroup,
                                      const Accumulator& acc) {
  const int thread = threadIdx.x % 128, rank = int(cute::block_rank_in_cluster()), last = g.splits - 1;
  const auto in_ring = [](uint32_t offset) { return offset < RING_BYTES ? offset : offset - RING_BYTES; };
  const uint32_t others = landing(g, 0), lasts = landing(g, last), to = ring + thread * 16;
  const uint32_t slot_bytes = g.splits * CHUNK_BYTES;
  const uint32_t first = warpgroup * STORE_CHUNKS, first_slot = first / uint32_t(g.splits);
  int owner = first - first_slot * g.splits;
  uint32_t offset = first_slot * slot_bytes + rank * CHUNK_BYTES;
  wait(room, 0);
#pragma unroll
  for (int c = 0; c < STORE_CHUNKS; ++c) {
    const uint32_t address = to + in_ring((owner == last ? lasts : others) + offset);
    if (owner == rank) {
      keep_chunk(address, acc + 8 * c);
      keep_chunk(address + CHUNK_BYTES / 2, acc + 8 * c + 4);
    } else {
      send(address, arrived, owner, acc + 8 * c);
      send(address + CHUNK_BYTES / 2, arrived, owner, acc + 8 * c + 4);
    }
    if (owner++ == last) {
      owner = 0;
      offset += slot_bytes;
    }
  }
  __syncwarp();
  arrive_if(thread % 32 == 0, arrived);
  wait(arrived, 0);
  for (int slot = warpgroup, i; (i = slot * g.splits + rank) < CHUNKS; slot += CONSUMERS) {
    const int of = i / STORE_CHUNKS, chunk = i - of * STORE_CHUNKS;
    uint32_t from = landing(g, rank) + slot * slot_bytes;
    float v[8] = {};
#pragma unroll 4
    for (int block = 0; block < g.splits; ++block, from += CHUNK_BYTES) {
      const uint32_t address = to + in_ring(from);
      const uint4 low = load_words(address), high = load_words(address + CHUNK_BYTES / 2);
      add(v, reinterpret_cast<const float4&>(low), reinterpret_cast<const float4&>(high));
    }
    store(g, out, staging, (at.m * CONSUMERS + of) * SLOT + thread / 32 * 16, at.n * TILE_N + chunk * 16, v,
          thread % 32);
  }
}
