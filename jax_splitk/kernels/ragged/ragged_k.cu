// Grouped products whose reduction is ragged, on the skeleton of device/persistent_tile.cuh:
//
//   D[g, m, n] = sum over the rows i of group g of A[i, m] * B[i, n]
//
// TMA loads zeros for what is beyond the group's rows (group_map.cuh). Who computes what: schedule_k.cuh.
//
// Workspace: two slots of fp32 sums of a tile for each worker. The first has its part of a tile that began in
// the range of a worker before it, the second its part of one that ends in a later one's. A second kernel adds
// the parts of such tiles in the order of the workers. A worker that adds a tile by several items, too, keeps
// the sums between them in the second slot.
//
// Macros: ELEMENT (a number of output.cuh), HAS_OFFSET (1: a group offset is given), and those of
// schedule_k.cuh and of device/persistent_tile.cuh.

#include "device/persistent_tile.cuh"
#include "ragged/group_map.cuh"
#include "structs.cuh"
#include "ragged/schedule_k.cuh"

constexpr int SLOT_CHUNKS = TILE_M * TILE_N / 4;  // float4
constexpr int ADD_THREADS = 256;                  // of the second kernel
// Stages that the tensor cores add: they truncate sums, which a float32 result would show.
constexpr int CHAIN_STAGES = OUT == FLOAT ? 512 : 1 << 30;

struct RaggedK : PersistentKernel {
  using Wgmma = WGMMA_16(TILE_N, SS)<GMMA::Major::MN, GMMA::Major::MN>;
  using A = MnMajor;
  using B = MnMajor;

  enum Flags { ADDS = 1, KEEPS = 2 };
  struct alignas(16) Item : ItemBase {
    int matrix, place;  // of the tile: its row among the tiles, and its column in the lower 16 bits
    int start, size;    // the group's rows
    int first;        // stage
    int slot;
    int flags;  // ADDS: the slot's sums are added; KEEPS: the sums go to the slot, else they are the result

    __device__ int row() const { return place >> 16; }
    __device__ int column() const { return place & 0xffff; }
  };

  const TensorMap &a_map, &b_map, &out_map;
  const int *sizes, *offset;
  const Args& args;
  float4* slots;
  int* ends;

  // ---- schedule ----

