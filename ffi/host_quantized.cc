// The work of out[row, f] = sum over k of x[row, k] * weight[k, f] on XLA's threads, for a packed weight.
//
// A task is (split of k, block of rows, tile of 64 features). It walks its split's tiles of 64 k: each is
// decoded to floats in the thread's own slot of the workspace and multiplied with its rows of x, whose sums
// stay in the slot. With one split the sums are the result; otherwise they go to the split's own f32 partial
// result in the workspace, and a second parallel phase adds the partials in split order. What is added in
// which order depends on the configuration only, never on how many threads there are, so results are bitwise
// repeatable. What lies beyond k is not read.

#include "host_quantized.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "host_decode.h"
#include "host_parallel.h"
#include "host_reduce.h"
#include "host_types.h"

namespace jax_splitk {
namespace {

namespace ffi = xla::ffi;

// The constants of the workspace formula; jax_splitk/kernels/quantized_host.py has the same.
constexpr int64_t kChunk = 24;     // rows of x that are floats at a time
constexpr int64_t kMaxSlots = 64;  // most threads that work on one call
constexpr int64_t kAlign = 64;     // bytes
constexpr int64_t kMaxSplits = 256;
constexpr int64_t kMaxRowBlock = 1024;
constexpr int64_t kSumChunk = 16384;       // elements of the result per task of the second phase
constexpr int64_t kSerialFlops = 1000000;  // below this, waking a thread costs more than it brings

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, kAlign) * kAlign; }

// What is multiplied.
struct Shape {
  int64_t rows, k, features, group_size;

  int64_t k_tiles() const { return CeilDiv(k, kTileSide); }
  int64_t feature_tiles() const { return CeilDiv(features, kTileSide); }
  int64_t groups() const { return group_size == k ? 1 : k_tiles() * kTileSide / group_size; }
};

// A thread's scratch area; the sums of a task's rows follow it.
struct Slot {
  float tile[kTileSide][kTileSide];  // [k][feature]
  float x[kChunk][kTileSide];        // [row][k]

  float (*sums()) [kTileSide] { return reinterpret_cast<float (*)[kTileSide]>(this + 1); }
};

// How the work is cut and where everything lies in the workspace (twin: quantized_host._layout).
struct Layout {
  int64_t row_blocks;
  int64_t tasks;
  int64_t slots;
  int64_t partial_bytes;  // one split's partial result; 0 where the single one is the result itself
  int64_t slot_bytes;
  int64_t total_bytes;
};

Layout MakeLayout(const Shape& shape, int64_t splits, int64_t row_block) {
  Layout layout{};
  layout.row_blocks = CeilDiv(shape.rows, row_block);
  layout.tasks = splits * layout.row_blocks * shape.feature_tiles();
  layout.slots = std::min(layout.tasks, kMaxSlots);
  layout.partial_bytes = splits == 1 ? 0 : AlignUp(4 * shape.rows * shape.features);
  layout.slot_bytes = sizeof(Slot) + 4 * kTileSide * std::min(row_block, shape.rows);
  layout.total_bytes = kAlign + splits * layout.partial_bytes + layout.slots * layout.slot_bytes;
  return layout;
}

// Everything one call's tasks need.
struct Call {
  Shape shape;
  Layout layout;
  int64_t splits, row_block;
  Format format;
  ffi::DataType x_type, scale_type, zero_type, out_type;
  const void *x, *scale, *zero;  // zero: null for none
  const uint32_t* words;
  void* out;
  char* workspace;  // aligned

  float* Partial(int64_t split) const {
    return reinterpret_cast<float*>(workspace + split * layout.partial_bytes);
  }
  Slot* SlotOf(int64_t slot) const {
    return reinterpret_cast<Slot*>(workspace + splits * layout.partial_bytes + slot * layout.slot_bytes);
  }
};

// sums[rows][64] += x[rows][depth] * tile[depth][64], summed over k in order.
template <int rows, int vectors>
JAX_SPLITK_INLINE void MultiplyRows(const float (*x)[kTileSide], const float (*tile)[kTileSide],
                                    int64_t depth, float (*sums)[kTileSide]) {
  // Vectors are loaded and stored one by one: an array that memcpy has touched as a whole stays in memory.
  for (int64_t f = 0; f < kTileSide; f += vectors * kWidth) {
    Floats sum[rows][vectors], weight[vectors];
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; ++i) {
      Floats& value = sum[i / vectors][i % vectors];
      std::memcpy(&value, sums[i / vectors] + f + i % vectors * kWidth, sizeof(value));
    }
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) std::memcpy(&weight[v], tile[k] + f + v * kWidth, sizeof(weight[v]));
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[r][v] += x[r][k] * weight[v];
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; ++i) {
      const Floats& value = sum[i / vectors][i % vectors];
      std::memcpy(sums[i / vectors] + f + i % vectors * kWidth, &value, sizeof(value));
    }
  }
}

