// WGMMA of two MN-major operands in shared memory: 64 x N x 16, N in whole 64-element blocks.
//
// Macros: ELEMENT_BF16 (else half).

#include "device/wgmma.cuh"

template <int N>
struct Wgmma;
#if ELEMENT_BF16
template <>
struct Wgmma<64> : GMMA::MMA_64x64x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<128> : GMMA::MMA_64x128x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<192> : GMMA::MMA_64x192x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<256> : GMMA::MMA_64x256x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
#else
template <>
struct Wgmma<64> : GMMA::MMA_64x64x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<128> : GMMA::MMA_64x128x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<192> : GMMA::MMA_64x192x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
template <>
struct Wgmma<256> : GMMA::MMA_64x256x16_F32F16F16_SS<GMMA::Major::MN, GMMA::Major::MN> {};
#endif

template <int N, int... I>
__device__ inline void wgmma(uint64_t a, uint64_t b, float (&acc)[N], GMMA::ScaleOut scale, Indices<I...>) {
  Wgmma<2 * N>::fma(a, b, acc[I]..., scale);
}

// acc += a * b, or acc = a * b; N elements of each of 128 threads.
template <int N>
__device__ inline void wgmma(uint64_t a, uint64_t b, float (&acc)[N], GMMA::ScaleOut scale) {
  wgmma(a, b, acc, scale, typename MakeIndices<N>::type{});
}
