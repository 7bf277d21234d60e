"""Kernel family: products of e4m3 activations with packed quantized weights, on Hopper's fp8 tensor cores (device code:
mixed_fp8.cu).

Weights of 4 bits, and e4m3 ones, are exact in e4m3 and are decoded into the A registers of WGMMA; the activation comes
by TMA as it lies in memory. The tensor cores add e4m3 products with few bits, so their sums of 32, 64 or 128 k go,
times the group's scale, onto fp32 accumulators (as in DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The sums of one
part of the tile are added up while the products of the next one, or another warpgroup's, run. The k blocks of the
output's tiles can be cut into ranges, as in mixed_wgmma; clusters of two thread blocks share the activation by
multicast. The result is deterministic.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jax import numpy as jnp

from jax_splitk import compiler, plan
from jax_splitk.kernels.dequantize import FORMAT_CODES
from jax_splitk.kernels.split_k import OUT_CODES
from jax_splitk.quantized.problem import QuantizedMatmulProblem
from jax_splitk.target import Target, hopper_limit

name = "mixed_fp8"
implementation = "cutlass"
platform = "cuda"
ABI = 1

BLOCK_K = 128  # two tiles of the packed weight
SLOT = 64  # features of a warpgroup
SHARED_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of the ring
BARRIER_BYTES = 256  # static shared memory
MAX_STAGES = 8
MIN_STAGES = 2
STAGING_BYTES = 4 * 16 * 48  # of a warpgroup's results on their way to memory
INT32_MAX = 2**31 - 1
REDUCE_COLUMNS = 16  # rows of x of a thread block of reduce_ranges
K_MULTIPLE = 16  # TMA's rows are multiples of 16 bytes

X_DTYPE = "float8_e4m3fn"
OUT_DTYPES = ("bfloat16", "float16")
QTYPES = ("int4", "uint4", "float4_e2m1fn", "float8_e4m3fn")
TILES_M = (128, 256)
TILES_N = (32, 64, 96, 128, 192, 256)
MAX_REGISTERS = 232
WIDEST_OF_256 = 64  # with four warpgroups a thread has few registers
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
      tile_m: features of a thread block's output tile, 64 for each warpgroup; see `TILES_M`.
    """

    tile_n: int
    chunk: int
    stages: int
    cluster: int
    blocks: int
    waves: int
    tile_m: int = 128

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply (CONSUMERS in the device code)."""
        return self.tile_m // SLOT

    @property
    def ranges(self) -> int:
        """Clusters, which are what tiles and ranges are given to."""
        return self.blocks // self.cluster


def per_channel(problem: QuantizedMatmulProblem) -> bool:
    return problem.group_size == problem.k


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
    return 2 if _registers(problem, config, 2) <= (224 if config.consumers == 2 else 80) else 1


def _fits(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether one set of partial sums fits in registers, with the scales of what is decoded."""
    return _registers(problem, config, 1) + (problem.scale_dtype == "float32") <= MAX_REGISTERS