// The same for any number of rows, as many at a time as registers allow.
JAX_SPLITK_INLINE void Multiply(const float (*x)[kTileSide], const float (*tile)[kTileSide], int64_t depth,
                                int64_t rows, float (*sums)[kTileSide]) {
  for (; rows >= 6; rows -= 6, x += 6, sums += 6) MultiplyRows<6, 2>(x, tile, depth, sums);
  for (; rows >= 3; rows -= 3, x += 3, sums += 3) MultiplyRows<3, 4>(x, tile, depth, sums);
  for (; rows > 0; --rows, ++x, ++sums) MultiplyRows<1, 8>(x, tile, depth, sums);
}

// Calls body with a null pointer of the type that holds a float of `type`.
template <typename Body>
JAX_SPLITK_INLINE void WithFloatType(ffi::DataType type, Body body) {
  if (type == ffi::F32) return body(static_cast<const float*>(nullptr));
  if (type == ffi::BF16) return body(static_cast<const Bf16*>(nullptr));
  body(static_cast<const F16*>(nullptr));
}

// One group of the tile of features: scales or zero points.
JAX_SPLITK_INLINE void LoadGroupOf(ffi::DataType type, const void* data, int64_t group, float* to) {
  WithFloatType(type, [&](auto* null) JAX_SPLITK_LAMBDA {
    LoadGroup(static_cast<decltype(null)>(data) + group * kTileSide, to);
  });
}

JAX_SPLITK_INLINE void Decode(const Call& call, int64_t feature_tile, int64_t k_tile, float* tile) {
  const Shape& shape = call.shape;
  TileGroups scale, zero{};
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t k = k_tile * kTileSide + half * 32, first = feature_tile * shape.groups();
    const int64_t group = first + (shape.group_size == shape.k ? 0 : k / shape.group_size);
    LoadGroupOf(call.scale_type, call.scale, group, scale[half]);
    if (call.zero != nullptr) LoadGroupOf(call.zero_type, call.zero, group, zero[half]);
  }
  const int64_t tile_words = kTileSide * kTileSide * FormatBits(call.format) / 32;
  const uint32_t* words = call.words + (feature_tile * shape.k_tiles() + k_tile) * tile_words;
  switch (call.format) {
    case Format::kInt4:
      return DecodeTile<Format::kInt4>(words, scale, zero, tile);
    case Format::kUint4:
      return DecodeTile<Format::kUint4>(words, scale, zero, tile);
    case Format::kInt8:
      return DecodeTile<Format::kInt8>(words, scale, zero, tile);
    case Format::kE4m3:
      return DecodeTile<Format::kE4m3>(words, scale, zero, tile);
    case Format::kE2m1:
      return DecodeTile<Format::kE2m1>(words, scale, zero, tile);
    case Format::kNf4:
      return DecodeTile<Format::kNf4>(words, scale, zero, tile);
  }
}

// Rows of x from k0 on, `depth` wide, as floats.
template <typename X>
JAX_SPLITK_INLINE void LoadRows(const Call& call, int64_t row, int64_t count, int64_t k0, int64_t depth,
                                float (*to)[kTileSide]) {
  const X* x = static_cast<const X*>(call.x) + row * call.shape.k + k0;
  for (int64_t i = 0; i < count; ++i) ToFloats(x + i * call.shape.k, depth, to[i]);
}

// The sums of one block of rows go where they belong: to the split's partial result or rounded to the result.
template <typename T>
JAX_SPLITK_INLINE void Store(const float (*sums)[kTileSide], int64_t rows, int64_t columns, int64_t stride,
                             T* to) {
  for (int64_t row = 0; row < rows; ++row, to += stride) {
    for (int64_t i = 0; i < columns; ++i) FromFloat(sums[row][i], to + i);
  }
}

