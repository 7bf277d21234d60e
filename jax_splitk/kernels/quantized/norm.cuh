// Activations over the root of their mean square, for stream.cu: x / sqrt(mean of x^2 + epsilon) * scale. A
// warpgroup's tiles of X are multiplied by the scale, and rounded, where they have come to shared memory; the
// sums of products by the root's inverse. The thread blocks of a cluster have slices of k: each sends its
// sums of squares to the block that owns the row.
//
// Macro: NORM (0: none, 1: without a scale, 2: with a bfloat16 for each of k).

constexpr int ROWS_AT_ONCE = 16;  // of a tile, by the 8 chunks of a row, and 128 threads
constexpr int ROW_PARTS = TILE_N < ROWS_AT_ONCE ? ROWS_AT_ONCE / TILE_N : 1;
constexpr int THREAD_ROWS = TILE_N > ROWS_AT_ONCE ? TILE_N / ROWS_AT_ONCE : 1;
constexpr int NORM_PARTS = WARPGROUPS * ROW_PARTS;

// Sums of squares: of the block's slice, in parts, and by the blocks of the cluster for its rows.
struct Squares {
  float parts[NORM_PARTS][TILE_N];
  float4 sent[CLUSTER][PART_ROWS];
};
static_assert(sizeof(Squares) <= NORM_BYTES, "room for sums of squares");

__device__ inline Squares& squares_of(const Block& block) {
  return *reinterpret_cast<Squares*>(block.smem + NORM_AT);
}

// The scale of the block's slice of k, behind X.
__device__ inline uint8_t* scale_of(const Block& block) {
  return block.smem + X_AT + (block.last - block.first) * STAGE_TILES * X_TILE;
}

// Its bytes, and the copy of it that comes with the first stage.
__device__ inline int scale_bytes(const Block& block) {
  const int end = min(block.last * STAGE_TILES * 64, block.g.k);
  return NORM == 2 ? (end - block.first * STAGE_TILES * 64) * 2 : 0;
}

__device__ inline void copy_scale(const Block& block, const void* scale, uint64_t* full) {
  if constexpr (NORM == 2) {
    const uint8_t* from = static_cast<const uint8_t*>(scale) + block.first * STAGE_TILES * 128;
    copy_bulk(scale_of(block), from, scale_bytes(block), full);
  }
}

// A thread's sums of squares, of each of its rows.
using RowSquares = float[THREAD_ROWS];

// Multiplies a warpgroup's tiles of X of stage s, and adds up their squares.
__device__ inline void scale_tiles(const Block& block, int s, int warpgroup, RowSquares& squares) {
  const Args& g = block.g;
  const int first = ((s - block.first) * STAGE_TILES + warpgroup * TILES) * 64;  // of the slice
  uint4* chunks = reinterpret_cast<uint4*>(block.smem + X_AT + first / 64 * X_TILE);
  const uint4* scale = reinterpret_cast<const uint4*>(scale_of(block)) + first / 8;
  const int thread = threadIdx.x % 128, left = (g.k - block.first * STAGE_TILES * 64 - first) / 8;
#pragma unroll THREAD_ROWS
  for (int i = 0; i < TILES * TILE_N * 8; i += 128) {
    const int at = i + thread, row = at / 8 % TILE_N;
    const int chunk = at / 8 / TILE_N * 8 + (at % 8 ^ row % 8);  // of k
    if (TILES * TILE_N * 8 % 128 && at >= TILES * TILE_N * 8) break;
    if (row >= g.rows || chunk >= left) continue;
    const uint4 loaded = chunks[at];
    uint32_t x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float& sum = squares[i / 128 % THREAD_ROWS];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = __uint_as_float(x[j] << 16), high = __uint_as_float(x[j] & 0xffff0000);
      sum = fmaf(low, low, fmaf(high, high, sum));
    }
    if constexpr (NORM == 2) {
      const uint4 by = scale[chunk];
      chunks[at] = uint4{mul_bf16x2(x[0], by.x), mul_bf16x2(x[1], by.y), mul_bf16x2(x[2], by.z),
                         mul_bf16x2(x[3], by.w)};
    }
  }
  if constexpr (NORM == 2) {
    fence_async_shared();  // WGMMA reads it
    named_sync(128, 2 + warpgroup);
  }
}

// Stores a warpgroup's sums of squares.
__device__ inline void store_squares(const Block& block, int warpgroup, RowSquares& squares) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < THREAD_ROWS; ++j) {
#pragma unroll
    for (int step = 4; step > 0; step /= 2) squares[j] += __shfl_xor_sync(~0u, squares[j], step);
    const int row = thread / 8 + j * ROWS_AT_ONCE;
    float (&parts)[TILE_N] = squares_of(block).parts[warpgroup * ROW_PARTS + row / TILE_N];
    if (thread % 8 == 0) parts[row % TILE_N] = squares[j];
  }
}

__device__ inline float own_squares(const Block& block, int n) {
  float sum = 0.f;
#pragma unroll
  for (int part = 0; part < NORM_PARTS; ++part) sum += squares_of(block).parts[part][n];
  return sum;
}

// To the block that owns row n, with the sums of the first row tile.
__device__ inline void send_squares(const Block& block, int n) {
  const uint32_t to = shared_address(&squares_of(block).sent[block.rank][n % PART_ROWS]);
  const int owner = n / PART_ROWS;
  store_async(set_block_rank(to, owner), float4{own_squares(block, n), 0.f, 0.f, 0.f},
              set_block_rank(shared_address(&block.barriers.arrived.at[0]), owner));
}

// What the sums of a row are multiplied by: of the block's row n, or of those that it owns of the cluster.
__device__ inline float inverse_root(const Block& block, int n) {
  float sum = 0.f;
  if constexpr (CLUSTER == 1) {
    sum = own_squares(block, n);
  } else {
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) sum += squares_of(block).sent[s][n].x;
  }
  const Args& g = block.g;
  return rsqrtf(fmaf(sum, __uint_as_float(uint32_t(g.inverse_k)), __uint_as_float(uint32_t(g.epsilon))));
}
