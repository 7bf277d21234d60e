// Boxes of the rows of one group (kernels/ragged/maps.py says how the map's bounds are the group's).

#include "device/async.cuh"

constexpr int GROUP_ROWS = 1 << 30;

// The rows `start` to `start + size` of a matrix.
struct Rows {
  int start, size;

  // The box's first row is the group's row `row`. Rows beyond the group are zeros.
  __device__ void load(const TensorMap& map, uint64_t* full, uint32_t to, int column, int row,
                       uint64_t hint = EVICT_NORMAL) const {
    load_tile(&map, full, hint, shared_pointer(to), column, GROUP_ROWS - size + row, start + size,
              GROUP_ROWS);
  }

  // Rows beyond the group are left as they are.
  __device__ void store(const TensorMap& map, uint32_t from, int column, int row) const {
    store_tile_hinted(&map, shared_pointer(from), EVICT_FIRST, column, GROUP_ROWS - size + row, start + size,
                      GROUP_ROWS);
  }
};
