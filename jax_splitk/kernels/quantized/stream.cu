// Packed quantized weight times a few rows of activations, for Hopper, by WGMMA: bound by the weight's bytes.
//
//   D[n, m] = sum over k of X[n, k] * (q[m, k] - zero[m, k / GROUP]) * scale[m, k / GROUP]
//
// Persistent: a cluster of CLUSTER blocks divides k, each block keeps its slice of X in shared memory and
// streams its slice of one row tile (64 rows of m) after another through a pipeline that a producer fills by
// bulk copies. A stage holds TILES tiles of 64 rows by 64 k for each consumer warpgroup, in the packed order
// (jax_splitk/quantized/packing.py), and their scales. A lane's 16 bytes become WGMMA's A operand in its
// registers (dequantize.cuh), X is B. The products of a group, or of 64 k of a longer one, are summed by the
// tensor cores, then multiplied by the scale and added in fp32; meanwhile the next tile is dequantized, where
// registers allow for two (IN_FLIGHT). Tiles beyond k repeat the last one, against zeros of X.
//
// With E4M3_PRODUCTS both operands are e4m3 (dequantize_e4m3.cuh): half as many products, and X as it comes
// but for its order within 16 k, which has to be that of the weight's bytes. Each warpgroup reorders its own
// tiles of X when it first meets them, or all reorder what they load. The tensor cores' sums of e4m3, which
// are short, are never longer than those 64 k.
//
// Where a block's slice of X does not fit beside a deep pipeline, X comes again with the stages of each row
// tile, to X_SLOTS places in turn. There are more of them than stages, so that nobody reads a place any more
// when its next stage may be filled.
//
// Activations that are to be normalized are multiplied by their scale when the consumers first meet them, and
// the sums by the inverse of the root of their mean square (norm.cuh).
//
// At the end of a row tile the warpgroups' sums meet in shared memory, where the epilogue's warps add them,
// and the blocks' in the cluster: each block owns TILE_N / CLUSTER rows of the result, receives the others'
// sums in its inboxes, and adds them, always in the same order, a row tile later.
//
// Roles: consumer warps, then the epilogue's, then the producer's.
// Barriers. Per stage: `full` (one arrival, with the bytes) and `empty` (one arrival per consumer warp).
// `written`, one arrival per consumer warp: its sums are there; `read`, one per warp of the epilogue. Per
// inbox: `arrived` (one arrival of the own block, with the bytes that the cluster's blocks send) and `free`
// (one arrival of each finishing warp of each block: that block has read its inbox; counted where the sender
// waits). All start in phase 0; the first passes of those who wait for room do not wait. Named barriers:
// READY for the block, when these are ready, on which the producer does not wait; 1 for all consumers, when
// they have loaded X; from 2 on for each warpgroup, when it has reordered its tiles of X.
//
// With CHAINED the kernel may start before those before it in the custom call have ended: X and the residual
// may be their results, which it waits for. It does not wait to load the weight's first stages.
//
// An instruction is fetched from the L2 when it first runs in a launch, which costs a small product several
// percent of its time. So the code on the way to the first copies is short and straight, and the end of the
// last row tile runs the code of those before it.
//
// Macros: FORMAT, HALF (dequantize.cuh), X_E4M3, E4M3_PRODUCTS (else X becomes fp16), X_TMA (X comes by TMA,
// else by the consumers' loads), WHOLE (k is a multiple of a stage's), FOURS (m is a multiple of 4), GROUP
// (0: per channel), SCALE_TYPE, ZERO_TYPE, CHANNEL_SCALE (scales.cuh), OUT (output.cuh), those of
// epilogue.cuh and norm.cuh, TABLE (NormalFloat4 by look-ups in shared memory), CHAINED, TILE_N (rows of X),
// WARPGROUPS, TILES, STAGES, CLUSTER, X_SLOTS (0: X stays for all row tiles).

#include "device/epilogue.cuh"
#include "device/skeleton.cuh"
#include "device/wgmma_rs.cuh"
#include "quantized/dequantize.cuh"
#include "quantized/scales.cuh"
#include "structs.cuh"

static_assert(!E4M3_PRODUCTS || (X_E4M3 && ZERO_TYPE == NONE), "what e4m3 products can compute");
static_assert(!X_SLOTS || (X_SLOTS > STAGES && X_TMA && WHOLE && !NORM), "what can come again");

constexpr int CONSUMERS = 128 * WARPGROUPS, EPILOGUE_WARPS = 3;
constexpr int EPILOGUE_THREADS = 32 * EPILOGUE_WARPS;
constexpr int THREADS = CONSUMERS + 32 + EPILOGUE_THREADS;  // whole warpgroups

// Under CHAINED, the stages whose words are loaded before X is there. More of them would delay X.
constexpr int EARLY_STAGES = 2;
static_assert(EARLY_STAGES <= STAGES);

constexpr int READY = 6;  // a named barrier: the others are ready to use

