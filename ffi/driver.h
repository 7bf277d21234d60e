// The part of CUDA's driver that the launcher uses, opened at run time so that this library needs no CUDA
// toolkit to build and imports on machines without a GPU. Declarations follow cuda.h of CUDA 12.3 and later
// (same ABI in 13).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_splitk {

using CUresult = int;
using CUdevice = int;
using CUstream = void*;
using CUevent = void*;
using CUlibrary = void*;
using CUkernel = void*;

constexpr CUresult kCudaSuccess = 0;
constexpr int kFuncAttributeMaxDynamicSharedSizeBytes = 8;
constexpr int kFuncAttributeNonPortableClusterSizeAllowed = 14;
constexpr int kLaunchAttributeClusterDimension = 4;
constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;

struct CUlaunchAttribute {
  int id;
  int pad;
  union {
    unsigned cluster[3];
    int programmatic_stream_serialization;
    char bytes[64];
  } value;
};

struct CUlaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attrs;
  unsigned num_attrs;
};

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

struct Driver {
  CUresult (*get_error_string)(CUresult, const char**);
  CUresult (*get_current_device)(CUdevice*);
  CUresult (*library_load_data)(CUlibrary*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  CUresult (*library_unload)(CUlibrary);
  CUresult (*library_get_kernel)(CUkernel*, CUlibrary, const char*);
  CUresult (*kernel_get_param_info)(CUkernel, size_t index, size_t* offset,
                                    size_t* size);  // null before 12.4
  CUresult (*kernel_set_attribute)(int attribute, int value, CUkernel, CUdevice);
  CUresult (*launch_kernel)(const CUlaunchConfig*, CUkernel, void** params, void** extra);
  CUresult (*stream_is_capturing)(CUstream, int* status);
  CUresult (*stream_wait_value)(CUstream, uint64_t address, uint32_t value, unsigned flags);
  CUresult (*event_create)(CUevent*, unsigned flags);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_elapsed_time)(float* milliseconds, CUevent start, CUevent end);
  CUresult (*mem_host_alloc)(void**, size_t bytes, unsigned flags);
  CUresult (*encode_tiled)(CUtensorMap*, int dtype, uint32_t rank, void*, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int l2_promotion, int oob_fill);
  CUresult (*encode_im2col)(CUtensorMap*, int dtype, uint32_t rank, void*, const uint64_t* dims,
                            const uint64_t* strides, const int* lower, const int* upper, uint32_t channels,
                            uint32_t pixels, const uint32_t* element_strides, int interleave, int swizzle,
                            int l2_promotion, int oob_fill);

  // This process's driver, which has a device; or null, with the reason in *why. Looked up once.
  static const Driver* Get(std::string* why);

  std::string ErrorString(CUresult result) const;
};

}  // namespace jax_splitk
