// Grouped convolutions for few channels per group: out[o, k] = sum over taps and channels c of k's group of
// x[i, c] w[tap, c, k], where o * DOWN - PAD + tap * DILATION = i * UP along each axis, and one of DOWN and
// UP is 1: a forward pass with strides, or the gradient of an input with strides (whose taps are MIRRORED).
//
// Words. Unit: 16 neighbouring channels, the MMA's k, and two of its n of 8. Bundle: the fewest groups whose
// channels are whole units on both sides; a unit of the output is summed over all units of the input of its
// bundle, with zeros as the weights between groups. Where groups are of 8 channels or fewer, MMAs have a k of
// 8 (HALVES), and half of the products. Strip: 16 pixels, the MMA's m. Block of rows (of columns): UP of
// them, for which the same row (column) of x comes first: block b begins at b * UP + OFFSET.
//
// A thread block has IN_BLOCK channels, and slides down planes of images: a step is the x that one more block
// of rows needs of a plane, STEP_ROWS rows of IMAGES images, as one TMA box and one stage of the pipeline. A
// warp has the same strips and units of the output from the first step to the last: it keeps the sums of the
// SLOTS blocks of rows that a step reaches in registers, so that each row of x is read once for all rows of
// taps; for each plane of taps it is read again.
//
// Infinities and NaNs reach other groups of their bundle through the zeros. So a warp whose results are not
// finite computes these anew, without the MMA.
//
// Roles: the last warp is the producer (one thread issues TMA), the others are consumers. `empty` has an
// arrival of each of these after its last ldmatrix. RESIDENT: a warp copies its weights to shared
// memory and then holds them in registers. If not, they stay in shared memory, in the order of registers.
//
// Results go through shared memory, in whole rows of the block's channels: a warp's own stores would touch 32
// bytes of many lines. Consumers meet once a block of rows; there are RESULTS sets of results. STORED: TMA
// stores a block of rows as one box, or, where it may begin before the output (UP), line by line, for a store
// at a negative coordinate is an illegal instruction. A line begins anywhere, and is to lie at a multiple of
// 128 bytes for TMA; where pixels have fewer, threads copy it.
//
// Bias and activation of an epilogue (device/epilogue.cuh) are applied while results are put into shared
// memory.
//
// Macros: ELEMENT, OUT, CTAS_PER_SM, IN_CHANNELS, OUT_CHANNELS, GROUP_IN, GROUP_OUT (of a group), BUNDLE_IN,
// BUNDLE_OUT (channels), BUNDLES (of the block), MIRRORED; of d, h and w INPUT, OUTPUT, KERNEL, DOWN, UP,
// DILATION, PAD; of h and w BASE (the first block of rows that reaches the output), OFFSET; BLOCKS_H;
// TILES_H, TILES_W (of an image); STEP_ROWS, X_WIDTH (of a box), STAGE_BYTES; WEIGHT_BOX (channels) and
// WEIGHT_BOX_ROWS of a box of weights, WEIGHT_COLUMN_BOXES, WEIGHT_ROW_BOXES; OUT_BOX (channels) and
// RESULT_BOX_BYTES of a box of results, RESULTS (sets of them), STORED, SKIPPED; the Config's, but `workers`,
// which is the grid's y.

#include "device/epilogue.cuh"
#include "device/skeleton.cuh"
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
// Whether an MMA has 8 channels of the input: those of 8 of the output are among the same 8.
constexpr bool HALVES = GROUP_IN == GROUP_OUT && 8 % GROUP_IN == 0;
constexpr bool MIXED = GROUP_IN < (HALVES ? 8 : BUNDLE_IN);  // whether there are products across groups

constexpr int WEIGHT_BOX_BYTES = WEIGHT_BOX_ROWS * WEIGHT_BOX * 2;
constexpr int WEIGHT_COLUMN_BYTES = WEIGHT_ROW_BOXES * WEIGHT_BOX_BYTES;
constexpr int WEIGHT_BOXES = WEIGHT_COLUMN_BOXES * WEIGHT_ROW_BOXES;
constexpr int RESULT_BOXES = BUNDLES * BUNDLE_OUT / OUT_BOX;
constexpr int RESULT_PIXEL = OUT_BOX * int(sizeof(Output));  // bytes
constexpr int RESULT_BYTES = RESULT_BOXES * RESULT_BOX_BYTES;
enum { COPY, BOX, LINE };  // STORED
constexpr bool BY_TMA = STORED != COPY;

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

