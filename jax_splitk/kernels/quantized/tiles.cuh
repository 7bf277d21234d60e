// The kernels of quantized_fp8 and quantized_tiled, but for their inner loops.
//
//   out[n, m] = sum over k of x[n, k] * (value(q[k, m]) - zero[k / group, m]) * scale[k / group, m]
//
// As a matrix product, D[m, n] = A B with m over features and n over rows of x: the weight becomes WGMMA's A
// in registers, x is its B in shared memory. A k block is 128 k, two tiles of the packed weight
// (jax_splitk/quantized/packing.py). A stage of the pipeline holds a k block: x under the 128-byte swizzle,
// and the words of 64 features for each of M_WARPGROUPS; its scales, zero points and sums of x lie behind all
// stages. Beyond k, TMA fills x with zeros; where the weight ends in the middle of a block its last tile
// stands in again, so that nothing unwritten is multiplied by these zeros.
//
// Under TRANSPOSED the product is with the transposed weight:
//
//   out[n, m] = sum over k of x[n, k] * (value(q[m, k]) - zero[m / group, k]) * scale[m / group, k]
//
// with m over the weight's k and k over its features, from the same tiles of 64 features by 64 k. What
// follows names dimensions as this product has them: a warpgroup has 64 m, and a k block is two tiles of
// features.
//
// Work. Tiles are numbered in bands (see `place_of`). A worker, which is a thread block, or a cluster of
// MULTICAST of them that have neighbouring tiles and load their rows of x together, computes `whole_tiles`
// tiles, as many apart as there are workers; the k blocks of all tiles after these, laid end to end, are cut
// into ranges of `range_blocks` blocks, one for each worker. A tile that more than one range reaches meets in
// the workspace: each range writes its fp32 sums as a slot, in the accumulators' order, and KERNEL(_reduce)
// adds the slots of a tile in the order of their ranges. With SPLITS above 1 each tile is cut into that many
// ranges, whose thread blocks form a cluster, and its sums meet in shared memory (cluster_sums.cuh); there
// K_WARPGROUPS can share 64 m: each takes every K_WARPGROUPS-th block of the range, and their sums
// meet first.
//
// Roles. Warpgroup 0 is the producer: a thread in each of some of its warps issues copies, and it leaves its
// registers to the others, the consumers. The pipeline goes on from one piece of work to the next.
// Barriers, per stage: `full` (one arrival per producer warp of this block, with the bytes of all copies into
// it, also of those that another block issues) and `empty` (one arrival per warp that takes the stage, of all
// blocks that share x, once it has read its words and the WGMMAs that read x have retired). Both start in
// phase 0; the producer's first pass waits on the opposite parity, which is complete. With MULTICAST, a last
// cluster barrier keeps every block's memory until nobody writes to it any more.
//
// What runs once counts: cold code takes some 4 ns an instruction, and the whole of a small product 10 us. So
// splits and their ranges are known at compile time, the tiles along n where they are few, and what the sizes
// need not.
//
// With EXPERTS the rows of x are in groups that have a weight each, and Schedule and Place are those of
// experts.cuh.
//
// Included after wgmma_rs.cuh. Macros: FORMAT, HALF, E4M3_PRODUCTS (dequantize.cuh), OUT (output.cuh), those
// of epilogue.cuh, SCALE_TYPE, ZERO_TYPE, CHANNEL_SCALE (scales.cuh), GROUP (k of a scale; 0: all), PERIOD (k
// of a partial sum), X_SUMS (zero points take part as multiples of sums of x), M_WARPGROUPS, K_WARPGROUPS,
// SPLITS, RANGE, LAST_RANGE (cluster_sums.cuh), MULTICAST, TILE_N, STAGES, N_TILES (tiles along n, not more
// than a band has; 0 for any number), EIGHTS (m is a multiple of 8), WHOLE (the weight does not end in the
// middle of a block), TRANSPOSED (0 by default), EXPERTS (0, or see experts.cuh).

#include "device/epilogue.cuh"
#include "device/skeleton.cuh"
#include "quantized/dequantize.cuh"
#include "quantized/scales.cuh"
#include "structs.cuh"

#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif

