"""Shared by the families of weight gradients on Hopper: buffers, and splits of the reduction. The kernel writes fp32
partial sums of each split into the workspace, and a second kernel adds them in a fixed order; see device/split_k.py.

The kernel of several splits writes fp32 partial sums of each into the workspace, and a second kernel adds them in a
fixed order; see device/split_k.py.
"""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from jax import numpy as jnp

from jax_splitk.kernels.device.split_k import OUT_CODES, REDUCE_THREADS, reduce_args, reduce_lanes, whole_splits
from jax_splitk.kernels.device.structs import Field, Values, constants, declarations
from jax_splitk.kernels.family import CudaFamily, ModelledFamily, call_buffers
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Buffer, Im2colMap, Launch, MapParam, Param, Pointer, TiledMap, tensor_map_strides
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target

# Most candidates, and most variants from which they come.
MAX_CANDIDATES, MAX_VARIANTS = 48, 32

_Any = TypeVar("_Any")


class WgradFamily(CudaFamily[ConvWgradProblem, _Any]):
    """A kernel that loads lhs and g and writes dW."""

    def buffers(self, problem: ConvWgradProblem, config: _Any) -> tuple[Buffer, ...]:
        """lhs, g, dW, workspace."""
        return call_buffers(problem, self.workspace_bytes(problem, config))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for a problem and config.

    Attributes:
      threads, shared_bytes: threads and dynamic shared memory of a thread block.
      macros: macros of the device code, besides types and thread blocks of a multiprocessor.
      args: its struct `Args`.
      maps: tensor maps.
      before, after: parameters between the maps and Args, and after Args. The destination is the last parameter.
      constants: structs of constants in the device code, by their names.
    """

    threads: int
    shared_bytes: int
    macros: dict[str, int]
    args: dict[str, Field]
    maps: tuple[TiledMap | Im2colMap, ...] = ()
    before: tuple[Param, ...] = ()
    after: tuple[Param, ...] = ()
    constants: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def struct(self) -> Values:
        return Values("Args", self.args)

    @property
    def params(self) -> tuple[Param, ...]:
        return (*map(MapParam, range(len(self.maps))), *self.before, self.struct.param(), *self.after)

    def launch(self, kernel: str, grid: tuple[int, int, int], *more: Param) -> Launch:
        return Launch(kernel, grid, (self.threads, 1, 1), (*self.params, *more), self.shared_bytes)


def reduction(kernel: str, grid: tuple[int, int, int], *params: Param) -> Launch:
    """The launch of a kernel that adds partial sums, and waits for them itself."""
    return Launch(kernel, grid, (REDUCE_THREADS, 1, 1), params, programmatic=True)


class _Split(Protocol):
    """A frozen dataclass with a split count."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def splits(self) -> int: ...


_Config = TypeVar("_Config", bound=_Split)


