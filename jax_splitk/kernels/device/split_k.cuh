// What every split-k kernel needs at its end: the kernel that adds the splits' partial sums.
//
// Macros: KERNEL(role) (a kernel's name), OUT (output.cuh), DISCARD (0 by default; splits' partial sums are
// whole lines of the L2, and so many that the reduction gives them up).

#include "device/output.cuh"
#include "device/ptx.cuh"
#include "structs.cuh"

__device__ inline void add_partial(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

constexpr int REDUCE_THREADS = 256;
constexpr int REDUCE_BATCH = 4;   // splits whose loads a thread has under way together
constexpr int REDUCE_BLOCKS = 6;  // of a multiprocessor: with more, registers are too few for a batch

// The sum of the splits `split`, `split + lanes`, ... of four neighbouring elements, which lie `step` apart.
__device__ inline float4 add_splits(const float* from, size_t step, int split, int splits, int lanes) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (; split < splits; split += REDUCE_BATCH * lanes, from += REDUCE_BATCH * step) {
    float4 v[REDUCE_BATCH];
#pragma unroll
    for (int b = 0; b < REDUCE_BATCH; ++b) {
      v[b] = load_l2_or_zero(split + b * lanes < splits, from + b * step);
    }
#pragma unroll
    for (int b = 0; b < REDUCE_BATCH; ++b) add_partial(sum, v[b]);
  }
  return sum;
}

// Adds what the lanes of each of a block's columns have; true in the thread that then has it all, lane 0.
__device__ inline bool add_lanes(float4& sum, int lanes, int columns, int column) {
  if (lanes == 1) return true;
  __shared__ float4 shared[REDUCE_THREADS];
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= columns) return false;
#pragma unroll 4
  for (int other = 1; other < lanes; ++other) add_partial(sum, shared[other * columns + column]);
  return true;
}

// out[i] = sum over splits of partials[split][i], in a fixed order. A block covers REDUCE_THREADS/lanes
// groups of four elements; lane y adds splits y, y + lanes, ... and the lanes meet in shared memory. Launched
// before the partials are complete: it waits for them here.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, REDUCE_BLOCKS)
    KERNEL(_reduce_splits)(const float* partials, Output* out, const __grid_constant__ ReduceArgs g) {
  const int lanes = g.lanes, log_lanes = 31 - __clz(lanes), columns = REDUCE_THREADS >> log_lanes;
  const int column = threadIdx.x & (columns - 1), lane = (threadIdx.x - column) * lanes / REDUCE_THREADS;
  const int i = (blockIdx.x * columns + column) * 4;
  const size_t step = size_t(g.stride) << log_lanes;
  const float* from = partials + size_t(lane) * g.stride + i;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (i < g.size) {
    // So that the address is at hand, and translated, when the wait is over.
    prefetch_l2(from);
    wait_on_dependent_grids();
    sum = add_splits(from, step, lane, g.splits, lanes);
  }
#if DISCARD
  // Nobody reads the partial sums again, but they lie in the L2 as modified lines, which the next kernels'
  // data would push out to memory: gives up the whole lines of 128 bytes. A warp has read them together.
  __syncwarp();
  constexpr int LINE = 128 / sizeof(float);
  if (column % (LINE / 4) == 0 && i + LINE <= g.size && reinterpret_cast<uintptr_t>(partials) % 128 == 0) {
#pragma unroll 1
    for (int split = lane; split < g.splits; split += lanes, from += step) {
      discard_l2(from);
    }
  }
#endif
  if (!add_lanes(sum, lanes, columns, column)) return;
  const Vec<Output, 4> result = converted<Output>({sum.x, sum.y, sum.z, sum.w});
  if (i + 4 <= g.size) {
    *reinterpret_cast<Vec<Output, 4>*>(out + i) = result;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j < g.size) out[i + j] = result.v[j];
    }
  }
}

// Parameters of kernels that load both inputs by TMA.
#define MAPS_AND_ARGS                                                                \
  const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map, \
      const __grid_constant__ Args g

// Defines a source's main kernel, which calls wgrad(arguments, to): KERNEL(_partial) writes partial sums of
// the splits, KERNEL(_direct) the output itself. The lists are in parentheses. Macros: CTAS_PER_SM, REDUCTION
// (whether the kernel is the former).
#define UNPACK(...) __VA_ARGS__
#define SPLIT_K_KERNEL(name, parameters, arguments, T)                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) name(UNPACK parameters, T* to) { \
    wgrad(UNPACK arguments, to);                                                                      \
  }
#if REDUCTION
#define SPLIT_K_KERNELS(parameters, arguments) SPLIT_K_KERNEL(KERNEL(_partial), parameters, arguments, float)
#else
#define SPLIT_K_KERNELS(parameters, arguments) SPLIT_K_KERNEL(KERNEL(_direct), parameters, arguments, Output)
#endif
