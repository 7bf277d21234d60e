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
// Shared memory, three rings:
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
// Roles: warp 0 issues TMA, warps 1 to 3 transpose, the other warpgroups are consumers.
// Barriers: `full` and `empty` of each place of each ring. x and raw: TMA's bytes; emptied by consumer warps
// (4 * CONSUMERS) and by transposers (3). dy: filled by transposers (3), emptied by consumer warps once the
// products of the last line that meets the row have retired. Every ring is walked in order, by units (images,
// strip of output rows, strip of columns), rows and lines; row p of a unit is loaded and needed from line p *
// STRIDE_H on.
//
// Macros: OUT (split_k.cuh), TAPS_H, TAPS_W, BLOCKS, TILE_N, TILE_IMAGES, TILE_Q (output columns of a strip),
// STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, X_STAGES, DY_STAGES, RAGGED (strips reach beyond the output's
// columns).

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/ptx.cuh"
#include "device/split_k.cuh"
#include "device/tensor_map.cuh"
#include "device/wgmma.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Must match `_args` in wgrad_tf32.py.
struct Args {
  int channels, out_channels;        // C, K
  int filter_h, filter_w, groups_w;  // R, S, blocks of taps along S
  int slots, k_blocks;               // blocks of BLOCKS * 64 and of TILE_N channels
  int out_h, out_w;
  int tile_p, tiles_p, tiles_q;  // strips
  int pad_h, pad_w;
  int units, units_per_split;
  int partial_stride;  // elements from one split's partial sums to the next's
};

#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)
using Wgmma = GMMA::PASTE(MMA_64x, TILE_N, x8_F32TF32TF32_RS_TN)<>;

constexpr int CONSUMERS = TAPS_W * BLOCKS;
constexpr int TRANSPOSERS = 3;  // warps
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int RAW_STAGES = 2;
constexpr int ACCUMULATORS = TILE_N / 2;  // of a thread and filter row
constexpr int PIXELS = TILE_IMAGES * TILE_Q;
constexpr int STEPS = PIXELS / 8;
constexpr int REACH = (TAPS_H - 1) * DILATION_H;  // lines beyond a row's first one
constexpr int COLUMNS = (TILE_Q - 1) * STRIDE_W + (TAPS_W - 1) * DILATION_W + 1;

constexpr int PIXEL_BYTES = 128;  // 32 channels
constexpr int PITCH_BYTES = (COLUMNS + 7) / 8 * 8 * PIXEL_BYTES;
constexpr int IMAGE_BYTES = 2 * BLOCKS * PITCH_BYTES;
constexpr int X_BYTES = TILE_IMAGES * IMAGE_BYTES;
constexpr int X_TMA_BYTES = TILE_IMAGES * 2 * BLOCKS * COLUMNS * PIXEL_BYTES;
constexpr int DY_BOXES = TILE_N / 32;
constexpr int DY_BOX_BYTES = PIXELS * PIXEL_BYTES;
constexpr int RAW_BYTES = PIXELS * TILE_N * 4;
constexpr int CHUNK_BYTES = TILE_N * 16;  // four pixels of dY transposed
constexpr int DY_BYTES = RAW_BYTES;

// The register file, shared out by role (setmaxnreg wants multiples of 8).
constexpr int REGS[4][2] = {{104, 240}, {88, 208}, {56, 152}, {64, 104}};
constexpr int PRODUCER_REGS = REGS[CONSUMERS - 1][0], CONSUMER_REGS = REGS[CONSUMERS - 1][1];

using Accumulator = float[TAPS_H][ACCUMULATORS];

// A place of a ring, and the parity of its barriers' phase.
template <int STAGES>
struct Turn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Barriers {
  uint64_t full_x[X_STAGES], empty_x[X_STAGES];
  uint64_t full_raw[RAW_STAGES], empty_raw[RAW_STAGES];
  uint64_t full_dy[DY_STAGES], empty_dy[DY_STAGES];
};

struct Unit {
  int n, p0, q0;
  int rows, lines;  // of dY and of X
};

