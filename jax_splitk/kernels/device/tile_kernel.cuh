// The skeleton of a kernel whose thread block computes one output tile (wgmma_tile.cuh), or one split of it.
//
// Roles: warpgroup 0 is the producer, in which one thread of each of LOADERS warps issues TMA. The other
// warpgroups are consumers. Barriers of a stage: `full` takes an arrival of each loader, and the bytes of the
// copies; `empty` takes an arrival of each consumer warpgroup, once the WGMMAs that read the stage have
// retired.
//
// A kernel is a struct that derives from `TileKernel`.

#include "device/skeleton.cuh"
#include "device/wgmma_tile.cuh"

using TileRoles = Roles<4, SHARE_REGISTERS ? PRODUCER_REGS : 0, CONSUMER_REGS>;
template <int LOADERS = 1>
using TilePipeline = Pipeline<STAGES, LOADERS, CONSUMERS>;

// A stage that a loader is to fill.
struct Stage {
  int number;        // among the stages of the tile, or of its split
  int loader;        // the warp
  uint64_t* full;    // the barrier that counts the bytes
  uint32_t address;  // in shared memory
};

// The defaults of a kernel. A kernel must have, too:
//   layout   types Wgmma (the instruction), A and B (how the operands lie in a stage: `Operand`)
//   load     count(): the number of stages of the tile, or of its split
//            load(stage), in one thread of each loader: issues the loader's copies into the stage
//   finish   finish(shared, stages, warpgroup, acc), in all consumers: stores the sums; the stages are free
struct TileKernel {
  static constexpr int LOADERS = 1;            // warps that load, 4 at most
  static constexpr int A_BLOCK = BLOCK_BYTES;  // bytes of 64 rows of A
  static constexpr bool DEPENDENT = false;     // whether the next kernel may be launched before `finish`
  // Whether all lanes of a loader run the loop of the first loads. Then the compiler knows that the numbers
  // that `advance` changes are uniform.
  static constexpr bool WALKS = false;
  struct Shared {};  // the kernel's variables in shared memory

  // The bytes of a loader's copies into a stage.
  __device__ static int bytes() { return STAGE_BYTES; }
  // Called by a loader's warp before its first stage, and after each stage: for kernels that keep their place
  // from stage to stage, and do not compute it from the stage's number.
  __device__ void locate(int) const {}
  __device__ void advance() const {}
  // Called by the consumers: the block of k of the first stage.
  __device__ TapBlock first_block() const { return {}; }
  // Called by each thread of the consumers, with its number among these, while the first stages are loaded.
  __device__ void prepare(Shared&, int) const {}
  // Called by the producer's warpgroup after the first loads, and at its end.
  __device__ void join() const {}
  __device__ void leave() const {}
};

// Loads `count` stages from number `begin` on; the thread that leads issues the copies. The FIRST stages,
// which are still empty, have a loop of their own at the kernel's start: everything waits for them, and code
// that lies far off takes long to fetch.
template <bool FIRST, class Kernel>
__device__ __forceinline__ void fill(Kernel& kernel, uint32_t stages, uint32_t barriers, int loader,
                                     bool lead, int begin, int count) {
  Position at;
#pragma unroll 1  // less code: each thread block fetches it anew
  for (int i = 0; i < count; ++i) {
    uint64_t* full = reinterpret_cast<uint64_t*>(shared_pointer(barriers + at.stage * 8));
    if constexpr (!FIRST) Barrier::wait(full + STAGES, at.phase);
    if (lead) {
      Barrier::arrive_and_expect_tx(full, kernel.bytes());
      kernel.load({begin + i, loader, full, stages + at.stage * STAGE_BYTES});
    }
    kernel.advance();
    at.advance(STAGES);
  }
}

// Computes the tile. All threads of the thread block call it.
template <class Kernel>
__device__ __forceinline__ void run_tile(Kernel kernel) {
  constexpr int LOADERS = Kernel::LOADERS;
  __shared__ TilePipeline<LOADERS>
      pipeline;  // first in shared memory: its addresses cost an instruction less
  __shared__ typename Kernel::Shared shared;
  const uint32_t stages = shared_stages();
  const int warp = warp_index(), count = kernel.count();
  const auto load_first = [&](bool lead) {
    fill<true>(kernel, stages, shared_address(&pipeline), warp, lead, 0, min(count, STAGES));
  };
  if (warp < LOADERS) kernel.locate(warp);
  if constexpr (LOADERS == 1) {
    // A single loader does not wait for the other warps: it initialises the barriers itself.
    if (warp == 0) {
      const bool lead = elect_one();
      if (lead) init_barriers(pipeline);
      if (lead && !Kernel::WALKS) load_first(true);
      if (Kernel::WALKS) load_first(lead);
    }
  } else if (threadIdx.x == 128) {
    init_barriers(pipeline);
  }
  if (warp >= 4) kernel.prepare(shared, threadIdx.x - 128);
  __syncthreads();
  if (LOADERS > 1 && warp < LOADERS) load_first(elect_one());
  split_roles<TileRoles>(
      warp,
      [&](int) {
        kernel.join();
        if (warp < LOADERS && elect_one())
          fill<false>(kernel, stages, shared_address(&pipeline), warp, true, STAGES, count - STAGES);
        kernel.leave();
      },
      [&](int) {
        const int warpgroup = threadIdx.x / 128 - 1;
        Accumulator acc;
        consume<Kernel>(stages, pipeline, count, warpgroup, acc, kernel.first_block());
        if constexpr (Kernel::DEPENDENT) launch_dependent_grids();
        kernel.finish(shared, stages, warpgroup, acc);
      });
}
