// Weight gradient of a unit-stride convolution for Hopper that loads an input row once for all filter taps.
//
//   dW[r, s, c, k] = sum over pixels (n, p, q) of
//       X[n, p - pad + r*dilation, q - pad + s*dilation, c] * dY[n, p, q, k]
//
// A thread block computes 64 output channels (M) x a block of TAPS_H x TAPS_W filter taps of 64 input
// channels. In shared memory lie rows of X with their halo, 128 bytes (64 channels) a pixel, and the rows of
// dY. A tap is only another start address of the same data: WGMMA's 128-byte swizzle is a function of address
// bits, so a descriptor may start at any pixel. The taps of a filter row are one WGMMA's N side (64-channel
// blocks, one dilated pixel apart), its filter rows are one consumer warpgroup each. A block of 16 along the
// reduction is 16 pixels of a row or, where TILE_Q is odd eights, 8 pixels of each of two rows: nothing but
// the problem's own pixels is ever multiplied.
//
// A thread block takes one split of a tile's units of work: an image's strips of rows and of columns. Partial
// sums go to the workspace in the accumulators' order, and KERNEL(_reduce) adds them.
//
// Roles: warpgroup 0 is the producer (one thread issues TMA), the others are consumers. A stage of the
// pipeline is a line: a row of X, and the row of dY that completes what it allows. A buffer is the lines of a
// unit; every unit fills every line of its buffer once, in order: a line is filled again as soon as the
// products of its rows are done.
//
// Macros: ELEMENT, OUT, TAPS_H, TAPS_W, TILE_N (64 * TAPS_W), TILE_Q (output columns of a strip),
// BATCH_ROWS (output rows whose products are issued and waited for together).

#include "device/skeleton.cuh"
#include "device/split_k.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

using Wgmma = WGMMA_16(TILE_N, SS)<GMMA::Major::MN, GMMA::Major::MN>;

constexpr int CHANNELS = 64;  // of a block, on both sides
constexpr int PIXEL_BYTES = CHANNELS * 2;
constexpr int MAX_LINES = 64;
constexpr int ROWS = TILE_Q % 16 ? 2 : 1;  // rows of a block of 16 pixels
constexpr int STEPS = TILE_Q / (16 / ROWS);
constexpr int DY_BYTES = TILE_Q * PIXEL_BYTES;
static_assert(TILE_N == CHANNELS * TAPS_W);
constexpr int ACCUMULATORS = TILE_N / 2;
constexpr int CONSUMERS = TAPS_H;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_FLOATS = CONSUMERS * 128 * ACCUMULATORS;
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGS = consumer_registers(CONSUMERS, PRODUCER_REGS);

using Accumulator = float[ACCUMULATORS];
using Lines = Pipeline<MAX_LINES, 1, CONSUMERS>;

struct Geometry {
  int halo, lines;                       // lines of a buffer; the first `halo` come without a row of dY
  int x_bytes, dy_offset, buffer_bytes;  // of an X line; of dY in a buffer

  __device__ explicit Geometry(const Args& g)
      : halo((TAPS_H - 1) * g.dilation.h), lines(g.tile_p + halo), x_bytes(g.pitch * PIXEL_BYTES) {
    dy_offset = (lines * g.pitch + 7) / 8 * 8 * PIXEL_BYTES;
    buffer_bytes = dy_offset + g.tile_p * DY_BYTES;
  }
};

// ---- work -------------------------------------------------------------------------------------------------

struct Tile {
  int k0, c0, r0, s0;
};

__device__ inline Tile tile_of(const Args& g, int index) {
  const int rest = index / g.k_blocks, group = rest / g.slots;
  const int row = group / g.groups_w;
  return {(index - rest * g.k_blocks) * CHANNELS, (rest - group * g.slots) * CHANNELS, row * TAPS_H,
          (group - row * g.groups_w) * TAPS_W};
}

struct Unit {
  int n, p0, q0;
};

__device__ inline Unit unit_of(const Args& g, int index) {
  const int n = index / g.in_image, rest = index - n * g.in_image;
  const int strip = rest / g.tiles_q;
  return {n, strip * g.tile_p, (rest - strip * g.tiles_q) * TILE_Q};
}

// ---- producer ---------------------------------------------------------------------------------------------

