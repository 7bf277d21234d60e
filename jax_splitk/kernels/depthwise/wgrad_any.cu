// Depthwise weight gradients in fp32 on the CUDA cores:
//
//   dW[tap, k] = sum over images and output pixels o of g[o, k] * x[i, k / MULTIPLIER]
//   with i = o * STRIDE - PAD + tap * DILATION along each axis
//
// A thread has a word of channels, and the sums of KERNEL taps in registers: of the whole FILTER or, if it is
// too large, of a block of its taps. It slides down a strip of COLUMNS
// columns, or, where images are one row (ALONG_W), from strip to strip along it. At each step it loads a row
// of g's strip, and of each of x's planes the rows and columns that lie STRIDE rows further. The last WINDOW
// rows of g are in registers: each row of x, read once, meets all of them. What a step needs is loaded a step
// ahead.
//
// A thread block works on STRIPS items side by side, each a strip of up to ROWS steps of an output plane. The
// first ones to differ are planes, then columns: what they share of x comes from the L1. The splits take the
// items in turns, so that what neighbours share is in the L2. At the end the thread block adds its strips'
// sums. If the filter has several blocks of taps, TEAMS of the thread block's threads, and other thread
// blocks, have one each; what teams share comes from the L1.
//
// Only products of pixels that the convolution has enter the sums, for a NaN in x times a zero would be a
// NaN: a strip beyond the image is moved back, and its columns that another has are zeros of g.
//
// Macros: ELEMENT, OUT, WARPS, CTAS_PER_SM, CHANNELS (of a word), WORDS (of a pixel of g), LANES (words of a
// thread block), TEAMS, MULTIPLIER, of each axis INPUT, OUTPUT, FILTER, KERNEL, STRIDE, DILATION, PAD;
// COLUMNS, ROWS, ALONG_W.

#include <cuda/std/cstdint>

#include "depthwise/words.cuh"
#include "device/split_k.cuh"

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

constexpr int THREADS = 32 * WARPS, STRIPS = THREADS / (LANES * TEAMS);
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, ALL_TAPS = FILTER_D * FILTER_H * FILTER_W;
constexpr bool BLOCKED = TAPS != ALL_TAPS;
constexpr int BLOCKS_H = divide_up(FILTER_H, KERNEL_H), BLOCKS_W = divide_up(FILTER_W, KERNEL_W);
constexpr int TILES = divide_up(WORDS, LANES);  // of words
constexpr int X_WORDS = WORDS / MULTIPLIER;
constexpr int LEAD = (KERNEL_H - 1) * DILATION_H / STRIDE_H;  // steps that x's last rows lie after g's
constexpr int WINDOW = LEAD + 1;
constexpr int READ = (COLUMNS - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int STRIPS_W = divide_up(OUTPUT_W, COLUMNS);
constexpr int STEPS = ALONG_W ? STRIPS_W : OUTPUT_H, ACROSS = ALONG_W ? 1 : STRIPS_W;

// The thread block's tile of words.
__device__ inline int tile() { return BLOCKED ? blockIdx.x % TILES : blockIdx.x; }

// The first tap of a team's block of taps.
struct FirstTap {
  int d, h, w;
  __device__ explicit FirstTap(int team) : d(0), h(0), w(0) {
    if constexpr (BLOCKED) {
      const int block = blockIdx.x / TILES * TEAMS + team;
      w = block % BLOCKS_W * KERNEL_W;
      h = block / BLOCKS_W % BLOCKS_H * KERNEL_H;
      d = block / (BLOCKS_W * BLOCKS_H) * KERNEL_D;
    }
  }
};

struct Item {
  int image, plane, across, first, end;  // steps
  int pad_d, pad_h, pad_w;               // from the block's first tap
  __device__ Item(int item, const FirstTap& tap)
      : pad_d(PAD_D - tap.d * DILATION_D),
        pad_h(PAD_H - tap.h * DILATION_H),
        pad_w(PAD_W - tap.w * DILATION_W) {
    plane = item % OUTPUT_D;
    item /= OUTPUT_D;
    across = item % ACROSS;
    item /= ACROSS;
    first = item % divide_up(STEPS, ROWS) * ROWS;
    end = min(first + ROWS, STEPS);
    image = item / divide_up(STEPS, ROWS);
  }
  __device__ int row(int step) const { return ALONG_W ? 0 : step; }
  // Columns of the output: the strip's first one, and the first one that no strip before it has.
  __device__ int column(int step) const { return min(own(step), OUTPUT_W - COLUMNS); }
  __device__ int own(int step) const { return (ALONG_W ? step : across) * COLUMNS; }
};

// What a step loads.
struct Lines {
  Word x[KERNEL_D][STRIDE_H][READ];
  Word g[COLUMNS];
};

// Whether some tap meets row k of those that a step reads, and column i.
__device__ constexpr bool is_row_used(int k) {
  for (int r = 0; r < KERNEL_H; ++r)
    if (r * DILATION_H % STRIDE_H == k) return true;
  return false;
}

__device__ constexpr bool is_column_used(int i) {
  for (int j = 0; j < COLUMNS; ++j)
    for (int s = 0; s < KERNEL_W; ++s)
      if (j * STRIDE_W + s * DILATION_W == i) return true;
  return false;
}

// Whether column i of those that a step reads, which is the image's `at`, is inside: mostly so in every
// strip.
__device__ inline bool is_inside(int i, int at) {
  constexpr int LAST = (BLOCKS_W - 1) * KERNEL_W * DILATION_W;  // between the blocks' first taps
  const bool left = i >= PAD_W, right = i + LAST < INPUT_W + PAD_W - (OUTPUT_W - COLUMNS) * STRIDE_W;
  return (left || at >= 0) && (right || at < INPUT_W);
}

__device__ inline void load_g(const Word* __restrict__ g, const Item& item, int step, Lines& lines) {
  const long long line =
      ((long long)(item.image * OUTPUT_D + item.plane) * OUTPUT_H + item.row(step)) * OUTPUT_W;
  const int column = item.column(step), own = item.own(step);
  const Word* from = g + (line + column) * WORDS;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const bool is_own = j >= STRIPS_W * COLUMNS - OUTPUT_W || column + j >= own;
    lines.g[j] = step < item.end && is_own ? __ldg(from + j * WORDS) : 0;
  }
}

