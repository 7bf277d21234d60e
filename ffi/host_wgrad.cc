// The host weight gradient: dW[m, f] = sum over output pixels of im2col(lhs)[pixel, m] * g[pixel, f], where m
// is (filter tap, input channel of the group).

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host.h"
#include "host_product.h"

namespace jax_splitk {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kRowBlock = 96;  // jax_splitk/kernels/wgrad/host.py has the same
constexpr int64_t kMinBlock = 8, kMaxBlock = 4096;

// A convolution with three spatial dimensions, leading ones of size 1: the attribute `geometry`, in its
// order. Numbers lie below 2^31, so that no product of two of them overflows.
struct Geometry {
  int64_t batch, in_channels, out_channels, in[3], out[3], kernel[3];  // at least 0
  int64_t groups, stride[3], lhs_dilation[3], rhs_dilation[3];         // at least 1
  int64_t pad_low[3];

  // Input coordinate that output position `at` meets at filter tap `tap`, or -1 if it meets padding or a
  // hole.
  int64_t Source(int dim, int64_t at, int64_t tap) const {
    const int64_t dilated = at * stride[dim] - pad_low[dim] + tap * rhs_dilation[dim];
    if (dilated < 0 || (lhs_dilation[dim] != 1 && dilated % lhs_dilation[dim] != 0)) return -1;
    const int64_t source = dilated / lhs_dilation[dim];
    return source < in[dim] ? source : -1;
  }
};
constexpr size_t kFirstPositive = 12, kFirstPad = 22, kNumbers = 25;
static_assert(sizeof(Geometry) == kNumbers * sizeof(int64_t));
constexpr int64_t kLargest = 2147483647;

// Of so few floats that a call of memcpy would take longer.
JAX_SPLITK_INLINE void CopyFew(const float* from, int64_t count, float* to) {
  for (; count >= 8; count -= 8, from += 8, to += 8) std::memcpy(to, from, 32);
  for (; count > 0; --count) *to++ = *from++;
}

struct Wgrad : Product {
  Geometry geo;
  const float *lhs, *g;

  JAX_SPLITK_INLINE void LoadTile(int64_t group, int64_t column, int64_t columns, int64_t pixel,
                                  int64_t depth, float* tile) const {
    const float* from = g + pixel * geo.out_channels + group * this->columns + column;
    for (int64_t i = 0; i < depth; ++i, from += geo.out_channels, tile += kTileColumns)
      std::copy_n(from, columns, tile);
  }

  JAX_SPLITK_INLINE Rows LoadRows(int64_t group, int64_t m, int64_t count, int64_t pixel, int64_t depth,
                                  float* chunk) const {
    const int64_t channels = geo.in_channels / groups;
    for (int64_t done = 0; done < count;) {
      const int64_t tap = (m + done) / channels, channel = (m + done) % channels;
      const int64_t width = std::min(channels - channel, count - done);
      LoadTap(tap, group * channels + channel, width, pixel, depth, chunk + done);
      done += width;
    }
    return {chunk, 1, kChunk};
  }

  // Of several of the convolution's groups in one: what input channels add to output channels of their own
  // group.
  Kept Keep(int64_t m, int64_t columns) const {
    if (span == 1) return {m, 0, columns};
    const int64_t channels = geo.in_channels / geo.groups, each = geo.out_channels / geo.groups;
    const int64_t tap = m / (span * channels), part = m / channels % span;
    return {tap * channels + m % channels, part * each, each};
  }

  // to[i][0:width] = what the pixels meet at the filter tap, from the channel on. Line by line of the output.
  JAX_SPLITK_INLINE void LoadTap(int64_t tap, int64_t channel, int64_t width, int64_t pixel, int64_t depth,
                                 float* to) const {
    const int64_t kw = tap % geo.kernel[2], kh = tap / geo.kernel[2] % geo.kernel[1];
    const int64_t kd = tap / geo.kernel[2] / geo.kernel[1];
    for (const int64_t end = pixel + depth; pixel < end;) {
      int64_t w = pixel % geo.out[2], line = pixel / geo.out[2];
      const int64_t h = geo.Source(1, line % geo.out[1], kh), image = line / geo.out[1];
      const int64_t d = geo.Source(0, image % geo.out[0], kd), n = image / geo.out[0];
      const int64_t start = ((n * geo.in[0] + d) * geo.in[1] + h) * geo.in[2];
      for (; w < geo.out[2] && pixel < end; ++w, ++pixel, to += kChunk) {
        const int64_t at = d < 0 || h < 0 ? -1 : geo.Source(2, w, kw);
        if (at < 0) {
          std::fill_n(to, width, 0.0f);
        } else {
          CopyFew(lhs + (start + at) * geo.in_channels + channel, width, to);
        }
      }
    }
  }
};

// The product of the sizes, -1 where it overflows.
int64_t Volume(std::initializer_list<int64_t> sizes) {
  int64_t volume = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(volume, size, &volume)) return -1;
  return volume;
}

