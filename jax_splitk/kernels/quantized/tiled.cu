// The product of a float activation and a packed quantized weight for Hopper: weights are dequantized into
// WGMMA's A registers, the activation is its B operand in shared memory.
//
//   out[n, m] = sum over k of x[n, k] * (value(q[k, m]) - zero[k / group, m]) * scale[k / group, m]
//
// As a matrix product, D[m, n] = A B with m over features and n over rows of x. A k block is 128 k, two tiles
// of the packed weight (jax_splitk/quantized/packing.py). A stage of the ring holds a block: x as two boxes
// of TILE_N rows of 64 k (128-byte swizzle), and for each consumer warpgroup the words of its 64 features,
// with their scales and zero points. Beyond k, TMA fills x with zeros; where the weight ends in the middle of
// a block its last tile stands in again, so that nothing unwritten is multiplied by these zeros.
//
// SCALING, where the scale goes. WEIGHT: into the A registers, in bfloat16: the weight is rounded to x's
// dtype; integers by the multiplication that decodes them (dequantize_scaled). SUM: onto the fp32 sum of each
// PERIOD k, which is then added to another set of accumulators; zero points take part as multiples of the
// sums of x over the same k (prepare_x): scale * (sum of x * q - zero * sum of x). CHANNEL: onto the fp32 sum
// over all k.
//
// The fragments hold values over FACTOR (dequantize.cuh), which comes back last: no scale overflows before
// its time.
//
// Work: as in ranges.cuh; a worker is a thread block.
// With SPLITS above 1 each tile is cut into that many ranges, whose thread blocks form a cluster, and its
// sums meet in shared memory (cluster_sums.cuh). There PARTS warpgroups can share 64 features: each takes
// every PARTS-th block of the range, and their sums meet first.
//
// What runs once counts: cold code takes some 4 ns an instruction, and the whole of a small product 10 us. So
// the cluster's size and its ranges are known at compile time, the tiles along n where they are few, and what
// the sizes need not.
//
// Roles: warpgroup 0 is the producer (one thread in each of its warps issues TMA and bulk copies; it leaves
// its registers to the others), the other warpgroups are consumers of 64 features each. The ring goes on from
// one piece of work to the next.
// Barriers, per stage: `full` (one arrival per producer warp, with the bytes of its copies) and `empty` (one
// arrival per warp that takes the stage, once it has read its words and the WGMMAs that read x have retired).
// Both start in phase 0; the producer's first pass waits on the opposite parity, which is complete. One more
// stands for the stage before a piece's first one.
//
// Macros: FORMAT, HALF (dequantize.cuh), X_E4M3 (x is e4m3, which prepare_x makes fp16), OUT (split_k.cuh),
// SCALE_TYPE, ZERO_TYPE, GROUP (scales.cuh), SCALING, PERIOD (SUM: 32, 64 or 128), CONSUMERS, PARTS, SPLITS
// (blocks of a cluster), RANGE, LAST_RANGE (cluster_sums.cuh), TILE_N, STAGES, CTAS_PER_SM, N_TILES, EIGHTS
// (ranges.cuh), WHOLE (the weight does not end in the middle of a block), PREPARED (after prepare_x).

#include <cutlass/arch/reg_reconfig.h>

#include "device/output.cuh"
#include "device/ring.cuh"
#include "device/wgmma_rs.cuh"
#include "quantized/dequantize.cuh"
#include "structs.cuh"

constexpr int CLUSTER = 1;  // that have neighbouring tiles
#include "quantized/ranges.cuh"
#include "quantized/scales.cuh"

constexpr bool IN_CLUSTERS = SPLITS > 1;
static_assert(PARTS == 1 || (PARTS == 2 && IN_CLUSTERS), "two parts give their sums to a cluster");

#if HALF
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

constexpr int WEIGHT = 0, SUM = 1, CHANNEL = 2;  // SCALING

