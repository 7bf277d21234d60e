// Threads of a thread block as fibers, blocks of a cluster as threads of the system that take turns.
//
// A fiber runs until it waits for something. A seed determines which ready fiber runs next. It also chooses one late
// warp in each thread block: this warp runs only when no other warp of the block can, in half of the draws not even
// after a copy. Background work (copies) is queued and runs at a later, random moment; in half of the draws only when
// no fiber can continue. An endless wait is an error that names the threads and what they wait for.

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace emulator {

struct Dim {
  unsigned x, y, z;
};

constexpr int WINDOW = 227 * 1024;

// A meeting of threads: how often they have met, and which have come.
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
  const struct Shape* shape;
};

struct Warpgroup {
  std::vector<Product> open[128];
  std::deque<std::vector<Product>> committed[128];  // barriers whose phase is not complete
  size_t count[128] = {}, complete = 0;
};

struct Block;

struct Fiber {
  Dim index;
  int number;
  Block* block;
  ucontext_t context;
  bool done = false;
  unsigned cluster_since = ~0u;  // the cluster's meeting to which it has come
  std::vector<std::function<void()>> copies;  // its own copies, in no group yet
  std::deque<std::vector<std::function<void()>>> groups;
  unsigned fences = 0;  // fences of its accesses to shared memory, before later copies
  std::deque<int> stores = {0};  // of TMA, of each group, whose bytes have not been read; the last group is open
  // What it waits for.
  bool (*ready)(const void*) = nullptr;
  const void* on = nullptr;
  const char* what = "";
};

struct Cluster;

// The last reader of a place in shared memory, and how many fences it had passed.
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
  int live = 0;
  std::vector<std::function<void()>> background;
  std::vector<Reader> readers;  // for each 16 bytes of the window
  std::map<int, Meeting> barriers;
  std::map<std::pair<int, uint32_t>, Exchange> exchanges;  // meetings by warp and mask
  std::vector<Warpgroup> warpgroups;
  Counter* counter = nullptr;
};

struct Cluster {
  std::vector<Block> blocks;
  Meeting meeting;
  int live = 0;
};

extern Dim grid, block_size;
extern thread_local Fiber* self;

// An error of the kernel: nothing runs any more.
[[noreturn]] void fail(const std::string& text);

// Fails outside of the plan's buffers.
void check_buffers(const void* from, int bytes);

// Waits until `ready(on)`, which may be asked at any time. `what` names the wait in errors.
void wait_until(const char* what, bool (*ready)(const void*), const void* on);
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  wait_until(what, [](const void* on) { return (*static_cast<const Ready*>(on))(); }, &ready);
}

// Runs `work` at a later moment.
void later(std::function<void()> work);

// Exchanges the words of each lane in the mask; returns when all lanes have given theirs.
const uint32_t (*exchange(uint32_t mask, const uint32_t* mine, int count, const char* what))[8];
template <int N>
const uint32_t (*exchange(uint32_t mask, const uint32_t (&mine)[N], const char* what))[8] {
  return exchange(mask, mine, N, what);
}

// Waits until `count` threads have come to a barrier of the block; 0: all threads that have not ended.
void sync(int barrier, int threads, const char* what);
void arrive(int barrier);
void cluster_arrive();
void cluster_wait();

// A grid's sizes, the function that calls the kernel, and the storage that the running system thread has for `dynamic`.
struct Run {
  Dim grid, block, cluster;
  unsigned seed;
  std::function<void()> kernel;
  uint8_t* (*window)();
};

// Runs all blocks of a grid; what is wrong, or "".
std::string run_grid(const Run& run);
// What is wrong with the sizes of a plan's parameters, or "".
std::string check_parameters(const int* wanted, int parameters, const int* bytes, int count);
const char* said(const std::string& text);  // kept until the next call

}  // namespace emulator
