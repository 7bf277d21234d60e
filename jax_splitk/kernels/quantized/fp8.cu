// The product of an e4m3 activation and a packed quantized weight for Hopper's fp8 tensor cores, in tiles
// (tiles.cuh): weights are decoded, without rounding, into e4m3.
//
// The tensor cores add e4m3 products with few bits (about 14), so that sums of PERIOD k at most are theirs:
// they go, times their scale, onto fp32 accumulators. A tile's columns are TURNS pieces of CHUNK; step
// (period, chunk) is one chain of WGMMAs into one of SUMS sets of partial sums. With two sets, the warpgroup
// adds up the sums of a step and decodes weights of the next period while the next step is under way:
//
//   multiply step s | decode a part | wait for step s - 1, promote its sums | multiply step s + 1 ...
//
// With one set (where registers are few), and at a block's end, nothing is under way when sums are promoted;
// other warpgroups keep the tensor cores busy.
// The fragments hold values over FACTOR, which comes back last.
//
// Order of k: WGMMA takes x as it lies in memory, so lane t of four needs k 4t to 4t + 3 of each 16, of which
// the packed words of two lanes hold two each: it reads both lanes' words and takes half of each (`pick`).
//
// Macros: those of tiles.cuh (no zero points, no float32 results); PERIOD 32, 64 or 128; CHUNK; SUMS.

#define COLUMNS CHUNK
#include "device/wgmma_rs.cuh"
#include "quantized/tiles.cuh"

constexpr int SHARE = TILE_N / MULTICAST;  // rows of x that a thread block loads
constexpr int TURNS = TILE_N / CHUNK, PERIODS = BLOCK_K / PERIOD, STEPS = PERIOD / 32;
using PeriodFragments = uint32_t[STEPS][4];  // A registers of a period, by steps of 32 k
// A part of a period is what is read from memory at a time.
constexpr int PERIOD_PARTS = PERIOD > 64 ? PERIOD / 64 : 1, PART_STEPS = STEPS / PERIOD_PARTS;
constexpr int PART_LOADS = WORDS == 1 ? 1 : PART_STEPS;

static_assert(OUT != FLOAT, "sums of the tensor cores are too short for float32 results");
static_assert(TILE_N % CHUNK == 0 && SHARE % 8 == 0, "whole chunks, and whole 8 rows of the swizzle");
static_assert(GROUP_K % PERIOD == 0, "one scale for a period");
static_assert((M_WARPGROUPS == 2 || M_WARPGROUPS == 4) && WARPGROUPS <= 4, "registers are known for these");

// ---- consumer --------------------------------------------------------------------------------------------

constexpr uint32_t NOBODY = 1u << 31;

struct Reader : Consumer {
  uint32_t words;     // of the two lanes that this one takes from, in the first stage
  uint32_t scales;    // of its two rows, which are neighbours, in the first stage
  uint32_t pick;      // which half of the lanes' words
  uint32_t empty;     // the first stage's barrier of the block that this lane tells; NOBODY if it tells none
  uint32_t released;  // that of the stage before this one

  __device__ Reader(const Kernel& kernel, const Role& role) : Consumer{{role.k_warpgroup}} {
    const int warp = role.warp % 4, lane = threadIdx.x % 32;
    stages = kernel.address;
    full = shared_address(kernel.barriers);
    const uint32_t from = lane / 4 * 4 + lane % 2 * 2;
    words = keep(stages + X_BYTES + role.m_warpgroup * 2 * TILE_BYTES + warp * (TILE_BYTES / 4) + from * 16);
    scales = keep(stages + EXTRAS_AT + role.m_warpgroup * SCALES + (warp * 16 + lane / 4 * 2) * SCALE_ITEM);
    pick = lane % 4 < 2 ? 0x6420 : 0x7531;
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

  // The stage before this one, which all lanes have read. Scales may be under way still (see `release_read`).
  __device__ void release() const {
    fence_async_shared();
    __syncwarp();
    arrive_if<(MULTICAST > 1)>(int(released) >= 0, released);
  }

  __device__ void advance() {
    released = empty + stage * 8;
    Consumer::advance();
  }
};

// Adds sums of a chunk, which have retired. All columns of a row before the other row's: what is as scarce as
// tensor cores here are reads of registers, and instructions in a row with the same scale read it once.
__device__ inline void promote(Accumulator& sum, const float2& scale, TileSums& acc, int chunk) {
  fence(sum);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int i = 0; i < CHUNK / 4; ++i) {
      const int at = i / 2 * 4 + row * 2 + i % 2;
      float& to = acc[chunk * (CHUNK / 2) + at];
      to = GROUP ? fmaf(sum[at], row ? scale.y : scale.x, to) : to + sum[at];
      fence(to);  // now: the next product overwrites the sum
    }
  }
}

