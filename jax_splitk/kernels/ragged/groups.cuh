// Which rows each group has, and how the tiles of a matrix follow each other.

#include "device/groups.cuh"

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
