#include "launcher.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "plan.h"
#include "text.h"

namespace ffi = xla::ffi;

namespace jax_splitk {
namespace {

std::atomic<long> g_instantiated{0}, g_loaded{0}, g_executed{0}, g_captured{0};

ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_splitk_launch: " + message);
}

ffi::Error CudaError(const Driver& driver, const std::string& what, CUresult result) {
  return ffi::Error::Internal("jax_splitk_launch: " + what + ": " + driver.ErrorString(result));
}

// Machine code is loaded once per process and content: XLA instantiates every call site separately. A
// context-free CUlibrary serves every device. Libraries are never unloaded, since a recorded graph may still
// hold their kernels.
ffi::Error LoadLibrary(const Driver& driver, std::string_view cubin, CUlibrary* library) {
  static std::mutex& mutex = *new std::mutex;
  static auto& libraries = *new std::map<std::string, CUlibrary, std::less<>>;  // by content
  std::lock_guard<std::mutex> lock(mutex);
  if (auto found = libraries.find(cubin); found != libraries.end()) {
    *library = found->second;
    return ffi::Error::Success();
  }
  // The driver does not get the size, and reads anything but an ELF file as text that ends with a zero.
  if (cubin.substr(0, 4) != "\177ELF") {
    return Invalid(Text("the code attribute (", cubin.size(), " bytes) is not an ELF file"));
  }
  if (CUresult r =
          driver.library_load_data(library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0)) {
    return CudaError(driver, "cannot load the code (built for compute capability 9.0, sm_90a)", r);
  }
  libraries.emplace(cubin, *library);
  ++g_loaded;
  return ffi::Error::Success();
}

// What is wrong with the sizes of a launch's parameters: with wrong sizes the driver or the kernel would read
// beyond them. Empty if they are right, or if the driver cannot tell (before CUDA 12.4).
std::string ParametersRefusal(const Driver& driver, CUkernel kernel, const std::vector<ParamSpec>& params) {
  if (!driver.kernel_get_param_info) return "";
  size_t count = 0, offset, size;
  for (; driver.kernel_get_param_info(kernel, count, &offset, &size) == kCudaSuccess; ++count) {
    if (count >= params.size()) continue;
    const ParamSpec& param = params[count];
    const size_t expected = param.kind == ParamSpec::kBytes ? (size + 7) / 8 * 8 : size;  // in whole words
    if (param.size() != expected)
      return Text("takes ", size, " bytes as parameter ", count, "; the plan gives ", param.size());
  }
  if (count == 0 || count == params.size()) return "";
  return Text("takes ", count, " parameters; the plan gives ", params.size());
}

// Machine codes that lie one after the other, cut where the code ends if the sizes go beyond it.
std::vector<std::string_view> Images(std::string_view code, ffi::Span<const int64_t> sizes) {
  if (sizes.size() == 0) return {code};
  std::vector<std::string_view> images;
  for (int64_t size : sizes) {
    const size_t bytes = size < 0 ? 0 : std::min<size_t>(size, code.size());
    images.push_back(code.substr(0, bytes));
    code.remove_prefix(bytes);
  }
  return images;
}

// The state of one call site: its parsed plan, its kernels, and the devices on which their attributes have
// been set. Without a driver (null) it has no kernels, and cannot run.
struct LaunchState {
  static ffi::TypeId id;
  const Driver* driver = nullptr;
  Plan plan;
  std::vector<CUkernel> kernels;  // of each launch
  std::atomic<uint64_t> prepared_devices{0};
};
ffi::TypeId LaunchState::id = {};

// `sizes`: bytes of each machine code in `code`, one after the other; empty if there is one.
ffi::Error Prepare(ffi::Span<const int64_t> words, std::string_view code, ffi::Span<const int64_t> sizes,
                   std::string_view kernels, LaunchState* state) {
  std::string message = ParsePlan(words.begin(), words.size(), kernels, &state->plan);
  if (!message.empty()) return Invalid(message);
  // XLA also compiles on machines without a GPU. It instantiates the call again where the program will run.
  const Driver* driver = state->driver = Driver::Get(nullptr);
  if (!driver) return ffi::Error::Success();
  std::vector<CUlibrary> libraries;
  for (std::string_view image : Images(code, sizes)) {
    libraries.push_back(nullptr);
    if (ffi::Error error = LoadLibrary(*driver, image, &libraries.back()); error.failure()) return error;
  }
  for (const LaunchSpec& launch : state->plan.launches) {
    CUkernel kernel;
    const std::string& name = state->plan.kernels[launch.kernel];
    const size_t image = state->plan.images[launch.kernel];
    if (image >= libraries.size())
      return Invalid(
          Text("kernel '", name, "' is in machine code ", image + 1, "; there are ", libraries.size()));
    if (CUresult r = driver->library_get_kernel(&kernel, libraries[image], name.c_str())) {
      return CudaError(*driver, "kernel '" + name + "' not found", r);
    }
    message = ParametersRefusal(*driver, kernel, launch.params);
    if (!message.empty()) return Invalid("kernel '" + name + "' " + message);
    state->kernels.push_back(kernel);
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<std::unique_ptr<LaunchState>> Instantiate(ffi::Dictionary attrs) {
  ++g_instantiated;
  auto words = attrs.get<ffi::Span<const int64_t>>("plan");
  auto code = attrs.get<ffi::Span<const uint8_t>>("code");
  auto kernels = attrs.get<std::string_view>("kernels");
  auto sizes = attrs.get<ffi::Span<const int64_t>>("code_bytes");  // with more than one machine code
  if (!words || !code || !kernels) {
    return ffi::Unexpected(
        Invalid("needs the attributes plan (int64[]), code (uint8[]) and kernels (string)"));
  }
  auto state = std::make_unique<LaunchState>();
  std::string_view images(reinterpret_cast<const char*>(code->begin()), code->size());
  const auto none = ffi::Span<const int64_t>();
  if (ffi::Error error = Prepare(*words, images, sizes ? *sizes : none, *kernels, state.get());
      error.failure())
    return ffi::Unexpected(error);
  return state;
}

// The limit of dynamic shared memory is an attribute of a kernel on a device. Plans that share a kernel may
// need different amounts, so the limit is only ever raised.
CUresult AllowSharedBytes(const Driver& driver, CUkernel kernel, CUdevice device, int bytes) {
  static std::mutex& mutex = *new std::mutex;
  static auto& allowed = *new std::map<std::pair<CUkernel, CUdevice>, int>;
  std::lock_guard<std::mutex> lock(mutex);
  int& limit = allowed[{kernel, device}];
  if (bytes <= limit) return kCudaSuccess;
  CUresult r = driver.kernel_set_attribute(kFuncAttributeMaxDynamicSharedSizeBytes, bytes, kernel, device);
  if (r == kCudaSuccess) limit = bytes;
  return r;
}

// Sets shared memory and cluster limits, once for each call site and device.
CUresult PrepareDevice(LaunchState& state) {
  CUdevice device;
  if (CUresult r = state.driver->get_current_device(&device)) return r;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (state.prepared_devices.load(std::memory_order_acquire) & bit) return kCudaSuccess;
  for (size_t i = 0; i < state.kernels.size(); ++i) {
    const LaunchSpec& launch = state.plan.launches[i];
    if (CUresult r = AllowSharedBytes(*state.driver, state.kernels[i], device,
                                      static_cast<int>(launch.shared_bytes))) {
      return r;
    }
    if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 8) {
      if (CUresult r = state.driver->kernel_set_attribute(kFuncAttributeNonPortableClusterSizeAllowed, 1,
                                                          state.kernels[i], device)) {
        return r;
      }
    }
  }
  state.prepared_devices.fetch_or(bit, std::memory_order_release);
  return kCudaSuccess;
}

CUresult Launch(const LaunchState& state, size_t which, CUstream stream, const std::vector<void*>& buffers,
                std::vector<CUtensorMap>& maps) {
  const LaunchSpec& spec = state.plan.launches[which];
  std::vector<void*> pointers(spec.params.size());
  std::vector<void*> params(spec.params.size());
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const ParamSpec& param = spec.params[i];
    switch (param.kind) {
      case ParamSpec::kPointer:
        pointers[i] = static_cast<char*>(buffers[param.index]) + param.offset;
        params[i] = &pointers[i];
        break;
      case ParamSpec::kTensorMap:
        params[i] = &maps[param.index];
        break;
      case ParamSpec::kBytes:
        params[i] = const_cast<uint64_t*>(param.bytes.data());
        break;
    }
  }
  CUlaunchAttribute attrs[2] = {};
  unsigned num_attrs = 0;
  if (spec.cluster[0] * spec.cluster[1] * spec.cluster[2] > 1) {
    CUlaunchAttribute& attr = attrs[num_attrs++];
    attr.id = kLaunchAttributeClusterDimension;
    for (int i = 0; i < 3; ++i) attr.value.cluster[i] = spec.cluster[i];
  }
  if (spec.programmatic) {
    CUlaunchAttribute& attr = attrs[num_attrs++];
    attr.id = kLaunchAttributeProgrammaticStreamSerialization;
    attr.value.programmatic_stream_serialization = 1;
  }
  CUlaunchConfig config = {{spec.grid[0], spec.grid[1], spec.grid[2]},
                           {spec.block[0], spec.block[1], spec.block[2]},
                           spec.shared_bytes,
                           stream,
                           attrs,
                           num_attrs};
  return state.driver->launch_kernel(&config, state.kernels[which], params.data(), nullptr);
}

// This is on the hot path: XLA records a graph again whenever a buffer moves. It neither allocates device
// memory nor waits.
ffi::Error Execute(CUstream stream, LaunchState* state, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  ++g_executed;
  if (!state->driver) {
    std::string why;
    Driver::Get(&why);
    return ffi::Error::Internal("jax_splitk_launch: " + why);
  }
  const Driver& driver = *state->driver;
  int capturing = 0;
  if (driver.stream_is_capturing(stream, &capturing) == kCudaSuccess && capturing) ++g_captured;

  std::vector<void*> buffers;
  std::vector<size_t> sizes;
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg) return arg.error();
    buffers.push_back(arg->untyped_data());
    sizes.push_back(arg->size_bytes());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto ret = rets.get<ffi::AnyBuffer>(i);
    if (!ret) return ret.error();
    buffers.push_back((*ret)->untyped_data());
    sizes.push_back((*ret)->size_bytes());
  }
  const std::string why = BuffersRefusal(state->plan, buffers, sizes);
  if (!why.empty()) return Invalid(why);
  if (CUresult r = PrepareDevice(*state)) return CudaError(driver, "cannot set kernel attributes", r);

  std::vector<CUtensorMap> maps(state->plan.maps.size());
  for (size_t i = 0; i < maps.size(); ++i) {
    const TensorMapSpec& spec = state->plan.maps[i];
    if (CUresult r = EncodeTensorMap(driver, spec, buffers[spec.buffer], &maps[i])) {
      return CudaError(driver, "cannot encode tensor map " + std::to_string(i), r);
    }
  }
  for (size_t i = 0; i < state->kernels.size(); ++i) {
    if (CUresult r = Launch(*state, i, stream, buffers, maps)) {
      return CudaError(driver, "cannot launch '" + state->plan.kernels[state->plan.launches[i].kernel] + "'",
                       r);
    }
  }
  return ffi::Error::Success();
}

constexpr XLA_FFI_TypeInfo kStateTypeInfo = ffi::MakeTypeInfo<LaunchState>();

}  // namespace

// Attributes are read as a dictionary, so that a call may carry further attributes for readers of HLO (the
// config).
XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Ctx<ffi::State<LaunchState>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_TypeId* LaunchStateTypeId() { return reinterpret_cast<XLA_FFI_TypeId*>(&LaunchState::id); }
const XLA_FFI_TypeInfo* LaunchStateTypeInfo() { return &kStateTypeInfo; }

std::string LaunchRefusal(const std::vector<int64_t>& plan, std::string_view code,
                          const std::vector<int64_t>& sizes, std::string_view kernels) {
  LaunchState state;
  const ffi::Error error =
      Prepare({plan.data(), plan.size()}, code, {sizes.data(), sizes.size()}, kernels, &state);
  return error.failure() ? error.message() : "";
}

LaunchCounts GetLaunchCounts() { return {g_instantiated, g_loaded, g_executed, g_captured}; }

}  // namespace jax_splitk
