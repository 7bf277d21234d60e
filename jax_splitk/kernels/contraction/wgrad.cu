// Split-k convolution weight gradient for Hopper: TMA (im2col) feeding WGMMA, on CuTe and CUTLASS atoms.
//
//   dW[tap, c, k] = sum over pixels (n, p, q) of X[n, p*stride - pad + tap*dilation, c] * dY[n, p, q, k]
//
// As a matrix product, D[rsc, k] = A^T B with both operands MN-major. The rsc side of a tile is a list of
// independent 64-channel slots (tap, c0), each one TMA im2col box of 64 pixels x 64 channels; the k side is
// 64-channel boxes of dY. In shared memory every box is 64 rows of 128 bytes under the 128-byte swizzle. With
// SWAP the M side of the tile is k and the N side is rsc.
//
// Roles and barriers: see device/tile_kernel.cuh. Results: fp32 goes to memory from the accumulators. 16 bits
// go through the pipeline's memory, as a tile [rsc][k], and from there in rows of the output.
//
// Code that runs once is fetched as it runs, at some 4 ns an instruction (fitted): small problems want little
// of it.
//
// Macros: ELEMENT, OUT, SWAP, X_TILED (1x1 stride 1: X is a plain matrix), RANK3 (three spatial dimensions;
// else two), TAIL (only the tiles after whole waves are split), REDUCTION (device/split_k.cuh), and those of
// device/wgmma_tile.cuh.

#include "device/packed_tile.cuh"
#include "device/split_k.cuh"
#include "device/tile_kernel.cuh"

using Product = WGMMA_16(TILE_N, SS)<GMMA::Major::MN, GMMA::Major::MN>;

// A matrix product's splits take turns at the blocks of pixels, so that all thread blocks read neighbouring
// memory.
constexpr bool TURNS = X_TILED && !TAIL;
constexpr int BLOCK_K = 64;
constexpr int SLOT = 64;  // channels of a box
constexpr int X_BOXES = SWAP ? N_BLOCKS : M_BLOCKS, DY_BOXES = SWAP ? M_BLOCKS : N_BLOCKS;
constexpr int BOXES = M_BLOCKS + N_BLOCKS;
// Warps that load. Four instead of one gain up to 9% where tiles are wide in boxes (measured), and lose
// nowhere.
constexpr int LOADERS = BOXES < 4 ? BOXES : 4;
constexpr int BOXES_PER_WARP = (BOXES + LOADERS - 1) / LOADERS;

struct Slot {
  int tap, c0;
};

__device__ inline Slot slot_of(const Args& g, int index) {
  int tap = index / g.slots;
  return {tap, (index - tap * g.slots) * SLOT};
}

// ---- producer --------------------------------------------------------------------------------------------

// The first of 64 output pixels.
struct Pixel {
  int index, n, o, p, q;
};

struct Tap {
  uint16_t d, h, w;  // times the dilation
};

__device__ inline Pixel pixel_at(const Args& g, int index) {
  const int row = index / g.out.w, q = index - row * g.out.w;
  const int plane = row / g.out.h, p = row - plane * g.out.h;
  const int n = RANK3 ? plane / g.out.d : plane;
  return {index, n, RANK3 ? plane - n * g.out.d : 0, p, q};
}

__device__ inline void advance(const Args& g, Pixel& at) {
  at.index = int(at.index + (TURNS ? uint32_t(g.step) : BLOCK_K));  // may wrap, after the last block
  at.q += g.step_q;
  if (at.q >= g.out.w) {
    at.q -= g.out.w;
    ++at.p;
  }
  at.p += g.step_p;
  if (at.p >= g.out.h) {
    at.p -= g.out.h;
    ++(RANK3 ? at.o : at.n);
  }
  if (RANK3) at.o += g.step_o;
  if (RANK3 && at.o >= g.out.d) {
    at.o -= g.out.d;
    ++at.n;
  }
  at.n += g.step_n;
}

// `once`: a single tile reads it, so that it need not stay in L2.
__device__ inline void load_matrix(const TensorMap& map, uint64_t* full, uint8_t* to, int c, const Pixel& at,
                                   bool once) {
  const uint64_t hint = TURNS && once ? EVICT_FIRST : EVICT_NORMAL;
  load_tile(&map, full, hint, to, c, at.index);
}

