// The skeleton of a kernel whose warps have roles: producers fill stages of shared memory, consumers compute
// from them. The skeleton owns the start of shared memory, the initialisation of barriers, the assignment of
// roles to warps and the split of the registers between roles. device/tile_kernel.cuh adds the main loops of
// a kernel that multiplies operands in shared memory. A kernel is the rest: the layout of a stage, the load
// into it, the computation, and the finish.
//
// Barriers are objects of the types `Pipeline` and `Barriers` (device/pipeline.cuh), whose types say how many
// arrivals they take.

#include "device/pipeline.cuh"

// The kernel's dynamic shared memory.
__device__ inline uint8_t* dynamic_shared() {
  extern __shared__ uint4 raw[];
  return reinterpret_cast<uint8_t*>(raw);
}

// The first multiple of 1024 in it, for operands under a swizzle.
__device__ inline uint32_t shared_stages() { return aligned_address(dynamic_shared()); }

// Initialises all of these barriers. One thread calls it; the others must not use the barriers before the
// thread block has synchronised.
template <class... Barriers>
__device__ inline void init_barriers(Barriers&... barriers) {
  const auto init = [](auto& some) {
    for (int i = 0; i < some.NUMBER; ++i) some.init(i);
  };
  (init(barriers), ...);
  fence_barrier_init();
}

// Initialises the first `count` stages alone, in a loop, which is less code.
template <class Barriers>
__device__ inline void init_stages(Barriers& barriers, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) barriers.init(i);
}

// Initialises COUNT barriers, of which the i-th takes arrivals(i). One thread of each warp calls it. It is a
// loop, because unrolled code takes longer: each of its instructions is fetched for the first time.
template <int COUNT, int WARPS_OF_BLOCK, class Arrivals>
__device__ __forceinline__ void init_by_warps(uint64_t* barriers, const Arrivals& arrivals) {
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < COUNT; i += WARPS_OF_BLOCK) Barrier::init(&barriers[i], arrivals(i));
  fence_barrier_init();
}

// Initialises all of these barriers and synchronises the thread block. All threads call it. One thread
// initialises the barriers, or a thread each where they are many.
template <class... Barriers>
__device__ inline void start_barriers(Barriers&... barriers) {
  if constexpr ((Barriers::NUMBER + ...) > 32) {
    const auto init = [](auto& some) {
      if (threadIdx.x < some.NUMBER) some.init(threadIdx.x);
    };
    (init(barriers), ...);
    fence_barrier_init();
  } else if (threadIdx.x == 0) {
    init_barriers(barriers...);
  }
  __syncthreads();
}

// The first FIRST warps of a thread block are producers, the others are consumers. A producer's thread keeps
// FEW registers, a consumer's thread gets MANY. FEW = 0 leaves the registers as they are. With ALL_LOAD all
// threads of a producer warp load, and the branch tells the compiler the range of their numbers. Without it
// one thread of a warp issues TMA, and the branch tells the compiler that the warp's number is uniform.
template <int FIRST, int FEW, int MANY, bool ALL_LOAD = false>
struct Roles {
  static constexpr int FIRST_CONSUMER = FIRST;

  __device__ static bool is_producer(int warp) { return ALL_LOAD ? threadIdx.x < 32 * FIRST : warp < FIRST; }

  __device__ static void be_producer() {
    if constexpr (FEW > 0) lower_registers<FEW>();
  }
  __device__ static void be_consumer() {
    if constexpr (FEW > 0) raise_registers<MANY>();
  }
};

// Runs produce(warp) in the producers and consume(warp) in the consumers, each with the registers of its
// role. `warp` counts the warps of the role.
template <class Roles, class Produce, class Consume>
__device__ __forceinline__ void split_roles(int warp, const Produce& produce, const Consume& consume) {
  if (Roles::is_producer(warp)) {
    Roles::be_producer();
    produce(warp);
  } else {
    Roles::be_consumer();
    consume(warp - Roles::FIRST_CONSUMER);
  }
}

// Initialises the barriers, then runs the roles.
template <class Roles, class Produce, class Consume, class... Barriers>
__device__ __forceinline__ void run_roles(const Produce& produce, const Consume& consume,
                                          Barriers&... barriers) {
  start_barriers(barriers...);
  split_roles<Roles>(warp_index(), produce, consume);
}
