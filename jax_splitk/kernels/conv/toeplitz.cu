// Depthwise convolutions on the tensor cores. Along a row of an image the filter's row r is a Toeplitz
// matrix: 8 neighbouring columns n of an output row get
//
//   out[p, 8 j + n] += sum over k of x[p * DOWN_H - PAD_H + r, 8 j * DOWN_W - PAD_W + k] * B_r[k, n],
//   B_r[k, n] = w[r, k - n * DOWN_W], which is 0 where there is no such tap,
//
// for one channel. An MMA multiplies 16 windows j of a row with 16 k; B is in registers all the time. (Of an
// input gradient the taps are MIRRORED.)
//
// Words. Tile: 8 neighbouring columns of the output; the input columns that it depends on are its window.
// Chunk: 8 neighbouring columns of the input, 16 bytes of one channel. Line: an image's strip of ROWS rows,
// of PLANES planes, of the output; a block has TILES tiles of LINES lines, 16 windows at most, which need
// CHUNKS chunks of each line. Step: the input rows that one more row of the output needs.
//
// A warp has EACH channels and slides down all lines at once: it keeps the sums of the WINDOW rows that a
// step reaches in registers, so that a window is read from shared memory once for all rows of taps. All warps
// take part in all else. A stage is STEP steps, and between two barriers a block
//   - loads the next stage from global memory into registers, 8 channels of a pixel to a lane, and has later
//     ones brought into the L2,
//   - stores the rows that the last stage has completed,
//   - multiplies this stage, and puts what is complete in shared memory,
//   - puts what was loaded in shared memory, transposed (stmatrix): [channel][row][chunk][line].
// Completed rows lie there as [channel][row][window] and are transposed back by ldmatrix.
//
// What 128 sums of a channel move through shared memory: 256 bytes in and 256 out as they are stored, and as
// much again as they are read, but 512 (K_CHUNKS * 256) for the windows, which overlap: 1.3 KB, 10 clocks,
// where device memory takes 20. Pitches IN_* and OUT_* are such that no two of 8 rows of a matrix meet in a
// bank.
//
// Infinities and NaNs reach other sums of their window through the zeros of B. So a lane that has stored what
// is not finite computes that anew at the end, without the MMA.
//
// Macros: ELEMENT, OUT, EIGHTS (of channels), MIRRORED; of d, h and w INPUT, OUTPUT, KERNEL, DOWN, PAD; the
// Config's; LINES, STRIPS, PLANE_BLOCKS (of an image), COLUMN_BLOCKS, CHANNEL_BLOCKS; CHUNKS, K_CHUNKS (of a
// window), UNITS (of 512 bytes, in a row of a block); IN_CHANNEL, IN_PART, IN_BYTES, OUT_CHANNEL, OUT_PART,
// OUT_BYTES (of a buffer; the pitches in 16 bytes); STAGES, CTAS_PER_SM.

#include "device/output.cuh"
#include "device/pipeline.cuh"
#include "structs.cuh"

using Element = TypeOf<ELEMENT>::type;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int PARTS = CHANNELS / 8, WARPS = CHANNELS / EACH, THREADS = 32 * WARPS;
constexpr int SHARE = 4 / PARTS;  // a unit's chunks of each part
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int WINDOW = (KERNEL_H - 1) / DOWN_H + 1, LEAD = WINDOW - 1;
constexpr int IN_PLANES = (PLANES - 1) * DOWN_D + KERNEL_D;
constexpr int IN_ROWS = STEP * DOWN_H * IN_PLANES, OUT_ROWS = STEP * PLANES;  // of a stage
constexpr int LOADS = ceil_div(IN_ROWS * UNITS, WARPS), STORES = OUT_ROWS * 4 * PARTS / WARPS;
constexpr int K_STEPS = ceil_div(K_CHUNKS, 2);
constexpr int HALVES = sizeof(Output) / 2;  // of a value: buffers for them
constexpr int AHEAD = ceil_div(6, STEP);    // stages that are prefetched, beside the one that is loaded
constexpr int NOWHERE = -(1 << 30);

// First channel, column of the output and line of a block.
struct Place {
  int channel, column, line;
  __device__ explicit Place(int index) {
    channel = index % CHANNEL_BLOCKS * CHANNELS;
    index /= CHANNEL_BLOCKS;
    column = index % COLUMN_BLOCKS * (TILES * 8);
    line = index / COLUMN_BLOCKS * LINES;
  }
};

