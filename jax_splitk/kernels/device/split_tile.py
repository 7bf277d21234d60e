"""Output tiles whose reduction is split, and where the splits meet: the host's side of `split_tile.cuh`.

A thread block computes one tile of one split. Splits take turns at the blocks of the reduction, which are 128 bytes of
a row. They meet in the workspace, where a second kernel adds the fp32 partial sums (programmatic dependent launch), or
in a thread-block cluster through distributed shared memory: one launch and no workspace. Either way they are added in a
fixed order, so that the result is deterministic, bit for bit.

The methods are those of CUTLASS's split-k and parallel reduction ("Efficient GEMM in CUDA" in its documentation).
"""

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from jax import numpy as jnp

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Values
from jax_splitk.kernels.device.wgmma_tile import (
    MIN_STAGES,
    ROW_BYTES,
    TILES,
    WgmmaTile,
    depths,
    max_stages,
    tile_refusal,
)
from jax_splitk.kernels.family import ModelledFamily, field_macros, field_refusal, varied
from jax_splitk.kernels.work import Work
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

BOX = 64  # elements along m or n of a box of an operand that is not K-major
MAX_CLUSTER = 8  # larger ones leave whole GPCs' multiprocessors empty
# Blocks of the reduction of a float32 result's split: the tensor cores truncate their sums.
MAX_FLOAT32_CHAIN = 512
MAX_ELEMENTS = 2**31 - 1 - 2**20  # of an array; 32-bit integers count them, and what tiles have beyond
MAX_GRID_YZ = 65535
SWIZZLES = {32: 1, 64: 2, 128: plan.SWIZZLE_128B}  # CUtensorMapSwizzle by a row's bytes
REDUCTIONS = {"none": 0, "workspace": 1, "cluster": 2}  # macro REDUCTION


@dataclasses.dataclass(frozen=True)
class SplitTile(WgmmaTile):
    """What configs of such kernels are.

    Attributes:
      tile_m, tile_n, stages: see `WgmmaTile`.
      splits: parts into which the reduction is cut; none may be empty.
      reduction: where the splits meet: "none" (there is one), "workspace" or "cluster".
    """

    splits: int = 1
    reduction: str = "none"


