// A stopwatch for what runs on a GPU: two custom calls without operands that enclose other work on a stream.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

// The first call holds the stream, and starts the stopwatch when the stream goes on: as soon as the second
// call is enqueued. So all work between them is enqueued before it runs, and no pause of the host counts.
// One measurement at a time.
XLA_FFI_DECLARE_HANDLER_SYMBOL(StopwatchStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(StopwatchStop);

// A finished measurement.
struct Lap {
  double microseconds;
  bool held;  // whether the stream was held until all was enqueued; else pauses of the host may count
};

// Returns why there is none; empty if there is one.
std::string StopwatchLap(Lap* lap);

}  // namespace jax_splitk
