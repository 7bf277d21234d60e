// The sums of a tile that a cluster computes: each of its blocks has a range of the k blocks. Included after
// ranges.cuh and ring.cuh, where Args (a Schedule), SPLITS (the cluster's size), STAGES, STAGE_BYTES,
// RING_BYTES, FACTOR (of results over sums), CONSUMERS, PARTS (1, or 2 warpgroups that share 64 features,
// each with the sums of every second k block), WARPGROUPS, their product, and SHARED_SUMS_AT (where they meet
// behind the ring) are known.
//
// Macros: RANGE, LAST_RANGE (k blocks of a block of the cluster, and of its last one; 0 without a cluster).
// With a known number of turns the loops over k are uniform to the compiler, and what follows is constant.
//
// The tile's chunks belong to the blocks in turn. A block sends its sums to the chunks' owners, which add
// them in the order of the blocks. Sums land where the ring's next stages would go: a producer tells the
// whole cluster once its block has read what was there (`room`, one arrival of each block). `arrived` counts
// the bytes that come from the other blocks; one arrival is the producer's, which expects them, and one each
// consumer warp's, for what it keeps. Nobody leaves before all that is sent to it has come: the cluster needs
// no barrier but the first, for the initialisation of these.

// k blocks of a block of the cluster.
__device__ inline int blocks_of(int rank) {
  return RANGE == LAST_RANGE || rank < SPLITS - 1 ? RANGE : LAST_RANGE;
}

// Chunks of 64 features and 16 rows of x, in the accumulators' order; a block's lie slot by slot, a slot in
// the order of the blocks that they come from.
constexpr int CHUNK_BYTES = 4096, CHUNKS = CONSUMERS * STORE_CHUNKS;
constexpr int SLOT_BYTES = SPLITS * CHUNK_BYTES, SLOTS = (CHUNKS + SPLITS - 1) / SPLITS;
constexpr int PART_CHUNKS = STORE_CHUNKS / PARTS;  // that a warpgroup has the block's sums of
using PartSums = float[8 * PART_CHUNKS];
static_assert(STAGE_BYTES % CHUNK_BYTES == 0, "a chunk does not lie across the end of the ring");
static_assert(PARTS == 1 || (PARTS == 2 && (SPLITS == 1 || STORE_CHUNKS % 2 == 0)), "whole chunks");

// Where a block's chunks begin in the ring: behind its last stage.
__device__ inline uint32_t landing(int rank) {
  constexpr uint32_t others = RANGE % STAGES * STAGE_BYTES, last = LAST_RANGE % STAGES * STAGE_BYTES;
  return others == last || rank < SPLITS - 1 ? others : last;
}

// Tells the cluster's blocks that this one's stages behind the last one have been read.
__device__ inline void offer_room(int rank, uint64_t* empty, uint64_t* room, uint64_t* arrived) {
  const int mine = (CHUNKS - rank + SPLITS - 1) / SPLITS;
  FullBarrier::arrive_and_expect_tx(arrived, mine * (SPLITS - 1) * CHUNK_BYTES);
  int stage = blocks_of(rank) % STAGES;
  uint32_t phase = blocks_of(rank) / STAGES % 2;
  for (int bytes = SLOTS * SLOT_BYTES; bytes > 0; bytes -= STAGE_BYTES) {
    EmptyBarrier::wait(&empty[stage], phase ^ 1);
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  for (int other = 0; other < SPLITS; ++other) EmptyBarrier::arrive(room, other, 1);
}

__device__ inline float4 four(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }

// Adds up what two warpgroups that share 64 features have: each gets the sums of half of the chunks.
__device__ inline void add_parts(uint32_t shared_sums, int warpgroup, int part, const float* acc,
                                 PartSums& sums) {
  constexpr int HALF_BYTES = PART_CHUNKS * CHUNK_BYTES;
  const uint32_t at = shared_sums + warpgroup * 2 * HALF_BYTES + threadIdx.x % 128 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* from = acc + 8 * PART_CHUNKS * half;
    if (half == part) {
#pragma unroll
      for (int i = 0; i < 8 * PART_CHUNKS; ++i) sums[i] = from[i];
    } else {
#pragma unroll
      for (int i = 0; i < 2 * PART_CHUNKS; ++i) {
        store_shared(at + half * HALF_BYTES + i * (CHUNK_BYTES / 2), four(from + 4 * i));
      }
    }
  }
  cutlass::arch::NamedBarrier::sync(256, warpgroup);
#pragma unroll
  for (int i = 0; i < PART_CHUNKS; ++i) {
    const uint32_t from = at + part * HALF_BYTES + i * CHUNK_BYTES;
    add(reinterpret_cast<float (&)[8]>(sums[8 * i]), load_shared<float4>(from),
        load_shared<float4>(from + CHUNK_BYTES / 2));
  }
}

