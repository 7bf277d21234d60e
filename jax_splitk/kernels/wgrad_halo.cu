// Weight gradient of a unit-stride convolution for Hopper that loads an input row once for all filter taps.
//
//   dW[r, s, c, k] = sum over pixels (n, p, q) of X[n, p - pad + r*dilation, q - pad + s*dilation, c] * dY[n, p, q, k]
//
// A thread block computes 64 output channels (M) x a block of TAPS_H x TAPS_W filter taps of 64 input channels. In shared
// memory lie rows of X with their halo, 128 bytes (64 channels) a pixel, and the rows of dY. A tap is only another
// start address of the same data: WGMMA's 128-byte swizzle is a function of address bits, so a descriptor may start at
// any pixel. The taps of a filter row are one WGMMA's N side (64-channel blocks, one dilated pixel apart), its filter
// rows are one consumer warpgroup each. A block of 16 along the reduction is 16 pixels of a row or, where TILE_Q is odd eights, 8
// pixels of each of two rows: nothing but the problem's own pixels is ever multiplied.
//
// Work is a list of units (output tile, image, strip of rows, strip of columns), the tile slowest. A thread block takes
// a contiguous range of it: parts of one tile (its split) or, as stream-k, 1/gridDim.x of everything. A tile that one
// block covers alone is stored; otherwise each part goes to the workspace and `reduce_tiles` adds them in a fixed order.
//
// Roles: warpgroup 0 is the producer (one thread issues TMA), the others are consumers.
// Barriers, per line (a row of X, and the row of dY that completes what it allows): `full` (the producer's arrival and
// the bytes) and `empty` (one arrival per consumer warpgroup). Every unit fills every line once, in order, into the same
// place: a line is filled for the next unit as soon as this unit's rows are past it.
//
// Macros: ELEMENT_BF16, TAPS_H, TAPS_W, TILE_Q (output columns of a strip), OUT (split_k.cuh).

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "split_k.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
namespace GMMA = cute::SM90::GMMA;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Must match `_args` in wgrad_halo.py.
struct Args {
  int channels, out_channels;                     // C, K
  int filter_h, filter_w, groups_w;               // R, S, blocks of taps along S
  int slots, k_blocks;                            // blocks of 64 channels
  int out_h, tile_p, tiles_p, tiles_q;            // P; strips
  int pitch;                                      // pixels of an X line
  int pad_h, pad_w, dilation_h, dilation_w;
  int units_per_tile;
  int splits, units_per_part, longer_parts;       // splits = 0: stream-k
};

constexpr int CHANNELS = 64;            // of a block, on both sides
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

#if ELEMENT_BF16
using Element = __nv_bfloat16;
template <int N>
struct Wgmma;
template <> struct Wgmma<64> : cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<128> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<192> : cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<256> : cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
#else
using Element = __half;
template <int N>
struct Wgmma;
template <> struct Wgmma<64> : cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<128> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<192> : cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <> struct Wgmma<256> : cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
#endif

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

using Accumulator = float[ACCUMULATORS];

template <int... I>
__device__ inline void wgmma(uint64_t a, uint64_t b, Accumulator& acc, GMMA::ScaleOut scale, Indices<I...>) {
  Wgmma<TILE_N>::fma(a, b, acc[I]..., scale);
}

__device__ inline void fence(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) cute::warpgroup_fence_operand(acc[i]);
}

// Descriptor of an MN-major operand under the 128-byte swizzle: 64-channel blocks are `block_bytes` apart, groups of 8
// pixels `group_bytes`.
__device__ inline uint64_t operand(uint32_t smem_address, int block_bytes, int group_bytes) {
  cute::GmmaDescriptor desc;
  desc.desc_ = 0;
  desc.bitfield.start_address_ = smem_address >> 4;
  desc.bitfield.leading_byte_offset_ = block_bytes >> 4;
  desc.bitfield.stride_byte_offset_ = group_bytes >> 4;
  desc.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return desc.desc_;
}

// ---- work ----------------------------------------------------------------------------------------------------------

struct Range {
  int begin, end;
};

// Units of stream-k part `part`: the first `longer_parts` have one more than the others.
__device__ inline int stream_begin(const Args& g, int part) {
  return part * g.units_per_part + min(part, g.longer_parts);
}

__device__ inline int stream_part_of(const Args& g, int unit) {
  const int longer = g.longer_parts * (g.units_per_part + 1);
  return unit < longer ? unit / (g.units_per_part + 1) : g.longer_parts + (unit - longer) / g.units_per_part;
}

__device__ inline Range units_of_block(const Args& g) {
  if (g.splits == 0) return {stream_begin(g, blockIdx.x), stream_begin(g, blockIdx.x + 1)};
  const int tile = blockIdx.x * g.units_per_tile, first = blockIdx.y * g.units_per_part;
  return {tile + first, tile + min(first + g.units_per_part, g.units_per_tile)};
}

