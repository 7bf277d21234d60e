"""XLA's choices for several problems at once: which problems, how many, and what happens to those that fail."""

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from benchmarks.cases import Case
from jax_splitk.kernels.base import xla
from jax_splitk.kernels.base.xla import Estimate
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import device, measure, searches, xla_choices
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import Bench
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.tuner import Queued
from jax_splitk.tuning.worth import Operation
from tests.tuning_cache import TINY, TUNES_THE_CPU, key_of

pytestmark = TUNES_THE_CPU

KEYS = [key_of(dataclasses.replace(TINY, batch=2 + i)) for i in range(80)]
PROBLEMS = [key.problem for key in KEYS]


class Programs:
    """The programs that were compiled, with a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[list[Problem]] = []
        self.seconds = 0.1  # for each problem
        self.now = 0.0
        monkeypatch.setattr(device, "_compile", self.compile)
        monkeypatch.setattr(device, "time", self)

    def compile(self, problems: Sequence[Problem], _: Any) -> None:
        self.compiled.append(list(problems))
        self.now += self.seconds * len(problems)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(monkeypatch)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each program has that is compiled for a choice, or by itself."""
    found: list[int] = []
    compile_together = device._compile

    def counting(problems: Sequence[Problem], options: Any) -> None:
        assert device.state.lock.locked(), "XLA times kernels"
        compile_together(problems, options)
        found.append(len(problems))

    monkeypatch.setattr(device, "_compile", counting)
    return found


def come(*keys: Any) -> None:
    searches.state.queue = {(key, 2**28): Queued() for key in keys}


def choose(problem: Problem, *following: Problem) -> bool:
    return device.state.let_xla_choose(problem, following, {})


def test_the_next_problems_are_chosen_for_once(programs: Programs) -> None:
    """They come in the order in which they will be searched: few at first, then as many as do not hold the device for
    long."""
    for problem in PROBLEMS:
        choose(problem, *PROBLEMS)
    assert programs.compiled == [PROBLEMS[:4], PROBLEMS[4:68], PROBLEMS[68:]]


@pytest.mark.parametrize(("seconds", "count"), [(3.0, 4), (1.0, 8), (0.0, 64)])
def test_slow_choices_hold_the_device_for_few(seconds: float, count: int, programs: Programs) -> None:
    programs.seconds = seconds
    for problem in PROBLEMS[:5]:
        choose(problem, *PROBLEMS)
    assert list(map(len, programs.compiled)) == [4, count]


def test_one_that_has_none_behind_it_is_compiled_by_itself(programs: Programs) -> None:
    choose(PROBLEMS[0])
    assert programs.compiled == []
    choose(PROBLEMS[1], *PROBLEMS[:2])
    assert programs.compiled == []


def bench(problem: Problem) -> Bench:
    made = Bench(problem, "cpu", threading.Event())
    made.platform = "cuda"
    return made


def test_xlas_contestant_takes_the_next_ones_along(compiled: list[int]) -> None:
    searches.state.running[KEYS[1], 2**28] = None
    come(KEYS[0], KEYS[2])
    for problem in PROBLEMS[:3]:
        contestants, failed = bench(problem).prepare([XLA])
        assert (len(contestants), failed) == (1, [])
    assert compiled == [3]
    come(*KEYS[3:6])
    Bench(PROBLEMS[3], "cpu", threading.Event()).prepare([XLA])
    assert compiled == [3], "XLA:CPU chooses nothing"


def test_what_fails_together_is_compiled_one_by_one(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is that of the problem that it belongs to."""
    operation = OPERATIONS["conv_wgrad"]

    def reference(problem: Problem, *operands: jax.Array) -> jax.Array:
        if problem == PROBLEMS[1] and problem.out_dtype == "float32" and len(device.state.xla_chose) == 3:
            raise ZeroDivisionError("scripted")
        return operation.reference(problem, *operands)

    monkeypatch.setitem(OPERATIONS, "conv_wgrad", dataclasses.replace(operation, reference=reference))
    come(*KEYS[:3])
    outcomes = [bench(problem).prepare([XLA]) for problem in PROBLEMS[:3]]
    assert compiled == []
    assert device.state.xla_chose == dict.fromkeys(PROBLEMS[:3], False)
    assert [len(contestants) for contestants, _ in outcomes] == [1, 0, 1]
    (failure,) = outcomes[1][1]
    assert "ZeroDivisionError: scripted" in str(failure.error)


# ---- before the searches ---------------------------------------------------------------------------------------------

LARGE, MIDDLE, SMALL = (Case("c", batch, 56, 56, 64, 64, (3, 3)).problem() for batch in (256, 128, 1))


def likely(
    monkeypatch: pytest.MonkeyPatch, ratio: float | None = 1.2, uncertainty: float = 0.1, **times: int
) -> list[Problem]:
    """What is likely measured of three problems if XLA takes so many times the least possible time of each."""

    def estimate(problem: Problem, target: Any) -> Estimate | None:
        return None if ratio is None else Estimate(ratio * xla.features(problem, target).floor, uncertainty)

    monkeypatch.setattr(xla, "estimate", estimate)
    operations: dict[Key, Operation] = {
        key_for(problem, DEFAULT_CUDA): Operation(problem, Options(), times.get(name, 1))
        for name, problem in (("small", SMALL), ("middle", MIDDLE), ("large", LARGE))
    }
    found = xla_choices.likely(operations)
    assert [key for key, _ in found] == [key_for(key.problem, DEFAULT_CUDA) for key, _ in found]
    assert {limit for _, limit in found} <= {Options().workspace_limit}
    return [key.problem for key, _ in found]


def test_what_takes_most_of_a_program_is_likely_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert likely(monkeypatch) == [MIDDLE, LARGE]
    assert likely(monkeypatch, large=20) == [LARGE]
    assert likely(monkeypatch, small=10000) == [SMALL]


def test_what_xla_chooses_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for uncertainty in (0.1, 0.6):
        most = 1.15 * math.exp(1.4 * uncertainty)
        assert likely(monkeypatch, most - 0.01, uncertainty)
        assert likely(monkeypatch, most + 0.01, uncertainty) == []
    assert likely(monkeypatch, ratio=None) == [], "nothing is known of XLA's time"


def wait() -> None:
    for thread in device.state.choosing:
        thread.join(20)
        assert not thread.is_alive()


def test_xla_chooses_in_a_block_until_all_are_chosen(programs: Programs) -> None:
    with xla_choices.begun(PROBLEMS[:6]):
        wait()
    assert programs.compiled == [PROBLEMS[:4], PROBLEMS[4:6]]
    with xla_choices.begun(PROBLEMS[:6]):
        wait()
    assert len(programs.compiled) == 2


def test_what_has_not_begun_with_the_block_is_left(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def compile(problems: Sequence[Problem], options: Any) -> None:
        assert options == measure.WITHOUT_GRAPHS
        programs.compile(problems, options)
        began.set()
        assert ended.wait(20)

    monkeypatch.setattr(device, "_compile", compile)
    with xla_choices.begun(PROBLEMS):
        assert began.wait(20)
        assert device.state.lock.locked(), "no search may time anything meanwhile"
    ended.set()
    wait()
    assert programs.compiled == [PROBLEMS[:4]]


def test_nothing_waits_for_a_choice(programs: Programs) -> None:
    """The device may be held by a search. The block ends without it."""
    with device.state.lock:
        started = time.monotonic()
        with xla_choices.begun(PROBLEMS):
            pass
        assert time.monotonic() - started < 10
    wait()
    assert len(programs.compiled) <= 1
