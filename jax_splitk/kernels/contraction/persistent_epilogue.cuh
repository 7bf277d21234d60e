// How the consumers of a persistent kernel (contraction/persistent.cuh) compute the epilogue
// (device/epilogue.cuh) of a tile's sums, and leave the results in shared memory (device/packed_tile.cuh).
//
// A residual comes to where the results will be, and each thread replaces what it has read. Its loads begin
// once the results before it are stored. Where TMA stores the results, warp 2 lets it load the residual:
// `residuals` counts the bytes. Where threads store them, the same threads load
// (contraction/persistent_stores.cuh), and each of their warps arrives at `residuals`; with OWN_STORES the
// team synchronises.

#if EPILOGUE && RESIDUAL_TYPE >= 0
#define HAS_RESIDUAL 1
#define RESIDUAL_BARRIERS , residuals
#define FINISHER_OF_PARAMETERS {EPILOGUE_OF_PARAMETERS, residuals}
static_assert(RESIDUAL_TYPE != FLOAT);
using Residuals = Barriers<TEAMS, THREAD_STORES ? STORERS / 32 : 1>;
#else
#define HAS_RESIDUAL 0
#define RESIDUAL_BARRIERS
#define FINISHER_OF_PARAMETERS {EPILOGUE_OF_PARAMETERS}
#endif

#if HAS_RESIDUAL && !THREAD_STORES
#define RESIDUAL_MAP , const __grid_constant__ TensorMap residual_map

// By a warp of its own, of which every lane walks, as the one that loads tiles.
__device__ inline void load_residuals(const Args& g, uint32_t results, Handover& handover,
                                      Residuals& residuals, const TensorMap& map) {
  const bool lead = elect_one();
  for_tiles(g, [&](const Tile& tile, int turn) {
    const int team = turn % TEAMS;
    handover.wait_empty({team, uint32_t(turn / TEAMS & 1)});
    __syncwarp();
    if (lead) {
      uint64_t* full = &residuals.at[team];
      int boxes = 0;
      for_result_boxes(g, tile, 0, [&](uint32_t, int, int) { ++boxes; });
      Barrier::arrive_and_expect_tx(full, boxes * RESULT_BOX * 128);
      for_result_boxes(g, tile, results + team * PACKED_BYTES, [&](uint32_t box, int column, int row) {
        load_tile(&map, full, EVICT_FIRST, shared_pointer(box), column, tile.group, row);
      });
    }
  });
}
#else
#define RESIDUAL_MAP
#endif

#if EPILOGUE
// What a thread needs for eight sums: those of the columns 0, 1, 8 and 9 from its first on, each in two rows.
struct Operands {
  float bias[4];  // of the columns, or under SWAP of the rows
  uint32_t residual[4];
};

// Stages the results of a tile. A thread loads the operands of a step one step ahead, as stores to shared
// memory keep the compiler from it.
__device__ inline void stage_finished(const Args& g, const Tile& tile, const Epilogue& epilogue, uint32_t to,
                                      int warpgroup, const Accumulator& acc) {
  constexpr int OF_BLOCK = TILE_N / 16, ALL = M_PER_WG * OF_BLOCK;  // steps
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const MatrixLane matrix;
  const ResultRows rows(g, tile);
  const auto load = [&](int step, Operands& next) {
    const int block = step / OF_BLOCK * CONSUMERS + warpgroup, j = step % OF_BLOCK * 2;
    if constexpr (BIAS != 0) {
      const Bias* bias = epilogue.bias + tile.group * g.n;
#if SWAP
#pragma unroll
      for (int i = 0; i < 2 && j == 0; ++i) {
        const int channel = tile.n + block * 64 + row + i * 8;
        next.bias[i] = channel < g.n ? float(bias[channel]) : 0.f;
      }
#else
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = tile.n + (j + i) * 8 + column;
        Vec<Bias, 2> pair = {};
        if (channel < g.n) pair = *reinterpret_cast<const Vec<Bias, 2>*>(bias + channel);
        next.bias[i * 2] = float(pair.v[0]), next.bias[i * 2 + 1] = float(pair.v[1]);
      }
#endif
    }
#if HAS_RESIDUAL
    uint32_t (&r)[4] = next.residual;
#if SWAP
    load_matrices_trans(matrix.at(to, block, j, rows), r[0], r[1], r[2], r[3]);
#else
    load_matrices(matrix.at(to, block, j, rows), r);
#endif
#endif
  };
  Operands next = {};
  load(0, next);
#pragma unroll
  for (int step = 0; step < ALL; ++step) {
    const Operands here = next;
    if (step + 1 < ALL) load(step + 1, next);
    const float* sums = &acc[step / OF_BLOCK][step % OF_BLOCK * 8];
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = sums[i];
      if constexpr (BIAS != 0) v[i] += here.bias[SWAP ? i / 2 % 2 : i / 4 * 2 + i % 2];
      if constexpr (!ACTIVATION_LAST) v[i] = activated_fast(v[i]);
#if HAS_RESIDUAL
      v[i] += float(reinterpret_cast<const Vec<Residual, 2>&>(here.residual[i / 2]).v[i % 2]);
#endif
      if constexpr (ACTIVATION_LAST) v[i] = activated_fast(v[i]);
    }
    const int block = step / OF_BLOCK * CONSUMERS + warpgroup;
    matrix.store(matrix.at(to, block, step % OF_BLOCK * 2, rows), v);
  }
}
#endif

// How a tile's sums become results.
struct Finisher {
  Epilogue epilogue;
#if HAS_RESIDUAL
  Residuals& residuals;
#endif

  // Waits until results may be staged.
  __device__ void wait([[maybe_unused]] Handover& handover, int team, uint32_t phase) const {
#if HAS_RESIDUAL
    Barrier::wait(&residuals.at[team], phase);
#else
    handover.wait_empty({team, phase});
#endif
  }

  __device__ void stage(const Args& g, const Tile& tile, uint32_t to, int warpgroup,
                        const Accumulator& acc) const {
#if EPILOGUE
    stage_finished(g, tile, epilogue, to, warpgroup, acc);
#else
    stage_packed(to, warpgroup, acc, 0, ResultRows(g, tile));
#endif
  }
};
