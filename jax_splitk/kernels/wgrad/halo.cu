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
// Work is a list of units (output tile, image, strip of rows, strip of columns), the tile slowest. A thread
// block takes one split of one tile or, as stream-k, whole tiles as long as there is one for every block, and
// then a contiguous 1/gridDim.x of the rest. A tile that one block covers alone is stored; otherwise each
// part goes to the workspace and `reduce_tiles` adds them in a fixed order.
//
// Roles: warpgroup 0 is the producer (one thread issues TMA), the others are consumers.
// Barriers, per line (a row of X, and the row of dY that completes what it allows): `full` (the producer's
// arrival and the bytes) and `empty` (one arrival per consumer warpgroup). Units take turns in `buffers`
// places, and every unit fills every line of its place once, in order: a line is filled again as soon as the
// products of its rows are done.
//
// Macros: ELEMENT_BF16, TAPS_H, TAPS_W, TILE_Q (output columns of a strip), BATCH_ROWS (output rows whose
// products are issued and waited for together), OUT (split_k.cuh).

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/divisor.cuh"
#include "device/ptx.cuh"
#include "device/split_k.cuh"
#include "device/tensor_map.cuh"
#include "device/wgmma_ss.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

constexpr int CHANNELS = 64;  // of a block, on both sides
constexpr int PIXEL_BYTES = CHANNELS * 2;
constexpr int MAX_LINES = 64;
constexpr int ROWS = TILE_Q % 16 ? 2 : 1;  // rows of a block of 16 pixels
constexpr int STEPS = TILE_Q / (16 / ROWS);
constexpr int DY_BYTES = TILE_Q * PIXEL_BYTES;
constexpr int TILE_N = CHANNELS * TAPS_W;
constexpr int ACCUMULATORS = TILE_N / 2;
constexpr int CONSUMERS = TAPS_H;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_FLOATS = CONSUMERS * 128 * ACCUMULATORS;
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGS = CONSUMERS == 3 ? 160 : 232;

using Accumulator = float[ACCUMULATORS];

struct Geometry {
  int halo, lines;                       // lines of a buffer; the first `halo` come without a row of dY
  int x_bytes, dy_offset, buffer_bytes;  // of an X line; of dY in a buffer

  __device__ explicit Geometry(const Args& g)
      : halo((TAPS_H - 1) * g.dilation_h), lines(g.tile_p + halo), x_bytes(g.pitch * PIXEL_BYTES) {
    dy_offset = (lines * g.pitch + 7) / 8 * 8 * PIXEL_BYTES;
    buffer_bytes = dy_offset + g.tile_p * DY_BYTES;
  }
};

// The buffer whose turn it is, and the parity of its barriers' phase.
struct Turn {
  int buffer = 0;
  uint32_t phase = 0;

  __device__ void next(const Args& g) {
    if (++buffer == g.buffers) {
      buffer = 0;
      phase ^= 1;
    }
  }
};

// ---- work -------------------------------------------------------------------------------------------------

// Units of stream-k part `part`, counted from the first tile that is not some block's alone: the first
// `longer_parts` have one more than the others.
__device__ inline int stream_begin(const Args& g, int part) {
  return part * g.units_per_part + min(part, g.longer_parts);
}

__device__ inline int stream_part_of(const Args& g, int unit) {
  const int longer = g.longer_parts * g.units_per_longer_part;
  return unit < longer ? unit / g.units_per_longer_part : g.longer_parts + (unit - longer) / g.units_per_part;
}

// What a block does, one tile after the other.
struct Work {
  int tile, begin, end;  // units of the tile

  __device__ explicit Work(const Args& g) {
    if (g.splits != 0) {
      tile = blockIdx.x;
      begin = blockIdx.y * g.units_per_part;
      end = min(begin + g.units_per_part, int(g.units_per_tile));
      whole_ = next_ = left_ = 0;
    } else {
      whole_ = 0;
      next_ = stream_begin(g, blockIdx.x);
      left_ = stream_begin(g, blockIdx.x + 1) - next_;
      advance(g);
    }
  }

  __device__ bool done() const { return begin == end; }

  __device__ void advance(const Args& g) {
    if (g.splits == 0 && whole_ < g.whole_tiles) {
      tile = whole_++ * gridDim.x + blockIdx.x;
      begin = 0;
      end = g.units_per_tile;
      return;
    }
    if (left_ == 0) {
      begin = end;
      return;
    }
    const int rest = next_ / g.units_per_tile;
    tile = g.whole_tiles * gridDim.x + rest;
    begin = next_ - rest * g.units_per_tile;
    end = min(begin + left_, int(g.units_per_tile));
    next_ += end - begin;
    left_ -= end - begin;
  }

  // Whether this is the block's last.
  __device__ bool last(const Args& g) const {
    return left_ == 0 && (g.splits != 0 || whole_ == g.whole_tiles);
  }

