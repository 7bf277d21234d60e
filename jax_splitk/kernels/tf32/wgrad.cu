// Weight gradient of a float32 convolution for Hopper on its tf32 tensor cores, in 1D or 2D.
//
//   dW[r, s, c, k] = sum over pixels (n, p, q) of X[n, h, w, c] * dY[n, p, q, k]
//   with h = p*stride - pad + r*dilation and w = q*stride - pad + s*dilation
//
// WGMMA takes tf32 operands from shared memory only with the reduction (pixels) contiguous, and both inputs
// have their channels contiguous. So A = X comes from registers, gathered from rows that lie in shared memory
// as they are, and B = dY is transposed on its way by warps of their own, once for all taps. A line of X
// (TILE_IMAGES rows, one of each image) is loaded once; its fragments are multiplied with the rows of dY that
// meet it at each of TAPS_H filter rows, while they are in registers. A thread block computes TAPS_H x TAPS_W
// taps of BLOCKS * 64 input channels (M) by TILE_N output channels (N): a consumer warpgroup has one filter
// column and 64 input channels, and all filter rows.
//
// Shared memory, three pipelines:
//   x    lines of X, [image][32 channels][column] of 128 bytes under TMA's 128-byte swizzle
//   raw  rows of dY as TMA brings them, [32 channels][image, column] of 128 bytes, swizzled too
//   dy   rows of dY transposed to WGMMA's layout without swizzle: [four pixels][channel] of 16 bytes
// The order of the reduction within a WGMMA's eight pixels is free to choose. At odd strides it is
// 0 2 4 6 1 3 5 7, for then the four pixels that a warp's lanes gather at once are of one parity, which the
// swizzle keeps in different banks. At even strides, and where eight pixels belong to two images, it is as in
// memory. If TILE_Q is no multiple of 4 (images of 14 or 7 columns, several in a line), four pixels may
// belong to two images (`MIXED`): the order is the stride's everywhere, and some lanes meet in a bank. Row n
// of B is output channel n % (TILE_N/4) * 4 + n / (TILE_N/4): the four of a 16-byte word go to different
// cores.
//
// Both inputs are rounded to tf32 (to nearest): the tensor cores would truncate, an error of one sign.
//
// Roles: warp 0 is the producer (one thread issues TMA), warps 1 to 3 transpose, the other warpgroups are
// consumers, then the epilogue. Every pipeline is walked in order, by units (images, strip of output rows,
// strip of columns), rows and lines; row p of a unit is loaded and needed from line p * STRIDE_H on. A row of
// dy is empty once the products of the last line that meets it have retired.
//
// Macros: OUT, those that tf32.py takes from its Config, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, COLUMNS
// (of a line), REACH (lines beyond a row's first one), PITCH_BYTES (32 channels of an image's line), X_BYTES
// (a line), DY_BYTES (a row), X_STAGES, RAW_STAGES, DY_STAGES, PRODUCER_REGS, CONSUMER_REGS, RAGGED (strips
// reach beyond the output's columns).

#include "device/skeleton.cuh"
#include "device/split_k.cuh"
#include "device/tf32.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

using Wgmma = WGMMA(TILE_N, x8_F32TF32TF32_RS_TN)<>;

constexpr int TRANSPOSERS = 3;  // warps
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int ACCUMULATORS = TILE_N / 2;  // of a thread and filter row
constexpr int PIXELS = TILE_IMAGES * TILE_Q;
constexpr int STEPS = PIXELS / 8;

constexpr int PIXEL_BYTES = 128;  // 32 channels
constexpr int IMAGE_BYTES = 2 * BLOCKS * PITCH_BYTES;
constexpr int X_TMA_BYTES = TILE_IMAGES * 2 * BLOCKS * COLUMNS * PIXEL_BYTES;
constexpr int DY_BOXES = TILE_N / 32;
constexpr int DY_BOX_BYTES = PIXELS * PIXEL_BYTES;
constexpr int CHUNK_BYTES = TILE_N * 16;  // four pixels of dY transposed

using Accumulator = float[TAPS_H][ACCUMULATORS];