// A mask of two weights, of channels `in` and the next: those that are of the group of `out`.
__device__ inline uint32_t same_group(int in, int out) {
  const int group = out / GROUP_OUT;
  return (in / GROUP_IN == group ? 0xffffu : 0u) | ((in + 1) / GROUP_IN == group ? 0xffff0000u : 0u);
}

using Ring = Pipeline<STAGES, 1, WARPS>;

// ---- producer ---------------------------------------------------------------------------------------------

__device__ inline void produce(const TensorMap& x_map, const Args& g, uint32_t stages, Ring& pipeline) {
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

// A lane's B registers of 16 channels of the input and a unit of the output: of two MMAs, of neighbouring
// halves of the unit.
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

// Puts the weights in the order of registers, 8 neighbouring ones at a time: of two channels of the input and
// 8 of the output, or where they are mirrored of 8 of the input and one of the output.
__device__ inline void stage_weights(const Element* __restrict__ w, uint32_t weights) {
  constexpr int PIECES = MIRRORED ? 32 : 16, WORDS = MIRRORED ? 4 : 8;
#pragma unroll 1
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
      if (MIXED) word &= same_group(in + c, out + k);
      const int lane = (c0 + c) % 8 / 2 + (k0 + k) % 8 * 4, reg = (k0 + k) / 8 * 2 + (c0 + c) / 8;
      store_shared(weights + (each * 32 + lane) * int(sizeof(Weights)) + reg * 4, word);
    }
  }
}

// Loads the weights as they lie in memory: rows, of taps and of a group's channels of one side, of the
// block's channels of the other side, WEIGHT_BOX of them to a row of shared memory.
__device__ inline void load_weights(const TensorMap& w_map, uint64_t* full, uint32_t weights) {
  Barrier::arrive_and_expect_tx(full, WEIGHT_BOXES * WEIGHT_BOX_BYTES);
#pragma unroll 1
  for (int i = 0; i < WEIGHT_BOXES; ++i) {
    const int columns = i / WEIGHT_ROW_BOXES, rows = i % WEIGHT_ROW_BOXES;
    load_box(w_map, full, weights + columns * WEIGHT_COLUMN_BYTES + rows * WEIGHT_BOX_BYTES,
             (MIRRORED ? first_in() : first_out()) + columns * WEIGHT_BOX, rows * WEIGHT_BOX_ROWS);
  }
}

// The weights of a lane at one tap, between a unit of the block's output and a unit of its bundle's input.
__device__ inline Weights loaded_weights(uint32_t weights, int tap, int unit, int in_unit) {
  const int lane = threadIdx.x % 32;
  // Lanes 8i to 8i + 7 have the rows of register i: half i / 2 of the output, i % 2 of the input.
  const int half = MIRRORED ? lane / 16 : lane / 8 % 2, other = MIRRORED ? lane / 8 % 2 : lane / 16;
  const int in = unit / OUT_UNITS * IN_UNITS + in_unit;
  const int across = ((MIRRORED ? unit : in) * 2 + half) * 8 + lane % 8;  // a channel of the side in rows
  const int along = ((MIRRORED ? in : unit) * 2 + other) * 8;             // the first of 8 of the other
  const int row =
      MIRRORED ? (TAPS - 1 - tap) * GROUP_OUT + across % GROUP_OUT : tap * GROUP_IN + across % GROUP_IN;
  const uint32_t at = weights + along / WEIGHT_BOX * WEIGHT_COLUMN_BYTES +
                      swizzled<WEIGHT_BOX * 2>(row, along % WEIGHT_BOX / 8);
  Weights found;
  if (MIRRORED) {
    uint32_t v[4];
    load_matrices(at, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) found.v[i / 2][i % 2] = v[i];
  } else {
    load_matrices_trans(at, found.v[0][0], found.v[0][1], found.v[1][0], found.v[1][1]);
  }
  if constexpr (MIXED) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      found.v[i / 2][i % 2] &=
          same_group(in * 16 + i % 2 * 8 + lane % 4 * 2, unit * 16 + i / 2 * 8 + lane / 4);
  }
  return found;
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
  __device__ WarpWeights(uint32_t weights, int unit)
      : address(weights + weights_offset(unit, 0, 0) + threadIdx.x % 32 * int(sizeof(Weights))) {}
  __device__ Weights operator()(int unit, int tap, int in_unit) const {
    return load_shared<Weights>(address + weights_offset(unit, tap, in_unit));
  }
};
template <>
struct WarpWeights<true> {
  Weights each[UNITS][TAPS][IN_UNITS];
  __device__ WarpWeights(uint32_t weights, int unit) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
        for (int i = 0; i < IN_UNITS; ++i) each[u][tap][i] = loaded_weights(weights, tap, unit + u, i);
      }
    }
  }
  __device__ const Weights& operator()(int unit, int tap, int in_unit) const {
    return each[unit][tap][in_unit];
  }
};