constexpr int BOX_BYTES = TILE_N * 128;          // 64 k of x
constexpr int TILE_BYTES = WORDS * 64 * 64 / 2;  // of the packed weight
constexpr int STAGE_BYTES = 2 * BOX_BYTES + CONSUMERS * 2 * TILE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WARPGROUPS = CONSUMERS * PARTS;  // of consumers
constexpr int THREADS = 128 + 128 * WARPGROUPS;
// The register file, shared out by role (setmaxnreg wants multiples of 8).
constexpr bool CROWDED = WARPGROUPS == 2 && CTAS_PER_SM == 2;
constexpr int PRODUCER_REGS = WARPGROUPS == 4 ? 64 : CROWDED ? 48 : 56;
constexpr int CONSUMER_REGS = WARPGROUPS == 4 ? 104 : CROWDED ? 96 : CTAS_PER_SM == 2 ? 192 : 224;

// A stage's scales, zero points and sums of x, after the ring.
constexpr int ZERO_ITEM = item_bytes(ZERO_TYPE);
constexpr int ZEROS = GROUPS * ROW * ZERO_ITEM;  // bytes, of a warpgroup
constexpr int SUM_ROWS = ZERO_TYPE == NONE ? 0 : BLOCK_K / PERIOD;
constexpr int SUMS = SUM_ROWS * TILE_N * 4;
constexpr int ZEROS_AT = CONSUMERS * SCALES, SUMS_AT = ZEROS_AT + CONSUMERS * ZEROS;
constexpr int EXTRAS_AT = RING_BYTES, EXTRA_BYTES = SUMS_AT + SUMS;

// Staging of results, and what the warpgroups that share features give to each other.
constexpr int STAGING_AT = EXTRAS_AT + STAGES * EXTRA_BYTES;
constexpr int SHARED_SUMS_AT = STAGING_AT + 4 * WARPGROUPS * STAGING_BYTES;

static_assert(ZERO_TYPE == NONE || SCALING == SUM, "zero points need sums");

#include "quantized/cluster_sums.cuh"

// ---- work ------------------------------------------------------------------------------------------------

// A thread block's pieces, one after the other.
struct Work {
  int wave = 0, unit, end;

  __device__ explicit Work(const Args& g) {
    if constexpr (IN_CLUSTERS) {
      const int rank = int(cute::block_rank_in_cluster());
      unit = rank * RANGE;
      end = unit + blocks_of(rank);
    } else {
      const int rest = g.tiles_m * g.tiles_n - g.whole_tiles * int(gridDim.x);
      unit = int(blockIdx.x) * g.range_blocks;
      end = min(unit + g.range_blocks, rest * g.k_blocks);
    }
  }

  __device__ bool next(const Args& g, Piece& piece) {
    if constexpr (IN_CLUSTERS) {  // without divisions, which the first loads wait for
      if (unit >= end) return false;
      piece = {int(blockIdx.x) / SPLITS, unit, end, -1};
      unit = end;
      return true;
    } else {
      if (wave < g.whole_tiles) {
        piece = {int(blockIdx.x) + wave++ * int(gridDim.x), 0, g.k_blocks, -1};
        return true;
      }
      if (unit >= end) return false;
      const int tile = unit / g.k_blocks, begin = unit - tile * g.k_blocks,
                stop = min(g.k_blocks, begin + end - unit);
      const int first = int(blockIdx.x) * g.range_blocks;
      const bool whole = begin == 0 && stop == g.k_blocks;
      piece = {g.whole_tiles * int(gridDim.x) + tile, begin, stop,
               whole ? -1 : 2 * int(blockIdx.x) + (unit != first)};
      unit += stop - begin;
      return true;
    }
  }
};

// ---- producer --------------------------------------------------------------------------------------------

struct Weight {
  const uint8_t *words, *scale, *zero;
  const float* sums;  // of x over PERIOD k: [k blocks * SUM_ROWS][tiles_n * TILE_N]
};

constexpr int PRODUCERS = 4;  // warps: the first CONSUMERS of them copy the weights of a consumer each,
constexpr int SUMS_WARP = 1, X_WARP = 2;  // one sums of x, and from X_WARP on one box of x each

