// Split-k weight gradient of a depthwise convolution for Hopper, on CuTe and CUTLASS atoms: TMA feeding
// warp-level tensor-core products.
//
//   dW[r, s, k] = sum over pixels (n, p, q) of
//       X[n, p*stride - pad + r*dilation, q*stride - pad + s*dilation, k / multiplier] * dY[n, p, q, k]
//
// For one channel and one shift s it is a small matrix product over the columns of rows of the two images,
//   D_s[i, j] = sum over q of X[row i, q + s] * dY[row j, q],      dW[r, s] = sum over j of D_s[j + r, j],
// with i over 16 rows of X and j over 8 rows of dY: one m16n8k16 product for each s and 16 columns. A
// thread's operands are a run of `SEGMENT` columns of one row of each image; a shift of the run by s is a
// renaming of its registers, for odd s of the registers with the halves of neighbours. So an element is read
// from shared memory once for all taps. Two blocks of 8 rows of X make an operand, and the lower of the next
// one is this one's upper: it stays in registers.
//
// Images lie under each other as one tall image, with just so many rows of zeros between them that no tap
// reaches from one into the next: `pitch` rows from one to the next. Where a row is wider than a tile, its
// tiles count as images. A block is 8 rows of the tall image, `SEGMENTS` neighbouring segments wide and
// IMAGES images deep: 4 segments in all, one for each of the four lanes that share a row of an operand. A
// split is a run of blocks.
//
// Taps that do not fit one operand are other thread blocks' (`Taps`); so are the taps of each residue of a
// stride, for which X is read with that stride: its rows and columns as they are used here are always
// neighbours.
//
// There is one role. Turn by turn, where the first has X's rows alone and the others the next 8 of X and 8
// of dY, a warp
//   1. waits for the stage (`full`; pixels of CHANNELS channels each, zeros outside of the images),
//   2. does its part of the transposition into planes [channel][image][row][column], by ldmatrix.trans,
//   3. meets the others (__syncthreads): the planes are complete and the stage is free; it starts the load
//      of its own row of the turn that comes into this stage, by TMA (every warp arrives at `full`, with its
//      row's bytes),
//   4. computes the products of its own channel from the planes.
// With more than one pass (of one channel to a warp), steps 2 to 4 are repeated for each. There are two sets
// of planes, used in turns: a warp that is in step 2 again writes the other set, and this one only after a
// barrier that all pass after their step 4.
//
// Macros: ELEMENT_BF16, CHANNELS (of a thread block), SEGMENT (8 or 16 columns), SEGMENTS (1, 2 or 4 along a
// row), COLUMNS (of dY in a tile, a multiple of 8), TAPS (of a block of taps, along a row), SHIFT (columns
// from tap to tap), STAGE_BYTES and PLANES_BYTES (what the plan reckons with), OUT (split_k.cuh).

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/arch/barrier.h>

#include "split_k.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The taps of one axis: tap t belongs to class t % step; the taps of a class are `shift` rows or columns
// apart and cut into `blocks` blocks of at most `size` taps.
struct Taps {
  int kernel, step, size, blocks;
};

// Must match `_args` in wgrad_depthwise.py.
struct Args {
  int batch, in_channels, out_channels, multiplier;
  int in_h, in_w, out_h, out_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Taps taps_h, taps_w;
  int shift_h;           // rows of X, as they are read here, from tap to tap
  int tap_blocks_w;      // blocks of taps along a row
  int tap_blocks;
  int tiles_w;           // tiles of COLUMNS columns in a row of dY
  int pitch;
  int blocks, blocks_per_split;
  int stages;
};

#if ELEMENT_BF16
using Element = __nv_bfloat16;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
__device__ inline float to_float(Element x) { return __bfloat162float(x); }
#else
using Element = __half;
using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
__device__ inline float to_float(Element x) { return __half2float(x); }
#endif

constexpr int ROWS = 8;  // of a block
constexpr int IMAGES = 4 / SEGMENTS;
constexpr int WARPS = CHANNELS < 16 ? CHANNELS : 16;
constexpr int THREADS = 32 * WARPS;
constexpr int PASSES = CHANNELS / WARPS;
constexpr int CTAS_PER_SM = 16 / WARPS;
constexpr int REACH = (TAPS - 1) * SHIFT;
constexpr int X_WORDS = (SEGMENT + REACH + 1) / 2, Y_WORDS = SEGMENT / 2;
constexpr int MAX_TAPS_H = 9, MAX_STAGES = 4;
constexpr unsigned ALL = ~0u;