constexpr int STAGE_TILES = WARPGROUPS * TILES;
constexpr int WORDS_BYTES = WORDS * 2048;  // of a tile of 64 by 64
constexpr int TILE_GROUPS = GROUP && GROUP < 64 ? 64 / GROUP : 1,
              STEPS = 64 / STEP_K / TILE_GROUPS;  // of a tile; of a group in it
constexpr int STAGE_GROUPS = GROUP ? STAGE_TILES * 64 / GROUP : 0;
constexpr int SCALES_OFFSET = STAGE_TILES * WORDS_BYTES;
constexpr int SCALE_ITEM = item_bytes(SCALE_TYPE), ZERO_ITEM = item_bytes(ZERO_TYPE);
constexpr int SCALE_ROW = 64 * SCALE_ITEM, ZERO_ROW = 64 * ZERO_ITEM;  // bytes of a group
constexpr int ZEROS_OFFSET = SCALES_OFFSET + STAGE_GROUPS * SCALE_ROW;
constexpr int STAGE_BYTES = ZEROS_OFFSET + STAGE_GROUPS * ZERO_ROW;

constexpr int SUMS_PITCH = 64 + 4;  // floats; lanes of a fragment write to different banks
constexpr int SUMS_BYTES = WARPGROUPS * TILE_N * SUMS_PITCH * 4;
constexpr int INBOXES = CLUSTER > 1 ? 2 : 0;
constexpr int INBOX_BYTES = TILE_N * 64 * 4, PART_ROWS = TILE_N / CLUSTER;
constexpr int PART_ITEMS = PART_ROWS * 16;  // groups of 4 features
constexpr int FINISHERS = PART_ITEMS >= EPILOGUE_THREADS ? EPILOGUE_WARPS : (PART_ITEMS + 31) / 32;  // warps

constexpr int SUMS_AT = STAGES * STAGE_BYTES, INBOXES_AT = SUMS_AT + SUMS_BYTES;
constexpr int BARRIERS_AT = INBOXES_AT + INBOXES * INBOX_BYTES;
constexpr int TABLE_AT = BARRIERS_AT + 384, TABLE_BYTES = TABLE ? 256 * 32 * 4 : 0;
constexpr int NORM_AT = TABLE_AT + TABLE_BYTES, NORM_BYTES = NORM ? 768 : 0;
constexpr int X_AT = (NORM_AT + NORM_BYTES + 1023) / 1024 * 1024;
constexpr int SQUARES_BYTES = NORM ? CLUSTER * PART_ROWS * 16 : 0;        // that a block gets (norm.cuh)
constexpr int X_ROW = E4M3_PRODUCTS ? 64 : 128, X_TILE = TILE_N * X_ROW;  // bytes of 64 k
constexpr int X_STAGE = STAGE_TILES * X_TILE;                             // bytes of a stage's k
constexpr int X_BOX = E4M3_PRODUCTS ? 32 : 64;  // elements of the tensor map, which has pairs of e4m3

struct Signals {
  Pipeline<STAGES, 1, CONSUMERS / 32> pipeline;
  Barriers<1, CONSUMERS / 32> written;
  Barriers<1, EPILOGUE_WARPS> read;
  Barriers<INBOXES, 1> arrived;
  Barriers<INBOXES, CLUSTER * FINISHERS> free;
};
static_assert(sizeof(Signals) <= TABLE_AT - BARRIERS_AT, "barriers");

// A thread block: its memory, and its work. The stages [first, last) of k are its part of them, which may not
// be empty.
struct Block {
  const Args& g;
  uint8_t* smem;
  Signals& barriers;
  int rank, cluster, clusters, first, last;

  __device__ Block(const Args& g, uint8_t* smem)
      : g(g),
        smem(smem),
        barriers(*reinterpret_cast<Signals*>(smem + BARRIERS_AT)),
        rank(CLUSTER > 1 ? int(block_rank_in_cluster()) : 0),
        cluster(blockIdx.x / CLUSTER),
        clusters(gridDim.x / CLUSTER),
        first(g.stages * rank / CLUSTER),
        last(g.stages * (rank + 1) / CLUSTER) {}
};

#if NORM
#include "quantized/norm.cuh"
#endif

// ---- producer --------------------------------------------------------------------------------------------

// A stage's rows (tiles, or groups of scales) of a row tile, from its row `first` on. The row tile has
// `count`; the last one stands in for those that are missing.
template <int ROWS, int BYTES>
__device__ inline void copy_rows(const void* all, int tile, int first, int count, uint64_t* full,
                                 uint8_t* to) {
  // 32 bits number all rows that fit in any memory.
  const auto row = [&](int i) {
    return static_cast<const uint8_t*>(all) +
           uint64_t(uint32_t(tile) * uint32_t(count) + uint32_t(i)) * BYTES;
  };
  const int rows = WHOLE ? ROWS : min(ROWS, count - first);
  copy_bulk(to, row(first), rows * BYTES, full);
#pragma unroll 1
  for (int i = rows; i < ROWS; ++i) {
    copy_bulk(to + i * BYTES, row(count - 1), BYTES, full);
  }
}

