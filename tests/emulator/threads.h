// Threads of a thread block as fibers, blocks of a cluster as threads of the system that take turns.
//
// A fiber runs until it waits for something. Which of those that may go on does so next is drawn by a seed. One warp of
// each thread block, drawn as well, is late: it goes on when no other of the block can, in half of the draws not even
// after a copy. What is done in the background (copies) is queued, and done at a later moment, drawn as well; in half of
// the draws once nobody can go on. A wait that nothing ends is an error that names who waits for what.

#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace emulator {

struct Dim {
  unsigned x, y, z;
};

constexpr int WINDOW = 227 * 1024, STACK = 256 * 1024;
// Shared memory: this array and the kernel's own variables, which lie in the same thread-local storage.
alignas(1024) inline thread_local uint8_t dynamic[WINDOW];

// Of those who meet: how often they have, and who has come.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;

  bool is_over(unsigned since, int expected) {
    if (generation == since && arrived >= expected) arrived = 0, ++generation;
    return generation != since;
  }
};

struct Exchange : Meeting {
  uint32_t words[2][32][8];
};

struct Product {  // a thread's part of a WGMMA
  uint64_t a, b;
  uint32_t registers[4];
  float* sums;
  bool zero;
  void (*run)(Product* const*);  // of 128 threads
};

struct Warpgroup {
  std::vector<Product> open[128];
  std::deque<std::vector<Product>> committed[128];  // those that are not complete
  size_t count[128] = {}, complete = 0;
};

struct Block;

struct Fiber {
  Dim index;
  int number;
  Block* block;
  ucontext_t context;
  bool done = false;
  unsigned cluster_since = ~0u;  // which meeting of the cluster it has come to
  std::vector<std::function<void()>> copies;  // its own, of no group yet
  std::deque<std::vector<std::function<void()>>> groups;
  unsigned fences = 0;  // of its accesses to shared memory, for copies that follow them
  std::deque<int> stores = {0};  // of TMA, of each group, whose bytes have not been read; the last group is open
  // What it waits for.
  bool (*ready)(const void*) = nullptr;
  const void* on = nullptr;
  const char* what = "";
};

struct Cluster;

// Who read a place in shared memory last, and how many fences it had come to.
struct Reader {
  const Fiber* fiber = nullptr;
  unsigned fences = 0;
};

struct Block {
  Dim index;
  int rank;
  Cluster* cluster;
  uint8_t* window = nullptr;  // its `dynamic`
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  int live = 0, late = 0;  // the late warp's number
  bool very_late = false;  // it waits for copies, too
  bool slow_copies = false;  // they wait for all threads
  std::vector<std::function<void()>> background;
  std::vector<Reader> readers;  // of each 16 bytes of the window
  std::map<int, Meeting> barriers;
  std::map<std::pair<int, uint32_t>, Exchange> exchanges;  // by warp and mask
  std::vector<Warpgroup> warpgroups;
  std::mt19937 random;
  Counter counter;
};

struct Cluster {
  std::vector<Block> blocks;
  Meeting meeting;
  int live = 0;
  std::function<void()> kernel;
  std::mutex turn;
  long progress = 0;
  std::string error;

  void fail(const std::string& text) {
    if (error.empty()) error = text;
  }
};

inline Dim grid, block_size;
inline thread_local Fiber* self;

inline std::string name(const Fiber& f) {
  const Dim& b = f.block->index;
  return "thread " + std::to_string(f.number) + " of block (" + std::to_string(b.x) + ", " + std::to_string(b.y) +
         ", " + std::to_string(b.z) + ")";
}

// Waits until `ready()`, which may be asked at any time.
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  if (ready()) return;
  self->ready = [](const void* on) { return (*static_cast<const Ready*>(on))(); };
  self->on = &ready, self->what = what;
  Fiber* fiber = self;
  swapcontext(&fiber->context, &fiber->block->scheduler);
}

// An error of the kernel: nothing runs any more.
[[noreturn]] inline void fail(const std::string& text) {
  Fiber* fiber = self;
  if (fiber != nullptr) {
    fiber->block->cluster->fail(name(*fiber) + ": " + text);
    fiber->ready = [](const void*) { return false; };
    for (;;) swapcontext(&fiber->context, &fiber->block->scheduler);
  }
  throw std::runtime_error(text);
}

inline void meet(Meeting& meeting, const char* what, const std::function<int()>& expected) {
  const unsigned since = meeting.generation;
  ++meeting.arrived;
  wait_until(what, [&] { return meeting.is_over(since, expected()); });
}

inline void start() {
  Fiber* fiber = self;
  fiber->block->cluster->kernel();
  Cluster* cluster = fiber->block->cluster;
  fiber->done = true;
  --fiber->block->live, --cluster->live;
  // Of those who have come to a meeting, and of those it waits for, only the living are counted.
  if (fiber->cluster_since == cluster->meeting.generation) --cluster->meeting.arrived;
  for (;;) swapcontext(&fiber->context, &fiber->block->scheduler);
}

inline std::vector<void*>& stacks() {
  static std::vector<void*> free;
  return free;
}

