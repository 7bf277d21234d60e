"""Lets XLA choose its kernels for several problems at once.

While XLA compiles a program it times its own kernels and cuDNN's, and the process remembers the fastest for each
operation. On an H200 it takes 1.6 s for one program of 16 convolutions and then 1.1 s to compile each by itself, but
4.0 s without that program. So a search that has XLA choose lets it choose for the next problems as well.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import device, searches

FEW = 4  # fewest problems of a program, if there are as many
MOST = 16  # most problems of a program
SECONDS = 2.0  # longest that a program of more than `FEW` is expected to take: other searches wait for the device


def choose(problem: Problem, compiler_options: Mapping[str, Any]) -> bool:
    """Has XLA choose kernels for the problem, unless it has, and for the next ones. The caller holds the device.

    What does not compile together is left to the searches that compile it by itself, and record what is wrong with it.

    Returns:
      Whether XLA has chosen, so that it times nothing when the problem is compiled by itself.
    """
    known, seconds = device.state.xla_chose, device.state.xla_seconds
    if problem in known:
        return known[problem]
    following = [key.problem for key, _ in (*list(searches.state.running), *list(searches.state.queue))]
    most = FEW if seconds is None else int(SECONDS / max(seconds, 1e-3))
    new = [p for p in dict.fromkeys((problem, *following)) if p not in known][: max(FEW, min(most, MOST))]
    known.update(dict.fromkeys(new, False))
    if len(new) > 1:
        started = time.monotonic()
        with contextlib.suppress(Exception):
            _compile(new, compiler_options)
            known.update(dict.fromkeys(new, True))
        device.state.xla_seconds = (time.monotonic() - started) / len(new)
    return known[problem]


def _compile(problems: Sequence[Problem], compiler_options: Mapping[str, Any]) -> None:
    """Compiles one program that computes all of the problems, and does not run it."""
    operands = [[jax.ShapeDtypeStruct(*array) for array in problem.operand_types] for problem in problems]

    def jax_splitk_choices(given: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        return [OPERATIONS[p.op].reference(p, *each) for p, each in zip(problems, given, strict=True)]

    jax.jit(jax_splitk_choices).lower(operands).compile(compiler_options=dict(compiler_options))