  template <class Emit>
  __device__ void schedule(const Emit& emit) const {
    const Schedule all(sizes, offset, args.groups, args.matrices, args.m, args.rows * args.columns, ends);
    const int worker = blockIdx.x;
    // A part of a tile, in items of as many stages as the tensor cores may add.
    const auto put = [&](int matrix, int tile, int first, int end, bool is_whole) {
      const Place at = place_of(tile, args.rows, args.columns);
      Item item{};
      item.matrix = matrix, item.place = at.row << 16 | at.column;
      item.start = all.start(matrix), item.size = all.size(matrix);
      item.slot = 2 * worker + (first == 0), item.first = first;
      do {
        item.stages = min(end - item.first, CHAIN_STAGES);
        const bool is_last = item.first + item.stages == end;
        item.flags = (item.first > first ? ADDS : 0) | (is_last && is_whole ? 0 : KEEPS);
        emit(item);
        item.first += item.stages;
      } while (item.first < end);
    };
    all.for_whole(worker, [&](int matrix, int tile, int stages) { put(matrix, tile, 0, stages, true); });
    all.for_cut(worker, [&](int matrix, int tile, int first, int end, int stages) {
      put(matrix, tile, first, end, first == 0 && end == stages);
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

  // Sums lie in a slot as the threads have them.
  __device__ bool exchange(const Item& item, Accumulator& acc) const {
    if (item.flags == 0) return false;
    float4* chunk = slots + size_t(item.slot) * SLOT_CHUNKS + threadIdx.x - 128;
#pragma unroll
    for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
      for (int j = 0; j < ACCUMULATORS; j += 4) {
        float(&v)[4] = reinterpret_cast<float(&)[4]>(acc[m][j]);
        if (item.flags & ADDS) {
          const float4 kept = *chunk;
          v[0] += kept.x, v[1] += kept.y, v[2] += kept.z, v[3] += kept.w;
        }
        if (item.flags & KEEPS) *chunk = make_float4(v[0], v[1], v[2], v[3]);
        chunk += CONSUMER_THREADS;
      }
    }
    return item.flags & KEEPS;
  }

  __device__ void store(const Item& item, int warpgroup, int part, uint32_t from) const {
    for_boxes(warpgroup, part, [&](int in_tile_row, int in_tile_column, uint32_t box) {
      const int row = item.row() * TILE_M + in_tile_row, column = item.column() * TILE_N + in_tile_column;
      if (row < args.rows_of_matrix && column < args.n)
        store_tile(&out_map, shared_pointer(from + box), column, row, item.matrix);
    });
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ TensorMap out_map, const int* sizes, const int* offset,
             const __grid_constant__ Args args, float4* slots) {
  __shared__ int ends[GROUPS];
  run_items(RaggedK{{}, a_map, b_map, out_map, sizes, offset, args, slots, ends});
}

// Adds the parts of tiles that several workers have. Block (x, y) has the tile that is the first to be cut where
// worker x + 1 begins, and a part of its sums.
extern "C" __global__ void __launch_bounds__(ADD_THREADS)
    KERNEL(_reduce)(const float4* slots, Output* out, const int* sizes, const int* offset,
                    const __grid_constant__ Args args) {
  __shared__ int ends[GROUPS];
  __shared__ int found[3];  // matrix, tile, and the end of the workers that have parts of it
  if (threadIdx.x < 32) {
    const Schedule all(sizes, offset, args.groups, args.matrices, args.m, args.rows * args.columns, ends);
    int matrix = -1, tile = 0, end = blockIdx.x + 1;
    // The part with which the worker before ends, if it is the first of its tile and not the last.
    all.for_cut(blockIdx.x, [&](int of_matrix, int of_tile, int first, int to, int stages) {
      if (first == 0 && to < stages) matrix = of_matrix, tile = of_tile;
    });
    for (bool more = matrix >= 0; more; ++end) {
      all.for_cut(end, [&](int of_matrix, int of_tile, int, int to, int stages) {
        if (of_matrix == matrix && of_tile == tile) more = to < stages;
      });
    }
    if (threadIdx.x == 0) found[0] = matrix, found[1] = tile, found[2] = end;
  }
  __syncthreads();
  if (found[0] < 0) return;
  wait_on_dependent_grids();
  const Place at = place_of(found[1], args.rows, args.columns);
#pragma unroll 1
  for (int i = blockIdx.y * ADD_THREADS + threadIdx.x; i < SLOT_CHUNKS; i += gridDim.y * ADD_THREADS) {
    const float4* chunk = slots + i;
    float4 sum = chunk[size_t(2 * blockIdx.x + 1) * SLOT_CHUNKS];
    for (int worker = blockIdx.x + 1; worker < found[2]; ++worker) {
      const float4 part = chunk[size_t(2 * worker) * SLOT_CHUNKS];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const int four = i / CONSUMER_THREADS, thread = i % CONSUMER_THREADS;
    const int block = four / (ACCUMULATORS / 4) * CONSUMERS + thread / 128;
    const int row = at.row * TILE_M + block * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
    const int column = at.column * TILE_N + four % (ACCUMULATORS / 4) * 8 + thread % 4 * 2;
    if (column >= args.n) continue;
    Output* to = out + (size_t(found[0]) * args.rows_of_matrix + row) * args.n + column;
    if (row < args.rows_of_matrix) store_values<Output, 2>(to, {sum.x, sum.y});
    if (row + 8 < args.rows_of_matrix) store_values<Output, 2>(to + size_t(8) * args.n, {sum.z, sum.w});
  }
}
