// The epilogue of stream.cu: it adds the sums of warpgroups and of a cluster's blocks, and stores what
// becomes of them.

#include "quantized/stream.cuh"

__device__ inline void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// The sums of row n of the block, or of those that it owns of the cluster, over the root of X's mean square.
__device__ inline float4 normalized([[maybe_unused]] const Block& block, [[maybe_unused]] int n,
                                    float4 sums) {
#if NORM
  const float inverse = inverse_root(block, n);
  sums.x *= inverse, sums.y *= inverse, sums.z *= inverse, sums.w *= inverse;
#endif
  return sums;
}

constexpr int THREAD_ITEMS =
    (PART_ITEMS + EPILOGUE_THREADS - 1) / EPILOGUE_THREADS;  // that a thread finishes
#if EPILOGUE
// Whether the residual is loaded while the sums are computed. After them its latency would be the kernel's
// end.
constexpr bool RESIDUAL_EARLY = RESIDUAL_TYPE >= 0 && CLUSTER > 1 && !GATED && THREAD_ITEMS <= 2 && FOURS;
constexpr int LOADED_ITEMS = RESIDUAL_EARLY ? THREAD_ITEMS : 1;

// The residual of what a thread finishes of a row tile.
struct Loaded {
  Vec<Residual, 4> items[LOADED_ITEMS];
};

__device__ inline Loaded load_early(const Block& block, const Destination& to, int thread, int tile) {
  const Args& g = block.g;
  Loaded loaded{};
#pragma unroll
  for (int i = 0; RESIDUAL_EARLY && i < THREAD_ITEMS; ++i) {
    const int item = i * EPILOGUE_THREADS + thread, n = block.rank * PART_ROWS + item / 16;
    const int feature = tile * 64 + item % 16 * 4;
    if (item >= PART_ITEMS || n >= g.rows || feature >= g.features) continue;
    const Residual* from = to.epilogue.residual + uint32_t(n * g.features + feature);
    loaded.items[i] = *reinterpret_cast<const Vec<Residual, 4>*>(from);
  }
  return loaded;
}

// The epilogue's results of four features of one row; each 16 lanes have a row.
__device__ inline void store(const Args& g, const Destination result, int n, int feature, float4 value,
                             [[maybe_unused]] const Vec<Residual, 4>& residual) {
  const float values[4] = {value.x * FACTOR, value.y * FACTOR, value.z * FACTOR, value.w * FACTOR};
  const Epilogue& epilogue = result.epilogue;
  if constexpr (GATED) {
    // The lane with four features of gate computes the first two results, that with those of up the others.
    const bool of_up = feature % 16 >= 8;
    float gate[2], up[2], bias[2], up_bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sent = of_up ? values[i] : values[i + 2];
      const float others = __shfl_xor_sync(0xffffu << threadIdx.x % 32 / 16 * 16, sent, 2);
      gate[i] = of_up ? others : values[i];
      up[i] = of_up ? values[i + 2] : others;
    }
    if (n >= g.rows || feature >= g.features) return;
    const int columns = g.features / 2, column = feature / 16 * 8 + feature % 8 + (of_up ? 2 : 0);
    epilogue.load_bias(column, bias);
    epilogue.load_bias(columns + column, up_bias);
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = gated(gate[i] + bias[i], up[i] + up_bias[i]);
    const uint32_t at = uint32_t(n * columns + column);
    epilogue.add_residual(at, v);
    store_values(result.out + at, v);
  } else {
    if (n >= g.rows) return;
    Output* to = result.out + uint32_t(n * g.features + feature);
    if constexpr (RESIDUAL_EARLY) {
      if (feature < g.features) epilogue.store(residual, to, n, feature, values);
    } else if constexpr (FOURS) {
      if (feature < g.features) epilogue.store(result.out, to, n, feature, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float one[1] = {values[i]};
        if (feature + i < g.features) epilogue.store(result.out, to + i, n, feature + i, one);
      }
    }
  }
}
#else
constexpr int LOADED_ITEMS = 1;
struct Loaded {
  int items[LOADED_ITEMS];
};

__device__ inline Loaded load_early(const Block&, const Destination&, int, int) { return {}; }

// Four features of one row of the result.
__device__ inline void store(const Args& g, Output* out, int n, int feature, float4 value, int) {
  if (n >= g.rows) return;
  const float values[4] = {value.x * FACTOR, value.y * FACTOR, value.z * FACTOR, value.w * FACTOR};
  Output* to = out + uint32_t(n * g.features + feature);
  const Vec<Output, 4> four = converted<Output>(values);
  if constexpr (FOURS) {
    if (feature < g.features) *reinterpret_cast<Vec<Output, 4>*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (feature + i < g.features) to[i] = four.v[i];
    }
  }
}
#endif