// The producer's warp, of which one lane is the leader. X comes with the stages of the first row tile, so
// that the products need not wait for all of it: as one box, or where k ends within a stage in boxes of a
// tile.
__device__ inline void produce(const Block& block, const TensorMap* x_map, const uint8_t* words,
                               const uint8_t* scale, const uint8_t* zero,
                               [[maybe_unused]] const void* norm_scale, bool leader) {
  const Args& g = block.g;
  Signals& barriers = block.barriers;
  constexpr uint64_t HINT = EVICT_LAST;
  if (WHOLE && !leader) return;
  Position at;
  bool first = X_TMA;
  [[maybe_unused]] int slot = 0;
  [[maybe_unused]] const auto copy_x = [&](int number, int place, uint64_t* full) {
    uint8_t* x = block.smem + X_AT + place * X_STAGE;
    const int tiles = (block.first + number) * STAGE_TILES, lane = threadIdx.x % 32;
    if constexpr (WHOLE) {
      load_tile(x_map, full, HINT, x, 0, 0, tiles);
    } else if (lane < STAGE_TILES) {
      load_tile(x_map, full, HINT, x + lane * X_TILE, (tiles + lane) * X_BOX, 0);
    }
  };
#if CHAINED
  const int last_early = min(EARLY_STAGES, block.last - block.first) - 1;
#endif
#pragma unroll 1
  for (int tile = block.cluster; tile < g.feature_tiles; tile += block.clusters, first = false) {
#pragma unroll 1
    for (int s = block.first; s < block.last; ++s, at.advance(STAGES)) {
      uint64_t* full = &barriers.pipeline.full[at.stage];
      if (WHOLE || leader) {
        uint8_t* stage = block.smem + at.stage * STAGE_BYTES;
        barriers.pipeline.wait_empty(at);
        int bytes = STAGE_BYTES + (first || X_SLOTS ? X_STAGE : 0);
#if NORM
        const bool with_scale = first && s == block.first;
        if (with_scale) bytes += scale_bytes(block);
#endif
        barriers.pipeline.expect(at, bytes);
        copy_rows<STAGE_TILES, WORDS_BYTES>(words, tile, s * STAGE_TILES, g.k_tiles, full, stage);
        if constexpr (GROUP != 0) {
          copy_rows<STAGE_GROUPS, SCALE_ROW>(scale, tile, s * STAGE_GROUPS, g.groups, full,
                                             stage + SCALES_OFFSET);
          if constexpr (ZERO_TYPE != NONE) {
            copy_rows<STAGE_GROUPS, ZERO_ROW>(zero, tile, s * STAGE_GROUPS, g.groups, full,
                                              stage + ZEROS_OFFSET);
          }
        }
#if NORM
        if (with_scale) copy_scale(block, norm_scale, full);
#endif
      }
      if (first || X_SLOTS) {
        if (!WHOLE) __syncwarp();
        const int number = s - block.first, place = X_SLOTS ? slot : number;
        if (X_SLOTS && ++slot == X_SLOTS) slot = 0;
#if CHAINED
        if (first && number < last_early) continue;
        if (first && number == last_early) {
          wait_on_dependent_grids();
          for (int i = 0; i < last_early; ++i) copy_x(i, i, &barriers.pipeline.full[i]);
        }
#endif
        copy_x(number, place, full);
      }
    }
  }
}

// ---- X ---------------------------------------------------------------------------------------------------

// X's slice in shared memory is tiles of TILE_N rows by 64 k, zero where X has none: of a 16-bit type under
// the 128-byte swizzle, or of e4m3 under the 64-byte swizzle. Where TMA cannot bring it, the consumers do.

// The 16 bytes of row n that begin 16 * chunk bytes into the slice.
__device__ inline uint4* place_of(uint8_t* to, int n, int chunk) {
  constexpr int CHUNKS = X_ROW / 16;  // of a tile
  const int swizzled = chunk % CHUNKS ^ n * CHUNKS / 8 % CHUNKS;
  return reinterpret_cast<uint4*>(to + chunk / CHUNKS * X_TILE + n * X_ROW + swizzled * 16);
}

// 16 e4m3 in the order of a packed weight's bytes: k 2t, 2t + 8, 2t + 1, 2t + 9 of word t.
__device__ inline uint4 reordered(uint4 x) {
  return uint4{__byte_perm(x.x, x.z, 0x5140), __byte_perm(x.x, x.z, 0x7362), __byte_perm(x.y, x.w, 0x5140),
               __byte_perm(x.y, x.w, 0x7362)};
}

// The same for a warpgroup's tiles of X of one stage, where TMA has put them.
[[maybe_unused]] __device__ inline void reorder_tiles(uint8_t* tiles, int warpgroup) {
  uint4* chunks = reinterpret_cast<uint4*>(tiles);
#pragma unroll
  for (int i = 0; i < TILES * X_TILE / 16; i += 128) {
    const int at = i + threadIdx.x % 128;
    if (at < TILES * X_TILE / 16) chunks[at] = reordered(chunks[at]);
  }
  fence_async_shared();  // WGMMA reads it
  named_sync(128, 2 + warpgroup);
}

