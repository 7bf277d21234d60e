"""Tuning ahead of time: the problems of a function's trace, or problems given one by one."""

import collections
import contextlib
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_splitk.ops import routing, trace
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning import agreement, measurement, searches, tuner, watch
from jax_splitk.tuning.entry import Entry, merge
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import current
from jax_splitk.tuning.result import TuningResult
from jax_splitk.tuning.search import is_served
from jax_splitk.tuning.serving import why_not_tuned

_logger = logging.getLogger("jax_splitk")


def tune(
    fn: Callable[..., Any], *args: Any, seconds: float | None = None, again: bool = False, **kwargs: Any
) -> TuningResult:
    """Measures the kernels of every jax_splitk operation in `fn(*args, **kwargs)`, and stores the fastest of each.

    `fn` is traced, and the problems in its trace are measured on the local device. The decisions go to the user's
    cache, if it may be written (`JAX_SPLITK_CACHE_MODE`); the log lists decisions that were not stored. A terminal, or
    else the log, shows the progress, and at the end the gain of a step (`JAX_SPLITK_PROGRESS`).

    Args:
      fn: a function that `jax.make_jaxpr` accepts, e.g. a train step; it is traced, not run.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: its arguments by name.
      seconds: budget for one problem, above 0; None for `JAX_SPLITK_TUNE_BUDGET_S`, else 10.
      again: also tune problems that a cache already has.

    Returns:
      The decisions. In a `with` block these decisions come first. `dumps` and `loads` take them to other machines.

    Raises:
      ValueError: `seconds` is not a number above 0.
      RuntimeError: XLA itself cannot compute a problem.

    Examples:
      >>> def wgrad(x, g):
      ...     return jax_splitk.conv_wgrad(x, g, (3, 4, 4), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
      >>> x = jax.ShapeDtypeStruct((2, 64, 4), jnp.float32)
      >>> tuned = jax_splitk.tune(wgrad, x, x, seconds=0.05)
      >>> len(tuned)
      1
      >>> with tuned:
      ...     dw = jax.jit(wgrad)(jnp.ones(x.shape), jnp.ones(x.shape))
    """
    wanted: collections.Counter[tuple[Problem, int]] = collections.Counter()
    target = target_for(local_platform())
    for found in trace.operations(trace.traced(fn, args, kwargs), fn, args, kwargs, local_platform(), every=True):
        options = found.options
        ours = found.undivided is None and options.config is None and options.implementation != "xla"
        if ours and routing.only_xla(found.problem) is None and why_not_tuned(found.problem, target) is None:
            wanted[(found.problem, options.workspace_limit)] += 1
    return _tune_all(wanted, seconds, again, counted=True)


def tune_problems(problems: Iterable[Problem], *, seconds: float | None = None, again: bool = False) -> TuningResult:
    """Measures the kernels of given problems, and stores the fastest of each: `tune` without a function to trace.

    Args:
      problems: e.g. a `jax_splitk.problems.conv_wgrad.ConvWgradProblem` or a
        `jax_splitk.problems.quantized_matmul.QuantizedMatmulProblem`; the current options apply to all of them.
      seconds: budget for one problem, above 0; None for `JAX_SPLITK_TUNE_BUDGET_S`, else 10.
      again: also tune problems that a cache already has.

    Returns:
      The decisions, as from `tune`.

    Raises:
      TypeError: one of them is not a problem.
      ValueError: the fields of a problem do not fit together; otherwise as `tune`.

    Examples:
      >>> from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
      >>> problem = QuantizedMatmulProblem(4, 64, 64, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
      >>> len(jax_splitk.tune_problems([problem], seconds=0.05))
      1
    """
    given = list(problems)
    accepted = tuple(operation.problem for operation in OPERATIONS.values())
    for i, problem in enumerate(given):
        if not isinstance(problem, accepted):
            raise TypeError(f"problems[{i}]={problem!r}; accepted: {', '.join(t.__name__ for t in accepted)}")
        try:
            problem.validate()
        except ValueError as error:
            raise ValueError(f"problems[{i}]: {error}") from None
    return _tune_all(dict.fromkeys(((problem, current().workspace_limit) for problem in given), 1), seconds, again)


def _tune_all(
    wanted: Mapping[tuple[Problem, int], int], seconds: float | None, again: bool, counted: bool = False
) -> TuningResult:
    """Tunes pairs of problem and workspace limit, each with its count. `counted`: whether the count is how often a step
    computes it."""
    budget = None if seconds is None else _seconds(seconds)
    target = target_for(local_platform())
    keys = {(key_for(problem, target), limit): count for (problem, limit), count in wanted.items()}
    keys = {(key, limit): count for (key, limit), count in keys.items() if is_served(key, limit)}  # else XLA's alone
    found: dict[Key, Entry] = {}
    missing = measurement.missing(keys, again)
    with tuner.queued(missing, budget), searches.state.progress.run(len(missing), len(keys) - len(missing)) as run:
        for (key, limit), count in keys.items():
            tuned = functools.partial(measurement.tuned, key, limit, budget, again)
            _, entry = agreement.agree(key, limit, lambda tuned=tuned: tuned().entry)
            watch.state.decided(key, entry)
            if key in searches.state.unsaved:
                where = f"JAX_SPLITK_CACHE_MODE={disk.mode()}, {disk.cache_dir()}"
                _logger.warning(
                    "%s: measured, but not stored (%s): this process and the TuningResult have it", key.problem, where
                )
            if entry is not None:
                found[key] = merge(found.get(key), entry)
                run.steps += [(count, entry)] * counted
    return TuningResult(tuple(found.items()))


def _seconds(value: Any) -> float:
    """A number of seconds of any numeric type, also NumPy's."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer that no float holds
            number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"seconds={value!r}; accepted: None or a number above 0")
    return number
