// An output tile of 64-row blocks by WGMMA, from a pipeline whose stages hold rows of 128 bytes under the
// 128-byte swizzle: TILE_M of A, then TILE_N of B. An operand is K-major (a row is of m or n), or MN-major
// (a row is of k, and 64 elements along MN). Other rows are the caller's (`Operand`).
//
// Macros: TILE_M, TILE_N, STAGES, CTAS_PER_SM (several consumer warpgroups share one block's registers), and
// with defaults TAPS (1; so many weights a stage has for the same pixels, of which it then has 8 more), SWAP
// (0; the weights are A), TEAMS (1; of consumer warpgroups that have a tile together), PERSISTENT (0;
// warpgroup 0 has more to do), CHAIN (0; the most stages that the tensor cores add, for they keep too few
// bits of longer sums), EMPTY (0; there may be no stage), LAST_STEPS (4; so many instructions have all of the
// k of a tap's last block that is not zeros), MIXED (0; a tap has other blocks before the last one),
// STATIONARY (0; the weights lie apart from the stages, all of them at once).

#include "device/pipeline.cuh"
#include "device/wgmma.cuh"

#ifndef TEAMS
#define TEAMS 1
#endif
#ifndef PERSISTENT
#define PERSISTENT 0
#endif

constexpr int BLOCK_BYTES = 64 * 128;
[[maybe_unused]] constexpr int M_BLOCKS = TILE_M / 64, N_BLOCKS = (TILE_N + 63) / 64;
#ifndef TAPS
#define TAPS 1
#endif
#ifndef SWAP
#define SWAP 0
#endif
#ifndef CHAIN
#define CHAIN 0
#endif
#ifndef EMPTY
#define EMPTY 0
#endif
#ifndef LAST_STEPS
#define LAST_STEPS 4
#endif
#ifndef MIXED
#define MIXED 0
#endif
#ifndef STATIONARY
#define STATIONARY 0
#endif
constexpr int REACH = TAPS > 1 ? 8 : 0, WEIGHTS = STATIONARY ? 0 : TAPS;  // of a stage
constexpr int A_BYTES = (SWAP ? WEIGHTS * TILE_M : TILE_M + REACH) * 128;
// Rows of a stage for TILE_N columns: boxes of 64 columns of an MN-major operand are whole.
constexpr int N_ROWS = TILE_N <= 32 ? TILE_N : N_BLOCKS * 64;
constexpr int STAGE_BYTES = A_BYTES + (SWAP ? TILE_N + REACH : WEIGHTS * N_ROWS) * 128;
// 256 rows go to two warpgroups of two 64-row blocks each, where the accumulators fit.
constexpr int CONSUMERS = TILE_M == 256 && TILE_N <= 128 ? 2 : M_BLOCKS;
constexpr int M_PER_WG = M_BLOCKS / CONSUMERS;
constexpr int ACCUMULATORS = TILE_N / 2;  // per thread and 64-row block
constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int THREADS = 128 + TEAMS * CONSUMER_THREADS;
// One consumer has enough registers without.
constexpr bool SHARE_REGISTERS = TEAMS * CONSUMERS > 1;
constexpr int PRODUCER_REGS = CONSUMERS == 4   ? 24
                              : PERSISTENT     ? (CONSUMERS == 3 ? 72 : 64)
                              : CONSUMERS == 3 ? 32
                                               : 40;
constexpr int CONSUMER_REGS = consumer_registers(TEAMS * CONSUMERS, PRODUCER_REGS, CTAS_PER_SM);

using Accumulator = float[M_PER_WG][ACCUMULATORS];

// Bytes from one instruction's k to the next's.
[[maybe_unused]] constexpr int K_MAJOR_STEP = 32, MN_MAJOR_STEP = 16 * 128;

// How an operand lies in a stage: rows of WIDTH bytes under the swizzle of as many, MN-major ones with
// LEADING bytes from one row's worth of MN to the next. STEP bytes lead to the next instruction's k, and
// PART, after STEPS of them, to the next part of a stage that has several. A PACKED operand has no gaps where
// a tap has only `steps` instructions of a stage.
template <int STEP, int WIDTH = 128, int LEADING = BLOCK_BYTES, int STEPS = 4, int PART = 0,
          bool PACKED = false>
struct Operand {
  static constexpr auto SWIZZLE = WIDTH == 128 ? Swizzle::B128 : WIDTH == 64 ? Swizzle::B64 : Swizzle::B32;

  __device__ static uint64_t at(uint32_t address) { return operand(address, LEADING, 8 * WIDTH, SWIZZLE); }
  static constexpr int offset(int k, int steps) {
    if (PACKED) k = k / 4 * steps + k % 4;
    return k / STEPS * PART + k % STEPS * STEP;
  }
};
using KMajor = Operand<K_MAJOR_STEP>;
using MnMajor = Operand<MN_MAJOR_STEP>;