// The bits of an element as the products take it, 0 beyond X's ends.
[[maybe_unused]] __device__ inline uint32_t element_of(const Args& g, const void* x, int n, int k) {
  const bool inside = n < g.rows && k < g.k;
  if constexpr (!X_E4M3) return inside ? static_cast<const uint16_t*>(x)[int64_t(n) * g.k + k] : 0;
  const uint32_t code = inside ? static_cast<const uint8_t*>(x)[int64_t(n) * g.k + k] : 0;
  return E4M3_PRODUCTS ? code : e4m3x2_to_f16x2(uint16_t(code)) & 0xffff;
}

[[maybe_unused]] __device__ inline void load_x(const Block& block, const void* x) {
  const Args& g = block.g;
  uint8_t* to = block.smem + X_AT;
  const int first = block.first * STAGE_TILES * 64;
  const int chunks = (block.last - block.first) * STAGE_TILES * (X_ROW / 16);
  if (!E4M3_PRODUCTS && X_E4M3 && g.k % 16 == 0) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_N * chunks / 2; i += CONSUMERS) {
      const int n = i / (chunks / 2), chunk = i % (chunks / 2) * 2, k = first + chunk * 8;
      uint4 codes{};
      if (n < g.rows && k < g.k) {
        codes = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x) + int64_t(n) * g.k + k));
      }
      const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        *place_of(to, n, chunk + j) =
            uint4{e4m3x2_to_f16x2(uint16_t(w[2 * j])), e4m3x2_to_f16x2(uint16_t(w[2 * j] >> 16)),
                  e4m3x2_to_f16x2(uint16_t(w[2 * j + 1])), e4m3x2_to_f16x2(uint16_t(w[2 * j + 1] >> 16))};
      }
    }
  } else {
    constexpr int ITEMS = E4M3_PRODUCTS ? 16 : 8, IN_WORD = ITEMS / 4;  // of a chunk
    for (int i = threadIdx.x; i < TILE_N * chunks; i += CONSUMERS) {
      const int n = i / chunks, chunk = i % chunks;
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        words[j / IN_WORD] |= element_of(g, x, n, first + chunk * ITEMS + j)
                              << (32 / IN_WORD * (j % IN_WORD));
      }
      const uint4 loaded{words[0], words[1], words[2], words[3]};
      *place_of(to, n, chunk) = E4M3_PRODUCTS ? reordered(loaded) : loaded;
    }
  }
  fence_async_shared();  // WGMMA reads it
  named_sync(CONSUMERS, 1);
}

#if TABLE
#include "quantized/normal_float_table.cuh"
#endif

// ---- consumers -------------------------------------------------------------------------------------------

// A lane's values of a tile, over FACTOR.
__device__ inline void decode_tile(const Words& words, [[maybe_unused]] uint32_t table, Fragments& a) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if E4M3_PRODUCTS
    if constexpr (WORDS == 1) {
      decode_e4m3(words[i][0], a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) a[i / 2][i % 2 * 2 + j] = words[i][j];
    }
#elif TABLE
    look_up(words[i][0], table, a[i]);
#else
    dequantize(words[i], a[i]);
#endif
  }
}

// acc += scale * (sums - zero * sums of x); four elements of a lane: two columns of row g, two of row g + 8.
__device__ inline void add_scaled(Accumulator& acc, Accumulator& sums, float2 scale, float2 zero,
                                  const Accumulator& x_sums) {
  fence(sums);
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) {
    float value = sums[i];
    if constexpr (ZERO_TYPE != NONE) value = fmaf(i % 4 < 2 ? -zero.x : -zero.y, x_sums[i], value);
    acc[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, value, acc[i]);
  }
}

// 1 / FACTOR, as the products are.
__device__ inline void fill_ones(Fragments& a) {
  constexpr uint32_t one = twice(HALF ? 0x3c00 : FACTOR == 64.f ? 0x3c80 : 0x3f80);
#pragma unroll
  for (int i = 0; i < 256 / STEP_K; ++i) a[i / 4][i % 4] = one;
}

// What a lane adds to a stage's address.
struct Lane {
  uint32_t words, scales, zeros;
};

constexpr int UNITS =
    TILES * TILE_GROUPS;  // groups of a warpgroup's part of a stage, each with sums of its own
