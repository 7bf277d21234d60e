#include "stopwatch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "driver.h"

namespace ffi = xla::ffi;

namespace jax_splitk {
namespace {

// The longest that a stream is held, in milliseconds. To enqueue some twenty programs takes the host a few.
// Work that waits for the GPU itself, as loops of XLA's may, or a call of the driver in another thread that
// waits until the GPU is idle, would wait for ever. After a measurement that was not held until its end, the
// next one is held twice as long: the host may be busy. After the longest one it is the first again.
constexpr int kHold = 30, kLongestHold = 240;

constexpr unsigned kPortable = 1, kDeviceMap = 2;  // CU_MEMHOSTALLOC_*
constexpr unsigned kWaitGreaterOrEqual = 0;        // CU_STREAM_WAIT_VALUE_GEQ, by the sign of the difference

// The stream waits until `word` is at least the number of the measurement. No mutex is held during a call of
// the driver, which may wait until the stream goes on.
struct Stopwatch {
  std::atomic<uint32_t>* word = nullptr;  // in memory that GPUs can read, which the driver frees at exit
  std::atomic<uint32_t> reached{0};       // the last measurement whose stream may go on, as `word` has it
  std::atomic<uint32_t> number{0};        // of the last measurement
  std::atomic<uint32_t> late{0};          // the last one that was not held until its end
  std::atomic<int> hold{kHold};           // milliseconds of the next one
  CUevent start = nullptr, stop = nullptr;

  // Lets the stream go on. Returns whether it was held; if not, this does not touch `word`.
  bool Release(uint32_t measurement) {
    uint32_t before = reached.load();
    while (static_cast<int32_t>(measurement - before) > 0) {
      if (!reached.compare_exchange_weak(before, measurement)) continue;
      word->store(measurement);
      return true;
    }
    return false;
  }
};

Stopwatch& State() {
  static Stopwatch& state = *new Stopwatch;
  return state;
}

ffi::Error Failed(const std::string& what) { return ffi::Error::Internal("jax_splitk_stopwatch: " + what); }

// What all measurements use is created once.
CUresult Prepare(const Driver& driver, Stopwatch& state) {
  static std::mutex& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (state.stop) return kCudaSuccess;
  if (!state.word) {
    void* memory;
    if (CUresult r = driver.mem_host_alloc(&memory, sizeof(uint32_t), kPortable | kDeviceMap)) return r;
    state.word = new (memory) std::atomic<uint32_t>(0);
  }
  if (CUresult r = driver.event_create(&state.start, 0)) return r;
  return driver.event_create(&state.stop, 0);
}

void ReleaseLate(uint32_t measurement) {
  Stopwatch& state = State();
  if (!state.Release(measurement)) return;
  state.late = measurement;
  const int hold = state.hold;
  state.hold = hold < kLongestHold ? std::min(2 * hold, kLongestHold) : kHold;
}

void ReleaseLater(uint32_t measurement) {
  try {
    std::thread([measurement, hold = State().hold.load()] {
      std::this_thread::sleep_for(std::chrono::milliseconds(hold));
      ReleaseLate(measurement);
    }).detach();
  } catch (const std::system_error&) {  // the system grants no thread
    ReleaseLate(measurement);
  }
}

ffi::Error Start(CUstream stream, ffi::RemainingRets) {
  std::string why;
  const Driver* driver = Driver::Get(&why);
  if (!driver) return Failed(why);
  Stopwatch& state = State();
  if (CUresult r = Prepare(*driver, state)) return Failed("cannot be set up: " + driver->ErrorString(r));
  const uint32_t measurement = ++state.number;
  ReleaseLater(measurement);
  const auto address = reinterpret_cast<uint64_t>(state.word);
  CUresult r = driver->stream_wait_value(stream, address, measurement, kWaitGreaterOrEqual);
  if (!r) r = driver->event_record(state.start, stream);
  return r ? Failed("cannot start: " + driver->ErrorString(r)) : ffi::Error::Success();
}

ffi::Error Stop(CUstream stream, ffi::RemainingRets) {
  std::string why;
  const Driver* driver = Driver::Get(&why);
  if (!driver) return Failed(why);
  Stopwatch& state = State();
  if (!state.stop) return Failed("stopped before it was started");
  const CUresult r = driver->event_record(state.stop, stream);
  if (state.Release(state.number)) state.hold = kHold;
  return r ? Failed("cannot stop: " + driver->ErrorString(r)) : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(StopwatchStart, Start,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(StopwatchStop, Stop,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>().RemainingRets());

std::string StopwatchLap(Lap* lap) {
  std::string why;
  const Driver* driver = Driver::Get(&why);
  if (!driver) return why;
  const Stopwatch& state = State();
  if (!state.stop) return "it was not started";
  float milliseconds = 0;
  if (CUresult r = driver->event_elapsed_time(&milliseconds, state.start, state.stop)) {
    return driver->ErrorString(r);
  }
  *lap = {1e3 * milliseconds, state.late != state.number};
  return "";
}

}  // namespace jax_splitk
