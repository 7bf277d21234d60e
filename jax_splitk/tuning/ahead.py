"""Tuning ahead of time: the problems of a function's trace, or problems given one by one."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jax_splitk import lowering, trace
from jax_splitk.kernels import Problem
from jax_splitk.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, store, tuner, watch
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import Options, current
from jax_splitk.tuning.result import TuningResult


def tune(
    fn: Callable[..., Any], *args: Any, seconds: float | None = None, again: bool = False, **kwargs: Any
) -> TuningResult:
    """Tunes every jax_splitk operation in a trace of `fn(*args, **kwargs)` on the local device, and stores the
    decisions in the user's cache.

    Args:
      fn: a function that `jax.make_jaxpr` accepts, e.g. a train step; it is traced, not run.
      *args, **kwargs: its arguments; arrays or `jax.ShapeDtypeStruct`s.
      seconds: budget for one problem; None for `JAX_SPLITK_TUNE_BUDGET_S`, else 10.
      again: also tune what a cache already has.

    Returns:
      The decisions. As a context manager it puts them in force; `dumps` and `loads` carry them elsewhere.
    """
    wanted = {}
    for eqn in trace.operations(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr):
        problem = trace.problem_of(eqn)
        options: Options = eqn.params["options"]
        if options.config is None and options.implementation != "xla" and lowering.is_static(problem):
            wanted[(problem, options.deterministic, options.workspace_limit_bytes)] = None
    keys = [
        (problem, Options(deterministic=deterministic, workspace_limit_bytes=limit))
        for problem, deterministic, limit in wanted
    ]
    return _tune_all(keys, seconds, again)


def tune_problems(problems: Iterable[Problem], *, seconds: float | None = None, again: bool = False) -> TuningResult:
    """`tune` for problems given as such (`jax_splitk.problem.ConvWgradProblem`,
    `jax_splitk.quantized.problem.QuantizedMatmulProblem`), under the options in force."""
    return _tune_all([(problem, current()) for problem in dict.fromkeys(problems)], seconds, again)


def _tune_all(wanted: list[tuple[Problem, Options]], seconds: float | None, again: bool) -> TuningResult:
    target = target_for(local_platform())
    pairs: list[tuple[Key, Entry]] = []
    for i, (problem, options) in enumerate(wanted):
        key = key_for(problem, target, options)
        if not tuner.ranked(key, target):
            continue  # only XLA can compute it: nothing to decide
        if sys.stderr.isatty() and len(wanted) > 1:
            print(f"problem {i + 1} of {len(wanted)}", file=sys.stderr)
        _, entry = agreement.agree(key, target, lambda key=key: _one(key, target, seconds, again))
        watch.decided(key, entry)
        if entry is not None:
            pairs.append((key, entry))
    return TuningResult(tuple(pairs))


def _one(key: Key, target: Target, seconds: float | None, again: bool) -> Entry:
    found = store.lookup(key, target)
    if found is not None and not again:
        return found[0]
    entry = tuner.tune(key, target, None if found is None else found[0], seconds)
    store.save(key, entry)
    return entry
