// The matrices of groups without rows, which are zeros (ragged_k.cu). With all rows in one group they are
// nearly all of the result. The warps that store results write them while the consumers multiply, each its
// share.
//
// These are plain stores: TMA takes its orders one after the other, and loads would wait behind them. After
// each step a warp pauses. Without pauses the stores fill the memory's queues, and the consumers wait for
// their loads until all zeros are written.

#include "ragged/schedule_k.cuh"

struct Zeros : Matrices {
  static constexpr int CHUNKS = 8 * 32;  // of a step: 16 bytes each, 8 of each lane
  static constexpr int PAUSE = 200;      // nanoseconds after a step; 500 and more are slower (H200)

  uint4* out;
  size_t chunks;         // of a matrix
  int steps;             // of a matrix
  int by;                // warps that take turns at the steps
  int matrix = 0, next;  // the next step, counted from the start of the matrix
  bool stored = false;   // by the last step

  __device__ Zeros(const Matrices& all, void* out, size_t bytes_of_matrix, int warp, int warps)
      : Matrices(all),
        out(static_cast<uint4*>(out)),
        chunks(bytes_of_matrix / 16),
        steps((chunks + CHUNKS - 1) / CHUNKS),
        by(warps),
        next(warp) {}

  // By all lanes of a warp: goes on to the next matrix, or stores one step; false once all are done.
  __device__ bool step() {
    if (matrix >= matrices) return false;
    const bool is_empty = size(matrix) == 0;
    stored = is_empty && next < steps;
    if (!stored) {
      if (is_empty) next -= steps;
      ++matrix;
      return true;
    }
    const size_t first = size_t(next) * CHUNKS + threadIdx.x % 32;
    uint4* to = out + matrix * chunks + first;
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 32) {
      if (first + i < chunks) __stcs(to + i, make_uint4(0, 0, 0, 0));
    }
    next += by;
    return true;
  }

  __device__ void pause() const {
    if (stored) __nanosleep(PAUSE);
  }
};
