"""From a choice to what is lowered: the kernel's custom call, or XLA's operation where it cannot be compiled."""

import logging

from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import agreement
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.session import session

_logger = logging.getLogger("jax_splitk")


def code_of(choice: Choice, target: Target, options: Options, *, agreed: bool) -> tuple[Choice, CustomCall | None]:
    """The choice and its custom call; XLA and None, with one warning, where its code does not compile.

    Args:
      agreed: whether the processes of a job lower the same: then one that cannot compile keeps all from it.

    Raises:
      CompilationError, CompilerUnavailable: likewise, for an explicit implementation or config.
    """
    problem, candidate = choice.problem, choice.candidate
    if candidate == XLA:
        return choice, None
    if options.explicit:
        return choice, candidate.plan(problem).custom_call()

    compiled: list[CustomCall] = []

    def obstacle() -> str | None:
        """Why the kernel is not used although it was chosen."""
        found = None
        try:
            compiled.append(candidate.plan(problem).custom_call())
        except (CompilationError, CompilerUnavailable, NvrtcError) as error:
            found = f"{candidate.name}: {error}"
        if agreed:
            found = agreement.obstacle(key_for(problem, target), candidate, found)
        if found is not None:
            _logger.warning("%s: XLA instead of %s: %s", problem, candidate, found)
        return found

    # It holds for the life of the process, which would otherwise wait for a compilation that fails, and for the other
    # processes of its job, at each lowering.
    found = session().once(("obstacle", problem, candidate), obstacle)
    if found is not None:
        return Choice(problem, XLA, found.splitlines()[0]), None
    return choice, compiled[0] if compiled else candidate.plan(problem).custom_call()
