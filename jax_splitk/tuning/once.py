"""Messages that a process gives once, and results that it computes once. `once.state` belongs to this process."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Once:
    """Results that were computed, and messages that were given. Safe to use from several threads.

    Attributes:
      deferred_warnings: warnings about kernels that were compiled ahead; their lowering gives them.
      stopped_agreeing: names on which the processes of a job did not agree. No process waits for the others there
        again.
    """

    def __init__(self) -> None:
        self.deferred_warnings: list[str] = []
        self.stopped_agreeing: set[str] = set()
        self._lock = threading.Lock()
        self._results: dict[Hashable, Any] = {}
        self._in_flight: dict[Hashable, threading.Lock] = {}
        self._counts: dict[Hashable, int] = {}

    def result(self, what: Hashable, make: Callable[[], _T]) -> _T:
        """The result of `make`, which is called once for each `what`, unless it raises. Other threads wait for it."""
        if what not in self._results:
            with self._lock:
                own = self._in_flight.setdefault(what, threading.Lock())
            with own:
                if what not in self._results:
                    self._results[what] = make()
        return self._results[what]

    def count(self, *what: Hashable) -> int:
        """How often this method was called with these arguments, including this call."""
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + 1
            return self._counts[what]

    def is_first(self, *what: Hashable) -> bool:
        """Whether this is the first call with these arguments."""
        return self.count(*what) == 1


state = Once()
