// The generic launcher: one XLA FFI handler that runs any Plan. It does not depend on the operation.
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

// For tests: why the launcher refuses a call before it runs; empty if it does not.
std::string LaunchRefusal(const std::vector<int64_t>& plan, std::string_view code,
                          const std::vector<int64_t>& sizes, std::string_view kernels);

// For tests: counts of what the launcher did in this process.
struct LaunchCounts {
  long instantiated;  // call sites
  long loaded;        // cubins handed to the driver
  long executed;      // executions of call sites
  long captured;      // executions while XLA recorded a command buffer
};
LaunchCounts GetLaunchCounts();

}  // namespace jax_splitk
