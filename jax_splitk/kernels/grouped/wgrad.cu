// Grouped convolution weight gradient for Hopper, for few channels per group: TMA tiles with their halo in
// shared memory, read by ldmatrix, multiplied by mma.sync.
//
//   dW[r, s, c % Cg, k] = sum over (n, p, q) of X[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c] * dY[n, p, q, k]
//   for c and k of the same group
//
// Words. Unit: 8 neighbouring channels, 16 bytes, a row of ldmatrix's 8x8 matrices. Bundle: the fewest groups
// whose channels are whole units on both sides; every unit of X meets every unit of dY of its bundle. Block:
// the channels of a thread block, whole bundles or a part of one. Where groups are PADDED, a bundle is one
// group, and its blocks may reach into its neighbours: sums with these channels are not stored. Octet: 8
// neighbouring pixels of an output row. Strip: two octets (the MMA's k of 16), followed from the tile's first
// row to its last.
//
// A tile is IMAGES x ROWS x COLUMNS output pixels and the input that they read; one stage of the pipeline
// holds it, X first, each as pixels of one TMA box under the swizzle of the pixel's size. Widths are whole
// multiples of 8 pixels, so that the swizzle of a unit depends on the pixel's place in its octet only. Filter
// taps are other addresses of the same X.
//
// An MMA's 16 rows are two slots (tap column, unit of X), its 8 columns a unit of dY. A warp owns a job: all
// tap rows, some tap columns, units of X and units of dY of one bundle, whose sums stay in its registers.
// Warps of the same job divide the strips among themselves (slices) and meet in shared memory at the end, in
// the order of their numbers. With REUSE a row of X is loaded once, for all tap rows, against the last
// KERNEL_H rows of dY, kept in registers. Of a filter with many columns (FILTER_W) a thread block has
// KERNEL_W, one of COLUMN_PARTS parts; what the last part has beyond the filter is not stored.
//
// What a strip has beyond the image is read from a row of zeros, as X and as dY: no value is multiplied that
// the convolution does not multiply.
//
// Roles: the last warp is the producer (one thread issues TMA) and fills all stages before the block's other
// warps, the consumers, have even begun. `empty` has an arrival of each of these after its last ldmatrix.
//
// Macros: ELEMENT, OUT, CTAS_PER_SM, the fields of grouped.py's Config and Tiling; KERNEL_H to DILATION_W;
// GROUP_IN, GROUP_OUT (channels per group), BUNDLE (groups), BUNDLE_IN, BUNDLE_OUT (channels of one), PADDED;
// RAGGED
// (the last tile of an image may have fewer rows), TILES_H, TILES_W (of an image).

#include "device/skeleton.cuh"
#include "device/split_k.cuh"
#include "device/tma.cuh"

using Element = TypeOf<ELEMENT>::type;

constexpr int IN_UNITS = IN_JOBS * WARP_IN, OUT_UNITS = OUT_JOBS * WARP_OUT;  // of one bundle in a block
constexpr int JOBS = BUNDLES * IN_JOBS * OUT_JOBS * COLUMN_JOBS;
constexpr int WARPS = JOBS * SLICES;  // consumers
constexpr int THREADS = 32 * (WARPS + 1);

constexpr int SLOTS = WARP_COLUMNS * WARP_IN;
constexpr int PAIRS = (SLOTS + 1) / 2;         // of slots
constexpr int OUT_PAIRS = (WARP_OUT + 1) / 2;  // of units of dY

constexpr int X_PIXEL = IN_BLOCK * 2, DY_PIXEL = OUT_BLOCK * 2;  // bytes
constexpr int X_ROW = X_WIDTH * X_PIXEL, X_IMAGE = X_HEIGHT * X_ROW;
constexpr int DY_ROW = DY_WIDTH * DY_PIXEL, DY_IMAGE = ROWS * DY_ROW;
constexpr int OCTETS = DY_WIDTH / 8;  // of a row
// How many groups of KERNEL_H rows of X the loop unrolls: all, unless the code gets too long. Unrolling makes
// every row's part constant.
constexpr int UNROLL = KERNEL_H <= 3 ? (X_HEIGHT + KERNEL_H - 1) / KERNEL_H : 1;

// Tile coordinates: group of IMAGES images, ROWS rows, COLUMNS columns.
struct Tile {
  int n, h, w;
};

__device__ inline Tile tile_at(int index) {
  const int row = index / TILES_W, image = row / TILES_H;
  return {image, row - image * TILES_H, index - row * TILES_W};
}