constexpr int BLOCK_K = 128;
constexpr int WARPGROUP_M = 64;                          // m of a warpgroup
constexpr int WARPGROUPS = M_WARPGROUPS * K_WARPGROUPS;  // of consumers
constexpr int THREADS = 128 + 128 * WARPGROUPS;
constexpr bool SPLIT = SPLITS > 1;
static_assert(K_WARPGROUPS == 1 || (K_WARPGROUPS == 2 && SPLIT), "two give their sums to a cluster");
static_assert(MULTICAST == 1 || !SPLIT, "a cluster shares x or a tile");

// ---- shared memory ---------------------------------------------------------------------------------------

constexpr int X_BYTES = TILE_N * BLOCK_K * 32 / STEP_K;  // of a stage
constexpr int TILE_BYTES = WORDS * 64 * 64 / 2;          // of the packed weight
constexpr int STAGE_BYTES = X_BYTES + M_WARPGROUPS * 2 * TILE_BYTES, PIPELINE_BYTES = STAGES * STAGE_BYTES;

// Scales and zero points of a stage and a warpgroup, and channel scales where k are features; sums of x over
// PERIOD k of a stage.
constexpr int GROUP_K = GROUP ? GROUP : BLOCK_K;
constexpr int TILE_GROUPS = GROUP && GROUP < 64 ? 64 / GROUP : 1;  // of the weight's tile
// Of a block. A scale for all k stays in registers, unless it belongs to the k of the product.
constexpr int GROUPS = TRANSPOSED ? 2 * TILE_GROUPS : GROUP ? BLOCK_K / GROUP_K : 0;
constexpr int SCALE_ITEM = item_bytes(SCALE_TYPE), ZERO_ITEM = item_bytes(ZERO_TYPE);
constexpr int SCALES = GROUPS * WARPGROUP_M * SCALE_ITEM, ZEROS = GROUPS * WARPGROUP_M * ZERO_ITEM;
constexpr int SUM_ROWS = X_SUMS ? BLOCK_K / PERIOD : 0;
constexpr int SUM_COLUMNS = TILE_N + (EXPERTS ? 4 : 0), SUMS_BYTES = SUM_ROWS * SUM_COLUMNS * 4;
constexpr int CHANNELS = TRANSPOSED && CHANNEL_SCALE ? 2 * 64 * 4 : 0;
constexpr int ZEROS_AT = M_WARPGROUPS * SCALES, CHANNELS_AT = ZEROS_AT + M_WARPGROUPS * ZEROS;
constexpr int SUMS_AT = CHANNELS_AT + M_WARPGROUPS * CHANNELS;
constexpr int EXTRAS_AT = PIPELINE_BYTES, EXTRA_BYTES = SUMS_AT + SUMS_BYTES;

// Results on their way to memory: 16 rows of x by 16 features for each warp, 16 bytes of padding to a row.
// Then what warpgroups that share features give to each other.
constexpr int STAGING_PITCH = 48, STAGING_BYTES = OUT == FLOAT ? 0 : 16 * STAGING_PITCH;
constexpr int STAGING_AT = EXTRAS_AT + STAGES * EXTRA_BYTES;
constexpr int SHARED_SUMS_AT = STAGING_AT + 4 * WARPGROUPS * STAGING_BYTES;

// Barriers: `full` of all stages, `empty` of all, two of cluster_sums.cuh, and where an inner loop wants it
// one that consumers release as the stage before a piece's first one: nobody waits on it.
constexpr int EMPTY = STAGES, ROOM = 2 * STAGES, ARRIVED = ROOM + 1;
[[maybe_unused]] constexpr int SPARE = ARRIVED + 1;

// ---- work ------------------------------------------------------------------------------------------------

// k blocks [begin, end) of a tile. slot: where the sums go; -1 if this is the whole tile.
struct Piece {
  int tile, begin, end, slot;
};

// k blocks of a block of a cluster with SPLITS.
__device__ inline int blocks_of(int rank) {
  return RANGE == LAST_RANGE || rank < SPLITS - 1 ? RANGE : LAST_RANGE;
}

constexpr int PIECES = SPLIT ? 1 : 0x7fffffff;  // of a worker, at most