constexpr int larger(int a, int b) { return a > b ? a : b; }

// One operand in shared memory. In a stage: [row][image][BOX_W pixels]. In the planes, in units of 16 bytes:
// an odd number of them to a channel, for the stores; odd rows and images that keep the four segments of a
// row apart, for the loads. Nothing has a bank conflict.
template <int COLUMNS_, int READ>
struct Layout {
  static constexpr int CHUNKS = (COLUMNS_ + 7) / 8;  // of 8 columns
  static constexpr int BOX_W = CHUNKS * 8;
  static constexpr int ROW_BYTES = IMAGES * BOX_W * CHANNELS * 2;
  static constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
  static constexpr int READ_CHUNKS = (READ + 7) / 8;
  static constexpr int ROW = larger(CHUNKS, (SEGMENTS - 1) * (SEGMENT / 8) + READ_CHUNKS) | 1;
  static constexpr int IMAGE = ROWS * ROW + (SEGMENTS == 4 ? 0 : SEGMENTS == 2 ? 4 : 2);
  static constexpr int CHANNEL = IMAGES * IMAGE | 1;
  static constexpr int PLANE_BYTES = CHANNEL * WARPS * 16;
};

using X = Layout<COLUMNS + REACH, SEGMENT + REACH>;
using Y = Layout<COLUMNS, SEGMENT>;
static_assert(STAGE_BYTES == X::OPERAND_BYTES + Y::OPERAND_BYTES, "`stage_bytes` in wgrad_depthwise.py");
static_assert(PLANES_BYTES == X::PLANE_BYTES + Y::PLANE_BYTES, "`planes_bytes` in wgrad_depthwise.py");

template <int I>
struct Constant {
  static constexpr int value = I;
};

// What does not change over a thread block's turns: its taps and channels.
struct Work {
  int r0, s0;         // first taps; the next ones follow at taps_h.step, taps_w.step
  int k0, c0;         // first output and input channel
  int begin, end;     // blocks of dY

  __device__ Work(const Args& g) {
    const int taps = blockIdx.x % g.tap_blocks;
    r0 = first(g.taps_h, taps / g.tap_blocks_w);
    s0 = first(g.taps_w, taps % g.tap_blocks_w);
    k0 = blockIdx.x / g.tap_blocks * CHANNELS;
    c0 = k0 / g.multiplier & ~7;  // TMA wants whole 16 bytes
    begin = blockIdx.y * g.blocks_per_split;
    end = min(begin + g.blocks_per_split, g.blocks);
  }

  // The tap with an index in the thread block's taps [taps_h.size][TAPS]; it may be beyond the filter.
  __device__ int r(const Args& g, int index) const { return r0 + index / TAPS * g.taps_h.step; }
  __device__ int s(const Args& g, int index) const { return s0 + index % TAPS * g.taps_w.step; }

  __device__ static int first(const Taps& taps, int block) {
    return block / taps.blocks + block % taps.blocks * taps.size * taps.step;
  }
};

// A row of the tall image: where its pixels come from.
struct Row {
  int n, tile, p;  // first image, tile, row of dY (beyond the last one: zeros)

  Row() = default;
  __device__ Row(const Args& g, int row) {
    const int run = row / g.pitch;
    p = row - run * g.pitch;
    n = run / g.tiles_w * IMAGES;
    tile = run % g.tiles_w;
  }

  // 8 rows on.
  __device__ void advance(const Args& g) {
    for (p += ROWS; p >= g.pitch; p -= g.pitch) {
      if (++tile == g.tiles_w) {
        tile = 0;
        n += IMAGES;
      }
    }
  }
};

// ---- loads ------------------------------------------------------------------------------------------------

// A warp's rows of every turn: of a turn's 16 rows, 8 of X and 8 of dY, row `warp`, and warp + 8 where there
// are 8 warps.
struct Loader {
  static constexpr int COUNT = 2 * ROWS / WARPS;
  Row rows[COUNT];  // in the next turn that is loaded
  int turn = 0, turns;

  __device__ Loader(const Args& g, const Work& work, int warp) : turns(work.end - work.begin + 1) {
    for (int i = 0; i < COUNT; ++i) rows[i] = Row(g, work.begin * ROWS + warp % ROWS);
  }

