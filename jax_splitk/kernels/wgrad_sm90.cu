// Split-k convolution weight gradient for Hopper: TMA (im2col) feeding WGMMA, on CuTe and CUTLASS atoms.
//
//   dW[tap, c, k] = sum over pixels (n, p, q) of X[n, p*stride - pad + tap*dilation, c] * dY[n, p, q, k]
//
// As a matrix product, D[rsc, k] = A^T B with both operands MN-major. The rsc side of a tile is a list of independent
// 64-channel slots (tap, c0), each one TMA im2col box of 64 pixels x 64 channels; the k side is 64-channel boxes of dY.
// In shared memory every box is 64 rows of 128 bytes under the 128-byte swizzle. With SWAP the M side of the tile is k
// and the N side is rsc.
//
// Roles: warpgroup 0 is the producer (one thread in each of its warps issues TMA; it leaves its registers to the
// others), the other warpgroups are consumers (WGMMA, then the epilogue).
// Barriers, per stage: `full` (one arrival per producer warp, with the bytes of its boxes) and `empty` (one arrival per
// consumer warpgroup, once the WGMMAs that read the stage have retired). Both start in phase 0; the producers' first
// pass over the ring waits on the opposite parity, which is already complete.
//
// Macros: ELEMENT_BF16, TILE_M, TILE_N, STAGES, SWAP, X_TILED (1x1 stride 1: X is a plain matrix), CTAS_PER_SM,
// OUT (split_k.cuh).

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

// Must match `_args` in wgrad_sm90.py.
struct Args {
  int channels, out_channels, taps;  // C, K, R*S
  int kernel_w;                      // S
  int out_h, out_w;                  // P, Q
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int tiles_n;
  int k_tiles, k_tiles_per_split;     // blocks of BLOCK_K pixels
  int step_n, step_p, step_q;         // BLOCK_K pixels as a mixed-radix number (n, p, q)
};

constexpr int BLOCK_K = 64;
constexpr int SLOT = 64;                      // channels of a box
constexpr int BOX_BYTES = BLOCK_K * SLOT * 2;
constexpr int M_BOXES = TILE_M / SLOT, N_BOXES = TILE_N / SLOT;
constexpr int X_BOXES = SWAP ? N_BOXES : M_BOXES, DY_BOXES = SWAP ? M_BOXES : N_BOXES;
constexpr int BOXES = M_BOXES + N_BOXES;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
constexpr int PRODUCERS = BOXES < 4 ? BOXES : 4;  // producer warps
constexpr int BOXES_PER_WARP = (BOXES + PRODUCERS - 1) / PRODUCERS;
// 256 rows go to two warpgroups of two 64-row blocks each, where the accumulators fit.
constexpr int CONSUMERS = TILE_M == 256 && TILE_N <= 128 ? 2 : M_BOXES;
constexpr int M_PER_WG = M_BOXES / CONSUMERS;
constexpr int ACCUMULATORS = TILE_N / 2;  // per thread and 64-row block
constexpr int THREADS = 128 * (CONSUMERS + 1);
// The register file, shared out by role (setmaxnreg wants multiples of 8).
constexpr int PRODUCER_REGS = CONSUMERS >= 3 ? (CONSUMERS == 4 ? 24 : 32) : 40;
constexpr int CONSUMER_REGS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : CTAS_PER_SM == 2 ? 208 : 232;

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

template <int... I>
__device__ inline void wgmma(uint64_t a, uint64_t b, float (&acc)[ACCUMULATORS], GMMA::ScaleOut scale, Indices<I...>) {
  Wgmma<TILE_N>::fma(a, b, acc[I]..., scale);
}

// Descriptor of an MN-major operand under the 128-byte swizzle: 64-element blocks along MN are one box apart (leading
// offset), groups of 8 rows along k are 1024 bytes apart (stride offset).
__device__ inline uint64_t operand(uint32_t smem_address) {
  cute::GmmaDescriptor desc;
  desc.desc_ = 0;
  desc.bitfield.start_address_ = smem_address >> 4;
  desc.bitfield.leading_byte_offset_ = BOX_BYTES >> 4;
  desc.bitfield.stride_byte_offset_ = 1024 >> 4;
  desc.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return desc.desc_;
}

struct Slot {
  int tap, c0;
};

__device__ inline Slot slot_of(const Args& g, int index) {
  int per_tap = (g.channels + SLOT - 1) / SLOT;
  int tap = index / per_tap;
  return {tap, (index - tap * per_tap) * SLOT};
}

