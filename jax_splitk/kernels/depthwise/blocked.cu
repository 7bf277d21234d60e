// Depthwise convolutions of any filter: out[o, c] = sum over taps of x[i, c] w[tap, c], where o * DOWN - PAD
// + tap * DILATION = i * UP along each axis, and one of DOWN and UP is 1: a forward pass with strides, or the
// gradient of an input with strides (whose taps are MIRRORED).
//
// A thread computes COLUMNS columns of a word of channels. A loop goes over the taps in blocks of BLOCK
// neighbouring taps of a row of the filter: it loads these, the columns of x that they meet, and multiplies
// all pairs. The last block of a row may have fewer taps. Columns of a thread lie STEP apart, so that
// neighbouring taps of a dilated filter meet neighbouring columns of what a thread loads.
//
// Threads of a thread block differ in the word first, then in the row: what rows share of x comes from the
// L1.
//
// Axes may stand in another order than in memory: W is the one along which the filter is longest. PITCH is
// the distance of neighbours along an axis: of pixels in x and out, of taps in w.
//
// With a MULTIPLIER, several output channels read one input channel. In its gradient, SUMMED channels of x
// are added to one. Words have one channel then.
//
// Macros: ELEMENT, OUT, CHANNELS (of a word), WORDS (of a pixel of the output), WORD_BLOCK (of neighbouring
// threads), MULTIPLIER, SUMMED; of each axis INPUT, OUTPUT, KERNEL, DOWN, UP, DILATION, PAD, X_PITCH,
// OUT_PITCH, TAP_PITCH; X_IMAGE, OUT_IMAGE (pixels); BASE_W and OFFSET_W: where the first strip begins, as in
// depthwise/passes.cu; STRIPS (of a row), STEP, BLOCK, COLUMNS; MIRRORED.

#include "depthwise/words.cuh"
#include "structs.cuh"

constexpr int THREADS = 256;
constexpr long long X_WORDS = WORDS / MULTIPLIER * SUMMED, TAP_WORDS = WORDS * SUMMED;  // of a pixel, a tap
constexpr long long X_NEXT = X_PITCH_W * X_WORDS, TAP_NEXT = TAP_PITCH_W * TAP_WORDS;  // the next along a row
constexpr int WORD_BLOCKS = (WORDS + WORD_BLOCK - 1) / WORD_BLOCK;
// Columns of x between those that are loaded, and how many of these neighbouring columns of a thread lie
// apart.
constexpr int X_STEP = UP_W > 1 ? 1 : DILATION_W, APART = UP_W > 1 ? 1 : STEP * DOWN_W / DILATION_W;

// What a thread computes.
struct Place {
  int word, row, column, plane, image;  // of the output
  __device__ explicit Place(int item) {
    word = item % WORD_BLOCK;
    item /= WORD_BLOCK;
    row = item % OUTPUT_H;
    item /= OUTPUT_H;
    const int strip = item % STRIPS;
    column = BASE_W * UP_W + OFFSET_W + strip / STEP * (STEP * COLUMNS) + strip % STEP;
    item /= STRIPS;
    word += item % WORD_BLOCKS * WORD_BLOCK;
    item /= WORD_BLOCKS;
    plane = item % OUTPUT_D;
    image = item / OUTPUT_D;
  }
};

// Where tap t meets the input along an axis; -1 for nowhere.
template <int DOWN, int PAD, int DILATION, int UP, int INPUT>
__device__ inline int met(int o, int t) {
  const int at = o * DOWN - PAD + t * DILATION;
  return at >= 0 && at % UP == 0 && at / UP < INPUT ? at / UP : -1;
}

// Columns that a block of TAPS taps reads, and which of them tap s meets for a thread's column j; -1 for
// none. If the input is dilated, taps count from the filter's last one, whose column comes last.
template <int TAPS>
struct Reads {
  static constexpr int LEFT = UP_W > 1 ? (TAPS - 1) * DILATION_W / UP_W : 0;
  static constexpr int COUNT = UP_W > 1 ? (COLUMNS - 1) / UP_W + LEFT + 1 : (COLUMNS - 1) * APART + TAPS;
  __device__ static constexpr int column(int j, int s) {
    if (UP_W == 1) return j * APART + s;
    const int at = j - s * DILATION_W;
    return at % UP_W == 0 ? at / UP_W + LEFT : -1;
  }
  __device__ static constexpr bool is_used(int i) {
    for (int s = 0; s < TAPS; ++s) {
      const int j = UP_W > 1 ? (i - LEFT) * UP_W + s * DILATION_W : (i - s) / APART;
      if (j >= 0 && j < COLUMNS && i >= (UP_W > 1 ? 0 : s) && column(j, s) == i) return true;
    }
    return false;
  }
};

