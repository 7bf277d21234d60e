"""The searches of a process, running and queued. `searches.state` belongs to this process."""

import threading
from collections.abc import Iterator
from typing import Any

from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.progress import Progress
from jax_splitk.tuning.worth import Program


class Searches:
    """Searches by key and workspace limit (tuner.py), and their results.

    Attributes:
      turn: a lock that the thread which waits for a measurement holds. So threads that miss the same problem at once
        measure it once.
      running: searches that run, or whose entries nobody has taken yet.
      queue: searches that may come next.
      awaiting: problems of traced operations for which the decision of a search may hold, which is for another problem.
      program: the program that is lowered, whose problems are not all worth a measurement (worth.py).
      abandoned: cancelled searches whose threads may still run.
      unsaved: measurements that could not be stored, so that a process measures a problem once in any case.
      progress: the user's view.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.running: dict[tuple[Key, int], Any] = {}
        self.queue: dict[tuple[Key, int], Any] = {}
        self.awaiting: dict[tuple[Key, int], list[Problem]] = {}
        self.program = Program()
        self.abandoned: list[Any] = []
        self.unsaved: dict[Key, Entry] = {}
        self.progress = Progress()


state = Searches()


def unsaved(key: Key) -> Iterator[Found]:
    """Measurements of this process that could not be stored."""
    if (entry := state.unsaved.get(key)) is not None:
        yield Found(entry, "measured now")
