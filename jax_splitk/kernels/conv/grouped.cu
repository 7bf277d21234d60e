// Grouped convolutions for few channels per group: out[o, k] = sum over taps and channels c of k's group of
// x[i, c] w[tap, c, k], where o * DOWN - PAD + tap * DILATION = i * UP along each axis, and one of DOWN and
// UP is 1: a forward pass with strides, or the gradient of an input with strides (whose taps are MIRRORED).
//
// Words. Unit: 16 neighbouring channels, the MMA's k, and two of its n of 8. Bundle: the fewest groups whose
// channels are whole units on both sides; a unit of the output is summed over all units of the input of its
// bundle, with zeros as the weights between groups. Strip: 16 pixels, the MMA's m. Block of rows (of
// columns): UP of them, for which the same row (column) of x comes first: block b begins at b * UP + OFFSET.
//
// A thread block has IN_BLOCK channels, and slides down planes of images: a step is the x that one more block
// of rows needs of a plane, STEP_ROWS rows of IMAGES images, as one TMA box and one stage of the pipeline. A
// warp has the same strips and units of the output from the first step to the last: it keeps the sums of the
// SLOTS blocks of rows that a step reaches in registers, so that each row of x is read once for all rows of
// taps; for each plane of taps it is read again.
//
// Infinities and NaNs reach other groups of their bundle through the zeros. So a warp that has stored what is
// not finite computes that anew, without the MMA.
//
// Roles: the last warp is the producer (one thread issues TMA), the others are consumers. `empty` has an
// arrival of each of these after its last ldmatrix. The weights are in shared memory, in the order of the
// MMA's registers; RESIDENT: a warp has its own in registers.
//
// Macros: ELEMENT, OUT, CTAS_PER_SM, IN_CHANNELS, OUT_CHANNELS, GROUP_IN, GROUP_OUT (of a group), BUNDLE_IN,
// BUNDLE_OUT (channels), BUNDLES (of the block), MIRRORED; of d, h and w INPUT, OUTPUT, KERNEL, DOWN, UP,
// DILATION, PAD; of h and w BASE (the first block of rows that reaches the output), OFFSET; BLOCKS_H;
// TILES_H, TILES_W (of an image); STEP_ROWS, X_WIDTH (of a box), STAGE_BYTES; the Config's, but `workers`,
// which is the grid's y.

#include "device/output.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "structs.cuh"

using Element = TypeOf<ELEMENT>::type;

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int IN_UNITS = BUNDLE_IN / 16, OUT_UNITS = BUNDLE_OUT / 16;
constexpr int WARP_BUNDLES = UNITS > OUT_UNITS ? UNITS / OUT_UNITS : 1;
constexpr int WARP_OUT = UNITS / WARP_BUNDLES;  // units of a bundle that a warp has
constexpr int JOBS = BUNDLES * OUT_UNITS / UNITS;
constexpr int PIXELS = IMAGES * COLUMNS;
constexpr int WARPS = JOBS * ((PIXELS + 16 * STRIPS - 1) / (16 * STRIPS));  // consumers
constexpr int THREADS = 32 * (WARPS + 1);

constexpr int REACH_H = (KERNEL_H - 1) * DILATION_H, REACH_W = (KERNEL_W - 1) * DILATION_W;
constexpr int LEAD = REACH_H / (DOWN_H * UP_H);  // blocks of rows whose x reaches into a tile from before it
constexpr int LEFT = UP_W > 1 ? REACH_W / UP_W : 0;
constexpr int SLOTS = LEAD + 1;
constexpr int X_PIXEL = IN_BLOCK * 2;  // bytes
constexpr int BOX_BYTES = IMAGES * STEP_ROWS * X_WIDTH * X_PIXEL;
constexpr bool MIXED = GROUP_IN < BUNDLE_IN;  // whether there are products across groups

// Which row of a step tap row r meets; of which of the blocks of rows it is a part, and of which of its rows.
__device__ constexpr int row_of(int r) { return r * DILATION_H % DOWN_H; }
__device__ constexpr int slot_of(int r) {
  return UP_H > 1 ? (REACH_H - r * DILATION_H) / UP_H : LEAD - r * DILATION_H / DOWN_H;
}
__device__ constexpr int phase_h(int r) { return UP_H > 1 ? (REACH_H - r * DILATION_H) % UP_H : 0; }

