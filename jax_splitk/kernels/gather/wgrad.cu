// Split-k convolution weight gradient for Hopper where TMA cannot load X or where X is float32: any channel
// counts, any strides, dilations (of either side) and padding, one to three spatial dimensions.
//
//   dW[tap, c, k] = sum over pixels (n, o, p, q) of
//       X[n, pixel*stride - pad + tap*dilation, c] * dY[n, o, p, q, k]
//
// A stage of the pipeline holds a tile of TILE_IMAGES x TILE_P x TILE_Q output pixels: dY as WGMMA's B
// operand (MN-major, 128-byte swizzle), and all of X that the windows of these pixels touch, once, as it is
// in memory, with zeros where a window leaves the image. Nothing is unrolled to columns in memory: A's
// fragments, [rows: (tap, channel)] x [pixels], are gathered into registers by WGMMA's own warps. A row's
// place in X's stage is fixed for a thread, a pixel's place is a compile-time constant away from it. What a
// fragment's two rows of a thread are is free to choose: they are neighbours in memory, so that one access
// loads both (PAIRED: where every pixel and tap is an even number of elements away).
//
// Rows of A are the elements of `segments`: a filter tap's channels or, where the taps of a filter row are
// contiguous in memory (RUNS), all of a filter row's. With PAIRED a segment is filled up to even places at
// both ends; the rows in excess read neighbours or unwritten memory and are not stored.
//
// float32 (PARTS > 1): each number is cut into bf16 parts by truncation, h + m (+ l). Two parts give three
// products, hh + hm + mh (about 16 bits); three hold the number exactly and give six (hh + hm + mh + mm + hl
// + lh). A part of an infinity or NaN that would meet 0 or an opposite infinity must not spoil it: these are
// whole in h, zero in m and l, and the products with m and l take `f`, h with zeros in their place.
//
// Roles: warpgroup 0 is the producer (cp.async for X; for dY TMA, cp.async or its own loads), the others are
// consumers.
// `full` has an arrival of each producer thread for its cp.asyncs and one for its own stores, as far as there
// are any, and one for TMA's bytes; `empty` one of each consumer warp, once the WGMMAs that follow its reads
// have retired.
//
// Macros: ELEMENT, OUT, CTAS_PER_SM, PRODUCER_REGS, CONSUMER_REGS and what gather.py takes from its Config
// (CONSUMERS warpgroups of BLOCKS 64-row blocks), Volume and Layout: those of gather/input.cuh. TAP_*:
// from one tap to the next. SEGMENTS of SEGMENT elements have SEGMENT_ROWS rows each, of which PARITY (0 or
// 1) come before the first element. COPIES: bf16 parts of an operand, h, m, (l,) f. CHAIN: times 16 pixels
// from one rounding addition to the next, with three parts. RAGGED: some tiles reach beyond the output.
// DY_VEC: channels of dY that are loaded or copied at a time without DY_TMA; they divide all.

#include "device/skeleton.cuh"
#include "device/split_k.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "gather/input.cuh"

// dY: a tensor map, or where TMA cannot load it, its address.
#if DY_TMA
using Gradient = TensorMap;
#else
using Gradient = const Element*;
#endif

using Wgmma = WGMMA_16(TILE_N, RS)<GMMA::Major::K, GMMA::Major::MN>;

constexpr int THREADS = PRODUCERS + 128 * CONSUMERS;
constexpr int BLOCK_M = 64 * BLOCKS * CONSUMERS;
constexpr int ACCUMULATORS = TILE_N / 2;  // per thread and 64-row block

