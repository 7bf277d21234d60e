// Which part of a depthwise convolution a thread block has, and its input: copied from global memory AHEAD of
// its use, then transposed. Words and macros: depthwise/toeplitz.cu.

#include "device/output.cuh"
#include "device/pipeline.cuh"

using Element = TypeOf<ELEMENT>::type;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int PARTS = CHANNELS / 8, WARPS = CHANNELS / EACH, THREADS = 32 * WARPS;
constexpr int SHARE = 4 / PARTS;  // a unit's chunks of each part
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int WINDOW = (KERNEL_H - 1) / DOWN_H + 1, LEAD = SLIDES ? 0 : WINDOW - 1;
constexpr int IN_PLANES = (PLANES - 1) * DOWN_D + KERNEL_D;
constexpr int IN_ROWS = STEP * DOWN_H * IN_PLANES, OUT_ROWS = STEP * PLANES;  // of a stage
constexpr int LOADS = ceil_div(IN_ROWS * UNITS, WARPS), STORES = OUT_ROWS * 4 * PARTS / WARPS;
constexpr int K_STEPS = ceil_div(K_CHUNKS, 2);
constexpr int HALVES = sizeof(Output) / 2;  // of a value: buffers for them
constexpr int NOWHERE = -(1 << 30);
constexpr int LAST_ROW = PERIOD * DOWN_H - PAD_H;  // of TALL lines: from here on it is the next image's row

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

// First row and plane of the output of a line. A TALL one may go on in the next images. With SLIDES the same
// strips of all images follow each other.
struct Line {
  int image, plane, row;
  __device__ Line(int index, int images) {
    if constexpr (SLIDES) {
      image = index < images * STRIPS ? index % images : images;
      plane = 0;
      row = min(index / images, STRIPS - 1) * ROWS;
      return;
    }
    if constexpr (TALL) {
      image = index * ROWS / PERIOD;
      plane = 0;
      row = index * ROWS % PERIOD;
      return;
    }
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

struct Loader {
  static constexpr int BYTES = LOADS * THREADS * 16;  // of a stage's copies
  const uint4* x;
  unsigned at[LOADS];  // pixels' eights of channels, in the stage that is loaded next
  int row[LOADS];      // NOWHERE: zeros
  uint32_t copies, to;
  unsigned end;  // of the images

  __device__ Loader(const Place& place, const Element* x_, int images, uint32_t buffers, uint32_t copies_)
      : x(reinterpret_cast<const uint4*>(x_)),
        copies(copies_ + threadIdx.x * 16),
        end(unsigned(images) * (INPUT_D * INPUT_H * INPUT_W) * EIGHTS) {
    const Unit own(threadIdx.x);
    const int warp = threadIdx.x / 32, eight = place.channel / 8 + own.part;
    to =
        buffers + (own.row_part * IN_PART + own.row_channel * IN_CHANNEL + warp * SHARE + own.row_chunk) * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int unit = i * WARPS + warp, step_row = unit / UNITS, position = unit % UNITS * SHARE + own.chunk;
      const Line line(place.line + position % LINES, images);
      const int column = place.column * DOWN_W - PAD_W + chunk_at(position / LINES) * 8 + own.column;
      const int plane = line.plane * DOWN_D - PAD_D + step_row % IN_PLANES;
      row[i] = line.row * DOWN_H - PAD_H + step_row / IN_PLANES;
      at[i] = unsigned((line.image * INPUT_D + plane) * INPUT_H + row[i]) * INPUT_W + column;
      at[i] = at[i] * EIGHTS + eight;
      const bool inside = unit < IN_ROWS * UNITS && position < CHUNKS * LINES && eight < EIGHTS &&
                          line.image < images && unsigned(plane) < INPUT_D && unsigned(column) < INPUT_W;
      if (!inside) row[i] = NOWHERE;
      if constexpr (TALL) leave_image(i);
    }
  }

  // Below the last row of a TALL line's image, and what padding both have in common, is the next one.
  __device__ void leave_image(int i) {
    constexpr unsigned further = unsigned(INPUT_D * INPUT_H - PERIOD * DOWN_H) * INPUT_W * EIGHTS;
    if (row[i] < LAST_ROW) return;
    row[i] -= PERIOD * DOWN_H;
    at[i] += further;
  }

  // With a stride of 2 all even chunks come first: so those of neighbouring windows are neighbours.
  __device__ static constexpr int chunk_at(int i) {
    return DOWN_W == 1 ? i : i % (CHUNKS / DOWN_W) * DOWN_W + i / (CHUNKS / DOWN_W);
  }

  // Begins the copy of a stage. It is called for the stages in order, and copies nothing behind the last one.
  __device__ void load(int stage) {
    if (stage < STAGES) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const bool inside = unsigned(row[i]) < INPUT_H && (!TALL || at[i] < end);
        copy_async<16>(copies + stage % AHEAD * BYTES + i * (THREADS * 16), x + at[i], inside ? 16 : 0);
        row[i] += STEP * DOWN_H;
        at[i] += unsigned(STEP * DOWN_H) * INPUT_W * EIGHTS;
        if constexpr (TALL) leave_image(i);
      }
    }
    commit_copies();
  }

  // Waits for a stage, the first of AHEAD whose copies have begun, and transposes it.
  __device__ void store(int stage) const {
    wait_copies<AHEAD - 1>();
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i * WARPS + WARPS > IN_ROWS * UNITS && i * WARPS + int(threadIdx.x / 32) >= IN_ROWS * UNITS)
        continue;
      const uint4 v = load_shared<uint4>(copies + stage % AHEAD * BYTES + i * (THREADS * 16));
      store_matrices_trans(to + stage % 2 * IN_BYTES + i * (WARPS * SHARE * 16), {v.x, v.y, v.z, v.w});
    }
  }
};