// Which column of x tap s meets for the first block of columns, and in which of its columns.
__device__ constexpr int column_of(int s) {
  return UP_W > 1 ? LEFT - (REACH_W - s * DILATION_W) / UP_W : s * DILATION_W;
}
__device__ constexpr int phase_w(int s) { return UP_W > 1 ? (REACH_W - s * DILATION_W) % UP_W : 0; }

// A tile's first image, its plane, its first block of rows and block of columns.
struct Tile {
  int image, plane, block, column;
  __device__ explicit Tile(int index) {
    column = BASE_W + index % TILES_W * COLUMNS;
    index /= TILES_W;
    block = BASE_H + index % TILES_H * ROWS;
    index /= TILES_H;
    plane = index % OUTPUT_D;
    image = index / OUTPUT_D * IMAGES;
  }
  __device__ int rows() const { return min(ROWS, BASE_H + BLOCKS_H - block); }
};

// x's plane that plane t of taps meets, -1 for none.
__device__ inline int input_plane(const Tile& tile, int t) {
  const int at = tile.plane * DOWN_D - PAD_D + t * DILATION_D;
  return at >= 0 && at % UP_D == 0 && at / UP_D < INPUT_D ? at / UP_D : -1;
}

// First channels of a thread block.
__device__ inline int first_in() { return blockIdx.x * (BUNDLES * BUNDLE_IN); }
__device__ inline int first_out() { return blockIdx.x * (BUNDLES * BUNDLE_OUT); }

// ---- producer ---------------------------------------------------------------------------------------------

__device__ inline void produce(const TensorMap& x_map, const Args& g, uint32_t stages,
                               Pipeline<STAGES>& pipeline) {
  Position at;
#pragma unroll 1
  for (int index = blockIdx.y; index < g.tiles; index += gridDim.y) {
    const Tile tile(index);
    const int column = UP_W > 1 ? tile.column - LEFT : tile.column * DOWN_W - PAD_W;
    const int row =
        UP_H > 1 ? tile.block : (tile.block + LEAD) * DOWN_H - PAD_H;  // of the tile's first block
#pragma unroll 1
    for (int block = -LEAD; block < tile.rows(); ++block) {
#pragma unroll 1
      for (int t = 0; t < KERNEL_D; ++t) {
        const int plane = input_plane(tile, t);
        if (plane < 0) continue;
        pipeline.wait_empty(at);
        uint64_t* const full = pipeline.expect(at, BOX_BYTES);
        load_box(x_map, full, stages + at.stage * STAGE_BYTES, first_in(), column, row + block * DOWN_H,
                 plane, tile.image);
        at.advance(STAGES);
      }
    }
  }
}

// ---- weights ----------------------------------------------------------------------------------------------

// A lane's B registers of 16 channels of the input and a unit of the output: of two MMAs. Column n of MMA h
// is channel 4 * (n / 2) + 2 * h + n % 2, so that a lane has sums of 4 neighbouring channels.
struct Weights {
  uint32_t v[2][2];
};

__device__ inline int weight_index(int tap, int in, int out) {
  return MIRRORED ? ((TAPS - 1 - tap) * GROUP_OUT + out % GROUP_OUT) * IN_CHANNELS + in
                  : (tap * GROUP_IN + in % GROUP_IN) * OUT_CHANNELS + out;
}

// Where those of a lane lie, from the block's first on.
__device__ constexpr int weights_offset(int unit, int tap, int in_unit) {
  return ((unit * TAPS + tap) * IN_UNITS + in_unit) * int(32 * sizeof(Weights));
}

