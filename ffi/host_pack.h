// The data movement of the host weight gradient: the walk over output pixels that turns the implicit im2col
// matrix into an explicit block of f32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host_geometry.h"
#include "host_types.h"

namespace jax_splitk {

// Calls body(row, count, w, line) for every stretch of rows in [begin, end) with the same n, d, h: rows [row,
// row + count) are output columns [w, w + count), and line is the offset in lhs of the line they meet at tap
// (kd, kh), or -1 where they meet padding.
template <typename Body>
JAX_SPLITK_INLINE void ForEachStretch(const Geometry& geo, int64_t begin, int64_t end, int64_t kd, int64_t kh,
                                      Body body) {
  int64_t w = begin % geo.out[2], rest = begin / geo.out[2];
  int64_t h = rest % geo.out[1];
  rest /= geo.out[1];
  int64_t d = rest % geo.out[0], n = rest / geo.out[0];
  for (int64_t row = begin; row < end;) {
    const int64_t count = std::min(geo.out[2] - w, end - row);
    const int64_t sd = geo.Source(0, d, kd), sh = geo.Source(1, h, kh);
    const bool inside = sd >= 0 && sh >= 0;
    body(row, count, w, inside ? ((n * geo.in[0] + sd) * geo.in[1] + sh) * geo.line() : int64_t{-1});
    row += count;
    w = 0;
    if (++h == geo.out[1]) {
      h = 0;
      if (++d == geo.out[0]) d = 0, ++n;
    }
  }
}

// dst[0:count] = elements [start, start + count) of a line of `width` elements, with zeros beyond its ends.
template <typename T>
JAX_SPLITK_INLINE void ToFloatsClipped(const T* line, int64_t width, int64_t start, int64_t count,
                                       float* dst) {
  if (start >= 0 && start + count <= width) return ToFloats(line + start, count, dst);
  const int64_t lo = std::clamp<int64_t>(-start, 0, count), hi = std::clamp(width - start, lo, count);
  std::fill(dst, dst + lo, 0.0f);
  ToFloats(line + start + lo, hi - lo, dst + lo);
  std::fill(dst + hi, dst + count, 0.0f);
}

// dst[row - begin][m - m0] = im2col[row][m] as f32 for rows [begin, end) and columns [m0, m1) of one group.
template <typename T>
JAX_SPLITK_INLINE void PackLhs(const Geometry& geo, const T* lhs, int64_t group, int64_t m0, int64_t m1,
                               int64_t begin, int64_t end, float* dst) {
  // A unit is what one output pixel reads from one line without a gap: all inner taps if they merge, else one
  // tap.
  const int64_t inner = geo.MergesInnerTaps() ? geo.kernel[2] : 1;
  const int64_t unit_columns = inner * geo.group_in(), ld = m1 - m0, width = geo.line();
  for (int64_t m = m0; m < m1;) {
    const int64_t unit = m / unit_columns, skip = m - unit * unit_columns;
    const int64_t count = std::min(unit_columns - skip, m1 - m);
    const int64_t tap = unit * inner, kw = tap % geo.kernel[2], outer = tap / geo.kernel[2];
    const int64_t shift = group * geo.group_in() + skip;
    float* column = dst + (m - m0);
    auto pack = [&](int64_t row, int64_t stretch, int64_t w, int64_t line) JAX_SPLITK_LAMBDA {
      float* out = column + (row - begin) * ld;
      for (int64_t i = 0; i < stretch; ++i, out += ld) {
        int64_t at = (w + i) * geo.stride[2] - geo.pad_lo[2] + kw * geo.rhs_dilation[2];
        bool hole = line < 0;
        if (geo.lhs_dilation[2] != 1) {
          hole = hole || at < 0 || at % geo.lhs_dilation[2] != 0;
          at /= geo.lhs_dilation[2];
        }
        if (hole) {
          std::fill(out, out + count, 0.0f);
        } else {
          ToFloatsClipped(lhs + line, width, at * geo.in_channels + shift, count, out);
        }
      }
    };
    ForEachStretch(geo, begin, end, outer / geo.kernel[1], outer % geo.kernel[1], pack);
    m += count;
  }
}

// dst[row - begin][0:n1 - n0] = g[row][n0:n1] as f32.
template <typename T>
JAX_SPLITK_INLINE void PackG(const Geometry& geo, const T* g, int64_t n0, int64_t n1, int64_t begin,
                             int64_t end, float* dst) {
  for (int64_t row = begin; row < end; ++row, dst += n1 - n0) {
    ToFloats(g + row * geo.out_channels + n0, n1 - n0, dst);
  }
}

// Element offsets of a pixel of lhs and of the row of g that it meets at one tap.
struct Meeting {
  int64_t lhs, g;
};

// Lists, in row order, where rows [begin, end) meet lhs at `tap`; rows that meet padding are left out.
JAX_SPLITK_INLINE int64_t ListMeetings(const Geometry& geo, int64_t tap, int64_t begin, int64_t end,
                                       Meeting* list) {
  const int64_t kw = tap % geo.kernel[2], outer = tap / geo.kernel[2];
  int64_t count = 0;
  auto add = [&](int64_t row, int64_t stretch, int64_t w, int64_t line) JAX_SPLITK_LAMBDA {
    for (int64_t i = 0; line >= 0 && i < stretch; ++i) {
      const int64_t at = geo.Source(2, w + i, kw);
      if (at >= 0) list[count++] = {line + at * geo.in_channels, (row + i) * geo.out_channels};
    }
  };
  ForEachStretch(geo, begin, end, outer / geo.kernel[1], outer % geo.kernel[1], add);
  return count;
}

}  // namespace jax_splitk
