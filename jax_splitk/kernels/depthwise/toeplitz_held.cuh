// Products of filters whose bands of B a warp's registers hold all the time: a warp slides down its lines
// with the sums of the rows that a step reaches. Words and macros: depthwise/toeplitz.cu.

// Where eight channels of a tap are: those of 8 neighbouring taps in different banks.
__device__ inline uint32_t tap_at(int tap, int part) {
  const int column = tap % KERNEL_W;
  return (tap * PARTS + (part ^ column * PARTS / 8 % PARTS)) * 16;
}

// The weights of the block's channels, [tap][channel].
__device__ inline void stage_weights(const Element* __restrict__ w, const Place& place, uint32_t weights) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TAPS * PARTS; i += THREADS) {
    const int tap = i / PARTS, eight = place.channel / 8 + i % PARTS;
    const uint4* from =
        reinterpret_cast<const uint4*>(w) + (MIRRORED ? TAPS - 1 - tap : tap) * EIGHTS + eight;
    store_shared(weights + tap_at(tap, i % PARTS), eight < EIGHTS ? __ldg(from) : uint4{});
  }
}

// A lane's registers of B, of all channels and rows of taps.
using Bands = uint32_t[EACH][KERNEL_D * KERNEL_H][K_STEPS][2];
// Sums of the rows that a step reaches. The step completes the first of these rows.
using Sums = float[EACH][PLANES][WINDOW][4];

__device__ inline void read_bands(uint32_t weights, Bands& bands) {
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * EACH;
#pragma unroll
  for (int chunk = 0; chunk < 2 * K_STEPS; ++chunk) {
    uint32_t at[2], mask[2];  // of neighbouring k
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int tap = chunk * 8 + lane % 4 * 2 + e - lane / 4 * DOWN_W;
      at[e] = weights + tap_at(min(max(tap, 0), KERNEL_W - 1), channel / 8) + channel % 8 * 2;
      mask[e] = unsigned(tap) < KERNEL_W ? ~0u : 0u;
    }
#pragma unroll
    for (int row = 0; row < KERNEL_D * KERNEL_H; ++row) {
      uint32_t words[2] = {};  // of both channels
      if (chunk < K_CHUNKS) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t from = at[e] + row * (KERNEL_W * CHANNELS * 2);
          words[e] = mask[e] & (EACH == 2 ? load_shared<uint32_t>(from) : load_shared<uint16_t>(from));
        }
      }
#pragma unroll
      for (int c = 0; c < EACH; ++c)
        bands[c][row][chunk / 2][chunk % 2] = __byte_perm(words[0], words[1], c == 0 ? 0x5410 : 0x7632);
    }
  }
}

// Adds the products of channel c with a step's row k.
__device__ inline void multiply(uint32_t windows, int c, int k, const Bands& bands, Sums& sums) {
#pragma unroll
  for (int u = 0; u < IN_PLANES; ++u) {
#pragma unroll
    for (int i = 0; i < K_STEPS; ++i) {
      uint32_t a[4] = {};
      const uint32_t from = windows + (u * (UNITS * SHARE) + i * (DOWN_W == 1 ? 2 : 1) * LINES) * 16;
      if (2 * i + 1 < K_CHUNKS) {
        load_matrices(from, a);
      } else {
        load_matrices(from, a[0], a[1]);
      }
#pragma unroll
      for (int e = 0; e < PLANES; ++e) {
        const int t = u - e * DOWN_D;
        if (t < 0 || t >= KERNEL_D) continue;
#pragma unroll
        for (int row = 0; row < WINDOW; ++row) {  // in this order one row takes the last one's place
          const int r = (LEAD - row) * DOWN_H + k;
          if (r >= KERNEL_H) continue;
          mma_m16n8k16<Element>(sums[c][e][row], a, bands[c][t * KERNEL_H + r][i]);
        }
      }
    }
  }
}

// A warp's products.
struct Multiplier {
  uint32_t from, to;  // this lane's rows of matrices, of the first channel
  Bands bands;
  Sums sums = {};

  __device__ Multiplier(uint32_t in, uint32_t out, uint32_t weights, const Place&, int)
      : from(in + windows_of_lane()), to(out + rows_of_lane()) {
    read_bands(weights, bands);
  }

  __device__ void run(int stage) {
#pragma unroll
    for (int a = 0; a < STEP; ++a) {
#pragma unroll
      for (int c = 0; c < EACH; ++c) {
#pragma unroll
        for (int k = 0; k < DOWN_H; ++k) {
          const int row = (a * DOWN_H + k) * IN_PLANES;
          multiply(from + stage % 2 * IN_BYTES + (c * IN_CHANNEL + row * (UNITS * SHARE)) * 16, c, k, bands,
                   sums);
        }
#pragma unroll
        for (int e = 0; e < PLANES; ++e)
          finish(to + stage % 2 * (HALVES * OUT_BYTES) + (c * OUT_CHANNEL + (e * STEP + a) * 16) * 16,
                 sums[c][e]);
      }
    }
  }

  // Puts the completed row where the block finds it, and moves the others on.
  __device__ static void finish(uint32_t at, float (&rows)[WINDOW][4]) {
    put_row(at, rows[0]);
#pragma unroll
    for (int row = 0; row < WINDOW; ++row)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[row][i] = row + 1 < WINDOW ? rows[row + 1][i] : 0.f;
  }
};