// ---- producer ------------------------------------------------------------------------------------------------------

// One producer warp's share of the boxes of a stage: box index `warp + i * PRODUCERS`, X's boxes first. Four warps
// instead of one gain up to 9% where tiles are wide in boxes (measured), and lose nowhere.
__device__ inline void produce(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, uint8_t* ring,
                               uint64_t* full, uint64_t* empty, int warp, int x_tile, int dy_tile, int kt,
                               int kt_end) {
  // Everything that divides comes before the loop: two divisions a box in it cost more than the loads themselves.
  int c0[BOXES_PER_WARP], offset[BOXES_PER_WARP];
  [[maybe_unused]] uint16_t tap_h[BOXES_PER_WARP], tap_w[BOXES_PER_WARP];
  int boxes = 0;
#pragma unroll
  for (int i = 0; i < BOXES_PER_WARP; ++i) {
    const int box = warp + i * PRODUCERS;
    const bool is_x = box < X_BOXES;
    boxes += box < BOXES;
    tap_h[i] = tap_w[i] = 0;
    // X's boxes are the N side's under SWAP, and that side follows the M side in a stage.
    offset[i] = (SWAP ? (is_x ? M_BOXES + box : box - X_BOXES) : box) * BOX_BYTES;
    if (is_x) {
      Slot slot = slot_of(g, x_tile * X_BOXES + box);
      if (slot.tap < g.taps) {
        int r = slot.tap / g.kernel_w;
        c0[i] = slot.c0;
        tap_h[i] = uint16_t(r * g.dilation_h);
        tap_w[i] = uint16_t((slot.tap - r * g.kernel_w) * g.dilation_w);
      } else {
        c0[i] = g.channels + SLOT;  // beyond the filter: filled with zeros, and never stored
      }
    } else {
      c0[i] = (dy_tile * DY_BOXES + box - X_BOXES) * SLOT;
    }
  }
  int pixel = kt * BLOCK_K;
  int n = pixel / (g.out_h * g.out_w);
  int rest = pixel - n * (g.out_h * g.out_w);
  int p = rest / g.out_w;
  int q = rest - p * g.out_w;

  int stage = 0;
  uint32_t phase = 0;
  for (; kt < kt_end; ++kt) {
    EmptyBarrier::wait(&empty[stage], phase ^ 1);
    FullBarrier::arrive_and_expect_tx(&full[stage], boxes * BOX_BYTES);
    uint64_t* barrier = &full[stage];
    uint8_t* base = ring + stage * STAGE_BYTES;
    constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
#pragma unroll
    for (int i = 0; i < BOXES_PER_WARP; ++i) {
      const int box = warp + i * PRODUCERS;
      if (box < X_BOXES) {
#if X_TILED
        cute::SM90_TMA_LOAD_2D::copy(&x_map, barrier, hint, base + offset[i], c0[i], pixel);
#else
        cute::SM90_TMA_LOAD_IM2COL_4D::copy(&x_map, barrier, base + offset[i], c0[i], q * g.stride_w - g.pad_w,
                                            p * g.stride_h - g.pad_h, n, tap_w[i], tap_h[i]);
#endif
      } else if (box < BOXES) {
        cute::SM90_TMA_LOAD_2D::copy(&dy_map, barrier, hint, base + offset[i], c0[i], pixel);
      }
    }
    pixel += BLOCK_K;
    q += g.step_q;
    if (q >= g.out_w) { q -= g.out_w; ++p; }
    p += g.step_p;
    if (p >= g.out_h) { p -= g.out_h; ++n; }
    n += g.step_n;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
}

// ---- consumer ------------------------------------------------------------------------------------------------------

using Accumulator = float[M_PER_WG][ACCUMULATORS];

__device__ inline void fence(Accumulator& acc) {
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) cute::warpgroup_fence_operand(acc[m][i]);
  }
}