// A block's part of a tile that a cluster computes: without divisions, which the first loads wait for.
__device__ inline Piece split_piece(int worker, bool exists = true) {
  const int rank = int(block_rank_in_cluster()), begin = rank * RANGE;
  return {worker / SPLITS, begin, exists ? begin + blocks_of(rank) : begin, -1};
}

// The worker's piece of that index, which is in its range: of the k blocks of `rest` tiles, which follow the
// whole tiles of all workers.
__device__ inline Piece range_piece(int worker, int index, int workers, int whole_tiles, int rest,
                                    int k_blocks, int range_blocks) {
  const int first = worker * range_blocks, last = min(first + range_blocks, rest * k_blocks);
  const int tile = first / k_blocks + index - whole_tiles, from = tile * k_blocks;
  const int begin = max(first - from, 0), end = min(last - from, k_blocks);
  const bool whole = begin == 0 && end == k_blocks;
  return {whole_tiles * workers + tile, begin, end, whole ? -1 : 2 * worker + (index > whole_tiles)};
}

struct Tile {
  int m, n;  // m a thread block's, or a cluster's
};

constexpr int BAND = 2048 / TILE_N;  // tiles along n that are computed together

// Bands of BAND tiles along n, of which neighbours share weights: what runs together fits in the L2 cache.
__device__ inline Tile in_bands(int tile, int tiles_m, int tiles_n) {
  if (tiles_n == 1) return {tile, 0};  // without divisions
  const int band = tile / (min(BAND, tiles_n) * tiles_m), first = band * BAND;
  const int width = min(BAND, tiles_n - first), inside = tile - first * tiles_m, m = inside / width;
  return {m, first + inside - m * width};
}

#if EXPERTS
#include "quantized/experts.cuh"
#else
using Schedule = Args;

__device__ inline int clusters() { return int(gridDim.x) / MULTICAST; }

// A worker's piece of that index, which follows from the index alone: nothing else need be kept in registers
// during a piece. begin is not below end if there is none.
__device__ inline Piece piece_of(const Schedule& g, int index, int worker = int(blockIdx.x) / MULTICAST) {
  if constexpr (SPLIT) {
    return split_piece(worker);
  } else {
    if (index < g.whole_tiles) return {worker + index * clusters(), 0, g.k_blocks, -1};
    const int rest = g.tiles_m * g.tiles_n - g.whole_tiles * clusters();
    return range_piece(worker, index, clusters(), g.whole_tiles, rest, g.k_blocks, g.range_blocks);
  }
}

struct Place {
  int m, n;  // tiles, m a thread block's

  // The packed weight's tile along m of a warpgroup. It may have none of them: the last one.
  __device__ int m_tile(const Schedule& g, int warpgroup) const {
    return min(m * M_WARPGROUPS + warpgroup, g.m_tiles - 1);
  }
  __device__ int first_row() const { return n * TILE_N; }
  __device__ int rows_end(const Schedule& g) const { return g.rows; }  // behind those that are stored
  // The index of the first sum of x that is copied from such a row of them, and the tile's first one there.
  __device__ size_t sums(const Schedule& g, int row) const { return (size_t(row) * g.tiles_n + n) * TILE_N; }
  __device__ int first_sum() const { return 0; }
  __device__ const Destination& destination(const Schedule&, const Destination& all) const { return all; }
};

__device__ inline Place place_of(const Schedule& g, int tile, int rank) {
  if constexpr (N_TILES > 0) {  // without divisions, which the first loads wait for
    static_assert(N_TILES <= BAND);
    constexpr int ALONG_N = N_TILES > 0 ? N_TILES : 1;  // the compiler looks here in any case
    return {tile / ALONG_N * MULTICAST + rank, tile % ALONG_N};
  } else {
    const Tile at = in_bands(tile, g.tiles_m, g.tiles_n);
    return {at.m * MULTICAST + rank, at.n};
  }
}
#endif

__device__ inline int cluster_rank() { return int(blockIdx.x) % MULTICAST; }

// What all parts of a kernel need.
struct Kernel {
  const Schedule& g;
  Destination out;
  float* partials;
  uint64_t* barriers;
  uint8_t* stages;   // the first one
  uint32_t address;  // of that
};

// ---- producer --------------------------------------------------------------------------------------------

