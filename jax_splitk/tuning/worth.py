"""Which problems of a program are worth a measurement.

A decision without measurement is expected to lose a few percent (`certainty.expected_loss`), and a problem that takes
little of a program's time can lose little of it. So a lowering measures the problems whose decisions matter the most,
until those of the others together are expected to lose at most `JAX_SPLITK_TUNE_LOSS` of the time of the program's
operations. The others are left to the sources of decisions that come after a measurement.
"""

import collections
from collections.abc import Callable, Iterable
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


class Program:
    """The program that is being lowered, or was lowered last.

    Attributes:
      is_divided: whether XLA's partitioner divides its operations among devices.
      left: keys of problems that are not measured for it, or were not for the last program that had them.
    """

    def __init__(self) -> None:
        self.is_divided = False
        self.left: frozenset[Key] = frozenset()
        self._functions: collections.deque[Any] = collections.deque(maxlen=_REMEMBERED)

    def is_new(self, function: Any) -> bool:
        """Whether a program's traced function, as JAX lowers it, was not seen before."""
        if any(function is seen for seen in self._functions):
            return False
        self._functions.append(function)
        return True

    def leave(
        self,
        operations: Iterable[Operation],
        target: Target,
        loss: float,
        measured_first: Callable[[Key, Options], Key | None],
    ) -> None:
        """Finds out which of a new program's problems are not worth a measurement.

        Args:
          loss: the share of the operations' time that may be lost.
          measured_first: the key that would be measured first for an operation; None if nothing would be measured.
        """
        operations = list(operations)
        self.left -= {key_for(operation.problem, target) for operation in operations}  # `measured_first` asks for it
        total = 0.0
        losses: dict[Key, float] = collections.defaultdict(float)
        problems: dict[Key, set[Key]] = collections.defaultdict(set)  # one measurement decides for several problems
        for problem, options, times in operations:
            key = key_for(problem, target)
            if (best := model.best(key, options.workspace_limit)) is None:
                continue
            seconds, candidate, _ = best
            xlas = xla.estimate(key.problem, target)
            spent = times * (seconds if xlas is None else min(seconds, xlas.seconds))
            total += spent
            if (measured := measured_first(key, options)) is not None:
                share = certainty.expected_loss(candidate, seconds, key.problem, target)
                losses[measured] += spent * (1.0 if options.explicit else share)
                problems[measured].add(key)
        remaining = loss * total
        for measured, lost in sorted(losses.items(), key=lambda of: of[1]):
            remaining -= lost
            if remaining < 0:
                break
            self.left |= problems[measured]
