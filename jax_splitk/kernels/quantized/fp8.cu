// The product of an e4m3 activation and a packed quantized weight for Hopper's fp8 tensor cores: weights are
// decoded, without rounding, into e4m3 in WGMMA's A registers, the activation is its B operand in shared
// memory.
//
//   out[n, m] = sum over k of x[n, k] * value(q[k, m]) * scale[k / group, m]
//
// As a matrix product, D[m, n] = A B with m over features and n over rows of x. A k block is 128 k, two tiles
// of the packed weight (jax_splitk/quantized/packing.py). A stage of the ring holds a block: x as TILE_N rows
// of 128 bytes (128-byte swizzle), and for each consumer warpgroup the words of its 64 features, with their
// scales. Beyond k, TMA fills x with zeros; where the weight ends in the middle of a block its last tile
// stands in again, so that nothing unwritten is multiplied by these zeros.
//
// The tensor cores add e4m3 products with few bits (about 14), so that sums of PERIOD k at most are theirs:
// they go, times their scale, onto fp32 accumulators. A tile's columns are TURNS pieces of CHUNK; step
// (period, chunk) is one chain of WGMMAs into one of SUMS sets of partial sums. With two sets, the warpgroup
// adds up the sums of a step and decodes weights of the next period while the next step is under way:
//
//   multiply step s | decode a part | wait for step s - 1, promote its sums | multiply step s + 1 ...
//
// With one set (where registers are few), and at a block's end, nothing is under way when sums are promoted;
// other warpgroups keep the tensor cores busy.
// The fragments hold values over E4M3_FACTOR, which comes back last.
//
// Order of k: WGMMA takes x as it lies in memory, so lane t of four needs k 4t to 4t + 3 of each 16, of which
// the packed words of two lanes hold two each: it reads both lanes' words and takes half of each (`Pick`).
//
// Work: as in ranges.cuh; a worker is a thread block, or a cluster of CLUSTER of them.
// With CLUSTER 2, a tile is that of two thread blocks with the same rows of x: each loads half of these rows
// for both.
// With SPLITS above 1 each tile is cut into that many ranges, whose thread blocks form a cluster, and its
// sums meet in shared memory (cluster_sums.cuh). There PARTS warpgroups can share 64 features: each takes
// every PARTS-th block of the range, and their sums meet first.
//
// Roles: warpgroup 0 is the producer (a thread in each of two warps issues the bulk copies of half of the
// weights, one in a third warp the TMA of x; it leaves its registers to the others), the other warpgroups are
// consumers of 64 features each. The ring goes on from one piece of work to the next.
// Barriers, per stage: `full` (one arrival per producer warp of this block, with the bytes of all copies into
// it, also of those that the other block issues) and `empty` (one arrival per consumer warp of all blocks of
// the cluster, once it has read its words and the WGMMAs that read x have retired). Both start in phase 0;
// the producer's first pass waits on the opposite parity, which is complete. With CLUSTER 2, a last cluster
// barrier keeps every block's memory until nobody writes to it any more.
//
// Macros: FORMAT (dequantize_e4m3.cuh), HALF (dequantize.cuh; of no effect), OUT (split_k.cuh; no float),
// SCALE_TYPE, GROUP (scales.cuh), PERIOD (32, 64 or 128), CONSUMERS (2 or 4), PARTS, SPLITS, RANGE,
// LAST_RANGE (cluster_sums.cuh), TILE_N, CHUNK, STAGES, CLUSTER, N_TILES, EIGHTS (ranges.cuh), WHOLE (the
// weight does not end in the middle of a block).

#include <cutlass/arch/reg_reconfig.h>

#include "device/output.cuh"
#include "device/ring.cuh"
#include "quantized/dequantize.cuh"
#include "quantized/dequantize_e4m3.cuh"
#include "structs.cuh"
#define E4M3_PRODUCTS 1
#define COLUMNS CHUNK
#include "device/wgmma_rs.cuh"
// These need what is above.
#include "quantized/ranges.cuh"
#include "quantized/scales.cuh"

