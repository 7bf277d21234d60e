"""What a process remembers of its tuning, in one object: `session()`."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.choice import Choice
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.progress import Progress
from jax_splitk.tuning.shared_profile import SharedProfile

_T = TypeVar("_T")


@dataclasses.dataclass
class Watched:
    """What was chosen while `Session.watching`: the command line's view of a script.

    Attributes:
      again: whether what a cache already has is measured too, each key once.
      exact: whether a problem is measured itself, where another one's decision would do.
      alone: whether forward passes that no gradient was asked of are measured (`Options.alone`).
      choices: of every operation that was lowered, with how often, without silent ones.
      silent: how many passes were left to lax because XLA is faster (`tuning.select.is_silent`).
      asked: all that was lowered, by problem and the caller's options; also what no kernel of this platform is for.
      entries: by key, where a cache or a measurement was asked; None where neither had an answer.
      measured: the keys that were measured.
    """

    again: bool = False
    exact: bool = False
    alone: bool = False
    choices: dict[Choice, int] = dataclasses.field(default_factory=dict)
    silent: int = 0
    asked: dict[tuple[Problem, Options], int] = dataclasses.field(default_factory=dict)
    entries: dict[Key, Entry | None] = dataclasses.field(default_factory=dict)
    measured: set[Key] = dataclasses.field(default_factory=set)


class Session:
    """The tuning of one process; safe to use from several threads.

    Attributes:
      turn: held by whoever waits for a measurement: threads that miss the same problem at once measure it once.
      device: held while a search times something on the device, or XLA does for one: nothing may disturb it.
      profile: the next one that is taken of the device.
      searches: those that are under way, or whose entries nobody has taken yet.
      left: those that were given up, whose threads may not have ended.
      suspect: the problem of a candidate that failed as it ran, after which nothing else may have worked.
      chosen: whether XLA has chosen a problem's kernels together with others', of those that it has tried
        (xla_choices.py).
      choice_seconds: what the last such choice took, for each of its problems; None before the first.
      traced: operations, by problem and the caller's options, that may be lowered next (ahead.py).
      untold: warnings of what was begun ahead of a lowering, which says them.
      coming: what may be measured next: keys and the callers' limits, with what is known of it.
      unsaved: measurements that could not be stored: a process measures a problem once in any case.
      rounds: how often the processes of a job were asked to agree, by name.
      progress: what the user sees of it.
      alone: names on which this process went its own way: it need not wait for the others a second time.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.device = threading.Lock()
        self.profile = SharedProfile()
        self.progress = Progress()
        self.searches: dict[tuple[Key, int], Any] = {}
        self.left: list[Any] = []
        self.suspect: Problem | None = None
        self.chosen: dict[Problem, bool] = {}
        self.choice_seconds: float | None = None
        self.traced: collections.OrderedDict[tuple[Problem, Options], None] = collections.OrderedDict()
        self.untold: list[str] = []
        self._apart = threading.local()
        self.coming: dict[tuple[Key, int], Any] = {}
        self.unsaved: dict[Key, Entry] = {}
        self.rounds: collections.Counter[str] = collections.Counter()
        self.alone: set[str] = set()
        self._lock = threading.Lock()
        self._once: dict[Hashable, Any] = {}
        self._in_flight: dict[Hashable, threading.Lock] = {}
        self._watchers: list[Watched] = []

    def once(self, what: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` returns, which is called once for each `what`, unless it raises; other threads wait for it."""
        if what not in self._once:
            with self._lock:
                own = self._in_flight.setdefault(what, threading.Lock())
            with own:
                if what not in self._once:
                    self._once[what] = make()
        return self._once[what]

    def is_first(self, *what: Hashable) -> bool:
        """Whether this is the first time that somebody asks so, of what is to be said or done once."""
        with self._lock:
            return self._once.setdefault(what, marker := object()) is marker

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What this thread traces and lowers in the block is ours: the program of nobody who will run it."""
        thread = self._apart
        before, thread.active = self.is_apart, True
        try:
            yield
        finally:
            thread.active = before

    @property
    def is_apart(self) -> bool:
        return getattr(self._apart, "active", False)

    @contextlib.contextmanager
    def watching(self, *, again: bool = False, exact: bool = False, alone: bool = False) -> Iterator[Watched]:
        """Records what is chosen while the block runs; see `Watched`."""
        watched = Watched(again, exact, alone)
        self._watchers.append(watched)
        try:
            yield watched
        finally:
            self._watchers.remove(watched)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def lowered(self, choice: Choice, options: Options, *, silent: bool) -> None:
        self.asked(choice.problem, options)
        for watched in self._watchers:
            watched.silent += silent
            if not silent:
                watched.choices[choice] = watched.choices.get(choice, 0) + 1

    def asked(self, problem: Problem, options: Options) -> None:
        asked = (problem, options)
        for watched in self._watchers:
            watched.asked[asked] = watched.asked.get(asked, 0) + 1

    def decided(self, key: Key, entry: Entry | None) -> None:
        for watched in self._watchers:
            watched.entries[key] = entry

    def measured(self, key: Key) -> None:
        for watched in self._watchers:
            watched.measured.add(key)

    def wants_again(self, key: Key) -> bool:
        """Whether a key that a cache has is to be measured now all the same."""
        return any(watched.again and key not in watched.entries for watched in self._watchers)

    def measures(self, options: Options) -> bool:
        """Whether a miss of a call with these options is measured, if tuning is on."""
        return not options.alone or any(watched.alone for watched in self._watchers)

    def wants_exact(self) -> bool:
        """Whether problems are to be measured themselves."""
        return any(watched.exact for watched in self._watchers)


# Of the process: what one lowering measured or said holds for the next, which JAX calls without an object of ours.
_session = Session()


def session() -> Session:
    """This process's."""
    return _session
