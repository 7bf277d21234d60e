// Forward convolutions with few or odd channels on Hopper: any strides, dilations and padding, one to three
// spatial dimensions, operands of 16 bits or float32.
//
//   out[pixel, k] = sum over (tap, c) of x[pixel * stride - pad + tap * dilation, c] * w[tap, c, k]
//
// or, MIRRORED, the gradient of an input: x is the output's cotangent, and tap's weights are those of the tap
// at the other end, w[tap, k, c].
//
// A stage of the pipeline holds what the windows of a tile of pixels touch (gather/input.cuh). WGMMA's
// A fragments, [pixels] x [(tap, channel)], are gathered from it into registers: the elements of a `segment`
// are neighbours in memory (a tap's channels or, with RUNS, those of a filter row), and segments are filled
// up to eights, so that what a lane loads is a compile-time constant away from its pixel. Fillings are zeros:
// in A, where neighbours of the window are read in their place, and in B, the weights, which stay in shared
// memory while thread blocks go from tile to tile: MN-major under the 128-byte swizzle, or for float32
// K-major without swizzle, [four elements][output channel] of 16 bytes.
//
// float32 is rounded to tf32 (to nearest), and a product has one eight instead of two. Its order is 0 2 4 6 1
// 3 5 7, so that a lane's two elements are neighbours there, too.
//
// Roles: warpgroup 0 is the producer of stages (cp.async, or its own loads and stores), the others are
// consumers, which first load the weights. `full` has an arrival of each producer thread, `empty` one of each
// consumer warp, once the WGMMAs that follow its reads have retired. Epilogue: a warp turns its 16 rows in
// memory of its own, and stores whole rows of the output.
//
// With an epilogue (device/epilogue.cuh) sums of results of 16 bits begin with the bias: registers are too
// few to load it beside the sums. A residual, of 16 bits too, comes to where the results will be.
//
// Macros: ELEMENT, OUT, CTAS_PER_SM, PRODUCER_REGS, CONSUMER_REGS, CONSUMERS warpgroups of BLOCKS 64-row
// blocks each, TILE_N, STAGES, those of gather/input.cuh, TAP_* (from one tap to the next), SEGMENTS of
// SEGMENT elements, of which PARITY (0 or 1) filled ones come before the first, PAIRED: neighbours are
// aligned as pairs, GROUP: products of a batch, TOGETHER: results that are stored at once, the largest of 1,
// 2, 4 and 8 that divides the output channels; MIRRORED; GROUPED: the SLICE channels are a group's, as are
// the output channels that a thread block computes.

#include "device/epilogue.cuh"
#include "device/skeleton.cuh"
#include "device/tf32.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "gather/input.cuh"
#include "structs.cuh"

#if ELEMENT == 0
using Wgmma = WGMMA(TILE_N, x8_F32TF32TF32_RS_TN)<>;
constexpr int EIGHTS_OF_STEP = 1;  // of a product
#else
using Wgmma = WGMMA_16(TILE_N, RS)<GMMA::Major::K, GMMA::Major::MN>;
constexpr int EIGHTS_OF_STEP = 2;
#endif

constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int THREADS = PRODUCERS + CONSUMER_THREADS;
constexpr int ACCUMULATORS = TILE_N / 2;            // per thread and 64-row block
constexpr int EIGHTS = (PARITY + SEGMENT + 7) / 8;  // of a segment
// Products of a 64-row block.
constexpr int STEPS = (SEGMENTS * EIGHTS + EIGHTS_OF_STEP - 1) / EIGHTS_OF_STEP;
#if ELEMENT == 0
constexpr int CHUNK_BYTES = TILE_N * 16;     // four rows of the weights
constexpr int STEP_BYTES = 2 * CHUNK_BYTES;  // a product's
constexpr int WEIGHT_BYTES = STEPS * STEP_BYTES;
#else
constexpr int BOX_BYTES = STEPS * 16 * 128;  // 64 columns of the weights
constexpr int STEP_BYTES = 16 * 128;
constexpr int WEIGHT_BYTES = (TILE_N + 63) / 64 * BOX_BYTES;
#endif

#if EPILOGUE && BIAS && OUT != 0
#define BEGUN 1  // sums begin with the bias
#else
#define BEGUN 0
#endif