 private:
  int whole_, next_, left_;
};

// Where in the workspace (in tiles) block `part` of stream-k, or split `part`, puts its part of a tile;
// `rest` counts tiles from the first that is not some block's alone. A tile's parts lie one behind the other;
// in stream-k the next of them all is either the next block's or the next tile's, so that the sum of both
// numbers tells them apart.
__device__ inline int partial_slot(const Args& g, int part, int rest) {
  return g.splits != 0 ? rest * g.splits + part : part + rest;
}

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
                               uint8_t* buffers, uint64_t* full, uint64_t* empty) {
  constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const Geometry at(g);
  Turn turn;
  for (Work work(g); !work.done(); work.advance(g)) {
    const Tile tile = tile_of(g, work.tile);
    for (int u = work.begin; u < work.end; ++u, turn.next(g)) {
      const Unit unit = unit_of(g, u);
      const int w = unit.q0 - g.pad_w + tile.s0 * g.dilation_w;
      const int h = unit.p0 - g.pad_h + tile.r0 * g.dilation_h;
      uint8_t* x = buffers + turn.buffer * at.buffer_bytes;
      uint8_t* dy = x + at.dy_offset;
#pragma unroll 1
      for (int line = 0; line < at.lines; ++line) {
        const int barrier = turn.buffer * at.lines + line, p = line - at.halo;
        EmptyBarrier::wait(&empty[barrier], turn.phase ^ 1);
        FullBarrier::arrive_and_expect_tx(&full[barrier], at.x_bytes + (p < 0 ? 0 : DY_BYTES));
        cute::SM90_TMA_LOAD_4D::copy(&x_map, &full[barrier], hint, x + line * at.x_bytes, tile.c0, w,
                                     h + line, unit.n);
        if (p >= 0) {
          cute::SM90_TMA_LOAD_4D::copy(&dy_map, &full[barrier], hint, dy + p * DY_BYTES, tile.k0, unit.q0,
                                       unit.p0 + p, unit.n);
        }
      }
    }
  }
}

// ---- consumer ---------------------------------------------------------------------------------------------

// The barriers of lines whose products may still be running, to be released when they are known to be done.
struct Held {
  int next = 0, end = 0;

  __device__ void release(uint64_t* empty, int until) {
#pragma unroll 1
    for (; next < until; ++next) {
      if (threadIdx.x % 128 == 0) EmptyBarrier::arrive(&empty[next]);
    }
  }
};

// One unit's products for filter row `warpgroup` of the tile. Unless `drain`, the last of them may still be
// running at the end.
__device__ inline void consume(const Args& g, const Geometry& at, const Turn& turn, uint32_t buffers,
                               uint64_t* full, uint64_t* empty, int warpgroup, int rows, bool drain,
                               GMMA::ScaleOut scale, Held& held, Accumulator& acc) {
  constexpr int STEP = 16 / ROWS * PIXEL_BYTES >> 4;
  const uint32_t x = buffers + turn.buffer * at.buffer_bytes, dy = x + at.dy_offset;
  const uint64_t a0 = operand(dy, 0, ROWS == 2 ? DY_BYTES : 8 * PIXEL_BYTES);
  const uint64_t b0 = operand(x + warpgroup * g.dilation_h * at.x_bytes, g.dilation_w * PIXEL_BYTES,
                              ROWS == 2 ? at.x_bytes : 8 * PIXEL_BYTES);
  const int first = turn.buffer * at.lines;
  int waited = 0;
  for (int p = 0; p < rows; p += BATCH_ROWS) {
#pragma unroll 1
    for (const int needed = p + BATCH_ROWS + at.halo; waited < needed; ++waited) {
      FullBarrier::wait(&full[first + waited], turn.phase);
    }
    const uint64_t a = a0 + uint64_t(p * DY_BYTES >> 4), b = b0 + uint64_t(p * at.x_bytes >> 4);
    fence(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int row = 0; row < BATCH_ROWS; row += ROWS) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        wgmma(a + (row * DY_BYTES >> 4) + step * STEP, b + (row * at.x_bytes >> 4) + step * STEP, acc, scale);
        scale = GMMA::ScaleOut::One;
      }
    }
    cute::warpgroup_commit_batch();
    // The batch before this one is done: the rest of the unit before, or the rows before.
    cute::warpgroup_wait<1>();
    fence(acc);
    held.release(empty, held.end);
    if (p == 0) held = {first, first};
    held.end = first + p + BATCH_ROWS;
    held.release(empty, first + p);
  }
  held.end = first + at.lines;
  // The next unit's first batch must not need what only its end releases.
  const bool ahead = g.buffers > 1 || rows - BATCH_ROWS >= BATCH_ROWS + at.halo;
  if (drain || rows != g.tile_p || !ahead) {
    cute::warpgroup_wait<0>();
    fence(acc);
    if (waited < at.lines) {
      // Lines that no product reads: no warp may be behind when they are released, and could be filled anew.
#pragma unroll 1
      for (; waited < at.lines; ++waited) FullBarrier::wait(&full[first + waited], turn.phase);
      cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup);
    }
    held.release(empty, held.end);
  }
}

