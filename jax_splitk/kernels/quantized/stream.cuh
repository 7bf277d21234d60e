// A thread block of stream.cu: its shared memory, its barriers, and its part of the work.

#include "device/epilogue.cuh"
#include "device/skeleton.cuh"
#include "device/wgmma_rs.cuh"
#include "quantized/dequantize.cuh"
#include "quantized/scales.cuh"
#include "structs.cuh"

static_assert(!E4M3_PRODUCTS || (X_E4M3 && ZERO_TYPE == NONE), "what e4m3 products can compute");
static_assert(!X_SLOTS || (X_SLOTS > STAGES && X_TMA && WHOLE && !NORM), "X that can be loaded again");

constexpr int CONSUMERS = 128 * WARPGROUPS, EPILOGUE_WARPS = 3;
constexpr int EPILOGUE_THREADS = 32 * EPILOGUE_WARPS;
constexpr int THREADS = CONSUMERS + 32 + EPILOGUE_THREADS;  // whole warpgroups

// Under CHAINED, the stages whose words are loaded before X is there. More of them would delay X.
constexpr int EARLY_STAGES = 2;
static_assert(EARLY_STAGES <= STAGES);

constexpr int READY = 6;  // a named barrier: the others are ready to use

constexpr int STAGE_TILES = WARPGROUPS * TILES;
constexpr int WORDS_BYTES = WORDS * 2048;  // of a tile of 64 by 64
constexpr int TILE_GROUPS = GROUP && GROUP < 64 ? 64 / GROUP : 1,
              STEPS = 64 / STEP_K / TILE_GROUPS;  // of a tile; of a group in it
constexpr int STAGE_GROUPS = GROUP ? STAGE_TILES * 64 / GROUP : 0;
constexpr int SCALES_OFFSET = STAGE_TILES * WORDS_BYTES;
constexpr int SCALE_ITEM = item_bytes(SCALE_TYPE), ZERO_ITEM = item_bytes(ZERO_TYPE);
constexpr int SCALE_ROW = 64 * SCALE_ITEM, ZERO_ROW = 64 * ZERO_ITEM;  // bytes of a group
constexpr int ZEROS_OFFSET = SCALES_OFFSET + STAGE_GROUPS * SCALE_ROW;
constexpr int STAGE_BYTES = ZEROS_OFFSET + STAGE_GROUPS * ZERO_ROW;

constexpr int SUMS_PITCH = 64 + 4;  // floats; lanes of a fragment write to different banks
constexpr int SUMS_BYTES = WARPGROUPS * TILE_N * SUMS_PITCH * 4;
constexpr int INBOXES = CLUSTER > 1 ? 2 : 0;
constexpr int INBOX_BYTES = TILE_N * 64 * 4, PART_ROWS = TILE_N / CLUSTER;
constexpr int PART_ITEMS = PART_ROWS * 16;  // groups of 4 features
constexpr int FINISHERS = PART_ITEMS >= EPILOGUE_THREADS ? EPILOGUE_WARPS : (PART_ITEMS + 31) / 32;  // warps

constexpr int SUMS_AT = STAGES * STAGE_BYTES, INBOXES_AT = SUMS_AT + SUMS_BYTES;
constexpr int BARRIERS_AT = INBOXES_AT + INBOXES * INBOX_BYTES;
constexpr int TABLE_AT = BARRIERS_AT + 384, TABLE_BYTES = TABLE ? 256 * 32 * 4 : 0;
constexpr int NORM_AT = TABLE_AT + TABLE_BYTES, NORM_BYTES = NORM ? 768 : 0;
constexpr int X_AT = (NORM_AT + NORM_BYTES + 1023) / 1024 * 1024;
constexpr int SQUARES_BYTES = NORM ? CLUSTER * PART_ROWS * 16 : 0;        // that a block gets (norm.cuh)
constexpr int X_ROW = E4M3_PRODUCTS ? 64 : 128, X_TILE = TILE_N * X_ROW;  // bytes of 64 k
constexpr int X_STAGE = STAGE_TILES * X_TILE;                             // bytes of a stage's k
constexpr int X_BOX = E4M3_PRODUCTS ? 32 : 64;  // elements of the tensor map, which has pairs of e4m3

struct Signals {
  Pipeline<STAGES, 1, CONSUMERS / 32> pipeline;
  Barriers<1, CONSUMERS / 32> written;
  Barriers<1, EPILOGUE_WARPS> read;
  Barriers<INBOXES, 1> arrived;
  Barriers<INBOXES, CLUSTER * FINISHERS> free;
};
static_assert(sizeof(Signals) <= TABLE_AT - BARRIERS_AT, "barriers");

// A thread block: its memory, and its work. The stages [first, last) of k are its part of them, which may not
// be empty.
struct Block {
  const Args& g;
  uint8_t* smem;
  Signals& barriers;
  int rank, cluster, clusters, first, last;

  __device__ Block(const Args& g, uint8_t* smem)
      : g(g),
        smem(smem),
        barriers(*reinterpret_cast<Signals*>(smem + BARRIERS_AT)),
        rank(CLUSTER > 1 ? int(block_rank_in_cluster()) : 0),
        cluster(blockIdx.x / CLUSTER),
        clusters(gridDim.x / CLUSTER),
        first(g.stages * rank / CLUSTER),
        last(g.stages * (rank + 1) / CLUSTER) {}
};

#if NORM
#include "quantized/norm.cuh"
#endif