using Accumulator = float[ACCUMULATORS];
using Windows = Pipeline<STAGES, PRODUCERS, 4 * CONSUMERS>;

// Output channels of a group.
__device__ inline int columns_of(const Args& g) {
#if GROUPED
  return g.columns;
#else
  return g.out_channels;
#endif
}

// ---- weights ---------------------------------------------------------------------------------------------

// Where the weight of a segment's element and output channel `k` is.
__device__ inline int64_t weight_at(const Args& g, int segment, int position, int k) {
  if constexpr (MIRRORED) {  // a segment is a tap's channels or, with RUNS, those of a filter row
    constexpr int ALL = SEGMENTS * SEGMENT / SLICE;
    const int tap = segment * (SEGMENT / SLICE) + position / SLICE;
    const int pitch = GROUPED ? g.channels : SLICE;
    return (int64_t(ALL - 1 - tap) * columns_of(g) + k) * pitch + position % SLICE;
  }
  return (int64_t(segment) * SEGMENT + position) * g.out_channels + k;
}

// By all consumers, with zeros where a segment is filled up and beyond the output channels.
__device__ inline void load_weights(const Args& g, const Element* w, uint32_t weights, int k0) {
#if ELEMENT == 0
  // A chunk has the even or the odd rows of an eight.
  for (int i = threadIdx.x - PRODUCERS; i < STEPS * 2 * TILE_N; i += CONSUMER_THREADS) {
    const int chunk = i / TILE_N, segment = chunk / 2 / EIGHTS, k = k0 + i % TILE_N;
    const int first = chunk / 2 % EIGHTS * 8 + chunk % 2 - PARITY;
    uint32_t value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int position = first + 2 * j;
      const bool is_there = position >= 0 && position < SEGMENT && k < columns_of(g);
      value[j] = is_there ? tf32(__float_as_uint(w[weight_at(g, segment, position, k)])) : 0;
    }
    store_shared(weights + i * 16, make_uint4(value[0], value[1], value[2], value[3]));
  }
#elif TOGETHER < 8 || MIRRORED
  for (int i = threadIdx.x - PRODUCERS; i < STEPS * 16 * TILE_N; i += CONSUMER_THREADS) {
    const int row = i / TILE_N, column = i % TILE_N, k = k0 + column;
    const int segment = row / (8 * EIGHTS), position = row % (8 * EIGHTS) - PARITY;
    const bool is_there = segment < SEGMENTS && position >= 0 && position < SEGMENT && k < columns_of(g);
    const int64_t from = weight_at(g, segment, position, k);
    const uint16_t value = is_there ? reinterpret_cast<const uint16_t*>(w)[from] : uint16_t(0);
    store_shared(weights + column / 64 * BOX_BYTES + swizzled(row, column / 8 % 8) + column % 8 * ITEM,
                 value);
  }
#else
  constexpr int CHUNKS = TILE_N / 8;  // 16 bytes of a row
  for (int i = threadIdx.x - PRODUCERS; i < STEPS * 16 * CHUNKS; i += CONSUMER_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, k = k0 + chunk * 8;
    const int segment = row / (8 * EIGHTS), position = row % (8 * EIGHTS) - PARITY;
    const bool is_there = segment < SEGMENTS && position >= 0 && position < SEGMENT && k < columns_of(g);
    const Element* from = w + (int64_t(segment) * SEGMENT + position) * g.out_channels + k;
    const uint4 value = is_there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    store_shared(weights + chunk / 8 * BOX_BYTES + swizzled(row, chunk % 8), value);
  }
#endif
}

// ---- producer --------------------------------------------------------------------------------------------

// `first`: the first channel.
__device__ inline void produce(const Args& g, const Element* x, uint32_t stages, Windows& pipeline,
                               int first) {
  Position at;
  for (int tile = blockIdx.x; tile < g.tiles; tile += gridDim.x, at.advance(STAGES)) {
    pipeline.wait_empty(at);
    load_x(g, x, stages + at.stage * STAGE_BYTES, tile_at(g, tile), first);
    if constexpr (X_ASYNC) {
      Barrier::arrive_after_copies(&pipeline.full[at.stage]);
    } else {
      Barrier::arrive(&pipeline.full[at.stage]);
    }
  }
}

// ---- consumer --------------------------------------------------------------------------------------------

