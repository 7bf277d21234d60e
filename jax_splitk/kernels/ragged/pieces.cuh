// Sums of pieces of tiles. A slot of the workspace holds the sums of one piece, in the order in which the
// threads of the consumers have them. A second kernel adds the pieces of a tile, always in the same order.

#include "device/output.cuh"
#include "device/wgmma_tile.cuh"

constexpr int SLOT_CHUNKS = TILE_M * TILE_N / 4;  // float4 of a slot
constexpr int ADD_THREADS = 256;                  // of the second kernel

// Adds a slot's sums to the consumers', or leaves the sums in the slot, or both.
__device__ __forceinline__ void exchange_sums(float4* slot, bool adds, bool keeps, Accumulator& acc) {
  float4* chunk = slot + threadIdx.x - 128;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 4) {
      float (&v)[4] = reinterpret_cast<float (&)[4]>(acc[m][j]);
      if (adds) {
        const float4 kept = *chunk;
        v[0] += kept.x, v[1] += kept.y, v[2] += kept.z, v[3] += kept.w;
      }
      if (keeps) *chunk = make_float4(v[0], v[1], v[2], v[3]);
      chunk += CONSUMER_THREADS;
    }
  }
}

// Adds the pieces of a tile, which are in slots one after the other, and stores the result. The blocks along
// y share the work. out(row) is where the result has a row of the tile; null: the row is not stored.
template <class Out>
__device__ __forceinline__ void add_pieces(const float4* slots, int first, int pieces, int first_column,
                                           int columns, const Out& out) {
#pragma unroll 1
  for (int i = blockIdx.y * ADD_THREADS + threadIdx.x; i < SLOT_CHUNKS; i += gridDim.y * ADD_THREADS) {
    const float4* chunk = slots + size_t(first) * SLOT_CHUNKS + i;
    float4 sum = *chunk;
#pragma unroll 4
    for (int piece = 1; piece < pieces; ++piece) {
      chunk += SLOT_CHUNKS;
      const float4 v = *chunk;
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int four = i / CONSUMER_THREADS, thread = i % CONSUMER_THREADS;
    const int block = four / (ACCUMULATORS / 4) * CONSUMERS + thread / 128;
    const int row = block * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
    const int column = first_column + four % (ACCUMULATORS / 4) * 8 + thread % 4 * 2;
    if (column >= columns) continue;
    if (Output* to = out(row)) store_values<Output, 2>(to + column, {sum.x, sum.y});
    if (Output* to = out(row + 8)) store_values<Output, 2>(to + column, {sum.z, sum.w});
  }
}