// A producer warp's part of the pipeline: waits until a stage is empty, expects so many bytes on its `full`
// barrier, and calls copy(place of the tile, k block, stage, barrier); for all blocks of all pieces.
template <class Copy>
__device__ inline void fill_stages(const Kernel& kernel, int bytes, const Copy& copy) {
  Position to{0, 1};  // the phase before
  for (int index = 0; index < PIECES; ++index) {
    const Piece piece = piece_of(kernel.g, index);
    if (piece.begin >= piece.end) break;
    const Place at = place_of(kernel.g, piece.tile, cluster_rank());
#pragma unroll 1  // all but the first turn find their code
    for (int block = piece.begin; block < piece.end; ++block) {
      uint64_t* full = &kernel.barriers[to.stage];
      Barrier::wait(full + EMPTY, to.phase);
      Barrier::arrive_and_expect_tx(full, bytes);
      copy(at, block, to.stage, full);
      to.advance(STAGES);
    }
  }
}

// `bytes` of a block; of half a block that half, twice.
__device__ inline void copy_block(uint32_t to, const uint8_t* from, int bytes, bool half, uint64_t* full,
                                  uint64_t hint) {
  const uint32_t barrier = shared_address(full);
  if (half) {
    copy_bulk(to, from, bytes / 2, barrier, hint);
    copy_bulk(to + bytes / 2, from, bytes / 2, barrier, hint);
  } else {
    copy_bulk(to, from, bytes, barrier, hint);
  }
}

struct Weight {
  const uint8_t *words, *scale, *zero;
  const float* channel;
};

constexpr int WEIGHT_BYTES = 2 * TILE_BYTES + SCALES + ZEROS + CHANNELS;  // of a stage and a warpgroup

// Read by one thread block only, or by several.
__device__ inline uint64_t weight_hint(const Schedule& g) { return g.once ? EVICT_FIRST : EVICT_NORMAL; }

#if TRANSPOSED
// The group of the weight's k that the 16 m of a warp in a warpgroup's tile belong to.
__device__ inline int group_of(int tile, int warp) {
  return GROUP == 0 ? 0 : (tile * WARPGROUP_M + warp * 16) / GROUP_K;
}

// Copies a k block of a warpgroup's m: two tiles of features, of which a block at the end may have the first
// one only. It then has that one twice.
__device__ inline void copy_weight(const Kernel& kernel, const Weight& from, const Place& at, int block,
                                   int warpgroup, int stage, uint64_t* full, uint64_t hint) {
  const Schedule& g = kernel.g;
  const int tile = at.m_tile(g, warpgroup), group = group_of(tile, 0);
  const uint32_t barrier = shared_address(full);
  const uint32_t words = kernel.address + stage * STAGE_BYTES + X_BYTES + warpgroup * 2 * TILE_BYTES;
  const uint32_t extras = kernel.address + EXTRAS_AT + stage * EXTRA_BYTES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of = WHOLE ? 2 * block + half : min(2 * block + half, g.k_tiles - 1);
    copy_bulk(words + half * TILE_BYTES, from.words + (size_t(of) * g.m_tiles + tile) * TILE_BYTES,
              TILE_BYTES, barrier, hint);
    const auto copy = [&](int at, const uint8_t* all, int bytes, int item) {
      copy_bulk(extras + at + warpgroup * bytes + half * (bytes / 2),
                all + (size_t(of) * g.groups + group) * WARPGROUP_M * item, bytes / 2, barrier, hint);
    };
    copy(0, from.scale, SCALES, SCALE_ITEM);
    if constexpr (ZERO_TYPE != NONE) copy(ZEROS_AT, from.zero, ZEROS, ZERO_ITEM);
    if constexpr (CHANNEL_SCALE) {
      const uint32_t to = extras + CHANNELS_AT + warpgroup * CHANNELS + half * (CHANNELS / 2);
      copy_bulk(to, from.channel + size_t(of) * 64, CHANNELS / 2, barrier, hint);
    }
  }
}
#else
// Copies a k block of a warpgroup's m.
__device__ inline void copy_weight(const Kernel& kernel, const Weight& from, const Place& at, int block,
                                   int warpgroup, int stage, uint64_t* full, uint64_t hint) {
  const Schedule& g = kernel.g;
  const int tile = at.m_tile(g, warpgroup);
  const bool half = !WHOLE && 2 * block + 1 == g.k_tiles;
  copy_block(kernel.address + stage * STAGE_BYTES + X_BYTES + warpgroup * 2 * TILE_BYTES,
             from.words + (size_t(tile) * g.k_tiles + 2 * block) * TILE_BYTES, 2 * TILE_BYTES, half, full,
             hint);
  if constexpr (GROUPS > 0) {
    const bool half_groups = half && GROUPS > 1;
    const auto copy = [&](int at, const uint8_t* all, int bytes, int item) {
      copy_block(kernel.address + EXTRAS_AT + stage * EXTRA_BYTES + at + warpgroup * bytes,
                 all + (size_t(tile) * g.groups + block * GROUPS) * WARPGROUP_M * item, bytes, half_groups,
                 full, hint);
    };
    copy(0, from.scale, SCALES, SCALE_ITEM);
    if constexpr (ZERO_TYPE != NONE) copy(ZEROS_AT, from.zero, ZEROS, ZERO_ITEM);
  }
}
#endif

