"""Kernels that compile before their lowering asks for them.

JAX lowers the operations of a program one after the other, but has traced all of them before it lowers the first. So
each trace notes its operations. If this process's devices are GPUs, a note begins at once to compile the kernel that
the lowering will choose; otherwise that begins when the first operation is lowered. A note may be wrong: some
operations are never lowered, or with other shapes. Then a kernel was compiled for nothing. Notes log, measure, store
and raise nothing: the lowering does.
"""

import contextlib
import dataclasses

import jax

from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, disk, settings
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, once, searches, tuner, watch
from jax_splitk.tuning.decide import measured_first
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.measure import compile_ahead
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select, without_code

_MOST = 128  # the latest notes, which are kept


def traced(problem: Problem, options: Options) -> None:
    """Notes an operation that a kernel may compute."""
    with contextlib.suppress(Exception):
        if settings.word("JAX_SPLITK_COMPILE_AHEAD") == "off" or options.implementation == "xla":
            return
        notes = searches.state.traced
        notes[problem, options] = None
        if len(notes) > _MOST:
            notes.popitem(last=False)
        if not watch.state.traces_only and _is_for_this_gpu():
            _begin(problem, options, target_for("cuda"), measure=True)


def lowered(problem: Problem, options: Options, target: Target, measure: bool, devices: int = 1) -> None:
    """Begins to compile what the noted operations will need, since one operation is being lowered.

    Args:
      measure: whether a problem that has no decision may be measured now.
      devices: over how many devices XLA's partitioner will divide the operations. It asks for their parts one after the
        other, some while XLA compiles. Most programs divide the batch.
    """
    with contextlib.suppress(Exception):
        untold, notes = once.state.deferred_warnings, searches.state.traced
        while untold:
            disk.warn_once(untold.pop(0))
        if devices == 1:
            notes.pop((problem, options), None)
        if target.platform != "cuda":
            return
        while notes:
            (other, wanted), _ = notes.popitem(last=False)
            if (part := _part(other, devices)) is not None:
                _begin(part, wanted, target, measure=measure)


def _part(problem: Problem, devices: int) -> Problem | None:
    """What each of the devices computes if they divide the batch; None if they cannot."""
    if devices == 1:
        return problem
    if not isinstance(problem, ConvProblem) or problem.batch % devices:
        return None
    return dataclasses.replace(problem, batch=problem.batch // devices)


def _is_for_this_gpu() -> bool:
    """Whether a traced operation will probably be lowered for this process's GPUs, with the shapes of the trace: over
    several devices jit divides it, unless shard_map has divided it already."""
    if not _compat.backends_are_started() or local_platform() != "cuda":
        return False
    return jax.device_count() == 1 or _compat.is_inside_shard_map()


def _begin(problem: Problem, options: Options, target: Target, *, measure: bool) -> None:
    """Begins to compile what the lowering would choose, once for each operation. A problem that the lowering would
    measure is queued for a search instead."""

    def begin() -> None:
        if measure and (measured := measured_first(key_for(problem, target), options)) is not None:
            if not agreement.needed():  # in a job nothing must disturb process 0, which measures
                tuner.enqueue(measured, options.workspace_limit, problem)
            return
        choice = select(problem, target, options)
        if without_code(choice, target) is None:
            compile_ahead(choice.problem, [choice.candidate])

    with contextlib.suppress(Exception), disk.defer_warnings(once.state.deferred_warnings):
        once.state.result(("ahead", problem, options, target), begin)
