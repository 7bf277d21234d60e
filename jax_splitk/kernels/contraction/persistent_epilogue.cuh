// What the consumers of a persistent kernel (contraction/persistent.cuh) make of a tile's sums in their registers, before
// they leave the results in shared memory: see device/epilogue.cuh.
//
// A residual comes by TMA to where the results will be, and each thread replaces what it has read. `full` counts the
// residual's bytes. Its loads begin once the results before it are stored (`empty` of the handover).

#if EPILOGUE && RESIDUAL_TYPE >= 0
#define HAS_RESIDUAL 1
#define RESIDUAL_MAP , const __grid_constant__ TensorMap residual_map
#define RESIDUAL_BARRIERS , residuals
static_assert(!PHASED && RESIDUAL_TYPE != FLOAT);
using Residuals = Barriers<TEAMS, 1>;

// By a warp of its own, of which every lane walks, as the one that loads tiles.
__device__ inline void load_residuals(const Args& g, uint32_t results, Handover& handover,
                                      Residuals& residuals, const TensorMap& map) {
  const bool lead = elect_one();
  for_tiles(g, [&](const Tile& tile, int turn) {
    const int team = turn % TEAMS;
    const uint32_t to = results + team * PACKED_BYTES;
    handover.wait_empty({team, uint32_t(turn / TEAMS & 1)});
    __syncwarp();
    if (lead) {
      uint64_t* full = &residuals.at[team];
      const int boxes = min(COLUMN_BOXES, (g.n - tile.n + 63) / 64);
      Barrier::arrive_and_expect_tx(full, PIXELS / 64 * boxes * BLOCK_BYTES);
      for (int i = 0; i < boxes; ++i) {
#pragma unroll
        for (int row = 0; row < PIXELS; row += 64) {
          uint8_t* box = shared_pointer(chunk_at(to, row / 64, i, 0, 0));
          load_tile(&map, full, EVICT_FIRST, box, tile.n + i * 64, tile.group, tile.m + row);
        }
      }
    }
  });
}
#else
#define HAS_RESIDUAL 0
#define RESIDUAL_MAP
#define RESIDUAL_BARRIERS
#endif

#if EPILOGUE
// 16 bits do not show the error of the fast functions.
__device__ inline float activated_packed(float x) {
  if constexpr (ACTIVATION == 2) return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x));
  if constexpr (ACTIVATION == 4) return times_sigmoid(x, x);
  return activated(x);
}

// Adds the bias to eight sums of a thread: v[i] is in row i / 2 % 2 * 8 and column i / 4 * 8 + i % 2 from `row` and
// `column` of the tile on.
__device__ inline void add_bias(const Args& g, const Tile& tile, const Epilogue& epilogue, int row, int column,
                                float (&v)[8]) {
  const Bias* bias = epilogue.bias + tile.group * g.n + tile.n;
#if SWAP
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float b = tile.n + row + half * 8 < g.n ? float(bias[row + half * 8]) : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i / 2 * 4 + half * 2 + i % 2] += b;
  }
#else
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    if (tile.n + column + odd * 8 >= g.n) continue;
    const auto b = *reinterpret_cast<const Vec<Bias, 2>*>(bias + column + odd * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[odd * 4 + i] += float(b.v[i % 2]);
  }
#endif
}

// Finishes the sums of a tile, whose results will be at `to`.
__device__ inline void finish_sums(const Args& g, const Tile& tile, const Epilogue& epilogue,
                                   [[maybe_unused]] uint32_t to, int warpgroup, Accumulator& acc) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int block = m * CONSUMERS + warpgroup;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j += 2) {
      float(&v)[8] = reinterpret_cast<float(&)[8]>(acc[m][j * 4]);
      if constexpr (BIAS != 0) add_bias(g, tile, epilogue, block * 64 + row, j * 8 + lane % 4 * 2, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = activated_packed(v[i]);
#if HAS_RESIDUAL
      uint32_t residual[4];
#if SWAP
      load_matrices_trans(matrices_at(to, block, j), residual[0], residual[1], residual[2], residual[3]);
#else
      load_matrices(matrices_at(to, block, j), residual);
#endif
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] += float(reinterpret_cast<const Vec<Residual, 2>&>(residual[i / 2]).v[i % 2]);
      }
#endif
    }
  }
}
#endif
