"""Kernel family: products of e4m3 activations with packed quantized weights, on Hopper's fp8 tensor cores (device code:
quantized/fp8.cu).

Weights of 4 bits, and e4m3 ones, are exact in e4m3 and are decoded into the A registers of WGMMA; the activation comes
by TMA as it lies in memory. The tensor cores add e4m3 products with few bits, so their sums of 32, 64 or 128 k go,
times the group's scale, onto fp32 accumulators (as in DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The sums of one
part of the tile are added up while the products of the next one, or another warpgroup's, run. The k blocks of the
output's tiles can be cut into ranges, as in quantized_tiled, whose sums meet in the workspace or in a cluster; clusters
of two thread blocks with a tile each share the activation by multicast. The result is deterministic.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jax_splitk.kernels.device.split_k import OUT_CODES, ReduceArgs
from jax_splitk.kernels.device.structs import declarations
from jax_splitk.kernels.quantized import dequantize, ranges
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS, FORMAT_CODES, TYPE_CODES, per_channel
from jax_splitk.kernels.quantized.ranges import BLOCK_K, SLOT, k_blocks
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import compiler, plan
from jax_splitk.runtime.target import Target, hopper_refusal, resident_blocks

name = "quantized_fp8"
implementation = "cutlass"
platform = "cuda"
ABI = 2

SHARED_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of the ring
BARRIER_BYTES = 256  # static shared memory
MAX_STAGES = 8
MIN_STAGES = {1: 2, 2: 3}  # by parts: a warpgroup waits for its next stage before it gives back the one it has
STAGING_BYTES = 4 * 16 * 48  # of a warpgroup's results on their way to memory
K_MULTIPLE = 16  # TMA's rows are multiples of 16 bytes

X_DTYPE = "float8_e4m3fn"
OUT_DTYPES = ("bfloat16", "float16")
QTYPES = E4M3_FORMATS
TILES_M = (128, 256)
TILES_N = (32, 64, 96, 128, 192, 256)
MAX_REGISTERS = 232
WIDEST_OF_256 = 64  # with four warpgroups a thread has few registers
WIDEST_OF_SPLITS = 128  # with more rows there are tiles enough
PARTS_TILES_N = (32, 64)  # with two parts, of the lower tile
CHUNKS = (32, 64, 128)
CLUSTERS = (1, 2)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product of an e4m3 activation is computed.

    Attributes:
      tile_n: rows of x of a thread block's output tile; see `TILES_N`.
      chunk: columns of that tile that are multiplied, and added up, at a time; see `CHUNKS`.
      stages: depth of the shared-memory ring, in blocks of 128 k.
      cluster: thread blocks of a cluster, which have the same rows of x and load them together.
      blocks: thread blocks.
      waves: whole tiles that each thread block computes; the k blocks of all other tiles are cut into equal ranges, one
        for each cluster.
      tile_m: features of a thread block's output tile, 64 for each warpgroup, or for two; see `TILES_M`.
      splits: equal ranges of the k blocks of every tile, whose thread blocks form a cluster; 1 if ranges meet in the
        workspace.
      parts: warpgroups that share 64 features of such a cluster's tile, and take turns with the k blocks of a range; 1
        or 2.
    """

    tile_n: int
    chunk: int
    stages: int
    cluster: int
    blocks: int
    waves: int
    tile_m: int = 128
    splits: int = 1
    parts: int = 1

    @property
    def consumers(self) -> int:
        """Features of a thread block, in 64 (CONSUMERS in the device code)."""
        return self.tile_m // SLOT

    @property
    def warpgroups(self) -> int:
        """Those that multiply (WARPGROUPS in the device code)."""
        return self.consumers * self.parts


def period(problem: QuantizedMatmulProblem, config: Config) -> int:
    """k of a sum of the tensor cores (PERIOD in the device code).

    128 where there is one scale for them: half as many sums to promote, as in DeepSeek-V3. Not for float16 results,
    which would show the bits that are lost, nor in narrow tiles, where promotion is a smaller part of the work.
    """
    group = BLOCK_K if per_channel(problem) else problem.group_size
    long = config.tile_m == TILES_M[0] and config.tile_n >= 128 and problem.out_dtype == "bfloat16"
    return min(128 if long else 64, group)


def _registers(problem: QuantizedMatmulProblem, config: Config, sets: int) -> int:
    """Of a thread: sums, `sets` of partial sums, fragments and words."""
    steps = period(problem, config) // 32
    words = 8 * (min(steps, 2) if problem.bits == 8 else 1)
    return (config.tile_n + sets * config.chunk) // 2 + 8 * steps + words


