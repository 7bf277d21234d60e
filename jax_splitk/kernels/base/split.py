"""Kernels whose thread blocks compute a tile of the result over a part of the reduction: the number of parts (splits),
how they are added, and the launches.

By default the kernel writes fp32 partial sums of each split to the workspace, and a second kernel adds them in a fixed
order; see device/split_k.py. A family may add them in other ways.
"""

import abc
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from jax_splitk.kernels.base.family import ModelledFamily
from jax_splitk.kernels.device.split_k import OUT_CODES, REDUCE_THREADS, reduce_args, reduce_lanes, whole_splits
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.runtime.plan import Launch, Param, Pointer
from jax_splitk.runtime.target import Target

# Candidates, and the variants whose split counts these are, at most.
MAX_CANDIDATES, MAX_VARIANTS = 48, 32

_Problem = TypeVar("_Problem")
_Config = TypeVar("_Config")


class SplitFamily(ModelledFamily[_Problem, _Config]):
    """A kernel whose thread blocks compute a tile of the result over one of `config.splits` parts of the reduction.

    Attributes:
      roles: the roles of three kernels: the one that computes whole sums, the one that computes partial sums, and the
        one that adds these.
    """

    roles: ClassVar[tuple[str, str, str]] = ("_direct", "_partial", "_reduce_splits")

    @abc.abstractmethod
    def tile_counts(self, problem: _Problem, config: _Config) -> tuple[int, ...]:
        """Tiles of the result along each of its dimensions: thread blocks of one split."""

    @abc.abstractmethod
    def block_counts(self, problem: _Problem, config: _Config) -> tuple[int, ...]:
        """Blocks along each dimension of the reduction."""

    @abc.abstractmethod
    def longest_chain(self, problem: _Problem, config: _Config) -> int:
        """The largest number of blocks in a split of a float32 result. The tensor cores truncate their fp32 sums, and
        the error grows with the number of additions in a row. A float32 result shows this error; in a 16-bit result
        rounding hides it.
        """

    def smallest_refusal(self, problem: Any, smallest: _Config) -> str | None:
        """Why no config can compute the problem: the smallest one cannot. None if it can."""
        reason = self.config_refusal(problem, smallest)
        window = f"window strides {problem.window_strides}, dilation {problem.rhs_dilation}"
        return None if reason is None else f"{window}: with the smallest tile {reason}"

    def thread_blocks(self, problem: _Problem, config: _Config) -> int:
        """Thread blocks of one split."""
        return math.prod(self.tile_counts(problem, config)) * self.grid_groups(problem)

    def reduction_blocks(self, problem: _Problem, config: _Config) -> int:
        """Blocks of the reduction. The splits get equal numbers of them, or differ by one."""
        return math.prod(self.block_counts(problem, config))

    def grid_groups(self, problem: _Problem) -> int:
        """Number of products, each with tiles of its own; the grid's last dimension."""
        del problem
        return 1

    # ---- search ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def variants(self, problem: _Problem, target: Target) -> Iterable[_Config]:
        """Configs that are legal apart from their splits, the most promising first."""

    def candidates(self, problem: _Problem, target: Target) -> Sequence[_Config]:
        """The first variants, with split counts that fill whole waves: the fastest of these configs, and the four with
        the fewest splits, since a small workspace may allow no others."""
        return _ranked(self, problem, target)

    def least_splits(self, problem: Any, config: _Config) -> int:
        """The fewest splits with the promised accuracy (explicit configs may have fewer)."""
        if problem.out_dtype != "float32":
            return 1
        return -(-self.reduction_blocks(problem, config) // max(1, self.longest_chain(problem, config)))

    def with_splits(self, problem: _Problem, config: Any, splits: int) -> _Config:
        """The config with the nearest split count not above `splits` (and at least 1) that leaves no split empty."""
        return dataclasses.replace(config, splits=whole_splits(self.reduction_blocks(problem, config), splits))

    def slots(self, problem: _Problem, config: _Config, target: Target) -> int:
        """Thread blocks that fill the machine once."""
        return target.cores * self.blocks_per_sm(problem, config)

    def wave(self, problem: _Problem, config: _Config, target: Target) -> float:
        """Splits that do."""
        return self.slots(problem, config, target) / self.thread_blocks(problem, config)

    def waves(self, problem: _Problem, config: Any, target: Target) -> int:
        """Waves in which the thread blocks of all splits run."""
        return -(-self.thread_blocks(problem, config) * config.splits // self.slots(problem, config, target))

    def in_waves(self, problem: _Problem, config: _Config, target: Target, most: int = 4) -> Iterator[_Config]:
        """The config with the fewest splits, and with the splits that fill 1 to `most` waves, if they are legal."""
        slots, blocks = self.slots(problem, config, target), self.thread_blocks(problem, config)
        least = self.least_splits(problem, config)
        wanted = (least, *(max(least, slots * waves // blocks) for waves in range(1, most + 1)))
        found = {self.with_splits(problem, config, splits) for splits in wanted}
        return (c for c in sorted(found, key=operator.attrgetter("splits")) if self.config_refusal(problem, c) is None)

    def filling(self, problem: _Problem, config: _Config, target: Target) -> _Config:
        """The config with the splits that fill the machine at most once, or with the fewest legal splits."""
        full = self.slots(problem, config, target) // self.thread_blocks(problem, config)
        return self.with_splits(problem, config, max(self.least_splits(problem, config), full))

    def other_splits(self, problem: _Problem, config: _Config, wanted: Iterable[int]) -> list[_Config]:
        """The config with the legal split counts nearest to the wanted ones that are accurate enough, without its
        own."""
        least = self.least_splits(problem, config)
        found = {self.with_splits(problem, config, splits) for splits in wanted if splits >= least} - {config}
        return sorted(found, key=operator.attrgetter("splits"))

    def reduction_work(self, problem: _Problem, config: _Config) -> dict[str, Any]:
        """The fields `partial_bytes` and `launches` of the config's Work."""
        return {"partial_bytes": 2 * self.workspace_bytes(problem, config), "launches": 1 + self.in_workspace(config)}

    # ---- plan ------------------------------------------------------------------------------------------------------

    def in_workspace(self, config: Any) -> bool:
        """Whether the splits are added from the workspace."""
        return config.splits > 1

    def partial_size(self, problem: Any, config: _Config) -> int:
        """Elements of a split's partial sums."""
        return math.prod(problem.out_shape)

    def workspace_bytes(self, problem: _Problem, config: Any) -> int:
        """Bytes of fp32 partial sums, one set for each split, rounded up to whole float4; 0 if splits are not added
        from the workspace."""
        return config.splits * whole_fours(self.partial_size(problem, config)) * 4 if self.in_workspace(config) else 0

    def macros(self, problem: Any, config: _Config) -> dict[str, int]:
        types = {"ELEMENT": OUT_CODES.get(problem.dtype, -1), "OUT": OUT_CODES[problem.out_dtype]}
        # If whole sums and partial sums have a kernel each, a source has one of the two: both take twice as long to
        # compile.
        of_splits = {"REDUCTION": int(self.in_workspace(config))} if self.roles[0] != self.roles[1] else {}
        return {**types, "CTAS_PER_SM": self.blocks_per_sm(problem, config), **of_splits}

    def grid(self, problem: _Problem, config: Any) -> tuple[int, int, int]:
        """The main kernel's grid."""
        groups = self.grid_groups(problem)
        return self.thread_blocks(problem, config) // groups, config.splits, groups

    def result(self, problem: _Problem, config: _Config) -> Param:
        """The parameter by which a kernel stores the result."""
        return Pointer(len(self.buffers(problem, config)) - 2)

    def epilogue_params(self, problem: _Problem, config: _Config) -> tuple[Param, ...]:
        """Parameters of the epilogue, the last ones of the kernel that stores the result."""
        return ()

    @abc.abstractmethod
    def main(self, problem: _Problem, config: _Config) -> Launch:
        """The kernel that computes tiles, made by `launch`."""

    def launch(
        self,
        problem: _Problem,
        config: _Config,
        threads: int,
        shared_bytes: int,
        *params: Param,
        role: str | None = None,
    ) -> Launch:
        """The main kernel's launch. The parameter for its output follows `params`."""
        partial = self.in_workspace(config)
        stored = (self.result(problem, config), *self.epilogue_params(problem, config))
        to = (self._partials(problem, config),) if partial else stored
        name = self.kernel_name(problem, self.roles[partial] if role is None else role)
        return Launch(name, self.grid(problem, config), (threads, 1, 1), (*params, *to), shared_bytes)

    def launches(self, problem: _Problem, config: _Config) -> tuple[Launch, ...]:
        """The kernel that computes the result, or the splits' partial sums, and the one that adds these."""
        main = self.main(problem, config)
        return (main, self.reduction(problem, config)) if self.in_workspace(config) else (main,)

    def reduce_args(self, problem: _Problem, config: Any) -> Struct:
        size = self.partial_size(problem, config)
        return reduce_args(size, whole_fours(size), config.splits)

    def reduction(self, problem: _Problem, config: Any) -> Launch:
        size = self.partial_size(problem, config)
        columns = REDUCE_THREADS // reduce_lanes(size // 4, config.splits)
        return self.adding(problem, config, (-(-size // (4 * columns)), 1, 1), *self.reduce_params(problem, config))

    def reduce_params(self, problem: _Problem, config: _Config) -> tuple[Param, ...]:
        """Parameters of the kernel that adds splits, after the partial sums and the result."""
        return (self.reduce_args(problem, config),)

    def adding(self, problem: _Problem, config: _Config, grid: tuple[int, int, int], *params: Param) -> Launch:
        """The launch of the kernel that adds partial sums. The kernel itself waits for them. The partial sums and the
        result are its first parameters."""
        name = self.kernel_name(problem, self.roles[2])
        params = self._partials(problem, config), self.result(problem, config), *params
        return Launch(name, grid, (REDUCE_THREADS, 1, 1), params, programmatic=True)

    def partials_offset(self, problem: _Problem) -> int:
        """Where the partial sums begin in the workspace, in bytes: a multiple of 16."""
        del problem
        return 0

    def _partials(self, problem: _Problem, config: _Config) -> Pointer:
        return Pointer(len(self.buffers(problem, config)) - 1, self.partials_offset(problem))

    def structs(self, problem: _Problem, config: _Config) -> list[Struct]:
        """Includes the struct of the kernel that adds splits, which the source always has."""
        return [self.reduce_args(problem, config), *super().structs(problem, config)]


@functools.lru_cache(maxsize=512)
def _ranked(family: SplitFamily[Any, Any], p: Any, target: Target) -> tuple[Any, ...]:
    variants = itertools.islice(family.variants(p, target), MAX_VARIANTS)
    ranked = family.by_estimate(p, (c for v in variants for c in family.in_waves(p, v, target)), target)
    fewest = sorted(ranked, key=operator.attrgetter("splits"))[:4]
    return tuple(dict.fromkeys([*ranked[: MAX_CANDIDATES - len(fewest)], *fewest]))


def whole_fours(size: int) -> int:
    """`size` elements, rounded up to whole float4."""
    return -(-size // 4) * 4


def nearby(splits: int, wave: float) -> set[int]:
    """Twice and half as many splits, and those that fill half a wave more or less."""
    return {splits // 2, splits * 2, round(splits + wave / 2), round(splits - wave / 2)}


def one_block_apart(splits: int, blocks: int) -> set[int]:
    """Split counts with one block of the reduction more or less in each split."""
    each = -(-blocks // splits)
    return {-(-blocks // other) for other in (each - 1, each + 1) if other > 0}
