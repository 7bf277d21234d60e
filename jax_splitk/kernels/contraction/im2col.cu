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
// after the other. A stage has one, or several where channels are few, so that it always has four products'
// k; the last stage's may be missing, and are zeros. The last block of a tap's channels has LAST_STEPS
// instructions, if it is a stage of its own. Splits take turns at the stages. WGMMA's A and B are these, or
// with SWAP the other way round.
//
// A forward pass's weight that cannot be read MN-major, or with too many rows, is TRANSPOSED by a kernel of
// its own first (contraction/weight.cuh).
//
// Where a stage has TAPS of a filter row, its block of A is loaded once for all of them: pixels along w are
// those of the windows of all, so that a tap's are TAP_ROWS after those of the tap before. What they compute
// between the lines of the images is not stored. A row of more taps has ROW_PARTS, which count as the taps of
// a block of the reduction. Its last part ends with the row; taps that the part before has, too, are zeros of
// B.
//
// A tile belongs to one group. Its columns are the group's, and those beyond are not stored. Where groups are
// PADDED, the maps of A and of a K-major B have a dimension for the groups: TMA puts zeros in place of the
// next group's channels.
//
// Roles and barriers: see device/tile_kernel.cuh. A PERSISTENT kernel, without splits, is that of
// contraction/persistent.cuh.
//
// Macros: ELEMENT (of the inputs; a number of output.cuh, FLOAT for tf32), OUT, AXES (spatial dimensions; 0:
// A is a plain matrix), PHASED (UP or TAPS above 1), TAP_ROWS, ROW_PARTS, GROUPED, PADDED, ROW_BYTES (bytes
// of a block of channels: 128, 64 or 32), WEIGHT_ROW, B_MN, B_WHOLE (see `load_operand`), TRANSPOSED, ODD (a
// group's columns are no multiple of four: each sum is stored by itself), LAST_STEPS, MIXED, SWAP,
// STATIONARY, RESULT_BOX, THREAD_STORES and OWN_STORES (see contraction/persistent.cuh), and those of
// device/split_tile.cuh, device/wgmma_tile.cuh and device/epilogue.cuh.

#include "contraction/blocks.cuh"
#include "device/epilogue.cuh"
#include "device/split_k.cuh"
#include "device/tile_kernel.cuh"
#if PERSISTENT
#include "device/packed_tile.cuh"
#else
#include "device/split_tile.cuh"
#endif
#if TRANSPOSED
#include "contraction/weight.cuh"
#endif

#if ELEMENT == 0
using Product = WGMMA(TILE_N, x8_F32TF32TF32_SS_TN)<>;
static_assert(!B_MN, "WGMMA takes tf32 K-major only");
#else
constexpr GMMA::Major WEIGHT_MAJOR = B_MN ? GMMA::Major::MN : GMMA::Major::K;
using Product = WGMMA_16(TILE_N,
                         SS)<SWAP ? WEIGHT_MAJOR : GMMA::Major::K, SWAP ? GMMA::Major::K : WEIGHT_MAJOR>;
#endif
static_assert(PERSISTENT || !SWAP, "partial sums have pixels as rows");

constexpr int BLOCK_K = ROW_BYTES / (ELEMENT == FLOAT ? 4 : 2);

