// The loop that replaces sgemm where a group is too small for one, depthwise filters above all: products of
// lhs and g are summed lane by lane (a lane is an output channel) over the rows in order.
#pragma once

#include "host_pack.h"

namespace jax_splitk {

// acc[0:lanes] += lhs * g over meetings, for kVectors * kWidth lanes starting at l0. Depthwise lanes lie side
// by side in lhs; otherwise lane l reads the first channel of its group, l / out_per_group * in_per_group.
template <typename T, int kVectors, bool kDepthwise>
JAX_SPLITK_INLINE void DirectVectors(const Geometry& geo, const T* lhs, const T* g, const Meeting* list,
                                     int64_t count, int64_t l0, float* acc) {
  Floats sum[kVectors];
  std::memcpy(sum, acc, sizeof(sum));
  int64_t index[kVectors * kWidth];
  for (int l = 0; l < kVectors * kWidth; ++l) index[l] = (l0 + l) / geo.group_out() * geo.group_in();
  for (int64_t i = 0; i < count; ++i) {
    const T *x = lhs + list[i].lhs, *y = g + list[i].g + l0;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Words raw;
      Floats a, b;
      Load(y + v * kWidth, &raw);
      Expand<T>(raw, &b);
      if constexpr (kDepthwise) {
        Load(x + l0 + v * kWidth, &raw);
      } else {
        uint32_t gathered[kWidth];
        for (int l = 0; l < kWidth; ++l) gathered[l] = ToWord(x[index[v * kWidth + l]]);
        std::memcpy(&raw, gathered, sizeof(raw));
      }
      Expand<T>(raw, &a);
      sum[v] += a * b;
    }
  }
  std::memcpy(acc, sum, sizeof(sum));
}

template <typename T>
JAX_SPLITK_INLINE void DirectLane(const Geometry& geo, const T* lhs, const T* g, const Meeting* list,
                                  int64_t count, int64_t l, float* acc) {
  const T* x = lhs + l / geo.group_out() * geo.group_in();
  float sum = *acc;
  for (int64_t i = 0; i < count; ++i) sum += ToFloat(x[list[i].lhs]) * ToFloat(g[list[i].g + l]);
  *acc = sum;
}

// acc[l0:l1] += the products of lanes [l0, l1), as many lanes at a time as registers allow.
template <typename T, bool kDepthwise>
JAX_SPLITK_INLINE void DirectLanes(const Geometry& geo, const T* lhs, const T* g, const Meeting* list,
                                   int64_t count, int64_t l0, int64_t l1, float* acc) {
  for (; l1 - l0 >= 64; l0 += 64) DirectVectors<T, 8, kDepthwise>(geo, lhs, g, list, count, l0, acc + l0);
  for (; l1 - l0 >= 32; l0 += 32) DirectVectors<T, 4, kDepthwise>(geo, lhs, g, list, count, l0, acc + l0);
  for (; l1 - l0 >= 8; l0 += 8) DirectVectors<T, 1, kDepthwise>(geo, lhs, g, list, count, l0, acc + l0);
  for (; l0 < l1; ++l0) DirectLane(geo, lhs, g, list, count, l0, acc + l0);
}

template <typename T>
JAX_SPLITK_INLINE void Direct(const Geometry& geo, const T* lhs, const T* g, const Meeting* list,
                              int64_t count, int64_t l0, int64_t l1, float* acc) {
  const bool depthwise = geo.group_in() == 1 && geo.group_out() == 1;
  if (depthwise) return DirectLanes<T, true>(geo, lhs, g, list, count, l0, l1, acc);
  return DirectLanes<T, false>(geo, lhs, g, list, count, l0, l1, acc);
}

}  // namespace jax_splitk