// The words of two lanes, of a part of a period. 4-bit: those of the whole tile of 64 k.
struct PartWords {
  uint32_t w[2][4 * PART_LOADS];

  __device__ void load(const Reader& in, int period, int part) {
    const int k = period * PERIOD + part * PART_STEPS * 32;
    const uint32_t from = in.words + in.stage * STAGE_BYTES + k / 64 * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < PART_LOADS; ++i) {
      const int at = WORDS == 1 ? 0 : (k / 32 % 2 + i) * 512;
#pragma unroll
      for (int lane = 0; lane < 2; ++lane) {
        const uint4 v = load_shared<uint4>(from + at + lane * 16);
        w[lane][4 * i] = v.x;
        w[lane][4 * i + 1] = v.y;
        w[lane][4 * i + 2] = v.z;
        w[lane][4 * i + 3] = v.w;
      }
    }
  }

  // The A registers of 32 k, which the part that was loaded last has.
  __device__ void decode(const Reader& in, int period, int step, uint32_t (&a)[4]) const {
    if constexpr (WORDS == 1) {
      const int first = (period * STEPS + step) % 2 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        decode_e4m3(__byte_perm(w[0][first + i], w[1][first + i], in.pick), a[2 * i], a[2 * i + 1]);
      }
    } else {
      const int first = step % PART_STEPS * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = __byte_perm(w[0][first + i], w[1][first + i], in.pick);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(a[i]);
  }
};

// When, of a period's chunks, what is next is loaded (not in the first one, where the LDS would come between
// the turn's first products), and how many of its steps are decoded before a chunk's sums are added.
constexpr int LOAD_CHUNK = TURNS > 2 ? 1 : 0;

__device__ constexpr int steps_before(int chunk) {
  constexpr int SHARES = TURNS > 1 ? TURNS - 1 - LOAD_CHUNK : 1;
  return chunk <= LOAD_CHUNK ? 0 : (chunk - LOAD_CHUNK) * STEPS / SHARES;
}

