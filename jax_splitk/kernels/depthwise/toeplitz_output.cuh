// What a block has completed: from shared memory, where it lies as [channel][row][window], to the output.
// Infinities and NaNs reach other sums of their window through the zeros of B. So a lane that has stored what
// is not finite computes that anew at the end, without the MMA. Words and macros: depthwise/toeplitz.cu.

#include "depthwise/toeplitz_input.cuh"

// NaN, as a word of either half, where one of the values is not finite, else zeros.
__device__ inline uint32_t not_finite(const uint32_t (&words)[HALVES][4]) {
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // The upper halves of floats have their exponents, in the places of bfloat16's.
    sum = OUT == HALF_FLOAT ? fma_f16x2(words[HALVES - 1][i], 0, sum)
                            : fma_bf16x2(words[HALVES - 1][i], 0, sum);
  }
  return sum & 0x7fff7fffu;
}

// The sum of a channel of a pixel, from memory.
__device__ inline float sum_of(const Element* __restrict__ x, const Element* __restrict__ w, int image,
                               int plane, int row, int column, int channel) {
  float sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < TAPS; ++tap) {
    const int d = plane * DOWN_D - PAD_D + tap / (KERNEL_H * KERNEL_W);
    const int h = row * DOWN_H - PAD_H + tap / KERNEL_W % KERNEL_H,
              v = column * DOWN_W - PAD_W + tap % KERNEL_W;
    if (unsigned(d) >= INPUT_D || unsigned(h) >= INPUT_H || unsigned(v) >= INPUT_W) continue;
    const long long pixel = (((long long)image * INPUT_D + d) * INPUT_H + h) * INPUT_W + v;
    const int weight = (MIRRORED ? TAPS - 1 - tap : tap) * (EIGHTS * 8) + channel;
    sum = fmaf(float(x[pixel * (EIGHTS * 8) + channel]), float(w[weight]), sum);
  }
  return sum;
}

// Two neighbouring values: as one word, or the lower and the upper halves of both.
__device__ inline void pack(float first, float second, uint32_t (&words)[HALVES]) {
  if constexpr (HALVES == 2) {
    words[0] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410);
    words[1] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
  } else {
    const Vec<Output, 2> both = converted<Output>({first, second});
    words[0] = reinterpret_cast<const uint32_t&>(both);
  }
}

// Where this lane's row of matrices is: of windows in the input, of completed rows.
__device__ inline uint32_t windows_of_lane() {
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * EACH;
  const int window = min(lane % 16, TILES * LINES - 1);
  const int position = window + lane / 16 * (DOWN_W == 1 ? 1 : CHUNKS / DOWN_W) * LINES;
  return (channel / 8 * IN_PART + channel % 8 * IN_CHANNEL + position) * 16;
}

__device__ inline uint32_t rows_of_lane() {
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * EACH;
  return (channel / 8 * OUT_PART + channel % 8 * OUT_CHANNEL + lane % 16) * 16 + lane / 16 * OUT_BYTES;
}

// Puts a completed row where the block finds it.
__device__ inline void put_row(uint32_t at, const float (&row)[4]) {
  uint32_t words[2][HALVES];  // of a lane's two windows
  pack(row[0], row[1], words[0]);
  pack(row[2], row[3], words[1]);
  if constexpr (HALVES == 1) {
    store_matrices(at, words[0][0], words[1][0]);
  } else {
    const uint32_t v[] = {words[0][0], words[1][0], words[0][1], words[1][1]};
    store_matrices(at, v);
  }
}

struct Writer {
  uint32_t from;
  int rows, planes;    // of the output, from the line's first on
  Output* to;          // its first row; of a TALL one that of the image in which it is
  int of_stage = 0;    // of a TALL line: of the image, the first that the next stage completes
  uint32_t wrong = 0;  // not 0: some of what was stored is not finite

