// Packed quantized weight times a few rows of activations, for Hopper, by mma.sync: bound by the weight's bytes.
//
//   D[n, m] = sum over k of X[n, k] * (q[m, k] - zero[m, k / GROUP]) * scale[m, k / GROUP]
//
// Persistent: a cluster of CLUSTER blocks divides k, each block keeps its slice of X in shared memory and streams its
// slice of one row tile (64 rows of m) after another through a ring that a producer thread fills by bulk copies. A stage
// holds K_WARPS tiles of 64 rows by 64 k, in the packed order (jax_splitk/quantized/packing.py), and their scales. Each
// consumer warp takes one of these tiles and BLOCKS of its four blocks of 16 rows; a lane's 16 bytes become the A
// operand in its registers (dequantize.cuh), X is B, by ldmatrix. The products of a group are summed by the tensor
// cores, then multiplied by the scale and added in fp32.
//
// At the end of a row tile the warps' sums meet in shared memory, where the epilogue's warps add them, and the blocks' in
// the cluster: each block owns TILE_N / CLUSTER rows of the result, receives the others' sums in its slots, and adds them,
// always in the same order, a row tile later.
//
// Roles: consumer warps, then the producer's, then the epilogue's.
// Barriers. Per stage: `full` (one arrival, with the bytes) and `empty` (one arrival per consumer warp). `written`, one arrival per consumer warp: its sums are there; `read`, one per warp of the epilogue. Per slot:
// `arrived` (one arrival of the own block, with the bytes that the cluster's blocks send) and `free` (one arrival of each
// finishing warp of each block: that block has read its slot; counted where the sender waits). All start in phase 0; the
// first passes of those who wait for room do not wait.
//
// Macros: FORMAT, HALF (dequantize.cuh), X_E4M3, X_TMA (X comes by TMA, else by the consumers' loads), GROUP (0: per channel),
// SCALE_TYPE, ZERO_TYPE and OUT_TYPE (0 float32, 1 bfloat16, 2 float16; ZERO_TYPE also -1: none), N_TILES (of 8 rows of
// X), BLOCKS, K_WARPS, STAGES, CLUSTER.

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/arch/barrier.h>

#include "dequantize.cuh"

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Must match `_args` in mixed_mma.py.
struct Args {
  int rows;          // n
  int k;             // elements of a row of X
  int features;      // m
  int feature_tiles;
  int k_tiles;       // of 64
  int groups;        // of a row tile's scales
};

template <int TYPE>
struct TypeOf;
template <>
struct TypeOf<0> {
  using type = float;
};
template <>
struct TypeOf<1> {
  using type = __nv_bfloat16;
};
template <>
struct TypeOf<2> {
  using type = __half;
};
using Scale = TypeOf<SCALE_TYPE>::type;
using Zero = TypeOf<ZERO_TYPE < 0 ? 0 : ZERO_TYPE>::type;
using Out = TypeOf<OUT_TYPE>::type;

constexpr int TILE_N = 8 * N_TILES;
constexpr int ROW_WARPS = 4 / BLOCKS, WARPS = ROW_WARPS * K_WARPS, CONSUMERS = 32 * WARPS, EPILOGUE_WARPS = 4, EPILOGUE = 32 * EPILOGUE_WARPS;
constexpr int THREADS = CONSUMERS + 32 + EPILOGUE;

constexpr int WORDS_BYTES = WORDS * 2048;  // of a tile of 64 by 64
constexpr int TILE_GROUPS = GROUP && GROUP < 64 ? 64 / GROUP : 1, STEPS = 4 / TILE_GROUPS;  // of a tile; of a group in it
constexpr int STAGE_GROUPS = GROUP ? K_WARPS * 64 / GROUP : 0;
constexpr int SCALES_OFFSET = K_WARPS * WORDS_BYTES;
constexpr int ZEROS_OFFSET = SCALES_OFFSET + STAGE_GROUPS * 64 * int(sizeof(Scale));
constexpr int STAGE_BYTES = ZEROS_OFFSET + (ZERO_TYPE < 0 ? 0 : STAGE_GROUPS * 64 * int(sizeof(Zero)));

