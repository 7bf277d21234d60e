// Packed quantized weight times a few rows of activations, for Hopper, by WGMMA: bound by the weight's bytes.
//
//   D[n, m] = sum over k of X[n, k] * (q[m, k] - zero[m, k / GROUP]) * scale[m, k / GROUP]
//
// Persistent: a cluster of CLUSTER blocks divides k, each block keeps its slice of X in shared memory and
// streams its slice of one row tile (64 rows of m) after another through a pipeline that a producer fills by
// bulk copies. A stage holds TILES tiles of 64 rows by 64 k for each consumer warpgroup, in the packed order
// (jax_splitk/quantized/packing.py), and their scales. A lane's 16 bytes become WGMMA's A operand in its
// registers (dequantize.cuh), X is B. The products of a group, or of 64 k of a longer one, are summed by the
// tensor cores, then multiplied by the scale and added in fp32; meanwhile the next tile is dequantized, where
// registers allow for two (IN_FLIGHT). Tiles beyond k repeat the last one, against zeros of X.
//
// With E4M3_PRODUCTS both operands are e4m3 (dequantize_e4m3.cuh): half as many products, and X as it comes
// but for its order within 16 k, which has to be that of the weight's bytes. Each warpgroup reorders its own
// tiles of X when it first meets them, or all reorder what they load. The tensor cores' sums of e4m3, which
// are short, are never longer than those 64 k.
//
// Where a block's slice of X does not fit beside a deep pipeline, X is loaded again for each row tile, with
// the stages, into X_SLOTS places in turn. There are more places than stages, so nobody reads a place any
// more when the stage of its next X may be filled.
//
// Activations that are to be normalized are multiplied by their scale when the consumers first meet them, and
// the sums by the inverse of the root of their mean square (norm.cuh).
//
// At the end of a row tile the warpgroups' sums meet in shared memory, where the epilogue's warps add them,
// and the blocks' in the cluster: each block owns TILE_N / CLUSTER rows of the result, receives the others'
// sums in its inboxes, and adds them, always in the same order, a row tile later.
//
// Roles: consumer warps, then the epilogue's, then the producer's.
// Barriers. Per stage: `full` (one arrival, with the bytes) and `empty` (one arrival per consumer warp).
// `written`, one arrival per consumer warp: its sums are there; `read`, one per warp of the epilogue. Per
// inbox: `arrived` (one arrival of the own block, with the bytes that the cluster's blocks send) and `free`
// (one arrival of each finishing warp of each block: that block has read its inbox; counted where the sender
// waits). All start in phase 0; the first passes of those who wait for room do not wait. Named barriers:
// READY for the block, when these are ready, on which the producer does not wait; 1 for all consumers, when
// they have loaded X; from 2 on for each warpgroup, when it has reordered its tiles of X.
//
// With CHAINED the kernel may start before those before it in the custom call have ended: X and the residual
// may be their results, which it waits for. It does not wait to load the weight's first stages.
//
// An instruction is fetched from the L2 when it first runs in a launch, which costs a small product several
// percent of its time. So the code on the way to the first copies is short and straight, and the end of the
// last row tile runs the code of those before it.
//
// Macros: FORMAT, HALF (dequantize.cuh), X_E4M3, E4M3_PRODUCTS (else X becomes fp16), X_TMA (X comes by TMA,
// else by the consumers' loads), WHOLE (k is a multiple of a stage's), FOURS (m is a multiple of 4), GROUP
// (0: per channel), SCALE_TYPE, ZERO_TYPE, CHANNEL_SCALE (scales.cuh), OUT (output.cuh), those of
// epilogue.cuh and norm.cuh, TABLE (NormalFloat4 by look-ups in shared memory), CHAINED, TILE_N (rows of X),
// WARPGROUPS, TILES, STAGES, CLUSTER, X_SLOTS (0: X stays for all row tiles).

#include "quantized/stream_consume.cuh"
#include "quantized/stream_load.cuh"
#include "quantized/stream_results.cuh"

#if X_TMA
using X = TensorMap;
#else
using X = const void*;
#endif
#if NORM
#define NORM_PARAMETER , const void* norm_scale
#define NORM_ARGUMENT norm_scale
#else
#define NORM_PARAMETER
#define NORM_ARGUMENT nullptr
#endif

extern "C" __global__ __launch_bounds__(THREADS, 1) void KERNEL()(
    const __grid_constant__ X x, const uint8_t* words, const uint8_t* scale, const uint8_t* zero, Output* out,
    const __grid_constant__ Args g CHANNEL_PARAMETER EPILOGUE_PARAMETERS NORM_PARAMETER) {
  extern __shared__ __align__(1024) uint8_t smem[];
#if CHAINED
  launch_dependent_grids();
#endif
  const Block block(g, smem);
  Signals& b = block.barriers;
  const int warp = warp_index();
  if (warp < CONSUMERS / 32 + EPILOGUE_WARPS) {
#if X_TMA
    if (warp == 0 && elect_one()) prefetch_tensor_map(&x);
#endif
    if (warp == CONSUMERS / 32) {
      if (elect_one()) init_barriers(b.written, b.read, b.arrived, b.free);
      __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
    named_sync(THREADS, READY);
    if (warp < CONSUMERS / 32) {
#if TABLE
      fill_table(smem);
#endif
#if !X_TMA
#if CHAINED
      wait_on_dependent_grids();
#endif
      load_x(block, x);
#endif
      consume(block, scale, zero, CHANNEL_ARGUMENT);
    } else {
      if constexpr (CLUSTER > 1) cluster_wait();  // for the other blocks' barriers
#if CHAINED
      wait_on_dependent_grids();  // the residual may be one of their results
#endif
      add_up(block, DESTINATION_OF_PARAMETERS);
    }
    return;
  }
  // The producer does not wait for the others. The compiler puts its code first, for it is the last here.
  const bool leader = elect_one();
  if (leader) {
    init_barriers(b.pipeline);
    fence_async_shared();
  }
  __syncwarp();
  named_arrive(THREADS, READY);
  if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  produce(block, X_TMA ? reinterpret_cast<const TensorMap*>(&x) : nullptr, words, scale, zero, NORM_ARGUMENT,
          leader);
}