// Where in the workspace (in tiles) block `part` of stream-k, or split `part`, puts its part of `tile`. A stream-k block
// has at most two incomplete tiles, its first and its last.
__device__ inline int partial_slot(const Args& g, int part, int tile, int tiles) {
  if (g.splits != 0) return part * tiles + tile;
  return 2 * part + (stream_begin(g, part) / g.units_per_tile == tile ? 0 : 1);
}

struct Tile {
  int k0, c0, r0, s0;
};

__device__ inline Tile tile_of(const Args& g, int index) {
  const int rest = index / g.k_blocks, group = rest / g.slots;
  return {(index - rest * g.k_blocks) * CHANNELS, (rest - group * g.slots) * CHANNELS, group / g.groups_w * TAPS_H,
          group % g.groups_w * TAPS_W};
}

struct Unit {
  int n, p0, q0;
};

__device__ inline Unit unit_of(const Args& g, int index) {
  const int in_image = g.tiles_p * g.tiles_q, n = index / in_image, rest = index - n * in_image;
  const int strip = rest / g.tiles_q;
  return {n, strip * g.tile_p, (rest - strip * g.tiles_q) * TILE_Q};
}

// ---- producer ------------------------------------------------------------------------------------------------------

__device__ inline void produce(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, uint8_t* x, uint8_t* dy,
                               uint64_t* full, uint64_t* empty, Range units) {
  constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const int halo = (TAPS_H - 1) * g.dilation_h, lines = g.tile_p + halo;
  const int x_bytes = g.pitch * PIXEL_BYTES;
  uint32_t phase = 0;
  for (int u = units.begin; u < units.end; ++u, phase ^= 1) {
    const int index = u / g.units_per_tile;
    const Tile tile = tile_of(g, index);
    const Unit unit = unit_of(g, u - index * g.units_per_tile);
    const int w = unit.q0 - g.pad_w + tile.s0 * g.dilation_w, h = unit.p0 - g.pad_h + tile.r0 * g.dilation_h;
    for (int line = 0; line < lines; ++line) {
      EmptyBarrier::wait(&empty[line], phase ^ 1);
      FullBarrier::arrive_and_expect_tx(&full[line], x_bytes + (line < halo ? 0 : DY_BYTES));
      cute::SM90_TMA_LOAD_4D::copy(&x_map, &full[line], hint, x + line * x_bytes, tile.c0, w, h + line, unit.n);
      if (line >= halo) {
        const int p = line - halo;
        cute::SM90_TMA_LOAD_4D::copy(&dy_map, &full[line], hint, dy + p * DY_BYTES, tile.k0, unit.q0, unit.p0 + p,
                                     unit.n);
      }
    }
  }
}

// ---- consumer ------------------------------------------------------------------------------------------------------

