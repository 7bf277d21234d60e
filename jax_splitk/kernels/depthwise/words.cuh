// Words of channels of depthwise kernels on the CUDA cores. Macros: ELEMENT, OUT, CHANNELS (of a word).

#include "device/output.cuh"

using Element = TypeOf<ELEMENT>::type;

template <int BYTES>
struct WordOf {
  using type = unsigned;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
using Word = WordOf<CHANNELS * sizeof(Element)>::type;

__device__ inline void unpack(Word word, float (&values)[CHANNELS]) {
  if constexpr (ELEMENT == FLOAT) {
    values[0] = __uint_as_float(word);
  } else if constexpr (ELEMENT == BF16) {
    values[0] = __uint_as_float(unsigned(word) << 16);
    if constexpr (CHANNELS == 2) values[1] = __uint_as_float(word & 0xffff0000u);
  } else if constexpr (CHANNELS == 2) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  } else {
    values[0] = __half2float(reinterpret_cast<const __half&>(word));
  }
}
