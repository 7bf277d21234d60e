"""The search: rank candidates by the cost model, time the best few, refine around the winner, race XLA. XLA is left
out where the estimates are sure that it is far slower: to time it takes most of such a search's seconds.

Successive halving over the ranked candidates is followed by a local search over the family's neighbouring configs.
CUTLASS's maintainers advise to tune weight gradients in the order of the ranking: tile shapes first, then the number of
splits that fills whole waves.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jax_splitk.kernels import Family
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime.cores import usable_cores
from jax_splitk.tuning import certainty, device, model, searches
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import XLA_ESTIMATE, Entry, Measurement
from jax_splitk.tuning.flips import NOISE
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.measure import DEVICE_ROUNDS, Bench, Contestant, compile_ahead
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.serving import serving

_logger = logging.getLogger("jax_splitk")

# Factors are of predicted or measured times, against the fastest candidate's unless the comment names another.
# The best candidate without splits is timed up to this factor. The models expected 1.23 for a product
# (1024x2048x50304) that was as fast without.
UNSPLIT = 1.25
FIRST_ROUND = 24  # most candidates that are timed first; half of the search's time is for compiling them
FEWEST = 4  # fewest of them, where the model is sure
KERNELS = 10  # most kernels that are compiled for them
HOPELESS = 2.5  # families whose best candidate is predicted to be slower by more are not tried
# Neighbours that are predicted to be slower by more are not tried. Of 147 searches none would have lost more than 1.5%.
SLOWER_STEP = 1.1
GIVE_UP = 1.3  # against XLA: of 272 searches none that was slower after the first round came to win
CPU_BATCH = 8  # fewest candidates of a batch, where compiling takes no time
FINALISTS = 4
FINALIST = 1.2  # a candidate that is slower on the device by more does not come to win
# The finals are unclear where the model's own choice is slower by a factor in this range, or their rounds disagree. Of
# 72 searches that were made twice 6 came to another choice, 4 of them for this reason.
UNCLEAR = 1.01, 1.05
UNCLEAR_ROUNDS = 7  # for the fastest candidates then
BAD_ON_ONE = 1.5  # a finalist that is slower than the fastest one by more on one kind of operands is not chosen
# Parts of XLA's errors where an operation takes more memory than there is.
# The second is its autotuner's, which can try no kernel then.
LACKS_MEMORY = "RESOURCE_EXHAUSTED", "NOT_FOUND: Failed to get configs"
STUCK_SECONDS = 120  # a candidate that has not come back after so long never will
SEARCH_SHARE = 0.65  # share of the budget in which the search may begin something; the rest is for the finals
LAST_SHARE = 0.9  # share of the budget in which the search should end
LATE_ROUNDS = 2  # rounds of the finals when that time is over: fewer cannot be told from noise
BY_EVENTS = "events"  # in an entry's metadata: its times are the stopwatch's


def ranked(key: Key, workspace_limit: int = DEFAULT_WORKSPACE_LIMIT) -> list[Candidate]:
    """Every legal candidate that fits the limit, the one that the cost model predicts to be fastest first."""
    return [candidate for _, candidate in predicted(key, workspace_limit)]


def predicted(key: Key, workspace_limit: int = DEFAULT_WORKSPACE_LIMIT) -> list[tuple[float, Candidate]]:
    """As `ranked`, each with the seconds that the cost model predicts."""
    return list(_ranking(key, workspace_limit, serving(key.problem, key.target)))


@functools.lru_cache(maxsize=512)  # compiling ahead and the search itself ask for the same
def _ranking(key: Key, workspace_limit: int, families: tuple[Family, ...]) -> tuple[tuple[float, Candidate], ...]:
    found: list[tuple[float, Candidate]] = []
    for family in families:
        every = model.estimated(family, key.problem, key.target, workspace_limit)
        candidates = ((seconds, Candidate(family, config)) for seconds, config in every)
        found += [(seconds, candidate) for seconds, candidate in candidates if _is_legal(candidate, key)]
    return tuple(sorted(found, key=lambda of: of[0]))  # equal estimates stay in the order of the families


def is_served(key: Key, workspace_limit: int) -> bool:
    """Whether `ranked` has any candidate. A ranking itself takes a tenth of a second for some problems."""
    # The last families take most problems. Some of the others have thousands of configs to choose from.
    families = reversed(serving(key.problem, key.target))
    fitting = ((family, model.fitting(family, key.problem, key.target, workspace_limit)) for family in families)
    return any(_is_legal(Candidate(family, config), key) for family, configs in fitting for config in configs)


def _is_legal(candidate: Candidate, key: Key) -> bool:
    return candidate.refusal(key.problem, key.target) is None


def _is_allowed(candidate: Candidate, key: Key, workspace_limit: int) -> bool:
    """Whether a candidate is legal and fits in the limit."""
    return _is_legal(candidate, key) and candidate.workspace_bytes(key.problem) <= workspace_limit


class Search:
    """One search and its results so far, which the thread that watches it may read, and which it may give up.

    Attributes:
      bench: where the candidates run; None before it is set up.
      xla: XLA's contestant, once it has run; None also where XLA is left out, since it is far slower.
      contestants: our candidates that compiled and computed the right result.
      failures: our candidates that did not.
      tried: all candidates that were prepared.
      given_up: set by the thread that watches: nothing more is compiled or run, and what is running ends by itself.
    """

    def __init__(self, key: Key, workspace_limit: int, old: Entry | None, seconds: float) -> None:
        self._started = time.monotonic()
        self._deadline = self._started + SEARCH_SHARE * seconds
        self._last = self._started + LAST_SHARE * seconds
        self.key = key
        ranking = predicted(key, workspace_limit)
        self.ranking = [candidate for _, candidate in ranking]
        self._predicted_seconds = ranking[0][0] if ranking else math.inf
        self.bench: Bench | None = None
        self.xla: Contestant | None = None
        self.contestants: list[Contestant] = []
        self.failures: list[Measurement] = []
        self.tried: set[Candidate] = set()
        self.given_up = threading.Event()
        # How many candidates a batch has. A GPU's kernels take seconds to compile.
        self._at_once = max(usable_cores(), 1 if key.target.platform == "cuda" else CPU_BATCH)
        self._compile_seconds = 0.0  # of a batch
        self._lacks_memory = False  # whether XLA cannot compute the problem for that reason
        self._limit = workspace_limit
        self._old = old
        self._first = first_round(key, ranking)

    def _now(self) -> float:
        """The time for the budget: it stands still while the search waits for others."""
        return time.monotonic() - (0.0 if self.bench is None else self.bench.waited)

    def stuck(self) -> Candidate | None:
        """The candidate that has been running on the device for longer than `STUCK_SECONDS`; None if there is none."""
        running = None if self.bench is None else self.bench.running
        return running[0] if running is not None and time.monotonic() - running[1] > STUCK_SECONDS else None

    def run(self) -> Entry:
        """Searches. Raises RuntimeError if XLA cannot compute the problem, `GivenUp` if the search is given up."""
        with jax.default_device(jax.local_devices()[0]):
            first = self._first_candidates()
            bench = self._start(first)
            taken = self._prepare_first(bench, first)
            self._screen(bench, self._started_ones())
            self._tell()
            self._refine(bench, taken)
            finalists = self._time_finalists(bench)
        xla = self.xla
        if xla is not None and xla.error is not None and not (self._lacks_memory and self.contestants):
            if not self._took_the_context(xla):
                raise RuntimeError(f"XLA cannot compute it: {xla.error}")
            _logger.warning(
                "%s: the device fails since a candidate did (%s); XLA is chosen. Start the process again",
                *(self.key.problem, xla.error),
            )
            return self._entry(XLA, self.contestants)
        if device.state.poisoned_by == self.key.problem:
            device.state.poisoned_by = None  # the device works although a candidate failed
        working = self._steady(bench, _working(finalists))
        entry = self._entry(decide(working, xla, self._predicted), self.contestants)
        xlas = "was not timed" if (us := entry.us(XLA)) is None else f"{us} us"
        times = (entry.metadata["seconds"], entry.choice, entry.us(entry.choice), xlas)
        _logger.info("tuned %s in %s s: %s, %s us; XLA %s", self.key.problem, *times)
        return entry

    @property
    def _predicted(self) -> Candidate | None:
        return self.ranking[0] if self.ranking else None

    def compile_first(self) -> None:
        """Begins to compile what the search will need first: its first candidates."""
        compile_ahead(self.key.problem, self._first_candidates())

    def _first_candidates(self) -> list[Candidate]:
        """The best candidates of an earlier entry, and the best by the model."""
        if self._old is None:
            return self._first
        ours = [m for m in self._old.measurements if m.us is not None and m.candidate != XLA]
        # An entry's choice was checked when it was read, its measurements were not.
        allowed = [m for m in ours if _is_allowed(m.candidate, self.key, self._limit)]
        again = [m.candidate for m in sorted(allowed, key=lambda m: m.us or 0.0)[:FINALISTS]]
        held = [c for c in (self._old.choice, *again) if c != XLA and _is_allowed(c, self.key, self._limit)]
        return list(dict.fromkeys([*self._first[:1], *held, *self._first]))

    def _start(self, first: list[Candidate]) -> Bench:
        """The bench, and XLA on it, while the first candidates compile: XLA takes seconds to choose cuDNN's kernels.
        XLA waits where it is far slower than what the models predict of ours."""
        bench = self.bench = Bench(self.key.problem, self.key.target.platform, self.given_up)
        if self._far_slower_xla(self._predicted_seconds) is not None:
            return bench
        with concurrent.futures.ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(self._compile, bench, first[: self._at_once])
            xla = self._prepare_xla(bench)
        if xla.error is not None and not self._lacks_memory:
            raise RuntimeError(f"XLA cannot compute it: {xla.error}")
        return bench

    def _far_slower_xla(self, seconds: float) -> float | None:
        """XLA's seconds by the estimate, where it is far slower than a kernel of ours that takes `seconds`."""
        return certainty.far_slower_xla(seconds, self.key.problem, self.key.target)

    def _prepare_xla(self, bench: Bench) -> Contestant:
        """XLA's contestant, with an error if it cannot run."""
        prepared, failed = bench.prepare([XLA])
        if prepared:
            (xla,) = prepared
        else:
            error = str(failed[0].error)
            self._lacks_memory = _lacks_memory(error)
            if self._lacks_memory:
                self.failures += failed  # it takes more memory than there is, which ours may not
            xla = Contestant(XLA, lambda: None, error=error)
        self.xla = xla
        return xla

    def _started_ones(self) -> list[Contestant]:
        """XLA, unless it waits or is left out, and our contestants."""
        return [c for c in (self.xla, *self.contestants) if c is not None]

    def _compile(self, bench: Bench, candidates: list[Candidate]) -> None:
        started = time.monotonic()
        bench.compile(candidates)
        self._compile_seconds = time.monotonic() - started

    def _prepare(self, bench: Bench, candidates: list[Candidate]) -> list[Contestant]:
        joined, failed = bench.prepare(candidates)
        self.tried.update(candidates)
        self.failures += failed
        return joined

    def _prepare_first(self, bench: Bench, first: list[Candidate]) -> float:
        """Prepares the first round within half of the search's time. Returns the seconds that a batch may take."""
        taken = self._compile_seconds
        for i in range(0, len(first), self._at_once):
            preparing = self._now()
            late = preparing > (self._started + self._deadline) / 2 or preparing + taken > self._last
            if self.contestants and late:
                break
            self.contestants += self._prepare(bench, first[i : i + self._at_once])
            self._compile_steps(bench)
            taken = max(taken, self._now() - preparing)
        return taken

    def _compile_steps(self, bench: Bench) -> None:
        """Begins to compile the neighbours of the fastest candidate so far, while others of the first round are
        prepared and timed. Only device code takes long to compile."""
        if self.key.target.platform == "cuda":
            self._screen(bench, self._started_ones())
            if (best := _fastest(_working(self.contestants))) is not None and self._may_be_beaten(best):
                compile_ahead(self.key.problem, self._neighbours(best.candidate))

    def _screen(self, bench: Bench, contestants: list[Contestant]) -> None:
        """Times the contestants that are not timed yet, by the stopwatch where possible: the wall clock also shows how
        long the host takes to start short kernels, and what other threads take from it. One round is enough."""
        new = [contestant for contestant in contestants if not contestant.is_timed]
        if new and not bench.time_on_device(_working(new), 1):
            bench.time(new, 3, self._deadline + bench.waited)

    def _may_be_beaten(self, best: Contestant) -> bool:
        """Whether a neighbour of our fastest candidate may be faster than it, and faster than XLA. If the model's own
        choice is the fastest, its neighbours that may be faster were in the first round. By that and by `FEWEST` 1159
        recorded problems, on most of which the cost model was fitted, lose 0.01% in the mean; 53 others 0.15%; at most
        5%."""
        if best.candidate == self._predicted:
            return False
        return self.xla is None or self.xla.error is not None or best.us <= GIVE_UP * self.xla.us

    def _refine(self, bench: Bench, taken: float) -> None:
        """Steps to the neighbours of the fastest candidate until none is faster, none can win, or the time is over."""
        while self.contestants and self._now() < self._deadline:
            started, best = self._now(), _fastest(self.contestants)
            if not self._may_be_beaten(best):
                break
            affordable = self._at_once * int((self._last - started) / max(taken, 1e-3))
            new = [c for c in self._neighbours(best.candidate) if c not in self.tried][:affordable]
            if not new:
                break
            joined = self._prepare(bench, new)
            self._screen(bench, joined)
            self.contestants += joined
            self._tell()
            if _fastest(self.contestants) is best and best.error is None:
                break
            taken = (self._now() - started) / math.ceil(len(new) / self._at_once)

    def _tell(self) -> None:
        """Shows the user how far the search is."""
        if self.contestants and (self.xla is None or self.xla.error is None):
            xla_us = None if self.xla is None else self.xla.us
            searches.state.progress.best(self.key, _fastest(self.contestants).us, xla_us)

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        family, problem, target = candidate.family, self.key.problem, self.key.target
        if family is None:
            return []
        found = [Candidate(family, config) for config in family.neighbours(problem, candidate.config, target)]
        allowed = [c for c in found if _is_allowed(c, self.key, self._limit)]
        own, *seconds = family.estimates(problem, [candidate.config, *(c.config for c in allowed)], target)
        return [c for c, each in zip(allowed, seconds, strict=True) if each <= SLOWER_STEP * own]

    def _time_finalists(self, bench: Bench) -> list[Contestant]:
        """Times the fastest candidates and XLA once more, in turns, on the device where possible. By the wall clock
        only these times count, since the earlier ones were not all taken side by side. XLA is left out where it is far
        slower than the fastest candidate, and takes part after all if no candidate works."""
        if self.xla is None and self._far_slower_xla(self._fastest_seconds()) is None:
            self._screen(bench, [self._prepare_xla(bench)])
        finalists = self._time_in_turns(bench)
        if self.xla is None and not _working(finalists):
            self._screen(bench, [self._prepare_xla(bench)])
        return finalists

    def _fastest_seconds(self) -> float:
        """The time of our fastest contestant; infinite if none works."""
        best = _fastest(_working(self.contestants))
        return math.inf if best is None else best.us * 1e-6

    def _time_in_turns(self, bench: Bench) -> list[Contestant]:
        """The finalists, timed beside XLA unless it is left out."""
        xla = self.xla
        working = sorted(_working(self.contestants), key=lambda c: c.us)
        # The model's own choice takes part, since the others are compared with it and its regret is reported. The
        # choice of an earlier search takes part, too.
        asked = (self._predicted, None if self._old is None else self._old.choice)
        near = [c for c in working[:FINALISTS] if not c.device_times or c.us <= FINALIST * working[0].us]
        finalists = near + [c for c in working[len(near) :] if c.candidate in asked]
        rounds = DEVICE_ROUNDS if self._now() < self._last else LATE_ROUNDS
        every = finalists if xla is None else [*finalists, xla]
        failed = xla is not None and xla.error is not None and not self._lacks_memory
        if failed or not bench.time_on_device(_working(every), rounds):
            bench.time_again(every, 8, max(self._deadline + bench.waited, time.monotonic() + 0.5))
        elif self._now() < self._last and self._is_unclear(_working(finalists)):
            fastest = _fastest(_working(finalists))
            near = [c for c in _working(every) if c.us <= FINALIST * fastest.us]
            if bench.time_on_device(near, UNCLEAR_ROUNDS):
                return [c for c in near if c is not xla]
        return finalists

    def _steady(self, bench: Bench, finalists: list[Contestant]) -> list[Contestant]:
        """The finalists that lose badly on no kind of operands; all of them if each loses on some kind. The mean does
        not show such a loss."""
        if OPERATIONS[self.key.problem.op].kinds == 1 or len(finalists) < 2:
            return finalists
        times = [bench.times_of_kinds(contestant) for contestant in finalists]
        best = [min(kind) for kind in zip(*times, strict=True)]
        steady = [
            contestant
            for contestant, own in zip(finalists, times, strict=True)
            if all(mine <= BAD_ON_ONE * least for mine, least in zip(own, best, strict=True))
        ]
        return steady or finalists

    def _is_unclear(self, finalists: list[Contestant]) -> bool:
        """Whether more rounds must tell if the fastest candidate beats the model's own choice."""
        fastest, least, most = _fastest(finalists), *UNCLEAR
        own = next((c for c in finalists if c.candidate == self._predicted), None)
        if own is None or not least * fastest.us < own.us <= FINALIST * fastest.us:
            return False
        return own.us <= most * fastest.us or not _beats(fastest, own)

    def _took_the_context(self, xla: Contestant) -> bool:
        """Whether XLA's operation fails because one of this search's candidates failed before it."""
        failed = bool(self.failures) or any(c.error is not None for c in self.contestants)
        return failed and device.state.poisoned_by == self.key.problem and not _lacks_memory(str(xla.error))

    def entry_without(self, stuck: Candidate) -> Entry:
        """The entry while a candidate does not come back. Raises RuntimeError if that is XLA."""
        error = f"it did not come back within {STUCK_SECONDS} s"
        if stuck == XLA:
            raise RuntimeError(f"XLA cannot compute it: {error}")
        self.failures.append(Measurement(stuck, None, error))
        timed = [c for c in self.contestants if c.is_timed and c.error is None and c.candidate != stuck]
        if self.xla is not None and not self.xla.is_timed:
            return self._entry(XLA, timed)
        return self._entry(decide(timed, self.xla, self._predicted), timed)

    def unfinished(self) -> Entry | None:
        """The measurements until now, as an entry that spares no search; None before there are any."""
        timed = [c for c in list(self.contestants) if c.is_timed and c.error is None]
        if not timed or (self.xla is not None and not self.xla.is_timed):
            return None
        choice = decide(timed, self.xla, self._predicted)
        return dataclasses.replace(self._entry(choice, timed), workspace_limit_bytes=0)

    def _entry(self, choice: Candidate, contestants: list[Contestant]) -> Entry:
        timed = [c for c in contestants if c.is_timed or c.error is not None]
        if self.xla is not None and self.xla.is_timed and self.xla.error is None:
            timed.insert(0, self.xla)
        measured = (Measurement(c.candidate, None if c.error else round(float(c.us), 3), c.error) for c in timed)
        measurements = (*measured, *self.failures)
        by_events = any(c.device_times for c in self._started_ones())
        metadata = _metadata(time.monotonic() - self._started, len(self.tried), by_events)
        if self.xla is None and (seconds := self._far_slower_xla(self._fastest_seconds())) is not None:
            metadata[XLA_ESTIMATE] = round(seconds * 1e6, 3)
        return Entry.of(self.key, choice, measurements, self._predicted, metadata, self._limit)