class SplitFamily(WgradFamily[_Config], ModelledFamily[ConvWgradProblem, _Config]):
    """A kernel whose thread blocks compute a tile of dW over one of `config.splits` parts of the reduction."""

    @abc.abstractmethod
    def tile_counts(self, problem: ConvWgradProblem, config: _Config) -> tuple[int, ...]:
        """Tiles of the output along each of its dimensions: thread blocks of one split."""

    @abc.abstractmethod
    def block_counts(self, problem: ConvWgradProblem, config: _Config) -> tuple[int, ...]:
        """Blocks along each dimension of the reduction."""

    @abc.abstractmethod
    def longest_chain(self, problem: ConvWgradProblem, config: _Config) -> int:
        """The most blocks in a split of a float32 result.

        The tensor cores truncate their fp32 sums, an error that grows with the number of additions in a row. A float32
        result shows this error; the rounding of a 16-bit result hides it.
        """

    def smallest_refusal(self, problem: ConvWgradProblem, smallest: _Config) -> str | None:
        """Why no config can compute the problem, because not even the smallest can."""
        reason = self.config_refusal(problem, smallest)
        window = f"window strides {problem.window_strides}, dilation {problem.rhs_dilation}"
        return None if reason is None else f"{window}: with the smallest tile {reason}"

    def thread_blocks(self, problem: ConvWgradProblem, config: _Config) -> int:
        """The thread blocks of one split."""
        return math.prod(self.tile_counts(problem, config)) * self.grid_groups(problem)

    def reduction_blocks(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Blocks of the reduction. Each split has equally many, or one less."""
        return math.prod(self.block_counts(problem, config))

    def grid_groups(self, problem: ConvWgradProblem) -> int:
        """Number of products that have such tiles each: the grid's last dimension."""
        del problem
        return 1

    # ---- search ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def variants(self, problem: ConvWgradProblem, target: Target) -> list[_Config]:
        """Configs that are legal except for their splits, the most promising first."""

    def candidates(self, problem: ConvWgradProblem, target: Target) -> Sequence[_Config]:
        """The first variants with split counts that fill whole waves: the fastest ones, and the four with the fewest
        splits, since a small workspace may allow no others."""
        return _ranked(self, problem, target)

    def least_splits(self, problem: ConvWgradProblem, config: _Config) -> int:
        """The fewest splits that give the promised accuracy (explicit configs may have fewer)."""
        if problem.out_dtype != "float32":
            return 1
        return -(-self.reduction_blocks(problem, config) // max(1, self.longest_chain(problem, config)))

    def with_splits(self, problem: ConvWgradProblem, config: _Config, splits: int) -> _Config:
        """The config with the nearest split count not above `splits` (and at least 1) that leaves no split empty."""
        return dataclasses.replace(config, splits=whole_splits(self.reduction_blocks(problem, config), splits))

    def slots(self, problem: ConvWgradProblem, config: _Config, target: Target) -> int:
        """Thread blocks that run on the machine at once."""
        return target.cores * self.blocks_per_sm(problem, config)

    def wave(self, problem: ConvWgradProblem, config: _Config, target: Target) -> float:
        """The number of splits that fills one wave."""
        return self.slots(problem, config, target) / self.thread_blocks(problem, config)

    def waves(self, problem: ConvWgradProblem, config: _Config, target: Target) -> int:
        """The number of waves of all splits' thread blocks."""
        return -(-self.thread_blocks(problem, config) * config.splits // self.slots(problem, config, target))

    def in_waves(self, problem: ConvWgradProblem, config: _Config, target: Target, most: int = 4) -> Iterator[_Config]:
        """The config with the fewest splits, and with the splits that fill 1 to `most` waves, if these are legal."""
        slots, blocks = self.slots(problem, config, target), self.thread_blocks(problem, config)
        least = self.least_splits(problem, config)
        wanted = (least, *(max(least, slots * waves // blocks) for waves in range(1, most + 1)))
        found = {self.with_splits(problem, config, splits) for splits in wanted}
        return (c for c in sorted(found, key=operator.attrgetter("splits")) if self.config_refusal(problem, c) is None)

    def filling(self, problem: ConvWgradProblem, config: _Config, target: Target) -> _Config:
        """The config with the most splits that fill the machine at most once, or with the fewest legal splits."""
        full = self.slots(problem, config, target) // self.thread_blocks(problem, config)
        return self.with_splits(problem, config, max(self.least_splits(problem, config), full))

    def other_splits(self, problem: ConvWgradProblem, config: _Config, wanted: Iterable[int]) -> list[_Config]:
        """The config with the legal split counts next to the wanted ones, if they are accurate enough and not its
        own."""
        least = self.least_splits(problem, config)
        found = {self.with_splits(problem, config, splits) for splits in wanted if splits >= least} - {config}
        return sorted(found, key=operator.attrgetter("splits"))

    def reduction_work(self, problem: ConvWgradProblem, config: _Config) -> dict[str, Any]:
        """`partial_bytes` and `launches` of its Work, for both kernels."""
        return {"partial_bytes": 2 * self.workspace_bytes(problem, config), "launches": 1 + (config.splits > 1)}

    # ---- plan ------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Bytes of fp32 partial sums, one set for each split; 0 for a single split, which writes dW itself."""
        return 0 if config.splits == 1 else config.splits * partial_stride(problem) * 4

    @abc.abstractmethod
    def kernel(self, problem: ConvWgradProblem, config: _Config) -> Kernel:
        """The kernel from which the plan is made."""

    def macros(self, problem: ConvWgradProblem, config: _Config) -> dict[str, int]:
        types = {"ELEMENT": OUT_CODES[problem.dtype], "OUT": OUT_CODES[problem.out_dtype]}
        return {**types, "CTAS_PER_SM": self.blocks_per_sm(problem, config), **self.kernel(problem, config).macros}

    def maps(self, problem: ConvWgradProblem, config: _Config) -> tuple[TiledMap | Im2colMap, ...]:
        return self.kernel(problem, config).maps

    def source(self, problem: ConvWgradProblem, config: _Config) -> Source:
        kernel = self.kernel(problem, config)
        structs = declarations(*self.structs, self._reduce_args(problem, config), kernel.struct)
        structs += "".join(constants(name, values) for name, values in kernel.constants.items())
        return Source(self.file, self.defines(problem, config), structs)

    def launches(self, problem: ConvWgradProblem, config: _Config) -> tuple[Launch, ...]:
        """The kernel that writes dW; or the kernel that writes the splits' partial sums, and the one that adds them."""
        kernel, groups = self.kernel(problem, config), self.grid_groups(problem)
        grid = (self.thread_blocks(problem, config) // groups, config.splits, groups)
        if config.splits == 1:
            return (kernel.launch(self.kernel_name(problem, "_direct"), grid, Pointer(2)),)
        size = math.prod(problem.out_shape)
        columns = REDUCE_THREADS // reduce_lanes(size // 4, config.splits)
        args = self._reduce_args(problem, config).param()
        reduce_grid, name = (-(-size // (4 * columns)), 1, 1), self.kernel_name(problem, "_reduce_splits")
        reduce = reduction(name, reduce_grid, Pointer(3), Pointer(2), args)
        return kernel.launch(self.kernel_name(problem, "_partial"), grid, Pointer(3)), reduce

    def _reduce_args(self, problem: ConvWgradProblem, config: _Config) -> Values:
        return reduce_args(math.prod(problem.out_shape), partial_stride(problem), config.splits)


@functools.lru_cache(maxsize=512)
def _ranked(family: SplitFamily[Any], p: ConvWgradProblem, target: Target) -> tuple[Any, ...]:
    variants = family.variants(p, target)[:MAX_VARIANTS]
    ranked = family.by_estimate(p, (c for v in variants for c in family.in_waves(p, v, target)), target)
    fewest = sorted(ranked, key=operator.attrgetter("splits"))[:4]
    return tuple(dict.fromkeys([*ranked[: MAX_CANDIDATES - len(fewest)], *fewest]))


def box_map(p: ConvWgradProblem, buffer: int, shape: tuple[int, ...], box: tuple[int, ...]) -> TiledMap:
    """A map with boxes (innermost dimension first) of an operand that is seen with this shape. The swizzle is as wide
    as a box's row of 16 to 128 bytes."""
    dims, item = shape[::-1], jnp.dtype(p.dtype).itemsize
    swizzle = (box[0] * item // 16).bit_length() - 1  # CUtensorMapSwizzle
    return TiledMap(buffer, p.dtype, dims, tensor_map_strides(dims, item), box, swizzle)


def partial_stride(problem: ConvWgradProblem) -> int:
    """Elements between the partial sums of neighbouring splits: the output's, rounded up to whole float4."""
    return -(-math.prod(problem.out_shape) // 4) * 4


def nearby(splits: int, wave: float) -> set[int]:
    """Twice and half as many splits, and those that fill half a wave more or less."""
    return {splits // 2, splits * 2, round(splits + wave / 2), round(splits - wave / 2)}


def one_block_apart(splits: int, blocks: int) -> set[int]:
    """Split counts with one block of the reduction more or less in each split."""
    each = -(-blocks // splits)
    return {-(-blocks // other) for other in (each - 1, each + 1) if other > 0}