constexpr int FINITE = COPIES - 1;       // f, the last part
constexpr int BOX_BYTES = PIXELS * 128;  // 64 channels of dY
constexpr int DY_BOXES = (TILE_N + 63) / 64;
constexpr int COPY_BYTES = DY_BOXES * BOX_BYTES;
constexpr bool DY_ASYNC = !DY_TMA && PARTS == 1 && DY_VEC > 1;  // cp.async needs whole words
constexpr bool COPIES_ASYNC = X_ASYNC || DY_ASYNC;
constexpr bool STORES = !X_ASYNC || !(DY_TMA || DY_ASYNC);  // the producer stores to shared memory itself
using Windows = Pipeline<STAGES, PRODUCERS*(COPIES_ASYNC + STORES) + DY_TMA, 4 * CONSUMERS>;

// ---- bf16 parts of floats ---------------------------------------------------------------------------------

// NaN to zero, all else as it is.
__device__ inline uint32_t without_nan(uint32_t pair) { return max_xorsign_abs_bf16x2(pair, 0); }

// Infinities and NaN to zero, all else as it is.
__device__ inline uint32_t finite(uint32_t pair) { return without_nan(fma_bf16x2(pair, 0, pair)); }

__device__ inline void subtract(float& low, float& high, uint32_t pair) {
  low -= __uint_as_float(pair << 16);
  high -= __uint_as_float(pair & 0xffff0000u);
}

// The parts of two floats, packed.
__device__ inline void split(float low, float high, uint32_t (&part)[COPIES]) {
  part[0] = truncate_to_bf16x2(low, high);
  if constexpr (PARTS > 1) {
    subtract(low, high, part[0]);
    if constexpr (PARTS == 3) {
      const uint32_t middle = truncate_to_bf16x2(low, high);
      part[1] = without_nan(middle);
      subtract(low, high, middle);
    }
    part[PARTS - 1] = without_nan(to_bf16x2(low, high));
    part[FINITE] = finite(part[0]);
  }
}

// ---- producer ---------------------------------------------------------------------------------------------

// dY without TMA: chunks of 8 channels of a pixel, which go where the 128-byte swizzle has them.
constexpr int CHUNKS = TILE_N / 8, DY_CHUNKS = PIXELS * CHUNKS;

struct Chunk {
  bool inside;     // the output has its pixel, and its first channel
  int channel;     // the first one
  int64_t offset;  // of that, in dY
  uint32_t to;     // bytes from the stage's start
};

__device__ inline Chunk dy_chunk(const Args& g, const Tile& tile, int k0, int i) {
  const int pixel = i / CHUNKS, chunk = i - pixel * CHUNKS, k = k0 + chunk * 8;
  const int n = tile.image + pixel / (TILE_P * TILE_Q), p = tile.p + pixel / TILE_Q % TILE_P,
            q = tile.q + pixel % TILE_Q;
  const bool inside = i < DY_CHUNKS && n < g.batch && p < g.out.h && q < g.out.w && k < g.out_channels;
  const int at = ((n * g.out.d + tile.d) * g.out.h + p) * g.out.w + q;
  return {inside, k, int64_t(at) * g.out_channels + k,
          uint32_t(chunk / 8 * BOX_BYTES + swizzled(pixel, chunk % 8))};
}

// DY_ASYNC: copies of DY_VEC channels.
[[maybe_unused]] __device__ inline void copy_dy(const Args& g, const Element* dy, uint32_t stage,
                                                const Tile& tile, int k0) {
  constexpr int BYTES = DY_ASYNC ? DY_VEC * ITEM : 4;
#pragma unroll 2
  for (int i = threadIdx.x; i < DY_CHUNKS; i += PRODUCERS) {
    const Chunk chunk = dy_chunk(g, tile, k0, i);
#pragma unroll
    for (int v = 0; v < 8; v += DY_VEC) {
      const bool inside = chunk.inside && chunk.channel + v < g.out_channels;
      copy_async<BYTES>(stage + chunk.to + v * ITEM, inside ? dy + (chunk.offset + v) : dy,
                        inside ? BYTES : 0);
    }
  }
}

