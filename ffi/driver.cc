#include "driver.h"

#include <dlfcn.h>

namespace jax_splitk {
namespace {

struct Loaded {
  Driver driver{};
  std::string why;
};

template <typename F>
void Bind(void* library, const char* name, F& function, std::string& why) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function && why.empty())
    why = std::string("libcuda.so.1 has no ") + name + " (CUDA 12.3 or later is needed)";
}

Loaded Load() {
  Loaded out;
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    const char* error = dlerror();
    out.why = std::string("cannot open the CUDA driver: ") + (error ? error : "dlopen failed");
    return out;
  }
  Driver& d = out.driver;
  CUresult (*init)(unsigned flags) = nullptr;
  Bind(library, "cuInit", init, out.why);
  Bind(library, "cuGetErrorString", d.get_error_string, out.why);
  Bind(library, "cuCtxGetDevice", d.get_current_device, out.why);
  Bind(library, "cuLibraryLoadData", d.library_load_data, out.why);
  Bind(library, "cuLibraryUnload", d.library_unload, out.why);
  Bind(library, "cuLibraryGetKernel", d.library_get_kernel, out.why);
  Bind(library, "cuKernelSetAttribute", d.kernel_set_attribute, out.why);
  Bind(library, "cuLaunchKernelEx", d.launch_kernel, out.why);
  Bind(library, "cuStreamIsCapturing", d.stream_is_capturing, out.why);
  Bind(library, "cuStreamWaitValue32_v2", d.stream_wait_value, out.why);
  Bind(library, "cuEventCreate", d.event_create, out.why);
  Bind(library, "cuEventRecord", d.event_record, out.why);
  Bind(library, "cuEventElapsedTime", d.event_elapsed_time, out.why);
  Bind(library, "cuMemHostAlloc", d.mem_host_alloc, out.why);
  Bind(library, "cuTensorMapEncodeTiled", d.encode_tiled, out.why);
  Bind(library, "cuTensorMapEncodeIm2col", d.encode_im2col, out.why);
  std::string optional;
  Bind(library, "cuKernelGetParamInfo", d.kernel_get_param_info, optional);
  if (!out.why.empty()) return out;
  if (CUresult r = init(0)) out.why = "the CUDA driver cannot use a GPU: " + d.ErrorString(r);
  return out;
}

}  // namespace

const Driver* Driver::Get(std::string* why) {
  static const Loaded loaded = Load();
  if (!loaded.why.empty()) {
    if (why) *why = loaded.why;
    return nullptr;
  }
  return &loaded.driver;
}

std::string Driver::ErrorString(CUresult result) const {
  const char* text = nullptr;
  if (get_error_string(result, &text) != kCudaSuccess || !text) text = "unknown error";
  return std::string(text) + " (CUresult " + std::to_string(result) + ")";
}

}  // namespace jax_splitk