__device__ inline void advance(Tile& tile) {
  if (++tile.w < TILES_W) return;
  tile.w = 0;
  if (++tile.h < TILES_H) return;
  tile.h = 0;
  ++tile.n;
}

// First channels of a thread block.
struct Channels {
  int in, out;
};

__device__ inline int bundles_at(int block) {
  return block / (COLUMN_PARTS * IN_PARTS * OUT_PARTS) * BUNDLES;
}

// The first tap column of a thread block.
__device__ inline int first_column() { return COLUMN_PARTS > 1 ? blockIdx.x % COLUMN_PARTS * KERNEL_W : 0; }

__device__ inline Channels block_channels(int block) {
  block /= COLUMN_PARTS;
  const int part = block % (IN_PARTS * OUT_PARTS), bundle = block / (IN_PARTS * OUT_PARTS) * BUNDLES;
  // Where groups are PADDED, a box begins at a multiple of 16 bytes.
  const auto begin = [](int channel) { return PADDED ? channel - channel % 8 : channel; };
  return {begin(bundle * BUNDLE_IN) + part / OUT_PARTS * IN_BLOCK,
          begin(bundle * BUNDLE_OUT) + part % OUT_PARTS * OUT_BLOCK};
}

using Ring = Pipeline<STAGES, 1, WARPS>;

// ---- producer ---------------------------------------------------------------------------------------------

// Loads `tiles` tiles from `tile` on. The FIRST tiles fill stages that nobody has used yet; later tiles wait
// until their stage is free.
template <bool FIRST>
__device__ inline void produce(const TensorMap& x_map, const TensorMap& dy_map, const Args& g,
                               uint32_t stages, Ring& pipeline, Channels channels, Tile tile, int tiles) {
  Position at;
  if (!FIRST) at.phase = 1;
#pragma unroll 1
  for (; tiles > 0; --tiles, advance(tile), at.advance(STAGES)) {
    if constexpr (!FIRST) pipeline.wait_empty(at);
    uint64_t* full = pipeline.expect(at, IMAGES * (X_IMAGE + DY_IMAGE));
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
    const int n = tile.n * IMAGES, p = tile.h * ROWS, q = tile.w * COLUMNS;
    load_box(x_map, full, stage, channels.in, q * STRIDE_W - g.pad.w + first_column() * DILATION_W,
             p * STRIDE_H - g.pad.h, n);
    load_box(dy_map, full, stage + DY_OFFSET, channels.out, q, p, n);
  }
}

// ---- consumer ---------------------------------------------------------------------------------------------

using Accumulator = float[KERNEL_H][PAIRS][WARP_OUT][4];
using XFragment = uint32_t[PAIRS][4];
using DyFragment = uint32_t[WARP_OUT][2];

struct Job {
  int in_unit, out_unit, column;  // the first ones: units of the block, tap column
};

__device__ inline Job job_at(int index) {
  const int column = index % COLUMN_JOBS, out = index / COLUMN_JOBS % OUT_JOBS;
  const int in = index / (COLUMN_JOBS * OUT_JOBS) % IN_JOBS;
  const int bundle = index / (COLUMN_JOBS * OUT_JOBS * IN_JOBS);
  return {bundle * IN_UNITS + in * WARP_IN, bundle * OUT_UNITS + out * WARP_OUT, column * WARP_COLUMNS};
}

// Where a lane's pixel lies in shared memory, for each load of a row. Lanes come in groups of 8, a pixel of
// an octet each. For X the groups are (octet, slot of a pair) = (0, 0), (0, 1), (1, 0), (1, 1), the order of
// the MMA's A registers; for dY (unit of a pair, octet), the order of two B operands.
struct Cursor {
  uint32_t x[PAIRS], dy[OUT_PAIRS];
  uint32_t x_row, dy_row;  // from a row to the next: 0 for lanes that stay on the row of zeros
};

// A lane's offsets from an octet's first pixel.
struct Lane {
  uint32_t x[PAIRS], dy[OUT_PAIRS];
};

__device__ inline Lane lane_offsets(const Job& job, int lane) {
  const int pixel = lane % 8;
  Lane at;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    // An odd last slot is loaded twice, and the second not stored: cheaper than moving its registers.
    const int slot = min(2 * i + lane / 8 % 2, SLOTS - 1);
    // So are columns beyond the filter, in the last job.
    const int column = min(job.column + slot / WARP_IN, KERNEL_W - 1);
    at.x[i] = swizzled<X_PIXEL>(pixel * STRIDE_W + column * DILATION_W, job.in_unit + slot % WARP_IN);
  }