__device__ inline Unit unit_of(const Args& g, int index) {
  const int rest = index / g.tiles_q, images = rest / g.tiles_p;
  const int p0 = (rest - images * g.tiles_p) * g.tile_p, rows = min(g.tile_p, g.out_h - p0);
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

// ---- producer
// ------------------------------------------------------------------------------------------------------

__device__ inline void load(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, const Tile& tile,
                            int unit, int end, uint8_t* x, uint8_t* raw, Barriers& barriers) {
  constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  Turn<X_STAGES> x_turn;
  Turn<RAW_STAGES> raw_turn;
  for (; unit < end; ++unit) {
    const Unit u = unit_of(g, unit);
    const int h = u.p0 * STRIDE_H - g.pad_h + tile.r0 * DILATION_H;
    const int w = u.q0 * STRIDE_W - g.pad_w + tile.s0 * DILATION_W;
    for (int line = 0; line < u.lines; ++line, x_turn.next()) {
      if (line % STRIDE_H == 0 && line / STRIDE_H < u.rows) {
        EmptyBarrier::wait(&barriers.empty_raw[raw_turn.stage], raw_turn.phase ^ 1);
        uint64_t* full = &barriers.full_raw[raw_turn.stage];
        FullBarrier::arrive_and_expect_tx(full, RAW_BYTES);
        uint8_t* to = raw + raw_turn.stage * RAW_BYTES;
#pragma unroll
        for (int box = 0; box < DY_BOXES; ++box) {
          cute::SM90_TMA_LOAD_4D::copy(&dy_map, full, hint, to + box * DY_BOX_BYTES, tile.k0 + box * 32, u.q0,
                                       u.p0 + line / STRIDE_H, u.n);
        }
        raw_turn.next();
      }
      EmptyBarrier::wait(&barriers.empty_x[x_turn.stage], x_turn.phase ^ 1);
      uint64_t* full = &barriers.full_x[x_turn.stage];
      FullBarrier::arrive_and_expect_tx(full, X_TMA_BYTES);
      uint8_t* to = x + x_turn.stage * X_BYTES;
#pragma unroll
      for (int image = 0; image < TILE_IMAGES; ++image) {
#pragma unroll
        for (int box = 0; box < 2 * BLOCKS; ++box, to += PITCH_BYTES) {
          cute::SM90_TMA_LOAD_4D::copy(&x_map, full, hint, to, tile.c0 + box * 32, w, h + line, u.n + image);
        }
      }
    }
  }
}

// ---- transposers
// ---------------------------------------------------------------------------------------------------

// To nearest, in the upper 19 bits that WGMMA takes. Not cvt.rna, which takes one instruction more and makes
// the largest floats infinite.
__device__ inline uint32_t tf32(uint32_t x) {
  constexpr float largest = 0x1.ffcp127f;  // of those that half a unit does not carry to infinity
  return fabsf(__uint_as_float(x)) <= largest ? x + 0x1000 : x;
}

struct Four {
  uint32_t v[4];
};

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
      pixel[j] = load_shared<Four>(from + at * PIXEL_BYTES + (a ^ at % 8) * 16);
    }
    const uint32_t to = dy + chunk * CHUNK_BYTES + (box * 8 + a) * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      store_shared(to + c * (CHUNK_BYTES / 4), make_uint4(tf32(pixel[0].v[c]), tf32(pixel[1].v[c]),
                                                          tf32(pixel[2].v[c]), tf32(pixel[3].v[c])));
    }
  }
}

__device__ inline void transpose(const Args& g, int unit, int end, uint32_t raw, uint32_t dy,
                                 Barriers& barriers, int warp) {
  const int lane = threadIdx.x % 32;
  Turn<RAW_STAGES> raw_turn;
  Turn<DY_STAGES> dy_turn;
  for (; unit < end; ++unit) {
    const int rows = unit_of(g, unit).rows;
    for (int p = 0; p < rows; ++p, raw_turn.next(), dy_turn.next()) {
      FullBarrier::wait(&barriers.full_raw[raw_turn.stage], raw_turn.phase);
      EmptyBarrier::wait(&barriers.empty_dy[dy_turn.stage], dy_turn.phase ^ 1);
      transpose_row(raw + raw_turn.stage * RAW_BYTES, dy + dy_turn.stage * DY_BYTES, warp, lane);
      cutlass::arch::fence_view_async_shared();  // WGMMA reads what was stored here
      __syncwarp();
      if (lane == 0) {
        EmptyBarrier::arrive(&barriers.empty_raw[raw_turn.stage]);
        EmptyBarrier::arrive(&barriers.full_dy[dy_turn.stage]);
      }
    }
  }
}