def sums(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Sets of partial sums that a thread's registers hold (SUMS in the device code)."""
    return 2 if _registers(problem, config, 2) <= (224 if config.warpgroups == 2 else 80) else 1


def _fits(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether one set of partial sums fits in registers, with the scales of what is decoded."""
    return _registers(problem, config, 1) + (problem.scale_dtype == "float32") <= MAX_REGISTERS


def _stage_bytes(problem: QuantizedMatmulProblem, tile_n: int, tile_m: int) -> int:
    """STAGE_BYTES and EXTRA_BYTES of the device code."""
    return BLOCK_K * tile_n + dequantize.weight_bytes(problem, tile_m, BLOCK_K)


def _fixed_bytes(tile_n: int, tile_m: int, parts: int) -> int:
    """Shared memory beside the ring."""
    staging = tile_m // SLOT * parts * STAGING_BYTES
    return staging + ranges.part_bytes(tile_m, tile_n, parts) + ALIGNMENT_BYTES + BARRIER_BYTES


def shared_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Shared memory of a thread block."""
    ring = config.stages * _stage_bytes(problem, config.tile_n, config.tile_m)
    return ring + _fixed_bytes(config.tile_n, config.tile_m, config.parts)


def _cluster_stages(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that hold the sums which the blocks of a cluster send to one of them."""
    received = ranges.received_bytes(config.tile_m, config.tile_n, config.splits)
    return -(-received // _block_bytes(problem, config))


def _block_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Of x and words: STAGE_BYTES of the device code."""
    return BLOCK_K * (config.tile_n + config.tile_m * problem.bits // 8)


def max_stages(problem: QuantizedMatmulProblem, tile_n: int, tile_m: int = TILES_M[0], parts: int = 1) -> int:
    """The deepest ring that fits in shared memory."""
    room = SHARED_BYTES - _fixed_bytes(tile_n, tile_m, parts)
    return min(MAX_STAGES, room // _stage_bytes(problem, tile_n, tile_m))


def tile_counts(problem: QuantizedMatmulProblem, config: Config) -> tuple[int, int]:
    """(a cluster's tiles along the features, tiles along the rows)."""
    return -(-problem.features // (config.tile_m * config.cluster)), -(-problem.rows // config.tile_n)


def schedule(problem: QuantizedMatmulProblem, config: Config) -> ranges.Schedule:
    """A cluster whose blocks have a tile each is a worker, as is a thread block of any other kind."""
    tiles = math.prod(tile_counts(problem, config))
    return ranges.Schedule(tiles, k_blocks(problem), config.blocks // config.cluster, config.waves)


def is_cut(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether any tile has more than one range, so that partial sums meet in the workspace."""
    return config.splits == 1 and schedule(problem, config).is_cut


def workspace_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Two slots of a tile for each range."""
    return 2 * config.blocks * config.tile_m * config.tile_n * 4 if is_cut(problem, config) else 0


# ---- legality --------------------------------------------------------------------------------------------------------


def supports(problem: QuantizedMatmulProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    reason = hopper_refusal(target) or _problem_limit(problem)
    if reason is None and config is not None:
        reason = _config_limit(problem, config)
    return reason


def preferred(problem: QuantizedMatmulProblem, target: Target) -> str | None:
    """Always chosen where it is legal: XLA writes the dequantized weight to memory first."""
    del problem, target
    return None


def _problem_limit(p: QuantizedMatmulProblem) -> str | None:
    if p.x_dtype != X_DTYPE:
        return f"x of dtype {p.x_dtype}; accepted: {X_DTYPE}"
    if p.out_dtype not in OUT_DTYPES:  # the tensor cores' sums of e4m3 products are not good enough for float32
        return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(OUT_DTYPES)}"
    if p.qtype not in QTYPES:
        return f"a weight of {p.qtype}, whose values e4m3 does not hold; accepted: {', '.join(QTYPES)}"
    if p.zero_dtype != "none":
        return f"zero points of dtype {p.zero_dtype}; accepted: none"
    if p.k % K_MULTIPLE:
        return f"k={p.k}; accepted: multiples of {K_MULTIPLE}"
    reason = ranges.size_limit(p)
    if reason is not None:
        return reason
    # Ranges are counted in k blocks of tiles.
    units = k_blocks(p) * -(-p.features // TILES_M[0]) * -(-p.rows // TILES_N[-1])
    if units > ranges.MAX_UNITS:
        tile = f"{TILES_M[0]} features, {TILES_N[-1]} rows and 128 k"
        return f"{units} blocks of {tile}; accepted: at most {ranges.MAX_UNITS}"
    return None


def _config_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    for field, accepted in (("tile_m", TILES_M), ("tile_n", TILES_N), ("chunk", CHUNKS), ("cluster", CLUSTERS)):
        value = getattr(config, field)
        if value not in accepted:
            return f"{field} {value}; accepted: {', '.join(map(str, accepted))}"
    if config.tile_n % config.chunk:
        return f"chunk {config.chunk} of tile_n {config.tile_n}; accepted: a divisor"
    if not _fits(p, config):
        return f"chunk {config.chunk} of tile_n {config.tile_n}; accepted with this weight: at most {config.chunk // 2}"
    if config.tile_m > TILES_M[0] and config.tile_n > WIDEST_OF_256:
        return f"tile_n {config.tile_n} with tile_m {config.tile_m}; accepted: at most {WIDEST_OF_256}"
    reason = _splits_limit(p, config)
    if reason is not None:
        return reason
    given = schedule(p, config)
    least, most = MIN_STAGES[config.parts], max_stages(p, config.tile_n, config.tile_m, config.parts)
    if config.splits > 1:
        reason = given.units_limit() or given.cluster_limit("splits", config.splits, config.parts)
        if reason is not None:
            return reason
        least = max(least, _cluster_stages(p, config))
    if not least <= config.stages <= most:
        return f"stages {config.stages}; accepted with this tile: {least} to {most}"
    if config.splits > 1:
        return None
    accepted = f"multiples of {config.cluster} up to {given.units * config.cluster}"
    return given.units_limit() or given.limit(config.blocks, config.cluster, accepted, "clusters")


def _splits_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    """Of which tiles the ranges can form a cluster, and have two parts."""
    if not 1 <= config.splits <= ranges.MAX_SPLITS:
        return f"splits {config.splits}; accepted: 1 to {ranges.MAX_SPLITS}"
    if config.splits != 1:
        if config.cluster != 1:
            return f"splits {config.splits} with cluster {config.cluster}; accepted: 1"
        if config.tile_n > WIDEST_OF_SPLITS:
            return f"splits {config.splits} of tile_n {config.tile_n}; accepted: 1"
    if config.parts == 1:
        return None
    if config.parts != 2:
        return f"parts {config.parts}; accepted: 1, 2"
    if config.splits == 1:
        return f"parts {config.parts} without splits; accepted: 1"
    if config.tile_m > TILES_M[0] or config.tile_n not in PARTS_TILES_N:
        tiles = f"{TILES_M[0]} by {', '.join(map(str, PARTS_TILES_N))}"
        return f"parts {config.parts} of tile {config.tile_m}x{config.tile_n}; accepted: {tiles}"
    if max_stages(p, config.tile_n, config.tile_m, config.parts) < MIN_STAGES[config.parts]:
        return f"parts {config.parts} of tile {config.tile_m}x{config.tile_n}; accepted with this weight: 1"
    return None


# ---- choices ---------------------------------------------------------------------------------------------------------


def _widths(problem: QuantizedMatmulProblem) -> list[int]:
    """The narrowest tile that holds all rows, and for more rows narrower ones that are not much slower."""
    fitting = [n for n in TILES_N if n >= problem.rows]
    return fitting[:1] + [n for n in TILES_N if min(128, problem.rows / 2) <= n < problem.rows]


def _tiles(problem: QuantizedMatmulProblem) -> Iterator[Config]:
    """Tiles, clusters and parts that `candidates` may use, with one thread block for each tile."""
    for tile_n, tile_m in itertools.product(_widths(problem), TILES_M):
        if tile_m > TILES_M[0] and (tile_n > WIDEST_OF_256 or problem.features <= TILES_M[0]):
            continue
        # Narrow chunks cost waits; they are for tiles that wider ones do not divide.
        chunks = [64 if tile_n % 64 == 0 else 32]
        if tile_n % 128 == 0:
            chunks.append(128)
        # Wide tiles read so much of x that two blocks had better share it.
        clusters = CLUSTERS if tile_n >= 128 and problem.features > tile_m else CLUSTERS[:1]
        for chunk, cluster, parts in itertools.product(chunks, clusters, (1, 2)):
            stages = max_stages(problem, tile_n, tile_m, parts)
            config = Config(tile_n, chunk, stages, cluster, 1, 1, tile_m, parts=parts)
            if not _fits(problem, config):
                continue
            tiles = math.prod(tile_counts(problem, config))
            yield dataclasses.replace(config, blocks=tiles * cluster)


def _in_splits(problem: QuantizedMatmulProblem, tile: Config) -> Iterator[Config]:
    for splits in ranges.SPLITS:
        blocks = math.prod(tile_counts(problem, tile)) * splits
        yield dataclasses.replace(tile, blocks=blocks, waves=0, splits=splits)


def variants(problem: QuantizedMatmulProblem) -> Iterator[Config]:
    """One of each kind that is other device code: what has to compile."""
    for tile in _tiles(problem):
        for config in (tile, *_in_splits(problem, tile)):
            if _config_limit(problem, config) is None:
                yield config


def _schedules(problem: QuantizedMatmulProblem, tile: Config, target: Target) -> list[Config]:
    """Ways to give the tiles to thread blocks."""
    tiles, resident = tile.blocks // tile.cluster, target.cores // tile.cluster
    found = [tile] if tiles <= resident else []
    for other in ranges.schedules(tiles, k_blocks(problem), resident):
        found.append(dataclasses.replace(tile, blocks=other.workers * tile.cluster, waves=other.waves))
    for config in _in_splits(problem, tile):
        if config.blocks <= resident_blocks(target, config.splits):
            found.append(config)
    return [config for config in dict.fromkeys(found) if _config_limit(problem, config) is None]


def candidates(problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
    """Of every tile, cluster and parts the few schedules that the model puts first; the most promising first."""
    return ranges.candidates(
        _tiles(problem),
        lambda tile: _schedules(problem, tile, target),
        lambda config: estimate(problem, config, target),
        4 if problem.rows <= 64 else 3,
    )


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
    """Other schedules of the tile, one stage less, the other chunk, cluster and parts, and the next tiles."""
    width = TILES_N.index(config.tile_n)
    found = [dataclasses.replace(config, stages=config.stages - 1)]
    tiles_n = TILES_N[max(0, width - 1) : width + 2]
    for tile_n, tile_m, chunk, cluster, parts in itertools.product(tiles_n, TILES_M, CHUNKS, CLUSTERS, (1, 2)):
        stages = max_stages(problem, tile_n, tile_m, parts)
        other = Config(tile_n, chunk, stages, cluster, cluster, 1, tile_m, parts=parts)
        if tile_n % chunk:
            continue
        same = (tile_n, chunk, cluster, tile_m) == (config.tile_n, config.chunk, config.cluster, config.tile_m)
        tiles = math.prod(tile_counts(problem, other))
        schedules = _schedules(problem, dataclasses.replace(other, blocks=tiles * cluster), target)
        found += schedules if same else schedules[:2]
    return [other for other in dict.fromkeys(found) if other != config]


# Fitted to an H200's times at 256 to 4096 rows (2.4% rms, 8% at most), before promotion read fewer registers.
_CLOCK = 1.755e9
_MMA_PER_COLUMN = 2  # clocks of a warpgroup's 64 features and 128 k
# Instructions of a warp for 128 k, but for what depends on the tile: decoding and the loop.
_ISSUE = {"int4": 146, "uint4": 106, "float4_e2m1fn": 138, "float8_e4m3fn": 94}
_ISSUE_PER_CHUNK = {1: 40, 2: 16}  # of each period, by sets of partial sums: waits, too; the first one is a guess
_PROMOTION = 0.8  # of an instruction, now that half of them read a register less
# Neither hides much of the other: both need the registers' ports.
_MMA_PART, _ISSUE_PART = 0.826, 0.771
_BLOCK_CLOCKS = 88
_L2_BYTES_PER_CLOCK = 30
_HBM_BYTES = 4.0e12
_PARTIAL_BYTES = 6.7e12  # partial sums stay in L2 for the most part
_LAUNCH_SECONDS = 3.9e-6
_CLUSTER_SECONDS = 0.2e-6  # a larger launch, and two barriers
# Where a tile's ranges are a cluster; as in quantized_tiled, and two times of 64 rows.
_SPLIT_PIECE_SECONDS = 0.25e-6  # the last sums are waited for, and stored
_STORE_BYTES_PER_SM = 66e9  # of fp32 sums
_SPLIT_SECONDS = 0.1e-6  # a larger launch, and waiting for the last: of each block but the first
_SPLIT_BYTES_PER_SM = 55e9  # distributed shared memory
_PARTS_SECONDS = 0.25e-6  # adding up two warpgroups' sums
_IN_PARTS = 0.85  # times a block's clocks, of which more warps hide more
_PIECE_SECONDS = 1.4e-6  # of a piece of work: its last sums are waited for, and stored
_REDUCE_SECONDS = 1.4e-6


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's blocks at the time of tensor cores and instruction issue together, or at that
    of L2, at least the time of device memory, plus launch and second kernel."""
    periods = BLOCK_K // period(problem, config)
    mma = config.consumers * _MMA_PER_COLUMN * config.tile_n
    per_chunk = _ISSUE_PER_CHUNK[2 if config.warpgroups > 2 else sums(problem, config)]  # others hide it
    promotion = config.tile_n / 2 * _PROMOTION + per_chunk * config.tile_n / config.chunk
    issue = config.consumers * (_ISSUE[problem.qtype] + periods * promotion)
    busy = _MMA_PART * mma + _ISSUE_PART * issue + _BLOCK_CLOCKS
    busy *= _IN_PARTS if config.parts > 1 else 1
    load = BLOCK_K * config.tile_n / config.cluster + dequantize.weight_bytes(problem, config.tile_m, BLOCK_K)
    step = max(busy, load / _L2_BYTES_PER_CLOCK) / _CLOCK

    # Rounds of thread blocks, where not all fit.
    resident = resident_blocks(target, config.splits) // config.cluster * config.cluster
    rounds = -(-config.blocks // resident)
    given = schedule(problem, config)
    sent = config.tile_m * config.tile_n * 4 // config.splits  # bytes that a thread block stores, or sends to another
    piece = _PIECE_SECONDS if config.splits == 1 else _SPLIT_PIECE_SECONDS + sent / _STORE_BYTES_PER_SM
    seconds = rounds * (given.blocks_each * step + given.pieces * piece)
    seconds = max(seconds, problem.bytes_moved / _HBM_BYTES) + _LAUNCH_SECONDS
    if config.splits > 1:
        seconds += (config.splits - 1) * (_SPLIT_SECONDS + sent / _SPLIT_BYTES_PER_SM)
        seconds += _PARTS_SECONDS * (config.parts - 1)
    if config.cluster > 1:
        seconds += _CLUSTER_SECONDS
    if is_cut(problem, config):
        slots = config.blocks + given.rest * config.cluster
        seconds += _REDUCE_SECONDS + 2 * slots * config.tile_m * config.tile_n * 4 / _PARTIAL_BYTES
    return seconds


# ---- plan ------------------------------------------------------------------------------------------------------------


def source(problem: QuantizedMatmulProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on dtypes, groups, tile and splits, and of the sizes on what
    `ranges.defines` says, and in clusters that share a tile on the ranges of k."""
    return compiler.Source(
        "quantized/fp8.cu",
        (
            ("FORMAT", FORMAT_CODES[problem.qtype]),
            ("HALF", 1),
            ("OUT", OUT_CODES[problem.out_dtype]),
            ("SCALE_TYPE", TYPE_CODES[problem.scale_dtype]),
            ("GROUP", dequantize.group_code(problem)),
            ("PERIOD", period(problem, config)),
            ("CONSUMERS", config.consumers),
            ("PARTS", config.parts),
            ("SPLITS", config.splits),
            *schedule(problem, config).defines(config.splits),
            ("TILE_N", config.tile_n),
            ("CHUNK", config.chunk),
            ("STAGES", config.stages),
            ("CLUSTER", config.cluster),
            *ranges.defines(problem, tile_counts(problem, config)[1]),
        ),
        declarations(ReduceArgs),
    )


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: x, words, scale, result, workspace."""
    buffers = dequantize.buffers(problem)
    buffers.append(plan.Buffer(workspace_bytes(problem, config), 256))
    out, workspace = 3, 4

    # Pairs of e4m3 as elements of 16 bits: the map only moves bytes.
    x_map = plan.TiledMap(
        buffer=0,
        dtype="float16",
        dims=(problem.k // 2, problem.rows),
        strides=(problem.k,),
        box=(BLOCK_K // 2, config.tile_n // config.cluster),
    )
    args = ranges.args(problem, tile_counts(problem, config), schedule(problem, config))
    launches = [
        plan.Launch(
            kernel="quantized_fp8",
            grid=(config.blocks, 1, 1),
            block=(128 * (config.warpgroups + 1), 1, 1),
            params=(plan.MapParam(0), args, *(plan.Pointer(buffer) for buffer in (1, 2, out, workspace))),
            shared_bytes=shared_bytes(problem, config) - BARRIER_BYTES,
            cluster=(config.cluster * config.splits, 1, 1),
        )
    ]
    if is_cut(problem, config):
        tile, given = (config.tile_m * config.cluster, config.tile_n), schedule(problem, config)
        launches.append(ranges.reduce_launch(args, given, tile, plan.Pointer(workspace), plan.Pointer(out)))
    return plan.DevicePlan(source(problem, config), tuple(buffers), (x_map,), tuple(launches), f"{name} {config}")