// Adds what the cluster's blocks sent for this block's rows of the result, and tells them that the inbox is
// free if they will use it again: a block that has sent its last sums may have ended.
__device__ inline void finish(const Block& block, const Destination out, const Loaded& loaded, int thread,
                              int count, int tile, bool again) {
  const int inbox = count % 2;
  Signals& barriers = block.barriers;
  if (thread >= 32 * FINISHERS) return;
  Barrier::wait(&barriers.arrived.at[inbox], count / 2 & 1);
#pragma unroll(THREAD_ITEMS <= 2 ? 2 : 1)
  for (int i = 0; i < PART_ITEMS; i += EPILOGUE_THREADS) {
    const int item = i + thread;
    if (i + 32 * FINISHERS > PART_ITEMS && item >= PART_ITEMS) break;
    const float4* from =
        reinterpret_cast<const float4*>(block.smem + INBOXES_AT + inbox * INBOX_BYTES) + item;
    float4 sum = from[0];
#pragma unroll
    for (int s = 1; s < CLUSTER; ++s) add(sum, from[s * PART_ITEMS]);
    store(block.g, out, block.rank * PART_ROWS + item / 16, tile * 64 + item % 16 * 4,
          normalized(block, item / 16, sum), loaded.items[i / EPILOGUE_THREADS % LOADED_ITEMS]);
  }
  __syncwarp();
  if (again && thread % 32 < CLUSTER) Barrier::arrive(&barriers.free.at[inbox], thread % 32);
}

// The sums of all warps, to the result or to the blocks that own them. One turn more than there are row
// tiles: the last one's sums are finished by code that has run before. `next` is the residual of this turn's
// row tile, `loaded` that of the one before, which this turn finishes.
__device__ inline void add_up(const Block& block, const Destination out) {
  const Args& g = block.g;
  Signals& barriers = block.barriers;
  constexpr unsigned ROWS = EPILOGUE_THREADS / 16;  // of X, at a time
  constexpr unsigned TURNS = TILE_N == 16 ? 3 : 2;  // whose loads are under way together
  const unsigned thread = threadIdx.x - CONSUMERS, column = thread % 16 * 4;
  const float* sums = reinterpret_cast<const float*>(block.smem + SUMS_AT) + column;
  Loaded loaded{}, next{};
#pragma unroll 1
  for (int count = 0, tile = block.cluster;; ++count, tile += block.clusters) {
    const bool more = tile < g.feature_tiles;
    if (more) {
      next = load_early(block, out, thread, tile);
      [[maybe_unused]] const int inbox = count % 2;
      if constexpr (CLUSTER > 1) {
        const int squares = count == 0 ? SQUARES_BYTES : 0;
        if (thread == 0) Barrier::arrive_and_expect_tx(&barriers.arrived.at[inbox], INBOX_BYTES + squares);
        if (count >= 2) Barrier::wait(&barriers.free.at[inbox], (count / 2 - 1) & 1);
      }
      Barrier::wait(barriers.written.at, count & 1);
#if NORM
      if (CLUSTER > 1 && count == 0 && thread < TILE_N) send_squares(block, thread);
#endif
#pragma unroll 1
      for (unsigned first = 0; first < TILE_N; first += TURNS * ROWS) {
        float4 sum[TURNS];
#pragma unroll
        for (unsigned turn = 0; turn < TURNS; ++turn) {
          const unsigned n = min(first + turn * ROWS + thread / 16, TILE_N - 1);
          const float* from = sums + n * SUMS_PITCH;
          sum[turn] = *reinterpret_cast<const float4*>(from);
#pragma unroll
          for (int w = 1; w < WARPGROUPS; ++w) {
            add(sum[turn], *reinterpret_cast<const float4*>(from + w * TILE_N * SUMS_PITCH));
          }
        }
#pragma unroll
        for (unsigned turn = 0; turn < TURNS; ++turn) {
          const unsigned n = first + turn * ROWS + thread / 16;
          if (n >= TILE_N) continue;
          if constexpr (CLUSTER == 1) {
            store(g, out, n, tile * 64 + column, normalized(block, n, sum[turn]), next.items[0]);
          } else {
            const unsigned owner = n / PART_ROWS, row = block.rank * PART_ROWS + n % PART_ROWS;
            const uint32_t to =
                shared_address(block.smem + INBOXES_AT + inbox * INBOX_BYTES) + (row * 64 + column) * 4;
            store_async(set_block_rank(to, owner), sum[turn],
                        set_block_rank(shared_address(&barriers.arrived.at[inbox]), owner));
          }
        }
      }
      __syncwarp();
      if (thread % 32 == 0) Barrier::arrive(barriers.read.at);
    }
    if (CLUSTER > 1 && count) {
      const int previous = tile - block.clusters;
      const bool again = previous + INBOXES * block.clusters < g.feature_tiles;
      finish(block, out, loaded, thread, count - 1, previous, again);
    }
    if (!more) return;
    loaded = next;
  }
}