#pragma unroll
  for (int i = 0; i < OUT_PAIRS; ++i) {
    at.dy[i] = swizzled<DY_PIXEL>(pixel, job.out_unit + min(2 * i + lane / 16, WARP_OUT - 1));
  }
  return at;
}

__device__ inline Cursor strip_cursor(const Lane& at, uint32_t stage, uint32_t zeros, int strip, int columns,
                                      int lane) {
  Cursor cursor;
  {
    const int octet = 2 * strip + lane / 16;
    const int image = octet / OCTETS, q = (octet - image * OCTETS) * 8;
    const bool live = image < IMAGES && q + lane % 8 < columns;
    const uint32_t x = stage + image * X_IMAGE + q * (STRIDE_W * X_PIXEL);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) cursor.x[i] = live ? x + at.x[i] : zeros + (at.x[i] & 0x70);
    cursor.x_row = live ? X_ROW : 0;
  }
  {
    const int octet = 2 * strip + lane / 8 % 2;
    const int image = octet / OCTETS, q = (octet - image * OCTETS) * 8;
    const bool live = image < IMAGES && q + lane % 8 < columns;
    const uint32_t dy = stage + DY_OFFSET + image * DY_IMAGE + q * DY_PIXEL;
#pragma unroll
    for (int i = 0; i < OUT_PAIRS; ++i) cursor.dy[i] = live ? dy + at.dy[i] : zeros + (at.dy[i] & 0x70);
    cursor.dy_row = live ? DY_ROW : 0;
  }
  return cursor;
}

// Loads a row, `offset` bytes from the cursor's.
__device__ inline void load_x(const Cursor& cursor, uint32_t offset, XFragment& a) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
    load_matrices_trans(cursor.x[i] + offset, a[i][0], a[i][1], a[i][2], a[i][3]);
}

__device__ inline void load_dy(const Cursor& cursor, uint32_t offset, DyFragment& b) {
#pragma unroll
  for (int i = 0; i < OUT_PAIRS; ++i) {
    const uint32_t address = cursor.dy[i] + offset;
    if (2 * i + 1 < WARP_OUT) {
      load_matrices_trans(address, b[2 * i][0], b[2 * i][1], b[2 * i + 1][0], b[2 * i + 1][1]);
    } else {
      load_matrices_trans(address, b[2 * i][0], b[2 * i][1]);
    }
  }
}

__device__ inline void multiply_row(const XFragment& a, const DyFragment& b,
                                    float (&acc)[PAIRS][WARP_OUT][4]) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
    for (int k = 0; k < WARP_OUT; ++k) mma_m16n8k16<Element>(acc[i][k], a[i], b[k]);
  }
}

// Adds a strip of `rows` rows of dY.
__device__ inline void add_strip(const Cursor& cursor, int rows, Accumulator& acc) {
  uint32_t x_offset = 0, dy_offset = 0;
  if constexpr (REUSE) {
    DyFragment b[KERNEL_H];
#pragma unroll(UNROLL)
    for (int first = 0; first < X_HEIGHT; first += KERNEL_H) {
#pragma unroll
      for (int j = 0; j < KERNEL_H; ++j) {
        const int h = first + j;
        if (h >= X_HEIGHT || (RAGGED && h >= rows + KERNEL_H - 1)) break;
        XFragment a;
        load_x(cursor, x_offset, a);
        if (h < ROWS) load_dy(cursor, dy_offset, b[j]);
        x_offset += cursor.x_row;
        dy_offset += cursor.dy_row;
#pragma unroll
        for (int r = KERNEL_H - 1; r >= 0; --r) {
          const int p = h - r;
          if (p < 0 || p >= ROWS || (RAGGED && p >= rows)) continue;
          multiply_row(a, b[(j - r + KERNEL_H) % KERNEL_H], acc[r]);
        }
      }
    }
  } else {
#pragma unroll 1
    for (int p = 0; p < rows; ++p) {
      DyFragment b;
      load_dy(cursor, dy_offset, b);
#pragma unroll
      for (int r = 0; r < KERNEL_H; ++r) {
        XFragment a;
        load_x(cursor, x_offset + r * DILATION_H * cursor.x_row, a);
        multiply_row(a, b, acc[r]);
      }
      x_offset += STRIDE_H * cursor.x_row;
      dy_offset += cursor.dy_row;
    }
  }
}

