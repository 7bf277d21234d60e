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
// With a filter that is too tall for this, the sums stay in registers, and the taps slide (SLIDES;
// toeplitz_sliding.cuh).
//
// TALL lines are strips of all images on top of each other. Neighbouring images share the rows of padding
// between them: an image begins every PERIOD rows of the output. So any number of blocks has equal shares.
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
// OUT_CHANNEL, OUT_PART, OUT_BYTES (of a buffer; the pitches in 16 bytes); STAGES, CTAS_PER_SM, SLIDES.

#include "depthwise/toeplitz_output.cuh"
#if SLIDES
#include "depthwise/toeplitz_sliding.cuh"
#else
#include "depthwise/toeplitz_held.cuh"
#endif
#include "structs.cuh"

// Both buffers of the input, and both of completed rows: with SLIDES rows are completed at the end, and take
// the place of the input.
constexpr int INPUTS = 2 * IN_BYTES, OUTPUTS = SLIDES ? 0 : INPUTS;
constexpr int COMPLETED = (SLIDES ? 1 : 2) * HALVES * OUT_BYTES;
constexpr int BUFFERS = INPUTS > OUTPUTS + COMPLETED ? INPUTS : OUTPUTS + COMPLETED;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    KERNEL()(const Element* __restrict__ x, const Element* __restrict__ w, Args args, Output* out) {
  extern __shared__ uint4 raw[];
  const uint32_t in_buffers = shared_address(raw), out_buffers = in_buffers + OUTPUTS;
  const uint32_t copies = in_buffers + BUFFERS, weights = copies + AHEAD * Loader::BYTES;
  const Place place(blockIdx.x);
  Loader loader(place, x, args.images, in_buffers, copies);
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) loader.load(stage);
  stage_weights(w, place, weights);
  sync_threads<THREADS, 1>();
  Multiplier multiplier(in_buffers, out_buffers, weights, place, args.images);  // while copies are under way
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
      if (!SLIDES && stage > 0) writer.store(stage - 1);
      if (TURNS == 2 && AHEAD > 1 && stage + 1 < STAGES) loader.store(stage + 1);
    }
    multiplier.run(stage);
    if (!SLIDES && TURNS == 2 && last && stage > 0) writer.store(stage - 1);
    if ((TURNS == 1 || AHEAD == 1 || last) && stage + 1 < STAGES) loader.store(stage + 1);
    sync_threads<THREADS, 1>();
  }
#if SLIDES
  multiplier.finish();
  sync_threads<THREADS, 1>();
#endif
  writer.store(SLIDES ? 0 : STAGES - 1);
  writer.repair(x, w, args.images, out);
}