// Otherwise loads, whose elements are cut into parts where they are float32.
[[maybe_unused]] __device__ inline void load_dy(const Args& g, const Element* dy, uint32_t stage,
                                                const Tile& tile, int k0) {
  constexpr int BATCH = 2;
  for (int base = threadIdx.x; base < DY_CHUNKS; base += PRODUCERS * BATCH) {
    Vec<Element, DY_VEC> value[BATCH][8 / DY_VEC];
    uint32_t to[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const Chunk chunk = dy_chunk(g, tile, k0, base + j * PRODUCERS);
      to[j] = stage + chunk.to;
#pragma unroll
      for (int v = 0; v < 8 / DY_VEC; ++v) {
        value[j][v] = chunk.inside && chunk.channel + v * DY_VEC < g.out_channels
                          ? *reinterpret_cast<const Vec<Element, DY_VEC>*>(dy + chunk.offset + v * DY_VEC)
                          : Vec<Element, DY_VEC>{};
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (base + j * PRODUCERS >= DY_CHUNKS) continue;
      uint32_t words[COPIES][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Element low = value[j][2 * w / DY_VEC].v[2 * w % DY_VEC];
        const Element high = value[j][(2 * w + 1) / DY_VEC].v[(2 * w + 1) % DY_VEC];
        uint32_t part[COPIES];
        if constexpr (PARTS == 1) {
          part[0] = reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
        } else {
          split(low, high, part);
        }
#pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) words[copy][w] = part[copy];
      }
#pragma unroll
      for (int copy = 0; copy < COPIES; ++copy) {
        const uint32_t (&v)[4] = words[copy];
        store_shared(to[j] + copy * COPY_BYTES, make_uint4(v[0], v[1], v[2], v[3]));
      }
    }
  }
}

__device__ inline void produce(const Gradient& dy, const Args& g, const Element* x, uint32_t stages,
                               Windows& pipeline, int c0, int k0, int kt, int kt_end) {
  Tile tile = tile_at(g, kt);
  Position at;
  for (; kt < kt_end; ++kt, advance(g, tile), at.advance(STAGES)) {
    pipeline.wait_empty(at);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
#if DY_TMA
    if (threadIdx.x == 0) {
      uint64_t* full = pipeline.expect(at, COPY_BYTES);
#pragma unroll
      for (int box = 0; box < DY_BOXES; ++box) {
        load_box(dy, full, stage + box * BOX_BYTES, k0 + box * 64, tile.q, tile.p, tile.d, tile.image);
      }
    }
#endif
    load_x(g, x, stage + COPIES * COPY_BYTES, tile, c0);
#if !DY_TMA
    if constexpr (DY_ASYNC) copy_dy(g, dy, stage, tile, k0);
#endif
    if constexpr (COPIES_ASYNC) Barrier::arrive_after_copies(&pipeline.full[at.stage]);
#if !DY_TMA
    if constexpr (!DY_ASYNC) {
      load_dy(g, dy, stage, tile, k0);
      fence_async_shared();  // WGMMA reads what was stored here
    }
#endif
    if constexpr (STORES) Barrier::arrive(&pipeline.full[at.stage]);
  }
}

// ---- consumer ---------------------------------------------------------------------------------------------

// A row of the A operand.
struct Row {
  int segment;
  int position;  // from the segment's first element; negative or beyond its end in filled up places
};

__device__ inline Row row_of(int m) { return {m / SEGMENT_ROWS, m % SEGMENT_ROWS - PARITY}; }

// Elements from the stage's start to the row's element for the tile's first pixel.
__device__ inline int row_offset(int m) {
  Row row = row_of(m);
  // Rows beyond the filter read something, and are not stored.
  const int segment = min(row.segment, SEGMENTS - 1);
  const int s = RUNS ? 0 : segment % KERNEL_W, tr = RUNS ? segment : segment / KERNEL_W;
  return (tr / KERNEL_H * ROWS * ROW_PITCH) + tr % KERNEL_H * TAP_ROW + s * TAP_COL + LEAD + row.position;
}

using Accumulator = float[BLOCKS][ACCUMULATORS];
using Fragment = uint32_t[COPIES][4];

// WGMMA truncates its sums to 24 bits (and what it adds to two more), an error of one sign that grows with
// the number of products added to a large sum. So with three parts a chain of CHAIN times 16 pixels adds the
// small products first and hh last, and is taken over into `sum` by rounding additions.
constexpr bool PROMOTE = PARTS == 3;
static_assert(PIXELS % (16 * CHAIN) == 0, "whole chains in a stage");

// h of a chain's fragments.
using High = uint32_t[CHAIN][4];

// The two rows' elements of a thread at one pixel: a word holds both, or each holds one.
struct Two {
  uint32_t first, second;
};

// `at`: addresses of the elements of the thread's two rows.
__device__ inline Two load_two(const uint32_t (&at)[2], int bytes) {
  using Item = conditional_t<ITEM == 4, uint32_t, uint16_t>;
  if constexpr (!PAIRED) {
    const uint32_t first = load_shared<Item>(at[0] + bytes), second = load_shared<Item>(at[1] + bytes);
    return {ITEM == 2 ? first | second << 16 : first, second};
  } else if constexpr (ITEM == 2) {
    return {load_shared<uint32_t>(at[0] + bytes), 0};
  } else {
    return load_shared<Two>(at[0] + bytes);
  }
}

// A's fragment for 16 pixels from `k` on. WGMMA's A fragment holds, for lane l, rows l/4 (+8) and pixels
// 2*(l%4) (+1) (+8). `at` includes pixel 2*(l%4); bit i of `inside` says whether pixel 2*(l%4) + i % 2 + i /
// 2 * 8 is to count.
__device__ inline void gather(const uint32_t (&at)[2], int k, [[maybe_unused]] const uint32_t (&inside)[4],
                              Fragment& a) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int bytes = pixel_offset(k + 8 * half) * ITEM;
    Two even = load_two(at, bytes), odd = load_two(at, bytes + pixel_offset(1) * ITEM);
#if RAGGED
    even.first &= inside[2 * half];
    odd.first &= inside[2 * half + 1];
    even.second &= inside[2 * half];
    odd.second &= inside[2 * half + 1];
#endif
    if constexpr (ITEM == 2) {
      a[0][2 * half] = __byte_perm(even.first, odd.first, 0x5410);
      a[0][2 * half + 1] = __byte_perm(even.first, odd.first, 0x7632);
    } else {
      uint32_t part[2][COPIES];
      split(__uint_as_float(even.first), __uint_as_float(odd.first), part[0]);
      split(__uint_as_float(even.second), __uint_as_float(odd.second), part[1]);
#pragma unroll
      for (int copy = 0; copy < COPIES; ++copy) {
        a[copy][2 * half] = part[0][copy];
        a[copy][2 * half + 1] = part[1][copy];
      }
    }
  }
}

