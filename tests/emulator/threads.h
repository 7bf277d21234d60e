// Threads of a thread block as fibers, blocks of a cluster as threads of the system that take turns.
//
// A fiber runs until it waits for something. A seed determines which ready fiber runs next. It also chooses one late
// warp in each thread block: this warp runs only when no other warp of the block can, in half of the draws not even
// after a copy. Background work (copies) is queued and runs at a later, random moment; in half of the draws only when
// no fiber can continue. An endless wait is an error that names the threads and what they wait for.

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace emulator {

struct Dim {
  unsigned x, y, z;
};

constexpr int WINDOW = 227 * 1024;

extern Dim grid, block_size;

// Of the running thread: its indices, its number in the block, and the block's rank in the cluster.
const Dim& thread_index();
const Dim& block_index();
int thread_number();
int block_rank();
inline int lane() { return thread_number() % 32; }

// An error of the kernel: nothing runs any more.
[[noreturn]] void fail(const char* text);

// Fails outside of the plan's buffers.
void check_buffers(const void* from, int bytes);

// Exchanges the words of each lane in the mask; returns when all lanes have given theirs.
const uint32_t (*exchange(uint32_t mask, const uint32_t* mine, int count, const char* what))[8];
template <int N>
const uint32_t (*exchange(uint32_t mask, const uint32_t (&mine)[N], const char* what))[8] {
  return exchange(mask, mine, N, what);
}

uint32_t ballot(uint32_t mask, bool vote);

// Waits until `count` threads have come to a barrier of the block; 0: all threads that have not ended.
void sync(int barrier, int threads, const char* what);
void arrive(int barrier);
void cluster_arrive();
void cluster_wait();

// A kernel, the sizes of its parameters, and the storage that the running system thread has for `dynamic`.
struct Kernel {
  void (*function)();
  void (*call)(void (*function)(), void* const* values);
  uint8_t* (*window)();
  const int* wanted;
  int parameters;
};

// Runs all blocks of a grid; `sizes` are those of grid, block and cluster. Returns what is wrong, or "".
const char* run_grid(const Kernel& kernel, const unsigned* sizes, void* const* values, const int* bytes, int count,
                     unsigned seed);

}  // namespace emulator
