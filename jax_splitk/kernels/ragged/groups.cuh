// Which rows each group has, and how the tiles of a matrix follow each other.

#include "device/groups.cuh"

__device__ inline int sum_of_lanes(int x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}

__device__ inline int max_of_lanes(int x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(~0u, x, by));
  return x;
}

// The number of pieces, `most` at most, into which each of `tiles` tiles is cut, so that as few workers as
// possible are idle in the last round of pieces. The fewest, where several numbers are as good. All lanes of
// a warp call it.
__device__ inline int pieces_that_fill(int workers, int tiles, int most) {
  int best = 0;  // percent of the workers that have a piece, and the number of pieces
  for (int i = threadIdx.x % 32 + 1; i <= most; i += 32) {
    const int count = tiles * i, rounds = (count + workers - 1) / workers;
    best = max(best, min(count * 100 / (rounds * workers), 97) * 1024 + 1023 - i);
  }
  best = max_of_lanes(best);
  return best == 0 ? 1 : 1023 - best % 1024;
}

// stages * piece / pieces, whose product may not fit in 32 bits.
__device__ inline int start_of_piece(int piece, int stages, int pieces) {
  return stages / pieces * piece + stages % pieces * piece / pieces;
}

struct Place {
  int row, column;  // of a tile among the tiles
};

// The place of a tile by its number, of so many rows and columns of tiles. Tiles that follow each other are
// computed at the same time, and share what they read where they lie in a square: so BAND rows of tiles come
// together, and in these one column after the other.
__device__ inline Place place_of(int tile, int rows, int columns) {
  constexpr int BAND = 16;
  const int band = tile / (BAND * columns), within = tile - band * BAND * columns;
  const int height = min(BAND, rows - band * BAND), column = within / height;
  return {band * BAND + within - column * height, column};
}
