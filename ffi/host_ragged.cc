// The host grouped product, in both of its modes: forward, out[r, :] = lhs[r, :] @ rhs[g] for each row r of a
// group g, and rhs gradient, out[g] = the sum over the rows r of the group of lhs[r, :]^T @ rhs[r, :]. Rows
// of a group are neighbours. Only they are read, so that the work is that of one matrix for each row.

#include <algorithm>
#include <cstdint>
#include <string>

#include "host.h"
#include "host_groups.h"
#include "host_product.h"

namespace jax_splitk {
namespace {

using Matrix = ffi::BufferR2<ffi::F32>;
using Integers = ffi::BufferR1<ffi::S32>;

constexpr int64_t kMaxRowBlock = 1024;  // jax_splitk/kernels/ragged/host.py has the same
constexpr int64_t kDepth = 64;          // likewise

// A rhs gradient has a reduction of its own length for each group.
struct Ragged : GroupedRows {
  static constexpr bool kFixedDepth = true;

  bool forward, transposed;  // transposed: rhs is [groups, n, k]
  int64_t lhs_columns, rhs_columns;
  const float *lhs, *rhs;

  JAX_SPLITK_INLINE Piece PieceOf(int64_t task) const {
    if (forward) return PieceOfRows(task);
    const int64_t column = task % column_tiles() * kTileColumns, rest = task / column_tiles();
    const int64_t wide = std::min(kTileColumns, columns - column);
    const int64_t group = rest % groups, row = rest / groups % row_blocks() * row_block;
    const int64_t split = rest / groups / row_blocks();
    const Range part = Part(of_group[group], split);
    return {group,
            row,
            std::min(row_block, rows - row),
            column,
            wide,
            part.begin,
            part.end,
            Partial(split) + group * rows * columns + column,
            columns};
  }

  Range Part(Range whole, int64_t split) const {
    const int64_t length = whole.end - whole.begin;
    return {whole.begin + split * length / splits, whole.begin + (split + 1) * length / splits};
  }

  JAX_SPLITK_INLINE Rows LoadRows(int64_t, int64_t row, int64_t count, int64_t k0, int64_t depth,
                                  float* chunk) const {
    if (forward) return {lhs + row * lhs_columns + k0, lhs_columns, 1};
    const float* from = lhs + k0 * lhs_columns + row;
    for (int64_t i = 0; i < depth; ++i, from += lhs_columns) std::copy_n(from, count, chunk + i * kChunk);
    return {chunk, 1, kChunk};
  }

  JAX_SPLITK_INLINE void LoadTile(int64_t group, int64_t column, int64_t count, int64_t k0, int64_t depth,
                                  float* tile) const {
    const int64_t first = forward ? group * k * columns : 0;
    if (!forward || !transposed) {
      const float* from = rhs + first + k0 * columns + column;
      for (int64_t i = 0; i < depth; ++i, from += columns) std::copy_n(from, count, tile + i * kTileColumns);
      return;
    }
    const float* from = rhs + first + column * k + k0;
    for (int64_t i = 0; i < count; ++i, from += k)
      for (int64_t j = 0; j < depth; ++j) tile[j * kTileColumns + i] = from[j];
  }
};

ffi::Error Refuse(const std::string& why) {
  return ffi::Error::InvalidArgument("jax_splitk host ragged_dot: " + why);
}

std::string ShapesRefusal(const Ragged& call, const ffi::AnyBuffer& rhs, const ffi::AnyBuffer& out,
                          int64_t m) {
  const auto of_rhs = rhs.dimensions(), of_out = out.dimensions();
  const bool fits = call.forward ? of_rhs.size() == 3 && of_out.size() == 2 && of_out[0] == m &&
                                       of_rhs[call.transposed ? 2 : 1] == call.k
                                 : of_rhs.size() == 2 && of_out.size() == 3 && of_rhs[0] == m &&
                                       of_out[1] == call.rows && of_rhs[1] == call.columns;
  if (fits && rhs.element_type() == ffi::F32 && out.element_type() == ffi::F32) return "";
  return Text("lhs of ", m, " rows and ", call.lhs_columns, " columns, rhs ", List(of_rhs), " and out ",
              List(of_out), " do not fit, or are not of F32");
}

ffi::Error HostRaggedDot(ffi::ThreadPool pool, Matrix lhs, ffi::AnyBuffer rhs, Integers sizes,
                         ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> out,
                         ffi::Result<ffi::Buffer<ffi::U8>> workspace, bool forward, bool transposed,
                         int64_t splits, int64_t row_block) {
  Ragged call{};
  const int64_t m = lhs.dimensions()[0], total = sizes.dimensions()[0];
  int64_t first = 0;
  if (more.size() > 0) {
    auto offset = more.get<Integers>(0);
    if (offset.has_error() || more.size() > 1 || offset->dimensions()[0] != 1)
      return Refuse("group_offset must be the one further operand, of one S32");
    first = offset->typed_data()[0];
  }
  if (row_block < 1 || row_block > kMaxRowBlock)
    return Refuse(Text("row_block = ", row_block, " must lie within 1..", kMaxRowBlock));
  const auto of_rhs = rhs.dimensions(), of_out = out->dimensions();
  call.forward = forward;
  call.transposed = transposed;
  call.lhs_columns = lhs.dimensions()[1];
  call.columns = of_out.back();
  call.groups = forward ? 1 : of_out.front();
  call.rows = forward ? m : call.lhs_columns;
  call.k = forward ? call.lhs_columns : m;
  call.span = call.grain = 1;
  call.depth = kDepth;
  call.splits = splits;
  call.row_block = row_block;
  std::string why = ShapesRefusal(call, rhs, *out, m);
  const int64_t groups = forward ? of_rhs.front() : call.groups;
  call.more_blocks = forward ? groups : 0;
  if (why.empty()) why = SetResults(&call, static_cast<float*>(out->untyped_data()), workspace);
  if (!why.empty()) return Refuse(why);
  call.lhs = lhs.typed_data();
  call.rhs = static_cast<const float*>(rhs.untyped_data());
  if (forward) {
    call.FindRows(sizes.typed_data(), total, first, groups);
  } else {
    call.of_group = RowsOfGroups(sizes.typed_data(), total, first, groups, m);
  }
  Run(pool, call, 2.0 * call.RowsOfAll() * static_cast<double>(call.lhs_columns) * call.columns);
  if (forward) call.ClearOtherRows();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostRaggedDot, jax_splitk::HostRaggedDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jax_splitk::Matrix>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jax_splitk::Integers>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<bool>("forward")
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("row_block"));
