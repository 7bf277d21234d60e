// The sums of a tile (wgmma_tile.cuh) as 16-bit results in shared memory, from where they go to memory in
// whole rows.
//
// The result's rows are those of the product, or its columns under SWAP. They lie in boxes of 64 rows and 64
// columns, of which a row is 128 bytes: 16-byte chunk i at i ^ row % 8, so that neither stores nor loads
// meet conflicts.
//
// Macros: SWAP, OUT (output.cuh; a type of 16 bits), and those of wgmma_tile.cuh.

#include "device/output.cuh"
#include "device/wgmma_tile.cuh"

constexpr int COLUMN_BOXES = SWAP ? M_BLOCKS : N_BLOCKS;  // of the result
[[maybe_unused]] constexpr int PACKED_BYTES = M_BLOCKS * N_BLOCKS * BLOCK_BYTES;

__device__ inline uint32_t chunk_at(uint32_t tile, int row_box, int column_box, int row, int chunk) {
  return tile + (row_box * COLUMN_BOXES + column_box) * BLOCK_BYTES + row * 128 + (chunk ^ row % 8) * 16;
}

__device__ inline uint32_t packed(const float* v) {
  const Vec<Output, 2> pair = converted<Output>({v[0], v[1]});
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline void stage_packed(uint32_t tile, int warpgroup, const Accumulator& acc) {
  // Lanes 8*i to 8*i+7 have the addresses of the i-th of four 8x8 matrices: two halves, for j and j + 1.
  const int lane = threadIdx.x % 32, row = lane % 8, odd = lane / 16;
  const int eight = (threadIdx.x % 128) / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int box = m * CONSUMERS + warpgroup;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j += 2) {
      const float* v = &acc[m][j * 4];
      const uint32_t matrices[4] = {packed(v), packed(v + 2), packed(v + 4), packed(v + 6)};
#if SWAP
      store_matrices_trans(chunk_at(tile, j / 8, box, (j % 8 + odd) * 8 + row, eight), matrices);
#else
      store_matrices(chunk_at(tile, box, j / 8, eight * 8 + row, j % 8 + odd), matrices);
#endif
    }
  }
}
