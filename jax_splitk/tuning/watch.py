"""What the command line sees of a script that it runs: `watching`. `watch.state` is this process's."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.choice import Choice
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.options import Options


@dataclasses.dataclass
class Watched:
    """What was lowered and decided in a block of `Watch.watching`.

    Attributes:
      again: whether keys that a cache has are measured too, each once.
      exact: whether a problem is measured itself, where another one's decision would do.
      forward_only: whether forward passes without a gradient are measured (`Options.forward_only`).
      choices: choices of the operations that were lowered, with how often; without silent ones.
      silent: how many passes were left to lax because XLA is faster (`tuning.select.is_silent`).
      asked: every operation that was lowered, by problem and the caller's options, with how often; also those that no
        kernel of this platform computes.
      entries: by key, where a cache or a measurement was asked; None if neither had an answer.
      measured: the keys that were measured.
    """

    again: bool = False
    exact: bool = False
    forward_only: bool = False
    choices: dict[Choice, int] = dataclasses.field(default_factory=dict)
    silent: int = 0
    asked: dict[tuple[Problem, Options], int] = dataclasses.field(default_factory=dict)
    entries: dict[Key, Entry | None] = dataclasses.field(default_factory=dict)
    measured: set[Key] = dataclasses.field(default_factory=set)


class Watch:
    """Who watches, and which threads only look at a program."""

    def __init__(self) -> None:
        self.watchers: list[Watched] = []
        self._thread = threading.local()

    @contextlib.contextmanager
    def watching(self, *, again: bool = False, exact: bool = False, forward_only: bool = False) -> Iterator[Watched]:
        """Records what is lowered and decided while the block runs; see `Watched`."""
        watched = Watched(again, exact, forward_only)
        self.watchers.append(watched)
        try:
            yield watched
        finally:
            self.watchers.remove(watched)

    @contextlib.contextmanager
    def tracing_only(self) -> Iterator[None]:
        """What this thread traces and lowers in the block is never run as the user's program."""
        before, self._thread.traces_only = self.traces_only, True
        try:
            yield
        finally:
            self._thread.traces_only = before

    @property
    def traces_only(self) -> bool:
        """Whether this thread is inside `tracing_only`."""
        return getattr(self._thread, "traces_only", False)

    def lowered(self, choice: Choice, options: Options, *, silent: bool) -> None:
        self.asked(choice.problem, options)
        for watched in self.watchers:
            watched.silent += silent and not options.copied_operand
            if not silent:
                watched.choices[choice] = watched.choices.get(choice, 0) + 1

    def asked(self, problem: Problem, options: Options) -> None:
        for watched in self.watchers:
            watched.asked[problem, options] = watched.asked.get((problem, options), 0) + 1

    def decided(self, key: Key, entry: Entry | None) -> None:
        for watched in self.watchers:
            watched.entries[key] = entry

    def measured(self, key: Key) -> None:
        for watched in self.watchers:
            watched.measured.add(key)

    def wishes(self, key: Key) -> tuple[bool, bool]:
        """(whether a key is to be measured although a cache has it, whether it is to be measured itself)."""
        again = any(watched.again and key not in watched.entries for watched in self.watchers)
        return again, again or any(watched.exact for watched in self.watchers)

    def measures(self, options: Options) -> bool:
        """Whether a miss of a call with these options is measured, if tuning is on."""
        return not options.forward_only or any(watched.forward_only for watched in self.watchers)


state = Watch()
