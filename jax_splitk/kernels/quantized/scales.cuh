// Scales (and zero points) of a packed weight's groups. Included after ranges.cuh. Macros: GROUP (k of a
// scale; 0: all), SCALE_TYPE.

constexpr int NONE = -1;  // ZERO_TYPE; other numbers as in output.cuh

constexpr int item_bytes(int type) { return type == FLOAT ? 4 : type == NONE ? 0 : 2; }

constexpr int GROUP_K = GROUP ? GROUP : BLOCK_K;
constexpr int GROUPS = GROUP ? BLOCK_K / GROUP_K : 0;  // of a block
constexpr int ROW = SLOT;                              // scales of a group
constexpr int SCALE_ITEM = item_bytes(SCALE_TYPE);
constexpr int SCALES = GROUPS * ROW * SCALE_ITEM;  // bytes, of a warpgroup

template <int TYPE>
__device__ inline float2 to_floats(uint32_t pair) {
  if constexpr (TYPE == BF16) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Scales or zero points of a lane's two rows, which are neighbours.
template <int TYPE>
__device__ inline float2 load_pair(uint32_t address) {
  if constexpr (TYPE == FLOAT) return load_shared<float2>(address);
  return to_floats<TYPE>(load_shared<uint32_t>(address));
}

template <int TYPE>
__device__ inline float2 load_pair(const uint8_t* address) {
  if constexpr (TYPE == FLOAT) return __ldg(reinterpret_cast<const float2*>(address));
  return to_floats<TYPE>(__ldg(reinterpret_cast<const uint32_t*>(address)));
}
