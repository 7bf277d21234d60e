// The sums of a tile that a cluster computes: each of its blocks has a range of the k blocks. Included by
// tiles.cuh.
//
// Macros: RANGE, LAST_RANGE (k blocks of a block of the cluster, and of its last one; 0 without a cluster).
// With a known number of turns the loops over k are uniform to the compiler, and what follows is constant.
//
// The tile's chunks belong to the blocks in turn. A block sends its sums to the chunks' owners, which add
// them in the order of the blocks. Sums land where the pipeline's next stages would go: a producer tells the
// whole cluster once its block has read what was there (ROOM, one arrival of each block). ARRIVED counts the
// bytes that come from the other blocks; one arrival is the producer's, which expects them, and one each
// consumer warp's, for what it keeps. Nobody leaves before all that is sent to it has come: the cluster needs
// no barrier but the first, for the initialisation of these.

// Chunks of 64 features and 16 rows of x, in the accumulators' order; a block's lie round by round, a round
// in the order of the blocks that they come from.
constexpr int CHUNK_BYTES = 4096, CHUNKS = M_WARPGROUPS * STORE_CHUNKS;
constexpr int ROUND_BYTES = SPLITS * CHUNK_BYTES, ROUNDS = (CHUNKS + SPLITS - 1) / SPLITS;
constexpr int PART_CHUNKS = STORE_CHUNKS / K_WARPGROUPS;  // that a warpgroup has the block's sums of
using PartSums = float[8 * PART_CHUNKS];
static_assert(STAGE_BYTES % CHUNK_BYTES == 0, "a chunk does not lie across the end of the pipeline");
static_assert(K_WARPGROUPS == 1 || (K_WARPGROUPS == 2 && (SPLITS == 1 || STORE_CHUNKS % 2 == 0)),
              "whole chunks");

// Where a block's chunks begin in the pipeline: behind its last stage.
__device__ inline uint32_t landing(int rank) {
  constexpr uint32_t others = RANGE % STAGES * STAGE_BYTES, last = LAST_RANGE % STAGES * STAGE_BYTES;
  return others == last || rank < SPLITS - 1 ? others : last;
}

// Tells the cluster's blocks that this one's stages behind the last one have been read.
__device__ inline void offer_room(const Kernel& kernel) {
  uint64_t* barriers = kernel.barriers;
  const int rank = int(block_rank_in_cluster()), mine = (CHUNKS - rank + SPLITS - 1) / SPLITS;
  Barrier::arrive_and_expect_tx(&barriers[ARRIVED], mine * (SPLITS - 1) * CHUNK_BYTES);
  Position at{blocks_of(rank) % STAGES, uint32_t(blocks_of(rank) / STAGES % 2)};
  for (int bytes = ROUNDS * ROUND_BYTES; bytes > 0; bytes -= STAGE_BYTES) {
    Barrier::wait(&barriers[EMPTY + at.stage], at.phase ^ 1);
    at.advance(STAGES);
  }
  for (int other = 0; other < SPLITS; ++other) Barrier::arrive(&barriers[ROOM], other);
}

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
  named_sync(256, warpgroup);
#pragma unroll
  for (int i = 0; i < PART_CHUNKS; ++i) {
    const uint32_t from = at + part * HALF_BYTES + i * CHUNK_BYTES;
    add(reinterpret_cast<float (&)[8]>(sums[8 * i]), load_shared<float4>(from),
        load_shared<float4>(from + CHUNK_BYTES / 2));
  }
}

// Sends this block's sums, adds and stores what it owns; the chunks of each consumer follow those of the one
// before.
__device__ inline void exchange(const Kernel& kernel, uint32_t staging, const Place& at, int warpgroup,
                                const float* sums) {
  const int thread = threadIdx.x % 128, rank = int(block_rank_in_cluster());
  constexpr int last = SPLITS - 1;
  const uint32_t room = shared_address(&kernel.barriers[ROOM]), arrived = room + 8;
  const auto wrapped = [](uint32_t at) { return at < PIPELINE_BYTES ? at : at - PIPELINE_BYTES; };
  const uint32_t others = landing(0), lasts = landing(last), to = kernel.address + thread * 16;
  const uint32_t first = warpgroup * PART_CHUNKS, first_round = first / SPLITS;
  int owner = first % SPLITS;
  uint32_t offset = first_round * ROUND_BYTES + rank * CHUNK_BYTES;
  wait(room, 0);
#pragma unroll
  for (int c = 0; c < PART_CHUNKS; ++c) {
    const uint32_t address = to + wrapped((owner == last ? lasts : others) + offset);
    const float4 low = four(sums + 8 * c), high = four(sums + 8 * c + 4);
    if (owner == rank) {
      store_shared(address, low);
      store_shared(address + CHUNK_BYTES / 2, high);
    } else {
      store_async(set_block_rank(address, owner), low, set_block_rank(arrived, owner));
      store_async(set_block_rank(address + CHUNK_BYTES / 2, owner), high, set_block_rank(arrived, owner));
    }
    if (owner++ == last) {
      owner = 0;
      offset += ROUND_BYTES;
    }
  }
  __syncwarp();
  arrive_if(thread % 32 == 0, arrived);
  wait(arrived, 0);
  for (int round = warpgroup, i; (i = round * SPLITS + rank) < CHUNKS; round += WARPGROUPS) {
    const int of = i / STORE_CHUNKS, chunk = i - of * STORE_CHUNKS;
    uint32_t from = landing(rank) + round * ROUND_BYTES;
    float v[8] = {};
#pragma unroll 4
    for (int block = 0; block < SPLITS; ++block, from += CHUNK_BYTES) {
      const uint32_t address = to + wrapped(from);
      add(v, load_shared<float4>(address), load_shared<float4>(address + CHUNK_BYTES / 2));
    }
    if constexpr (!E4M3_PRODUCTS) {  // else done
#pragma unroll
      for (float& sum : v) sum *= FACTOR;
    }
    store(kernel.g, at.destination(kernel.g, kernel.out), staging,
          (at.m * M_WARPGROUPS + of) * WARPGROUP_M + thread / 32 * 16, at.first_row() + chunk * 16,
          at.rows_end(kernel.g), v, thread % 32);
  }
}

// Ends the block's part of a tile. All consumers take part.
__device__ inline void store_together(const Kernel& kernel, uint32_t staging, const Place& at,
                                      int m_warpgroup, int k_warpgroup, const float* acc) {
  if constexpr (K_WARPGROUPS > 1) {
    PartSums sums;
    add_parts(kernel.address + SHARED_SUMS_AT, m_warpgroup, k_warpgroup, acc, sums);
    exchange(kernel, staging, at, m_warpgroup * K_WARPGROUPS + k_warpgroup, sums);
  } else {
    exchange(kernel, staging, at, m_warpgroup, acc);
  }
}
