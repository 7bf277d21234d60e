// Products of filters that are too tall for a warp to hold all bands of B: a block has STEP rows of the
// output, whose sums stay in registers, and the rows of taps slide by. Row i of the input meets row p of the
// output by row i - p of the taps, so each new row of the input needs one new band, and the last STEP are
// held. A warp has one channel. Words and macros: depthwise/toeplitz.cu.

// Of a channel's row of taps in shared memory: zeros, the taps, zeros, as far as bands reach.
constexpr int BEFORE = 7, TAP_PITCH = BEFORE + 8 * K_CHUNKS + 1;

// The weights of the block's channels, [channel][row][column]. A lane loads eight channels of a tap.
__device__ inline void stage_weights(const Element* __restrict__ w, const Place& place, uint32_t weights) {
#pragma unroll 1
  for (int i = threadIdx.x; i < CHANNELS * KERNEL_H * TAP_PITCH / 8; i += THREADS)
    store_shared(weights + i * 16, uint4{});
  sync_threads<THREADS, 1>();
#pragma unroll 4
  for (int i = threadIdx.x; i < TAPS * PARTS; i += THREADS) {
    const int tap = i / PARTS, part = i % PARTS, eight = place.channel / 8 + part;
    if (eight >= EIGHTS) continue;
    const uint4 v =
        __ldg(reinterpret_cast<const uint4*>(w) + (MIRRORED ? TAPS - 1 - tap : tap) * EIGHTS + eight);
    const uint32_t words[] = {v.x, v.y, v.z, v.w};
    const int at = (part * 8 * KERNEL_H + tap / KERNEL_W) * TAP_PITCH + BEFORE + tap % KERNEL_W;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      store_shared(weights + (at + c * KERNEL_H * TAP_PITCH) * 2, uint16_t(words[c / 2] >> c % 2 * 16));
  }
}

// A warp's products.
struct Multiplier {
  uint32_t from, to;  // this lane's rows of matrices
  uint32_t taps;      // this lane's first one
  int first, end;     // rows of the input that the block's lines have, counted from the lines' first ones
  uint32_t bands[STEP][K_STEPS][2] = {};
  float sums[STEP][4] = {};

  __device__ Multiplier(uint32_t in, uint32_t out, uint32_t weights, const Place& place, int images)
      : from(in + windows_of_lane()), to(out + rows_of_lane()) {
    const int lane = threadIdx.x % 32, channel = threadIdx.x / 32;
    taps = weights + (channel * KERNEL_H * TAP_PITCH + BEFORE + lane % 4 * 2 - lane / 4) * 2;
    first = PAD_H - Line(place.line + LINES - 1, images).row;
    end = INPUT_H + PAD_H - Line(place.line, images).row;
  }

  __device__ void run(int stage) {
#pragma unroll
    for (int at = 0; at < STEP; ++at) {
      const int row = stage * STEP + at;
      read_band(row, bands[at]);
      if (row < first || row >= end) continue;
#pragma unroll
      for (int i = 0; i < K_STEPS; ++i) {
        uint32_t a[4] = {};
        const uint32_t windows = from + stage % 2 * IN_BYTES + (at * (UNITS * SHARE) + i * 2 * LINES) * 16;
        if (2 * i + 1 < K_CHUNKS) {
          load_matrices(windows, a);
        } else {
          load_matrices(windows, a[0], a[1]);
        }
#pragma unroll
        for (int p = 0; p < STEP; ++p) mma_m16n8k16<Element>(sums[p], a, bands[(at + STEP - p) % STEP][i]);
      }
    }
  }

  // Zeros beyond the filter.
  __device__ void read_band(int row, uint32_t (&band)[K_STEPS][2]) const {
    const uint32_t from = taps + min(row, KERNEL_H - 1) * (TAP_PITCH * 2);
    const uint32_t mask = row < KERNEL_H ? ~0u : 0u;
#pragma unroll
    for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
      const uint32_t first = load_shared<uint16_t>(from + chunk * 16);
      const uint32_t second = load_shared<uint16_t>(from + chunk * 16 + 2);
      band[chunk / 2][chunk % 2] = (first | second << 16) & mask;
    }
  }

  // Puts all rows where the block finds them.
  __device__ void finish() const {
#pragma unroll
    for (int p = 0; p < STEP; ++p) put_row(to + p * (16 * 16), sums[p]);
  }
};