// The products of 16 pixels with a half of a unit of the output: of its own 8 channels of the input alone
// where HALVES.
__device__ inline void add_products(float (&sums)[4], const uint32_t (&a)[4], const Weights& b, int half) {
  if constexpr (HALVES) {
    mma_m16n8k8<Element>(sums, a[half * 2], a[half * 2 + 1], b.v[half][half]);
  } else {
    mma_m16n8k16<Element>(sums, a, b.v[half]);
  }
}

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
              for (int h = 0; h < 2; ++h) add_products(to[i][h], a[i], b, h);
            }
          }
        }
      }
    }
  }
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// Which row of a block's results pixel m of the tile has: the first of its UP_H * UP_W.
__device__ inline int result_row(int m) {
  return UP_H * UP_W == 1 ? m : (m / COLUMNS * UP_H * COLUMNS + m % COLUMNS) * UP_W;
}

// Where 16 bytes of a row of results lie, of a unit of the block.
__device__ inline uint32_t result_at(int row, int unit, int chunk) {
  constexpr int CHUNKS = sizeof(Output);  // of a unit
  return unit * 16 / OUT_BOX * RESULT_BOX_BYTES +
         swizzled<RESULT_PIXEL>(row, unit * CHUNKS % (RESULT_PIXEL / 16) + chunk);
}

__device__ inline uint32_t packed(float v0, float v1) {
  const Vec<Output, 2> pair = converted<Output>({v0, v1});
  return reinterpret_cast<const uint32_t&>(pair);
}

// Puts a warp's sums of 16 pixels and a unit into rows of results, from `row` on of this lane's own.
__device__ inline void stage_strip(const float (&sums)[2][4], uint32_t results, int row, int below, int unit,
                                   [[maybe_unused]] const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32;
#if EPILOGUE
  float v[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int channel = first_out() + unit * 16 + h * 8 + lane % 4 * 2;
    float bias[2] = {};
    if (channel < OUT_CHANNELS) epilogue.load_bias(channel, bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[h][i] = BIAS == 0 ? sums[h][i] : sums[h][i] + bias[i % 2];
  }
  static_assert(RESIDUAL_TYPE < 0);
  finish({}, reinterpret_cast<float (&)[8]>(v));
#else
  const float (&v)[2][4] = sums;
#endif
  if constexpr (sizeof(Output) == 2) {
    store_matrices(results + result_at(row, unit, lane / 16),
                   {packed(v[0][0], v[0][1]), packed(v[0][2], v[0][3]), packed(v[1][0], v[1][1]),
                    packed(v[1][2], v[1][3])});
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = h * 2 + lane % 4 / 2, byte = lane % 2 * 8;
      store_shared(results + result_at(row, unit, chunk) + byte, make_float2(v[h][0], v[h][1]));
      store_shared(results + result_at(below, unit, chunk) + byte, make_float2(v[h][2], v[h][3]));
    }
  }
}

// A lane's rows of results, of each strip: the one whose address it gives, or that it has sums of, and in the
// latter case also the one 8 pixels on.
struct ResultRows {
  int row[STRIPS], below[STRIPS];
  __device__ explicit ResultRows(const Job& job) {
    const int lane = threadIdx.x % 32, first = sizeof(Output) == 2 ? lane % 16 : lane / 4;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      row[i] = result_row(job.pixel + i * 16 + first);
      below[i] = result_row(job.pixel + i * 16 + first + 8);
    }
  }
};

