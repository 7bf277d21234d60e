// Which thread block (a worker) computes what of a grouped product whose reduction is ragged (ragged_k.cu).
// Each worker finds the whole schedule for itself, so nothing but the sizes decides who computes what.
//
// A tile of a group of s stages takes about s + STORE_UNITS units of time. Groups come one after the other,
// the longest first, and each tile goes to the worker that has the least to do so far (list scheduling).
// Workers compute the tiles of a group at about the same time, and share what they read.
//
// Where a tile would take more than 1/WORKER_TILES of a worker's time, its group is cut: first as many tiles
// as fill the machine some times are computed as others are. The rest are cut into pieces along the
// reduction, so many that the pieces fill the machine. Pieces of the same rows are computed at the same time.
// Each leaves its sums in a slot of the workspace, and a second kernel adds the pieces of a tile in their
// order.
//
// The matrix of a group without rows is zeros. It has no tiles: zeros.cuh has all workers store it.
//
// Macros: WORKERS (thread blocks of the grid), STORE_UNITS, WORKER_TILES, PIECE_STAGES (stages of a piece, at
// least), SLOTS (for pieces; 0 where no sizes make any), GROUPS.

#include "ragged/groups.cuh"

static_assert(SLOTS < 1024);
constexpr int MOST_SORTED = 1024;  // groups; of more, the order is their own
constexpr int WORKERS_OF_LANE = (WORKERS + 31) / 32;

// How many tiles at the end of a matrix are cut, and into how many pieces: 1 where none is.
struct Cut {
  int tiles, pieces;
};

// Which rows the group of each matrix of the result has.
struct Matrices {
  const int* ends;       // of the groups' rows
  int groups, matrices;  // of group_sizes, and of the result
  int first_matrix;      // its group

  __device__ Matrices(const int* offset, int groups, int matrices, const int* ends)
      : ends(ends), groups(groups), matrices(matrices), first_matrix(HAS_OFFSET ? __ldg(offset) : 0) {}

  // Rows of a matrix's group: none where there is no such group.
  __device__ int start(int matrix) const {
    const int group = min(first_matrix + matrix, groups);
    return group <= 0 ? 0 : ends[group - 1];
  }
  __device__ int size(int matrix) const {
    const int group = first_matrix + matrix;
    return group < 0 || group >= groups ? 0 : ends[group] - start(matrix);
  }
  __device__ int stages(int matrix) const { return (size(matrix) + 63) / 64; }
};

// The schedule of a problem. All lanes of a warp construct it and call its functions.
struct Schedule : Matrices {
  int tiles;     // of each matrix
  int share;     // units of a worker
  int cut_ones;  // matrices that are cut

  __device__ Schedule(const int* sizes, const int* offset, int groups, int matrices, int rows, int tiles,
                      int* ends)
      : Matrices(offset, groups, matrices, ends), tiles(tiles) {
    find_groups(sizes, groups, rows, ends);
    share = sum_of_matrices([&](int stages) { return stages + STORE_UNITS; }) * tiles / WORKERS;
    cut_ones = sum_of_matrices([&](int stages) { return int(is_cut(stages)); });
  }

  // Whether a tile of so many stages would take more than 1/WORKER_TILES of a worker's time.
  __device__ bool is_cut(int stages) const {
    return stages >= 2 * PIECE_STAGES && (stages + STORE_UNITS) * WORKER_TILES > share;
  }

  // visit(matrix, stages of its tiles, how it is cut, first of its slots) for all matrices that have tiles in
  // their order, until it is false.
  template <class Visit>
  __device__ void for_matrices(const Visit& visit) const {
    const bool is_sorted = matrices <= MOST_SORTED;
    int slot = 0, last = 1 << 30;
#pragma unroll 1
    for (int i = 0; i < matrices; ++i) {
      const int matrix = is_sorted ? next_by_length(last) : i, own = stages(matrix);
      if (own == 0) continue;
      const Cut cut = cut_of(own);
      if (!visit(matrix, own, cut, slot)) return;
      if (cut.pieces > 1) slot += cut.tiles * cut.pieces;
    }
  }

