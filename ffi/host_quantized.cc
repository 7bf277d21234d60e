// Host products with packed weights: out[r, :] = x[r, :] @ weight[g] for each row r of a group g. A single
// weight has all rows. Each task decodes the tiles of 64 k by 64 features that it multiplies to floats.
// Weights of groups without rows are not decoded.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host.h"
#include "host_groups.h"
#include "host_packed.h"
#include "host_product.h"

namespace jax_splitk {
namespace {

using Matrix = ffi::BufferR2<ffi::F32>;
using Words = ffi::Buffer<ffi::U32>;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::BufferR1<ffi::S32>;

constexpr int64_t kMaxRowBlock = 1024;  // jax_splitk/kernels/cpu/quantized.py has the same

struct Quantized : GroupedRows {
  static constexpr bool kFixedDepth = true;

  const float* x;
  PackedTiles weight;

  JAX_SPLITK_INLINE Piece PieceOf(int64_t task) const { return PieceOfRows(task); }

  JAX_SPLITK_INLINE Rows LoadRows(int64_t, int64_t row, int64_t, int64_t k0, int64_t, float*) const {
    return {x + row * k + k0, k, 1};
  }

  JAX_SPLITK_INLINE void LoadTile(int64_t group, int64_t feature, int64_t, int64_t k0, int64_t,
                                  float* tile) const {
    weight.Load(group, feature, k0, tile);
  }
};

ffi::Error Refuse(const std::string& why) {
  return ffi::Error::InvalidArgument("jax_splitk host product with packed weights: " + why);
}

ffi::Error HostQuantized(ffi::ThreadPool pool, Matrix x, Words words, Floats scale, ffi::RemainingArgs more,
                         ffi::Result<Matrix> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                         ffi::Span<const float> values, bool has_zero, bool has_channel, int64_t group_size,
                         int64_t splits, int64_t row_block) {
  Quantized call{};
  PackedTiles& weight = call.weight;
  const bool stacked = words.dimensions().size() == 4;
  const int64_t groups = stacked ? words.dimensions()[0] : 1;
  call.rows = x.dimensions()[0];
  call.k = weight.k = x.dimensions()[1];
  call.columns = weight.columns = out->dimensions()[1];
  call.groups = call.span = 1;
  call.splits = splits;
  call.grain = call.depth = kTileSide;
  call.row_block = row_block;
  call.more_blocks = stacked ? groups : 0;
  weight.bits = values.size() == 16 ? 4 : 8;
  weight.group_size = group_size;
  weight.values = values.begin();
  const size_t leaves = size_t{has_zero} + has_channel;
  if (more.size() < leaves + stacked || more.size() > leaves + 2 * stacked)
    return Refuse(Text(more.size(),
                       " operands after scale; accepted: zero points and channel scales, if the weights "
                       "have them, and, of a stack of weights, group_sizes and group_offset"));
  auto zero = has_zero ? more.get<Floats>(0) : ffi::ErrorOr<Floats>(scale);
  auto channel = has_channel ? more.get<Floats>(has_zero) : ffi::ErrorOr<Floats>(scale);
  if (zero.has_error() || channel.has_error()) return Refuse("zero points and channel scales must be of F32");
  const auto all_rows = static_cast<int32_t>(call.rows);
  const int32_t* sizes = &all_rows;
  int64_t total = 1, first = 0;
  if (stacked) {
    auto given = more.get<Integers>(leaves);
    if (given.has_error()) return Refuse("group_sizes must be of S32");
    sizes = given->typed_data();
    total = given->dimensions()[0];
  }
  if (more.size() > leaves + 1) {
    auto offset = more.get<Integers>(leaves + 1);
    if (offset.has_error() || offset->dimensions()[0] != 1) return Refuse("group_offset must be one S32");
    first = offset->typed_data()[0];
  }
  std::string why = weight.Refusal(values.size());
  if (why.empty() && (row_block < 1 || row_block > kMaxRowBlock))
    why = Text("row_block = ", row_block, " must lie within 1..", kMaxRowBlock);
  if (!why.empty()) return Refuse(why);
  // The dimensions of an array of the weights, with the stack's in front.
  const auto is = [&](ffi::AnyBuffer::Dimensions given, std::initializer_list<int64_t> of_one) {
    return given.size() == of_one.size() + stacked && (!stacked || given[0] == groups) &&
           std::equal(of_one.begin(), of_one.end(), given.begin() + stacked);
  };
  const std::initializer_list<int64_t> of_groups = {weight.column_tiles(), weight.groups_of_k(), kTileSide};
  if (out->dimensions()[0] != call.rows ||
      !is(words.dimensions(), {weight.column_tiles(), weight.k_tiles(), weight.tile_words()}) ||
      !is(scale.dimensions(), of_groups) || !is(zero->dimensions(), of_groups) ||
      (has_channel && !is(channel->dimensions(), {weight.column_tiles(), 1, kTileSide}))) {
    return Refuse(Text("x ", List(x.dimensions()), ", words ", List(words.dimensions()), ", scale ",
                       List(scale.dimensions()), ", zero points ", List(zero->dimensions()),
                       ", channel scales ", List(channel->dimensions()), " and out ", List(out->dimensions()),
                       " do not fit for groups of ", group_size));
  }
  if (!(why = SetResults(&call, out->typed_data(), workspace)).empty()) return Refuse(why);
  call.x = x.typed_data();
  weight.words = words.typed_data();
  weight.scale = scale.typed_data();
  weight.zero = has_zero ? zero->typed_data() : nullptr;
  weight.channel = has_channel ? channel->typed_data() : nullptr;
  call.FindRows(sizes, total, first, groups);
  // Decoding a weight costs about as much as multiplying it with 8 rows.
  Run(pool, call, 2.0 * (call.RowsOfAll() + 8.0 * call.blocks.size()) * call.k * call.columns);
  call.ClearOtherRows();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostQuantized, jax_splitk::HostQuantized,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jax_splitk::Matrix>()
                                  .Arg<jax_splitk::Words>()
                                  .Arg<jax_splitk::Floats>()
                                  .RemainingArgs()
                                  .Ret<jax_splitk::Matrix>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<xla::ffi::Span<const float>>("values")
                                  .Attr<bool>("has_zero")
                                  .Attr<bool>("has_channel")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("row_block"));
