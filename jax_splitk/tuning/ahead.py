"""Kernels that compile before their lowering asks for them.

JAX lowers the operations of a program one after the other. If this process's devices are GPUs, the trace of an
operation begins at once to compile the kernel that the lowering will choose; otherwise that begins when the first
operation of the program is lowered. What is traced may never be lowered, or with other shapes. Then a kernel was
compiled for nothing. Nothing here logs or stores, and callers ignore what it raises: the lowering does it again.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import jax

from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, disk, settings
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, once, searches, tuner, watch, xla_choices
from jax_splitk.tuning.decide import is_measured, left_by, measured_first
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import compile_ahead
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select, without_code
from jax_splitk.tuning.worth import Callbacks, Operation


def traced(problem: Problem, options: Options) -> None:
    """Begins to compile the kernel of an operation that was traced, if it is for this process's GPUs."""
    is_looked_at = watch.state.traces_only or options.implementation == "xla"
    if is_looked_at or not _is_for_this_gpu():
        return
    target = target_for("cuda")
    with disk.defer_warnings(once.state.deferred_warnings):
        if not is_measured(key_for(problem, target), options):
            _compile(problem, options, target)


def begin(
    operations: Sequence[Operation], target: Target, *, measure: bool, under_way: tuple[Problem, Options] | None
) -> None:
    """Begins to compile what a program's operations will need, or to search for it, since its lowering begins.

    Args:
      measure: whether a problem that has no decision may be measured now.
      under_way: the operation whose own lowering has begun, if nothing else is to prepare it.
    """
    with disk.defer_warnings(once.state.deferred_warnings):
        first: Sequence[Key | None] = [None] * len(operations)
        if measure:
            loss = settings.share("JAX_SPLITK_TUNE_LOSS")
            ask = Callbacks(measured_first, is_measured, left_by, _preparing)
            first = searches.state.program.begin(operations, target, loss, ask)
        for (problem, options, _), key in zip(operations, first, strict=True):
            if (problem, options) == under_way:
                continue
            if key is None:
                _compile(problem, options, target)
            elif _searches_ahead():
                tuner.enqueue(key, options.workspace_limit, problem)


def speak() -> None:
    """Gives the warnings about what was prepared."""
    while once.state.deferred_warnings:
        disk.warn_once(once.state.deferred_warnings.pop(0))


def _is_for_this_gpu() -> bool:
    """Whether a traced operation will probably be lowered for this process's GPUs, with the shapes of the trace: over
    several devices jit divides it, unless shard_map has divided it already."""
    if not _compat.backends_are_started() or local_platform() != "cuda":
        return False
    return jax.device_count() == 1 or _compat.is_inside_shard_map()


def _is_on() -> bool:
    return settings.word("JAX_SPLITK_COMPILE_AHEAD") == "on"


def _searches_ahead() -> bool:
    """Whether measurements begin before their lowering asks for them. In a job nothing must disturb process 0, which
    measures."""
    return _is_on() and not agreement.needed()


@contextlib.contextmanager
def _preparing(operations: Mapping[Key, Operation]) -> Iterator[None]:
    """In the block XLA chooses kernels, and first candidates compile, for what will most probably be measured."""
    if not _searches_ahead():
        yield
        return
    likely = xla_choices.likely(operations)
    with xla_choices.begun([key.problem for key, _ in likely]):
        tuner.compile_first(likely)
        yield


def _compile(problem: Problem, options: Options, target: Target) -> None:
    """Begins to compile what the lowering would choose without a measurement, once for each operation."""

    def begin() -> None:
        choice = select(problem, target, options)
        if without_code(choice, target) is None:
            compile_ahead(choice.problem, [choice.candidate])

    with contextlib.suppress(Exception):  # an error is raised again by the lowering
        if _is_on():
            once.state.result(("ahead", problem, options, target), begin)
