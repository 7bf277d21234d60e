"""Which entry decides for a key: a cache's, the shipped table's, or a measurement's; in a job, process 0's."""

import functools
import itertools
import json
import logging
from collections.abc import Iterable
from typing import Any

import jax

from jax_splitk import kernels
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import disk, settings, toolchain
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import agreement, buckets, flips, once, searches, store, table, tuner, watch
from jax_splitk.tuning.buckets import Found
from jax_splitk.tuning.entry import Entry, merge
from jax_splitk.tuning.key import Key, problem_as_dict
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

_logger = logging.getLogger("jax_splitk")

_ENDS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class FrozenCacheMiss(RuntimeError):
    """Raised in frozen mode (`JAX_SPLITK_CACHE_MODE=frozen`) for an operation that was not tuned.

    Also for one whose tuned kernel is in no cache, where there is no compiler.

    Raised where an operation is lowered: when a call of it, or of a jitted function around it, compiles, or when it is
    exported. The message is the problem and the command that tunes it, or what is missing. An explicit config,
    `implementation="xla"`, a `TuningResult` in force that has the problem, what only XLA can compute and what tuning
    does not measure because XLA is known to be as fast (`foregone`) need no decision. The forward pass and the input
    gradient of `conv_general_dilated` are XLA's without one, with a warning.
    """


def autotune(target: Target) -> bool:
    """Whether a miss is measured: `JAX_SPLITK_AUTOTUNE`, by default "on_miss" on a GPU and "off" on the CPU.

    Raises ValueError for any other word.
    """
    return settings.word("JAX_SPLITK_AUTOTUNE", "on_miss" if target.platform == "cuda" else "off") == "on_miss"


def foregone(problem: Problem, target: Target) -> str | None:
    """Why a miss is not measured although a kernel serves: XLA is known to be as fast. None where it is measured."""
    families = kernels.families(problem.op, target.platform)
    reasons = [f.measurement_refusal(problem) for f in families if f.refusal(problem, None, target) is None]
    return reasons[0] if reasons and None not in reasons else None


def known(key: Key, workspace_limit: int, *, here: bool, measure: bool) -> Found | None:
    """What decides for a caller of that limit; None for a miss.

    Args:
      here: whether the decision is for this process's devices: all processes of a job take the same.
      measure: whether a miss may then be measured now (and stored), if tuning is on.
    """
    if not here:
        return _held(key, workspace_limit) or _served(key, workspace_limit)
    if not agreement.needed():
        found = _here(key, workspace_limit, measure)
        watch.state.decided(key, None if found is None else found[0])
        return found
    # A problem that is lowered again needs no other agreement, and cannot come out otherwise.
    settled = lambda: _agreed(key, workspace_limit, measure)  # noqa: E731
    return once.state.result(("settled", key, workspace_limit, measure), settled)


def to_measure(key: Key, workspace_limit: int) -> Key | None:
    """What a lowering of the problem for the local device would measure first: it, a representative, or nothing."""
    if disk.mode() == "frozen" or not autotune(key.target):
        return None
    if watch.state.wants_again(key):
        return key
    held = _held(key, workspace_limit)
    if held is None and not watch.state.wants_exact():
        held = _served(key, workspace_limit)
        key = buckets.to_tune(key, workspace_limit)[0] if held is None else key
        if foregone(key.problem, key.target) is not None:
            return None
    return None if held is not None and held[0].is_searched(workspace_limit) else key


def _agreed(key: Key, workspace_limit: int, measure: bool) -> Found | None:
    """The same in every process of the job."""
    where = "process 0's decision"

    def decide() -> Entry | None:
        nonlocal where
        entry, where = _here(key, workspace_limit, measure) or (None, where)
        return entry

    agreed, entry = agreement.agree(key, workspace_limit, decide)
    watch.state.decided(key, entry)
    if not agreed:
        entry, where = table.lookup(key), "shipped table"  # the same in every process
    return None if entry is None else (entry, where)


