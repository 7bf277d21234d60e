// The weight gradient of a 1x1 convolution: dW[c, k] = sum over pixels of lhs[pixel, c] * g[pixel, k]. A
// thread block computes a tile of TILE x TILE of dW, with one thread for each element. ROWS pixels at a time
// go through shared memory. A thread adds in the order of the pixels, so results are deterministic.
#include "structs.cuh"

constexpr int TILE = 16;

extern "C" __global__ void __launch_bounds__(TILE* TILE)
    pointwise(const float* lhs, const float* g, Args args, float* out) {
  __shared__ float a[ROWS][TILE], b[ROWS][TILE];
  const int row = threadIdx.x / TILE, column = threadIdx.x % TILE;
  const int channel = blockIdx.x * TILE, out_channel = blockIdx.y * TILE;
  float sum = 0;
  for (int first = 0; first < args.pixels; first += ROWS) {
    for (int i = row; i < ROWS; i += TILE) {
      const long long pixel = first + i;
      const bool inside = pixel < args.pixels;
      a[i][column] =
          inside && channel + column < args.channels ? lhs[pixel * args.channels + channel + column] : 0;
      b[i][column] = inside && out_channel + column < args.out_channels
                         ? g[pixel * args.out_channels + out_channel + column]
                         : 0;
    }
    __syncthreads();
    for (int i = 0; i < ROWS; ++i) sum += a[i][row] * b[i][column];
    __syncthreads();
  }
  if (channel + row < args.channels && out_channel + column < args.out_channels) {
    out[(long long)(channel + row) * args.out_channels + out_channel + column] = sum;
  }
}
