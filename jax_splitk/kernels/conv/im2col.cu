// Dense forward passes and input gradients for Hopper, with splits of the reduction: TMA (im2col) feeds
// WGMMA, on CuTe and CUTLASS atoms.
//
//   out[o, n] = sum over taps t and channels c of x[i, c] * w[t, c, n], where along each axis
//   i * UP = o * DOWN - PAD + t * DILATION, and one of UP and DOWN is 1
//
// UP above 1, a stride of an input gradient, divides the output into phases: the pixels of one residue modulo
// UP meet the same taps, and are a dense pass of their own over these (`Residue`). All phases have as many
// pixels, of which those outside of the output are not stored, so that one tensor map serves them. What no
// tap meets is zeros.
//
// As a matrix product: rows of A are pixels, a box of TMA's im2col mode of TILE_M pixels x BLOCK_K channels
// at one tap; B is the weight of that tap, [k][n] (MN-major, a forward pass) or [n][k] (K-major, an input
// gradient, whose taps the host has mirrored). Blocks of the reduction are those of the channels, for one tap
// after the other; splits take turns at them. WGMMA's A and B are these, or with SWAP the other way round.
//
// Roles: warpgroup 0 is the producer (one thread issues TMA), the others are consumers (WGMMA, then the
// epilogue). Barriers: see device/pipeline.cuh; the producer arrives at `full`, a consumer warpgroup at
// `empty`. A PERSISTENT kernel, without splits, is that of conv/persistent.cuh.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, FLOAT for tf32), OUT, TILE_M, TILE_N, STAGES,
// CTAS_PER_SM, AXES (spatial dimensions; 0: A is a plain matrix), PHASED (UP above 1), EMPTY (some split of
// some phase has no block; if PERSISTENT, some phase has no tap), B_MN, B_WHOLE (see `load_operand`), SWAP,
// PERSISTENT, and those of device/split_tile.cuh, device/wgmma_tile.cuh and dot/epilogue.cuh.

#include "device/pipeline.cuh"
#include "device/split_k.cuh"
#include "device/wgmma_tile.cuh"
#include "dot/epilogue.cuh"
#if PERSISTENT
#include "device/packed_tile.cuh"
#else
#include "device/split_tile.cuh"
#endif

#if ELEMENT == 0
using Wgmma = WGMMA(TILE_N, x8_F32TF32TF32_SS_TN)<>;
static_assert(!B_MN, "WGMMA takes tf32 K-major only");
#else
constexpr GMMA::Major WEIGHT_MAJOR = B_MN ? GMMA::Major::MN : GMMA::Major::K;
using Wgmma = WGMMA_16(TILE_N,
                       SS)<SWAP ? WEIGHT_MAJOR : GMMA::Major::K, SWAP ? GMMA::Major::K : WEIGHT_MAJOR>;
#endif
static_assert(PERSISTENT || !SWAP, "partial sums have pixels as rows");

constexpr int BLOCK_K = ELEMENT == FLOAT ? 32 : 64;
constexpr bool SPLIT = REDUCTION != 0;
// Of a tile, and where a stage has the operands.
constexpr int PIXELS = SWAP ? TILE_N : TILE_M, CHANNELS = SWAP ? TILE_M : TILE_N;
constexpr int PIXELS_AT = SWAP ? A_BYTES : 0, WEIGHT_AT = SWAP ? 0 : A_BYTES;
// Bytes from one instruction's k to the next's.
constexpr int WEIGHT_STEP = B_MN ? MN_MAJOR_STEP : K_MAJOR_STEP;
constexpr int A_STEP = SWAP ? WEIGHT_STEP : K_MAJOR_STEP, B_STEP = SWAP ? K_MAJOR_STEP : WEIGHT_STEP;

// One number for each axis; those that the convolution has not are 0.
struct Axes {
  int d, h, w;
};

// A tile: its first pixel and column, and the residues of its phase.
struct Tile {
  int m, n;
  Axes residue;
};

