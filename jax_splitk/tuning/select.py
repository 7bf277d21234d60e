"""Problem to choice, in the order of the design: an explicit config, the `TuningResult` in force, the caches, the
shipped table, a measurement where one may be made, the table of another GPU of the architecture, the cost model, and
XLA where no kernel of ours may or should serve.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, disk, toolchain
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import agreement, buckets, certainty, decide, model, once, relatives, store, watch
from jax_splitk.tuning.choice import XLA, Candidate, Choice, Times
from jax_splitk.tuning.decide import FrozenCacheMiss
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import Options

_logger = logging.getLogger("jax_splitk")


def select(problem: Problem, target: Target, options: Options, *, measure: bool = False, final: bool = False) -> Choice:
    """The choice for `problem` on `target`.

    Caches, tables and the cost model need no compiler. A final choice needs its kernel's code: one that no cache has,
    and that cannot be compiled here, is XLA's.

    Args:
      measure: whether a miss may be measured now (and stored), if tuning is on.
      final: whether the choice will be lowered, and not only looked at.

    Raises:
      NotImplementedError: an explicit implementation or config cannot serve; the message names the limit.
      ValueError: the config is not legal for the problem, or its workspace is over the limit.
      FrozenCacheMiss: no entry, or neither its kernel nor a compiler, under `JAX_SPLITK_CACHE_MODE=frozen`, for a final
        choice.
    """
    if options.implementation == "xla":
        return Choice(problem, XLA, "implementation='xla' was asked for")
    # Of another platform's families only what was asked for is worth a word.
    families = kernels.families(problem.op, None if options.explicit else target.platform)
    asked = [f for f in families if options.implementation in (None, f.implementation)]
    if options.config is not None:
        asked = [f for f in asked if isinstance(options.config, f.Config)]
    reasons = {family.name: Candidate(family).refusal(problem, target) for family in asked}
    refusals = {name: reason for name, reason in reasons.items() if reason is not None}
    serving = [family for family in asked if family.name not in refusals]
    choice = None
    if serving and options.config is not None:
        choice = _explicit(serving[0], problem, target, options)
    elif serving:
        key = key_for(problem, target)
        choice = _known(key, options, measure, final) or _by_a_relative(key, options)
        choice = choice or _predicted(serving, problem, target, options, refusals)
    if choice is not None:
        # A process of a job that lacks the compiler says so to the others when it comes to compile (`code_of`).
        together = measure and not options.explicit and agreement.needed()
        missing = without_code(choice, target) if final and not together else None
        if missing is None:
            return choice
        if disk.mode() == "frozen" and not options.explicit and not options.quiet:
            raise FrozenCacheMiss(f"{problem}: no cache has the kernel of {choice.candidate}, and {missing}")
        refusals = {choice.candidate.name: missing}  # what else would not serve is no matter
    reason = _in_words(refusals) or f"no kernel for platform {target.platform}"
    if options.explicit:
        raise NotImplementedError(
            f"{problem}: {reason}. Use implementation=None (the best that can) or implementation='xla'."
        )
    return Choice(problem, XLA, reason, costs=would_serve(problem, target))


def would_serve(problem: Problem, target: Target) -> bool:
    """Whether a kernel for Hopper that is likely to be faster than XLA's takes the problem by itself."""
    families = kernels.families(problem.op, "cuda") if target.is_hopper else ()
    able = (family for family in families if family.refusal(problem, None, target) is None)
    return any(family.unmeasured_refusal(problem) is None for family in able)


def without_code(choice: Choice, target: Target) -> str | None:
    """Why there is no compiler for the choice's kernel, if no cache has it; None where there is its code."""
    if choice.candidate == XLA or target.platform != "cuda" or (missing := toolchain.unavailable()) is None:
        return None
    plan = choice.candidate.plan(choice.problem)
    has_code = not isinstance(plan, DevicePlan) or compiler.held(plan.source) is not None
    return None if has_code else missing


