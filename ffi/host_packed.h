// The tiles of packed quantized weights, in the order of jax_splitk/quantized/packing.py, decoded to floats.
#pragma once

#include <cstdint>
#include <string>

#include "host_product.h"
#include "text.h"

namespace jax_splitk {

constexpr int64_t kTileSide = 64;  // features and k of a tile of the weight
constexpr int64_t kSteps = 4;      // of 16 k, the shortest group, of a tile

// A weight, or a stack of weights one behind the other.
struct PackedTiles {
  int64_t k, columns, bits, group_size;
  // values: of each code; zero, channel: null if the weight has no zero points or channel scales
  const float *values, *scale, *zero, *channel;
  const uint32_t* words;

  int64_t column_tiles() const { return CeilDiv(columns, kTileSide); }
  int64_t k_tiles() const { return CeilDiv(k, kTileSide); }
  int64_t groups_of_k() const { return group_size == k ? 1 : k_tiles() * kTileSide / group_size; }
  int64_t tile_words() const { return kTileSide * kTileSide * bits / 32; }

  // Returns what is wrong with the groups, or with the number of codes; empty if they are right.
  std::string Refusal(int64_t codes) const {
    if (codes != 16 && codes != 256) return Text("values of ", codes, " codes; accepted: 16 or 256");
    const int64_t group = group_size;
    if (k < 1 || (group != 16 && group != 32 && group != 64 && group != 128 && group != k) || k % group != 0)
      return Text("group_size = ", group, " must be 16, 32, 64 or 128 and divide k = ", k, ", or be k");
    return "";
  }

  // tile[k][feature] = (value - zero) * scale, of 64 k from k0 on and 64 features from `feature` on.
  JAX_SPLITK_INLINE void Load(int64_t weight, int64_t feature, int64_t k0, float* tile) const {
    const int64_t feature_tile = weight * column_tiles() + feature / kTileSide;
    float scales[kSteps][kTileSide], zeros[kSteps][kTileSide] = {};  // [16 k of a tile][feature]
    for (int64_t step = 0; step < kSteps; ++step) {
      const int64_t group_of_k = group_size == k ? 0 : (k0 + step * 16) / group_size;
      const int64_t at = (feature_tile * groups_of_k() + group_of_k) * kTileSide;
      LoadGroup(scale + at, scales[step]);
      if (channel != nullptr) {
        float channels[kTileSide];
        LoadGroup(channel + feature_tile * kTileSide, channels);
        for (int64_t i = 0; i < kTileSide; ++i) scales[step][i] *= channels[i];
      }
      if (zero != nullptr) LoadGroup(zero + at, zeros[step]);
    }
    const uint32_t* from = words + (feature_tile * k_tiles() + k0 / kTileSide) * tile_words();
    if (bits == 4) return Decode<4>(from, scales, zeros, tile);
    Decode<8>(from, scales, zeros, tile);
  }

  // Packed groups lie in the order 16 block + 2 g + half for feature 16 block + 8 half + g.
  static JAX_SPLITK_INLINE void LoadGroup(const float* from, float* to) {
    for (int64_t i = 0; i < kTileSide; ++i) to[i / 16 * 16 + i % 2 * 8 + i / 2 % 8] = from[i];
  }

  // The innermost loop is over the eight g of a lane index 4 g +
  // t, whose words lie 16 apart.
  template <int kBits>
  JAX_SPLITK_INLINE void Decode(const uint32_t* from, const float (&scales)[kSteps][kTileSide],
                                const float (&zeros)[kSteps][kTileSide], float* tile) const {
    // A row of words belongs to one g. 4-bit: [block][g][t, j]; 8-bit: [block][kh][g][t, kj, half].
    for (int64_t row = 0; row < (kBits == 4 ? 4 : 8); ++row, from += 128) {
      const int64_t block = kBits == 4 ? row : row / 2;
      for (int64_t column = 0; column < 16; ++column) {
        const int64_t t = column / 4;
        const int64_t step = kBits == 4 ? column % 4 : 2 * (row % 2) + column / 2 % 2;  // of 16 k
        for (int code = 0; code < 32 / kBits; ++code) {
          const int64_t half = kBits == 4 ? code % 2 : column % 2;
          const int64_t octet = kBits == 4 ? code / 2 % 2 : code % 2, e = kBits == 4 ? code / 4 : code / 2;
          const int64_t feature = 16 * block + 8 * half;
          float* __restrict to = tile + (16 * step + 8 * octet + 2 * t + e) * kTileSide + feature;
          const float *z = zeros[step] + feature, *s = scales[step] + feature;
          for (int g = 0; g < 8; ++g)
            to[g] = (values[from[16 * g + column] >> (kBits * code) & ((1u << kBits) - 1)] - z[g]) * s[g];
        }
      }
    }
  }
};

}  // namespace jax_splitk