// ---- consumer --------------------------------------------------------------------------------------------

// In a register from here on, not computed again in every turn of a loop.
__device__ inline uint32_t keep(uint32_t value) { return __shfl_sync(~0u, value, int(threadIdx.x % 32)); }

// The pipeline as a consumer warp goes through it: every K_WARPGROUPS-th stage.
struct Consumer : Position {
  uint32_t stages, full;  // addresses: of the first one, of its barrier

  __device__ uint32_t address() const { return stages + stage * STAGE_BYTES; }
  __device__ uint32_t extras() const { return stages + EXTRAS_AT + stage * EXTRA_BYTES; }
  // Each stage belongs to one k warpgroup. If two took turns, neither would see every fill of the stage, and
  // a barrier's parity tells whether a fill has come only if the fill before was seen.
  static_assert(STAGES % K_WARPGROUPS == 0);
  __device__ void wait_full() const { wait(full + stage * 8, phase); }

  // The lower half of the descriptor of the stage's x: uniform to the compiler.
  __device__ uint32_t operand() const { return __shfl_sync(~0u, address() >> 4 | 1 << 16, 0); }

  __device__ void advance() {
    stage += K_WARPGROUPS;
    if (stage >= STAGES) {
      stage = K_WARPGROUPS == 1 ? 0 : stage - STAGES;
      phase ^= 1;
    }
  }
};

constexpr uint32_t OPERAND_HIGH = 1 << 30 | 8 * 128 >> 4;  // 128-byte swizzle, 8 rows of x apart

// ---- results ---------------------------------------------------------------------------------------------

constexpr int TILE_SUMS = TILE_N / 2;      // of a lane: four for each 8 columns, in the accumulators' order
constexpr int STORE_CHUNKS = TILE_N / 16;  // of 16 rows of x: what `store` takes
using TileSums = float[TILE_SUMS];

__device__ inline uint32_t packed(float low, float high) {
  Vec<Output, 2> pair;
  convert(low, pair.v[0]);
  convert(high, pair.v[1]);
  return reinterpret_cast<const uint32_t&>(pair);
}

#if EPILOGUE
// Of gate, which the first 8 of a warp's m are, and of up; the parameters of `store`.
[[maybe_unused]] __device__ inline void store_gated(const Args& g, const Destination& result,
                                                    [[maybe_unused]] uint32_t staging, int m, int n, int end,
                                                    const float (&sums)[8], int lane) {
  const int columns = g.m / 2, first = m / 2, column = first + lane / 4;
  float bias[1] = {}, up_bias[1] = {}, v[4];
  if (column < columns) {
    result.epilogue.load_bias(column, bias);
    result.epilogue.load_bias(columns + column, up_bias);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = n + i / 2 * 8 + lane % 4 * 2 + i % 2, at = i / 2 * 4 + i % 2;
    float one[1] = {gated(sums[at] + bias[0], sums[at + 2] + up_bias[0])};
    if (row < end && column < columns) result.epilogue.add_residual(size_t(row) * columns + column, one);
    v[i] = one[0];
  }
  if constexpr (OUT != FLOAT) {
    // As in `store`; the second half of each row of 16 is not used.
    const uint32_t low = packed(v[0], v[1]), high = packed(v[2], v[3]);
    __syncwarp();
    store_matrices_trans(staging + (lane / 16 * 8 + lane % 8) * STAGING_PITCH + lane / 8 % 2 * 16,
                         {low, low, high, high});
    __syncwarp();
    const int row = n + lane / 2;
    const uint4 chunk = load_shared<uint4>(staging + lane / 2 * STAGING_PITCH);
    if (lane % 2 == 0 && row < end && first < columns) {
      *reinterpret_cast<uint4*>(result.out + size_t(row) * columns + first) = chunk;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = n + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (row < end && column < columns) convert(v[i], result.out[size_t(row) * columns + column]);
    }
  }
}

