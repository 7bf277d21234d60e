// Split-k weight gradient of a depthwise convolution for Hopper, on CuTe and CUTLASS atoms: warp-level
// tensor-core products of what producer warps transpose in their registers.
//
//   dW[r, s, k] = sum over pixels (n, p, q) of
//       X[n, p*stride - pad + r*dilation, q*stride - pad + s*dilation, k / multiplier] * dY[n, p, q, k]
//
// For one channel and one shift s it is a small matrix product over the columns of rows of the two images,
//   D_s[i, j] = sum over q of dY[row i, q] * X[row j, q + s],      dW[r, s] = sum over j of D_s[j - r, j],
// with i over 16 rows of dY and j over 8 rows of X: one m16n8k16 product for each s and 16 columns. A
// thread's operands are a run of `SEGMENT` columns of one row of each image; a shift of the run by s is a
// renaming of its registers, for odd s of the registers with the halves of neighbours. So an element is read
// from shared memory once for all taps. Two blocks of 8 rows of dY make an operand, and the lower of the next
// one is this one's upper: it stays in registers. (Of the operands dY's is the one with four registers, which
// have to be neighbours: it is put together once for all taps. X's has two; columns lie in shared memory so
// that a wide load has them in neighbours.)
//
// Images lie under each other as one tall image, with just so many rows of zeros between them that no tap
// reaches from one into the next: `PITCH` rows from one to the next. Where a row is wider than a tile, its
// tiles count as images. A block is 8 rows of the tall image, `SEGMENTS` neighbouring segments wide and
// IMAGES images deep: 4 segments in all, one for each of the four lanes that share a row of an operand. A
// split is a run of blocks.
//
// Taps that do not fit one operand are other thread blocks' (`Taps`); so are the taps of each residue of a
// stride, for which X is read with that stride: its rows and columns as they are used here are always
// neighbours.
//
// Where a row is one segment, zeros beside the image need not be in the planes (X_PAD, X_COLUMNS): all lanes
// have them in the same places of their runs, known to the compiler, and constants there.
//
// A long filter of one dimension is wrapped (WRAP > 0): images are lines, rows of both are WRAP pixels of a
// line, and tap r * WRAP + s is tap (r, s) of a filter of two dimensions. Row i of dY and tap r then need
// rows i + r and i + r + 1 of X. A lane has a row j of X and, in front of it, row j - 1, which its neighbour
// has read. So dW[r, s] = sum over j of D_s[j - r - 1, j].
//
// Roles, for each of the split's blocks and one more of X alone (dY is zero):
//   - PRODUCERS warps, each with some of the rows, read pixels from global memory into registers, 8 channels
//     to a lane, and store them transposed (stmatrix) in planes [channel][image][row][column], a stage of the
//     pipeline. What a lane has stored it reads again for the next block at once, so that loads are always in
//     flight. They are the first warps, because these start first.
//   - Consumers: a warp for each channel (with more than one pass: for each of a few) computes products from
//     its planes, then the epilogue.
//
// Macros: ELEMENT, OUT; fields of depthwise.py's Config, Axis (_H and _W) and Tiling, which it explains; ROWS
// (of a block), TAP_BLOCKS_W (along a row), TAP_BLOCKS (in all), CHAIN (blocks after which sums leave the
// tensor cores, a power of two; 0: at the end), SUMS (floats for a channel's taps), SCRATCH (floats for a
// product), WRAP (pixels of a wrapped line's row, or 0), FILTER (taps in all). What could be arguments as
// well is known to the compiler for the sake of addresses: whatever runs once before the first loads or after
// the last products is fetched from L2 at every launch. Of `Operand` there the planes of X and Y have
// structs.

#include "device/skeleton.cuh"
#include "device/split_k.cuh"

// Taps of a thread block along a row: their number, and the columns between neighbouring taps and between the
// first and the last.
constexpr int TAPS = SIZE_W, SHIFT = SHIFT_W, REACH = (TAPS - 1) * SHIFT;