constexpr int LAST_UNIT = UNITS - 1;
// Whether words are loaded while the tile before them is multiplied: not where they already are fragments.
constexpr bool AHEAD = (!E4M3_PRODUCTS || WORDS == 1) && TILE_N < 64;
constexpr bool X_SUMS = ZERO_TYPE != NONE;
// Sums that the tensor cores work on. Two, which take turns, where registers allow for them: ptxas of
// CUDA 13.0 spills with the widest X of e4m3 where tiles lie beyond k, which is too rare for the cost model
// to know.
constexpr int WIDEST_OF_FOUR = 16;
constexpr bool CROWDED = WARPGROUPS == 4 ? TILE_N > WIDEST_OF_FOUR : TILE_N == 64 && E4M3_PRODUCTS && !WHOLE;
constexpr int IN_FLIGHT = TILES > 1 && !X_SUMS && !CROWDED ? 2 : 1;

// ---- results ---------------------------------------------------------------------------------------------

__device__ inline void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// The sums of row n of the block, or of those that it owns of the cluster, over the root of X's mean square.
__device__ inline float4 normalized([[maybe_unused]] const Block& block, [[maybe_unused]] int n,
                                    float4 sums) {
#if NORM
  const float inverse = inverse_root(block, n);
  sums.x *= inverse, sums.y *= inverse, sums.z *= inverse, sums.w *= inverse;
#endif
  return sums;
}

constexpr int THREAD_ITEMS =
    (PART_ITEMS + EPILOGUE_THREADS - 1) / EPILOGUE_THREADS;  // that a thread finishes
#if EPILOGUE
// Whether the residual is loaded while the sums are computed. After them its latency would be the kernel's
// end.
constexpr bool RESIDUAL_EARLY = CLUSTER > 1 && FOURS&& RESIDUAL_TYPE >= 0 && !GATED && THREAD_ITEMS <= 2;
constexpr int LOADED_ITEMS = RESIDUAL_EARLY ? THREAD_ITEMS : 1;

// The residual of what a thread finishes of a row tile.
struct Loaded {
  Vec<Residual, 4> items[LOADED_ITEMS];
};

__device__ inline Loaded load_early(const Block& block, const Destination& to, int thread, int tile) {
  const Args& g = block.g;
  Loaded loaded{};
#pragma unroll
  for (int i = 0; RESIDUAL_EARLY && i < THREAD_ITEMS; ++i) {
    const int item = i * EPILOGUE_THREADS + thread, n = block.rank * PART_ROWS + item / 16;
    const int feature = tile * 64 + item % 16 * 4;
    if (item >= PART_ITEMS || n >= g.rows || feature >= g.features) continue;
    const Residual* from = to.epilogue.residual + uint32_t(n * g.features + feature);
    loaded.items[i] = *reinterpret_cast<const Vec<Residual, 4>*>(from);
  }
  return loaded;
}

// The epilogue's results of four features of one row; each 16 lanes have a row.
__device__ inline void store(const Args& g, const Destination result, int n, int feature, float4 value,
                             [[maybe_unused]] const Vec<Residual, 4>& residual) {
  const float values[4] = {value.x * FACTOR, value.y * FACTOR, value.z * FACTOR, value.w * FACTOR};
  const Epilogue& epilogue = result.epilogue;
  if constexpr (GATED) {
    // The lane with four features of gate computes the first two results, that with those of up the others.
    const bool of_up = feature % 16 >= 8;
    float gate[2], up[2], bias[2], up_bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sent = of_up ? values[i] : values[i + 2];
      const float others = __shfl_xor_sync(0xffffu << threadIdx.x % 32 / 16 * 16, sent, 2);
      gate[i] = of_up ? others : values[i];
      up[i] = of_up ? values[i + 2] : others;
    }
    if (n >= g.rows || feature >= g.features) return;
    const int columns = g.features / 2, column = feature / 16 * 8 + feature % 8 + (of_up ? 2 : 0);
    epilogue.load_bias(column, bias);
    epilogue.load_bias(columns + column, up_bias);
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = gated(gate[i] + bias[i], up[i] + up_bias[i]);
    const uint32_t at = uint32_t(n * columns + column);
    epilogue.add_residual(at, v);
    store_values(result.out + at, v);
  } else {
    if (n >= g.rows) return;
    Output* to = result.out + uint32_t(n * g.features + feature);
    if constexpr (RESIDUAL_EARLY) {
      if (feature < g.features) epilogue.store(residual, to, n, feature, values);
    } else if constexpr (FOURS) {
      if (feature < g.features) epilogue.store(result.out, to, n, feature, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float one[1] = {values[i]};
        if (feature + i < g.features) epilogue.store(result.out, to + i, n, feature + i, one);
      }
    }
  }
}
#else
constexpr int LOADED_ITEMS = 1;
struct Loaded {
  int items[LOADED_ITEMS];
};

__device__ inline Loaded load_early(const Block&, const Destination&, int, int) { return {}; }

// Four features of one row of the result.
__device__ inline void store(const Args& g, Output* out, int n, int feature, float4 value, int) {
  if (n >= g.rows) return;
  const float values[4] = {value.x * FACTOR, value.y * FACTOR, value.z * FACTOR, value.w * FACTOR};
  Output* to = out + uint32_t(n * g.features + feature);
  const Vec<Output, 4> four = converted<Output>(values);
  if constexpr (FOURS) {
    if (feature < g.features) *reinterpret_cast<Vec<Output, 4>*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (feature + i < g.features) to[i] = four.v[i];
    }
  }
}
#endif

