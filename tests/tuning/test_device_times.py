"""Times by the stopwatch, on a device that the tests play."""

import functools
import itertools
import math
import threading
from collections.abc import Callable

import jax
import pytest
from jax import numpy as jnp

from jax_splitk.runtime import stopwatch
from jax_splitk.tuning import check, device, measure, search
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.measure import Bench, Contestant
from tests.tuning_cache import TINY, bench_without_operands, key_of

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these tune the CPU's family")


class FakeDevice:
    """A GPU whose stopwatch counts what contestants say they ran.

    Attributes:
      laps: the names that ran in each measurement.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, float]] = []
        self.laps: list[list[str]] = []
        monkeypatch.setattr(stopwatch, "microseconds", self.microseconds)

    def contestant(self, name: str, us: float) -> Contestant:
        return Contestant(Candidate(name), lambda: self.ran.append((name, us)), module=name, warm_us=us)

    def microseconds(self, work: Callable[[], object]) -> float:
        assert device.state.lock.locked()
        self.ran.clear()
        work()
        self.laps.append([name for name, _ in self.ran])
        return sum(us for _, us in self.ran)

    def bench(self) -> Bench:
        return bench_without_operands(Bench)


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are called more often, but never so often that JAX lets no more executions be under way."""
    device = FakeDevice(monkeypatch)
    times = {"a": 7.0, "b": 290.0, "c": 12000.0}
    contestants = [device.contestant(name, us) for name, us in times.items()]
    assert device.bench().time_on_device(contestants, rounds=1)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] for us in times.values()]
    assert device.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] * 3 for us in times.values()]
    assert device.laps == [["a"] * 24, ["b"] * 6, ["c"]] * (1 + 3)
    assert device.bench().time_on_device(contestants[:1])
    assert contestants[0].device_times == [pytest.approx(7.0)]
    bench = device.bench()
    bench.platform = "cpu"
    assert not bench.time_on_device(contestants)


def no_time(work: Callable[[], object]) -> float:
    raise RuntimeError("the driver cannot hold a stream")


@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize(("clock_us", "us", "is_slow"), [(9e4, 9e4, True), (9e4, 10.0, False), (10.0, 10.0, False)])
def test_a_slow_candidate_is_called_a_few_times(
    clock_us: float, us: float, is_slow: bool, has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the time of these calls. A candidate whose first calls alone take long by the clock, since it loads code,
    is not slow."""
    fake, now, runs = FakeDevice(monkeypatch), 0.0, 0
    bench, result = fake.bench(), jnp.zeros(())
    bench.sets = 24
    contestant, quick = fake.contestant("slow", us), fake.contestant("quick", 7.0)
    clock = itertools.chain([clock_us], itertools.repeat(us))

    def of_kind(kind: int) -> list[jax.Array]:
        nonlocal now
        now += 4e-6 * next(clock)
        fake.ran.append(("slow", 4 * us))
        return [result] * 4

    def run() -> list[jax.Array]:
        nonlocal runs
        runs += 1
        return [result] * 4

    if not has_times:
        monkeypatch.setattr(stopwatch, "microseconds", no_time)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    contestant.of_kind, contestant.run, contestant.candidate = of_kind, run, XLA
    assert bench._try(contestant) is None
    assert contestant.is_slow == is_slow
    if is_slow:
        assert runs == 0
        bench.time([contestant], 3, math.inf)
        assert (contestant.us, contestant.spread, runs) == (pytest.approx(us), 0.0, 0)
        assert bench.time_on_device([contestant])
        assert bench.time_on_device([contestant, quick]) == has_times
        assert len(quick.device_times) == has_times


def test_a_device_without_times_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    contestants = [device.contestant("a", 7.0), device.contestant("b", 9.0)]
    monkeypatch.setattr(stopwatch, "microseconds", no_time)
    assert not device.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[], []]


def test_what_is_waited_for_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the wall clock and by the stopwatch; it is no part of a search's budget."""
    key = key_of(TINY)
    bench = Bench(key.problem, "cpu", threading.Event())
    contestants, _ = bench.prepare(search.ranked(key)[:1])
    bench.platform = "cuda"

    def microseconds(work: Callable[[], object]) -> float:
        work()
        return 1.0

    monkeypatch.setattr(stopwatch, "microseconds", microseconds)
    lock = device.state.lock
    for timed in (lambda: bench.time(contestants, 1, math.inf), lambda: bench.time_on_device(contestants)):
        before = bench.waited
        timed()
        by_itself, before = bench.waited - before, bench.waited
        lock.acquire()
        threading.Timer(0.4, lock.release).start()
        timed()
        assert bench.waited - before - by_itself > 0.3


def guarded(contestant: Contestant, lock: threading.Lock) -> Callable[..., object]:
    """The contestant's calls, which must have the device."""
    run, of_kind = contestant.run, contestant.of_kind

    def call(*kind: int) -> object:
        assert lock.locked()
        return of_kind(*kind) if kind else run()

    return call


def test_only_one_search_uses_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates run for the first time, are timed, and are compared with XLA while nobody else does. Programs are
    compiled meanwhile."""
    key = key_of(TINY)
    bench = Bench(key.problem, "cpu", threading.Event())
    candidates = [XLA, *search.ranked(key)[:2]]
    bench.compile(candidates)
    compiled, lock = list[bool](), device.state.lock
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(check, "_error_of", functools.lru_cache(check._error_of.__wrapped__))

    def compiling(lowered: jax.stages.Lowered, *args: object, **options: object) -> object:
        compiled.append(lock.locked())
        program = compile_(lowered, *args, **options)  # pyright: ignore[reportArgumentType]

        def held(*operands: object) -> object:
            assert lock.locked()
            return program(*operands)

        return held

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    for contestant in bench._compiled.values():
        assert isinstance(contestant, Contestant)
        contestant.run = contestant.of_kind = guarded(contestant, lock)
    contestants, failures = bench.prepare(candidates)
    assert (len(contestants), failures) == (3, [])
    bench.time(contestants, 1, math.inf)
    assert compiled == [False], "one comparison serves both candidates"
