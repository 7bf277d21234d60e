"""Searches of a process, under way and to come. `searches.state` is this process's."""

import collections
import threading
from collections.abc import Iterator
from typing import Any

from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.progress import Progress


class Searches:
    """Searches by key and workspace limit (tuner.py), and what becomes of them.

    Attributes:
      turn: held by the thread that waits for a measurement: threads that miss the same problem at once measure it once.
      running: searches that are under way, or whose entries nobody has taken yet.
      queue: searches that may come next.
      traced: operations, by problem and the caller's options, that may be lowered next (ahead.py).
      abandoned: searches that were given up, whose threads may not have ended.
      unsaved: measurements that could not be stored: a process measures a problem once in any case.
      progress: what the user sees.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.running: dict[tuple[Key, int], Any] = {}
        self.queue: dict[tuple[Key, int], Any] = {}
        self.traced: collections.OrderedDict[tuple[Problem, Options], None] = collections.OrderedDict()
        self.abandoned: list[Any] = []
        self.unsaved: dict[Key, Entry] = {}
        self.progress = Progress()


state = Searches()


def unsaved(key: Key) -> Iterator[Found]:
    """What this process measured and could not store."""
    if (entry := state.unsaved.get(key)) is not None:
        yield Found(entry, "measured now")
