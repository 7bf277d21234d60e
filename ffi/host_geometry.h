// The convolution of a host weight gradient, from what XLA hands over.
#pragma once

#include <cstdint>
#include <string>

#include "text.h"
#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

// A weight gradient in canonical form: always three spatial dimensions (leading ones added), sizes validated.
// Reduction row `row` is the output pixel (n, d, h, w), and column m of the im2col matrix is (tap, channel of
// group).
struct Geometry {
  int64_t batch;
  int64_t in_channels, out_channels, groups;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, kernel[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1}, pad_lo[3] = {0, 0, 0}, lhs_dilation[3] = {1, 1, 1},
          rhs_dilation[3] = {1, 1, 1};

  int64_t rows() const { return batch * out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t group_in() const { return in_channels / groups; }
  int64_t group_out() const { return out_channels / groups; }
  int64_t gemm_m() const { return taps() * group_in(); }
  int64_t line() const { return in[2] * in_channels; }  // elements in one innermost spatial line of lhs

  // Input coordinate that output position `pos` meets at filter tap `tap`, or -1 if it meets padding or a
  // hole.
  int64_t Source(int dim, int64_t pos, int64_t tap) const {
    int64_t at = pos * stride[dim] - pad_lo[dim] + tap * rhs_dilation[dim];
    if (at < 0 || (lhs_dilation[dim] != 1 && at % lhs_dilation[dim] != 0)) return -1;
    at /= lhs_dilation[dim];
    return at < in[dim] ? at : -1;
  }

  // A 1x1 convolution that only copies: lhs itself is the im2col matrix.
  bool IsPlainProduct() const {
    bool plain = taps() == 1;
    for (int i = 0; i < 3; ++i) {
      plain = plain && stride[i] == 1 && lhs_dilation[i] == 1 && pad_lo[i] == 0 && in[i] == out[i];
    }
    return plain;
  }

  // Whether the innermost filter taps of one pixel are neighbours in memory, to be copied in one go.
  bool MergesInnerTaps() const { return groups == 1 && lhs_dilation[2] == 1 && rhs_dilation[2] == 1; }
};

using Ints = xla::ffi::Span<const int64_t>;

// What the caller passed about the convolution.
struct ConvArguments {
  Ints lhs, g, out;  // shapes
  Ints strides, padding, lhs_dilation, rhs_dilation;
  int64_t groups;

  std::string shapes() const { return Text("lhs ", List(lhs), ", g ", List(g), " and dW ", List(out)); }
};

// Elements, strides and positions are held below 2^31, so that no product of two of them overflows and BLAS's
// int can hold a leading dimension.
constexpr int64_t kLargest = 2147483647;

inline std::string ValuesRefusal(const char* name, Ints values, size_t length, int64_t low) {
  if (values.size() != length) {
    return Text(name, " = ", List(values), " has ", values.size(), " elements, expected ", length);
  }
  for (int64_t value : values) {
    if (value < low || value > kLargest)
      return Text(name, " = ", List(values), " must lie within ", low, "..", kLargest);
  }
  return "";
}

inline std::string ArgumentsRefusal(const ConvArguments& a) {
  const size_t rank = a.lhs.size(), spatial = rank - 2;
  if (rank < 3 || rank > 5 || a.g.size() != rank || a.out.size() != rank)
    return Text(a.shapes(), " must have the same number of dimensions, 3 to 5");
  std::string why;
  auto check = [&](const char* name, Ints values, size_t length, int64_t low) {
    if (why.empty()) why = ValuesRefusal(name, values, length, low);
  };
  for (Ints dims : {a.lhs, a.g, a.out}) check("shape", dims, rank, 0);
  check("window_strides", a.strides, spatial, 1);
  check("padding", a.padding, 2 * spatial, -kLargest);
  check("lhs_dilation", a.lhs_dilation, spatial, 1);
  check("rhs_dilation", a.rhs_dilation, spatial, 1);
  return why;
}

inline std::string ChannelsRefusal(const ConvArguments& a) {
  const int64_t channels = a.lhs.back(), out = a.g.back(), groups = a.groups;
  if (groups < 1 || channels % groups != 0 || out % groups != 0) {
    return Text("feature_group_count = ", groups, " must be positive and divide the ", channels,
                " channels of lhs and the ", out, " of g");
  }
  if (a.g.front() == a.lhs.front() && a.out.back() == out && a.out[a.out.size() - 2] == channels / groups)
    return "";
  return Text(a.shapes(), " do not fit with ", groups,
              " groups: expected [N, *, C], [N, *, K] and [*, C / groups, K]");
}

// Spatial dimension i of the call becomes dimension `to` of the geometry.
inline std::string SetDimension(const ConvArguments& a, size_t i, size_t to, Geometry* geo) {
  const int64_t in = geo->in[to] = a.lhs[i + 1], out = geo->out[to] = a.g[i + 1];
  const int64_t kernel = geo->kernel[to] = a.out[i], stride = geo->stride[to] = a.strides[i];
  const int64_t low = geo->pad_lo[to] = a.padding[2 * i], high = a.padding[2 * i + 1];
  const int64_t lhs_dilation = geo->lhs_dilation[to] = a.lhs_dilation[i];
  const int64_t rhs_dilation = geo->rhs_dilation[to] = a.rhs_dilation[i];
  const int64_t base = in > 0 ? (in - 1) * lhs_dilation + 1 : 0;
  const int64_t room = base + low + high - ((kernel - 1) * rhs_dilation + 1);
  const int64_t expected = room < 0 ? 0 : room / stride + 1;
  if (out == expected) return "";
  return Text("spatial dimension ", i, " of g is ", out, ", but input ", in, ", kernel ", kernel, ", stride ",
              stride, ", padding (", low, ", ", high, ") and dilations ", lhs_dilation, ", ", rhs_dilation,
              " give ", expected);
}

// Sets *geo, or says what is wrong with the arguments; empty where nothing is.
inline std::string SetGeometry(const ConvArguments& a, Geometry* geo) {
  std::string why = ArgumentsRefusal(a);
  if (why.empty()) why = ChannelsRefusal(a);
  if (!why.empty()) return why;
  *geo = {a.lhs.front(), a.lhs.back(), a.g.back(), a.groups};
  const size_t spatial = a.strides.size();
  for (size_t i = 0; i < spatial && why.empty(); ++i) why = SetDimension(a, i, 3 - spatial + i, geo);
  return why;
}

}  // namespace jax_splitk