// An operand's part of a stage. An MN-major one has a dimension of its own for each 64 elements along MN
// (WHOLE), or a box of BYTES for each, where these do not come out even.
template <bool MN_MAJOR, bool WHOLE, int BLOCKS, int BYTES = BLOCK_BYTES>
__device__ inline void load_operand(const TensorMap& map, uint64_t* full, uint32_t to, int mn, int k,
                                    int batch, uint64_t hint) {
  if constexpr (!MN_MAJOR) {
    load_tile(&map, full, hint, shared_pointer(to), k, mn, batch);
  } else if constexpr (WHOLE) {
    load_tile(&map, full, hint, shared_pointer(to), 0, k, mn / 64, batch);
  } else {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      load_tile(&map, full, hint, shared_pointer(to + i * BYTES), mn + 64 * i, k, batch);
    }
  }
}

__device__ inline uint64_t hint_for(int once) { return once ? EVICT_FIRST : EVICT_NORMAL; }

// The block of k that the next stage has, among the `count` of a tap: the stage after that has the one `step`
// blocks later, of the same tap or of another. Only MIXED products need it. `weight`: where the weights of a
// STATIONARY product are for the next stage.
struct TapBlock {
  int count = 1, step = 0, now = 0;
  uint32_t weight = 0;

  __device__ bool is_last() const { return now == count - 1; }
  __device__ void advance() {
    now += step;
    if (now >= count) now -= count;
  }
};

// acc = the sum of A * B over `blocks` stages from `at` on. The warpgroup has the blocks `warpgroup`,
// `warpgroup + CONSUMERS`, ... of A's rows. Returns the last stage, whose products are still under way.
// `Kernel` has the layout: see tile_kernel.cuh.
template <class Kernel, class Ring>
__device__ inline int multiply(uint32_t stages, Ring& pipeline, int blocks, int warpgroup, Accumulator& acc,
                               Position& at, [[maybe_unused]] TapBlock& of_tap) {
  using A = typename Kernel::A;
  using B = typename Kernel::B;
  using Weight = conditional_t<SWAP, A, B>;
  int previous = -1;
  GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    pipeline.wait_full(at);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
    const uint32_t a_at = STATIONARY && SWAP ? of_tap.weight : stage;
    const uint64_t b = B::at(STATIONARY && !SWAP ? of_tap.weight : stage + A_BYTES);
    const auto products = [&](int steps) {
#pragma unroll
      for (int k = 0; k < 4 * TAPS; ++k) {
        if (k % 4 >= steps) continue;
#pragma unroll
        for (int m = 0; m < M_PER_WG; ++m) {
          const uint64_t a = A::at(a_at + warpgroup * Kernel::A_BLOCK + m * CONSUMERS * Kernel::A_BLOCK);
          wgmma<typename Kernel::Wgmma>(a + (A::offset(k, steps) >> 4), b + (B::offset(k, steps) >> 4),
                                        acc[m], scale);
        }
        scale = GMMA::ScaleOut::One;
      }
      if constexpr (STATIONARY) of_tap.weight += Weight::offset(4 * TAPS, steps);
    };
    // Each batch has code of its own: the compiler may serialize products under conditions.
    if (MIXED && !of_tap.is_last()) {
      batch([&] { products(4); }, acc);
    } else {
      batch([&] { products(LAST_STEPS); }, acc);
    }
    if constexpr (MIXED) of_tap.advance();
    // The batch before this one has retired, so the stage it read may be filled again.
    wait_batches<1>(acc);
    if (previous >= 0 && threadIdx.x % 128 == 0) pipeline.release(previous);
    previous = at.stage;
    at.advance(STAGES);
  }
  return previous;
}

__device__ inline void clear(Accumulator& acc) {
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) acc[m][j] = 0.f;
  }
}

// sums = the sum of A * B over `blocks` stages, with all products retired. Sums of chains are added in fp32.
template <class Kernel, class Ring>
__device__ inline void consume(uint32_t stages, Ring& pipeline, int blocks, int warpgroup, Accumulator& sums,
                               TapBlock of_tap) {
  Position at;
#if !CHAIN
  multiply<Kernel>(stages, pipeline, blocks, warpgroup, sums, at, of_tap);
  wait_batches<0>(sums);
  if (EMPTY && blocks == 0) clear(sums);
#else
  clear(sums);
#pragma unroll 1
  for (; blocks > 0; blocks -= CHAIN) {
    Accumulator acc;
    const int last = multiply<Kernel>(stages, pipeline, min(blocks, CHAIN), warpgroup, acc, at, of_tap);
    wait_batches<0>(acc);
    if (threadIdx.x % 128 == 0) pipeline.release(last);
#pragma unroll
    for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
      for (int j = 0; j < ACCUMULATORS; ++j) sums[m][j] += acc[m][j];
    }
  }
#endif
}
