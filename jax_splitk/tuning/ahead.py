"""Kernels that are compiled before the lowering that needs them asks for them.

A lowering meets the operations of a program one after the other, a trace has met them all before the first is lowered.
So a trace takes note of them. Where it is known what they will be lowered for, the devices of this process being GPUs,
what lowering is going to choose begins to compile at once; else when the first of them is lowered. A note may be wrong:
operations are traced that are never lowered, and in other shapes than theirs. Then a kernel was compiled for nothing.
Nothing is said, measured, stored or raised here: all of that is left to the lowering.
"""

import contextlib

import jax

from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, compiler, disk, settings
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, once, searches, tuner, watch
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.decide import measured_first
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select, without_code

_MOST = 128  # notes that are kept, the latest


def traced(problem: Problem, options: Options) -> None:
    """Takes note of an operation that a kernel may compute."""
    with contextlib.suppress(Exception):
        if settings.word("JAX_SPLITK_COMPILE_AHEAD") == "off" or options.implementation == "xla":
            return
        notes = searches.state.traced
        notes[problem, options] = None
        if len(notes) > _MOST:
            notes.popitem(last=False)
        if not watch.state.traces_only and _is_for_this_gpu():
            _begin(problem, options, target_for("cuda"), measure=True)


def lowered(problem: Problem, options: Options, target: Target, measure: bool) -> None:
    """An operation is lowered: begins to compile what others, which no lowering has met yet, will need.

    Args:
      measure: whether a problem that has no decision may be measured now.
    """
    with contextlib.suppress(Exception):
        untold, notes = once.state.deferred_warnings, searches.state.traced
        while untold:
            disk.warn_once(untold.pop(0))
        notes.pop((problem, options), None)
        if target.platform != "cuda":
            return
        while notes:
            note, _ = notes.popitem(last=False)
            _begin(*note, target, measure=measure)


def _is_for_this_gpu() -> bool:
    """Whether what is traced will, as far as one knows, be lowered for the GPUs of this process, and as it is: over
    several devices jit divides it, but for what shard_map has divided already."""
    if not _compat.backends_are_started() or local_platform() != "cuda":
        return False
    return jax.device_count() == 1 or _compat.is_inside_shard_map()


def _begin(problem: Problem, options: Options, target: Target, *, measure: bool) -> None:
    """Begins to compile what lowering would choose, once. A problem that it would measure is one of those that come
    next."""

    def begin() -> None:
        if measure and (measured := measured_first(key_for(problem, target), options)) is not None:
            if not agreement.needed():  # else process 0 measures, and nothing must disturb it
                tuner.enqueue(measured, options.workspace_limit)
            return
        choice = select(problem, target, options)
        if choice.candidate == XLA or without_code(choice, target) is not None:
            return
        if isinstance(plan := choice.candidate.plan(problem), DevicePlan):
            compiler.compile_ahead([plan.source])

    with contextlib.suppress(Exception), disk.defer_warnings(once.state.deferred_warnings):
        once.state.result(("ahead", problem, options, target), begin)
