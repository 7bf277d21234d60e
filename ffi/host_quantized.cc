// The host product out[row, feature] = sum over k of x[row, k] * weight[k, feature] for a packed weight. Each
// task decodes the tiles of 64 k by 64 features that it multiplies to floats.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "host.h"
#include "host_packed.h"
#include "host_product.h"

namespace jax_splitk {
namespace {

using Matrix = ffi::BufferR2<ffi::F32>;
using Groups = ffi::BufferR3<ffi::F32>;
using Dims = ffi::AnyBuffer::Dimensions;

constexpr int64_t kMaxRowBlock = 1024;  // jax_splitk/kernels/quantized/host.py has the same

struct Quantized : Product {
  static constexpr bool kFixedDepth = true;

  const float* x;
  PackedTiles weight;

  JAX_SPLITK_INLINE Rows LoadRows(int64_t, int64_t row, int64_t, int64_t k0, int64_t, float*) const {
    return {x + row * k + k0, k, 1};
  }

  JAX_SPLITK_INLINE void LoadTile(int64_t, int64_t feature, int64_t, int64_t k0, int64_t, float* tile) const {
    weight.Load(0, feature, k0, tile);
  }
};

std::string ShapesRefusal(const Quantized& call, Dims words, Dims scale, Dims zero, const Dims* channel,
                          Dims out) {
  const PackedTiles& weight = call.weight;
  const std::initializer_list<int64_t> groups = {weight.column_tiles(), weight.groups_of_k(), kTileSide};
  if (out[0] == call.rows && Is(words, {weight.column_tiles(), weight.k_tiles(), weight.tile_words()}) &&
      Is(scale, groups) && Is(zero, groups) &&
      (channel == nullptr || Is(*channel, {weight.column_tiles(), 1, kTileSide}))) {
    return "";
  }
  return Text("x ", List(std::initializer_list<int64_t>{call.rows, call.k}), ", words ", List(words),
              ", scale ", List(scale), ", zero points ", List(zero), ", ",
              channel == nullptr ? "no channel scales" : "channel scales " + List(*channel), " and out ",
              List(out), " do not fit for groups of ", weight.group_size);
}

ffi::Error Refuse(const std::string& why) {
  return ffi::Error::InvalidArgument("jax_splitk host quantized_matmul: " + why);
}

ffi::Error HostQuantizedMatmul(ffi::ThreadPool pool, Matrix x, ffi::BufferR3<ffi::U32> words, Groups scale,
                               ffi::RemainingArgs more, ffi::Result<Matrix> out,
                               ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Span<const float> values,
                               int64_t group_size, int64_t splits, int64_t row_block, int64_t channels) {
  Quantized call{};
  Dims zero_shape = scale.dimensions();
  std::optional<Dims> channel_shape;
  // Zero points, then channel scales, if the weight has them.
  const bool has_channels = channels != 0;
  if (more.size() > 2 || more.size() < size_t{has_channels})
    return Refuse(Text(more.size(), " operands after scale; accepted: zero points, channel scales"));
  for (size_t i = 0; i < more.size(); ++i) {
    auto operand = more.get<Groups>(i);
    if (operand.has_error()) return Refuse("zero points and channel scales must be of F32");
    if (has_channels && i + 1 == more.size()) {
      call.weight.channel = operand->typed_data();
      channel_shape = operand->dimensions();
    } else if (call.weight.zero == nullptr) {
      call.weight.zero = operand->typed_data();
      zero_shape = operand->dimensions();
    } else {
      return Refuse("two operands of zero points; accepted: one");
    }
  }
  call.rows = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.columns = out->dimensions()[1];
  call.groups = call.span = 1;
  call.weight.k = call.k;
  call.weight.columns = call.columns;
  call.weight.bits = values.size() == 16 ? 4 : 8;
  call.weight.group_size = group_size;
  call.weight.values = values.begin();
  call.splits = splits;
  call.grain = call.depth = kTileSide;
  call.row_block = row_block;
  std::string why = call.weight.Refusal(values.size());
  if (why.empty() && (row_block < 1 || row_block > kMaxRowBlock))
    why = Text("row_block = ", row_block, " must lie within 1..", kMaxRowBlock);
  if (why.empty())
    why = ShapesRefusal(call, words.dimensions(), scale.dimensions(), zero_shape,
                        channel_shape ? &*channel_shape : nullptr, out->dimensions());
  if (why.empty()) why = SetResults(&call, out->typed_data(), workspace);
  if (!why.empty()) return Refuse(why);
  call.x = x.typed_data();
  call.weight.words = words.typed_data();
  call.weight.scale = scale.typed_data();
  // Decoding a weight costs about as much as multiplying it with 8 rows.
  Run(pool, call, 2.0 * (call.rows + 8) * call.k * call.columns);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostQuantizedMatmul, jax_splitk::HostQuantizedMatmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jax_splitk::Matrix>()
                                  .Arg<xla::ffi::BufferR3<xla::ffi::U32>>()
                                  .Arg<jax_splitk::Groups>()
                                  .RemainingArgs()
                                  .Ret<jax_splitk::Matrix>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<xla::ffi::Span<const float>>("values")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("row_block")
                                  .Attr<int64_t>("channels"));
