// The Python module jax_splitk._ffi: capsules for XLA's registry, and functions for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "host.h"
#include "launcher.h"
#include "plan.h"
#include "stopwatch.h"

namespace nb = nanobind;
namespace js = jax_splitk;

namespace {

nb::capsule HandlerCapsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

void Require(const std::string& refusal) {
  if (!refusal.empty()) throw nb::value_error(refusal.c_str());
}

js::Plan Parsed(const std::vector<int64_t>& words, std::string_view kernels) {
  js::Plan plan;
  Require(js::ParsePlan(words.data(), words.size(), kernels, &plan));
  return plan;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("launch_handlers", [] {
    nb::dict stages;
    stages["instantiate"] = HandlerCapsule(js::LaunchInstantiate);
    stages["execute"] = HandlerCapsule(js::LaunchExecute);
    return stages;
  });
  m.def("launch_state_type", [] {
    nb::dict type;
    type["type_id"] = nb::capsule(js::LaunchStateTypeId());
    type["type_info"] = nb::capsule(const_cast<XLA_FFI_TypeInfo*>(js::LaunchStateTypeInfo()));
    return type;
  });
  m.def("stopwatch_start_handler", [] { return HandlerCapsule(js::StopwatchStart); });
  m.def("stopwatch_stop_handler", [] { return HandlerCapsule(js::StopwatchStop); });
  // Returns (microseconds, whether the stream was held). Raises RuntimeError if there is no measurement.
  m.def("stopwatch_lap", [] {
    js::Lap lap;
    const std::string why = js::StopwatchLap(&lap);
    if (!why.empty()) throw std::runtime_error("the stopwatch has no time: " + why);
    return nb::make_tuple(lap.microseconds, lap.held);
  });
  m.def("host_conv_handler", [] { return HandlerCapsule(JaxSplitkHostConv); });
  m.def("host_wgrad_handler", [] { return HandlerCapsule(JaxSplitkHostWgrad); });
  m.def("host_quantized_handler", [] { return HandlerCapsule(JaxSplitkHostQuantized); });
  m.def("host_ragged_handler", [] { return HandlerCapsule(JaxSplitkHostRaggedDot); });

  m.attr("VERSION") = JAX_SPLITK_VERSION;
  m.attr("SOURCES") = JAX_SPLITK_SOURCES;
  m.attr("PLAN_MAGIC") = js::kPlanMagic;
  m.attr("PLAN_VERSION") = js::kPlanVersion;
  m.def("driver_error", []() -> std::string {
    std::string why;
    return js::Driver::Get(&why) ? "" : why;
  });
  m.def("launch_counts", [] {
    js::LaunchCounts counts = js::GetLaunchCounts();
    nb::dict out;
    out["instantiated"] = counts.instantiated;
    out["loaded"] = counts.loaded;
    out["executed"] = counts.executed;
    out["captured"] = counts.captured;
    return out;
  });
  m.def("launch_refusal", [](const std::vector<int64_t>& words, nb::bytes code,
                             const std::vector<int64_t>& sizes, std::string_view kernels) {
    return js::LaunchRefusal(words, {code.c_str(), code.size()}, sizes, kernels);
  });
  // Returns (buffers, tensor maps, launches). Raises ValueError if the launcher would refuse the plan.
  m.def("check_plan", [](const std::vector<int64_t>& words, std::string_view kernels) {
    const js::Plan plan = Parsed(words, kernels);
    return nb::make_tuple(plan.buffers.size(), plan.maps.size(), plan.launches.size());
  });
  m.def("check_buffers", [](const std::vector<int64_t>& words, std::string_view kernels,
                            const std::vector<uintptr_t>& addresses, const std::vector<size_t>& sizes) {
    std::vector<void*> pointers;
    for (uintptr_t address : addresses) pointers.push_back(reinterpret_cast<void*>(address));
    Require(js::BuffersRefusal(Parsed(words, kernels), pointers, sizes));
  });
}
