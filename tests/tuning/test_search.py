"""The search: its candidates, its winners, when it runs, and the cost of a hit."""

import dataclasses
import pathlib
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.problems import random_operands
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import execute, toolchain
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import entry, measure, search, select, tuner
from jax_splitk.tuning.check import TOLERANCE
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.measure import Bench
from jax_splitk.tuning.options import Options
from tests.exhaustive import thinned
from tests.problems import SEED, seeded
from tests.tuning_cache import CPU, TINY, TUNES_THE_CPU, finish, key_of, lax_wgrad, operands, random_tiny, start, wgrad

pytestmark = TUNES_THE_CPU


# ---- the search on the CPU -----------------------------------------------------------------------------------------


def test_two_problems_are_tuned_and_the_next_process_measures_nothing(cache: pathlib.Path) -> None:
    with seeded(12) as rng:
        cases = [random_tiny(rng), random_tiny(rng, batch=9, height=20)]
    problems = [case.problem() for case in cases]
    result = jax_splitk.tune_problems(problems, seconds=0.3)
    assert [key.problem for key, _ in result] == problems
    configs = []
    for key, found in result:
        assert entry.loads((cache / key.file).read_text(), key) == found
        assert found.choice.refusal(key.problem, CPU) is None
        xla_us = found.us(XLA)
        ours = [m.us for m in found.measurements if m.candidate.family is wgrad_host.FAMILY]
        assert xla_us > 0
        assert len(ours) >= min(search.FEWEST, len(search.ranked(key)))
        assert None not in ours
        assert found.us(found.choice) > 0
        assert found.predicted == search.ranked(key)[0]
        assert {"date", "jax", "jaxlib", "platform_version", "seconds", "candidates", "times"} == set(found.metadata)
        assert found.metadata["times"] == "clock"
        configs.append(select.select(key.problem, CPU, Options()).config)
    script = f"""
import json
from unittest import mock
import jax
from jax import numpy as jnp
import jax_splitk
from benchmarks.cases import Case
from jax_splitk.runtime import compiler, nvrtc, toolchain
from jax_splitk.tuning import measure, search, tuner
forbidden = mock.Mock(side_effect=AssertionError("measured or compiled"))
tuner.tune = search.Search.run = measure.Bench.__init__ = forbidden
nvrtc.Nvrtc.compile = compiler.compile_in_worker = forbidden
out = []
for case in {cases!r}:
    run = lambda x, g: jax_splitk.conv_wgrad(x, g, case.rhs_shape, **case.lax_arguments())
    args = jnp.ones(case.lhs_shape), jnp.ones(case.g_shape)
    (decision,) = jax_splitk.explain(run, *args).decisions
    text = jax.jit(run).lower(*args).as_text()
    jax.block_until_ready(jax.jit(run)(*args))
    out.append([repr(decision.config), decision.why, text])
    if decision.config is not None:
        assert f"splits = {{decision.config.splits}} : i64" in text
result = jax_splitk.tune_problems([case.problem() for case in {cases!r}])
print(json.dumps([out, [str(e.choice) for _, e in result], forbidden.call_count]))
"""
    second = start(script, CACHE_DIR=str(cache), AUTOTUNE="on_miss", TUNE_BUDGET_S="1")
    (((lowered, choices, calls), _),) = finish(second)
    assert calls == 0
    assert [config for config, _, _ in lowered] == [repr(config) for config in configs]
    assert all(why.startswith("user cache: ") for _, why, _ in lowered)
    assert choices == [str(found.choice) for _, found in result]


