// A parallel loop on XLA's own threads.
#ifndef JAX_SPLITK_HOST_PARALLEL_H_
#define JAX_SPLITK_HOST_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

// Runs body(task, slot) for every task in [0, tasks) on the calling thread and up to `helpers` of the pool's.
// Tasks are claimed from a counter, so the caller alone can finish them and only ever waits for threads
// already at work: no deadlock, even on a pool of one thread that is running us. A helper that starts late
// finds nothing to claim and touches only `Job`, which it keeps alive.
inline void ParallelFor(xla::ffi::ThreadPool& pool, int64_t helpers, int64_t tasks,
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

}  // namespace jax_splitk

#endif  // JAX_SPLITK_HOST_PARALLEL_H_