using Element = TypeOf<ELEMENT>::type;

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int PASSES = CHANNELS / WARPS;
constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32 * PRODUCERS;
// The register file, shared out by role where products need more (setmaxnreg wants multiples of 8).
constexpr int START_REGS = 65536 / THREADS / 8 * 8;
constexpr bool SHARED_OUT = PASSES > 1 || (WARPS == 16 && (CHAIN > 0 || (TAPS - 1) * SHIFT > 6));
constexpr int PASSES_REGS = larger(104 + 16 * TAPS, 144) + (CHAIN > 0 ? 8 : 0);  // four passes
constexpr int CONSUMER_REGS = !SHARED_OUT ? START_REGS : PASSES == 1 ? START_REGS + 8 : PASSES_REGS;
constexpr int PRODUCER_REGS = (THREADS * START_REGS - CONSUMERS * CONSUMER_REGS) / (32 * PRODUCERS) / 8 * 8;
// Slots of a producer, of 4 registers each. Addresses take more registers if segments come from different
// images.
constexpr int MAX_IN_FLIGHT = smaller((PRODUCER_REGS - 32) / 4, PASSES > 1 && SEGMENTS < 4 ? 8 : 12);
constexpr int PARTS = CHANNELS / 8;  // of a pixel, each 16 bytes
constexpr int X_WORDS = (SEGMENT + REACH + 1) / 2, Y_WORDS = SEGMENT / 2;
constexpr int RUN_WORDS = WRAP > 0 ? 2 * Y_WORDS : X::READ_CHUNKS * 4;
constexpr int STEPS = SEGMENT / 4;  // products of a segment and a tap: each has 4 columns of it
constexpr unsigned ALL = ~0u;
enum { START = 1, PRODUCTS };  // named barriers

// The order of columns, two to a word: words w and w + STEPS are a product's operand, and lie side by side.
constexpr int word_at(int w) { return w / (2 * STEPS) * 2 * STEPS + w % STEPS * 2 + w % (2 * STEPS) / STEPS; }
constexpr int column_at(int at) {  // and back
  return (at / 2 % 2 * STEPS + at / 4 % STEPS) * 2 + at % 2 + at / (4 * STEPS) * 4 * STEPS;
}

// A tile with one segment does not read X's columns beyond the used ones: they are zeros or multiplied by
// zeros.
static_assert(SEGMENTS > 1 || X::ROW_CHUNKS <= X::WRITTEN,
              "all that is read of X is written for every block");
static_assert(X_PAD % 2 == 0 && (SEGMENTS == 1 || (X_PAD == 0 && X_COLUMNS == USED + REACH)));

using Ring = Pipeline<MAX_STAGES, PRODUCERS, WARPS>;
using Shares = Roles<PRODUCERS, SHARED_OUT ? PRODUCER_REGS : 0, CONSUMER_REGS>;

// CUTLASS's barriers do not keep the compiler from moving shared-memory accesses across them.
__device__ inline void wait_full(Ring& pipeline, const Position& at) {
  pipeline.wait_full(at);
  fence_compiler();
}

__device__ inline void wait_empty(Ring& pipeline, const Position& at) {
  pipeline.wait_empty(at);
  fence_compiler();
}

// The number of a pixel in an image of H x W, or of a wrapped line of W pixels; -1 outside.
template <int H, int W>
__device__ inline int pixel_at(int row, int column) {
  const int at = row * (WRAP > 0 ? WRAP : W) + column;
  if constexpr (WRAP > 0) return unsigned(at) < unsigned(W) ? at : -1;
  return unsigned(row) < unsigned(H) && unsigned(column) < unsigned(W) ? at : -1;
}

// What all lanes of the warp have read or written before is so for whoever waits.
__device__ inline void arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Barrier::arrive(barrier);
  fence_compiler();
}

