// Packed weights to the A registers of tensor-core products.
//
// A lane of wgmma.m64nNk16 on 16-bit types holds, for each 16 k, rows g and g + 8 and the k 2t, 2t + 1 and
// 2t + 8, 2t + 9; jax_splitk/quantized/packing.py lays the weight out so that these eight elements are one
// word of 4-bit codes or two words of 8-bit ones, one for each of the rows. Of 4-bit codes the low nibbles
// are row g, the high ones row g + 8. Bytes 0 to 3 are the k 2t, 2t + 8, 2t + 1, 2t + 9.
//
// No format is converted by a conversion instruction where its bits can be put into place.
//
// Macros: FORMAT; E4M3_PRODUCTS (of two e4m3), without ROUNDED (decoded to fp16, and then rounded to e4m3;
// may be undefined); otherwise HALF (fp16, or bfloat16).

#include "device/ptx.cuh"

constexpr int INT4 = 0, UINT4 = 1, INT8 = 2, E4M3 = 3, E2M1 = 4;  // the last one is NormalFloat4, 5

constexpr int WORDS = FORMAT == INT8 || FORMAT == E4M3 ? 2 : 1;  // of a lane, for 16 k

// A lane's words of a tile of 64 features by 64 k, by 16 k.
using Words = uint32_t[4][WORDS];

__device__ inline void load_words(uint32_t address, Words& words) {
#pragma unroll
  for (int load = 0; load < WORDS; ++load) {
    const uint4 w = load_shared<uint4>(address + load * 512);
    const uint32_t loaded[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[(load * 4 + i) / WORDS][i % WORDS] = loaded[i];
  }
}

// The largest magnitude that a value less `zero` can have.
[[maybe_unused]] __device__ inline float largest_difference(float zero) {
  constexpr float LOW = FORMAT == INT4    ? -8
                        : FORMAT == INT8  ? -128
                        : FORMAT == UINT4 ? 0
                        : FORMAT == E4M3  ? -448
                        : FORMAT == E2M1  ? -6
                                          : -1;
  constexpr float HIGH = FORMAT == UINT4 ? 15 : FORMAT == INT4 ? 7 : FORMAT == INT8 ? 127 : -LOW;
  return fmaxf(fabsf(LOW - zero), fabsf(HIGH - zero));
}

// The largest power of two that is at most a magnitude, within 2^-100 and 2^120: it and its inverse are
// normal numbers of fp32, also times a small one.
[[maybe_unused]] __device__ inline float leading_power(float magnitude) {
  const float power = __uint_as_float(__float_as_uint(magnitude) & 0x7f800000u);
  return fminf(fmaxf(power, 0x1p-100f), 0x1p120f);
}

constexpr uint32_t twice(uint32_t bits) { return bits << 16 | bits; }

#if E4M3_PRODUCTS && !ROUNDED

// Integers up to 15 are their own e4m3 bits: byte N is N * 2^-9, through the subnormal numbers and the first
// binade. A sign has to be a sign bit: codes with a bias would be exact too, but tensor cores keep only some
// 14 bits of a sum of e4m3 products, and the bias would use them up. The words of e4m3 weights are A
// registers as they stand.
static_assert(FORMAT == INT4 || FORMAT == UINT4 || FORMAT == E2M1 || FORMAT == E4M3, "what e4m3 holds");

// A weight's value is FACTOR times its e4m3 byte's.
constexpr float FACTOR = FORMAT == E4M3 ? 1.f : FORMAT == E2M1 ? 64.f : 512.f;

// Bytes whose low nibbles hold a code, and the same code's top bit at the byte's top: e4m3. The other bits of
// `codes` and `tops` may be anything.
__device__ inline uint32_t code_to_e4m3(uint32_t codes, uint32_t tops) {
  if constexpr (FORMAT == INT4) {  // q + 8
    return byte_distances(codes & 0x0f0f0f0fu, 0x08080808u) | (~tops & 0x80808080u);
  } else {
    return codes & 0x0f0f0f0fu;
  }
}

// A word of 4-bit codes to two registers of e4m3.
__device__ inline void decode_e4m3(uint32_t word, uint32_t& row_g, uint32_t& row_g8) {
  if constexpr (FORMAT == E2M1) {
    // Its exponent and mantissa, which begin at bit 2, are e4m3 at 2^-6 of the value.
    row_g = (word << 2 & 0x1c1c1c1cu) | (word << 4 & 0x80808080u);
    row_g8 = (word >> 2 & 0x1c1c1c1cu) | (word & 0x80808080u);
  } else {
    row_g = code_to_e4m3(word, word << 4);
    row_g8 = code_to_e4m3(word >> 4, word);
  }
}

#else

// Small integers are exact as the bits of a subnormal number (code c is c * 2^-133 in bfloat16): one fused
// multiply-add, which rounds nothing here, brings it to normal numbers and subtracts the code's bias.

// A weight's value is FACTOR times what the fragment holds: bfloat16 ends before 2^133.
constexpr float FACTOR = !HALF && FORMAT <= INT8 ? 64.f : 1.f;

__device__ inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return HALF ? fma_f16x2(a, b, c) : fma_bf16x2(a, b, c);
}