  __device__ void load(const TensorMap& x_map, const TensorMap& y_map, const Args& g, const Work& work,
                       int warp, uint8_t* stage, uint64_t* full) {
    uint8_t* x_row = stage + warp % ROWS * X::ROW_BYTES;
    uint8_t* y_row = stage + X::OPERAND_BYTES + warp % ROWS * Y::ROW_BYTES;
    constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if (turn == turns) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool is_y = COUNT == 2 ? i == 1 : warp >= ROWS;
      Row& row = rows[i];
      if (!is_y) {
        if (cute::elect_one_sync()) {
          const int h = row.p * g.stride_h + work.r0 * g.dilation_h - g.pad_h;
          const int w = row.tile * COLUMNS * g.stride_w + work.s0 * g.dilation_w - g.pad_w;
          FullBarrier::arrive_and_expect_tx(full, X::ROW_BYTES);
          cute::SM90_TMA_LOAD_4D::copy(&x_map, full, hint, x_row, work.c0, w, h, row.n);
        }
        row.advance(g);
      } else if (turn > 0) {
        if (cute::elect_one_sync()) {
          FullBarrier::arrive_and_expect_tx(full, Y::ROW_BYTES);
          cute::SM90_TMA_LOAD_4D::copy(&y_map, full, hint, y_row, work.k0, row.tile * COLUMNS, row.p, row.n);
        }
        row.advance(g);
      } else if (cute::elect_one_sync()) {
        FullBarrier::arrive(full);
      }
    }
    ++turn;
  }
};

// ---- step 2: pixels of channels to planes of columns ------------------------------------------------------

// This warp's granules of 4 rows x 8 columns x 8 channels. A matrix of ldmatrix is 8 columns of a row;
// transposed, lane (channel, t) holds columns 2t and 2t + 1. Swizzled as TMA wrote it: the 16-byte part of a
// pixel is xor-ed with address bits from 7 on.
template <class L>
__device__ inline void transpose(const uint8_t* stage, int pass, int warp, uint32_t* planes) {
  constexpr int GRANULES = WARPS / 8 * 2 * IMAGES * L::CHUNKS;
  int lane = threadIdx.x % 32;
  // With two channels to a warp there are no registers for addresses from one turn to the next.
  if (PASSES > 1) asm volatile("" : "+r"(lane));
#pragma unroll
  for (int i = 0; i < (GRANULES + WARPS - 1) / WARPS; ++i) {
    const int granule = warp + i * WARPS;
    if (GRANULES % WARPS != 0 && granule >= GRANULES) break;
    const int chunk = granule % L::CHUNKS, image = granule / L::CHUNKS % IMAGES;
    const int row = granule / L::CHUNKS / IMAGES % 2 * 4, part = granule / L::CHUNKS / IMAGES / 2;
    const int pixel = ((row + lane / 8) * IMAGES + image) * L::BOX_W + chunk * 8 + lane % 8;
    const int at = pixel * CHANNELS * 2, swizzle = at >> 7 & (CHANNELS / 8 - 1);
    const uint8_t* from = stage + (at | ((swizzle ^ (pass * (WARPS / 8) + part)) << 4));
    const int channel = part * 8 + lane / 4;
    uint32_t* to = planes + lane % 4 + 4 * (chunk + row * L::ROW + image * L::IMAGE + channel * L::CHANNEL);
    uint32_t v[4];
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), v[0], v[1], v[2], v[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[4 * j * L::ROW] = v[j];
  }
}

// ---- step 4: products -------------------------------------------------------------------------------------

// A run of columns of one row of X, two to a word.
using Run = uint32_t[X_WORDS];

// This lane's row (lane / 4) and segment (lane % 4) of a channel's plane.
template <class L>
__device__ inline const uint4* segment_of(const uint8_t* planes, int channel) {
  const int row = threadIdx.x % 32 / 4, segment = threadIdx.x % 4;
  return reinterpret_cast<const uint4*>(planes) + channel * L::CHANNEL + segment / SEGMENTS * L::IMAGE +
         row * L::ROW + segment % SEGMENTS * (SEGMENT / 8);
}

template <int WORDS>
__device__ inline void read_words(const uint4* from, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < WORDS; i += 4) {
    const uint4 v = from[i / 4];
    const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4 && i + j < WORDS; ++j) words[i + j] = four[j];
  }
}

// The words of a run that start at odd columns.
__device__ inline void odd_words(const Run& run, Run& odd) {
#pragma unroll
  for (int i = 0; i + 1 < X_WORDS; ++i) odd[i] = __funnelshift_r(run[i], run[i + 1], 16);
}

