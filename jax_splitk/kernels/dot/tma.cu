// Matrix products for Hopper, with splits of the reduction: TMA feeds WGMMA, on CuTe and CUTLASS atoms.
//
//   D[b, m, n] = sum over k of A[b, m, k] * B[b, k, n]
//
// An operand is K-major (k is contiguous) or MN-major (16 bits only: what WGMMA takes). In shared memory every
// row is 128 bytes under the 128-byte swizzle: BLOCK_K elements of a row of A or column of B, or 64 elements
// along MN of one k.
//
// Roles: warpgroup 0 is the producer (one thread of up to four warps issues TMA), the others are consumers
// (WGMMA, then the epilogue). Barriers: see device/pipeline.cuh; a producer warp arrives at `full`, a consumer
// warpgroup at `empty`. Splits take turns at the blocks of k, so that all thread blocks read neighbouring
// memory.
//
// Where the splits meet (macro REDUCTION):
//   0  there is one split; the epilogue stores the result
//   1  in the workspace: fp32 partial sums, added by a second kernel, which is resident by then
//   2  in a cluster, whose blocks are the splits of one tile: each keeps its sums in its shared memory, and
//      each adds a part of the tile's rows in the order of the splits. One launch, no workspace.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, FLOAT for tf32), OUT, TILE_M, TILE_N, STAGES,
// CTAS_PER_SM, A_MN, B_MN, REDUCTION, SPLITS (the cluster's size; 1 elsewhere).

#include "device/pipeline.cuh"
#include "device/split_k.cuh"
#include "device/wgmma.cuh"

#if ELEMENT == 1
using Wgmma = WGMMA(TILE_N, x16_F32BF16BF16_SS)<A_MN ? GMMA::Major::MN : GMMA::Major::K,
                                                B_MN ? GMMA::Major::MN : GMMA::Major::K>;
#elif ELEMENT == 2
using Wgmma = WGMMA(TILE_N, x16_F32F16F16_SS)<A_MN ? GMMA::Major::MN : GMMA::Major::K,
                                              B_MN ? GMMA::Major::MN : GMMA::Major::K>;
#else
using Wgmma = WGMMA(TILE_N, x8_F32TF32TF32_SS_TN)<>;
static_assert(!A_MN && !B_MN, "WGMMA takes tf32 K-major only");
#endif

constexpr int ELEMENT_BYTES = ELEMENT == FLOAT ? 4 : 2;
constexpr int BLOCK_K = 128 / ELEMENT_BYTES;
constexpr int BOX = 64;  // elements along MN of a box of an MN-major operand
constexpr int BLOCK_BYTES = 64 * 128;  // 64 rows, or 64 elements along MN of BLOCK_K k
constexpr int M_BLOCKS = TILE_M / 64, N_BLOCKS = TILE_N / 64;
constexpr int A_BOXES = A_MN ? M_BLOCKS : 1, B_BOXES = B_MN ? N_BLOCKS : 1, BOXES = A_BOXES + B_BOXES;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * 128;
constexpr int PRODUCERS = BOXES < 4 ? BOXES : 4;  // producer warps
constexpr int BOXES_PER_WARP = (BOXES + PRODUCERS - 1) / PRODUCERS;
// 256 rows go to two warpgroups of two 64-row blocks each, where the accumulators fit.
constexpr int CONSUMERS = TILE_M == 256 && TILE_N <= 128 ? 2 : M_BLOCKS;
constexpr int M_PER_WG = M_BLOCKS / CONSUMERS;
constexpr int ACCUMULATORS = TILE_N / 2;  // per thread and 64-row block
constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int THREADS = 128 + CONSUMER_THREADS;
constexpr bool SHARE_REGISTERS = CONSUMERS > 1;
constexpr int PRODUCER_REGS = CONSUMERS == 4 ? 24 : CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGS = consumer_registers(CONSUMERS, PRODUCER_REGS);

// Where a tile starts.
struct Tile {
  int m, n, batch;
};

// Tiles are walked in bands of so many rows of tiles, so that those under way together share their operands.
__device__ inline Tile tile_of(const Args& g, int index) {
  const int band = index / g.band_tiles, at = index - band * g.band_tiles.value;
  const int rows = min(g.band, g.rows - band * g.band);
  const int column = at / rows;
  return {(band * g.band + at - column * rows) * TILE_M, column * TILE_N, int(blockIdx.z)};
}