// Pairs of unsigned integers in the low bits of each half, where MASK has ones, to (integer - bias) / FACTOR.
template <uint32_t MASK, int CODE_OF_0>
__device__ inline uint32_t integers(uint32_t word) {
  constexpr bool SHIFT = (MASK & 1) == 0;  // 4 bits higher
  if constexpr (HALF) {                    // 0x6400 is 1024, whose last place is 1
    const uint32_t offset = and_or(word, MASK, 0x64006400u);
    constexpr uint32_t one = 0x3c00, sixteenth = 0x2c00;
    // -(1024 + CODE_OF_0), and that over 16
    constexpr uint32_t minus = CODE_OF_0 == 0 ? 0xe400 : CODE_OF_0 == 8 ? 0xe408 : 0xe480;
    constexpr uint32_t minus_sixteenth = CODE_OF_0 == 0 ? 0xd400 : 0xd480;
    return SHIFT ? fma2(offset, twice(sixteenth), twice(minus_sixteenth))
                 : fma2(offset, twice(one), twice(minus));
  } else {  // times 2^127, or 2^123 where the integer stands 4 bits higher; the bias over 64
    constexpr uint32_t minus = CODE_OF_0 == 0 ? 0x8000 : CODE_OF_0 == 8 ? 0xbe00 : 0xc000;
    return fma2(word & MASK, twice(SHIFT ? 0x7d00 : 0x7f00), twice(minus));
  }
}

// Fields of 4 bits that begin at bit P of each half, sign and 3 bits of magnitude: to the highest bit and to
// the lowest exponent bits and the highest mantissa bit. Their values over 2^14 (fp16) or 2^126, which the
// exponents' biases leave.
template <int P>
__device__ inline uint32_t small_float_bits(uint32_t w) {
  if constexpr (HALF) {
    constexpr int LOWEST = 9, SHIFT = LOWEST - P;
    const uint32_t magnitude = (SHIFT >= 0 ? w << (SHIFT & 31) : w >> (-SHIFT & 31)) & twice(7 << LOWEST);
    return magnitude | (w << (12 - P) & 0x80008000u);
  } else {  // a multiplication shifts a field to both places, which do not overlap
    constexpr int LOWEST = 6, FIRST = P % 8;
    const uint32_t field = w >> (P - FIRST) & twice(15 << FIRST);
    return field * (1u << (12 - FIRST) | 1u << (LOWEST - FIRST)) & twice(0x8000 | 7 << LOWEST);
  }
}

constexpr uint32_t SMALL_FLOATS = HALF ? 0x7400 : 0x7e80;  // 2^14, 2^126

template <int P>
__device__ inline uint32_t small_floats(uint32_t w) {
  return fma2(small_float_bits<P>(w), twice(SMALL_FLOATS), 0x80008000u);
}

// Two e4m3 in the low bytes of each half.
__device__ inline uint32_t e4m3(uint32_t pair) {
  const uint32_t halves = e4m3x2_to_f16x2(uint16_t(__byte_perm(pair, 0, 0x4420)));
  if constexpr (HALF) return halves;
  const float2 value = __half22float2(reinterpret_cast<const __half2&>(halves));
  return to_bf16x2(value.x, value.y);
}

