// The host grouped product with a stack of packed weights: out[r, :] = x[r, :] @ weight[g] for each row r of
// a group g. Weights of groups without rows are not decoded.

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
using Groups = ffi::BufferR4<ffi::F32>;
using Integers = ffi::BufferR1<ffi::S32>;

constexpr int64_t kMaxRowBlock = 1024;  // jax_splitk/kernels/cpu/experts.py has the same

struct Experts : GroupedRows {
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
  return ffi::Error::InvalidArgument("jax_splitk host quantized_ragged_dot: " + why);
}

ffi::Error HostQuantizedRaggedDot(ffi::ThreadPool pool, Matrix x, ffi::BufferR4<ffi::U32> words, Groups scale,
                                  ffi::RemainingArgs more, ffi::Result<Matrix> out,
                                  ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Span<const float> values,
                                  bool has_zero, bool has_channel, int64_t group_size, int64_t splits,
                                  int64_t row_block) {
  Experts call{};
  PackedTiles& weight = call.weight;
  call.rows = x.dimensions()[0];
  call.k = weight.k = x.dimensions()[1];
  call.columns = weight.columns = out->dimensions()[1];
  call.groups = call.span = 1;
  call.splits = splits;
  call.grain = call.depth = kTileSide;
  call.row_block = row_block;
  const int64_t groups = call.more_blocks = words.dimensions()[0];
  weight.bits = values.size() == 16 ? 4 : 8;
  weight.group_size = group_size;
  weight.values = values.begin();
  const size_t leaves = size_t{has_zero} + has_channel;
  if (more.size() < 1 + leaves || more.size() > 2 + leaves)
    return Refuse(
        "further operands must be zero points and channel scales, if the weights have them, "
        "group_sizes and group_offset");
  auto zero = has_zero ? more.get<Groups>(0) : ffi::ErrorOr<Groups>(scale);
  auto channel = has_channel ? more.get<Groups>(has_zero) : ffi::ErrorOr<Groups>(scale);
  auto sizes = more.get<Integers>(leaves);
  int64_t first = 0;
  if (zero.has_error() || channel.has_error() || sizes.has_error())
    return Refuse("zero points and channel scales must be of F32, group_sizes of S32");
  if (more.size() > 1 + leaves) {
    auto offset = more.get<Integers>(1 + leaves);
    if (offset.has_error() || offset->dimensions()[0] != 1) return Refuse("group_offset must be one S32");
    first = offset->typed_data()[0];
  }
  std::string why = weight.Refusal(values.size());
  if (why.empty() && (row_block < 1 || row_block > kMaxRowBlock))
    why = Text("row_block = ", row_block, " must lie within 1..", kMaxRowBlock);
  if (!why.empty()) return Refuse(why);
  const std::initializer_list<int64_t> of_groups = {groups, weight.column_tiles(), weight.groups_of_k(),
                                                    kTileSide};
  if (out->dimensions()[0] != call.rows ||
      !Is(words.dimensions(), {groups, weight.column_tiles(), weight.k_tiles(), weight.tile_words()}) ||
      !Is(scale.dimensions(), of_groups) || !Is(zero->dimensions(), of_groups) ||
      (has_channel && !Is(channel->dimensions(), {groups, weight.column_tiles(), 1, kTileSide}))) {
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
  call.FindRows(sizes->typed_data(), sizes->dimensions()[0], first, groups);
  // Decoding a weight costs about as much as multiplying it with 8 rows.
  Run(pool, call, 2.0 * (call.RowsOfAll() + 8.0 * call.blocks.size()) * call.k * call.columns);
  call.ClearOtherRows();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostQuantizedRaggedDot, jax_splitk::HostQuantizedRaggedDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jax_splitk::Matrix>()
                                  .Arg<xla::ffi::BufferR4<xla::ffi::U32>>()
                                  .Arg<jax_splitk::Groups>()
                                  .RemainingArgs()
                                  .Ret<jax_splitk::Matrix>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<xla::ffi::Span<const float>>("values")
                                  .Attr<bool>("has_zero")
                                  .Attr<bool>("has_channel")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("row_block"));
