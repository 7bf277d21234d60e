// Convolutions in the CPU handlers: their geometry, and checks of their buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "host_product.h"

namespace jax_splitk {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kMinBlock = 8, kMaxBlock = 4096;

// A convolution with three spatial dimensions, leading ones of size 1: the attribute `geometry`, in its
// order. Numbers are below 2^31, so that no product of two numbers overflows.
struct Geometry {
  int64_t batch, in_channels, out_channels, in[3], out[3], kernel[3];  // at least 0
  int64_t groups, stride[3], lhs_dilation[3], rhs_dilation[3];         // at least 1
  int64_t pad_low[3];

  // The input coordinate that output position `at` reads at filter tap `tap`; -1 for padding or a hole.
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

// Copies few floats, for which a call of memcpy would take longer.
JAX_SPLITK_INLINE void CopyFew(const float* from, int64_t count, float* to) {
  for (; count >= 8; count -= 8, from += 8, to += 8) std::memcpy(to, from, 32);
  for (; count > 0; --count) *to++ = *from++;
}

// The product of the sizes; -1 if it overflows.
inline int64_t Volume(std::initializer_list<int64_t> sizes) {
  int64_t volume = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(volume, size, &volume)) return -1;
  return volume;
}

inline std::string GeometryRefusal(const Geometry& geo, Floats lhs, Floats g, Floats weight) {
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
      matches(weight, geo.in_channels / geo.groups, geo.kernel, geo.out_channels)) {
    return "";
  }
  return Text("lhs ", List(lhs.dimensions()), ", g ", List(g.dimensions()), " and the weight ",
              List(weight.dimensions()), " are not of the geometry's sizes");
}

// Reads the attribute `geometry`. Returns what is wrong with it or with `block`; empty if both are right.
inline std::string SetGeometry(Geometry* geo, ffi::Span<const int64_t> given, int64_t block, Floats lhs,
                               Floats g, Floats weight) {
  if (given.size() != kNumbers) return Text("geometry has ", given.size(), " numbers, expected ", kNumbers);
  std::memcpy(geo, given.begin(), sizeof(*geo));
  const std::string why = GeometryRefusal(*geo, lhs, g, weight);
  if (!why.empty() || (block >= kMinBlock && block <= kMaxBlock)) return why;
  return Text("block = ", block, " must lie within ", kMinBlock, "..", kMaxBlock);
}

// Checks the buffers of a pass that reads the convolution's input and another array: the weight, or g.
struct ConvolutionProduct : Product {
  Geometry geo;
  const float *lhs, *other;
};

// Computes a convolution's product in `splits` parts, `block` of k at a time. If `why` is not empty, it is
// the error.
template <typename Call>
ffi::Error RunConvolution(const char* name, std::string why, ffi::ThreadPool& pool, Call* call, Floats lhs,
                          Floats other, int64_t splits, int64_t block, ffi::Result<Floats> out,
                          ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  if (why.empty()) {
    call->splits = splits;
    call->grain = 1;
    call->depth = block;
    why = SetResults(call, out->typed_data(), workspace);
  }
  if (!why.empty()) return ffi::Error::InvalidArgument(Text("jax_splitk host ", name, ": ", why));
  call->lhs = lhs.typed_data();
  call->other = other.typed_data();
  Run(pool, *call, 2.0 * call->size() * call->k);
  return ffi::Error::Success();
}

// The binding of a handler: two operands, result, workspace, and the common attributes with one of its own.
inline auto ConvolutionBinding(const char* own) {
  auto buffers = ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Ret<Floats>();
  auto all = std::move(buffers).Ret<ffi::Buffer<ffi::U8>>().Attr<ffi::Span<const int64_t>>("geometry");
  return std::move(all).Attr<int64_t>(own).Attr<int64_t>("splits").Attr<int64_t>("block");
}

}  // namespace jax_splitk