@pytest.mark.parametrize(("dtype", "out_dtype"), thinned([
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"),
    ("float16", "float32"), ("float32", "bfloat16"), ("float32", "float16"),
], 2))  # fmt: skip
def test_every_dtype_is_tuned(dtype: str, out_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction is long, so that the rounding of XLA and of ours differs as much as in practice."""
    monkeypatch.setattr(search, "FIRST_ROUND", 3)
    case = Case("long", 16, 30, 31, 4, 8, (2, 2), dtype=dtype)
    key = key_for(case.problem(out_dtype), CPU)
    found = tuner.tune(key, seconds=0.05)
    assert [m.error for m in found.measurements if m.error] == []
    assert found.us(XLA) > 0


def config_of(custom_call: CustomCall) -> wgrad_host.Config:
    return wgrad_host.Config(int(custom_call.attributes["splits"]), int(custom_call.attributes["block"]))


@pytest.mark.parametrize("fault", ["zeros", "nan", "one in a thousand"])
def test_a_wrong_candidate_does_not_win(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(Case("tiny", 8, 30, 31, 8, 16, (3, 3), dtype="float32"))
    bad = search.ranked(key)[0]
    call = execute.call

    def wrong(custom_call: CustomCall, problem: ConvWgradProblem, lhs: jax.Array, g: jax.Array) -> jax.Array:
        if config_of(custom_call) != bad.config:
            return call(custom_call, problem, lhs, g)
        if fault == "one in a thousand":
            out = call(custom_call, problem, lhs, g)
            flat = out.reshape(-1)
            return flat.at[0].add(0.2 * jnp.linalg.norm(flat)).reshape(out.shape)
        return jnp.full(problem.out_shape, 0.0 if fault == "zeros" else jnp.nan, problem.out_dtype)

    monkeypatch.setattr(execute, "call", wrong)
    monkeypatch.setattr(search, "FIRST_ROUND", 3)
    found = tuner.tune(key, seconds=0.05)
    assert found.choice != bad
    assert found.predicted == bad
    (failure,) = [m for m in found.measurements if m.error]
    assert (failure.candidate, failure.us) == (bad, None)
    assert failure.error.startswith("differs from XLA's: relative error")


def test_xlas_own_error_is_accepted_and_twice_that_of_ours() -> None:
    """XLA's kernels differ among themselves on long sums. Results that none of them could give are refused."""
    key = key_of(Case("tiny", 8, 30, 31, 8, 16, (3, 3), dtype="float32"))
    bench = Bench(key.problem, "cpu", threading.Event())
    exact = bench._check.reference(0, lambda work: work())
    tolerance = TOLERANCE["float32"]

    def check(candidate: Candidate, error: float) -> str | None:
        results = [exact * (1 + error)]
        return bench._try(measure.Contestant(candidate, lambda: results, of_kind=lambda _: results))

    ours = search.ranked(key)[0]
    assert check(ours, 1.5 * tolerance) is not None
    assert check(XLA, 11 * tolerance) is None
    assert "1.5e-03, accepted: 1e-03" in (check(ours, 1.5 * tolerance) or ""), "no kernel errs as XLA does"
    assert check(XLA, 0.4 * tolerance) is None
    assert check(ours, 1.5 * tolerance) is not None, "no less is accepted than without XLA's error"
    assert check(XLA, 1.2 * tolerance) is None
    assert check(ours, 2.3 * tolerance) is None
    assert "accepted: 2e-03" in (check(ours, 2.6 * tolerance) or "")


def test_the_float32_reference_is_computed_once() -> None:
    """It takes up to a second, and candidates may differ from XLA's result one after the other."""
    key = key_of(Case("tiny", 8, 30, 31, 8, 16, (3, 3), dtype="float32"))
    bench = Bench(key.problem, "cpu", threading.Event())
    program, runs = bench._check._reference_program, 0

    def counted(*operands: jax.Array) -> jax.Array:
        nonlocal runs
        runs += 1
        return program(*operands)

    bench._check._reference_program = counted
    wrong = [jnp.zeros(key.problem.out_shape, jnp.float32)]
    assert all(bench._check.why_wrong(wrong, lambda work: work()) for _ in range(3))
    assert runs == 1


@pytest.mark.parametrize("where", ["plan", "call", "run"])
def test_a_candidate_that_raises_does_not_end_the_search(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(dataclasses.replace(TINY, batch=12))
    bad = search.ranked(key)[0]
    make_plan, call = wgrad_host.FAMILY.plan, execute.call

    def raising_plan(problem: ConvWgradProblem, config: Any) -> Any:
        if where == "plan" and config == bad.config:
            raise ZeroDivisionError("scripted")
        return make_plan(problem, config)

    def raising_call(custom_call: CustomCall, problem: ConvWgradProblem, *args: jax.Array) -> jax.Array:
        if config_of(custom_call) == bad.config:
            if where == "call":
                raise ZeroDivisionError("scripted")
            if where == "run":  # a workspace that the handler refuses
                custom_call = dataclasses.replace(custom_call, workspace_bytes=custom_call.workspace_bytes - 64)
        return call(custom_call, problem, *args)

    monkeypatch.setattr(wgrad_host.FAMILY, "plan", raising_plan)
    monkeypatch.setattr(execute, "call", raising_call)
    monkeypatch.setattr(search, "FIRST_ROUND", 3)
    found = tuner.tune(key, seconds=0.05)
    (failure,) = [m for m in found.measurements if m.error]
    assert failure.candidate == bad
    assert ("ZeroDivisionError: scripted" if where != "run" else "workspace") in failure.error
    assert found.choice != bad
    assert len([m for m in found.measurements if m.us and m.candidate.family is wgrad_host.FAMILY]) >= 2


def test_a_process_ends_although_a_candidate_does_not(cache: pathlib.Path) -> None:
    """The candidate hangs in its first calls, before it is timed: XLA is chosen and stored, and the process can end."""
    script = """
import threading
import jax_splitk
from jax_splitk.tuning.choice import XLA
from tests.tuning_cache import TINY, key_of
from jax_splitk.tuning import measure, search, store, tuner
bad = search.ranked(key_of(TINY))[0]
warm = measure.Bench._warm
def hanging(self, contestant):
    if self.running[0] == bad:
        threading.Event().wait()
    return warm(self, contestant)
measure.Bench._warm = hanging
search.STUCK_SECONDS = 3
((_, entry),) = jax_splitk.tune_problems([TINY.problem()], seconds=0.05)
assert entry.choice == XLA, entry
assert [m.candidate for m in entry.measurements if m.error] == [bad]
assert store.lookup(key_of(TINY))[0].choice == XLA
print('"decided"')
"""
    ((done, log),) = finish(start(script, CACHE_DIR=str(cache)))
    assert done == "decided"
    assert "did not come back within 3 s" in log


def test_a_failed_search_leaves_the_decision_to_the_cost_model(
    tuned: list[ConvWgradProblem], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with seeded(13) as rng:
        case = random_tiny(rng)
        lhs, g, expected = operands(rng, case)

    def broken(*args: Any) -> Any:
        raise MemoryError("scripted")

    monkeypatch.setattr(search, "Bench", broken)
    np.testing.assert_array_equal(jax.jit(lambda x, y: wgrad(x, y, case))(lhs, g), expected)
    assert len(tuned) == 1
    assert "tuning failed (MemoryError: scripted); the cost model decides" in caplog.text


def test_nothing_is_decided_without_a_compiler(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all our candidates would fail, and XLA would win and stay in the cache."""
    monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
    key = key_for(TINY.problem(), DEFAULT_CUDA)
    with pytest.raises(CompilerUnavailable, match="no compiler in this test"):
        tuner.tune(key)
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize("wanted", [1, 2, 5, 23])
def test_xla_runs_on_every_input_set_once(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several executions, each on the next sets, as the candidates, whose time is divided by the same number."""
    monkeypatch.setitem(measure.ROTATED_BYTES, "cpu", wanted * TINY.problem().bytes_moved)
    bench = Bench(TINY.problem(), "cpu", threading.Event())
    assert max(wanted, 2) <= bench.sets <= max(wanted, 2) + measure.CALLED_TOGETHER - 1
    (ours, xla), failures = bench.prepare([search.ranked(key_of(TINY))[0], XLA])
    assert not failures
    each = [list[Any](), list[Any]()]
    while len(each[0]) < bench.sets:
        for found, contestant in zip(each, (xla, ours), strict=True):
            found.extend(contestant.run())
    ran = measure.WARM_UP * min(measure.CALLED_TOGETHER, bench.sets) % bench.sets  # before
    for result, expected, inputs in zip(*each, bench._inputs[ran:] + bench._inputs[:ran], strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(result, lax_wgrad(*inputs, TINY), rtol=1e-4, atol=1e-4)


def test_a_gpu_gets_one_set_of_operands_and_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy has memory of its own, so that inputs rotate past the caches."""
    drawn = []
    draw = OPERATIONS["conv_wgrad"].random_operands
    monkeypatch.setitem(
        OPERATIONS,
        "conv_wgrad",
        dataclasses.replace(OPERATIONS["conv_wgrad"], random_operands=lambda *of: drawn.append(of) or draw(*of)),
    )
    bench = Bench(TINY.problem(), "cuda", threading.Event())
    assert len(drawn) == 1 and len(bench._inputs) == bench.sets == measure.MAX_INPUT_SETS
    first = draw(TINY.problem(), 0)
    for one in bench._inputs:
        for mine, expected in zip(one, first, strict=True):
            np.testing.assert_array_equal(mine, expected)
    buffers = {operand.unsafe_buffer_pointer() for one in bench._inputs for operand in one}
    assert len(buffers) == 2 * bench.sets


def test_operands_are_stretches_of_the_hosts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around and around. XLA would take half a second to compile a generator for each shape."""
    drawn = np.random.default_rng(SEED).permutation(251).astype(np.float32)  # whole numbers, each of them once
    monkeypatch.setattr(random_operands, "_COUNT", 251)
    monkeypatch.setattr(random_operands, "_normals", drawn.astype)
    wanted = (((3, 50), "float32"), ((70, 2), "float16"), ((0, 3), "bfloat16"), ((2, 2), "float32"))
    found = random_operands.normals(wanted, SEED)
    assert [(x.shape, x.dtype.name) for x in found] == list(wanted)
    values = np.concatenate([np.asarray(x, np.float32).ravel() for x in found])
    np.testing.assert_array_equal(np.sort(values[:251]), np.arange(251))
    np.testing.assert_array_equal(values[251:], values[:43])  # around again
    (other,) = random_operands.normals([((294,), "float32")], SEED + 1)
    assert not np.array_equal(other, values)


def test_numbers_are_normal_and_words_uniform() -> None:
    stretches = random_operands.Stretches(SEED)
    normals, words = stretches.normals((10**5,), "bfloat16").astype(np.float64), stretches.words((10**5,))
    assert abs(normals.mean()) < 0.02 and abs(normals.std() - 1) < 0.02
    assert abs(words.mean() / 2**32 - 0.5) < 0.01 and words.dtype == np.uint32


# ---- the decision ---------------------------------------------------------------------------------------------------


def contestant(name: str, *device_times: float) -> measure.Contestant:
    return measure.Contestant(Candidate(name), lambda: None, [1.0], list(device_times))


def test_a_disturbed_round_does_not_hide_a_faster_candidate() -> None:
    """The model's choice had one bad round: this is no tie, and no reason to choose XLA."""
    best, predicted = contestant("best", 65.5, 65.6, 65.7), contestant("predicted", 74.9, 90.1, 74.8)
    assert search.decide([best, predicted], contestant("xla", 72.8, 72.9, 72.7), predicted.candidate) == best.candidate


def test_on_a_busy_machine_what_is_slower_than_xla_is_not_chosen() -> None:
    """Times are from the wall clock, whose rounds differ much on a busy machine."""
    ours, xla = (
        measure.Contestant(Candidate(name), lambda: None, times)
        for name, times in (("ours", [5200.0, 2400.0, 4100.0]), ("xla", [655.0, 1300.0, 2900.0]))
    )
    assert search.decide([ours], xla, ours.candidate) == XLA
    tie = measure.Contestant(Candidate("ours"), lambda: None, [660.0, 900.0])
    assert search.decide([tie], xla, tie.candidate) == tie.candidate


def test_many_rounds_forgive_one() -> None:
    """The fastest candidate wins if it is faster than the model's choice in six of seven rounds. Two rounds that it
    loses are a tie, which the model's choice wins."""
    predicted, xla = contestant("predicted", *[103.0] * 7), contestant("xla", 500.0)
    for slow, winner in ((1, "best"), (2, "predicted")):
        best = contestant("best", *[100.0] * (7 - slow), *[110.0] * slow)
        assert search.decide([best, predicted], xla, predicted.candidate).family == winner


def test_a_tie_with_xla_is_no_reason_for_the_models_choice() -> None:
    """The model's choice stays if it is within the noise of the fastest, but not if that may lose the gain over XLA."""
    best, predicted = contestant("best", *[101.4] * 3), contestant("predicted", *[103.0] * 3)
    for xla, winner in ((103.7, best), (102.0, best), (101.0, None), (106.0, predicted)):
        last = contestant("xla", *[xla] * 3)
        assert search.decide([best, predicted], last, predicted.candidate) == (winner.candidate if winner else XLA)
