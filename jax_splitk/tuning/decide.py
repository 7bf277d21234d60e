"""The chain of decisions: `SOURCES`, and the function that asks them in turn."""

import dataclasses
import logging
from collections.abc import Callable

from jax_splitk.runtime import disk
from jax_splitk.tuning import agreement, buckets, certainty, lookup, model, once, searches, store, watch
from jax_splitk.tuning.choice import XLA, Candidate, Choice, Times
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.lookup import Query
from jax_splitk.tuning.measurement import command, may_measure, measurement, to_measure
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.serving import why_not_tuned, would_serve

_logger = logging.getLogger("jax_splitk")

# A source's answer to a query: an entry that someone has, or a choice that needs none; None if it has no answer.
Source = Callable[[Query], Found | Choice | None]


class FrozenCacheMiss(RuntimeError):
    """Raised in frozen mode (`JAX_SPLITK_CACHE_MODE=frozen`) for an operation that was not tuned.

    Also for one whose tuned kernel is in no cache, where there is no compiler.

    Raised where an operation is lowered: when a call of it, or of a jitted function around it, compiles, or when it is
    exported. The message is the problem and the command that tunes it, or what is missing. No decision is needed for an
    explicit config, for `implementation="xla"`, where the `TuningResult` in force has the problem, for what only XLA
    can compute, and for what tuning does not measure because XLA is known to be as fast. The forward pass and the input
    gradient of `conv_general_dilated` are XLA's without one, with a warning.
    """


# ---- the sources -----------------------------------------------------------------------------------------------------


def config_argument(query: Query) -> Choice | None:
    """The config that the caller gave; ValueError if it is not legal, or its workspace is over the limit."""
    config, problem = query.options.config, query.key.problem
    if config is None:
        return None
    candidate = Candidate(query.families[0], config)
    if (reason := candidate.refusal(problem, query.key.target)) is not None:
        raise ValueError(f"config={config!r} is not legal for {problem}: {reason}")
    if (size := candidate.workspace_bytes(problem)) > query.limit:
        raise ValueError(
            f"config={config!r} needs {size} bytes of workspace for {problem}; workspace_limit_bytes={query.limit}"
        )
    return Choice(problem, candidate, "the config was given explicitly")


def tuning_result(query: Query) -> Found | None:
    """The `TuningResult` in force."""
    tuning = query.options.tuning
    if tuning is None:
        return None
    found = lookup.Decisions(tuning.found)(query)
    if found is None and tuning.get(query.key) is None:
        others = "; ".join(str(key.environment) for key, _ in tuning if key.problem == query.key.problem)
        passed_over = f"{query.key.problem}: the TuningResult in force is passed over"
        if others:
            disk.warn_once(f"{passed_over}: it decides for {others}, and this is {query.key.environment}")
    return found


class InCommon:
    """Sources that are asked in turn until the decision is settled. Their answers may differ between the processes of a
    job, so process 0 asks them, and the others take its answer."""

    def __init__(self, *sources: Callable[[Query], Found | None]) -> None:
        self._sources = sources

    def __call__(self, query: Query) -> Found | None:
        if not query.here:
            return self._ask(query)
        if watch.state.watchers:
            query.again, query.exact = watch.state.wishes(query.key)
        if agreement.needed():
            # A problem that is lowered again needs no other agreement, and cannot come out otherwise.
            settled = ("agreed", query.key, query.limit, watch.state.measures(query.options))
            found = once.state.result(settled, lambda: self._agree(query))
        else:
            found = self._ask(query)
        if watch.state.watchers:
            watch.state.decided(query.key, None if found is None else found.entry)
        return found

    def _ask(self, query: Query) -> Found | None:
        for source in self._sources:
            if not query.is_settled():
                query.held = source(query) or query.held
        return query.held

    def _agree(self, query: Query) -> Found | None:
        def entry() -> Entry | None:
            found = self._ask(query)
            return None if found is None else found.entry

        agreed, of_process_0 = agreement.agree(query.key, query.limit, entry)
        if not agreed:
            return lookup.SHIPPED_TABLE(query)  # the same in every process
        # In process 0 the answer says who had it.
        return query.held or (None if of_process_0 is None else Found(of_process_0, "process 0's decision"))


def frozen_mode(query: Query) -> Choice | None:
    """In frozen mode, XLA for an implied pass, since caches of weight gradients lack it; FrozenCacheMiss for a pass
    that the caller named. No answer if no decision is needed, or if a decision has none for the implementation."""
    problem = query.key.problem
    if not query.final or disk.mode() != "frozen" or why_not_tuned(problem, query.key.target) or lookup.LOCAL(query):
        return None
    reason = "no entry, and JAX_SPLITK_CACHE_MODE=frozen"
    if not query.options.implied:
        raise FrozenCacheMiss(f"{problem}: {reason}; {_elsewhere(query.key)}{command(query.key, query.limit)}")
    return Choice(problem, XLA, reason, kernel_blocked=would_serve(problem, query.key.target))


