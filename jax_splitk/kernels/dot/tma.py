"""Kernel family: matrix products on Hopper whose operands go by TMA to WGMMA as they are (device code: dot/tma.cu).

The output is cut into tiles and the reduction over k into splits; a thread block computes one tile of one split. Splits
take turns at blocks of 128 bytes of k. They meet in the workspace, where a second kernel adds the fp32 partial sums
(programmatic dependent launch), or in a thread-block cluster through distributed shared memory: one launch and no
workspace. Either way they are added in a fixed order, so that the result is deterministic, bit for bit. What adds them
computes the epilogue, too, once (dot/epilogue.cuh).

The methods are those of CUTLASS's split-k and parallel reduction ("Efficient GEMM in CUDA" in its documentation).
"""

import dataclasses
import math
from collections.abc import Iterator

from jax import numpy as jnp

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Divisor, Values, declarations
from jax_splitk.kernels.device.wgmma_tile import (
    MIN_STAGES,
    ROW_BYTES,
    TILES,
    TileCosts,
    WgmmaTile,
    depths,
    max_stages,
    tile_refusal,
)
from jax_splitk.kernels.family import CudaFamily, field_macros, field_refusal, varied
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target

BOX = 64  # elements along m or n of a box of an operand that is not K-major
MAX_CLUSTER = 8  # larger ones leave whole GPCs' multiprocessors empty
# Blocks of k of a float32 result's split: the tensor cores truncate their sums.
MAX_FLOAT32_CHAIN = 512
INT32_MAX = 2**31 - 1
MAX_GRID_YZ = 65535
# Where our kernels were measured to be faster than XLA's library: up to 64 tiles of 128 x 128 and some 10 us.
_LIBRARY_FLOPS, _LIBRARY_BYTES = 790e12, 4.3e12
_FEW_TILES = 64
_SHORT_SECONDS = 10e-6
ELEMENT_CODES = {**split_k.OUT_CODES, E4M3: 3}  # macro ELEMENT
# Sums of a thread for e4m3, which has each twice, of a stage and of all; by thread blocks that share an SM.
MAX_E4M3_SUMS = {1: 64, 2: 32}
# Macros BIAS and ACTIVATION.
BIAS_CODES = {"none": 0, "m": 1, "n": 2}
ACTIVATION_CODES = {"none": 0, "relu": 1, "gelu": 2, "gelu_exact": 3, "silu": 4}
REDUCTIONS = {"none": 0, "workspace": 1, "cluster": 2}  # macro REDUCTION


@dataclasses.dataclass(frozen=True)
class Config(WgmmaTile):
    """How a matrix product is computed.

    Attributes:
      tile_m, tile_n, stages: see `WgmmaTile`.
      splits: parts into which the reduction over k is cut; none may be empty.
      reduction: where the splits meet: "none" (there is one), "workspace" or "cluster".
    """

    splits: int = 1
    reduction: str = "none"


