// What becomes of the sums of a tile (wgmma_tile.cuh): where its splits meet, and who stores them.
//
// Macros: REDUCTION
//   0  there is one split, whose block stores the tile
//   1  in the workspace: fp32 partial sums, added by a second kernel, which is resident by then
//   2  in a cluster, whose blocks are the splits of one tile: each keeps its sums in its shared memory, and
//      each adds a part of the tile's rows in the order of the splits. One launch, no workspace.
// and SPLITS (the cluster's size; 1 elsewhere).

#include "device/epilogue.cuh"
#include "device/split_k.cuh"
#include "device/wgmma_tile.cuh"

// A lane of the accumulators has rows l/4 and l/4 + 8 of each warp's 16, and columns 2 * (l%4) and the next
// of each 8.
#if REDUCTION == 1
// The main kernel's last parameters, and the object that they make.
#define TILE_RESULT float* partials
#define TILE_RESULT_OF_PARAMETERS {partials}
struct TileResult {
  float* partials;
};
constexpr int TILE_CHUNKS = TILE_M * TILE_N / 4;  // float4 of a tile

// Partial sums lie as the threads have them, so that a warp stores 512 bytes in a row: [split][tile][four of
// a thread's accumulators][thread]. (In rows of the output, which are 32 bytes of each warp's store, they
// take four times as long.) `part`: which of the splits' tiles it is.
__device__ inline void store_partials(float* partials, size_t part, const Accumulator& acc) {
  float4* to = reinterpret_cast<float4*>(partials) + part * TILE_CHUNKS + threadIdx.x - 128;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 4) {
      *to = make_float4(acc[m][j], acc[m][j + 1], acc[m][j + 2], acc[m][j + 3]);
      to += CONSUMER_THREADS;
    }
  }
}

// A thread of the second kernel: the lane of the splits and the four sums of a tile that it adds, two
// neighbours in each of the rows `row` and `row + 8`.
struct Four {
  int lanes, log_lanes, columns, column, lane;
  int i, tile, four, thread, block;

  __device__ explicit Four(const ReduceArgs& r) {
    lanes = r.lanes, log_lanes = 31 - __clz(lanes), columns = REDUCE_THREADS >> log_lanes;
    column = threadIdx.x & (columns - 1), lane = threadIdx.x >> (31 - __clz(columns));
    i = blockIdx.x * columns + column;
    tile = i / TILE_CHUNKS;
    const int chunk = i % TILE_CHUNKS;
    four = chunk / CONSUMER_THREADS, thread = chunk % CONSUMER_THREADS;
    block = four / (ACCUMULATORS / 4) * CONSUMERS + thread / 128;
  }

  // Row and column of the sums, in a tile that begins at row or column `first`.
  __device__ int row(int first) const {
    return first + block * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
  }
  __device__ int col(int first) const { return first + four % (ACCUMULATORS / 4) * 8 + thread % 4 * 2; }

  // Adds the splits' partial sums in their order, once these are there; true in the thread that has all.
  __device__ bool add(const float* partials, const ReduceArgs& r, bool inside, float4& sum) const {
    sum = make_float4(0.f, 0.f, 0.f, 0.f);
    wait_on_dependent_grids();
    if (inside) {
      const size_t step = size_t(r.stride) << log_lanes;
      sum = add_splits(partials + size_t(lane) * r.stride + size_t(i) * 4, step, lane, r.splits, lanes);
    }
    return add_lanes(sum, lanes, columns, column);
  }
};
#else
#define TILE_RESULT Output* out EPILOGUE_PARAMETERS
#define TILE_RESULT_OF_PARAMETERS {out, EPILOGUE_OF_PARAMETERS}
struct TileResult {
  Output* out;
  Epilogue epilogue;
};
constexpr int PITCH =
    TILE_N + 8;  // floats of a row of sums: neither writing nor reading them meets conflicts
constexpr int CHUNKS = TILE_N / 4;  // float4 of a row
static_assert(TILE_M * PITCH * 4 <= STAGES * STAGE_BYTES, "the stages hold the sums of the tile");

