"""Background work in threads that live only while there is work. Each piece of work runs once for its key. Work that a
caller waits for comes before work that is done ahead.

The threads are daemons, which the interpreter does not wait for when it ends.
"""

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from jax_splitk.runtime.cores import usable_cores as cores
from jax_splitk.runtime.outcome import Outcome

_Job = tuple[Outcome[Any], Callable[[], Any]]

# Most pieces of work, results included, that nobody waits for. Further work ahead of its use is refused.
MAX_AHEAD = 256


class Pool:
    """Runs at most one piece of work for each core at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[Hashable, Outcome[Any]] = {}  # until somebody takes the result
        self._urgent: dict[Hashable, _Job] = {}
        self._ahead: dict[Hashable, _Job] = {}
        self._threads = 0
        self._spared: list[int] = []
        self._closed = False

    @property
    def queued(self) -> int:
        """Pieces of work that have not begun."""
        return len(self._urgent) + len(self._ahead)

    def submit(self, key: Hashable, work: Callable[[], Any], *, urgent: bool = False) -> Outcome[Any] | None:
        """The outcome of `work`, or of earlier work with the same key; None if the pool is full. `urgent`: somebody
        waits."""
        with self._lock:
            outcome = self._outcomes.get(key)
            if outcome is None:
                self._forget_oldest()
                if self._closed or (not urgent and len(self._outcomes) >= MAX_AHEAD):
                    return None
                outcome = self._outcomes[key] = Outcome()
                self._ahead[key] = (outcome, work)
            if urgent and key in self._ahead:
                self._urgent[key] = self._ahead.pop(key)
            self._start()
            if not self._threads:  # the system grants no thread
                self._drop(key)
        return outcome

    def take(self, key: Hashable) -> Any:
        """Waits for the result of work that has begun. None if the work failed or does not exist. Work that has not
        begun is dropped."""
        with self._lock:
            outcome = self._outcomes.get(key)
            self._drop(key)
        try:
            return None if outcome is None else outcome.result()
        except Exception:
            return None
        finally:
            with self._lock:
                if outcome is not None and outcome.done() and self._outcomes.get(key) is outcome:
                    del self._outcomes[key]

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Drops the work of these keys that has not begun."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def drop_ahead(self) -> None:
        """Drops all work that has not begun and that no caller waits for."""
        with self._lock:
            for key in list(self._ahead):
                self._drop(key)

    @contextlib.contextmanager
    def sparing(self, count: int) -> Iterator[None]:
        """Leaves `cores` free while the block runs, except for work that a caller waits for. Of nested or parallel
        blocks the largest number counts."""
        with self._lock:
            self._spared.append(count)
        try:
            yield
        finally:
            with self._lock:
                self._spared.remove(count)
                self._start()

    def close(self) -> None:
        """No further work begins."""
        self._closed = True
        self.drop(list(self._outcomes))

    def _drop(self, key: Hashable) -> None:
        job = self._urgent.pop(key, None) or self._ahead.pop(key, None)
        if job is not None:
            self._outcomes.pop(key).set_exception(concurrent.futures.CancelledError())

    def _forget_oldest(self) -> None:
        """Drops the oldest results that nobody has taken, to make room for one more."""
        done = (key for key, outcome in self._outcomes.items() if outcome.done())
        for key in list(itertools.islice(done, max(0, len(self._outcomes) - MAX_AHEAD + 1))):
            del self._outcomes[key]

    def _room(self) -> int:
        """How many threads the queued work may use."""
        return cores() if self._urgent else max(1, cores() - max(self._spared, default=0))

    def _start(self) -> None:
        for _ in range(self._threads, min(self._room(), self._threads + self.queued)):
            with contextlib.suppress(RuntimeError):  # the system's limit: the existing threads go on
                threading.Thread(target=self._work, name="jax_splitk-compiler", daemon=True).start()
                self._threads += 1

    def _next(self) -> _Job | None:
        """The next piece of work for a thread; None: the thread ends."""
        with self._lock:
            queue = self._urgent or self._ahead
            if not queue or self._threads > self._room():
                self._threads -= 1
                return None
            return queue.pop(next(iter(queue)))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome, work = job
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)