// Where a consumer thread's accumulators belong in out[R][S][C][K]. Element 4*i + j is column 8*i +
// 2*(lane%4) + j%2 and row 16*warp + lane/4 + 8*(j/2) of the warpgroup's tile.
struct Place {
  int offset;  // of the tile's first column, in the thread's row
  // How many are left from the thread's first on: channels, output channels, filter columns.
  int columns, rows, taps;
};

__device__ inline Place place_of(const Args& g, const Tile& tile, int thread) {
  const int r = tile.r0 + thread / 128, lane = thread % 32;
  const int c = tile.c0 + 2 * (lane % 4), k = tile.k0 + thread % 128 / 32 * 16 + lane / 4;
  return {((r * g.filter_w + tile.s0) * g.channels + c) * g.out_channels + k, g.channels - c,
          g.out_channels - k, r < g.filter_h ? g.filter_w - tile.s0 : 0};
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgrad_halo(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
               const __grid_constant__ Args g, Output* out, float4* partials) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[MAX_LINES], empty[MAX_LINES];
  uint8_t* buffers = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  const Geometry at(g);
  if (threadIdx.x < at.lines * g.buffers) {
    FullBarrier::init(&full[threadIdx.x], 1);
    EmptyBarrier::init(&empty[threadIdx.x], CONSUMERS);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp == 0 && cute::elect_one_sync()) produce(x_map, dy_map, g, buffers, full, empty);
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int thread = threadIdx.x - 128;
    Turn turn;
    Held held;
    for (Work work(g); !work.done(); work.advance(g)) {
      Accumulator acc;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      for (int u = work.begin; u < work.end; ++u, turn.next(g)) {
        const int rows = min(g.tile_p, g.out_h - unit_of(g, u).p0);
        consume(g, at, turn, cute::cast_smem_ptr_to_uint(buffers), full, empty, thread / 128, rows,
                u + 1 == work.end, scale, held, acc);
        scale = GMMA::ScaleOut::One;
      }
      if (work.last(g)) launch_dependent_grids();
      if (work.begin == 0 && work.end == g.units_per_tile) {
        const Place place = place_of(g, tile_of(g, work.tile), thread);
#pragma unroll
        for (int i = 0; i < ACCUMULATORS / 4; ++i) {
          store(g, place, out, i, {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
        }
      } else {
        const int part = g.splits == 0 ? blockIdx.x : blockIdx.y;
        const int rest = work.tile - g.whole_tiles * gridDim.x;
        float4* to = partials + size_t(partial_slot(g, part, rest)) * (TILE_FLOATS / 4) + thread;
#pragma unroll
        for (int i = 0; i < ACCUMULATORS / 4; ++i) {
          to[i * 128 * CONSUMERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        }
      }
    }
  }
}

// ---- reduction --------------------------------------------------------------------------------------------

constexpr int TILE_REDUCE_BLOCKS = 5;  // of a multiprocessor: with 6, ptxas puts additions between the loads

// Grid: x over pieces of a tile, y over tiles from first_tile on. Sums a tile's parts and stores it.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, TILE_REDUCE_BLOCKS)
    reduce_tiles(const float* partials, Output* out, const __grid_constant__ Args g,
                 const __grid_constant__ TileReduceArgs reduce) {
  const int rest = blockIdx.y, begin = rest * g.units_per_tile;
  int first = 0, parts = g.splits;
  if (g.splits == 0) {
    first = stream_part_of(g, begin);
    parts = stream_part_of(g, begin + g.units_per_tile - 1) - first + 1;
  }
  if (parts == 1) return;
  const int lanes = reduce.lanes, log_lanes = 31 - __clz(lanes), columns = REDUCE_THREADS >> log_lanes;
  const int column = threadIdx.x & (columns - 1), lane = (threadIdx.x - column) * lanes / REDUCE_THREADS;
  const int group = blockIdx.x * columns + column, i = group / (128 * CONSUMERS);
  const Place place = place_of(g, tile_of(g, reduce.first_tile + rest), group - i * 128 * CONSUMERS);
  const float* from = partials + size_t(partial_slot(g, first + lane, rest)) * TILE_FLOATS + group * 4;
  if (lane < parts) prefetch_l2(from);
  wait_on_dependent_grids();
  float4 sum = add_splits(from, size_t(TILE_FLOATS) << log_lanes, lane, parts, lanes);
  if (add_lanes(sum, lanes, columns, column)) store(g, place, out, i, {sum.x, sum.y, sum.z, sum.w});
}
