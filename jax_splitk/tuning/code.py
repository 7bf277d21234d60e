"""From a choice to what is lowered: the kernel's custom call, or XLA's operation where it cannot be compiled."""

import logging
import threading
from typing import Any

from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import agreement
from jax_splitk.tuning.entry import Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import Choice, xla

logger = logging.getLogger("jax_splitk")

# Why a kernel is not used although it was chosen, None where it is: it holds for the life of the process, which would
# otherwise wait for a compilation that fails, and for the other processes of its job, at each lowering.
_obstacles: dict[tuple[Problem, str, Any], str | None] = {}
_in_flight: dict[tuple[Problem, str, Any], threading.Lock] = {}


def code_of(choice: Choice, target: Target, options: Options, *, agreed: bool) -> tuple[Choice, CustomCall | None]:
    """The choice and its custom call; XLA and None, with one warning, where its code does not compile.

    Args:
      agreed: whether the processes of a job lower the same: then one that cannot compile keeps all from it.

    Raises:
      CompilationError, CompilerUnavailable: likewise, for an explicit implementation or config.
    """
    family = choice.family
    if family is None:
        return choice, None
    if options.explicit:
        return choice, family.plan(choice.problem, choice.config).custom_call()
    at = (choice.problem, family.name, choice.config)
    custom_call, obstacle = None, _obstacles.get(at)
    if obstacle is None:
        try:
            custom_call = family.plan(choice.problem, choice.config).custom_call()
        except (CompilationError, CompilerUnavailable, NvrtcError) as error:
            obstacle = f"{family.name}: {error}"
    with _in_flight.setdefault(at, threading.Lock()):  # a process asks the others once
        if at not in _obstacles:
            if agreed:
                key, candidate = key_for(choice.problem, target), Candidate(family.name, choice.config)
                obstacle = agreement.obstacle(key, candidate, obstacle)
            if obstacle is not None:
                logger.warning("%s: XLA instead of %s %s: %s", choice.problem, family.name, choice.config, obstacle)
            _obstacles[at] = obstacle
        obstacle = _obstacles[at]
    return (choice, custom_call) if obstacle is None else (xla(choice.problem, obstacle.splitlines()[0]), None)
