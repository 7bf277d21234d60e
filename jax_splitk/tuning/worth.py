"""Which problems of a program are worth a measurement.

A decision without measurement is expected to lose a few percent (`certainty.expected_loss`), and a problem that takes
little of a program's time can lose little of it. So a lowering measures the problems whose decisions matter the most,
until those of the others together are expected to lose at most `JAX_SPLITK_TUNE_LOSS` of the time of the program's
operations. The others are left to the sources of decisions that come after a measurement.
"""

import collections
import contextlib
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_splitk.kernels.base import xla
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import certainty, model
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import Options

_REMEMBERED = 8  # functions: more threads than that hardly lower programs at a time


class Operation(NamedTuple):
    """An operation, and how many times a program runs it."""

    problem: Problem
    options: Options
    times: int


class Callbacks(NamedTuple):
    """Functions that look decisions up, and one that prepares for measurements.

    Attributes:
      measured_first: the key that would be measured first for an operation; None if nothing would be measured.
      is_measured: whether anything would be measured for an operation. It takes much less time to tell.
      left_by: the digests of the programs that left a problem.
      preparing: given operations of which some will be measured, with their keys, a context in which to find out which.
    """

    measured_first: Callable[[Key, Options], Key | None]
    is_measured: Callable[[Key, Options], bool]
    left_by: Callable[[Key], Sequence[str]]
    preparing: Callable[[Mapping[Key, Operation]], contextlib.AbstractContextManager[Any]]


class Program:
    """The program that is being lowered, or was lowered last.

    Attributes:
      is_divided: whether XLA's partitioner divides its operations among devices.
      digest: stands for its operations, and for how much may be lost.
      left: keys of problems that were not measured, for this program or for the last one that had them.
    """

    def __init__(self) -> None:
        self.is_divided = False
        self.digest = ""
        self.left: frozenset[Key] = frozenset()
        self._functions: collections.deque[weakref.ref[Any]] = collections.deque(maxlen=_REMEMBERED)

    def is_new(self, function: Any) -> bool:
        """Whether a program's traced function, as JAX lowers it, was not seen before."""
        if any(seen() is function for seen in self._functions):
            return False
        self._functions.append(weakref.ref(function))
        return True

    def begin(self, operations: Sequence[Operation], target: Target, loss: float, ask: Callbacks) -> list[Key | None]:
        """The key to measure first for each operation of a new program; None where nothing is measured.

        Args:
          loss: the share of the operations' time that may be lost.
        """
        keys = [key_for(operation.problem, target) for operation in operations]
        self.digest = _digest(operations, loss)
        self.left -= frozenset(keys)  # `measured_first` asks for it
        known = frozenset(key for key in keys if self.digest in ask.left_by(key))
        asked = list(zip(keys, operations, strict=True))
        if not any(key not in known and ask.is_measured(key, each.options) for key, each in asked):
            self.left |= known
            return [None] * len(keys)
        # The program is new, or the cache lacks some of its entries.
        with ask.preparing({key: each for key, each in asked if ask.is_measured(key, each.options)}):
            measured = [ask.measured_first(key, each.options) for key, each in asked]
            left = _left(operations, keys, measured, loss)
        self.left |= left
        return [None if key in left else first for key, first in zip(keys, measured, strict=True)]


def _digest(operations: Sequence[Operation], loss: float) -> str:
    lines = sorted(f"{problem!r} {options.explicit} {times}" for problem, options, times in operations)
    return hashlib.sha256(repr((loss, lines)).encode()).hexdigest()[:16]


def _left(
    operations: Sequence[Operation], keys: Sequence[Key], measured: Sequence[Key | None], loss: float
) -> frozenset[Key]:
    """The keys of the problems that are not worth a measurement."""
    total = 0.0
    losses: dict[Key, float] = collections.defaultdict(float)
    problems: dict[Key, set[Key]] = collections.defaultdict(set)  # one measurement decides for several problems
    for (_, options, times), key, first in zip(operations, keys, measured, strict=True):
        if (best := model.best(key, options.workspace_limit)) is None:
            continue
        seconds, candidate, _ = best
        xlas = xla.estimate(key.problem, key.target)
        spent = times * (seconds if xlas is None else min(seconds, xlas.seconds))
        total += spent
        if first is not None:
            share = certainty.expected_loss(candidate, seconds, key.problem, key.target)
            losses[first] += spent * (1.0 if options.explicit else share)
            problems[first].add(key)
    found: set[Key] = set()
    remaining = loss * total
    for first, lost in sorted(losses.items(), key=lambda of: of[1]):
        remaining -= lost
        if remaining < 0:
            break
        found |= problems[first]
    return frozenset(found)
