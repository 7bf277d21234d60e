// The product of a float activation and a packed quantized weight, or its transpose, for Hopper, in tiles
// (tiles.cuh): weights are dequantized to 16 bits.
//
// SCALING, where the scale goes. WEIGHT: into the A registers, in bfloat16: the weight is rounded to x's
// dtype (scaled_weights.cuh). SUM: onto the fp32 sum of each PERIOD k, which is then added to another set of
// accumulators; zero points take part as multiples of the sums of x over the same k (KERNEL(_prepare)): scale
// * (sum of x * q - zero * sum of x). CHANNEL: onto the fp32 sum over all k.
//
// The fragments hold values over FACTOR (dequantize.cuh), which comes back last: no scale overflows before
// its time.
//
// Macros: those of tiles.cuh; X_E4M3 (x is e4m3, which KERNEL(_prepare) makes fp16), SCALING, CTAS_PER_SM,
// PREPARED (after KERNEL(_prepare), or KERNEL(_factors)).

#include "device/wgmma_rs.cuh"
#include "quantized/tiles.cuh"

using Element = TypeOf<(HALF ? HALF_FLOAT : BF16)>::type;

constexpr int WEIGHT = 0, SUM = 1, CHANNEL = 2;  // SCALING
static_assert(ZERO_TYPE == NONE || SCALING != CHANNEL, "zero points belong to a group");
static_assert(X_SUMS == (ZERO_TYPE != NONE && SCALING == SUM), "which sums of x there are");

constexpr int BOX_BYTES = TILE_N * 128;  // 64 k of x

#include "quantized/scaled_weights.cuh"
#include "quantized/transposed.cuh"

// ---- consumer --------------------------------------------------------------------------------------------

struct Reader : Consumer {
  uint32_t words;     // the lane's in the first stage
  uint32_t pairs;     // its two rows, which are neighbours, among a stage's scales
  uint32_t released;  // barrier of the stage before this one, or the one that nobody waits for
  bool leads;         // its warp
  float inverse;      // what multiplies the weights of its rows (FACTORS)
  uint32_t channels;  // its two rows' first channel scales in a stage's extras (TRANSPOSED)

  __device__ Reader(const Kernel& kernel, const Role& role) : Consumer{{role.k_warpgroup}} {
    const int warp = role.warp % 4, lane = threadIdx.x % 32;
    stages = kernel.address;
    full = keep(shared_address(kernel.barriers));
#if TRANSPOSED
    words = keep(stages + X_BYTES + role.m_warpgroup * 2 * TILE_BYTES + first_word(warp, lane));
    const int group = TILE_GROUPS > 1 ? warp * 16 / GROUP_K : 0;
    pairs = keep((role.m_warpgroup * GROUPS + group) * WARPGROUP_M + lane / 4 * 2);
    channels = keep(CHANNELS_AT + role.m_warpgroup * CHANNELS + lane / 4 * 2 * 4);
#else
    words = keep(stages + X_BYTES + role.m_warpgroup * 2 * TILE_BYTES + warp * (TILE_BYTES / 4) + lane * 16);
    pairs = keep(role.m_warpgroup * GROUPS * WARPGROUP_M + warp * 16 + lane / 4 * 2);
#endif
    leads = lane == 0;
    released = full + SPARE * 8;
  }

  __device__ uint32_t tile(int index) const { return words + stage * STAGE_BYTES + index * TILE_BYTES; }

  // Once for every stage, which all lanes have read.
  __device__ void release() const {
    // Products wait for what was loaded before them; sums of x are loaded after the stage's products.
    if constexpr (SUM_ROWS > 0) fence_async_shared();
    __syncwarp();
    arrive_if(leads, released);
  }

  __device__ void advance() {
    released = full + (EMPTY + stage) * 8;
    Consumer::advance();
  }

  __device__ void release_last() {
    release();
    released = full + SPARE * 8;
  }
};

// acc (+)= A B of STEPS steps of 16 k, from a[0] and the lower half of B's descriptor on.
template <int STEPS>
__device__ inline void multiply(uint32_t (*a)[4], uint32_t b, Accumulator& acc,
                                GMMA::ScaleOut scale = GMMA::ScaleOut::One) {
  multiply_batch<STEPS>(a, uint64_t(OPERAND_HIGH) << 32 | b, acc, scale);
}

