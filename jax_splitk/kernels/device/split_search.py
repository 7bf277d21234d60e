"""Which split counts a search considers, for families that cut their reduction into splits."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from jax_splitk.kernels.device.split_k import whole_splits


class _Split(Protocol):
    """A frozen dataclass with a split count."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def splits(self) -> int: ...


_Config = TypeVar("_Config", bound=_Split)


def wave_splits(blocks: int, tiles: int, slots: int, least: int = 1) -> list[int]:
    """`least`, and the split counts with which so many tiles fill 1 to 4 waves of `slots` thread blocks, in whole
    splits of the reduction's blocks."""
    wanted = (least, *(max(least, slots * waves // tiles) for waves in (1, 2, 3, 4)))
    return sorted({whole_splits(blocks, splits) for splits in wanted})


def with_splits(config: _Config, blocks: int, wanted: Iterable[int], least: int) -> list[_Config]:
    """The config with the whole split counts next to those wanted, of at least `least`; not with its own."""
    splits = {whole_splits(blocks, s) for s in wanted if s >= least} - {config.splits}
    return [dataclasses.replace(config, splits=s) for s in sorted(splits)]


def fastest_and_fewest(seconds: Mapping[_Config, float], most: int) -> tuple[_Config, ...]:
    """At most so many configs, the fastest first. The four of fewest splits stay, however slow: a small workspace may
    allow no others."""
    ranked = sorted(seconds, key=lambda c: seconds[c])
    fewest = sorted(ranked, key=lambda c: c.splits)[:4]
    return tuple(dict.fromkeys([*ranked[: most - len(fewest)], *fewest]))
