// The pipeline that streams a packed weight through shared memory: barriers, stages, copies.

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/ptx.cuh"
#include "device/tensor_map.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Values of cache hints.
[[maybe_unused]] constexpr uint64_t EVICT_FIRST = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
[[maybe_unused]] constexpr uint64_t EVICT_LAST = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
[[maybe_unused]] constexpr uint64_t EVICT_NORMAL = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

__device__ inline uint32_t shared_address(const void* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

// In a register from here on, not computed again in every turn of a loop.
__device__ inline uint32_t keep(uint32_t value) { return __shfl_sync(~0u, value, int(threadIdx.x % 32)); }

// A stage, and the parity of its barriers' phase: the same for whoever goes through the pipeline in steps of
// STEP from stage `first` on.
template <int STEP = 1>
struct Stage {
  int index = 0;
  uint32_t phase = 0;

  __device__ inline void advance() {
    index += STEP;
    if (STEP == 1 ? index == STAGES : index >= STAGES) {
      index = STEP == 1 ? 0 : index - STAGES;
      phase ^= 1;
    }
  }
};

__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* full, uint64_t hint) {
  copy_bulk(to, from, bytes, shared_address(full), hint);
}

// `bytes` of a block; of half a block that half, twice.
__device__ inline void copy_block(uint32_t to, const uint8_t* from, int bytes, bool half, uint64_t* full,
                                  uint64_t hint) {
  if (half) {
    copy_bulk(to, from, bytes / 2, full, hint);
    copy_bulk(to + bytes / 2, from, bytes / 2, full, hint);
  } else {
    copy_bulk(to, from, bytes, full, hint);
  }
}