__device__ inline Axes residue_at(const Args& g, int phase) {
  Axes at = {0, 0, 0};
#if PHASED
  const int line = phase / g.residues.w;
  at.w = phase - line * g.residues.w.value;
#if AXES == 2
  at.h = line;
#elif AXES == 3
  at.d = line / g.residues.h;
  at.h = line - at.d * g.residues.h.value;
#endif
#endif
  return at;
}

// Neighbours in a row of tiles read the same pixels, and so do the phases, which follow: those with many taps
// first.
__device__ inline Tile tile_at(const Args& g, int index) {
  int row = index / g.columns, phase = 0;
  const int column = index - row * g.columns.value;
#if PHASED
  phase = row;
  row = phase / g.phases;
  phase -= row * g.phases.value;
#endif
  return {row * PIXELS, column * CHANNELS, residue_at(g, phase)};
}

// A pixel of a phase: the image, and where it is in the phase.
struct Pixel {
  int n;
  Axes at;
};

__device__ inline Pixel pixel_at(const Args& g, int m) {
  const int line = m / g.pixels.w;
  Pixel p = {line, {0, 0, m - line * g.pixels.w.value}};
#if AXES > 1
  p.n = line / g.pixels.h;
  p.at.h = line - p.n * g.pixels.h.value;
#endif
#if AXES > 2
  const int image = p.n / g.pixels.d;
  p.at.d = p.n - image * g.pixels.d.value;
  p.n = image;
#endif
  return p;
}

// Which row of the output that is, -1 outside of it.
__device__ inline int row_of(const Args& g, const Axes& residue, int m) {
  if (m >= g.m) return -1;
#if PHASED
  const Pixel p = pixel_at(g, m);
  const int w = g.on_w[residue.w].place + p.at.w * g.up.w;
  bool inside = w < g.out.w;
  int row = p.n;
#if AXES > 2
  const int d = g.on_d[residue.d].place + p.at.d * g.up.d;
  inside &= d < g.out.d;
  row = row * g.out.d + d;
#endif
#if AXES > 1
  const int h = g.on_h[residue.h].place + p.at.h * g.up.h;
  inside &= h < g.out.h;
  row = row * g.out.h + h;
#endif
  return inside ? row * g.out.w + w : -1;
#else
  return m;
#endif
}

// ---- producer --------------------------------------------------------------------------------------------

// A block of the reduction: of channels, at one of the phase's taps.
struct Block {
  int c;
  Axes tap;
};

__device__ inline Block block_at(const Args& g, const Axes& residue, int index) {
#if AXES == 0
  return {index, {0, 0, 0}};
#else
  const int tap = index / g.blocks;
  Block b = {index - tap * g.blocks.value, {0, 0, tap}};
#if AXES > 1
  const auto& w = g.on_w[residue.w].taps;
  b.tap.h = tap / w;
  b.tap.w = tap - b.tap.h * w.value;
#endif
#if AXES > 2
  const auto& h = g.on_h[residue.h].taps;
  const int line = b.tap.h;
  b.tap.d = line / h;
  b.tap.h = line - b.tap.d * h.value;
#endif
  return b;
#endif
}

__device__ inline void advance(const Args& g, const Axes& residue, const Block& by, Block& b) {
  b.c += by.c;
#if AXES > 0
  b.tap.w += by.tap.w;
  if (b.c >= g.blocks.value) {
    b.c -= g.blocks.value;
    ++b.tap.w;
  }
#endif
#if AXES > 1
  const int w = g.on_w[residue.w].taps.value;
  b.tap.h += by.tap.h;
  if (b.tap.w >= w) {
    b.tap.w -= w;
    ++b.tap.h;
  }
#endif
#if AXES > 2
  const int h = g.on_h[residue.h].taps.value;
  b.tap.d += by.tap.d;
  if (b.tap.h >= h) {
    b.tap.h -= h;
    ++b.tap.d;
  }
#endif
}

