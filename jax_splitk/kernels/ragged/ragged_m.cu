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
// Who computes what: schedule_m.cuh. Workspace: with CUT the slots of the pieces' fp32 sums.
//
// Macros: ELEMENT (a number of output.cuh), B_MN (1: n is contiguous in B, 0: k is), B_WHOLE (see
// `load_operand`), GROUPS (at least as many as there are), HAS_OFFSET (1: a group offset is given), and those
// of schedule_m.cuh and of device/persistent_tile.cuh.

#include "device/persistent_tile.cuh"
#include "ragged/group_map.cuh"
#include "ragged/pieces.cuh"
#include "ragged/schedule_m.cuh"

static_assert(!CUT || !SWAP);
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
    int first;        // stage
    int slot;         // of the sums; -1 where they are the result
  };

  const TensorMap &rows_map, &weight_map, &out_map;
  const int *sizes, *offset;
  const Args& args;
  float4* slots;
  int* ends;

  // ---- schedule ----

  template <class Emit>
  __device__ void schedule(const Emit& emit) const {
    const Turns<TILE_ROWS> turns(sizes, offset, args, ends);
    turns.for_work(blockIdx.x, [&](const Part& part) {
      Item item{};
      item.stages = part.end - part.first;
      item.matrix = part.matrix, item.start = part.start, item.size = part.size;
      item.row = part.at.row * TILE_ROWS, item.column = part.at.column * TILE_COLUMNS;
      item.first = part.first, item.slot = part.slot;
      emit(item);
    });
  }

  // ---- load ----

  __device__ void load(const Item& item, int number, uint64_t* full, uint32_t stage) const {
    constexpr int WEIGHT_BLOCKS = SWAP ? M_BLOCKS : N_BLOCKS;
    const int k = (item.first + number) * 64;
    load_tile(&rows_map, full, EVICT_NORMAL, shared_pointer(stage + ROWS_AT), k, item.start + item.row, 0);
    // A group of one row of tiles reads its matrix once.
    const uint64_t hint = item.size <= TILE_ROWS ? EVICT_FIRST : EVICT_LAST;
    load_operand<B_MN, B_WHOLE, WEIGHT_BLOCKS>(weight_map, full, stage + WEIGHT_AT, item.column, k,
                                               item.matrix, hint);
  }

  // ---- finish ----

  __device__ bool has_result(const Item& item) const { return !CUT || item.slot < 0; }
  __device__ bool is_needed(const Item& item, int warpgroup) const {
    return SWAP ? item.column + warpgroup * 64 < args.n : item.row + warpgroup * 64 < item.size;
  }

  __device__ bool exchange(const Item& item, Accumulator& acc) const {
    if (has_result(item)) return false;
    exchange_sums(slots + size_t(item.slot) * SLOT_CHUNKS, false, true, acc);
    return true;
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
             const __grid_constant__ Args args, float4* slots) {
  __shared__ int ends[GROUPS];
  run_items(RaggedM{{}, rows_map, weight_map, out_map, sizes, offset, args, slots, ends});
}

#if CUT
// Adds the pieces of the last round's tiles. Block (x, y) has the x-th tile, and a part of its sums.
extern "C" __global__ void __launch_bounds__(ADD_THREADS)
    KERNEL(_reduce)(const float4* slots, Output* out, const int* sizes, const int* offset,
                    const __grid_constant__ Args args) {
  __shared__ int ends[GROUPS];
  __shared__ Part found;
  __shared__ int pieces;
  const int number = blockIdx.x;
  if (threadIdx.x < 32) {
    const Turns<TILE_ROWS> turns(sizes, offset, args, ends);
    const LastRound& last = turns.last;
    const Part part = number < last.tiles ? turns.tile_of_last_round(number) : Part{};
    if (threadIdx.x == 0) found = part, pieces = number < last.tiles ? last.pieces : 0;
  }
  __syncthreads();
  // All blocks wait, those without a tile too: what follows this kernel must find the first one's results.
  wait_on_dependent_grids();
  if (pieces <= 1) return;
  add_pieces(slots, number * pieces, pieces, found.at.column * TILE_COLUMNS, args.n, [&](int in_tile) {
    const int row = found.at.row * TILE_ROWS + in_tile;
    return row < found.size ? out + size_t(found.start + row) * args.n : nullptr;
  });
}
#endif
