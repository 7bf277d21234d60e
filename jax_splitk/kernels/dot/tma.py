"""Kernel family: matrix products on Hopper whose operands go by TMA to WGMMA as they are (device code: dot/tma.cu).

The output is cut into tiles and the reduction over k into splits; a thread block computes one tile of one split. Splits
take turns at blocks of 128 bytes of k. They meet in the workspace, where a second kernel adds the fp32 partial sums
(programmatic dependent launch), or in a thread-block cluster through distributed shared memory: one launch and no
workspace. Either way they are added in a fixed order, so that the result is deterministic, bit for bit.

The methods are those of CUTLASS's split-k and parallel reduction ("Efficient GEMM in CUDA" in its documentation).
"""

import dataclasses
import math
from collections.abc import Iterator

from jax import numpy as jnp

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Divisor, Values, declarations
from jax_splitk.kernels.family import CudaFamily, field_refusal, varied
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target

ROW_BYTES = 128  # of shared memory: the swizzle
BOX = 64  # elements along m or n of a box of an operand that is not K-major
SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 2 * 1024  # alignment of the pipeline and barriers
MIN_STAGES, MAX_STAGES = 2, 8
MAX_CLUSTER = 8  # larger ones leave whole GPCs' multiprocessors empty
# Blocks of k of a float32 result's split: the tensor cores truncate their sums.
MAX_FLOAT32_CHAIN = 512
INT32_MAX = 2**31 - 1
MAX_GRID_YZ = 65535

# (tile_m, tile_n): rows of one or more 64-row blocks per consumer warpgroup, columns of one WGMMA.
TILES = (
    (64, 64),
    (64, 128),
    (64, 192),
    (64, 256),
    (128, 64),
    (128, 128),
    (128, 192),
    (128, 256),
    (192, 64),
    (192, 128),
    (192, 192),
    (256, 64),
    (256, 128),
)
REDUCTIONS = {"none": 0, "workspace": 1, "cluster": 2}  # macro REDUCTION


@dataclasses.dataclass(frozen=True)
class Config:
    """How a matrix product is computed.

    Attributes:
      tile_m, tile_n: output tile of a thread block (elements); see `TILES`.
      stages: depth of the shared-memory pipeline, in blocks of 128 bytes of k.
      splits: parts into which the reduction over k is cut; none may be empty.
      reduction: where the splits meet: "none" (there is one), "workspace" or "cluster".
    """

    tile_m: int
    tile_n: int
    stages: int
    splits: int = 1
    reduction: str = "none"

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + RESERVED_BYTES

    @property
    def consumers(self) -> int:
        """Consumer warpgroups (CONSUMERS in the device code)."""
        return 2 if self.tile_m == 256 and self.tile_n <= 128 else self.tile_m // 64

    @property
    def blocks_per_sm(self) -> int:
        """2 where shared memory and, at 128 registers a thread, the accumulators allow it."""
        return 2 if self.consumers == 1 and self.tile_n <= 192 and 2 * self.shared_bytes <= SHARED_BYTES else 1


