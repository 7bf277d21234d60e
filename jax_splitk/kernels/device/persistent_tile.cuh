// The skeleton of a persistent kernel: a thread block computes one tile (wgmma_tile.cuh) after the other.
// While a tile is stored, the next one is multiplied, and the one after that is loaded.
//
// Roles: of warpgroup 0, warp 0 loads by TMA, and warp 1 schedules: it finds the thread block's items of
// work, a few of them ahead. The other warpgroups are consumers, one or two: they multiply, and leave their
// rows of the results in shared memory (packed_tile.cuh), from where warps 2 and 3 store them by TMA, each
// those of one consumer. A consumer does not wait for the other: one may store while the other multiplies.
//
// Barriers, with arrivals of a phase:
//   stages    `full` 1 of the loader, and the bytes of its copies; `empty` 1 of each consumer warpgroup, once
//             the WGMMAs that read the stage have retired
//   items     `full` 1 of the scheduler; `empty` 1 of each warp that has read the item
//   results   of each consumer: `full` 1 of each of its warps; `empty` 1 of the warp that stores, once TMA
//             has read them
//
// A kernel is a struct that derives from `PersistentKernel`.

#include "device/packed_tile.cuh"
#include "device/skeleton.cuh"

static_assert(PERSISTENT && CTAS_PER_SM == 1 && TEAMS == 1 && CONSUMERS <= 2);

using TileRoles = Roles<4, SHARE_REGISTERS ? PRODUCER_REGS : 0, CONSUMER_REGS>;
constexpr int ITEMS = 4;  // that the scheduler may be ahead

// What there is to do for one tile; a kernel's item derives from it, and has 8 numbers in all (alignas(16)).
struct ItemBase {
  int stages;  // of operands to multiply; NO_MORE in the last item, which is no work
};
constexpr int NO_MORE = -1;

// A kernel must have, too:
//   layout    types Wgmma (the instruction), A and B (how the operands lie in a stage: `Operand`)
//   schedule  Item; schedule(emit), in all lanes of a warp: calls emit(item) for each item
//   load      load(item, number, full, address), in one thread: issues the copies of a stage
//   finish    is_needed(item, warpgroup): whether the item has rows of the consumer, which else does not
//             multiply; store(item, warpgroup, part, from), in one thread: issues TMA stores of a part of the
//             consumer's results; has_result(item): whether there are any
struct PersistentKernel {
  static constexpr int A_BLOCK = BLOCK_BYTES;  // bytes of 64 rows of A

  // What the warp that stores a consumer's results does while there are none to store, in small steps: a step
  // is false once there is nothing left to do. While the consumers multiply, there is a pause after each. By
  // all lanes, after the first item has come.
  struct Background {
    __device__ bool step() { return false; }
    __device__ void pause() const {}
  };
  __device__ Background background(int /* warpgroup */) const { return {}; }

  // For items whose sums are not the result, or not all of it, called in all consumers: true where nothing is
  // to be stored.
  template <class Item>
  __device__ bool exchange(const Item&, Accumulator&) const {
    return false;
  }
};

template <class Item>
struct Worklist {
  Item items[ITEMS];
  Pipeline<ITEMS, 1, 1 + CONSUMERS + 4 * CONSUMERS> ring;

  // By all lanes of the scheduler.
  __device__ void put(const Item& item, Position& at) {
    static_assert(sizeof(Item) == 32);
    ring.wait_empty(at);
    __syncwarp();  // no lane may still wait when the others go a phase further
    if (threadIdx.x % 32 == 0) {
      const uint4* words = reinterpret_cast<const uint4*>(&item);
      const uint32_t to = shared_address(&items[at.stage]);
      store_shared(to, words[0]);
      store_shared(to + 16, words[1]);
      Barrier::arrive(&ring.full[at.stage]);
    }
    at.advance(ITEMS);
  }

  // By all lanes of any other warp.
  __device__ Item take(Position& at) {
    ring.wait_full(at);
    const uint32_t from = shared_address(&items[at.stage]);
    union {
      uint4 words[2];
      Item item;
    } taken = {{load_shared<uint4>(from), load_shared<uint4>(from + 16)}};
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release(at.stage);
    at.advance(ITEMS);
    return taken.item;
  }

  // The same. The compiler knows that all lanes have the same numbers, and else wraps TMA instructions in
  // loops.
  __device__ Item take_uniform(Position& at) {
    union {
      Item item;
      int words[8];
    } taken = {take(at)};
#pragma unroll  // a loop over references leaves the item in local memory
    for (int i = 0; i < 8; ++i) taken.words[i] = __shfl_sync(~0u, taken.words[i], 0);
    return taken.item;
  }
};

