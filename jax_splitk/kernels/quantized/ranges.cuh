// How the output's tiles are shared out, and how they reach memory. Included after split_k.cuh and ring.cuh.
//
// Tiles are numbered in bands (see `place_of`). A worker, which is a thread block, or a cluster of CLUSTER of
// them that have a tile of their own each, computes `whole_tiles` tiles, as many apart as there are workers;
// the k blocks of all tiles after these, laid end to end, are cut into ranges of `range_blocks` blocks, one
// for each worker. A tile that more than one range reaches meets in the workspace: each range writes its fp32
// sums as a slot, in the accumulators' order, and reduce_ranges adds the slots of a tile in the order of
// their ranges.
//
// Macros: OUT (split_k.cuh), CONSUMERS (warpgroups of 64 features each), TILE_N, CLUSTER, N_TILES (tiles
// along n, not more than a band has; 0 for any number), EIGHTS (features are a multiple of 8).

constexpr int SLOT = 64;  // features of a warpgroup
constexpr int BLOCK_K = 128;
constexpr int BAND = 2048 / TILE_N;        // tiles along n that are computed together
constexpr int TILE_SUMS = TILE_N / 2;      // of a lane: four for each 8 columns, in the accumulators' order
constexpr int STORE_CHUNKS = TILE_N / 16;  // of 16 rows of x: what `store` takes

// k blocks [begin, end) of a tile. slot: where the sums go; -1 if this is the whole tile.
struct Piece {
  int tile, begin, end, slot;
};

struct Place {
  int m, n;  // tiles, m a thread block's
};

// Bands of BAND tiles along n, of which neighbours share weights: what runs together fits in the L2 cache.
__device__ inline Place place_of(const Args& g, int tile, int rank = 0) {
  if constexpr (N_TILES > 0) {  // without divisions, which the first loads wait for
    static_assert(N_TILES <= BAND);
    constexpr int ALONG_N = N_TILES > 0 ? N_TILES : 1;  // the compiler looks here in any case
    return {tile / ALONG_N * CLUSTER + rank, tile % ALONG_N};
  } else {
    const int band = tile / (min(BAND, g.tiles_n) * g.tiles_m), first = band * BAND;
    const int width = min(BAND, g.tiles_n - first), inside = tile - first * g.tiles_m, m = inside / width;
    return {m * CLUSTER + rank, first + inside - m * width};
  }
}

// ---- results ---------------------------------------------------------------------------------------------

// Results on their way to memory: 16 rows of x by 16 features for each warp, 16 bytes of padding to a row.
constexpr int STAGING_PITCH = 48, STAGING_BYTES = OUT == 0 ? 0 : 16 * STAGING_PITCH;

__device__ inline uint32_t packed(float low, float high) {
  Vec<Output, 2> pair;
  convert(low, pair.v[0]);
  convert(high, pair.v[1]);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Stores a warp's 16 features, from `m` on, of 16 rows of x, from `n` on. WGMMA's accumulator holds, for lane
// l, features l/4 (+8) and rows 2*(l%4) (+1) (+8): v[8-row half * 4 + feature half * 2 + odd].
__device__ inline void store(const Args& g, Output* out, [[maybe_unused]] uint32_t staging, int m, int n,
                             const float (&v)[8], int lane) {
  if constexpr (OUT != 0 && EIGHTS) {
    // Through shared memory, transposed: 16 bytes of a row of the output for each lane.
    const uint32_t to = staging + (lane / 16 * 8 + lane % 8) * STAGING_PITCH + lane / 8 % 2 * 16;
    __syncwarp();
    store_matrices_trans(to,
                         {packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7])});
    __syncwarp();
    const int row = n + lane / 2, feature = m + lane % 2 * 8;
    const uint4 chunk = load_shared<uint4>(staging + lane / 2 * STAGING_PITCH + lane % 2 * 16);
    if (row < g.rows && feature < g.features) {
      *reinterpret_cast<uint4*>(out + size_t(row) * g.features + feature) = chunk;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = n + i / 4 * 8 + lane % 4 * 2 + i % 2, feature = m + i / 2 % 2 * 8 + lane / 4;
      if (row < g.rows && feature < g.features) convert(v[i], out[size_t(row) * g.features + feature]);
    }
  }
}

// ---- partial sums ----------------------------------------------------------------------------------------

constexpr int SLOT_CHUNK = 128;                          // float4 of 8 rows of x of a warpgroup
constexpr int WARPGROUP_SLOT = TILE_N / 8 * SLOT_CHUNK;  // float4

__device__ inline void store_slot(float4* to, const float (&acc)[TILE_SUMS]) {
#pragma unroll
  for (int j = 0; j < TILE_N / 8; ++j) {
    __stcg(to + j * SLOT_CHUNK, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
  }
}

__device__ inline void add(float (&v)[8], const float4& low, const float4& high) {
  v[0] += low.x;
  v[1] += low.y;
  v[2] += low.z;
  v[3] += low.w;
  v[4] += high.x;
  v[5] += high.y;
  v[6] += high.z;
  v[7] += high.w;
}
