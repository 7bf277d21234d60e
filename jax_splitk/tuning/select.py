"""From a problem to what is lowered for it: a kernel, or XLA where no kernel can or should serve."""

import dataclasses
import functools
import logging

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.base.family import CudaFamily
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, disk, toolchain
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import agreement, once, watch
from jax_splitk.tuning.choice import XLA, Candidate, Choice, Times
from jax_splitk.tuning.decide import FrozenCacheMiss, decide
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.lookup import Query
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.serving import serving, would_serve

_logger = logging.getLogger("jax_splitk")

CHAINED_US = 1.5  # that a chain saves for a product in its middle (benchmarks/notes/quantized.md)


def select(problem: Problem, target: Target, options: Options, *, measure: bool = False, final: bool = False) -> Choice:
    """The choice for `problem` on `target`. For a convolution with an epilogue it is the choice for the convolution
    alone; the choice's problem has the epilogue if the kernel computes it.

    Caches, tables and the cost model need no compiler. A final choice needs its kernel's code: where no cache has that,
    and nothing here compiles it, the choice is XLA.

    Args:
      measure: whether a miss may be measured now (and stored), if tuning is on.
      final: whether the choice will be lowered, and not only looked at.

    Raises:
      NotImplementedError: an explicit implementation or config cannot serve; the message names the limit.
      ValueError: the config is not legal for the problem, or its workspace is over the limit.
      FrozenCacheMiss: in frozen mode, for a final choice: there is no entry, or neither its kernel nor a compiler.
    """
    if options.implementation == "xla":
        return Choice(problem, XLA, "implementation='xla' was asked for")
    if options.copied_operand:
        return _in_place(problem, target, options, measure=measure, final=final)
    if options.chained:
        return _in_chain(problem, target, options, measure=measure, final=final)
    families = serving(problem, target)
    if options.explicit:
        families = tuple(family for family in families if _is_asked_for(family, options))
    choice = None
    if families:
        choice = decide(Query(key_for(problem, target), options, options.workspace_limit, families, measure, final))
    missing = None
    if choice is not None:
        # In a job a process without a compiler tells the others when it should compile (`code_of`).
        together = measure and not options.explicit and agreement.needed()
        needs_code = final and not together
        choice = _with_epilogue(choice, problem, target, needs_code)
        missing = without_code(choice, target) if needs_code else None
        if missing is None:
            return choice
        if disk.mode() == "frozen" and not options.explicit and not options.implied:
            raise FrozenCacheMiss(f"{problem}: no cache has the kernel of {choice.candidate}, and {missing}")
    reason = _why_xla(problem, target, options) if choice is None else f"{choice.candidate.name}: {missing}"
    if options.explicit:
        raise NotImplementedError(
            f"{problem}: {reason}. Use implementation=None (the best that can) or implementation='xla'."
        )
    return Choice(problem, XLA, reason, kernel_blocked=would_serve(problem, target))


def _with_epilogue(choice: Choice, problem: Problem, target: Target, needs_code: bool) -> Choice:
    """The choice with the problem's epilogue, if it has one that the chosen kernel computes. `needs_code`: the code of
    this kernel must be there."""
    whole = dataclasses.replace(choice, problem=choice.candidate.computed(problem))
    if whole == choice:
        return choice
    return choice if needs_code and without_code(whole, target) is not None else whole


def _in_place(problem: Problem, target: Target, options: Options, *, measure: bool, final: bool) -> Choice:
    """The choice for a product for which XLA would copy an operand (`Options.copied_operand`). XLA does not compete,
    because it is measured without the copy."""
    few = next((family for family in serving(problem, target) if family.few_rows), None)
    if few is None:
        return Choice(problem, XLA, "no kernel for few rows serves it")
    kernels_only = dataclasses.replace(options, implementation=few.implementation, copied_operand=False)
    try:
        return select(problem, target, kernels_only, measure=measure, final=final)
    except NotImplementedError as error:
        return Choice(problem, XLA, str(error))


def _in_chain(problem: Problem, target: Target, options: Options, *, measure: bool, final: bool) -> Choice:
    """The choice for a product of a chain: that for the product alone, unless its kernel cannot be chained and one that
    can be takes hardly longer."""
    choice = select(problem, target, dataclasses.replace(options, chained=False), measure=measure, final=final)
    family = choice.family
    if family is None or options.explicit or can_be_chained(family):
        return choice
    us, xla_us = choice.times.us, choice.times.xla_us
    for other in filter(can_be_chained, serving(choice.problem, target)):
        configs = other.candidates(choice.problem, target)
        for best in other.by_estimate(choice.problem, configs, target)[:1]:
            other_us = 1e6 * other.estimate(choice.problem, best, target)
            times = functools.partial(Times, other_us, xla_us, predicted=True)
            because = f"{family.name} cannot be chained"
            found = dataclasses.replace(choice, candidate=Candidate(other, best), because=because, read_times=times)
            if us is not None and other_us <= us + CHAINED_US and not (final and without_code(found, target)):
                return found
    return choice