constexpr bool IN_CLUSTERS = SPLITS > 1;
static_assert(PARTS == 1 || (PARTS == 2 && IN_CLUSTERS), "two parts give their sums to a cluster");
static_assert(CLUSTER == 1 || !IN_CLUSTERS, "a cluster shares x or a tile");

constexpr int X_BYTES = TILE_N * BLOCK_K;        // of a stage
constexpr int SHARE = TILE_N / CLUSTER;          // rows of x that a thread block loads
constexpr int TILE_BYTES = WORDS * 64 * 64 / 2;  // of the packed weight
constexpr int STAGE_BYTES = X_BYTES + CONSUMERS * 2 * TILE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WARPGROUPS = CONSUMERS * PARTS;  // of consumers
constexpr int THREADS = 128 + 128 * WARPGROUPS;
// Registers by role (setmaxnreg wants multiples of 8): together no more than the 168 (96) of each thread at
// launch.
constexpr int PRODUCER_REGS = WARPGROUPS == 2 ? 40 : 64, CONSUMER_REGS = WARPGROUPS == 2 ? 232 : 104;

// A stage's scales, after the ring; then staging of results, and what warpgroups that share features give to
// each other.
constexpr int EXTRAS_AT = RING_BYTES, EXTRA_BYTES = CONSUMERS * SCALES;
constexpr int STAGING_AT = EXTRAS_AT + STAGES * EXTRA_BYTES;
constexpr int SHARED_SUMS_AT = STAGING_AT + 4 * WARPGROUPS * STAGING_BYTES;

constexpr int TURNS = TILE_N / CHUNK, PERIODS = BLOCK_K / PERIOD, STEPS = PERIOD / 32;
using Sums = float[TILE_SUMS];               // of the tile
using PeriodFragments = uint32_t[STEPS][4];  // A registers of a period, by steps of 32 k
// A part of a period is what is read from memory at a time.
constexpr int PERIOD_PARTS = PERIOD > 64 ? PERIOD / 64 : 1, PART_STEPS = STEPS / PERIOD_PARTS;
constexpr int PART_LOADS = WORDS == 1 ? 1 : PART_STEPS;
// Two sets of partial sums where registers allow it; `sums` in quantized_fp8.py.
constexpr int REGISTERS = TILE_SUMS + CHUNK + 8 * STEPS + 8 * PART_LOADS;
constexpr int SUMS = REGISTERS <= (WARPGROUPS == 2 ? 224 : 80) ? 2 : 1;

static_assert(HAS_E4M3 && FACTOR == 1.f, "a weight that e4m3 holds");
static_assert(OUT != 0, "sums of the tensor cores are too short for float32 results");
static_assert(TILE_N % CHUNK == 0 && SHARE % 8 == 0, "whole chunks, and whole 8 rows of the swizzle");
static_assert(GROUP_K % PERIOD == 0, "one scale for a period");
static_assert((CONSUMERS == 2 || CONSUMERS == 4) && WARPGROUPS <= 4, "registers are known for these");

#include "quantized/cluster_sums.cuh"

// ---- work ------------------------------------------------------------------------------------------------

__device__ inline int clusters() { return int(gridDim.x) / CLUSTER; }

constexpr int PIECES = IN_CLUSTERS ? 1 : 0x7fffffff;  // of a worker, at most

// A worker's piece of that index, which follows from the index alone: nothing else need be kept in registers
// during a piece. begin is not below end if there is none.
__device__ inline Piece piece_of(const Args& g, int index, int worker = int(blockIdx.x) / CLUSTER) {
  if constexpr (IN_CLUSTERS) {
    const int rank = int(cute::block_rank_in_cluster()), begin = rank * RANGE;
    return {worker / SPLITS, begin, begin + blocks_of(rank), -1};
  } else {
    if (index < g.whole_tiles) return {worker + index * clusters(), 0, g.k_blocks, -1};
    const int rest = g.tiles_m * g.tiles_n - g.whole_tiles * clusters();
    const int first = worker * g.range_blocks, last = min(first + g.range_blocks, rest * g.k_blocks);
    const int tile = first / g.k_blocks + index - g.whole_tiles, from = tile * g.k_blocks;
    const int begin = max(first - from, 0), end = min(last - from, g.k_blocks);
    const bool whole = begin == 0 && end == g.k_blocks;
    return {g.whole_tiles * clusters() + tile, begin, end, whole ? -1 : 2 * worker + (index > g.whole_tiles)};
  }
}