// Of all taps and channels, and those of the split.
__device__ inline int blocks_of(const Args& g, const Axes& residue, int split) {
  int all = g.blocks.value;
#if AXES > 0
  all *= g.on_w[residue.w].taps.value;
#endif
#if AXES > 1
  all *= g.on_h[residue.h].taps.value;
#endif
#if AXES > 2
  all *= g.on_d[residue.d].taps.value;
#endif
  return SPLIT ? (all - split + g.splits.value - 1) / g.splits : all;
}

// What the producer knows: the window of the tile's first pixel, and the block that comes next.
struct Loads {
  int n;
  Axes window;
  Block block, step;
};

__device__ inline Loads loads_of(const Args& g, const Tile& tile, int split) {
  Loads l = {};
#if AXES > 0
  const Pixel first = pixel_at(g, tile.m);
  l.n = first.n;
  l.window.w = g.lower.w + first.at.w * g.down.w;
#endif
#if AXES > 1
  l.window.h = g.lower.h + first.at.h * g.down.h;
#endif
#if AXES > 2
  l.window.d = g.lower.d + first.at.d * g.down.d;
#endif
  l.step.c = 1;
  if constexpr (SPLIT) {
    l.block = block_at(g, tile.residue, split);
    l.step = block_at(g, tile.residue, g.splits.value);
  }
  return l;
}

__device__ inline void load(const TensorMap& a_map, const TensorMap& b_map, const Args& g, const Tile& tile,
                            const Loads& l, uint64_t* full, uint32_t stage) {
  const int c = l.block.c * BLOCK_K;
#if AXES == 0
  load_operand<false, false, PIXELS / 64>(a_map, full, stage + PIXELS_AT, tile.m, c, 0, hint_for(g.a_once));
  const int tap = 0;
#else
  const auto& on_w = g.on_w[tile.residue.w];
  const uint16_t w = on_w.offset + l.block.tap.w * g.step.w;
  int tap = on_w.tap + l.block.tap.w * g.tap_step.w;
  uint8_t* to = shared_pointer(stage + PIXELS_AT);
#if AXES == 1
  cute::SM90_TMA_LOAD_IM2COL_3D::copy(&a_map, full, to, c, l.window.w, l.n, w);
#else
  const auto& on_h = g.on_h[tile.residue.h];
  const uint16_t h = on_h.offset + l.block.tap.h * g.step.h;
  tap += on_h.tap + l.block.tap.h * g.tap_step.h;
#if AXES == 2
  cute::SM90_TMA_LOAD_IM2COL_4D::copy(&a_map, full, to, c, l.window.w, l.window.h, l.n, w, h);
#else
  const auto& on_d = g.on_d[tile.residue.d];
  const uint16_t d = on_d.offset + l.block.tap.d * g.step.d;
  tap += on_d.tap + l.block.tap.d * g.tap_step.d;
  cute::SM90_TMA_LOAD_IM2COL_5D::copy(&a_map, full, to, c, l.window.w, l.window.h, l.window.d, l.n, w, h, d);
#endif
#endif
#endif
  load_operand<B_MN, B_WHOLE, CHANNELS / 64>(b_map, full, stage + WEIGHT_AT, tile.n, c, tap,
                                             hint_for(g.b_once));
}