__device__ inline void produce(const TensorMap& x_map, const Args& g, const Weight& weight, uint8_t* ring,
                               uint64_t* full, uint64_t* empty, int warp) {
  constexpr uint64_t normal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const uint64_t hint = g.once ? uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST) : normal;
  const uint32_t ring_address = cute::cast_smem_ptr_to_uint(ring);
  const bool has_weight = warp < CONSUMERS, has_x = warp >= X_WARP, has_sums = warp == SUMS_WARP;
  const int bytes =
      (has_weight ? 2 * TILE_BYTES + SCALES + ZEROS : 0) + (has_x ? BOX_BYTES : 0) + (has_sums ? SUMS : 0);
  int stage = 0;
  uint32_t phase = 0;
  Work work(g);
  for (Piece piece; work.next(g, piece);) {
    const Place at = place_of(g, piece.tile);
    const int tile = min(at.m * CONSUMERS + warp, g.feature_tiles - 1);
    const uint8_t* words = weight.words + (size_t(tile) * g.k_tiles + 2 * piece.begin) * TILE_BYTES;
    const size_t row = (size_t(tile) * g.groups + piece.begin * GROUPS) * ROW;
    [[maybe_unused]] const uint8_t* scale = weight.scale + row * SCALE_ITEM;
    [[maybe_unused]] const uint8_t* zero = weight.zero + row * ZERO_ITEM;
    [[maybe_unused]] const float* sums =
        weight.sums + (size_t(piece.begin * SUM_ROWS) * g.tiles_n + at.n) * TILE_N;
#pragma unroll 1  // all but the first turn find their code
    for (int block = piece.begin; block < piece.end; ++block) {
      EmptyBarrier::wait(&empty[stage], phase ^ 1);
      FullBarrier::arrive_and_expect_tx(&full[stage], bytes);
      [[maybe_unused]] const uint32_t extra = ring_address + EXTRAS_AT + stage * EXTRA_BYTES;
      if (has_weight) {
        const bool half = !WHOLE && 2 * block + 1 == g.k_tiles;
        copy_block(ring_address + stage * STAGE_BYTES + 2 * BOX_BYTES + warp * 2 * TILE_BYTES, words,
                   2 * TILE_BYTES, half, &full[stage], hint);
        words += 2 * TILE_BYTES;
        if constexpr (GROUPS > 0) {
          copy_block(extra + warp * SCALES, scale, SCALES, half, &full[stage], hint);
          scale += SCALES;
          if constexpr (ZERO_TYPE != NONE) {
            copy_block(extra + ZEROS_AT + warp * ZEROS, zero, ZEROS, half, &full[stage], hint);
            zero += ZEROS;
          }
        }
      }
      if (has_x) {
        cute::SM90_TMA_LOAD_2D::copy(&x_map, &full[stage], normal,
                                     ring + stage * STAGE_BYTES + (warp - X_WARP) * BOX_BYTES,
                                     block * BLOCK_K + (warp - X_WARP) * 64, at.n * TILE_N);
      }
      if (SUM_ROWS > 0 && has_sums) {
#pragma unroll 1
        for (int i = 0; i < SUM_ROWS; ++i) {
          copy_bulk(extra + SUMS_AT + i * TILE_N * 4, sums, TILE_N * 4, &full[stage], normal);
          sums += g.tiles_n * TILE_N;
        }
      }
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// ---- consumer --------------------------------------------------------------------------------------------

// The lane's words of a tile.
using Words = uint32_t[4][WORDS];

__device__ inline void load_tile(uint32_t address, Words& words) {
#pragma unroll
  for (int load = 0; load < WORDS; ++load) {
    const uint4 w = load_shared<uint4>(address + load * 512);
    const uint32_t loaded[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[(load * 4 + i) / WORDS][i % WORDS] = loaded[i];
  }
}

// The ring as a consumer goes through it: every PARTS-th stage.
struct Reader {
  uint32_t ring, full;
  uint32_t words;     // the lane's in the first stage
  uint32_t pairs;     // its two rows, which are neighbours, among a stage's scales
  uint32_t released;  // barrier of the stage before this one, or the one that nobody waits for
  bool leads;         // its warp
  int stage;
  uint32_t phase = 0;

  __device__ Reader(uint32_t ring_address, uint64_t* barriers, int warp, int warpgroup, int part)
      : stage(part) {
    const int lane = threadIdx.x % 32;
    ring = ring_address;
    full = keep(cute::cast_smem_ptr_to_uint(barriers));
    words = keep(ring + 2 * BOX_BYTES + warpgroup * 2 * TILE_BYTES + warp % 4 * (TILE_BYTES / 4) + lane * 16);
    pairs = keep(warpgroup * GROUPS * ROW + warp % 4 * 16 + lane / 4 * 2);
    leads = lane == 0;
    released = full + 2 * STAGES * 8;
  }

  __device__ void wait_full() const { wait(full + stage * 8, phase); }
  __device__ uint32_t extra() const { return ring + EXTRAS_AT + stage * EXTRA_BYTES; }
  __device__ uint32_t tile(int index) const { return words + stage * STAGE_BYTES + index * TILE_BYTES; }

  // The descriptor of the stage's x, its lower half: uniform to the compiler.
  __device__ uint32_t operand() const {
    return __shfl_sync(~0u, (ring + stage * STAGE_BYTES) >> 4 | 1 << 16, 0);
  }

  // Once for every stage, which all lanes have read.
  __device__ void release() const {
    __syncwarp();
    arrive_if(leads, released);
  }

  __device__ void advance() {
    released = full + (STAGES + stage) * 8;
    stage += PARTS;
    if (stage >= STAGES) {
      stage = PARTS == 1 ? 0 : stage - STAGES;
      phase ^= 1;
    }
  }

  __device__ void release_last() {
    release();
    released = full + 2 * STAGES * 8;
  }
};

// acc (+)= A B of STEPS steps of 16 k, from a[0] and the lower half of B's descriptor on.
template <int STEPS>
__device__ inline void multiply(uint32_t (*a)[4], uint32_t b, Accumulator& acc,
                                GMMA::ScaleOut scale = GMMA::ScaleOut::One) {
  constexpr uint64_t HIGH = uint64_t(1 << 30 | 8 * 128 >> 4) << 32;  // 128-byte swizzle, 8 rows of x apart
  multiply_batch<STEPS>(a, HIGH | b, acc, scale);
}

__device__ inline void scale_weights(uint32_t pair, uint32_t (&a)[4]) {
  const uint32_t scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = mul_bf16x2(a[i], scale[i % 2]);
}

// One fused multiply-add decodes and scales integers: the exact product, rounded once, as by decoding (which
// is exact) and multiplying.
constexpr bool FOLDED = SCALING == WEIGHT && FORMAT <= INT8;

// For a lane's two rows: the scale times what `integers` multiplies with, and times the bias, negative. Both
// are exact for scales from 2^-123 to below 2; beyond 2 the factor overflows (`too_large`), below 2^-123 the
// bias's part is subnormal, and the weight off by at most 2^-127.
struct Folded {
  uint32_t factor[2], minus[2];
};

__device__ inline bool too_large(uint32_t pair) { return (pair & twice(0x4000)) != 0; }

__device__ inline Folded fold(uint32_t pair) {
  // The second row's codes of 4 bits stand 4 bits higher.
  constexpr uint32_t factors = FORMAT == INT8 ? twice(0x7f00) : 0x7d007f00u;
  constexpr uint32_t biases = twice(FORMAT == UINT4 ? 0x8000 : FORMAT == INT4 ? 0xbe00 : 0xc000);
  const uint32_t f = mul_bf16x2(pair, factors), m = mul_bf16x2(pair, biases);
  return {{__byte_perm(f, 0, 0x1010), __byte_perm(f, 0, 0x3232)},
          {__byte_perm(m, 0, 0x1010), __byte_perm(m, 0, 0x3232)}};
}

__device__ inline void dequantize_scaled(const uint32_t (&words)[WORDS], const Folded& s, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2, upper = i / 2 * 8;
    const uint32_t codes = FORMAT == INT8 ? (words[row % WORDS] ^ 0x80808080u) >> upper & 0x00ff00ffu
                                          : words[0] >> upper & (row ? 0x00f000f0u : 0x000f000fu);
    a[i] = fma2(codes, s.factor[row], s.minus[row]);
  }
}

// Steps of 16 k that are multiplied at a time, and batches of them that may be under way while the next one's
// fragments are made. A stage is released with the batch PENDING - 1 of the next.
constexpr int BATCH = FOLDED ? 2 : 4, BATCHES = 8 / BATCH;
constexpr int PENDING = FOLDED && TILE_N < 192 ? 3 : 1;

// What a lane reads of a stage in advance.
struct Block {
  static constexpr int TILES =
      WORDS == 1 ? 2 : 1;  // more would not fit in registers beside four warpgroups' sums
  static constexpr int PAIRS = SCALING == WEIGHT ? GROUPS : 0;
  Words words[2];
  uint32_t pairs[PAIRS + 1];  // scales of its two rows

  __device__ void load(const Reader& in) {
    in.wait_full();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) load_tile(in.tile(tile), words[tile]);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      pairs[i] = load_shared<uint32_t>(in.extra() + (in.pairs + i * ROW) * SCALE_ITEM);
  }
};

// WEIGHT and CHANNEL: one chain of sums. The fragments of batches take turns: some are made while the tensor
// cores read others.
__device__ inline void consume(Reader& in, int blocks, Accumulator& acc) {
  uint32_t fragments[PENDING + 1][BATCH][4];
  Block block;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = 0.f;
  block.load(in);
  while (true) {
    const uint32_t b = in.operand();
    [[maybe_unused]] bool large = false;
    if constexpr (FOLDED) {
#pragma unroll
      for (int i = 0; i < Block::PAIRS; ++i) large |= too_large(block.pairs[i]);
      large = __any_sync(~0u, large);
    }
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      const int tile = batch * BATCH / 4, first = batch * BATCH % 4;
      if (tile >= Block::TILES && first == 0) load_tile(in.tile(tile), block.words[tile]);
      auto& a = fragments[batch % (PENDING + 1)];
#pragma unroll
      for (int step = 0; step < BATCH; ++step) {
        const auto& words = block.words[tile][first + step];
        const uint32_t pair = block.pairs[(tile * 64 + (first + step) * 16) / GROUP_K];
        if constexpr (FOLDED) {
          dequantize_scaled(words, fold(pair), a[step]);
        } else {
          dequantize(words, a[step]);
          if constexpr (SCALING == WEIGHT) scale_weights(pair, a[step]);
        }
      }
      if (FOLDED && large) {  // again, without what overflows
#pragma unroll
        for (int step = 0; step < BATCH; ++step) {
          dequantize(block.words[tile][first + step], a[step]);
          scale_weights(block.pairs[(tile * 64 + (first + step) * 16) / GROUP_K], a[step]);
        }
      }
      multiply<BATCH>(a, b + tile * (BOX_BYTES >> 4) + first * 2, acc);
      if (batch == BATCHES - 1) {
        in.advance();
        if (--blocks > 0) block.load(in);
      }
      // The next batch's fragments are free and, from batch PENDING - 1 on, the last stage.
      cute::warpgroup_wait<PENDING>();
      if (batch == PENDING - 1) in.release();
    }
    if (blocks == 0) break;
  }
  cute::warpgroup_wait<0>();
  fence(acc);
  in.release_last();
}