constexpr int SUMS_PITCH = 64 + 4;  // floats; lanes of a fragment write to different banks
constexpr int SUMS_BYTES = K_WARPS * TILE_N * SUMS_PITCH * 4;
constexpr int SLOTS = CLUSTER > 1 ? 2 : 0;
constexpr int SLOT_BYTES = TILE_N * 64 * 4, PART_ROWS = TILE_N / CLUSTER;
constexpr int PART_ITEMS = PART_ROWS * 16;  // groups of 4 features
constexpr int FINISHERS = PART_ITEMS >= EPILOGUE ? EPILOGUE_WARPS : (PART_ITEMS + 31) / 32;  // warps

constexpr int SUMS_AT = STAGES * STAGE_BYTES, SLOTS_AT = SUMS_AT + SUMS_BYTES;
constexpr int BARRIERS_AT = SLOTS_AT + SLOTS * SLOT_BYTES;
constexpr int X_AT = (BARRIERS_AT + 384 + 1023) / 1024 * 1024, X_TILE = TILE_N * 128;  // of 64 k


struct Barriers {
  uint64_t full[STAGES], empty[STAGES], written, read, arrived[SLOTS + 1], free[SLOTS + 1];
};
static_assert(sizeof(Barriers) <= X_AT - BARRIERS_AT, "barriers");

struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ inline void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The part of k of one block, in stages; it may not be empty.
struct Slice {
  int first, last;
};

// ---- producer -------------------------------------------------------------------------------------------------------

// All lanes of the producer's warp. X comes with the stages of the first row tile, so that the products need not wait
// for all of it.
__device__ inline void produce(const Args& g, const TensorMap* x_map, const uint8_t* words, const Scale* scale,
                               const Zero* zero, uint8_t* smem, Barriers& barriers, Slice slice, int tile,
                               int clusters) {
  const int lane = threadIdx.x % 32;
  Ring ring;
  for (bool first = X_TMA; tile < g.feature_tiles; tile += clusters, first = false) {
    for (int s = slice.first; s < slice.last; ++s, ring.advance()) {
      uint64_t* full = &barriers.full[ring.stage];
      const int kt = s * K_WARPS, tiles = min(K_WARPS, g.k_tiles - kt);
      if (lane == 0) {
        uint8_t* stage = smem + ring.stage * STAGE_BYTES;
        const int groups = GROUP ? tiles * 64 / (GROUP ? GROUP : 1) : 0;
        const int64_t group = int64_t(tile) * g.groups + (GROUP ? kt * 64 / (GROUP ? GROUP : 1) : 0);
        const int scale_bytes = groups * 64 * int(sizeof(Scale));
        const int zero_bytes = ZERO_TYPE < 0 ? 0 : groups * 64 * int(sizeof(Zero));
        EmptyBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
        FullBarrier::arrive_and_expect_tx(
            full, tiles * WORDS_BYTES + scale_bytes + zero_bytes + (first ? tiles * X_TILE : 0));
        cute::SM90_BULK_COPY_G2S::copy(words + (int64_t(tile) * g.k_tiles + kt) * WORDS_BYTES, full, stage,
                                       tiles * WORDS_BYTES);
        if constexpr (GROUP != 0) {
          cute::SM90_BULK_COPY_G2S::copy(scale + group * 64, full, stage + SCALES_OFFSET, scale_bytes);
          if constexpr (ZERO_TYPE >= 0) {
            cute::SM90_BULK_COPY_G2S::copy(zero + group * 64, full, stage + ZEROS_OFFSET, zero_bytes);
          }
        }
      }
      if (first) {
        __syncwarp();
        constexpr uint64_t hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
        uint8_t* to = smem + X_AT + ((s - slice.first) * K_WARPS + lane) * X_TILE;
        if (lane < tiles) cute::SM90_TMA_LOAD_2D::copy(x_map, full, hint, to, (kt + lane) * 64, 0);
      }
    }
  }
}