  // visit(matrix, tile, first stage, end of its stages, slot) for what a worker computes; the slot is -1 for
  // whole tiles.
  template <class Visit>
  __device__ void for_work(int worker, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
    int load[WORKERS_OF_LANE];  // units so far of workers lane, lane + 32, ...
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) load[i] = 32 * i + lane < WORKERS ? 0 : 1 << 30;
    int least = 0, largest = 0;  // bounds of the loads
    for_matrices([&](int matrix, int stages, const Cut& cut, int slot) {
      const int whole = tiles - cut.tiles;
      take_turns(worker, whole, stages + STORE_UNITS, load, least, largest,
                 [&](int tile) { visit(matrix, tile, 0, stages, -1); });
      take_turns(worker, cut.tiles * cut.pieces, stages / cut.pieces + STORE_UNITS, load, least, largest,
                 [&](int i) {
                   const int piece = i / cut.tiles, tile = i - piece * cut.tiles;
                   visit(matrix, whole + tile, start_of_piece(piece, stages, cut.pieces),
                         start_of_piece(piece + 1, stages, cut.pieces), slot + tile * cut.pieces + piece);
                 });
      return true;
    });
  }

 private:
  // The pieces fill the machine as well as may be, and there are no more of them than this matrix's slots.
  __device__ Cut cut_of(int stages) const {
    const int rest = tiles % WORKERS;
    if (rest == 0 || !is_cut(stages)) return {0, 1};
    const int most = min(SLOTS / cut_ones / rest, stages / PIECE_STAGES);
    const int pieces = pieces_that_fill(WORKERS, rest, most);
    return {pieces > 1 ? rest : 0, pieces};
  }

  // The matrix whose tiles take the longest of those after `last`, which it sets: a number of the tiles'
  // stages and the matrix.
  __device__ int next_by_length(int& last) const {
    int best = -1;
    for (int i = threadIdx.x % 32; i < matrices; i += 32) {
      const int number = min(stages(i), (1 << 20) - 1) * MOST_SORTED + MOST_SORTED - 1 - i;
      if (number < last) best = max(best, number);
    }
    last = max_of_lanes(best);
    return MOST_SORTED - 1 - last % MOST_SORTED;
  }

  // The sum of number(stages) of the matrices that have tiles.
  template <class Number>
  __device__ int sum_of_matrices(const Number& number) const {
    int sum = 0;
    for (int i = threadIdx.x % 32; i < matrices; i += 32) {
      if (const int own = stages(i); own > 0) sum += number(own);
    }
    return sum_of_lanes(sum);
  }

  // Gives `count` tiles of so many units to the workers; visit(number) for those of this worker. As long as
  // there is one for each worker, each gets one. The rest go to those that have the least to do.
  template <class Visit>
  __device__ static void take_turns(int worker, int count, int units, int (&load)[WORKERS_OF_LANE],
                                    int& least, int& largest, const Visit& visit) {
    const int rounds = count / WORKERS, rest = count - rounds * WORKERS;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) visit(i * WORKERS + worker);
    if (rest == 0) return;
    const int number = share_rest(worker, rest, units, load, least, largest);
    if (number >= 0) visit(rounds * WORKERS + number);
  }

  // Gives one tile each to the `rest` workers that have the least to do, in the order of their numbers: to
  // all whose load is below a limit, and the first of those that have it. Returns which is this worker's, or
  // -1.
  __device__ static int share_rest(int worker, int rest, int units, int (&load)[WORKERS_OF_LANE], int& least,
                                   int& largest) {
    const int lane = threadIdx.x % 32;
    const uint32_t lower = (1u << lane) - 1;  // lanes
    int limit = least, high = largest;
#pragma unroll 1
    while (limit < high) {
      const int middle = (limit + high) / 2;
      if (count_of(load, middle) >= rest) {
        high = middle;
      } else {
        limit = middle + 1;
      }
    }
    int before = 0, equals = rest - count_of(load, limit - 1), number = -1;
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) {
      const uint32_t same = __ballot_sync(~0u, load[i] == limit);
      const bool is_chosen = load[i] < limit || (load[i] == limit && __popc(same & lower) < equals);
      const uint32_t chosen = __ballot_sync(~0u, is_chosen);
      if (worker / 32 == i && (chosen >> worker % 32 & 1)) {
        number = before + __popc(chosen & ((1u << worker % 32) - 1));
      }
      before += __popc(chosen), equals -= min(equals, __popc(same));
      if (is_chosen) load[i] += units;
    }
    least = min(limit, least + units), largest = max(largest, limit + units);
    return number;
  }

  // Workers whose load is at most `most`.
  __device__ static int count_of(const int (&load)[WORKERS_OF_LANE], int most) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) count += __popc(__ballot_sync(~0u, load[i] <= most));
    return count;
  }
};
