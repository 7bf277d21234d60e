"""The device on which a process measures: who has it, and the problems for which XLA has chosen kernels. `device.state`
is this process's.

While XLA compiles a program it times its own kernels and cuDNN's, and the process remembers the fastest for each
operation. On an H200 it takes 1.6 s for one program of 16 convolutions and then 1.1 s to compile each by itself, but
4.0 s without that program. So a search that has XLA choose lets it choose for the next problems as well.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem

FEW = 4  # fewest problems of a program, if there are as many
MOST = 64  # most problems of a program
SECONDS = 8.0  # longest that a program of more than `FEW` is expected to take: other searches wait for the device


class Device:
    """Who has the device, and what is known of it.

    Attributes:
      lock: held while a search uses the device, or XLA times kernels for one: nothing may disturb a measurement.
      poisoned_by: the problem of a candidate that failed as it ran: what fails after it may fail because of it.
      choosing: threads in which XLA chooses kernels before a search asks for them (xla_choices.py).
      xla_chose: whether XLA has chosen a problem's kernels together with others', for those that were tried so.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.poisoned_by: Problem | None = None
        self.choosing: list[threading.Thread] = []
        self.xla_chose: dict[Problem, bool] = {}
        self._seconds: float | None = None  # that XLA last took to choose, for each problem

    def let_xla_choose(self, problem: Problem, following: Iterable[Problem], options: Mapping[str, Any]) -> bool:
        """Has XLA choose kernels for the problem, unless it has, and for the following ones. The caller holds the lock.

        What does not compile together is left to the searches that compile it by itself, and record what is wrong.

        Returns:
          Whether XLA has chosen. If so, it times no kernels when the problem is compiled by itself.
        """
        known = self.xla_chose
        if problem not in known:
            most = FEW if self._seconds is None else int(SECONDS / max(self._seconds, 1e-3))
            new = [p for p in dict.fromkeys((problem, *following)) if p not in known][: max(FEW, min(most, MOST))]
            known.update(dict.fromkeys(new, False))
            if len(new) > 1:
                started = time.monotonic()
                with contextlib.suppress(Exception):
                    _compile(new, options)
                    known.update(dict.fromkeys(new, True))
                self._seconds = (time.monotonic() - started) / len(new)
        return known[problem]


state = Device()


def _compile(problems: Sequence[Problem], compiler_options: Mapping[str, Any]) -> None:
    """Compiles one program that computes all of the problems, and does not run it."""
    operands = [[jax.ShapeDtypeStruct(*array) for array in problem.operand_types] for problem in problems]

    def jax_splitk_choices(given: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        return [OPERATIONS[p.op].reference(p, *each) for p, each in zip(problems, given, strict=True)]

    jax.jit(jax_splitk_choices).lower(operands).compile(compiler_options=dict(compiler_options))