__device__ inline void produce(const TensorMap& x_map, const TensorMap& dy_map, const Args& g,
                               const Tile& tile, int u, int end, uint32_t buffers, Lines& pipeline) {
  const Geometry at(g);
  for (Position buffer; u < end; ++u, buffer.advance(g.buffers)) {
    const Unit unit = unit_of(g, u);
    const int w = unit.q0 - g.pad.w + tile.s0 * g.dilation.w;
    const int h = unit.p0 - g.pad.h + tile.r0 * g.dilation.h;
    const uint32_t x = buffers + buffer.stage * at.buffer_bytes, dy = x + at.dy_offset;
#pragma unroll 1
    for (int line = 0; line < at.lines; ++line) {
      const Position stage{buffer.stage * at.lines + line, buffer.phase};
      const int p = line - at.halo;
      pipeline.wait_empty(stage);
      uint64_t* full = pipeline.expect(stage, at.x_bytes + (p < 0 ? 0 : DY_BYTES));
      load_box(x_map, full, x + line * at.x_bytes, tile.c0, w, h + line, unit.n);
      if (p >= 0) load_box(dy_map, full, dy + p * DY_BYTES, tile.k0, unit.q0, unit.p0 + p, unit.n);
    }
  }
}

// ---- consumer ---------------------------------------------------------------------------------------------

// The lines whose products may still be running, to be released when they are known to be done.
struct Held {
  int next = 0, end = 0;

  __device__ void release(Lines& pipeline, int until) {
#pragma unroll 1
    for (; next < until; ++next) {
      if (threadIdx.x % 128 == 0) pipeline.release(next);
    }
  }
};

// One unit's products for filter row `warpgroup` of the tile. Unless `drain`, the last of them may still be
// running at the end.
__device__ inline void consume(const Args& g, const Geometry& at, const Position& buffer, uint32_t buffers,
                               Lines& pipeline, int warpgroup, int rows, bool drain, GMMA::ScaleOut scale,
                               Held& held, Accumulator& acc) {
  constexpr int STEP = 16 / ROWS * PIXEL_BYTES >> 4;
  const uint32_t x = buffers + buffer.stage * at.buffer_bytes, dy = x + at.dy_offset;
  const uint64_t a0 = operand(dy, 0, ROWS == 2 ? DY_BYTES : 8 * PIXEL_BYTES);
  const uint64_t b0 = operand(x + warpgroup * g.dilation.h * at.x_bytes, g.dilation.w * PIXEL_BYTES,
                              ROWS == 2 ? at.x_bytes : 8 * PIXEL_BYTES);
  const int first = buffer.stage * at.lines;
  int waited = 0;
  const auto wait_until = [&](int needed) {
#pragma unroll 1
    for (; waited < needed; ++waited) pipeline.wait_full({first + waited, buffer.phase});
  };
  for (int p = 0; p < rows; p += BATCH_ROWS) {
    wait_until(p + BATCH_ROWS + at.halo);
    const uint64_t a = a0 + uint64_t(p * DY_BYTES >> 4), b = b0 + uint64_t(p * at.x_bytes >> 4);
    const auto products = [&] {
#pragma unroll
      for (int row = 0; row < BATCH_ROWS; row += ROWS) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          wgmma<Wgmma>(a + (row * DY_BYTES >> 4) + step * STEP, b + (row * at.x_bytes >> 4) + step * STEP,
                       acc, scale);
          scale = GMMA::ScaleOut::One;
        }
      }
    };
    batch(products, acc);
    // The batch before this one is done: the rest of the unit before, or the rows before.
    wait_batches<1>(acc);
    held.release(pipeline, held.end);
    if (p == 0) held = {first, first};
    held.end = first + p + BATCH_ROWS;
    held.release(pipeline, first + p);
  }
  held.end = first + at.lines;
  // The next unit's first batch must not need what only its end releases.
  const bool ahead = g.buffers > 1 || rows - BATCH_ROWS >= BATCH_ROWS + at.halo;
  if (drain || rows != g.tile_p || !ahead) {
    wait_batches<0>(acc);
    if (waited < at.lines) {
      // Lines that no product reads: no warp may be behind when they are released, and could be filled anew.
      wait_until(at.lines);
      named_sync(128, 1 + warpgroup);
    }
    held.release(pipeline, held.end);
  }
}

// Where a consumer thread's accumulators belong in out[R][S][C][K].
struct Place {
  int offset;  // of the tile's first column, in the thread's row
  // How many are left from the thread's first on: channels, output channels, filter columns.
  int columns, rows, taps;
};