// Adds what the cluster's blocks sent for this block's rows of the result, and tells them that the inbox is
// free if they will use it again: a block that has sent its last sums may have ended.
__device__ inline void finish(const Block& block, const Destination out, const Loaded& loaded, int thread,
                              int count, int tile, bool again) {
  const int inbox = count % 2;
  Signals& barriers = block.barriers;
  if (thread >= 32 * FINISHERS) return;
  Barrier::wait(&barriers.arrived.at[inbox], count / 2 & 1);
#pragma unroll(PART_ITEMS <= 2 * EPILOGUE_THREADS ? 2 : 1)
  for (int i = 0; i < PART_ITEMS; i += EPILOGUE_THREADS) {
    const int item = i + thread;
    if (i + 32 * FINISHERS > PART_ITEMS && item >= PART_ITEMS) break;
    const float4* from =
        reinterpret_cast<const float4*>(block.smem + INBOXES_AT + inbox * INBOX_BYTES) + item;
    float4 sum = from[0];
#pragma unroll
    for (int s = 1; s < CLUSTER; ++s) add(sum, from[s * PART_ITEMS]);
    store(block.g, out, block.rank * PART_ROWS + item / 16, tile * 64 + item % 16 * 4,
          normalized(block, item / 16, sum), loaded.items[i / EPILOGUE_THREADS % LOADED_ITEMS]);
  }
  __syncwarp();
  if (again && thread % 32 < CLUSTER) Barrier::arrive(&barriers.free.at[inbox], thread % 32);
}

// The sums of all warps, to the result or to the blocks that own them. One turn more than there are row
// tiles: the last one's sums are finished by code that has run before.
__device__ inline void add_up(const Block& block, const Destination out) {
  const Args& g = block.g;
  Signals& barriers = block.barriers;
  constexpr unsigned ROWS = EPILOGUE_THREADS / 16;  // of X, at a time
  constexpr unsigned TURNS = TILE_N == 16 ? 3 : 2;  // whose loads are under way together
  const unsigned thread = threadIdx.x - CONSUMERS, column = thread % 16 * 4;
  const float* sums = reinterpret_cast<const float*>(block.smem + SUMS_AT) + column;
  Loaded loaded{}, next{};
#pragma unroll 1
  for (int count = 0, tile = block.cluster;; ++count, tile += block.clusters) {
    const bool more = tile < g.feature_tiles;
    if (more) {
      next = load_early(block, out, thread, tile);
      [[maybe_unused]] const int inbox = count % 2;
      if constexpr (CLUSTER > 1) {
        const int squares = count == 0 ? SQUARES_BYTES : 0;
        if (thread == 0) Barrier::arrive_and_expect_tx(&barriers.arrived.at[inbox], INBOX_BYTES + squares);
        if (count >= 2) Barrier::wait(&barriers.free.at[inbox], (count / 2 - 1) & 1);
      }
      Barrier::wait(barriers.written.at, count & 1);
#if NORM
      if (CLUSTER > 1 && count == 0 && thread < TILE_N) send_squares(block, thread);
#endif
#pragma unroll 1
      for (unsigned first = 0; first < TILE_N; first += TURNS * ROWS) {
        float4 sum[TURNS];
#pragma unroll
        for (unsigned turn = 0; turn < TURNS; ++turn) {
          const unsigned n = min(first + turn * ROWS + thread / 16, TILE_N - 1);
          const float* from = sums + n * SUMS_PITCH;
          sum[turn] = *reinterpret_cast<const float4*>(from);
#pragma unroll
          for (int w = 1; w < WARPGROUPS; ++w) {
            add(sum[turn], *reinterpret_cast<const float4*>(from + w * TILE_N * SUMS_PITCH));
          }
        }
#pragma unroll
        for (unsigned turn = 0; turn < TURNS; ++turn) {
          const unsigned n = first + turn * ROWS + thread / 16;
          if (n >= TILE_N) continue;
          if constexpr (CLUSTER == 1) {
            store(g, out, n, tile * 64 + column, normalized(block, n, sum[turn]), next.items[0]);
          } else {
            const unsigned owner = n / PART_ROWS, row = block.rank * PART_ROWS + n % PART_ROWS;
            const uint32_t to =
                shared_address(block.smem + INBOXES_AT + inbox * INBOX_BYTES) + (row * 64 + column) * 4;
            store_async(set_block_rank(to, owner), sum[turn],
                        set_block_rank(shared_address(&barriers.arrived.at[inbox]), owner));
          }
        }
      }
      __syncwarp();
      if (thread % 32 == 0) Barrier::arrive(barriers.read.at);
    }
    if (CLUSTER > 1 && count) {
      const int previous = tile - block.clusters;
      const bool again = previous + INBOXES * block.clusters < g.feature_tiles;
      finish(block, out, loaded, thread, count - 1, previous, again);
    }
    if (!more) return;
    loaded = next;
  }
}