// ---- X --------------------------------------------------------------------------------------------------------------

// X's slice in shared memory is tiles of TILE_N rows by 64 k of a 16-bit type, zero where X has none, under the 128-byte
// swizzle. Where TMA cannot bring it, the consumers do.
[[maybe_unused]] __device__ inline void load_x(const Args& g, const void* x, uint8_t* to, Slice slice) {
  const int first = slice.first * K_WARPS * 64, pairs = (min(slice.last * K_WARPS, g.k_tiles) * 64 - first) / 2;
  for (int n = 0; n < TILE_N; ++n) {
    const int64_t row = int64_t(n) * g.k;
#pragma unroll 4
    for (int i = threadIdx.x; i < pairs; i += CONSUMERS) {
      uint32_t pair = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int k = first + 2 * i + j;
        uint16_t bits = 0;
        if (n < g.rows && k < g.k) {
          if constexpr (X_E4M3) {
            const uint16_t code = static_cast<const uint8_t*>(x)[row + k];
            uint32_t halves;
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(code));
            bits = uint16_t(halves);
          } else {
            bits = static_cast<const uint16_t*>(x)[row + k];
          }
        }
        pair |= uint32_t(bits) << (16 * j);
      }
      const int chunk = i % 32 / 4;  // of 16 bytes
      *reinterpret_cast<uint32_t*>(to + i / 32 * X_TILE + n * 128 + (chunk ^ n % 8) * 16 + i % 4 * 4) = pair;
    }
  }
  cutlass::arch::NamedBarrier::sync(CONSUMERS, 1);
}

// ---- consumers ------------------------------------------------------------------------------------------------------

__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  if constexpr (HALF) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                            c[3]);
  } else {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                              c[3]);
  }
}

// Scales (or zero points) of rows g and g + 8 of a block, which are neighbours.
__device__ inline float2 two_floats(const float* pair) { return *reinterpret_cast<const float2*>(pair); }
__device__ inline float2 two_floats(const __half* pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(pair));
}
__device__ inline float2 two_floats(const __nv_bfloat16* pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pair));
}
template <typename T>
__device__ inline float2 two_rows(uint32_t address) {  // in shared memory
  struct alignas(2 * sizeof(T)) {
    T v[2];
  } pair;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.v[0]), "=f"(pair.v[1]) : "r"(address));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(reinterpret_cast<uint32_t&>(pair)) : "r"(address));
  }
  return two_floats(pair.v);
}

// acc += scale * (sums - zero * sum of x), rows g (elements 0, 1) and g + 8.
__device__ inline void add_scaled(float (&acc)[4], const float (&sums)[4], float2 scale, float2 zero,
                                  const float (&x_sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = sums[i];
    if constexpr (ZERO_TYPE >= 0) value = fmaf(i < 2 ? -zero.x : -zero.y, x_sums[i], value);
    acc[i] = fmaf(i < 2 ? scale.x : scale.y, value, acc[i]);
  }
}

struct Sums {
  float rows[BLOCKS][N_TILES][4];
  float x[N_TILES][4];  // per channel, with zero points: sums of x
};

__device__ inline uint4 load16(uint32_t address) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(address));
  return out;
}

// What a lane adds to a stage's address and to X's.
struct Lane {
  uint32_t words, scales, zeros, x;
};

// One tile of 64 k for this warp's blocks: of the stage and of X at the addresses.
__device__ inline void multiply(Sums& sums, uint32_t stage, uint32_t x, const Lane& lane) {
  const float none[4] = {0.f, 0.f, 0.f, 0.f};
  uint32_t words[BLOCKS][WORDS][4];
#pragma unroll
  for (int r = 0; r < BLOCKS; ++r) {
#pragma unroll
    for (int h = 0; h < WORDS; ++h) {
      const uint4 loaded = load16(stage + lane.words + (r * WORDS + h) * 512);
      words[r][h][0] = loaded.x, words[r][h][1] = loaded.y, words[r][h][2] = loaded.z, words[r][h][3] = loaded.w;
    }
  }
  uint32_t b[N_TILES][8];
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = x + (lane.x ^ h * 64) + n * 1024;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[n][4 * h]), "=r"(b[n][4 * h + 1]), "=r"(b[n][4 * h + 2]), "=r"(b[n][4 * h + 3])
                   : "r"(from));
    }
  }