// The epilogue's results of a lane's sums; the parameters of `store`.
[[maybe_unused]] __device__ inline void finish_sums(const Args& g, const Epilogue& epilogue, int m, int n,
                                                    int end, const float (&sums)[8], float (&v)[8],
                                                    int lane) {
  float bias[2][1] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = m + half * 8 + lane / 4;
    if (column < g.m) epilogue.load_bias(column, bias[half]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = n + i / 4 * 8 + lane % 4 * 2 + i % 2, column = m + i / 2 % 2 * 8 + lane / 4;
    float one[1] = {activated(sums[i] + bias[i / 2 % 2][0])};
    if (row < end && column < g.m) epilogue.add_residual(size_t(row) * g.m + column, one);
    v[i] = one[0];
  }
}
#endif

// Stores a warp's 16 m, from `m` on, of 16 rows of x, from `n` on and before `end`. WGMMA's accumulator
// holds, for lane l, m l/4 (+8) and rows 2*(l%4) (+1) (+8): sums[8-row half * 4 + m half * 2 + odd].
__device__ inline void store(const Args& g, const Destination& result, [[maybe_unused]] uint32_t staging,
                             int m, int n, int end, const float (&sums)[8], int lane) {
#if EPILOGUE
  Output* const out = result.out;
  if constexpr (GATED) return store_gated(g, result, staging, m, n, end, sums, lane);
  float v[8];
  finish_sums(g, result.epilogue, m, n, end, sums, v, lane);
#else
  Output* const out = result;
  const float (&v)[8] = sums;
#endif
  if constexpr (OUT != FLOAT && EIGHTS) {
    // Through shared memory, transposed: 16 bytes of a row of the output for each lane.
    const uint32_t to = staging + (lane / 16 * 8 + lane % 8) * STAGING_PITCH + lane / 8 % 2 * 16;
    __syncwarp();
    store_matrices_trans(to,
                         {packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7])});
    __syncwarp();
    const int row = n + lane / 2, column = m + lane % 2 * 8;
    const uint4 chunk = load_shared<uint4>(staging + lane / 2 * STAGING_PITCH + lane % 2 * 16);
    if (row < end && column < g.m) {
      *reinterpret_cast<uint4*>(out + size_t(row) * g.m + column) = chunk;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = n + i / 4 * 8 + lane % 4 * 2 + i % 2, column = m + i / 2 % 2 * 8 + lane / 4;
      if (row < end && column < g.m) convert(v[i], out[size_t(row) * g.m + column]);
    }
  }
}

__device__ inline void add(float (&v)[8], const float4& low, const float4& high) {
  v[0] += low.x;
  v[1] += low.y;
  v[2] += low.z;
  v[3] += low.w;
  v[4] += high.x;
  v[5] += high.y;
  v[6] += high.z;
  v[7] += high.w;
}

__device__ inline float4 four(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }

// Slots of partial sums: of a warpgroup a float4 of 128 threads for each 8 columns.
constexpr int SLOT_CHUNK = 128;
constexpr int WARPGROUP_SLOT = TILE_N / 8 * SLOT_CHUNK;

__device__ inline float4* slot_of(float* partials, int slot, int rank, int warpgroup) {
  return reinterpret_cast<float4*>(partials) +
         ((size_t(slot) * MULTICAST + rank) * M_WARPGROUPS + warpgroup) * WARPGROUP_SLOT;
}