def can_be_chained(family: Family) -> bool:
    """Whether the family's kernels can be chained (`runtime/joined_plan.py`)."""
    return isinstance(family, CudaFamily) and family.chainable


def _is_asked_for(family: Family, options: Options) -> bool:
    """Whether the caller allows the family."""
    of_config = options.config is None or isinstance(options.config, family.Config)
    return of_config and options.implementation in (None, family.implementation)


def without_code(choice: Choice, target: Target) -> str | None:
    """Why the choice's kernel cannot be lowered: no cache has it, and there is no compiler. None if it can."""
    if choice.candidate == XLA or target.platform != "cuda" or (missing := toolchain.unavailable()) is None:
        return None
    plan = choice.candidate.plan(choice.problem)
    has_code = not isinstance(plan, DevicePlan) or compiler.held(plan.source) is not None
    return None if has_code else missing


def _why_xla(problem: Problem, target: Target, options: Options) -> str:
    """Why no family serves: each reason once, with its families. Other platforms' families are mentioned only where one
    of them was asked for."""
    problem = decisive(problem)
    names: dict[str, list[str]] = {}
    for family in kernels.families(problem.op, None if options.explicit else target.platform):
        if _is_asked_for(family, options):
            reason = Candidate(family).refusal(problem, target)
            reason = reason or (None if options.implementation else family.why_xla_untuned(problem))
            reason = reason or f"no config fits in workspace_limit_bytes={options.workspace_limit}"
            names.setdefault(reason, []).append(family.name)
    reasons = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())
    return reasons or f"no kernel for platform {target.platform}"


def is_silent(choice: Choice, options: Options) -> bool:
    """Whether the choice is an implied pass that is lax's because XLA is faster. Nobody needs to know that."""
    return options.implied and choice.candidate == XLA and not choice.kernel_blocked


def announce(choice: Choice, options: Options) -> None:
    """Logs a choice: a line for each problem and outcome, and a warning, once for each reason, where an obstacle costs
    time. Silent passes are not logged."""
    silent = is_silent(choice, options)
    watch.state.lowered(choice, options, silent=silent)
    if silent:
        return
    if choice.kernel_blocked and once.state.is_first("kernel blocked", choice.because):
        _logger.warning(
            "%s: XLA where a kernel would serve: %s (said once for each reason)", choice.problem, choice.why
        )
    elif _logger.isEnabledFor(logging.INFO) and once.state.is_first("announced", choice.problem, choice.because):
        what = "XLA" if choice.candidate == XLA else f"{choice.implementation} {choice.candidate}"
        _logger.info("%s: %s (%s)", choice.problem, what, choice.why)


# ---- what is lowered ---------------------------------------------------------------------------------------------


def code_of(choice: Choice, target: Target, options: Options, *, agreed: bool) -> tuple[Choice, CustomCall | None]:
    """The choice and its custom call; XLA and None, with one warning, where its code does not compile.

    Args:
      agreed: whether all processes of a job lower this choice. If one of them cannot compile it, XLA computes it in
        all.

    Raises:
      CompilationError, CompilerUnavailable: the code of an explicit implementation or config does not compile.
    """
    problem, candidate = choice.problem, choice.candidate
    if candidate == XLA:
        return choice, None
    if options.explicit:
        return choice, candidate.custom_call(problem)

    compiled: list[CustomCall] = []

    def obstacle() -> str | None:
        """Why the kernel is not used although it was chosen."""
        found = None
        try:
            compiled.append(candidate.custom_call(problem))
        except (CompilationError, CompilerUnavailable, NvrtcError) as error:
            found = f"{candidate.name}: {error}"
        if agreed:
            found = agreement.obstacle(key_for(problem, target), candidate, found)
        if found is not None:
            level = logging.WARNING if once.state.is_first("kernel blocked", found) else logging.INFO
            _logger.log(level, "%s: XLA instead of %s: %s", problem, candidate, found)
        return found

    # An obstacle holds for the life of the process. Otherwise each lowering would wait for a compilation that fails,
    # and for the other processes of the job.
    found = once.state.result(("obstacle", problem, candidate), obstacle)
    if found is not None:
        return Choice(problem, XLA, found.splitlines()[0]), None
    return choice, compiled[0] if compiled else candidate.custom_call(problem)