__device__ inline void load_x(const TensorMap& map, const Args& g, uint64_t* full, uint8_t* to, int c,
                              const Tap& tap, const Pixel& at) {
#if X_TILED
  load_matrix(map, full, to, c, at, g.x_once);
#else
  const int w = at.q * g.stride.w - g.pad.w, h = at.p * g.stride.h - g.pad.h;
#if RANK3
  const int d = at.o * g.stride.d - g.pad.d;
  load_im2col(&map, full, to, c, w, h, d, at.n, tap.w, tap.h, tap.d);
#else
  load_im2col(&map, full, to, c, w, h, at.n, tap.w, tap.h);
#endif
#endif
}

__device__ inline Tap tap_at(const Args& g, int tap) {
  const int row = tap / g.kernel.w, s = tap - row * g.kernel.w;
  const int t = RANK3 ? row / g.kernel.h : 0;
  return {uint16_t(t * g.dilation.d), uint16_t((row - t * g.kernel.h) * g.dilation.h),
          uint16_t(s * g.dilation.w)};
}

// One warp's share of the boxes of a stage: box index `warp + i * LOADERS`, X's boxes first.
struct Loads {
  int c0[BOXES_PER_WARP], offset[BOXES_PER_WARP];
  Tap tap[BOXES_PER_WARP];
  bool issued[BOXES_PER_WARP];  // whether there is such a box
  int boxes;
  Pixel at;
};

// Everything that divides: in the loop two divisions a box cost more than the loads themselves.
__device__ inline Loads loads_of(const Args& g, int warp, int x_tile, int dy_tile, int kt) {
  Loads loads;
  loads.boxes = 0;
#pragma unroll
  for (int i = 0; i < BOXES_PER_WARP; ++i) {
    const int box = warp + i * LOADERS;
    const bool is_x = box < X_BOXES;
    const int index = is_x ? box : box - X_BOXES;
    loads.boxes += box < BOXES;
    loads.issued[i] = box < BOXES;
    loads.tap[i] = {0, 0, 0};
    // X's boxes are the N side's under SWAP, and that side follows the M side in a stage.
    loads.offset[i] = (SWAP ? (is_x ? M_BLOCKS + box : box - X_BOXES) : box) * BLOCK_BYTES;
    if (is_x) {
      Slot slot = slot_of(g, x_tile * X_BOXES + index);
      if (slot.tap < g.taps) {
        loads.c0[i] = blockIdx.z * g.channels + slot.c0;
        loads.tap[i] = tap_at(g, slot.tap);
      } else {
        loads.c0[i] =
            gridDim.z * g.channels + SLOT;  // beyond the filter: filled with zeros, and never stored
      }
    } else {
      loads.c0[i] = blockIdx.z * g.out_channels + (dy_tile * DY_BOXES + index) * SLOT;
    }
  }
  loads.at = pixel_at(g, kt * BLOCK_K);
  return loads;
}

// ---- epilogue --------------------------------------------------------------------------------------------

constexpr int X_TILE = X_BOXES * SLOT, DY_TILE = DY_BOXES * SLOT;
static_assert(X_TILE * DY_TILE * 2 <= STAGES * STAGE_BYTES, "the ring holds the 16-bit tile");
#if TAIL
constexpr int CHUNKS = DY_TILE / 4;  // float4 of a row
#endif

// Where the 64 rows of a slot go.
struct Rows {
  int offset, count;  // of the first in the output; those within the problem
};

__device__ inline Rows rows_of(const Args& g, int index) {
  const Slot slot = slot_of(g, index);
  if (slot.tap >= g.taps) return {0, 0};
  return {(slot.tap * g.channels + slot.c0) * g.pitch + int(blockIdx.z) * g.out_channels,
          min(SLOT, g.channels - slot.c0)};
}

// Where the rows of a tile go, and its columns: from `column` on, those below `columns`, of rows that are
// `pitch` apart. Their numbers within the problem are multiples of 8.
struct Place {
  const Rows* slots;
  int column, columns, pitch;
};

// Straight from the accumulators: a warp writes whole 32-byte sectors.
__device__ inline void store_sums(const Place& place, int warpgroup, const Accumulator& acc, float* out) {
  const int lane = threadIdx.x % 32, row0 = (threadIdx.x % 128) / 32 * 16, col0 = 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int box = m * CONSUMERS + warpgroup;
#if SWAP
    const int k = place.column + box * SLOT + row0;
    const bool inside[2] = {k < place.columns, k + 8 < place.columns};
#pragma unroll
    for (int slot = 0; slot < X_BOXES; ++slot) {
      const Rows rows = place.slots[slot];
      float* to = out + rows.offset + col0 * place.pitch + k + lane / 4;
#pragma unroll
      for (int j = 0; j < SLOT / 8; ++j) {
        const float* sums = &acc[m][(slot * (SLOT / 8) + j) * 4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool store = inside[half] && 8 * j < rows.count;
          store_global_if(store, to + 8 * half, sums[2 * half]);
          store_global_if(store, to + place.pitch + 8 * half, sums[2 * half + 1]);
        }
        to += 8 * place.pitch;
      }
    }
#else
    const Rows rows = place.slots[box];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = row0 + 8 * half;
      const int columns = first < rows.count ? place.columns - place.column : 0;
      float* to = out + rows.offset + (first + lane / 4) * place.pitch + place.column + col0;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        store_global_if(8 * j < columns, to + 8 * j, acc[m][j * 4 + 2 * half], acc[m][j * 4 + 2 * half + 1]);
      }
    }
