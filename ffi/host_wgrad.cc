// The host weight gradient: dW[m, f] = sum over output pixels of im2col(lhs)[pixel, m] * g[pixel, f], where m
// is (filter tap, input channel of the group).

#include <algorithm>
#include <cstdint>
#include <string>

#include "host.h"
#include "host_convolution.h"

namespace jax_splitk {
namespace {

constexpr int64_t kRowBlock = 96;  // jax_splitk/kernels/wgrad/host.py has the same

struct Wgrad : ConvolutionProduct {
  JAX_SPLITK_INLINE void LoadTile(int64_t group, int64_t column, int64_t columns, int64_t pixel,
                                  int64_t depth, float* tile) const {
    const float* from = other + pixel * geo.out_channels + group * this->columns + column;
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

  // A product may join several of the convolution's groups. Only sums between channels of the same group
  // belong to dW.
  Kept Keep(int64_t m, int64_t columns) const {
    if (span == 1) return {m, 0, columns};
    const int64_t channels = geo.in_channels / geo.groups, each = geo.out_channels / geo.groups;
    const int64_t tap = m / (span * channels), part = m / channels % span;
    return {tap * channels + m % channels, part * each, each};
  }

  // to[i][0:width] = the input that the pixels read at the filter tap, from the channel on. Works line by
  // line of the output.
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

ffi::Error HostWgrad(ffi::ThreadPool pool, Floats lhs, Floats g, ffi::Result<Floats> out,
                     ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Span<const int64_t> geometry,
                     int64_t span, int64_t splits, int64_t block) {
  Wgrad call{};
  std::string why = SetGeometry(&call.geo, geometry, block, lhs, g, *out);
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
    call.row_block = kRowBlock;
    call.k = geo.batch * geo.out[0] * geo.out[1] * geo.out[2];
  }
  return RunConvolution("wgrad", why, pool, &call, lhs, g, splits, block, out, workspace);
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostWgrad, jax_splitk::HostWgrad,
                              jax_splitk::ConvolutionBinding("span"));
