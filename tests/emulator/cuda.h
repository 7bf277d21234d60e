// CUDA's additions to C++: qualifiers, indices, vectors, 16- and 8-bit numbers, functions of warps and blocks.

#include <cmath>

using std::isfinite, std::isinf, std::isnan;

#define __device__
#define __global__
#define __host__
#define __constant__
#define __shared__ thread_local
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define gridDim (emulator::grid)
#define blockDim (emulator::block_size)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15;
    unsigned byte = both >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}
template <class T>
inline T __ldg(const T* from, SITE) {
  emulator::count("ld.global", sizeof(T), from, site);
  emulator::check_buffers(from, sizeof(T));
  return *from;
}
template <class T>
inline T __ldcg(const T* from, SITE) {
  emulator::count("ld.global", sizeof(T), from, site);
  return *from;
}
template <class T>
inline void __stcg(T* to, const T& value, SITE) {
  emulator::count("st.global", sizeof(T), to, site);
  *to = value;
}
template <class T>
inline void __stcs(T* to, const T& value, SITE) {
  emulator::count("st.global", sizeof(T), to, site);
  *to = value;
}
inline void __nanosleep(unsigned) {}

// ---- numbers -----------------------------------------------------------------------------------------------

inline uint16_t rounded_to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
using __half = _Float16;
struct __half2 { __half x, y; };
// NaN is the one that a GPU's arithmetic gives.
inline uint16_t rounded_to_half(float x) { return std::isnan(x) ? 0x7fff : bits_as<uint16_t>(__half(x)); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {rounded_to_bf16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return {rounded_to_bf16(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline float e4m3_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 127) == 127 ? NAN
                          : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                              : std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}
// To the nearest, ties to even, and at most the largest one.
inline uint8_t rounded_to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const float magnitude = std::fmin(std::fabs(x), 448.f);
  const int exponent = std::max(std::ilogb(magnitude), -6);  // of 0: the lowest
  const int places = int(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return (std::signbit(x) ? 128 : 0) | ((exponent + 6) * 8 + places);
}
struct __nv_fp8_e4m3 {
  uint8_t bits;
  operator float() const { return e4m3_to_float(bits); }
};

// ---- warps and blocks --------------------------------------------------------------------------------------

namespace emulator {

template <class T>
T from_lane(uint32_t mask, const T& value, int lane, const char* what) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 32);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  T out;
  std::memcpy(&out, exchange(mask, words, what)[lane & 31], sizeof(T));
  return out;
}

}  // namespace emulator

inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
// As CUDA documents it, a divisor above 2^126 makes a quotient of 0, or NaN of an infinity.
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f ? x * 0.f : x / y; }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int = 32) {
  return emulator::from_lane(mask, value, lane, "__shfl_sync");
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int = 32) {
  return emulator::from_lane(mask, value, emulator::lane() ^ lanes, "__shfl_xor_sync");
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int lanes, int = 32) {
  const int lane = emulator::lane();
  return emulator::from_lane(mask, value, lane < lanes ? lane : lane - lanes, "__shfl_up_sync");
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int lanes, int = 32) {
  const int lane = emulator::lane();
  return emulator::from_lane(mask, value, lane + lanes < 32 ? lane + lanes : lane, "__shfl_down_sync");
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return emulator::ballot(mask, vote); }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline void __syncwarp(unsigned mask = ~0u) { emulator::exchange(mask, {0u}, "__syncwarp"); }
inline void __syncthreads() { emulator::sync(0, 0, "__syncthreads"); }