__device__ inline void consume(uint32_t ring, uint64_t* full, uint64_t* empty, int warpgroup, int k_tiles,
                               Accumulator& acc) {
  int stage = 0, previous = -1;
  uint32_t phase = 0;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
  for (int kt = 0; kt < k_tiles; ++kt) {
    FullBarrier::wait(&full[stage], phase);
    uint32_t m_side = ring + stage * STAGE_BYTES + warpgroup * BOX_BYTES;
    uint64_t b = operand(ring + stage * STAGE_BYTES + M_BOXES * BOX_BYTES);
    fence(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
#pragma unroll
      for (int m = 0; m < M_PER_WG; ++m) {
        uint64_t a = operand(m_side + m * CONSUMERS * BOX_BYTES);
        wgmma(a + k * (16 * 128 >> 4), b + k * (16 * 128 >> 4), acc[m], scale, MakeIndices<ACCUMULATORS>::type{});
      }
      scale = GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    // The batch before this one has retired, so the stage it read may be filled again.
    cute::warpgroup_wait<1>();
    fence(acc);
    if (previous >= 0 && threadIdx.x % 128 == 0) EmptyBarrier::arrive(&empty[previous]);
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  cute::warpgroup_wait<0>();
  fence(acc);
}

// Writes a tile into out[taps][C][K], leaving out rows and columns beyond the problem. WGMMA's accumulator holds, for
// warp w and lane l of the warpgroup, rows w*16 + l/4 (+8) and columns 8*j + 2*(l%4) (+1).
template <class T>
__device__ inline void store_tile(const Args& g, T* out, int tile_m, int tile_n, int warpgroup, Accumulator& acc) {
  const int lane = threadIdx.x % 32, row0 = (threadIdx.x % 128) / 32 * 16 + lane / 4, col0 = 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int m_box = tile_m * M_BOXES + m * CONSUMERS + warpgroup;
#if SWAP
    const int k = m_box * SLOT + row0;
#pragma unroll
    for (int box = 0; box < N_BOXES; ++box) {
      const Slot slot = slot_of(g, tile_n * N_BOXES + box);
      if (slot.tap >= g.taps) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = slot.c0 + 8 * j + col0;
        if (c >= g.channels) continue;
        T* at = out + (size_t(slot.tap) * g.channels + c) * g.out_channels + k;
        const float* v = &acc[m][(box * 8 + j) * 4];
        if (k < g.out_channels) {
          convert(v[0], at[0]);
          convert(v[1], at[g.out_channels]);
        }
        if (k + 8 < g.out_channels) {
          convert(v[2], at[8]);
          convert(v[3], at[g.out_channels + 8]);
        }
      }
    }
#else
    const Slot slot = slot_of(g, m_box);
    if (slot.tap >= g.taps) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = slot.c0 + row0 + 8 * half;
      if (c >= g.channels) continue;
      T* row = out + (size_t(slot.tap) * g.channels + c) * g.out_channels + tile_n * TILE_N;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        const int k = 8 * j + col0;
        if (tile_n * TILE_N + k >= g.out_channels) continue;
        Vec<T, 2> pair;
        convert(acc[m][j * 4 + 2 * half], pair.v[0]);
        convert(acc[m][j * 4 + 2 * half + 1], pair.v[1]);
        *reinterpret_cast<Vec<T, 2>*>(row + k) = pair;
      }
    }
#endif
  }
}

// Grid: x over output tiles (neighbours share a pixel range, and so their inputs in L2), y over splits. Split s covers
// pixel blocks [s, s+1) * k_tiles_per_split and writes out + s * (output size); the plan leaves no split empty.
template <class T>
__device__ inline void wgrad(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, T* out) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  uint8_t* ring = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      FullBarrier::init(&full[i], PRODUCERS);
      EmptyBarrier::init(&empty[i], CONSUMERS);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const int tile_m = blockIdx.x / g.tiles_n, tile_n = blockIdx.x - tile_m * g.tiles_n;
  const int kt = blockIdx.y * g.k_tiles_per_split;
  const int kt_end = min(kt + g.k_tiles_per_split, g.k_tiles);
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    // Uniform to the compiler, which otherwise wraps every TMA instruction in a loop over the warp's lanes.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < PRODUCERS && cute::elect_one_sync()) {
      produce(x_map, dy_map, g, ring, full, empty, warp, SWAP ? tile_n : tile_m, SWAP ? tile_m : tile_n, kt, kt_end);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Accumulator acc;
    consume(cute::cast_smem_ptr_to_uint(ring), full, empty, warpgroup, kt_end - kt, acc);
    cutlass::arch::launch_dependent_grids();
    const size_t size = size_t(g.taps) * g.channels * g.out_channels;
    store_tile(g, out + blockIdx.y * size, tile_m, tile_n, warpgroup, acc);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    wgrad_partial(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
                  const __grid_constant__ Args g, float* partials) {
  wgrad(x_map, dy_map, g, partials);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    wgrad_direct(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
                 const __grid_constant__ Args g, Output* out) {
  wgrad(x_map, dy_map, g, out);
}
