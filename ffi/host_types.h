// Element types of the CPU kernels and their conversions, which XLA's flushing of subnormals must not change.
#pragma once

#include <cstdint>
#include <cstring>

// Everything inside a task is inlined into it, because a task is compiled once per instruction set
// (host_split.h).
#define JAX_SPLITK_INLINE inline __attribute__((always_inline))
#define JAX_SPLITK_LAMBDA __attribute__((always_inline))

namespace jax_splitk {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float ToFloat(float value) { return value; }

inline float ToFloat(Bf16 value) { return FromBits(uint32_t{value.bits} << 16); }

// Branch-free so that it vectorises, and free of subnormal floats, which XLA's threads flush to zero: a
// subnormal half becomes a normal float by subtracting two normal ones.
inline float ToFloat(F16 value) {
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + (112u << 23) + (exponent == 0x0f800000u ? 112u << 23 : 0u);
  const uint32_t subnormal = ToBits(FromBits(magnitude + (113u << 23)) - FromBits(113u << 23));
  return FromBits((exponent == 0 ? subnormal : normal) | (uint32_t{value.bits} & 0x8000u) << 16);
}

// Conversions back round to nearest even and keep NaNs.
inline void FromFloat(float value, float* out) { *out = value; }

inline void FromFloat(float value, Bf16* out) {
  const uint32_t bits = ToBits(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void FromFloat(float value, F16* out) {
  const uint32_t bits = ToBits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 2^16 and above, infinity, NaN
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude <
             0x38800000u) {  // below 2^-14: adding 0.5 makes the FPU round at the last subnormal bit
    half = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// GCC's and Clang's portable vectors: arrays of them stay in registers, which arrays of floats did not.
constexpr int kWidth = 8;
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halfwords __attribute__((vector_size(2 * kWidth)));

// Elements travel as words, 16-bit ones extended by zeros, and become floats eight at a time. Results go
// through a pointer: vectors by value would tie the ABI to the instruction set.
JAX_SPLITK_INLINE uint32_t ToWord(float value) { return ToBits(value); }
template <typename T>
JAX_SPLITK_INLINE uint32_t ToWord(T value) {
  return value.bits;
}

JAX_SPLITK_INLINE void Load(const float* from, Words* to) { std::memcpy(to, from, sizeof(*to)); }
template <typename T>
JAX_SPLITK_INLINE void Load(const T* from, Words* to) {
  Halfwords half;
  std::memcpy(&half, from, sizeof(half));
  *to = __builtin_convertvector(half, Words);
}

template <typename T>
JAX_SPLITK_INLINE void Expand(const Words& words, Floats* to);
template <>
JAX_SPLITK_INLINE void Expand<float>(const Words& words, Floats* to) {
  *to = (Floats)words;
}
template <>
JAX_SPLITK_INLINE void Expand<Bf16>(const Words& words, Floats* to) {
  *to = (Floats)(words << 16);
}
// As ToFloat(F16); comparisons give all ones or zero.
template <>
JAX_SPLITK_INLINE void Expand<F16>(const Words& words, Floats* to) {
  const Words magnitude = (words & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
  const Words special = (Words)(exponent == 0x0f800000u), tiny = (Words)(exponent == 0);
  const Words normal = magnitude + (112u << 23) + (special & (112u << 23));
  const Floats subnormal = (Floats)(magnitude + (113u << 23)) - FromBits(113u << 23);
  *to = (Floats)((tiny & (Words)subnormal) | (~tiny & normal) | ((words & 0x8000u) << 16));
}

// dst[0:count] = src[0:count] as f32, in fixed-size steps because count is often too small for a memcpy call.
template <typename T>
JAX_SPLITK_INLINE void ToFloats(const T* src, int64_t count, float* dst) {
  for (; count >= kWidth; count -= kWidth, src += kWidth, dst += kWidth) {
    Words words;
    Floats floats;
    Load(src, &words);
    Expand<T>(words, &floats);
    std::memcpy(dst, &floats, sizeof(floats));
  }
  for (; count > 0; --count) *dst++ = ToFloat(*src++);
}

}  // namespace jax_splitk
