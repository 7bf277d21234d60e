// Loops on XLA's own threads, compiled for several instruction sets.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

// Everything inside a task is inlined into it, because a task is compiled once per instruction set.
#define JAX_SPLITK_INLINE inline __attribute__((always_inline))

namespace jax_splitk {

namespace ffi = xla::ffi;

// Runs body(task, slot) for every task in [0, tasks) on the calling thread and up to `helpers` of the pool's.
// Threads claim tasks from a counter. So the caller alone can finish them, and waits only for threads that
// are already working: there is no deadlock, even if the pool has one thread and that is the caller. A helper
// that starts late finds no task and touches only `Job`, which it keeps alive.
inline void ParallelFor(ffi::ThreadPool& pool, int64_t helpers, int64_t tasks,
                        std::function<void(int64_t, int64_t)> body) {
  struct Job {
    std::atomic<int64_t> next{0}, workers{0};
    int64_t done = 0;  // guarded by mutex
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto job = std::make_shared<Job>();
  auto work = [job, tasks, run = &body] {
    int64_t ran = 0;
    const int64_t slot = job->workers.fetch_add(1);
    for (int64_t task; (task = job->next.fetch_add(1)) < tasks; ++ran) (*run)(task, slot);
    if (ran == 0) return;
    std::lock_guard<std::mutex> lock(job->mutex);
    job->done += ran;
    if (job->done == tasks) job->finished.notify_all();
  };
  for (int64_t i = 0; i < std::min(helpers, tasks - 1); ++i) pool.Schedule(std::function<void()>(work));
  work();
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done == tasks; });
}

// GCC's and Clang's portable vectors: arrays of them stay in registers, which arrays of floats did not.
template <int lanes>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * lanes)));
};

// RunTask<lanes>(operation, task, slot), compiled for this CPU, with vectors as wide as its registers. Only
// the machine decides which variant runs.
template <typename Operation>
using Task = void(const Operation& operation, int64_t task, float* slot);

template <int lanes, typename Operation>
JAX_SPLITK_INLINE void RunTask(const Operation& operation, int64_t task, float* slot);

template <typename Operation>
void Baseline(const Operation& operation, int64_t task, float* slot) {
  RunTask<8>(operation, task, slot);
}

#if defined(__x86_64__)
template <typename Operation>
__attribute__((target("avx2,fma"))) void Avx2(const Operation& operation, int64_t task, float* slot) {
  RunTask<8>(operation, task, slot);
}

template <typename Operation>
__attribute__((target("avx512f,avx2,fma"))) void Avx512(const Operation& operation, int64_t task,
                                                        float* slot) {
  RunTask<16>(operation, task, slot);
}
#endif

template <typename Operation>
Task<Operation>* ForThisCpu() {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  if (avx512) return Avx512<Operation>;
  if (avx2) return Avx2<Operation>;
#endif
  return Baseline<Operation>;
}

}  // namespace jax_splitk
