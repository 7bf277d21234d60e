// Scales and zero points that go into the weight, in bfloat16 (SCALING WEIGHT). Included by tiled.cu, whose
// macros it takes.
//
// FOLDED: one fused multiply-add decodes and scales integers and e2m1. It is the exact product, rounded once,
// as by decoding (which is exact) and multiplying. IN_PARTS: zero points, and scales that bfloat16 does not
// hold. What is left, e4m3 and nf4, is decoded and then scaled.

__device__ inline void scale_weights(uint32_t pair, uint32_t (&a)[4]) {
  const uint32_t scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = mul_bf16x2(a[i], scale[i % 2]);
}

constexpr bool SHORT_SCALE = SCALE_TYPE == BF16 || is_byte(SCALE_TYPE);  // bfloat16 holds it
constexpr bool IN_PARTS = SCALING == WEIGHT && !TRANSPOSED && (ZERO_TYPE != NONE || !SHORT_SCALE);
constexpr bool FOLDED = SCALING == WEIGHT && (FORMAT <= INT8 || FORMAT == E2M1) && !TRANSPOSED && !IN_PARTS;

// ---- scales of bfloat16 or a byte, no zero points ------------------------------------------------------

// e4m3 scales go up to 448, where the factor below would overflow: they are taken over 256, which comes back
// with FACTOR.
constexpr bool LOWERED = FOLDED && SCALE_TYPE == E4M3_SCALE;

// E8M0 scales of e2m1 stay the bytes that they are: their factor has an exponent that is theirs but for a
// constant.
constexpr bool EXPONENTS = FOLDED && FORMAT == E2M1 && SCALE_TYPE == E8M0_SCALE;

// For a lane's two rows: the scale times what `integers` and `small_floats` multiply with, and times the
// bias, negative, which e2m1 lacks. Both are exact for scales from 2^-123 to below 2; beyond 2 the factor
// overflows (`too_large`), below 2^-123 the bias's part is subnormal, and the weight off by at most 2^-127.
struct Folded {
  uint32_t factor[2], minus[2];
};

__device__ inline bool too_large(uint32_t pair) {
  return (pair & (EXPONENTS ? 0x8080u : twice(0x4000))) != 0;
}

__device__ inline Folded fold(uint32_t pair) {
  if constexpr (EXPONENTS) {  // 2^(byte - 127) * 2^126
    constexpr uint32_t shift = 128, constant = twice(126 << 7);
    return {
        {__byte_perm(pair, 0, 0x4040) * shift + constant, __byte_perm(pair, 0, 0x4141) * shift + constant},
        {}};
  } else {
    // The second row's codes of 4 bits stand 4 bits higher.
    constexpr uint32_t factors = FORMAT == E2M1   ? twice(SMALL_FLOATS)
                                 : FORMAT == INT8 ? twice(0x7f00)
                                                  : 0x7d007f00u;
    constexpr uint32_t biases = twice(FORMAT == INT4 ? 0xbe00 : FORMAT == INT8 ? 0xc000 : 0x8000);
    const uint32_t f = mul_bf16x2(pair, factors), m = mul_bf16x2(pair, biases);
    return {{__byte_perm(f, 0, 0x1010), __byte_perm(f, 0, 0x3232)},
            {__byte_perm(m, 0, 0x1010), __byte_perm(m, 0, 0x3232)}};
  }
}

__device__ inline void dequantize_scaled(const uint32_t (&words)[WORDS], const Folded& s, uint32_t (&a)[4]) {
  if constexpr (FORMAT == E2M1) {
    a[0] = mul_bf16x2(small_float_bits<0>(words[0]), s.factor[0]);
    a[1] = mul_bf16x2(small_float_bits<4>(words[0]), s.factor[1]);
    a[2] = mul_bf16x2(small_float_bits<8>(words[0]), s.factor[0]);
    a[3] = mul_bf16x2(small_float_bits<12>(words[0]), s.factor[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2, upper = i / 2 * 8;
      const uint32_t codes = FORMAT == INT8 ? (words[row % WORDS] ^ 0x80808080u) >> upper & 0x00ff00ffu
                                            : words[0] >> upper & (row ? 0x00f000f0u : 0x000f000fu);
      a[i] = fma2(codes, s.factor[row], s.minus[row]);
    }
  }
}

// ---- zero points, and scales of 16 and 32 bits ---------------------------------------------------------

// Zero points and scales of a lane's two rows where IN_PARTS. A scale is two bfloat16, high + low, and a zero
// point a whole number and a rest: a weight is (value - whole) * high + ((value - whole) * low - rest *
// scale). The difference is exact; what is in brackets is small, and rounded; so the sum is rounded once, but
// for at most 2^-8 of the scale.
struct Parts {
  uint32_t high, low, whole, rest;  // pairs; `whole` and `rest` negative, over FACTOR, `rest` times the scale

  __device__ void load(uint32_t scale, [[maybe_unused]] uint32_t zero) {  // addresses
    const float2 s = load_pair<SCALE_TYPE>(scale);
    high = to_bf16x2(s.x, s.y);
    if constexpr (!SHORT_SCALE) {
      const float2 rounded = to_floats<BF16>(high);
      low = to_bf16x2(s.x - rounded.x, s.y - rounded.y);
    }
    if constexpr (ZERO_TYPE != NONE) {
      const float2 z = load_pair<ZERO_TYPE>(zero);
      const float x = -(z.x + CODE_OF_0) / FACTOR, y = -(z.y + CODE_OF_0) / FACTOR;
      whole = INTEGERS ? to_bf16x2(rintf(x * FACTOR) / FACTOR, rintf(y * FACTOR) / FACTOR) : to_bf16x2(x, y);
      const float2 w = to_floats<BF16>(whole);
      rest = to_bf16x2((x - w.x) * s.x, (y - w.y) * s.y);
    }
  }

  static constexpr bool INTEGERS = FORMAT <= INT8;
  // What a code holds above its value, which is subtracted with the zero point.
  static constexpr int CODE_OF_0 = FORMAT == INT4 ? 8 : FORMAT == INT8 ? 128 : 0;

  __device__ void dequantize_parts(const uint32_t (&words)[WORDS], uint32_t (&a)[4]) const {
    const auto of_row = [](uint32_t pair, int row) { return __byte_perm(pair, 0, row ? 0x3232 : 0x1010); };
    if constexpr (INTEGERS && ZERO_TYPE != NONE) {
      dequantize_scaled(
          words,
          {{twice(0x7f00), twice(FORMAT == INT8 ? 0x7f00 : 0x7d00)}, {of_row(whole, 0), of_row(whole, 1)}},
          a);
    } else {
      dequantize(words, a);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2;
      if constexpr (!INTEGERS && ZERO_TYPE != NONE) a[i] = fma2(a[i], twice(0x3f80), of_row(whole, row));
      uint32_t more = ZERO_TYPE == NONE ? twice(0x8000) : of_row(rest, row);
      if constexpr (!SHORT_SCALE) more = fma2(a[i], of_row(low, row), more);
      a[i] = fma2(a[i], of_row(high, row), more);
    }
  }
};