def first_round(key: Key, ranking: Sequence[tuple[float, Candidate]]) -> list[Candidate]:
    """The candidates that are timed first: those that may be the fastest by the cost models, few where these are sure.

    The last third are the best of other families and kernel variants, if there are any: models err by whole tiles, each
    in its own direction. The best one without splits is added where it may be the fastest (`UNSPLIT`).
    """
    close = len(certainty.close(ranking, key.problem, key.target))
    count = min(FIRST_ROUND, max(FEWEST, close))
    candidates = [candidate for _, candidate in ranking]
    of_family = _firsts((c for s, c in ranking if s <= HOPELESS * ranking[0][0]), lambda c: c.name)
    compiled = set(list(dict.fromkeys(map(_variant, [*of_family, *candidates])))[:KERNELS])
    candidates = [candidate for candidate in candidates if _variant(candidate) in compiled]
    best, others = candidates[: count * 2 // 3], candidates[count * 2 // 3 :]
    seen = {_variant(candidate) for candidate in best}
    new = _firsts((candidate for candidate in others if _variant(candidate) not in seen), _variant)
    found = list(dict.fromkeys([*best, *of_family, *new, *others]))[:count]
    unsplit = [c for s, c in ranking if s <= UNSPLIT * ranking[0][0] and getattr(c.config, "splits", None) == 1]
    return list(dict.fromkeys([*found, *unsplit[:1]]))


def _lacks_memory(error: str) -> bool:
    return any(words in error for words in LACKS_MEMORY)


def _firsts(candidates: Iterable[Candidate], kind: Callable[[Candidate], Any]) -> list[Candidate]:
    """The first of each kind."""
    found: dict[Any, Candidate] = {}
    for candidate in candidates:
        found.setdefault(kind(candidate), candidate)
    return list(found.values())


def _variant(candidate: Candidate) -> Any:
    """A candidate without its number of splits."""
    fields = {name: value for name, value in vars(candidate.config).items() if name != "splits"}
    return candidate.family, tuple(fields.items())


def _working(contestants: Iterable[Contestant]) -> list[Contestant]:
    return [c for c in contestants if c.error is None]


def _fastest(contestants: list[Contestant]) -> Contestant | Any:
    return min(contestants, key=lambda c: c.us, default=None)


def decide(finalists: list[Contestant], xla: Contestant | None, predicted: Candidate | None) -> Candidate:
    """The winner among the finalists and XLA; XLA without a contestant of its own is slower than all.

    The fastest of our candidates competes with XLA, or the model's own choice, if that is within the noise of the
    fastest, and faster than XLA by more than the noise. Device times are compared as they are. By the wall clock XLA
    wins where its fastest round is faster by more than `NOISE`: on a busy machine rounds lie far apart, and the fastest
    says the most.
    """
    best = _fastest(finalists)
    if best is None:
        return XLA
    xla_us = math.inf if xla is None else xla.us
    for contestant in finalists:
        is_safe = contestant.us < xla_us * (1 - NOISE)
        if contestant.candidate == predicted and is_safe and not _beats(best, contestant):
            best = contestant
    noise = 0.0 if xla is not None and xla.device_times and best.device_times else NOISE
    return XLA if xla_us < best.us * (1 - noise) else best.candidate


def _beats(challenger: Contestant, holder: Contestant) -> bool:
    """Whether the challenger is faster by more than the noise. Device times were taken in turns: it must be faster in
    every round, or in all but one of many. Otherwise it must be faster by more than the spread of both."""
    if challenger.device_times and holder.device_times:
        if challenger.us >= holder.us * (1 - NOISE):
            return False
        rounds = list(zip(challenger.device_times, holder.device_times, strict=False))
        return sum(mine >= theirs for mine, theirs in rounds) <= len(rounds) // 5
    margin = max(NOISE, challenger.spread + holder.spread)
    return challenger.us < holder.us * (1 - margin)


def _metadata(seconds: float, tried: int, by_events: bool) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform_version": str(getattr(jax.local_devices()[0].client, "platform_version", "")),
        "seconds": round(seconds, 3),
        "candidates": tried,
        "times": BY_EVENTS if by_events else "clock",
    }
