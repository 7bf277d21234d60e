// What the kernels that stream a packed weight through a ring in shared memory share: its barriers, the
// copies into it, and how consumers wait, read and release.

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/ptx.cuh"
#include "device/tensor_map.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// ---- producer --------------------------------------------------------------------------------------------

__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* full, uint64_t hint) {
  copy_bulk(to, from, bytes, cute::cast_smem_ptr_to_uint(full), hint);
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

// ---- consumer --------------------------------------------------------------------------------------------

// In a register from here on, not computed again in every turn.
__device__ inline uint32_t keep(uint32_t value) { return __shfl_sync(~0u, value, int(threadIdx.x % 32)); }

__device__ inline uint4 load_words(uint32_t address) { return load_shared<uint4>(address); }