JAX_SPLITK_INLINE void RunTask(const Call& call, int64_t task, Slot* slot) {
  const Shape& shape = call.shape;
  const int64_t feature_tile = task % shape.feature_tiles(), rest = task / shape.feature_tiles();
  const int64_t split = rest / call.layout.row_blocks, row0 = rest % call.layout.row_blocks * call.row_block;
  const int64_t rows = std::min(call.row_block, shape.rows - row0), tiles = shape.k_tiles();
  auto* sums = slot->sums();
  std::fill_n(sums[0], rows * kTileSide, 0.0f);
  for (int64_t k_tile = split * tiles / call.splits; k_tile < (split + 1) * tiles / call.splits; ++k_tile) {
    const int64_t k0 = k_tile * kTileSide, depth = std::min(kTileSide, shape.k - k0);
    Decode(call, feature_tile, k_tile, slot->tile[0]);
    for (int64_t row = 0; row < rows; row += kChunk) {
      const int64_t count = std::min(kChunk, rows - row);
      if (call.x_type == ffi::BF16) {
        LoadRows<Bf16>(call, row0 + row, count, k0, depth, slot->x);
      } else if (call.x_type == ffi::F16) {
        LoadRows<F16>(call, row0 + row, count, k0, depth, slot->x);
      } else {
        LoadRows<E4m3>(call, row0 + row, count, k0, depth, slot->x);
      }
      Multiply(slot->x, slot->tile, depth, count, sums + row);
    }
  }
  const int64_t f0 = feature_tile * kTileSide, columns = std::min(kTileSide, shape.features - f0);
  const int64_t offset = row0 * shape.features + f0;
  if (call.splits > 1) return Store(sums, rows, columns, shape.features, call.Partial(split) + offset);
  WithFloatType(call.out_type, [&](auto* null) JAX_SPLITK_LAMBDA {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    Store(sums, rows, columns, shape.features, static_cast<Out*>(call.out) + offset);
  });
}

void RunTaskBaseline(const Call& call, int64_t task, Slot* slot) { RunTask(call, task, slot); }

#if defined(__x86_64__)
// The same once more for the CPUs of the last decade. Which of the two runs depends on the machine only.
__attribute__((target("avx2,fma"))) void RunTaskAvx2(const Call& call, int64_t task, Slot* slot) {
  RunTask(call, task, slot);
}

auto ChooseRunTask() {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return avx2 ? RunTaskAvx2 : RunTaskBaseline;
}
#else
auto ChooseRunTask() { return RunTaskBaseline; }
#endif

void Run(ffi::ThreadPool& pool, const Call& call) {
  const Shape& shape = call.shape;
  // Decoding a weight costs about as much as multiplying it with 8 rows.
  const bool serial = 2.0 * (shape.rows + 8) * shape.k * shape.features < kSerialFlops;
  const int64_t helpers = serial ? 0 : std::min(pool.num_threads(), call.layout.slots) - 1;
  auto* run = ChooseRunTask();
  ParallelFor(pool, helpers, call.layout.tasks,
              [&](int64_t task, int64_t slot) { run(call, task, call.SlotOf(slot)); });
  if (call.splits == 1) return;
  const int64_t size = shape.rows * shape.features;
  ParallelFor(pool, size * call.splits < kSerialFlops / 8 ? 0 : helpers, CeilDiv(size, kSumChunk),
              [&](int64_t task, int64_t) {
                auto* sum = call.out_type == ffi::F32    ? SumPartials<float, Call>
                            : call.out_type == ffi::BF16 ? SumPartials<Bf16, Call>
                                                         : SumPartials<F16, Call>;
                sum(call, task * kSumChunk, std::min((task + 1) * kSumChunk, size));
              });
}

// ---- what XLA hands over, checked
// --------------------------------------------------------------------------

ffi::Error Refuse(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_splitk host quantized_matmul: " + message);
}

