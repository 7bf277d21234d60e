// The persistent kernel of conv/im2col.cu: a thread block computes one tile after the other. While it stores
// a tile, it multiplies the next one and loads what comes then.
//
// Warpgroup 0: warp 0 loads, others (STORERS) store. Consumer warpgroups multiply, and leave a tile's 16-bit
// results in shared memory. Where a tile is a single warpgroup's, two of them (TEAMS) take turns at the
// tiles, so that one multiplies while the other hands over its results. With OWN_STORES a team stores these
// itself: its threads have registers for a whole tile, where others go to memory and back for each part.
//
// Barriers: those of the stages, see conv/im2col.cu; of each team's results `full` has an arrival of each of
// its warps, `empty` one of each warp that stores. `turns`: each warp of the other team has waited for its
// last stage. (Of a barrier that is more than a phase behind, the parity is wrong. So a team may not wait for
// one before, nor one warp arrive for the others: a tile of one stage lets it come here before they have
// waited.)
//
// A thread block takes all phases of its pixels in turns: it has as much to do as the others, and writes
// neighbouring pixels at about the same time. Each phase has taps.
//
// Where its tiles have one column, and the stages hold whole reductions, a stage has the same part of the
// weight for every tile, which is loaded once (`keeps_weight`).

static_assert(REDUCTION == 0 && !EMPTY && OUT != 0 && CTAS_PER_SM == 1 && SHARE_REGISTERS);

static_assert(!OWN_STORES || (PHASED && TEAMS > 1));

constexpr int STORERS = OWN_STORES ? 128 : PHASED ? 96 : 32;  // threads

// work(tile, how many came before it) for all tiles of the thread block.
template <class Work>
__device__ inline void for_tiles(const Args& g, const Work& work) {
  const int phases = PHASED ? g.phases.value : 1;
  int turn = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < g.tiles; unit += gridDim.x) {
    int row = unit;
    const int column = take(row, g.columns);
#pragma unroll 1
    for (int phase = 0; phase < phases; ++phase) {
      work(tile_at(g, row, phase, column), turn);
      ++turn;
    }
  }
}

// Every lane walks, so that the compiler knows that the warp's numbers are uniform.
__device__ inline void load_tiles(const TensorMap& a_map, const TensorMap& b_map, const Args& g,
                                  uint32_t stages, Pipeline<STAGES>& pipeline) {
  const bool lead = elect_one();
  Position at;
  int loaded = 0;
  for_tiles(g, [&](const Tile& tile, int) {
    Loads loads = loads_of(g, tile, 0);
    const int count = stages_of(g, tile.residue, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      pipeline.wait_empty(at);
      const bool has_weight = g.keeps_weight && loaded >= STAGES;
      if (lead) {
        uint64_t* full = pipeline.expect(at, has_weight ? PIXEL_BYTES : LOAD_BYTES);
        load_stage(a_map, b_map, g, tile, loads, full, stages + at.stage * STAGE_BYTES, has_weight);
      }
      ++loaded;
      advance(g, tile.residue, loads.step, loads.block);
      at.advance(STAGES);
    }
  });
}

// ---- what stores -----------------------------------------------------------------------------------------

#if PHASED
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

  __device__ uint4 load(uint32_t from, int row) const {
    return load_shared<uint4>(chunk_at(from, row / 64, chunk / 8, row % 64, chunk % 8));
  }

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

// ---- by the warps beside the one that loads ----

constexpr int BATCH = 8;  // chunks that a thread has under way

// Where all rows go.
__device__ inline void find_rows(const Args& g, const Axes& residue, int m, int* rows) {
  sync_threads<STORERS, 1>();  // nobody reads the last ones any more
#pragma unroll 1
  for (int row = threadIdx.x - 32; row < PIXELS; row += STORERS) rows[row] = row_of(g, residue, m + row);
  sync_threads<STORERS, 1>();
}

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

__device__ inline void store_tiles(const Args& g, uint32_t results, Pipeline<TEAMS>& handover, Output* out) {
  // Behind the results, in what is left of the bytes that the alignment of the stages may take.
  int* rows = reinterpret_cast<int*>(shared_pointer(results + TEAMS * PACKED_BYTES));
  for_tiles(g, [&](const Tile& tile, int turn) {
    const Part part(g, tile, threadIdx.x - 32);
    find_rows(g, tile.residue, tile.m, rows);
    const int team = turn % TEAMS;
    const uint32_t from = results + team * PACKED_BYTES;
    Barrier::wait(&handover.full[team], turn / TEAMS & 1);
    if (part.inside) store_part(g, part, from, rows, out);
    __syncwarp();
    if (threadIdx.x % 32 == 0) handover.release(team);
  });
}
#else
using Result = TensorMap;

