"""What families of weight gradients share that cut their reduction into splits."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.family import CudaFamily
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import Buffer, Launch, Param
from jax_splitk.runtime.target import Target


class _Split(Protocol):
    """A frozen dataclass with a split count."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def splits(self) -> int: ...


_Config = TypeVar("_Config", bound=_Split)


class SplitFamily(CudaFamily[ConvWgradProblem, _Config]):
    """A kernel that computes a tile of dW over one of `config.splits` parts of the reduction, each of whole blocks.

    See device/split_k.py for the partial sums of several splits.
    """

    @abc.abstractmethod
    def blocks(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Blocks of the reduction."""

    @abc.abstractmethod
    def longest_chain(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Blocks of a float32 result's split, at most: see split_k.least_splits."""

    @abc.abstractmethod
    def tiles(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Thread blocks of a split."""

    def ctas_per_sm(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Thread blocks that share an SM (CTAS_PER_SM in the device code)."""
        del problem, config
        return 1

    # ---- splits ----------------------------------------------------------------------------------------------------

    def least_splits(self, problem: ConvWgradProblem, config: _Config) -> int:
        """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
        return split_k.least_splits(problem, self.blocks(problem, config), self.longest_chain(problem, config))

    def whole_splits(self, problem: ConvWgradProblem, config: _Config, splits: int) -> _Config:
        """The config with the nearest split count not above `splits` (and at least 1) that leaves no split empty."""
        return dataclasses.replace(config, splits=split_k.whole_splits(self.blocks(problem, config), splits))

    def waves(self, problem: ConvWgradProblem, config: _Config, target: Target) -> Iterator[_Config]:
        """Legal ones of the config with the fewest splits and with those that fill 1 to 4 waves of thread blocks."""
        blocks, tiles, least = self.blocks(problem, config), self.tiles(problem, config), self.least_splits(problem, config)
        slots = target.cores * self.ctas_per_sm(problem, config)
        wanted = (least, *(max(least, slots * waves // tiles) for waves in (1, 2, 3, 4)))
        for splits in sorted({split_k.whole_splits(blocks, s) for s in wanted}):
            found = dataclasses.replace(config, splits=splits)
            if self.config_refusal(problem, found) is None:
                yield found

    def with_splits(self, problem: ConvWgradProblem, config: _Config, wanted: Iterable[int]) -> list[_Config]:
        """The config with the whole split counts next to those wanted that are accurate enough; not with its own."""
        blocks, least = self.blocks(problem, config), self.least_splits(problem, config)
        splits = {split_k.whole_splits(blocks, s) for s in wanted if s >= least} - {config.splits}
        return [dataclasses.replace(config, splits=s) for s in sorted(splits)]

    def wave(self, problem, config, target) -> float:
        """..."""