// All ones for each of a thread's pixels of 16 from `k` on that the output has, else zeros.
[[maybe_unused]] __device__ inline void inside_output(const Args& g, const Tile& tile, int k,
                                                      uint32_t (&inside)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int pixel = k + 2 * int(threadIdx.x % 4) + i % 2 + i / 2 * 8;
    const bool in = tile.q + pixel % TILE_Q < g.out.w && tile.p + pixel / TILE_Q % TILE_P < g.out.h &&
                    tile.image + pixel / (TILE_Q * TILE_P) < g.batch;
    inside[i] = in ? ~0u : 0u;
  }
}

// The products of one fragment with dY. With three parts all but hh, the smallest first.
__device__ inline void multiply(const Fragment& a, uint64_t b, float (&acc)[ACCUMULATORS],
                                GMMA::ScaleOut scale) {
  constexpr uint64_t COPY = COPY_BYTES >> 4;
  if constexpr (PARTS == 3) {
    wgmma<Wgmma>(a[2], b + FINITE * COPY, acc, scale);
    wgmma<Wgmma>(a[FINITE], b + 2 * COPY, acc, GMMA::ScaleOut::One);
    wgmma<Wgmma>(a[1], b + COPY, acc, GMMA::ScaleOut::One);
  } else {
    wgmma<Wgmma>(a[0], b, acc, scale);
  }
  if constexpr (PARTS > 1) {
    wgmma<Wgmma>(a[1], b + FINITE * COPY, acc, GMMA::ScaleOut::One);
    wgmma<Wgmma>(a[FINITE], b + COPY, acc, GMMA::ScaleOut::One);
  }
}