// What a thread block computes.
struct Work {
  int r0, s0;      // first taps; the next ones follow at STEP_H, STEP_W
  int k0, c0;      // first output and input channel
  int begin, end;  // blocks of dY

  __device__ Work(const Args& g) {
    // A second one is worked out anew.
    int column = blockIdx.x, split = blockIdx.y;
    pin(column, split);
    const int taps = column % TAP_BLOCKS;
    r0 = first<SIZE_H, STEP_H, BLOCKS_H>(taps / TAP_BLOCKS_W);
    s0 = first<SIZE_W, STEP_W, BLOCKS_W>(taps % TAP_BLOCKS_W);
    k0 = column / TAP_BLOCKS * CHANNELS;
    c0 = k0 / MULTIPLIER & ~7;  // loads are of whole 16 bytes
    begin = split * g.blocks_per_split;
    end = min(begin + g.blocks_per_split, g.blocks);
  }

  // The tap with an index in the thread block's taps [SIZE_H][TAPS]; it may be beyond the filter.
  __device__ int r(int index) const { return r0 + index / TAPS * STEP_H; }
  __device__ int s(int index) const { return s0 + index % TAPS * STEP_W; }

  // The filter's number of a tap; -1 beyond the filter.
  __device__ int tap(int index) const {
    const int at = r(index) * KERNEL_W + s(index);
    return r(index) < KERNEL_H && s(index) < KERNEL_W && at < FILTER ? at : -1;
  }

  // The taps of an axis are of classes, by t % STEP, each in BLOCKS blocks of at most SIZE taps.
  template <int SIZE, int STEP, int BLOCKS>
  __device__ static int first(int block) {
    return block / BLOCKS + block % BLOCKS * SIZE * STEP;
  }
};

// A row of the tall image: where its pixels come from.
struct Row {
  int n, tile, p;  // first image, tile, row of dY (beyond the last one: zeros)

  __device__ Row(int row) {
    const int run = row / PITCH;
    p = row - run * PITCH;
    n = run / TILES * IMAGES;
    tile = run % TILES;
  }
};

// ---- producer ---------------------------------------------------------------------------------------------

// What a lane reads of an operand: a pixel's 8 channels for each store. Row p and column q of dY lie at
// p * STRIDE_H + h0 and so on. CUT: columns beyond a tile are the next tile's, and have to be zeros here.
template <int ROWS_, int COLUMNS_, int CHANNELS_, int STRIDE_H_, int STRIDE_W_, bool CUT, class Layout_>
struct Operand {
  using Layout = Layout_;
  static constexpr int PIXEL_BYTES = CHANNELS_ * 2;
  static constexpr int64_t ROW_BYTES = int64_t(WRAP > 0 ? WRAP : COLUMNS_) * PIXEL_BYTES;
  static constexpr int64_t PIXELS = int64_t(WRAP > 0 ? 1 : ROWS_) * COLUMNS_,
                           IMAGE_BYTES = PIXELS * PIXEL_BYTES;
  const char* data;  // of this lane, in the first row and tile
  int h0, w0, column;
  int batch;  // images from this lane's on; 0 where its part is beyond the channels
  int at;     // of its row of a matrix, in bytes
  // The row that is read:
  const char* row_data;
  int w, images;

  // A store's (part, image, chunk), of four.
  __device__ static int part_of(int i) { return i % PARTS; }
  __device__ static int image_of(int i) { return i / PARTS % Layout::STORE_IMAGES; }
  __device__ static int chunk_of(int i) { return i / (PARTS * Layout::STORE_IMAGES); }