// ---- consumers
// -----------------------------------------------------------------------------------------------------

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
      places.at[i][j] = (block * 2 + warp / 2) * PITCH_BYTES + column * PIXEL_BYTES +
                        (chunk ^ column % 8) * 16 + row % 2 * 8;
    }
  }
  places.start = (block * 2 + warp / 2) * PITCH_BYTES + row % 2 * 8;
  places.chunk = chunk;
  places.column = s * DILATION_W;
  return places;
}

// The output column of a thread's pixel of a half, and the address of its two channels in the line at `x`.
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
  return {own, x + places.start + image + column * PIXEL_BYTES + (places.chunk ^ column % 8) * 16};
}

template <int... I>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint64_t b, float (&acc)[ACCUMULATORS],
                                      Indices<I...>) {
  Wgmma::fma(a[0], a[1], a[2], a[3], b, acc[I]..., GMMA::ScaleOut::One);
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

// Whatever holds WGMMAs is __forceinline__: products under way across a call are serialized.

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
#pragma unroll
  for (int r = 0; r < TAPS_H; ++r) {
    if (MASK >> r & 1) fence(acc[r]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) cute::warpgroup_fence_operand(fragment[i]);
  cute::warpgroup_arrive();
#pragma unroll
  for (int r = 0; r < TAPS_H; ++r) {
    if (MASK >> r & 1) {
      wgmma(fragment, b[r] + (STEP * 2 * CHUNK_BYTES >> 4), acc[r],
            typename MakeIndices<ACCUMULATORS>::type{});
    }
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<1>();  // the other fragment is free
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
        cute::warpgroup_wait<0>();
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

// Descriptor of a row of dY: its two chunks of four pixels are CHUNK_BYTES apart, groups of eight channels
// 128.
__device__ inline uint64_t dy_operand(uint32_t address) {
  cute::GmmaDescriptor desc;
  desc.desc_ = 0;
  desc.bitfield.start_address_ = address >> 4;
  desc.bitfield.leading_byte_offset_ = CHUNK_BYTES >> 4;
  desc.bitfield.stride_byte_offset_ = 128 >> 4;
  desc.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::INTERLEAVE);
  return desc.desc_;
}

__device__ __forceinline__ void consume(const Args& g, int unit, int end, uint32_t x, uint32_t dy,
                                        Barriers& barriers, int warpgroup, Accumulator& acc) {
  const bool leads = threadIdx.x % 32 == 0;
  const Places places = places_of(warpgroup);
  const uint64_t operand = dy_operand(dy);
#pragma unroll
  for (int r = 0; r < TAPS_H; ++r) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) acc[r][i] = 0.f;
  }
  Turn<X_STAGES> turn;
  uint32_t rows_before = 0;  // of dY, in units before
  for (; unit < end; ++unit) {
    const Unit u = unit_of(g, unit);
    for (int line = 0; line < u.lines; ++line, turn.next()) {
      int mask = 0;
      uint64_t b[TAPS_H];
#pragma unroll
      for (int r = 0; r < TAPS_H; ++r) {
        const int from = line - r * DILATION_H, p = max(from, 0) / STRIDE_H;
        if (from >= 0 && from % STRIDE_H == 0 && p < u.rows) mask |= 1 << r;
        b[r] = operand + (rows_before + p) % DY_STAGES * (DY_BYTES >> 4);
      }
      if (mask & 1) {
        const uint32_t row = rows_before + line / STRIDE_H;
        FullBarrier::wait(&barriers.full_dy[row % DY_STAGES], row / DY_STAGES & 1);
      }
      FullBarrier::wait(&barriers.full_x[turn.stage], turn.phase);
      multiply_line<(1 << TAPS_H) - 1>(mask, x + turn.stage * X_BYTES, places, b, g.out_w - u.q0, acc);
      __syncwarp();  // what other lanes have read is released too
      if (leads) {
        EmptyBarrier::arrive(&barriers.empty_x[turn.stage]);
        if (mask >> (TAPS_H - 1) & 1) {
          EmptyBarrier::arrive(&barriers.empty_dy[(rows_before + (line - REACH) / STRIDE_H) % DY_STAGES]);
        }
      }
    }
    rows_before += u.rows;
  }
}

