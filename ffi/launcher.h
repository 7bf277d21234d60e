// The generic launcher: one XLA FFI handler that runs any Plan. It knows nothing of convolutions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchExecute);

XLA_FFI_TypeId* LaunchStateTypeId();
const XLA_FFI_TypeInfo* LaunchStateTypeInfo();

// What the launcher refuses a call for, before it runs; empty where nothing, for tests.
std::string LaunchRefusal(const std::vector<int64_t>& plan, std::string_view code, std::string_view kernels);

// What the launcher did in this process, for tests.
struct LaunchCounts {
  long instantiated;  // call sites
  long loaded;        // cubins handed to the driver
  long executed;      // executions of call sites
  long captured;      // of these, while XLA recorded a command buffer
};
LaunchCounts GetLaunchCounts();

}  // namespace jax_splitk
