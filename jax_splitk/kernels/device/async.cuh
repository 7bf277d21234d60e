// What runs beside the threads, and how they wait for it and for each other, in PTX: barriers, clusters,
// copies to shared memory by cp.async and TMA. Constraints are as in ptx.cuh.
//
// CUTLASS and CuTe have functions for most of this. Their headers take NVRTC more than a second, six times as
// long as a kernel; only WGMMA's (wgmma.cuh), which are thousands of instructions, are worth it.

#include "device/ptx.cuh"

// A generic pointer to an address in shared memory, and the reverse. Arithmetic is for the 32-bit address: it
// takes half of the instructions.
__device__ inline uint8_t* shared_pointer(uint32_t address) {
  return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The first multiple of 1024, for the 128-byte swizzle.
__device__ inline uint32_t aligned_address(const void* pointer) {
  return (shared_address(pointer) + 1023) & ~1023u;
}

// ---- barriers in shared memory ---------------------------------------------------------------------------

// An mbarrier: a phase is complete once all arrivals have come, and all bytes that were announced.
struct Barrier {
  // By one thread, before any other comes to it; `fence_barrier_init` is to follow.
  __device__ static void init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%1], %0;" ::"r"(arrivals), "r"(shared_address(barrier)));
  }

  // Until the phase of that parity is complete. The thread may sleep, 10 ms at most.
  __device__ static void wait(const uint64_t* barrier, uint32_t phase) {
    constexpr uint32_t nanoseconds = 10000000;
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2; @p bra over; "
        "bra again; over: }" ::"r"(shared_address(barrier)),
        "r"(phase), "r"(nanoseconds));
  }

  // Whether the phase of that parity is complete, without waiting.
  __device__ static bool is_complete(const uint64_t* barrier, uint32_t phase) {
    uint32_t complete;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(phase));
    return complete;
  }

  __device__ static void arrive(const uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)));
  }

  // At the barrier that a block of the cluster has at the same address.
  __device__ static void arrive(const uint64_t* barrier, uint32_t block) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
        "r"(block));
  }

  // Arrives, and announces so many bytes of copies.
  __device__ static void arrive_and_expect_tx(const uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%1], %0;" ::"r"(bytes),
                 "r"(shared_address(barrier)));
  }

  // Arrives once the thread's copies (`copy_async`) have come; the barrier counts that among its arrivals.
  __device__ static void arrive_after_copies(const uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)));
  }
};

// Barriers that this thread initialised are so for TMA and the other blocks of the cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }

// Until the barrier's phase of that parity is complete. Unlike CUTLASS's it names no time after which to try
// again.
__device__ inline void wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{.reg .pred p; wait_more: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra waited; "
      "bra wait_more; waited: }" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// At a barrier of this block, or with REMOTE of any block of the cluster.
template <bool REMOTE = false>
__device__ inline void arrive_if(bool condition, uint32_t barrier) {
#define ARRIVE(space)                                                                   \
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::" space \
               ".b64 _, [%0];}" ::"r"(barrier),                                         \
               "r"(uint32_t(condition))                                                 \
               : "memory")
  if constexpr (REMOTE) {
    ARRIVE("cluster");
  } else {
    ARRIVE("cta");
  }
#undef ARRIVE
}

// ---- threads of a block, and of a cluster ----------------------------------------------------------------

// `threads` threads meet at the named barrier. The compiler may move plain accesses to shared memory.
__device__ inline void named_sync(uint32_t threads, uint32_t barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads));
}

// Counts as one of them, and goes on.
__device__ inline void named_arrive(uint32_t threads, uint32_t barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads));
}

// The first THREADS threads that come to the named barrier wait for each other. Orders plain accesses to
// shared memory too, which `named_sync` leaves to the compiler.
template <int THREADS, int BARRIER>
__device__ inline void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// 1 in one thread of a warp, which the compiler knows to be one.
__device__ inline uint32_t elect_one() {
  uint32_t elected = 0, lane = 0;
  asm volatile(
      "{ .reg .b32 which; .reg .pred p; elect.sync which|p, %2; @p mov.s32 %1, 1; mov.s32 %0, which; }"
      : "+r"(lane), "+r"(elected)
      : "r"(0xffffffff));
  return elected;
}

__device__ inline uint32_t block_rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where another block of the cluster has what is at this address here.
__device__ inline uint32_t set_block_rank(uint32_t address, uint32_t block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// All threads of the cluster arrive, then wait for each other; relaxed: without the order of their accesses.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;"); }
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;"); }

// Registers of each thread of a warpgroup.
template <uint32_t REGISTERS>
__device__ inline void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <uint32_t REGISTERS>
__device__ inline void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- copies by threads -----------------------------------------------------------------------------------

// `bytes` (0 to BYTES) of BYTES (4, 8 or 16), and zeros.
template <int BYTES>
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
}