__device__ inline int cluster_rank() { return int(blockIdx.x) % CLUSTER; }

// ---- producer --------------------------------------------------------------------------------------------

// Warps: the first two of them copy the weights of half of the consumers each, the next one x.
constexpr int X_WARP = 2, PRODUCERS = 3, SHARED_BY = CONSUMERS / 2;

// The producer's way through the ring.
struct Writer {
  int stage = 0;
  uint32_t phase = 1;

  __device__ uint64_t* begin(uint64_t* barriers, int bytes) const {
    EmptyBarrier::wait(&barriers[STAGES + stage], phase);
    FullBarrier::arrive_and_expect_tx(&barriers[stage], bytes);
    return &barriers[stage];
  }

  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ inline void produce_x(const TensorMap& map, const Args& g, uint8_t* ring, uint64_t* barriers) {
  constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const int rank = cluster_rank();
  Writer out;
  for (int index = 0; index < PIECES; ++index) {
    const Piece piece = piece_of(g, index);
    if (piece.begin >= piece.end) break;
    const int row = place_of(g, piece.tile, rank).n * TILE_N + rank * SHARE;
#pragma unroll 1
    for (int block = piece.begin; block < piece.end; ++block) {
      uint64_t* full = out.begin(barriers, X_BYTES);
      uint8_t* to = ring + out.stage * STAGE_BYTES + rank * SHARE * BLOCK_K;
      const int column = block * (BLOCK_K / 2);  // the map's elements are pairs of x
      if constexpr (CLUSTER > 1) {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, (1 << CLUSTER) - 1, hint, to, column, row);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(&map, full, hint, to, column, row);
      }
      out.advance();
    }
  }
}