struct Pipelines {
  Pipeline<X_STAGES, 1, 4 * CONSUMERS> x;
  Pipeline<RAW_STAGES, 1, TRANSPOSERS> raw;
  Pipeline<DY_STAGES, TRANSPOSERS, 4 * CONSUMERS> dy;
};

// Their stages' addresses.
struct Stages {
  uint32_t x, raw, dy;
};

struct Unit {
  int n, p0, q0;
  int rows, lines;  // of dY and of X
};

__device__ inline Unit unit_of(const Args& g, int index) {
  const int rest = index / g.tiles_q, images = rest / g.tiles_p;
  const int p0 = (rest - images * g.tiles_p) * g.tile_p, rows = min(g.tile_p, g.out.h - p0);
  return {images * TILE_IMAGES, p0, (index - rest * g.tiles_q) * TILE_Q, rows,
          (rows - 1) * STRIDE_H + REACH + 1};
}

struct Tile {
  int k0, c0, r0, s0;
};

__device__ inline Tile tile_of(const Args& g, int index) {
  const int rest = index / g.k_blocks, group = rest / g.slots;
  return {(index - rest * g.k_blocks) * TILE_N, (rest - group * g.slots) * (64 * BLOCKS),
          group / g.groups_w * TAPS_H, group % g.groups_w * TAPS_W};
}

// Whether four pixels in a row may be of two images.
constexpr bool MIXED = TILE_Q % 4 != 0;

// Whether the eight pixels of a step are taken every other one first.
__device__ constexpr bool spaced(int step) {
  return STRIDE_W % 2 == 1 && (MIXED || step * 8 % TILE_Q + 8 <= TILE_Q);
}

// ---- producer ---------------------------------------------------------------------------------------------

__device__ inline void produce(const TensorMap& x_map, const TensorMap& dy_map, const Args& g,
                               const Tile& tile, int unit, int end, const Stages& stages,
                               Pipelines& pipelines) {
  Position x_at, raw_at;
  for (; unit < end; ++unit) {
    const Unit u = unit_of(g, unit);
    const int h = u.p0 * STRIDE_H - g.pad.h + tile.r0 * DILATION_H;
    const int w = u.q0 * STRIDE_W - g.pad.w + tile.s0 * DILATION_W;
#pragma unroll 1
    for (int line = 0; line < u.lines; ++line, x_at.advance(X_STAGES)) {
      if (line % STRIDE_H == 0 && line / STRIDE_H < u.rows) {
        pipelines.raw.wait_empty(raw_at);
        uint64_t* full = pipelines.raw.expect(raw_at, DY_BYTES);
        const uint32_t to = stages.raw + raw_at.stage * DY_BYTES;
#pragma unroll
        for (int box = 0; box < DY_BOXES; ++box) {
          load_box(dy_map, full, to + box * DY_BOX_BYTES, tile.k0 + box * 32, u.q0, u.p0 + line / STRIDE_H,
                   u.n);
        }
        raw_at.advance(RAW_STAGES);
      }
      pipelines.x.wait_empty(x_at);
      uint64_t* full = pipelines.x.expect(x_at, X_TMA_BYTES);
      uint32_t to = stages.x + x_at.stage * X_BYTES;
#pragma unroll
      for (int image = 0; image < TILE_IMAGES; ++image) {
#pragma unroll
        for (int box = 0; box < 2 * BLOCKS; ++box, to += PITCH_BYTES) {
          load_box(x_map, full, to, tile.c0 + box * 32, w, h + line, u.n + image);
        }
      }
    }
  }
}

// ---- transposers ------------------------------------------------------------------------------------------

using Four = Vec<uint32_t, 4>;