// Puts the weights in their order, 8 neighbouring ones at a time: of two channels of the input and 8 of the
// output, or where they are mirrored of 8 of the input and one of the output.
__device__ inline void stage_weights(const Element* __restrict__ w, uint32_t weights) {
  constexpr int PIECES = MIRRORED ? 32 : 16, WORDS = MIRRORED ? 4 : 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < BUNDLES * OUT_UNITS * TAPS * IN_UNITS * PIECES; i += WARPS * 32) {
    const int each = i / PIECES, unit = each / (TAPS * IN_UNITS), tap = each / IN_UNITS % TAPS,
              at = i % PIECES;
    const int c0 = MIRRORED ? at / 16 * 8 : at % 8 * 2, k0 = MIRRORED ? at % 16 : at / 8 * 8;  // of the unit
    const int in = first_in() + (unit / OUT_UNITS * IN_UNITS + each % IN_UNITS) * 16 + c0;
    const int out = first_out() + unit * 16 + k0;
    uint4 first = {}, second = {};
    if (in < IN_CHANNELS && out < OUT_CHANNELS) {
      first = *reinterpret_cast<const uint4*>(w + weight_index(tap, in, out));
      if (!MIRRORED) second = *reinterpret_cast<const uint4*>(w + weight_index(tap, in + 1, out));
    }
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      const int c = MIRRORED ? j * 2 : 0, k = MIRRORED ? 0 : j;
      uint32_t word = (&first.x)[MIRRORED ? j : j / 2];
      if (!MIRRORED) {
        const uint32_t other = (&second.x)[j / 2];
        word = j % 2 ? word >> 16 | (other & 0xffff0000u) : (word & 0xffffu) | other << 16;
      }
      if (MIXED) {
        const int group = (out + k) / GROUP_OUT;
        if ((in + c) / GROUP_IN != group) word &= 0xffff0000u;
        if ((in + c + 1) / GROUP_IN != group) word &= 0xffffu;
      }
      const int lane = (c0 + c) % 8 / 2 + ((k0 + k) / 4 * 2 + (k0 + k) % 2) * 4;
      const int reg = (k0 + k) / 2 % 2 * 2 + (c0 + c) / 8;
      store_shared(weights + (each * 32 + lane) * int(sizeof(Weights)) + reg * 4, word);
    }
  }
}

// ---- consumer ---------------------------------------------------------------------------------------------

using Sums =
    float[UP_H][UP_W][UNITS][STRIPS][2][4];  // of a block of rows; the last two of the MMAs of a unit

struct Job {
  int unit, pixel;  // the first ones
  __device__ explicit Job(int warp) : unit(warp % JOBS * UNITS), pixel(warp / JOBS * STRIPS * 16) {}
};

// A lane's rows of A in a stage: of the row of a step, tap column and strip.
struct Cursor {
  uint32_t x[STEP_ROWS][KERNEL_W][STRIPS];
  __device__ explicit Cursor(const Job& job) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      const int m = min(job.pixel + i * 16 + lane % 16, PIXELS - 1), image = m / COLUMNS;
#pragma unroll
      for (int k = 0; k < STEP_ROWS; ++k) {
#pragma unroll
        for (int s = 0; s < KERNEL_W; ++s) {
          const int column = (m - image * COLUMNS) * DOWN_W + column_of(s);
          x[k][s][i] = swizzled<X_PIXEL>((image * STEP_ROWS + k) * X_WIDTH + column,
                                         job.unit / OUT_UNITS * IN_UNITS * 2 + lane / 16);
        }
      }
    }
  }
};

// The weights of a warp.
template <bool IN_REGISTERS>
struct WarpWeights {
  uint32_t address;
  __device__ explicit WarpWeights(uint32_t at) : address(at) {}
  __device__ Weights operator()(int unit, int tap, int in_unit) const {
    return load_shared<Weights>(address + weights_offset(unit, tap, in_unit));
  }
};
template <>
struct WarpWeights<true> {
  Weights each[UNITS][TAPS][IN_UNITS];
  __device__ explicit WarpWeights(uint32_t at) {
#pragma unroll
    for (int i = 0; i < UNITS * TAPS * IN_UNITS; ++i)
      (&each[0][0][0])[i] = load_shared<Weights>(at + i * int(32 * sizeof(Weights)));
  }
  __device__ const Weights& operator()(int unit, int tap, int in_unit) const {
    return each[unit][tap][in_unit];
  }
};

// Adds the products of a step with plane t of taps; its first block of rows has its sums in slot `first`.
__device__ inline void multiply(const Cursor& cursor, uint32_t stage, const WarpWeights<RESIDENT>& weights,
                                int t, int first, Sums (&sums)[SLOTS]) {
#pragma unroll
  for (int k = 0; k < STEP_ROWS; ++k) {
#pragma unroll
    for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
      for (int in = 0; in < WARP_BUNDLES * IN_UNITS; ++in) {
        const int bundle = in / IN_UNITS;
        uint32_t a[STRIPS][4];
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) load_matrices((stage + cursor.x[k][s][i]) ^ (in << 5), a[i]);
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
          if (row_of(r) != k) continue;
#pragma unroll
          for (int u = 0; u < WARP_OUT; ++u) {
            const int unit = bundle * WARP_OUT + u;
            const Weights b = weights(unit, (t * KERNEL_H + r) * KERNEL_W + s, in % IN_UNITS);
            auto& to = sums[(first + slot_of(r)) % SLOTS][phase_h(r)][phase_w(s)][unit];
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) {
#pragma unroll
              for (int h = 0; h < 2; ++h) mma_m16n8k16<Element>(to[i][h], a[i], b.v[h]);
            }
          }
        }
      }
    }
  }
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// Where a lane's sums go: of each strip rows l/4 and l/4 + 8 of the MMA.
struct Target {
  Output* to[STRIPS * 2];  // the first row of the next block
  int column[STRIPS * 2];  // of the output, the first of the block; beyond it where there is no such pixel

