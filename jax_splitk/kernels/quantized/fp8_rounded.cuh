// The inner loop of quantized_fp8 with weights that are rounded to e4m3. Included by fp8.cu.
//
// A weight is decoded to fp16. Its zero point is subtracted, its scale over a power of two of its feature
// (`Rounding`) multiplies it, and it is rounded to e4m3. So all k have one chain of sums, and nothing is
// added up beside the tensor cores. They keep some 14 bits of a sum.

constexpr bool HAS_ZERO = ZERO_TYPE != NONE;
constexpr int SIXTEENS = 4;  // of a tile of 64 k

// Powers of two of a lane's two features, and what multiplies scales to have the feature's largest weight
// from 128 to 256: e4m3 ends at 448, and is subnormal below 2^-6.
struct Rounding {
  float2 inverse, factor;

  __device__ Rounding(const Schedule& g, const Weight& weight, const Role& role, const Place& at,
                      const Piece& piece) {
    const int lane = threadIdx.x % 32;
    const int first = GROUP ? piece.begin * GROUPS : 0, end = GROUP ? min(piece.end * GROUPS, g.groups) : 1;
    const size_t row =
        size_t(at.m_tile(g, role.m_warpgroup)) * g.groups * WARPGROUP_M + role.warp % 4 * 16 + lane / 4 * 2;
    constexpr int LOADS = HAS_ZERO ? 16 : 32;
    // Bits of magnitudes, whose order is theirs: infinity is above all numbers, and NaN above infinity.
    uint32_t most[2] = {};
    const auto take = [&](int i, float scale, float zero) {
      most[i] = max(most[i], __float_as_uint(fabsf(scale) * largest_difference(zero)));
    };
    // Four lanes have these features. Loads of a turn are under way together; beyond the end they are
    // repeated.
#pragma unroll 1
    for (int turn = first; turn < end; turn += 4 * LOADS) {
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int group = min(turn + 4 * load + lane % 4, end - 1);
        const size_t item = row + size_t(group) * WARPGROUP_M;
        const float2 scale = load_pair<SCALE_TYPE>(weight.scale + item * SCALE_ITEM);
        float2 zero = {0.f, 0.f};
        if constexpr (HAS_ZERO) zero = load_pair<ZERO_TYPE>(weight.zero + item * ZERO_ITEM);
        take(0, scale.x, zero.x);
        take(1, scale.y, zero.y);
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      for (uint32_t& each : most) each = max(each, __shfl_xor_sync(~0u, each, step));
    }
    factor = {power_below(__uint_as_float(most[0])), power_below(__uint_as_float(most[1]))};
    inverse = {1.f / factor.x, 1.f / factor.y};
  }
};

// Integers of 4 bits are the bits 4 to 7 of an fp16 from 64 to 79, in which 0 is 72 or 64. Their scales are
// rounded to 7 of fp16's 11 significant bits: then the scale's multiples that are subtracted, 72 and whole
// zero points, are exact, and one fused multiply-add subtracts one of them and scales.
constexpr bool CODES = FORMAT == INT4 || FORMAT == UINT4;
constexpr uint32_t ZERO_CODE = FORMAT == INT4 ? 0xd480 : 0xd400;  // -72 and -64 in fp16

// Codes of a lane's two rows, of k 0 and 1, then those of k 2 and 3.
__device__ inline void place_codes(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t MASK = 0x00f000f0, SIXTY_FOUR = 0x54005400;
  a[0] = and_or(word << 4, MASK, SIXTY_FOUR);
  a[1] = and_or(word, MASK, SIXTY_FOUR);
  a[2] = and_or(word >> 4, MASK, SIXTY_FOUR);
  a[3] = and_or(word >> 8, MASK, SIXTY_FOUR);
}

// What a lane needs of a tile of 64 k of the weight.
struct RoundedTile {
  static constexpr int PAIRS = GROUP == 0 ? 1 : TILE_GROUPS;
  uint32_t words[2][4 * WORDS];  // of the two lanes that this one takes from
  uint32_t scale[PAIRS][2];      // by group and row, twice in fp16
  uint32_t minus[PAIRS][2];      // likewise, of CODES what is added to the scaled ones, else to those before