// Elements from a pixel's place to a segment.
__device__ constexpr int segment_offset(int segment) {
  const int s = RUNS ? 0 : segment % KERNEL_W, row = RUNS ? segment : segment / KERNEL_W;
  return row / KERNEL_H * ROWS * ROW_PITCH + row % KERNEL_H * TAP_ROW + s * TAP_COL + LEAD - PARITY;
}

#if ELEMENT == 0
// Which of a lane's two elements count, at a segment's ends: of its first eight, of its last.
struct Masks {
  uint2 first, last;
  __device__ explicit Masks(int pair) {
    const int left = PARITY + SEGMENT - (EIGHTS - 1) * 8 - pair;
    first = make_uint2(pair < PARITY ? 0u : ~0u, ~0u);
    last = make_uint2(left <= 0 ? 0u : ~0u, left <= 1 ? 0u : ~0u);
  }
};

// The two elements that a lane has of the filter's `eight`-th eight elements, of the pixel at `at`.
__device__ __forceinline__ void load_two(uint32_t at, int eight, const Masks& masks, uint32_t& even,
                                         uint32_t& odd) {
  const int segment = eight / EIGHTS, place = eight % EIGHTS;
  const uint32_t from = at + (segment_offset(segment) + place * 8) * ITEM;
  uint2 two;
  if constexpr (PAIRED) {
    two = load_shared<uint2>(from);
  } else {
    two = make_uint2(load_shared<uint32_t>(from), load_shared<uint32_t>(from + ITEM));
  }
  if (PARITY && place == 0) two.x &= masks.first.x;
  if ((PARITY + SEGMENT) % 8 && place == EIGHTS - 1) two.x &= masks.last.x, two.y &= masks.last.y;
  even = tf32(two.x);
  odd = tf32(two.y);
}
#else
// Which of a lane's pairs of elements count, at a segment's ends: those of its first eight, of its last.
struct Masks {
  uint32_t first, last;
  __device__ explicit Masks(int pair) {
    const int left = PARITY + SEGMENT - (EIGHTS - 1) * 8 - pair;
    first = pair < PARITY ? 0xffff0000u : ~0u;
    last = left <= 0 ? 0u : left == 1 ? 0xffffu : ~0u;
  }
};

// The two elements that a lane has of the filter's `eight`-th eight elements, of the pixel at `at`.
__device__ __forceinline__ uint32_t load_pair(uint32_t at, int eight, const Masks& masks) {
  const int segment = eight / EIGHTS, place = eight % EIGHTS;
  if (segment >= SEGMENTS) return 0;
  const uint32_t from = at + (segment_offset(segment) + place * 8) * ITEM;
  uint32_t pair;
  if constexpr (PAIRED) {
    pair = load_shared<uint32_t>(from);
  } else {
    const uint32_t low = load_shared<uint16_t>(from), high = load_shared<uint16_t>(from + ITEM);
    pair = low | high << 16;
  }
  if (PARITY && place == 0) pair &= masks.first;
  if ((PARITY + SEGMENT) % 8 && place == EIGHTS - 1) pair &= masks.last;
  return pair;
}
#endif

// A's fragment of a product; `at`: of the two rows' pixels.
__device__ __forceinline__ void load_fragment(const uint32_t (&at)[2], int step, const Masks& masks,
                                              uint32_t (&a)[4]) {
#if ELEMENT == 0
#pragma unroll
  for (int row = 0; row < 2; ++row) load_two(at[row], step, masks, a[row], a[2 + row]);
#else
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = load_pair(at[j % 2], step * 2 + j / 2, masks);
#endif
}

// acc = windows of the rows whose pixels are at `at` (two of a thread) times the weights, or with BEGUN
// acc += that.
__device__ inline void multiply(const uint32_t (&at)[2], uint64_t b, const Masks& masks, Accumulator& acc) {
  uint32_t a[2][GROUP][4];
  GMMA::ScaleOut scale = BEGUN ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
#pragma unroll
  for (int first = 0; first < STEPS; first += GROUP) {
    uint32_t (&now)[GROUP][4] = a[first / GROUP % 2];
    // The batch that read these registers has retired.
    if (first >= 2 * GROUP) wait_batches<1>();
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      if (first + i < STEPS) load_fragment(at, first + i, masks, now[i]);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      if (first + i < STEPS) fence(now[i]);
    }
    const auto products = [&] {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        if (first + i >= STEPS) continue;
        wgmma<Wgmma>(now[i], b + (first + i) * (STEP_BYTES >> 4), acc, scale);
        scale = GMMA::ScaleOut::One;
      }
    };
    batch(products, acc);
  }
  wait_batches<0>(acc);
}