#pragma unroll
  for (int part = 0; part < TILE_GROUPS; ++part) {
    [[maybe_unused]] float x_sums[N_TILES][4];
    if constexpr (ZERO_TYPE >= 0) {  // times 1 / FACTOR, as the products are
      constexpr uint32_t one = twice(HALF ? 0x3c00 : FACTOR == 64.f ? 0x3c80 : 0x3f80);
      const uint32_t ones[4] = {one, one, one, one};
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int j = part * STEPS + step;
          if constexpr (GROUP != 0) {
            mma(x_sums[n], ones, b[n][2 * j], b[n][2 * j + 1], *(step ? &x_sums[n] : &none));
          } else {
            mma(sums.x[n], ones, b[n][2 * j], b[n][2 * j + 1], sums.x[n]);
          }
        }
      }
    }
    [[maybe_unused]] float partial[BLOCKS][N_TILES][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int j = part * STEPS + step;
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
        uint32_t a[4], from[WORDS];
        if constexpr (WORDS == 1) {
          from[0] = words[r][0][j];
        } else {
          from[0] = words[r][j / 2 % WORDS][j % 2 * 2], from[WORDS - 1] = words[r][j / 2 % WORDS][j % 2 * 2 + 1];
        }
        dequantize(from, a);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if constexpr (GROUP != 0) {
            mma(partial[r][n], a, b[n][2 * j], b[n][2 * j + 1], *(step ? &partial[r][n] : &none));
          } else {
            mma(sums.rows[r][n], a, b[n][2 * j], b[n][2 * j + 1], sums.rows[r][n]);
          }
        }
      }
    }
    if constexpr (GROUP != 0) {
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
        const float2 scale = two_rows<Scale>(stage + lane.scales + (part * 64 + r * 16) * int(sizeof(Scale)));
        float2 zero{};
        if constexpr (ZERO_TYPE >= 0) zero = two_rows<Zero>(stage + lane.zeros + (part * 64 + r * 16) * int(sizeof(Zero)));
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) add_scaled(sums.rows[r][n], partial[r][n], scale, zero, x_sums[n]);
      }
    }
  }
}

// ---- results --------------------------------------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* pointer) { return cute::cast_smem_ptr_to_uint(pointer); }

// Four features of one row of the result.
__device__ inline void store(const Args& g, Out* out, int n, int feature, float4 value) {
  if (n >= g.rows) return;
  const float values[4] = {value.x * FACTOR, value.y * FACTOR, value.z * FACTOR, value.w * FACTOR};
  Out* to = out + int64_t(n) * g.features + feature;
  struct alignas(4 * sizeof(Out)) Four {
    Out v[4];
  } four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.v[i] = Out(values[i]);
  if (g.features % 4 == 0) {
    if (feature < g.features) *reinterpret_cast<Four*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (feature + i < g.features) to[i] = four.v[i];
    }
  }
}