// Sizes of a tile, and the positions of its operands in a stage.
constexpr int PIXELS = SWAP ? TILE_N : TILE_M, CHANNELS = SWAP ? TILE_M : TILE_N;
constexpr int PIXELS_AT = SWAP ? A_BYTES : 0;
[[maybe_unused]] constexpr int WEIGHT_AT = SWAP ? 0 : A_BYTES;
// Sizes of a block in a stage. Channels of an MN-major weight lie in boxes of at most 64. A weight is loaded
// in parts of WEIGHT_ROW bytes of k, which are blocks unless it is stationary.
constexpr int PIXELS_PART = (SWAP ? STAGE_BYTES - A_BYTES : A_BYTES) / BLOCKS;
constexpr int CHANNEL_ROWS = SWAP ? TILE_M : STATIONARY && !B_MN ? TILE_N : N_ROWS;
constexpr int WEIGHT_K = WEIGHT_ROW * BLOCK_K / ROW_BYTES;
constexpr int WEIGHT_PART = CHANNEL_ROWS * WEIGHT_ROW;
constexpr int STEPS = ROW_BYTES / K_MAJOR_STEP, PART_STEPS = WEIGHT_ROW / K_MAJOR_STEP;
constexpr int N_ROW = CHANNEL_ROWS < 64 ? CHANNEL_ROWS * 2 : 128, N_BOX = WEIGHT_K * N_ROW;
constexpr int PIXEL_BYTES = BLOCKS * (PIXELS + (TAPS - 1) * TAP_ROWS) * ROW_BYTES;
constexpr int WEIGHT_BYTES = BLOCKS * TAPS * (B_MN ? CHANNEL_ROWS : CHANNELS) * WEIGHT_ROW;  // of a part
[[maybe_unused]] constexpr int LOAD_BYTES = PIXEL_BYTES + WEIGHT_BYTES;
struct Pixels : Operand<K_MAJOR_STEP, ROW_BYTES> {
  static constexpr int offset(int k, int) {
    const int tap = k / STEPS;
    return tap / TAPS * PIXELS_PART + tap % TAPS * TAP_ROWS * ROW_BYTES + k % STEPS * K_MAJOR_STEP;
  }
};
using Weight =
    conditional_t<B_MN, Operand<16 * N_ROW, N_ROW, N_BOX, PART_STEPS, WEIGHT_PART, STATIONARY>,
                  Operand<K_MAJOR_STEP, WEIGHT_ROW, BLOCK_BYTES, PART_STEPS, WEIGHT_PART, STATIONARY>>;

// How a stage is laid out.
struct Layout : TileKernel {
  using Wgmma = Product;
  using A = conditional_t<SWAP, Weight, Pixels>;
  using B = conditional_t<SWAP, Pixels, Weight>;
  static constexpr int A_BLOCK = 64 * (SWAP ? WEIGHT_ROW : ROW_BYTES);
};

// A tile: its first pixel and column, the residues of its phase, and its group.
struct Tile {
  int m, n;
  Axes residue;
  int group;
};

// Elements of a row of the output.
__device__ inline int pitch_of(const Args& g) {
#if GROUPED
  return g.pitch;
#else
  return g.n;
#endif
}

__device__ inline Axes residue_at(const Args& g, int phase) {
  Axes at = {0, 0, 0};
#if PHASED
  at.w = take(phase, g.residues.w);
#if AXES == 2
  at.h = phase;
#elif AXES == 3
  at.h = take(phase, g.residues.h);
  at.d = phase;
#endif
#endif
  return at;
}

__device__ inline Tile tile_at(const Args& g, int row, int phase, int column) {
  int group = 0;
#if GROUPED
  group = column / g.group_columns;
  column -= group * g.group_columns.value;
#endif
  return {row * PIXELS, column * CHANNELS, residue_at(g, phase), group};
}

// Neighbours in a row of tiles read the same pixels, and so do the phases, which follow: those with many taps
// first.
__device__ inline Tile tile_at(const Args& g, int index) {
  const int column = take(index, g.columns), phase = PHASED ? take(index, g.phases) : 0;
  return tile_at(g, index, phase, column);
}

// A pixel of a phase: the image, and where it is in the phase.
struct Pixel {
  int n;
  Axes at;
};

__device__ inline Pixel pixel_at(const Args& g, int m) {
  Pixel p = {0, {0, 0, take(m, g.pixels.w)}};
#if AXES > 1
  p.at.h = take(m, g.pixels.h);
#endif
#if AXES > 2
  p.at.d = take(m, g.pixels.d);
#endif
  p.n = m;
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

// What the producer knows: the window of the tile's first pixel, the stage's first block, and from there to
// the next stage's.
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
  if constexpr (SPLIT) l.block = block_at(g, tile.residue, split * BLOCKS);
  if constexpr (SPLIT || BLOCKS > 1)
    l.step = block_at(g, tile.residue, (SPLIT ? g.splits.value : 1) * BLOCKS);
  return l;
}

// Where a block of the reduction is in the operands.
struct Source {
  int c, n, k;  // A's channel, the weight's column and k
  int group;    // where groups are PADDED
  int tap;      // the first of the block's
  int missing;  // taps of the block before the first
  uint16_t d, h, w;
};

