"""Kernel family: products of a packed quantized weight with at most 32 rows of activations, on Hopper by mma.sync
(device code: mixed_mma.cu).

Such a product is bound by the weight's bytes. Thread blocks stay on their SMs, keep a slice of the activations in shared
memory, and stream row tiles of 64 features through a ring; a cluster of blocks divides k, and adds its sums through
distributed shared memory, in a fixed order: the result is deterministic, bit for bit. No workspace is needed.
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk import compiler, plan
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.quantized.packing import TILE
from jax_splitk.quantized.problem import QuantizedMatmulProblem
from jax_splitk.target import Target, hopper_limit

name = "mixed_mma"
implementation = "cutlass"
platform = "cuda"
ABI = 1

TILES_N = (8, 16, 32)
BLOCKS = (1, 2, 4)
K_WARPS = (2, 4, 8, 16)
CLUSTERS = (1, 2, 4, 8)  # thread blocks of a cluster: 8 are the most that every Hopper GPU runs
MIN_WARPS, MAX_WARPS = 4, 16
MAX_STAGES = 14  # barriers
SHARED_BYTES = 227 * 1024
INT32_MAX = 2**31 - 1

FORMAT_CODES = {"int4": 0, "uint4": 1, "int8": 2, "float8_e4m3fn": 3, "float4_e2m1fn": 4, "nf4": 5}  # macro FORMAT
TYPE_CODES = {"none": -1, "float32": 0, "bfloat16": 1, "float16": 2}  # macros SCALE_TYPE, ZERO_TYPE, OUT_TYPE
_SLOTS = 2
_EPILOGUE_WARPS = 4
_REGISTERS = 65536  # of an SM
_BARRIER_BYTES = 384
_ALIGNMENT = 1024  # of x, for the swizzle
_SUMS_PITCH = TILE + 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is computed.

    Attributes:
      tile_n: rows of x of a thread block, 8, 16 or 32, at least the problem's.
      blocks: blocks of 16 features of a warp: they share the activations that it reads.
      k_warps: warps along k; also the tiles of 64 k of a stage.
      stages: depth of the shared-memory ring.
      cluster: thread blocks that divide k.
      clusters: how many clusters run; each takes every `clusters`-th tile of 64 features.
    """

    tile_n: int
    blocks: int
    k_warps: int
    stages: int
    cluster: int
    clusters: int


def warps(config: Config) -> int:
    """Consumer warps of a thread block."""
    return 4 // config.blocks * config.k_warps


def threads(config: Config) -> int:
    """Of a thread block: consumers, the producer's warp and the epilogue's."""
    return 32 * (warps(config) + 1 + _EPILOGUE_WARPS)


def registers(p: QuantizedMatmulProblem, config: Config) -> int:
    """At most that many registers of a thread, by the compiler's report for a few configs."""
    n_tiles = config.tile_n // 8
    zero = 0 if p.zero_dtype == "none" else 4 * n_tiles
    return (
        40
        + (12 if p.qtype == "nf4" else 0)
        + 8 * n_tiles * (config.blocks + 1)
        + 4 * config.blocks * FORMATS[p.qtype].bits // 4
        + zero
    )


