"""Problems that a program's lowering leaves to the cost model, since they take little of its time. Searches are
simulated, and so is the GPU."""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.base import xla
from jax_splitk.kernels.base.xla import Estimate
from jax_splitk.ops import lowering
from jax_splitk.runtime import settings, toolchain
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import certainty, decide, model, search, searches, select, store, tuner, worth, xla_choices
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options
from jax_splitk.tuning.result import TuningResult
from jax_splitk.tuning.worth import Callbacks, Operation, Program
from tests.tuning_cache import new_session, wgrad

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="plays a GPU"),
    pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC and CUTLASS's headers"),
]

LARGE = Case("large", 256, 28, 28, 256, 256, (3, 3))
SMALL = Case("small", 8, 14, 14, 64, 64, (3, 3))
KEYS = {case: key_for(case.problem(), DEFAULT_CUDA) for case in (LARGE, SMALL)}


def callbacks(measured: Callable[[Key], Key | None] = lambda key: key) -> Callbacks:
    return Callbacks(
        lambda key, _: measured(key),
        lambda key, _: measured(key) is not None,
        lambda _: (),
        lambda _: contextlib.nullcontext(),
    )


def left(operations: list[Operation], loss: float = 0.01, measured: Callable[[Key], Key | None] = lambda k: k) -> Any:
    program = Program()
    found = program.begin(operations, DEFAULT_CUDA, loss, callbacks(measured))
    keys = [key_for(operation.problem, DEFAULT_CUDA) for operation in operations]
    assert found == [None if key in program.left else measured(key) for key in keys]
    return program.left


def seconds(case: Case) -> float:
    """How long the faster one of our kernel and XLA's takes, by the models."""
    best, xlas = model.best(KEYS[case], DEFAULT_WORKSPACE_LIMIT), xla.estimate(case.problem(), DEFAULT_CUDA)
    assert best is not None
    assert xlas is not None
    return min(best[0], xlas.seconds)


def lost(case: Case) -> float:
    """Seconds that a decision without measurement is expected to lose."""
    best = model.best(KEYS[case], DEFAULT_WORKSPACE_LIMIT)
    assert best is not None
    return seconds(case) * certainty.expected_loss(best[1], best[0], case.problem(), DEFAULT_CUDA)


# ---- which problems ------------------------------------------------------------------------------------------------


def test_what_takes_little_time_is_left_until_the_sum_is_too_large() -> None:
    both = [Operation(case.problem(), Options(), 1) for case in (LARGE, SMALL)]
    bound = lost(SMALL) / (seconds(LARGE) + seconds(SMALL))
    assert 0 < bound < 0.01
    assert left(both, 1.01 * bound) == {KEYS[SMALL]}
    assert left(both, 0.99 * bound) == left(both, 0.0) == set()
    assert left(both, 0.9) == set(KEYS.values())


def test_an_operation_counts_as_often_as_it_runs() -> None:
    times = int(seconds(LARGE) / seconds(SMALL)) + 1
    assert left([Operation(LARGE.problem(), Options(), 1), Operation(SMALL.problem(), Options(), times)]) == set()


def test_what_is_not_measured_anyway_counts_as_time_alone() -> None:
    """A decision that was measured loses nothing."""
    both = [Operation(case.problem(), Options(), 1) for case in (LARGE, SMALL)]
    found = left(both, measured=lambda key: None if key == KEYS[LARGE] else key)
    assert found == {KEYS[SMALL]}


def test_an_implementation_that_was_asked_for_is_measured() -> None:
    asked = Options(implementation="cutlass")
    assert left([Operation(LARGE.problem(), Options(), 1), Operation(SMALL.problem(), asked, 1)]) == set()


def test_problems_that_one_measurement_decides_are_left_together() -> None:
    """Or measured together: the sum of what they lose counts."""
    others = [dataclasses.replace(SMALL, batch=8 + i).problem() for i in range(1, 40)]
    operations = [Operation(problem, Options(), 1) for problem in (LARGE.problem(), SMALL.problem(), *others)]
    assert left(operations)
    shared = left(operations, measured=lambda key: key if key == KEYS[LARGE] else KEYS[SMALL])
    assert shared == set()