// Four codes to the two bytes of their NormalFloat4 values (as bfloat16 or fp16): table look-ups in
// registers.
struct Bytes {
  uint32_t low, high;
};
__device__ inline Bytes normal_floats(uint32_t codes) {
  // Values of codes 0 to 15: those of jax_splitk/quantized/formats.py, which are float32, rounded to 16 bits.
  constexpr uint16_t BF16[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                                 0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};
  constexpr uint16_t FP16[16] = {0xbc00, 0xb992, 0xb833, 0xb652, 0xb48d, 0xb1ea, 0xadd4, 0x0000,
                                 0x2d18, 0x3126, 0x33e0, 0x3568, 0x370d, 0x3880, 0x39c9, 0x3c00};
  constexpr auto bytes = [](int first, int shift) {
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t((HALF ? FP16 : BF16)[first + i] >> shift & 0xff) << (8 * i);
    return out;
  };
  constexpr uint32_t L0 = bytes(0, 0), L1 = bytes(4, 0), L2 = bytes(8, 0), L3 = bytes(12, 0);
  constexpr uint32_t H0 = bytes(0, 8), H1 = bytes(4, 8), H2 = bytes(8, 8), H3 = bytes(12, 8);
  const uint32_t index = codes & 0x7777u;
  const uint32_t upper =
      __byte_perm(0x0000ff00u, 0, codes >> 3 & 0x1111u);  // 0xff where the code is 8 or more
  const uint32_t low = (__byte_perm(L0, L1, index) & ~upper) | (__byte_perm(L2, L3, index) & upper);
  const uint32_t high = (__byte_perm(H0, H1, index) & ~upper) | (__byte_perm(H2, H3, index) & upper);
  return {low, high};
}

// The A registers of one step of 16 k: a[0] is row g and k 2t, 2t + 1, a[1] row g + 8, a[2] and a[3] the same
// 8 k on.
__device__ inline void dequantize(const uint32_t (&words)[WORDS], uint32_t (&a)[4]) {
  if constexpr (FORMAT == INT4 || FORMAT == UINT4) {
    constexpr int CODE_OF_0 = FORMAT == INT4 ? 8 : 0;
    const uint32_t low = words[0], high = words[0] >> 8;
    a[0] = integers<0x000f000f, CODE_OF_0>(low);
    a[1] = integers<0x00f000f0, CODE_OF_0>(low);
    a[2] = integers<0x000f000f, CODE_OF_0>(high);
    a[3] = integers<0x00f000f0, CODE_OF_0>(high);
  } else if constexpr (FORMAT == INT8) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t codes = words[row % WORDS] ^ 0x80808080u;  // q + 128
      a[row] = integers<0x00ff00ff, 128>(codes);
      a[row + 2] = integers<0x00ff00ff, 128>(codes >> 8);
    }
  } else if constexpr (FORMAT == E4M3) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      a[row] = e4m3(words[row % WORDS]);
      a[row + 2] = e4m3(words[row % WORDS] >> 8);
    }
  } else if constexpr (FORMAT == E2M1) {
    a[0] = small_floats<0>(words[0]);
    a[1] = small_floats<4>(words[0]);
    a[2] = small_floats<8>(words[0]);
    a[3] = small_floats<12>(words[0]);
  } else {
    const Bytes first = normal_floats(words[0]), second = normal_floats(words[0] >> 16);
    const uint32_t x0 = __byte_perm(first.low, first.high, 0x5140),
                   x1 = __byte_perm(first.low, first.high, 0x7362);
    const uint32_t y0 = __byte_perm(second.low, second.high, 0x5140);
    const uint32_t y1 = __byte_perm(second.low, second.high, 0x7362);
    a[0] = __byte_perm(x0, y0, 0x5410);
    a[1] = __byte_perm(x0, y0, 0x7632);
    a[2] = __byte_perm(x1, y1, 0x5410);
    a[3] = __byte_perm(x1, y1, 0x7632);
  }
}

#endif
