#include "plan.h"

#include "text.h"

namespace jax_splitk {
namespace {

// Reads words with range checks; after the first failure every read returns 0, and the message of the failure
// stays.
class Reader {
 public:
  Reader(const int64_t* words, size_t count) : words_(words), count_(count) {}

  int64_t Next(const char* what, int64_t lo, int64_t hi) {
    if (!error_.empty()) return 0;
    if (next_ == count_) {
      error_ = Text("plan ends before ", what, " (", count_, " words)");
      return 0;
    }
    int64_t value = words_[next_++];
    if (value < lo || value > hi) {
      error_ = Text(what, " is ", value, "; accepted: ", lo, " to ", hi);
      return 0;
    }
    return value;
  }

  bool ok() const { return error_.empty(); }
  bool AtEnd() const { return next_ == count_; }
  size_t position() const { return next_; }
  const std::string& error() const { return error_; }
  void Fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
  }

 private:
  const int64_t* words_;
  size_t count_;
  size_t next_ = 0;
  std::string error_;
};

constexpr int64_t kMaxBytes = int64_t{1} << 50;

BufferSpec ReadBuffer(Reader& in) {
  BufferSpec spec{in.Next("buffer bytes", 0, kMaxBytes), in.Next("buffer alignment", 1, 4096)};
  if (spec.alignment & (spec.alignment - 1)) {
    in.Fail(Text("buffer alignment is ", spec.alignment, "; accepted: powers of two"));
  }
  return spec;
}

TensorMapSpec ReadTensorMap(Reader& in, int64_t buffers) {
  TensorMapSpec spec{};
  spec.im2col = in.Next("tensor map kind", 0, 1) == 1;
  spec.buffer = in.Next("tensor map buffer", 0, buffers - 1);
  spec.dtype = static_cast<int>(in.Next("tensor map dtype", 0, 15));
  // The driver checks the limits of its encoder. This only checks that our arrays stay in bounds.
  spec.rank = static_cast<uint32_t>(in.Next("tensor map rank", spec.im2col ? 3 : 1, kMaxTensorRank));
  for (uint32_t i = 0; i < spec.rank; ++i)
    spec.dims[i] = in.Next("tensor map dimension", 1, int64_t{1} << 32);
  for (uint32_t i = 0; i + 1 < spec.rank; ++i)
    spec.strides[i] = in.Next("tensor map stride", 0, int64_t{1} << 40);
  for (uint32_t i = 0; i < spec.rank; ++i)
    spec.element_strides[i] = in.Next("tensor map element stride", 1, 8);
  if (spec.im2col) {
    for (uint32_t i = 0; i + 2 < spec.rank; ++i)
      spec.lower[i] = in.Next("im2col lower corner", -32768, 32767);
    for (uint32_t i = 0; i + 2 < spec.rank; ++i)
      spec.upper[i] = in.Next("im2col upper corner", -32768, 32767);
    spec.channels = in.Next("im2col channels", 1, 256);
    spec.pixels = in.Next("im2col pixels", 1, 1024);
  } else {
    for (uint32_t i = 0; i < spec.rank; ++i) spec.box[i] = in.Next("tensor map box", 1, 256);
  }
  spec.swizzle = static_cast<int>(in.Next("tensor map swizzle", 0, 6));
  spec.l2_promotion = static_cast<int>(in.Next("tensor map L2 promotion", 0, 3));
  return spec;
}

ParamSpec ReadParam(Reader& in, const std::vector<BufferSpec>& buffers, int64_t maps) {
  ParamSpec spec{};
  spec.kind = static_cast<ParamSpec::Kind>(in.Next("parameter kind", 0, 2));
  switch (spec.kind) {
    case ParamSpec::kPointer: {
      spec.index = in.Next("parameter buffer", 0, static_cast<int64_t>(buffers.size()) - 1);
      int64_t bytes = buffers.empty() ? 0 : buffers[spec.index].bytes;
      spec.offset = in.Next("parameter offset", 0, bytes);
      break;
    }
    case ParamSpec::kTensorMap:
      spec.index = in.Next("parameter tensor map", 0, maps - 1);
      break;
    case ParamSpec::kBytes: {
      int64_t words = in.Next("parameter words", 1, 512);
      for (int64_t i = 0; i < words && in.ok(); ++i)
        spec.bytes.push_back(in.Next("parameter value", INT64_MIN, INT64_MAX));
      break;
    }
  }
  return spec;
}

LaunchSpec ReadLaunch(Reader& in, const Plan& plan) {
  LaunchSpec spec{};
  spec.kernel = in.Next("launch kernel", 0, static_cast<int64_t>(plan.kernels.size()) - 1);
  for (int i = 0; i < 3; ++i) spec.grid[i] = in.Next("launch grid", 1, i == 0 ? 0x7fffffff : 65535);
  for (auto& x : spec.block) x = in.Next("launch block", 1, 1024);
  for (auto& x : spec.cluster) x = in.Next("launch cluster", 1, 16);
  spec.shared_bytes = in.Next("launch shared memory", 0, 227 * 1024);
  spec.programmatic = in.Next("launch programmatic", 0, 1) == 1;
  int64_t params = in.Next("launch parameters", 0, 64);
  for (int64_t i = 0; i < params && in.ok(); ++i) {
    spec.params.push_back(ReadParam(in, plan.buffers, static_cast<int64_t>(plan.maps.size())));
  }
  for (int i = 0; i < 3 && in.ok(); ++i) {
    if (spec.grid[i] % spec.cluster[i]) {
      in.Fail(Text("launch grid ", spec.grid[i], " is not a multiple of its cluster ", spec.cluster[i]));
    }
  }
  return spec;
}

void SplitNames(std::string_view names, Plan* plan) {
  for (size_t image = 0; !names.empty();) {
    const size_t end = names.find_first_of(",;");
    plan->kernels.emplace_back(names.substr(0, end));
    plan->images.push_back(image);
    if (end == std::string_view::npos) return;
    image += names[end] == ';';
    names = names.substr(end + 1);
  }
}

}  // namespace

