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
//   - has the copy of a stage begin that is AHEAD of this one (cp.async), 8 channels of a pixel to a lane,
//   - stores the rows that the last stage has completed,
//   - multiplies this stage, and puts what is complete in shared memory,
//   - puts the next stage, which has come, in its place, transposed (stmatrix): [channel][row][chunk][line].
//     Each lane reads what it has copied itself.
// Completed rows lie there as [channel][row][window] and are transposed back by ldmatrix.
//
// In one order, all warps would want the load/store unit at one time, and the tensor cores at another. With
// two TURNS half of the warps multiply while the others store.
//
// TALL lines are strips of all images on top of each other, which have what padding both want in common: an
// image begins every PERIOD rows of the output. So any number of blocks has equal shares.
//
// What 128 sums of a channel move through shared memory: 256 bytes in and 256 out as they are stored, and as
// much again as they are read, 512 as the copies come and go, and 512 (K_CHUNKS * 256) for the windows, which
// overlap: 1.8 KB, 14 clocks, where device memory takes 20. What limits a block is rather how many pieces of
// lines its accesses to global memory touch, CHANNELS of a pixel each: few instructions must touch them, so
// nothing is prefetched and all accesses are of 16 bytes. Pitches IN_* and OUT_* are such that no two of 8
// rows of a matrix meet in a bank.
//
// Macros: ELEMENT, OUT, EIGHTS (of channels), MIRRORED; of d, h and w INPUT, OUTPUT, KERNEL, DOWN, PAD; the
// Config's; LINES, PERIOD, STRIPS, PLANE_BLOCKS (of an image), COLUMN_BLOCKS, CHANNEL_BLOCKS; CHUNKS,
// K_CHUNKS (of a window), UNITS (of 512 bytes, in a row of a block); IN_CHANNEL, IN_PART, IN_BYTES,
// OUT_CHANNEL, OUT_PART, OUT_BYTES (of a buffer; the pitches in 16 bytes); STAGES, CTAS_PER_SM.

#include "depthwise/toeplitz_input.cuh"
#include "depthwise/toeplitz_output.cuh"
#include "structs.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const Element* __restrict__ x, const Element* __restrict__ w, Args args, Output* out) {
  extern __shared__ uint4 raw[];
  const uint32_t in_buffers = shared_address(raw), out_buffers = in_buffers + 2 * IN_BYTES;
  const uint32_t copies = out_buffers + 2 * HALVES * OUT_BYTES, weights = copies + AHEAD * Loader::BYTES;
  const Place place(blockIdx.x);
  Loader loader(place, x, args.images, in_buffers, copies);
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) loader.load(stage);
  stage_weights(w, place, weights);
  sync_threads<THREADS, 1>();
  Multiplier multiplier(in_buffers, out_buffers, weights);  // while the first copies are under way
  Writer writer(place, args.images, out_buffers, out);
  loader.store(0);
  sync_threads<THREADS, 1>();
  // Half of the warps of each of the multiprocessor's four parts. With AHEAD 1 the next stage has not come
  // yet when the others store.
  const bool last = TURNS == 2 && warp_index() / 4 % 2 == 1;
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    loader.load(stage + AHEAD);
    if (!last) {
      if (stage > 0) writer.store(stage - 1);
      if (TURNS == 2 && AHEAD > 1 && stage + 1 < STAGES) loader.store(stage + 1);
    }
    multiplier.run(stage);
    if (TURNS == 2 && last && stage > 0) writer.store(stage - 1);
    if ((TURNS == 1 || AHEAD == 1 || last) && stage + 1 < STAGES) loader.store(stage + 1);
    sync_threads<THREADS, 1>();
  }
  writer.store(STAGES - 1);
  writer.repair(x, w, out);
}
