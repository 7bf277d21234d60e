// Depthwise convolutions: out[o, c] = sum over taps of x[i, c] w[tap, c], where o * DOWN - PAD + tap *
// DILATION = i * UP along each axis, and one of DOWN and UP is 1: a forward pass with strides, or the
// gradient of an input with strides (whose taps are MIRRORED).
//
// A thread computes COLUMNS neighbouring columns of a word of channels, row by row: it keeps the sums of a
// WINDOW of output rows in registers, adds to them what the next rows of x give, and stores the rows that are
// complete. Each row of x is read once for all rows of taps, and while the one before it is multiplied.
//
// Macros: ELEMENT, OUT, CHANNELS (of a word), WORDS (of a pixel of the output), MULTIPLIER (output channels
// of an input channel; if above 1, words have one channel), of each axis INPUT, OUTPUT, KERNEL, DOWN, UP,
// DILATION, PAD; BASE and OFFSET: a block of UP rows (columns) begins at block * UP + OFFSET, the first one
// that reaches the output is BASE; BLOCKS: of rows; ROWS: blocks of rows of a strip, which a thread computes;
// COLUMNS; STRIPS_H, STRIPS_W; MIRRORED.

#include "depthwise/words.cuh"
#include "structs.cuh"

constexpr int THREADS = 128;
constexpr int X_WORDS = WORDS / MULTIPLIER;
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int WINDOW = (KERNEL_H - 1) * DILATION_H / DOWN_H + UP_H;
constexpr int LEAD = (WINDOW - UP_H) / UP_H;  // blocks of rows whose x reaches into a strip from before it
constexpr int REACH_W = (KERNEL_W - 1) * DILATION_W;
constexpr int LEFT = UP_W > 1 ? REACH_W / UP_W : 0;
constexpr int READ = UP_W > 1 ? (COLUMNS - 1) / UP_W + LEFT + 1 : (COLUMNS - 1) * DOWN_W + REACH_W + 1;

// Words of x for a block of rows; those that no tap meets are not loaded.
struct Line {
  Word words[DOWN_H][READ];
};

// What a thread computes.
struct Place {
  int word, image, plane, first_block, column;  // of the output
  __device__ explicit Place(int item) {
    word = item % WORDS;
    item /= WORDS;
    column = (BASE_W * UP_W + OFFSET_W) + item % STRIPS_W * COLUMNS;
    item /= STRIPS_W;
    first_block = BASE_H + item % STRIPS_H * ROWS;
    item /= STRIPS_H;
    plane = item % OUTPUT_D;
    image = item / OUTPUT_D;
  }
};

// Whether some tap meets row k of those that a block of rows reads.
__device__ constexpr bool is_row_used(int k) {
  for (int r = 0; r < KERNEL_H; ++r)
    if (r * DILATION_H % DOWN_H == k) return true;
  return false;
}

// Which of the columns that are read tap s meets at column j; -1 for none.
__device__ constexpr int column_of(int j, int s) {
  if (UP_W == 1) return j * DOWN_W + s * DILATION_W;
  const int at = j - (KERNEL_W - 1 - s) * DILATION_W;
  return at % UP_W == 0 ? at / UP_W + LEFT : -1;
}

__device__ constexpr bool is_column_used(int i) {
  for (int j = 0; j < COLUMNS; ++j)
    for (int s = 0; s < KERNEL_W; ++s)
      if (column_of(j, s) == i) return true;
  return false;
}

// x's plane that tap t meets, -1 for none.
__device__ inline int input_plane(int plane, int t) {
  const int at = plane * DOWN_D - PAD_D + t * DILATION_D;
  return at >= 0 && at % UP_D == 0 && at / UP_D < INPUT_D ? at / UP_D : -1;
}