  Operand() = default;
  __device__ Operand(const Element* data, int h0, int w0, int channel, int batch) : h0(h0), w0(w0) {
    const int lane = threadIdx.x % 32;
    // A matrix has two channels of what all lanes have read, and its rows are these channels' columns of each
    // (part, image, chunk).
    const int i = lane % 4, j = lane % 8 / 2;
    column = column_at(chunk_of(i) * 8 + lane / 4);
    channel += part_of(i) * 8;
    this->data = reinterpret_cast<const char*>(data + channel) + image_of(i) * IMAGE_BYTES +
                 (column * STRIDE_W_ + w0) * int64_t(PIXEL_BYTES);
    this->batch = channel < CHANNELS_ ? batch - image_of(i) : 0;
    at = (part_of(j) * Layout::PART + (lane / 8 * 2 + lane % 2) * Layout::CHANNEL +
          image_of(j) * Layout::IMAGE + chunk_of(j)) *
         16;
  }

  __device__ void begin(const Row& row, bool wanted) {
    const int h = row.p * STRIDE_H_ + h0;
    row_data =
        data + row.n * IMAGE_BYTES + h * ROW_BYTES + row.tile * int64_t(COLUMNS * STRIDE_W_ * PIXEL_BYTES);
    w = (row.tile * COLUMNS + column) * STRIDE_W_ + w0 + h * WRAP;
    images = wanted && (WRAP > 0 || unsigned(h) < unsigned(ROWS_)) ? batch - row.n : 0;
  }

  template <bool FIRST>
  __device__ void fetch(int store, uint32_t (&v)[4]) const {
    const int image = store / Layout::ROW_STORES * Layout::STORE_IMAGES;
    const int more = column_at(store % Layout::ROW_STORES * Layout::STORE_CHUNKS * 8);
    const bool valid = image < images && unsigned(w + more * STRIDE_W_) < unsigned(COLUMNS_);
    // The first ones not by the read-only path: ptxas moves its loads behind a barrier.
    load_stream_or_zero<!FIRST>(valid && (!CUT || column + more < COLUMNS),
                                row_data + image * IMAGE_BYTES + more * int64_t(STRIDE_W_ * PIXEL_BYTES), v);
  }

  // `planes`: those of the warp's row.
  __device__ void store(int store, const uint32_t (&v)[4], uint32_t planes) const {
    const int image = store / Layout::ROW_STORES * Layout::STORE_IMAGES;
    const int chunk = store % Layout::ROW_STORES * Layout::STORE_CHUNKS;
    store_matrices_trans(planes + at + (image * Layout::IMAGE + chunk) * 16, v);
  }
};

using XOperand = Operand<INPUT_H, INPUT_W, IN_CHANNELS, STRIDE_H, STRIDE_W, false, X>;
using YOperand = Operand<OUTPUT_H, OUTPUT_W, OUT_CHANNELS, 1, 1, (TILES > 1 && Y::WRITTEN * 8 > COLUMNS), Y>;

// A warp's work: the first loads, and all blocks.
struct Producer {
  static constexpr int EACH = X::STORES + Y::STORES, SLOTS = ROWS / PRODUCERS * EACH;
  static constexpr int IN_FLIGHT = ceil_div(SLOTS, ceil_div(SLOTS, MAX_IN_FLIGHT));
  static constexpr int ROUND = ceil_div(SLOTS, IN_FLIGHT) * IN_FLIGHT;
  XOperand x_operand;
  YOperand y_operand;
  int warp, blocks, first_row;  // blocks: with the one of X alone
  uint32_t v[IN_FLIGHT][4];

  template <bool FIRST = false>
  __device__ void fetch(int slot, int block, uint32_t (&v)[4]) {
    if (slot >= SLOTS) return;
    const int store = slot % EACH;
    if (store == 0) {
      const Row row(first_row + block * ROWS + slot / EACH * PRODUCERS);
      x_operand.begin(row, block < blocks);
      y_operand.begin(row, block < blocks - 1);
    }
    if (store < X::STORES) {
      x_operand.template fetch<FIRST>(store, v);
    } else {
      y_operand.template fetch<FIRST>(store - X::STORES, v);
    }
  }