std::string ParsePlan(const int64_t* words, size_t count, std::string_view kernels, Plan* plan) {
  Reader in(words, count);
  *plan = Plan{};
  SplitNames(kernels, plan);
  in.Next("plan magic", kPlanMagic, kPlanMagic);
  in.Next("plan version", kPlanVersion, kPlanVersion);
  int64_t buffers = in.Next("number of buffers", 1, 64);
  int64_t maps = in.Next("number of tensor maps", 0, 64);
  int64_t launches = in.Next("number of launches", 1, 64);
  for (int64_t i = 0; i < buffers && in.ok(); ++i) plan->buffers.push_back(ReadBuffer(in));
  for (int64_t i = 0; i < maps && in.ok(); ++i) plan->maps.push_back(ReadTensorMap(in, buffers));
  for (int64_t i = 0; i < launches && in.ok(); ++i) plan->launches.push_back(ReadLaunch(in, *plan));
  if (in.ok() && !in.AtEnd()) {
    in.Fail(Text("plan has ", count, " words; ", in.position(), " were expected"));
  }
  return in.error();
}

std::string BuffersRefusal(const Plan& plan, const std::vector<void*>& addresses,
                           const std::vector<size_t>& sizes) {
  if (addresses.size() != plan.buffers.size())
    return Text("the plan is for ", plan.buffers.size(), " buffers; the call has ", addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    const BufferSpec& spec = plan.buffers[i];
    if (static_cast<int64_t>(sizes[i]) != spec.bytes)
      return Text("buffer ", i, " has ", sizes[i], " bytes; the plan expects ", spec.bytes);
    if (reinterpret_cast<uintptr_t>(addresses[i]) % spec.alignment)
      return Text("buffer ", i, " is not aligned to the ", spec.alignment, " bytes the plan expects");
  }
  return "";
}

CUresult EncodeTensorMap(const Driver& driver, const TensorMapSpec& spec, void* address, CUtensorMap* map) {
  constexpr int kNoInterleave = 0, kFillZeros = 0;
  if (spec.im2col) {
    return driver.encode_im2col(map, spec.dtype, spec.rank, address, spec.dims.data(), spec.strides.data(),
                                spec.lower.data(), spec.upper.data(), spec.channels, spec.pixels,
                                spec.element_strides.data(), kNoInterleave, spec.swizzle, spec.l2_promotion,
                                kFillZeros);
  }
  return driver.encode_tiled(map, spec.dtype, spec.rank, address, spec.dims.data(), spec.strides.data(),
                             spec.box.data(), spec.element_strides.data(), kNoInterleave, spec.swizzle,
                             spec.l2_promotion, kFillZeros);
}

}  // namespace jax_splitk
