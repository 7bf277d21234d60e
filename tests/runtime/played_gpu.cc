// The stopwatch with a driver that plays a GPU: a stream is a thread that does one thing after the other.
// Ends with the number of the line whose check failed, or 0.
#include <sys/mman.h>

#include <condition_variable>
#include <deque>
#include <functional>

#include "stopwatch.cc"

using namespace jax_splitk;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool busy = false;

  Stream() {
    std::thread([this] {
      std::unique_lock<std::mutex> lock(mutex);
      for (;;) {
        changed.wait(lock, [this] { return !queue.empty(); });
        const std::function<void()> next = queue.front();
        busy = true;
        lock.unlock();
        next();
        lock.lock();
        queue.pop_front();
        busy = false;
        changed.notify_all();
      }
    }).detach();
  }

  int Add(std::function<void()> what) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(what));
    changed.notify_all();
    return 0;
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
};

Stream& stream = *new Stream;
void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

int Allocate(void** memory, size_t, unsigned) {
  *memory = page;
  return 0;
}

int CreateEvent(CUevent* event, unsigned) {
  *event = new Clock::time_point;
  return 0;
}

int RecordEvent(CUevent event, CUstream) {
  return stream.Add([event] { *static_cast<Clock::time_point*>(event) = Clock::now(); });
}

int ElapsedTime(float* milliseconds, CUevent start, CUevent stop) {
  const auto at = [](CUevent event) { return *static_cast<Clock::time_point*>(event); };
  *milliseconds = std::chrono::duration<float, std::milli>(at(stop) - at(start)).count();
  return 0;
}

int WaitValue(CUstream, uint64_t address, uint32_t value, unsigned) {
  return stream.Add([address, value] {
    const auto* word = reinterpret_cast<std::atomic<uint32_t>*>(address);
    while (static_cast<int32_t>(*word - value) < 0) std::this_thread::yield();
  });
}

const Driver& Played() {
  static Driver driver{};
  driver.mem_host_alloc = Allocate;
  driver.event_create = CreateEvent;
  driver.event_record = RecordEvent;
  driver.event_elapsed_time = ElapsedTime;
  driver.stream_wait_value = WaitValue;
  return driver;
}

// Two pieces of work of a millisecond each, between which the host pauses.
Lap Measured(milliseconds pause) {
  const XLA_FFI_Rets none{};
  const auto work = [] { std::this_thread::sleep_for(milliseconds(1)); };
  Start(nullptr, ffi::RemainingRets(&none, 0));
  stream.Add(work);
  std::this_thread::sleep_for(pause);
  stream.Add(work);
  Stop(nullptr, ffi::RemainingRets(&none, 0));
  stream.Wait();
  Lap lap{};
  StopwatchLap(&lap);
  return lap;
}

}  // namespace

const Driver* Driver::Get(std::string*) { return &Played(); }
std::string Driver::ErrorString(CUresult) const { return "error"; }

#define CHECK(what) \
  if (!(what)) return __LINE__

int main() {
  for (int i = 0; i < 3; ++i) {
    const Lap lap = Measured(milliseconds(10));
    CHECK(lap.held && lap.microseconds > 2000 && lap.microseconds < 9000);  // without the pause
  }
  const Lap late = Measured(milliseconds(kHold + 20));
  CHECK(!late.held && late.microseconds > 5000);
  CHECK(Measured(milliseconds(kHold + 5)).held);    // held twice as long
  CHECK(!Measured(milliseconds(kHold + 20)).held);  // and no longer
  CHECK(Measured(milliseconds(1)).held);
  // The driver frees its memory at exit, before the threads that wait to let streams go on have ended.
  mprotect(page, 4096, PROT_NONE);
  std::this_thread::sleep_for(milliseconds(3 * kHold));
  return 0;
}