  __device__ Target(const Job& job, const Tile& tile, int images, Output* out) {
#pragma unroll
    for (int i = 0; i < STRIPS * 2; ++i) {
      const int m = job.pixel + i * 8 + threadIdx.x % 32 / 4, image = tile.image + m / COLUMNS;
      const int first = (tile.column + m % COLUMNS) * UP_W + OFFSET_W;
      const long long plane = (long long)image * OUTPUT_D + tile.plane;
      const long long row = plane * OUTPUT_H + tile.block * UP_H + OFFSET_H;
      to[i] = out + (row * OUTPUT_W + first) * OUT_CHANNELS;
      column[i] = m < PIXELS && image < images ? first : OUTPUT_W;
    }
  }
  __device__ void advance() {
#pragma unroll
    for (int i = 0; i < STRIPS * 2; ++i) to[i] += UP_H * OUTPUT_W * OUT_CHANNELS;
  }
};

// 4 neighbouring values as one access.
__device__ inline void store_values(Output* to, float v0, float v1, float v2, float v3) {
  using Bits = conditional_t<sizeof(Output) == 2, uint2, uint4>;
  const Vec<Output, 4> result = converted<Output>({v0, v1, v2, v3});
  *reinterpret_cast<Bits*>(to) = reinterpret_cast<const Bits&>(result);
}

// Stores a block of rows, the first of which is `row`. `not_finite` becomes NaN where one of its sums is not
// finite.
__device__ inline void store(const Sums& sums, const Target& target, int row, int channel,
                             float& not_finite) {
#pragma unroll
  for (int a = 0; a < UP_H; ++a) {
    if (UP_H > 1 && unsigned(row + a) >= OUTPUT_H) continue;
#pragma unroll
    for (int i = 0; i < STRIPS * 2; ++i) {
#pragma unroll
      for (int b = 0; b < UP_W; ++b) {
        if (unsigned(target.column[i] + b) >= OUTPUT_W) continue;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
          if (OUT_CHANNELS % (BUNDLES * BUNDLE_OUT) && channel + u * 16 >= OUT_CHANNELS) continue;
          const auto& v = sums[a][b][u][i / 2];
          const int at = i % 2 * 2;
          if constexpr (MIXED) {
#pragma unroll
            for (int h = 0; h < 2; ++h) not_finite = fmaf(v[h][at + 1], 0.f, fmaf(v[h][at], 0.f, not_finite));
          }
          store_values(target.to[i] + (a * OUTPUT_W + b) * OUT_CHANNELS + u * 16, v[0][at], v[0][at + 1],
                       v[1][at], v[1][at + 1]);
        }
      }
    }
  }
}

// The sum of a channel of the tile's plane of an image, from memory.
__device__ inline float sum_of(const Element* __restrict__ x, const Element* __restrict__ w, const Tile& tile,
                               int image, int row, int column, int channel) {
  const int group = channel / GROUP_OUT;
  float sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < TAPS; ++tap) {
    const int plane = input_plane(tile, tap / (KERNEL_H * KERNEL_W));
    const int h = row * DOWN_H - PAD_H + tap / KERNEL_W % KERNEL_H * DILATION_H;
    const int v = column * DOWN_W - PAD_W + tap % KERNEL_W * DILATION_W;
    if (plane < 0 || h < 0 || h % UP_H || h / UP_H >= INPUT_H) continue;
    if (v < 0 || v % UP_W || v / UP_W >= INPUT_W) continue;
    const long long line = ((long long)image * INPUT_D + plane) * INPUT_H + h / UP_H;
    const long long pixel = line * INPUT_W + v / UP_W;
#pragma unroll 1
    for (int c = group * GROUP_IN; c < (group + 1) * GROUP_IN; ++c)
      sum = fmaf(float(x[pixel * IN_CHANNELS + c]), float(w[weight_index(tap, c, channel)]), sum);
  }
  return sum;
}

