"""What the user sees of tuning: a bar on a terminal or in a notebook, otherwise lines of the log; and a closing line.

A run is a group of problems: those of one call of `tune`, or those that one lowering did not find in a cache.
"""

import contextlib
import logging
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jax_splitk.runtime import settings, streams
from jax_splitk.tuning import flips
from jax_splitk.tuning.choice import XLA, gain
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key

if TYPE_CHECKING:
    from jax_splitk.tuning.bar import Bar

_logger = logging.getLogger("jax_splitk")

# The progress of a measurement that exceeds its budget.
_NEARLY = 0.99


def shows_bar() -> bool:
    """Whether a bar is wanted and can be drawn on stderr."""
    if settings.in_force()["JAX_SPLITK_PROGRESS"] == "off" or streams.is_closed(sys.stderr):
        return False
    # A notebook's stream is no terminal, but its page can overwrite lines as well.
    return type(sys.stderr).__module__.startswith("ipykernel.") or streams.is_terminal(sys.stderr)


class Run:
    """Problems that are measured together, and how far they are.

    Attributes:
      total: number of problems; None if they come up one by one.
      known: number of further problems whose decisions were known before.
      measured: the new entries.
      steps: (count, entry) of each operation of a step that is decided; empty if operations are not counted.
    """

    def __init__(self, total: int | None = None, known: int = 0):
        self.total, self.known = total, known
        self.measured: list[Entry] = []
        self.steps: list[tuple[int, Entry]] = []
        self._started = time.monotonic()
        self._number = 0
        self._since, self._seconds = self._started, 1.0
        self._key: Key | None = None
        self._bar: Bar | None = None

    def begin(self, key: Key, seconds: float) -> None:
        """The measurement of a problem begins, with a budget of `seconds`."""
        self._number += 1
        self._key, self._since, self._seconds = key, time.monotonic(), seconds
        name = f"tuning {self._number}" + (f" of {self.total}" if self.total else "")
        _logger.info("%s: %s", name, key.problem)
        if self._bar is None and shows_bar():
            self._bar = bar = _bars().Bar(self.total or 1, name)
            bar.make_room()
        if self._bar is not None:
            self._bar.set_description_str(name, refresh=False)
            self._bar.set_postfix_str(str(key.problem), refresh=False)
        self.tick()

    def best(self, us: float, xla_us: float | None) -> None:
        """Notes the time of our fastest candidate so far, and XLA's if it is timed; `tick` shows them."""
        bar, key = self._bar, self._key  # another thread may remove them
        if bar is not None and key is not None:
            xlas = "" if xla_us is None else f", XLA {xla_us:.1f} us"
            bar.set_postfix_str(f"best {us:.1f} us{xlas}: {key.problem}", refresh=False)

    def tick(self) -> None:
        """Moves the bar to the present state."""
        if self._bar is not None:
            done = min(_NEARLY, (time.monotonic() - self._since) / self._seconds)
            self._draw(done if self.total is None else self._number - 1 + done)

    def end(self) -> None:
        """The measurement ends, with or without a result."""
        self._key = None
        if self.total is None:
            self._remove_bar()  # between two lowered operations other output may come
        else:
            self._draw(self._number)

    def _draw(self, done: float) -> None:
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def close(self, given_up: bool = False) -> None:
        """Removes the bar, and writes the closing line."""
        self._remove_bar()
        text = f"tuning was given up: {self.summary()}" if given_up else self.summary()
        if not shows_bar():
            _logger.info("%s", text)
            return
        _bars().write(f"jax_splitk: {text}")

    def summary(self) -> str:
        """One line: the number of problems, the seconds, the gain of a step, and choices that changed."""
        count = len(self.measured)
        left = max(0, (self.total or 0) - count)
        what = f"{count} of {self.total} problems" if left else f"{count} problem{'s' * (count != 1)}"
        known = f" ({self.known} known before)" if self.known else ""
        said = [f"tuned {what} in {time.monotonic() - self._started:.1f} s{known}"]
        if self.steps:
            said.append(_sum("step of {} operations: ", self.steps))
        elif self.measured:
            said.append(_sum("one of each: " if count > 1 else "", [(1, entry) for entry in self.measured]))
        return "; ".join([*said, *flips.summary(self.measured)])


def _bars() -> types.ModuleType:
    from jax_splitk.tuning import bar  # noqa: PLC0415 - imports tqdm, which most processes never need

    return bar


def _sum(of: str, counted: Iterable[tuple[int, Entry]]) -> str:
    """The time of operations, one after the other, and the gain over XLA, whose time may be estimated."""
    rows = [(count, entry.us(entry.choice), entry.us(XLA) or entry.estimated_xla_us) for count, entry in counted]
    timed = [(count, count * us, count * xla_us) for count, us, xla_us in rows if us is not None and xla_us is not None]
    operations, us, xla_us = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 0.0, 0.0)
    said = f"{of.format(operations)}{us:.1f} us, XLA {xla_us:.1f} us, predicted {gain(us, xla_us) if timed else ''}"
    return said if timed else "XLA was not measured"


class Progress:
    """The runs of a process. Each belongs to the thread that waits for it."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._open: dict[Key, Run] = {}

    @contextlib.contextmanager
    def run(self, total: int, known: int = 0) -> Iterator[Run]:
        """What this thread measures in the block is one run."""
        run = self._own.run = Run(total, known)
        given_up = True
        try:
            yield run
            given_up = False
        finally:
            self._own.run = None
            run.close(given_up)

    @contextlib.contextmanager
    def measuring(self, key: Key, seconds: float) -> Iterator[list[Entry]]:
        """A measurement in this thread's run, or in one that ends with the lowering. The block appends its entry."""
        run = self._own.run = getattr(self._own, "run", None) or Run()
        self._open[key] = run
        run.begin(key, seconds)
        try:
            yield run.measured
        except KeyboardInterrupt:
            if run.total is None:
                self.lowered(given_up=True)
            raise
        finally:
            del self._open[key]
            run.end()

    def best(self, key: Key, us: float, xla_us: float | None) -> None:
        """Calls `Run.best` of the run with this key, if one is open; the search may be in any thread."""
        if (run := self._open.get(key)) is not None:
            run.best(us, xla_us)

    def tick(self, key: Key) -> None:
        """Calls `Run.tick` of the run with this key, if one is open."""
        if (run := self._open.get(key)) is not None:
            run.tick()

    def lowered(self, *, given_up: bool = False) -> bool:
        """This thread's lowering is done. Returns whether that ends a run."""
        run = getattr(self._own, "run", None)
        if run is None or run.total is not None:
            return False
        self._own.run = None
        if run.measured:
            run.close(given_up)
        return True
