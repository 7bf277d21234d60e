// The host convolution: out[p, f] = sum over m of im2col(lhs)[p, m] * weight[m, f], where p is an output
// pixel and m is (filter tap, input channel of the group). An input gradient is such a convolution with a
// mirrored weight.

#include <algorithm>
#include <cstdint>
#include <string>

#include "host.h"
#include "host_convolution.h"

namespace jax_splitk {
namespace {

constexpr int64_t kRowBlock = 96;  // jax_splitk/kernels/conv/host.py has the same

struct Forward : ConvolutionProduct {
  bool mirrored;  // the weight is [kernel, out_channels / groups, in_channels], its taps in reverse

  JAX_SPLITK_INLINE void LoadTile(int64_t group, int64_t column, int64_t columns, int64_t m, int64_t depth,
                                  float* tile) const {
    const int64_t channels = geo.in_channels / groups, taps = k / channels;
    for (const int64_t end = m + depth; m < end; ++m, tile += kTileColumns) {
      if (!mirrored) {
        std::copy_n(other + m * geo.out_channels + group * this->columns + column, columns, tile);
        continue;
      }
      const int64_t line = (taps - 1 - m / channels) * this->columns + column;
      const float* from = other + line * geo.in_channels + group * channels + m % channels;
      for (int64_t f = 0; f < columns; ++f) tile[f] = from[f * geo.in_channels];
    }
  }

  JAX_SPLITK_INLINE Rows LoadRows(int64_t group, int64_t pixel, int64_t count, int64_t m, int64_t depth,
                                  float* chunk) const {
    const int64_t channels = geo.in_channels / groups;
    for (int64_t i = 0; i < count; ++i, ++pixel) {
      float* to = chunk + i * depth;
      for (int64_t done = 0; done < depth;) {
        const int64_t tap = (m + done) / channels, channel = (m + done) % channels;
        const int64_t width = std::min(channels - channel, depth - done), at = Source(pixel, tap);
        if (at < 0) {
          std::fill_n(to + done, width, 0.0f);
        } else {
          CopyFew(lhs + at * geo.in_channels + group * channels + channel, width, to + done);
        }
        done += width;
      }
    }
    return {chunk, depth, 1};
  }

  // The input pixel that an output pixel reads at a filter tap; -1 for padding and holes.
  int64_t Source(int64_t pixel, int64_t tap) const {
    const int64_t kw = tap % geo.kernel[2], kh = tap / geo.kernel[2] % geo.kernel[1];
    const int64_t line = pixel / geo.out[2], image = line / geo.out[1], n = image / geo.out[0];
    const int64_t w = geo.Source(2, pixel % geo.out[2], kw), h = geo.Source(1, line % geo.out[1], kh);
    const int64_t d = geo.Source(0, image % geo.out[0], tap / geo.kernel[2] / geo.kernel[1]);
    return std::min({d, h, w}) < 0 ? -1 : ((n * geo.in[0] + d) * geo.in[1] + h) * geo.in[2] + w;
  }
};

ffi::Error HostConv(ffi::ThreadPool pool, Floats lhs, Floats rhs, ffi::Result<Floats> out,
                    ffi::Result<ffi::Buffer<ffi::U8>> workspace, ffi::Span<const int64_t> geometry,
                    int64_t mirrored, int64_t splits, int64_t block) {
  Forward call{};
  std::string why = SetGeometry(&call.geo, geometry, block, lhs, *out, rhs);
  if (why.empty()) {
    const Geometry& geo = call.geo;
    call.groups = geo.groups;
    call.span = 1;
    call.rows = geo.batch * geo.out[0] * geo.out[1] * geo.out[2];
    call.columns = geo.out_channels / geo.groups;
    call.row_block = kRowBlock;
    call.k = geo.kernel[0] * geo.kernel[1] * geo.kernel[2] * (geo.in_channels / geo.groups);
    call.mirrored = mirrored != 0;
  }
  return RunConvolution("convolution", why, pool, &call, lhs, rhs, splits, block, out, workspace);
}

}  // namespace
}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostConv, jax_splitk::HostConv,
                              jax_splitk::ConvolutionBinding("mirrored"));