// Eight lanes share four pixels of 32 channels: each transposes a block of four channels.
__device__ inline void transpose_row(uint32_t raw, uint32_t dy, int warp, int lane) {
  constexpr int BLOCKS_OF_32 = STEPS * 2 * DY_BOXES;
  const uint32_t a = lane % 8;
  for (int i = warp * 4 + lane / 8; i < BLOCKS_OF_32; i += TRANSPOSERS * 4) {
    const int chunk = i / DY_BOXES, box = i - chunk * DY_BOXES, step = chunk / 2, half = chunk % 2;
    const bool every_other = spaced(step);
    const int first = every_other ? step * 8 + half : chunk * 4, apart = every_other ? 2 : 1;
    const uint32_t from = raw + box * DY_BOX_BYTES;
    Four pixel[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = first + j * apart;
      pixel[j] = load_shared<Four>(from + swizzled(at, a));
    }
    const uint32_t to = dy + chunk * CHUNK_BYTES + (box * 8 + a) * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      store_shared(to + c * (CHUNK_BYTES / 4), make_uint4(tf32(pixel[0].v[c]), tf32(pixel[1].v[c]),
                                                          tf32(pixel[2].v[c]), tf32(pixel[3].v[c])));
    }
  }
}

__device__ inline void transpose(const Args& g, int unit, int end, const Stages& stages, Pipelines& pipelines,
                                 int warp) {
  const int lane = threadIdx.x % 32;
  Position raw_at, dy_at;
  for (; unit < end; ++unit) {
    const int rows = unit_of(g, unit).rows;
    for (int p = 0; p < rows; ++p, raw_at.advance(RAW_STAGES), dy_at.advance(DY_STAGES)) {
      pipelines.raw.wait_full(raw_at);
      pipelines.dy.wait_empty(dy_at);
      transpose_row(stages.raw + raw_at.stage * DY_BYTES, stages.dy + dy_at.stage * DY_BYTES, warp, lane);
      fence_async_shared();  // WGMMA reads what was stored here
      __syncwarp();
      if (lane == 0) {
        pipelines.raw.release(raw_at.stage);
        Barrier::arrive(&pipelines.dy.full[dy_at.stage]);
      }
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------------------

// Where a thread finds its two channels of a step's half (WGMMA's A fragment: four pixels, one for each lane
// % 4), from the line's start on: a fixed place for each order of the pixels and each parity of the half's
// first pixel / 4 (which the swizzle makes a difference), plus a constant.
struct Places {
  uint32_t at[3][2];  // orders: 0 2 4 6; 1 3 5 7; 0 1 2 3
  // If MIXED, from which it is computed for each half: the first column's bytes, the chunk there, and the
  // filter's column.
  uint32_t start, chunk;
  int column;
};

__device__ constexpr int order(int step, int half) { return spaced(step) ? half : 2; }
__device__ constexpr int first_pixel(int step, int half) { return 8 * step + (spaced(step) ? 0 : 4 * half); }
__device__ constexpr int first_column(int step, int half) { return first_pixel(step, half) % TILE_Q; }
__device__ constexpr int parity(int step, int half) { return first_column(step, half) * STRIDE_W % 8 / 4; }
__device__ constexpr int offset(int step, int half) {
  return first_pixel(step, half) / TILE_Q * IMAGE_BYTES +
         (first_column(step, half) * STRIDE_W - 4 * parity(step, half)) * PIXEL_BYTES;
}

// The thread's pixel of a half, from its first one on.
__device__ inline int pixel_of(int order) {
  const int t = threadIdx.x % 4;
  return order < 2 ? 2 * t + order : t;
}

__device__ inline Places places_of(int warpgroup) {
  const int warp = threadIdx.x / 32 % 4, row = threadIdx.x % 32 / 4;
  const int s = warpgroup % TAPS_W, block = warpgroup / TAPS_W;
  const uint32_t chunk = warp % 2 * 4 + row / 2;
  Places places;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = pixel_of(i) * STRIDE_W + s * DILATION_W + 4 * j;
      places.at[i][j] = (block * 2 + warp / 2) * PITCH_BYTES + swizzled(column, chunk) + row % 2 * 8;
    }
  }
  places.start = (block * 2 + warp / 2) * PITCH_BYTES + row % 2 * 8;
  places.chunk = chunk;
  places.column = s * DILATION_W;
  return places;
}

// A thread's pixel of half a step: its output column, and the address of its two channels.
struct Place {
  int q;
  uint32_t at;
};

__device__ __forceinline__ Place place_of(uint32_t x, const Places& places, int step, int half) {
  const int q = first_column(step, half) + pixel_of(order(step, half));
  if constexpr (!MIXED) return {q, x + places.at[order(step, half)][parity(step, half)] + offset(step, half)};
  // At most one image ends here: there are seven columns or more.
  const bool may_end = first_column(step, half) + (order(step, half) < 2 ? 6 + half : 3) >= TILE_Q;
  const bool next = may_end && q >= TILE_Q;
  const int own = next ? q - TILE_Q : q, column = own * STRIDE_W + places.column;
  const uint32_t image = first_pixel(step, half) / TILE_Q * IMAGE_BYTES + (next ? IMAGE_BYTES : 0);
  return {own, x + places.start + image + swizzled(column, places.chunk)};
}

// `inside`: how many of the strip's columns the output has.
template <int STEP>
__device__ __forceinline__ void gather(uint32_t x, const Places& places, [[maybe_unused]] int inside,
                                       uint32_t (&a)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place place = place_of(x, places, STEP, half);
    const uint2 channels = load_shared<uint2>(place.at);
    a[2 * half] = channels.x;
    a[2 * half + 1] = channels.y;
#if RAGGED
    // dY is zero there, but X need not be finite.
    if (place.q >= inside) a[2 * half] = a[2 * half + 1] = 0;
#endif
  }
}

