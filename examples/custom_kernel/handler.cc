// The weight gradient of a 1x1 convolution on a CPU: dW[c, k] = sum over pixels of lhs[pixel, c] * g[pixel,
// k].
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace py = pybind11;

namespace {

// Operands and results are those of jax_splitk's custom calls: lhs, g, dW, workspace. `block` input channels
// at a time stay in the cache.
ffi::Error Pointwise(ffi::Buffer<ffi::F32> lhs, ffi::Buffer<ffi::F32> g, ffi::ResultBuffer<ffi::F32> dw,
                     ffi::ResultBuffer<ffi::U8> /*workspace*/, int64_t block) {
  const int64_t channels = lhs.dimensions().back(), out_channels = g.dimensions().back();
  if (block < 1 || static_cast<int64_t>(dw->element_count()) != channels * out_channels) {
    return ffi::Error::InvalidArgument("pointwise: block below 1, or a result of another size");
  }
  const int64_t pixels = channels ? static_cast<int64_t>(lhs.element_count()) / channels : 0;
  float* out = dw->typed_data();
  std::fill(out, out + channels * out_channels, 0.0f);
  for (int64_t first = 0; first < channels; first += block) {
    const int64_t end = std::min(first + block, channels);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const float* x = lhs.typed_data() + pixel * channels;
      const float* y = g.typed_data() + pixel * out_channels;
      for (int64_t c = first; c < end; ++c) {
        for (int64_t k = 0; k < out_channels; ++k) out[c * out_channels + k] += x[c] * y[k];
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PointwiseHandler, Pointwise,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<int64_t>("block"));

PYBIND11_MODULE(_handler, m) {
  m.def("pointwise",
        [] { return py::capsule(reinterpret_cast<void*>(PointwiseHandler), "xla._CUSTOM_CALL_TARGET"); });
}