  __device__ void load(const Reader& in, int tile, const Rounding& rounding) {
    const uint32_t from = in.words + in.stage * STAGE_BYTES + tile * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) load_two_lanes(from + i * 512, words, 4 * i);
    if constexpr (GROUP > 0) {
      const uint32_t extra = in.stage * EXTRA_BYTES;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const uint32_t at = (tile * 64 / GROUP_K + i) * WARPGROUP_M;
        const float2 s = load_pair<SCALE_TYPE>(in.scales + extra + at * SCALE_ITEM);
        float2 zero = {0.f, 0.f};
        if constexpr (HAS_ZERO) zero = load_pair<ZERO_TYPE>(in.zeros + extra + at * ZERO_ITEM);
        set_group(i, s, zero, rounding);
      }
    }
  }

  __device__ void set_group(int group, float2 s, float2 zero, const Rounding& rounding) {
    uint32_t pair = to_f16x2(s.x * rounding.inverse.x, s.y * rounding.inverse.y);
    uint32_t less = to_f16x2(-zero.x, -zero.y);
    if constexpr (CODES) {
      pair = pair + 0x00080008u & 0xfff0fff0u;
      less = fma_f16x2(pair, HAS_ZERO ? less : twice(ZERO_CODE), twice(0x8000));
    }
    twice_each(pair, scale[group]);
    twice_each(less, minus[group]);
  }

  static __device__ void twice_each(uint32_t pair, uint32_t (&to)[2]) {
    to[0] = __byte_perm(pair, 0, 0x1010);
    to[1] = __byte_perm(pair, 0, 0x3232);
  }

  // The A registers of the tile's two steps of 32 k.
  __device__ void round(const Reader& in, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int sixteen = 0; sixteen < SIXTEENS; ++sixteen) {
      uint32_t own[WORDS], value[4];
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        own[i] = __byte_perm(words[0][sixteen * WORDS + i], words[1][sixteen * WORDS + i], in.pick);
      }
      if constexpr (CODES) {
        place_codes(own[0], value);
      } else {
        dequantize(own, value);  // in the same order
      }
      const int group = GROUP == 0 ? 0 : sixteen * 16 / (GROUP_K < 64 ? GROUP_K : 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t less = minus[group][i % 2];
        if constexpr (HAS_ZERO)
          value[i] = fma_f16x2(value[i], twice(0x3c00), CODES ? twice(ZERO_CODE) : less);
        value[i] = fma_f16x2(value[i], scale[group][i % 2], CODES ? less : twice(0x8000));
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        a[sixteen / 2][sixteen % 2 * 2 + row] = f16x4_to_e4m3x4(value[row], value[row + 2]);
      }
    }
  }
};

__device__ inline void add_blocks(Reader& in, int blocks, RoundedTile& tile, const Rounding& rounding,
                                  Accumulator& acc) {
  uint32_t a[2][2][4];
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = 0.f;
  in.released = NOBODY;
  in.wait_full();
  tile.load(in, 0, rounding);
  while (true) {
    const uint64_t b = in.operand();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile.round(in, a[half]);
      multiply_batch<2>(a[half], b + (half * 64 >> 4), acc, GMMA::ScaleOut::One);
      if (half == 1) {
        in.advance();
        if (--blocks > 0) in.wait_full();
      }
      if (half == 0 || blocks > 0) tile.load(in, 1 - half, rounding);
      // The products of the half before have retired. Their fragments can be overwritten, and after a block's
      // second half its stage can be filled again.
      wait_batches<1>();
      if (half == 0) in.release();
    }
    if (blocks == 0) break;
  }
  wait_batches<0>(acc);
  in.release();
}

// The sums of a piece, and what multiplies those of a lane's two features.
__device__ inline float2 add_rounded(const Kernel& kernel, const Weight& weight, const Role& role,
                                     const Piece& piece, Reader& in, Accumulator& acc) {
  const Place at = place_of(kernel.g, piece.tile, cluster_rank());
  const Rounding rounding(kernel.g, weight, role, at, piece);
  RoundedTile tile;
  if constexpr (GROUP == 0) {
    const size_t row = role.channel(kernel.g, at);
    float2 zero = {0.f, 0.f};
    if constexpr (HAS_ZERO) zero = load_pair<ZERO_TYPE>(weight.zero + row * ZERO_ITEM);
    tile.set_group(0, load_pair<SCALE_TYPE>(weight.scale + row * SCALE_ITEM), zero, rounding);
  }
  add_blocks(in, role.blocks(piece), tile, rounding, acc);
  return rounding.factor;
}