// First row and plane of the output of a line.
struct Line {
  int image, plane, row;
  __device__ explicit Line(int index) {
    row = index % STRIPS * ROWS;
    index /= STRIPS;
    plane = index % PLANE_BLOCKS * PLANES;
    image = index / PLANE_BLOCKS;
  }
};

// What a lane does of units of four chunks of 8 channels, which a warp transposes: of its pixels, and of the
// rows of the 8x8 matrices that it has the addresses of. A matrix has two channels of the four chunks.
struct Unit {
  int part, chunk, column;               // of a pixel, whose 8 channels the lane has
  int row_part, row_chunk, row_channel;  // of a row
  __device__ explicit Unit(int thread) {
    const int lane = thread % 32, other = lane % 8 / 2;
    part = lane % 4 % PARTS;
    chunk = lane % 4 / PARTS;
    column = lane / 4;
    row_part = other % PARTS;
    row_chunk = other / PARTS;
    row_channel = lane / 8 * 2 + lane % 2;
  }
};

// ---- input ------------------------------------------------------------------------------------------------

struct Loader {
  const uint4* x;
  unsigned at[LOADS];  // pixels' eights of channels, in the first stage
  int row[LOADS];      // NOWHERE: zeros
  uint32_t to;
  uint32_t words[LOADS][4];

  __device__ Loader(const Place& place, const Element* x_, int images, uint32_t buffers) {
    const Unit own(threadIdx.x);
    const int warp = threadIdx.x / 32, eight = place.channel / 8 + own.part;
    x = reinterpret_cast<const uint4*>(x_);
    to =
        buffers + (own.row_part * IN_PART + own.row_channel * IN_CHANNEL + warp * SHARE + own.row_chunk) * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int unit = i * WARPS + warp, step_row = unit / UNITS, position = unit % UNITS * SHARE + own.chunk;
      const Line line(place.line + position % LINES);
      const int column = place.column * DOWN_W - PAD_W + chunk_at(position / LINES) * 8 + own.column;
      const int plane = line.plane * DOWN_D - PAD_D + step_row % IN_PLANES;
      row[i] = line.row * DOWN_H - PAD_H + step_row / IN_PLANES;
      at[i] = unsigned((line.image * INPUT_D + plane) * INPUT_H + row[i]) * INPUT_W + column;
      at[i] = at[i] * EIGHTS + eight;
      const bool inside = position < CHUNKS * LINES && eight < EIGHTS && line.image < images &&
                          unsigned(plane) < INPUT_D && unsigned(column) < INPUT_W;
      if (!inside) row[i] = NOWHERE;
    }
  }

  // With a stride of 2 all even chunks come first: so those of neighbouring windows are neighbours.
  __device__ static constexpr int chunk_at(int i) {
    return DOWN_W == 1 ? i : i % (CHUNKS / DOWN_W) * DOWN_W + i / (CHUNKS / DOWN_W);
  }

  __device__ void load(int stage) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const bool inside = unsigned(row[i] + stage * (STEP * DOWN_H)) < INPUT_H;
      const unsigned from = at[i] + unsigned(stage) * (unsigned(STEP * DOWN_H) * INPUT_W * EIGHTS);
      load_stream_or_zero<false>(inside, x + from, words[i]);
    }
  }

  // Into the L2, from where a stage's time is enough to load it.
  __device__ void prefetch(int stage) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const unsigned from = at[i] + unsigned(stage) * (unsigned(STEP * DOWN_H) * INPUT_W * EIGHTS);
      if (unsigned(row[i] + stage * (STEP * DOWN_H)) < INPUT_H) prefetch_l2(x + from);
    }
  }

  __device__ void store(int stage) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i * WARPS + WARPS > IN_ROWS * UNITS && i * WARPS + int(threadIdx.x / 32) >= IN_ROWS * UNITS)
        continue;
      store_matrices_trans(to + stage % 2 * IN_BYTES + i * (WARPS * SHARE * 16), words[i]);
    }
  }
};

// ---- products ---------------------------------------------------------------------------------------------

