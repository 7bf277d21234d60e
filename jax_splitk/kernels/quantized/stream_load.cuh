// How words, scales and X come to the shared memory of stream.cu.

#include "quantized/stream.cuh"

// A stage's rows (tiles, or groups of scales) of a row tile, from its row `first` on. The row tile has
// `count`; the last one stands in for those that are missing.
template <int ROWS, int BYTES>
__device__ inline void copy_rows(const void* all, int tile, int first, int count, uint64_t* full,
                                 uint8_t* to) {
  // 32 bits number all rows that fit in any memory.
  const auto row = [&](int i) {
    return static_cast<const uint8_t*>(all) +
           uint64_t(uint32_t(tile) * uint32_t(count) + uint32_t(i)) * BYTES;
  };
  const int rows = WHOLE ? ROWS : min(ROWS, count - first);
  copy_bulk(to, row(first), rows * BYTES, full);
#pragma unroll 1
  for (int i = rows; i < ROWS; ++i) {
    copy_bulk(to + i * BYTES, row(count - 1), BYTES, full);
  }
}

// The producer's warp, of which one lane is the leader. X comes with the stages of the first row tile, so
// that the products need not wait for all of it: as one box, or where k ends within a stage in boxes of a
// tile.
__device__ inline void produce(const Block& block, const TensorMap* x_map, const uint8_t* words,
                               const uint8_t* scale, const uint8_t* zero,
                               [[maybe_unused]] const void* norm_scale, bool leader) {
  const Args& g = block.g;
  Signals& barriers = block.barriers;
  constexpr uint64_t HINT = EVICT_LAST;
  if (WHOLE && !leader) return;
  Position at;
  bool first = X_TMA;
  [[maybe_unused]] int slot = 0;
  [[maybe_unused]] const auto copy_x = [&](int number, int place, uint64_t* full) {
    uint8_t* x = block.smem + X_AT + place * X_STAGE;
    const int tiles = (block.first + number) * STAGE_TILES, lane = threadIdx.x % 32;
    if constexpr (WHOLE) {
      load_tile(x_map, full, HINT, x, 0, 0, tiles);
    } else if (lane < STAGE_TILES) {
      load_tile(x_map, full, HINT, x + lane * X_TILE, (tiles + lane) * X_BOX, 0);
    }
  };
#if CHAINED
  const int last_early = min(EARLY_STAGES, block.last - block.first) - 1;
#endif
#pragma unroll 1
  for (int tile = block.cluster; tile < g.feature_tiles; tile += block.clusters, first = false) {
#pragma unroll 1
    for (int s = block.first; s < block.last; ++s, at.advance(STAGES)) {
      uint64_t* full = &barriers.pipeline.full[at.stage];
      if (WHOLE || leader) {
        uint8_t* stage = block.smem + at.stage * STAGE_BYTES;
        barriers.pipeline.wait_empty(at);
        int bytes = STAGE_BYTES + (first || X_SLOTS ? X_STAGE : 0);
#if NORM
        const bool with_scale = first && s == block.first;
        if (with_scale) bytes += scale_bytes(block);
#endif
        barriers.pipeline.expect(at, bytes);
        copy_rows<STAGE_TILES, WORDS_BYTES>(words, tile, s * STAGE_TILES, g.k_tiles, full, stage);
        if constexpr (GROUP != 0) {
          copy_rows<STAGE_GROUPS, SCALE_ROW>(scale, tile, s * STAGE_GROUPS, g.groups, full,
                                             stage + SCALES_OFFSET);
          if constexpr (ZERO_TYPE != NONE) {
            copy_rows<STAGE_GROUPS, ZERO_ROW>(zero, tile, s * STAGE_GROUPS, g.groups, full,
                                              stage + ZEROS_OFFSET);
          }
        }
#if NORM
        if (with_scale) copy_scale(block, norm_scale, full);
#endif
      }
      if (first || X_SLOTS) {
        if (!WHOLE) __syncwarp();
        const int number = s - block.first, place = X_SLOTS ? slot : number;
        if (X_SLOTS && ++slot == X_SLOTS) slot = 0;
#if CHAINED
        if (first && number < last_early) continue;
        if (first && number == last_early) {
          wait_on_dependent_grids();
          for (int i = 0; i < last_early; ++i) copy_x(i, i, &barriers.pipeline.full[i]);
        }
#endif
        copy_x(number, place, full);
      }
    }
  }
}