def least_stages(tile_m: int, tile_n: int) -> int:
    """So many as hold the fp32 sums of a tile, whose rows are 8 longer."""
    return max(MIN_STAGES, -(-tile_m * (tile_n + 8) * 4 // ((tile_m + tile_n) * ROW_BYTES)))


def k_blocks(problem: DotProblem) -> int:
    """Blocks of the reduction."""
    return -(-problem.k * jnp.dtype(problem.dtype).itemsize // ROW_BYTES)


def tile_counts(problem: DotProblem, config: Config) -> tuple[int, int]:
    """(tiles along m, tiles along n) of a product of the batch."""
    return -(-problem.m // config.tile_m), -(-problem.n // config.tile_n)


def kernel_args(problem: DotProblem, config: Config) -> Values:
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


def operand_map(buffer: int, problem: DotProblem, order: str, tile: int) -> plan.TiledMap:
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


def _epilogue_macros(problem: DotProblem) -> dict[str, int]:
    """Of epilogue.cuh; none for a product alone."""
    if not problem.epilogue:
        return {}
    return {
        "EPILOGUE": 1,
        "BIAS": BIAS_CODES[problem.bias],
        "BIAS_TYPE": split_k.OUT_CODES.get(problem.bias_dtype, 0),
        "ACTIVATION": ACTIVATION_CODES[problem.activation],
        "RESIDUAL_TYPE": split_k.OUT_CODES.get(problem.residual_dtype, -1),
    }


def _epilogue_params(problem: DotProblem) -> tuple[plan.Pointer, ...]:
    """(bias, residual); of one that is not there lhs, which is not read."""
    if not problem.epilogue:
        return ()
    bias, residual = problem.bias != "none", problem.residual_dtype != "none"
    return plan.Pointer(2 * bias), plan.Pointer((2 + bias) * residual)


@dataclasses.dataclass(frozen=True)
class Costs(TileCosts):
    """The cost model's constants.

    Attributes:
      hbm_bytes_per_second: of device memory.
      partial_bytes_per_second: at which partial sums are written and read again.
      wave_seconds: of filling the pipeline.
      launch_seconds, reduce_seconds, cluster_seconds: of a launch, of the second kernel, and of sums in a cluster,
        however little there is to do.
      cluster_bytes_per_sm, epilogue_bytes_per_sm: a second, of a tile's sums in a cluster, and without splits.
      cluster_loss: multiprocessors that clusters of so many blocks leave empty.
    """

    hbm_bytes_per_second: float
    partial_bytes_per_second: float
    wave_seconds: float
    launch_seconds: float
    reduce_seconds: float
    cluster_seconds: float
    cluster_bytes_per_sm: float
    epilogue_bytes_per_sm: float
    cluster_loss: dict[int, int]


class Tma(CudaFamily[DotProblem, Config]):
    """Chosen wherever it is legal and predicted to be the fastest."""

    name = "dot_tma"
    ABI = 1
    file = "dot/tma.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: DotProblem) -> str | None:
        p = problem
        if p.dtype not in ELEMENT_CODES:
            return f"dtype {p.dtype}; accepted: {', '.join(ELEMENT_CODES)}"
        # The tensor cores keep too little of e4m3 products for float32.
        outs = [dtype for dtype in split_k.OUT_CODES if dtype != "float32" or p.dtype != E4M3]
        if p.out_dtype not in outs:
            return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(outs)}"
        for name in ("bias_dtype", "residual_dtype"):
            if (dtype := getattr(p, name)) not in ("none", *split_k.OUT_CODES):
                return f"{name} {dtype}; accepted: {', '.join(split_k.OUT_CODES)}"
        majors = (p.lhs_order[-1], p.rhs_order[-1])
        if p.precision == "highest" and p.dtype == "float32":
            return "precision 'highest'; accepted: 'default', 'high'"
        if p.dtype in ("float32", E4M3) and majors != ("k", "k"):
            return f"{p.dtype} with {majors[0]} and {majors[1]} contiguous; accepted: k in both"
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
        if (reason := tile_refusal(config)) is not None:
            return reason
        stages = range(least_stages(config.tile_m, config.tile_n), max_stages(config.tile_m, config.tile_n) + 1)
        reason = field_refusal(config, stages=stages, reduction=tuple(REDUCTIONS))
        if reason is not None:
            return reason
        sums = config.tile_m // 64 // config.consumers * config.tile_n // 2
        if problem.dtype == E4M3 and sums > (most := MAX_E4M3_SUMS[config.blocks_per_sm]):
            tile = f"tile {config.tile_m}x{config.tile_n} of {config.stages} stages"
            return f"{tile}, {sums} sums a thread, with {E4M3}; accepted: at most {most}"
        if (config.splits == 1) != (config.reduction == "none"):
            return f"reduction {config.reduction!r} of {config.splits} splits; accepted: 'none' of 1, others of more"
        if config.reduction == "cluster" and config.splits > MAX_CLUSTER:
            return f"splits {config.splits} in a cluster; accepted: at most {MAX_CLUSTER}"
        return split_k.splits_refusal(config.splits, k_blocks(problem), "blocks of k", uneven=True)

    def unmeasured_refusal(self, problem: DotProblem) -> str | None:
        """XLA's library is as fast where tiles fill the machine by themselves, and on long products. What no GPU has
        run yet is left to those who ask for it."""
        if problem.dtype == E4M3 or problem.epilogue:
            what = "an epilogue" if problem.epilogue else "e4m3 operands"
            return f"{what} in the kernel: it takes an explicit config or implementation, or a measurement"
        tiles = -(-problem.m // 128) * -(-problem.n // 128) * problem.batch
        seconds = max(problem.flops / _LIBRARY_FLOPS, problem.bytes_moved / _LIBRARY_BYTES)
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
            for stages in depths(tile_m, tile_n):
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
        costs: Costs = self.costs(target)
        blocks = self.thread_blocks(problem, config) * config.splits
        resident = target.cores * config.blocks_per_sm
        if config.reduction == "cluster":
            resident -= costs.cluster_loss[config.splits] * config.blocks_per_sm
        waves = -(-blocks // resident)
        busiest = waves * config.blocks_per_sm if config.reduction == "cluster" else -(-blocks // target.cores)
        step = config.step_seconds(costs)
        seconds = busiest * -(-k_blocks(problem) // config.splits) * step + waves * costs.wave_seconds
        share = min(1.0, blocks / target.cores)  # of the multiprocessors, which the memory needs all
        seconds = max(seconds, problem.bytes_moved / (costs.hbm_bytes_per_second * share)) + costs.launch_seconds
        if config.reduction == "workspace":
            seconds += costs.reduce_seconds + 2 * self.workspace_bytes(problem, config) / costs.partial_bytes_per_second
        elif config.reduction == "cluster":
            seconds += costs.cluster_seconds + config.tile_m * config.tile_n * 4 * waves / costs.cluster_bytes_per_sm
        else:
            seconds += config.tile_m * config.tile_n * 4 * waves / costs.epilogue_bytes_per_sm
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
            "ELEMENT": ELEMENT_CODES[problem.dtype],
            "OUT": split_k.OUT_CODES[problem.out_dtype],
            **field_macros(config, "tile_m", "tile_n", "stages"),
            "CTAS_PER_SM": config.blocks_per_sm,
            "A_MN": int(problem.lhs_order[-1] == "m"),
            "B_MN": int(problem.rhs_order[-1] == "n"),
            "A_WHOLE": int(_is_whole(problem.m)),
            "B_WHOLE": int(_is_whole(problem.n)),
            "REDUCTION": REDUCTIONS[config.reduction],
            "SPLITS": config.splits if config.reduction == "cluster" else 1,
            **_epilogue_macros(problem),
        }

    def buffers(self, problem: DotProblem, config: Config) -> tuple[plan.Buffer, ...]:
        """lhs, rhs, those of the epilogue, out, workspace."""
        operands = ((problem.lhs_shape, problem.dtype), (problem.rhs_shape, problem.dtype), *problem.epilogue_operands)
        shapes = (*operands, (problem.out_shape, problem.out_dtype))
        sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes]
        return tuple(plan.Buffer(size, 16) for size in (*sizes, self.workspace_bytes(problem, config)))

    def maps(self, problem: DotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        lhs = operand_map(0, problem, problem.lhs_order, config.tile_m)
        return lhs, operand_map(1, problem, problem.rhs_order, config.tile_n)

    def launches(self, problem: DotProblem, config: Config, args: Values | None = None) -> tuple[plan.Launch, ...]:
        """With those arguments, of a family that borrows the kernels, for the product's."""
        rows, columns = tile_counts(problem, config)
        cluster = config.splits if config.reduction == "cluster" else 1
        in_workspace = config.reduction == "workspace"
        given = (args or kernel_args(problem, config)).param()
        out = plan.Pointer(2 + len(problem.epilogue_operands))
        partials, epilogue = plan.Pointer(out.buffer + 1), _epilogue_params(problem)
        main = plan.Launch(
            kernel="dot",
            grid=(rows, columns, config.splits * problem.batch),
            block=(config.threads, 1, 1),
            params=(plan.MapParam(0), plan.MapParam(1), given, *((partials,) if in_workspace else (out, *epilogue))),
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
            params=(partials, out, given, self._reduce_args(problem, config).param(), *epilogue),
            programmatic=True,
        )
        return main, reduce

    def _reduce_args(self, problem: DotProblem, config: Config) -> Values:
        size = self._partial_stride(problem, config)
        return split_k.reduce_args(size, size, config.splits)

    def source(self, problem: DotProblem, config: Config, args: Values | None = None, **macros: int) -> Source:
        """With those arguments and further macros, of a family that borrows the kernels."""
        structs = declarations(self._reduce_args(problem, config), args or kernel_args(problem, config))
        return Source(self.file, tuple((self.macros(problem, config) | macros).items()), structs)


FAMILY = Tma(Config, Costs)