// The products of steps STEP and on of a line with the rows of dY at `b`, for the filter rows of MASK. At
// most one batch of them is under way before; `raw` is what the first step multiplies.
template <int MASK, int STEP>
__device__ __forceinline__ void multiply(uint32_t x, const Places& places, const uint64_t (&b)[TAPS_H],
                                         int inside, uint32_t (&raw)[4], uint32_t (&a)[2][4],
                                         Accumulator& acc) {
  uint32_t (&fragment)[4] = a[STEP % 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) fragment[i] = tf32(raw[i]);
  if constexpr (STEP + 1 < STEPS) gather<STEP + 1>(x, places, inside, raw);
  const auto products = [&] {
#pragma unroll
    for (int r = 0; r < TAPS_H; ++r) {
      if (MASK >> r & 1) {
        wgmma<Wgmma>(fragment, b[r] + (STEP * 2 * CHUNK_BYTES >> 4), acc[r], GMMA::ScaleOut::One);
      }
    }
  };
  batch(products, fragment);
  wait_batches<1>();  // the other fragment is free
  if constexpr (STEP + 1 < STEPS) multiply<MASK, STEP + 1>(x, places, b, inside, raw, a, acc);
}

// Whether filter rows of MASK may meet the same line: those whose rows of dY differ by whole ones, without
// gaps.
__device__ constexpr bool possible(int mask) {
  for (int low = 0; low < TAPS_H; ++low) {
    for (int high = low + 1; high < TAPS_H; ++high) {
      if (!(mask >> low & 1) || !(mask >> high & 1)) continue;
      if ((high - low) * DILATION_H % STRIDE_H) return false;
      for (int r = low + 1; r < high; ++r) {
        if ((r - low) * DILATION_H % STRIDE_H == 0 && !(mask >> r & 1)) return false;
      }
    }
  }
  return true;
}

template <int MASK>
__device__ __forceinline__ void multiply_line(int mask, uint32_t x, const Places& places,
                                              const uint64_t (&b)[TAPS_H], int inside, Accumulator& acc) {
  if constexpr (MASK > 0) {
    if constexpr (possible(MASK)) {
      if (mask == MASK) {
        uint32_t raw[4], a[2][4];
        gather<0>(x, places, inside, raw);
        multiply<MASK, 0>(x, places, b, inside, raw, a, acc);
        wait_batches<0>();
#pragma unroll
        for (int r = 0; r < TAPS_H; ++r) {
          if (MASK >> r & 1) fence(acc[r]);
        }
        return;
      }
    }
    multiply_line<MASK - 1>(mask, x, places, b, inside, acc);
  }
}

