"""The search: rank by the cost model, time the best few, refine around the winner, race XLA.

Successive halving over the ranked candidates, then a local search over the family's neighbouring configs; the order in
which CUTLASS's maintainers advise to tune weight gradients (tile shapes first, then the split count that fills whole
waves) is the order of the ranking.

A candidate that raises, or computes something else than XLA, is recorded and passed over. Two failures end the search,
because they take the device from the whole process: a kernel that does not come back, which nobody can stop and behind
which all other work waits, and an error that ends CUDA's context, such as an illegal address, after which every call
fails. Then the decision is made of what is known, usually XLA, and kept with the candidate's failure, so that the
program works when it is started again.
"""

import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax

from jax_splitk import kernels
from jax_splitk.runtime import settings, toolchain
from jax_splitk.tuning import watch
from jax_splitk.tuning.entry import XLA, Candidate, Entry, Measurement, family_named, illegality
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.measure import Bench, Contestant, compile_ahead, usual_settings
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

logger = logging.getLogger("jax_splitk")

FIRST_ROUND = 24  # candidates that are timed at first
BATCH = 8  # of them that are compiled together; half of the search's time is for compiling them
FINALISTS = 4
HOST_BOUND_US = 30  # below it a wall clock shows what the host takes to start the kernels
SEARCH_SHARE = 0.65  # of the budget; the rest is for the finalists' device times
STUCK_SECONDS = 120  # a candidate that has not come back after so long never will
WATCH_SECONDS = 0.2  # how often that is looked at
NOISE = 0.02  # a challenger must be faster by more than this, and by more than the spread of its own timings


def budget_seconds() -> float:
    """`JAX_SPLITK_TUNE_BUDGET_S`, seconds for one problem; 10 by default. Raises ValueError unless positive."""
    return settings.seconds("JAX_SPLITK_TUNE_BUDGET_S", 10)


# One measurement at a time for the whole process: they must not disturb each other.
_turn = threading.Lock()

# The thread of a measurement that did not come back.
_stuck: threading.Thread | None = None


@dataclasses.dataclass
class _Found:
    """What a search has found so far, for the thread that watches it, which may give it up."""

    workspace_limit: int
    started: float
    abandoned: bool = False
    bench: Bench | None = None
    xla: Contestant | None = None
    contestants: list[Contestant] = dataclasses.field(default_factory=list)
    failures: list[Measurement] = dataclasses.field(default_factory=list)
    tried: set[Candidate] = dataclasses.field(default_factory=set)

    def give_up(self) -> None:
        """Nothing more is compiled or run; what is running ends by itself."""
        self.abandoned = True
        if self.bench is not None:
            self.bench.abandoned = True


def tune(
    key: Key,
    workspace_limit: int = DEFAULT_WORKSPACE_LIMIT,
    old: Entry | None = None,
    seconds: float | None = None,
) -> Entry:
    """Decides by measurement on the local device; blocks until done.

    Args:
      key: what to decide, for the local device.
      workspace_limit: bytes that a candidate's workspace may have.
      old: an earlier entry for the key; its best candidates take part again.
      seconds: time budget; None for `budget_seconds()`. Compilation of the first candidates may exceed it.

    Raises:
      RuntimeError: XLA itself fails on the problem (out of memory, for instance), or an earlier measurement of this
        process has not come back.
      CompilerUnavailable: there is no compiler for our candidates: XLA would win, and stay in the cache.
    """
    seconds = budget_seconds() if seconds is None else seconds
    with _turn:
        entry = _watched(key, workspace_limit, old, seconds)
    watch.measured(key)
    return entry


def _watched(key: Key, workspace_limit: int, old: Entry | None, seconds: float) -> Entry:
    """`_tune` in a thread of its own: it is free of the trace, mesh and other JAX contexts that the caller may be
    inside of, and the process can do without it (and end) where a kernel does not come back."""
    global _stuck  # noqa: PLW0603
    if _stuck is not None and _stuck.is_alive():
        raise RuntimeError("an earlier measurement has not come back; the process must be started again")
    found = _Found(workspace_limit, time.monotonic())
    result: concurrent.futures.Future[Entry] = concurrent.futures.Future()

    def work() -> None:
        try:
            with usual_settings():
                result.set_result(_tune(key, old, seconds, found))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="jax_splitk-tuner", daemon=True)
    thread.start()
    try:
        while True:
            concurrent.futures.wait([result], WATCH_SECONDS)
            running = None if found.bench is None else found.bench.running
            if result.done():
                return result.result()
            if running is not None and time.monotonic() - running[1] > STUCK_SECONDS:
                _stuck = thread
                return _without(running[0], found, key)
    except KeyboardInterrupt:
        found.give_up()
        raise