// Steps of 16 k that are multiplied at a time, and batches of them that may be under way while the next one's
// fragments are made. A stage is released with the batch PENDING - 1 of the next. Products of narrow tiles
// are short: more of them at a time, with fewer waits.
constexpr int BATCH = (FOLDED && TILE_N > 32) || IN_PARTS || TRANSPOSED ? 2 : 4, BATCHES = 8 / BATCH;
constexpr int PENDING = BATCH == 2 && TILE_N < 192 ? 3 : 1;

__device__ inline float2 over_factor(float2 v) { return make_float2(v.x / FACTOR, v.y / FACTOR); }

// What a lane reads of a stage in advance.
struct Block {
  static constexpr int TILES =
      WORDS == 1 ? 2 : 1;  // more would not fit in registers beside four warpgroups' sums
#if TRANSPOSED
  static constexpr int PAIRS = PACKED_SCALES ? 8 : 0, TYPE = PAIRS > 0 ? SCALE_TYPE : BF16;
#else
  static constexpr int PAIRS = SCALING == WEIGHT && !IN_PARTS ? GROUPS : 0;
  static constexpr int TYPE = PAIRS > 0 ? SCALE_TYPE : BF16, PARTS = IN_PARTS ? GROUPS : 0;
  Parts parts[PARTS + 1];
#endif
  Words words[2];
  uint32_t pairs[PAIRS + 1];  // scales of its two rows, as bfloat16, or with EXPONENTS as bytes

  __device__ void load(const Reader& in) {
    in.wait_full();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) load(in, tile);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#if TRANSPOSED
      const uint32_t at = in.extras() + (in.pairs + scales_of(i)) * SCALE_ITEM;
#else
      const uint32_t at = in.extras() + (in.pairs + i * WARPGROUP_M) * SCALE_ITEM;
#endif
      const Pair<TYPE> pair = load_shared<Pair<TYPE>>(at);
      pairs[i] = EXPONENTS ? uint32_t(pair) : to_bf16_pair<TYPE>(pair);
      if constexpr (LOWERED) pairs[i] = mul_bf16x2(pairs[i], twice(0x3b80));
    }
#if !TRANSPOSED
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const uint32_t row = in.pairs + i * WARPGROUP_M;
      parts[i].load(in.extras() + row * SCALE_ITEM, in.extras() + ZEROS_AT + row * ZERO_ITEM);
    }
#endif
  }

  __device__ void load(const Reader& in, int tile) {
#if TRANSPOSED
    load_transposed(in.tile(tile), words[tile]);
#else
    load_words(in.tile(tile), words[tile]);
#endif
  }

  // Those of a group, as bfloat16.
  __device__ uint32_t scales(int group) const {
    return EXPONENTS ? to_bf16_pair<TYPE>(Pair<TYPE>(pairs[group])) : pairs[group];
  }

#if TRANSPOSED
  // The fragments of 16 features, the block's `sixteen`-th.
  __device__ void fragments(const Reader& in, int sixteen, uint32_t (&a)[4]) const {
    dequantize(words[sixteen / 4][sixteen % 4], a);
    if constexpr (PACKED_SCALES) {
      scale_weights(pairs[sixteen], a);
    } else {
      const uint32_t at = in.pairs + scales_of(sixteen);
      float2 scale = load_pair<SCALE_TYPE>(in.extras() + at * SCALE_ITEM), zero = {0.f, 0.f};
      if constexpr (ZERO_TYPE != NONE)
        zero = over_factor(load_pair<ZERO_TYPE>(in.extras() + ZEROS_AT + at * ZERO_ITEM));
      if constexpr (CHANNEL_SCALE) {
        const uint32_t channels = in.extras() + in.channels + sixteen * 16 * 4;
        const float2 channel = load_pair<FLOAT>(channels);
        scale = {scale.x * channel.x, scale.y * channel.y};
      }
      if constexpr (FACTORS) scale = {scale.x * in.inverse, scale.y * in.inverse};
      scale_values(scale, zero, a);
    }
    transpose(a);
  }