#endif
  }
}

#if OUT != 0
// Each warpgroup stores whole boxes.
__device__ inline void store_packed(const Place& place, uint32_t tile, int warpgroup, Output* out) {
  constexpr int ROWS = 16, PASSES = SLOT / ROWS;  // rows that a warpgroup stores together
  const int row0 = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < M_PER_WG * N_BLOCKS; ++i) {
    const int box = i * CONSUMERS + warpgroup, slot = box / DY_BOXES, dy_box = box % DY_BOXES;
    const uint32_t from = chunk_at(tile, dy_box, slot * SLOT + row0, chunk);
    const int k = place.column + dy_box * SLOT + chunk * 8;
    const Rows rows = place.slots[slot];
    const int end = k < place.columns ? rows.count : 0;
    Output* to = out + rows.offset + row0 * place.pitch + k;
    uint4 v[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      v[pass] = load_shared<uint4>(from + pass * ROWS * 128);
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      store_global_below(to + pass * ROWS * place.pitch, v[pass], row0 + pass * ROWS, end);
    }
  }
}
#endif

// ---- the kernels -----------------------------------------------------------------------------------------

// What a thread block computes: a tile's sum over so many blocks of pixels from kt on.
struct Work {
  int tile, split, kt, k_tiles;
};

// Grid: x over output tiles (neighbours share a pixel range, and so their inputs in L2), y over splits, z
// over groups. Split s covers pixel blocks [s, s+1) * k_tiles_per_split, or s, s + splits, ... under TURNS;
// the plan leaves no split empty. Partial sums of split s go to partials + s * (output size).
__device__ inline Work work_of_block(const Args& g) {
  const int tile = blockIdx.x, split = blockIdx.y;
  if constexpr (TURNS) {
    const int more = g.k_tiles - g.k_tiles_per_split * int(gridDim.y);  // splits that have one block more
    return {tile, split, split, g.k_tiles_per_split + (split < more)};
  } else {
    const int kt = split * g.k_tiles_per_split;
    return {tile, split, kt, min(g.k_tiles_per_split, g.k_tiles - kt)};
  }
}

// Grid under TAIL: the tiles that are not split, then the splits of the others. These go to partials as
// tiles.
__device__ inline Work work_of_block(const Args& g, const TailArgs& tail) {
  const int index = int(blockIdx.x) - tail.whole;
  if (index < 0) return {int(blockIdx.x), 0, 0, g.k_tiles};
  const int split = index / tail.rest, kt = split * g.k_tiles_per_split;
  return {tail.whole + index - split * tail.rest, split, kt, min(g.k_tiles_per_split, g.k_tiles - kt)};
}

template <bool PARTIAL>
struct Wgrad : TileKernel {
  using Wgmma = Product;
  using A = MnMajor;
  using B = MnMajor;
  struct Shared {
    Rows slots[X_BOXES];  // where those of the tile go
  };
  static constexpr int LOADERS = ::LOADERS;
  static constexpr bool WALKS = true, DEPENDENT = PARTIAL;

  const TensorMap &x_map, &dy_map;
  const Args& g;
  const Work work;
  Output* out;
  float* partials;
  const TailArgs* tail;
  int x_tile, dy_tile;
  bool as_tile;
  Loads loads;

  __device__ Wgrad(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, const Work& work,
                   Output* out, float* partials, const TailArgs* tail)
      : x_map(x_map), dy_map(dy_map), g(g), work(work), out(out), partials(partials), tail(tail) {
    const int tile_m = work.tile / g.columns, tile_n = work.tile - tile_m * g.columns;
    x_tile = SWAP ? tile_n : tile_m, dy_tile = SWAP ? tile_m : tile_n;
    as_tile = tail != nullptr && work.tile >= tail->whole;
  }

  __device__ int count() const { return work.k_tiles; }

  // ---- load ----

