// Products of a few rows with a large matrix for Hopper, bound by the matrix's bytes.
//
//   D[b, m, n] = sum over k of X[b, m, k] * W[b, k, n], or what epilogue.cuh makes of it; m is at most TILE_N
//
// The roles of the operands are exchanged: W's columns are the rows of WGMMA's tile, so that no product is of
// padding beyond 8 rows of X. W is read where it lies, K-major or MN-major (16 bits only); X is K-major. In
// shared memory every row is 128 bytes under the 128-byte swizzle.
//
// A thread block has TILE_M columns of W and a part of k. The blocks of a cluster are the parts of one tile,
// and take turns at the blocks of k, so that they read neighbouring memory. Enough thread blocks share a
// multiprocessor to have most of its shared memory's worth of copies under way from the kernel's start on.
//
// At the end each block sends its sums to the blocks that own them, which add them in the order of the
// blocks. A unit of sums is what a warp has of 16 columns of W and 8 rows of X, 512 bytes; the blocks own the
// units in turn.
//
// Roles and barriers: see device/tile_kernel.cuh. `arrived` counts the bytes that come to a block, its own
// included; its one arrival announces them. The cluster's barrier is for the initialisation of `arrived`.
// Nobody leaves before all that is sent to it has come, and what is sent to it lands beside the stages: so
// the cluster needs no barrier at its end.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, 3 for e4m3), OUT, W_MN (1: W is MN-major), W_WHOLE
// (see `load_operand`), SPLITS (blocks of a cluster), and those of device/wgmma_tile.cuh and
// device/epilogue.cuh.

#include "device/epilogue.cuh"
#include "device/tile_kernel.cuh"
#include "structs.cuh"

constexpr int E4M3 = 3;
#if ELEMENT == 3
using Product = WGMMA(TILE_N, x32_F32E4M3E4M3_SS_TN)<>;
static_assert(!W_MN, "WGMMA takes e4m3 K-major only");
#else
using Product = WGMMA_16(TILE_N, SS)<W_MN ? GMMA::Major::MN : GMMA::Major::K, GMMA::Major::K>;
#endif
constexpr int BLOCK_K = ELEMENT == E4M3 ? 128 : 64;

constexpr int WARPS = 4 * CONSUMERS;
constexpr int UNITS = 4 * M_BLOCKS * (TILE_N / 8), UNIT_BYTES = 512;
constexpr int LANDING_AT = STAGES * STAGE_BYTES;  // [unit that the block owns][block it comes from]

struct Sums {
  Barriers<1, 1> arrived;
};

struct FewRows : TileKernel {
  using Wgmma = Product;
  using A = conditional_t<W_MN, MnMajor, KMajor>;
  using B = KMajor;
  using Shared = Sums;

  const TensorMap &w_map, &x_map;
  const Args& g;
  Output* out;
  const Epilogue epilogue;
  const int rank, n, batch;  // the block of the cluster; where the tile begins

  // Blocks of k `rank`, `rank + SPLITS`, ...
  __device__ int count() const { return (g.k_blocks - rank + SPLITS - 1) / SPLITS; }

  // ---- load ----

  __device__ void load(const Stage& to) const {
    const int k = (rank + to.number * SPLITS) * BLOCK_K;
    load_operand<W_MN, W_WHOLE, M_BLOCKS>(w_map, to.full, to.address, n, k, batch, EVICT_FIRST);
    load_operand<false, false, 1>(x_map, to.full, to.address + A_BYTES, 0, k, batch, EVICT_LAST);
  }

  // ---- finish ----

  __device__ void prepare(Shared& shared, int thread) const {
    if constexpr (SPLITS > 1) {
      if (thread == 0) {
        init_barriers(shared.arrived);
        const int mine = (UNITS - rank + SPLITS - 1) / SPLITS;
        Barrier::arrive_and_expect_tx(shared.arrived.at, mine * SPLITS * UNIT_BYTES);
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
  }

  // Before the loop: the producers have nothing to wait for.
  __device__ void join() const {
    if constexpr (SPLITS > 1) cluster_arrive_relaxed();
  }

  // A lane's sums of a unit: columns l/4 and l/4 + 8 of W, each for rows 2 * (l%4) of X and the next.
  __device__ void store(int unit, const float (&sums)[4]) const {
    constexpr int CHUNKS = TILE_N / 8;
    const int lane = threadIdx.x % 32;
    const int column = n + unit / CHUNKS * 16 + lane / 4, row = unit % CHUNKS * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = row + i % 2, at = column + i / 2 * 8;
      if (m >= g.m || at >= g.n) continue;
      epilogue.store(out, out + (size_t(batch) * g.m + m) * g.n + at, m, at, {sums[i]});
    }
  }

  __device__ void finish(Shared& shared, uint32_t stages, int warpgroup, const Accumulator& acc) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint32_t landing = stages + LANDING_AT + lane * 16, arrived = shared_address(shared.arrived.at);
    if constexpr (SPLITS > 1) cluster_wait();
#pragma unroll
    for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        const int unit = ((m * CONSUMERS + warpgroup) * 4 + warp) * (TILE_N / 8) + j;
        const float* v = &acc[m][j * 4];
        if constexpr (SPLITS == 1) {
          store(unit, {v[0], v[1], v[2], v[3]});
        } else {
          const int owner = unit % SPLITS;
          const uint32_t to = landing + (unit / SPLITS * SPLITS + rank) * UNIT_BYTES;
          store_async(set_block_rank(to, owner), make_float4(v[0], v[1], v[2], v[3]),
                      set_block_rank(arrived, owner));
        }
      }
    }
    if constexpr (SPLITS > 1) {
      wait(arrived, 0);
#pragma unroll 1
      for (int i = warpgroup * 4 + warp; i * SPLITS + rank < UNITS; i += WARPS) {
        float4 v[SPLITS];
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
          v[split] = load_shared<float4>(landing + (i * SPLITS + split) * UNIT_BYTES);
        }
#pragma unroll
        for (int split = 1; split < SPLITS; ++split) {
          v[0].x += v[split].x, v[0].y += v[split].y, v[0].z += v[split].z, v[0].w += v[split].w;
        }
        store(i * SPLITS + rank, {v[0].x, v[0].y, v[0].z, v[0].w});
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
             const __grid_constant__ Args g, Output* out EPILOGUE_PARAMETERS) {
  const int rank = SPLITS > 1 ? int(block_rank_in_cluster()) : 0;
  const int tile = blockIdx.x / SPLITS, batch = blockIdx.y;
  run_tile(FewRows{{}, w_map, x_map, g, out, EPILOGUE_OF_PARAMETERS, rank, tile * TILE_M, batch});
}