// Writes a warpgroup's sums into out[R][S][C][K]. WGMMA's accumulator holds, for lane l, rows l/4 (+8) of the
// warp's 16 and columns 8*j + 2*(l%4) (+1); gather() makes rows l/4 and l/4 + 8 channels 2*(l/4) and the
// next.
template <class T>
__device__ inline void store(const Args& g, const Tile& tile, T* out, int warpgroup, const Accumulator& acc) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int s = tile.s0 + warpgroup % TAPS_W;
  const int c = tile.c0 + warpgroup / TAPS_W * 64 + warp * 16 + lane / 4 * 2;
  if (s >= g.filter_w) return;
#pragma unroll
  for (int tap = 0; tap < TAPS_H; ++tap) {
    const int r = tile.r0 + tap;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (r >= g.filter_h || c + half >= g.channels) continue;
      T* to = out + (size_t(r * g.filter_w + s) * g.channels + c + half) * g.out_channels;
#pragma unroll
      for (int box = 0; box < DY_BOXES; ++box) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = tile.k0 + 4 * (8 * box + 2 * (lane % 4) + e);
          if (k >= g.out_channels) continue;
          Vec<T, 4> four;
#pragma unroll
          for (int i = 0; i < 4; ++i) convert(acc[tap][4 * (i * DY_BOXES + box) + 2 * half + e], four.v[i]);
          *reinterpret_cast<Vec<T, 4>*>(to + k) = four;
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
  extern __shared__ uint8_t memory[];
  __shared__ Barriers barriers;
  uint8_t* x = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
  uint8_t* raw = x + X_STAGES * X_BYTES;
  uint8_t* dy = raw + RAW_STAGES * RAW_BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) {
      FullBarrier::init(&barriers.full_x[i], 1);
      EmptyBarrier::init(&barriers.empty_x[i], 4 * CONSUMERS);
    }
    for (int i = 0; i < RAW_STAGES; ++i) {
      FullBarrier::init(&barriers.full_raw[i], 1);
      EmptyBarrier::init(&barriers.empty_raw[i], TRANSPOSERS);
    }
    for (int i = 0; i < DY_STAGES; ++i) {
      FullBarrier::init(&barriers.full_dy[i], TRANSPOSERS);
      EmptyBarrier::init(&barriers.empty_dy[i], 4 * CONSUMERS);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const Tile tile = tile_of(g, blockIdx.x);
  const int unit = blockIdx.y * g.units_per_split, end = min(unit + g.units_per_split, g.units);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp > 0) {
      transpose(g, unit, end, cute::cast_smem_ptr_to_uint(raw), cute::cast_smem_ptr_to_uint(dy), barriers,
                warp - 1);
    } else if (cute::elect_one_sync()) {
      load(x_map, dy_map, g, tile, unit, end, x, raw, barriers);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int warpgroup = warp / 4 - 1;
    Accumulator acc;
    consume(g, unit, end, cute::cast_smem_ptr_to_uint(x), cute::cast_smem_ptr_to_uint(dy), barriers,
            warpgroup, acc);
    launch_dependent_grids();
    store(g, tile, out + size_t(blockIdx.y) * g.partial_stride, warpgroup, acc);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgrad_partial(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
                  const __grid_constant__ Args g, float* partials) {
  wgrad(x_map, dy_map, g, partials);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgrad_direct(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
                 const __grid_constant__ Args g, Output* out) {
  wgrad(x_map, dy_map, g, out);
}