// hh of a chain whose last 16 pixels are at `b`.
__device__ inline void multiply_high(const High& high, uint64_t b, float (&acc)[ACCUMULATORS]) {
#pragma unroll
  for (int i = 0; i < CHAIN; ++i) {
    wgmma<Wgmma>(high[i], b - (CHAIN - 1 - i) * (16 * 128 >> 4), acc, GMMA::ScaleOut::One);
  }
}

__device__ inline void promote(float (&chain)[ACCUMULATORS], float (&sum)[ACCUMULATORS]) {
  fence(chain);
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) sum[i] += chain[i];
}

// Tells the producer that the warp, all of its lanes, has read a stage (none: -1).
__device__ inline void release(Windows& pipeline, int stage) {
  __syncwarp();
  if (stage >= 0 && threadIdx.x % 32 == 0) pipeline.release(stage);
}

__device__ inline void consume(const Args& g, uint32_t stages, Windows& pipeline, int m0, int kt, int kt_end,
                               Accumulator& sum) {
  const int lane = threadIdx.x % 32, m = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4 * 2;
  uint32_t at[BLOCKS][2];
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at[block][i] =
          COPIES * COPY_BYTES + (row_offset(m + block * 64 + i) + pixel_offset(2 * (lane % 4))) * ITEM;
    }
  }
  [[maybe_unused]] Tile tile = tile_at(g, kt);
  [[maybe_unused]] Accumulator chain;
  Accumulator& acc = PROMOTE ? chain : sum;
  if constexpr (PROMOTE) {
#pragma unroll
    for (auto& sums : sum) {
#pragma unroll
      for (float& element : sums) element = 0.f;
    }
  }
  // Two fragments take turns: one is gathered while the tensor cores read the other.
  Fragment a[2];
  [[maybe_unused]] High high[BLOCKS];
  uint32_t inside[4] = {~0u, ~0u, ~0u, ~0u};
  Position place;
  int previous = -1;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
  for (; kt < kt_end; ++kt) {
    pipeline.wait_full(place);
    if constexpr (DY_ASYNC) fence_async_shared();  // WGMMA reads what cp.async has written
    const uint32_t stage = stages + place.stage * STAGE_BYTES;
    const uint64_t b = operand(stage, BOX_BYTES);
#if RAGGED
    const bool whole =
        tile.q + TILE_Q <= g.out.w && tile.p + TILE_P <= g.out.h && tile.image + TILE_IMAGES <= g.batch;
#endif
#pragma unroll
    for (int k = 0; k < PIXELS; k += 16) {
#if RAGGED
      if (!whole) {
        inside_output(g, tile, k, inside);
      } else if (k == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) inside[i] = ~0u;
      }
#endif
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        Fragment& fragment = a[(k / 16 * BLOCKS + block) % 2];
        const uint32_t now[2] = {stage + at[block][0], stage + at[block][1]};
        gather(now, k, inside, fragment);
        const int link = k / 16 % CHAIN;
        const bool last = PROMOTE && link == CHAIN - 1;
        if constexpr (PROMOTE) {
          scale = link ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
#pragma unroll
          for (int i = 0; i < 4; ++i) high[block][link][i] = fragment[0][i];
        }
#pragma unroll
        for (int copy = PROMOTE; copy < COPIES; ++copy) fence(fragment[copy]);  // h is elsewhere
        if (last) fence(high[block]);
        const auto products = [&] {
          multiply(fragment, b + k * (128 >> 4), acc[block], scale);
          if (last) multiply_high(high[block], b + k * (128 >> 4), acc[block]);
        };
        batch(products, acc[block]);
        // The batch before this one has retired, so its fragment and, at a stage's start, its stage are free.
        wait_batches<1>();
        if (!PROMOTE && k == 0 && block == 0) release(pipeline, previous);
        if (last && block > 0) promote(acc[block - 1], sum[block - 1]);
      }
      scale = GMMA::ScaleOut::One;
      if (PROMOTE && k / 16 % CHAIN == CHAIN - 1) {
        wait_batches<0>();
        if (k + 16 == PIXELS) release(pipeline, place.stage);
        promote(acc[BLOCKS - 1], sum[BLOCKS - 1]);
      }
    }
    advance(g, tile);
    previous = place.stage;
    place.advance(STAGES);
  }
  wait_batches<0>(acc);
}