bool IsFloat(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

std::string Text(const ffi::AnyBuffer::Dimensions& dimensions) {
  std::string text;
  for (int64_t size : dimensions) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

bool Is(const ffi::AnyBuffer::Dimensions& dimensions, std::initializer_list<int64_t> expected) {
  return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
}

ffi::Error CheckTypes(const Call& call, ffi::DataType words, ffi::DataType workspace) {
  const bool x = call.x_type == ffi::BF16 || call.x_type == ffi::F16 || call.x_type == ffi::F8E4M3FN;
  if (x && words == ffi::U32 && IsFloat(call.scale_type) && IsFloat(call.zero_type) &&
      IsFloat(call.out_type) && workspace == ffi::U8) {
    return ffi::Error::Success();
  }
  auto number = [](ffi::DataType type) { return std::to_string(static_cast<int>(type)); };
  return Refuse("element types (XLA numbers) x " + number(call.x_type) + ", words " + number(words) +
                ", scale " + number(call.scale_type) + ", zero points " + number(call.zero_type) + ", out " +
                number(call.out_type) + ", workspace " + number(workspace) +
                ": x must be BF16 16, F16 10 or F8E4M3FN 20, words U32 8, workspace U8 6, the others F32 11, "
                "BF16 16 or F16 10");
}

ffi::Error CheckNumbers(const Shape& shape, int64_t splits, int64_t row_block) {
  const int64_t group = shape.group_size;
  if (shape.k < 1 || (group != 32 && group != 64 && group != 128 && group != shape.k) ||
      shape.k % group != 0) {
    return Refuse("group_size = " + std::to_string(group) +
                  " must be 32, 64 or 128 and divide k = " + std::to_string(shape.k) + ", or be k");
  }
  const int64_t most = std::min(shape.k_tiles(), kMaxSplits);
  if (splits < 1 || splits > most) {
    return Refuse("splits = " + std::to_string(splits) + " must lie within 1.." + std::to_string(most) +
                  " for k = " + std::to_string(shape.k));
  }
  if (row_block < 1 || row_block > kMaxRowBlock) {
    return Refuse("row_block = " + std::to_string(row_block) + " must lie within 1.." +
                  std::to_string(kMaxRowBlock));
  }
  return ffi::Error::Success();
}

ffi::Error FindFormat(std::string_view qtype, Format* format) {
  const auto* end = std::end(kFormatNames);
  const auto* found = std::find(std::begin(kFormatNames), end, qtype);
  if (found == end) return Refuse("qtype = " + std::string(qtype) + " is not one of the six formats");
  *format = static_cast<Format>(found - std::begin(kFormatNames));
  return ffi::Error::Success();
}

ffi::Error HostQuantizedMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer words,
                               ffi::AnyBuffer scale, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> workspace, std::string_view qtype,
                               int64_t group_size, int64_t splits, int64_t row_block) {
  Call call{};
  call.x_type = x.element_type();
  call.scale_type = call.zero_type = scale.element_type();
  call.out_type = out->element_type();
  auto scale_shape = scale.dimensions(), zero_shape = scale_shape;
  if (more.size() > 0) {
    auto zero = more.get<ffi::AnyBuffer>(0);
    if (zero.has_error() || more.size() > 1) return Refuse("more than four operands");
    call.zero = zero->untyped_data();
    call.zero_type = zero->element_type();
    zero_shape = zero->dimensions();
  }
  auto error = CheckTypes(call, words.element_type(), workspace->element_type());
  if (error.success()) error = FindFormat(qtype, &call.format);
  if (error.failure()) return error;
  if (x.dimensions().size() != 2 || out->dimensions().size() != 2) {
    return Refuse("x " + Text(x.dimensions()) + " and out " + Text(out->dimensions()) +
                  " must be [rows, k] and [rows, features]");
  }
  Shape& shape = call.shape;
  shape = {x.dimensions()[0], x.dimensions()[1], out->dimensions()[1], group_size};
  error = CheckNumbers(shape, splits, row_block);
  if (error.failure()) return error;
  const int64_t tile_words = kTileSide * kTileSide * FormatBits(call.format) / 32;
  if (out->dimensions()[0] != shape.rows ||
      !Is(words.dimensions(), {shape.feature_tiles(), shape.k_tiles(), tile_words}) ||
      !Is(scale_shape, {shape.feature_tiles(), shape.groups(), kTileSide}) ||
      !Is(zero_shape, {shape.feature_tiles(), shape.groups(), kTileSide})) {
    return Refuse("x " + Text(x.dimensions()) + ", words " + Text(words.dimensions()) + ", scale " +
                  Text(scale_shape) + ", zero points " + Text(zero_shape) + " and out " +
                  Text(out->dimensions()) + " do not fit for groups of " + std::to_string(group_size));
  }
  call.layout = MakeLayout(shape, splits, row_block);
  const int64_t given = static_cast<int64_t>(workspace->size_bytes());
  if (given != call.layout.total_bytes) {
    return Refuse("workspace has " + std::to_string(given) + " bytes, expected " +
                  std::to_string(call.layout.total_bytes) + " for splits = " + std::to_string(splits) +
                  " and row_block = " + std::to_string(row_block));
  }
  if (out->element_count() == 0) return ffi::Error::Success();
  call.splits = splits;
  call.row_block = row_block;
  call.x = x.untyped_data();
  call.words = static_cast<const uint32_t*>(words.untyped_data());
  call.scale = scale.untyped_data();
  call.out = out->untyped_data();
  const auto base = reinterpret_cast<uintptr_t>(workspace->untyped_data());
  call.workspace = static_cast<char*>(workspace->untyped_data()) + (kAlign - base % kAlign) % kAlign;
  Run(pool, call);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostQuantizedMatmul, jax_splitk::HostQuantizedMatmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("qtype")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("row_block"));
