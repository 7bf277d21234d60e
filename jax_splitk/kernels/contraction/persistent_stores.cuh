// How the results of a persistent kernel's tiles go from shared memory (device/packed_tile.cuh) to memory
// (contraction/persistent.cuh).
//
// TMA stores the rows of a tile, which are neighbours in the output: those between two lines of an image are
// not among them (contraction/persistent_boxes.cuh). Rows of a phase are stored by threads (THREAD_STORES):
// those of the team that has multiplied (OWN_STORES), all of a tile at once, or those of the warps beside the
// one that loads, a part of their rows at a time.

#if THREAD_STORES
using Result = Output*;  // rows of a phase lie apart

constexpr int CHUNKS_OF_ROW = CHANNELS / 8;  // of 16 bytes
constexpr int ROWS_AT_A_TIME = STORERS / CHUNKS_OF_ROW;
constexpr int ROWS_OF_THREAD = (PIXELS + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;

// A thread's part of a tile: one chunk of every ROWS_AT_A_TIME-th row.
struct Part {
  int first, chunk, column;
  bool inside;

  __device__ Part(const Args& g, const Tile& tile, int thread) {
    first = thread / CHUNKS_OF_ROW;
    chunk = thread - first * CHUNKS_OF_ROW;
    column = tile.n + chunk * 8;
    inside = column < g.n && first < ROWS_AT_A_TIME;
    column += tile.group * g.n;
  }

  __device__ int row(int i) const { return first + i * ROWS_AT_A_TIME; }

  __device__ uint32_t at(uint32_t tile, int row) const { return chunk_at(tile, chunk / 8, row, chunk % 8); }
  __device__ uint4 load(uint32_t from, int row) const { return load_shared<uint4>(at(from, row)); }

#if HAS_RESIDUAL
  // Begins to load the residual of the row whose number in the output is `of`, -1 outside of it.
  __device__ void load_residual(const Args& g, const Residual* residual, int of, uint32_t to, int row) const {
    if (of >= 0) copy_async<16>(at(to, row), residual + size_t(of) * pitch_of(g) + column, 16);
  }
#endif

  // `to`: the number of the row in the output, -1 outside of it.
  __device__ void store(const Args& g, Output* out, int to, const uint4& v) const {
    if (to >= 0) *reinterpret_cast<uint4*>(out + size_t(to) * pitch_of(g) + column) = v;
  }
};

// ---- by the team that has multiplied ----

// Where the rows of the thread's part go.
struct Rows {
  int at[ROWS_OF_THREAD];

  __device__ Rows(const Args& g, const Tile& tile, const Part& part) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; ++i) {
      const int row = part.row(i);
      at[i] = part.inside && row < PIXELS ? row_of(g, tile.residue, tile.m + row) : -1;
    }
  }
};

__device__ inline void sync_team(int team) {
  if (team == 0) {
    sync_threads<STORERS, 1>();
  } else {
    sync_threads<STORERS, 2>();
  }
}

__device__ inline void store_own(const Args& g, const Part& part, const Rows& rows, uint32_t from,
                                 Output* out) {
  uint4 v[ROWS_OF_THREAD];
#pragma unroll
  for (int i = 0; i < ROWS_OF_THREAD; ++i) v[i] = part.load(from, min(part.row(i), PIXELS - 1));
#pragma unroll
  for (int i = 0; i < ROWS_OF_THREAD; ++i) part.store(g, out, rows.at[i], v[i]);
}

// Before the products, so that these hide the loads.
__device__ inline void load_own_residual([[maybe_unused]] const Args& g, [[maybe_unused]] const Part& part,
                                         [[maybe_unused]] const Rows& rows, [[maybe_unused]] uint32_t to,
                                         [[maybe_unused]] const Finisher& finisher) {
#if HAS_RESIDUAL
#pragma unroll
  for (int i = 0; i < ROWS_OF_THREAD; ++i) {
    part.load_residual(g, finisher.epilogue.residual, rows.at[i], to, part.row(i));
  }
  commit_copies();
#endif
}

__device__ inline void wait_own_residual() {
#if HAS_RESIDUAL
  wait_copies<0>();
#endif
}

// ---- by the warps beside the one that loads ----

constexpr int BATCH = 8;  // chunks that a thread has under way

// Where all rows go.
__device__ inline void find_rows(const Args& g, const Axes& residue, int m, int* rows) {
  sync_threads<STORERS, 1>();  // nobody reads the last ones any more
#pragma unroll 1
  for (int row = threadIdx.x - 32; row < PIXELS; row += STORERS) rows[row] = row_of(g, residue, m + row);
  sync_threads<STORERS, 1>();
}

#if HAS_RESIDUAL
// Loads the residual of the part.
__device__ inline void load_part(const Args& g, const Part& part, const Residual* residual, const int* rows,
                                 uint32_t to) {
#pragma unroll 1
  for (int row = part.first; row < PIXELS; row += ROWS_AT_A_TIME) {
    part.load_residual(g, residual, rows[row], to, row);
  }
  commit_copies();
}
#endif

// Stores the part; the tile's results are at `from`.
__device__ inline void store_part(const Args& g, const Part& part, uint32_t from, const int* rows,
                                  Output* out) {
#pragma unroll 1
  for (int row = part.first; row < PIXELS; row += BATCH * ROWS_AT_A_TIME) {
    uint4 v[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) v[i] = part.load(from, min(row + i * ROWS_AT_A_TIME, PIXELS - 1));
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = row + i * ROWS_AT_A_TIME;
      if (at >= PIXELS) break;
      part.store(g, out, rows[at], v[i]);
    }
  }
}

__device__ inline void store_tiles(const Args& g, uint32_t results, Handover& handover, Output* out,
                                   [[maybe_unused]] const Finisher& finisher) {
  // These follow the results. The launch asks for more shared memory than stages and results need, so that
  // the stages can be aligned; the rows fit in what the alignment leaves.
  int* rows = reinterpret_cast<int*>(shared_pointer(results + TEAMS * PACKED_BYTES));
  for_tiles(g, [&](const Tile& tile, int turn) {
    const Part part(g, tile, threadIdx.x - 32);
    find_rows(g, tile.residue, tile.m, rows);
    const int team = turn % TEAMS;
    const uint32_t from = results + team * PACKED_BYTES;
#if HAS_RESIDUAL
    if (part.inside) load_part(g, part, finisher.epilogue.residual, rows, from);
    wait_copies<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(&finisher.residuals.at[team]);
#endif
    Barrier::wait(&handover.full[team], turn / TEAMS & 1);
    if (part.inside) store_part(g, part, from, rows, out);
    __syncwarp();
    if (threadIdx.x % 32 == 0) handover.release(team);
  });
}
#else
using Result = TensorMap;

// Every lane walks, as the one that loads.
__device__ inline void store_tiles(const Args& g, uint32_t results, Handover& handover, const TensorMap& out,
                                   const Finisher&) {
  const bool lead = elect_one();
  for_tiles(g, [&](const Tile& tile, int turn) {
    const int team = turn % TEAMS;
    Barrier::wait(&handover.full[team], turn / TEAMS & 1);
    if (lead) {
      for_result_boxes(g, tile, results + team * PACKED_BYTES, [&](uint32_t box, int column, int row) {
        store_tile(&out, shared_pointer(box), column, tile.group, row);
      });
      wait_stores_read();
      handover.release(team);
    }
    __syncwarp();  // else a lane may be two phases late at a barrier, which it would wait for in vain
  });
}
#endif
