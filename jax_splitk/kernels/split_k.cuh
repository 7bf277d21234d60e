// What every split-k kernel needs at its end: the output's type, and the kernel that adds the splits' partial
// sums.
//
// Macros: OUT (0 float, 1 bf16, 2 half).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Programmatic dependent launch. CUTLASS's header for these (cutlass/arch/grid_dependency_control.h) takes
// more than a second to compile.
__device__ inline void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_on_dependent_grids() { asm volatile("griddepcontrol.wait;"); }

#if OUT == 0
using Output = float;
#elif OUT == 1
using Output = __nv_bfloat16;
#else
using Output = __half;
#endif

__device__ inline void convert(float x, float& out) { out = x; }
__device__ inline void convert(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }
__device__ inline void convert(float x, __half& out) { out = __float2half_rn(x); }

// N neighbouring values as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Must match `reduce_launch` in split_k.py.
struct ReduceArgs {
  int size,
      stride;  // elements of the output, and from one split's partial sums to the next's (a multiple of 4)
  int splits, lanes;  // lanes: threads of a block that share one element's splits
};

constexpr int REDUCE_THREADS = 256;

// out[i] = sum over splits of partials[split][i], in a fixed order. A block covers REDUCE_THREADS/lanes
// groups of four elements; lane y adds splits y, y + lanes, ... and the lanes meet in shared memory. Launched
// before the partials are complete: it waits for them here.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_splits(const float* partials, Output* out, const __grid_constant__ ReduceArgs g) {
  __shared__ float4 shared[REDUCE_THREADS];
  const int columns = REDUCE_THREADS / g.lanes;
  const int column = threadIdx.x % columns, lane = threadIdx.x / columns;
  const int i = (blockIdx.x * columns + column) * 4;
  wait_on_dependent_grids();
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (i < g.size) {
#pragma unroll 8
    for (int split = lane; split < g.splits; split += g.lanes) {
      // Not the read-only path: these were written while this grid may already have been resident.
      float4 v = __ldcg(reinterpret_cast<const float4*>(partials + size_t(split) * g.stride + i));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
  }
  if (g.lanes > 1) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0) return;
    for (int other = 1; other < g.lanes; ++other) {
      float4 v = shared[other * columns + column];
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
  }
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  Vec<Output, 4> result;
#pragma unroll
  for (int j = 0; j < 4; ++j) convert(sums[j], result.v[j]);
  if (i + 4 <= g.size) {
    *reinterpret_cast<Vec<Output, 4>*>(out + i) = result;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j < g.size) out[i + j] = result.v[j];
    }
  }
}
