"""What families of weight gradients share that cut their reduction into splits."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.family import CudaFamily
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Buffer, Launch, Param, Pointer
from jax_splitk.runtime.target import Target

_REDUCE_SECONDS = 0.7e-6
_PARTIAL_BYTES = 4.8e12  # a second; partial sums stay in L2 for the most part


class _Split(Protocol):
    """A frozen dataclass with a split count."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def splits(self) -> int: ...


_Config = TypeVar("_Config", bound=_Split)


class SplitFamily(CudaFamily[ConvWgradProblem, _Config]):
    """A kernel whose thread blocks compute a tile of dW over one of `config.splits` parts of the reduction, in whole
    blocks of it. The partial sums of several splits are those of device/split_k.py."""

    structs = (split_k.ReduceArgs,)

    @abc.abstractmethod
    def reduction_blocks(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Blocks of the reduction."""

    @abc.abstractmethod
    def longest_chain(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Blocks of a float32 result's split, at most: see `split_k.least_splits`."""

    @abc.abstractmethod
    def thread_blocks(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Thread blocks of a split."""

    def least_splits(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
        return split_k.least_splits(
            problem, self.reduction_blocks(problem, config), self.longest_chain(problem, config)
        )

    def with_splits(self, problem: ConvWgradProblem, config: _Config, splits: int) -> _Config:
        """The config with the nearest split count not above `splits` (and at least 1) that leaves no split empty."""
        return dataclasses.replace(config, splits=split_k.whole_splits(self.reduction_blocks(problem, config), splits))

    def wave(self, problem: ConvWgradProblem, config: _Config, target: Target) -> float:
        """Splits that fill the machine once."""
        return target.cores * self.blocks_per_sm(problem, config) / self.thread_blocks(problem, config)

    def in_waves(self, problem: ConvWgradProblem, config: _Config, target: Target) -> Iterator[_Config]:
        """The config with the fewest splits, and with those that fill 1 to 4 waves, as far as they are legal."""
        slots, blocks = target.cores * self.blocks_per_sm(problem, config), self.thread_blocks(problem, config)
        least = self.least_splits(problem, config)
        wanted = (least, *(max(least, slots * waves // blocks) for waves in (1, 2, 3, 4)))
        found = {self.with_splits(problem, config, splits) for splits in wanted}
        for other in sorted(found, key=lambda c: c.splits):
            if self.config_refusal(problem, other) is None:
                yield other

    def other_splits(self, problem: ConvWgradProblem, config: _Config, wanted: Iterable[int]) -> list[_Config]:
        """The config with the whole split counts next to those wanted that are accurate enough; not with its own."""
        least = self.least_splits(problem, config)
        found = {self.with_splits(problem, config, splits) for splits in wanted if splits >= least} - {config}
        return sorted(found, key=lambda c: c.splits)

    def reduce_seconds(self, problem: ConvWgradProblem, config: _Config) -> float:
        """Of the second kernel, which adds the splits' partial sums."""
        moved = 2 * self.workspace_bytes(problem, config)
        return 0.0 if config.splits == 1 else _REDUCE_SECONDS + moved / _PARTIAL_BYTES

    def workspace_bytes(self, problem: ConvWgradProblem, config: _Config) -> int:
        """fp32 partial sums, one set for each split; none when there is a single split."""
        return split_k.workspace_bytes(problem, config.splits)

    def buffers(self, problem: ConvWgradProblem, config: _Config) -> tuple[Buffer, ...]:
        """lhs, g, dW, workspace."""
        return split_k.buffers(problem, self.workspace_bytes(problem, config))

    def split_launches(
        self,
        problem: ConvWgradProblem,
        config: _Config,
        *,
        threads: int,
        params: tuple[Param, ...],
        shared_bytes: int,
        groups: int = 1,
    ) -> tuple[Launch, ...]:
        """The kernel that writes dW itself, or the one that writes the splits' partial sums, and their reduction.

        Where they are written is the kernel's last parameter, after `params`. Feature groups are the grid's last
        dimension.
        """
        split = config.splits > 1
        main = Launch(
            kernel="wgrad_partial" if split else "wgrad_direct",
            grid=(self.thread_blocks(problem, config) // groups, config.splits, groups),
            block=(threads, 1, 1),
            params=(*params, Pointer(3 if split else 2)),
            shared_bytes=shared_bytes,
        )
        return (main, split_k.reduce_launch(problem, config.splits)) if split else (main,)


def nearby(splits: int, wave: float) -> set[int]:
    """Twice and half as many splits, and those that fill half a wave more or less."""
    return {splits // 2, splits * 2, round(splits + wave / 2), round(splits - wave / 2)}


def one_block_apart(splits: int, blocks: int) -> set[int]:
    """Split counts with one block of the reduction more or less in each split."""
    each = -(-blocks // splits)
    return {-(-blocks // other) for other in (each - 1, each + 1) if other > 0}


def fastest_and_fewest(seconds: Mapping[_Config, float], most: int) -> tuple[_Config, ...]:
    """At most so many configs, the fastest first. The four of fewest splits stay, however slow: a small workspace may
    allow no others."""
    ranked = sorted(seconds, key=lambda c: seconds[c])
    fewest = sorted(ranked, key=lambda c: c.splits)[:4]
    return tuple(dict.fromkeys([*ranked[: most - len(fewest)], *fewest]))
