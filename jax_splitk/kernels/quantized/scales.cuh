// Scales (and zero points) of a packed weight: their types, as in output.cuh, and how a lane reads those of
// its two rows, which are neighbours.

constexpr int NONE = -1;  // the type of zero points where there are none

constexpr int item_bytes(int type) { return type == FLOAT ? 4 : type == NONE ? 0 : 2; }

// A pair as it lies in memory.
template <int TYPE>
using Pair = conditional_t<TYPE == FLOAT, float2, uint32_t>;

template <int TYPE>
__device__ inline float2 to_floats(const Pair<TYPE>& pair) {
  if constexpr (TYPE == FLOAT) {
    return pair;
  } else if constexpr (TYPE == BF16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
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
