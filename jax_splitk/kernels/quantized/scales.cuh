// Scales (and zero points) of a packed weight's groups. Included after ranges.cuh. Macros: GROUP (k of a
// scale; 0: all), SCALE_TYPE.

constexpr int FLOAT = 0, BF16 = 1, NONE = -1;  // SCALE_TYPE, ZERO_TYPE; 2 is half

constexpr int item_bytes(int type) { return type == FLOAT ? 4 : type == NONE ? 0 : 2; }

constexpr int GROUP_K = GROUP ? GROUP : BLOCK_K;
constexpr int GROUPS = GROUP ? BLOCK_K / GROUP_K : 0;  // of a block
constexpr int ROW = SLOT;                              // scales of a group
constexpr int SCALE_ITEM = item_bytes(SCALE_TYPE);
constexpr int SCALES = GROUPS * ROW * SCALE_ITEM;  // bytes, of a warpgroup

__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline float2 load_floats(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

template <int TYPE>
__device__ inline float2 to_floats(uint32_t pair) {
  if constexpr (TYPE == BF16) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Scales or zero points of a lane's two rows, which are neighbours.
template <int TYPE>
__device__ inline float2 load_pair(uint32_t address) {
  if constexpr (TYPE == FLOAT) return load_floats(address);
  return to_floats<TYPE>(load_shared(address));
}

template <int TYPE>
__device__ inline float2 load_pair(const uint8_t* address) {
  if constexpr (TYPE == FLOAT) return __ldg(reinterpret_cast<const float2*>(address));
  return to_floats<TYPE>(__ldg(reinterpret_cast<const uint32_t*>(address)));
}