// Writes a warpgroup's blocks into out[taps][C][K], leaving out rows and columns beyond the problem.
template <class T>
__device__ inline void store(const Args& g, T* out, int m0, int c0, int k0, Accumulator& sum) {
  const int lane = threadIdx.x % 32, m = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4 * 2,
            column = 2 * (lane % 4);
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_of(m + block * 64 + half);
      const int c = c0 + row.position;
      if (row.segment >= SEGMENTS || row.position < 0 || row.position >= SEGMENT) continue;
      if (!RUNS && c >= g.channels) continue;
      T* to = out + (size_t(row.segment) * (RUNS ? SEGMENT : g.channels) + c) * g.out_channels;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        const int k = k0 + 8 * j + column;
        const float v[2] = {sum[block][4 * j + 2 * half], sum[block][4 * j + 2 * half + 1]};
        if (g.out_channels % 2 == 0) {
          if (k >= g.out_channels) continue;
          store_values(to + k, v);
        } else {
          if (k < g.out_channels) convert(v[0], to[k]);
          if (k + 1 < g.out_channels) convert(v[1], to[k + 1]);
        }
      }
    }
  }
}

// Grid: x over output tiles (neighbours share pixels, and so their inputs in L2), y over splits. Split s
// covers tiles of pixels [s, s+1) * k_tiles_per_split and writes out + s * partial_stride; the plan leaves no
// split empty.
template <class T>
__device__ inline void wgrad(const Gradient& dy, const Args& g, const Element* x, T* out) {
  __shared__ Windows pipeline;
  const uint32_t stages = shared_stages();
  const int mn_tiles = g.m_tiles * g.n_tiles;
  const int slice = blockIdx.x / mn_tiles, mn = blockIdx.x - slice * mn_tiles;
  const int m_tile = mn / g.n_tiles, k0 = (mn - m_tile * g.n_tiles) * TILE_N, c0 = slice * SLICE;
  const int kt = blockIdx.y * g.k_tiles_per_split, kt_end = min(kt + g.k_tiles_per_split, g.k_tiles);
  run_roles<Roles<PRODUCERS / 32, PRODUCER_REGS, CONSUMER_REGS, true>>(
      [&](int) { produce(dy, g, x, stages, pipeline, c0, k0, kt, kt_end); },
      [&](int) {
        const int m0 = m_tile * BLOCK_M + (threadIdx.x / 128 - 1) * 64 * BLOCKS;
        Accumulator sum;
        consume(g, stages, pipeline, m0, kt, kt_end, sum);
        launch_dependent_grids();
        store(g, out + size_t(blockIdx.y) * g.partial_stride, m0, c0, k0, sum);
      },
      pipeline);
}

SPLIT_K_KERNELS((const __grid_constant__ Gradient dy, const __grid_constant__ Args g, const Element* x),
                (dy, g, x))