def _without(stuck: Candidate, found: _Found, key: Key) -> Entry:
    """The decision where a candidate does not come back."""
    found.give_up()
    error = f"it did not come back within {STUCK_SECONDS} s"
    if found.xla is None or stuck.family == XLA:
        raise RuntimeError(f"XLA cannot compute it: {error}")
    found.failures.append(Measurement(stuck, None, error))
    timed = [c for c in found.contestants if c.times and c.error is None and c.candidate != stuck]
    ranking = ranked(key, found.workspace_limit)
    choice = _decide(timed, found.xla, ranking[0] if ranking else None) if found.xla.times else found.xla
    entry = _entry(key, choice, timed, found, ranking)
    logger.warning(
        "%s: %s: %s; the search ends and %s is chosen. What this process runs on the device from now on will wait for "
        "it: start the process again",
        *(key.problem, stuck, error, entry.choice),
    )
    return entry


def ranked(key: Key, workspace_limit: int = DEFAULT_WORKSPACE_LIMIT) -> list[Candidate]:
    """Every legal candidate that fits the limit, the one that the cost model predicts to be fastest first."""
    target = key.target
    found: list[tuple[float, int, Candidate]] = []
    for family in kernels.families(key.problem.op, target.platform):
        if family.refusal(key.problem, None, target) is not None:
            continue
        for config in family.candidates(key.problem, target):
            candidate = Candidate(family.name, config)
            if _is_allowed(candidate, key, workspace_limit):
                found.append((family.estimate(key.problem, config, target), len(found), candidate))
    return [candidate for _, _, candidate in sorted(found, key=lambda item: item[:2])]


def _is_allowed(candidate: Candidate, key: Key, workspace_limit: int) -> bool:
    if illegality(candidate, key) is not None:
        return False
    family = family_named(key.problem.op, candidate.family)
    return family.workspace_bytes(key.problem, candidate.config) <= workspace_limit


def _tune(key: Key, old: Entry | None, seconds: float, found: _Found) -> Entry:
    target, limit = key.target, found.workspace_limit
    started, contestants, failures, tried = found.started, found.contestants, found.failures, found.tried
    deadline = started + SEARCH_SHARE * seconds
    ranking = ranked(key, limit)
    missing = toolchain.unavailable() if target.platform == "cuda" else None
    if missing is not None:
        raise toolchain.CompilerUnavailable(missing)
    progress = _Progress(key)
    with jax.default_device(jax.local_devices()[0]):
        first = _spread_over_variants(ranking, FIRST_ROUND)
        if old is not None:
            ours = [m for m in old.measurements if m.us is not None and m.candidate.family != XLA]
            allowed = [m for m in ours if _is_allowed(m.candidate, key, limit)]
            again = sorted(allowed, key=lambda m: m.us or 0.0)[:FINALISTS]
            first = list(dict.fromkeys([m.candidate for m in again] + first))
        with concurrent.futures.ThreadPoolExecutor(1) as meanwhile:  # XLA takes seconds to choose cuDNN's kernels
            meanwhile.submit(compile_ahead, key.problem, first[: max(BATCH, os.cpu_count() or 1)])
            bench = found.bench = Bench(key.problem, target.platform)
            bench.abandoned = found.abandoned
            prepared, failed = bench.prepare([Candidate(XLA)])
        if not prepared:
            raise RuntimeError(f"XLA cannot compute it: {failed[0].error}")
        (xla,) = prepared
        found.xla = xla
        taken = 0.0
        for batch in (first[i : i + BATCH] for i in range(0, len(first), BATCH)):
            preparing = time.monotonic()
            if contestants and preparing > (started + deadline) / 2:
                break
            joined, failed = bench.prepare(batch)
            tried.update(batch)
            contestants += joined
            failures += failed
            taken = time.monotonic() - preparing  # so long a round of refinement may take, too
        bench.time([xla, *contestants], 3, deadline)
        host_bound = _fastest([xla, *contestants]).us < HOST_BOUND_US
        screened = host_bound and bench.screen_on_device(_working([xla, *contestants]))
        progress.report(len(tried), _fastest(contestants))
        while contestants and time.monotonic() + taken < deadline:
            round_started, best = time.monotonic(), _fastest(contestants)
            new = [c for c in _neighbours(key, best.candidate, limit) if c not in tried]
            if not new:
                break
            tried.update(new)
            joined, failed = bench.prepare(new)
            failures += failed
            bench.time(joined, 3, deadline)
            if screened:
                bench.screen_on_device(_working(joined))
            contestants += joined
            progress.report(len(tried), _fastest(contestants))
            if _fastest(contestants) is best and best.error is None:
                break
            taken = time.monotonic() - round_started
        working = sorted(_working(contestants), key=lambda c: c.us)
        # The model's own choice takes part: it is what the others are compared with, and its regret is reported.
        finalists = working[:FINALISTS] + [c for c in working[FINALISTS:] if c.candidate in ranking[:1]]
        if xla.error is not None or not bench.time_on_device([*finalists, xla]):
            bench.time([*finalists, xla], 8, max(deadline, time.monotonic() + 0.5))
    if xla.error is not None:
        if not _context_lost(xla, contestants, failures):
            raise RuntimeError(f"XLA cannot compute it: {xla.error}")
        logger.warning(
            "%s: the device fails since a candidate did (%s); XLA is chosen. Start the process again",
            *(key.problem, xla.error),
        )
        return _entry(key, xla, contestants, found, ranking)
    finalists = _working(finalists)
    entry = _entry(key, _decide(finalists, xla, ranking[0] if ranking else None), contestants, found, ranking)
    progress.done(entry)
    return entry