// Blocks of k of a split: `split`, `split + splits`, ...
__device__ inline int blocks_of(const Args& g, int split) {
  return (g.k_blocks - split + g.splits - 1) / g.splits;
}

// ---- producer --------------------------------------------------------------------------------------------

__device__ inline void load(const TensorMap& map, uint64_t* full, uint32_t to, bool mn_major, int mn, int k,
                            int batch, bool once) {
  using Hint = cute::TMA::CacheHintSm90;
  const uint64_t hint = uint64_t(once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, shared_pointer(to), mn_major ? mn : k, mn_major ? k : mn,
                               batch);
}

// One producer warp's share: boxes `warp + i * PRODUCERS`, A's first.
__device__ inline void produce(const TensorMap& a_map, const TensorMap& b_map, const Args& g, uint32_t stages,
                               Pipeline<STAGES>& pipeline, int warp, const Tile& tile, int split) {
  constexpr int A_BOX = A_MN ? BLOCK_BYTES : TILE_M * 128, B_BOX = B_MN ? BLOCK_BYTES : TILE_N * 128;
  int bytes = 0;
#pragma unroll
  for (int i = 0; i < BOXES_PER_WARP; ++i) {
    const int box = warp + i * PRODUCERS;
    if (box < BOXES) bytes += box < A_BOXES ? A_BOX : B_BOX;
  }
  const int blocks = blocks_of(g, split), step = g.splits * BLOCK_K;
  Position at;
  int k = split * BLOCK_K;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i, k += step) {
    pipeline.wait_empty(at);
    uint64_t* full = pipeline.expect(at, bytes);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
#pragma unroll
    for (int j = 0; j < BOXES_PER_WARP; ++j) {
      const int box = warp + j * PRODUCERS;
      if (box < A_BOXES) {
        load(a_map, full, stage + box * BLOCK_BYTES, A_MN, tile.m + box * BOX, k, tile.batch, g.a_once);
      } else if (box < BOXES) {
        const int block = box - A_BOXES;
        load(b_map, full, stage + TILE_M * 128 + block * BLOCK_BYTES, B_MN, tile.n + block * BOX, k,
             tile.batch, g.b_once);
      }
    }
    at.advance(STAGES);
  }
}

// ---- consumer --------------------------------------------------------------------------------------------

using Accumulator = float[M_PER_WG][ACCUMULATORS];

__device__ inline void consume(uint32_t stages, Pipeline<STAGES>& pipeline, int warpgroup, int blocks,
                               Accumulator& acc) {
  // Of a descriptor, from one instruction's k to the next's.
  constexpr int STEPS = 4, A_STEP = (A_MN ? 16 * 128 : 32) >> 4, B_STEP = (B_MN ? 16 * 128 : 32) >> 4;
  Position at;
  int previous = -1;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    pipeline.wait_full(at);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
    const uint64_t b = operand(stage + TILE_M * 128, BLOCK_BYTES);
    fence(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int m = 0; m < M_PER_WG; ++m) {
        const uint64_t a = operand(stage + (warpgroup + m * CONSUMERS) * BLOCK_BYTES, BLOCK_BYTES);
        wgmma<Wgmma>(a + k * A_STEP, b + k * B_STEP, acc[m], scale);
      }
      scale = GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    // The batch before this one has retired, so the stage it read may be filled again.
    cute::warpgroup_wait<1>();
    fence(acc);
    if (previous >= 0 && threadIdx.x % 128 == 0) pipeline.release(previous);
    previous = at.stage;
    at.advance(STAGES);
  }
  cute::warpgroup_wait<0>();
  fence(acc);
}

// ---- epilogue --------------------------------------------------------------------------------------------

// A lane of the accumulators has rows l/4 and l/4 + 8 of each warp's 16, and columns 2 * (l%4) and the next of
// each 8.
#if REDUCTION == 1
__device__ inline void store_partials(const Args& g, const Tile& tile, int warpgroup, const Accumulator& acc,
                                      float* partials) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int column = tile.n + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.m + (m * CONSUMERS + warpgroup) * 64 + row0 + 8 * half;
      const int columns = row < g.m ? g.n - column : 0;
      float* to = partials + (size_t(tile.batch) * g.m + row) * g.n + column;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        store_global_if(8 * j < columns, to + 8 * j, acc[m][j * 4 + 2 * half], acc[m][j * 4 + 2 * half + 1]);
      }
    }
  }
}
#else
constexpr int PITCH = TILE_N + 8;  // floats of a row of sums: neither writing nor reading them meets conflicts
constexpr int CHUNKS = TILE_N / 4;  // float4 of a row
static_assert(TILE_M * PITCH * 4 <= STAGES * STAGE_BYTES, "the stages hold the sums of the tile");

