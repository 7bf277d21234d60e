// Turns what XLA hands to the host weight gradient into a validated Geometry, or says what is wrong with it.
#ifndef JAX_SPLITK_HOST_CHECK_H_
#define JAX_SPLITK_HOST_CHECK_H_

#include <string>

#include "host_pack.h"
#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

using Ints = xla::ffi::Span<const int64_t>;

inline xla::ffi::Error Invalid(const std::string& message) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, "jax_splitk host wgrad: " + message);
}

// Dimensions and Span alike.
template <typename Values>
inline std::string Text(const Values& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "(" + text + ")";
}

// Elements, strides and positions are held below 2^31, so that no product of two of them overflows and BLAS's
// int can hold a leading dimension.
constexpr int64_t kLargest = 2147483647;

inline xla::ffi::Error CheckAttribute(const char* name, Ints values, size_t length, int64_t low) {
  if (values.size() != length) {
    return Invalid(std::string(name) + " = " + Text(values) + " has " + std::to_string(values.size()) +
                   " elements, expected " + std::to_string(length));
  }
  for (int64_t value : values) {
    if (value < low || value > kLargest) {
      return Invalid(std::string(name) + " = " + Text(values) + " must lie within " + std::to_string(low) +
                     ".." + std::to_string(kLargest));
    }
  }
  return xla::ffi::Error::Success();
}

// What the caller passed about the convolution.
struct ConvArguments {
  xla::ffi::AnyBuffer::Dimensions lhs, g, out;
  Ints strides, padding, lhs_dilation, rhs_dilation;
  int64_t groups;
};

inline xla::ffi::Error CheckRanksAndAttributes(const ConvArguments& a) {
  const size_t rank = a.lhs.size(), spatial = rank - 2;
  if (rank < 3 || rank > 5 || a.g.size() != rank || a.out.size() != rank) {
    return Invalid("lhs " + Text(a.lhs) + ", g " + Text(a.g) + " and dW " + Text(a.out) +
                   " must have the same number of dimensions, 3 to 5");
  }
  for (auto dims : {a.lhs, a.g, a.out}) {
    for (int64_t size : dims) {
      if (size < 0 || size > kLargest)
        return Invalid("shape " + Text(dims) + " has a size outside 0..2147483647");
    }
  }
  auto error = CheckAttribute("window_strides", a.strides, spatial, 1);
  if (error.success()) error = CheckAttribute("padding", a.padding, 2 * spatial, -kLargest);
  if (error.success()) error = CheckAttribute("lhs_dilation", a.lhs_dilation, spatial, 1);
  if (error.success()) error = CheckAttribute("rhs_dilation", a.rhs_dilation, spatial, 1);
  return error;
}

inline xla::ffi::Error CheckChannels(const ConvArguments& a) {
  const int64_t channels = a.lhs.back(), out = a.g.back(), groups = a.groups;
  if (groups < 1 || channels % groups != 0 || out % groups != 0) {
    return Invalid("feature_group_count = " + std::to_string(groups) + " must be positive and divide the " +
                   std::to_string(channels) + " channels of lhs and the " + std::to_string(out) + " of g");
  }
  if (a.g.front() != a.lhs.front() || a.out.back() != out || a.out[a.out.size() - 2] != channels / groups) {
    return Invalid("lhs " + Text(a.lhs) + ", g " + Text(a.g) + " and dW " + Text(a.out) +
                   " do not fit with " + std::to_string(groups) +
                   " groups: expected [N, *, C], [N, *, K] and [*, C / groups, K]");
  }
  return xla::ffi::Error::Success();
}

// Spatial dimension i of the call becomes dimension `to` of the geometry.
inline xla::ffi::Error SetDimension(const ConvArguments& a, size_t i, int to, Geometry* geo) {
  geo->in[to] = a.lhs[i + 1];
  geo->out[to] = a.g[i + 1];
  geo->kernel[to] = a.out[i];
  geo->stride[to] = a.strides[i];
  geo->pad_lo[to] = a.padding[2 * i];
  geo->lhs_dilation[to] = a.lhs_dilation[i];
  geo->rhs_dilation[to] = a.rhs_dilation[i];
  const int64_t base = geo->in[to] > 0 ? (geo->in[to] - 1) * geo->lhs_dilation[to] + 1 : 0;
  const int64_t window = (geo->kernel[to] - 1) * geo->rhs_dilation[to] + 1;
  const int64_t room = base + a.padding[2 * i] + a.padding[2 * i + 1] - window;
  const int64_t expected = room < 0 ? 0 : room / geo->stride[to] + 1;
  if (geo->out[to] == expected) return xla::ffi::Error::Success();
  return Invalid(
      "spatial dimension " + std::to_string(i) + " of g is " + std::to_string(geo->out[to]) + ", but input " +
      std::to_string(geo->in[to]) + ", kernel " + std::to_string(geo->kernel[to]) + ", stride " +
      std::to_string(geo->stride[to]) + ", padding (" + std::to_string(a.padding[2 * i]) + ", " +
      std::to_string(a.padding[2 * i + 1]) + ") and dilations " + std::to_string(geo->lhs_dilation[to]) +
      ", " + std::to_string(geo->rhs_dilation[to]) + " give " + std::to_string(expected));
}

inline xla::ffi::Error MakeGeometry(const ConvArguments& a, Geometry* geo) {
  auto error = CheckRanksAndAttributes(a);
  if (error.success()) error = CheckChannels(a);
  if (error.failure()) return error;
  *geo = {a.lhs.front(), {1, 1, 1}, {1, 1, 1},    {1, 1, 1},  {1, 1, 1}, {0, 0, 0},
          {1, 1, 1},     {1, 1, 1}, a.lhs.back(), a.g.back(), a.groups};
  const size_t spatial = a.strides.size();
  for (size_t i = 0; i < spatial && error.success(); ++i) {
    error = SetDimension(a, i, static_cast<int>(3 - spatial + i), geo);
  }
  return error;
}

}  // namespace jax_splitk

#endif  // JAX_SPLITK_HOST_CHECK_H_