// The thread's copies since the last group become one, or none an empty one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of the thread's groups but the last PENDING have come, which it sees then.
template <int PENDING>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- copies by TMA ---------------------------------------------------------------------------------------

// A TMA descriptor, which the launcher encodes: by value, as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// How long the L2 is to keep what is loaded.
enum Eviction : uint64_t {
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12f0000000000000,
  EVICT_LAST = 0x14f0000000000000,
};

// What this thread has stored in shared memory is visible to TMA and WGMMA, and what it has loaded from there
// has come.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;"); }

// Says that all loads from shared memory have come, because products that wait for them are in a loop that
// has ended. An arrival that lets TMA overwrite what was read follows: it does not wait for loads, and
// elsewhere takes a fence before it. No instruction; the emulator asks for one of the two.
__device__ inline void loads_done() {}

// Whole 16 bytes, which `barrier` counts.
__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(hint)
      : "memory");
}

// The same without a hint.
__device__ inline void copy_bulk(void* to, const void* from, int bytes, uint64_t* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(full))
      : "memory");
}

// Loads a tile, whose bytes `full` counts: coordinates of its first element, the contiguous dimension's
// first.
#define LOAD_TILE(rank, at)                                             \
  "cp.async.bulk.tensor." rank                                          \
  ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint" \
  " [%0], [%1, {" at "}], [%2], %3;" ::"r"(shared_address(to)),         \
      "l"(map), "r"(shared_address(full)), "l"(hint)
__device__ inline void load_tile(const void* map, uint64_t* full, uint64_t hint, void* to, int x, int y) {
  asm volatile(LOAD_TILE("2d", "%4, %5"), "r"(x), "r"(y) : "memory");
}
__device__ inline void load_tile(const void* map, uint64_t* full, uint64_t hint, void* to, int x, int y,
                                 int z) {
  asm volatile(LOAD_TILE("3d", "%4, %5, %6"), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void load_tile(const void* map, uint64_t* full, uint64_t hint, void* to, int x, int y,
                                 int z, int u) {
  asm volatile(LOAD_TILE("4d", "%4, %5, %6, %7"), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
__device__ inline void load_tile(const void* map, uint64_t* full, uint64_t hint, void* to, int x, int y,
                                 int z, int u, int v) {
  asm volatile(LOAD_TILE("5d", "%4, %5, %6, %7, %8"), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}
#undef LOAD_TILE

// The same, to each block of the cluster that `blocks` has a bit for, and its barrier.
__device__ inline void load_tile_multicast(const void* map, uint64_t* full, uint16_t blocks, uint64_t hint,
                                           void* to, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "h"(blocks), "r"(x), "r"(y), "l"(hint)
      : "memory");
}

// Stores a tile that lies at `from` as a load would have left it, without what is outside of the tensor.
__device__ inline void store_tile(const void* map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ inline void store_tile(const void* map, const void* from, int x, int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

// The same; `hint` says how long the L2 is to keep what is stored.
__device__ inline void store_tile_hinted(const void* map, const void* from, uint64_t hint, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::
          "l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "l"(hint)
      : "memory");
}

__device__ inline void store_tile_hinted(const void* map, const void* from, uint64_t hint, int x, int y,
                                         int z, int u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
      "%6;" ::"l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(u), "l"(hint)
      : "memory");
}

// The thread's stores since the last call become a group. Until all of its groups but the last PENDING have
// been read from shared memory.
template <int PENDING = 0>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Loads pixels under a filter's tap: channel, coordinates of the first window's origin, image, then the tap.
#define LOAD_IM2COL(rank, at, tap)                                     \
  "cp.async.bulk.tensor." rank                                         \
  ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes"        \
  " [%0], [%1, {" at "}], [%2], {" tap "};" ::"r"(shared_address(to)), \
      "l"(map), "r"(shared_address(full))
__device__ inline void load_im2col(const void* map, uint64_t* full, void* to, int c, int w, int n,
                                   uint16_t tap_w) {
  asm volatile(LOAD_IM2COL("3d", "%3, %4, %5", "%6"), "r"(c), "r"(w), "r"(n), "h"(tap_w) : "memory");
}
__device__ inline void load_im2col(const void* map, uint64_t* full, void* to, int c, int w, int h, int n,
                                   uint16_t tap_w, uint16_t tap_h) {
  asm volatile(LOAD_IM2COL("4d", "%3, %4, %5, %6", "%7, %8"), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w),
               "h"(tap_h)
               : "memory");
}
__device__ inline void load_im2col(const void* map, uint64_t* full, void* to, int c, int w, int h, int d,
                                   int n, uint16_t tap_w, uint16_t tap_h, uint16_t tap_d) {
  asm volatile(LOAD_IM2COL("5d", "%3, %4, %5, %6, %7", "%8, %9, %10"), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n),
               "h"(tap_w), "h"(tap_h), "h"(tap_d)
               : "memory");
}
#undef LOAD_IM2COL
