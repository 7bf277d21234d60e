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

// Four partial sums, or zeros. Written out, or the compiler makes load, addition and branch of every split.
// Not the read-only path: these were written while this grid may already have been resident.
__device__ inline float4 partial_or_zero(bool inside, const float* from) {
  float4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(from), "r"(int(inside)));
  return v;
}

// Must match `reduce_launch` in split_k.py.
struct ReduceArgs {
  int size,
      stride;  // elements of the output, and from one split's partial sums to the next's (a multiple of 4)
  int splits, lanes;  // lanes: threads of a block that share one element's splits; a power of 2
};

constexpr int REDUCE_THREADS = 256;
constexpr int REDUCE_BATCH = 4;   // splits whose loads a thread has under way together
constexpr int REDUCE_BLOCKS = 6;  // of a multiprocessor: with more, registers are too few for a batch

// out[i] = sum over splits of partials[split][i], in a fixed order. A block covers REDUCE_THREADS/lanes
// groups of four elements; lane y adds splits y, y + lanes, ... and the lanes meet in shared memory. Launched
// before the partials are complete: it waits for them here.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, REDUCE_BLOCKS)
    reduce_splits(const float* partials, Output* out, const __grid_constant__ ReduceArgs g) {
  __shared__ float4 shared[REDUCE_THREADS];
  const int lanes = g.lanes, log_lanes = 31 - __clz(lanes), columns = REDUCE_THREADS >> log_lanes;
  const int column = threadIdx.x & (columns - 1), lane = (threadIdx.x - column) * lanes / REDUCE_THREADS;
  const int i = (blockIdx.x * columns + column) * 4;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (i < g.size) {
    const size_t step = size_t(g.stride) << log_lanes;
    const float* from = partials + size_t(lane) * g.stride + i;
    // So that the address is at hand, and translated, when the wait is over.
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    wait_on_dependent_grids();
#pragma unroll 1
    for (int split = lane; split < g.splits; split += REDUCE_BATCH * lanes, from += REDUCE_BATCH * step) {
      float4 v[REDUCE_BATCH];
#pragma unroll
      for (int b = 0; b < REDUCE_BATCH; ++b) {
        v[b] = partial_or_zero(split + b * lanes < g.splits, from + b * step);
      }
#pragma unroll
      for (int b = 0; b < REDUCE_BATCH; ++b) {
        sum.x += v[b].x;
        sum.y += v[b].y;
        sum.z += v[b].z;
        sum.w += v[b].w;
      }
    }
  }
  if (lanes > 1) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0) return;
#pragma unroll 4
    for (int other = 1; other < lanes; ++other) {
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
