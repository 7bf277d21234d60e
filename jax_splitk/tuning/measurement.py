"""Decisions by measurement: which problems are measured, when, and how results are used."""

import functools
import json
import logging
from collections.abc import Iterable
from typing import Any

import jax

from jax_splitk.runtime import disk, settings, toolchain
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import buckets, flips, searches, store, tuner, watch
from jax_splitk.tuning.entry import Found, merge
from jax_splitk.tuning.key import Key, problem_as_dict
from jax_splitk.tuning.lookup import LOCAL, Query
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.serving import why_not_tuned

_logger = logging.getLogger("jax_splitk")

_LOWERED, _COMPILED = (f"/jax/core/compile/{name}_duration" for name in ("jaxpr_to_mlir_module", "backend_compile"))


def autotune(target: Target) -> bool:
    """Whether a miss is measured: `JAX_SPLITK_AUTOTUNE`, by default "on_miss" on a GPU and "off" on the CPU. Raises
    ValueError for any other word.
    """
    return settings.word("JAX_SPLITK_AUTOTUNE", "on_miss" if target.platform == "cuda" else "off") == "on_miss"


def measurement(query: Query) -> Found | None:
    """A source of decisions: measures the keys of `to_measure` until one decides for the query. None, with a line in
    the log, if nothing may be measured or the measurement fails: a failure, such as running out of memory, must not end
    the user's program.
    """
    keys = to_measure(query)
    if not keys:
        if query.here and query.held is None and _logger.isEnabledFor(logging.INFO):
            _logger.info("%s: not tuned; %s", query.key.problem, _obstacle(query) or command(query.key, query.limit))
        return None
    seconds = tuner.budget_seconds()
    settings.share("JAX_SPLITK_TUNE_LOSS")  # the lowering read it, but raised nothing
    try:
        for key in keys:
            found = tuned(key, query.limit, seconds, query.again)
            if key == query.key:
                return found
            if (derived := buckets.derived(query.key, found, query.limit)) is not None:
                return derived
    except Exception as error:
        name, decides = type(error).__name__, "the cost model" if query.held is None else "the cache"
        _logger.warning("%s: tuning failed (%s: %s); %s decides", query.key.problem, name, error, decides)
    return None


def to_measure(query: Query) -> list[Key]:
    """The keys to measure for a query that is not settled, until one decides for it: representatives, then the problem
    itself. Empty if a measurement is impossible or useless."""
    if not may_measure(query):
        return []
    itself = query.exact or (query.held is not None and len(query.held.entry.measurements) > 0)
    return [query.key] if itself else buckets.to_tune(query.key, query.limit)


def may_measure(query: Query) -> bool:
    """Whether a query that is not settled is measured: `to_measure` has a key. It asks no cost model."""
    allowed = query.here and disk.mode() != "frozen" and _obstacle(query) is None
    if not allowed or not watch.state.measures(query.options) or not autotune(query.key.target):
        return False
    return query.exact or query.key not in searches.state.program.left


def _obstacle(query: Query) -> str | None:
    """Why a measurement is impossible or useless."""
    missing = toolchain.unavailable() if query.key.target.platform == "cuda" else None
    return missing or (None if query.exact else why_not_tuned(query.key.problem, query.key.target))


def tuned(key: Key, workspace_limit: int, seconds: float | None = None, again: bool = False) -> Found:
    """The decision of this process or a cache for the key, if its search had such a limit. Otherwise, or with `again`,
    a measurement, which is stored.

    Raises:
      RuntimeError: as `tuner.tune`.
    """
    with searches.state.turn:
        if not again and (found := _searched(key, workspace_limit)) is not None:
            return found
        _listen()
        old = tuner.earlier(key)
        seconds = tuner.budget_seconds() if seconds is None else seconds
        with searches.state.progress.measuring(key, seconds) as measured:
            entry = flips.noted(old, tuner.tune(key, workspace_limit, old, seconds))
            measured.append(entry)
        watch.state.measured(key)
        if not store.save(entry):
            searches.state.unsaved[key] = merge(searches.state.unsaved.get(key), entry)
        return Found(entry, "measured now")


def missing(asked: Iterable[tuple[Key, int]], again: bool) -> list[tuple[Key, int]]:
    """The keys, each with a workspace limit, that `tuned` would measure; with `again`, all of them."""
    return [each for each in asked if again or _searched(*each) is None]


def _searched(key: Key, workspace_limit: int) -> Found | None:
    found = LOCAL.own(key, workspace_limit)
    return found if found is not None and found.entry.is_searched(workspace_limit) else None


@functools.cache
def _listen() -> None:
    """Ends a run of measurements together with the lowering that began it, or with XLA's compilation, if its
    partitioner divides the program: it asks for the devices' parts."""

    def ended(event: str, duration_secs: float, **_: Any) -> None:
        is_end = event == _COMPILED or (event == _LOWERED and not searches.state.program.is_divided)
        if is_end and searches.state.progress.lowered():
            tuner.give_up_ahead()

    jax.monitoring.register_event_duration_secs_listener(ended)


def command(key: Key, workspace_limit: int) -> str:
    """The command that tunes a problem ahead of time, or the problem whose decision it uses."""
    fields = json.dumps(problem_as_dict(buckets.to_tune(key, workspace_limit)[0].problem))
    limit = "" if workspace_limit == DEFAULT_WORKSPACE_LIMIT else f" --workspace-limit-bytes {workspace_limit}"
    return f"to tune it ahead of time: python -m jax_splitk tune '{fields}'{limit}"