  __device__ void locate(int warp) { loads = loads_of(g, warp, x_tile, dy_tile, work.kt); }
  __device__ int bytes() const { return loads.boxes * BLOCK_BYTES; }
  __device__ void advance() { ::advance(g, loads.at); }

  __device__ void load(const Stage& stage) const {
#pragma unroll
    for (int i = 0; i < BOXES_PER_WARP; ++i) {
      if (!loads.issued[i]) continue;
      uint8_t* to = shared_pointer(stage.address + loads.offset[i]);
      if (stage.loader + i * LOADERS < X_BOXES) {
        load_x(x_map, g, stage.full, to, loads.c0[i], loads.tap[i], loads.at);
      } else {
        load_matrix(dy_map, stage.full, to, loads.c0[i], loads.at, g.dy_once);
      }
    }
  }

  // ---- finish ----

  __device__ void prepare(Shared& shared, int thread) const {
    const int slot = thread - 32;
    if (slot < 0 || slot >= X_BOXES) return;
    shared.slots[slot] = as_tile ? Rows{slot * SLOT * DY_TILE, SLOT} : rows_of(g, x_tile * X_BOXES + slot);
  }

  __device__ void finish(const Shared& shared, uint32_t stages, int warpgroup, const Accumulator& acc) const {
    const Place place = as_tile ? Place{shared.slots, 0, DY_TILE, DY_TILE}
                                : Place{shared.slots, dy_tile * DY_TILE, g.out_channels, g.pitch};
    if (as_tile) {
      const int part = work.split * tail->rest + work.tile - tail->whole;
      store_sums(place, warpgroup, acc, partials + size_t(part) * (TILE_M * TILE_N));
    } else if (PARTIAL && tail == nullptr) {
      store_sums(place, warpgroup, acc, partials + work.split * (size_t(g.taps) * g.channels * g.pitch));
    } else {
#if OUT == 0
      store_sums(place, warpgroup, acc, out);
#else
      named_sync(CONSUMER_THREADS, 1);
      stage_packed(stages, warpgroup, acc);
      named_sync(CONSUMER_THREADS, 1);
      store_packed(place, stages, warpgroup, out);
#endif
    }
  }
};

#if TAIL
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL(_tail)(MAPS_AND_ARGS, const __grid_constant__ TailArgs tail, Output* out, float* partials) {
  run_tile(Wgrad<true>(x_map, dy_map, g, work_of_block(g, tail), out, partials, &tail));
}

constexpr int TAIL_CHUNKS = 4;  // of each thread: enough loads under way

// Grid: x over pieces of a tile, y over the tiles that were split. Adds the splits in order.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    KERNEL(_reduce_tail)(const __grid_constant__ Args g, const __grid_constant__ TailArgs tail,
                         const float4* partials, Output* out) {
  static_assert(TILE_M * TILE_N / 4 % (REDUCE_THREADS * TAIL_CHUNKS) == 0);
  const int tile = tail.whole + blockIdx.y, row = tile / g.columns, column = tile - row * g.columns;
  const int x_tile = SWAP ? column : row, dy_tile = SWAP ? row : column;
  const int first = blockIdx.x * REDUCE_THREADS * TAIL_CHUNKS + threadIdx.x;
  wait_on_dependent_grids();
  float4 sum[TAIL_CHUNKS] = {};
  for (int split = 0; split < tail.splits; ++split) {
    const float4* from = partials + (size_t(split) * tail.rest + blockIdx.y) * (TILE_M * TILE_N / 4) + first;
#pragma unroll
    for (int i = 0; i < TAIL_CHUNKS; ++i) {
      add_partial(sum[i], __ldcg(from + i * REDUCE_THREADS));
    }
  }
#pragma unroll
  for (int i = 0; i < TAIL_CHUNKS; ++i) {
    const int at = first + i * REDUCE_THREADS, line = at / CHUNKS, k = dy_tile * DY_TILE + at % CHUNKS * 4;
    const Rows rows = rows_of(g, x_tile * X_BOXES + line / SLOT);
    if (line % SLOT >= rows.count || k >= g.out_channels) continue;
    store_values(out + rows.offset + line % SLOT * g.pitch + k, {sum[i].x, sum[i].y, sum[i].z, sum[i].w});
  }
}
#elif REDUCTION
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL(_partial)(MAPS_AND_ARGS, float* partials) {
  run_tile(Wgrad<true>(x_map, dy_map, g, work_of_block(g), nullptr, partials, nullptr));
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL(_direct)(MAPS_AND_ARGS, Output* out) {
  run_tile(Wgrad<false>(x_map, dy_map, g, work_of_block(g), out, nullptr, nullptr));
}
#endif