// The products' k is in the order in which the lanes hold columns: lane t of a row has 4 of a product's 16
// columns.
__device__ inline void multiply(const Run& low, const Run& high, const uint32_t (&y)[Y_WORDS],
                                float (&acc)[TAPS][4]) {
  Run low_odd, high_odd;
  odd_words(low, low_odd);
  odd_words(high, high_odd);
#pragma unroll
  for (int i = 0; i < Y_WORDS; i += 2) {
#pragma unroll
    for (int s = 0; s < TAPS; ++s) {
      const int at = i + s * SHIFT / 2;
      const uint32_t* a = (s * SHIFT % 2 ? low_odd : low) + at;
      const uint32_t* b = (s * SHIFT % 2 ? high_odd : high) + at;
      float* d = acc[s];
      Mma::fma(d[0], d[1], d[2], d[3], a[0], b[0], a[1], b[1], y[i], y[i + 1], d[0], d[1], d[2], d[3]);
    }
  }
}

// All turns of a warp.
__device__ inline void consume(const TensorMap& x_map, const TensorMap& y_map, const Args& g,
                               const Work& work, Loader& loader, uint8_t* stages, uint8_t* planes,
                               uint64_t* full, int warp, float (&acc)[PASSES][TAPS][4]) {
  Run runs[PASSES][2];  // rows of X: the last turn's and this one's, by the turn's parity
  // X's channel of this warp among those loaded; with more than one pass they are the output's (`supports`).
  const int x_channel = PASSES > 1 ? warp : (work.k0 + warp) / g.multiplier - work.c0;
  int slot = 0, left = work.end - work.begin;  // left: blocks after this turn
  uint32_t phase = 0;
  bool with_y = false;

  auto turn = [&](auto parity) {
    constexpr int now = decltype(parity)::value;
    uint8_t* stage = stages + slot * STAGE_BYTES;
    FullBarrier::wait(&full[slot], phase);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      uint8_t* x_planes = planes + (PASSES > 1 ? pass : now) * PLANES_BYTES;
      uint8_t* y_planes = x_planes + X::PLANE_BYTES;
      transpose<X>(stage, pass, warp, reinterpret_cast<uint32_t*>(x_planes));
      if (with_y) transpose<Y>(stage + X::OPERAND_BYTES, pass, warp, reinterpret_cast<uint32_t*>(y_planes));
      __syncthreads();
      if (pass == PASSES - 1) loader.load(x_map, y_map, g, work, warp, stage, &full[slot]);
      read_words<X_WORDS>(segment_of<X>(x_planes, x_channel), runs[pass][now]);
      if (with_y) {
        uint32_t y_words[Y_WORDS];
        read_words<Y_WORDS>(segment_of<Y>(y_planes, warp), y_words);
        multiply(runs[pass][1 - now], runs[pass][now], y_words, acc[pass]);
      }
    }
    if (++slot == g.stages) {
      slot = 0;
      phase ^= 1;
    }
    with_y = true;
    return --left >= 0;
  };
  while (turn(Constant<0>{}) && turn(Constant<1>{})) {
  }
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// dW[r, s, k] of the split by one warp, over exactly the pixels that it depends on. The products multiply
// pixels of X beyond dY's edges by zeros: where such a pixel is not finite they are wrong.
__device__ inline float exact(const Args& g, const Work& work, const Element* x, const Element* y, int r,
                              int s, int k) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
  for (int i = work.begin * ROWS; i < work.end * ROWS; ++i) {
    const Row row(g, i);
    const int p = row.p, h = p * g.stride_h - g.pad_h + r * g.dilation_h;
    if (p >= g.out_h || h < 0 || h >= g.in_h) continue;
    for (int j = lane; j < IMAGES * COLUMNS; j += 32) {
      const int n = row.n + j / COLUMNS, q = row.tile * COLUMNS + j % COLUMNS;
      const int w = q * g.stride_w - g.pad_w + s * g.dilation_w;
      if (n >= g.batch || q >= g.out_w || w < 0 || w >= g.in_w) continue;
      const size_t x_at = ((size_t(n) * g.in_h + h) * g.in_w + w) * g.in_channels + k / g.multiplier;
      const size_t y_at = ((size_t(n) * g.out_h + p) * g.out_w + q) * g.out_channels + k;
      sum = fmaf(to_float(x[x_at]), to_float(y[y_at]), sum);
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(ALL, sum, other);
  return sum;
}

// Adds a channel's products along their diagonals: sums[row of taps][tap of a row][channel of the thread
// block].
__device__ inline void add_diagonals(const Args& g, const float (&acc)[TAPS][4], float* scratch,
                                     float* sums) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int s = 0; s < TAPS; ++s) {
    __syncwarp();
    *reinterpret_cast<float2*>(scratch + row * 8 + column) = make_float2(acc[s][0], acc[s][1]);
    *reinterpret_cast<float2*>(scratch + (row + 8) * 8 + column) = make_float2(acc[s][2], acc[s][3]);
    __syncwarp();
    if (lane < g.taps_h.size) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += scratch[(j + lane * g.shift_h) * 8 + j];
      sums[(lane * TAPS + s) * CHANNELS] = sum;
    }
  }
  __syncwarp();
}

