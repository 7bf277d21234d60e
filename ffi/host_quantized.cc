// The host product out[row, feature] = sum over k of x[row, k] * weight[k, feature] for a packed weight. Each
// task decodes the tiles of 64 k by 64 features that it multiplies to floats.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "host.h"
#include "host_product.h"

namespace jax_splitk {
namespace {

using Matrix = ffi::BufferR2<ffi::F32>;
using Groups = ffi::BufferR3<ffi::F32>;
using Dims = ffi::AnyBuffer::Dimensions;

constexpr int64_t kTileSide = 64;       // features and k of a tile of the weight
constexpr int64_t kSteps = 4;           // of 16 k, the shortest group, of a tile
constexpr int64_t kMaxRowBlock = 1024;  // jax_splitk/kernels/quantized/host.py has the same

struct Quantized : Product {
  int64_t bits, group_size;
  // values: of each code; zero, channel: null if the weight has no zero points or channel scales
  const float *values, *x, *scale, *zero, *channel;
  const uint32_t* words;  // in the order of jax_splitk/quantized/packing.py

  int64_t k_tiles() const { return CeilDiv(k, kTileSide); }
  int64_t groups_of_k() const { return group_size == k ? 1 : k_tiles() * kTileSide / group_size; }
  int64_t tile_words() const { return kTileSide * kTileSide * bits / 32; }

  JAX_SPLITK_INLINE Rows LoadRows(int64_t, int64_t row, int64_t, int64_t k0, int64_t, float*) const {
    return {x + row * k + k0, k, 1};
  }

  JAX_SPLITK_INLINE void LoadTile(int64_t, int64_t feature, int64_t, int64_t k0, int64_t, float* tile) const {
    const int64_t feature_tile = feature / kTileSide;
    float scales[kSteps][kTileSide], zeros[kSteps][kTileSide] = {};  // [16 k of a tile][feature]
    for (int64_t step = 0; step < kSteps; ++step) {
      const int64_t group_of_k = group_size == k ? 0 : (k0 + step * 16) / group_size;
      const int64_t at = (feature_tile * groups_of_k() + group_of_k) * kTileSide;
      LoadGroup(scale + at, scales[step]);
      if (channel != nullptr) {
        float channels[kTileSide];
        LoadGroup(channel + feature_tile * kTileSide, channels);
        for (int64_t i = 0; i < kTileSide; ++i) scales[step][i] *= channels[i];
      }
      if (zero != nullptr) LoadGroup(zero + at, zeros[step]);
    }
    const uint32_t* from = words + (feature_tile * k_tiles() + k0 / kTileSide) * tile_words();
    if (bits == 4) return Decode<4>(from, scales, zeros, tile);
    Decode<8>(from, scales, zeros, tile);
  }

  // Packed groups lie in the order 16 block + 2 g + half for feature 16 block + 8 half + g.
  static JAX_SPLITK_INLINE void LoadGroup(const float* from, float* to) {
    for (int64_t i = 0; i < kTileSide; ++i) to[i / 16 * 16 + i % 2 * 8 + i / 2 % 8] = from[i];
  }

  // tile[k][feature] = (value - zero) * scale. The innermost loop is over the eight g of a lane index 4 g +
  // t, whose words lie 16 apart.
  template <int kBits>
  JAX_SPLITK_INLINE void Decode(const uint32_t* from, const float (&scales)[kSteps][kTileSide],
                                const float (&zeros)[kSteps][kTileSide], float* tile) const {
    // A row of words belongs to one g. 4-bit: [block][g][t, j]; 8-bit: [block][kh][g][t, kj, half].
    for (int64_t row = 0; row < (kBits == 4 ? 4 : 8); ++row, from += 128) {
      const int64_t block = kBits == 4 ? row : row / 2;
      for (int64_t column = 0; column < 16; ++column) {
        const int64_t t = column / 4;
        const int64_t step = kBits == 4 ? column % 4 : 2 * (row % 2) + column / 2 % 2;  // of 16 k
        for (int code = 0; code < 32 / kBits; ++code) {
          const int64_t half = kBits == 4 ? code % 2 : column % 2;
          const int64_t octet = kBits == 4 ? code / 2 % 2 : code % 2, e = kBits == 4 ? code / 4 : code / 2;
          const int64_t feature = 16 * block + 8 * half;
          float* __restrict to = tile + (16 * step + 8 * octet + 2 * t + e) * kTileSide + feature;
          const float *z = zeros[step] + feature, *s = scales[step] + feature;
          for (int g = 0; g < 8; ++g)
            to[g] = (values[from[16 * g + column] >> (kBits * code) & ((1u << kBits) - 1)] - z[g]) * s[g];
        }
      }
    }
  }
};

bool Is(Dims dimensions, std::initializer_list<int64_t> expected) {
  return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
}

std::string NumbersRefusal(const Quantized& call) {
  const int64_t group = call.group_size, k = call.k, block = call.row_block;
  if (k < 1 || (group != 16 && group != 32 && group != 64 && group != 128 && group != k) || k % group != 0)
    return Text("group_size = ", group, " must be 16, 32, 64 or 128 and divide k = ", k, ", or be k");
  if (block < 1 || block > kMaxRowBlock)
    return Text("row_block = ", block, " must lie within 1..", kMaxRowBlock);
  return "";
}

std::string ShapesRefusal(const Quantized& call, Dims words, Dims scale, Dims zero, const Dims* channel,
                          Dims out) {
  const std::initializer_list<int64_t> groups = {call.column_tiles(), call.groups_of_k(), kTileSide};
  if (out[0] == call.rows && Is(words, {call.column_tiles(), call.k_tiles(), call.tile_words()}) &&
      Is(scale, groups) && Is(zero, groups) &&
      (channel == nullptr || Is(*channel, {call.column_tiles(), 1, kTileSide}))) {
    return "";
  }
  return Text("x ", List(std::initializer_list<int64_t>{call.rows, call.k}), ", words ", List(words),
              ", scale ", List(scale), ", zero points ", List(zero), ", ",
              channel == nullptr ? "no channel scales" : "channel scales " + List(*channel), " and out ",
              List(out), " do not fit for groups of ", call.group_size);
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
      call.channel = operand->typed_data();
      channel_shape = operand->dimensions();
    } else if (call.zero == nullptr) {
      call.zero = operand->typed_data();
      zero_shape = operand->dimensions();
    } else {
      return Refuse("two operands of zero points; accepted: one");
    }
  }
  if (values.size() != 16 && values.size() != 256)
    return Refuse(Text("values of ", values.size(), " codes; accepted: 16 or 256"));
  call.values = values.begin();
  call.bits = values.size() == 16 ? 4 : 8;
  call.rows = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.columns = out->dimensions()[1];
  call.groups = call.span = 1;
  call.group_size = group_size;
  call.splits = splits;
  call.grain = call.depth = kTileSide;
  call.row_block = row_block;
  std::string why = NumbersRefusal(call);
  if (why.empty())
    why = ShapesRefusal(call, words.dimensions(), scale.dimensions(), zero_shape,
                        channel_shape ? &*channel_shape : nullptr, out->dimensions());
  if (why.empty()) why = SetResults(&call, out->typed_data(), workspace);
  if (!why.empty()) return Refuse(why);
  call.x = x.typed_data();
  call.words = words.typed_data();
  call.scale = scale.typed_data();
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