__device__ inline void stage_sums(uint32_t sums, int warpgroup, const Accumulator& acc) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int m = 0; m < M_PER_WG; ++m) {
    const int row = (m * CONSUMERS + warpgroup) * 64 + row0;
    const uint32_t to = sums + (row * PITCH + 2 * (lane % 4)) * 4;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      const float* v = &acc[m][j * 4];
      store_shared(to + 32 * j, make_float2(v[0], v[1]));
      store_shared(to + 32 * j + 8 * PITCH * 4, make_float2(v[2], v[3]));
    }
  }
}

// Four neighbouring sums: of this block, or those of all blocks of the cluster in their order.
__device__ inline float4 sums_at(uint32_t address) {
#if REDUCTION == 2
  float4 v[SPLITS];
#pragma unroll
  for (int split = 0; split < SPLITS; ++split) v[split] = load_cluster(address, split);
#pragma unroll
  for (int split = 1; split < SPLITS; ++split) add_partial(v[0], v[split]);
  return v[0];
#else
  return load_shared<float4>(address);
#endif
}

// Stores the tile's rows from `first` on: store(row, column, four neighbouring sums), if inside(row, column).
template <class Inside, class Store>
__device__ inline void store_rows(uint32_t sums, int first, int rows, const Inside& inside,
                                  const Store& store) {
  const int thread = threadIdx.x - 128;
#pragma unroll 2
  for (int i = thread; i < rows * CHUNKS; i += CONSUMER_THREADS) {
    const int row = first + i / CHUNKS, column = i % CHUNKS * 4;
    if (inside(row, column)) store(row, column, sums_at(sums + (row * PITCH + column) * 4));
  }
}

#if EPILOGUE && RESIDUAL_TYPE >= 0
constexpr int ROWS_AHEAD = 8;

// `store_rows` of a whole tile, where each thread loads the residuals of ROWS_AHEAD rows before it stores the
// first of them: the compiler moves no load before a store. load(row, column) returns the residual of four
// neighbours, and store(row, column, sums, residual) takes it.
template <class Inside, class Load, class Store>
__device__ inline void store_rows_ahead(uint32_t sums, const Inside& inside, const Load& load,
                                        const Store& store) {
  constexpr int ALL = TILE_M * CHUNKS;
#pragma unroll 1
  for (int first = threadIdx.x - 128; first < ALL; first += ROWS_AHEAD * CONSUMER_THREADS) {
    Vec<Residual, 4> residual[ROWS_AHEAD];
    bool is_inside[ROWS_AHEAD];
#pragma unroll
    for (int k = 0; k < ROWS_AHEAD; ++k) {
      const int i = first + k * CONSUMER_THREADS, row = i / CHUNKS, column = i % CHUNKS * 4;
      is_inside[k] = i < ALL && inside(row, column);
      if (is_inside[k]) residual[k] = load(row, column);
    }
#pragma unroll
    for (int k = 0; k < ROWS_AHEAD; ++k) {
      const int i = first + k * CONSUMER_THREADS, row = i / CHUNKS, column = i % CHUNKS * 4;
      if (is_inside[k])
        store(row, column, load_shared<float4>(sums + (row * PITCH + column) * 4), residual[k]);
    }
  }
}
#endif

// By all consumers, once each has its sums.
template <class Inside, class Store>
__device__ inline void store_tile(uint32_t stages, int split, int warpgroup, const Accumulator& acc,
                                  const Inside& inside, const Store& store) {
  sync_threads<CONSUMER_THREADS, 1>();  // nobody reads the stages any more
  stage_sums(stages, warpgroup, acc);
#if REDUCTION == 2
  cluster_arrive();
  cluster_wait();
  constexpr int ROWS = (TILE_M + SPLITS - 1) / SPLITS;
  store_rows(stages, split * ROWS, min(ROWS, TILE_M - split * ROWS), inside, store);
  // Shared memory stays until all have read it.
  cluster_arrive_relaxed();
  cluster_wait();
#else
  sync_threads<CONSUMER_THREADS, 1>();
  store_rows(stages, 0, TILE_M, inside, store);
#endif
}
#endif

// The producer warps' part in what a cluster's consumers do.
__device__ inline void join_cluster() {
#if REDUCTION == 2
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
  cluster_arrive_relaxed();
  cluster_wait();
#endif
}
