// Matrix products for Hopper, with splits of the reduction: TMA feeds WGMMA, on CuTe and CUTLASS atoms.
//
//   D[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], or what epilogue.cuh makes of it
//
// An operand is K-major (k is contiguous) or MN-major (16 bits only: what WGMMA takes). In shared memory
// every row is 128 bytes under the 128-byte swizzle: BLOCK_K elements of a row of A or column of B, or 64
// elements along MN of one k.
//
// Roles: warpgroup 0 is the producer (one thread issues TMA), the others are consumers (WGMMA, then the
// epilogue). Barriers: see device/pipeline.cuh; the producer arrives at `full`, a consumer warpgroup at
// `empty`. Splits take turns at the blocks of k, so that all thread blocks read neighbouring
// memory.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, FLOAT for tf32; 3 for e4m3), OUT, TILE_M, TILE_N,
// STAGES, CTAS_PER_SM, A_MN, B_MN (1: MN-major), A_WHOLE, B_WHOLE (see `load_operand`), CHAIN (stages that
// the tensor cores add; 0: all of a split), and those of device/split_tile.cuh, epilogue.cuh and
// conv/patch.cuh.

#include "conv/patch.cuh"
#include "device/pipeline.cuh"
#include "device/split_tile.cuh"
#include "dot/epilogue.cuh"

#if ELEMENT == 0
using Wgmma = WGMMA(TILE_N, x8_F32TF32TF32_SS_TN)<>;
static_assert(!A_MN && !B_MN, "WGMMA takes tf32 K-major only");
#elif ELEMENT == 3
using Wgmma = WGMMA(TILE_N, x32_F32E4M3E4M3_SS_TN)<>;
static_assert(!A_MN && !B_MN, "WGMMA takes e4m3 K-major only");
#else
constexpr GMMA::Major A_MAJOR = A_MN ? GMMA::Major::MN : GMMA::Major::K;
constexpr GMMA::Major B_MAJOR = B_MN ? GMMA::Major::MN : GMMA::Major::K;
using Wgmma = WGMMA_16(TILE_N, SS)<A_MAJOR, B_MAJOR>;
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

// Blocks of k of a split: `split`, `split + splits`, ...
__device__ inline int blocks_of(const Args& g, int split) { return g.k_blocks + (split < g.longer); }

// ---- producer --------------------------------------------------------------------------------------------

// Loads `blocks` blocks of k from k on. The first ones, into stages that are EMPTY yet, are a loop of their
// own right at the kernel's start: all that follows waits for them, and code that lies far off is slow to
// come.
template <bool FIRST>
__device__ inline void produce(const TensorMap& a_map, const TensorMap& b_map, const Args& g, uint32_t stages,
                               Pipeline<STAGES>& pipeline, const Work& work, int k, int blocks) {
  const int step = g.splits.value * BLOCK_K;
  [[maybe_unused]] const uint64_t a_hint = hint_for(g.a_once), b_hint = hint_for(g.b_once);
  Position at;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i, k += step) {
    if constexpr (!FIRST) Barrier::wait(&pipeline.empty[at.stage], at.phase);
    uint64_t* full = pipeline.expect(at, STAGE_BYTES);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
#if PATCH == 1
    const FilterPart part = filter_part(g, k);
    load_windows(a_map, g, full, stage, work.m, part);
    load_operand<B_MN, B_WHOLE, N_BLOCKS>(b_map, full, stage + A_BYTES, work.n, part.element, part.row,
                                          b_hint);
#else
#if PATCH == 3
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i) {
      load_windows(a_map, g, full, stage + i * BLOCK_BYTES, k, filter_part(g, work.m + 64 * i));
    }
#else
    load_operand<A_MN, A_WHOLE, M_BLOCKS>(a_map, full, stage, work.m, k, work.batch, a_hint);
#endif
    load_operand<B_MN, B_WHOLE, N_BLOCKS>(b_map, full, stage + A_BYTES, work.n, k, work.batch, b_hint);
#endif
    at.advance(STAGES);
  }
}

// ---- epilogue --------------------------------------------------------------------------------------------

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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ Args g, TILE_RESULT) {
  extern __shared__ uint8_t raw[];
  __shared__ Pipeline<STAGES> pipeline;
  const uint32_t stages = aligned_address(raw);
  const Work work = work_of_block(g);
  const int blocks = blocks_of(g, work.split);
  const int warp = warp_index();
  // The producer does not wait for the others: what it needs, it starts itself.
  if (warp == 0 && elect_one()) {
    pipeline.init(1, CONSUMERS);
    fence_barrier_init();
    produce<true>(a_map, b_map, g, stages, pipeline, work, work.split * BLOCK_K, min(blocks, STAGES));
  }
  __syncthreads();
  if (warp < 4) {
    if constexpr (SHARE_REGISTERS) lower_registers<PRODUCER_REGS>();
    if (warp == 0 && elect_one()) {
      const int k = (work.split + STAGES * g.splits.value) * BLOCK_K;
      produce<false>(a_map, b_map, g, stages, pipeline, work, k, blocks - STAGES);
    }
    join_cluster();
  } else {
    if constexpr (SHARE_REGISTERS) raise_registers<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Accumulator acc;
    const auto block_at = [=](uint32_t stage, int m) {
      return stage + (warpgroup + m * CONSUMERS) * BLOCK_BYTES;
    };
    using A = conditional_t<A_MN, MnMajor, KMajor>;
    using B = conditional_t<B_MN, MnMajor, KMajor>;
#if CHAIN
    consume_chains<Wgmma, A, B, CHAIN>(stages, pipeline, blocks, block_at, acc);
#else
    consume<Wgmma, A, B>(stages, pipeline, blocks, block_at, acc);
#endif
#if REDUCTION == 1
    launch_dependent_grids();
    const int tiles = gridDim.x * gridDim.y, batches = gridDim.z / g.splits.value;
    const int tile = work.batch * tiles + blockIdx.y * gridDim.x + blockIdx.x;
    store_partials(partials, size_t(work.split) * batches * tiles + tile, acc);
#else
    const Epilogue epilogue = EPILOGUE_OF_PARAMETERS;
    const auto inside = [&](int row, int column) {
      return work.m + row < g.m && work.n + column < g.n && !is_padding(g, work.m + row);
    };
    const auto store = [&](int row, int column, const float4& v) {
      Output* to = result_at(g, out, work.batch, work.m, work.n, row, column);
      epilogue.store(out, to, work.m + row, work.n + column, {v.x, v.y, v.z, v.w});
    };
    store_tile(stages, work.split, warpgroup, acc, inside, store);
#endif
  }
}
