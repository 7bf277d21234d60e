// Which rows each group of a grouped product has.

#include "device/ptx.cuh"

// ends[i] = the row behind group i, at most `rows`, in shared memory; of `groups` groups. Negative sizes
// count as 0. All lanes of a warp call it.
__device__ inline void find_groups(const int* sizes, int groups, int rows, int* ends) {
  constexpr int AT_A_TIME = 8;  // loads of a lane under way
  const int lane = threadIdx.x % 32;
  const uint32_t most = rows;
  uint32_t before = 0;
#pragma unroll 1
  for (int base = 0; base < groups; base += 32 * AT_A_TIME) {
    uint32_t end[AT_A_TIME];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int group = base + 32 * i + lane;
      end[i] = group < groups ? min(uint32_t(max(__ldg(sizes + group), 0)), most) : 0;
    }
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      if (base + 32 * i >= groups) break;
      // Both summands are below 2**31.
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const uint32_t left = __shfl_up_sync(~0u, end[i], by);
        if (lane >= by) end[i] = min(end[i] + left, most);
      }
      end[i] = min(end[i] + before, most);
      before = __shfl_sync(~0u, end[i], 31);
      if (base + 32 * i + lane < groups) ends[base + 32 * i + lane] = end[i];
    }
  }
  __syncwarp();
}
