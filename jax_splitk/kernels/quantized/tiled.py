"""Kernel family: products with packed quantized weights on Hopper by WGMMA (device code: quantized/tiled.cu).

Weights are dequantized into the A registers of WGMMA while the tensor cores work on those before; the activation
comes by TMA. The scale of a group goes either into the weight, which is then rounded to the activation's dtype, or onto
the fp32 sum of the group. The k blocks of the output's tiles can be cut into ranges of equal length, one for each
thread block, wherever tiles begin or end ("stream-k", Osama et al., arXiv:2301.03598); a second kernel, launched with
programmatic dependent launch, adds the sums of tiles that were cut. Or each tile is cut into the same number of ranges,
whose thread blocks form a cluster and add their sums through distributed shared memory; there two warpgroups can share
features and take turns with the k blocks. All add in a fixed order: the result is deterministic, bit for bit.

Mixed-input products with the weight in registers: FRPC and Marlin (Frantar et al., arXiv:2408.11743) for SM80, and
CUTLASS's mixed-input collective for SM90.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jax_splitk.kernels.device.split_k import OUT_CODES, ReduceArgs
from jax_splitk.kernels.device.structs import declarations
from jax_splitk.kernels.quantized import dequantize, ranges
from jax_splitk.kernels.quantized.dequantize import FORMAT_CODES, TYPE_CODES, has_zero, per_channel
from jax_splitk.kernels.quantized.ranges import BLOCK_K, INT32_MAX, SLOT, k_blocks
from jax_splitk.problems.quantized_matmul import OUT_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime import compiler, plan
from jax_splitk.runtime.target import Target, hopper_refusal, resident_blocks

name = "quantized_tiled"
implementation = "cutlass"
platform = "cuda"
ABI = 3

SHARED_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of the ring
BARRIER_BYTES = 256  # static shared memory
MAX_STAGES = {1: 8, 2: 10}  # by parts, which hold two stages each
MIN_STAGES = {1: 2, 2: 3}  # by parts: a warpgroup waits for its next stage before it gives back the one it has
STAGING_BYTES = 16 * 48  # of a warp, for 16-bit results
PREPARE_WARPS = 4
SUM_PERIOD = 128  # k of a partial sum where there is one scale for all k

X_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
SCALINGS = ("weight", "sum", "channel")
TILES_M = (64, 128, 256)
TILES_N = (16, 32, 64, 96, 128, 192, 256)
PARTS_TILES_M, PARTS_TILES_N = (64, 128), (32, 64)
# The widest tile_n whose accumulators leave room for the rest, by consumer warpgroups: one set of them, or two ("sum").
MAX_TILE_N = {1: 256, 2: 256, 4: 64}
MAX_TILE_N_SUM = {1: 128, 2: 128, 4: 16}
MAX_TILE_N_SUM_32 = 64  # four sums of 32 k in a loop need more registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product with a quantized weight is computed.

    Attributes:
      tile_m, tile_n: output tile of a thread block, features by rows of x; see `TILES_M`, `TILES_N`. A warpgroup has 64
        features.
      stages: depth of the shared-memory ring, in blocks of 128 k.
      scaling: where scales are applied: "weight" (the weight is rounded to the activation's dtype), "sum" (fp32 sums of
        a group), or "channel" (fp32 sums of all k).
      blocks: thread blocks.
      waves: whole tiles that each thread block computes; the k blocks of all other tiles are cut into equal ranges, one
        for each thread block.
      cluster: thread blocks of a cluster, which are the ranges of a tile; 1 if ranges meet in the workspace.
      parts: warpgroups that share 64 features of a cluster's tile, and take turns with the k blocks of a range; 1 or 2.
    """

    tile_m: int
    tile_n: int
    stages: int
    scaling: str
    blocks: int
    waves: int
    cluster: int = 1
    parts: int = 1

    @property
    def consumers(self) -> int:
        """Features of a thread block, in 64 (CONSUMERS in the device code)."""
        return self.tile_m // SLOT

    @property
    def warpgroups(self) -> int:
        """Those that multiply (WARPGROUPS in the device code)."""
        return self.consumers * self.parts


