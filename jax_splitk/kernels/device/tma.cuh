// Boxes that TMA loads, and where it puts them.

#include "device/async.cuh"

// Loads a box of a tensor at these coordinates, the contiguous dimension's first, to `to` in shared memory.
// The barrier counts its bytes.
template <class Map, class... Coordinates>
__device__ inline void load_box(const Map& map, uint64_t* full, uint32_t to, Coordinates... at) {
  load_tile(&map, full, EVICT_NORMAL, __cvta_shared_to_generic(to), at...);
}

// Byte of a 16-byte chunk of a row of ROW_BYTES under the swizzle of that width (128: 16 bytes are not
// swizzled): the chunk's number is flipped by the number of the 128-byte line.
template <int ROW_BYTES = 128>
__device__ inline uint32_t swizzled(int row, int chunk) {
  const int byte = row * ROW_BYTES;
  return byte + ((chunk ^ (byte >> 7 & (ROW_BYTES / 16 - 1))) << 4);
}