def test_the_latest_program_that_has_a_problem_decides() -> None:
    program = Program()
    for cases, left_then in (((LARGE, SMALL), {KEYS[SMALL]}), ((LARGE,), {KEYS[SMALL]}), ((SMALL,), set())):
        program.begin([Operation(c.problem(), Options(), 1) for c in cases], DEFAULT_CUDA, 0.01, callbacks())
        assert program.left == left_then


def test_the_nearer_xla_the_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    best = search.predicted(KEYS[LARGE])[0]

    def expected(ratio: float | None) -> float:
        found = None if ratio is None else Estimate(ratio * best[0], 0.2)
        monkeypatch.setattr(xla, "estimate", lambda *_: found)
        return certainty.expected_loss(best[1], best[0], LARGE.problem(), DEFAULT_CUDA)

    within = expected(100.0)
    assert within > 0
    losses = [expected(ratio) for ratio in (1.0, 1.1, 1.3, 2.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 2 * within
    assert losses[-1] == pytest.approx(within, rel=0.2)
    assert expected(0.5) == pytest.approx(expected(2.0)), "XLA is chosen then"
    assert expected(None) > within
    assert certainty.expected_loss(Candidate(), 1.0, LARGE.problem(), DEFAULT_CUDA) == 0


# ---- programs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys that are searched in lowerings for CUDA, which may measure here. No kernel is compiled."""
    keys: list[Key] = []

    def tune(key: Key, workspace_limit: int, old: Entry | None, seconds: float | None = None) -> Entry:
        keys.append(key)
        searches.state.queue.pop((key, workspace_limit), None)
        return Entry.of(key, search.predicted(key)[0][1], workspace_limit_bytes=workspace_limit)

    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr(lowering, "_may_measure", lambda ctx, target: True)
    monkeypatch.setattr(lowering, "code_of", lambda choice, *_, **__: (choice, None))
    monkeypatch.setattr("jax_splitk.tuning.ahead.compile_ahead", lambda *_: None)
    monkeypatch.setattr(search, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(xla_choices, "begun", lambda _: contextlib.nullcontext())
    return keys


def lower(*cases: Case, times: int = 1) -> None:
    """Lowers a program in which the last case's operation is in a loop."""

    def operation(case: Case) -> jax.Array:
        return wgrad(jnp.ones(case.lhs_shape, case.dtype), jnp.ones(case.g_shape, case.dtype), case)

    def program() -> list[jax.Array]:
        looped = jax.lax.scan(lambda sums, _: (sums + operation(cases[-1]), None), operation(cases[-1]), length=times)
        return [*map(operation, cases[:-1]), looped[0]]

    jax.jit(program).trace().lower(lowering_platforms=("cuda",))


def test_a_lowering_measures_what_matters(searched: list[Key], cache: pathlib.Path) -> None:
    lower(LARGE, SMALL)
    assert searched == [KEYS[LARGE]]
    assert searches.state.queue == {}
    lower(SMALL)
    assert searched == [KEYS[LARGE], KEYS[SMALL]], "alone it is all of the program's time"


def test_turns_of_a_loop_count(searched: list[Key]) -> None:
    lower(LARGE, SMALL, times=int(seconds(LARGE) / seconds(SMALL)))
    assert set(searched) == set(KEYS.values())


def test_every_problem_can_be_measured(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_TUNE_LOSS", "0")
    lower(LARGE, SMALL)
    assert set(searched) == set(KEYS.values())


def test_the_choice_is_stored_and_gives_way_to_a_search(
    searched: list[Key], monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path
) -> None:
    lower(LARGE, SMALL)
    found = store.lookup(KEYS[SMALL])
    assert found is not None
    entry = found.entry
    assert entry.is_unmeasured and not entry.measurements
    unstored = select.select(SMALL.problem(), DEFAULT_CUDA, Options())
    assert entry.choice == unstored.candidate
    assert unstored.times.predicted
    new_session(monkeypatch)
    lower(LARGE, SMALL)
    assert searched == [KEYS[LARGE]]
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")
    new_session(monkeypatch)
    lower(SMALL)
    with pytest.raises(jax_splitk.FrozenCacheMiss):
        lower(dataclasses.replace(SMALL, batch=16))
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    new_session(monkeypatch)
    lower(SMALL)
    assert searched == [KEYS[LARGE], KEYS[SMALL]]
    measured = store.lookup(KEYS[SMALL])
    assert measured is not None
    assert measured.entry.is_searched(DEFAULT_WORKSPACE_LIMIT)
    assert not measured.entry.is_unmeasured


def test_a_program_that_is_known_asks_no_model(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finds in the cache that the same program left a problem."""
    lower(LARGE, SMALL)
    new_session(monkeypatch)
    monkeypatch.setattr(worth, "_left", lambda *_: pytest.fail("estimates take a second for a hundred problems"))
    lower(LARGE, SMALL)
    assert searched == [KEYS[LARGE]]


def test_programs_that_leave_the_same_problem_are_all_known(
    searched: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a training step and an evaluation do."""
    programs = [(LARGE, SMALL), (LARGE, LARGE, SMALL)]
    for program in programs:
        new_session(monkeypatch)
        lower(*program)
    monkeypatch.setattr(worth, "_left", lambda *_: pytest.fail("the cache has both programs"))
    for program in programs:
        new_session(monkeypatch)
        lower(*program)
    assert searched == [KEYS[LARGE]]
    found = store.lookup(KEYS[SMALL])
    assert found is not None and len(found.entry.left_by) == 2
    for i in range(100):
        store.save(found.entry.also_left_by(f"program {i}"))
        found = store.lookup(KEYS[SMALL])
        assert found is not None and found.entry.left_by[-1] == f"program {i}" and len(found.entry.left_by) <= 32


def test_another_loss_is_another_program(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    lower(LARGE, SMALL)
    new_session(monkeypatch)
    monkeypatch.setenv("JAX_SPLITK_TUNE_LOSS", "0")
    lower(LARGE, SMALL)
    assert searched == [KEYS[LARGE], KEYS[SMALL]]


def test_what_the_models_leave_to_xla_is_stored_too(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "SOURCES", (*decide.SOURCES[:-1], lambda query: None))
    lower(LARGE, SMALL)
    found = store.lookup(KEYS[SMALL])
    assert found is not None and found.entry.is_unmeasured and found.entry.choice == XLA


def test_what_the_caller_gave_is_not_stored(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    searches.state.program.left = frozenset(KEYS.values())
    given = Options(implementation="cutlass")
    select.select(SMALL.problem(), DEFAULT_CUDA, given, measure=True, final=True)
    entry = Entry.of(KEYS[LARGE], search.predicted(KEYS[LARGE])[0][1])
    tuned = Options(tuning=TuningResult(((KEYS[LARGE], entry),)))
    assert select.select(LARGE.problem(), DEFAULT_CUDA, tuned, measure=True, final=True).candidate == entry.choice
    assert [store.lookup(key) for key in KEYS.values()] == [None, None]


@pytest.mark.parametrize("value", ["-0.1", "1", "nan", "much"])
def test_a_wrong_share_is_an_error_of_the_users_program(
    value: str, searched: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_TUNE_LOSS", value)
    accepted = f"JAX_SPLITK_TUNE_LOSS={value!r}; accepted: a number of at least 0 and below 1"
    assert settings.mistakes() == [accepted]
    with pytest.raises(settings.SettingError, match="accepted: a number"):
        lower(SMALL)


def test_each_equation_of_a_program_is_looked_at_once(searched: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in functions that JAX lowers apart."""
    calls = collections.Counter[int]()
    begin = Program.begin

    def counting(self: Program, operations: list[Operation], *others: Any) -> list[Key | None]:
        calls[len(operations)] += 1
        return begin(self, operations, *others)

    monkeypatch.setattr(Program, "begin", counting)
    lower(LARGE, dataclasses.replace(LARGE, batch=128), SMALL, times=3)
    assert calls == {3: 1}
