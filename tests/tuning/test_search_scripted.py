"""The search with scripted times: what may win, what ends it, what an old entry is worth, and its budget."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler, outcome, toolchain
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import certainty, device, entry, measure, search, searches, select, store, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import Bench, Contestant
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.result import TuningResult
from tests.problems import generator, seeded
from tests.tuning_cache import CPU, HUGE, TINY, key_of, random_tiny

pytestmark = pytest.mark.usefixtures("cache")


class Clock:
    """A clock that only the scripted bench moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Script:
    """The times of each candidate, and its failures.

    Attributes:
      us: microseconds of a candidate.
      broken: candidates that do not compile, and why.
      round_seconds: how far a timing moves the clock.
      compile_seconds, xla_seconds, device_seconds: the same of a kernel's compilation, of preparing XLA's operation,
        and of each round of device times.
      wait_seconds: how far other searches, which have the device, move the clock at each preparation.
      cores: how many kernels are compiled at once.
      late: candidates that raise at this timing (counted from 0).
      fatal: whether such an error is the end of everything, as CUDA's are that end its context.
      stuck: candidates that do not come back from their second timing before the event is set.
      device_us: the same as `us` by the stopwatch, where there is one.
      screened, finalists: candidates in the order in which they were screened by it, or timed again at the end.
      device_rounds: how many rounds each timing on the device had.
    """

    def __init__(self, us: Callable[[Candidate], float]):
        self.us = us
        self.broken: dict[Candidate, str] = {}
        self.late: dict[Candidate, int] = {}
        self.fatal = ""
        self.stuck: dict[Candidate, threading.Event] = {}
        self.device_us: Callable[[Candidate], float] | None = None
        self.screened: list[Candidate] = []
        self.finalists: list[Candidate] = []
        self.device_rounds: list[int] = []
        self.round_seconds = 1e-3
        self.compile_seconds = self.xla_seconds = self.device_seconds = self.wait_seconds = 0.0
        self.cores = 16
        self.compiled: set[Candidate] = set()
        self.ahead = threading.Event()
        self.clock = Clock()
        self.prepared: list[Candidate] = []
        self.rounds: list[Candidate] = []

    def compile(self, candidates: Sequence[Candidate]) -> None:
        new = set(candidates) - self.compiled - {XLA}
        self.compiled |= new
        self.clock.now += self.compile_seconds * -(-len(new) // self.cores)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Candidate], float]], Script]:
    """Replaces everything of the bench that compiles or runs; its `time` is the real one."""

    def install(us: Callable[[Candidate], float]) -> Script:
        script = Script(us)

        class ScriptedBench(Bench):
            def __init__(self, problem: ConvWgradProblem, platform: str, given_up: threading.Event):
                self.problem, self.platform, self.given_up, self.sets = problem, platform, given_up, 1

            def compile(self, candidates: Sequence[Candidate]) -> None:
                script.compile(candidates)
                script.ahead.set()

            def prepare(self, candidates: Sequence[Candidate]) -> tuple[list[Contestant], list[Measurement]]:
                if XLA in candidates:
                    assert script.ahead.wait(60)  # so that the two move the clock one after the other
                    script.clock.now += script.xla_seconds
                else:
                    script.ahead.set()
                script.prepared += candidates
                script.compile(candidates)
                script.clock.now += script.wait_seconds
                self.waited += script.wait_seconds
                broken = [Measurement(c, None, script.broken[c]) for c in candidates if c in script.broken]
                return [Contestant(c, lambda: None) for c in candidates if c not in script.broken], broken

            def time_on_device(self, contestants: Sequence[Contestant], rounds: int = 3) -> bool:
                if script.device_us is None:
                    return False
                script.clock.now += script.device_seconds * rounds
                timed = script.screened if rounds == 1 else script.finalists
                timed += [contestant.candidate for contestant in contestants]
                script.device_rounds.append(rounds)
                for contestant in contestants:
                    contestant.device_times = [script.device_us(contestant.candidate)] * rounds
                return True

            def _round(self, contestant: Contestant) -> float:
                script.clock.now += script.round_seconds
                candidate = contestant.candidate
                if script.fatal and any(script.rounds.count(c) == late for c, late in script.late.items()):
                    raise RuntimeError(script.fatal)
                if candidate in script.stuck and candidate in script.rounds:
                    script.clock.now += search.STUCK_SECONDS + 1
                    script.stuck[candidate].wait(60)
                if script.rounds.count(candidate) == script.late.get(candidate, -1):
                    raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED: scripted")
                script.rounds.append(candidate)
                return script.us(candidate)

        monkeypatch.setattr(search, "Bench", ScriptedBench)
        monkeypatch.setattr(search, "usable_cores", lambda: script.cores)
        monkeypatch.setattr(compiler, "compile_ahead", lambda sources: None)
        for module in (search, measure):
            monkeypatch.setattr(module, "time", script.clock)
        return script

    return install


def wide(rng: np.random.Generator) -> Key:
    """A key with many candidates."""
    return key_of(random_tiny(rng, batch=64, height=int(rng.integers(24, 32)), width=31))


def first_round(key: Key) -> tuple[list[Candidate], Candidate]:
    """A search's first candidates, and one of them whose neighbours are others; it is not the model's choice."""
    one = search.Search(key, 2**28, None, 1.0)
    first = one._first_candidates()
    return first, next(c for c in first[1:] if set(one._neighbours(c)) - set(first))


def test_who_is_far_behind_the_fastest_is_no_finalist(scripted: Any) -> None:
    """The model's own choice and XLA always are finalists."""
    with seeded(2) as rng:
        key = wide(rng)
    ranking = search.ranked(key)
    times = {c: 200.0 + 50 * i for i, c in enumerate(rng.permutation(ranking[1:7]))} | {ranking[0]: 900.0}
    near = sorted(times, key=lambda c: times[c])[:2]
    times[near[1]] = 200.0 * (search.FINALIST - 0.01)
    script = scripted(lambda c: 0.0)
    script.device_us = lambda c: 5000.0 if c == XLA else times.get(c, 1000.0)
    assert tuner.tune(key).choice == near[0]
    assert script.finalists == [*near, ranking[0], XLA]


@pytest.mark.parametrize(("chosen", "step"), [(True, 0.0), (False, 90.0), (False, 105.0)])
def test_the_finals_have_more_rounds(chosen: bool, step: float, scripted: Any) -> None:
    """Where the model's own choice is the fastest of the first round, nothing else is prepared. Where another one is,
    its neighbours are timed. Either way the finals end the search."""
    with seeded(4) as rng:
        key = wide(rng)
    first, other = first_round(key)
    fastest = first[0] if chosen else other
    script = scripted(lambda c: 0.0)
    script.device_us = lambda c: 900.0 if c == XLA else 100.0 if c == fastest else 200.0 if c in first else step
    assert (tuner.tune(key).choice == fastest) is (step != 90.0)
    assert script.screened[: len(first) + 1] == [XLA, *first]
    assert (set(script.prepared) == {XLA, *first}) is chosen
    *screens, final = script.device_rounds
    assert set(screens) == {1} and final == search.DEVICE_ROUNDS


@pytest.mark.parametrize(
    ("own", "again", "stays"),
    [
        (100.5, None, True),  # a tie
        (103.0, 100.5, True),
        (103.0, 103.0, False),
        (107.0, None, False),  # all rounds agree
    ],
)
def test_a_close_final_goes_on(own: float, again: float | None, stays: bool, scripted: Any) -> None:
    """The model's own choice is timed against the fastest in a few rounds, and in more if these do not decide."""
    with seeded(3) as rng:
        key = wide(rng)
    first, fastest, slow = search.ranked(key)[:3]
    script = scripted(lambda c: 0.0)

    def device_us(candidate: Candidate) -> float:
        if candidate == first:
            return own if again is None or script.device_rounds[-1] != search.UNCLEAR_ROUNDS else again
        return {fastest: 100.0, slow: 130.0, XLA: 5000.0}.get(candidate, 1000.0)

    script.device_us = device_us
    assert tuner.tune(key).choice == (first if stays else fastest)
    assert script.device_rounds.count(search.UNCLEAR_ROUNDS) == (again is not None)
    if again is not None:
        assert script.finalists[-2:] in ([first, fastest], [fastest, first])


def test_the_fastest_wins_wherever_the_search_finds_it(scripted: Any) -> None:
    with seeded(1) as rng:
        for _ in range(20):
            key = wide(rng)
            ranking = search.ranked(key)
            assert len(ranking) > 20
            times = {c: float(rng.uniform(100, 1000)) for c in ranking}
            script = scripted(lambda c, times=times: times.get(c, 2000.0))
            found = tuner.tune(key)
            tried = [c for c in script.prepared if c != XLA]
            assert len(tried) == len(set(tried))
            best = min(tried, key=lambda c: times.get(c, 2000.0))
            beaten = times[best] < times[ranking[0]] * (1 - search.NOISE)
            assert found.choice == (best if beaten else ranking[0])
            assert found.predicted == ranking[0] in tried
            assert {m.candidate: m.us for m in found.measurements} == {
                XLA: 2000.0,
                **{c: round(times.get(c, 2000.0), 3) for c in tried},
            }
            assert found.metadata["candidates"] == len(tried)
            fastest = min(times.get(c, 2000.0) for c in tried)
            regret = round(times[ranking[0]], 3) / round(fastest, 3) - 1  # of times as an entry has them
            assert found.regret == pytest.approx(regret, abs=1e-12)
            assert entry.loads(found.dumps(), key) == found


def test_the_search_refines_around_the_best(scripted: Any) -> None:
    """It walks downhill from the candidates of the family to configs that are none of them."""
    key = wide(generator(2))
    listed = {c.config for c in search.ranked(key)}
    goal = wgrad_host.Config(16, 2048)
    assert goal not in listed
    assert wgrad_host.FAMILY.refusal(key.problem, goal) is None
    distance = lambda c: abs(np.log2(c.config.splits / 16)) + abs(np.log2(c.config.block / 2048))  # noqa: E731
    scripted(lambda c: 9000.0 if c == XLA else 100.0 * (1 + distance(c)))
    found = tuner.tune(key)
    assert found.choice.config == goal
    assert found.regret > 0


def test_the_search_does_not_refine_what_is_far_behind_xla(scripted: Any) -> None:
    key = wide(generator(12))
    first, fastest = first_round(key)
    for xla_us, refines in ((90.0, True), (70.0, False)):
        script = scripted(lambda c, us=xla_us: us if c == XLA else 100.0 if c == fastest else 101.0)
        found = tuner.tune(key)
        assert found.choice == XLA
        assert set(first) <= set(script.prepared)
        assert (len(script.prepared) > len(first) + 1) is refines


def test_steps_that_the_model_expects_to_be_slower_are_not_made(scripted: Any) -> None:
    key = wide(generator(13))
    estimate = lambda c: c.family.estimate(key.problem, c.config, key.target)  # noqa: E731
    first, best = first_round(key)
    script = scripted(lambda c: 900.0 if c == XLA else 90.0 if c == best else 100.0)
    tuner.tune(key)
    steps = [c for c in script.prepared if c not in first and c != XLA]
    assert all(estimate(c) <= search.SLOWER_STEP * estimate(best) for c in steps)
    assert len(steps) < len(best.family.neighbours(key.problem, best.config, key.target))


def test_what_is_within_the_noise_does_not_displace_the_prediction(scripted: Any) -> None:
    key = wide(generator(3))
    ranking = search.ranked(key)
    first, other = ranking[0], ranking[5]
    for gain, winner in ((0.99, first), (0.985, first), (0.97, other), (0.5, other)):
        scripted(lambda c, gain=gain: 100.0 if c == first else 100 * gain if c == other else 500.0)
        assert tuner.tune(key).choice == winner


def test_however_many_are_within_the_noise(scripted: Any) -> None:
    key = wide(generator(4))
    first = search.ranked(key)[0]
    scripted(lambda c: 100.0 if c == first else 900.0 if c == XLA else 99.5)
    assert tuner.tune(key).choice == first


def test_a_noisy_challenger_needs_more(scripted: Any) -> None:
    """A challenger whose own timings differ by a fifth is not believed to be a tenth faster."""
    key = wide(generator(5))
    ranking = search.ranked(key)
    first, other = ranking[0], ranking[3]
    times = iter([90.0] + [110.0] * 1000)
    scripted(lambda c: 100.0 if c == first else next(times) if c == other else 500.0)
    assert tuner.tune(key).choice == first
    scripted(lambda c: 100.0 if c == first else 90.0 if c == other else 500.0)
    assert tuner.tune(key).choice == other


def test_xla_wins_where_it_is_faster_by_more_than_the_noise(scripted: Any) -> None:
    key = wide(generator(6))
    for xla_us, wins in ((99.0, False), (101.0, False), (97.0, True), (5.0, True)):
        scripted(lambda c, us=xla_us: us if c == XLA else 100.0)
        found = tuner.tune(key)
        assert (found.choice == XLA) is wins
        assert found.us(XLA) == xla_us
    store.save(found)
    assert select.select(key.problem, CPU, Options()).implementation == "xla"
    assert select.select(key.problem, CPU, Options(implementation="host")).implementation == "host"


def test_xla_wins_where_nothing_of_ours_works(scripted: Any) -> None:
    key = key_of(TINY)
    script = scripted(lambda c: 100.0)
    script.broken = {c: "no" for c in search.ranked(key)}
    found = tuner.tune(key)
    assert found.choice == XLA
    first = search.Search(key, 2**28, None, 1.0)._first_candidates()
    assert [m.error for m in found.measurements if m.candidate != XLA] == ["no"] * len(first)
    assert found.regret is None
    assert entry.loads(found.dumps(), key) == found


def test_what_does_not_compile_is_recorded_and_passed_over(scripted: Any) -> None:
    key = wide(generator(7))
    ranking = search.ranked(key)
    script = scripted(lambda c: 900.0 if c == XLA else 100.0 + 10 * ranking.index(c) if c in ranking else 800.0)
    script.broken = {ranking[0]: "CompilationError: first", ranking[2]: "wrong result: third"}
    found = tuner.tune(key)
    assert found.choice == ranking[1]
    assert {m.candidate: m.error for m in found.measurements if m.error} == script.broken
    assert ranking[0] not in script.rounds
    assert entry.loads(found.dumps(), key) == found


@pytest.mark.parametrize("late", [0, 1, 3, 4])
def test_what_fails_while_it_is_timed_is_recorded_and_passed_over(late: int, scripted: Any) -> None:
    """A launch that fails only after some calls ends that candidate, not the search."""
    key = wide(generator(8))
    ranking = search.ranked(key)
    fastest, second = ranking[1], ranking[4]
    script = scripted(lambda c: {fastest: 50.0, second: 60.0}.get(c, 900.0))
    script.late = {fastest: late}
    found = tuner.tune(key)
    assert found.choice == second
    (failure,) = [m for m in found.measurements if m.error]
    assert (failure.candidate, failure.us) == (fastest, None)
    assert "CUDA_ERROR_LAUNCH_FAILED" in failure.error
    assert entry.loads(found.dumps(), key) == found


def test_what_does_not_come_back_ends_the_search_with_what_it_has(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = wide(generator(18))
    ranking = search.ranked(key)
    bad, best = ranking[3], ranking[2]
    script = scripted(lambda c: {bad: 10.0, best: 50.0}.get(c, 900.0))
    script.stuck[bad] = threading.Event()
    found = tuner.tune(key)
    assert found.choice == best
    (failure,) = [m for m in found.measurements if m.error]
    assert (failure.candidate, failure.us) == (bad, None)
    assert failure.error == f"it did not come back within {search.STUCK_SECONDS} s"
    assert found.us(XLA) == 900.0
    assert entry.loads(found.dumps(), key) == found
    (record,) = caplog.records
    assert f"the search ends and {best} is chosen" in record.getMessage()
    with pytest.raises(RuntimeError, match="an earlier measurement has not come back"):
        tuner.tune(key)
    (left,) = searches.state.abandoned
    script.stuck.pop(bad).set()
    left.thread.join(10)
    assert tuner.tune(key).choice == bad


def test_where_xla_does_not_come_back_nothing_is_decided(scripted: Any) -> None:
    key = wide(generator(19))
    script = scripted(lambda c: 100.0)
    script.stuck[XLA] = threading.Event()
    with pytest.raises(RuntimeError, match="XLA cannot compute it: it did not come back within"):
        tuner.tune(key)
    (left,) = searches.state.abandoned
    script.stuck.pop(XLA).set()
    left.thread.join(10)


def test_a_candidate_that_takes_the_device_with_it_leaves_the_decision_to_xla(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After an illegal address every call of the process fails: the decision is for the next one."""
    key = wide(generator(20))
    bad = search.ranked(key)[1]
    script = scripted(lambda c: 900.0 if c == XLA else 100.0)
    script.late, script.fatal = {bad: 1}, "CUDA_ERROR_ILLEGAL_ADDRESS: scripted"
    found = tuner.tune(key)
    assert found.choice == XLA
    assert bad in [m.candidate for m in found.measurements if m.error]
    assert entry.loads(found.dumps(), key) == found
    assert "the device fails since a candidate did (RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text
    script = scripted(lambda c: 100.0)
    script.late, script.fatal = {bad: 1}, "RESOURCE_EXHAUSTED: scripted"
    with pytest.raises(RuntimeError, match="XLA cannot compute it: RuntimeError: RESOURCE_EXHAUSTED"):
        tuner.tune(key)


def test_what_another_search_did_to_the_device_is_not_stored(scripted: Any) -> None:
    """Ours fail, too, after that, and are not to blame."""
    key = wide(generator(25))
    bad = search.ranked(key)[1]
    script = scripted(lambda c: 900.0 if c == XLA else 100.0)
    script.late, script.fatal = {bad: 1}, "CUDA_ERROR_ILLEGAL_ADDRESS: scripted"
    device.state.poisoned_by = TINY.problem()
    with pytest.raises(RuntimeError, match="XLA cannot compute it: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"):
        tuner.tune(key)
    assert device.state.poisoned_by == TINY.problem()
    # A failure that the device survives is forgotten with the search that it belongs to.
    script = scripted(lambda c: 100.0)
    script.late = {bad: 1}
    device.state.poisoned_by = None
    assert tuner.tune(key).choice != XLA
    assert device.state.poisoned_by is None


def test_candidates_are_screened_by_device_time(scripted: Any) -> None:
    """This holds if there is a device time; the wall clock shows the host as well."""
    key = wide(generator(21))
    best = search.ranked(key)[7]
    for screened in (True, False):
        script = scripted(lambda c: 190.0 - (c != best))
        script.device_us = (lambda c: 6.0 if c == best else 7.0) if screened else None
        found = tuner.tune(key)
        assert (found.choice == best) is screened
        assert script.screened == (script.prepared if screened else [])
        assert bool(script.rounds) is not screened
        assert entry.loads(found.dumps(), key) == found


@pytest.mark.parametrize("at_a_lock", [False, True])
def test_ctrl_c_ends_the_search(at_a_lock: bool, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if Python's own locks turn it into another error."""
    key = wide(generator(22))
    reached, held = threading.Event(), threading.Event()

    def us(_: Candidate) -> float:
        if len(script.rounds) > 3:
            reached.set()
            held.wait(60)
        return 100.0

    def interrupted(*_: Any) -> None:
        assert reached.wait(60)
        try:
            raise KeyboardInterrupt
        finally:
            if at_a_lock:
                raise RuntimeError("release unlocked lock")

    script = scripted(us)
    with monkeypatch.context() as patch:
        patch.setattr(outcome.Outcome, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuner.tune(key)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "jax_splitk-tuner"]
    rounds = len(script.rounds)
    held.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(script.rounds) == rounds
    assert tuner.tune(key).measurements


def test_no_thread_outlives_the_search(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that lets go of executables while the interpreter ends would abort the process."""

    @contextlib.contextmanager
    def slow_to_leave(_: int) -> Iterator[None]:
        yield
        threading.Event().wait(0.5)

    scripted(lambda _: 100.0)
    monkeypatch.setattr(compiler.pool, "sparing", slow_to_leave)
    tuner.tune(wide(generator(23)))
    assert not [thread for thread in threading.enumerate() if thread.name == "jax_splitk-tuner"]


def test_what_others_take_is_no_part_of_the_budget(scripted: Any) -> None:
    """A search tries as much beside others as by itself."""
    key, tried = wide(generator(11)), []
    for waits in (0.0, 50.0):
        script = scripted(lambda c: 900.0 if c == XLA else 100.0 + 1000 / c.config.block)
        script.round_seconds, script.wait_seconds = 0.02, waits
        tuner.tune(key, seconds=5.0)
        tried.append(script.prepared)
    assert tried[0] == tried[1]


def test_the_budget_is_kept(scripted: Any) -> None:
    key = wide(generator(9))
    spent = {}
    for budget in (0.5, 5.0, 60.0):
        script = scripted(lambda c: 900.0 if c == XLA else 100.0 + 1000 / c.config.block)
        script.round_seconds = 0.1
        began = script.clock.now
        found = tuner.tune(key, seconds=budget)
        # Each candidate is timed once in any case, and the finalists get half a second.
        least = 0.1 * len(script.prepared)
        spent[budget] = script.clock.now - began
        assert spent[budget] <= max(least, budget) + 0.5 + 0.3
        assert found.metadata["seconds"] == round(spent[budget], 3)
        assert set(script.rounds) == set(script.prepared)
    assert spent[0.5] < spent[5.0] < spent[60.0]


@pytest.mark.parametrize("compile_seconds", [2.0, 4.3])
@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_compilation_keeps_to_the_budget(
    cores: int, compile_seconds: float, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On few cores fewer kernels are looked at. The tolerance is a fifth of the budget; what cannot be left out is
    XLA's operation, the kernels that are compiled at once, and the finals."""
    monkeypatch.setattr(toolchain, "unavailable", lambda: None)
    key = key_for(Case("layer", 32, 28, 28, 128, 128, (3, 3)).problem(), DEFAULT_CUDA)
    ranking, first = search.ranked(key), search.first_round(key, search.predicted(key))
    script = scripted(lambda c: 60.0 if c == XLA else 20.0 + ranking.index(c) if c in ranking else 50.0)
    script.cores, script.compile_seconds, script.xla_seconds, script.device_seconds = cores, compile_seconds, 1.5, 0.3
    script.device_us = script.us
    began = script.clock.now
    found = tuner.tune(key, seconds=10.0)
    assert script.clock.now - began <= 12.0
    assert found.choice == ranking[0]
    assert len(script.prepared) - 1 >= min(cores, len(first))
    # Where the first kernels alone take longer, nothing else is begun.
    script = scripted(script.us)
    script.cores, script.compile_seconds, script.xla_seconds, script.device_seconds = cores, 30.0, 1.5, 0.3
    script.device_us = script.us
    began = script.clock.now
    found = tuner.tune(key, seconds=10.0)
    assert script.clock.now - began <= 30.0 + 1.5 + (1 + search.LATE_ROUNDS) * 0.3 + 0.1
    assert {m.candidate for m in found.measurements} == {XLA, *first[: len(script.compiled)]}
    assert len(script.compiled) == min(cores, len(first))


def test_a_lucky_moment_before_the_finals_does_not_win(scripted: Any) -> None:
    """A challenger that was timed while the machine was fast has to show it next to the model's choice."""
    key = wide(generator(24))
    ranking = search.ranked(key)
    first, other = ranking[0], ranking[3]
    script = scripted(lambda c: 500.0 if c not in (first, other) else 100.0)
    script.us = lambda c: 500.0 if c not in (first, other) else 80.0 if c == other and early(c) else 100.0
    early = lambda c: script.rounds.count(c) <= 3  # noqa: E731
    found = tuner.tune(key)
    assert found.choice == first
    assert found.us(other) == 100.0
    script = scripted(script.us)
    script.us = lambda c: 500.0 if c not in (first, other) else 80.0 if c == other else 100.0
    assert tuner.tune(key).choice == other


def test_an_old_entry_takes_part_again(scripted: Any) -> None:
    """Its fastest candidates are timed again, also those that the ranking would not have reached."""
    key = wide(generator(10))
    ranking = search.ranked(key)
    hidden = Candidate(wgrad_host.FAMILY, wgrad_host.Config(13, 1000))
    assert hidden not in ranking
    assert hidden.refusal(key.problem, CPU) is None
    old = Entry.of(key, hidden, (Measurement(hidden, 10.0), Measurement(ranking[-1], 9e4)), ranking[0], {})
    script = scripted(lambda c: 10.0 if c == hidden else 100.0)
    found = tuner.tune(key, old=old)
    assert hidden in script.prepared
    assert found.choice == hidden


def test_an_illegal_measurement_of_an_old_entry_cannot_win(scripted: Any) -> None:
    """Files are never trusted: only an entry's choice is checked when it is read, so the search checks the rest."""
    key = wide(generator(11))
    ranking = search.ranked(key)
    illegal = Candidate(wgrad_host.FAMILY, wgrad_host.Config(10**6, 64))
    assert illegal.refusal(key.problem, CPU) is not None
    text = Entry.of(key, ranking[0], (Measurement(illegal, 1.0),), ranking[0], {}).dumps()
    script = scripted(lambda c: 1.0 if c == illegal else 100.0)
    found = tuner.tune(key, old=entry.loads(text, key))
    assert illegal not in script.prepared
    assert found.choice != illegal


# ---- XLA is left out where it is far slower --------------------------------------------------------------------------


def far_slower(monkeypatch: pytest.MonkeyPatch, than: Callable[[float], bool]) -> None:
    """XLA takes a second by the estimates, and is far slower than a kernel whose seconds `than` accepts."""
    monkeypatch.setattr(certainty, "far_slower_xla", lambda seconds, *_: 1.0 if than(seconds) else None)


def test_xla_is_left_out_where_it_is_far_slower(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = wide(generator(31))
    far_slower(monkeypatch, lambda seconds: seconds < 0.1)
    best = search.ranked(key)[1]
    script = scripted(lambda c: 100.0 if c == best else 200.0)
    found = tuner.tune(key)
    assert XLA not in script.prepared
    assert (found.choice, found.us(XLA), found.estimated_xla_us) == (best, None, 1e6)
    assert entry.loads(found.dumps(), key) == found
    store.save(found)
    assert select.select(key.problem, CPU, Options()).why == "user cache: 100.0 us"
    (shown,) = [line for line in str(TuningResult(((key, found),))).splitlines() if str(best) in line]
    assert shown.endswith("(chosen 100.0 us, XLA about 1000000.0 us)")
    timed = dataclasses.replace(found, evidence={**found.evidence, "measurements": [Measurement(XLA, 7.0).as_dict()]})
    assert entry.merge(timed, found).estimated_xla_us is None  # an earlier search timed it
    for damaged in ("7", True, -1.0, float("nan"), HUGE, None):
        metadata = {**found.metadata, entry.XLA_ESTIMATE: damaged}
        assert dataclasses.replace(found, evidence={**found.evidence, "metadata": metadata}).estimated_xla_us is None


@pytest.mark.parametrize("xla_us", [50.0, 500.0])
def test_xla_takes_part_where_ours_are_slower_than_predicted(
    xla_us: float, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = wide(generator(32))
    predicted, candidate = search.predicted(key)[0]
    far_slower(monkeypatch, lambda seconds: seconds == predicted)
    script = scripted(lambda c: xla_us if c == XLA else 100.0 if c == candidate else 200.0)
    found = tuner.tune(key)
    assert script.prepared[-1] == XLA
    assert (found.choice, found.us(XLA)) == (XLA if xla_us < 100 else candidate, xla_us)
    assert found.estimated_xla_us is None


def test_xla_takes_part_where_none_of_ours_works(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = wide(generator(33))
    far_slower(monkeypatch, math.isfinite)
    script = scripted(lambda c: 100.0)
    script.broken = dict.fromkeys(search.ranked(key), "scripted")
    found = tuner.tune(key)
    assert (found.choice, found.us(XLA), found.estimated_xla_us) == (XLA, 100.0, None)
    # And where one of them took the device with it.
    script = scripted(lambda c: 100.0)
    script.late, script.fatal = dict.fromkeys(search.ranked(key), 1), "CUDA_ERROR_ILLEGAL_ADDRESS: scripted"
    assert tuner.tune(key).choice == XLA
    assert "the device fails since a candidate did" in caplog.text


def test_a_candidate_that_does_not_come_back_loses_where_xla_is_left_out(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = wide(generator(34))
    far_slower(monkeypatch, lambda seconds: seconds < 0.1)
    bad, best = search.ranked(key)[:2]
    script = scripted(lambda c: 200.0 if c == best else 300.0)
    script.stuck[bad] = threading.Event()
    assert tuner.tune(key).choice == best
    (left,) = searches.state.abandoned
    script.stuck.pop(bad).set()
    left.thread.join(10)