// Loads the plane of x that tap t reads.
__device__ inline void load_x(const Word* __restrict__ x, const Item& item, int t, int step, Lines& lines) {
  const int plane = item.plane * STRIDE_D - item.pad_d + t * DILATION_D;
  const int column = item.column(step) * STRIDE_W - item.pad_w;
#pragma unroll
  for (int k = 0; k < STRIDE_H; ++k) {
    if (!is_row_used(k)) continue;
    const int row = item.row(step) * STRIDE_H - item.pad_h + k;
    const bool valid = step < item.end + LEAD && unsigned(plane) < INPUT_D && unsigned(row) < INPUT_H;
    const long long pixel = (((long long)item.image * INPUT_D + plane) * INPUT_H + row) * INPUT_W + column;
    const Word* from = x + pixel * X_WORDS;
#pragma unroll
    for (int i = 0; i < READ; ++i) {
      if (!is_column_used(i)) continue;
      lines.x[t][k][i] = valid && is_inside(i, column + i) ? __ldg(from + i * X_WORDS) : 0;
    }
  }
}

__device__ inline void load(const Word* __restrict__ x, const Word* __restrict__ g, const Item& item,
                            int step, Lines& lines) {
  load_g(g, item, step, lines);
#pragma unroll
  for (int t = 0; t < KERNEL_D; ++t) load_x(x, item, t, step, lines);
}

// Adds the products of x's rows with the rows of g that they meet: with all in the window, or with those from
// `above` to `below`.
template <bool ALL>
__device__ inline void accumulate(const Lines& lines, const float (&g)[WINDOW][COLUMNS][CHANNELS], int above,
                                  int below, float (&sums)[TAPS][CHANNELS]) {
#pragma unroll
  for (int tk = 0; tk < KERNEL_D * STRIDE_H; ++tk) {
    const int t = tk / STRIDE_H, k = tk % STRIDE_H;
    if (!is_row_used(k)) continue;
    float x[READ][CHANNELS];
#pragma unroll
    for (int i = 0; i < READ; ++i)
      if (is_column_used(i)) unpack(lines.x[t][k][i], x[i]);
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
      const int row = r * DILATION_H / STRIDE_H;  // steps ago
      if (r * DILATION_H % STRIDE_H != k || (!ALL && (row > above || row <= below))) continue;
#pragma unroll
      for (int js = 0; js < COLUMNS * KERNEL_W; ++js) {
        const int j = js / KERNEL_W, s = js % KERNEL_W;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          float& sum = sums[(t * KERNEL_H + r) * KERNEL_W + s][c];
          sum = fmaf(x[j * STRIDE_W + s * DILATION_W][c], g[row][j][c], sum);
        }
      }
    }
  }
}

