// The tiles of a product with a stack of packed weights: each group of neighbouring rows of x is multiplied
// with a weight of its own. Only the device knows the groups' sizes.
//
// Work. A tile has rows of one group, and begins at the group's first row or a multiple of TILE_N rows behind
// it. x has rows of the next group in it, too: they are other columns of the product, which are not stored.
// Tiles come group by group. A weight's tiles are read only where its group has rows. A worker computes as
// many whole tiles as all workers have. What is left is, under CUT, cut into ranges as in tiles.cuh;
// otherwise some workers have a tile more. With SPLITS above 1 there is a cluster for each tile that any
// sizes may make; those that have none return.
//
// Rows of x that belong to no weight have results of zero, also with an epilogue: all thread blocks write
// them together. Each weight has a bias of its own.
//
// Included by tiles.cuh, where EXPERTS is not 0. Macros: EXPERTS (at least as many as there are groups),
// HAS_OFFSET (1: a group offset is given), CUT, and those of tiles.cuh.

#include "device/groups.cuh"

// In shared memory; `find_tiles` fills it.
struct Tiles {
  int ends[EXPERTS];    // the row behind each group
  int counts[EXPERTS];  // tiles of rows of the weights up to each one
  int first;            // the first weight's group
  int begin, end;       // rows of all weights' groups
  int count;            // tiles
  int whole_tiles, range_blocks;
};

// Sizes, and which tiles there are.
struct Schedule : Args {
  const Tiles& tiles;

  // Rows before a weight's group, which may be missing.
  __device__ int start(int matrix) const {
    const int group = min(max(tiles.first + matrix, 0), experts);
    return group == 0 ? 0 : tiles.ends[group - 1];
  }
};

// All lanes of a warp call it.
__device__ inline void find_tiles(const Args& g, const int* sizes, const int* offset, Tiles& to) {
  const int lane = threadIdx.x % 32;
  find_groups(sizes, g.experts, g.rows, to.ends);
  if (lane == 0) to.first = HAS_OFFSET ? min(max(__ldg(offset), -g.matrices), g.experts) : 0;
  __syncwarp();
  const Schedule s{g, to};
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < g.matrices; base += 32) {
    const int matrix = base + lane;
    int count = matrix < g.matrices ? (s.start(matrix + 1) - s.start(matrix) + TILE_N - 1) / TILE_N : 0;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int left = __shfl_up_sync(~0u, count, by);
      if (lane >= by) count += left;
    }
    count += before;
    before = __shfl_sync(~0u, count, 31);
    if (matrix < g.matrices) to.counts[matrix] = count;
  }
  if (lane == 0) {
    to.begin = s.start(0), to.end = s.start(g.matrices), to.count = before * g.tiles_m;
    to.whole_tiles = CUT ? to.count / g.workers : (to.count + g.workers - 1) / g.workers;
    const int rest = max(to.count - to.whole_tiles * g.workers, 0);
    to.range_blocks = (rest * g.k_blocks + g.workers - 1) / g.workers;
  }
}

// See `piece_of` in tiles.cuh.
__device__ inline Piece piece_of(const Schedule& g, int index, int worker = int(blockIdx.x)) {
  if constexpr (SPLIT) {
    return split_piece(worker, worker / SPLITS < g.tiles.count);
  } else {
    const int whole = g.tiles.whole_tiles, tile = worker + index * g.workers;
    if (index < whole) return {tile, 0, tile < g.tiles.count ? g.k_blocks : 0, -1};
    const int rest = max(g.tiles.count - whole * g.workers, 0);
    return range_piece(worker, index, g.workers, whole, rest, g.k_blocks, g.tiles.range_blocks);
  }
}

struct Place {
  int m;         // tile of features, a thread block's
  int row, end;  // the tile's first row, and the row behind the group's last one
  int matrix;    // number of the weight

  __device__ int m_tile(const Schedule& g, int warpgroup) const {
    return matrix * g.m_tiles + min(m * M_WARPGROUPS + warpgroup, g.m_tiles - 1);
  }
  __device__ int first_row() const { return row; }
  __device__ int rows_end(const Schedule&) const { return end; }
  // Copies begin at multiples of 16 bytes.
  __device__ size_t sums(const Schedule& g, int at) const { return size_t(at) * g.padded_rows + (row & ~3); }
  __device__ int first_sum() const { return row & 3; }
  // Where results of this weight's rows go, with its own bias.
  __device__ Destination destination(const Schedule& g, const Destination& all) const {
    return with_bias_at(all, size_t(matrix) * g.m);
  }
};

__device__ inline Place place_of(const Schedule& g, int tile, int) {
  // The first weight whose last tile is not before this one.
  const int along_rows = tile / g.tiles_m;
  int matrix = 0;
  for (int last = g.matrices - 1; matrix < last;) {
    const int middle = (matrix + last) / 2;
    if (g.tiles.counts[middle] > along_rows) {
      last = middle;
    } else {
      matrix = middle + 1;
    }
  }
  const int before = matrix == 0 ? 0 : g.tiles.counts[matrix - 1];
  const Tile at = in_bands(tile - before * g.tiles_m, g.tiles_m, g.tiles.counts[matrix] - before);
  return {at.m, g.start(matrix) + at.n * TILE_N, g.start(matrix + 1), matrix};
}

// ---- rows of no weight -----------------------------------------------------------------------------------

// Writes zeros to rows [begin, end) of the result; `thread` of `threads`. A gated result has half of the
// columns.
__device__ inline void clear_rows(const Args& g, Output* out, int begin, int end, int thread, int threads) {
  using Item = conditional_t<EIGHTS, uint4, Output>;
  constexpr int EACH = sizeof(Item) / sizeof(Output);
  const int columns = GATED ? g.m / 2 : g.m;
  Item* to = reinterpret_cast<Item*>(out + size_t(begin) * columns);
  const size_t count = size_t(max(end - begin, 0)) * columns / EACH;
#pragma unroll 1
  for (size_t i = thread; i < count; i += threads) to[i] = Item{};
}

// Whether this thread block has a part of a tile. Before that the consumers write its share of the zeros.
__device__ inline bool begin_work(const Schedule& g, Output* out) {
  if (threadIdx.x >= 128) {
    constexpr int CONSUMERS = THREADS - 128;
    const int thread = int(blockIdx.x) * CONSUMERS + threadIdx.x - 128, threads = int(gridDim.x) * CONSUMERS;
    clear_rows(g, out, 0, g.tiles.begin, thread, threads);
    clear_rows(g, out, g.tiles.end, g.rows, thread, threads);
  }
  const Piece piece = piece_of(g, 0);
  return piece.begin < piece.end;
}