// Computes anew what the lane has stored of a tile and is not finite.
__device__ inline void repair(const Element* x, const Element* w, const Job& job, const Tile& tile,
                              int images, int first_channel, Output* out) {
  constexpr int VALUES = UP_W * UNITS * 4, EACH = STRIPS * 2 * VALUES;  // of a pixel's columns, of a row
#pragma unroll 1
  for (int i = 0; i < tile.rows() * UP_H * EACH; ++i) {
    const int m = job.pixel + i % EACH / VALUES * 8 + threadIdx.x % 32 / 4, image = tile.image + m / COLUMNS;
    const int row = tile.block * UP_H + OFFSET_H + i / EACH;
    const int column = (tile.column + m % COLUMNS) * UP_W + OFFSET_W + i % VALUES / (UNITS * 4);
    const int channel = first_channel + i / 4 % UNITS * 16 + i % 4;
    if (m >= PIXELS || image >= images || unsigned(row) >= OUTPUT_H || unsigned(column) >= OUTPUT_W) continue;
    if (channel >= OUT_CHANNELS) continue;
    const long long line = ((long long)image * OUTPUT_D + tile.plane) * OUTPUT_H + row;
    Output* const to = out + (line * OUTPUT_W + column) * OUT_CHANNELS + channel;
    const float value = float(*to);
    if (value - value != 0.f) convert(sum_of(x, w, tile, image, row, column, channel), *to);
  }
}

__device__ inline void consume(const Element* x, const Element* w, const Args& g, uint32_t stages,
                               uint32_t staged_weights, Pipeline<STAGES>& pipeline, int warp, Output* out) {
  const int lane = threadIdx.x % 32;
  const Job job(warp);
  const Cursor cursor(job);
  const WarpWeights<RESIDENT> weights(staged_weights + weights_offset(job.unit, 0, 0) +
                                      lane * int(sizeof(Weights)));
  const int channel = first_out() + job.unit * 16 + lane % 4 * 4;
  Position at;
#pragma unroll 1
  for (int index = blockIdx.y; index < g.tiles; index += gridDim.y) {
    const Tile tile(index);
    Target target(job, tile, g.images, out + channel);
    float not_finite = 0;
    Sums sums[SLOTS] = {};
#pragma unroll 1
    for (int first = -LEAD; first < tile.rows(); first += SLOTS) {
#pragma unroll
      for (int j = 0; j < SLOTS; ++j) {
        if (first + j >= tile.rows()) break;
#pragma unroll
        for (int t = 0; t < KERNEL_D; ++t) {
          if (input_plane(tile, t) < 0) continue;
          pipeline.wait_full(at);
          multiply(cursor, stages + at.stage * STAGE_BYTES, weights, t, j, sums);
          __syncwarp();
          if (lane == 0) pipeline.release(at.stage);
          at.advance(STAGES);
        }
        if (first + j >= 0) {
          store(sums[j], target, (tile.block + first + j) * UP_H + OFFSET_H, channel, not_finite);
          target.advance();
        }
#pragma unroll
        for (int i = 0; i < int(sizeof(Sums) / sizeof(float)); ++i) reinterpret_cast<float*>(&sums[j])[i] = 0;
      }
    }
    if (MIXED && not_finite != 0.f) repair(x, w, job, tile, g.images, channel, out);
  }
}

// Grid: x over blocks of channels, y over workers.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    grouped(const __grid_constant__ TensorMap x_map, const Element* __restrict__ x,
            const Element* __restrict__ w, const __grid_constant__ Args g, Output* out) {
  extern __shared__ uint8_t raw[];
  __shared__ Pipeline<STAGES> pipeline;
  const uint32_t stages = aligned_address(raw), weights = stages + STAGES * STAGE_BYTES;
  const int warp = warp_index();
  if (warp == WARPS && elect_one()) {
    pipeline.init(1, WARPS);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp == WARPS) {
    if (elect_one()) produce(x_map, g, stages, pipeline);
    return;
  }
  stage_weights(w, weights);
  sync_threads<WARPS * 32, 1>();
  consume(x, w, g, stages, weights, pipeline, warp, out);
}