__device__ inline Place place_of(const Args& g, const Tile& tile, int thread) {
  const int r = tile.r0 + thread / 128, lane = thread % 32;
  const int c = tile.c0 + 2 * (lane % 4), k = tile.k0 + thread % 128 / 32 * 16 + lane / 4;
  return {((r * g.filter.w + tile.s0) * g.channels + c) * g.out_channels + k, g.channels - c,
          g.out_channels - k, r < g.filter.h ? g.filter.w - tile.s0 : 0};
}

__device__ inline void store(const Args& g, const Place& place, Output* out, int i, const float (&v)[4]) {
  const int s = i / (CHANNELS / 8), c = i % (CHANNELS / 8) * 8;
  if (s >= place.taps || c >= place.columns) return;
  Output* at = out + (place.offset + (s * g.channels + c) * g.out_channels);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (c + j % 2 < place.columns && j / 2 * 8 < place.rows) {
      convert(v[j], at[j % 2 * g.out_channels + j / 2 * 8]);
    }
  }
}

// Where a thread's part of a split's sums lies in the workspace: a float4 for each 4 accumulators, a block's
// threads apart.
__device__ inline float4* partial_of(const Args& g, float4* partials, int tile, int split, int thread) {
  return partials + (size_t(tile) * g.splits + split) * (TILE_FLOATS / 4) + thread;
}

// Grid: x over tiles, y over splits. Split s covers units [s, s+1) * units_per_split; the plan leaves none
// empty.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(MAPS_AND_ARGS, Output* out, float4* partials) {
  __shared__ Lines pipeline;
  const uint32_t buffers = shared_stages();
  const Geometry at(g);
  const Tile tile = tile_of(g, blockIdx.x);
  const int begin = blockIdx.y * g.units_per_split, end = min(begin + g.units_per_split, g.units_per_tile);
  const auto consume_units = [&](int warp) {
    const int thread = threadIdx.x - 128;
    Accumulator acc;
    Position buffer;
    Held held;
    GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
    for (int u = begin; u < end; ++u, buffer.advance(g.buffers)) {
      const int rows = min(g.tile_p, g.out_h - unit_of(g, u).p0);
      consume(g, at, buffer, buffers, pipeline, warp / 4, rows, u + 1 == end, scale, held, acc);
      scale = GMMA::ScaleOut::One;
    }
    launch_dependent_grids();
    if (g.splits == 1) {
      const Place place = place_of(g, tile, thread);
#pragma unroll
      for (int i = 0; i < ACCUMULATORS / 4; ++i) {
        store(g, place, out, i, {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
      }
    } else {
      float4* to = partial_of(g, partials, blockIdx.x, blockIdx.y, thread);
#pragma unroll
      for (int i = 0; i < ACCUMULATORS / 4; ++i) {
        to[i * 128 * CONSUMERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      }
    }
  };
  run_roles<Roles<4, PRODUCER_REGS, CONSUMER_REGS>>(
      [&](int warp) {
        if (warp == 0 && elect_one()) produce(x_map, dy_map, g, tile, begin, end, buffers, pipeline);
      },
      consume_units, pipeline);
}

// ---- reduction --------------------------------------------------------------------------------------------

constexpr int TILE_REDUCE_BLOCKS = 5;  // of a multiprocessor: with 6, ptxas puts additions between the loads

// Grid: x over pieces of a tile, y over tiles. Sums a tile's splits and stores it.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, TILE_REDUCE_BLOCKS)
    KERNEL(_reduce)(float4* partials, Output* out, const __grid_constant__ Args g) {
  const int lanes = g.lanes, log_lanes = 31 - __clz(lanes), columns = REDUCE_THREADS >> log_lanes;
  const int column = threadIdx.x & (columns - 1), lane = (threadIdx.x - column) * lanes / REDUCE_THREADS;
  const int group = blockIdx.x * columns + column, i = group / (128 * CONSUMERS);
  const Place place = place_of(g, tile_of(g, blockIdx.y), group - i * 128 * CONSUMERS);
  const float* from = reinterpret_cast<float*>(partial_of(g, partials, blockIdx.y, lane, group));
  if (lane < g.splits) prefetch_l2(from);
  wait_on_dependent_grids();
  float4 sum = add_splits(from, size_t(TILE_FLOATS) << log_lanes, lane, g.splits, lanes);
  if (add_lanes(sum, lanes, columns, column)) store(g, place, out, i, {sum.x, sum.y, sum.z, sum.w});
}