  __device__ Writer(const Place& place, int images, uint32_t buffers, Output* out) {
    const Unit own(threadIdx.x);
    const int warp = threadIdx.x / 32, first = warp % (4 * PARTS) * SHARE, row = warp / (4 * PARTS);
    from = buffers +
           (own.row_part * OUT_PART + own.row_channel * OUT_CHANNEL + first + own.row_chunk + row * 16) * 16;
    const int window = first + own.chunk, eight = place.channel / 8 + own.part;
    const Line line(place.line + window % LINES, images);
    const int column = place.column + window / LINES * 8 + own.column;
    const bool inside = window < TILES * LINES && column < OUTPUT_W && eight < EIGHTS && line.image < images;
    rows = inside ? TALL ? ROWS : min(ROWS, OUTPUT_H - line.row) : 0;
    planes = OUTPUT_D - line.plane;
    long long first_row = ((long long)line.image * OUTPUT_D + line.plane) * OUTPUT_H + line.row;
    if constexpr (TALL) {
      if (inside) rows = int(min((long long)ROWS, (long long)(images - line.image) * PERIOD - line.row));
      of_stage = line.row - LEAD;
      first_row -= line.row;
    }
    to = out + ((first_row * OUTPUT_W + column) * EIGHTS + eight) * 8;
  }

  // Stores what stage `stage` has completed.
  __device__ void store(int stage) {
#pragma unroll
    for (int i = 0; i < STORES; ++i) {
      const int first = i * WARPS / (4 * PARTS);  // with one channel to a warp, of two rows
      const int e = first / STEP, other = int(threadIdx.x / 32) / (4 * PARTS);
      const int from_first = stage * STEP + first % STEP + other - LEAD;
      uint32_t words[HALVES][4];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        uint32_t (&v)[4] = words[half];
        load_matrices_trans(from + (stage % 2 * HALVES + half) * OUT_BYTES + first * 256, v[0], v[1], v[2],
                            v[3]);
      }
      bool inside = unsigned(from_first) < unsigned(rows) && (PLANES == 1 || e < planes);
      int of_image = from_first;
      if constexpr (TALL) {
        of_image = of_stage + first % STEP + other;
        const bool next = of_image >= PERIOD;  // the padding between them is PERIOD - OUTPUT_H rows
        inside = inside && of_image - (next ? PERIOD : 0) < OUTPUT_H;
        if (next) of_image += OUTPUT_D * OUTPUT_H - PERIOD;
      }
      Output* const pixel = to + (long long)(e * OUTPUT_H + of_image) * (OUTPUT_W * EIGHTS * 8);
      if constexpr (HALVES == 1) {
        store_global_below(pixel, make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]), 0, inside);
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t low[2] = {words[0][2 * j], words[0][2 * j + 1]};
          const uint32_t high[2] = {words[1][2 * j], words[1][2 * j + 1]};
          const uint4 v =
              make_uint4(__byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
                         __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
          store_global_below(pixel + 4 * j, v, 0, inside);
        }
      }
      wrong |= not_finite(words);
    }
    if constexpr (TALL) {
      of_stage += STEP;
      if (of_stage >= PERIOD) {
        of_stage -= PERIOD;
        to += (long long)(OUTPUT_D * OUTPUT_H) * (OUTPUT_W * EIGHTS * 8);
      }
    }
  }

  // Computes anew what the lane has stored and is not finite.
  __device__ void repair(const Element* x, const Element* w, int images, Output* out) const {
    constexpr int EVERY = WARPS / (4 * PARTS);  // rows from one that the lane has stored to the next
    if (wrong == 0) return;
    int thread, block;
    read_indices(thread, block);  // anew: nothing of this was in registers before
    const Place place(block);
    const Unit own(thread);
    const int warp = thread / 32, window = warp % (4 * PARTS) * SHARE + own.chunk;
    const Line line(place.line + window % LINES, images);
    const int column = place.column + window / LINES * 8 + own.column, channel = place.channel + own.part * 8;
#pragma unroll 1
    for (int e = 0; e < (PLANES > 1 ? min(PLANES, planes) : 1); ++e) {
#pragma unroll 1
      for (int i = (warp / (4 * PARTS) + LEAD) % EVERY; i < rows; i += EVERY) {
        const int image = line.image + (TALL ? (line.row + i) / PERIOD : 0);
        const int row = TALL ? (line.row + i) % PERIOD : line.row + i;
        if (row >= OUTPUT_H) continue;
        const long long of_all = ((long long)image * OUTPUT_D + line.plane + e) * OUTPUT_H + row;
        Output* const pixel = out + ((of_all * OUTPUT_W + column) * EIGHTS + channel / 8) * 8;
#pragma unroll 1
        for (int c = 0; c < 8; ++c) {
          const float value = float(pixel[c]);
          if (value - value == 0.f) continue;
          convert(sum_of(x, w, image, line.plane + e, row, column, channel + c), pixel[c]);
        }
      }
    }
  }
};