#include "quantized/cluster_sums.cuh"

// Where a consumer thread is: the warp of all consumers', its warpgroup among those of other m, and
// among those that share them; the thread of the block; the block of those that share x.
struct Role {
  int warp, m_warpgroup, k_warpgroup, rank;
  unsigned thread;

  __device__ Role(int warp, unsigned thread, int rank) : warp(warp), rank(rank), thread(thread) {
    // No constant, even where it is 0. With it a range's blocks would be known, and of a loop of one turn
    // ptxas (CUDA 13) drops products of fp8: it takes those of two chunks for the same.
    k_warpgroup = warp / 4 / M_WARPGROUPS;
    m_warpgroup = warp / 4 - k_warpgroup * M_WARPGROUPS;
  }

  // This warpgroup's k blocks of the piece.
  __device__ int blocks(const Piece& piece) const {
    return (piece.end - piece.begin + K_WARPGROUPS - 1 - k_warpgroup) / K_WARPGROUPS;
  }

  // The first of a lane's two rows among all m, which are neighbours in the packed order.
  __device__ size_t channel(const Schedule& g, const Place& at) const {
    return size_t(at.m_tile(g, m_warpgroup)) * WARPGROUP_M + warp % 4 * 16 + thread % 32 / 4 * 2;
  }
};

// Multiplies a lane's sums by what its two rows have.
[[maybe_unused]] __device__ inline void scale_rows(const float2& scale, TileSums& acc) {
#pragma unroll
  for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= i / 2 % 2 ? scale.y : scale.x;
}

[[maybe_unused]] __device__ inline void scale_channels(const float* channel, size_t row, TileSums& acc) {
  scale_rows(load_pair<FLOAT>(reinterpret_cast<const uint8_t*>(channel + row)), acc);
}

// Ends a piece: `acc` is what a thread has of it.
__device__ inline void store_piece(const Kernel& kernel, const Piece& piece, const Place& at,
                                   const Role& role, const TileSums& acc) {
  const uint32_t staging = kernel.address + STAGING_AT + role.warp * STAGING_BYTES;
  if constexpr (SPLIT) {
    store_together(kernel, staging, at, role.m_warpgroup, role.k_warpgroup, acc);
  } else if (piece.slot >= 0) {
    float4* to = slot_of(kernel.partials, piece.slot, role.rank, role.m_warpgroup) + role.thread % 128;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) __stcg(to + j * SLOT_CHUNK, four(acc + 4 * j));
  } else {
    const int m = (at.m * M_WARPGROUPS + role.m_warpgroup) * WARPGROUP_M + role.warp % 4 * 16;
#pragma unroll
    for (int j = 0; j < STORE_CHUNKS; ++j) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = acc[8 * j + i];
      store(kernel.g, at.destination(kernel.g, kernel.out), staging, m, at.first_row() + 16 * j,
            at.rows_end(kernel.g), v, role.thread % 32);
    }
  }
}

// A thread block adds the slots of 16 rows of x of a warpgroup's features of a tile. `before`: tiles that no
// range reaches.
__device__ inline void add_slots(const Schedule& g, int before, int range_blocks, float* partials,
                                 const Destination& out) {
  __shared__ alignas(16) uint8_t staging[4][16 * STAGING_PITCH];
  const int part = int(blockIdx.x) / STORE_CHUNKS, chunk = int(blockIdx.x) - part * STORE_CHUNKS;
  const int others = part / M_WARPGROUPS, warpgroup = part - others * M_WARPGROUPS;
  const int tile = others / MULTICAST, rank = others - tile * MULTICAST;
  const int first_unit = tile * g.k_blocks, last_unit = first_unit + g.k_blocks - 1;
  const int first = first_unit / range_blocks, last = last_unit / range_blocks;
  wait_on_dependent_grids();
  if (first == last) return;  // a whole tile
  float v[8] = {};
#pragma unroll 4
  for (int range = first; range <= last; ++range) {
    // A range has two slots: one for the tile in which it begins, one for the tile in which it ends.
    const int slot = 2 * range + (range * range_blocks < first_unit);
    const float4* from = slot_of(partials, slot, rank, warpgroup) + chunk * 2 * SLOT_CHUNK + threadIdx.x;
    add(v, __ldcg(from), __ldcg(from + SLOT_CHUNK));
  }
  const Place at = place_of(g, before + tile, rank);
  const int warp = threadIdx.x / 32;
  store(g, at.destination(g, out), shared_address(staging[warp]),
        (at.m * M_WARPGROUPS + warpgroup) * WARPGROUP_M + warp * 16, at.first_row() + chunk * 16,
        at.rows_end(g), v, threadIdx.x % 32);
}