def _weight_bytes(problem: QuantizedMatmulProblem, tile_m: int) -> int:
    """Words and scales of a stage."""
    groups = 0 if per_channel(problem) else BLOCK_K // problem.group_size
    return tile_m * (BLOCK_K * problem.bits // 8 + groups * jnp.dtype(problem.scale_dtype).itemsize)


def _stage_bytes(problem: QuantizedMatmulProblem, tile_n: int, tile_m: int) -> int:
    """STAGE_BYTES and EXTRA_BYTES of the device code."""
    return BLOCK_K * tile_n + _weight_bytes(problem, tile_m)


def _fixed_bytes(tile_m: int) -> int:
    """Shared memory beside the ring."""
    return tile_m // SLOT * STAGING_BYTES + ALIGNMENT_BYTES + BARRIER_BYTES


def shared_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Shared memory of a thread block."""
    return config.stages * _stage_bytes(problem, config.tile_n, config.tile_m) + _fixed_bytes(config.tile_m)


def max_stages(problem: QuantizedMatmulProblem, tile_n: int, tile_m: int = TILES_M[0]) -> int:
    """The deepest ring that fits in shared memory."""
    room = SHARED_BYTES - _fixed_bytes(tile_m)
    return min(MAX_STAGES, room // _stage_bytes(problem, tile_n, tile_m))


def tile_counts(problem: QuantizedMatmulProblem, config: Config) -> tuple[int, int]:
    """(a cluster's tiles along the features, tiles along the rows)."""
    return -(-problem.features // (config.tile_m * config.cluster)), -(-problem.rows // config.tile_n)


def k_blocks(problem: QuantizedMatmulProblem) -> int:
    return -(-problem.k // BLOCK_K)


def rest_tiles(problem: QuantizedMatmulProblem, config: Config) -> int:
    """A cluster's tiles that are cut into ranges."""
    return math.prod(tile_counts(problem, config)) - config.waves * config.ranges


def range_blocks(problem: QuantizedMatmulProblem, config: Config) -> int:
    """k blocks of a range; 0 without ranges."""
    return -(-rest_tiles(problem, config) * k_blocks(problem) // config.ranges)


def is_cut(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether any tile has more than one range, so that partial sums meet in the workspace."""
    return rest_tiles(problem, config) > 0 and range_blocks(problem, config) % k_blocks(problem) != 0


def workspace_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Two slots of a tile for each range."""
    return 2 * config.blocks * config.tile_m * config.tile_n * 4 if is_cut(problem, config) else 0


# ---- legality --------------------------------------------------------------------------------------------------------


def supports(problem: QuantizedMatmulProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    reason = hopper_limit(target) or _problem_limit(problem)
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
    for what, size in (("rows of x", p.rows), ("k", p.k), ("features", p.features)):
        if not 0 < size <= INT32_MAX - 256:
            return f"{size} {what}; accepted: 1 to {INT32_MAX - 256}"
    # Ranges are counted in k blocks of tiles.
    units = k_blocks(p) * -(-p.features // TILES_M[0]) * -(-p.rows // TILES_N[-1])
    if units > INT32_MAX // 2:
        tile = f"{TILES_M[0]} features, {TILES_N[-1]} rows and 128 k"
        return f"{units} blocks of {tile}; accepted: at most {INT32_MAX // 2}"
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
    most = max_stages(p, config.tile_n, config.tile_m)
    if not MIN_STAGES <= config.stages <= most:
        return f"stages {config.stages}; accepted with this tile: {MIN_STAGES} to {most}"
    tiles = math.prod(tile_counts(p, config))
    units = tiles * k_blocks(p)
    if units > INT32_MAX // 2:
        return f"{units} blocks of this tile and 128 k; accepted: at most {INT32_MAX // 2}"
    if config.blocks % config.cluster or not 1 <= config.ranges <= units:
        each = f"multiples of {config.cluster} up to {units * config.cluster}"
        return f"blocks {config.blocks}; accepted for {tiles} tiles of {k_blocks(p)} k blocks: {each}"
    if not 0 <= config.waves * config.ranges <= tiles:
        return (
            f"waves {config.waves} of {config.ranges} clusters; accepted for {tiles} tiles: "
            f"0 to {tiles // config.ranges}"
        )
    if config.waves == 0 and whole_blocks(p, config) != config:
        nearest = whole_blocks(p, config).blocks
        return f"blocks {config.blocks} leaves some without any of {units} k blocks; use {nearest}"
    return None


# ---- choices ---------------------------------------------------------------------------------------------------------


def _widths(problem: QuantizedMatmulProblem) -> list[int]:
    """The narrowest tile that holds all rows, and for more rows narrower ones that are not much slower."""
    fitting = [n for n in TILES_N if n >= problem.rows]
    return fitting[:1] + [n for n in TILES_N if min(128, problem.rows / 2) <= n < problem.rows]


def variants(problem: QuantizedMatmulProblem) -> Iterator[Config]:
    """Tiles and clusters that `candidates` may use, with one thread block for each tile: what has to compile."""
    for tile_n, tile_m in itertools.product(_widths(problem), TILES_M):
        if tile_m > TILES_M[0] and (tile_n > WIDEST_OF_256 or problem.features <= TILES_M[0]):
            continue
        # Narrow chunks cost waits; they are for tiles that wider ones do not divide.
        chunks = [64 if tile_n % 64 == 0 else 32]
        if tile_n % 128 == 0:
            chunks.append(128)
        # Wide tiles read so much of x that two blocks had better share it.
        clusters = CLUSTERS if tile_n >= 128 and problem.features > tile_m else CLUSTERS[:1]
        for chunk, cluster in itertools.product(chunks, clusters):
            config = Config(tile_n, chunk, max_stages(problem, tile_n, tile_m), cluster, 1, 1, tile_m)
            if not _fits(problem, config):
                continue
            tiles = math.prod(tile_counts(problem, config))
            yield dataclasses.replace(config, blocks=tiles * cluster)


def whole_blocks(problem: QuantizedMatmulProblem, config: Config) -> Config:
    """`config` with the nearest number of thread blocks not above its own that leaves none without work."""
    units = math.prod(tile_counts(problem, config)) * k_blocks(problem)
    config = dataclasses.replace(config, blocks=max(1, min(config.ranges, units)) * config.cluster)
    if config.waves:
        return config
    return dataclasses.replace(config, blocks=-(-units // range_blocks(problem, config)) * config.cluster)


def _schedules(problem: QuantizedMatmulProblem, variant: Config, target: Target) -> list[Config]:
    """Ways to give the tiles of a variant to thread blocks."""
    tiles = variant.ranges
    resident = target.cores // variant.cluster
    waves = tiles // resident
    found = []

    def add(ranges: int, waves: int) -> None:
        found.append(dataclasses.replace(variant, blocks=ranges * variant.cluster, waves=waves))

    if tiles <= resident:
        add(tiles, 1)
    each = -(-tiles // resident)
    if each > 1 and tiles % each == 0:
        add(tiles // each, each)
    # Ranges for all tiles, or for those after some whole waves.
    for whole in sorted({0, max(0, waves - 1), waves}):
        add(resident, whole)
    # Each tile cut into the same number of ranges.
    for splits in range(2, resident // tiles + 1):
        if k_blocks(problem) % splits == 0:
            add(tiles * splits, 0)
    found = [whole_blocks(problem, config) for config in found]
    return [config for config in dict.fromkeys(found) if _config_limit(problem, config) is None]


def candidates(problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
    """Of every variant the few schedules that the model puts first; the most promising first."""
    found: dict[Config, float] = {}
    for variant in variants(problem):
        schedules = {config: estimate(problem, config, target) for config in _schedules(problem, variant, target)}
        count = 4 if problem.rows <= 64 else 3
        found |= {config: schedules[config] for config in sorted(schedules, key=schedules.__getitem__)[:count]}
    return sorted(found, key=found.__getitem__)


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
    """Other schedules of the tile, one stage less, the other chunk and cluster, and the next tiles."""
    width = TILES_N.index(config.tile_n)
    found = [dataclasses.replace(config, stages=config.stages - 1)]
    tiles_n = TILES_N[max(0, width - 1) : width + 2]
    for tile_n, tile_m, chunk, cluster in itertools.product(tiles_n, TILES_M, CHUNKS, CLUSTERS):
        other = Config(tile_n, chunk, max_stages(problem, tile_n, tile_m), cluster, cluster, 1, tile_m)
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
_PIECE_SECONDS = 1.4e-6  # of a piece of work: its last sums are waited for, and stored
_REDUCE_SECONDS = 1.4e-6


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's blocks at the time of tensor cores and instruction issue together, or at that
    of L2, at least the time of device memory, plus launch and second kernel."""
    periods = BLOCK_K // period(problem, config)
    mma = config.consumers * _MMA_PER_COLUMN * config.tile_n
    per_chunk = _ISSUE_PER_CHUNK[2 if config.consumers > 2 else sums(problem, config)]  # others hide it
    promotion = config.tile_n / 2 * _PROMOTION + per_chunk * config.tile_n / config.chunk
    issue = config.consumers * (_ISSUE[problem.qtype] + periods * promotion)
    busy = _MMA_PART * mma + _ISSUE_PART * issue + _BLOCK_CLOCKS
    load = BLOCK_K * config.tile_n / config.cluster + _weight_bytes(problem, config.tile_m)
    step = max(busy, load / _L2_BYTES_PER_CLOCK) / _CLOCK

    # Rounds of thread blocks, where not all fit.
    rounds = -(-config.blocks // (target.cores // config.cluster * config.cluster))
    blocks_each = config.waves * k_blocks(problem) + range_blocks(problem, config)
    pieces = config.waves + -(-range_blocks(problem, config) // k_blocks(problem))
    seconds = rounds * (blocks_each * step + pieces * _PIECE_SECONDS)
    seconds = max(seconds, problem.bytes_moved / _HBM_BYTES) + _LAUNCH_SECONDS
    if config.cluster > 1:
        seconds += _CLUSTER_SECONDS
    if is_cut(problem, config):
        slots = config.blocks + rest_tiles(problem, config) * config.cluster
        seconds += _REDUCE_SECONDS + 2 * slots * config.tile_m * config.tile_n * 4 / _PARTIAL_BYTES
    return seconds


# ---- plan ------------------------------------------------------------------------------------------------------------


def source(problem: QuantizedMatmulProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on dtypes, groups and tile, not on sizes or the schedule."""
    return compiler.Source(
        "mixed_fp8.cu",
        (
            ("FORMAT", FORMAT_CODES[problem.qtype]),
            ("HALF", 1),
            ("OUT", OUT_CODES[problem.out_dtype]),
            ("SCALE_TYPE", OUT_CODES[problem.scale_dtype]),
            ("GROUP", 0 if per_channel(problem) else problem.group_size),
            ("PERIOD", period(problem, config)),
            ("CONSUMERS", config.consumers),
            ("TILE_N", config.tile_n),
            ("CHUNK", config.chunk),
            ("STAGES", config.stages),
            ("CLUSTER", config.cluster),
        ),
    )


def _args(problem: QuantizedMatmulProblem, config: Config) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order."""
    tiles_m, tiles_n = tile_counts(problem, config)
    return plan.Int32Struct(
        (
            *(problem.rows, problem.features),
            *(problem.feature_tiles, problem.k_tiles, problem.groups, k_blocks(problem)),
            *(tiles_m, tiles_n, config.waves, range_blocks(problem, config), int(tiles_n == 1)),
        )
    )


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: x, words, scale, result, workspace."""
    shapes = [(problem.x_shape, problem.x_dtype), (problem.words_shape, "uint32")]
    shapes += [(problem.scale_shape, problem.scale_dtype), (problem.out_shape, problem.out_dtype)]
    buffers = [plan.Buffer(math.prod(shape) * jnp.dtype(dtype).itemsize, 16) for shape, dtype in shapes]
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
    args = _args(problem, config)
    launches = [
        plan.Launch(
            kernel="mixed_fp8",
            grid=(config.blocks, 1, 1),
            block=(128 * (config.consumers + 1), 1, 1),
            params=(plan.MapParam(0), args, *(plan.Pointer(buffer) for buffer in (1, 2, out, workspace))),
            shared_bytes=shared_bytes(problem, config) - BARRIER_BYTES,
            cluster=(config.cluster, 1, 1),
        )
    ]
    if is_cut(problem, config):
        parts = config.tile_n // REDUCE_COLUMNS * config.consumers * config.cluster
        before = plan.Int32Struct((config.waves * config.ranges,))
        reduce = plan.Launch(
            kernel="reduce_ranges",
            grid=(rest_tiles(problem, config) * parts, 1, 1),
            block=(128, 1, 1),
            params=(args, before, plan.Pointer(workspace), plan.Pointer(out)),
            programmatic=True,
        )
        launches.append(reduce)
    return plan.DevicePlan(source(problem, config), tuple(buffers), (x_map,), tuple(launches), f"{name} {config}")