__device__ inline Source source_of(const Args& g, const Tile& tile, Block block) {
  // TMA fills with zeros what lies beyond the channels.
  if (BLOCKS > 1 && is_beyond(g, tile.residue, block)) block = {g.beyond, {0, 0, 0}};
  Source s = {};
  s.c = block.c * BLOCK_K, s.n = tile.n, s.k = s.c;
#if GROUPED
  if (!PADDED) s.c += tile.group * g.k;
  if (B_MN) s.n += tile.group * g.n;
#endif
  if (!B_MN) s.k = s.c;
  s.group = PADDED ? tile.group : 0;
#if AXES > 0
  const auto& on_w = g.on_w[tile.residue.w];
#if ROW_PARTS
  const int begin = block.tap.w * TAPS, first = min(begin, g.row_taps - TAPS);
  s.missing = begin - first;
#else
  const int first = block.tap.w;
#endif
  s.w = on_w.offset + first * g.step.w;
  s.tap = on_w.tap + first * g.tap_step.w;
#endif
#if AXES > 1
  const auto& on_h = g.on_h[tile.residue.h];
  s.h = on_h.offset + block.tap.h * g.step.h;
  s.tap += on_h.tap + block.tap.h * g.tap_step.h;
#endif
#if AXES > 2
  const auto& on_d = g.on_d[tile.residue.d];
  s.d = on_d.offset + block.tap.d * g.step.d;
  s.tap += on_d.tap + block.tap.d * g.tap_step.d;
#endif
  return s;
}

__device__ inline void load_pixels(const TensorMap& map, const Args& g, const Tile& tile, const Loads& l,
                                   const Source& s, uint64_t* full, uint32_t to) {
#if AXES == 0
  load_operand<false, false, PIXELS / 64>(map, full, to, tile.m, s.c, s.group, hint_for(g.a_once));
#elif AXES == 1 && PADDED
  load_im2col(&map, full, shared_pointer(to), s.c, l.window.w, l.n, s.group, s.w, 0);
#elif AXES == 1
  load_im2col(&map, full, shared_pointer(to), s.c, l.window.w, l.n, s.w);
#elif AXES == 2 && PADDED
  load_im2col(&map, full, shared_pointer(to), s.c, l.window.w, l.window.h, l.n, s.group, s.w, s.h, 0);
#elif AXES == 2
  load_im2col(&map, full, shared_pointer(to), s.c, l.window.w, l.window.h, l.n, s.w, s.h);
#else
  load_im2col(&map, full, shared_pointer(to), s.c, l.window.w, l.window.h, l.window.d, l.n, s.w, s.h, s.d);
#endif
}

// The block's weights at its taps, in `parts` loads for each.
__device__ inline void load_weights(const TensorMap& map, const Args& g, const Source& s, int parts,
                                    uint64_t* full, uint32_t to) {
#pragma unroll
  for (int i = 0; i < TAPS; ++i) {
    // TMA fills with zeros what lies before the first tap.
    const int tap = ROW_PARTS && i < s.missing ? -1 : s.tap + i * g.tap_step.w;
    for (int part = 0; part < parts; ++part, to += WEIGHT_PART) {
      const int k = s.k + part * WEIGHT_K;
      if constexpr (PADDED && !B_MN) {
        load_tile(&map, full, hint_for(g.b_once), shared_pointer(to), k, s.n, s.group, tap);
      } else {
        load_operand<B_MN, B_WHOLE, (CHANNELS + 63) / 64, N_BOX>(map, full, to, s.n, k, tap,
                                                                 hint_for(g.b_once));
      }
    }
  }
}

// The blocks of a stage, from where `loads` stands on. A tap has so many parts of the weight.
__device__ inline void load_stage(const TensorMap& a_map, const TensorMap& b_map, const Args& g,
                                  const Tile& tile, const Loads& loads, uint64_t* full, uint32_t stage,
                                  uint32_t weight, int weight_parts) {
  Block block = loads.block;
#pragma unroll
  for (int part = 0; part < BLOCKS; ++part) {
    if (part > 0) advance(g, tile.residue, {1, {0, 0, 0}}, block);
    const Source source = source_of(g, tile, block);
    load_pixels(a_map, g, tile, loads, source, full, stage + PIXELS_AT + part * PIXELS_PART);
    load_weights(b_map, g, source, weight_parts, full, weight + part * TAPS * WEIGHT_PART);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------

#if PERSISTENT
#include "contraction/persistent.cuh"
#else

// Stores what becomes of neighbouring sums, of which those beyond the group's columns are left out.
template <int N>
__device__ __forceinline__ void store_sums(const Args& g, const Epilogue& epilogue, Output* out, Output* to,
                                           int group, int row, int column, const float (&sums)[N]) {
  const int first = group * g.n;  // of the group's columns
#if ODD
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (column + i < g.n) epilogue.store(out, to + i, row, first + column + i, {sums[i]});
  }
#else
  epilogue.store(out, to, row, first + column, sums);
#endif
}

#if REDUCTION == 1
// Adds the splits' partial sums.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, REDUCE_BLOCKS)
    KERNEL(_reduce)(const float* partials, Output* out, const __grid_constant__ Args g,
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
    Output* to = out + size_t(row) * pitch_of(g) + tile.group * g.n + col;
    store_sums(g, epilogue, out, to, tile.group, row, col, {half ? sum.z : sum.x, half ? sum.w : sum.y});
  }
}
#endif