__device__ inline void consume(const Args& g, uint32_t stages, Ring& pipeline, uint32_t zeros, const Job& job,
                               int slice, Tile tile, int tiles, Accumulator& acc) {
  const int lane = threadIdx.x % 32;
  const Lane lane_at = lane_offsets(job, lane);
  Position at;
#pragma unroll 1
  for (; tiles > 0; --tiles, advance(tile), at.advance(STAGES)) {
    const int rows = RAGGED ? min(ROWS, g.out.h - tile.h * ROWS) : ROWS;
    const int columns = TILES_W == 1 ? COLUMNS : min(COLUMNS, g.out.w - tile.w * COLUMNS);
    pipeline.wait_full(at);
#pragma unroll 1
    for (int strip = slice; strip < STRIPS; strip += SLICES) {
      add_strip(strip_cursor(lane_at, stages + at.stage * STAGE_BYTES, zeros, strip, columns, lane), rows,
                acc);
    }
    loads_done();
    __syncwarp();
    if (lane == 0) pipeline.release(at.stage);
  }
}

__device__ inline void sync_consumers() { sync_threads<WARPS * 32, 1>(); }

// ---- epilogue ---------------------------------------------------------------------------------------------

// A block's results are, for each tap, SUM_ROWS (input channels of a group) rows of OUT_BLOCK values; where
// it is a part of a bundle of several groups, some of these belong to groups of which it has no input. They
// lie so in shared memory, in place of the pipeline, for each slice; there the 32-byte units of a row are
// swapped so that half a warp, which has 4 rows of a unit, meets all banks.
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr bool INCOMPLETE = BUNDLE > 1 && IN_PARTS* OUT_PARTS > 1;
// Values that a thread stores together.
constexpr int PIECE = PADDED                        ? (GROUP_OUT % 4 == 0   ? 4
                                                       : GROUP_OUT % 2 == 0 ? 2
                                                                            : 1)
                      : INCOMPLETE && GROUP_OUT < 4 ? GROUP_OUT
                                                    : 4;
constexpr int TAP_SUMS = SUM_ROWS * OUT_BLOCK, TAP_PIECES = TAP_SUMS / PIECE;
constexpr int IN_GROUPS = IN_BLOCK > GROUP_IN ? IN_BLOCK / GROUP_IN : 1;
constexpr int SUMS_BYTES = TAPS * TAP_SUMS * 4;  // of a slice

__device__ inline int swapped(int row, int unit) {
  return unit ^ (OUT_BLOCK >= 32 ? row & 3 : OUT_BLOCK == 16 ? row >> 1 & 1 : 0);
}

// The MMA's accumulator holds, for lane l, rows l/4 (+8) and columns 2*(l%4) (+1). Sums across groups are
// left out.
__device__ inline void stage_sums(uint32_t sums, Channels channels, const Job& job, const Accumulator& acc) {
  const int lane = threadIdx.x % 32;
  const int row = SUM_ROWS < 8 ? lane / 4 % SUM_ROWS : job.in_unit * 8 % SUM_ROWS + lane / 4;
  sums += ((job.column * SUM_ROWS + row) * OUT_BLOCK + lane % 4 * 2) * 4;
#pragma unroll
  for (int k = 0; k < WARP_OUT; ++k) {
    const uint32_t to = sums + swapped(row, job.out_unit + k) * 32;
    const int group = (channels.out + (job.out_unit + k) * 8 + lane % 4 * 2) / GROUP_OUT;
#pragma unroll
    for (int unit = 0; unit < WARP_IN; ++unit) {
      if (BUNDLE > 1 && (channels.in + (job.in_unit + unit) * 8 + lane / 4) / GROUP_IN != group) continue;
#pragma unroll
      for (int column = 0; column < WARP_COLUMNS; ++column) {
        if (KERNEL_W % WARP_COLUMNS && job.column + column >= KERNEL_W) break;
        const int slot = column * WARP_IN + unit;
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
          const float* v = &acc[r][slot / 2][k][slot % 2 * 2];
          const int at = (r * KERNEL_W + column) * TAP_SUMS + unit * 8 % SUM_ROWS * OUT_BLOCK;
          store_shared(to + at * 4, make_float2(v[0], v[1]));
        }
      }
    }
  }
}

using Piece = Vec<float, PIECE>;