// ---- roles -----------------------------------------------------------------------------------------------

__device__ inline void consume(const Block& block, const uint8_t* scales, const uint8_t* zeros,
                               [[maybe_unused]] const float* channels) {
  const Args& g = block.g;
  uint8_t* smem = block.smem;
  Signals& barriers = block.barriers;
  // The compiler shall see that descriptors of X are the same in all lanes.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, id = threadIdx.x % 32;
  const int rows = warp * 16 + id / 4 * 2;  // in the order of scales
  const int group = GROUP ? warpgroup * TILES * 64 / (GROUP ? GROUP : 1) : 0;
  const Lane lane{
      uint32_t(warpgroup * TILES * WORDS_BYTES + warp * WORDS * 512 + id * 16),
      uint32_t(SCALES_OFFSET + group * SCALE_ROW + rows * SCALE_ITEM),
      uint32_t(ZEROS_OFFSET + group * ZERO_ROW + rows * ZERO_ITEM),
  };
  const uint32_t pipeline = shared_address(smem), table = pipeline + TABLE_AT + id * 4;
  constexpr auto SWIZZLE = X_ROW == 128 ? Swizzle::B128 : Swizzle::B64;
  const uint64_t x_start =
      operand(shared_address(smem + X_AT) + warpgroup * TILES * X_TILE, 16, 8 * X_ROW, SWIZZLE);
  float* mine = reinterpret_cast<float*>(smem + SUMS_AT) + (warpgroup * TILE_N + id % 4 * 2) * SUMS_PITCH +
                warp * 16 + id / 4;
  Position at;
  uint32_t phase = 1;
  Fragments a[IN_FLIGHT];
  Accumulator sums[IN_FLIGHT];
  [[maybe_unused]] Accumulator x_sums;
  float2 scale[IN_FLIGHT], zero{};
  Words words;
#if NORM
  RowSquares squares{};
#endif
  uint64_t x = x_start;
  [[maybe_unused]] int slot = 0;
  for (int tile = block.cluster; tile < g.feature_tiles; tile += block.clusters) {
    Accumulator acc{};
    float2 channel_scale{}, channel_zero{};
    [[maybe_unused]] float2 second_scale{};
    [[maybe_unused]] const auto load_second_scale = [&] {
      const float* from = channels + int64_t(tile) * 64 + rows;
      second_scale = load_pair<FLOAT>(reinterpret_cast<const uint8_t*>(from));
    };
    if constexpr (CHANNEL_SCALE && !X_SUMS) load_second_scale();
    if constexpr (GROUP == 0) {
      channel_scale = load_pair<SCALE_TYPE>(scales + (int64_t(tile) * 64 + rows) * SCALE_ITEM);
      if constexpr (X_SUMS)
        channel_zero = load_pair<ZERO_TYPE>(zeros + (int64_t(tile) * 64 + rows) * ZERO_ITEM);
    }
    if constexpr (!X_SLOTS) x = x_start;
    uint32_t stage = 0;
    const auto begin_stage = [&](int s) {
      stage = pipeline + at.stage * STAGE_BYTES;
      barriers.pipeline.wait_full(at);
      if (E4M3_PRODUCTS && X_TMA && (X_SLOTS || tile == block.cluster)) {
        const int place = X_SLOTS ? slot : s - block.first;
        reorder_tiles(smem + X_AT + place * X_STAGE + warpgroup * TILES * X_TILE, warpgroup);
      }
#if NORM
      if (tile == block.cluster) scale_tiles(block, s, warpgroup, squares);
#endif
      if constexpr (AHEAD) load_words(stage + lane.words, words);
    };
    const auto decode = [&](int unit) {
      if (!AHEAD && unit % TILE_GROUPS == 0) {
        load_words(stage + lane.words + unit / TILE_GROUPS * WORDS_BYTES, words);
      }
      if (unit % TILE_GROUPS == 0) decode_tile(words, table, a[unit / TILE_GROUPS % IN_FLIGHT]);
    };
    // The products of a unit of stage s; then the words of the tile after it.
    const auto start = [&](int unit, int s) {
      const int t = unit / TILE_GROUPS, part = unit % TILE_GROUPS, now = unit % IN_FLIGHT;
      const int row = GROUP > 64 ? t * 64 / (GROUP ? GROUP : 1) : unit;
      scale[now] = channel_scale;
      zero = channel_zero;
      if constexpr (GROUP != 0) {
        scale[now] = load_pair<SCALE_TYPE>(stage + lane.scales + row * SCALE_ROW);
        if constexpr (X_SUMS) zero = load_pair<ZERO_TYPE>(stage + lane.zeros + row * ZERO_ROW);
      }
      if constexpr (X_SUMS) fence(x_sums);
      const uint64_t b = x + t * (X_TILE >> 4) + part * STEPS * (32 >> 4);
      const auto products = [&] {
        multiply_steps<STEPS>(a[t % IN_FLIGHT] + part * STEPS, b, sums[now], GMMA::ScaleOut::Zero);
        if constexpr (X_SUMS) {
          Fragments one;
          fill_ones(one);
          multiply_steps<STEPS>(one + part * STEPS, b, x_sums, GMMA::ScaleOut::Zero);
        }
      };
      batch(products, sums[now], a[t % IN_FLIGHT]);
      if (unit == LAST_UNIT) {  // all of the stage has been read
        __syncwarp();
        if (id == 0) barriers.pipeline.release(at.stage);
        at.advance(STAGES);
        x += X_STAGE >> 4;
        if (X_SLOTS && ++slot == X_SLOTS) slot = 0, x = x_start;
        if (s + 1 < block.last) begin_stage(s + 1);
      } else if (AHEAD && part == TILE_GROUPS - 1) {
        load_words(stage + lane.words + (t + 1) * WORDS_BYTES, words);
      }
    };
    const auto finish = [&](int unit) {
      if constexpr (X_SUMS) fence(x_sums);
      add_scaled(acc, sums[unit % IN_FLIGHT], scale[unit % IN_FLIGHT], zero, x_sums);
    };
    begin_stage(block.first);
    if constexpr (IN_FLIGHT == 2) {  // before the first unit there is none
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) sums[1][i] = 0.f;
      scale[1] = float2{};
    }
    for (int s = block.first; s < block.last; ++s) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        decode(unit);
        if constexpr (IN_FLIGHT == 1) {
          start(unit, s);
          wait_batches<0>();
          finish(unit);
        } else {
          // The unit before; around the loop only all products may be waited for.
          if (unit == 0) {
            wait_batches<0>();
            finish(LAST_UNIT);
          }
          start(unit, s);
          if (unit > 0) {
            wait_batches<1>();
            finish(unit - 1);
          }
        }
      }
    }
    if constexpr (IN_FLIGHT == 2) {
      wait_batches<0>();
      finish(LAST_UNIT);
    }