// ---- epilogue --------------------------------------------------------------------------------------------

#if BEGUN
__device__ inline void begin(const Args& g, const Epilogue& epilogue, int k0, Accumulator& acc) {
  constexpr int EACH = TOGETHER > 1 ? 2 : 1;  // columns
#pragma unroll
  for (int i = 0; i < TILE_N / 8 * 2; i += EACH) {
    const int k = k0 + i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2;
    float b[EACH] = {};
    if (k < columns_of(g)) epilogue.load_bias(k, b);
    float* sums = &acc[i / 2 * 4 + i % 2];
#pragma unroll
    for (int j = 0; j < EACH; ++j) sums[j] = sums[j + 2] = b[j];
  }
}
#endif

// The place of a tile's row in the output, in pixels; -1 beyond it.
__device__ inline int pixel_of(const Args& g, const Tile& tile, int row) {
  const int n = tile.image + row / (TILE_P * TILE_Q), p = tile.p + row / TILE_Q % TILE_P,
            q = tile.q + row % TILE_Q;
  const bool inside = row < PIXELS && n < g.batch && p < g.out.h && q < g.out.w;
  return inside ? ((n * g.out.d.value + tile.d) * g.out.h.value + p) * g.out.w.value + q : -1;
}

#if OUT == 0
// A lane's neighbours go as they are: four lanes fill a sector.
__device__ inline void store(const Args& g, const Tile& tile, int row, int k0, uint32_t,
                             const Accumulator& acc, Output* out, const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = pixel_of(g, tile, row + lane / 4 + 8 * half);
    if (pixel < 0) continue;
    Output* to = out + int64_t(pixel) * g.out_channels + k0 + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      if (k0 + 8 * j >= columns_of(g)) continue;
      const float (&v)[2] = reinterpret_cast<const float (&)[2]>(acc[4 * j + 2 * half]);
      const int k = k0 + 8 * j + 2 * (lane % 4);
      if constexpr (TOGETHER == 1) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (k + c < columns_of(g)) epilogue.store(out, to + 8 * j + c, 0, k + c, {v[c]});
        }
      } else if (TOGETHER == 8 || k < columns_of(g)) {
        epilogue.store(out, to + 8 * j, 0, k, v);
      }
    }
  }
}
#else
constexpr int COLUMNS_AT_ONCE = TILE_N % 64 ? TILE_N : 64;
constexpr int PITCH_BYTES = COLUMNS_AT_ONCE * 2 + 16;  // eight rows' 16 bytes lie in different banks
constexpr int WARP_BYTES = 16 * PITCH_BYTES;
using Piece = Vec<Output, TOGETHER>;
using Few = conditional_t<TOGETHER == 1, uint16_t, uint32_t>;
using Bits = conditional_t<(TOGETHER < 4), Few, conditional_t<TOGETHER == 4, float2, uint4>>;  // of a piece

__device__ inline uint32_t packed(float low, float high) {
  Vec<Output, 2> pair = converted<Output, 2>({low, high});
  return reinterpret_cast<const uint32_t&>(pair);
}