// Adds the slices in their order, and writes out[KERNEL_H][FILTER_W][GROUP_IN][K].
template <class T>
__device__ inline void store_sums(const Args& g, T* out, Channels channels, uint32_t sums) {
  constexpr int TOGETHER = TAP_PIECES > WARPS * 32 ? 1 : WARPS * 32 / TAP_PIECES;  // taps
  const int first = TAP_PIECES > WARPS * 32 ? 0 : threadIdx.x / TAP_PIECES;
  if (WARPS * 32 % TAP_PIECES && first >= TOGETHER) return;
  const int bundle = bundles_at(blockIdx.x);
  // The first row's channel of its group.
  const auto in = [&] { return PADDED ? channels.in - bundle * BUNDLE_IN : channels.in % GROUP_IN; };
#pragma unroll 1
  for (int piece = threadIdx.x - first * TAP_PIECES; piece < TAP_PIECES; piece += WARPS * 32) {
    const int row = piece / (OUT_BLOCK / PIECE), column = piece % (OUT_BLOCK / PIECE) * PIECE;
    const int k = channels.out + column;
    if (k >= g.out_channels) continue;
    if (PADDED && (uint32_t(in() + row) >= GROUP_IN || uint32_t(k - bundle * BUNDLE_OUT) >= GROUP_OUT))
      continue;
    const int group = k / GROUP_OUT - channels.in / GROUP_IN;  // from the block's first on
    if (INCOMPLETE && uint32_t(group) >= IN_GROUPS) continue;
    uint32_t from =
        sums + ((first * SUM_ROWS + row) * OUT_BLOCK + swapped(row, column / 8) * 8 + column % 8) * 4;
    T* to = out + size_t(first * GROUP_IN + in() + row) * g.out_channels + k;
    const auto store = [&](int tap) {
      Piece sum = load_shared<Piece>(from);
#pragma unroll
      for (int slice = 1; slice < SLICES; ++slice) {
        const Piece x = load_shared<Piece>(from + slice * SUMS_BYTES);
#pragma unroll
        for (int j = 0; j < PIECE; ++j) sum.v[j] += x.v[j];
      }
      if constexpr (COLUMN_PARTS == 1) {
        store_values(to, sum.v);
      } else {
        const int column = first_column() + tap % KERNEL_W, number = tap / KERNEL_W * FILTER_W + column;
        if (column < FILTER_W) {
          store_values(out + size_t(number * GROUP_IN + in() + row) * g.out_channels + k, sum.v);
        }
      }
      from += TOGETHER * TAP_SUMS * 4;
      to += size_t(TOGETHER * GROUP_IN) * g.out_channels;
    };
    if constexpr (TOGETHER == 1) {
#pragma unroll(TAPS % 3 ? 1 : 3)
      for (int tap = 0; tap < TAPS; ++tap) store(tap);
    } else {
#pragma unroll 1
      for (int tap = first; tap < TAPS; tap += TOGETHER) store(tap);
    }
  }
}

// Grid: x over blocks of channels (neighbours share cache lines), y over splits. The tiles are shared out
// evenly: the first splits have one more where they do not divide.
template <class T>
__device__ inline void wgrad(const TensorMap& x_map, const TensorMap& dy_map, const Args& g, T* out) {
  __shared__ Ring pipeline;
  __shared__ alignas(128) uint4 zeros[8];  // one for each set of banks
  const uint32_t stages = shared_stages();
  const int split = blockIdx.y, tiles = g.each + (split < g.more);
  const int first = split * g.each + min(split, g.more);
  const Channels channels = block_channels(blockIdx.x);
  const int warp = warp_index();
  if (threadIdx.x < 8) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (warp == WARPS && elect_one()) {
    init_barriers(pipeline);
    produce<true>(x_map, dy_map, g, stages, pipeline, channels, tile_at(first), min(tiles, STAGES));
  }
  __syncthreads();
  if (warp == WARPS) {
    if (tiles > STAGES && elect_one()) {
      produce<false>(x_map, dy_map, g, stages, pipeline, channels, tile_at(first + STAGES), tiles - STAGES);
    }
    return;
  }
  const int slice = warp / JOBS;
  const Job job = job_at(warp - slice * JOBS);
  Accumulator acc = {};
  consume(g, stages, pipeline, shared_address(zeros), job, slice, tile_at(first), tiles, acc);
  launch_dependent_grids();
  sync_consumers();  // after the last read of the pipeline
  stage_sums(stages + slice * SUMS_BYTES, channels, job, acc);
  sync_consumers();
  store_sums(g, out + size_t(split) * g.stride, channels, stages);
}

SPLIT_K_KERNELS((MAPS_AND_ARGS), (x_map, dy_map, g))