using Results = Pipeline<CONSUMERS, 4, 1>;  // a stage is a consumer's

template <class Kernel, class Work>
__device__ __forceinline__ void load_items(const Kernel& kernel, Work& work, uint32_t stages,
                                           Pipeline<STAGES, 1, CONSUMERS>& pipeline) {
  const bool lead = elect_one();
  Position at, item_at;
#pragma unroll 1
  for (;;) {
    const auto item = work.take_uniform(item_at);
    if (item.stages == NO_MORE) return;
#pragma unroll 1
    for (int i = 0; i < item.stages; ++i) {
      pipeline.wait_empty(at);
      __syncwarp();
      if (lead) {
        uint64_t* full = pipeline.expect(at, STAGE_BYTES);
        kernel.load(item, i, full, stages + at.stage * STAGE_BYTES);
      }
      at.advance(STAGES);
    }
  }
}

template <class Kernel, class Work>
__device__ __forceinline__ void store_items(const Kernel& kernel, Work& work, int warpgroup, uint32_t from,
                                            Results& results) {
  const bool lead = elect_one();
  Position at, item_at;
  at.stage = warpgroup;
  auto background = kernel.background(warpgroup);
  const auto work_until_full = [&](const auto& ring, const Position& position) {
    while (!__any_sync(~0u, ring.is_full(position)) && background.step()) background.pause();
  };
  auto item = work.take_uniform(item_at);
#pragma unroll 1
  while (item.stages != NO_MORE) {
    if (kernel.has_result(item) && kernel.is_needed(item, warpgroup)) {
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        work_until_full(results, at);
        results.wait_full(at);
        __syncwarp();
        if (lead) {
          kernel.store(item, warpgroup, part, from);
          wait_stores_read();
          results.release(warpgroup);
        }
        at.phase ^= 1;
      }
    }
    work_until_full(work.ring, item_at);
    item = work.take_uniform(item_at);
  }
  while (background.step()) {
  }
}

template <class Kernel, class Work>
__device__ __forceinline__ void multiply_items(const Kernel& kernel, Work& work, uint32_t stages,
                                               Pipeline<STAGES, 1, CONSUMERS>& pipeline, uint32_t to,
                                               Results& results) {
  const int warpgroup = threadIdx.x / 128 - 1;
  Position at, item_at, result_at;
  result_at.stage = warpgroup;
#pragma unroll 1
  for (;;) {
    const auto item = work.take(item_at);
    if (item.stages == NO_MORE) return;
    if (!kernel.is_needed(item, warpgroup)) {
#pragma unroll 1
      for (int i = 0; i < item.stages; ++i) {
        pipeline.wait_full(at);
        named_sync(128, 1 + warpgroup);  // no warp may be more than a phase behind
        if (threadIdx.x % 128 == 0) pipeline.release(at.stage);
        at.advance(STAGES);
      }
      continue;
    }
    Accumulator acc;
    TapBlock block;
    const int last = multiply<Kernel>(stages, pipeline, item.stages, warpgroup, acc, at, block);
    wait_batches<0>(acc);
    if (last >= 0 && threadIdx.x % 128 == 0) pipeline.release(last);
    if (item.stages == 0) clear(acc);
    if (kernel.exchange(item, acc)) continue;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      results.wait_empty(result_at);
      stage_result(to, warpgroup, acc, part);
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Barrier::arrive(&results.full[warpgroup]);
      result_at.phase ^= 1;
    }
  }
}

// Computes the thread block's tiles. All of its threads call it.
template <class Kernel>
__device__ __forceinline__ void run_items(const Kernel& kernel) {
  __shared__ Pipeline<STAGES, 1, CONSUMERS> pipeline;
  __shared__ Worklist<typename Kernel::Item> work;
  __shared__ Results results;
  const uint32_t stages = shared_stages(), staged = stages + STAGES * STAGE_BYTES;
  run_roles<TileRoles>(
      [&](int warp) {
        if (warp == 0) load_items(kernel, work, stages, pipeline);
        if (warp >= 2 && warp < 2 + CONSUMERS) store_items(kernel, work, warp - 2, staged, results);
        if (warp == 1) {
          Position at;
          kernel.schedule([&](const auto& item) { work.put(item, at); });
          typename Kernel::Item last{};
          last.stages = NO_MORE;
          work.put(last, at);
        }
      },
      [&](int) { multiply_items(kernel, work, stages, pipeline, staged, results); }, pipeline, work.ring,
      results);
}