// Those of the warpgroups from `first` on.
__device__ inline void produce_weight(const Args& g, const uint8_t* words, const uint8_t* scales,
                                      uint32_t ring, uint64_t* barriers, int first) {
  const uint64_t hint =
      uint64_t(g.once ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  Writer out;
  for (int index = 0; index < PIECES; ++index) {
    const Piece piece = piece_of(g, index);
    if (piece.begin >= piece.end) break;
    const int first_tile = place_of(g, piece.tile, cluster_rank()).m * CONSUMERS + first;
#pragma unroll 1
    for (int block = piece.begin; block < piece.end; ++block) {
      uint64_t* full = out.begin(barriers, SHARED_BY * (2 * TILE_BYTES + SCALES));
      const bool half = !WHOLE && 2 * block + 1 == g.k_tiles;
#pragma unroll
      for (int i = 0; i < SHARED_BY; ++i) {
        const int tile = min(first_tile + i, g.feature_tiles - 1);
        copy_block(ring + out.stage * STAGE_BYTES + X_BYTES + (first + i) * 2 * TILE_BYTES,
                   words + (size_t(tile) * g.k_tiles + 2 * block) * TILE_BYTES, 2 * TILE_BYTES, half, full,
                   hint);
        if constexpr (GROUPS > 0) {
          copy_block(ring + EXTRAS_AT + out.stage * EXTRA_BYTES + (first + i) * SCALES,
                     scales + (size_t(tile) * g.groups + block * GROUPS) * ROW * SCALE_ITEM, SCALES,
                     half && GROUPS > 1, full, hint);
        }
      }
      out.advance();
    }
  }
}

// ---- consumer --------------------------------------------------------------------------------------------

// Two neighbouring scales.
using Pair = Vec<float, 2>;
struct RawPair {
  uint32_t bits[SCALE_TYPE == FLOAT ? 2 : 1];
};

__device__ inline RawPair load_pair(uint32_t address) {
  RawPair raw;
  if constexpr (SCALE_TYPE == FLOAT) {
    const uint2 bits = load_shared<uint2>(address);
    raw.bits[0] = bits.x;
    raw.bits[SCALE_TYPE == FLOAT] = bits.y;
  } else {
    raw.bits[0] = load_shared<uint32_t>(address);
  }
  return raw;
}

__device__ inline Pair to_floats(const RawPair& raw) {
  if constexpr (SCALE_TYPE == FLOAT) {
    return {__uint_as_float(raw.bits[0]), __uint_as_float(raw.bits[SCALE_TYPE == FLOAT])};
  } else if constexpr (SCALE_TYPE == BF16) {
    return {__uint_as_float(raw.bits[0] << 16), __uint_as_float(raw.bits[0] & 0xffff0000u)};
  } else {
    const float2 f = to_floats<SCALE_TYPE>(raw.bits[0]);
    return {f.x, f.y};
  }
}

constexpr uint32_t NOBODY = 1u << 31;

// The ring as a consumer goes through it: every PARTS-th stage.
struct Reader {
  uint32_t ring, full;
  uint32_t words;     // of the two lanes that this one takes from, in the first stage
  uint32_t scales;    // of its two rows, which are neighbours, in the first stage
  uint32_t pick;      // which half of the lanes' words
  uint32_t empty;     // the first stage's barrier of the block that this lane tells; NOBODY if it tells none
  uint32_t released;  // that of the stage before this one
  int stage;
  uint32_t phase = 0;

  __device__ Reader(uint32_t ring_address, uint64_t* barriers, int warp, int warpgroup, int part)
      : stage(part) {
    const int lane = threadIdx.x % 32;
    ring = ring_address;
    full = cute::cast_smem_ptr_to_uint(barriers);
    const uint32_t from = lane / 4 * 4 + lane % 2 * 2;
    words = keep(ring + X_BYTES + warpgroup * 2 * TILE_BYTES + warp % 4 * (TILE_BYTES / 4) + from * 16);
    scales = keep(ring + EXTRAS_AT + warpgroup * SCALES + (warp % 4 * 16 + lane / 4 * 2) * SCALE_ITEM);
    pick = lane % 4 < 2 ? 0x6420 : 0x7531;
    empty = full + STAGES * 8;
    if constexpr (CLUSTER > 1) empty = cute::set_block_rank(empty, lane % CLUSTER);
    released = empty = keep(lane < CLUSTER ? empty : NOBODY);
  }

  __device__ void wait_full() const { wait(full + stage * 8, phase); }

  // The descriptor of the stage's x: uniform to the compiler, which shall not see the constant in it and put
  // it together anew for every product.
  __device__ uint64_t operand() const {
    constexpr uint32_t HIGH = 1 << 30 | 8 * 128 >> 4;  // 128-byte swizzle, 8 rows of x apart
    const uint32_t low = __shfl_sync(~0u, (ring + stage * STAGE_BYTES) >> 4 | 1 << 16, 0);
    return uint64_t(__shfl_sync(~0u, HIGH, 0)) << 32 | low;
  }

  // The stage before this one, which all lanes have read.
  __device__ void release() const {
    __syncwarp();
    arrive_if<(CLUSTER > 1)>(int(released) >= 0, released);
  }

  __device__ void advance() {
    released = empty + stage * 8;
    stage += PARTS;
    if (stage >= STAGES) {
      stage -= STAGES;
      phase ^= 1;
    }
  }
};

// Adds sums of a chunk, which have retired. All columns of a row before the other row's: what is as scarce as
// tensor cores here are reads of registers, and instructions in a row with the same scale read it once.
__device__ inline void promote(Accumulator& sum, const Pair& scale, Sums& acc, int chunk) {
  fence(sum);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int i = 0; i < CHUNK / 4; ++i) {
      const int at = i / 2 * 4 + row * 2 + i % 2;
      float& to = acc[chunk * (CHUNK / 2) + at];
      to = GROUP ? fmaf(sum[at], scale.v[row], to) : to + sum[at];
      cute::warpgroup_fence_operand(to);  // now: the next product overwrites the sum
    }
  }
}

// The words of two lanes, of a part of a period. 4-bit: those of the whole tile of 64 k.
struct Words {
  uint32_t w[2][4 * PART_LOADS];