// Sends this block's sums, adds and stores what it owns; the chunks of each consumer follow those of the one
// before.
__device__ inline void exchange(const Args& g, Output* out, uint32_t ring, uint32_t room, uint32_t staging,
                                const Place& at, int warpgroup, const float* sums) {
  const int thread = threadIdx.x % 128, rank = int(cute::block_rank_in_cluster());
  constexpr int last = SPLITS - 1;
  const uint32_t arrived = room + 8;
  const auto in_ring = [](uint32_t offset) { return offset < RING_BYTES ? offset : offset - RING_BYTES; };
  const uint32_t others = landing(0), lasts = landing(last), to = ring + thread * 16;
  const uint32_t first = warpgroup * PART_CHUNKS, first_slot = first / SPLITS;
  int owner = first % SPLITS;
  uint32_t offset = first_slot * SLOT_BYTES + rank * CHUNK_BYTES;
  wait(room, 0);
#pragma unroll
  for (int c = 0; c < PART_CHUNKS; ++c) {
    const uint32_t address = to + in_ring((owner == last ? lasts : others) + offset);
    const float4 low = four(sums + 8 * c), high = four(sums + 8 * c + 4);
    if (owner == rank) {
      store_shared(address, low);
      store_shared(address + CHUNK_BYTES / 2, high);
    } else {
      store_async(cute::set_block_rank(address, owner), low, cute::set_block_rank(arrived, owner));
      store_async(cute::set_block_rank(address + CHUNK_BYTES / 2, owner), high,
                  cute::set_block_rank(arrived, owner));
    }
    if (owner++ == last) {
      owner = 0;
      offset += SLOT_BYTES;
    }
  }
  __syncwarp();
  arrive_if(thread % 32 == 0, arrived);
  wait(arrived, 0);
  for (int slot = warpgroup, i; (i = slot * SPLITS + rank) < CHUNKS; slot += WARPGROUPS) {
    const int of = i / STORE_CHUNKS, chunk = i - of * STORE_CHUNKS;
    uint32_t from = landing(rank) + slot * SLOT_BYTES;
    float v[8] = {};
#pragma unroll 4
    for (int block = 0; block < SPLITS; ++block, from += CHUNK_BYTES) {
      const uint32_t address = to + in_ring(from);
      add(v, load_shared<float4>(address), load_shared<float4>(address + CHUNK_BYTES / 2));
    }
#pragma unroll
    for (float& sum : v) sum *= FACTOR;
    store(g, out, staging, (at.m * CONSUMERS + of) * SLOT + thread / 32 * 16, at.n * TILE_N + chunk * 16, v,
          thread % 32);
  }
}

// Ends the block's part of a tile. All consumers take part. `arrived` is the barrier behind `room`.
__device__ inline void store_together(const Args& g, Output* out, uint32_t ring, uint32_t room,
                                      uint32_t staging, const Place& at, int warpgroup, int part,
                                      const float* acc) {
  if constexpr (PARTS > 1) {
    PartSums sums;
    add_parts(ring + SHARED_SUMS_AT, warpgroup, part, acc, sums);
    exchange(g, out, ring, room, staging, at, warpgroup * PARTS + part, sums);
  } else {
    exchange(g, out, ring, room, staging, at, warpgroup, acc);
  }
}
