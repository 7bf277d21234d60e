// Which thread block (a worker) computes what of a grouped product whose reduction is ragged (ragged_k.cu).
// Every worker finds the same schedule for itself, so the order of sums depends on the sizes alone.
//
// A tile of a group of s stages takes s + STORE units of time. As long as a group has a tile for each worker,
// each computes one. The rest of its tiles, less than WORKERS, is shared in one of two ways:
//
//   cut    where a tile would take more than 1/FEW of a worker's time. The units of all these tiles are cut into
//          equal ranges, one for each worker. A tile that is cut is added from the workers' parts
//          (ragged_k_reduce).
//   whole  by the workers that have the least to do so far (list scheduling)
//
// Tiles of one group are computed at about the same time: they share what they read.
//
// Macros: WORKERS (thread blocks of the grid), GROUPS.

#include "ragged/groups.cuh"

constexpr int STORE = 2, FEW = 16;
constexpr int LEAST = 16;  // units of a worker's range, and of a tile that is cut
constexpr int WORKERS_OF_LANE = (WORKERS + 31) / 32;

__device__ inline int sum_of_lanes(int x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}

__device__ inline int max_of_lanes(int x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(~0u, x, by));
  return x;
}

// The groups of a problem, and how their tiles are shared. All lanes of a warp construct it.
struct Schedule {
  const int* ends;
  int groups, matrices, tiles;  // of group_sizes, of the result, and of each matrix
  int first_matrix;
  int rounds, rest;  // tiles of a matrix for each worker, and what is left
  int most_units;    // of a tile that is not cut
  int cut_units;     // of all tiles that are cut

  __device__ Schedule(const int* sizes, const int* offset, int groups, int matrices, int rows, int tiles,
                      int* ends)
      : ends(ends), groups(groups), matrices(matrices), tiles(tiles) {
    rounds = tiles / WORKERS, rest = tiles - rounds * WORKERS;
    find_groups(sizes, groups, rows, ends);
    first_matrix = HAS_OFFSET ? __ldg(offset) : 0;
    const int lane = threadIdx.x % 32;
    int units = 0;
    for (int i = lane; i < matrices; i += 32) units += stages(i) + STORE;
    most_units = max(sum_of_lanes(units) * tiles / (WORKERS * FEW), LEAST);
    units = 0;
    for (int i = lane; i < matrices; i += 32) units += is_cut(stages(i)) ? stages(i) + STORE : 0;
    cut_units = sum_of_lanes(units) * rest;
  }

  // Rows of a matrix's group: empty where there is no such group.
  __device__ int start(int matrix) const {
    const int group = min(first_matrix + matrix, groups);
    return group <= 0 ? 0 : ends[group - 1];
  }
  __device__ int size(int matrix) const {
    const int group = first_matrix + matrix;
    return group < 0 || group >= groups ? 0 : ends[group] - start(matrix);
  }
  __device__ int stages(int matrix) const { return (size(matrix) + 63) / 64; }
  // Whether the rest of a matrix's tiles, of so many stages, is cut.
  __device__ bool is_cut(int stages) const { return stages + STORE > most_units; }

  // Where a worker's range of the units that are cut begins. Few units are for a few workers.
  __device__ int begin_of(int worker) const {
    const int sharing = min(max(cut_units / LEAST, 1), WORKERS);
    return int(int64_t(cut_units) * min(worker, sharing) / sharing);
  }

  // visit(matrix, tile, first stage, end of its stages, stages of the tile) for the worker's range.
  template <class Visit>
  __device__ void for_cut(int worker, const Visit& visit) const {
    const int begin = begin_of(worker), end = begin_of(worker + 1);
    int first = 0;  // unit of a matrix
    if (begin == end) return;
    for_matrices(
        [&](int own) {  // all of 32 matrices come before the range
          const int units = rest * sum_of_lanes(own >= 0 && is_cut(own) ? own + STORE : 0);
          if (first + units > begin) return false;
          first += units;
          return true;
        },
        [&](int matrix, int count) {
          if (!is_cut(count) || first >= end) return;
          const int units = count + STORE;
#pragma unroll 1
          for (int tile = max(begin - first, 0) / units; tile < rest && first + tile * units < end; ++tile) {
            const int at = first + tile * units;
            const int from = min(max(begin - at, 0), count), to = min(end - at, count);
            if (from < to) visit(matrix, rounds * WORKERS + tile, from, to, count);
          }
          first += rest * units;
        });
  }

  // visit(matrix, tile, stages of the tile) for the tiles that this worker computes as a whole.
  template <class Visit>
  __device__ void for_whole(int worker, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
    int load[WORKERS_OF_LANE];  // units so far of workers lane, lane + 32, ...
    int least = cut_units, largest = 0;  // bounds of the loads
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) {
      const int other = 32 * i + lane;
      load[i] = other < WORKERS ? begin_of(other + 1) - begin_of(other) : 1 << 30;
      if (other < WORKERS) least = min(least, load[i]), largest = max(largest, load[i]);
    }
    least = -max_of_lanes(-least), largest = max_of_lanes(largest);
    for_matrices([](int) { return false; },
                 [&](int matrix, int count) {
#pragma unroll 1
                   for (int round = 0; round < rounds; ++round) visit(matrix, round * WORKERS + worker, count);
                   if (rest == 0 || is_cut(count)) return;
                   const int tile = share_rest(worker, rest, count + STORE, load, least, largest);
                   if (tile >= 0) visit(matrix, rounds * WORKERS + tile, count);
                 });
  }

 private:
  // skip(stages of the lane's matrix, -1 where there is none) for each 32 matrices; where it is false in turn
  // visit(matrix, stages of its tiles) for each of these.
  template <class Skip, class Visit>
  __device__ void for_matrices(const Skip& skip, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = 0; base < matrices; base += 32) {
      const int own = base + lane < matrices ? stages(base + lane) : -1;
      if (skip(own)) continue;
#pragma unroll 1
      for (int i = 0; i < min(32, matrices - base); ++i) visit(base + i, __shfl_sync(~0u, own, i));
    }
  }

  // Gives one tile each to the `rest` workers that have the least to do, in the order of their numbers: to all
  // whose load is below a limit, and the first of those that have it. Returns which tile is this worker's, or -1.
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
    int before = 0, equals = rest - count_of(load, limit - 1), tile = -1;
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) {
      const uint32_t same = __ballot_sync(~0u, load[i] == limit);
      const bool is_chosen = load[i] < limit || (load[i] == limit && __popc(same & lower) < equals);
      const uint32_t chosen = __ballot_sync(~0u, is_chosen);
      if (worker / 32 == i && (chosen >> worker % 32 & 1)) {
        tile = before + __popc(chosen & ((1u << worker % 32) - 1));
      }
      before += __popc(chosen), equals -= min(equals, __popc(same));
      if (is_chosen) load[i] += units;
    }
    least = min(limit, least + units), largest = max(largest, limit + units);
    return tile;
  }

  // Workers whose load is at most `most`.
  __device__ static int count_of(const int (&load)[WORKERS_OF_LANE], int most) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < WORKERS_OF_LANE; ++i) count += __popc(__ballot_sync(~0u, load[i] <= most));
    return count;
  }
};