// The sum of a period, and what it is to be multiplied with.
struct Period {
  float2 scale, zero;  // of the lane's two rows; zero points over FACTOR
  uint32_t sums;       // of x, for the lane's first columns
};

__device__ inline float less_zero(float acc, float zero, float sum_of_x) {
  return ZERO_TYPE == NONE ? acc : fmaf(-zero, sum_of_x, acc);
}

__device__ inline void add_period(const Period& p, Accumulator& acc, Accumulator& sum) {
  fence(acc);
#pragma unroll
  for (int j = 0; j < TILE_N / 8; ++j) {
    float2 s = make_float2(0.f, 0.f);
    if constexpr (ZERO_TYPE != NONE) s = load_shared<float2>(p.sums + j * 8 * 4);
    sum[4 * j] = fmaf(p.scale.x, less_zero(acc[4 * j], p.zero.x, s.x), sum[4 * j]);
    sum[4 * j + 1] = fmaf(p.scale.x, less_zero(acc[4 * j + 1], p.zero.x, s.y), sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(p.scale.y, less_zero(acc[4 * j + 2], p.zero.y, s.x), sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(p.scale.y, less_zero(acc[4 * j + 3], p.zero.y, s.y), sum[4 * j + 3]);
  }
}

// SUM: a chain of sums for each period, whose end is waited for. Scales of GROUP 0 are in `period` already.
__device__ inline void consume(Reader& in, int blocks, Period period, Accumulator& sum) {
  Fragments a[2];
  Accumulator acc;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) sum[i] = 0.f;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
  bool pending = false;
  const auto finish = [&] {
    cute::warpgroup_wait<0>();
    if (pending) add_period(period, acc, sum);
    scale = GMMA::ScaleOut::Zero;
  };
  for (; blocks > 0; --blocks) {
    const uint32_t b = in.operand(), extra = in.extra();
    in.wait_full();
    const auto begin_period = [&](int k) {
      if constexpr (GROUP != 0) {
        const uint32_t row = in.pairs + k / GROUP_K * ROW;
        period.scale = load_pair<SCALE_TYPE>(extra + row * SCALE_ITEM);
        if constexpr (ZERO_TYPE != NONE) {
          period.zero = load_pair<ZERO_TYPE>(extra + ZEROS_AT + row * ZERO_ITEM);
          period.zero = make_float2(period.zero.x / FACTOR, period.zero.y / FACTOR);
        }
      }
      period.sums = extra + SUMS_AT + (k / PERIOD * TILE_N + column) * 4;
    };
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      // Two tiles of one period are both under way: the first one's fragments are free again once it has
      // retired.
      if (PERIOD == 128 && tile == 0) cute::warpgroup_wait<1>();
      Words words;
      load_tile(in.tile(tile), words);
#pragma unroll
      for (int step = 0; step < 4; ++step) dequantize(words[step], a[tile][step]);
      if (tile == 0 || PERIOD < 128) {
        finish();
        if (tile == 0) in.release();
        begin_period(tile * 64);
      }
      const uint32_t b_tile = b + tile * (BOX_BYTES >> 4);
      if constexpr (PERIOD == 32) {
        multiply<2>(a[tile], b_tile, acc, scale);
        pending = true;
        finish();
        begin_period(tile * 64 + 32);
        multiply<2>(a[tile] + 2, b_tile + 4, acc, scale);
      } else {
        multiply<4>(a[tile], b_tile, acc, scale);
        scale = GMMA::ScaleOut::One;
      }
      pending = true;
    }
    in.advance();
  }
  finish();
  in.release_last();
}