def k_stages(p: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that the whole k takes."""
    return -(-p.k_tiles // config.k_warps)


def stage_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """STAGE_BYTES of the device code."""
    words = config.k_warps * TILE * TILE * p.bits // 8
    if p.group_size == p.k:
        return words
    groups = config.k_warps * TILE // p.group_size
    item = jnp.dtype(p.scale_dtype).itemsize + (0 if p.zero_dtype == "none" else jnp.dtype(p.zero_dtype).itemsize)
    return words + groups * TILE * item


def shared_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """The ring, the sums of the warps, slots of the cluster, barriers, and the slice of x."""
    sums = config.k_warps * config.tile_n * _SUMS_PITCH * 4
    slots = (_SLOTS if config.cluster > 1 else 0) * config.tile_n * TILE * 4
    x = -(-k_stages(p, config) // config.cluster) * config.k_warps * TILE * 2 * config.tile_n
    rest = config.stages * stage_bytes(p, config) + sums + slots + _BARRIER_BYTES
    return -(-rest // _ALIGNMENT) * _ALIGNMENT + x


def workspace_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    del problem, config
    return 0


# ---- legality ------------------------------------------------------------------------------------------------------


def supports(problem: QuantizedMatmulProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    reason = hopper_limit(target) or _problem_limit(problem)
    if reason is None and config is not None:
        reason = _config_limit(problem, config)
    return reason


def preferred(problem: QuantizedMatmulProblem, target: Target) -> str | None:
    """Always chosen where it is legal: XLA writes the dequantized weight to memory and reads it again."""
    del problem, target
    return None


def _problem_limit(p: QuantizedMatmulProblem) -> str | None:
    if not 1 <= p.rows <= TILES_N[-1]:
        return f"{p.rows} rows of x; accepted: 1 to {TILES_N[-1]}"
    if p.group_size < TILE // 2:
        return f"groups of {p.group_size}, k itself; accepted: k of at least {TILE // 2} per channel"
    most = max(p.rows * p.k, p.feature_tiles * TILE, p.rows * p.features)
    if most > INT32_MAX:
        return f"arrays of {most} elements; accepted: at most {INT32_MAX}"
    if not any(_config_limit(p, config) is None for config in _smallest(p)):
        return f"k {p.k}: {p.rows} rows of x of a cluster's thread block do not fit in {SHARED_BYTES} bytes"
    return None


def _tile_n(p: QuantizedMatmulProblem) -> int:
    return next(tile for tile in TILES_N if tile >= p.rows)


def _smallest(p: QuantizedMatmulProblem) -> list[Config]:
    """For each size of cluster, the config with the least shared memory."""
    return [Config(_tile_n(p), 2, 2, 2, cluster, 1) for cluster in CLUSTERS]


def _config_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    for field, accepted in (
        ("tile_n", TILES_N),
        ("blocks", BLOCKS),
        ("k_warps", K_WARPS),
        ("cluster", CLUSTERS),
    ):
        if getattr(config, field) not in accepted:
            return f"{field} {getattr(config, field)}; accepted: {', '.join(map(str, accepted))}"
    if config.tile_n < p.rows:
        return f"tile_n {config.tile_n}; accepted for {p.rows} rows: at least {p.rows}"
    if not MIN_WARPS <= warps(config) <= MAX_WARPS:
        return f"blocks {config.blocks}, k_warps {config.k_warps}: {warps(config)} warps; accepted: {MIN_WARPS} to {MAX_WARPS}"
    if threads(config) * registers(p, config) > _REGISTERS:
        most = _REGISTERS // threads(config)
        return f"{threads(config)} threads of {registers(p, config)} registers; accepted: at most {most} registers"
    if not 2 <= config.stages <= MAX_STAGES:
        return f"stages {config.stages}; accepted: 2 to {MAX_STAGES}"
    if config.cluster > k_stages(p, config):
        return f"cluster {config.cluster}; accepted for {k_stages(p, config)} stages of k: at most as many"
    if config.cluster > config.tile_n:
        return f"cluster {config.cluster}; accepted: at most tile_n"
    if not 1 <= config.clusters <= p.feature_tiles:
        return f"clusters {config.clusters}; accepted: 1 to {p.feature_tiles}, the tiles of {TILE} features"
    if shared_bytes(p, config) > SHARED_BYTES:
        return f"{shared_bytes(p, config)} bytes of shared memory; accepted: at most {SHARED_BYTES}"
    return None


# ---- candidates ----------------------------------------------------------------------------------------------------


def candidates(problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
    """All shapes of warps and clusters, with the deepest ring, that fill the machine."""
    found = []
    for blocks in BLOCKS:
        for k_warps in K_WARPS:
            for cluster in CLUSTERS:
                for clusters in [_clusters(problem, target, cluster)]:
                    config = Config(_tile_n(problem), blocks, k_warps, 2, cluster, clusters)
                    deep = dataclasses.replace(config, stages=_deepest(problem, config))
                    if _config_limit(problem, deep) is None:
                        found.append(deep)
    return found


def _clusters(p: QuantizedMatmulProblem, target: Target, cluster: int) -> int:
    """Clusters that are resident at once: those of 4 and 8 do not fill every part of the GPU (its GPCs)."""
    share = 1.0 if cluster <= 2 else 0.91
    most = max(1, int(target.cores * share) // cluster)
    rounds = -(-p.feature_tiles // most)
    return max(1, -(-p.feature_tiles // rounds))


def _deepest(p: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that fit; more than some 100 kB bring nothing."""
    rest = SHARED_BYTES - shared_bytes(p, dataclasses.replace(config, stages=0))
    return min(rest // stage_bytes(p, config), MAX_STAGES, max(2, -(-(100 << 10) // stage_bytes(p, config))))


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
    """Other depths of the ring and numbers of clusters."""
    del target
    found = [dataclasses.replace(config, stages=config.stages + step) for step in (-2, 2)]
    found += [dataclasses.replace(config, clusters=config.clusters + step) for step in (-2, -1, 1, 2)]
    wider = [tile for tile in TILES_N if tile > config.tile_n][:1]
    return found + [dataclasses.replace(config, tile_n=tile) for tile in wider]


# ---- cost model ----------------------------------------------------------------------------------------------------

_CLOCK = 1.755e9
_HBM_BYTES = 4.0e12
_ISSUE_PER_CLOCK = 2.4  # instructions of an SM
_DECODE = {"int4": 40, "uint4": 40, "int8": 44, "float8_e4m3fn": 90, "float4_e2m1fn": 68, "nf4": 120}  # of a block
_LOOP = 45  # instructions of a warp for a tile of 64 k, beside those of its blocks
_SUMS = 90  # at the end of a row tile, for 8 rows of x
_LAUNCH_SECONDS = 2.5e-6
_RAMP_SECONDS = 1.2e-6
_CLUSTER_SECONDS = 0.8e-6


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest cluster's row tiles, at the memory's rate or that of its instructions."""
    tiles = -(-problem.feature_tiles // config.clusters)
    stages = -(-k_stages(problem, config) // config.cluster)
    n_tiles = config.tile_n // 8
    scale = 0 if problem.group_size == problem.k else max(1, TILE // problem.group_size)
    zero = problem.zero_dtype != "none"
    block = _DECODE[problem.qtype] + 6 * n_tiles + scale * (4 + (8 if zero else 4) * n_tiles)
    warp = _LOOP + 2 * n_tiles + config.blocks * block + (4 * n_tiles if zero else 0)
    latency = 350 + 60 * config.blocks  # clocks of a warp alone, for one tile of 64 k
    together = warps(config) * warp / _ISSUE_PER_CLOCK
    clocks = tiles * (stages * max(together, latency) + _SUMS * n_tiles * 2)
    sms = min(config.clusters * config.cluster, target.cores)
    memory = problem.bytes_moved / _HBM_BYTES * target.cores / sms * tiles * config.clusters / problem.feature_tiles
    cluster = _CLUSTER_SECONDS * math.log2(config.cluster) / 2
    return max(clocks / _CLOCK, memory) + _LAUNCH_SECONDS + _RAMP_SECONDS + cluster


# ---- the plan ------------------------------------------------------------------------------------------------------


def source(problem: QuantizedMatmulProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on types, groups and the config, not on the sizes."""
    half = problem.x_dtype != "bfloat16"
    return compiler.Source(
        "mixed_mma.cu",
        (
            ("FORMAT", FORMAT_CODES[FORMATS[problem.qtype].name]),
            ("HALF", int(half)),
            ("X_E4M3", int(problem.x_dtype == "float8_e4m3fn")),
            ("X_TMA", int(_by_tma(problem))),
            ("GROUP", 0 if problem.group_size == problem.k else problem.group_size),
            ("SCALE_TYPE", TYPE_CODES[problem.scale_dtype]),
            ("ZERO_TYPE", TYPE_CODES[problem.zero_dtype]),
            ("OUT_TYPE", TYPE_CODES[problem.out_dtype]),
            ("N_TILES", config.tile_n // 8),
            ("BLOCKS", config.blocks),
            ("K_WARPS", config.k_warps),
            ("STAGES", config.stages),
            ("CLUSTER", config.cluster),
        ),
    )


def _by_tma(p: QuantizedMatmulProblem) -> bool:
    """Whether x's rows are whole multiples of 16 bytes, of a type that the tensor cores take."""
    return p.x_dtype != "float8_e4m3fn" and p.k % 8 == 0


def _args(p: QuantizedMatmulProblem) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order."""
    return plan.Int32Struct((p.rows, p.k, p.features, p.feature_tiles, p.k_tiles, p.groups))


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: x, words, scale, zero point if there is one, result, workspace."""

    def buffer(shape: tuple[int, ...], dtype: str) -> plan.Buffer:
        return plan.Buffer(math.prod(shape) * jnp.dtype(dtype).itemsize, 16)

    operands = [
        buffer(problem.x_shape, problem.x_dtype),
        buffer(problem.words_shape, "uint32"),
        buffer(problem.scale_shape, problem.scale_dtype),
    ]
    if problem.zero_dtype != "none":
        operands.append(buffer(problem.scale_shape, problem.zero_dtype))
    out = len(operands)
    maps, x = (), plan.Pointer(0)
    if _by_tma(problem):
        dims, box = (problem.k, problem.rows), (TILE, config.tile_n)
        maps = (plan.TiledMap(0, problem.x_dtype, dims, plan.tensor_map_strides(dims, 2), box),)
        x = plan.MapParam(0)
    launch = plan.Launch(
        kernel="mixed_mma",
        grid=(config.clusters * config.cluster, 1, 1),
        block=(threads(config), 1, 1),
        # Without zero points the kernel does not read their address.
        params=(x, *(plan.Pointer(i) for i in (1, 2, out - 1, out)), _args(problem)),
        shared_bytes=shared_bytes(problem, config),
        cluster=(config.cluster, 1, 1),
    )
    buffers = (*operands, buffer(problem.out_shape, problem.out_dtype), plan.Buffer(0, 16))
    return plan.DevicePlan(source(problem, config), buffers, maps, (launch,), label=f"{name} {config}")
