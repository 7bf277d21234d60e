// A split reduction on XLA's own threads, for every operation. Tasks add into the f32 partial result of their
// split; a second parallel phase adds the partials in split order. What is added in which order depends on
// the configuration only, never on how many threads there are or which of them ran what, so results are
// bitwise repeatable.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "host_types.h"
#include "text.h"
#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

namespace ffi = xla::ffi;

// Of the workspace formulas; jax_splitk/kernels/host.py has the same.
constexpr int64_t kAlign = 64;     // bytes
constexpr int64_t kMaxSlots = 64;  // most threads that work on one call
constexpr int64_t kMaxSplits = 256;

constexpr int64_t kSumChunk = 16384;       // elements of the result per task of the second phase
constexpr int64_t kSerialFlops = 1000000;  // below this, waking a thread costs more than it brings

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, kAlign) * kAlign; }

// ---- element types

template <typename T>
constexpr ffi::DataType kType = ffi::DataType::INVALID;
template <>
inline constexpr ffi::DataType kType<float> = ffi::F32;
template <>
inline constexpr ffi::DataType kType<Bf16> = ffi::BF16;
template <>
inline constexpr ffi::DataType kType<F16> = ffi::F16;

inline bool IsFloat(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

// body(T()) for the one of the types whose kType is `type`, which must be among them.
template <typename T, typename... More, typename Body>
JAX_SPLITK_INLINE auto WithType(ffi::DataType type, Body body) {
  if constexpr (sizeof...(More) > 0) {
    if (type != kType<T>) return WithType<More...>(type, body);
  }
  return body(T());
}

// ---- calls

// What the calls of all operations have. The workspace holds the splits' partial results, then the slots.
struct SplitCall {
  int64_t splits;
  int64_t slots;          // threads' own scratch areas
  int64_t partial_bytes;  // one split's partial result; 0 if the single one is the result itself
  int64_t slot_bytes;
  ffi::DataType out_type;
  void* out;
  char* workspace;  // aligned

  int64_t total_bytes() const { return kAlign + splits * partial_bytes + slots * slot_bytes; }

  float* Partial(int64_t split) const {
    return reinterpret_cast<float*>(partial_bytes == 0 ? out : workspace + split * partial_bytes);
  }
  char* Slot(int64_t slot) const { return workspace + splits * partial_bytes + slot * slot_bytes; }

  void SetResults(ffi::AnyBuffer result, ffi::AnyBuffer bytes) {
    out = result.untyped_data();
    const auto base = reinterpret_cast<uintptr_t>(bytes.untyped_data());
    workspace = static_cast<char*>(bytes.untyped_data()) + (kAlign - base % kAlign) % kAlign;
  }
};

// One task of a call's first phase, with the scratch area of the thread that runs it.
template <typename Call>
using Task = void(const Call& call, int64_t task, char* slot);

template <typename Call, Task<Call> task>
void Baseline(const Call& call, int64_t index, char* slot) {
  task(call, index, slot);
}

#if defined(__x86_64__)
template <typename Call, Task<Call> task>
__attribute__((target("avx2,fma"))) void Avx2(const Call& call, int64_t index, char* slot) {
  task(call, index, slot);
}
#endif

// `task`, a JAX_SPLITK_INLINE function, compiled for this CPU: once more for those of the last decade. Which
// of the two runs depends on the machine only.
template <typename Call, Task<Call> task>
Task<Call>* ForThisCpu() {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) return Avx2<Call, task>;
#endif
  return Baseline<Call, task>;
}

// ---- the two phases

// Runs body(task, slot) for every task in [0, tasks) on the calling thread and up to `helpers` of the pool's.
// Tasks are claimed from a counter, so the caller alone can finish them and only ever waits for threads
// already at work: no deadlock, even on a pool of one thread that is running us. A helper that starts late
// finds nothing to claim and touches only `Job`, which it keeps alive.
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

// out[begin:end] = sum of the partials, in split order, in the result's type.
template <typename T>
void SumPartials(const SplitCall& call, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 256;
  T* out = static_cast<T*>(call.out);
  for (int64_t at = begin; at < end; at += kStep) {
    const int64_t count = std::min(kStep, end - at);
    float sum[kStep];
    std::copy_n(call.Partial(0) + at, count, sum);
    for (int64_t split = 1; split < call.splits; ++split) {
      const float* partial = call.Partial(split) + at;
      for (int64_t i = 0; i < count; ++i) sum[i] += partial[i];
    }
    for (int64_t i = 0; i < count; ++i) FromFloat(sum[i], out + at + i);
  }
}

// Both phases of a call that computes `size` elements by `flops` operations in so many tasks.
template <typename Call>
void RunSplits(ffi::ThreadPool& pool, const Call& call, Task<Call>* run, int64_t tasks, int64_t size,
               double flops) {
  const int64_t helpers = flops < kSerialFlops ? 0 : std::min(pool.num_threads(), call.slots) - 1;
  ParallelFor(pool, helpers, tasks, [&](int64_t task, int64_t slot) { run(call, task, call.Slot(slot)); });
  if (call.partial_bytes == 0) return;
  auto* sum =
      WithType<float, Bf16, F16>(call.out_type, [](auto zero) { return SumPartials<decltype(zero)>; });
  ParallelFor(
      pool, size * call.splits < kSerialFlops / 8 ? 0 : helpers, CeilDiv(size, kSumChunk),
      [&](int64_t task, int64_t) { sum(call, task * kSumChunk, std::min((task + 1) * kSumChunk, size)); });
}

// ---- refusals: what is wrong with a call, empty where nothing is

inline std::string SplitsRefusal(const SplitCall& call, int64_t most, const char* reduction, int64_t size) {
  if (call.splits >= 1 && call.splits <= most) return "";
  return Text("splits = ", call.splits, " must lie within 1..", most, " for ", reduction, size);
}

inline std::string WorkspaceRefusal(const SplitCall& call, ffi::AnyBuffer workspace) {
  const int64_t given = static_cast<int64_t>(workspace.size_bytes()), expected = call.total_bytes();
  if (given == expected) return "";
  return Text("workspace has ", given, " bytes, expected ", expected, " for this configuration");
}

}  // namespace jax_splitk
