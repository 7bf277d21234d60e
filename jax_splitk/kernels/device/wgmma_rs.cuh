// WGMMA with A from registers and a K-major B in shared memory. Macros: E4M3_PRODUCTS (e4m3 times e4m3; may
// be undefined), HALF (fp16, otherwise bfloat16), COLUMNS of B (TILE_N where it is undefined).

#include "device/wgmma.cuh"

#ifndef COLUMNS
#define COLUMNS TILE_N
#endif
#if E4M3_PRODUCTS
constexpr int STEP_K = 32;  // of an instruction
using Wgmma = WGMMA(COLUMNS, x32_F32E4M3E4M3_RS_TN)<>;
#elif HALF
constexpr int STEP_K = 16;
using Wgmma = WGMMA(COLUMNS, x16_F32F16F16_RS)<GMMA::Major::K, GMMA::Major::K>;
#else
constexpr int STEP_K = 16;
using Wgmma = WGMMA(COLUMNS, x16_F32BF16BF16_RS)<GMMA::Major::K, GMMA::Major::K>;
#endif

constexpr int ACCUMULATORS = COLUMNS / 2;  // of a lane: four for each 8 columns
using Accumulator = float[ACCUMULATORS];
using Fragments = uint32_t[64 / STEP_K][4];  // A registers of a tile of 64 k, by steps

// acc (+)= A B of STEPS steps, from a[0] and b on: 32 bytes of a row of B each.
template <int STEPS>
__device__ inline void multiply_steps(const uint32_t (*a)[4], uint64_t b, Accumulator& acc,
                                      GMMA::ScaleOut scale) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma<Wgmma>(a[step], b + step * (32 >> 4), acc, step ? GMMA::ScaleOut::One : scale);
  }
}

// The same as a batch of its own.
template <int STEPS>
__device__ inline void multiply_batch(uint32_t (*a)[4], uint64_t b, Accumulator& acc, GMMA::ScaleOut scale) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) fence(a[step]);
  batch([&] { multiply_steps<STEPS>(a, b, acc, scale); }, acc);
}