#endif
};

// WEIGHT and CHANNEL: one chain of sums. The fragments of batches take turns: some are made while the tensor
// cores read others.
__device__ inline void add_blocks(Reader& in, int blocks, Accumulator& acc) {
  uint32_t fragments[PENDING + 1][BATCH][4];
  Block block;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = 0.f;
  block.load(in);
  while (true) {
    const uint32_t b = in.operand();
    [[maybe_unused]] bool large = false;
    if constexpr (FOLDED && !LOWERED) {
#pragma unroll
      for (int i = 0; i < Block::PAIRS; ++i) large |= too_large(block.pairs[i]);
      large = __any_sync(~0u, large);
    }
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      const int tile = batch * BATCH / 4, first = batch * BATCH % 4;
      if (tile >= Block::TILES && first == 0) block.load(in, tile);
      auto& a = fragments[batch % (PENDING + 1)];
#pragma unroll
      for (int step = 0; step < BATCH; ++step) {
#if TRANSPOSED
        block.fragments(in, tile * 4 + first + step, a[step]);
#else
        const auto& words = block.words[tile][first + step];
        const int group = (tile * 64 + (first + step) * 16) / GROUP_K;
        const uint32_t pair = block.pairs[IN_PARTS ? 0 : group];
        if constexpr (IN_PARTS) {
          block.parts[group].dequantize_parts(words, a[step]);
        } else if constexpr (FOLDED) {
          dequantize_scaled(words, fold(pair), a[step]);
        } else {
          dequantize(words, a[step]);
          if constexpr (SCALING == WEIGHT) scale_weights(pair, a[step]);
        }
#endif
      }
      if (FOLDED && large) {  // again, without what overflows
#pragma unroll
        for (int step = 0; step < BATCH; ++step) {
          dequantize(block.words[tile][first + step], a[step]);
          scale_weights(block.scales((tile * 64 + (first + step) * 16) / GROUP_K), a[step]);
        }
      }
      multiply<BATCH>(a, b + tile * (BOX_BYTES >> 4) + first * 2, acc);
      if (batch == BATCHES - 1) {
        in.advance();
        if (--blocks > 0) block.load(in);
      }
      // The next batch's fragments are free and, from batch PENDING - 1 on, the last stage.
      wait_batches<PENDING>();
      if (batch == PENDING - 1) in.release();
    }
    if (blocks == 0) break;
  }
  wait_batches<0>(acc);
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

// Sums of two neighbouring rows of x; EXPERTS: which may begin at any.
__device__ inline float2 load_sums(uint32_t address) {
  if constexpr (EXPERTS) return make_float2(load_shared<float>(address), load_shared<float>(address + 4));
  return load_shared<float2>(address);
}

