// The product of an e4m3 activation and a packed quantized weight for Hopper's fp8 tensor cores, in tiles
// (tiles.cuh): weights are decoded into e4m3.
//
// ROUNDED 0: without rounding. The scale of a group multiplies its sums (fp8_promoted.cuh).
// ROUNDED 1: with their scales and zero points, rounded to e4m3. One chain of sums for all k
// (fp8_rounded.cuh).
//
// Order of k: WGMMA takes x as it lies in memory, so lane t of four needs k 4t to 4t + 3 of each 16, of which
// the packed words of two lanes hold two each: it reads both lanes' words and takes half of each (`pick`).
//
// PREPARED: x has 16 bits, and KERNEL(_prepare) rounds it (rounded_rows.cuh).
//
// Macros: those of tiles.cuh (no float32 results; zero points only where ROUNDED), ROUNDED, PREPARED; CHUNK,
// the columns of a tile that are multiplied at a time (ROUNDED: all).

#define COLUMNS CHUNK
#include "device/wgmma_rs.cuh"
#include "quantized/tiles.cuh"

constexpr int SHARE = TILE_N / MULTICAST;  // rows of x that a thread block loads

static_assert(OUT != FLOAT, "sums of the tensor cores are too short for float32 results");
static_assert(TILE_N % CHUNK == 0 && SHARE % 8 == 0, "whole chunks, and whole 8 rows of the swizzle");
static_assert((M_WARPGROUPS == 2 || M_WARPGROUPS == 4) && WARPGROUPS <= 4, "registers are known for these");

// ---- consumer --------------------------------------------------------------------------------------------

constexpr uint32_t NOBODY = 1u << 31;

struct Reader : Consumer {
  uint32_t words;     // of the two lanes that this one takes from, in the first stage
  uint32_t scales;    // of its two rows, which are neighbours, in the first stage
  uint32_t zeros;     // their zero points
  uint32_t pick;      // which half of the lanes' words; ROUNDED: k 0, 2, 1, 3
  uint32_t empty;     // the first stage's barrier of the block that this lane tells; NOBODY if it tells none
  uint32_t released;  // that of the stage before this one

  __device__ Reader(const Kernel& kernel, const Role& role) : Consumer{{role.k_warpgroup}} {
    const int warp = role.warp % 4, lane = threadIdx.x % 32;
    stages = kernel.address;
    full = shared_address(kernel.barriers);
    const uint32_t from = lane / 4 * 4 + lane % 2 * 2;
    words = keep(stages + X_BYTES + role.m_warpgroup * 2 * TILE_BYTES + warp * (TILE_BYTES / 4) + from * 16);
    const int row = warp * 16 + lane / 4 * 2;
    scales = keep(stages + EXTRAS_AT + role.m_warpgroup * SCALES + row * SCALE_ITEM);
    zeros = stages + EXTRAS_AT + ZEROS_AT + role.m_warpgroup * ZEROS + row * ZERO_ITEM;
    pick = (ROUNDED ? 0x6240 : 0x6420) + (lane % 4 < 2 ? 0 : 0x1111);
    empty = full + EMPTY * 8;
    if constexpr (MULTICAST > 1) empty = set_block_rank(empty, lane % MULTICAST);
    released = empty = keep(lane < MULTICAST ? empty : NOBODY);
  }

  // The descriptor of the stage's x, of which the compiler shall not see the constant: it would put it
  // together anew for every product.
  __device__ uint64_t operand() const {
    const uint32_t low = Consumer::operand();
    return uint64_t(__shfl_sync(~0u, OPERAND_HIGH, 0)) << 32 | low;
  }

  // The stage before this one, which all lanes have read. Scales that multiply sums may be under way still
  // (see `release_read`); products wait for what was loaded before them.
  __device__ void release() const {
    if constexpr (!ROUNDED) fence_async_shared();
    __syncwarp();
    arrive_if<(MULTICAST > 1)>(int(released) >= 0, released);
  }

  __device__ void advance() {
    released = empty + stage * 8;
    Consumer::advance();
  }
};

// Loads the words of two neighbouring lanes, four of each, from shared memory.
template <int COUNT>
__device__ inline void load_two_lanes(uint32_t address, uint32_t (&words)[2][COUNT], int first) {
#pragma unroll
  for (int lane = 0; lane < 2; ++lane) {
    const uint4 v = load_shared<uint4>(address + lane * 16);
    words[lane][first] = v.x;
    words[lane][first + 1] = v.y;
    words[lane][first + 2] = v.z;
    words[lane][first + 3] = v.w;
  }
}