// What the block of rows reads of a plane.
__device__ inline void load(const Word* __restrict__ x, const Place& place, int t, int block, bool more,
                            Line& line) {
  const int plane = input_plane(place.plane, t);
  const int column = UP_W > 1 ? (place.column - OFFSET_W) / UP_W - LEFT
                              : place.column * DOWN_W - PAD_W;  // exact: of a strip
#pragma unroll
  for (int k = 0; k < DOWN_H; ++k) {
    if (!is_row_used(k)) continue;
    const int row = UP_H > 1 ? block : (block + WINDOW - 1) * DOWN_H - PAD_H + k;
    const bool valid = more && plane >= 0 && row >= 0 && row < INPUT_H;
    const long long pixel = ((long long)(place.image * INPUT_D + plane) * INPUT_H + row) * INPUT_W + column;
    const Word* from = x + pixel * X_WORDS + place.word / MULTIPLIER;
#pragma unroll
    for (int i = 0; i < READ; ++i) {
      if (!is_column_used(i)) continue;
      const bool inside = valid && unsigned(column + i) < unsigned(INPUT_W);
      line.words[k][i] = inside ? __ldg(from + i * X_WORDS) : 0;
    }
  }
}

// Adds the products with the taps of plane t.
__device__ inline void accumulate(const Line& line, const Word* weights,
                                  float (&sums)[WINDOW][COLUMNS][CHANNELS]) {
#pragma unroll
  for (int k = 0; k < DOWN_H; ++k) {
    if (!is_row_used(k)) continue;
    float x[READ][CHANNELS];
#pragma unroll
    for (int i = 0; i < READ; ++i)
      if (is_column_used(i)) unpack(line.words[k][i], x[i]);
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
      if (r * DILATION_H % DOWN_H != k) continue;
      const int row = WINDOW - UP_H - r * DILATION_H / DOWN_H;
#pragma unroll
      for (int s = 0; s < KERNEL_W; ++s) {
        float w[CHANNELS];
        unpack(weights[r * KERNEL_W + s], w);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          const int i = column_of(j, s);
          if (i < 0) continue;
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) sums[row][j][c] = fmaf(x[i][c], w[c], sums[row][j][c]);
        }
      }
    }
  }
}

// Stores the first UP_H rows of sums, and makes the others the first.
__device__ inline void store(const Place& place, int block, float (&sums)[WINDOW][COLUMNS][CHANNELS],
                             Output* out) {
#pragma unroll
  for (int a = 0; a < UP_H; ++a) {
    const int row = block * UP_H + OFFSET_H + a;
    if (block < place.first_block || row < 0 || row >= OUTPUT_H) continue;
    const long long line = ((long long)(place.image * OUTPUT_D + place.plane) * OUTPUT_H + row) * OUTPUT_W;
    Output* to = out + ((line + place.column) * WORDS + place.word) * CHANNELS;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      if (unsigned(place.column + j) < unsigned(OUTPUT_W))
        store_values(to + j * WORDS * CHANNELS, sums[a][j]);
  }
#pragma unroll
  for (int a = 0; a < WINDOW; ++a)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) sums[a][j][c] = a + UP_H < WINDOW ? sums[a + UP_H][j][c] : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL()(const Word* __restrict__ x, const Word* __restrict__ w, Args args, Output* out) {
  const int item = blockIdx.x * THREADS + threadIdx.x;
  if (item >= args.items) return;
  const Place place(item);
  Word weights[TAPS];
#pragma unroll
  for (int i = 0; i < TAPS; ++i) weights[i] = __ldg(w + (MIRRORED ? TAPS - 1 - i : i) * WORDS + place.word);
  float sums[WINDOW][COLUMNS][CHANNELS] = {};
  const int end = min(place.first_block + ROWS, BASE_H + BLOCKS);
  Line next;
  load(x, place, 0, place.first_block - LEAD, true, next);
#pragma unroll 1
  for (int block = place.first_block - LEAD; block < end; ++block) {
#pragma unroll
    for (int t = 0; t < KERNEL_D; ++t) {
      const Line line = next;
      const bool last = t == KERNEL_D - 1;
      load(x, place, last ? 0 : t + 1, block + last, !last || block + 1 < end, next);
      accumulate(line, weights + t * KERNEL_H * KERNEL_W, sums);
    }
    store(place, block, sums, out);
  }
}
