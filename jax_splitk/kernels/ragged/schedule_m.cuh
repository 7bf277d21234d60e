// Which thread block (a worker) computes what of a grouped product whose rows are ragged (ragged_m.cu).
//
// The workers take turns at the tiles of all groups, one group after the other. CUT: the last round has fewer
// tiles than there are workers, so these are cut along k into so many pieces that they fill the workers. Each
// piece leaves its sums in a slot of the workspace, and a second kernel adds the pieces of a tile in their
// order.
//
// Macros: CUT, SLOTS (for pieces), PIECE_STAGES (of a piece, at least), GROUPS, HAS_OFFSET.

#include "ragged/groups.cuh"
#include "structs.cuh"

// The tiles of the last round, by their numbers among those of all products.
struct LastRound {
  int first = 1 << 30, tiles = 0, pieces = 1;
};

// A tile, or a piece of it.
struct Part {
  int matrix;       // of B
  int start, size;  // the group's rows
  Place at;
  int first, end;  // stages: none where the rows are no group's
  int slot;        // -1 for a whole tile
};

// The schedule of a problem. All lanes of a warp construct it and call its functions.
template <int TILE_ROWS>
struct Turns {
  const int* ends;
  const Args& args;
  int first_matrix;
  LastRound last;

  __device__ Turns(const int* sizes, const int* offset, const Args& args, int* ends)
      : ends(ends), args(args) {
    find_groups(sizes, args.groups, args.m, ends);
    first_matrix = HAS_OFFSET ? __ldg(offset) : 0;
    if constexpr (CUT) {
      int rows = 0;
      for (int group = threadIdx.x % 32; group < args.groups; group += 32) {
        if (is_product(group)) rows += tiles_of(ends[group] - start_of(group));
      }
      const int total = sum_of_lanes(rows) * args.columns;
      last.tiles = total % args.workers, last.first = total - last.tiles;
      if (last.tiles > 0) {
        const int most = min(SLOTS / last.tiles, args.k_blocks / PIECE_STAGES);
        last.pieces = pieces_that_fill(args.workers, last.tiles, most);
      }
    }
  }

  // visit(part) for what a worker computes.
  template <class Visit>
  __device__ void for_work(int worker, const Visit& visit) const {
    int product = worker, other = worker;  // the next tile's number, from this group on
    int before = 0;                        // tiles of products
#pragma unroll 1
    for (int group = 0; group <= args.groups; ++group) {
      const bool multiplies = is_product(group);
      Part part = of_group(group, multiplies);
      const int rows = tiles_of(part.size), count = rows * args.columns;
      const int whole = multiplies ? min(count, last.first - before) : count;
      int tile = multiplies ? product : other;
#pragma unroll 1
      for (; tile < whole; tile += args.workers) {
        part.at = place_of(tile, rows, args.columns);
        visit(part);
      }
      if (!multiplies) {
        other = tile - count;
        continue;
      }
      product = tile - count;
      if constexpr (CUT) {
#pragma unroll 1
        for (int i = worker; i < last.tiles * last.pieces; i += args.workers) {
          const int piece = i / last.tiles, number = i - piece * last.tiles;
          const int cut = last.first + number - before;
          if (0 <= cut && cut < count) {
            part.at = place_of(cut, rows, args.columns);
            part.first = start_of_piece(piece, args.k_blocks, last.pieces);
            part.end = start_of_piece(piece + 1, args.k_blocks, last.pieces);
            part.slot = last.pieces > 1 ? number * last.pieces + piece : -1;
            visit(part);
          }
        }
      }
      before += count;
    }
  }

  // The `number`-th tile of the last round; `number` is below last.tiles.
  __device__ Part tile_of_last_round(int number) const {
    int tile = last.first + number;
    for (int group = 0; group < args.groups; ++group) {
      if (!is_product(group)) continue;
      Part part = of_group(group, true);
      const int rows = tiles_of(part.size), count = rows * args.columns;
      if (tile < count) {
        part.at = place_of(tile, rows, args.columns);
        return part;
      }
      tile -= count;
    }
    return {};
  }

 private:
  __device__ static int tiles_of(int size) { return (size + TILE_ROWS - 1) / TILE_ROWS; }
  __device__ int start_of(int group) const { return group == 0 ? 0 : ends[group - 1]; }

  // Else its rows are zeros. After the last group come all rows that are left.
  __device__ bool is_product(int group) const {
    const int matrix = group - first_matrix;
    return group < args.groups && matrix >= 0 && matrix < args.matrices;
  }

  // A group's whole tiles.
  __device__ Part of_group(int group, bool multiplies) const {
    const int start = start_of(group), end = group < args.groups ? ends[group] : args.m;
    return {group - first_matrix, start, end - start, {}, 0, multiplies ? args.k_blocks : 0, -1};
  }
};
