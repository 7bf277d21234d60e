"""Shared by the families that compute tiles by TMA and WGMMA: dense forward passes, input gradients and products."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from jax_splitk.kernels.base.family import field_macros, field_refusal, varied
from jax_splitk.kernels.base.split import SplitFamily
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.split_tile import (
    MAX_CLUSTER,
    MAX_ELEMENTS,
    MAX_FLOAT32_CHAIN,
    REDUCTIONS,
    SplitTile,
    least_stages,
)
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import ROW_BYTES, TILES, depths, max_stages, tile_refusal
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

_Problem = TypeVar("_Problem")
_Config = TypeVar("_Config", bound=SplitTile)


class TileFamily(SplitFamily[_Problem, _Config]):
    """Kernels with two tensor maps, for A and B.

    Attributes:
      reductions: the ways to add splits; values of a config's `reduction`.
    """

    roles = ("", "", "_reduce")
    reductions: ClassVar[tuple[str, ...]] = tuple(REDUCTIONS)

    def tiles(self, problem: _Problem) -> Sequence[tuple[int, int]]:
        """The possible (tile_m, tile_n)."""
        return TILES

    def stage_counts(self, config: _Config) -> range:
        """Numbers of stages that the config's tile may have."""
        return range(least_stages(config.tile_m, config.tile_n), max_stages(config.tile_m, config.tile_n) + 1)

    @abc.abstractmethod
    def chains(self, problem: _Problem, config: _Config) -> Sequence[int]:
        """How many blocks of the reduction a tile has, each in one stage. Tiles may have different numbers: the
        largest comes first, and each holds for the same share of the tiles."""

    def block_counts(self, problem: _Problem, config: _Config) -> tuple[int, ...]:
        return (self.chains(problem, config)[0],)

    def longest_chain(self, problem: _Problem, config: _Config) -> int:
        return MAX_FLOAT32_CHAIN // config.depth

    @abc.abstractmethod
    def args(self, problem: _Problem, config: _Config) -> Struct:
        """The kernels' struct `Args`."""

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
        if config.reduction == "workspace" and (sums := self.partial_size(problem, config)) > MAX_ELEMENTS:
            return f"{sums} partial sums of a split; accepted: at most {MAX_ELEMENTS}"
        return split_k.splits_refusal(config.splits, self.chains(problem, config)[0], "blocks of k", uneven=True)

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: _Problem, config: _Config) -> int:
        return config.blocks_per_sm

    def least_splits(self, problem: Any, config: _Config) -> int:
        blocks = self.reduction_blocks(problem, config) * config.depth
        return -(-blocks // MAX_FLOAT32_CHAIN) if problem.out_dtype == "float32" else 1

    def with_splits(self, problem: _Problem, config: _Config, splits: int) -> _Config:
        """The config with this number of splits, if there are enough blocks. The splits need not be equal."""
        splits = max(1, min(splits, self.reduction_blocks(problem, config)))
        return dataclasses.replace(config, splits=splits, reduction="none" if splits == 1 else "workspace")

    def in_waves(self, problem: _Problem, config: _Config, target: Target, most: int = 4) -> Iterator[_Config]:
        """Includes configs that add splits in clusters, if all clusters run at the same time. They do in each of the 24
        recorded problems whose fastest config has clusters."""
        yield from super().in_waves(problem, config, target, most)
        tiles, slots = self.thread_blocks(problem, config), self.slots(problem, config, target)
        if "cluster" in self.reductions:
            few = range(max(2, self.least_splits(problem, config)), MAX_CLUSTER + 1)
            clusters = varied(dataclasses.replace(config, reduction="cluster"), splits=few)
            fitting = (c for c in clusters if tiles * c.splits <= slots)
            yield from (c for c in fitting if self.config_refusal(problem, c) is None)

    def candidates(self, problem: _Problem, target: Target) -> list[_Config]:
        """For every tile, the best few ways to split by the model."""
        tiles = (self.in_waves(problem, whole, target) for whole in self.variants(problem, target))
        return self.best_of_each(problem, tiles, 4, target)

    def variants(self, problem: _Problem, target: Target) -> Iterator[_Config]:
        for tile_m, tile_n in self.tiles(problem):
            yield from (self.Config(tile_m, tile_n, stages) for stages in depths(tile_m, tile_n, self.Config))

    def neighbours(self, problem: _Problem, config: _Config, target: Target) -> list[_Config]:
        """A stage less, the other reduction, and split counts nearby."""
        found = [dataclasses.replace(config, stages=config.stages - 1)]
        if config.splits > 1:
            others = {"none", config.reduction}
            found += varied(config, reduction=[name for name in self.reductions if name not in others])
            near = {config.splits - 1, config.splits + 1, config.splits * 2, config.splits // 2} - {1}
            counts = {c.splits for c in self.other_splits(problem, config, near)} - {1, config.splits}
            found += varied(config, splits=sorted(counts))
        return found

    def swept(self, config: Any, splits: int) -> list[Any]:
        meeting = [name for name in self.reductions if (name == "none") == (splits == 1)]
        return varied(dataclasses.replace(config, splits=splits), reduction=meeting)

    def _longest(self, problem: _Problem, config: _Config, at_a_time: int) -> int:
        """Blocks of the reduction that one multiprocessor computes if `at_a_time` thread blocks begin together: the
        longest of each wave."""
        lengths = [-(-blocks // config.splits) for blocks in self.chains(problem, config)]
        each = self.thread_blocks(problem, config) // len(lengths) * config.splits
        waves = [-(-each * count // at_a_time) for count in range(len(lengths) + 1)]  # that the longest ones begin
        return sum(length * (end - begin) for length, begin, end in zip(lengths, waves, waves[1:], strict=False))

    def rows(self, problem: _Problem, config: _Config) -> float:
        """Lines that TMA's rows of a stage touch; see `Work.rows`."""
        return config.stage_bytes / ROW_BYTES

    def filled(self, problem: Any, config: _Config) -> float:
        """The share of a stage's instructions that the kernel has, in the mean of its stages."""
        return 1.0

    def work(self, problem: Any, config: _Config, target: Target) -> Work:
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
            **config.stage_work(steps, chain, together, self.filled(problem, config)),
            rows=steps * self.rows(problem, config),
            memory_bytes=problem.bytes_moved,
            memory_share=min(1.0, blocks / target.cores),
            waves=waves,
            stored_bytes=config.tile_m * config.tile_n * 4 * waves,
            **self.reduction_work(problem, config),
            cluster=config.splits if config.reduction == "cluster" else 1,
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def in_workspace(self, config: _Config) -> bool:
        return config.reduction == "workspace"

    def partial_size(self, problem: _Problem, config: _Config) -> int:
        """Elements of a split's partial sums, including the parts of tiles beyond the result."""
        return self.thread_blocks(problem, config) * config.tile_m * config.tile_n

    def macros(self, problem: _Problem, config: _Config) -> dict[str, int]:
        """Macros of wgmma_tile.cuh, split_tile.cuh and output.cuh."""
        return {
            **super().macros(problem, config),
            **field_macros(config, "tile_m", "tile_n", "stages"),
            "REDUCTION": REDUCTIONS[config.reduction],
            "SPLITS": config.splits if config.reduction == "cluster" else 1,
        }

    def shared_bytes(self, problem: _Problem, config: _Config) -> int:
        """Bytes of shared memory that the main kernel's launch asks for."""
        return config.shared_bytes

    def main(self, problem: _Problem, config: _Config) -> plan.Launch:
        params = plan.MapParam(0), plan.MapParam(1), self.args(problem, config)
        main = self.launch(problem, config, config.threads, self.shared_bytes(problem, config), *params)
        in_cluster = config.reduction == "cluster"
        return dataclasses.replace(main, cluster=(1, 1, config.splits)) if in_cluster else main

    def reduce_params(self, problem: _Problem, config: _Config) -> tuple[plan.Param, ...]:
        args = self.args(problem, config)
        return args, *super().reduce_params(problem, config), *self.epilogue_params(problem, config)
