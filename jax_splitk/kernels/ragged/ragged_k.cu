// Grouped products whose reduction is ragged, on the skeleton of device/persistent_tile.cuh:
//
//   D[g, m, n] = sum over the rows i of group g of A[i, m] * B[i, n]
//
// TMA loads zeros for what is beyond the group's rows (group_map.cuh). Who computes what: schedule_k.cuh, and
// zeros.cuh for groups without rows.
//
// Workspace: slots of fp32 sums of a tile. The pieces of tiles that are cut have one each, and the last
// kernel adds them. For float32 results each worker has one more, for the sums of a tile that takes several
// items.
//
// Macros: ELEMENT (a number of output.cuh), HAS_OFFSET (1: a group offset is given), CHAIN_STAGES (that the
// tensor cores add: they truncate sums, which a float32 result would show), and those of schedule_k.cuh and
// of device/persistent_tile.cuh.

#include "device/persistent_tile.cuh"
#include "ragged/group_map.cuh"
#include "ragged/pieces.cuh"
#include "ragged/schedule_k.cuh"
#include "ragged/zeros.cuh"
#include "structs.cuh"

struct RaggedK : PersistentKernel {
  using Wgmma = WGMMA_16(TILE_N, SS)<GMMA::Major::MN, GMMA::Major::MN>;
  using A = MnMajor;
  using B = MnMajor;

  enum Flags { ADDS = 1, KEEPS = 2 };
  struct alignas(16) Item : ItemBase {
    int matrix, place;  // of the tile: its row among the tiles, and its column in the lower 16 bits
    int start, size;    // the group's rows
    int first;          // stage
    int slot;
    int flags;  // ADDS: the slot's sums are added; KEEPS: the sums go to the slot, else they are the result

    __device__ int row() const { return place >> 16; }
    __device__ int column() const { return place & 0xffff; }
  };

  const TensorMap &a_map, &b_map, &out_map;
  const int *sizes, *offset;
  const Args& args;
  float4* slots;
  Output* out;
  int* ends;

  // ---- schedule ----

  // A tile, or a piece of it, is one item, or several of as many stages as the tensor cores may add.
  template <class Emit>
  __device__ void schedule(const Emit& emit) const {
    const Schedule all(sizes, offset, args.groups, args.matrices, args.m, args.rows * args.columns, ends);
    all.for_work(blockIdx.x, [&](int matrix, int tile, int first, int end, int slot) {
      const Place at = place_of(tile, args.rows, args.columns);
      const int keeps = slot < 0 ? 0 : KEEPS;
      Item item{};
      item.matrix = matrix, item.place = at.row << 16 | at.column;
      item.start = all.start(matrix), item.size = all.size(matrix);
      item.slot = slot < 0 ? SLOTS + blockIdx.x : slot, item.first = first;
      do {
        item.stages = min(end - item.first, CHAIN_STAGES);
        item.flags = (item.first > first ? ADDS : 0) | (item.first + item.stages < end ? KEEPS : keeps);
        emit(item);
        item.first += item.stages;
      } while (item.first < end);
    });
  }

  // ---- load ----

  __device__ void load(const Item& item, int number, uint64_t* full, uint32_t stage) const {
    const Rows rows = {item.start, item.size};
    const int row = (item.first + number) * 64;
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i)
      rows.load(a_map, full, stage + i * BLOCK_BYTES, item.row() * TILE_M + 64 * i, row);
#pragma unroll
    for (int i = 0; i < N_BLOCKS; ++i)
      rows.load(b_map, full, stage + A_BYTES + i * BLOCK_BYTES, item.column() * TILE_N + 64 * i, row);
  }

  // ---- finish ----

  __device__ bool has_result(const Item& item) const { return !(item.flags & KEEPS); }
  __device__ bool is_needed(const Item& item, int warpgroup) const {
    return item.row() * TILE_M + warpgroup * 64 < args.rows_of_matrix;
  }

  __device__ bool exchange(const Item& item, Accumulator& acc) const {
    if (item.flags == 0) return false;
    exchange_sums(slots + size_t(item.slot) * SLOT_CHUNKS, item.flags & ADDS, item.flags & KEEPS, acc);
    return item.flags & KEEPS;
  }

  __device__ void store(const Item& item, int warpgroup, int part, uint32_t from) const {
    for_boxes(warpgroup, part, [&](int in_tile_row, int in_tile_column, uint32_t box) {
      const int row = item.row() * TILE_M + in_tile_row, column = item.column() * TILE_N + in_tile_column;
      if (row < args.rows_of_matrix && column < args.n)
        store_tile_hinted(&out_map, shared_pointer(from + box), EVICT_FIRST, column, row, item.matrix);
    });
  }

  using Background = Zeros;
  __device__ Zeros background(int warpgroup) const {
    return {{offset, args.groups, args.matrices, ends},
            out,
            size_t(args.rows_of_matrix) * args.n * sizeof(Output),
            int(blockIdx.x) * CONSUMERS + warpgroup,
            WORKERS * CONSUMERS};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ TensorMap out_map, const int* sizes, const int* offset,
             const __grid_constant__ Args args, float4* slots, Output* out) {
  __shared__ int ends[GROUPS];
  run_items(RaggedK{{}, a_map, b_map, out_map, sizes, offset, args, slots, out, ends});
}

// Adds the pieces of tiles that are cut. Block (x, y) has the x-th such tile, and a part of its sums.
extern "C" __global__ void __launch_bounds__(ADD_THREADS)
    KERNEL(_reduce)(const float4* slots, Output* out, const int* sizes, const int* offset,
                    const __grid_constant__ Args args) {
  __shared__ int ends[GROUPS];
  __shared__ int found[4];  // matrix, tile, first slot, pieces
  if (threadIdx.x < 32) {
    const Schedule all(sizes, offset, args.groups, args.matrices, args.m, args.rows * args.columns, ends);
    int matrix = -1, tile = 0, first = 0, pieces = 0, before = 0, cut_ones = all.cut_ones;
    all.for_matrices([&](int other, int own, const Cut& cut, int slot) {
      const int number = int(blockIdx.x) - before;
      if (number < cut.tiles) {
        matrix = other, tile = all.tiles - cut.tiles + number, pieces = cut.pieces,
        first = slot + number * pieces;
        return false;
      }
      before += cut.tiles;
      if (all.is_cut(own)) --cut_ones;
      return cut_ones > 0;
    });
    if (threadIdx.x == 0) found[0] = matrix, found[1] = tile, found[2] = first, found[3] = pieces;
  }
  __syncthreads();
  // All blocks wait, those without a tile too: what follows this kernel must find the first one's results.
  wait_on_dependent_grids();
  if (found[0] < 0) return;
  const Place at = place_of(found[1], args.rows, args.columns);
  add_pieces(slots, found[2], found[3], at.column * TILE_N, args.n, [&](int in_tile) {
    const int row = at.row * TILE_M + in_tile;
    Output* matrix = out + size_t(found[0]) * args.rows_of_matrix * args.n;
    return row < args.rows_of_matrix ? matrix + size_t(row) * args.n : nullptr;
  });
}