def _in_words(refusals: dict[str, str]) -> str:
    """Each reason once, with all its families."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())


def _explicit(family: Family, problem: Problem, target: Target, options: Options) -> Choice:
    candidate, limit = Candidate(family, options.config), options.workspace_limit
    reason = candidate.refusal(problem, target)
    if reason is not None:
        raise ValueError(f"config={options.config!r} is not legal for {problem}: {reason}")
    size = candidate.workspace_bytes(problem)
    if size > limit:
        raise ValueError(
            f"config={options.config!r} needs {size} bytes of workspace for {problem}; workspace_limit_bytes={limit}"
        )
    return Choice(problem, candidate, "the config was given explicitly")


_IN_FORCE = "the TuningResult in force"


# ---- by measurement ------------------------------------------------------------------------------------------------


def _known(key: Key, options: Options, measure: bool, final: bool) -> Choice | None:
    """What a TuningResult, a cache, the shipped table or a measurement says; None where nothing does."""
    limit = options.workspace_limit
    if options.tuning is not None:
        entry = options.tuning.get(key)
        if entry is not None and entry.best(limit) is not None:
            return _from_entry(entry, _IN_FORCE, options)
        in_force = lambda other: (e, _IN_FORCE) if (e := options.tuning.get(other)) else None  # noqa: E731
        found = buckets.served(key, limit, in_force)
        if found is not None:
            return _from_entry(*found, options)
        if entry is None:
            _say_what_does_not_match(options.tuning, key)
    found = decide.known(key, limit, here=measure, measure=watch.state.measures(options))
    if found is None and final and disk.mode() == "frozen" and decide.foregone(key.problem, key.target) is None:
        return _frozen(key, options)
    return None if found is None else _from_entry(*found, options)


def _frozen(key: Key, options: Options) -> Choice:
    """XLA for a quiet pass, which caches of weight gradients do not have; FrozenCacheMiss for what the caller named."""
    why = "no entry, and JAX_SPLITK_CACHE_MODE=frozen"
    if not options.quiet:
        others = _elsewhere(key)
        raise FrozenCacheMiss(f"{key.problem}: {why}; {others}{decide.command(key, options.workspace_limit)}")
    return Choice(key.problem, XLA, why, costs=would_serve(key.problem, key.target))


def _elsewhere(key: Key) -> str:
    """What the caches have of the problem for other machines, and how their decision could serve; empty for nothing."""
    environments, here = store.elsewhere(key), key.environment
    if not environments:
        return ""
    cores = [str(e.cores) for e in environments if dataclasses.replace(e, cores=here.cores) == here]
    if cores and here.platform == "cpu":
        return (
            f"a cache has it for {' and for '.join(cores)} CPU cores, here are {here.cores}, and the best config "
            f"depends on that (NPROC={cores[0]} starts a process with as many of XLA's threads); "
        )
    return f"a cache has it for {'; '.join(map(str, environments))}, this machine is {here}; "


def _say_what_does_not_match(tuning: Any, key: Key) -> None:
    """One log line where a TuningResult has the problem, but not for this machine."""
    others = "; ".join(str(other.environment) for other, _ in tuning if other.problem == key.problem)
    if others:
        passed_over = f"{key.problem}: the TuningResult in force is passed over"
        disk.warn_once(f"{passed_over}: it decides for {others}, and this is {key.environment}")


def _from_entry(entry: Entry, where: str, options: Options) -> Choice | None:
    """The entry's answer within the limit, or its best of the implementation that was asked for."""
    candidate = entry.best(options.workspace_limit, options.implementation)
    if candidate is None:
        return None

    def times() -> Times:
        if buckets.REPRESENTATIVE in entry.metadata and candidate.family is not None:
            seconds = candidate.family.estimate(entry.key.problem, candidate.config, entry.key.target)
            return Times(seconds * 1e6, predicted=True)
        measured = (m.us for m in entry.measurements if m.us and m.candidate != XLA)
        return Times(min(measured, default=None) if candidate == XLA else entry.us(candidate), entry.us(XLA))

    return Choice(entry.key.problem, candidate, where, times)


def _by_a_relative(key: Key, options: Options) -> Choice | None:
    """What was measured on another GPU of the architecture: a prediction here."""
    found = relatives.shipped(key, options.workspace_limit)
    choice = None if found is None else _from_entry(*found, options)
    if found is None or choice is None:
        return None
    us = None if choice.candidate == XLA else found[0].us(choice.candidate)
    return dataclasses.replace(choice, read_times=lambda: Times(us, predicted=True))


# ---- by the cost model ---------------------------------------------------------------------------------------------


def _predicted(
    serving: Sequence[Family], problem: Problem, target: Target, options: Options, refusals: dict[str, str]
) -> Choice | None:
    """The cost model's best legal config, or XLA where that is predicted to be faster and nothing was asked for; where
    there is none, None and the reasons in `refusals`."""
    limit = options.workspace_limit
    found: list[tuple[float, int, Candidate]] = []
    total = 0
    for family in serving:
        reason = None if options.implementation else family.unmeasured_refusal(problem)
        seconds, best, count = 0.0, None, 0
        if reason is None:
            seconds, best, count = model.best_of_family(family, problem, target, limit)
        total += count
        if best is None:
            refusals[family.name] = reason or f"no config fits in workspace_limit_bytes={limit}"
        else:
            found.append((seconds, len(found), Candidate(family, best)))
    if not found:
        return None
    seconds, _, candidate = min(found)
    faster = None
    if not options.explicit:
        # In doubt a pass that nobody named stays as it was.
        faster = certainty.faster_xla(candidate, seconds, problem, target, doubted=not options.quiet)
    if faster is not None:
        said = f"XLA {faster * 1e6:.1f} us, {candidate.name} {seconds * 1e6:.1f} us"
        return Choice(problem, XLA, f"the cost model predicts that XLA is faster ({said})")
    times = Times(seconds * 1e6, predicted=True)
    return Choice(problem, candidate, f"the cost model's best of {total} configs", lambda: times)


def is_silent(choice: Choice, options: Options) -> bool:
    """Whether it is a quiet pass that is lax's because XLA is faster: nothing that anybody has to know."""
    return options.quiet and choice.candidate == XLA and not choice.costs


def announce(choice: Choice, options: Options) -> None:
    """One log line for each problem and outcome: falling back is silent only where nobody asked for more, and a warning
    for each reason where it costs time."""
    silent = is_silent(choice, options)
    watch.state.lowered(choice, options, silent=silent)
    if silent:
        return
    if choice.costs and once.state.is_first("costs", choice.because):
        _logger.warning("%s: XLA where a kernel would serve: %s (said once for a reason)", choice.problem, choice.why)
    elif _logger.isEnabledFor(logging.INFO) and once.state.is_first("announced", choice.problem, choice.because):
        what = "XLA" if choice.candidate == XLA else f"{choice.implementation} {choice.candidate}"
        _logger.info("%s: %s (%s)", choice.problem, what, choice.why)


# ---- what is lowered ---------------------------------------------------------------------------------------------


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
            level = logging.WARNING if once.state.is_first("costs", found) else logging.INFO
            _logger.log(level, "%s: XLA instead of %s: %s", problem, candidate, found)
        return found

    # It holds for the life of the process, which would otherwise wait for a compilation that fails, and for the other
    # processes of its job, at each lowering.
    found = once.state.result(("obstacle", problem, candidate), obstacle)
    if found is not None:
        return Choice(problem, XLA, found.splitlines()[0]), None
    return choice, compiled[0] if compiled else candidate.custom_call(problem)
