// A pipeline in shared memory: producer warps fill its stages, consumer warps read them.
//
// Barriers, per stage: `full` (the producers' arrivals, and the bytes that copies bring) and `empty` (the
// consumers' arrivals, once nothing reads the stage any more). Both start in phase 0. A producer waits for
// the opposite parity, which is complete as long as the stage has never been filled.

#include "device/async.cuh"

// Where a role is in a pipeline: the stage, and the parity of its barriers' phase.
struct Position {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// COUNT barriers in shared memory, of which each takes ARRIVALS.
template <int COUNT, int ARRIVALS>
struct Barriers {
  static constexpr int NUMBER = COUNT;
  uint64_t at[COUNT > 0 ? COUNT : 1];

  __device__ void init(int i) { Barrier::init(&at[i], ARRIVALS); }
};

// Barriers of COUNT stages, in shared memory. A phase of `full` takes FILLERS arrivals of producers, one of
// `empty` READERS arrivals of consumers.
template <int COUNT, int FILLERS = 1, int READERS = 1>
struct Pipeline {
  static constexpr int NUMBER = COUNT;
  uint64_t full[COUNT], empty[COUNT];

  __device__ void init(int i) {
    Barrier::init(&full[i], FILLERS);
    Barrier::init(&empty[i], READERS);
  }

  // For a producer: waits until the stage may be filled.
  __device__ void wait_empty(const Position& at) { Barrier::wait(&empty[at.stage], at.phase ^ 1); }

  // Announces so many bytes of copies, which the returned barrier counts.
  __device__ uint64_t* expect(const Position& at, int bytes) {
    Barrier::arrive_and_expect_tx(&full[at.stage], bytes);
    return &full[at.stage];
  }

  // For a consumer. `release` is for a stage that WGMMA has read and been waited for, or after `loads_done`.
  __device__ void wait_full(const Position& at) { Barrier::wait(&full[at.stage], at.phase); }
  __device__ bool is_full(const Position& at) const {
    return Barrier::is_complete(&full[at.stage], at.phase);
  }
  __device__ void release(int stage) { Barrier::arrive(&empty[stage]); }

  // For all lanes of a warp, which have read the stage by loads of their own (ldmatrix, ld.shared). Those may
  // be under way still when a later instruction arrives at the barrier, and TMA would overwrite what they are
  // to read.
  __device__ void release_read(int stage) {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) release(stage);
  }
};

// A warp's number, uniform to the compiler, which otherwise wraps every TMA instruction in a loop over the
// warp's lanes.
__device__ inline int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

// Registers of a consumer's thread where one of the producers' warpgroup has so many: what is left of the
// register file's share of each of `blocks` thread blocks (setmaxnreg wants multiples of 8, 240 at most
// here).
constexpr int consumer_registers(int consumers, int producer_registers, int blocks = 1) {
  const int at_launch = 65536 / blocks / (128 * (consumers + 1)) / 8 * 8;
  const int registers = (at_launch * (consumers + 1) - producer_registers) / consumers / 8 * 8;
  return registers < 240 ? registers : 240;
}