// TMA stores boxes of 64 rows and 64 channels. Every lane walks, as the one that loads.
__device__ inline void store_tiles(const Args& g, uint32_t results, Pipeline<TEAMS>& handover,
                                   const TensorMap& out) {
  const bool lead = elect_one();
  for_tiles(g, [&](const Tile& tile, int turn) {
    const int team = turn % TEAMS;
    const uint32_t from = results + team * PACKED_BYTES;
    Barrier::wait(&handover.full[team], turn / TEAMS & 1);
    if (lead) {
      for (int column = 0; column < CHANNELS && tile.n + column < g.n; column += 64) {
#pragma unroll
        for (int row = 0; row < PIXELS; row += 64) {
          const uint32_t box = chunk_at(from, row / 64, column / 64, 0, 0);
          store_tile(&out, shared_pointer(box), tile.n + column, tile.group, tile.m + row);
        }
      }
      wait_stores_read();
      handover.release(team);
    }
    __syncwarp();  // else a lane may be two phases late at a barrier, which it would wait for in vain
  });
}
#endif

// ---- what multiplies -------------------------------------------------------------------------------------

__device__ inline void multiply_tiles(const Args& g, uint32_t stages, Pipeline<STAGES>& pipeline,
                                      uint32_t results, Pipeline<TEAMS>& handover, uint64_t* turns,
                                      [[maybe_unused]] const Result& out) {
  const int team = TEAMS == 1 ? 0 : threadIdx.x / 128 - 1;
  const int warpgroup = TEAMS == 1 ? threadIdx.x / 128 - 1 : 0;
  const auto block_of = [=](uint32_t stage, int m) {
    return stage + (warpgroup + m * CONSUMERS) * (64 * ROW_BYTES);
  };
  Position at;
  for_tiles(g, [&](const Tile& tile, int turn) {
    const int count = stages_of(g, tile.residue, 0);
    if (turn % TEAMS != team) {
      const int next = at.stage + count;
      at = {next % STAGES, at.phase ^ (next / STAGES & 1)};
      return;
    }
    const uint32_t phase = turn / TEAMS & 1;
#if OWN_STORES
    const Part part(g, tile, threadIdx.x % 128);
    const Rows rows(g, tile, part);
#endif
    if constexpr (TEAMS > 1) Barrier::wait(&turns[team], team == 0 ? phase ^ 1 : phase);
    Accumulator acc;
    const int last = multiply<Wgmma, A, B>(stages, pipeline, count, block_of, acc, at);
    if (TEAMS > 1 && threadIdx.x % 32 == 0) Barrier::arrive(&turns[team ^ 1]);
    cute::warpgroup_wait<0>();
    fence(acc);
    if (threadIdx.x % 128 == 0) pipeline.release(last);
#if OWN_STORES
    const uint32_t own = results + team * PACKED_BYTES;
    sync_team(team);  // nobody reads the last results any more
    stage_packed(own, warpgroup, acc);
    sync_team(team);
    store_own(g, part, rows, own, out);
#else
    handover.wait_empty({team, phase});
    stage_packed(results + team * PACKED_BYTES, warpgroup, acc);
    if constexpr (!PHASED) fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(&handover.full[team]);
#endif
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ Args g, const __grid_constant__ Result out) {
  extern __shared__ uint8_t raw[];
  __shared__ Pipeline<STAGES> pipeline;
  __shared__ Pipeline<TEAMS> handover;
  __shared__ uint64_t turns[2];
  const uint32_t stages = aligned_address(raw), results = stages + STAGES * STAGE_BYTES;
  const int warp = warp_index();
  if (warp == 0 && elect_one()) {
    pipeline.init(1, CONSUMERS);
    handover.init(4 * CONSUMERS, STORERS / 32);
    for (uint64_t& turn : turns) Barrier::init(&turn, 4 * CONSUMERS);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp >= 4) {
    raise_registers<CONSUMER_REGS>();
    multiply_tiles(g, stages, pipeline, results, handover, turns, out);
    return;
  }
  lower_registers<PRODUCER_REGS>();
  if (warp == 0) {
    load_tiles(a_map, b_map, g, stages, pipeline);
  } else if (!OWN_STORES && warp <= STORERS / 32) {
    store_tiles(g, results, handover, out);
  }
}
