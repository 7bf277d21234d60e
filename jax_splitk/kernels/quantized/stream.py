"""Kernel family: products of a packed quantized weight with at most 64 rows of activations, on Hopper by WGMMA (device
code: quantized/stream.cu). e4m3 activations are multiplied directly if the weight's format allows it. The bytes of the
weight bound the time of such a product. Values of nf4 are looked up in shared memory, if it has room. Thread blocks
stay on their SMs, keep a slice of the activations in shared memory, and stream row tiles of 64 features through a
pipeline; a cluster of blocks divides k, and adds its sums through distributed shared memory, in a fixed order: the
result is deterministic, bit for bit. No workspace is needed. Activations may be normalized on the way
(quantized/norm.cuh).
"""

import dataclasses
import itertools

from jax import numpy as jnp

from jax_splitk.kernels.base.family import ModelledFamily, field_refusal
from jax_splitk.kernels.base.named import NamedByFormat
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import dequantize, norm
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS, SHORTEST_GROUP, has_zero
from jax_splitk.kernels.quantized.tiles import INT32_MAX, SHARED_BYTES
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

TILES_N = (8, 16, 32, 64)
WARPGROUPS = (1, 2, 4)
TILES = (1, 2, 4)
CLUSTERS = (1, 2, 4, 8)  # thread blocks of a cluster: every Hopper GPU runs up to 8
WIDEST_OF_FOUR = 16  # tile_n with four warpgroups, for their registers: half of it with zero points, twice for e4m3
MAX_STAGES = 14  # barriers

_INBOXES = 2
_BARRIER_BYTES = 384
_TABLE_BYTES = 256 * 32 * 4  # of nf4
_TABLE_SLOTS = 110  # ISSUE_SLOTS with the table
_ALIGNMENT = 1024  # of x, for the swizzle
_SUMS_PITCH = TILE + 4
_SWIZZLE_64B = 2  # CUtensorMapSwizzle


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is computed.

    Attributes:
      tile_n: rows of x in a thread block: 8, 16, 32 or 64, at least the problem's.
      warpgroups: consumers, each with a different part of k.
      tiles: tiles of 64 features by 64 k that a warpgroup has in a stage.
      stages: depth of the shared-memory pipeline.
      cluster: thread blocks that divide k.
      clusters: how many clusters run; each takes every `clusters`-th tile of 64 features.
    """

    tile_n: int
    warpgroups: int
    tiles: int
    stages: int
    cluster: int
    clusters: int


def products(p: QuantizedMatmulProblem) -> str:
    """The type that the tensor cores multiply: x's own, but float16 where e4m3 products cannot serve.

    They are not exact enough for formats with more than four significant bits, zero points, and float32 results: the
    tensor cores keep some 14 bits of a sum of e4m3 products. Their instruction has 32 k, more than a group of 16.
    """
    exact = p.qtype in E4M3_FORMATS and not has_zero(p) and p.out_dtype != "float32"
    serves = exact and p.group_size >= SHORTEST_GROUP
    return "float16" if p.x_dtype == "float8_e4m3fn" and not serves else p.x_dtype


def _most_with_zeros(p: QuantizedMatmulProblem, config: Config) -> int:
    """The most `tiles` with the widest x and zero points, for their registers. Two scales of a tile need more."""
    crowded = p.group_size == TILE // 2 and products(p) == "float16" and config.warpgroups > 1
    return 1 if crowded else 2


def stage_tiles(config: Config) -> int:
    """Tiles of 64 features by 64 k in a stage, one after the other along k."""
    return config.warpgroups * config.tiles


def k_stages(p: QuantizedMatmulProblem, config: Config) -> int:
    """The number of stages for all of k."""
    return -(-p.k_tiles // stage_tiles(config))


def stage_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """STAGE_BYTES of the device code."""
    return dequantize.weight_bytes(p, TILE, stage_tiles(config) * TILE)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a kernel has in shared memory.

    Attributes:
      table: whether codes of nf4 are looked up there (TABLE in the device code).
      x_slots: 0 if a thread block's slice of x stays there for all its row tiles. Else the number of stages of x that
        are there at a time (X_SLOTS in the device code): x is loaded again for each row tile.
      bytes: of all of it.
    """

    table: bool
    x_slots: int
    bytes: int