// Puts a block of rows into `results`; whether one of its sums is not finite.
__device__ inline bool stage_results(const Sums& sums, const ResultRows& rows, const Job& job,
                                     uint32_t results, const Epilogue& epilogue) {
  float not_finite = 0;  // or else NaN
#pragma unroll
  for (int a = 0; a < UP_H; ++a) {
#pragma unroll
    for (int b = 0; b < UP_W; ++b) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
          const auto& v = sums[a][b][u][i];
          if constexpr (MIXED) {
#pragma unroll
            for (int j = 0; j < 8; ++j) not_finite = fmaf(v[j / 4][j % 4], 0.f, not_finite);
          }
          constexpr int ROW = COLUMNS * UP_W;
          stage_strip(v, results, rows.row[i] + a * ROW + b, rows.below[i] + a * ROW + b, job.unit + u,
                      epilogue);
        }
      }
    }
  }
  return MIXED && not_finite != 0.f;
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

// Computes anew what the warp has put into `results` and is not finite, of the block of rows that begins at
// `first_row`.
__device__ inline void repair(const Element* x, const Element* w, const Job& job, const Tile& tile,
                              int images, int first_row, uint32_t results,
                              [[maybe_unused]] const Epilogue& epilogue) {
  using Bits = conditional_t<sizeof(Output) == 2, uint16_t, uint32_t>;
  constexpr int CHANNELS = UNITS * 16, STEPS = UP_H * UP_W;
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < STRIPS * 16 * STEPS * CHANNELS; i += 32) {
    const int c = i % CHANNELS, step = i / CHANNELS % STEPS, m = job.pixel + i / (CHANNELS * STEPS);
    const int a = step / UP_W, b = step % UP_W, image = tile.image + m / COLUMNS;
    const int row = first_row + a, column = (tile.column + m % COLUMNS) * UP_W + OFFSET_W + b;
    const int channel = first_out() + job.unit * 16 + c;
    if (m >= PIXELS || image >= images || unsigned(row) >= OUTPUT_H || unsigned(column) >= OUTPUT_W) continue;
    if (channel >= OUT_CHANNELS) continue;
    const int byte = c % 16 * int(sizeof(Output));
    const uint32_t at =
        results + result_at(result_row(m) + a * COLUMNS * UP_W + b, job.unit + c / 16, byte / 16) + byte % 16;
    const Bits bits = load_shared<Bits>(at);
    const float value = float(reinterpret_cast<const Output&>(bits));
    if (value - value == 0.f) continue;
    Output anew;
#if EPILOGUE
    convert(epilogue.finished_one(sum_of(x, w, tile, image, row, column, channel), channel), anew);
#else
    convert(sum_of(x, w, tile, image, row, column, channel), anew);
#endif
    store_shared(at, reinterpret_cast<const Bits&>(anew));
  }
}

// Stores a block of rows by TMA, which leaves out what is beyond the output, but not what is before it: lines
// before it are left out here, and of the first tile's lines the first SKIPPED pixels.
__device__ inline void store_results(const TensorMap& out_map, const TensorMap& first_map, const Tile& tile,
                                     int first_row, uint32_t results) {
  constexpr int LINES = STORED == LINE ? IMAGES * UP_H : 1;
  const bool is_first = SKIPPED && tile.column == BASE_W;
  const TensorMap* const map = is_first ? &first_map : &out_map;
  const int skipped = is_first ? SKIPPED : 0, column = tile.column * UP_W + OFFSET_W + skipped;
#pragma unroll
  for (int line = 0; line < LINES; ++line) {
    const int row = first_row + line % UP_H;
    if (STORED == LINE && row < 0) continue;
#pragma unroll
    for (int i = 0; i < RESULT_BOXES; ++i) {
      const uint32_t from = results + i * RESULT_BOX_BYTES + (line * COLUMNS * UP_W + skipped) * RESULT_PIXEL;
      store_tile(map, shared_pointer(from), first_out() + i * OUT_BOX, column, row, tile.plane,
                 tile.image + line / UP_H);
    }
  }
}

