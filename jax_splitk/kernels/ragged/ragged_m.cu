// Grouped products whose rows are ragged, on the skeleton of device/persistent_tile.cuh:
//
//   D[i, n] = sum over k of A[i, k] * B[g, k, n], where row i is group g's; zeros where it is no group's
//
// Tiles begin at a group's first row. Of A a tile also loads rows of the next group, which reach only rows
// that are not stored. TMA stores the group's rows alone (group_map.cuh).
//
// Under SWAP the columns of B are WGMMA's rows, and the rows of A its columns: a group of a few rows costs
// its own rows, not 64.
//
// Macros: ELEMENT (a number of output.cuh), B_MN (1: n is contiguous in B, 0: k is), B_WHOLE (see
// `load_operand`), GROUPS (at least as many as there are), HAS_OFFSET (1: a group offset is given), and those
// of device/persistent_tile.cuh.

#include "device/persistent_tile.cuh"
#include "ragged/group_map.cuh"
#include "ragged/groups.cuh"
#include "structs.cuh"

constexpr int TILE_ROWS = SWAP ? TILE_N : TILE_M, TILE_COLUMNS = SWAP ? TILE_M : TILE_N;
constexpr GMMA::Major WEIGHT_MAJOR = B_MN ? GMMA::Major::MN : GMMA::Major::K;
using Weight = conditional_t<B_MN, MnMajor, KMajor>;

struct RaggedM : PersistentKernel {
#if SWAP
  using Wgmma = WGMMA_16(TILE_N, SS)<WEIGHT_MAJOR, GMMA::Major::K>;
  using A = Weight;
  using B = KMajor;
  static constexpr int WEIGHT_AT = 0, ROWS_AT = A_BYTES;
#else
  using Wgmma = WGMMA_16(TILE_N, SS)<GMMA::Major::K, WEIGHT_MAJOR>;
  using A = KMajor;
  using B = Weight;
  static constexpr int WEIGHT_AT = A_BYTES, ROWS_AT = 0;
#endif
  struct alignas(16) Item : ItemBase {
    int matrix;       // of B
    int start, size;  // the group's rows
    int row, column;  // where the tile begins, the row within the group
  };

  const TensorMap &rows_map, &weight_map, &out_map;
  const int *sizes, *offset;
  const Args& args;
  int* ends;

  // ---- schedule ----

  // The thread blocks take turns at the tiles.
  template <class Emit>
  __device__ void schedule(const Emit& emit) const {
    find_groups(sizes, args.groups, args.m, ends);
    const int first_matrix = HAS_OFFSET ? __ldg(offset) : 0;
    int tile = blockIdx.x, first = 0, start = 0;
#pragma unroll 1
    for (int group = 0; group <= args.groups; ++group) {
      const bool is_group = group < args.groups;  // else all rows that are left
      const int end = is_group ? ends[group] : args.m, size = end - start, matrix = group - first_matrix;
      const int rows = (size + TILE_ROWS - 1) / TILE_ROWS, count = rows * args.columns;
      const bool is_product = is_group && matrix >= 0 && matrix < args.matrices;
#pragma unroll 1
      for (; tile < first + count; tile += gridDim.x) {
        const Place at = place_of(tile - first, rows, args.columns);
        Item item{};
        item.stages = is_product ? args.k_blocks : 0;
        item.matrix = matrix, item.start = start, item.size = size;
        item.row = at.row * TILE_ROWS, item.column = at.column * TILE_COLUMNS;
        emit(item);
      }
      first += count, start = end;
    }
  }

  // ---- load ----

  __device__ void load(const Item& item, int number, uint64_t* full, uint32_t stage) const {
    constexpr int WEIGHT_BLOCKS = SWAP ? M_BLOCKS : N_BLOCKS;
    load_tile(&rows_map, full, EVICT_NORMAL, shared_pointer(stage + ROWS_AT), number * 64,
              item.start + item.row, 0);
    // A group of one row of tiles reads its matrix once.
    const uint64_t hint = item.size <= TILE_ROWS ? EVICT_FIRST : EVICT_LAST;
    load_operand<B_MN, B_WHOLE, WEIGHT_BLOCKS>(weight_map, full, stage + WEIGHT_AT, item.column, number * 64,
                                               item.matrix, hint);
  }

  // ---- finish ----

  __device__ bool has_result(const Item&) const { return true; }
  __device__ bool is_needed(const Item& item, int warpgroup) const {
    return SWAP ? item.column + warpgroup * 64 < args.n : item.row + warpgroup * 64 < item.size;
  }

  __device__ void store(const Item& item, int warpgroup, int part, uint32_t from) const {
    const Rows rows = {item.start, item.size};
    for_boxes(warpgroup, part, [&](int row, int column, uint32_t box) {
      if (item.row + row < item.size && item.column + column < args.n)
        rows.store(out_map, from + box, item.column + column, item.row + row);
    });
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap rows_map, const __grid_constant__ TensorMap weight_map,
             const __grid_constant__ TensorMap out_map, const int* sizes, const int* offset,
             const __grid_constant__ Args args) {
  __shared__ int ends[GROUPS];
  run_items(RaggedM{{}, rows_map, weight_map, out_map, sizes, offset, args, ends});
}