#if EXPERTS
extern "C" __global__ void __launch_bounds__(128)
    KERNEL(_reduce)(const __grid_constant__ Args args, const int* sizes, const int* offset, float* partials,
                    Output* out EPILOGUE_PARAMETERS) {
  __shared__ Tiles tiles;
  if (threadIdx.x < 32) find_tiles(args, sizes, offset, tiles);
  __syncthreads();
  const int before = tiles.whole_tiles * args.workers, tile = int(blockIdx.x) / (STORE_CHUNKS * M_WARPGROUPS);
  if (before + tile < tiles.count) {
    add_slots({args, tiles}, before, tiles.range_blocks, partials, DESTINATION_OF_PARAMETERS);
  }
}
#else
extern "C" __global__ void __launch_bounds__(128)
    KERNEL(_reduce)(const __grid_constant__ Args g, int tiles_before, float* partials,
                    Output* out EPILOGUE_PARAMETERS) {
  add_slots(g, tiles_before, g.range_blocks, partials, DESTINATION_OF_PARAMETERS);
}
#endif

// ---- the kernel ------------------------------------------------------------------------------------------

// Its body. A family's Loop has
//   PRODUCERS, X_WARP              warps of the producer, and the one of them that first needs the tensor map
//   PRODUCER_REGS, CONSUMER_REGS   registers by role (setmaxnreg wants multiples of 8)
//   BARRIERS                       ARRIVED + 1, or SPARE + 1
//   produce                        copies, by an elected thread of a producer warp
//   consume                        computes and stores a worker's pieces, by a consumer warp
template <class Loop>
__device__ inline void run(const Loop& loop, const TensorMap& x_map, const Schedule& g,
                           const Destination& out, float* partials) {
  using Shares = Roles<4, Loop::PRODUCER_REGS, Loop::CONSUMER_REGS>;
  uint8_t* const raw = dynamic_shared();
  __shared__ uint64_t barriers[Loop::BARRIERS];
  const uint32_t raw_address = shared_address(raw), address = aligned_address(raw);
  if (elect_one()) {
    init_by_warps<Loop::BARRIERS, THREADS / 32>(barriers, [](int i) {
      return i < EMPTY   ? Loop::PRODUCERS
             : i < ROOM  ? 4 * M_WARPGROUPS * MULTICAST
             : i == ROOM ? SPLITS
                         : 4 * WARPGROUPS + 1;
    });
    if (threadIdx.x / 32 == Loop::X_WARP) prefetch_tensor_map(&x_map);
  }
  if constexpr (MULTICAST > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
#if EXPERTS
    if (!begin_work(g, result_of(out))) return;
#endif
    if constexpr (SPLIT) cluster_arrive_relaxed();
  }
  const Kernel kernel{g, out, partials, barriers, raw + (address - raw_address), address};
  // As warp_index(), by which the compiler would not expect the first case: its code comes next, since all
  // wait for the first loads.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4;
  if (__builtin_expect(warp < 0, true)) {
    Shares::be_producer();
    if (warp + 4 < Loop::PRODUCERS && elect_one()) loop.produce(kernel, x_map, warp + 4);
    if constexpr (SPLIT) {
      __syncwarp();
      cluster_wait();  // for the other blocks' barriers
      if (warp + 4 == Loop::PRODUCERS - 1 && elect_one()) offer_room(kernel);
    }
    return;
  }
  Shares::be_consumer();
  if constexpr (SPLIT) cluster_wait();
  loop.consume(kernel, warp);
  if constexpr (!SPLIT) launch_dependent_grids();
  if constexpr (MULTICAST > 1) {
    cluster_arrive();
    cluster_wait();
  }
}
