// Matrix products for Hopper, with splits of the reduction: TMA feeds WGMMA, on CuTe and CUTLASS atoms.
//
//   D[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], or what epilogue.cuh makes of it
//
// An operand is K-major (k is contiguous) or MN-major (16 bits only: what WGMMA takes). In shared memory
// every row is 128 bytes under the 128-byte swizzle: BLOCK_K elements of a row of A or column of B, or 64
// elements along MN of one k.
//
// Roles and barriers: see device/tile_kernel.cuh. Splits take turns at the blocks of k, so that all thread
// blocks read neighbouring memory.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, FLOAT for tf32; 3 for e4m3), OUT, A_MN, B_MN (1:
// MN-major), A_WHOLE, B_WHOLE (see `load_operand`), and those of device/wgmma_tile.cuh,
// device/split_tile.cuh, device/epilogue.cuh and contraction/patch.cuh.

#include "contraction/patch.cuh"
#include "device/split_tile.cuh"
#include "device/tile_kernel.cuh"

#if ELEMENT == 0
using Product = WGMMA(TILE_N, x8_F32TF32TF32_SS_TN)<>;
static_assert(!A_MN && !B_MN, "WGMMA takes tf32 K-major only");
#elif ELEMENT == 3
using Product = WGMMA(TILE_N, x32_F32E4M3E4M3_SS_TN)<>;
static_assert(!A_MN && !B_MN, "WGMMA takes e4m3 K-major only");
#else
constexpr GMMA::Major A_MAJOR = A_MN ? GMMA::Major::MN : GMMA::Major::K;
constexpr GMMA::Major B_MAJOR = B_MN ? GMMA::Major::MN : GMMA::Major::K;
using Product = WGMMA_16(TILE_N, SS)<A_MAJOR, B_MAJOR>;
#endif

constexpr int E4M3 = 3;
constexpr int ELEMENT_BYTES = ELEMENT == FLOAT ? 4 : ELEMENT == E4M3 ? 1 : 2;
constexpr int BLOCK_K = 128 / ELEMENT_BYTES;

// Where a tile starts, and which split of it the block has.
struct Work {
  int m, n, batch, split;
};

// Grid: x over rows of tiles, y over columns, z over the splits (a cluster's, where they meet there), and the
// batch.
__device__ inline Work work_of_block(const Args& g) {
  const int z = blockIdx.z, batch = g.splits == int(gridDim.z) ? 0 : z / g.splits;
  return {int(blockIdx.x) * TILE_M, int(blockIdx.y) * TILE_N, batch, z - batch * g.splits.value};
}

// ---- the splits
// --------------------------------------------------------------------------------------------

#if REDUCTION == 1
// Adds the splits' partial sums.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, REDUCE_BLOCKS)
    KERNEL(_reduce)(const float* partials, Output* out, const __grid_constant__ Args g,
                    const __grid_constant__ ReduceArgs r EPILOGUE_PARAMETERS) {
  const Four at(r);
  const int tile_column = at.tile / g.rows, batch = tile_column / g.columns;
  const int row = at.row((at.tile - tile_column * g.rows.value) * TILE_M);
  const int col = at.col((tile_column - batch * g.columns.value) * TILE_N);
  const bool inside = at.i * 4 < r.size && row < g.m && col < g.n && !is_padding(g, row);
  float4 sum;
  if (!at.add(partials, r, inside, sum) || !inside) return;
  Output* to = result_at(g, out, batch, 0, 0, row, col);
  const Epilogue epilogue = EPILOGUE_OF_PARAMETERS;
  epilogue.store(out, to, row, col, {sum.x, sum.y});
  if (row + 8 >= g.m || is_padding(g, row + 8)) return;
  epilogue.store(out, eight_below(g, out, to, batch, row, col), row + 8, col, {sum.z, sum.w});
}
#endif

// ---- the kernel ------------------------------------------------------------------------------------------

struct Dot : TileKernel {
  using Wgmma = Product;
  using A = conditional_t<A_MN, MnMajor, KMajor>;
  using B = conditional_t<B_MN, MnMajor, KMajor>;
  static constexpr bool DEPENDENT = REDUCTION == 1;

  const TensorMap &a_map, &b_map;
  const Args& g;
  const Work work;
  const TileResult result;

  // Blocks of k of a split: `split`, `split + splits`, ...
  __device__ int count() const { return g.k_blocks + (work.split < g.longer); }

  // ---- load ----

  __device__ void load(const Stage& to) const {
    const int k = (work.split + to.number * g.splits.value) * BLOCK_K;
    uint64_t* full = to.full;
    const uint32_t stage = to.address;
    [[maybe_unused]] const uint64_t a_hint = hint_for(g.a_once), b_hint = hint_for(g.b_once);
#if PATCH == 1
    const FilterPart part = filter_part(g, k);
    load_windows(a_map, g, full, stage, work.m, part);
    load_operand<B_MN, B_WHOLE, N_BLOCKS>(b_map, full, stage + A_BYTES, work.n, part.element, part.row,
                                          b_hint);
#else
#if PATCH == 2
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i) {
      load_windows(a_map, g, full, stage + i * BLOCK_BYTES, k, filter_part(g, work.m + 64 * i));
    }
#else
    load_operand<A_MN, A_WHOLE, M_BLOCKS>(a_map, full, stage, work.m, k, work.batch, a_hint);
#endif
    load_operand<B_MN, B_WHOLE, N_BLOCKS>(b_map, full, stage + A_BYTES, work.n, k, work.batch, b_hint);
#endif
  }

  // ---- finish ----

  __device__ void leave() const { join_cluster(); }

  __device__ void finish(const Shared&, uint32_t stages, int warpgroup, const Accumulator& acc) const {
#if REDUCTION == 1
    const int tiles = gridDim.x * gridDim.y, batches = gridDim.z / g.splits.value;
    const int tile = work.batch * tiles + blockIdx.y * gridDim.x + blockIdx.x;
    store_partials(result.partials, size_t(work.split) * batches * tiles + tile, acc);
#else
    const auto inside = [&](int row, int column) {
      return work.m + row < g.m && work.n + column < g.n && !is_padding(g, work.m + row);
    };
    const auto store = [&](int row, int column, const float4& v) {
      Output* to = result_at(g, result.out, work.batch, work.m, work.n, row, column);
      result.epilogue.store(result.out, to, work.m + row, work.n + column, {v.x, v.y, v.z, v.w});
    };
    store_tile(stages, work.split, warpgroup, acc, inside, store);
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ Args g, TILE_RESULT) {
  run_tile(Dot{{}, a_map, b_map, g, work_of_block(g), TILE_RESULT_OF_PARAMETERS});
}