// The weights of the block's channels, [tap][channel].
__device__ inline void stage_weights(const Element* __restrict__ w, const Place& place, uint32_t weights) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TAPS * PARTS; i += THREADS) {
    const int tap = i / PARTS, eight = place.channel / 8 + i % PARTS;
    const uint4* from =
        reinterpret_cast<const uint4*>(w) + (MIRRORED ? TAPS - 1 - tap : tap) * EIGHTS + eight;
    store_shared(weights + i * 16, eight < EIGHTS ? __ldg(from) : uint4{});
  }
}

// A lane's registers of B, of all channels and rows of taps.
using Bands = uint32_t[EACH][KERNEL_D * KERNEL_H][K_STEPS][2];
// Of the rows that a step reaches, the first of which it completes.
using Sums = float[EACH][PLANES][WINDOW][4];

__device__ inline void read_bands(uint32_t weights, Bands& bands) {
  const int lane = threadIdx.x % 32;
  weights += threadIdx.x / 32 * (EACH * 2);
#pragma unroll
  for (int chunk = 0; chunk < 2 * K_STEPS; ++chunk) {
    uint32_t at[2], mask[2];  // of neighbouring k
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int tap = chunk * 8 + lane % 4 * 2 + e - lane / 4 * DOWN_W;
      at[e] = weights + min(max(tap, 0), KERNEL_W - 1) * (CHANNELS * 2);
      mask[e] = unsigned(tap) < KERNEL_W ? 0xffffu : 0u;
    }
#pragma unroll
    for (int row = 0; row < KERNEL_D * KERNEL_H; ++row) {
#pragma unroll
      for (int c = 0; c < EACH; ++c) {
        if (chunk >= K_CHUNKS) {
          bands[c][row][chunk / 2][1] = 0;
          continue;
        }
        const int offset = row * (KERNEL_W * CHANNELS * 2) + c * 2;
        const uint32_t low = load_shared<uint16_t>(at[0] + offset) & mask[0];
        const uint32_t high = load_shared<uint16_t>(at[1] + offset) & mask[1];
        bands[c][row][chunk / 2][chunk % 2] = high << 16 | low;
      }
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

// A warp's products.
struct Multiplier {
  uint32_t from, to;  // this lane's rows of matrices, of the first channel
  Bands bands;
  Sums sums = {};

  __device__ Multiplier(uint32_t in, uint32_t out, uint32_t weights) {
    const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * EACH;
    const int window = min(lane % 16, TILES * LINES - 1);
    const int position = window + lane / 16 * (DOWN_W == 1 ? 1 : CHUNKS / DOWN_W) * LINES;
    from = in + (channel / 8 * IN_PART + channel % 8 * IN_CHANNEL + position) * 16;
    to = out + (channel / 8 * OUT_PART + channel % 8 * OUT_CHANNEL + lane % 16) * 16 + lane / 16 * OUT_BYTES;
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
    uint32_t words[2][HALVES];  // of a lane's two windows
    pack(rows[0][0], rows[0][1], words[0]);
    pack(rows[0][2], rows[0][3], words[1]);
    if constexpr (HALVES == 1) {
      store_matrices(at, words[0][0], words[1][0]);
    } else {
      const uint32_t v[] = {words[0][0], words[1][0], words[0][1], words[1][1]};
      store_matrices(at, v);
    }
#pragma unroll
    for (int row = 0; row < WINDOW; ++row)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[row][i] = row + 1 < WINDOW ? rows[row + 1][i] : 0.f;
  }
};

// ---- output -----------------------------------------------------------------------------------------------

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

struct Writer {
  uint32_t from;
  int rows, planes;    // of the output, from the line's first on
  Output* to;          // its first row
  uint32_t wrong = 0;  // not 0: some of what was stored is not finite

  __device__ Writer(const Place& place, int images, uint32_t buffers, Output* out) {
    const Unit own(threadIdx.x);
    const int warp = threadIdx.x / 32, first = warp % (4 * PARTS) * SHARE, row = warp / (4 * PARTS);
    from = buffers +
           (own.row_part * OUT_PART + own.row_channel * OUT_CHANNEL + first + own.row_chunk + row * 16) * 16;
    const int window = first + own.chunk, eight = place.channel / 8 + own.part;
    const Line line(place.line + window % LINES);
    const int column = place.column + window / LINES * 8 + own.column;
    const bool inside = window < TILES * LINES && column < OUTPUT_W && eight < EIGHTS && line.image < images;
    rows = inside ? min(ROWS, OUTPUT_H - line.row) : 0;
    planes = OUTPUT_D - line.plane;
    const long long first_row = ((long long)line.image * OUTPUT_D + line.plane) * OUTPUT_H + line.row;
    to = out + ((first_row * OUTPUT_W + column) * EIGHTS + eight) * 8;
  }

  // Stores what stage `stage` has completed.
  __device__ void store(int stage) {
#pragma unroll
    for (int i = 0; i < STORES; ++i) {
      const int first = i * WARPS / (4 * PARTS);  // with one channel to a warp, of two rows
      const int e = first / STEP,
                row = stage * STEP + first % STEP + int(threadIdx.x / 32) / (4 * PARTS) - LEAD;
      uint32_t words[HALVES][4];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        uint32_t (&v)[4] = words[half];
        load_matrices_trans(from + (stage % 2 * HALVES + half) * OUT_BYTES + first * 256, v[0], v[1], v[2],
                            v[3]);
      }
      if (unsigned(row) >= unsigned(rows) || (PLANES > 1 && e >= planes)) continue;
      Output* const pixel = to + (long long)(e * OUTPUT_H + row) * (OUTPUT_W * EIGHTS * 8);
      uint4* const stored = reinterpret_cast<uint4*>(pixel);
      if constexpr (HALVES == 1) {
        stored[0] = make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]);
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t low[2] = {words[0][2 * j], words[0][2 * j + 1]};
          const uint32_t high[2] = {words[1][2 * j], words[1][2 * j + 1]};
          stored[j] = make_uint4(__byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
                                 __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
        }
      }
      wrong |= not_finite(words);
    }
  }

  // Computes anew what the lane has stored and is not finite.
  __device__ void repair(const Element* x, const Element* w) const {
    constexpr int EVERY = WARPS / (4 * PARTS);  // rows from one that the lane has stored to the next
    if (wrong == 0) return;
    int thread, block;
    read_indices(thread, block);  // anew: nothing of this was in registers before
    const Place place(block);
    const Unit own(thread);
    const int warp = thread / 32, window = warp % (4 * PARTS) * SHARE + own.chunk;
    const Line line(place.line + window % LINES);
    const int column = place.column + window / LINES * 8 + own.column, channel = place.channel + own.part * 8;
#pragma unroll 1
    for (int e = 0; e < (PLANES > 1 ? min(PLANES, planes) : 1); ++e) {
#pragma unroll 1
      for (int row = (warp / (4 * PARTS) + LEAD) % EVERY; row < rows; row += EVERY) {
        Output* const pixel = to + (long long)(e * OUTPUT_H + row) * (OUTPUT_W * EIGHTS * 8);
#pragma unroll 1
        for (int c = 0; c < 8; ++c) {
          const float value = float(pixel[c]);
          if (value - value == 0.f) continue;
          convert(sum_of(x, w, line.image, line.plane + e, line.row + row, column, channel + c), pixel[c]);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    toeplitz(const Element* __restrict__ x, const Element* __restrict__ w, Args args, Output* out) {
  extern __shared__ uint4 raw[];
  const uint32_t in_buffers = shared_address(raw), out_buffers = in_buffers + 2 * IN_BYTES;
  const uint32_t weights = out_buffers + 2 * HALVES * OUT_BYTES;
  const Place place(blockIdx.x);
  Loader loader(place, x, args.images, in_buffers);
  loader.load(0);
#pragma unroll 1
  for (int stage = 1; stage <= min(AHEAD, STAGES - 1); ++stage) loader.prefetch(stage);
  stage_weights(w, place, weights);
  sync_threads<THREADS, 1>();
  Multiplier multiplier(in_buffers, out_buffers, weights);  // while the first loads are under way
  Writer writer(place, args.images, out_buffers, out);
  loader.store(0);
  sync_threads<THREADS, 1>();
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    const bool more = stage + 1 < STAGES;
    if (more) loader.load(stage + 1);
    if (stage + 1 + AHEAD < STAGES) loader.prefetch(stage + 1 + AHEAD);
    if (stage > 0) writer.store(stage - 1);
    multiplier.run(stage);
    if (more) loader.store(stage + 1);
    sync_threads<THREADS, 1>();
  }
  writer.store(STAGES - 1);
  writer.repair(x, w);
}