  __device__ void begin(const Args& g, const Work& work, const Element* x, const Element* y) {
    blocks = work.end - work.begin + 1;
    const int h0 = work.r0 * DILATION_H - PAD_H, w0 = work.s0 * DILATION_W - PAD_W + X_PAD;
    x_operand = XOperand(x, h0, w0, work.c0, g.batch);
    y_operand = YOperand(y, 0, 0, work.k0, g.batch);
    warp = warp_index();
    first_row = work.begin * ROWS + warp;
#pragma unroll
    for (int slot = 0; slot < IN_FLIGHT; ++slot) fetch<true>(slot, 0, v[slot]);
  }

  __device__ void run(const Args& g, uint32_t stages, Ring& pipeline) {
    const uint32_t x_row = stages + warp * (X::ROW * 16),
                   y_row = stages + X::PLANE_BYTES + warp * (Y::ROW * 16);
    Position at;
    for (int block = 0; block < blocks; ++block, at.advance(g.stages)) {
      wait_empty(pipeline, at);
#pragma unroll
      for (int slot = 0; slot < ROUND; ++slot) {
        uint32_t (&pixel)[4] = v[slot % IN_FLIGHT];
        const int row = slot / EACH * PRODUCERS, store = slot % EACH;
        if (slot < SLOTS && store < X::STORES) {
          x_operand.store(store, pixel, x_row + at.stage * STAGE_BYTES + row * (X::ROW * 16));
        } else if (slot < SLOTS) {
          y_operand.store(store - X::STORES, pixel, y_row + at.stage * STAGE_BYTES + row * (Y::ROW * 16));
        }
        const bool now = slot + IN_FLIGHT < ROUND;
        fetch(now ? slot + IN_FLIGHT : slot + IN_FLIGHT - ROUND, now ? block : block + 1, pixel);
      }
      arrive(&pipeline.full[at.stage]);
    }
  }
};

// ---- consumer ---------------------------------------------------------------------------------------------

// This lane's row (lane / 4) and segment (lane % 4) of a channel's plane.
template <class L>
__device__ inline const uint8_t* segment_of(const uint8_t* planes, int channel) {
  const int row = threadIdx.x % 32 / 4, segment = threadIdx.x % 4;
  const int at = channel / 8 * L::PART + channel % 8 * L::CHANNEL + segment / SEGMENTS * L::IMAGE;
  return planes + (at + row * L::ROW + segment % SEGMENTS * (SEGMENT / 8)) * 16;
}

template <int CHUNKS>
__device__ inline void read_chunks(const uint8_t* from, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[i];
    words[4 * i] = v.x;
    words[4 * i + 1] = v.y;
    words[4 * i + 2] = v.z;
    words[4 * i + 3] = v.w;
  }
}

// A run of columns of one row of X, as it is read.
using Run = uint32_t[RUN_WORDS];
// dY's columns of both blocks of rows, as products take them: of the lower and the upper block, twice.
using Columns = uint32_t[STEPS][4];

// Puts the row before it in front of a lane's row, which lies in the second half of x. Rows of a block follow
// each other every 4 lanes; before the first one comes the last one of the block before, which is in `last`.
__device__ inline void prepend_row(uint32_t* last, uint32_t* x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Y_WORDS; ++i) {
    const uint32_t own = x[Y_WORDS + i];
    x[i] = __shfl_sync(ALL, lane >= 28 ? last[i] : own, (lane + 28) % 32);
    last[i] = own;
  }
}

