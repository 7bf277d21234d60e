// A pipeline in shared memory: producer warps fill its stages, consumer warps read them.
//
// Barriers, per stage: `full` (the producers' arrivals, and the bytes that copies bring) and `empty` (the
// consumers' arrivals, once nothing reads the stage any more). Both start in phase 0. A producer waits for
// the opposite parity, which is complete as long as the stage has never been filled.

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/ptx.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// A TMA descriptor, which the launcher encodes: by value, as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

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

// A generic pointer to an address in shared memory. Arithmetic is for the 32-bit address: it takes half of
// the instructions.
__device__ inline uint8_t* shared_pointer(uint32_t address) {
  return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

// The first multiple of 1024, for the 128-byte swizzle.
__device__ inline uint32_t aligned_address(const void* pointer) {
  return (shared_address(pointer) + 1023) & ~1023u;
}

// Barriers of COUNT stages, in shared memory.
template <int COUNT>
struct Pipeline {
  uint64_t full[COUNT], empty[COUNT];

  // By one thread, before any other comes to the barriers; a fence (fence_barrier_init) is to follow.
  __device__ void init(int producers, int consumers) {
    for (int i = 0; i < COUNT; ++i) {
      FullBarrier::init(&full[i], producers);
      EmptyBarrier::init(&empty[i], consumers);
    }
  }

  // For a producer: waits until the stage may be filled.
  __device__ void wait_empty(const Position& at) { EmptyBarrier::wait(&empty[at.stage], at.phase ^ 1); }

  // Announces so many bytes of copies, which the returned barrier counts.
  __device__ uint64_t* expect(const Position& at, int bytes) {
    FullBarrier::arrive_and_expect_tx(&full[at.stage], bytes);
    return &full[at.stage];
  }

  // For a consumer.
  __device__ void wait_full(const Position& at) { FullBarrier::wait(&full[at.stage], at.phase); }
  __device__ void release(int stage) { EmptyBarrier::arrive(&empty[stage]); }
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
