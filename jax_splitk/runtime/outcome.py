"""Waits for other threads during which Ctrl-C may come: the outcome of their work, and their end.

`concurrent.futures.Future` and `threading.Event` take and release their locks in Python code. A KeyboardInterrupt there
can leave a lock taken, and the thread that does the work then waits for it for ever.
"""

import math
import threading
import time
from typing import Generic, TypeVar

_T = TypeVar("_T")

_WATCH_SECONDS = 0.2
_POLL_SECONDS = 0.002


class Outcome(Generic[_T]):
    """A result or an error, which one thread sets once and any number of threads wait for."""

    def __init__(self) -> None:
        self._pending = threading.Lock()
        self._pending.acquire()
        self._done = False
        self._value: _T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, value: _T) -> None:
        self._value = value
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._done = True
        self._pending.release()

    def wait(self, seconds: float) -> bool:
        """Waits at most that long. Returns whether there is an outcome."""
        # If Ctrl-C comes between both lines, the lock stays taken: other threads that wait see `_done` in time.
        if not self._done and self._pending.acquire(timeout=seconds):
            self._pending.release()
        return self._done

    def exception(self) -> BaseException | None:
        """The error; None for a result. Waits for either."""
        while not self._done:
            self.wait(_WATCH_SECONDS)
        return self._error

    def result(self) -> _T:
        """The result, or raises the error. Waits for either."""
        error = self.exception()
        if error is not None:
            raise error
        return self._value  # type: ignore[return-value]


def join(thread: threading.Thread, seconds: float = math.inf) -> None:
    """Waits at most that long for a thread to end. After a KeyboardInterrupt in `Thread.join`, Python 3.9 to 3.12 take
    a thread that goes on as ended."""
    end = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
