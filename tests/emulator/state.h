// The threads of a running grid (threads.h), for the code that all kernels share.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace emulator {

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
  std::vector<std::vector<Product>> committed[128];  // barriers whose phase is not complete
  size_t count[128] = {}, complete = 0;
};

struct Block;

struct Fiber {
  Dim index;
  int number;
  Block* block;
  ucontext_t entry;
  jmp_buf place;  // where it goes on, once it has been entered
  bool entered = false;
  bool done = false;
  unsigned cluster_since = ~0u;  // the cluster's meeting to which it has come
  std::vector<std::function<void()>> copies;  // its own copies, in no group yet
  std::vector<std::vector<std::function<void()>>> groups;
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
  jmp_buf scheduler;
  int live = 0;
  std::vector<uint32_t> lanes;  // of each warp, those that have not ended
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

extern thread_local Fiber* self;

// An error of the kernel: nothing runs any more.
[[noreturn]] void fail(const std::string& text);

// Waits until `ready(on)`, which may be asked at any time. `what` names the wait in errors.
void wait_until(const char* what, bool (*ready)(const void*), const void* on);
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  wait_until(what, [](const void* on) { return (*static_cast<const Ready*>(on))(); }, &ready);
}

// Runs `work` at a later moment.
void later(std::function<void()> work);

// The meeting of a warp, or of the block, for the running thread's counts of accesses.
void count_meeting();

const char* said(const std::string& text);  // kept until the next call

}  // namespace emulator