// A channel's sums that are not finite, again.
__device__ inline void mend(const Args& g, const Work& work, const Element* x, const Element* y, int channel,
                            float* sums) {
  const int lane = threadIdx.x % 32, k = work.k0 + channel;
  if (k >= g.out_channels) return;
  for (int base = 0; base < g.taps_h.size * TAPS; base += 32) {
    const int mine = base + lane;
    const bool is_tap = mine < g.taps_h.size * TAPS && work.r(g, mine) < g.taps_h.kernel &&
                        work.s(g, mine) < g.taps_w.kernel;
    unsigned wrong = __ballot_sync(ALL, is_tap && !isfinite(sums[mine * CHANNELS + channel]));
    for (; wrong != 0; wrong &= wrong - 1) {
      const int index = base + __ffs(wrong) - 1;
      const float sum = exact(g, work, x, y, work.r(g, index), work.s(g, index), k);
      if (lane == 0) sums[index * CHANNELS + channel] = sum;
    }
  }
}

// Grid: x over blocks of taps and, outside of these, blocks of channels (neighbours read the same pixels), y
// over splits. Split s covers blocks [s, s+1) * blocks_per_split and writes out + s * (output size); the
// plan leaves no split empty.
template <class T>
__device__ inline void wgrad(const TensorMap& x_map, const TensorMap& y_map, const Args& g, const Element* x,
                             const Element* y, T* out) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[MAX_STAGES];
  // An offset from `raw`: of a rounded address the compiler does not know that it is in shared memory.
  uint8_t* stages = raw + (-cute::cast_smem_ptr_to_uint(raw) & 1023);
  uint8_t* planes = stages + g.stages * STAGE_BYTES;
  const Work work(g);
  // A class with fewer blocks than others.
  if (work.r0 >= g.taps_h.kernel || work.s0 >= g.taps_w.kernel) return;
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);  // uniform to the compiler
  if (threadIdx.x == 0) {
    for (int i = 0; i < g.stages; ++i) FullBarrier::init(&full[i], 2 * ROWS);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  Loader loader(g, work, warp);
  for (int i = 0; i < g.stages; ++i) {
    loader.load(x_map, y_map, g, work, warp, stages + i * STAGE_BYTES, &full[i]);
  }
  // Columns beyond the chunks that are written turn by turn are read as zeros.
  for (int i = threadIdx.x; i < 2 * PLANES_BYTES / 16; i += THREADS) {
    reinterpret_cast<uint4*>(planes)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  float acc[PASSES][TAPS][4];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int s = 0; s < TAPS; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[pass][s][i] = 0.f;
    }
  }
  consume(x_map, y_map, g, work, loader, stages, planes, full, warp, acc);

  launch_dependent_grids();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(planes);
  float* scratch = sums + MAX_TAPS_H * TAPS * CHANNELS + warp * 128;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    add_diagonals(g, acc[pass], scratch, sums + pass * WARPS + warp);
    mend(g, work, x, y, pass * WARPS + warp, sums);
  }
  __syncthreads();
  out += blockIdx.y * size_t(g.taps_h.kernel) * g.taps_w.kernel * g.out_channels;
  for (int i = threadIdx.x; i < g.taps_h.size * TAPS * CHANNELS; i += THREADS) {
    const int r = work.r(g, i / CHANNELS), s = work.s(g, i / CHANNELS), k = work.k0 + i % CHANNELS;
    if (r < g.taps_h.kernel && s < g.taps_w.kernel && k < g.out_channels) {
      convert(sums[i], out[(size_t(r) * g.taps_w.kernel + s) * g.out_channels + k]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    wgrad_partial(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                  const __grid_constant__ Args g, const Element* x, const Element* y, float* partials) {
  wgrad(x_map, y_map, g, x, y, partials);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    wgrad_direct(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                 const __grid_constant__ Args g, const Element* x, const Element* y, Output* out) {
  wgrad(x_map, y_map, g, x, y, out);
}