// Adds what the cluster's blocks sent for this block's rows of the result, and tells them that the slot is free.
__device__ inline void finish(const Args& g, Out* out, const uint8_t* slots, Barriers& barriers, int thread, int count,
                              int tile, int rank) {
  const int slot = count % 2;
  if (thread >= 32 * FINISHERS) return;
  FullBarrier::wait(&barriers.arrived[slot], count / 2 & 1);
  for (int item = thread; item < PART_ITEMS; item += EPILOGUE) {
    const float4* from = reinterpret_cast<const float4*>(slots + slot * SLOT_BYTES) + item;
    float4 sum = from[0];
#pragma unroll
    for (int s = 1; s < CLUSTER; ++s) {
      const float4 more = from[s * PART_ITEMS];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    store(g, out, rank * PART_ROWS + item / 16, tile * 64 + item % 16 * 4, sum);
  }
  __syncwarp();
  if (thread % 32 < CLUSTER) EmptyBarrier::arrive(&barriers.free[slot], thread % 32, 1);
}

// The sums of all warps, to the result or to the blocks that own them.
__device__ inline void epilogue(const Args& g, Out* out, uint8_t* smem, Barriers& barriers, int tile, int clusters,
                                int rank) {
  const int thread = threadIdx.x - CONSUMERS - 32;
  const float* sums = reinterpret_cast<const float*>(smem + SUMS_AT);
  uint8_t* slots = smem + SLOTS_AT;
  int count = 0, previous = 0;
  for (; tile < g.feature_tiles; previous = tile, tile += clusters, ++count) {
    [[maybe_unused]] const int slot = count % 2;
    if constexpr (CLUSTER > 1) {
      if (thread == 0) FullBarrier::arrive_and_expect_tx(&barriers.arrived[slot], SLOT_BYTES);
      if (count >= 2) EmptyBarrier::wait(&barriers.free[slot], (count / 2 - 1) & 1);
    }
    FullBarrier::wait(&barriers.written, count & 1);
    for (int item = thread; item < TILE_N * 16; item += EPILOGUE) {
      const int n = item / 16;
      const float* from = sums + n * SUMS_PITCH + item % 16 * 4;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int w = 1; w < K_WARPS; ++w) {
        const float4 more = *reinterpret_cast<const float4*>(from + w * TILE_N * SUMS_PITCH);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      if constexpr (CLUSTER == 1) {
        store(g, out, n, tile * 64 + item % 16 * 4, sum);
      } else {
        const int owner = n / PART_ROWS;
        const uint32_t to = shared_address(slots + slot * SLOT_BYTES) + (rank * PART_ITEMS + item % PART_ITEMS) * 16;
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                cute::set_block_rank(to, owner)),
            "r"(cute::set_block_rank(shared_address(&barriers.arrived[slot]), owner)), "r"(__float_as_uint(sum.x)),
            "r"(__float_as_uint(sum.y)), "r"(__float_as_uint(sum.z)), "r"(__float_as_uint(sum.w))
            : "memory");
      }
    }
    __syncwarp();
    if (thread % 32 == 0) EmptyBarrier::arrive(&barriers.read);
    if (CLUSTER > 1 && count) finish(g, out, slots, barriers, thread, count - 1, previous, rank);
  }
  if (CLUSTER > 1 && count) finish(g, out, slots, barriers, thread, count - 1, previous, rank);
}

// ---- roles ----------------------------------------------------------------------------------------------------------