def least_stages(tile_m: int, tile_n: int) -> int:
    """So many as hold the fp32 sums of a tile, whose rows are 8 longer."""
    return max(MIN_STAGES, -(-tile_m * (tile_n + 8) * 4 // ((tile_m + tile_n) * ROW_BYTES)))


def is_whole(size: int) -> bool:
    """Whether an operand's m or n, which is contiguous, has a dimension of its own for each `BOX` of it: one load
    instead of one for each of them."""
    return size % BOX == 0


def map_dtype(dtype: str) -> str:
    """Of an operand's tensor map: its loads round float32, of which the tensor cores would cut off the low bits."""
    return plan.TF32 if dtype == "float32" else dtype


def operand_map(
    buffer: int,
    dtype: str,
    shape: tuple[int, ...],
    order: str,
    tile: int,
    row_bytes: int = ROW_BYTES,
    whole: bool = True,
) -> plan.TiledMap:
    """The dimensions as (contiguous, other, batch), wherever the batch lies in memory; `order` names them by b, k and
    another letter. A box has `tile` of the last, and `row_bytes` of k. `whole`: tiles begin at multiples of `BOX`."""
    item, dtype = jnp.dtype(dtype).itemsize, map_dtype(dtype)
    strides = {order[axis]: math.prod(shape[axis + 1 :]) * item for axis in range(3)}
    sizes = dict(zip(order, shape, strict=True))
    inner = order[-1]
    outer = next(name for name in order if name not in ("b", inner))
    block_k = row_bytes // item
    if inner == "k":
        dims, box = (sizes["k"], sizes[outer], sizes["b"]), (block_k, tile, 1)
        return plan.TiledMap(buffer, dtype, dims, (strides[outer], strides["b"]), box, SWIZZLES[row_bytes])
    if not (whole and is_whole(sizes[inner])):
        columns = min(tile, BOX)
        dims, box = (sizes[inner], sizes["k"], sizes["b"]), (columns, block_k, 1)
        return plan.TiledMap(buffer, dtype, dims, (strides["k"], strides["b"]), box, SWIZZLES[columns * item])
    dims = (BOX, sizes["k"], sizes[inner] // BOX, sizes["b"])
    box = (BOX, block_k, tile // BOX, 1)
    return plan.TiledMap(buffer, dtype, dims, (strides["k"], BOX * item, strides["b"]), box)


class _Sums(Protocol):
    """A problem of such a family."""

    @property
    def out_dtype(self) -> str: ...
    @property
    def bytes_moved(self) -> int: ...


_Problem = TypeVar("_Problem", bound=_Sums)
_Config = TypeVar("_Config", bound=SplitTile)


class SplitTileFamily(ModelledFamily[_Problem, _Config]):
    """Kernels of two tensor maps, of A and B.

    Attributes:
      reductions: where splits may meet.
    """

    reductions: ClassVar[tuple[str, ...]] = tuple(REDUCTIONS)

    def tiles(self, problem: _Problem) -> Sequence[tuple[int, int]]:
        """(tile_m, tile_n) that there are."""
        return TILES

    def stage_counts(self, config: _Config) -> range:
        """That its tile may have."""
        return range(least_stages(config.tile_m, config.tile_n), max_stages(config.tile_m, config.tile_n) + 1)

    @abc.abstractmethod
    def chains(self, problem: _Problem, config: _Config) -> Sequence[int]:
        """Blocks of the reduction of a tile, the longest first; each of them that of as many tiles. A stage has one."""

    @abc.abstractmethod
    def thread_blocks(self, problem: _Problem, config: _Config) -> int:
        """Of one split: tiles of the whole result."""

    @abc.abstractmethod
    def args(self, problem: _Problem, config: _Config) -> Values:
        """The kernels' struct `Args`."""

    @abc.abstractmethod
    def grid(self, problem: _Problem, config: _Config) -> tuple[int, int, int]:
        """Of the main kernel; the splits of a tile follow each other along z."""

    def result(self, problem: _Problem, config: _Config) -> plan.Param:
        """The parameter by which a kernel without partial sums stores."""
        return plan.Pointer(len(self.buffers(problem, config)) - 2)

    def epilogue_params(self, problem: _Problem) -> tuple[plan.Param, ...]:
        """Of the kernel that stores the result, after all others."""
        return ()

    def config_refusal(self, problem: _Problem, config: _Config) -> str | None:
        if (reason := tile_refusal(config, self.tiles(problem))) is not None:
            return reason
        reason = field_refusal(config, stages=self.stage_counts(config), reduction=self.reductions)
        if reason is not None:
            return reason
        if (config.splits == 1) != (config.reduction == "none"):
            return f"reduction {config.reduction!r} of {config.splits} splits; accepted: 'none' of 1, others of more"
        if config.reduction == "cluster" and config.splits > MAX_CLUSTER:
            return f"splits {config.splits} in a cluster; accepted: at most {MAX_CLUSTER}"
        if config.reduction == "workspace" and (sums := self._partial_stride(problem, config)) > MAX_ELEMENTS:
            return f"{sums} partial sums of a split; accepted: at most {MAX_ELEMENTS}"
        return split_k.splits_refusal(config.splits, self.chains(problem, config)[0], "blocks of k", uneven=True)

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: _Problem, config: _Config) -> int:
        return config.blocks_per_sm

    def least_splits(self, problem: _Problem, config: _Config) -> int:
        """By which the result is accurate enough."""
        blocks = self.chains(problem, config)[0] * config.depth
        return -(-blocks // MAX_FLOAT32_CHAIN) if problem.out_dtype == "float32" else 1

    def _splits(self, problem: _Problem, config: _Config, target: Target) -> Iterator[_Config]:
        """The config with one split, in clusters, and with splits that fill 1 to 4 waves; as far as accurate enough."""
        blocks, least = self.chains(problem, config)[0], self.least_splits(problem, config)
        slots, tiles = target.cores * config.blocks_per_sm, self.thread_blocks(problem, config)
        wanted = {least, *(max(least, slots * waves // tiles) for waves in range(1, 5))}
        if least == 1:
            yield config
        clusters = range(max(2, least), MAX_CLUSTER + 1) if "cluster" in self.reductions else ()
        for splits in clusters:
            if splits <= blocks and tiles * splits <= 2 * slots:
                yield dataclasses.replace(config, splits=splits, reduction="cluster")
        for splits in sorted({min(splits, blocks) for splits in wanted} - {0, 1}):
            yield dataclasses.replace(config, splits=splits, reduction="workspace")

    def candidates(self, problem: _Problem, target: Target) -> list[_Config]:
        """Of every tile the best few ways to split by the model."""
        tiles = (self._splits(problem, whole, target) for whole in self.whole(problem))
        legal = ([c for c in splits if self.config_refusal(problem, c) is None] for splits in tiles)
        return self.best_of_each(problem, legal, 4, target)

    def whole(self, problem: _Problem) -> Iterator[_Config]:
        """Candidates before they are split."""
        for tile_m, tile_n in self.tiles(problem):
            yield from (self.Config(tile_m, tile_n, stages) for stages in depths(tile_m, tile_n, self.Config))

    def neighbours(self, problem: _Problem, config: _Config, target: Target) -> list[_Config]:
        """A stage less, the other reduction, and split counts nearby."""
        blocks, least = self.chains(problem, config)[0], self.least_splits(problem, config)
        found = [dataclasses.replace(config, stages=config.stages - 1)]
        if config.splits > 1:
            others = {"none", config.reduction}
            found += varied(config, reduction=[name for name in self.reductions if name not in others])
            near = {config.splits - 1, config.splits + 1, config.splits * 2, config.splits // 2}
            near = {min(splits, blocks) for splits in near if splits >= max(2, least)} - {1, config.splits}
            found += varied(config, splits=sorted(near))
        return found

    def swept(self, config: Any, splits: int) -> list[Any]:
        meeting = [name for name in self.reductions if (name == "none") == (splits == 1)]
        return varied(dataclasses.replace(config, splits=splits), reduction=meeting)

    def _longest(self, problem: _Problem, config: _Config, at_a_time: int) -> int:
        """Blocks of the reduction that one multiprocessor has to compute, where so many thread blocks begin together:
        the longest of each wave."""
        lengths = [-(-blocks // config.splits) for blocks in self.chains(problem, config)]
        each = self.thread_blocks(problem, config) // len(lengths) * config.splits
        waves = [-(-each * count // at_a_time) for count in range(len(lengths) + 1)]  # that the longest ones begin
        return sum(length * (end - begin) for length, begin, end in zip(lengths, waves, waves[1:], strict=False))

    def rows(self, problem: _Problem, config: _Config) -> float:
        """Lines that TMA's rows of a stage touch; see `Work.rows`."""
        return config.stage_bytes / ROW_BYTES

    def work(self, problem: _Problem, config: _Config, target: Target) -> Work:
        blocks = self.thread_blocks(problem, config) * config.splits
        resident = target.cores * config.blocks_per_sm
        if config.reduction == "cluster":
            resident = resident_blocks(target, config.splits, config.blocks_per_sm)
            steps = self._longest(problem, config, resident) * config.blocks_per_sm
        else:
            steps = self._longest(problem, config, target.cores)
        waves = -(-blocks // resident)
        chain = -(-self.chains(problem, config)[0] // config.splits)
        together = min(config.blocks_per_sm, -(-blocks // target.cores))
        return Work(
            **config.stage_work(steps, chain, together),
            rows=steps * self.rows(problem, config),
            memory_bytes=problem.bytes_moved,
            memory_share=min(1.0, blocks / target.cores),
            waves=waves,
            stored_bytes=config.tile_m * config.tile_n * 4 * waves,
            partial_bytes=2 * self.workspace_bytes(problem, config),
            launches=2 if config.reduction == "workspace" else 1,
            cluster=config.splits if config.reduction == "cluster" else 1,
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: _Problem, config: _Config) -> int:
        """fp32 partial sums, one set for each split, where they meet there."""
        if config.reduction != "workspace":
            return 0
        return config.splits * self._partial_stride(problem, config) * 4

    def _partial_stride(self, problem: _Problem, config: _Config) -> int:
        """Elements from one split's partial sums to the next's: whole tiles."""
        return self.thread_blocks(problem, config) * config.tile_m * config.tile_n

    def macros(self, problem: _Problem, config: _Config) -> dict[str, int]:
        """Those of wgmma_tile.cuh, split_tile.cuh and output.cuh."""
        return {
            "OUT": split_k.OUT_CODES[problem.out_dtype],
            **field_macros(config, "tile_m", "tile_n", "stages"),
            "CTAS_PER_SM": config.blocks_per_sm,
            "REDUCTION": REDUCTIONS[config.reduction],
            "SPLITS": config.splits if config.reduction == "cluster" else 1,
        }

    def launches(self, problem: _Problem, config: _Config) -> tuple[plan.Launch, ...]:
        in_workspace = config.reduction == "workspace"
        args, epilogue = self.args(problem, config).param(), self.epilogue_params(problem)
        partials = plan.Pointer(len(self.buffers(problem, config)) - 1)
        out = self.result(problem, config)
        stores = (partials,) if in_workspace else (out, *epilogue)
        main = plan.Launch(
            kernel=self.kernel_name(problem),
            grid=self.grid(problem, config),
            block=(config.threads, 1, 1),
            params=(plan.MapParam(0), plan.MapParam(1), args, *stores),
            shared_bytes=config.shared_bytes,
            cluster=(1, 1, config.splits if config.reduction == "cluster" else 1),
        )
        if not in_workspace:
            return (main,)
        lanes = split_k.reduce_lanes(self._partial_stride(problem, config) // 4, config.splits)
        reduce = plan.Launch(
            kernel=self.kernel_name(problem, "_reduce"),
            grid=(-(-self._partial_stride(problem, config) // (4 * split_k.REDUCE_THREADS // lanes)), 1, 1),
            block=(split_k.REDUCE_THREADS, 1, 1),
            params=(partials, out, args, self._reduce_args(problem, config).param(), *epilogue),
            programmatic=True,
        )
        return main, reduce

    def _reduce_args(self, problem: _Problem, config: _Config) -> Values:
        size = self._partial_stride(problem, config)
        return split_k.reduce_args(size, size, config.splits)

    def declared(self, problem: _Problem, config: _Config) -> tuple[Values, ...]:
        return self._reduce_args(problem, config), self.args(problem, config)