// Grid: x over tiles, z over splits (a cluster, where they meet there).
struct Conv : Layout {
  static constexpr bool WALKS = true, DEPENDENT = REDUCTION == 1;
#if PHASED && REDUCTION != 1
  struct Shared {
    int rows[TILE_M];  // where those of the tile go
  };
#endif

  const TensorMap &a_map, &b_map;
  const Args& g;
  const TileResult result;
  const Tile tile;
  const int split;
  Loads loads;

  __device__ Conv(const TensorMap& a_map, const TensorMap& b_map, const Args& g, const TileResult& result)
      : a_map(a_map),
        b_map(b_map),
        g(g),
        result(result),
        tile(tile_at(g, blockIdx.x)),
        split(SPLIT ? blockIdx.z : 0) {}

  __device__ int count() const { return stages_of(g, tile.residue, split); }
  __device__ TapBlock first_block() const {
    int step = SPLIT ? g.splits.value : 1, first = split;
    return {g.blocks.value, take(step, g.blocks), take(first, g.blocks)};
  }

  // ---- load ----

  __device__ void locate(int) {
    loads = loads_of(g, tile, split);
#if TRANSPOSED
    wait_on_dependent_grids();
#endif
  }
  __device__ void advance() { ::advance(g, tile.residue, loads.step, loads.block); }
  __device__ static int bytes() { return LOAD_BYTES; }
  __device__ void load(const Stage& to) const {
    load_stage(a_map, b_map, g, tile, loads, to.full, to.address, to.address + WEIGHT_AT, 1);
  }

  // ---- finish ----

  __device__ void prepare([[maybe_unused]] Shared& shared, [[maybe_unused]] int thread) const {
#if PHASED && REDUCTION != 1
    // A consumer's thread reads what others have written once all have multiplied.
    if (thread < TILE_M) shared.rows[thread] = row_of(g, tile.residue, tile.m + thread);
#endif
  }
  __device__ void leave() const { join_cluster(); }

  __device__ void finish([[maybe_unused]] const Shared& shared, uint32_t stages, int warpgroup,
                         const Accumulator& acc) const {
#if REDUCTION == 1
    store_partials(result.partials, size_t(split) * gridDim.x + blockIdx.x, acc);
#else
#if PHASED
    const auto row_at = [&](int row) { return shared.rows[row]; };
    const auto inside = [&](int row, int column) { return shared.rows[row] >= 0 && tile.n + column < g.n; };
#else
    const auto row_at = [&](int row) { return tile.m + row; };
    const auto inside = [&](int row, int column) { return tile.m + row < g.m && tile.n + column < g.n; };
#endif
    // As they are added up, so is the machine code.
    const auto place = [&](int row, int column) {
      return result.out + size_t(row_at(row)) * pitch_of(g) + tile.group * g.n + tile.n + column;
    };
#if EPILOGUE && RESIDUAL_TYPE >= 0 && !ODD && REDUCTION == 0
    const auto load = [&](int row, int column) {
      return result.epilogue.load_residual<4>(result.out, place(row, column));
    };
    const auto store = [&](int row, int column, const float4& v, const Vec<Residual, 4>& residual) {
      const int channel = tile.group * g.n + tile.n + column;
      result.epilogue.store(residual, place(row, column), row_at(row), channel, {v.x, v.y, v.z, v.w});
    };
    sync_threads<CONSUMER_THREADS, 1>();  // nobody reads the stages any more
    stage_sums(stages, warpgroup, acc);
    sync_threads<CONSUMER_THREADS, 1>();
    store_rows_ahead(stages, inside, load, store);
#else
    const auto store = [&](int row, int column, const float4& v) {
      store_sums(g, result.epilogue, result.out, place(row, column), tile.group, row_at(row), tile.n + column,
                 {v.x, v.y, v.z, v.w});
    };
    store_tile(stages, split, warpgroup, acc, inside, store);
#endif
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ Args g, TILE_RESULT) {
  run_tile(Conv(a_map, b_map, g, TILE_RESULT_OF_PARAMETERS));
}
#endif
