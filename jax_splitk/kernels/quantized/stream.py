"""Kernel family: products of a packed quantized weight with at most 64 rows of activations, on Hopper by WGMMA
(device code: quantized/stream.cu). Activations of e4m3 are multiplied as they are where the weight's format allows it.

Such a product is bound by the weight's bytes. Thread blocks stay on their SMs, keep a slice of the activations in
shared memory, and stream row tiles of 64 features through a ring; a cluster of blocks divides k, and adds its sums
through distributed shared memory, in a fixed order: the result is deterministic, bit for bit. No workspace is needed.
"""

import dataclasses
import itertools

from jax import numpy as jnp

from jax_splitk.kernels.device.structs import Struct, declarations
from jax_splitk.kernels.quantized import dequantize
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS, FORMAT_CODES, TYPE_CODES, has_zero
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime import compiler, plan
from jax_splitk.runtime.target import Target, hopper_limit, resident_blocks

name = "quantized_stream"
implementation = "cutlass"
platform = "cuda"
ABI = 1

TILES_N = (8, 16, 32, 64)
WARPGROUPS = (1, 2, 4)
TILES = (1, 2, 4)
CLUSTERS = (1, 2, 4, 8)  # thread blocks of a cluster: 8 are the most that every Hopper GPU runs
WIDEST_OF_FOUR = 16  # tile_n with four warpgroups, for their registers: half of it with zero points, twice for e4m3
MAX_STAGES = 14  # barriers
SHARED_BYTES = 227 * 1024
INT32_MAX = 2**31 - 1

