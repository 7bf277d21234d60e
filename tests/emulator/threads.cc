// Runs the threads of a grid (threads.h).

#include <sys/mman.h>

#include <chrono>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

namespace emulator {

constexpr int STACK = 256 * 1024;
Dim grid, block_size;
thread_local Fiber* self;

// The state of a running cluster.
struct Running : Cluster {
  const Kernel* kernel;
  void* const* values;
  std::mutex turn;
  long progress = 0;
  std::string error;

  void fail(const std::string& text) {
    if (error.empty()) error = text;
  }
};

// The order in which a block's threads run and copies arrive.
struct Order {
  std::mt19937 random;
  int late;          // the late warp's number
  bool very_late;    // it waits for copies, too
  bool slow_copies;  // they wait for all threads

  Order(unsigned seed, int warps) : random(seed) {
    late = random() % warps, very_late = random() % 2, slow_copies = random() % 2;
  }
};

Running& running(const Block& block) { return static_cast<Running&>(*block.cluster); }

std::string name(const Fiber& f) {
  const Dim& b = f.block->index;
  return "thread " + std::to_string(f.number) + " of block (" + std::to_string(b.x) + ", " + std::to_string(b.y) +
         ", " + std::to_string(b.z) + ")";
}

const Dim& thread_index() { return self->index; }
const Dim& block_index() { return self->block->index; }
int thread_number() { return self->number; }
int block_rank() { return self->block->rank; }

// Unlike swapcontext, jumps between stacks need no system call.
void leave(Fiber* fiber) {
  if (_setjmp(fiber->place) == 0) _longjmp(fiber->block->scheduler, 1);
}
void enter(Fiber* fiber) {
  if (_setjmp(fiber->block->scheduler) != 0) return;
  if (fiber->entered) _longjmp(fiber->place, 1);
  fiber->entered = true;
  setcontext(&fiber->entry);
}

void wait_until(const char* what, bool (*ready)(const void*), const void* on) {
  if (ready(on)) return;
  Fiber* fiber = self;
  fiber->ready = ready, fiber->on = on, fiber->what = what;
  leave(fiber);
}

void later(std::function<void()> work) { self->block->background.push_back(std::move(work)); }

// Reports an error of the kernel: nothing runs any more.
[[noreturn]] void fail(const std::string& text) {
  Fiber* fiber = self;
  if (fiber != nullptr) {
    running(*fiber->block).fail(name(*fiber) + ": " + text);
    fiber->ready = [](const void*) { return false; };
    for (;;) leave(fiber);
  }
  throw std::runtime_error(text);
}
[[noreturn]] void fail(const char* text) { fail(std::string(text)); }

void meet(Meeting& meeting, const char* what, const std::function<int()>& expected) {
  const unsigned since = meeting.generation;
  ++meeting.arrived;
  wait_until(what, [&] { return meeting.is_over(since, expected()); });
}

void start() {
  Fiber* fiber = self;
  Running* cluster = &running(*fiber->block);
  cluster->kernel->call(cluster->kernel->function, cluster->values);
  fiber->done = true;
  --fiber->block->live, --cluster->live;
  fiber->block->lanes[fiber->number / 32] &= ~(1u << fiber->number % 32);
  // A meeting counts only threads that have not ended, among those that have come and those that must come.
  if (fiber->cluster_since == cluster->meeting.generation) --cluster->meeting.arrived;
  for (;;) leave(fiber);
}

std::vector<void*>& stacks() {
  static std::vector<void*> free;
  return free;
}

// Runs, one after the other, all ready fibers of the late warp or of the other warps. Returns whether there was one.
bool run_fibers(Block& block, Order& order, bool late) {
  bool moved = false;
  const size_t first = order.random() % block.fibers.size(), count = block.fibers.size();
  for (size_t i = 0; i < count && running(block).error.empty(); ++i) {
    Fiber& fiber = block.fibers[(first + i) % count];
    if ((fiber.number / 32 == order.late) != late) continue;
    if (fiber.done || (fiber.ready != nullptr && !fiber.ready(fiber.on))) continue;
    fiber.ready = nullptr;
    self = &fiber;
    enter(&fiber);
    self = nullptr;
    moved = true;
  }
  return moved;
}

bool run_round(Block& block, Order& order) {
  bool moved = run_fibers(block, order, false);
  if (!moved && !order.very_late) moved = run_fibers(block, order, true);
  // Runs some of the background copies; at least one if no fiber can continue without them.
  std::vector<std::function<void()>> kept, run;
  const bool none = moved && order.slow_copies;
  for (auto& work : block.background) (none || order.random() % 2 ? kept : run).push_back(std::move(work));
  if (!moved && run.empty() && !kept.empty()) run.push_back(std::move(kept.back())), kept.pop_back();
  block.background = std::move(kept);
  for (auto& work : run) work(), moved = true;
  return moved || run_fibers(block, order, true);
}

void run_block(Block& block, unsigned seed) {
  Running& cluster = running(block);
  std::unique_lock<std::mutex> turn(cluster.turn);
  Order order(seed, (block.fibers.size() + 31) / 32);
  block.window = cluster.kernel->window();
  std::memset(block.window, 0xff, WINDOW);  // NaN
  Counter counter;
  block.counter = &counter;
  std::vector<void*> used;
  for (Fiber& fiber : block.fibers) {
    if (stacks().empty()) {
      stacks().push_back(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    used.push_back(stacks().back());
    stacks().pop_back();
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = used.back();
    fiber.entry.uc_stack.ss_size = STACK;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, start, 0);
  }
  // All blocks' shared memory exists before any block runs.
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
    if (block.live > 0 || !block.background.empty()) cluster.progress += run_round(block, order);
    const auto now = std::chrono::steady_clock::now();
    const bool moved = cluster.progress != seen;
    if (moved) seen = cluster.progress, since = now;
    // Without a cluster, no other block can end the waits of this block's threads.
    if (!moved && (cluster.blocks.size() == 1 || now - since > std::chrono::seconds(3))) {
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

// ---- what the threads of a warp and of a block do together ---------------------------------------------------------

const uint32_t (*exchange(uint32_t mask, const uint32_t* mine, int count, const char* what))[8] {
  const int warp = self->number / 32, lane = self->number % 32;
  Exchange& e = self->block->exchanges[{warp, mask}];
  const unsigned since = e.generation;
  for (int i = 0; i < count; ++i) e.words[since % 2][lane][i] = mine[i];
  ++e.arrived;
  const uint32_t& lanes = self->block->lanes[warp];
  wait_until(what, [&e, since, mask, &lanes] { return e.is_over(since, __builtin_popcount(mask & lanes)); });
  if (mask == ~0u) count_meeting();
  return e.words[since % 2];
}

uint32_t ballot(uint32_t mask, bool vote) {
  const auto votes = exchange(mask, {uint32_t(vote)}, "__ballot_sync");
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) all |= mask >> i & 1 ? (votes[i][0] & 1) << i : 0;
  return all;
}

void sync(int barrier, int threads, const char* what) {
  Block* block = self->block;
  meet(block->barriers[barrier], what, [=] { return threads > 0 ? threads : block->live; });
  count_meeting();
}

void arrive(int barrier) { ++self->block->barriers[barrier].arrived; }

void cluster_arrive() {
  Meeting& meeting = self->block->cluster->meeting;
  self->cluster_since = meeting.generation;
  ++meeting.arrived;
}
void cluster_wait() {
  Cluster* cluster = self->block->cluster;
  const unsigned since = self->cluster_since;
  wait_until("cluster_wait", [=] { return cluster->meeting.is_over(since, cluster->live); });
}

// What is wrong with the sizes of a plan's parameters, or "".
std::string check_parameters(const Kernel& kernel, const int* bytes, int count) {
  if (count != kernel.parameters) return "the kernel has other parameters than the plan";
  for (int i = 0; i < count; ++i) {
    if (kernel.wanted[i] > bytes[i] || kernel.wanted[i] + 8 <= bytes[i]) {
      return "parameter " + std::to_string(i) + ": " + std::to_string(bytes[i]) + " bytes in the plan, " +
             std::to_string(kernel.wanted[i]) + " in the kernel";
    }
  }
  return "";
}

std::string run_blocks(const Kernel& kernel, void* const* values, const Dim& cluster_size, unsigned seed) {
  const Dim block = block_size;
  const int threads = block.x * block.y * block.z, blocks = cluster_size.x * cluster_size.y * cluster_size.z;
  for (unsigned z = 0; z < grid.z; z += cluster_size.z)
    for (unsigned y = 0; y < grid.y; y += cluster_size.y)
      for (unsigned x = 0; x < grid.x; x += cluster_size.x) {
        Running cluster;
        cluster.kernel = &kernel, cluster.values = values;
        cluster.live = threads * blocks;
        cluster.blocks.resize(blocks);
        for (int rank = 0; rank < blocks; ++rank) {
          Block& b = cluster.blocks[rank];
          const unsigned row = rank / cluster_size.x;
          b.index = {x + rank % cluster_size.x, y + row % cluster_size.y, z + row / cluster_size.y};
          b.rank = rank, b.cluster = &cluster, b.live = threads;
          b.fibers.resize(threads);
          b.lanes.resize((threads + 31) / 32);
          b.warpgroups.resize((threads + 127) / 128);
          for (int i = 0; i < threads; ++i) {
            Fiber& f = b.fibers[i];
            f.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
            f.number = i, f.block = &b;
            b.lanes[i / 32] |= 1u << i % 32;
          }
        }
        // Each block runs in a system thread of its own, since thread-local storage holds a block's own variables.
        std::vector<std::thread> threads_of_blocks;
        for (int rank = 0; rank < blocks; ++rank) {
          threads_of_blocks.emplace_back([&, rank] { run_block(cluster.blocks[rank], seed + rank); });
        }
        for (std::thread& thread : threads_of_blocks) thread.join();
        if (!cluster.error.empty()) return cluster.error;
        seed += blocks;
      }
  return "";
}

const char* run_grid(const Kernel& kernel, const unsigned* sizes, void* const* values, const int* bytes, int count,
                     unsigned seed) {
  grid = {sizes[0], sizes[1], sizes[2]}, block_size = {sizes[3], sizes[4], sizes[5]};
  const std::string error = check_parameters(kernel, bytes, count);
  return said(error.empty() ? run_blocks(kernel, values, {sizes[6], sizes[7], sizes[8]}, seed) : error);
}

}  // namespace emulator
