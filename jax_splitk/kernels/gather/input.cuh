// The input of a tile of TILE_IMAGES x TILE_P x TILE_Q output pixels in shared memory: all that their windows
// touch, once, as it is in memory, with zeros where a window leaves the image. PRODUCERS threads copy it.
//
// Macros: TILE_IMAGES, TILE_P, TILE_Q, SLICE (channels), KERNEL_D, LHS_D, LHS_H, LHS_W (dilations of the
// input) and those of `Layout` (gather/layout.py). A stage, in elements, is
// [TILE_IMAGES][KERNEL_D][ROWS] rows of ROW_PITCH, in which COLUMNS pixels of PITCH follow LEAD; a step of
// rows or columns is GRID_* input pixels, one of planes GRID_D. DENSE: rows are contiguous in memory too
// (else only pixels are). PIXEL_*: from one output pixel to the next. GRANULE: bytes of one copy.

#include "device/output.cuh"
#include "structs.cuh"

using Element = TypeOf<ELEMENT>::type;

constexpr int PIXELS = TILE_IMAGES * TILE_P * TILE_Q;  // of a stage
constexpr int PRODUCERS = 128;                         // threads
constexpr int ITEM = sizeof(Element);
constexpr int PIXEL_IMAGE = KERNEL_D * ROWS * ROW_PITCH;

constexpr int GRANULE_ITEMS = GRANULE / ITEM;
constexpr bool X_ASYNC = GRANULE >= 4;

// A tile of pixels, by its first one.
struct Tile {
  int image, d, p, q;
};

__device__ inline Tile tile_at(const Args& g, int kt) {
  const int rest = kt / g.tiles_w, plane = rest / g.tiles_h, images = plane / g.out.d;
  return {images * TILE_IMAGES, plane - images * g.out.d, (rest - plane * g.tiles_h) * TILE_P,
          (kt - rest * g.tiles_w) * TILE_Q};
}

__device__ inline void advance(const Args& g, Tile& tile) {
  tile.q += TILE_Q;
  if (tile.q < g.out.w) return;
  tile.q = 0;
  tile.p += TILE_P;
  if (tile.p < g.out.h) return;
  tile.p = 0;
  if (++tile.d < g.out.d) return;
  tile.d = 0;
  tile.image += TILE_IMAGES;
}

// The place of `position` in an input of `size` that is dilated by `dilation`, or -1 where it holds a zero.
template <int DILATION>
__device__ inline int undilated(int position, int size) {
  const int at = position / DILATION;
  return position >= 0 && at < size && at * DILATION == position ? at : -1;
}

constexpr int LINE_GRANULES =
    DENSE ? (LEAD + COLUMNS * PITCH + GRANULE_ITEMS - 1) / GRANULE_ITEMS : SLICE / GRANULE_ITEMS;
constexpr int LINES = TILE_IMAGES * KERNEL_D * ROWS * (DENSE ? 1 : COLUMNS);
constexpr int GRANULES = LINES * LINE_GRANULES;

// Where granule `i` of X's stage comes from (null: it is zero) and goes to (bytes from the stage's start).
__device__ inline const Element* granule(const Args& g, const Element* x, const Tile& tile, int c0, int i,
                                         uint32_t& to) {
  int line = i / LINE_GRANULES;
  const int first = (i - line * LINE_GRANULES) * GRANULE_ITEMS;
  int column = 0;
  if constexpr (!DENSE) {
    column = line % COLUMNS;
    line /= COLUMNS;
  }
  to = (line * ROW_PITCH + column * PITCH + first) * ITEM;
  const int row = line % ROWS, plane = line / ROWS % KERNEL_D, n = tile.image + line / (ROWS * KERNEL_D);
  const int d = undilated<LHS_D>(tile.d * g.stride.d - g.pad.d + plane * GRID_D, g.in.d);
  const int h = undilated<LHS_H>(tile.p * g.stride.h - g.pad.h + row * GRID_H, g.in.h);
  int w = 0, element;
  bool inside = n < g.batch && d >= 0 && h >= 0;
  if constexpr (DENSE) {
    element = (tile.q * g.stride.w - g.pad.w) * PITCH - LEAD + first;
    inside = inside && element >= 0 && element < g.in.w * PITCH;
  } else {
    w = undilated<LHS_W>(tile.q * g.stride.w - g.pad.w + column * GRID_W, g.in.w);
    element = c0 + first;
    inside = inside && w >= 0 && element < g.channels;
  }
  const int pixel = ((n * g.in.d + d) * g.in.h + h) * g.in.w + w;
  return inside ? x + (int64_t(pixel) * g.channels + element) : nullptr;
}

__device__ inline void load_x(const Args& g, const Element* x, uint32_t stage, const Tile& tile, int c0) {
  if constexpr (X_ASYNC) {
#pragma unroll 2
    for (int i = threadIdx.x; i < GRANULES; i += PRODUCERS) {
      uint32_t to;
      const Element* from = granule(g, x, tile, c0, i, to);
      const int bytes = from ? GRANULE : 0;  // the rest of the granule is filled with zeros
      copy_async<GRANULE>(stage + to, from ? from : x, bytes);
    }
  } else {
    constexpr int BATCH = 8;  // loads in flight
    for (int base = threadIdx.x; base < GRANULES; base += PRODUCERS * BATCH) {
      uint16_t value[BATCH];
      uint32_t to[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = base + j * PRODUCERS;
        const Element* from = i < GRANULES ? granule(g, x, tile, c0, i, to[j]) : nullptr;
        value[j] = from ? __ldg(reinterpret_cast<const uint16_t*>(from)) : uint16_t(0);
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        if (base + j * PRODUCERS < GRANULES) store_shared(stage + to[j], value[j]);
      }
    }
  }
}

// Elements from the tile's first pixel to pixel `k`, in X's stage.
__device__ constexpr int pixel_offset(int k) {
  return k % TILE_Q * PIXEL_COL + k / TILE_Q % TILE_P * PIXEL_ROW + k / (TILE_Q * TILE_P) * PIXEL_IMAGE;
}