// ---- epilogue --------------------------------------------------------------------------------------------

// A thread's sums as a slot holds them: a float4 for each 8 columns, SLOT_CHUNK apart.
__device__ inline float4* slot_of(float* partials, int slot, int warpgroup) {
  return reinterpret_cast<float4*>(partials) + (size_t(slot) * CONSUMERS + warpgroup) * WARPGROUP_SLOT +
         threadIdx.x % 128;
}

// ---- kernels ---------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    quantized_tiled(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args g,
                    const uint8_t* words, const uint8_t* scale, const uint8_t* zero, const float* sums,
                    Output* out, float* partials) {
  extern __shared__ uint8_t raw[];
  // full, empty, one for a consumer without a stage to release, room, arrived
  constexpr int BARRIERS = 2 * STAGES + 3;
  __shared__ uint64_t barriers[BARRIERS];
  uint64_t *full = barriers, *empty = barriers + STAGES, *room = barriers + 2 * STAGES + 1,
           *arrived = room + 1;
  const uint32_t raw_address = cute::cast_smem_ptr_to_uint(raw), ring_address = (raw_address + 1023) & ~1023u;
  if (cute::elect_one_sync()) {
#pragma unroll 1  // for all of them in a row are slower: code that is new
    for (int i = threadIdx.x / 32; i < BARRIERS; i += THREADS / 32) {
      const int arrivals = i < STAGES            ? PRODUCERS
                           : i <= 2 * STAGES     ? 4 * CONSUMERS
                           : i == 2 * STAGES + 1 ? SPLITS
                                                 : 4 * WARPGROUPS + 1;
      EmptyBarrier::init(&barriers[i], arrivals);
    }
    cutlass::arch::fence_barrier_init();
    if (threadIdx.x / 32 == X_WARP) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x_map));
    }
  }
  __syncthreads();
  if constexpr (IN_CLUSTERS) cute::cluster_arrive_relaxed();

  // Uniform to the compiler, which otherwise wraps every TMA instruction in a loop over the warp's lanes.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - PRODUCERS;
  if (__builtin_expect(warp < 0, true)) {  // its code comes next: all wait for the first loads
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (cute::elect_one_sync()) {
      if constexpr (PREPARED) wait_on_dependent_grids();
      uint8_t* ring = raw + (ring_address - raw_address);
      produce(x_map, g, {words, scale, zero, sums}, ring, full, empty, warp + PRODUCERS);
    }
    __syncwarp();
    if constexpr (IN_CLUSTERS) {
      cute::cluster_wait();  // for the other blocks' barriers
      if (warp == -1 && cute::elect_one_sync()) {
        offer_room(int(cute::block_rank_in_cluster()), empty, room, arrived);
      }
    }
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
  if constexpr (IN_CLUSTERS) cute::cluster_wait();
  const int part = warp / 4 / CONSUMERS, warpgroup = warp / 4 - part * CONSUMERS;
  const uint32_t staging = ring_address + STAGING_AT + warp * STAGING_BYTES;
  Reader in(ring_address, barriers, warp, warpgroup, part);
  Work work(g);
  for (Piece piece; work.next(g, piece);) {
    Accumulator acc;
    Period channel = {};
    const Place at = place_of(g, piece.tile);
    if constexpr (GROUP == 0) {
      const size_t row = min(at.m * CONSUMERS + warpgroup, g.feature_tiles - 1) * ROW + warp % 4 * 16 +
                         threadIdx.x % 32 / 4 * 2;
      channel.scale = load_pair<SCALE_TYPE>(scale + row * SCALE_ITEM);
      if constexpr (ZERO_TYPE != NONE) {
        channel.zero = load_pair<ZERO_TYPE>(zero + row * ZERO_ITEM);
        channel.zero = make_float2(channel.zero.x / FACTOR, channel.zero.y / FACTOR);
      }
    }
    const int blocks = (piece.end - piece.begin + PARTS - 1 - part) / PARTS;
    if constexpr (SCALING == SUM) {
      consume(in, blocks, channel, acc);
    } else {
      consume(in, blocks, acc);
    }
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) {
      if constexpr (SCALING == CHANNEL) acc[i] *= i / 2 % 2 ? channel.scale.y : channel.scale.x;
      if constexpr (!IN_CLUSTERS) acc[i] *= FACTOR;
    }
    if constexpr (IN_CLUSTERS) {
      store_together(g, out, ring_address, cute::cast_smem_ptr_to_uint(room), staging, at, warpgroup, part,
                     acc);
    } else if (piece.slot >= 0) {
      store_slot(slot_of(partials, piece.slot, warpgroup), acc);
    } else {
      const int m = (at.m * CONSUMERS + warpgroup) * SLOT + warp % 4 * 16;
#pragma unroll
      for (int j = 0; j < STORE_CHUNKS; ++j) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = acc[8 * j + i];
        store(g, out, staging, m, at.n * TILE_N + 16 * j, v, threadIdx.x % 32);
      }
    }
  }
  if constexpr (!IN_CLUSTERS) launch_dependent_grids();
}

