// Patches for the matrix product (contraction/products.cu): convolutions whose filter is as large as its
// stride, so that windows neither overlap nor leave the image. A row of the filter is `row` contiguous
// elements (columns x channels) of the input, which pads to `chunks` times 64 where it is an index of the
// product.
//
//   PATCH 1  forward:           A[pixel, (filter row, element)] are windows, B is the weight
//   PATCH 2  weight's gradient: A[pixel, (filter row, element)] are windows, MN-major, D is the weight
//
// Windows are read by TMA's im2col mode from a view of the input whose `channels` are
// such rows; the view's planes and rows are `step` times the output's, and a plane of the filter is `plane`
// planes of the view. Undefined: a product of matrices.

#include "device/output.cuh"
#include "device/pipeline.cuh"
#include "structs.cuh"

#if PATCH
// Where 64 of the filter's elements are: the row's number, and the place in it.
struct FilterPart {
  int row, element;
};

[[maybe_unused]] __device__ inline FilterPart filter_part(const Args& g, int index) {
  int row = index / 64;
  const int chunk = take(row, g.chunks);
  return {row, chunk * 64};
}

// A box of 64 elements of the filter of pixels from `pixel` on. It is zeros beyond the last filter row, and
// where a row or the pixels end.
[[maybe_unused]] __device__ inline void load_windows(const TensorMap& map, const Args& g, uint64_t* full,
                                                     uint32_t to, int pixel, const FilterPart& part) {
  const int w = take(pixel, g.out.w), h = take(pixel, g.out.h), d = take(pixel, g.out.d);
  const bool is_there = part.row < g.filter_rows;
  const int t = is_there ? part.row / g.kernel_h : 0, r = is_there ? part.row - t * g.kernel_h.value : 0;
  const int element = is_there ? part.element : g.chunks.value * 64;
  load_im2col(&map, full, shared_pointer(to), element, w, h * g.step.h, d * g.step.d, pixel, uint16_t(0),
              uint16_t(r), uint16_t(t * g.plane));
}
#endif

// Whether a row of the product only fills up a row of the filter.
__device__ inline bool is_padding(const Args& g, int row) {
#if PATCH == 2
  return filter_part(g, row).element + row % 64 >= g.row;
#else
  return false;
#endif
}

// Where the result has the product's elements from (m + row, n + column) on. As they are added up, so is the
// machine code.
__device__ inline Output* result_at(const Args& g, Output* out, int batch, int m, int n, int row,
                                    int column) {
#if PATCH == 2
  const FilterPart part = filter_part(g, m + row);
  return out + (size_t(part.row) * g.row.value + part.element + (m + row) % 64) * g.n + n + column;
#else
  return out + (size_t(batch) * g.m + m + row) * g.n + n + column;
#endif
}

// The same of the row after eight others; `at` is (row, column).
__device__ inline Output* eight_below(const Args& g, Output* out, Output* at, int batch, int row,
                                      int column) {
#if PATCH == 2
  return result_at(g, out, batch, 0, 0, row + 8, column);
#else
  return at + 8 * g.n;
#endif
}