// The products' k is in the order in which the lanes hold columns: lane t of a row has 4 of a product's 16
// columns. Taps at odd columns come last, and take words made of the halves of neighbours, which take the
// place of the others: registers are few.
__device__ inline void multiply(const Run& x, const Columns& y, float (&acc)[TAPS][4]) {
  auto word = [&](int w) {  // of a row with all its zeros
    const int kept = w - X_PAD / 2;
    return kept >= 0 && word_at(kept) < RUN_WORDS ? x[word_at(kept)] : 0;
  };
  uint32_t x_odd[X_WORDS];
#pragma unroll
  for (int odd = 0; odd < (SHIFT % 2 && TAPS > 1 ? 2 : 1); ++odd) {
    if (odd) {
#pragma unroll
      for (int w = SHIFT / 2; w + 1 < X_WORDS; ++w) x_odd[w] = middle_halves(word(w), word(w + 1));
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
      for (int s = 0; s < TAPS; ++s) {
        if (s * SHIFT % 2 != odd) continue;
        const int at = i + s * SHIFT / 2;
        const uint32_t b[2] = {odd ? x_odd[at] : word(at), odd ? x_odd[at + STEPS] : word(at + STEPS)};
        mma_m16n8k16<Element>(acc[s], y[i], b);
      }
    }
  }
}

// The tensor cores truncate their sums, an error that grows with the number of additions in a row. Where the
// result keeps it, sums are moved to shared memory now and then, each lane's to a place of its own.
__device__ inline void add_to(const float4* sums, float (&acc)[PASSES][TAPS][4]) {
#pragma unroll
  for (int i = 0; i < PASSES * TAPS; ++i) {
    float* d = acc[i / TAPS][i % TAPS];
    const float4 sum = sums[i * 32];
    d[0] += sum.x;
    d[1] += sum.y;
    d[2] += sum.z;
    d[3] += sum.w;
  }
}

__device__ inline void move_to(float4* sums, float (&acc)[PASSES][TAPS][4]) {
#pragma unroll
  for (int i = 0; i < PASSES * TAPS; ++i) {
    float* d = acc[i / TAPS][i % TAPS];
    sums[i * 32] = make_float4(d[0], d[1], d[2], d[3]);
    d[0] = d[1] = d[2] = d[3] = 0.f;
  }
}