  __device__ void load(const Reader& in, int period, int part) {
    const int k = period * PERIOD + part * PART_STEPS * 32;
    const uint32_t from = in.words + in.stage * STAGE_BYTES + k / 64 * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < PART_LOADS; ++i) {
      const int at = WORDS == 1 ? 0 : (k / 32 % 2 + i) * 512;
#pragma unroll
      for (int lane = 0; lane < 2; ++lane) {
        const uint4 v = load_shared<uint4>(from + at + lane * 16);
        w[lane][4 * i] = v.x;
        w[lane][4 * i + 1] = v.y;
        w[lane][4 * i + 2] = v.z;
        w[lane][4 * i + 3] = v.w;
      }
    }
  }

  // The A registers of 32 k, which the part that was loaded last has.
  __device__ void decode(const Reader& in, int period, int step, uint32_t (&a)[4]) const {
    if constexpr (WORDS == 1) {
      const int first = (period * STEPS + step) % 2 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        decode_e4m3(__byte_perm(w[0][first + i], w[1][first + i], in.pick), a[2 * i], a[2 * i + 1]);
      }
    } else {
      const int first = step % PART_STEPS * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = __byte_perm(w[0][first + i], w[1][first + i], in.pick);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(a[i]);
  }
};

// When, of a period's chunks, what is next is loaded (not in the first one, where the LDS would come between
// the turn's first products), and how many of its steps are decoded before a chunk's sums are added.
constexpr int LOAD_CHUNK = TURNS > 2 ? 1 : 0;

__device__ constexpr int steps_before(int chunk) {
  constexpr int SHARES = TURNS > 1 ? TURNS - 1 - LOAD_CHUNK : 1;
  return chunk <= LOAD_CHUNK ? 0 : (chunk - LOAD_CHUNK) * STEPS / SHARES;
}

__device__ inline void consume(Reader& in, int blocks, Sums& acc) {
  PeriodFragments a[2];
  Accumulator sum[SUMS];
  Words words;
  RawPair next;             // scales of the period that is decoded
  Pair scale = {0.f, 0.f};  // of the period whose sums are promoted; at first there are none
#pragma unroll
  for (int i = 0; i < TILE_SUMS; ++i) acc[i] = 0.f;
  const auto load = [&](int period) {
    words.load(in, period, 0);
    if constexpr (GROUPS > 0) {
      next = load_pair(in.scales + in.stage * EXTRA_BYTES + period * PERIOD / GROUP_K * ROW * SCALE_ITEM);
    }
  };
  // Steps [from, to) of a period, of whose parts the one with `from` is loaded.
  const auto decode = [&](int period, int from, int to, PeriodFragments& fragments) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step < from || step >= to) continue;
      if (step > from && step % PART_STEPS == 0) words.load(in, period, step / PART_STEPS);
      words.decode(in, period, step, fragments[step]);
    }
  };
  const auto next_words = [&](int period, bool of_next_block) {
    if (of_next_block) {
      in.advance();
      if (--blocks > 0) in.wait_full();
    }
    load(period);  // after a piece's last block of anything: it is not used
  };
  // Not known to the compiler as early as it would matter: plain copies of a[1] to a[0], where a block is one
  // period, would make one of the two, and ptxas wait after every product.
  const uint32_t zero = keep(0);
  in.wait_full();
  load(0);
  decode(0, 0, STEPS, a[0]);
  while (true) {
    const uint64_t b = in.operand();
#pragma unroll
    for (int period = 0; period < PERIODS; ++period) {
      const bool last = period == PERIODS - 1;
      const int following = (period + 1) % PERIODS;
      PeriodFragments& to = a[(period + 1) % 2];
#pragma unroll
      for (int chunk = 0; chunk < TURNS; ++chunk) {
        const int step = period * TURNS + chunk;
        multiply_batch<STEPS>(a[period % 2], b + (chunk * CHUNK * BLOCK_K + period * PERIOD >> 4),
                              sum[step % SUMS], GMMA::ScaleOut::Zero);
        // The fragments of the next period are free from the end of the period's first step on.
        const int decoded = steps_before(chunk);
        if (chunk == LOAD_CHUNK && LOAD_CHUNK > 0) next_words(following, last);
        if (TURNS > 1 && chunk > 0) decode(following, steps_before(chunk - 1), decoded, to);
        if (SUMS == 2 && step > 0) {
          cute::warpgroup_wait<1>();
          promote(sum[(step + 1) % 2], scale, acc, (step + TURNS - 1) % TURNS);
        }
        if (GROUPS > 0 && chunk == 0) scale = to_floats(next);
        if (chunk == LOAD_CHUNK) {
          if (LOAD_CHUNK == 0) next_words(following, last);
          if constexpr (TURNS == 1) decode(following, 0, STEPS, to);
        } else if (decoded > steps_before(chunk - 1) && decoded < STEPS && decoded % PART_STEPS == 0) {
          words.load(in, following, decoded / PART_STEPS);
        }
        if constexpr (SUMS == 1) {
          cute::warpgroup_wait<0>();
          if (step == PERIODS * TURNS - 1) in.release();
          promote(sum[0], scale, acc, chunk);
        }
      }
    }
    if constexpr (SUMS == 2) {
      // Sums that are under way from one turn of the loop to the next would make ptxas wait after every
      // product.
      cute::warpgroup_wait<0>();
      in.release();
      promote(sum[(PERIODS * TURNS - 1) % 2], scale, acc, TURNS - 1);
    }
    if (blocks == 0) break;
    if constexpr (PERIODS == 1) {
#pragma unroll
      for (int i = 0; i < 4 * STEPS; ++i) a[0][i / 4][i % 4] = a[1][i / 4][i % 4] ^ zero;
    }
  }
}