// Copies a block of rows, all consumers together, 16 bytes of a pixel to a lane.
__device__ inline void copy_results(Output* out, const Tile& tile, int images, int first_row,
                                    uint32_t results) {
  constexpr int EACH = 16 / sizeof(Output), CHUNKS = BUNDLES * BUNDLE_OUT / EACH, PIXELS_W = COLUMNS * UP_W;
#pragma unroll 2
  for (int i = threadIdx.x; i < IMAGES * UP_H * PIXELS_W * CHUNKS; i += WARPS * 32) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, channel = first_out() + chunk * EACH;
    const int image = tile.image + row / (UP_H * PIXELS_W), h = first_row + row / PIXELS_W % UP_H;
    const int v = tile.column * UP_W + OFFSET_W + row % PIXELS_W;
    if (image >= images || unsigned(h) >= OUTPUT_H || unsigned(v) >= OUTPUT_W || channel >= OUT_CHANNELS)
      continue;
    const long long pixel = (((long long)image * OUTPUT_D + tile.plane) * OUTPUT_H + h) * OUTPUT_W + v;
    const uint4 value = load_shared<uint4>(
        results + result_at(row, chunk / int(sizeof(Output)), chunk % int(sizeof(Output))));
    *reinterpret_cast<uint4*>(out + pixel * OUT_CHANNELS + channel) = value;
  }
}

__device__ inline void consume(const TensorMap& out_map, const TensorMap& first_map, const Element* x,
                               const Element* w, const Args& g, Output* out, const Epilogue& epilogue,
                               uint32_t stages, uint32_t staged_weights, uint32_t results, Ring& pipeline,
                               int warp) {
  const Job job(warp);
  const Cursor cursor(job);
  const ResultRows result_rows(job);
  const WarpWeights<RESIDENT> weights(staged_weights, job.unit);
  Position at;
  uint32_t result = 0;  // the set of results that is next
#pragma unroll 1
  for (int index = blockIdx.y; index < g.tiles; index += gridDim.y) {
    const Tile tile(index);
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
          pipeline.release_read(at.stage);
          at.advance(STAGES);
        }
        if (first + j >= 0) {
          const int row = (tile.block + first + j) * UP_H + OFFSET_H;
          const bool not_finite = stage_results(sums[j], result_rows, job, results + result, epilogue);
          if constexpr (MIXED) {
            if (__any_sync(~0u, not_finite))
              repair(x, w, job, tile, g.images, row, results + result, epilogue);
          }
          if constexpr (BY_TMA) {
            fence_async_shared();
            // The next set may be written to then.
            if (warp == 0 && elect_one()) wait_stores_read<RESULTS - 2>();
          }
          sync_threads<WARPS * 32, 1>();
          if constexpr (!BY_TMA) {
            copy_results(out, tile, g.images, row, results + result);
          } else if (warp == 0 && elect_one()) {
            store_results(out_map, first_map, tile, row, results + result);
          }
          result = result == (RESULTS - 1) * RESULT_BYTES ? 0 : result + RESULT_BYTES;
        }
#pragma unroll
        for (int i = 0; i < int(sizeof(Sums) / sizeof(float)); ++i) reinterpret_cast<float*>(&sums[j])[i] = 0;
      }
    }
  }
  if (BY_TMA && warp == 0 && elect_one()) wait_stores_read();
}

// Grid: x over blocks of channels, y over workers.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap first_map,
             const Element* __restrict__ x, const Element* __restrict__ w, const __grid_constant__ Args g,
             Output* __restrict__ out EPILOGUE_PARAMETERS) {
  __shared__ Ring pipeline;
  __shared__ Barriers<1, 1> weights_full;
  const uint32_t stages = shared_stages(), results = stages + STAGES * STAGE_BYTES,
                 weights = results + RESULTS * RESULT_BYTES;
  const int warp = warp_index();
  // The producer does not wait for consumers to begin.
  if (warp == WARPS) {
    if (elect_one()) init_barriers(pipeline, weights_full);
    __syncwarp();
    named_arrive(THREADS, 2);
    if (elect_one()) {
      if (RESIDENT) load_weights(w_map, weights_full.at, weights);
      produce(x_map, g, stages, pipeline);
    }
    return;
  }
  if (!RESIDENT) stage_weights(w, weights);
  named_sync(THREADS, 2);
  if (RESIDENT) {
    Barrier::wait(weights_full.at, 0);
  } else {
    sync_threads<WARPS * 32, 1>();
  }
  consume(out_map, first_map, x, w, g, out, EPILOGUE_OF_PARAMETERS, stages, weights, results, pipeline, warp);
}