// Adds the products of an item to the sums.
__device__ inline void slide(const Word* __restrict__ x, const Word* __restrict__ g, const Item& item,
                             float (&sums)[TAPS][CHANNELS]) {
  Lines next;
  load(x, g, item, item.first, next);
  // Zeros, although the first steps do not use them: ptxas 13.0 takes a register that has no value yet for
  // another one.
  float window[WINDOW][COLUMNS][CHANNELS] = {};
#pragma unroll 1
  for (int step = item.first; step < item.end + LEAD; ++step) {
#pragma unroll
    for (int row = WINDOW - 1; row >= 0; --row)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (row == 0) unpack(next.g[j], window[0][j]);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
          if (row > 0) window[row][j][c] = window[row - 1][j][c];
      }
    const Lines lines = next;
    load(x, g, item, step + 1, next);
    const int above = step - item.first, below = step - item.end;
    if (LEAD == 0 || (above >= LEAD && below < 0)) {
      accumulate<true>(lines, window, above, below, sums);
    } else {
      accumulate<false>(lines, window, above, below, sums);
    }
  }
}

// The filter's number of tap i of a team; -1 for a tap beyond the filter.
__device__ inline int tap_of(int team, int i) {
  if constexpr (!BLOCKED) return i;
  const FirstTap first(team);
  const int d = first.d + i / (KERNEL_H * KERNEL_W), h = first.h + i / KERNEL_W % KERNEL_H,
            w = first.w + i % KERNEL_W;
  return d < FILTER_D && h < FILTER_H && w < FILTER_W ? (d * FILTER_H + h) * FILTER_W + w : -1;
}

// Adds what the block's strips have, and stores it.
template <class T>
__device__ inline void finish(const float (&sums)[TAPS][CHANNELS], T* to) {
  constexpr int GROUP = TAPS < 8 ? TAPS : 8;  // taps at a time
  __shared__ float shared[GROUP][CHANNELS][THREADS];
#pragma unroll
  for (int first = 0; first < TAPS; first += GROUP) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < GROUP && first + i < TAPS; ++i)
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) shared[i][c][threadIdx.x] = sums[first + i][c];
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < GROUP * LANES * TEAMS * CHANNELS; at += THREADS) {
      const int lane = at % LANES, team = at / LANES % TEAMS;
      const int c = at / (LANES * TEAMS) % CHANNELS, i = at / (LANES * TEAMS * CHANNELS);
      float sum = 0.f;
#pragma unroll 8
      for (int strip = 0; strip < STRIPS; ++strip) sum += shared[i][c][(strip * TEAMS + team) * LANES + lane];
      const int word = tile() * LANES + lane, number = tap_of(team, first + i);
      if (first + i < TAPS && word < WORDS && (!BLOCKED || number >= 0))
        convert(sum, to[(number * WORDS + word) * CHANNELS + c]);
    }
  }
}

template <class T>
__device__ inline void wgrad(const Args& args, const Word* __restrict__ x, const Word* __restrict__ g,
                             T* to) {
  const int word = tile() * LANES + threadIdx.x % LANES, strip = threadIdx.x / (LANES * TEAMS);
  const FirstTap tap(threadIdx.x / LANES % TEAMS);
  float sums[TAPS][CHANNELS] = {};
  const int items = word < WORDS ? args.items : 0;
#pragma unroll 1
  for (int item = blockIdx.y * STRIPS + strip; item < items; item += gridDim.y * STRIPS) {
    slide(x + word / MULTIPLIER, g + word, Item(item, tap), sums);
  }
  launch_dependent_grids();
  finish(sums, to + size_t(blockIdx.y) * (divide_up(ALL_TAPS * WORDS * CHANNELS, 4) * 4));
}

SPLIT_K_KERNELS((const __grid_constant__ Args args, const Word* x, const Word* g), (args, x, g))