// Loads `blocks` blocks from where `loads` stands on. The first ones, into stages that are empty yet, are a
// loop of their own right at the kernel's start: all that follows waits for them, and code that lies far off
// is slow to come. There every lane walks, so that the compiler knows that the warp's numbers are uniform.
template <bool FIRST>
__device__ inline void produce(const TensorMap& a_map, const TensorMap& b_map, const Args& g, uint32_t stages,
                               Pipeline<STAGES>& pipeline, const Tile& tile, Loads& loads, int blocks) {
  const bool lead = !FIRST || cute::elect_one_sync();
  Position at;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    if constexpr (!FIRST) EmptyBarrier::wait(&pipeline.empty[at.stage], at.phase);
    if (lead) {
      uint64_t* full = pipeline.expect(at, STAGE_BYTES);
      load(a_map, b_map, g, tile, loads, full, stages + at.stage * STAGE_BYTES);
    }
    advance(g, tile.residue, loads.step, loads.block);
    at.advance(STAGES);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------

#if PERSISTENT
#include "conv/persistent.cuh"
#else

#if REDUCTION == 1
// Adds the splits' partial sums.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, REDUCE_BLOCKS)
    reduce_conv(const float* partials, Output* out, const __grid_constant__ Args g,
                const __grid_constant__ ReduceArgs r EPILOGUE_PARAMETERS) {
  const Four at(r);
  const Tile tile = tile_at(g, at.tile);
  const int m = at.row(tile.m), col = at.col(tile.n);
  const bool inside = at.i * 4 < r.size && m < g.m && col < g.n;
  float4 sum;
  if (!at.add(partials, r, inside, sum) || !inside) return;
  const Epilogue epilogue = EPILOGUE_OF_PARAMETERS;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(g, tile.residue, m + 8 * half);
    if (row < 0) continue;
    Output* to = out + size_t(row) * g.n + col;
    epilogue.store(out, to, row, col, {half ? sum.z : sum.x, half ? sum.w : sum.y});
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    conv(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ Args g, float* partials) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    conv(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ Args g, Output* out EPILOGUE_PARAMETERS) {
#endif
  extern __shared__ uint8_t raw[];
  __shared__ Pipeline<STAGES> pipeline;
  const uint32_t stages = aligned_address(raw);
  // Grid: x over tiles, z over splits (a cluster, where they meet there).
  const Tile tile = tile_at(g, blockIdx.x);
  const int split = SPLIT ? blockIdx.z : 0, blocks = blocks_of(g, tile.residue, split);
  const int warp = warp_index();
  Loads loads;
  // The producer does not wait for the others: what it needs, it starts itself.
  if (warp == 0) {
    loads = loads_of(g, tile, split);
    if (cute::elect_one_sync()) {
      pipeline.init(1, CONSUMERS);
      cutlass::arch::fence_barrier_init();
    }
    produce<true>(a_map, b_map, g, stages, pipeline, tile, loads, min(blocks, STAGES));
  }
#if PHASED && REDUCTION != 1
  // Where the tile's rows go. A consumer's thread reads what others have written once all have multiplied.
  __shared__ int rows[TILE_M];
  if (const int row = int(threadIdx.x) - 128; row >= 0 && row < TILE_M) {
    rows[row] = row_of(g, tile.residue, tile.m + row);
  }
#endif
  __syncthreads();
  if (warp < 4) {
    if constexpr (SHARE_REGISTERS) cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGS>();
    if (warp == 0 && cute::elect_one_sync()) {
      produce<false>(a_map, b_map, g, stages, pipeline, tile, loads, blocks - STAGES);
    }
    join_cluster();
  } else {
    if constexpr (SHARE_REGISTERS) cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Accumulator acc;
    const auto block_of = [=](uint32_t stage, int m) {
      return stage + (warpgroup + m * CONSUMERS) * BLOCK_BYTES;
    };
    consume<Wgmma, A_STEP, B_STEP>(stages, pipeline, blocks, block_of, acc);
#if EMPTY
    if (blocks == 0) {
#pragma unroll
      for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) acc[m][j] = 0.f;
      }
    }
#endif
#if REDUCTION == 1
    launch_dependent_grids();
    store_partials(partials, size_t(split) * gridDim.x + blockIdx.x, acc);
#else
    const Epilogue epilogue = EPILOGUE_OF_PARAMETERS;
#if PHASED
    const auto row_at = [&](int row) { return rows[row]; };
    const auto inside = [&](int row, int column) { return rows[row] >= 0 && tile.n + column < g.n; };
#else
    const auto row_at = [&](int row) { return tile.m + row; };
    const auto inside = [&](int row, int column) { return tile.m + row < g.m && tile.n + column < g.n; };
#endif
    const auto store = [&](int row, int column, const float4& v) {
      Output* to = out + size_t(row_at(row)) * g.n + tile.n + column;
      epilogue.store(out, to, row_at(row), tile.n + column, {v.x, v.y, v.z, v.w});
    };
    store_tile(stages, split, warpgroup, acc, inside, store);
#endif
  }
}
#endif