// `row`: the first of the warp's 16. `turn`: its memory.
__device__ inline void store(const Args& g, const Tile& tile, int row, int k0, uint32_t turn,
                             const Accumulator& acc, Output* out, [[maybe_unused]] const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = turn + lane % 16 * PITCH_BYTES + lane / 16 * 16;
  constexpr int CHUNKS = COLUMNS_AT_ONCE / TOGETHER;
  const int pixel_of_line = pixel_of(g, tile, row + lane % 16);  // each is needed CHUNKS times
#pragma unroll
  for (int first = 0; first < TILE_N; first += COLUMNS_AT_ONCE) {
#if EPILOGUE && RESIDUAL_TYPE >= 0
    static_assert(RESIDUAL_TYPE != FLOAT);
#pragma unroll 4
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
      const int line = i / CHUNKS, chunk = i % CHUNKS, k = k0 + first + chunk * TOGETHER;
      const int pixel = __shfl_sync(~0u, pixel_of_line, line);
      Bits value = {};
      if (pixel >= 0 && k < columns_of(g))
        value = *reinterpret_cast<const Bits*>(epilogue.residual + int64_t(pixel) * g.out_channels + k);
      store_shared(turn + line * PITCH_BYTES + chunk * sizeof(Piece), value);
    }
    __syncwarp();
#endif
#pragma unroll
    for (int column = 0; column < COLUMNS_AT_ONCE; column += 16) {
#if EPILOGUE
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = acc[(first + column) / 2 + i];
      uint32_t residual[4] = {};
      if constexpr (RESIDUAL_TYPE >= 0) load_matrices(to + column * 2, residual);
      finish(residual, v);
#else
      const float* v = &acc[(first + column) / 2];
#endif
      store_matrices(to + column * 2,
                     {packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7])});
    }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
      const int line = i / CHUNKS, chunk = i % CHUNKS, k = k0 + first + chunk * TOGETHER;
      const int pixel = __shfl_sync(~0u, pixel_of_line, line);
      const Piece value = load_shared<Piece>(turn + line * PITCH_BYTES + chunk * sizeof(Piece));
      if (pixel < 0 || k >= columns_of(g)) continue;
      *reinterpret_cast<Piece*>(out + int64_t(pixel) * g.out_channels + k) = value;
    }
    __syncwarp();
  }
}
#endif

__device__ inline void consume(const Args& g, const Element* w, uint32_t weights, uint32_t stages,
                               uint32_t turns, Windows& pipeline, int k0, Output* out,
                               const Epilogue& epilogue) {
  load_weights(g, w, weights, k0);
  fence_async_shared();  // WGMMA reads what was stored here
  sync_threads<CONSUMER_THREADS, 1>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - PRODUCERS / 32;
  const int first = warp / 4 * 64 * BLOCKS + warp % 4 * 16;  // the warp's rows of its first block
#if ELEMENT == 0
  const uint64_t b = operand(weights, CHUNK_BYTES, 128, Swizzle::NONE);
#else
  const uint64_t b = operand(weights, BOX_BYTES);
#endif
  const Masks masks(2 * (lane % 4));
  [[maybe_unused]] uint32_t turn = turns;
#if OUT != 0
  turn += warp * WARP_BYTES;
#endif
  Position at;
  for (int i = blockIdx.x; i < g.tiles; i += gridDim.x, at.advance(STAGES)) {
    const Tile tile = tile_at(g, i);
    const uint32_t stage = stages + at.stage * STAGE_BYTES;
    pipeline.wait_full(at);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
      const int row = first + block * 64;
      uint32_t pixel[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Rows beyond the tile read its last pixel.
        const int k = min(row + lane / 4 + 8 * half, PIXELS - 1);
        pixel[half] = stage + (pixel_offset(k) + 2 * (lane % 4)) * ITEM;
      }
      Accumulator acc;
#if BEGUN
      begin(g, epilogue, k0, acc);
#endif
      multiply(pixel, b, masks, acc);
      if (block == BLOCKS - 1) {
        __syncwarp();
        if (lane == 0) pipeline.release(at.stage);
      }
      store(g, tile, row, k0, turn, acc, out, epilogue);
    }
  }
}

// Grid: x over the thread blocks that share the tiles of pixels, y over tiles of output channels, of one
// group after the other.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const Element* x, const Element* w, const __grid_constant__ Args g,
             Output* out EPILOGUE_PARAMETERS) {
  __shared__ Windows pipeline;
  const uint32_t weights = shared_stages(), stages = weights + WEIGHT_BYTES;
  int first = 0, tile_n = blockIdx.y;
  Epilogue epilogue = EPILOGUE_OF_PARAMETERS;
#if GROUPED
  const int group = tile_n / g.tiles_n;
  tile_n -= group * g.tiles_n;
  first = group * SLICE;
  w += MIRRORED ? first : group * g.columns;
  out += group * g.columns;
  epilogue = epilogue.from_column(group * g.columns);
#endif
  run_roles<Roles<PRODUCERS / 32, PRODUCER_REGS, CONSUMER_REGS, true>>(
      [&](int) { produce(g, x, stages, pipeline, first); },
      [&](int) {
        consume(g, w, weights, stages, stages + STAGES * STAGE_BYTES, pipeline, tile_n * TILE_N, out,
                epilogue);
      },
      pipeline);
}