def _here(key: Key, workspace_limit: int, measure: bool) -> Found | None:
    """What decides in this process by itself: what is held, for the problem or a representative, if it was searched
    under such a limit; else a measurement, if tuning is on and the caller lets it; else, or if that fails, which is
    logged, what is held."""
    again = watch.state.wants_again(key)
    held = _held(key, workspace_limit)
    exact = again or held is not None or watch.state.wants_exact()
    if not exact:
        held = _served(key, workspace_limit)
    if held is not None and not again and held[0].is_searched(workspace_limit):
        return held
    reason = toolchain.unavailable() if key.target.platform == "cuda" else None
    if reason is None and not again and not watch.state.wants_exact():
        reason = foregone(key.problem, key.target)
    if disk.mode() == "frozen" or reason is not None or not measure or not autotune(key.target):
        if held is None:
            _logger.info("%s: not tuned; %s", key.problem, reason or command(key, workspace_limit))
        return held
    seconds = tuner.budget_seconds()
    try:
        for measured in [key] if exact else buckets.to_tune(key, workspace_limit):
            found = tuned(measured, workspace_limit, seconds, again)
            if measured != key:
                found = buckets.served(key, workspace_limit, {measured: found}.get)
            if found is not None:
                return found
        return held
    except Exception as error:  # a failed measurement (out of memory, say) must not fail the user's program
        fallback = "the cost model" if held is None else "the cache"
        _logger.warning("%s: tuning failed (%s: %s); %s decides", key.problem, type(error).__name__, error, fallback)
        return held


def tuned(key: Key, workspace_limit: int, seconds: float | None = None, again: bool = False) -> Found:
    """What is held, if that was searched under such a limit; else, or `again`, a measurement, which is stored.

    Raises:
      RuntimeError: as `tuner.tune`.
    """
    with searches.state.turn:
        held = _held(key, workspace_limit)
        if held is not None and not again and held[0].is_searched(workspace_limit):
            return held
        _listen()
        old = tuner.earlier(key)
        seconds = tuner.budget_seconds() if seconds is None else seconds
        with searches.state.progress.measuring(key, seconds) as measured:
            entry = flips.noted(old, tuner.tune(key, workspace_limit, old, seconds))
            measured.append(entry)
        watch.state.measured(key)
        if not store.save(entry):
            searches.state.unsaved[key] = merge(searches.state.unsaved.get(key), entry)
        return entry, "measured now"


def missing(asked: Iterable[tuple[Key, int]], again: bool) -> list[tuple[Key, int]]:
    """Those of the keys, each with a workspace limit, that `tuned` has to measure; `again`: all of them."""

    def is_held(key: Key, workspace_limit: int) -> bool:
        held = _held(key, workspace_limit)
        return held is not None and held[0].is_searched(workspace_limit)

    return [each for each in asked if again or not is_held(*each)]


def _served(key: Key, workspace_limit: int) -> Found | None:
    """What is held for a representative of the problem, and holds for it, too."""
    return buckets.served(key, workspace_limit, lambda other: _held(other, workspace_limit))


@functools.cache
def _listen() -> None:
    """A run of measurements that a lowering began ends with it, or with the compilation, where XLA's partitioner asks
    for a device's part."""

    def ended(event: str, duration_secs: float, **_: Any) -> None:
        if event in _ENDS and searches.state.progress.lowered():
            tuner.give_up_ahead()

    jax.monitoring.register_event_duration_secs_listener(ended)


def _held(key: Key, workspace_limit: int) -> Found | None:
    """The first entry of this process or of a layer of the cache that has an answer for the limit."""
    unsaved = searches.state.unsaved.get(key)
    first = [] if unsaved is None else [(unsaved, "measured now")]
    found = itertools.chain(first, store.found(key))
    return next((f for f in found if f[0].best(workspace_limit) is not None), None)


def command(key: Key, workspace_limit: int) -> str:
    """How to tune the problem, or the one that decides for it, ahead of time."""
    fields = json.dumps(problem_as_dict(buckets.to_tune(key, workspace_limit)[0].problem))
    limit = "" if workspace_limit == DEFAULT_WORKSPACE_LIMIT else f" --workspace-limit-bytes {workspace_limit}"
    return f"to tune it ahead of time: python -m jax_splitk tune '{fields}'{limit}"