def _context_lost(xla: Contestant, contestants: list[Contestant], failures: list[Measurement]) -> bool:
    """Whether XLA's operation, which had worked, fails because one of ours did before it."""
    failed = bool(failures) or any(c.error is not None for c in contestants)
    return failed and "RESOURCE_EXHAUSTED" not in str(xla.error)


def _entry(
    key: Key, choice: Contestant, contestants: list[Contestant], found: _Found, ranking: list[Candidate]
) -> Entry:
    timed = [c for c in contestants if c.times or c.error is not None]
    if found.xla is not None and found.xla.times and found.xla.error is None:
        timed.insert(0, found.xla)
    return Entry(
        key=key.as_dict(),
        choice=choice.candidate,
        measurements=(*map(_measurement, timed), *found.failures),
        predicted=ranking[0] if ranking else None,
        metadata=_metadata(time.monotonic() - found.started, len(found.tried)),
        workspace_limit_bytes=found.workspace_limit,
    )


def _measurement(contestant: Contestant) -> Measurement:
    us = None if contestant.error is not None else round(contestant.us, 3)
    return Measurement(contestant.candidate, us, contestant.error)


def _spread_over_variants(ranking: list[Candidate], count: int) -> list[Candidate]:
    """The best by the model, and beyond them the best of each other kernel variant: models err by whole tiles."""
    first = ranking[: count * 2 // 3]
    seen = {_variant(c) for c in first}
    for candidate in ranking[len(first) :]:
        if len(first) == count:
            break
        if _variant(candidate) not in seen:
            seen.add(_variant(candidate))
            first.append(candidate)
    return first


def _variant(candidate: Candidate) -> Any:
    """A candidate up to its split count."""
    fields = {name: value for name, value in vars(candidate.config).items() if name != "splits"}
    return candidate.family, tuple(fields.items())


def _neighbours(key: Key, candidate: Candidate, workspace_limit: int) -> list[Candidate]:
    family = family_named(key.problem.op, candidate.family)
    found = [Candidate(family.name, c) for c in family.neighbours(key.problem, candidate.config, key.target)]
    return [c for c in found if _is_allowed(c, key, workspace_limit)]


def _working(contestants: Iterable[Contestant]) -> list[Contestant]:
    return [c for c in contestants if c.error is None]


def _fastest(contestants: list[Contestant]) -> Contestant | Any:
    return min(contestants, key=lambda c: c.us, default=None)


def _decide(finalists: list[Contestant], xla: Contestant, predicted: Candidate | None) -> Contestant:
    """The fastest of ours, unless the model's own choice is within the noise of it; then the faster of it and XLA, by
    device times as they stand, by the wall clock only beyond the noise."""
    best = _fastest(finalists)
    if best is None:
        return xla
    for contestant in finalists:
        if contestant.candidate == predicted and not _beats(best, contestant) and not _beats(xla, contestant):
            best = contestant
    if xla.device_times and best.device_times:
        return xla if xla.us < best.us else best
    return xla if _beats(xla, best) else best


def _beats(challenger: Contestant, holder: Contestant) -> bool:
    """Whether it is faster by more than the noise: in every round of device times, which were taken in turns; else by
    more than the spread of both."""
    if challenger.device_times and holder.device_times:
        rounds = zip(challenger.device_times, holder.device_times, strict=True)
        return challenger.us < holder.us * (1 - NOISE) and all(mine < theirs for mine, theirs in rounds)
    margin = max(NOISE, challenger.spread + holder.spread)
    return challenger.us < holder.us * (1 - margin)


def _metadata(seconds: float, tried: int) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform_version": str(getattr(jax.local_devices()[0].client, "platform_version", "")),
        "seconds": round(seconds, 3),
        "candidates": tried,
    }


class _Progress:
    """A line on a terminal while a problem is tuned; a log record at its end everywhere."""

    def __init__(self, key: Key):
        self._problem = key.problem
        self._terminal = sys.stderr.isatty()

    def report(self, candidates: int, best: Contestant | None) -> None:
        if self._terminal:
            fastest = "none works yet" if best is None else f"best {best.us:.1f} us: {best.candidate}"
            print(f"\r\x1b[Ktuning {self._problem}: {candidates} candidates, {fastest}", end="", file=sys.stderr)

    def done(self, entry: Entry) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
        ours, xla = entry.us(entry.choice), entry.us(Candidate(XLA))
        seconds = entry.metadata["seconds"]
        logger.info("tuned %s in %s s: %s, %s us; XLA %s us", self._problem, seconds, entry.choice, ours, xla)