// The power of two over which magnitudes up to `most` are at most 128 to 256: e4m3 ends at 448, and is
// subnormal below 2^-6. NaN if one is infinite.
[[maybe_unused]] __device__ inline float power_below(float most) {
  return most - most == 0.f ? leading_power(most) * 0x1p-7f : most - most;
}

#if PREPARED
#include "quantized/rounded_rows.cuh"
#endif
#if ROUNDED
#include "quantized/fp8_rounded.cuh"
#else
#include "quantized/fp8_promoted.cuh"
#endif

// ---- kernel ----------------------------------------------------------------------------------------------

struct Loop {
  // The first two warps copy the weights of half of the warpgroups each, the next one x.
  static constexpr int PRODUCERS = 3, X_WARP = 2, BARRIERS = ARRIVED + 1;
  static constexpr int PRODUCER_REGS = WARPGROUPS == 2 ? 40 : 64;
  static constexpr int CONSUMER_REGS = consumer_registers(WARPGROUPS, PRODUCER_REGS);
  const Weight weight;
  const float* row_factors;

  __device__ void produce(const Kernel& kernel, const TensorMap& x_map, int warp) const {
    constexpr int COUNT = M_WARPGROUPS / 2;
    if (warp == X_WARP) {
      if constexpr (PREPARED) wait_on_dependent_grids();
      const int share = cluster_rank() * SHARE;
      fill_stages(kernel, X_BYTES, [&](const Place& at, int block, int stage, uint64_t* full) {
        uint8_t* to = kernel.stages + stage * STAGE_BYTES + share * BLOCK_K;
        const int column = block * (BLOCK_K / 2), row = at.first_row() + share;  // the map has pairs of x
        if constexpr (MULTICAST > 1) {
          constexpr int ALL = (1 << MULTICAST) - 1;
          load_tile_multicast(&x_map, full, ALL, EVICT_NORMAL, to, column, row);
        } else {
          load_tile(&x_map, full, EVICT_NORMAL, to, column, row);
        }
      });
    } else {
      const uint64_t hint = weight_hint(kernel.g);
      const auto copy = [&](const Place& at, int block, int stage, uint64_t* full) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          copy_weight(kernel, weight, at, block, warp * COUNT + i, stage, full, hint);
        }
      };
      fill_stages(kernel, COUNT * WEIGHT_BYTES, copy);
    }
  }

  __device__ void consume(const Kernel& kernel, int warp) const {
    const Schedule& g = kernel.g;
    const Role role(warp, threadIdx.x, 0);
    Reader in(kernel, role);
    for (int index = 0; index < PIECES; ++index) {
      Piece piece = piece_of(g, index);
      if (piece.begin >= piece.end) break;
      TileSums acc;
#if ROUNDED
      const float2 factor = add_rounded(kernel, weight, role, piece, in, acc);
#else
      add_blocks(in, role.blocks(piece), acc);
#endif
      // Computed again, not kept in registers meanwhile: where this is.
      int thread, block;
      read_indices(thread, block);
      const Role here(thread / 32 - 4, thread, block % MULTICAST);
      piece = piece_of(g, index, block / MULTICAST);
      const Place at = place_of(g, piece.tile, here.rank);
#if ROUNDED
      scale_rows(factor, acc);
#else
      if constexpr (GROUP == 0) {
        scale_rows(load_pair<SCALE_TYPE>(weight.scale + here.channel(g, at) * SCALE_ITEM), acc);
      }
      // Last: no scale overflows before its time.
#pragma unroll
      for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= FACTOR;
#endif
      if constexpr (CHANNEL_SCALE) scale_channels(weight.channel, here.channel(g, at), acc);
#if PREPARED
      scale_columns(row_factors + at.first_row(), acc);
#endif
      store_piece(kernel, piece, at, here, acc);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args g, const uint8_t* words,
             const uint8_t* scale, const uint8_t* zero, const float* row_factors, Output* out,
             float* partials CHANNEL_PARAMETER EPILOGUE_PARAMETERS) {
  run(Loop{{words, scale, zero, CHANNEL_ARGUMENT}, row_factors}, x_map, g, DESTINATION_OF_PARAMETERS,
      partials);
}