// ---- X ---------------------------------------------------------------------------------------------------

// X's slice in shared memory is tiles of TILE_N rows by 64 k, zero where X has none: of a 16-bit type under
// the 128-byte swizzle, or of e4m3 under the 64-byte swizzle. Where TMA cannot bring it, the consumers do.

// The 16 bytes of row n that begin 16 * chunk bytes into the slice.
__device__ inline uint4* place_of(uint8_t* to, int n, int chunk) {
  constexpr int CHUNKS = X_ROW / 16;  // of a tile
  const int swizzled = chunk % CHUNKS ^ n * CHUNKS / 8 % CHUNKS;
  return reinterpret_cast<uint4*>(to + chunk / CHUNKS * X_TILE + n * X_ROW + swizzled * 16);
}

// 16 e4m3 in the order of a packed weight's bytes: k 2t, 2t + 8, 2t + 1, 2t + 9 of word t.
__device__ inline uint4 reordered(uint4 x) {
  return uint4{__byte_perm(x.x, x.z, 0x5140), __byte_perm(x.x, x.z, 0x7362), __byte_perm(x.y, x.w, 0x5140),
               __byte_perm(x.y, x.w, 0x7362)};
}

// The same for a warpgroup's tiles of X of one stage, where TMA has put them.
[[maybe_unused]] __device__ inline void reorder_tiles(uint8_t* tiles, int warpgroup) {
  uint4* chunks = reinterpret_cast<uint4*>(tiles);
#pragma unroll
  for (int i = 0; i < TILES * X_TILE / 16; i += 128) {
    const int at = i + threadIdx.x % 128;
    if (at < TILES * X_TILE / 16) chunks[at] = reordered(chunks[at]);
  }
  fence_async_shared();  // WGMMA reads it
  named_sync(128, 2 + warpgroup);
}

// The bits of an element as the products take it, 0 beyond X's ends.
[[maybe_unused]] __device__ inline uint32_t element_of(const Args& g, const void* x, int n, int k) {
  const bool inside = n < g.rows && k < g.k;
  if constexpr (!X_E4M3) return inside ? static_cast<const uint16_t*>(x)[int64_t(n) * g.k + k] : 0;
  const uint32_t code = inside ? static_cast<const uint8_t*>(x)[int64_t(n) * g.k + k] : 0;
  return E4M3_PRODUCTS ? code : e4m3x2_to_f16x2(uint16_t(code)) & 0xffff;
}

[[maybe_unused]] __device__ inline void load_x(const Block& block, const void* x) {
  const Args& g = block.g;
  uint8_t* to = block.smem + X_AT;
  const int first = block.first * STAGE_TILES * 64;
  const int chunks = (block.last - block.first) * STAGE_TILES * (X_ROW / 16);
  if (!E4M3_PRODUCTS && X_E4M3 && g.k % 16 == 0) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_N * chunks / 2; i += CONSUMERS) {
      const int n = i / (chunks / 2), chunk = i % (chunks / 2) * 2, k = first + chunk * 8;
      uint4 codes{};
      if (n < g.rows && k < g.k) {
        codes = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x) + int64_t(n) * g.k + k));
      }
      const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        *place_of(to, n, chunk + j) =
            uint4{e4m3x2_to_f16x2(uint16_t(w[2 * j])), e4m3x2_to_f16x2(uint16_t(w[2 * j] >> 16)),
                  e4m3x2_to_f16x2(uint16_t(w[2 * j + 1])), e4m3x2_to_f16x2(uint16_t(w[2 * j + 1] >> 16))};
      }
    }
  } else {
    constexpr int ITEMS = E4M3_PRODUCTS ? 16 : 8, IN_WORD = ITEMS / 4;  // of a chunk
    for (int i = threadIdx.x; i < TILE_N * chunks; i += CONSUMERS) {
      const int n = i / chunks, chunk = i % chunks;
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        words[j / IN_WORD] |= element_of(g, x, n, first + chunk * ITEMS + j)
                              << (32 / IN_WORD * (j % IN_WORD));
      }
      const uint4 loaded{words[0], words[1], words[2], words[3]};
      *place_of(to, n, chunk) = E4M3_PRODUCTS ? reordered(loaded) : loaded;
    }
  }
  fence_async_shared();  // WGMMA reads it
  named_sync(CONSUMERS, 1);
}
