// Tiles of a packed quantized weight (jax_splitk/quantized/packing.py) as floats, for the host product.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_split.h"
#include "host_types.h"

namespace jax_splitk {

constexpr int64_t kTileSide = 64;  // features and k of a tile

enum class Format { kInt4, kUint4, kInt8, kE4m3, kE2m1, kNf4 };
constexpr const char* kFormatNames[] = {"int4", "uint4", "int8", "float8_e4m3fn", "float4_e2m1fn", "nf4"};

constexpr int FormatBits(Format format) { return format == Format::kInt8 || format == Format::kE4m3 ? 8 : 4; }

// NormalFloat4's values, as bfloat16.
constexpr uint16_t kNf4[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                               0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};

// Floats of `bits` bits with `mantissa` of them explicit, no infinity; exact, and free of subnormal floats,
// which XLA's threads flush to zero: small ones become normal by subtracting two normal ones.
template <int bits, int mantissa>
JAX_SPLITK_INLINE void ExpandSmallFloat(const Words& codes, Floats* to) {
  constexpr uint32_t kMask = (1u << (bits - 1)) - 1, kShift = 23 - mantissa;
  constexpr uint32_t kBias = (1u << (bits - 2 - mantissa)) - 1;
  constexpr uint32_t kNormal = (127 - kBias) << 23, kSubnormal = (128 - kBias) << 23;
  const Words magnitude = (codes & kMask) << kShift;
  const Words tiny = (Words)(magnitude < (1u << 23));
  const Floats subnormal = (Floats)(magnitude + kSubnormal) - FromBits(kSubnormal);
  Words value = (tiny & (Words)subnormal) | (~tiny & (magnitude + kNormal));
  if constexpr (bits == 8) value |= (Words)((codes & kMask) == kMask) & 0x7fc00000u;
  *to = (Floats)(value | (codes >> (bits - 1)) << 31);
}

// An activation of 8 bits.
struct E4m3 {
  uint8_t bits;
};
template <>
inline constexpr ffi::DataType kType<E4m3> = ffi::F8E4M3FN;
JAX_SPLITK_INLINE void Load(const E4m3* from, Words* to) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  *to = __builtin_convertvector(bytes, Words);
}
template <>
JAX_SPLITK_INLINE void Expand<E4m3>(const Words& words, Floats* to) {
  ExpandSmallFloat<8, 3>(words, to);
}
JAX_SPLITK_INLINE float ToFloat(E4m3 value) {
  Floats floats;
  ExpandSmallFloat<8, 3>(Words{value.bits}, &floats);
  return floats[0];
}

// The values of codes below 2**bits.
template <Format format>
JAX_SPLITK_INLINE void Values(const Words& codes, Floats* to) {
  typedef int32_t Ints __attribute__((vector_size(sizeof(Words))));
  if constexpr (format == Format::kInt4) {
    *to = __builtin_convertvector((Ints)codes - 8, Floats);
  } else if constexpr (format == Format::kUint4) {
    *to = __builtin_convertvector((Ints)codes, Floats);
  } else if constexpr (format == Format::kInt8) {
    *to = __builtin_convertvector((Ints)(codes << 24) >> 24, Floats);
  } else if constexpr (format == Format::kE4m3) {
    ExpandSmallFloat<8, 3>(codes, to);
  } else if constexpr (format == Format::kE2m1) {
    ExpandSmallFloat<4, 1>(codes, to);
  } else {
    Words bits;
    for (int lane = 0; lane < kWidth; ++lane) bits[lane] = kNf4[codes[lane]];
    *to = (Floats)(bits << 16);
  }
}

// Scales, or zero points, of a tile: [half of k][feature].
using TileGroups = float[2][kTileSide];

// Packed groups lie in the order 16 block + 2 g + half for feature 16 block + 8 half + g.
template <typename T>
JAX_SPLITK_INLINE void LoadGroup(const T* from, float* to) {
  for (int64_t i = 0; i < kTileSide; ++i) to[i / 16 * 16 + i % 2 * 8 + i / 2 % 8] = ToFloat(from[i]);
}

// tile[k][feature] = (value - zero) * scale for the 64 k and 64 features of one packed tile. Eight vector
// lanes are the eight g of a lane index 4 g + t, whose words lie 16 apart.
template <Format format>
JAX_SPLITK_INLINE void DecodeTile(const uint32_t* words, const TileGroups& scale, const TileGroups& zero,
                                  float* tile) {
  constexpr int kBits = FormatBits(format), kCodes = 32 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  // A row of words: those of one g. 4-bit: [block][g][t, j]; 8-bit: [block][kh][g][t, kj, half].
  for (int64_t row = 0; row < (kBits == 4 ? 4 : 8); ++row, words += 16 * kWidth) {
    const int64_t block = kBits == 4 ? row : row / 2;
    for (int64_t column = 0; column < 16; ++column) {
      Words packed;
      for (int g = 0; g < kWidth; ++g) packed[g] = words[16 * g + column];
      const int64_t t = column / 4;
      const int64_t step = kBits == 4 ? column % 4 : 2 * (row % 2) + column / 2 % 2;  // of 16 k
#pragma GCC unroll 8
      for (int code = 0; code < kCodes; ++code) {
        const int64_t half = kBits == 4 ? code % 2 : column % 2;
        const int64_t octet = kBits == 4 ? code / 2 % 2 : code % 2, e = kBits == 4 ? code / 4 : code / 2;
        const int64_t feature = 16 * block + 8 * half;
        Floats value, z, s;
        Values<format>(packed >> (kBits * code) & kMask, &value);
        std::memcpy(&z, &zero[step / 2][feature], sizeof(z));
        std::memcpy(&s, &scale[step / 2][feature], sizeof(s));
        value = (value - z) * s;
        std::memcpy(tile + (16 * step + 8 * octet + 2 * t + e) * kTileSide + feature, &value, sizeof(value));
      }
    }
  }
}

}  // namespace jax_splitk
