// The consumers of stream.cu, which decode a weight and multiply it by X.

#include "quantized/stream_load.cuh"

#if TABLE
#include "quantized/normal_float_table.cuh"
#endif

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
