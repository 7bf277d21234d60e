"""A progress bar for terminals and notebooks that survives log lines, Ctrl-C and a closed stream.

`progress` imports this module, which imports tqdm, when it draws the first bar.
"""

import contextlib
import logging
import sys
import threading
from typing import Any

from tqdm.std import tqdm

_logger = logging.getLogger("jax_splitk")

_FORMAT = "{desc}: {percentage:3.0f}%|{bar:12}| {elapsed}<{remaining}{postfix}"


class _Stream:
    """A stream whose write errors are ignored: a bar must not end a program. tqdm finds other bars on the stream by
    `_wrapped`."""

    def __init__(self, stream: Any):
        self._wrapped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._wrapped.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._wrapped.flush()


class _ClearsBar(logging.Filter):
    """A filter that clears the bar before each line of the log, and lets the line pass."""

    def __init__(self, bar: tqdm):
        super().__init__()
        self._bar = bar

    def filter(self, record: logging.LogRecord) -> bool:
        self._bar.clear()
        return True


class Bar(tqdm):
    """A tqdm bar that Ctrl-C may interrupt at any moment. tqdm itself would keep its lock, and the next thread to draw
    would wait for ever."""

    monitor_interval = 0  # tqdm starts no thread: the thread that waits for a search moves the bar
    _lock = threading.RLock()

    def __init__(self, total: int, name: str):
        look = {"bar_format": _FORMAT, "leave": False, "dynamic_ncols": True, "smoothing": 0}
        self._filter = _ClearsBar(self)
        super().__init__(total=total, desc=name, file=_Stream(sys.stderr), **look)

    def make_room(self) -> None:
        """Clears the bar before each line of our log, until the bar is closed."""
        _logger.addFilter(self._filter)

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        with self._lock:
            super().refresh(nolock=True)

    def clear(self, nolock: bool = False) -> None:
        with self._lock:
            super().clear(nolock=True)

    def close(self) -> None:
        _logger.removeFilter(self._filter)
        super().close()


def write(line: str) -> None:
    """Writes a line above the bars."""
    Bar.write(line, file=_Stream(sys.stderr))