// All blocks of a warp. `x_channel` and `channel`: its first ones, of those in the planes.
__device__ inline void consume(const Args& g, int blocks, uint8_t* stages, Ring& pipeline, int x_channel,
                               int channel, float (&acc)[PASSES][TAPS][4]) {
  const uint8_t* x_planes = segment_of<X>(stages, x_channel);
  const uint8_t* y_planes = segment_of<Y>(stages + X::PLANE_BYTES, channel);
  Columns y[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES * STEPS; ++i) y[i / STEPS][i % STEPS][1] = y[i / STEPS][i % STEPS][3] = 0;
  uint32_t last[PASSES][Y_WORDS] = {};  // X's rows of the last block, if lines are wrapped
  float4* sums = reinterpret_cast<float4*>(stages + g.stages * STAGE_BYTES) + channel * (PASSES * TAPS * 32) +
                 threadIdx.x % 32;
  if constexpr (CHAIN > 0) move_to(sums, acc);
  Position place;
#pragma unroll 1
  for (; blocks > 0; --blocks) {
    const int at = place.stage * STAGE_BYTES;
    wait_full(pipeline, place);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {  // of WARPS channels
      Run x;
      uint32_t next[Y_WORDS];
      uint32_t* const read = x + RUN_WORDS - X::READ_CHUNKS * 4;
      read_chunks<X::READ_CHUNKS>(x_planes + at + pass * (WARPS / 8 * X::PART * 16), read);
      if constexpr (WRAP > 0) prepend_row(last[pass], x);
      read_chunks<Y::READ_CHUNKS>(y_planes + at + pass * (WARPS / 8 * Y::PART * 16), next);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        uint32_t (&columns)[4] = y[pass][i];
        columns[0] = columns[1];
        columns[2] = columns[3];
        columns[1] = next[2 * i];
        columns[3] = next[2 * i + 1];
      }
      multiply(x, y[pass], acc[pass]);
    }
    arrive(&pipeline.empty[place.stage]);
    place.advance(g.stages);
    if constexpr (CHAIN > 0) {
      if ((blocks & (CHAIN - 1)) == 0) {
        add_to(sums, acc);
        move_to(sums, acc);
      }
    }
  }
  if constexpr (CHAIN > 0) add_to(sums, acc);
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// dW[r, s, k] of the split by one warp, over exactly the pixels that it depends on. The products multiply
// pixels of X beyond dY's edges by zeros: where such a pixel is not finite they are wrong.
__device__ inline float exact(const Args& g, const Work& work, const Element* x, const Element* y, int r,
                              int s, int k) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
  for (int i = work.begin * ROWS; i < work.end * ROWS; ++i) {
    const Row row(i);
    const int p = row.p, h = p * STRIDE_H - PAD_H + r * DILATION_H;
#pragma unroll 1  // rarely run
    for (int j = lane; j < IMAGES * COLUMNS; j += 32) {
      const int n = row.n + j / COLUMNS, q = row.tile * COLUMNS + j % COLUMNS;
      const int w = q * STRIDE_W - PAD_W + s * DILATION_W;
      const int x_pixel = pixel_at<INPUT_H, INPUT_W>(h, w), y_pixel = pixel_at<OUTPUT_H, OUTPUT_W>(p, q);
      if (n >= g.batch || x_pixel < 0 || y_pixel < 0) continue;
      const size_t x_at = (n * XOperand::PIXELS + x_pixel) * IN_CHANNELS + k / MULTIPLIER;
      const size_t y_at = (n * YOperand::PIXELS + y_pixel) * OUT_CHANNELS + k;
      sum = fmaf(float(x[x_at]), float(y[y_at]), sum);
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(ALL, sum, other);
  return sum;
}

// A channel's taps: sums of its products along their diagonals, and what is not finite again. sums[tap], as
// `Work::r` and `Work::s` count taps.
__device__ inline void finish(const Args& g, const Work& work, const Element* x, const Element* y, int k,
                              const float (&acc)[TAPS][4], float* scratch, float* sums) {
  constexpr int taps = SIZE_H * TAPS;
  const int lane = threadIdx.x % 32;
  float* products = scratch + lane / 4 * 8 + lane % 4 * 2;
#pragma unroll
  for (int s = 0; s < TAPS; ++s) {
    *reinterpret_cast<float2*>(products + s * SCRATCH) = make_float2(acc[s][0], acc[s][1]);
    *reinterpret_cast<float2*>(products + s * SCRATCH + 64) = make_float2(acc[s][2], acc[s][3]);
  }
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < taps; base += 32) {
    const int tap = base + lane;
    bool wrong = false;
    float sum = 0.f;
    if (tap < taps) {
      constexpr int FIRST_ROW = WRAP > 0;  // of X, that the first row of dY meets
      const float* diagonal = scratch + tap % TAPS * SCRATCH + (8 - FIRST_ROW - tap / TAPS * SHIFT_H) * 8;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += diagonal[j * 9];
      wrong = !isfinite(sum) && work.tap(tap) >= 0;
    }
    for (unsigned all = __ballot_sync(ALL, wrong && k < OUT_CHANNELS); all != 0; all &= all - 1) {
      const int index = base + __ffs(all) - 1;
      const float again = exact(g, work, x, y, work.r(index), work.s(index), k);
      if (index == tap) sum = again;
    }
    if (tap < taps) sums[tap] = sum;
  }
  __syncwarp();
}