__device__ inline void add_blocks(Reader& in, int blocks, TileSums& acc) {
  PeriodFragments a[2];
  Accumulator sum[SUMS];
  PartWords words;
  Pair<SCALE_TYPE> next;      // scales of the period that is decoded
  float2 scale = {0.f, 0.f};  // of the period whose sums are promoted; at first there are none
#pragma unroll
  for (int i = 0; i < TILE_SUMS; ++i) acc[i] = 0.f;
  const auto load = [&](int period) {
    words.load(in, period, 0);
    if constexpr (GROUPS > 0) {
      next = load_shared<Pair<SCALE_TYPE>>(in.scales + in.stage * EXTRA_BYTES +
                                           period * PERIOD / GROUP_K * WARPGROUP_M * SCALE_ITEM);
    }
  };
  // Steps [from, to) of a period, of whose parts the one with `from` is loaded.
  const auto decode = [&](int period, int from, int to, PeriodFragments& fragments) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step < from || step >= to) continue;
      if (step > from && step % PART_STEPS == 0) words.load(in, period, step / PART_STEPS);
      words.decode(in, period, step, fragments[step]);
    }
  };
  const auto next_words = [&](int period, bool of_next_block) {
    if (of_next_block) {
      in.advance();
      if (--blocks > 0) in.wait_full();
    }
    load(period);  // after a piece's last block of anything: it is not used
  };
  // Not known to the compiler as early as it would matter: plain copies of a[1] to a[0], where a block is one
  // period, would make one of the two, and ptxas wait after every product.
  const uint32_t zero = keep(0);
  in.wait_full();
  load(0);
  decode(0, 0, STEPS, a[0]);
  while (true) {
    const uint64_t b = in.operand();
#pragma unroll
    for (int period = 0; period < PERIODS; ++period) {
      const bool last = period == PERIODS - 1;
      const int following = (period + 1) % PERIODS;
      PeriodFragments& to = a[(period + 1) % 2];
#pragma unroll
      for (int chunk = 0; chunk < TURNS; ++chunk) {
        const int step = period * TURNS + chunk;
        multiply_batch<STEPS>(a[period % 2], b + (chunk * CHUNK * BLOCK_K + period * PERIOD >> 4),
                              sum[step % SUMS], GMMA::ScaleOut::Zero);
        // The fragments of the next period are free from the end of the period's first step on.
        const int decoded = steps_before(chunk);
        if (chunk == LOAD_CHUNK && LOAD_CHUNK > 0) next_words(following, last);
        if (TURNS > 1 && chunk > 0) decode(following, steps_before(chunk - 1), decoded, to);
        if (SUMS == 2 && step > 0) {
          wait_batches<1>();
          promote(sum[(step + 1) % 2], scale, acc, (step + TURNS - 1) % TURNS);
        }
        if (GROUPS > 0 && chunk == 0) scale = to_floats<SCALE_TYPE>(next);
        if (chunk == LOAD_CHUNK) {
          if (LOAD_CHUNK == 0) next_words(following, last);
          if constexpr (TURNS == 1) decode(following, 0, STEPS, to);
        } else if (decoded > steps_before(chunk - 1) && decoded < STEPS && decoded % PART_STEPS == 0) {
          words.load(in, following, decoded / PART_STEPS);
        }
        if constexpr (SUMS == 1) {
          wait_batches<0>();
          if (step == PERIODS * TURNS - 1) in.release();
          promote(sum[0], scale, acc, chunk);
        }
      }
    }
    if constexpr (SUMS == 2) {
      // Sums that are under way from one turn of the loop to the next would make ptxas wait after every
      // product.
      wait_batches<0>();
      in.release();
      promote(sum[(PERIODS * TURNS - 1) % 2], scale, acc, TURNS - 1);
    }
    if (blocks == 0) break;
    if constexpr (PERIODS == 1) {
#pragma unroll
      for (int i = 0; i < 4 * STEPS; ++i) a[0][i / 4][i % 4] = a[1][i / 4][i % 4] ^ zero;
    }
  }
}

// ---- kernel ----------------------------------------------------------------------------------------------

struct Loop {
  // The first two warps copy the weights of half of the warpgroups each, the next one x.
  static constexpr int PRODUCERS = 3, X_WARP = 2, BARRIERS = ARRIVED + 1;
  static constexpr int PRODUCER_REGS = WARPGROUPS == 2 ? 40 : 64;
  static constexpr int CONSUMER_REGS = consumer_registers(WARPGROUPS, PRODUCER_REGS);
  const Weight weight;

  __device__ void produce(const Kernel& kernel, const TensorMap& x_map, int warp) const {
    constexpr int COUNT = M_WARPGROUPS / 2;
    if (warp == X_WARP) {
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
      add_blocks(in, role.blocks(piece), acc);
      // Computed again, not kept in registers meanwhile: where this is.
      int thread, block;
      read_indices(thread, block);
      const Role here(thread / 32 - 4, thread, block % MULTICAST);
      piece = piece_of(g, index, block / MULTICAST);
      const Place at = place_of(g, piece.tile, here.rank);
      if constexpr (GROUP == 0) {
        const float2 scale = load_pair<SCALE_TYPE>(weight.scale + here.channel(g, at) * SCALE_ITEM);
#pragma unroll
        for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= i / 2 % 2 ? scale.y : scale.x;
      }
      // Last: no scale overflows before its time.
#pragma unroll
      for (int i = 0; i < TILE_SUMS; ++i) acc[i] *= FACTOR;
      if constexpr (CHANNEL_SCALE) scale_channels(weight.channel, here.channel(g, at), acc);
      store_piece(kernel, piece, at, here, acc);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap x_map, const __grid_constant__ Args g, const uint8_t* words,
             const uint8_t* scale, Output* out, float* partials CHANNEL_PARAMETER EPILOGUE_PARAMETERS) {
  run(Loop{{words, scale, nullptr, CHANNEL_ARGUMENT}}, x_map, g, DESTINATION_OF_PARAMETERS, partials);
}
