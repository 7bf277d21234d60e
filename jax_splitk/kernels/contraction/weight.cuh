// Transposes a forward pass's weight in the workspace, where TMA cannot load it MN-major or takes longer
// (`transposes` in im2col_config.py): from [taps][k of a group][columns of all groups] to [taps][columns of a
// group][k of all groups], the layout of an input gradient's weight. The kernel that multiplies it is
// resident by then.
//
// A thread block transposes 32 x 32 elements of a tap and group.
//
// Macro: ELEMENT.

#include "device/output.cuh"
#include "device/ptx.cuh"
#include "structs.cuh"

constexpr int WEIGHT_THREADS = 256, WEIGHT_SIDE = 32;

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS)
    KERNEL(_transpose)(const TypeOf<ELEMENT>::type* from, TypeOf<ELEMENT>::type* to,
                       const __grid_constant__ WeightArgs g) {
  __shared__ TypeOf<ELEMENT>::type part[WEIGHT_SIDE][WEIGHT_SIDE + 1];
  launch_dependent_grids();
  int tap = blockIdx.x;
  const int n0 = take(tap, g.tiles_n) * WEIGHT_SIDE, k0 = take(tap, g.tiles_k) * WEIGHT_SIDE;
  const int group = take(tap, g.groups);
  const int lane = threadIdx.x % WEIGHT_SIDE, first = threadIdx.x / WEIGHT_SIDE;
  constexpr int STEP = WEIGHT_THREADS / WEIGHT_SIDE;
  from += size_t(tap) * g.k * g.n * g.groups.value;
  to += size_t(tap) * g.k * g.n * g.groups.value;
#pragma unroll
  for (int i = first; i < WEIGHT_SIDE; i += STEP) {
    const int k = k0 + i, n = n0 + lane;
    if (k < g.k && n < g.n) part[i][lane] = from[size_t(k) * g.n * g.groups.value + group * g.n + n];
  }
  __syncthreads();
#pragma unroll
  for (int i = first; i < WEIGHT_SIDE; i += STEP) {
    const int n = n0 + i, k = k0 + lane;
    if (k < g.k && n < g.n) to[size_t(n) * g.k * g.groups.value + group * g.k + k] = part[lane][i];
  }
  fence_async_global();
}
