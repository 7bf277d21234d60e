// x of 16 bits, rounded to e4m3: each row over a power of two of its own, which multiplies the row's sums.
// Included by fp8.cu. Macro: X_HALF (x is float16, otherwise bfloat16).

constexpr int ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32;
constexpr int X_TYPE = X_HALF ? HALF_FLOAT : BF16;

// A thread block rounds a row.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    KERNEL(_prepare)(const __grid_constant__ RowsArgs g, const uint4* x, uint2* rounded, float* factors) {
  __shared__ float largest[ROW_WARPS];
  const uint4* from = x + size_t(blockIdx.x) * g.eighths;
  launch_dependent_grids();
  float most = 0.f;
  for (int i = threadIdx.x; i < g.eighths; i += ROW_THREADS) {
    const uint4 v = from[i];
    for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
      const float2 two = to_floats<X_TYPE>(pair);
      most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < ROW_WARPS; ++warp) most = fmaxf(most, largest[warp]);
  const float factor = power_below(most), inverse = 1.f / factor;
  const auto halves = [&](uint32_t pair) {
    const float2 two = to_floats<X_TYPE>(pair);
    return to_f16x2(two.x * inverse, two.y * inverse);
  };
  for (int i = threadIdx.x; i < g.eighths; i += ROW_THREADS) {
    const uint4 v = from[i];
    rounded[size_t(blockIdx.x) * g.eighths + i] = {f16x4_to_e4m3x4(halves(v.x), halves(v.y)),
                                                   f16x4_to_e4m3x4(halves(v.z), halves(v.w))};
  }
  if (threadIdx.x == 0) factors[blockIdx.x] = factor;
  fence_async_global();  // TMA reads what was stored here
}

// Multiplies a lane's sums by the factors of their rows of x, which begin at the tile's first one.
__device__ inline void scale_columns(const float* factors, TileSums& acc) {
  wait_on_dependent_grids();
  const float* own = factors + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILE_N / 8; ++j) {
    const float2 factor = __ldcg(reinterpret_cast<const float2*>(own + j * 8));
    acc[4 * j] *= factor.x;
    acc[4 * j + 1] *= factor.y;
    acc[4 * j + 2] *= factor.x;
    acc[4 * j + 3] *= factor.y;
  }
}