// Columns that are read of every row but not written (dY's are multiplied, X's multiply zeros): zeros, in
// every stage.
template <class L>
__device__ inline void clear(uint8_t* planes, int stages) {
  constexpr int WIDE = L::ROW_CHUNKS - L::WRITTEN;
  if constexpr (WIDE > 0) {
    const int all = stages * CHANNELS * IMAGES * ROWS * WIDE;
#pragma unroll 1  // once or twice
    for (int i = threadIdx.x - 32 * PRODUCERS; i < all; i += CONSUMERS) {
      int rest = i / WIDE;
      const int row = rest % ROWS, image = rest / ROWS % IMAGES;
      rest /= ROWS * IMAGES;
      const int channel = rest % CHANNELS, stage = rest / CHANNELS;
      const int at = channel / 8 * L::PART + channel % 8 * L::CHANNEL + image * L::IMAGE + row * L::ROW;
      uint4* to = reinterpret_cast<uint4*>(planes + stage * STAGE_BYTES);
      to[at + L::WRITTEN + i % WIDE] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Grid: x over blocks of taps and, outside of these, blocks of channels (neighbours read the same pixels), y
// over splits. Split s covers blocks [s, s+1) * blocks_per_split and writes out + s * (output size); the
// plan leaves no split empty.
template <class T>
__device__ inline void wgrad(const Args& g, const Element* x, const Element* y, T* out) {
  __shared__ Ring pipeline;
  uint8_t* stages = dynamic_shared();
  const Work work(g);
  // A class with fewer blocks than others.
  if (work.r0 >= KERNEL_H || work.s0 >= KERNEL_W) return;
  const int warp = warp_index() - PRODUCERS;  // of the consumers
  Producer producer;
  auto prepare = [&] {
    if (threadIdx.x == 32 * PRODUCERS) init_stages(pipeline, g.stages);
    clear<X>(stages, g.stages);
    clear<Y>(stages + X::PLANE_BYTES, g.stages);
  };
  // The first loads' code lies at the start, unless that takes registers that producers do not have.
  constexpr bool TIGHT = SHARED_OUT && PASSES == 1;
  if constexpr (!TIGHT) {
    if (warp < 0) {
      producer.begin(g, work, x, y);
    } else {
      prepare();
    }
    sync_threads<THREADS, START>();
  }
  if (warp < 0) {
    Shares::be_producer();
    if constexpr (TIGHT) {
      producer.begin(g, work, x, y);
      sync_threads<THREADS, START>();
    }
    producer.run(g, shared_address(stages), pipeline);
  } else {
    Shares::be_consumer();
    if constexpr (TIGHT) {
      prepare();
      sync_threads<THREADS, START>();
    }
    float acc[PASSES][TAPS][4] = {};
    // X's channel among those loaded; with more than one pass they are the output's (`config_refusal`).
    const int x_channel = PASSES > 1 ? warp : (work.k0 + warp) / MULTIPLIER - work.c0;
    consume(g, work.end - work.begin + 1, stages, pipeline, x_channel, warp, acc);
    const Work again(g);  // instead of `work`, for which there were no registers
    const int thread = read_thread_index() - 32 * PRODUCERS;

    launch_dependent_grids();
    sync_threads<CONSUMERS, PRODUCTS>();  // nobody reads the planes any more
    float* sums = reinterpret_cast<float*>(stages);
    float* scratch = sums + SUMS * CHANNELS + thread / 32 * TAPS * SCRATCH;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int channel = pass * WARPS + thread / 32;
      finish(g, again, x, y, again.k0 + channel, acc[pass], scratch, sums + channel * SUMS);
    }
    sync_threads<CONSUMERS, PRODUCTS>();
    out += blockIdx.y * (size_t(FILTER) * OUT_CHANNELS);
#pragma unroll 1  // twice for 7x7 taps of 16 channels
    for (int i = thread; i < SIZE_H * TAPS * CHANNELS; i += CONSUMERS) {
      const int tap = i / CHANNELS, channel = i % CHANNELS, k = again.k0 + channel, at = again.tap(tap);
      if (at >= 0 && k < OUT_CHANNELS)
        convert(sums[channel * SUMS + tap], out[size_t(at) * OUT_CHANNELS + k]);
    }
  }
}

// Both kernels, though a plan launches one: without the other, NVRTC orders the code of some in another way,
// which takes up to 4% longer.
#define PARAMETERS (const __grid_constant__ Args g, const Element* x, const Element* y)
SPLIT_K_KERNEL(KERNEL(_partial), PARAMETERS, (g, x, y), float)
SPLIT_K_KERNEL(KERNEL(_direct), PARAMETERS, (g, x, y), Output)
