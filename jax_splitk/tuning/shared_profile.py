"""One profile for all searches that wait for one.

It takes longer to start and to stop a profile than to run what a search measures. So the first search that asks waits
for the device, and those that ask meanwhile run in the same profile, one after the other.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Any

from jax_splitk.tuning import profile
from jax_splitk.tuning.profile import Event

_WATCH_SECONDS = 0.2


class _Left(Exception):
    """The search that was to take the profile was given up before."""


@dataclasses.dataclass
class _Work:
    """What one search runs in the profile.

    Attributes:
      error: what `run` raised.
      events: the profile's events, named by their modules.
    """

    run: Callable[[], object]
    error: BaseException | None = None
    events: "Future[list[Event]]" = dataclasses.field(default_factory=Future)


class SharedProfile:
    """The next profile that is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Work] = []

    def events(
        self,
        run: Callable[[], object],
        device: Callable[[], contextlib.AbstractContextManager[Any]],
        check: Callable[[], object],
    ) -> list[Event]:
        """`profile.module_times` of a profile in which `run` ran; others may have run before and after it.

        Args:
          run: runs the work and waits for its results.
          device: a context in which nothing else is measured.
          check: raises where the caller should not wait any longer.

        Raises:
          RuntimeError: somebody else is taking a profile.
          BaseException: what `run`, `device` or `check` raised.
        """
        while True:
            work = _Work(run)
            with self._lock:
                self._waiting.append(work)
                first = len(self._waiting) == 1
            try:
                events = self._taken(device) if first else _awaited(work, check)
            except _Left:
                continue
            if work.error is not None:
                raise work.error
            return events

    def _taken(self, device: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Event]:
        works: list[_Work] = []
        try:
            with device():
                works = self._all()
                data = profile.recorded(lambda: [_run(work) for work in works])
            # Reading a profile does not need the device.
            events = profile.module_times(data)
        except BaseException as error:
            told = error if works and isinstance(error, Exception) else _Left()
            for work in (works or self._all())[1:]:  # the first is this search's own
                work.events.set_exception(told)
            raise
        for work in works[1:]:
            work.events.set_result(events)
        return events

    def _all(self) -> list[_Work]:
        with self._lock:
            works, self._waiting = self._waiting, []
        return works


def _run(work: _Work) -> None:
    try:
        work.run()
    except BaseException as error:
        work.error = error


def _awaited(work: _Work, check: Callable[[], object]) -> list[Event]:
    while True:
        with contextlib.suppress(TimeoutError):
            return work.events.result(timeout=_WATCH_SECONDS)
        check()