def _elsewhere(key: Key) -> str:
    """The machines for which the caches have the problem, and how their decision could serve here; empty for none."""
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


def cost_model(query: Query) -> Choice | None:
    """The cost model's best config, or XLA where that is predicted to be faster and nothing was asked for."""
    problem, target, options = query.key.problem, query.key.target, query.options
    families = [f for f in query.families if options.implementation or f.why_xla_untuned(problem) is None]
    best = model.best(query.key, query.limit, families)
    if best is None:
        return None
    seconds, candidate, total = best
    faster = None
    if not options.explicit:
        # An implied pass stays XLA's in doubt.
        faster = certainty.faster_xla(candidate, seconds, problem, target, doubted=not options.implied)
    if faster is not None:
        said = f"XLA {faster * 1e6:.1f} us, {candidate.name} {seconds * 1e6:.1f} us"
        return Choice(problem, XLA, f"the cost model predicts that XLA is faster ({said})")
    times = Times(seconds * 1e6, predicted=True)
    return Choice(problem, candidate, f"the cost model's best of {total} configs", lambda: times)


# In the order in which they are asked: the first answer decides. docs/concepts/choice.md has the same list.
SOURCES: tuple[Source, ...] = (
    config_argument,
    tuning_result,
    InCommon(lookup.LOCAL, measurement),
    frozen_mode,
    lookup.SIBLING_TABLES,
    cost_model,
)


def decide(query: Query) -> Choice | None:
    """The first answer of the sources; None if no source has an answer."""
    source = choice = None
    for source in SOURCES:
        if (choice := _choice(source(query), query)) is not None:
            break
    if query.final and query.here and source is not tuning_result:
        _store(query, choice)
    return choice


def _store(query: Query, choice: Choice | None) -> None:
    """Stores what it takes time to find out again: that a representative's decision holds for a problem; and the choice
    for a problem that is not worth a measurement, with the program that left it. Frozen mode needs the latter."""
    program, old = searches.state.program, None if query.held is None else query.held.entry
    is_left = query.key in program.left and not query.options.explicit
    if old is not None:
        entry = buckets.to_store(old) if buckets.is_derived(old) and not old.is_unmeasured else old
    elif is_left:
        chosen, because = (XLA, "no source") if choice is None else (choice.candidate, choice.because)
        entry = Entry.unmeasured(query.key, chosen, because)
    else:
        return
    if is_left and entry.is_unmeasured and program.digest not in entry.left_by:
        entry = entry.also_left_by(program.digest)
    if entry is not old:
        store.save(entry)


def _choice(answer: Found | Choice | None, query: Query) -> Choice | None:
    """A source's answer as a choice: of an entry its choice, or its best of the implementation that was asked for."""
    if not isinstance(answer, Found):
        return answer
    entry, options = answer.entry, query.options
    candidate = entry.best(query.limit, options.implementation)
    if candidate is None:
        return None

    def times() -> Times:
        if (entry.is_unmeasured or buckets.is_derived(entry)) and candidate.family is not None:
            seconds = candidate.family.estimate(entry.key.problem, candidate.config, entry.key.target)
            return Times(seconds * 1e6, predicted=True)
        if entry.key != query.key:  # another GPU's times are a prediction here
            return Times(None if candidate == XLA else entry.us(candidate), predicted=True)
        measured = (m.us for m in entry.measurements if m.us and m.candidate != XLA)
        return Times(min(measured, default=None) if candidate == XLA else entry.us(candidate), entry.us(XLA))

    return Choice(entry.key.problem, candidate, answer.where, times)


def measured_first(key: Key, options: Options) -> Key | None:
    """What the lowering of a problem for this process's devices would measure first: the problem, a representative, or
    None for nothing."""
    query = _to_settle(key, options)
    return None if query is None else next(iter(to_measure(query)), None)


def is_measured(key: Key, options: Options) -> bool:
    """Whether the lowering of a problem for this process's devices would measure anything. It asks no cost model."""
    query = _to_settle(key, options)
    return query is not None and may_measure(query)


def _to_settle(key: Key, options: Options) -> Query | None:
    """The query of a problem that is lowered for this process's devices; None if its decision is settled."""
    again, exact = watch.state.wishes(key)
    query = Query(key, options, options.workspace_limit, here=True, again=again, exact=exact)
    if options.config is not None or tuning_result(query) is not None:
        return None
    query.held = lookup.LOCAL(query)
    return None if query.is_settled() else query


def left_by(key: Key) -> tuple[str, ...]:
    """The digests of the programs that left a problem, whose choice was therefore stored without a measurement."""
    found = next(iter(store.cached(key)), None)
    return () if found is None else found.entry.left_by