// One after the other, all fibers that can, of the late warp or of the others; whether there was one.
inline bool run_fibers(Block& block, bool late) {
  bool moved = false;
  const size_t first = block.random() % block.fibers.size(), count = block.fibers.size();
  for (size_t i = 0; i < count && block.cluster->error.empty(); ++i) {
    Fiber& fiber = block.fibers[(first + i) % count];
    if (fiber.done || (fiber.number / 32 == block.late) != late) continue;
    if (fiber.ready != nullptr && !fiber.ready(fiber.on)) continue;
    fiber.ready = nullptr;
    self = &fiber;
    swapcontext(&block.scheduler, &fiber.context);
    self = nullptr;
    moved = true;
  }
  return moved;
}

inline bool run_round(Block& block) {
  bool moved = run_fibers(block, false);
  if (!moved && !block.very_late) moved = run_fibers(block, true);
  // Some of what is in the background; of what nobody can go on without, one at least.
  std::vector<std::function<void()>> kept, run;
  const bool none = moved && block.slow_copies;
  for (auto& work : block.background) (none || block.random() % 2 ? kept : run).push_back(std::move(work));
  if (!moved && run.empty() && !kept.empty()) run.push_back(std::move(kept.back())), kept.pop_back();
  block.background = std::move(kept);
  for (auto& work : run) work(), moved = true;
  return moved || run_fibers(block, true);
}

inline void run_block(Block& block, unsigned seed) {
  Cluster& cluster = *block.cluster;
  std::unique_lock<std::mutex> turn(cluster.turn);
  block.random.seed(seed);
  block.late = block.random() % ((block.fibers.size() + 31) / 32);
  block.very_late = block.random() % 2;
  block.slow_copies = block.random() % 2;
  block.window = dynamic;
  std::memset(dynamic, 0xff, WINDOW);  // NaN
  std::vector<void*> used;
  for (Fiber& fiber : block.fibers) {
    if (stacks().empty()) {
      stacks().push_back(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    used.push_back(stacks().back());
    stacks().pop_back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = used.back();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  // The others' shared memory is there before anybody runs.
  for (;;) {
    bool all = true;
    for (const Block& other : cluster.blocks) all = all && other.window != nullptr;
    if (all) break;
    turn.unlock(), std::this_thread::yield(), turn.lock();
  }
  long seen = -1;
  auto since = std::chrono::steady_clock::now();
  // A block's shared memory stays until no block of the cluster runs any more.
  while (cluster.live > 0 && cluster.error.empty()) {
    if (block.live > 0 || !block.background.empty()) cluster.progress += run_round(block);
    const auto now = std::chrono::steady_clock::now();
    if (cluster.progress != seen) seen = cluster.progress, since = now;
    const bool stuck = cluster.blocks.size() == 1 ? now - since > std::chrono::milliseconds(50)
                                                  : now - since > std::chrono::seconds(3);
    if (stuck) {
      std::string text = "deadlock:";
      int listed = 0;
      for (const Block& each : cluster.blocks) {
        for (const Fiber& fiber : each.fibers) {
          if (!fiber.done && fiber.number % 32 == 0 && ++listed <= 24) {
            text += "\n  " + name(fiber) + " waits at " + fiber.what;
          }
        }
      }
      cluster.fail(text);
    }
    if (cluster.blocks.size() > 1) turn.unlock(), std::this_thread::yield(), turn.lock();
  }
  if (!block.background.empty()) cluster.fail("a copy that nobody waited for");
  for (void* stack : used) stacks().push_back(stack);
}

// Runs all blocks of a grid; what is wrong, or "".
inline std::string run_grid(Dim grid_size, Dim block, Dim cluster_size, unsigned seed,
                            const std::function<void()>& kernel) {
  grid = grid_size, block_size = block;
  const int threads = block.x * block.y * block.z, blocks = cluster_size.x * cluster_size.y * cluster_size.z;
  for (unsigned z = 0; z < grid.z; z += cluster_size.z)
    for (unsigned y = 0; y < grid.y; y += cluster_size.y)
      for (unsigned x = 0; x < grid.x; x += cluster_size.x) {
        Cluster cluster;
        cluster.kernel = kernel;
        cluster.live = threads * blocks;
        cluster.blocks.resize(blocks);
        for (int rank = 0; rank < blocks; ++rank) {
          Block& b = cluster.blocks[rank];
          const unsigned row = rank / cluster_size.x;
          b.index = {x + rank % cluster_size.x, y + row % cluster_size.y, z + row / cluster_size.y};
          b.rank = rank, b.cluster = &cluster, b.live = threads;
          b.fibers.resize(threads);
          b.warpgroups.resize((threads + 127) / 128);
          for (int i = 0; i < threads; ++i) {
            Fiber& f = b.fibers[i];
            f.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
            f.number = i, f.block = &b;
          }
        }
        // A thread each, for thread-local storage is what a block has for itself.
        std::vector<std::thread> running;
        for (int rank = 0; rank < blocks; ++rank) {
          running.emplace_back([&, rank] { run_block(cluster.blocks[rank], seed + rank); });
        }
        for (std::thread& thread : running) thread.join();
        if (!cluster.error.empty()) return cluster.error;
        seed += blocks;
      }
  return "";
}

}  // namespace emulator
