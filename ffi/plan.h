// The Plan of a custom call as the launcher reads it: launches, tensor maps and the buffers they expect. The
// encoding is the int64 word list written by jax_splitk/runtime/plan.py (its docstring has the grammar); both
// sides carry kPlanVersion.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"

namespace jax_splitk {

constexpr int64_t kPlanMagic = 0x4b50534a;  // "JSPK"
constexpr int64_t kPlanVersion = 2;
constexpr int kMaxTensorRank = 5;

struct BufferSpec {
  int64_t bytes;      // exactly the size that XLA must pass
  int64_t alignment;  // alignment of the address, a power of two
};

struct TensorMapSpec {
  bool im2col;
  int64_t buffer;
  int dtype;
  uint32_t rank;
  std::array<uint64_t, kMaxTensorRank> dims;
  std::array<uint64_t, kMaxTensorRank> strides;  // strides in bytes of dimensions 1..rank-1
  std::array<uint32_t, kMaxTensorRank> element_strides;
  std::array<uint32_t, kMaxTensorRank> box;      // tiled
  std::array<int, kMaxTensorRank> lower, upper;  // im2col: the corners in the rank-2 spatial dimensions
  uint32_t channels, pixels;                     // im2col
  int swizzle;
  int l2_promotion;
};

struct ParamSpec {
  enum Kind : int64_t { kPointer = 0, kTensorMap = 1, kBytes = 2 } kind;
  int64_t index;                // buffer or tensor map
  int64_t offset;               // kPointer: bytes into the buffer
  std::vector<uint64_t> bytes;  // kBytes: the value, in whole words

  size_t size() const {
    return kind == kPointer ? sizeof(void*) : kind == kTensorMap ? sizeof(CUtensorMap) : 8 * bytes.size();
  }
};

struct LaunchSpec {
  int64_t kernel;
  std::array<unsigned, 3> grid, block, cluster;
  unsigned shared_bytes;
  bool programmatic;  // may start before the previous launch of this plan has ended (it waits on the device)
  std::vector<ParamSpec> params;
};

struct Plan {
  std::vector<BufferSpec> buffers;
  std::vector<TensorMapSpec> maps;
  std::vector<LaunchSpec> launches;
  std::vector<std::string> kernels;
  std::vector<size_t> images;  // of each kernel: the number of the machine code that has it
};

// Sets *plan. Returns which numbers are wrong; empty if all are right. `kernels`: names with commas between
// them, and with a semicolon where those of the next machine code begin.
std::string ParsePlan(const int64_t* words, size_t count, std::string_view kernels, Plan* plan);

// How the buffers that XLA passed differ from the plan's; empty if they do not.
std::string BuffersRefusal(const Plan& plan, const std::vector<void*>& addresses,
                           const std::vector<size_t>& sizes);

CUresult EncodeTensorMap(const Driver& driver, const TensorMapSpec& spec, void* address, CUtensorMap* map);

}  // namespace jax_splitk
