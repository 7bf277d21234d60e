"""Watching what is decided: the command line's view of the decisions that are taken while a script runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key

if TYPE_CHECKING:
    from jax_splitk.tuning.select import Choice


@dataclasses.dataclass
class Watched:
    """What happened inside `watching`.

    Attributes:
      again: whether what a cache already has is measured too, each key once.
      choices: of every operation that was lowered, with how often.
      entries: by key, where a cache or a measurement was asked; None where neither had an answer.
      measured: the keys that were measured.
    """

    again: bool = False
    choices: "dict[Choice, int]" = dataclasses.field(default_factory=dict)
    entries: dict[Key, Entry | None] = dataclasses.field(default_factory=dict)
    measured: set[Key] = dataclasses.field(default_factory=set)


_watchers: list[Watched] = []


@contextlib.contextmanager
def watching(*, again: bool = False) -> Iterator[Watched]:
    """Records the process's decisions while the block runs; see `Watched`."""
    watched = Watched(again)
    _watchers.append(watched)
    try:
        yield watched
    finally:
        _watchers.remove(watched)


def chosen(choice: "Choice") -> None:
    for watched in _watchers:
        watched.choices[choice] = watched.choices.get(choice, 0) + 1


def decided(key: Key, entry: Entry | None) -> None:
    for watched in _watchers:
        watched.entries[key] = entry


def measured(key: Key) -> None:
    for watched in _watchers:
        watched.measured.add(key)


def wants_again(key: Key) -> bool:
    """Whether a key that a cache has is to be measured now all the same."""
    return any(watched.again and key not in watched.entries for watched in _watchers)
