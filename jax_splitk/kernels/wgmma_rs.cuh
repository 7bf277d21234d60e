// WGMMA with A from registers and a K-major B of TILE_N columns in shared memory. Macros: HALF (fp16,
// otherwise bfloat16), TILE_N.

#include "wgmma.cuh"

#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)
#if HALF
using Wgmma = GMMA::PASTE(MMA_64x, TILE_N, x16_F32F16F16_RS)<GMMA::Major::K, GMMA::Major::K>;
#else
using Wgmma = GMMA::PASTE(MMA_64x, TILE_N, x16_F32BF16BF16_RS)<GMMA::Major::K, GMMA::Major::K>;
#endif

constexpr int ACCUMULATORS = TILE_N / 2;  // of a lane: four for each 8 columns
using Accumulator = float[ACCUMULATORS];
using Fragments = uint32_t[4][4];  // A registers of a tile of 64 k, by steps of 16

template <int... I>
__device__ inline void wgmma(const uint32_t (&a)[4], uint64_t b, Accumulator& acc, GMMA::ScaleOut scale,
                             Indices<I...>) {
  Wgmma::fma(a[0], a[1], a[2], a[3], b, acc[I]..., scale);
}