__device__ inline void add_period(const Period& p, Accumulator& acc, Accumulator& sum) {
  fence(acc);
#pragma unroll
  for (int j = 0; j < TILE_N / 8; ++j) {
    float2 s = make_float2(0.f, 0.f);
    if constexpr (ZERO_TYPE != NONE) s = load_sums(p.sums + j * 8 * 4);
    sum[4 * j] = fmaf(p.scale.x, less_zero(acc[4 * j], p.zero.x, s.x), sum[4 * j]);
    sum[4 * j + 1] = fmaf(p.scale.x, less_zero(acc[4 * j + 1], p.zero.x, s.y), sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(p.scale.y, less_zero(acc[4 * j + 2], p.zero.y, s.x), sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(p.scale.y, less_zero(acc[4 * j + 3], p.zero.y, s.y), sum[4 * j + 3]);
  }
}

// SUM: a chain of sums for each period, whose end is waited for. Scales of GROUP 0 are in `period` already.
// The tile's sums of x begin at `first_sum` in a row of them.
__device__ inline void add_periods(Reader& in, int blocks, int first_sum, Period period, Accumulator& sum) {
  Fragments a[2];
  Accumulator acc;
  const int column = threadIdx.x % 4 * 2 + first_sum;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) sum[i] = 0.f;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
  bool pending = false;
  const auto finish = [&] {
    wait_batches<0>();
    if (pending) add_period(period, acc, sum);
    scale = GMMA::ScaleOut::Zero;
  };
#pragma unroll 1  // the compiler else repeats the first block, and ptxas may wait after every product
  for (; blocks > 0; --blocks) {
    const uint32_t b = in.operand(), extra = in.extras();
    in.wait_full();
    const auto begin_period = [&](int k) {
      if constexpr (GROUP != 0) {
        const uint32_t row = in.pairs + k / GROUP_K * WARPGROUP_M;
        period.scale = load_pair<SCALE_TYPE>(extra + row * SCALE_ITEM);
        if constexpr (ZERO_TYPE != NONE) {
          period.zero = over_factor(load_pair<ZERO_TYPE>(extra + ZEROS_AT + row * ZERO_ITEM));
        }
      }
      period.sums = extra + SUMS_AT + (k / PERIOD * SUM_COLUMNS + column) * 4;
    };
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      // Two tiles of one period are both under way: the first one's fragments are free again once it has
      // retired.
      if (PERIOD == 128 && tile == 0) wait_batches<1>();
      Words words;
      load_words(in.tile(tile), words);
#pragma unroll
      for (int step = 0; step < 4; ++step) dequantize(words[step], a[tile][step]);
      if (tile == 0 || PERIOD < 128) {
        finish();
        if (tile == 0) in.release();
        begin_period(tile * 64);
      }
      const uint32_t b_tile = b + tile * (BOX_BYTES >> 4);
      if constexpr (PERIOD < 64) {
        constexpr int STEPS = PERIOD / 16;
#pragma unroll
        for (int step = 0; step < 4; step += STEPS) {
          if (step > 0) {
            pending = true;
            finish();
            begin_period(tile * 64 + step * 16);
          }
          multiply<STEPS>(a[tile] + step, b_tile + step * 2, acc, scale);
        }
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

// ---- kernels ---------------------------------------------------------------------------------------------

struct Loop {
  // The first M_WARPGROUPS of the producer's warps copy the weights of a warpgroup each, one sums of x, and
  // from X_WARP on one box of x each.
  static constexpr int PRODUCERS = 4, SUMS_WARP = 1, X_WARP = 2, BARRIERS = SPARE + 1;
  static constexpr bool CROWDED = WARPGROUPS == 2 && CTAS_PER_SM == 2;
  static constexpr int FEW = EXPERTS ? 40 : 24;  // a producer that finds the groups' tiles has more to do
  static constexpr int PRODUCER_REGS = WARPGROUPS == 4 ? 64 : CROWDED ? 48 : CTAS_PER_SM == 2 ? 56 : FEW;
  static constexpr int MANY = CTAS_PER_SM == 3 ? 120 : EXPERTS ? 232 : 240;
  static constexpr int CONSUMER_REGS = WARPGROUPS == 4 ? 104 : CROWDED ? 96 : CTAS_PER_SM == 2 ? 192 : MANY;
  const Weight weight;
  // Sums of x over PERIOD k: [k blocks * SUM_ROWS][tiles_n * TILE_N], or rows of x with EXPERTS. With
  // FACTORS, factors of groups.
  const float* sums;

  __device__ void produce(const Kernel& kernel, const TensorMap& x_map, int warp) const {
    if constexpr (PREPARED) wait_on_dependent_grids();
    const Schedule& g = kernel.g;
    const uint64_t hint = weight_hint(g);
    const bool has_weight = warp < M_WARPGROUPS, has_x = warp >= X_WARP, has_sums = warp == SUMS_WARP;
    const int bytes = (has_weight ? WEIGHT_BYTES : 0) + (has_x ? BOX_BYTES : 0) + (has_sums ? SUMS_BYTES : 0);
    fill_stages(kernel, bytes, [&](const Place& at, int block, int stage, uint64_t* full) {
      if (has_weight) copy_weight(kernel, weight, at, block, warp, stage, full, hint);
      if (has_x) {
        uint8_t* to = kernel.stages + stage * STAGE_BYTES + (warp - X_WARP) * BOX_BYTES;
        const int k = block * BLOCK_K + (warp - X_WARP) * 64;
        load_tile(&x_map, full, EVICT_NORMAL, to, k, at.first_row());
      }
      if (SUM_ROWS > 0 && has_sums) {
#pragma unroll 1
        for (int i = 0; i < SUM_ROWS; ++i) {
          copy_bulk(kernel.address + EXTRAS_AT + stage * EXTRA_BYTES + SUMS_AT + i * SUM_COLUMNS * 4,
                    sums + at.sums(g, block * SUM_ROWS + i), SUM_COLUMNS * 4, shared_address(full),
                    EVICT_NORMAL);
        }
      }
    });
  }

  __device__ void consume(const Kernel& kernel, int warp) const {
    const Schedule& g = kernel.g;
    const Role role(warp, threadIdx.x, 0);
    Reader in(kernel, role);
    if constexpr (FACTORS) wait_on_dependent_grids();
    for (int index = 0; index < PIECES; ++index) {
      const Piece piece = piece_of(g, index);
      if (piece.begin >= piece.end) break;
      Accumulator acc;
      Period channel = {};
      const Place at = place_of(g, piece.tile, 0);
      if constexpr (GROUP == 0 && !TRANSPOSED) {
        const size_t row = role.channel(g, at);
        channel.scale = load_pair<SCALE_TYPE>(weight.scale + row * SCALE_ITEM);
        if constexpr (ZERO_TYPE != NONE) {
          channel.zero = over_factor(load_pair<ZERO_TYPE>(weight.zero + row * ZERO_ITEM));
        }
      }
      [[maybe_unused]] float factor = 1.f;
#if TRANSPOSED
      if constexpr (FACTORS) {
        factor = __ldcg(sums + group_of(at.m_tile(g, role.m_warpgroup), role.warp % 4));
        in.inverse = 1.f / factor;
      }
#endif
      if constexpr (SCALING == SUM) {
        add_periods(in, role.blocks(piece), at.first_sum(), channel, acc);
      } else {
        add_blocks(in, role.blocks(piece), acc);
      }
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) {
        if constexpr (SCALING == CHANNEL) acc[i] *= i / 2 % 2 ? channel.scale.y : channel.scale.x;
        if constexpr (!SPLIT) acc[i] *= FACTOR;
        if constexpr (LOWERED) acc[i] *= 256.f;
        if constexpr (FACTORS) acc[i] *= factor;
      }
      if constexpr (CHANNEL_SCALE && !TRANSPOSED) scale_channels(weight.channel, role.channel(g, at), acc);
      store_piece(kernel, piece, at, role, acc);
    }
  }
};

#if EXPERTS
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args args, const int* sizes,
             const int* offset, const uint8_t* words, const uint8_t* scale, const uint8_t* zero,
             const float* sums, Output* out, float* partials CHANNEL_PARAMETER EPILOGUE_PARAMETERS) {
  __shared__ Tiles tiles;
  if (threadIdx.x < 32) find_tiles(args, sizes, offset, tiles);
  run(Loop{{words, scale, zero, CHANNEL_ARGUMENT}, sums}, x_map, Schedule{args, tiles},
      DESTINATION_OF_PARAMETERS, partials);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args g, const uint8_t* words,
             const uint8_t* scale, const uint8_t* zero, const float* sums, Output* out,
             float* partials CHANNEL_PARAMETER EPILOGUE_PARAMETERS) {
  run(Loop{{words, scale, zero, CHANNEL_ARGUMENT}, sums}, x_map, g, DESTINATION_OF_PARAMETERS, partials);
}
#endif

#if X_E4M3
#include <cuda_fp8.h>
using Source = __nv_fp8_e4m3;
#else
using Source = Element;
#endif

// A warp copies 128 k of a row of x to rows that TMA can load, and adds them up by periods. Rows beyond x
// have sums of zero.
extern "C" __global__ void __launch_bounds__(128)
    KERNEL(_prepare)(const __grid_constant__ PrepareArgs g, const Source* x, Element* copy, float* sums) {
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
  if constexpr (SUM_ROWS > 0) {
#pragma unroll
    for (int step = 1; step < PERIOD / 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane % (PERIOD / 4) == 0) {
      sums[size_t(block * SUM_ROWS + lane / (PERIOD / 4)) * g.padded_rows + row] = sum;
    }
  }
  fence_async_global();  // TMA reads what was stored here
}
