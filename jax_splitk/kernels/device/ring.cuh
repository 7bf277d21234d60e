// What the kernels that stream a packed weight through a ring in shared memory share: its barriers, the
// copies into it, and how consumers wait, read and release.

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/tensor_map.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// ---- producer --------------------------------------------------------------------------------------------

__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* full, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(full)), "l"(hint)
      : "memory");
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

__device__ inline void wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{.reg .pred p; wait_more: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra waited; "
      "bra wait_more; waited: }" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// A barrier of this block, or with REMOTE of any block of the cluster.
template <bool REMOTE = false>
__device__ inline void arrive_if(bool condition, uint32_t barrier) {
  if constexpr (REMOTE) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(
            barrier),
        "r"(uint32_t(condition))
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
        "r"(uint32_t(condition))
        : "memory");
  }
}

__device__ inline uint4 load_words(uint32_t address) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(address)
               : "memory");
  return w;
}