#if NORM
    if (tile == block.cluster) store_squares(block, warpgroup, squares);
#endif
    if constexpr (CHANNEL_SCALE) {
      if constexpr (X_SUMS) load_second_scale();  // beside sums of X there are no registers for it before
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) acc[i] *= i % 4 < 2 ? second_scale.x : second_scale.y;
    }
    Barrier::wait(barriers.read.at, phase);
    phase ^= 1;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) mine[(i / 4 * 8 + i % 2) * SUMS_PITCH + i % 4 / 2 * 8] = acc[i];
    __syncwarp();
    if (id == 0) Barrier::arrive(barriers.written.at);
  }
}

#if X_TMA
using X = TensorMap;
#else
using X = const void*;
#endif
#if NORM
#define NORM_PARAMETER , const void* norm_scale
#define NORM_ARGUMENT norm_scale
#else
#define NORM_PARAMETER
#define NORM_ARGUMENT nullptr
#endif

extern "C" __global__ __launch_bounds__(THREADS, 1) void KERNEL()(
    const __grid_constant__ X x, const uint8_t* words, const uint8_t* scale, const uint8_t* zero, Output* out,
    const __grid_constant__ Args g CHANNEL_PARAMETER EPILOGUE_PARAMETERS NORM_PARAMETER) {
  extern __shared__ __align__(1024) uint8_t smem[];
#if CHAINED
  launch_dependent_grids();
#endif
  const Block block(g, smem);
  Signals& b = block.barriers;
  const int warp = warp_index();
  if (warp < CONSUMERS / 32 + EPILOGUE_WARPS) {
#if X_TMA
    if (warp == 0 && elect_one()) prefetch_tensor_map(&x);
#endif
    if (warp == CONSUMERS / 32) {
      if (elect_one()) init_barriers(b.written, b.read, b.arrived, b.free);
      __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
    named_sync(THREADS, READY);
    if (warp < CONSUMERS / 32) {
#if TABLE
      fill_table(smem);
#endif
#if !X_TMA
#if CHAINED
      wait_on_dependent_grids();
#endif
      load_x(block, x);
#endif
      consume(block, scale, zero, CHANNEL_ARGUMENT);
    } else {
      if constexpr (CLUSTER > 1) cluster_wait();  // for the other blocks' barriers
#if CHAINED
      wait_on_dependent_grids();  // the residual may be one of their results
#endif
      add_up(block, DESTINATION_OF_PARAMETERS);
    }
    return;
  }
  // The producer does not wait for the others. The compiler puts its code first, for it is the last here.
  const bool leader = elect_one();
  if (leader) {
    init_barriers(b.pipeline);
    fence_async_shared();
  }
  __syncwarp();
  named_arrive(THREADS, READY);
  if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  produce(block, X_TMA ? reinterpret_cast<const TensorMap*>(&x) : nullptr, words, scale, zero, NORM_ARGUMENT,
          leader);
}
