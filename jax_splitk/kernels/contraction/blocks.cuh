// The reduction of a dense pass (im2col.cu): blocks of channels, at one tap of the tile's phase after the
// other.
//
// Macros: AXES, ROW_BYTES (of a block of channels; a stage has 128 bytes of them), REDUCTION.

#include "structs.cuh"

constexpr int BLOCKS = 128 / ROW_BYTES;  // of a stage
constexpr bool SPLIT = REDUCTION != 0;

// One number for each axis; those that the convolution has not are 0.
struct Axes {
  int d, h, w;
};

// A block of the reduction: of channels, at one of the phase's taps.
struct Block {
  int c;
  Axes tap;
};

__device__ inline Block block_at(const Args& g, const Axes& residue, int index) {
#if AXES == 0
  return {index, {0, 0, 0}};
#else
  Block b = {take(index, g.blocks), {0, 0, index}};
#if AXES > 1
  b.tap.w = take(index, g.on_w[residue.w].taps);
  b.tap.h = index;
#endif
#if AXES > 2
  b.tap.h = take(index, g.on_h[residue.h].taps);
  b.tap.d = index;
#endif
  return b;
#endif
}

// Adds to the next digit of a block's number, and carries from this one.
__device__ inline void carry(int& digit, int base, int& next, int by) {
  next += by;
  if (digit >= base) {
    digit -= base;
    ++next;
  }
}

__device__ inline void advance(const Args& g, const Axes& residue, const Block& by, Block& b) {
  b.c += by.c;
#if AXES > 0
  carry(b.c, g.blocks.value, b.tap.w, by.tap.w);
#endif
#if AXES > 1
  carry(b.tap.w, g.on_w[residue.w].taps.value, b.tap.h, by.tap.h);
#endif
#if AXES > 2
  carry(b.tap.h, g.on_h[residue.h].taps.value, b.tap.d, by.tap.d);
#endif
}

// Stages of all taps and channels, or those of the split.
__device__ inline int stages_of(const Args& g, const Axes& residue, int split) {
  int all = g.blocks.value;
#if AXES > 0
  all *= g.on_w[residue.w].taps.value;
#endif
#if AXES > 1
  all *= g.on_h[residue.h].taps.value;
#endif
#if AXES > 2
  all *= g.on_d[residue.d].taps.value;
#endif
  all = (all + BLOCKS - 1) / BLOCKS;
  return SPLIT ? (all - split + g.splits.value - 1) / g.splits : all;
}

// Whether there is no such block, after the last one.
__device__ inline bool is_beyond(const Args& g, const Axes& residue, const Block& b) {
#if AXES == 0
  return b.c >= g.blocks.value;
#elif AXES == 1
  return b.tap.w >= g.on_w[residue.w].taps.value;
#elif AXES == 2
  return b.tap.h >= g.on_h[residue.h].taps.value;
#else
  return b.tap.d >= g.on_d[residue.d].taps.value;
#endif
}