def least_stages(tile_m: int, tile_n: int) -> int:
    """So many as hold the fp32 sums of a tile, whose rows are 8 longer."""
    return max(MIN_STAGES, -(-tile_m * (tile_n + 8) * 4 // ((tile_m + tile_n) * ROW_BYTES)))


def most_stages(tile_m: int, tile_n: int, blocks_per_sm: int = 1) -> int:
    """The deepest pipeline that fits in shared memory and is of use."""
    room = (SHARED_BYTES // blocks_per_sm - RESERVED_BYTES) // ((tile_m + tile_n) * ROW_BYTES)
    return min(MAX_STAGES, room)


def k_blocks(problem: DotProblem) -> int:
    """Blocks of the reduction."""
    return -(-problem.k * jnp.dtype(problem.dtype).itemsize // ROW_BYTES)


def tile_counts(problem: DotProblem, config: Config) -> tuple[int, int]:
    """(tiles along m, tiles along n) of a product of the batch."""
    return -(-problem.m // config.tile_m), -(-problem.n // config.tile_n)


def _args(problem: DotProblem, config: Config) -> Values:
    """Of the kernels: tiles along m and n; blocks of the reduction of a split, of which the first `longer` splits have
    one more; whether a single tile reads any of the operand, so that it need not stay in the L2."""
    rows, columns = tile_counts(problem, config)
    blocks, longer = divmod(k_blocks(problem), config.splits)
    return Values(
        "Args",
        {
            "m": problem.m,
            "n": problem.n,
            "rows": Divisor.of(rows),
            "columns": Divisor.of(columns),
            "splits": Divisor.of(config.splits),
            "k_blocks": blocks,
            "longer": longer,
            "a_once": int(columns == 1),
            "b_once": int(rows == 1),
        },
    )


def _is_whole(size: int) -> bool:
    """Whether an operand's m or n, which is contiguous, has a dimension of its own for each `BOX` of it: one load
    instead of one for each of them."""
    return size % BOX == 0


def _operand_map(buffer: int, problem: DotProblem, order: str, tile: int) -> plan.TiledMap:
    """The dimensions as (contiguous, other, batch), wherever the batch lies in memory."""
    item = jnp.dtype(problem.dtype).itemsize
    shape = problem.lhs_shape if buffer == 0 else problem.rhs_shape
    strides = {order[axis]: math.prod(shape[axis + 1 :]) * item for axis in range(3)}
    sizes = dict(zip(order, shape, strict=True))
    inner = order[-1]
    outer = next(name for name in order if name not in ("b", inner))
    block_k = ROW_BYTES // item
    if inner == "k":
        dims, box = (sizes["k"], sizes[outer], sizes["b"]), (block_k, tile, 1)
        return plan.TiledMap(buffer, problem.dtype, dims, (strides[outer], strides["b"]), box)
    if not _is_whole(sizes[inner]):
        dims, box = (sizes[inner], sizes["k"], sizes["b"]), (BOX, block_k, 1)
        return plan.TiledMap(buffer, problem.dtype, dims, (strides["k"], strides["b"]), box)
    dims = (BOX, sizes["k"], sizes[inner] // BOX, sizes["b"])
    box = (BOX, block_k, tile // BOX, 1)
    return plan.TiledMap(buffer, problem.dtype, dims, (strides["k"], BOX * item, strides["b"]), box)


class Tma(CudaFamily[DotProblem, Config]):
    """Chosen wherever it is legal and predicted to be the fastest."""

    name = "dot_tma"
    ABI = 1
    file = "dot/tma.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: DotProblem) -> str | None:
        p = problem
        if p.dtype not in ("bfloat16", "float16", "float32"):
            return f"dtype {p.dtype}; accepted: bfloat16, float16, float32"
        if p.out_dtype not in split_k.OUT_CODES:
            return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(split_k.OUT_CODES)}"
        majors = (p.lhs_order[-1], p.rhs_order[-1])
        if p.dtype == "float32":
            if p.precision == "highest":
                return "precision 'highest'; accepted: 'default', 'high'"
            if majors != ("k", "k"):
                return f"float32 with {majors[0]} and {majors[1]} contiguous; accepted: k in both"
        multiple = 16 // jnp.dtype(p.dtype).itemsize
        sizes = {"m": p.m, "n": p.n, "k": p.k}
        for major in majors:
            if sizes[major] % multiple:
                return f"{major}={sizes[major]}, which is contiguous; accepted: multiples of {multiple}"
        if p.n % 4:
            return f"n={p.n}; accepted: multiples of 4"
        if max(math.prod(p.lhs_shape), math.prod(p.rhs_shape), math.prod(p.out_shape)) > INT32_MAX - 2**20:
            return f"operands or a result of more than {INT32_MAX - 2**20} elements"
        if p.batch > MAX_GRID_YZ:
            return f"batch {p.batch}; accepted: at most {MAX_GRID_YZ}"
        return None

    def config_refusal(self, problem: DotProblem, config: Config) -> str | None:
        if (config.tile_m, config.tile_n) not in TILES:
            return f"tile {config.tile_m}x{config.tile_n}; accepted: {', '.join(f'{m}x{n}' for m, n in TILES)}"
        stages = range(least_stages(config.tile_m, config.tile_n), most_stages(config.tile_m, config.tile_n) + 1)
        reason = field_refusal(config, stages=stages, reduction=tuple(REDUCTIONS))
        if reason is not None:
            return reason
        if (config.splits == 1) != (config.reduction == "none"):
            return f"reduction {config.reduction!r} of {config.splits} splits; accepted: 'none' of 1, others of more"
        if config.reduction == "cluster" and config.splits > MAX_CLUSTER:
            return f"splits {config.splits} in a cluster; accepted: at most {MAX_CLUSTER}"
        return split_k.splits_refusal(config.splits, k_blocks(problem), "blocks of k", uneven=True)

    def unmeasured_refusal(self, problem: DotProblem) -> str | None:
        """XLA's library is as fast where tiles fill the machine by themselves, and on long products."""
        tiles = -(-problem.m // 128) * -(-problem.n // 128) * problem.batch
        seconds = max(problem.flops / _LIBRARY_FLOPS, problem.bytes_moved / _HBM_BYTES)
        if tiles <= _FEW_TILES and seconds < _SHORT_SECONDS:
            return None
        return f"{problem} was not measured, and XLA's product is as fast as ours for most of its size"

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: DotProblem, config: Config) -> int:
        return config.blocks_per_sm

    def thread_blocks(self, problem: DotProblem, config: Config) -> int:
        """Of one split."""
        return math.prod(tile_counts(problem, config)) * problem.batch

    def _least_splits(self, problem: DotProblem) -> int:
        return -(-k_blocks(problem) // MAX_FLOAT32_CHAIN) if problem.out_dtype == "float32" else 1

    def _splits(self, problem: DotProblem, config: Config, target: Target) -> Iterator[Config]:
        """The config with one split, in clusters, and with splits that fill 1 to 4 waves; as far as accurate enough."""
        blocks, least = k_blocks(problem), self._least_splits(problem)
        slots, tiles = target.cores * config.blocks_per_sm, self.thread_blocks(problem, config)
        wanted = {least, *(max(least, slots * waves // tiles) for waves in range(1, 5))}
        if least == 1:
            yield config
        for splits in range(max(2, least), MAX_CLUSTER + 1):
            if splits <= blocks and tiles * splits <= 2 * slots:
                yield dataclasses.replace(config, splits=splits, reduction="cluster")
        for splits in sorted({min(splits, blocks) for splits in wanted} - {0, 1}):
            yield dataclasses.replace(config, splits=splits, reduction="workspace")

    def candidates(self, problem: DotProblem, target: Target) -> list[Config]:
        """Of every tile the best few ways to split by the model."""
        found: list[Config] = []
        for tile_m, tile_n in TILES:
            depths = {most_stages(tile_m, tile_n)}
            if tile_m == 64 and tile_n <= 192:
                depths.add(most_stages(tile_m, tile_n, blocks_per_sm=2))
            for stages in sorted(depths):
                splits = self._splits(problem, Config(tile_m, tile_n, stages), target)
                legal = [c for c in splits if self.config_refusal(problem, c) is None]
                found += sorted(legal, key=lambda c: self.estimate(problem, c, target))[:4]
        return found

    def neighbours(self, problem: DotProblem, config: Config, target: Target) -> list[Config]:
        """A stage less, the other reduction, and split counts nearby."""
        blocks, least = k_blocks(problem), self._least_splits(problem)
        found = [dataclasses.replace(config, stages=config.stages - 1)]
        if config.splits > 1:
            other = "cluster" if config.reduction == "workspace" else "workspace"
            found.append(dataclasses.replace(config, reduction=other))
            near = {config.splits - 1, config.splits + 1, config.splits * 2, config.splits // 2}
            near = {min(splits, blocks) for splits in near if splits >= max(2, least)} - {1, config.splits}
            found += varied(config, splits=sorted(near))
        return found

    def swept(self, config: Config, splits: int) -> list[Config]:
        meeting = [name for name in REDUCTIONS if (name == "none") == (splits == 1)]
        return varied(dataclasses.replace(config, splits=splits), reduction=meeting)

    def estimate(self, problem: DotProblem, config: Config, target: Target) -> float:
        """Predicted seconds: the busiest SM's blocks at the slower of tensor-core and L2 rate, plus the reduction."""
        itemsize = jnp.dtype(problem.dtype).itemsize
        mma = 2 * config.tile_m * config.tile_n * (ROW_BYTES // itemsize) / (_MMA_FLOPS_PER_SM * 2 / itemsize)
        if config.consumers == 1:
            mma /= _ONE_WARPGROUP
        elif config.tile_n == 64:
            mma /= _NARROW
        load = config.stage_bytes / _L2_BYTES_PER_SM
        step = max(mma, load) + _SHADOW * min(mma, load)
        blocks = self.thread_blocks(problem, config) * config.splits
        resident = target.cores * config.blocks_per_sm
        if config.reduction == "cluster":
            resident -= _CLUSTER_LOSS[config.splits] * config.blocks_per_sm
        waves = -(-blocks // resident)
        busiest = waves * config.blocks_per_sm if config.reduction == "cluster" else -(-blocks // target.cores)
        seconds = busiest * -(-k_blocks(problem) // config.splits) * step + waves * _WAVE_SECONDS
        share = min(1.0, blocks / target.cores)  # of the multiprocessors, which the memory needs all
        seconds = max(seconds, problem.bytes_moved / (_HBM_BYTES * share)) + _LAUNCH_SECONDS
        if config.reduction == "workspace":
            seconds += _REDUCE_SECONDS + 2 * self.workspace_bytes(problem, config) / _PARTIAL_BYTES
        elif config.reduction == "cluster":
            seconds += _CLUSTER_SECONDS + config.tile_m * config.tile_n * 4 * waves / _CLUSTER_BYTES_PER_SM
        else:
            seconds += config.tile_m * config.tile_n * 4 * waves / _EPILOGUE_BYTES_PER_SM
        return seconds

    # ---- plan ------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: DotProblem, config: Config) -> int:
        """fp32 partial sums, one set for each split, where they meet there."""
        if config.reduction != "workspace":
            return 0
        return config.splits * self._partial_stride(problem, config) * 4

    def _partial_stride(self, problem: DotProblem, config: Config) -> int:
        """Elements from one split's partial sums to the next's: whole tiles."""
        return self.thread_blocks(problem, config) * config.tile_m * config.tile_n

    def macros(self, problem: DotProblem, config: Config) -> dict[str, int]:
        return {
            "ELEMENT": split_k.OUT_CODES[problem.dtype],
            "OUT": split_k.OUT_CODES[problem.out_dtype],
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "STAGES": config.stages,
            "CTAS_PER_SM": config.blocks_per_sm,
            "A_MN": int(problem.lhs_order[-1] == "m"),
            "B_MN": int(problem.rhs_order[-1] == "n"),
            "A_WHOLE": int(_is_whole(problem.m)),
            "B_WHOLE": int(_is_whole(problem.n)),
            "REDUCTION": REDUCTIONS[config.reduction],
            "SPLITS": config.splits if config.reduction == "cluster" else 1,
        }

    def buffers(self, problem: DotProblem, config: Config) -> tuple[plan.Buffer, ...]:
        """lhs, rhs, out, workspace."""
        item, out_item = jnp.dtype(problem.dtype).itemsize, jnp.dtype(problem.out_dtype).itemsize
        shapes = ((problem.lhs_shape, item), (problem.rhs_shape, item), (problem.out_shape, out_item))
        sizes = (*(math.prod(shape) * size for shape, size in shapes), self.workspace_bytes(problem, config))
        return tuple(plan.Buffer(size, 16) for size in sizes)

    def maps(self, problem: DotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        lhs = _operand_map(0, problem, problem.lhs_order, config.tile_m)
        return lhs, _operand_map(1, problem, problem.rhs_order, config.tile_n)

    def launches(self, problem: DotProblem, config: Config) -> tuple[plan.Launch, ...]:
        rows, columns = tile_counts(problem, config)
        cluster = config.splits if config.reduction == "cluster" else 1
        in_workspace = config.reduction == "workspace"
        args = _args(problem, config).param()
        main = plan.Launch(
            kernel="dot",
            grid=(rows, columns, config.splits * problem.batch),
            block=(128 * (config.consumers + 1), 1, 1),
            params=(plan.MapParam(0), plan.MapParam(1), args, plan.Pointer(3 if in_workspace else 2)),
            shared_bytes=config.shared_bytes,
            cluster=(1, 1, cluster),
        )
        if not in_workspace:
            return (main,)
        lanes = split_k.reduce_lanes(self._partial_stride(problem, config) // 4, config.splits)
        reduce = plan.Launch(
            kernel="reduce_dot",
            grid=(-(-self._partial_stride(problem, config) // (4 * split_k.REDUCE_THREADS // lanes)), 1, 1),
            block=(split_k.REDUCE_THREADS, 1, 1),
            params=(plan.Pointer(3), plan.Pointer(2), args, self._reduce_args(problem, config).param()),
            programmatic=True,
        )
        return main, reduce

    def _reduce_args(self, problem: DotProblem, config: Config) -> Values:
        size = self._partial_stride(problem, config)
        return split_k.reduce_args(size, size, config.splits)

    def source(self, problem: DotProblem, config: Config) -> Source:
        structs = declarations(self._reduce_args(problem, config), _args(problem, config))
        return Source(self.file, tuple(self.macros(problem, config).items()), structs)


# Where our kernels were measured to be faster than XLA's library: up to 64 tiles of 128 x 128 and some 10 us.
_LIBRARY_FLOPS = 790e12
_FEW_TILES = 64
_SHORT_SECONDS = 10e-6
# Those of wgrad_im2col, and what was measured of clusters.
_MMA_FLOPS_PER_SM = 990e12 / 132
_ONE_WARPGROUP = 0.86
_NARROW = 0.95
_L2_BYTES_PER_SM = 167e9
_SHADOW = 0.31
_HBM_BYTES = 4.3e12
_PARTIAL_BYTES = 6.5e12
_WAVE_SECONDS = 0.3e-6
_LAUNCH_SECONDS = 2.6e-6
_REDUCE_SECONDS = 1.2e-6
_CLUSTER_SECONDS = 0.8e-6
_CLUSTER_BYTES_PER_SM = 60e9
_EPILOGUE_BYTES_PER_SM = 100e9
# Multiprocessors that clusters of so many blocks leave empty.
_CLUSTER_LOSS = {2: 0, 3: 6, 4: 12, 5: 12, 6: 12, 7: 13, 8: 12}

FAMILY = Tma(Config)