// The sums of a warpgroup as a slot holds them: float4 of TILE_N / 8 columns by 128 threads.
__device__ inline float4* slot_of(float* partials, int slot, int rank, int warpgroup) {
  return reinterpret_cast<float4*>(partials) +
         ((size_t(slot) * CLUSTER + rank) * CONSUMERS + warpgroup) * WARPGROUP_SLOT;
}

// ---- kernels ---------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantized_fp8(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args g,
                  const uint8_t* words, const uint8_t* scales, Output* out, float* partials) {
  extern __shared__ uint8_t raw[];
  constexpr int BARRIERS = 2 * STAGES + 2;  // full, empty, room, arrived
  __shared__ uint64_t barriers[BARRIERS];
  uint64_t *empty = barriers + STAGES, *room = empty + STAGES, *arrived = room + 1;
  const uint32_t raw_address = cute::cast_smem_ptr_to_uint(raw), ring_address = (raw_address + 1023) & ~1023u;
  if (cute::elect_one_sync()) {
#pragma unroll 1  // for all of them in a row are slower: code that is new
    for (int i = threadIdx.x / 32; i < BARRIERS; i += THREADS / 32) {
      const int arrivals = i < STAGES        ? PRODUCERS
                           : i < 2 * STAGES  ? 4 * CONSUMERS * CLUSTER
                           : i == 2 * STAGES ? SPLITS
                                             : 4 * WARPGROUPS + 1;
      EmptyBarrier::init(&barriers[i], arrivals);
    }
    cutlass::arch::fence_barrier_init();
    if (threadIdx.x / 32 == X_WARP) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x_map));
    }
  }
  if constexpr (CLUSTER > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
    if constexpr (IN_CLUSTERS) cute::cluster_arrive_relaxed();
  }

  // Uniform to the compiler, which otherwise wraps every TMA instruction in a loop over the warp's lanes.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4;
  if (__builtin_expect(warp < 0, true)) {  // its code comes next: all wait for the first loads
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp + 4 < PRODUCERS && cute::elect_one_sync()) {
      if (warp + 4 == X_WARP) {
        produce_x(x_map, g, raw + (ring_address - raw_address), barriers);
      } else {
        produce_weight(g, words, scales, ring_address, barriers, (warp + 4) * SHARED_BY);
      }
    }
    if constexpr (IN_CLUSTERS) {
      __syncwarp();
      cute::cluster_wait();  // for the other blocks' barriers
      if (warp + 4 == X_WARP && cute::elect_one_sync()) {
        offer_room(int(cute::block_rank_in_cluster()), empty, room, arrived);
      }
    }
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
  if constexpr (IN_CLUSTERS) cute::cluster_wait();
  const int first = warp / 4 / CONSUMERS;  // of its k blocks
  Reader in(ring_address, barriers, warp, warp / 4 % CONSUMERS, first);
  for (int index = 0; index < PIECES; ++index) {
    Piece piece = piece_of(g, index);
    if (piece.begin >= piece.end) break;
    Sums acc;
    consume(in, (piece.end - piece.begin + PARTS - 1 - first) / PARTS, acc);
    // Computed again, not kept in registers meanwhile: where this is.
    int thread, block;
    read_indices(thread, block);
    const int lane = thread % 32, warp = thread / 32 - 4, rank = block % CLUSTER;
    const int part = warp / 4 / CONSUMERS, warpgroup = warp / 4 - part * CONSUMERS;
    const uint32_t staging = ring_address + STAGING_AT + warp * STAGING_BYTES;
    piece = piece_of(g, index, block / CLUSTER);
    const Place at = place_of(g, piece.tile, rank);
    if constexpr (GROUP == 0) {
      const size_t row =
          size_t(min(at.m * CONSUMERS + warpgroup, g.feature_tiles - 1)) * ROW + warp % 4 * 16 + lane / 4 * 2;
      RawPair channel;
#pragma unroll
      for (uint32_t& bits : channel.bits) {
        bits = __ldg(reinterpret_cast<const uint32_t*>(scales + row * SCALE_ITEM) + (&bits - channel.bits));
      }
      const Pair scale = to_floats(channel);
#pragma unroll
      for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= scale.v[i / 2 % 2];
    }
    // Last: no scale overflows before its time.
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= E4M3_FACTOR;
    if constexpr (IN_CLUSTERS) {
      store_together(g, out, ring_address, cute::cast_smem_ptr_to_uint(room), staging, at, warpgroup, part,
                     acc);
    } else if (piece.slot >= 0) {
      store_slot(slot_of(partials, piece.slot, rank, warpgroup) + thread % 128, acc);
    } else {
      const int m = (at.m * CONSUMERS + warpgroup) * SLOT + warp % 4 * 16;
#pragma unroll
      for (int j = 0; j < STORE_CHUNKS; ++j) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = acc[8 * j + i];
        store(g, out, staging, m, at.n * TILE_N + 16 * j, v, lane);
      }
    }
  }
  if constexpr (!IN_CLUSTERS) launch_dependent_grids();
  if constexpr (CLUSTER > 1) {
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

// A thread block adds the slots of 16 rows of x of a warpgroup's features of a tile.
extern "C" __global__ void __launch_bounds__(128)
    reduce_ranges(const __grid_constant__ Args g, int tiles_before, float* partials, Output* out) {
  __shared__ alignas(16) uint8_t staging[4][STAGING_BYTES];
  const int part = int(blockIdx.x) / STORE_CHUNKS, chunk = int(blockIdx.x) - part * STORE_CHUNKS;
  const int rest = part / CONSUMERS, warpgroup = part - rest * CONSUMERS;
  const int tile = rest / CLUSTER, rank = rest - tile * CLUSTER;
  const int first_unit = tile * g.k_blocks, last_unit = first_unit + g.k_blocks - 1;
  const int first = first_unit / g.range_blocks, last = last_unit / g.range_blocks;
  wait_on_dependent_grids();
  if (first == last) return;  // a whole tile
  float v[8] = {};
#pragma unroll 4
  for (int range = first; range <= last; ++range) {
    // A range begins with slot 0; if it began in an earlier tile, this is its second piece that is not whole.
    const int slot = 2 * range + (range * g.range_blocks < first_unit);
    const float4* from = slot_of(partials, slot, rank, warpgroup) + chunk * 2 * SLOT_CHUNK + threadIdx.x;
    add(v, __ldcg(from), __ldcg(from + SLOT_CHUNK));
  }
  const Place at = place_of(g, tiles_before + tile, rank);
  const int warp = threadIdx.x / 32;
  store(g, out, cute::cast_smem_ptr_to_uint(staging[warp]), (at.m * CONSUMERS + warpgroup) * SLOT + warp * 16,
        at.n * TILE_N + chunk * 16, v, threadIdx.x % 32);
}