__device__ inline void consume(const Args& g, const Scale* scale, const Zero* zero, uint8_t* smem, Barriers& barriers,
                               Slice slice, int tile, int clusters) {
  const int warp = threadIdx.x / 32, id = threadIdx.x % 32, k_warp = warp / ROW_WARPS, row_warp = warp % ROW_WARPS;
  const int rows = row_warp * BLOCKS * 16 + id / 4 * 2;  // in the order of scales
  const int group = GROUP > 64 ? k_warp / (GROUP > 64 ? GROUP / 64 : 1) : k_warp * TILE_GROUPS;
  const Lane lane{
      uint32_t(k_warp * WORDS_BYTES + row_warp * BLOCKS * WORDS * 512 + id * 16),
      uint32_t(SCALES_OFFSET + (group * 64 + rows) * sizeof(Scale)),
      uint32_t(ZEROS_OFFSET + (group * 64 + rows) * sizeof(Zero)),
      uint32_t(id % 8 * 128 + (id / 8 ^ id % 8) * 16),
  };
  const uint32_t ring_address = shared_address(smem), x_address = shared_address(smem + X_AT) + k_warp * X_TILE;
  // One tile of 64 k may be missing in the last stage.
  const int last = slice.last - (slice.last * K_WARPS - K_WARPS + k_warp >= g.k_tiles);
  float* mine = reinterpret_cast<float*>(smem + SUMS_AT) + (k_warp * TILE_N + id % 4 * 2) * SUMS_PITCH +
                row_warp * BLOCKS * 16 + id / 4;
  Ring ring;
  uint32_t phase = 1;
  for (; tile < g.feature_tiles; tile += clusters, phase ^= 1) {
    Sums sums{};
    [[maybe_unused]] float2 scales[BLOCKS], zeros[BLOCKS];
    if constexpr (GROUP == 0) {
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
        scales[r] = two_floats(scale + int64_t(tile) * 64 + rows + r * 16);
        if constexpr (ZERO_TYPE >= 0) zeros[r] = two_floats(zero + int64_t(tile) * 64 + rows + r * 16);
      }
    }
    uint32_t x = x_address;
    for (int s = slice.first; s < slice.last; ++s, ring.advance(), x += K_WARPS * X_TILE) {
      FullBarrier::wait(&barriers.full[ring.stage], ring.phase);
      if (s < last) multiply(sums, ring_address + ring.stage * STAGE_BYTES, x, lane);
      __syncwarp();
      if (id == 0) EmptyBarrier::arrive(&barriers.empty[ring.stage]);
    }
    EmptyBarrier::wait(&barriers.read, phase);
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) {
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        float value[4];
        if constexpr (GROUP == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) value[i] = 0.f;
          add_scaled(value, sums.rows[r][n], scales[r], ZERO_TYPE < 0 ? float2{} : zeros[r], sums.x[n]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) value[i] = sums.rows[r][n][i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[(n * 8 + i % 2) * SUMS_PITCH + r * 16 + i / 2 * 8] = value[i];
      }
    }
    __syncwarp();
    if (id == 0) EmptyBarrier::arrive(&barriers.written);
  }
}

#if X_TMA
using X = TensorMap;
#else
using X = const void*;
#endif

extern "C" __global__ __launch_bounds__(THREADS, 1) void mixed_mma(const __grid_constant__ X x, const uint8_t* words,
                                                                   const Scale* scale, const Zero* zero, Out* out,
                                                                   const __grid_constant__ Args g) {
  extern __shared__ __align__(1024) uint8_t smem[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(smem + BARRIERS_AT);
  const int rank = CLUSTER > 1 ? int(cute::block_rank_in_cluster()) : 0;
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int stages = (g.k_tiles + K_WARPS - 1) / K_WARPS;  // of the whole k
  const Slice slice{stages * rank / CLUSTER, stages * (rank + 1) / CLUSTER};
  if (threadIdx.x == CONSUMERS) {
    for (int i = 0; i < STAGES; ++i) {
      FullBarrier::init(&barriers.full[i], 1);
      EmptyBarrier::init(&barriers.empty[i], WARPS);
    }
    EmptyBarrier::init(&barriers.written, WARPS);
    EmptyBarrier::init(&barriers.read, EPILOGUE_WARPS);
    for (int i = 0; i < SLOTS; ++i) {
      FullBarrier::init(&barriers.arrived[i], 1);
      EmptyBarrier::init(&barriers.free[i], CLUSTER * FINISHERS);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cute::cluster_arrive_relaxed();
  if (threadIdx.x < CONSUMERS) {
#if !X_TMA
    load_x(g, x, smem + X_AT, slice);
#endif
    consume(g, scale, zero, smem, barriers, slice, cluster, clusters);
    __syncwarp();
    if constexpr (CLUSTER > 1) cute::cluster_wait();
  } else if (threadIdx.x < CONSUMERS + 32) {
    produce(g, X_TMA ? reinterpret_cast<const TensorMap*>(&x) : nullptr, words, scale, zero, smem, barriers, slice, cluster,
            clusters);
    __syncwarp();
    if constexpr (CLUSTER > 1) cute::cluster_wait();
  } else {
    if constexpr (CLUSTER > 1) cute::cluster_wait();  // for the other blocks' barriers
    epilogue(g, out, smem, barriers, cluster, clusters, rank);
    __syncwarp();
  }
  if constexpr (CLUSTER > 1) {  // no block ends before the others have told it what they had to
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}
