// The work of out[row, f] = sum over k of x[row, k] * weight[k, f] on XLA's threads, for a packed weight.
//
// A task is (split of k, block of rows, tile of 64 features). It walks its split's tiles of 64 k: each is
// decoded to floats in the thread's own slot of the workspace and multiplied with its rows of x, whose sums
// stay in the slot. With one split the sums are the result; otherwise they go to the split's own f32 partial
// result in the workspace. What lies beyond k is not read.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "host.h"
#include "host_decode.h"
#include "host_split.h"
#include "host_types.h"

namespace jax_splitk {
namespace {

// Of the workspace formula; jax_splitk/kernels/quantized/host.py has the same.
constexpr int64_t kChunk = 24;  // rows of x that are floats at a time
constexpr int64_t kMaxRowBlock = 1024;

using Dims = ffi::AnyBuffer::Dimensions;

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

// Everything one call's tasks need.
struct Call : SplitCall {
  Shape shape;
  Format format;
  ffi::DataType x_type, scale_type, zero_type;
  const void *x, *scale, *zero;  // zero: null for none
  const uint32_t* words;
  int64_t row_block, row_blocks, tasks;

  int64_t tile_words() const { return kTileSide * kTileSide * FormatBits(format) / 32; }
};

// How the work is cut and the size of everything in the workspace (twin: _layout in
// jax_splitk/kernels/quantized/host.py).
void SetLayout(Call* call) {
  const Shape& shape = call->shape;
  call->row_blocks = CeilDiv(shape.rows, call->row_block);
  call->tasks = call->splits * call->row_blocks * shape.feature_tiles();
  call->slots = std::min(call->tasks, kMaxSlots);
  call->partial_bytes = call->splits == 1 ? 0 : AlignUp(4 * shape.rows * shape.features);
  call->slot_bytes = sizeof(Slot) + 4 * kTileSide * std::min(call->row_block, shape.rows);
}

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

// One group of the tile of features: scales or zero points.
JAX_SPLITK_INLINE void LoadGroupOf(ffi::DataType type, const void* data, int64_t group, float* to) {
  WithType<float, Bf16, F16>(type, [&](auto zero) JAX_SPLITK_LAMBDA {
    LoadGroup(static_cast<const decltype(zero)*>(data) + group * kTileSide, to);
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
  const uint32_t* words = call.words + (feature_tile * shape.k_tiles() + k_tile) * call.tile_words();
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

JAX_SPLITK_INLINE void RunTask(const Call& call, int64_t task, char* scratch) {
  const Shape& shape = call.shape;
  const int64_t feature_tile = task % shape.feature_tiles(), rest = task / shape.feature_tiles();
  const int64_t split = rest / call.row_blocks, row0 = rest % call.row_blocks * call.row_block;
  const int64_t rows = std::min(call.row_block, shape.rows - row0), tiles = shape.k_tiles();
  auto* slot = reinterpret_cast<Slot*>(scratch);
  auto* sums = slot->sums();
  std::fill_n(sums[0], rows * kTileSide, 0.0f);
  for (int64_t k_tile = split * tiles / call.splits; k_tile < (split + 1) * tiles / call.splits; ++k_tile) {
    const int64_t k0 = k_tile * kTileSide, depth = std::min(kTileSide, shape.k - k0);
    Decode(call, feature_tile, k_tile, slot->tile[0]);
    for (int64_t row = 0; row < rows; row += kChunk) {
      const int64_t count = std::min(kChunk, rows - row);
      WithType<Bf16, F16, E4m3>(call.x_type, [&](auto zero) JAX_SPLITK_LAMBDA {
        LoadRows<decltype(zero)>(call, row0 + row, count, k0, depth, slot->x);
      });
      Multiply(slot->x, slot->tile, depth, count, sums + row);
    }
  }
  const int64_t f0 = feature_tile * kTileSide, columns = std::min(kTileSide, shape.features - f0);
  const int64_t offset = row0 * shape.features + f0;
  if (call.splits > 1) return Store(sums, rows, columns, shape.features, call.Partial(split) + offset);
  WithType<float, Bf16, F16>(call.out_type, [&](auto zero) JAX_SPLITK_LAMBDA {
    Store(sums, rows, columns, shape.features, static_cast<decltype(zero)*>(call.out) + offset);
  });
}

// ---- what XLA hands over, checked

bool Is(Dims dimensions, std::initializer_list<int64_t> expected) {
  return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
}

std::string TypesRefusal(const Call& call, ffi::DataType words, ffi::DataType workspace) {
  const bool x = call.x_type == ffi::BF16 || call.x_type == ffi::F16 || call.x_type == ffi::F8E4M3FN;
  if (x && words == ffi::U32 && IsFloat(call.scale_type) && IsFloat(call.zero_type) &&
      IsFloat(call.out_type) && workspace == ffi::U8) {
    return "";
  }
  return Text("element types x ", call.x_type, ", words ", words, ", scale ", call.scale_type,
              ", zero points ", call.zero_type, ", out ", call.out_type, ", workspace ", workspace,
              "; accepted: x of BF16, F16 or F8E4M3FN, words of U32, workspace of U8, the others of F32, "
              "BF16 or F16");
}

std::string NumbersRefusal(const Call& call) {
  const int64_t group = call.shape.group_size, k = call.shape.k, block = call.row_block;
  if (k < 1 || (group != 32 && group != 64 && group != 128 && group != k) || k % group != 0)
    return Text("group_size = ", group, " must be 32, 64 or 128 and divide k = ", k, ", or be k");
  if (block < 1 || block > kMaxRowBlock)
    return Text("row_block = ", block, " must lie within 1..", kMaxRowBlock);
  return SplitsRefusal(call, std::min(call.shape.k_tiles(), kMaxSplits), "k = ", k);
}

std::string ShapesRefusal(const Call& call, Dims x, Dims words, Dims scale, Dims zero, Dims out) {
  const Shape& shape = call.shape;
  const std::initializer_list<int64_t> groups = {shape.feature_tiles(), shape.groups(), kTileSide};
  if (out[0] == shape.rows && Is(words, {shape.feature_tiles(), shape.k_tiles(), call.tile_words()}) &&
      Is(scale, groups) && Is(zero, groups)) {
    return "";
  }
  return Text("x ", List(x), ", words ", List(words), ", scale ", List(scale), ", zero points ", List(zero),
              " and out ", List(out), " do not fit for groups of ", shape.group_size);
}

ffi::Error Refuse(const std::string& why) {
  return ffi::Error::InvalidArgument("jax_splitk host quantized_matmul: " + why);
}

ffi::Error HostQuantizedMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer words,
                               ffi::AnyBuffer scale, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> workspace, std::string_view qtype,
                               int64_t group_size, int64_t splits, int64_t row_block) {
  Call call{};
  call.x_type = x.element_type();
  call.scale_type = call.zero_type = scale.element_type();
  call.out_type = out->element_type();
  call.splits = splits;
  call.row_block = row_block;
  Dims zero_shape = scale.dimensions();
  if (more.size() > 0) {
    auto zero = more.get<ffi::AnyBuffer>(0);
    if (zero.has_error() || more.size() > 1) return Refuse("more than four operands");
    call.zero = zero->untyped_data();
    call.zero_type = zero->element_type();
    zero_shape = zero->dimensions();
  }
  const auto* name = std::find(std::begin(kFormatNames), std::end(kFormatNames), qtype);
  if (name == std::end(kFormatNames))
    return Refuse(Text("qtype = ", qtype, " is not one of the six formats"));
  call.format = static_cast<Format>(name - std::begin(kFormatNames));
  const Dims x_shape = x.dimensions(), out_shape = out->dimensions();
  if (x_shape.size() != 2 || out_shape.size() != 2)
    return Refuse(
        Text("x ", List(x_shape), " and out ", List(out_shape), " must be [rows, k] and [rows, features]"));
  call.shape = {x_shape[0], x_shape[1], out_shape[1], group_size};
  std::string why = TypesRefusal(call, words.element_type(), workspace->element_type());
  if (why.empty()) why = NumbersRefusal(call);
  if (why.empty())
    why = ShapesRefusal(call, x_shape, words.dimensions(), scale.dimensions(), zero_shape, out_shape);
  if (why.empty()) {
    SetLayout(&call);
    why = WorkspaceRefusal(call, *workspace);
  }
  if (!why.empty()) return Refuse(why);
  if (out->element_count() == 0) return ffi::Error::Success();
  call.x = x.untyped_data();
  call.words = static_cast<const uint32_t*>(words.untyped_data());
  call.scale = scale.untyped_data();
  call.SetResults(*out, *workspace);
  // Decoding a weight costs about as much as multiplying it with 8 rows.
  RunSplits(pool, call, ForThisCpu<Call, RunTask>(), call.tasks, call.shape.rows * call.shape.features,
            2.0 * (call.shape.rows + 8) * call.shape.k * call.shape.features);
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
