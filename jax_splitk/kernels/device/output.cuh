// Element types by their number, and conversion to the output's. Macro: OUT, the output's number.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

[[maybe_unused]] constexpr int FLOAT = 0, BF16 = 1, HALF_FLOAT = 2;

template <int TYPE>
struct TypeOf {
  using type = float;
};
template <>
struct TypeOf<BF16> {
  using type = __nv_bfloat16;
};
template <>
struct TypeOf<HALF_FLOAT> {
  using type = __half;
};

using Output = TypeOf<OUT>::type;

__device__ inline void convert(float x, float& out) { out = x; }
__device__ inline void convert(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }
__device__ inline void convert(float x, __half& out) { out = __float2half_rn(x); }

// N neighbouring values as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <class T, int N>
__device__ inline Vec<T, N> converted(const float (&values)[N]) {
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) convert(values[i], result.v[i]);
  return result;
}

template <class T, int N>
__device__ inline void store_values(T* to, const float (&values)[N]) {
  *reinterpret_cast<Vec<T, N>*>(to) = converted<T>(values);
}