__device__ inline void stage_sums(uint32_t sums, int warpgroup, const Accumulator& acc) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int row = (m * CONSUMERS + warpgroup) * 64 + row0;
    const uint32_t to = sums + (row * PITCH + 2 * (lane % 4)) * 4;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      const float* v = &acc[m][j * 4];
      store_shared(to + 32 * j, make_float2(v[0], v[1]));
      store_shared(to + 32 * j + 8 * PITCH * 4, make_float2(v[2], v[3]));
    }
  }
}

// Four neighbouring sums: of this block, or those of all blocks of the cluster in their order.
__device__ inline float4 sums_at(uint32_t address) {
#if REDUCTION == 2
  float4 v[SPLITS];
#pragma unroll
  for (int split = 0; split < SPLITS; ++split) v[split] = load_cluster(address, split);
#pragma unroll
  for (int split = 1; split < SPLITS; ++split) add_partial(v[0], v[split]);
  return v[0];
#else
  return load_shared<float4>(address);
#endif
}

__device__ inline void store_rows(const Args& g, const Tile& tile, uint32_t sums, int first, int rows,
                                  Output* out) {
  const int thread = threadIdx.x - 128;
#pragma unroll 2
  for (int i = thread; i < rows * CHUNKS; i += CONSUMER_THREADS) {
    const int row = first + i / CHUNKS, column = i % CHUNKS * 4;
    if (tile.m + row >= g.m || tile.n + column >= g.n) continue;
    const float4 v = sums_at(sums + (row * PITCH + column) * 4);
    store_values(out + (size_t(tile.batch) * g.m + tile.m + row) * g.n + tile.n + column,
                 {v.x, v.y, v.z, v.w});
  }
}
#endif

// ---- the kernel ------------------------------------------------------------------------------------------

// Grid: x over tiles and, in clusters, the splits of each; y over splits that meet in the workspace; z over the
// batch.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    dot(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
        const __grid_constant__ Args g, void* result) {
  extern __shared__ uint8_t raw[];
  __shared__ Pipeline<STAGES> pipeline;
  const uint32_t stages = aligned_address(raw);
  const int split = REDUCTION == 2 ? blockIdx.x % SPLITS : blockIdx.y;
  const Tile tile = tile_of(g, REDUCTION == 2 ? blockIdx.x / SPLITS : blockIdx.x);
  const int warp = warp_index();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&a_map);
    prefetch_tensor_map(&b_map);
    pipeline.init(PRODUCERS, CONSUMERS);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    if constexpr (SHARE_REGISTERS) cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp < PRODUCERS && cute::elect_one_sync()) {
      produce(a_map, b_map, g, stages, pipeline, warp, tile, split);
    }
#if REDUCTION == 2
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
#endif
  } else {
    if constexpr (SHARE_REGISTERS) cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Accumulator acc;
    consume(stages, pipeline, warpgroup, blocks_of(g, split), acc);
#if REDUCTION == 1
    launch_dependent_grids();
    const size_t size = size_t(gridDim.z) * g.m * g.n;
    store_partials(g, tile, warpgroup, acc, static_cast<float*>(result) + split * size);
#else
    Output* out = static_cast<Output*>(result);
    sync_threads<CONSUMER_THREADS, 1>();  // nobody reads the stages any more
    stage_sums(stages, warpgroup, acc);
#if REDUCTION == 2
    cute::cluster_arrive();
    cute::cluster_wait();
    constexpr int ROWS = (TILE_M + SPLITS - 1) / SPLITS;
    store_rows(g, tile, stages, split * ROWS, min(ROWS, TILE_M - split * ROWS), out);
    // Shared memory stays until all have read it.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
#else
    sync_threads<CONSUMER_THREADS, 1>();
    store_rows(g, tile, stages, 0, TILE_M, out);
#endif
#endif
  }
}