// One unit's products for filter row `warpgroup` of the tile. The last of them may still be running at the end: then
// `held` is the first line that they read, and that the next unit has to release.
__device__ inline void consume(const Args& g, uint32_t x, uint32_t dy, uint64_t* full, uint64_t* empty, int warpgroup,
                               int rows, bool last, uint32_t phase, GMMA::ScaleOut scale, int& held,
                               Accumulator& acc) {
  const int halo = (TAPS_H - 1) * g.dilation_h, lines = g.tile_p + halo;
  const int x_bytes = g.pitch * PIXEL_BYTES;
  constexpr int STEP = 16 / ROWS * PIXEL_BYTES >> 4;
  const uint64_t a0 = operand(dy, 0, ROWS == 2 ? DY_BYTES : 8 * PIXEL_BYTES);
  const uint64_t b0 = operand(x + warpgroup * g.dilation_h * x_bytes, g.dilation_w * PIXEL_BYTES,
                              ROWS == 2 ? x_bytes : 8 * PIXEL_BYTES);
  const bool releases = threadIdx.x % 128 == 0;
  int waited = 0, released = 0;
  for (int p = 0; p < rows; p += ROWS) {
    for (const int needed = p + ROWS + halo; waited < needed; ++waited) FullBarrier::wait(&full[waited], phase);
    const uint64_t a = a0 + uint64_t(p * DY_BYTES >> 4), b = b0 + uint64_t(p * x_bytes >> 4);
    fence(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      wgmma(a + step * STEP, b + step * STEP, acc, scale, MakeIndices<ACCUMULATORS>::type{});
      scale = GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    // The rows before these have been multiplied, so their lines may be filled again.
    cute::warpgroup_wait<1>();
    fence(acc);
    for (; held < lines; ++held) {
      if (releases) EmptyBarrier::arrive(&empty[held]);
    }
    for (; released < p; ++released) {
      if (releases) EmptyBarrier::arrive(&empty[released]);
    }
  }
  // The next unit's first products need lines up to ROWS + halo, which must not be among those held.
  if (!last && rows == g.tile_p && released >= ROWS + halo) {
    held = released;
    return;
  }
  cute::warpgroup_wait<0>();
  fence(acc);
  for (; waited < lines; ++waited) FullBarrier::wait(&full[waited], phase);
  for (; released < lines; ++released) {
    if (releases) EmptyBarrier::arrive(&empty[released]);
  }
}

// Where a consumer thread's accumulators belong in out[R][S][C][K]. Element 4*i + j is column 8*i + 2*(lane%4) + j%2 and
// row 16*warp + lane/4 + 8*(j/2) of the warpgroup's tile.
struct Place {
  int offset;              // of the tile's first column, in the thread's row
  int columns, rows, taps; // how many are left from the thread's first on: channels, output channels, filter columns
};

__device__ inline Place place_of(const Args& g, const Tile& tile, int thread) {
  const int r = tile.r0 + thread / 128, lane = thread % 32;
  const int c = tile.c0 + 2 * (lane % 4), k = tile.k0 + thread % 128 / 32 * 16 + lane / 4;
  return {((r * g.filter_w + tile.s0) * g.channels + c) * g.out_channels + k, g.channels - c, g.out_channels - k,
          r < g.filter_h ? g.filter_w - tile.s0 : 0};
}

__device__ inline void store(const Args& g, const Place& place, Output* out, int i, const float (&v)[4]) {
  const int s = i / (CHANNELS / 8), c = i % (CHANNELS / 8) * 8;
  if (s >= place.taps || c >= place.columns) return;
  Output* at = out + (place.offset + (s * g.channels + c) * g.out_channels);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (c + j % 2 < place.columns && j / 2 * 8 < place.rows) convert(v[j], at[j % 2 * g.out_channels + j / 2 * 8]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgrad_halo(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
               const __grid_constant__ Args g, Output* out, float4* partials) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[MAX_LINES], empty[MAX_LINES];
  uint8_t* x = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  const int lines = g.tile_p + (TAPS_H - 1) * g.dilation_h;
  uint8_t* dy = x + (lines * g.pitch + 7) / 8 * 8 * PIXEL_BYTES;
  if (threadIdx.x < lines) {
    FullBarrier::init(&full[threadIdx.x], 1);
    EmptyBarrier::init(&empty[threadIdx.x], CONSUMERS);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const Range units = units_of_block(g);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp == 0 && cute::elect_one_sync()) produce(x_map, dy_map, g, x, dy, full, empty, units);
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int thread = threadIdx.x - 128;
    uint32_t phase = 0;
    int held = lines;
    for (int u = units.begin; u < units.end;) {
      const int index = u / g.units_per_tile, tile_begin = index * g.units_per_tile;
      const int end = min(units.end, tile_begin + g.units_per_tile);
      const bool whole = u == tile_begin && end == tile_begin + g.units_per_tile;
      Accumulator acc;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      for (; u < end; ++u, phase ^= 1) {
        const int rows = min(g.tile_p, g.out_h - unit_of(g, u - tile_begin).p0);
        consume(g, cute::cast_smem_ptr_to_uint(x), cute::cast_smem_ptr_to_uint(dy), full, empty, thread / 128, rows,
                u + 1 == end, phase, scale, held, acc);
        scale = GMMA::ScaleOut::One;
      }
      if (u == units.end) cutlass::arch::launch_dependent_grids();
      if (whole) {
        const Place place = place_of(g, tile_of(g, index), thread);
#pragma unroll
        for (int i = 0; i < ACCUMULATORS / 4; ++i) {
          store(g, place, out, i, {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
        }
      } else {
        const int part = g.splits == 0 ? blockIdx.x : blockIdx.y;
        float4* to = partials + size_t(partial_slot(g, part, index, gridDim.x)) * (TILE_FLOATS / 4) + thread;
#pragma unroll
        for (int i = 0; i < ACCUMULATORS / 4; ++i) {
          to[i * 128 * CONSUMERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        }
      }
    }
  }
}

// ---- reduction -----------------------------------------------------------------------------------------------------

// Grid: x over pieces of a tile, y over tiles. Sums a tile's parts, in the order of the reduction, and stores it.
// `lanes` threads share an element's parts; they meet in shared memory.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_tiles(const float4* partials, Output* out, const __grid_constant__ Args g,
                 const __grid_constant__ ReduceArgs reduce) {
  __shared__ float4 shared[REDUCE_THREADS];
  const int index = blockIdx.y, tile_begin = index * g.units_per_tile;
  int first = 0, parts = g.splits;
  if (g.splits == 0) {
    first = stream_part_of(g, tile_begin);
    parts = stream_part_of(g, tile_begin + g.units_per_tile - 1) - first + 1;
  }
  if (parts == 1) return;
  const int columns = REDUCE_THREADS / reduce.lanes, column = threadIdx.x % columns, lane = threadIdx.x / columns;
  const int element = blockIdx.x * columns + column;
  cutlass::arch::wait_on_dependent_grids();
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int part = lane; part < parts; part += reduce.lanes) {
    const size_t slot = partial_slot(g, first + part, index, gridDim.y);
    const float4 v = __ldcg(partials + slot * (TILE_FLOATS / 4) + element);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  if (reduce.lanes > 1) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0) return;
    for (int other = 1; other < reduce.lanes; ++other) {
      const float4 v = shared[other * columns + column];
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
  }
  const int i = element / (128 * CONSUMERS);
  const Place place = place_of(g, tile_of(g, index), element - i * 128 * CONSUMERS);
  store(g, place, out, i, {sum.x, sum.y, sum.z, sum.w});
}