// A thread block adds the slots of 16 rows of x of a warpgroup's features of a tile.
extern "C" __global__ void __launch_bounds__(128)
    reduce_ranges(const __grid_constant__ Args g, int tiles_before, float* partials, Output* out) {
  __shared__ alignas(16) uint8_t staging[4][16 * STAGING_PITCH];
  const int rest = int(blockIdx.x) / STORE_CHUNKS, chunk = int(blockIdx.x) - rest * STORE_CHUNKS;
  const int tile = rest / CONSUMERS, warpgroup = rest - tile * CONSUMERS;
  const int first_unit = tile * g.k_blocks, last_unit = first_unit + g.k_blocks - 1;
  const int first = first_unit / g.range_blocks, last = last_unit / g.range_blocks;
  wait_on_dependent_grids();
  if (first == last) return;  // a whole tile
  float v[8] = {};
#pragma unroll 4
  for (int range = first; range <= last; ++range) {
    // A range begins with slot 0; if it began in an earlier tile, this is its second piece that is not whole.
    const int slot = 2 * range + (range * g.range_blocks < first_unit);
    const float4* from = slot_of(partials, slot, warpgroup) + chunk * 2 * SLOT_CHUNK;
    add(v, __ldcg(from), __ldcg(from + SLOT_CHUNK));
  }
  const Place at = place_of(g, tiles_before + tile);
  const int warp = threadIdx.x / 32;
  store(g, out, cute::cast_smem_ptr_to_uint(staging[warp]), (at.m * CONSUMERS + warpgroup) * SLOT + warp * 16,
        at.n * TILE_N + chunk * 16, v, threadIdx.x % 32);
}

