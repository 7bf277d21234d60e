// The sums of a tile (wgmma_tile.cuh) as results in shared memory, from where they go to memory in whole
// rows.
//
// The result's rows are those of the product, or its columns under SWAP. They lie in boxes of columns, of
// which a row is 128 bytes: 16-byte chunk i at i ^ row % 8, so that neither stores nor loads meet conflicts.
// A TMA store or a load of any of a box's rows finds the chunks where they are.
//
// Macros: SWAP, OUT (output.cuh), PARTS (1; the tile leaves in so many parts, of equal columns of the
// result), and those of wgmma_tile.cuh.

#include "device/output.cuh"
#include "device/wgmma_tile.cuh"

#ifndef PARTS
#define PARTS 1
#endif
static_assert(PARTS == 1 || !SWAP);

constexpr int BOX_COLUMNS = 128 / sizeof(Output);
[[maybe_unused]] constexpr int RESULT_ROWS = SWAP ? TILE_N : TILE_M;
constexpr int RESULT_COLUMNS = (SWAP ? TILE_M : TILE_N) / PARTS;  // of a part
constexpr int COLUMN_BOXES = (RESULT_COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int PACKED_ROWS = (RESULT_ROWS + 63) / 64 * 64;
[[maybe_unused]] constexpr int PACKED_BYTES = COLUMN_BOXES * PACKED_ROWS * 128;

// Where a row of a box begins.
__device__ inline uint32_t row_at(uint32_t tile, int column_box, int row) {
  return tile + (column_box * PACKED_ROWS + row) * 128;
}

__device__ inline uint32_t chunk_at(uint32_t tile, int column_box, int row, int chunk) {
  return row_at(tile, column_box, row) + (chunk ^ row % 8) * 16;
}

// Each row of the result at its own place.
struct OwnPlaces {
  __device__ int operator()(int row) const { return row; }
};

__device__ inline uint32_t packed(const float* v) {
  const Vec<Output, 2> pair = converted<Output>({v[0], v[1]});
  return reinterpret_cast<const uint32_t&>(pair);
}

// A lane's part in a warp's access to the results of four 8x8 matrices. Lanes 8*i to 8*i+7 have the addresses
// of the i-th of them: two halves, for j and j + 1.
struct MatrixLane {
  int row, odd, eight;

  __device__ MatrixLane() {
    const int lane = threadIdx.x % 32;
    row = lane % 8, odd = lane / 16, eight = (threadIdx.x % 128) / 32 * 2 + lane / 8 % 2;
  }

  // Of sums j and j + 1 of a 64-row block. `places`: where the result's rows are among those of the boxes.
  template <class Places = OwnPlaces>
  __device__ uint32_t at(uint32_t tile, int block, int j, const Places& places = {}) const {
#if SWAP
    return chunk_at(tile, block, places((j + odd) * 8 + row), eight);
#else
    return chunk_at(tile, j / 8, places(block * 64 + eight * 8 + row), j % 8 + odd);
#endif
  }

  __device__ static void store(uint32_t to, const float* v) {
    const uint32_t matrices[4] = {packed(v), packed(v + 2), packed(v + 4), packed(v + 6)};
#if SWAP
    store_matrices_trans(to, matrices);
#else
    store_matrices(to, matrices);
#endif
  }
};

// 16-bit results.
template <class Places = OwnPlaces>
__device__ inline void stage_packed(uint32_t tile, int warpgroup, const Accumulator& acc, int part = 0,
                                    const Places& places = {}) {
  const MatrixLane lane;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int box = m * CONSUMERS + warpgroup;
#pragma unroll
    for (int j = 0; j < TILE_N / PARTS / 8; j += 2) {
      lane.store(lane.at(tile, box, j, places), &acc[m][(part * (TILE_N / PARTS / 8) + j) * 4]);
    }
  }
}

// float32 results.
__device__ inline void stage_floats(uint32_t tile, int warpgroup, const Accumulator& acc, int part = 0) {
  const int lane = threadIdx.x % 32, row = (threadIdx.x % 128) / 32 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int block = m * CONSUMERS + warpgroup;
#pragma unroll
    for (int j = 0; j < TILE_N / PARTS / 8; ++j) {
      const float* v = &acc[m][(part * (TILE_N / PARTS / 8) + j) * 4];
#if SWAP
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int to_row = j * 8 + pair * 2 + i % 2, to_column = block * 64 + row + i / 2 * 8;
        const uint32_t chunk = chunk_at(tile, to_column / 32, to_row, to_column % 32 / 4);
        store_shared(chunk + to_column % 4 * 4, v[i]);
      }
#else
      const int chunk = j % 4 * 2 + pair / 2, byte = pair % 2 * 8;
      const uint32_t upper = chunk_at(tile, j / 4, block * 64 + row, chunk) + byte;
      store_shared(upper, make_float2(v[0], v[1]));
      store_shared(upper + 8 * 128, make_float2(v[2], v[3]));
#endif
    }
  }
}

__device__ inline void stage_result(uint32_t tile, int warpgroup, const Accumulator& acc, int part = 0) {
  if constexpr (OUT == FLOAT) {
    stage_floats(tile, warpgroup, acc, part);
  } else {
    stage_packed(tile, warpgroup, acc, part);
  }
}

// visit(row and column of the result in the tile, byte from the tile's first) for the boxes that a consumer
// has of a part.
template <class Visit>
__device__ inline void for_boxes(int warpgroup, int part, const Visit& visit) {
  for (int m = 0; m < M_PER_WG; ++m) {
    const int block = m * CONSUMERS + warpgroup;
#if SWAP
    constexpr int BOXES = 64 / BOX_COLUMNS;  // of 64 columns
    for (int row = 0; row < TILE_N; row += 64) {
      for (int i = block * BOXES; i < (block + 1) * BOXES; ++i) {
        visit(row, i * BOX_COLUMNS, row_at(0, i, row));
      }
    }
#else
    for (int i = 0; i < COLUMN_BOXES; ++i) {
      visit(block * 64, part * RESULT_COLUMNS + i * BOX_COLUMNS, row_at(0, i, block * 64));
    }
#endif
  }
}
