// Scales (and zero points) of a packed weight: their types, as in output.cuh and here, and how a lane reads
// those of its two rows, which are neighbours.
//
// Macro: CHANNEL_SCALE (a second scale, float32, for each feature, which multiplies the sums over all k; it
// is the last parameter of a kernel, which kernels without it do not have).

#if CHANNEL_SCALE
#define CHANNEL_PARAMETER , const float* channel
#define CHANNEL_ARGUMENT channel
#else
#define CHANNEL_PARAMETER
#define CHANNEL_ARGUMENT nullptr
#endif

constexpr int NONE = -1;  // the type of zero points where there are none
// Scales of a byte: E8M0 is 2^(byte - 127), and 255 NaN; and e4m3.
constexpr int E8M0_SCALE = 3, E4M3_SCALE = 4;

constexpr bool is_byte(int type) { return type == E8M0_SCALE || type == E4M3_SCALE; }

constexpr int item_bytes(int type) { return type == FLOAT ? 4 : type == NONE ? 0 : is_byte(type) ? 1 : 2; }

// A pair as it lies in memory.
template <int TYPE>
using Pair = conditional_t<TYPE == FLOAT, float2, conditional_t<is_byte(TYPE), uint16_t, uint32_t>>;

// A pair of bfloat16, or of a byte each, as bfloat16, which holds both kinds of bytes exactly.
template <int TYPE>
__device__ inline uint32_t to_bf16_pair(const Pair<TYPE>& pair) {
  static_assert(TYPE == BF16 || is_byte(TYPE), "types that bfloat16 holds");
  if constexpr (TYPE == BF16) {
    return pair;
  } else if constexpr (TYPE == E8M0_SCALE) {
    // The byte is bfloat16's exponent. But 0 is the subnormal 2^-127, and 255 NaN: their mantissas begin with
    // a 1. Bit 15 of each half of `special` says whether the byte is one of these two.
    const uint32_t exponents = __byte_perm(pair, 0, 0x4140) << 7;
    const uint32_t special = (exponents + 0x00800080u) | ~(exponents + 0x7f807f80u);
    return exponents | (special >> 9 & 0x00400040u);
  } else {
    const uint32_t halves = e4m3x2_to_f16x2(pair);
    const float2 value = __half22float2(reinterpret_cast<const __half2&>(halves));
    return to_bf16x2(value.x, value.y);
  }
}

template <int TYPE>
__device__ inline float2 to_floats(const Pair<TYPE>& pair) {
  if constexpr (TYPE == FLOAT) {
    return pair;
  } else if constexpr (TYPE == BF16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else if constexpr (TYPE == E8M0_SCALE) {
    return to_floats<BF16>(to_bf16_pair<TYPE>(pair));
  } else {
    const uint32_t halves = TYPE == E4M3_SCALE ? e4m3x2_to_f16x2(uint16_t(pair)) : uint32_t(pair);
    return __half22float2(reinterpret_cast<const __half2&>(halves));
  }
}

template <int TYPE>
__device__ inline float2 load_pair(uint32_t address) {  // in shared memory
  return to_floats<TYPE>(load_shared<Pair<TYPE>>(address));
}

template <int TYPE>
__device__ inline float2 load_pair(const uint8_t* address) {
  return to_floats<TYPE>(__ldg(reinterpret_cast<const Pair<TYPE>*>(address)));
}
