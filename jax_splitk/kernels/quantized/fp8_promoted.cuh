// The inner loop of quantized_fp8 without rounding. Included by fp8.cu.
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
// Macros: PERIOD 32, 64 or 128; CHUNK; SUMS.

constexpr int TURNS = TILE_N / CHUNK, PERIODS = BLOCK_K / PERIOD, STEPS = PERIOD / 32;
using PeriodFragments = uint32_t[STEPS][4];  // A registers of a period, by steps of 32 k
// A part of a period is what is read from memory at a time.
constexpr int PERIOD_PARTS = PERIOD > 64 ? PERIOD / 64 : 1, PART_STEPS = STEPS / PERIOD_PARTS;
constexpr int PART_LOADS = WORDS == 1 ? 1 : PART_STEPS;

static_assert(GROUP_K % PERIOD == 0, "one scale for a period");

// Adds sums of a chunk, whose products have retired. It takes all columns of one row, then those of the
// other: consecutive instructions that have the same scale read its register once, and reads of registers are
// as scarce here as tensor cores.
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
      load_two_lanes(from + at, w, 4 * i);
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