def period(problem: QuantizedMatmulProblem) -> int:
    """k of an fp32 partial sum with the scaling "sum" (PERIOD in the device code)."""
    return SUM_PERIOD if per_channel(problem) else problem.group_size


def _stage_bytes(problem: QuantizedMatmulProblem, tile_m: int, tile_n: int) -> int:
    """Of x, words, scales, zero points and sums of x: STAGE_BYTES and EXTRA_BYTES of the device code."""
    sums = BLOCK_K // period(problem) * tile_n * 4 if has_zero(problem) else 0
    return BLOCK_K * 2 * tile_n + dequantize.weight_bytes(problem, tile_m, BLOCK_K) + sums


def _after_ring(problem: QuantizedMatmulProblem, tile_m: int, tile_n: int, parts: int) -> int:
    """Shared memory for results on their way to memory, and for sums on their way from one part to the other."""
    warpgroups = tile_m // SLOT * parts
    staging = 0 if problem.out_dtype == "float32" else 4 * warpgroups * STAGING_BYTES
    return staging + ranges.part_bytes(tile_m, tile_n, parts)


def shared_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Shared memory of a thread block."""
    ring = config.stages * _stage_bytes(problem, config.tile_m, config.tile_n)
    after = _after_ring(problem, config.tile_m, config.tile_n, config.parts)
    return ring + after + ALIGNMENT_BYTES + BARRIER_BYTES


def _cluster_stages(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that hold the sums which the blocks of a cluster send to one of them."""
    received = ranges.received_bytes(config.tile_m, config.tile_n, config.cluster)
    return -(-received // _block_bytes(problem, config))


def _block_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Of x and words: STAGE_BYTES of the device code."""
    return BLOCK_K * (2 * config.tile_n + config.tile_m * problem.bits // 8)


def max_stages(problem: QuantizedMatmulProblem, tile_m: int, tile_n: int, ctas_per_sm: int = 1, parts: int = 1) -> int:
    """The deepest ring that fits in shared memory."""
    # A KiB of each thread block is the system's.
    room = (SHARED_BYTES + 1024) // ctas_per_sm - 1024 - ALIGNMENT_BYTES - BARRIER_BYTES
    room -= _after_ring(problem, tile_m, tile_n, parts)
    return min(MAX_STAGES[parts], room // _stage_bytes(problem, tile_m, tile_n))


def ctas_per_sm(problem: QuantizedMatmulProblem, config: Config) -> int:
    """2 where shared memory and the registers allow it (CTAS_PER_SM in the device code)."""
    crowded = config.scaling == "sum" and (problem.bits == 8 or period(problem) == 128)
    widest = 16 if crowded else 32
    small = config.warpgroups <= 2 and config.tile_n <= (64 if config.warpgroups == 1 else widest)
    most = max_stages(problem, config.tile_m, config.tile_n, 2, config.parts)
    return 2 if small and config.stages <= most else 1


def tile_counts(problem: QuantizedMatmulProblem, config: Config) -> tuple[int, int]:
    """(tiles along the features, tiles along the rows)."""
    return -(-problem.features // config.tile_m), -(-problem.rows // config.tile_n)


def schedule(problem: QuantizedMatmulProblem, config: Config) -> ranges.Schedule:
    """A thread block is a worker, of a cluster too."""
    return ranges.Schedule(math.prod(tile_counts(problem, config)), k_blocks(problem), config.blocks, config.waves)


def is_cut(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether any tile has more than one range, so that partial sums meet in the workspace."""
    return config.cluster == 1 and schedule(problem, config).is_cut


def needs_copy(problem: QuantizedMatmulProblem) -> bool:
    """Whether x is not as TMA can load it for WGMMA: rows of 16 bytes, elements of 16 bits."""
    return problem.k % 8 != 0 or problem.x_dtype == "float8_e4m3fn"


def _prepared(problem: QuantizedMatmulProblem) -> bool:
    """Whether prepare_x runs first (PREPARED in the device code)."""
    return needs_copy(problem) or has_zero(problem)


def _operand_dtype(problem: QuantizedMatmulProblem) -> str:
    """Of x as WGMMA reads it: fp16 holds every e4m3."""
    return "float16" if problem.x_dtype == "float8_e4m3fn" else problem.x_dtype


# ---- workspace: a copy of x, sums of x, slots of partial sums --------------------------------------------------------


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _copy_bytes(problem: QuantizedMatmulProblem) -> int:
    return _aligned(problem.rows * _pitch(problem) * 2) if needs_copy(problem) else 0


def _pitch(problem: QuantizedMatmulProblem) -> int:
    return -(-problem.k // 8) * 8


def _padded_rows(problem: QuantizedMatmulProblem, config: Config) -> int:
    return tile_counts(problem, config)[1] * config.tile_n


def _sums_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    if not has_zero(problem):
        return 0
    return _aligned(k_blocks(problem) * (BLOCK_K // period(problem)) * _padded_rows(problem, config) * 4)


def workspace_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """x as TMA can load it, sums of x for zero points, and two slots of a tile for each range."""
    slots = 2 * config.blocks * config.tile_m * config.tile_n * 4 if is_cut(problem, config) else 0
    return _copy_bytes(problem) + _sums_bytes(problem, config) + slots


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
    if p.x_dtype not in X_DTYPES:
        return f"x of dtype {p.x_dtype}; accepted: {', '.join(X_DTYPES)}"
    if p.out_dtype not in OUT_DTYPES:
        return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(OUT_DTYPES)}"
    reason = ranges.size_limit(p)
    if reason is not None:
        return reason
    # Ranges are counted in k blocks of tiles; the smallest tile of the most general scaling.
    units = k_blocks(p) * -(-p.features // 128) * -(-p.rows // 128)
    if units > ranges.MAX_UNITS:
        return f"{units} blocks of 128 features, rows and k; accepted: at most {ranges.MAX_UNITS}"
    if _prepared(p) and (p.rows + 256) * k_blocks(p) > INT32_MAX:
        copied = f"dtype {p.x_dtype}" if p.k % 8 == 0 else f"k={p.k} (no multiple of 8)"
        what = "zero points" if has_zero(p) else copied
        return f"{(p.rows + 256) * k_blocks(p)} blocks of 128 k of x with {what}; accepted: at most {INT32_MAX}"
    return None


def scaling_limit(p: QuantizedMatmulProblem, scaling: str) -> str | None:
    """Why `scaling` does not give the problem's result as it is promised; None where it does."""
    if scaling == "weight":
        dtypes = (p.x_dtype, p.out_dtype, p.scale_dtype)
        if per_channel(p):
            return "scaling 'weight' with one group; accepted: 'sum', 'channel'"
        # The range of float16 does not hold every weight; and only there, and in float32, would rounding the weight
        # be an error beyond that of rounding the result.
        if dtypes != ("bfloat16",) * 3:
            return f"scaling 'weight' with dtypes {', '.join(dtypes)}; accepted: bfloat16 for x, result and scale"
        if has_zero(p):
            return f"scaling 'weight' with zero points of dtype {p.zero_dtype}; accepted: none"
    elif scaling == "channel":
        if not per_channel(p):
            return f"scaling 'channel' with groups of {p.group_size}; accepted: one group of k={p.k}"
        if has_zero(p):
            return f"scaling 'channel' with zero points of dtype {p.zero_dtype}; accepted: none"
        if p.out_dtype == "float32":  # WGMMA truncates its sums: long chains of them only where rounding hides it
            return "scaling 'channel' with a float32 result; accepted: bfloat16, float16"
    elif scaling != "sum":
        return f"scaling {scaling!r}; accepted: {', '.join(map(repr, SCALINGS))}"
    return None


def max_tile_n(p: QuantizedMatmulProblem, scaling: str, warpgroups: int) -> int:
    """The widest tile whose accumulators fit in registers."""
    if scaling != "sum":
        return MAX_TILE_N[warpgroups]
    widest = MAX_TILE_N_SUM[warpgroups]
    return min(widest, MAX_TILE_N_SUM_32) if period(p) == 32 else widest


def _config_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    if config.tile_m not in TILES_M or config.tile_n not in TILES_N:
        accepted = f"{', '.join(map(str, TILES_M))} by {', '.join(map(str, TILES_N))}"
        return f"tile {config.tile_m}x{config.tile_n}; accepted: {accepted}"
    reason = scaling_limit(p, config.scaling)
    if reason is not None:
        return reason
    reason = _parts_limit(p, config)
    if reason is not None:
        return reason
    widest = max_tile_n(p, config.scaling, config.warpgroups)
    if config.tile_n > widest:
        shared = "" if config.parts == 1 else f", {config.parts} parts"
        return (
            f"tile_n {config.tile_n} with tile_m {config.tile_m}{shared} and scaling {config.scaling!r}; "
            f"at most {widest}"
        )
    most = max_stages(p, config.tile_m, config.tile_n, parts=config.parts)
    least = MIN_STAGES[config.parts]
    if not least <= config.stages <= most:
        return f"stages {config.stages}; accepted with this tile: {least} to {most}"
    given = schedule(p, config)
    reason = given.units_limit()
    if reason is not None:
        return reason
    if config.cluster != 1:
        reason = given.cluster_limit("cluster", config.cluster, config.parts)
        if reason is not None:
            return reason
        least = max(least, _cluster_stages(p, config))
        if config.stages < least:
            return (
                f"stages {config.stages} with clusters of {config.cluster}; accepted with this tile: {least} to {most}"
            )
        return None
    return given.limit(config.blocks, 1, f"1 to {given.units}", "blocks")


def _parts_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    if config.parts == 1:
        return None
    if config.parts != 2:
        return f"parts {config.parts}; accepted: 1, 2"
    if config.cluster == 1:
        return f"parts {config.parts} without clusters; accepted: 1"
    if config.tile_m not in PARTS_TILES_M or config.tile_n not in PARTS_TILES_N:
        tiles = f"{', '.join(map(str, PARTS_TILES_M))} by {', '.join(map(str, PARTS_TILES_N))}"
        return f"parts {config.parts} of tile {config.tile_m}x{config.tile_n}; accepted: {tiles}"
    if max_stages(p, config.tile_m, config.tile_n, parts=config.parts) < MIN_STAGES[config.parts]:
        return f"parts {config.parts} of tile {config.tile_m}x{config.tile_n}; accepted with this weight: 1"
    return None


# ---- choices ---------------------------------------------------------------------------------------------------------


def scalings(problem: QuantizedMatmulProblem) -> list[str]:
    """Those that are legal, the fastest first."""
    order = ("weight", "channel", "sum")
    return [scaling for scaling in order if scaling_limit(problem, scaling) is None]


def _tiles(problem: QuantizedMatmulProblem) -> Iterator[Config]:
    """Tiles, depths and parts that `candidates` may use, with a thread block for each tile."""
    scaling = scalings(problem)[0]
    fitting = [n for n in TILES_N if n >= problem.rows]
    # The narrowest tile that holds all rows, and for more rows the widest ones.
    widths = fitting[:1] if fitting else []
    widths += [n for n in (64, 96, 128, 192, 256) if n < problem.rows]
    for tile_m in TILES_M:
        if tile_m // 2 >= problem.features and tile_m > SLOT:
            continue  # half of it is padding
        if tile_m == SLOT and problem.features > SLOT and problem.rows > 64:
            continue
        for tile_n in widths:
            if tile_n > max_tile_n(problem, scaling, tile_m // SLOT):
                continue
            for parts, together in itertools.product((1, 2), (2, 1)):
                stages = max_stages(problem, tile_m, tile_n, together, parts)
                config = Config(tile_m, tile_n, stages, scaling, 1, 1, parts=parts)
                if stages >= MIN_STAGES[parts] and ctas_per_sm(problem, config) == together:
                    yield dataclasses.replace(config, blocks=math.prod(tile_counts(problem, config)))


def _clusters(problem: QuantizedMatmulProblem, tile: Config) -> Iterator[Config]:
    for size in ranges.SPLITS:
        yield dataclasses.replace(tile, blocks=math.prod(tile_counts(problem, tile)) * size, waves=0, cluster=size)


def variants(problem: QuantizedMatmulProblem) -> Iterator[Config]:
    """One of each kind that is other device code: what has to compile."""
    for tile in _tiles(problem):
        for config in (tile, *_clusters(problem, tile)):
            if _config_limit(problem, config) is None:
                yield config


def _schedules(problem: QuantizedMatmulProblem, tile: Config, target: Target) -> list[Config]:
    """Ways to give the tiles to thread blocks."""
    tiles = math.prod(tile_counts(problem, tile))
    resident = target.cores * ctas_per_sm(problem, tile)
    found = [tile]
    for other in ranges.schedules(tiles, k_blocks(problem), resident):
        found.append(dataclasses.replace(tile, blocks=other.workers, waves=other.waves))
    for config in _clusters(problem, tile):
        if config.blocks <= resident_blocks(target, config.cluster, resident // target.cores):
            found.append(config)
    return [config for config in dict.fromkeys(found) if _config_limit(problem, config) is None]


def candidates(problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
    """Of every tile, depth and parts the few schedules that the model puts first; the most promising first."""
    return ranges.candidates(
        _tiles(problem),
        lambda tile: _schedules(problem, tile, target),
        lambda config: estimate(problem, config, target),
        3,
    )


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
    """Other schedules of the tile, one stage less, and the next tiles."""
    found = _schedules(problem, _whole_tiles(problem, config), target)
    found.append(dataclasses.replace(config, stages=config.stages - 1))
    width, height = TILES_N.index(config.tile_n), TILES_M.index(config.tile_m)
    others = [(config.tile_m, n) for n in TILES_N[max(0, width - 1) : width + 2]]
    others += [(m, config.tile_n) for m in TILES_M[max(0, height - 1) : height + 2]]
    for tile_m, tile_n in others:
        if (tile_m, tile_n) != (config.tile_m, config.tile_n):
            stages = max_stages(problem, tile_m, tile_n, parts=config.parts)
            other = dataclasses.replace(config, tile_m=tile_m, tile_n=tile_n, stages=stages)
            found += _schedules(problem, _whole_tiles(problem, other), target)[:2]
    return [other for other in dict.fromkeys(found) if other != config]


def _whole_tiles(problem: QuantizedMatmulProblem, config: Config) -> Config:
    tiles = math.prod(tile_counts(problem, config))
    return dataclasses.replace(config, blocks=tiles, waves=1, cluster=1)


# Fitted to an H200, int4 weights and 64 to 4096 rows. Long runs take up to a tenth longer: the clock falls.
_CLOCK = 1.755e9
_MMA_PER_COLUMN = 0.5  # clocks of m64nNk16 for each of N
_MMA_LEAST = 13.0
# Clocks of a scheduler for what a warp issues for a tile of 16 features and 64 k: bit operations take two.
_ISSUE = {"int4": 56, "uint4": 56, "int8": 80, "float8_e4m3fn": 120, "float4_e2m1fn": 90, "nf4": 150}
_ISSUE_SCALE = 20  # "weight"
_ISSUE_FOLDED = 8  # the same for integers
_ISSUE_LOOP = 32
_FEW_WARPS = {1: 1.6, 2: 1.1}  # longer, where so few warps of a scheduler hide each other's waits
# The part of the shorter of tensor cores' and issue time that the longer does not hide, by which one is the longer:
# of issue time the less, the shorter it is.
_BEHIND_MMA = 0.7
_BEHIND_ISSUE = 0.68
_L2_BYTES_PER_CLOCK = 54
_HBM_BYTES = 4.0e12
_PARTIAL_BYTES = 6.7e12  # partial sums stay in L2 for the most part
_LAUNCH_SECONDS = 3.1e-6  # the first stage's load comes on top
_PIECE_SECONDS = 0.2e-6  # of a piece of work: its last sums are waited for, and stored
_STORE_BYTES_PER_SM = 66e9  # of fp32 sums
_REDUCE_SECONDS = 1.5e-6
_PREPARE_SECONDS = 2.0e-6
_CLUSTER_SECONDS = 0.1e-6  # a larger launch, and waiting for the last: of each block but the first
_PARTS_SECONDS = 0.25e-6  # adding up two warpgroups' sums
_CLUSTER_BYTES_PER_SM = 55e9  # distributed shared memory


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's blocks at the time of tensor cores and instruction issue, which hide each
    other in part, or at that of L2, at least the time of device memory, plus launch, second kernel and preparation.
    """
    resident = ctas_per_sm(problem, config)
    together = min(resident, -(-config.blocks // target.cores))
    warpgroups = config.warpgroups * together
    mma = 8 * warpgroups * max(config.tile_n * _MMA_PER_COLUMN, _MMA_LEAST)
    issue = _ISSUE[problem.qtype] + _ISSUE_LOOP
    if config.scaling == "weight":
        issue += _ISSUE_FOLDED if FORMATS[problem.qtype].integer else _ISSUE_SCALE
    if config.scaling == "sum":
        issue += config.tile_n / 2 * (2 if has_zero(problem) else 1) * 64 / period(problem)
    issue *= 2 * warpgroups * _FEW_WARPS.get(warpgroups, 1)
    busy = mma + _BEHIND_MMA * issue * issue / mma if mma > issue else issue + _BEHIND_ISSUE * mma
    # A single batch at a time, whose end is waited for, overlaps only with other warpgroups'.
    if config.scaling == "sum":
        busy = max(busy, max(mma, issue) + min(mma, issue) / warpgroups)
    busy /= config.parts  # each has a block of its own
    load = together * _stage_bytes(problem, config.tile_m, config.tile_n) / _L2_BYTES_PER_CLOCK
    step = max(busy, load) / _CLOCK

    # Rounds of thread blocks, where not all fit.
    rounds = -(-config.blocks // resident_blocks(target, config.cluster, resident))
    given = schedule(problem, config)
    sums = config.tile_m * config.tile_n * 4 // config.cluster  # bytes that a thread block stores, or adds up
    piece = _PIECE_SECONDS + sums / _STORE_BYTES_PER_SM
    seconds = rounds * (load / _CLOCK + given.blocks_each * step + given.pieces * piece)
    seconds = max(seconds, problem.bytes_moved / _HBM_BYTES) + _LAUNCH_SECONDS
    if config.cluster > 1:
        seconds += (config.cluster - 1) * (_CLUSTER_SECONDS + sums / _CLUSTER_BYTES_PER_SM)
        seconds += _PARTS_SECONDS * (config.parts - 1)
    elif is_cut(problem, config):
        slots = config.blocks + given.rest
        seconds += _REDUCE_SECONDS + 2 * slots * config.tile_m * config.tile_n * 4 / _PARTIAL_BYTES
    if _prepared(problem):
        seconds += _PREPARE_SECONDS + 2 * problem.rows * problem.k * 2 / _HBM_BYTES
    return seconds


# ---- plan ------------------------------------------------------------------------------------------------------------


def source(problem: QuantizedMatmulProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on dtypes, groups, tile and cluster, and of the sizes on what
    `ranges.defines` says, and in clusters that share a tile on the ranges of k."""
    return compiler.Source(
        "quantized/tiled.cu",
        (
            ("FORMAT", FORMAT_CODES[problem.qtype]),
            ("HALF", int(_operand_dtype(problem) == "float16")),
            ("X_E4M3", int(problem.x_dtype == "float8_e4m3fn")),
            ("OUT", OUT_CODES[problem.out_dtype]),
            ("SCALE_TYPE", TYPE_CODES[problem.scale_dtype]),
            ("ZERO_TYPE", TYPE_CODES[problem.zero_dtype]),
            ("GROUP", dequantize.group_code(problem)),
            ("SCALING", SCALINGS.index(config.scaling)),
            ("PERIOD", period(problem)),
            ("CONSUMERS", config.consumers),
            ("PARTS", config.parts),
            ("SPLITS", config.cluster),
            *schedule(problem, config).defines(config.cluster),
            ("TILE_N", config.tile_n),
            ("STAGES", config.stages),
            ("CTAS_PER_SM", ctas_per_sm(problem, config)),
            ("PREPARED", int(_prepared(problem))),
            *ranges.defines(problem, tile_counts(problem, config)[1]),
        ),
        declarations(ReduceArgs),
    )


def _prepare_args(problem: QuantizedMatmulProblem, config: Config) -> plan.Int32Struct:
    """`struct PrepareArgs` of the device code, in its order."""
    pitch = _pitch(problem) if needs_copy(problem) else 0
    return plan.Int32Struct((problem.rows, problem.k, _padded_rows(problem, config), k_blocks(problem), pitch))


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: x, words, scale, (zero point,) result, workspace."""
    buffers = dequantize.buffers(problem)
    workspace, out = len(buffers), len(buffers) - 1
    buffers.append(plan.Buffer(workspace_bytes(problem, config), 256))
    sums = plan.Pointer(workspace, _copy_bytes(problem))
    partials = plan.Pointer(workspace, _copy_bytes(problem) + _sums_bytes(problem, config))

    prepared = _prepared(problem)
    pitch = _pitch(problem)  # k itself where rows are not copied
    dims = (problem.k, problem.rows)
    x_map = plan.TiledMap(
        buffer=workspace if needs_copy(problem) else 0,
        dtype=_operand_dtype(problem),
        dims=dims,
        strides=(pitch * 2,),
        box=(64, config.tile_n),
    )
    args = ranges.args(problem, tile_counts(problem, config), schedule(problem, config))
    zero = plan.Pointer(3 if has_zero(problem) else 2)
    pointers = (plan.Pointer(1), plan.Pointer(2), zero, sums, plan.Pointer(out), partials)
    launches = [
        plan.Launch(
            kernel="quantized_tiled",
            grid=(config.blocks, 1, 1),
            block=(128 * (config.warpgroups + 1), 1, 1),
            params=(plan.MapParam(0), args, *pointers),
            shared_bytes=shared_bytes(problem, config) - BARRIER_BYTES,
            cluster=(config.cluster, 1, 1),
            programmatic=prepared,
        )
    ]
    if prepared:
        warps = _padded_rows(problem, config) * k_blocks(problem)
        prepare = plan.Launch(
            kernel="prepare_x",
            grid=(-(-warps // PREPARE_WARPS), 1, 1),
            block=(32 * PREPARE_WARPS, 1, 1),
            params=(_prepare_args(problem, config), plan.Pointer(0), plan.Pointer(workspace), sums),
        )
        launches.insert(0, prepare)
    if is_cut(problem, config):
        tile = (config.tile_m, config.tile_n)
        launches.append(ranges.reduce_launch(args, schedule(problem, config), tile, partials, plan.Pointer(out)))
    return plan.DevicePlan(source(problem, config), tuple(buffers), (x_map,), tuple(launches), f"{name} {config}")
