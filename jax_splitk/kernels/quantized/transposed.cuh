// The weight's fragments in products with the transposed weight (tiles.cuh, TRANSPOSED). Included by
// tiled.cu.
//
// A lane's words hold, for 16 features, the A registers of a product that sums over the weight's k
// (dequantize.cuh). Here the rows of A are the weight's k. So a warp takes from each 16 features of a tile
// the 16 k that are its rows, one word for each lane (two of 8-bit codes), scales their values, and
// transposes their four 8x8 matrices in registers.
//
// Scales and zero points belong to a feature and to a group of k. They cannot multiply a sum over features.
// So they are applied to the values, in bfloat16 where that rounds once, else in fp32: (value - zero) *
// (scale * channel scale), which is then rounded to x's dtype. nf4's values are those of dequantize.cuh,
// rounded before.
//
// FACTORS: fp16 does not hold every weight. KERNEL(_factors) finds for each group of k a power of two, by
// which the group's weights are divided, and their sums multiplied.

constexpr bool FACTORS = TRANSPOSED && HALF;

#if TRANSPOSED
static_assert(SCALING == WEIGHT);

// Whether a bfloat16 product of value and scale is the weight, rounded once.
constexpr bool PACKED_SCALES =
    (SCALE_TYPE == BF16 || is_byte(SCALE_TYPE)) && ZERO_TYPE == NONE && !CHANNEL_SCALE && !HALF;

// Where a lane's first word lies in a tile: of the 16 k that a warp takes.
__device__ inline uint32_t first_word(int warp, int lane) {
  return lane * 16 + (WORDS == 1 ? warp * 4 : warp / 2 * 512 + warp % 2 * 8);
}

// A lane's words of a tile, by 16 features. `address`: of the first one.
__device__ inline void load_transposed(uint32_t address, Words& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (WORDS == 1) {
      words[i][0] = load_shared<uint32_t>(address + i * (TILE_BYTES / 4));
    } else {
      const uint2 pair = load_shared<uint2>(address + i * (TILE_BYTES / 4));
      words[i][0] = pair.x;
      words[i][WORDS - 1] = pair.y;
    }
  }
}

// Where the scales of 16 features begin, of the stage's eight times 16: the number of the first.
constexpr int scales_of(int sixteen) { return sixteen / 4 * TILE_GROUPS * WARPGROUP_M + sixteen % 4 * 16; }

__device__ inline float2 pair_of_floats(uint32_t pair) {
  if constexpr (HALF) return __half22float2(reinterpret_cast<const __half2&>(pair));
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ inline uint32_t rounded_pair(float low, float high) {
  if constexpr (!HALF) return to_bf16x2(low, high);
  const Vec<__half, 2> pair = converted<__half>({low, high});
  return reinterpret_cast<const uint32_t&>(pair);
}

// Values over FACTOR to weights over FACTOR: of a lane's two features, which take turns in `a`.
__device__ inline void scale_values(float2 scale, float2 zero, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float s = i % 2 ? scale.y : scale.x, z = i % 2 ? zero.y : zero.x;
    const float2 v = pair_of_floats(a[i]);
    a[i] = rounded_pair((v.x - z) * s, (v.y - z) * s);
  }
}

// Makes rows of columns: of registers 16 features by 16 k, those of 16 k by 16 features.
__device__ inline void transpose(uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = transposed_matrix(a[i]);
  const uint32_t upper = a[1];
  a[1] = a[2];
  a[2] = upper;
}

// ---- factors of groups -----------------------------------------------------------------------------------

// The power of two for a group: its largest weight over it is below 2^15, which leaves fp16's range to small
// ones. It and its inverse are normal numbers of fp32.
__device__ inline float factor_of(float bound) { return leading_power(bound) * 0x1p-14f; }

// A thread block finds the factor of a group of k.
extern "C" __global__ void __launch_bounds__(128)
    KERNEL(_factors)(const __grid_constant__ FactorArgs g, const uint8_t* scale, const uint8_t* zero,
                     float* factors CHANNEL_PARAMETER) {
  __shared__ float bounds[4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = int(blockIdx.x);
  launch_dependent_grids();
  float bound = 0.f;
#pragma unroll 4
  for (int tile = warp; tile < g.feature_tiles; tile += 4) {
    const size_t pair = (size_t(tile) * g.groups + group) * WARPGROUP_M + lane * 2;
    float2 s = load_pair<SCALE_TYPE>(scale + pair * SCALE_ITEM), z = {0.f, 0.f};
#if CHANNEL_SCALE
    const float2 c = load_pair<FLOAT>(reinterpret_cast<const uint8_t*>(channel + tile * 64 + lane * 2));
    s = {s.x * c.x, s.y * c.y};
#endif
    if constexpr (ZERO_TYPE != NONE) z = load_pair<ZERO_TYPE>(zero + pair * ZERO_ITEM);
    bound = fmaxf(bound, fabsf(s.x) * largest_difference(z.x));
    bound = fmaxf(bound, fabsf(s.y) * largest_difference(z.y));
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, step));
  if (lane == 0) bounds[warp] = bound;
  __syncthreads();
  if (threadIdx.x > 0) return;
  factors[group] = factor_of(fmaxf(fmaxf(bounds[0], bounds[1]), fmaxf(bounds[2], bounds[3])));
}
#endif
