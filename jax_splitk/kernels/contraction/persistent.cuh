// The persistent kernel of contraction/im2col.cu: a thread block computes one tile after the other. While it
// stores a tile, it multiplies the next one and loads what comes then.
//
// Warpgroup 0: warp 0 loads, others (STORERS) store: contraction/persistent_stores.cuh has THREAD_STORES, and
// contraction/persistent_boxes.cuh RESULT_BOX. Consumer warpgroups multiply, and leave a tile's 16-bit
// results in shared memory. Where a tile is a single warpgroup's, two of them (TEAMS) take turns at the
// tiles, so that one multiplies while the other hands over its results, or stores them itself (OWN_STORES).
//
// Barriers: those of the stages, see contraction/im2col.cu; of each team's results `full` has an arrival of
// each of its warps, `empty` one of each warp that stores. `turns`: each warp of the other team has waited
// for its last stage. (Of a barrier that is more than a phase behind, the parity is wrong. So a team may not
// wait for one before, nor one warp arrive for the others: a tile of one stage lets it come here before they
// have waited.)
//
// A thread block takes all phases of its pixels in turns: it has as much to do as the others, and writes
// neighbouring pixels at about the same time. Each phase has taps.
//
// With an epilogue the consumers finish the sums before they leave the results, see
// contraction/persistent_epilogue.cuh. With a residual they wait for it in place of `empty`.
//
// A STATIONARY weight, that of the one column of tiles that a thread block has, lies before the stages, in
// the order of the products. It is loaded with the stages of the first tile, whose barriers count its bytes.

static_assert(REDUCTION == 0 && !EMPTY && OUT != 0 && CTAS_PER_SM == 1 && SHARE_REGISTERS);
static_assert(!THREAD_STORES || PHASED);
static_assert(!OWN_STORES || (THREAD_STORES && TEAMS > 1));

constexpr int STORERS = OWN_STORES ? 128 : THREAD_STORES ? 96 : 32;  // threads

using Handover = Pipeline<TEAMS, 4 * CONSUMERS, STORERS / 32>;
using Turns = Barriers<2, 4 * CONSUMERS>;

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
                                  [[maybe_unused]] uint32_t weight, uint32_t stages,
                                  TilePipeline<>& pipeline) {
  const bool lead = elect_one();
  Position at;
#if TRANSPOSED
  wait_on_dependent_grids();
#endif
  for_tiles(g, [&](const Tile& tile, int turn) {
    Loads loads = loads_of(g, tile, 0);
    const int count = stages_of(g, tile.residue, 0);
    [[maybe_unused]] TapBlock block = {g.blocks.value, 1, 0, weight};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      pipeline.wait_empty(at);
      __syncwarp();  // else a lane could be two phases behind the one that loads, and wait for ever
      const uint32_t stage = stages + at.stage * STAGE_BYTES;
#if STATIONARY
      const int steps = MIXED && !block.is_last() ? 4 : LAST_STEPS;
      const int parts = turn > 0 ? 0 : steps / (BLOCKS * PART_STEPS);
      const uint32_t to = block.weight;
      block.weight += Weight::offset(4 * TAPS, steps);
      block.advance();
#else
      constexpr int parts = 1;
      const uint32_t to = stage + WEIGHT_AT;
#endif
      if (lead) {
        uint64_t* full = pipeline.expect(at, PIXEL_BYTES + parts * WEIGHT_BYTES);
        load_stage(a_map, b_map, g, tile, loads, full, stage, to, parts);
      }
      advance(g, tile.residue, loads.step, loads.block);
      at.advance(STAGES);
    }
  });
}

#include "contraction/persistent_boxes.cuh"
#include "contraction/persistent_epilogue.cuh"
#include "contraction/persistent_stores.cuh"

// ---- what multiplies -------------------------------------------------------------------------------------

__device__ inline void multiply_tiles(const Args& g, uint32_t weight, uint32_t stages,
                                      TilePipeline<>& pipeline, uint32_t results, Handover& handover,
                                      Turns& turns, [[maybe_unused]] const Result& out,
                                      const Finisher& finisher) {
  const int team = TEAMS == 1 ? 0 : threadIdx.x / 128 - 1;
  const int warpgroup = TEAMS == 1 ? threadIdx.x / 128 - 1 : 0;
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
    load_own_residual(g, part, rows, results + team * PACKED_BYTES, finisher);
#endif
    if constexpr (TEAMS > 1) Barrier::wait(&turns.at[team], team == 0 ? phase ^ 1 : phase);
    Accumulator acc;
    TapBlock block = {g.blocks.value, 1, 0, weight};
    const int last = multiply<Layout>(stages, pipeline, count, warpgroup, acc, at, block);
    if (TEAMS > 1 && threadIdx.x % 32 == 0) Barrier::arrive(&turns.at[team ^ 1]);
    wait_batches<0>(acc);
    if (threadIdx.x % 128 == 0) pipeline.release(last);
    const uint32_t own = results + team * PACKED_BYTES;
#if OWN_STORES
    wait_own_residual();
    sync_team(team);  // nobody reads the last results any more, and the residual is there
    finisher.stage(g, tile, own, warpgroup, acc);
    sync_team(team);
    store_own(g, part, rows, own, out);
#else
    finisher.wait(handover, team, phase);
    finisher.stage(g, tile, own, warpgroup, acc);
    if constexpr (!THREAD_STORES) fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(&handover.full[team]);
#endif
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL()(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ Args g,
             const __grid_constant__ Result out EPILOGUE_PARAMETERS RESIDUAL_MAP) {
  __shared__ TilePipeline<> pipeline;
  __shared__ Handover handover;
  __shared__ Turns turns;
#if HAS_RESIDUAL
  __shared__ Residuals residuals;
#endif
  const uint32_t weight = shared_stages(), stages = weight + (STATIONARY ? g.stationary_bytes : 0);
  const uint32_t results = stages + STAGES * STAGE_BYTES;
  const Finisher finisher = FINISHER_OF_PARAMETERS;
  run_roles<TileRoles>(
      [&](int warp) {
        if (warp == 0) {
          load_tiles(a_map, b_map, g, weight, stages, pipeline);
        } else if (!OWN_STORES && warp <= STORERS / 32) {
          store_tiles(g, results, handover, out, finisher);
        }
#if HAS_RESIDUAL && !THREAD_STORES
        if (warp == 2) load_residuals(g, results, handover, residuals, residual_map);
#endif
      },
      [&](int) { multiply_tiles(g, weight, stages, pipeline, results, handover, turns, out, finisher); },
      pipeline, handover, turns RESIDUAL_BARRIERS);
}