def memory(p: QuantizedMatmulProblem, config: Config) -> Memory:
    """The first of these that fits: x stays, with a table or without; x is loaded again, with a table or without."""
    slots = (0, config.stages + 1) if _may_reload_x(p, config) else (0,)
    tables = (True, False) if p.qtype == "nf4" else (False,)
    ways = [Memory(table, each, _bytes(p, config, table, each)) for each in slots for table in tables]
    return next((way for way in ways if way.bytes <= SHARED_BYTES), ways[-1])


def _may_reload_x(p: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether x may be loaded again for each row tile."""
    return _by_tma(p) and _whole_stages(p, config) and not norm.normalizes(p)


def _bytes(p: QuantizedMatmulProblem, config: Config, table: bool, slots: int) -> int:
    """Bytes of the pipeline, the sums of the warpgroups, inboxes of the cluster, barriers, the table, and x."""
    sums = config.warpgroups * config.tile_n * _SUMS_PITCH * 4
    inboxes = (_INBOXES if config.cluster > 1 else 0) * config.tile_n * TILE * 4
    x = slots * _x_stage_bytes(p, config) if slots else x_bytes(p, config)
    rest = config.stages * stage_bytes(p, config) + sums + inboxes + _BARRIER_BYTES + table * _TABLE_BYTES
    if norm.normalizes(p):
        rest, x = rest + norm.BYTES, x + x // config.tile_n * len(p.norm_operands)
    return -(-rest // _ALIGNMENT) * _ALIGNMENT + x


def x_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """Bytes of a thread block's slice of x."""
    return -(-k_stages(p, config) // config.cluster) * _x_stage_bytes(p, config)


def _x_stage_bytes(p: QuantizedMatmulProblem, config: Config) -> int:
    """Bytes of x in a stage."""
    return stage_tiles(config) * TILE * jnp.dtype(products(p)).itemsize * config.tile_n


def _tile_n(p: QuantizedMatmulProblem) -> int:
    return next(tile for tile in TILES_N if tile >= p.rows)


def _smallest(p: QuantizedMatmulProblem) -> list[Config]:
    """For each size of cluster, the config with the least shared memory."""
    tiles = 1 if p.group_size != 2 * TILE else 2
    return [Config(_tile_n(p), 1, tiles, 2, cluster, 1) for cluster in CLUSTERS]


def _clusters(p: QuantizedMatmulProblem, target: Target, cluster: int) -> int:
    """The number of clusters that are resident at once, reduced so that all have equally many row tiles."""
    most = resident_blocks(target, cluster) // cluster
    rounds = -(-p.feature_tiles // most)
    return -(-p.feature_tiles // rounds)


def _deepest(p: QuantizedMatmulProblem, config: Config) -> int:
    """The largest number of stages that fits; more than some 70 kB would delay the first stage."""
    each, empty = stage_bytes(p, config), dataclasses.replace(config, stages=0)
    wanted = min(MAX_STAGES, max(2, -(-(70 << 10) // each)))
    table = memory(p, dataclasses.replace(config, stages=2)).table
    found = (SHARED_BYTES - _bytes(p, empty, table, 0)) // each
    if found < wanted and _may_reload_x(p, config):
        found = max(found, (SHARED_BYTES - _bytes(p, empty, table, 1)) // (each + _x_stage_bytes(p, config)))
    return min(found, wanted)


# ---- cost model ----------------------------------------------------------------------------------------------------


def _by_tma(p: QuantizedMatmulProblem) -> bool:
    """Whether TMA can load x: its rows are multiples of 16 bytes, and x has the type that the tensor cores multiply."""
    return products(p) == p.x_dtype and p.k * jnp.dtype(p.x_dtype).itemsize % 16 == 0


def _whole_stages(p: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether k is a multiple of a stage's k. Otherwise some tiles of the last stage are missing."""
    return p.k % (stage_tiles(config) * TILE) == 0


def _x_map(p: QuantizedMatmulProblem, config: Config) -> plan.TiledMap:
    """Boxes of 64 k of all rows, or of a whole stage's k if stages are whole. Tensor maps have no e4m3, so an element
    of the map is a pair of e4m3."""
    pairs = p.x_dtype == "float8_e4m3fn"
    dtype, swizzle = ("bfloat16", _SWIZZLE_64B) if pairs else (p.x_dtype, plan.SWIZZLE_128B)
    k, width = (p.k // 2, TILE // 2) if pairs else (p.k, TILE)
    if not _whole_stages(p, config):
        return plan.TiledMap(0, dtype, (k, p.rows), (2 * k,), (width, config.tile_n), swizzle)
    dims, box = (width, p.rows, p.k_tiles), (width, config.tile_n, stage_tiles(config))
    return plan.TiledMap(0, dtype, dims, (2 * k, 2 * width), box, swizzle)


def _args(p: QuantizedMatmulProblem, config: Config) -> Struct:
    """Sizes of x, of the result and of the packed weight; the number of stages for all of k."""
    sizes = {"rows": p.rows, "k": p.k, "features": p.features, "feature_tiles": p.feature_tiles}
    counts = {"k_tiles": p.k_tiles, "groups": p.groups, "stages": k_stages(p, config)}
    return Struct("Args", {**sizes, **counts, **norm.args(p)})


class Stream(NamedByFormat, ModelledFamily[QuantizedMatmulProblem, Config]):
    """Preferred whenever it is legal: XLA writes the dequantized weight to memory and reads it again."""

    name = "quantized_stream"
    ABI = 2
    file = "quantized/stream.cu"
    chainable = True

    def problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        if not 1 <= problem.rows <= TILES_N[-1]:
            return f"{problem.rows} rows of x; accepted: 1 to {TILES_N[-1]}"
        if (reason := norm.refusal(problem)) is not None:
            return reason
        if problem.group_size < TILE // 2 and dequantize.per_channel(problem):
            return f"groups of {problem.group_size}, k itself; accepted: k of at least {TILE // 2} per channel"
        most = max(problem.rows * problem.k, problem.feature_tiles * TILE, problem.rows * problem.features)
        if most > INT32_MAX:
            return f"arrays of {most} elements; accepted: at most {INT32_MAX}"
        if not any(self.config_refusal(problem, config) is None for config in _smallest(problem)):
            rows = f"{problem.rows} rows of x of a cluster's thread block"
            return f"k {problem.k}: {rows} do not fit in {SHARED_BYTES} bytes"
        return None

    def config_refusal(self, problem: QuantizedMatmulProblem, config: Config) -> str | None:
        stages = range(2, MAX_STAGES + 1)
        reason = field_refusal(
            config, tile_n=TILES_N, warpgroups=WARPGROUPS, tiles=TILES, cluster=CLUSTERS, stages=stages
        )
        if reason is not None:
            return reason
        if config.tile_n < problem.rows:
            return f"tile_n {config.tile_n}; accepted for {problem.rows} rows: at least {problem.rows}"
        if norm.normalizes(problem) and config.tile_n > norm.MOST_ROWS:
            return f"tile_n {config.tile_n} with normalized x; accepted: at most {norm.MOST_ROWS}"
        e4m3 = products(problem) == "float8_e4m3fn"
        widest = WIDEST_OF_FOUR * 2 if e4m3 else WIDEST_OF_FOUR // 2 if has_zero(problem) else WIDEST_OF_FOUR
        if config.warpgroups == WARPGROUPS[-1] and config.tile_n > widest:
            return f"tile_n {config.tile_n} with {config.warpgroups} warpgroups; accepted: at most {widest}"
        if has_zero(problem) and config.tile_n == TILES_N[-1] and config.tiles > _most_with_zeros(problem, config):
            most = _most_with_zeros(problem, config)
            return f"tiles {config.tiles} with tile_n {config.tile_n} and zero points; accepted: at most {most}"
        if problem.group_size not in (problem.k, *range(TILE)) and config.tiles * TILE % problem.group_size:
            groups = f"groups of {problem.group_size}"
            return f"tiles {config.tiles}; accepted with {groups}: multiples of {problem.group_size // TILE}"
        if config.cluster > k_stages(problem, config):
            return f"cluster {config.cluster}; accepted for {k_stages(problem, config)} stages of k: at most as many"
        if not 1 <= config.clusters <= problem.feature_tiles:
            return f"clusters {config.clusters}; accepted: 1 to {problem.feature_tiles}, the tiles of {TILE} features"
        if (most := memory(problem, config).bytes) > SHARED_BYTES:
            return f"{most} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        return None

    def candidates(self, problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
        """All shapes of warps and clusters that fill the machine, with the deepest pipeline."""
        found = []
        for warpgroups, tiles, cluster in itertools.product(WARPGROUPS, TILES, CLUSTERS):
            clusters = _clusters(problem, target, cluster)
            config = Config(_tile_n(problem), warpgroups, tiles, 2, cluster, clusters)
            deep = dataclasses.replace(config, stages=_deepest(problem, config))
            if self.config_refusal(problem, deep) is None:
                found.append(deep)
        return found

    def neighbours(self, problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
        """Other depths of the pipeline and numbers of clusters."""
        found = [dataclasses.replace(config, stages=config.stages + step) for step in (-2, -1, 1, 2)]
        found += [dataclasses.replace(config, clusters=config.clusters + step) for step in (-2, -1, 1, 2)]
        wider = [tile for tile in TILES_N if tile > config.tile_n][:1]
        return found + [dataclasses.replace(config, tile_n=tile) for tile in wider]

    def work(self, problem: QuantizedMatmulProblem, config: Config, target: Target) -> Work:
        """The work of the busiest cluster."""
        waves = -(-config.clusters * config.cluster // resident_blocks(target, config.cluster))
        rounds = waves * -(-problem.feature_tiles // config.clusters)
        stages = -(-k_stages(problem, config) // config.cluster)
        zero, e4m3 = has_zero(problem), products(problem) == "float8_e4m3fn"
        tiles = rounds * stages * stage_tiles(config)
        waited = config.tiles == 1 or zero or (config.warpgroups == WARPGROUPS[-1] and config.tile_n > WIDEST_OF_FOUR)
        sms = min(config.clusters * config.cluster, target.cores)
        has = memory(problem, config)
        slots = _TABLE_SLOTS if has.table else dequantize.ISSUE_SLOTS[problem.qtype]
        decode = slots / (2 if e4m3 else 1)
        return Work(
            tensor_clocks=tiles * config.tile_n * (3 if zero else 1) / (1 if e4m3 else 0.5),
            instructions=4 * tiles * (decode + config.tile_n),
            l2_bytes=tiles * TILE * TILE * problem.bits / 8,
            waits=rounds * stages / config.stages,
            turns=rounds
            * (stages * (2 if waited else 1) + 4 + config.tile_n * (config.warpgroups + config.cluster) / 64),
            memory_bytes=problem.bytes_moved * rounds * config.clusters / (waves * problem.feature_tiles),
            memory_share=sms / target.cores,
            waves=waves,
            # x, which is loaded with the first row tiles, or with all.
            stored_bytes=(rounds if has.x_slots else waves) * x_bytes(problem, config),
            cluster=config.cluster,
        )

    def macros(self, problem: QuantizedMatmulProblem, config: Config) -> dict[str, int]:
        """Macros for types, groups, the config, and divisibility of k and features."""
        has = memory(problem, config)
        return {
            **dequantize.macros(problem),
            **norm.macros(problem),
            "HALF": int(problem.x_dtype != "bfloat16"),
            "X_E4M3": int(problem.x_dtype == "float8_e4m3fn"),
            "E4M3_PRODUCTS": int(products(problem) == "float8_e4m3fn"),
            "X_TMA": int(_by_tma(problem)),
            "WHOLE": int(_whole_stages(problem, config)),
            "FOURS": int(problem.features % 4 == 0),
            "TABLE": int(has.table),
            "X_SLOTS": has.x_slots,
            "TILE_N": config.tile_n,
            "WARPGROUPS": config.warpgroups,
            "TILES": config.tiles,
            "STAGES": config.stages,
            "CLUSTER": config.cluster,
        }

    def maps(self, problem: QuantizedMatmulProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        return (_x_map(problem, config),) if _by_tma(problem) else ()

    def launches(self, problem: QuantizedMatmulProblem, config: Config) -> tuple[plan.Launch, ...]:
        out = len(problem.operand_types)
        launch = plan.Launch(
            kernel=self.kernel_name(problem),
            grid=(config.clusters * config.cluster, 1, 1),
            block=(128 * (config.warpgroups + 1), 1, 1),  # consumers, and a warpgroup of the producer and the epilogue
            params=(
                plan.MapParam(0) if _by_tma(problem) else plan.Pointer(0),
                *(plan.Pointer(1), plan.Pointer(2), dequantize.zero_pointer(problem), plan.Pointer(out)),
                _args(problem, config),
                *dequantize.last_pointers(problem),
                *norm.pointers(problem),
            ),
            shared_bytes=memory(problem, config).bytes,
            cluster=(config.cluster, 1, 1),
        )
        return (launch,)


FAMILY = Stream(Config)