std::string GeometryRefusal(const Geometry& geo, Floats lhs, Floats g, Floats out) {
  const auto* numbers = reinterpret_cast<const int64_t*>(&geo);
  for (size_t i = 0; i < kNumbers; ++i) {
    const int64_t low = i < kFirstPositive ? 0 : i < kFirstPad ? 1 : -kLargest;
    if (numbers[i] < low || numbers[i] > kLargest)
      return Text("geometry[", i, "] = ", numbers[i], " must lie within ", low, "..", kLargest);
  }
  if (geo.in_channels % geo.groups != 0 || geo.out_channels % geo.groups != 0)
    return Text(geo.groups, " groups must divide ", geo.in_channels, " and ", geo.out_channels, " channels");
  auto matches = [](Floats buffer, int64_t first, const int64_t (&spatial)[3], int64_t last) {
    return Volume({first, spatial[0], spatial[1], spatial[2], last}) ==
           static_cast<int64_t>(buffer.element_count());
  };
  if (matches(lhs, geo.batch, geo.in, geo.in_channels) && matches(g, geo.batch, geo.out, geo.out_channels) &&
      matches(out, geo.in_channels / geo.groups, geo.kernel, geo.out_channels)) {
    return "";
  }
  return Text("lhs ", List(lhs.dimensions()), ", g ", List(g.dimensions()), " and dW ",
              List(out.dimensions()), " are not of the geometry's sizes");
}

ffi::Error HostWgrad(ffi::ThreadPool pool, Floats lhs, Floats g, ffi::Result<Floats> out,
                     ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Span<const int64_t> geometry,
                     int64_t span, int64_t splits, int64_t block) {
  Wgrad call{};
  std::string why;
  if (geometry.size() != kNumbers) {
    why = Text("geometry has ", geometry.size(), " numbers, expected ", kNumbers);
  } else {
    std::memcpy(&call.geo, geometry.begin(), sizeof(call.geo));
    why = GeometryRefusal(call.geo, lhs, g, *out);
  }
  if (why.empty() && (block < kMinBlock || block > kMaxBlock))
    why = Text("block = ", block, " must lie within ", kMinBlock, "..", kMaxBlock);
  const Geometry& geo = call.geo;
  if (why.empty() && (span < 1 || geo.groups % span != 0 ||
                      (span > 1 && geo.out_channels / geo.groups * span > kTileColumns)))
    why = Text("span = ", span, " of ", geo.groups, " groups must divide them and have at most ",
               kTileColumns, " output channels");
  if (why.empty()) {
    call.groups = geo.groups / span;
    call.span = span;
    call.rows = geo.kernel[0] * geo.kernel[1] * geo.kernel[2] * (geo.in_channels / call.groups);
    call.columns = geo.out_channels / call.groups;
    call.k = geo.batch * geo.out[0] * geo.out[1] * geo.out[2];
    call.splits = splits;
    call.grain = 1;
    call.depth = block;
    call.row_block = kRowBlock;
    why = SetResults(&call, out->typed_data(), workspace);
  }
  if (!why.empty()) return ffi::Error::InvalidArgument("jax_splitk host wgrad: " + why);
  call.lhs = lhs.typed_data();
  call.g = g.typed_data();
  Run(pool, call, 2.0 * call.size() * call.k);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostWgrad, jax_splitk::HostWgrad,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jax_splitk::Floats>()
                                  .Arg<jax_splitk::Floats>()
                                  .Ret<jax_splitk::Floats>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<xla::ffi::Span<const int64_t>>("geometry")
                                  .Attr<int64_t>("span")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("block"));