_INBOXES = 2
_BARRIER_BYTES = 384
_ALIGNMENT = 1024  # of x, for the swizzle
_SUMS_PITCH = TILE + 4
_SWIZZLE_64B = 2  # CUtensorMapSwizzle


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is computed.

    Attributes:
      tile_n: rows of x of a thread block, 8, 16, 32 or 64, at least the problem's.
      warpgroups: consumers; each takes other k.
      tiles: tiles of 64 features by 64 k of a warpgroup in a stage.
      stages: depth of the shared-memory ring.
      cluster: thread blocks that divide k.
      clusters: how many clusters run; each takes every `clusters`-th tile of 64 features.
    """

    tile_n: int
    warpgroups: int
    tiles: int
    stages: int
    cluster: int
    clusters: int


@dataclasses.dataclass(frozen=True)
class Args(Struct):
    """Of the kernel.

    Attributes:
      rows, k: of x.
      feature_tiles, k_tiles: of the packed weight.
      groups: of a feature tile's scales.
      stages: that the whole k takes.
    """

    rows: int
    k: int
    features: int
    feature_tiles: int
    k_tiles: int
    groups: int
    stages: int


def threads(config: Config) -> int:
    """Of a thread block: consumers, and a warpgroup of the producer and the epilogue."""
    return 128 * (config.warpgroups + 1)


def products(p: QuantizedMatmulProblem) -> str:
    """The type that the tensor cores multiply: x's own, but float16 for what e4m3 products cannot do exactly enough.

    That is formats with more than four significant bits, zero points, and float32 results: the tensor cores keep some
    14 bits of a sum of e4m3 products.
    """
    exact = p.qtype in E4M3_FORMATS and not has_zero(p) and p.out_dtype != "float32"
    return "float16" if p.x_dtype == "float8_e4m3fn" and not exact else p.x_dtype


def stage_tiles(config: Config) -> int:
    """Tiles of 64 features by 64 k of a stage, one behind the other along k."""
    return config.warpgroups * config.tiles


def k_stages(p: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that the whole k takes."""
    return -(-p.k_tiles // stage_tiles(config))


def stage_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """STAGE_BYTES of the device code."""
    return dequantize.weight_bytes(p, TILE, stage_tiles(config) * TILE)


def shared_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """The ring, the sums of the warpgroups, inboxes of the cluster's sums, barriers, and the slice of x."""
    sums = config.warpgroups * config.tile_n * _SUMS_PITCH * 4
    inboxes = (_INBOXES if config.cluster > 1 else 0) * config.tile_n * TILE * 4
    x = x_bytes(p, config)
    rest = config.stages * stage_bytes(p, config) + sums + inboxes + _BARRIER_BYTES
    return -(-rest // _ALIGNMENT) * _ALIGNMENT + x


def x_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """Of a thread block's slice of x."""
    item = jnp.dtype(products(p)).itemsize
    return -(-k_stages(p, config) // config.cluster) * stage_tiles(config) * TILE * item * config.tile_n


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
    tiles = 1 if p.group_size != 2 * TILE else 2
    return [Config(_tile_n(p), 1, tiles, 2, cluster, 1) for cluster in CLUSTERS]


def _config_limit(p: QuantizedMatmulProblem, config: Config) -> str | None:
    for field, accepted in (
        ("tile_n", TILES_N),
        ("warpgroups", WARPGROUPS),
        ("tiles", TILES),
        ("cluster", CLUSTERS),
    ):
        if getattr(config, field) not in accepted:
            return f"{field} {getattr(config, field)}; accepted: {', '.join(map(str, accepted))}"
    if config.tile_n < p.rows:
        return f"tile_n {config.tile_n}; accepted for {p.rows} rows: at least {p.rows}"
    e4m3 = products(p) == "float8_e4m3fn"
    widest = WIDEST_OF_FOUR * 2 if e4m3 else WIDEST_OF_FOUR // 2 if has_zero(p) else WIDEST_OF_FOUR
    if config.warpgroups == WARPGROUPS[-1] and config.tile_n > widest:
        return f"tile_n {config.tile_n} with {config.warpgroups} warpgroups; accepted: at most {widest}"
    if has_zero(p) and config.tile_n == TILES_N[-1] and config.tiles > 2:
        return f"tiles {config.tiles} with tile_n {config.tile_n} and zero points; accepted: at most 2"
    if p.group_size not in (p.k, *range(TILE)) and config.tiles * TILE % p.group_size:
        return f"tiles {config.tiles}; accepted with groups of {p.group_size}: multiples of {p.group_size // TILE}"
    if not 2 <= config.stages <= MAX_STAGES:
        return f"stages {config.stages}; accepted: 2 to {MAX_STAGES}"
    if config.cluster > k_stages(p, config):
        return f"cluster {config.cluster}; accepted for {k_stages(p, config)} stages of k: at most as many"
    if not 1 <= config.clusters <= p.feature_tiles:
        return f"clusters {config.clusters}; accepted: 1 to {p.feature_tiles}, the tiles of {TILE} features"
    if shared_bytes(p, config) > SHARED_BYTES:
        return f"{shared_bytes(p, config)} bytes of shared memory; accepted: at most {SHARED_BYTES}"
    return None


# ---- candidates ----------------------------------------------------------------------------------------------------


def candidates(problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
    """All shapes of warps and clusters, with the deepest ring, that fill the machine."""
    found = []
    for warpgroups, tiles, cluster in itertools.product(WARPGROUPS, TILES, CLUSTERS):
        clusters = _clusters(problem, target, cluster)
        config = Config(_tile_n(problem), warpgroups, tiles, 2, cluster, clusters)
        deep = dataclasses.replace(config, stages=_deepest(problem, config))
        if _config_limit(problem, deep) is None:
            found.append(deep)
    return found


def _clusters(p: QuantizedMatmulProblem, target: Target, cluster: int) -> int:
    """Clusters that are resident at once, no more than give each of them as many row tiles."""
    most = resident_blocks(target, cluster) // cluster
    rounds = -(-p.feature_tiles // most)
    return -(-p.feature_tiles // rounds)


def _deepest(p: QuantizedMatmulProblem, config: Config) -> int:
    """Stages that fit; what is more than some 70 kB delays the first of them."""
    rest = SHARED_BYTES - shared_bytes(p, dataclasses.replace(config, stages=0))
    return min(rest // stage_bytes(p, config), MAX_STAGES, max(2, -(-(70 << 10) // stage_bytes(p, config))))


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
    """Other depths of the ring and numbers of clusters."""
    del target
    found = [dataclasses.replace(config, stages=config.stages + step) for step in (-2, -1, 1, 2)]
    found += [dataclasses.replace(config, clusters=config.clusters + step) for step in (-2, -1, 1, 2)]
    wider = [tile for tile in TILES_N if tile > config.tile_n][:1]
    return found + [dataclasses.replace(config, tile_n=tile) for tile in wider]


# ---- cost model ----------------------------------------------------------------------------------------------------

# Fitted to 74 device times of int4 weights on one H200, 1 to 64 rows of e4m3 and 8 to 32 of bfloat16; with less weight
# to an earlier fit of 120 times of bfloat16. Of these, the slice of x and short rings again, to the times of 1 to 16
# rows that the shipped tables hold. Of other formats the instructions are counted.
_CLOCK = 1.755e9
_HBM_BYTES = 4.5e12
_X_BYTES_PER_SM = 60e9  # the slice of x, while the first row tiles are loaded
_X_BYTES_PER_SM_HIDDEN = 400e9  # up to 16 rows of 16 bits, whose instructions take longer
_DECODE = {
    "int4": 78,
    "uint4": 78,
    "int8": 84,
    "float8_e4m3fn": 132,
    "float4_e2m1fn": 117,
    "nf4": 172,
}  # clocks, a tile
_DECODE_E4M3 = {"int4": 62, "uint4": 42, "float8_e4m3fn": 36, "float4_e2m1fn": 58}  # for products of e4m3
_ROW, _ROW_E4M3 = 0.95, 1.18  # clocks of a tile for each row of x
_ONE_WARPGROUP = 1.16  # times its tiles: nothing runs while it waits for products
_STAGE = 155  # clocks of a stage beside its tiles
_WAITED = 96  # more of them where a warpgroup waits for each tile's products (IN_FLIGHT of the device code)
_FILL, _FILL_E4M3 = 2100, 1560  # clocks from a stage's end to its next words
_ROUND = 170  # clocks at the end of a row tile
_SUM = 0.9  # more of them for each row of x, warpgroup and block, whose sums are added
_ONE_STAGE = 240  # more of them where the row tile was a single stage
_SHADOW = 0.12  # part of the shorter of memory's and instructions' time that the longer does not hide
_LAUNCH_SECONDS = 2.97e-6


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest cluster's row tiles, at the memory's rate or that of its instructions."""
    rounds = -(-problem.feature_tiles // config.clusters)
    stages = -(-k_stages(problem, config) // config.cluster)
    zero = has_zero(problem)
    e4m3 = products(problem) == "float8_e4m3fn"
    if e4m3:
        tile = _DECODE_E4M3[problem.qtype] + _ROW_E4M3 * config.tile_n
    else:
        tile = _DECODE[problem.qtype] + _ROW * config.tile_n * (3 if zero else 1)
    tile *= _ONE_WARPGROUP if config.warpgroups == 1 else 1
    waited = config.tiles == 1 or zero or (config.warpgroups == WARPGROUPS[-1] and config.tile_n > WIDEST_OF_FOUR)
    stage = _STAGE + (_WAITED if waited else 0) + stage_tiles(config) * tile
    stage = max(stage, ((_FILL_E4M3 if e4m3 else _FILL) + stage) / config.stages)  # or as fast as a short ring fills
    end = _ROUND + _SUM * config.tile_n * (config.warpgroups + config.cluster) + (_ONE_STAGE if stages == 1 else 0)
    busy = rounds * (stages * stage + end) / _CLOCK
    sms = min(config.clusters * config.cluster, target.cores)
    memory = problem.bytes_moved / _HBM_BYTES * target.cores / sms * rounds * config.clusters / problem.feature_tiles
    hidden = not e4m3 and config.tile_n <= WIDEST_OF_FOUR
    x = x_bytes(problem, config) / (_X_BYTES_PER_SM_HIDDEN if hidden else _X_BYTES_PER_SM)
    return max(busy, memory) + _SHADOW * min(busy, memory) + x + _LAUNCH_SECONDS


# ---- the plan ------------------------------------------------------------------------------------------------------


def source(problem: QuantizedMatmulProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on types, groups, the config, and on what divides k and features."""
    return compiler.Source(
        "quantized/stream.cu",
        (
            ("FORMAT", FORMAT_CODES[problem.qtype]),
            ("HALF", int(problem.x_dtype != "bfloat16")),
            ("X_E4M3", int(problem.x_dtype == "float8_e4m3fn")),
            ("E4M3_PRODUCTS", int(products(problem) == "float8_e4m3fn")),
            ("X_TMA", int(_by_tma(problem))),
            ("WHOLE", int(_whole_stages(problem, config))),
            ("FOURS", int(problem.features % 4 == 0)),
            ("GROUP", dequantize.group_code(problem)),
            ("SCALE_TYPE", TYPE_CODES[problem.scale_dtype]),
            ("ZERO_TYPE", TYPE_CODES[problem.zero_dtype]),
            ("OUT", TYPE_CODES[problem.out_dtype]),
            ("TILE_N", config.tile_n),
            ("WARPGROUPS", config.warpgroups),
            ("TILES", config.tiles),
            ("STAGES", config.stages),
            ("CLUSTER", config.cluster),
        ),
        declarations(Args),
    )


def _by_tma(p: QuantizedMatmulProblem) -> bool:
    """Whether x's rows are whole multiples of 16 bytes, of the type that the tensor cores take."""
    return products(p) == p.x_dtype and p.k * jnp.dtype(p.x_dtype).itemsize % 16 == 0


def _whole_stages(p: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether k is a multiple of a stage's: nothing stands in for missing tiles."""
    return p.k % (stage_tiles(config) * TILE) == 0


def _x_map(p: QuantizedMatmulProblem, config: Config) -> plan.TiledMap:
    """Boxes of 64 k of all rows: a stage's at once where stages are whole. Tensor maps have no e4m3: pairs of them."""
    pairs = p.x_dtype == "float8_e4m3fn"
    dtype, swizzle = ("bfloat16", _SWIZZLE_64B) if pairs else (p.x_dtype, plan.SWIZZLE_128B)
    k, width = (p.k // 2, TILE // 2) if pairs else (p.k, TILE)
    if not _whole_stages(p, config):
        return plan.TiledMap(0, dtype, (k, p.rows), (2 * k,), (width, config.tile_n), swizzle)
    dims, box = (width, p.rows, p.k_tiles), (width, config.tile_n, stage_tiles(config))
    return plan.TiledMap(0, dtype, dims, (2 * k, 2 * width), box, swizzle)


def _args(p: QuantizedMatmulProblem, config: Config) -> plan.Int32Struct:
    packed = (p.feature_tiles, p.k_tiles, p.groups)
    return Args(p.rows, p.k, p.features, *packed, k_stages(p, config)).param()


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: x, words, scale, zero point if there is one, result, workspace."""
    buffers = dequantize.buffers(problem)
    out = len(buffers) - 1
    maps: tuple[plan.TiledMap, ...] = ()
    x: plan.Pointer | plan.MapParam = plan.Pointer(0)
    if _by_tma(problem):
        maps, x = (_x_map(problem, config),), plan.MapParam(0)
    launch = plan.Launch(
        kernel="quantized_stream",
        grid=(config.clusters * config.cluster, 1, 1),
        block=(threads(config), 1, 1),
        # Without zero points the kernel does not read their address.
        params=(x, *(plan.Pointer(i) for i in (1, 2, out - 1, out)), _args(problem, config)),
        shared_bytes=shared_bytes(problem, config),
        cluster=(config.cluster, 1, 1),
    )
    buffers.append(plan.Buffer(0, 16))
    return plan.DevicePlan(source(problem, config), tuple(buffers), maps, (launch,), label=f"{name} {config}")