__device__ __forceinline__ void consume(const Args& g, int unit, int end, const Stages& stages,
                                        Pipelines& pipelines, int warpgroup, Accumulator& acc) {
  const bool leads = threadIdx.x % 32 == 0;
  const Places places = places_of(warpgroup);
  // dY's two chunks of four pixels are CHUNK_BYTES apart, groups of eight channels 128.
  const uint64_t dy = operand(stages.dy, CHUNK_BYTES, 128, Swizzle::NONE);
  Position at;
  uint32_t rows_before = 0;  // of dY, in units before
  for (; unit < end; ++unit) {
    const Unit u = unit_of(g, unit);
    for (int line = 0; line < u.lines; ++line, at.advance(X_STAGES)) {
      int mask = 0;
      uint64_t b[TAPS_H];
#pragma unroll
      for (int r = 0; r < TAPS_H; ++r) {
        const int from = line - r * DILATION_H, p = max(from, 0) / STRIDE_H;
        if (from >= 0 && from % STRIDE_H == 0 && p < u.rows) mask |= 1 << r;
        b[r] = dy + (rows_before + p) % DY_STAGES * (DY_BYTES >> 4);
      }
      if (mask & 1) {
        const uint32_t row = rows_before + line / STRIDE_H;
        pipelines.dy.wait_full({int(row % DY_STAGES), row / DY_STAGES & 1});
      }
      pipelines.x.wait_full(at);
      multiply_line<(1 << TAPS_H) - 1>(mask, stages.x + at.stage * X_BYTES, places, b, g.out.w - u.q0, acc);
      __syncwarp();  // what other lanes have read is released too
      if (leads) {
        pipelines.x.release(at.stage);
        if (mask >> (TAPS_H - 1) & 1) {
          pipelines.dy.release((rows_before + (line - REACH) / STRIDE_H) % DY_STAGES);
        }
      }
    }
    rows_before += u.rows;
  }
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// Writes a warpgroup's sums into out[R][S][C][K]. Of a warp's 16 rows gather() makes l/4 and l/4 + 8 channels
// 2*(l/4) and the next.
template <class T>
__device__ inline void store(const Args& g, const Tile& tile, T* out, int warpgroup, const Accumulator& acc) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int s = tile.s0 + warpgroup % TAPS_W;
  const int c = tile.c0 + warpgroup / TAPS_W * 64 + warp * 16 + lane / 4 * 2;
  if (s >= g.filter.w) return;
#pragma unroll
  for (int tap = 0; tap < TAPS_H; ++tap) {
    const int r = tile.r0 + tap;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (r >= g.filter.h || c + half >= g.channels) continue;
      T* to = out + (size_t(r * g.filter.w + s) * g.channels + c + half) * g.out_channels;
#pragma unroll
      for (int box = 0; box < DY_BOXES; ++box) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = tile.k0 + 4 * (8 * box + 2 * (lane % 4) + e);
          if (k >= g.out_channels) continue;
          const float* v = &acc[tap][4 * box + 2 * half + e];
          store_values(to + k, {v[0], v[4 * DY_BOXES], v[8 * DY_BOXES], v[12 * DY_BOXES]});
        }
      }
    }
  }
}

// Grid: x over output tiles (neighbours share pixels, and so their inputs in L2), y over splits. Split s
// covers units [s, s+1) * units_per_split and writes out + s * partial_stride; the plan leaves no split
// empty.
template <class T>
__device__ inline void wgrad(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, T* out) {
  __shared__ Pipelines pipelines;
  const uint32_t x = shared_stages(), after_x = x + X_STAGES * X_BYTES;
  const Stages stages{x, after_x, after_x + RAW_STAGES * DY_BYTES};
  const Tile tile = tile_of(g, blockIdx.x);
  const int unit = blockIdx.y * g.units_per_split, end = min(unit + g.units_per_split, g.units);
  run_roles<Roles<4, PRODUCER_REGS, CONSUMER_REGS>>(
      [&](int warp) {
        if (warp > 0) {
          transpose(g, unit, end, stages, pipelines, warp - 1);
        } else if (elect_one()) {
          produce(x_map, dy_map, g, tile, unit, end, stages, pipelines);
        }
      },
      [&](int warp) {
        Accumulator acc = {};
        consume(g, unit, end, stages, pipelines, warp / 4, acc);
        launch_dependent_grids();
        store(g, tile, out + size_t(blockIdx.y) * g.partial_stride, warp / 4, acc);
      },
      pipelines.x, pipelines.raw, pipelines.dy);
}

SPLIT_K_KERNELS((MAPS_AND_ARGS), (x_map, dy_map, g))