#if X_E4M3
#include <cuda_fp8.h>
using Source = __nv_fp8_e4m3;
#else
using Source = Element;
#endif

// A warp copies 128 k of a row of x to rows that TMA can load, and adds them up by periods. Rows beyond x
// have sums of zero.
extern "C" __global__ void __launch_bounds__(128)
    prepare_x(const __grid_constant__ PrepareArgs g, const Source* x, Element* copy, float* sums) {
  const int lane = threadIdx.x % 32, warp = int(blockIdx.x) * 4 + threadIdx.x / 32;
  const int row = warp / g.k_blocks, block = warp - row * g.k_blocks, k = block * BLOCK_K + lane * 4;
  launch_dependent_grids();
  if (row >= g.padded_rows) return;
  const Source* from = x + size_t(row) * g.k + k;
  Element* to = copy + size_t(row) * g.pitch + k;
  const int count = row < g.rows ? min(4, g.k - k) : 0;
  float sum = 0.f;
  if (count == 4 && g.k % 4 == 0) {
    const auto four = *reinterpret_cast<const Vec<Source, 4>*>(from);
    Vec<Element, 4> converted;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      converted.v[i] = Element(four.v[i]);
      sum += float(four.v[i]);
    }
    if (g.pitch) *reinterpret_cast<Vec<Element, 4>*>(to) = converted;
  } else {
    for (int i = 0; i < count; ++i) {
      const Source value = from[i];
      if (g.pitch) to[i] = Element(value);
      sum += float(value);
    }
  }
  if constexpr (ZERO_TYPE != NONE) {
#pragma unroll
    for (int step = 1; step < PERIOD / 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane % (PERIOD / 4) == 0) {
      sums[size_t(block * SUM_ROWS + lane / (PERIOD / 4)) * g.padded_rows + row] = sum;
    }
  }
  fence_async_global();  // TMA reads what was stored here
}