// Adds the products with TAPS taps, the first of which is number `first` of its row of the filter.
template <int TAPS>
__device__ inline void multiply(const Word* __restrict__ x, const Word* __restrict__ w, int column, int first,
                                float (&sums)[COLUMNS][CHANNELS]) {
  using Read = Reads<TAPS>;
  float weights[TAPS][CHANNELS], values[Read::COUNT][CHANNELS];
#pragma unroll
  for (int s = 0; s < TAPS; ++s) {
    const int tap = UP_W > 1 ? KERNEL_W - 1 - first - s : first + s;
    unpack(__ldg(w + (MIRRORED ? KERNEL_W - 1 - tap : tap) * TAP_NEXT), weights[s]);
  }
  const int begin = UP_W > 1 ? (column - OFFSET_W) / UP_W - first * DILATION_W / UP_W - Read::LEFT
                             : column * DOWN_W - PAD_W + first * DILATION_W;
  const Word* from = x + begin * X_NEXT;
#pragma unroll
  for (int i = 0; i < Read::COUNT; ++i) {
    if (!Read::is_used(i)) continue;
    const bool inside = unsigned(begin + i * X_STEP) < unsigned(INPUT_W);
    unpack(inside ? __ldg(from + i * (X_STEP * X_NEXT)) : Word(0), values[i]);
  }
#pragma unroll
  for (int s = 0; s < TAPS; ++s)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int i = Read::column(j, s);
      if (i < 0) continue;
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) sums[j][c] = fmaf(values[i][c], weights[s][c], sums[j][c]);
    }
}

// Adds the products with a row of the filter.
__device__ inline void multiply_row(const Word* __restrict__ x, const Word* __restrict__ w, int column,
                                    float (&sums)[COLUMNS][CHANNELS]) {
  constexpr int REST = KERNEL_W % BLOCK;
#pragma unroll 1
  for (int first = 0; first < KERNEL_W - REST; first += BLOCK) multiply<BLOCK>(x, w, column, first, sums);
  if constexpr (REST > 0) multiply<REST>(x, w, column, KERNEL_W - REST, sums);
}

// Adds the products with all taps, and with all channels of x that are added to one.
__device__ inline void multiply_all(const Word* __restrict__ x, const Word* __restrict__ w,
                                    const Place& place, float (&sums)[COLUMNS][CHANNELS]) {
#pragma unroll 1
  for (int t = 0; t < KERNEL_D; ++t) {
    const int plane = met<DOWN_D, PAD_D, DILATION_D, UP_D, INPUT_D>(place.plane, t);
    if (plane < 0) continue;
#pragma unroll 1
    for (int r = 0; r < KERNEL_H; ++r) {
      const int row = met<DOWN_H, PAD_H, DILATION_H, UP_H, INPUT_H>(place.row, r);
      if (row < 0) continue;
      const long long pixel =
          place.image * (long long)X_IMAGE + plane * (long long)X_PITCH_D + row * (long long)X_PITCH_H;
      const Word* line = x + pixel * X_WORDS + place.word / MULTIPLIER * SUMMED;
      const int tap = MIRRORED ? (KERNEL_D - 1 - t) * TAP_PITCH_D + (KERNEL_H - 1 - r) * TAP_PITCH_H
                               : t * TAP_PITCH_D + r * TAP_PITCH_H;
      const Word* taps = w + tap * TAP_WORDS + place.word * SUMMED;
#pragma unroll 1
      for (int channel = 0; channel < SUMMED; ++channel)
        multiply_row(line + channel, taps + channel, place.column, sums);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL()(const Word* __restrict__ x, const Word* __restrict__ w, Args args, Output* out) {
  const int item = blockIdx.x * THREADS + threadIdx.x;
  if (item >= args.items) return;
  const Place place(item);
  if (place.word >= WORDS) return;
  float sums[COLUMNS][CHANNELS] = {};
  multiply_all(x, w, place, sums);
  const long long pixel = place.image * (long long)OUT_IMAGE + place.plane * (long long)OUT_PITCH_D +
                          place.row * (long long)OUT_PITCH_H;
  Output* to = out + (pixel * WORDS + place.word) * CHANNELS;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const int column = place.column + j * STEP;
    if (unsigned(column) < unsigned(OUTPUT_W))
      store_values(to + column * ((long long)OUT_PITCH_W * WORDS * CHANNELS), sums[j]);
  }
}
