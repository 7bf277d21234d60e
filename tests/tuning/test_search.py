"""The search: what it measures, what may win, when it runs, and what a hit costs."""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import host as wgrad_host
from jax_splitk.ops import tune
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import disk, execute, toolchain
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET, CustomCall
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning import entry, measure, profile, search, select, store, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import Bench, Contestant
from jax_splitk.tuning.options import Options
from tests.problems import SEED, seeded
from tests.tuning_cache import CPU, isolate, random_tiny

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these tune the CPU's family")

CASE = Case("tiny", 4, 9, 8, 6, 10, (3, 2), dtype="float32")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A cache of its own for every test."""
    return isolate(monkeypatch, tmp_path)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[ConvWgradProblem]:
    """Turns tuning on, in a small search, and collects the problems that are tuned."""
    problems: list[ConvWgradProblem] = []
    run = search.Search.run

    def counting(this: search.Search) -> Entry:
        problems.append(this.key.problem)
        return run(this)

    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    monkeypatch.setattr(search, "FIRST_ROUND", 3)
    monkeypatch.setattr(search.Search, "run", counting)
    return problems


def operands(rng: np.random.Generator, case: Case) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """(lhs, g, the weight gradient), of small integers, so that every order of summation gives the same."""
    lhs, g = (jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in (case.lhs_shape, case.g_shape))
    return lhs, g, lax_wgrad(lhs, g, case)


def lax_wgrad(lhs: jax.Array, g: jax.Array, case: Case) -> np.ndarray:
    forward = lambda w: jax.lax.conv_general_dilated(lhs, w, **case.lax_arguments())  # noqa: E731
    return np.asarray(jax.vjp(forward, jnp.zeros(case.rhs_shape, lhs.dtype))[1](g)[0])


def wgrad(lhs: jax.Array, g: jax.Array, case: Case, **options: Any) -> jax.Array:
    return jax_splitk.conv_wgrad(lhs, g, case.rhs_shape, **case.lax_arguments(), **options)


def key_of(case: Case) -> Key:
    return key_for(case.problem(), CPU)


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
        assert len(ours) >= min(search.BATCH, len(search.ranked(key)))
        assert None not in ours
        assert found.us(found.choice) > 0
        assert found.predicted == search.ranked(key)[0]
        assert {"date", "jax", "jaxlib", "platform_version", "seconds", "candidates"} == set(found.metadata)
        configs.append(select.select(key.problem, CPU, Options()).config)
    script = f"""
import json, sys
from unittest import mock
import jax
from jax import numpy as jnp
import jax_splitk
from benchmarks.cases import Case
from jax_splitk.runtime import nvrtc, toolchain
from jax_splitk.tuning import measure, search, tuner
forbidden = mock.Mock(side_effect=AssertionError("measured or compiled"))
tuner.tune = search.Search.run = measure.Bench.__init__ = forbidden
nvrtc.Nvrtc.compile = nvrtc.compile_in_worker = forbidden
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_SPLITK_AUTOTUNE": "on_miss", "JAX_SPLITK_TUNE_BUDGET_S": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lowered, choices, calls = json.loads(done.stdout)
    assert calls == 0
    assert [config for config, _, _ in lowered] == [repr(config) for config in configs]
    assert all(why.startswith("user cache: ") for _, why, _ in lowered)
    assert choices == [str(found.choice) for _, found in result]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
    ],
)
def test_every_dtype_is_tuned(dtype: str, out_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long reduction, so that XLA and ours differ in rounding as much as they do in practice."""
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
    assert failure.error.startswith("wrong result: relative error")


@pytest.mark.parametrize("where", ["plan", "call", "run"])
def test_a_candidate_that_raises_does_not_end_the_search(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(dataclasses.replace(CASE, batch=12))
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
    """It hangs in its first calls, before anything is timed: XLA is chosen and stored, and the process can go."""
    script = """
import threading
import jax_splitk
from tests.tuning.test_search import CASE, XLA, key_of
from jax_splitk.tuning import measure, search, store, tuner
bad = search.ranked(key_of(CASE))[0]
check = measure.Bench._check
def hanging(self, run):
    if self.running[0] == bad:
        threading.Event().wait()
    return check(self, run)
measure.Bench._check = hanging
tuner.STUCK_SECONDS = 5
((_, entry),) = jax_splitk.tune_problems([CASE.problem()], seconds=0.05)
assert entry.choice == XLA, entry
assert [m.candidate for m in entry.measurements if m.error] == [bad]
assert store.lookup(key_of(CASE))[0].choice == XLA
print("decided")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "decided\n"), done.stderr
    assert "did not come back within 5 s" in done.stderr


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
    """Each of our candidates would fail, XLA would win, and stay in the cache."""
    monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
    key = key_for(CASE.problem(), DEFAULT_CUDA)
    with pytest.raises(CompilerUnavailable, match="no compiler in this test"):
        tuner.tune(key)
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize("wanted", [1, 2, 5, 23])
def test_xla_runs_on_every_input_set_once(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although in several calls: as often as the candidates, whose time is divided by the same number."""
    monkeypatch.setitem(measure.ROTATED_BYTES, "cpu", wanted * CASE.problem().bytes_moved)
    bench = Bench(CASE.problem(), "cpu")
    assert max(wanted, 2) <= bench.sets <= max(wanted, 2) + measure.XLA_INPUT_SETS - 1
    (ours, xla), failures = bench.prepare([search.ranked(key_of(CASE))[0], XLA])
    assert not failures
    got = [np.asarray(result) for result in xla.run()]
    assert len(got) == bench.sets
    for result, expected, operands in zip(got, ours.run(), bench._inputs, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(result, lax_wgrad(*operands, CASE), rtol=1e-4, atol=1e-4)


def test_the_budget_is_kept_on_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(Case("tiny", 12, 30, 31, 8, 16, (3, 3), dtype="float32"))
    rounds = []
    real = Bench._round

    def slow(self: Bench, contestant: Contestant) -> float:
        rounds.append(contestant.candidate)
        time.sleep(0.02)
        return real(self, contestant)

    monkeypatch.setattr(search, "FIRST_ROUND", 6)
    monkeypatch.setattr(Bench, "_round", slow)
    found = tuner.tune(key, seconds=1e-3)
    # Nothing was refined; at most one round of each, and the finalists' half second.
    assert found.metadata["candidates"] <= 6
    assert rounds[: len(set(rounds))] == list(dict.fromkeys(rounds))
    assert len(rounds) <= 7 + 0.5 / 0.02 + 5


# ---- inside traces -------------------------------------------------------------------------------------------------


def conv(lhs: jax.Array, w: jax.Array, case: Case) -> jax.Array:
    return jax_splitk.conv_general_dilated(lhs, w, **case.lax_arguments())


def _jit(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    return jax.jit(lambda x, y: wgrad(x, y, case))(lhs, g), lax_wgrad(lhs, g, case)


def _eager(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    return wgrad(lhs, g, case), lax_wgrad(lhs, g, case)


def _grad(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    w = jnp.ones(case.rhs_shape)
    return jax.jit(jax.grad(lambda w: jnp.sum(conv(lhs, w, case) * g)))(w), lax_wgrad(lhs, g, case)


def _checkpoint(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    w = jnp.ones(case.rhs_shape)
    return jax.grad(jax.checkpoint(lambda w: jnp.sum(conv(lhs, w, case) * g)))(w), lax_wgrad(lhs, g, case)


def _vmap(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    gs = jnp.stack([g, 2 * g, -g])
    out = jax.jit(jax.vmap(lambda y: wgrad(lhs, y, case)))(gs)
    return out, np.stack([lax_wgrad(lhs, y, case) for y in gs])


def _scan(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    step = lambda w, scale: (w + wgrad(lhs, scale * g, case), None)  # noqa: E731
    out = jax.lax.scan(step, jnp.zeros(case.rhs_shape), jnp.array([1.0, 2.0, -4.0]))[0]
    return out, -lax_wgrad(lhs, g, case)


def _cond(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    out = jax.jit(lambda p: jax.lax.cond(p, lambda: wgrad(lhs, g, case), lambda: wgrad(lhs, 2 * g, case)))(True)
    return out, lax_wgrad(lhs, g, case)


def _shard_map(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    assert jax.device_count() >= 4
    mesh = jax.make_mesh((4,), ("batch",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(
        lambda x, y: jax.lax.psum(wgrad(x, y, case), "batch"),
        mesh=mesh,
        in_specs=(P("batch"), P("batch")),
        out_specs=P(),
    )
    lhs4, g4 = jnp.concatenate([lhs] * 4), jnp.concatenate([g, 2 * g, -g, g])
    return jax.jit(each)(lhs4, g4), 3 * lax_wgrad(lhs, g, case)


def _twice(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    """Two operations of one problem, in two programs as well."""
    out = jax.jit(lambda x, y: wgrad(x, y, case) + wgrad(x + 1, y, case) - wgrad(x + 1, y, case))(lhs, g)
    again = jax.jit(lambda x, y: 2 * wgrad(x, y, case))(lhs, g)
    return again - out, lax_wgrad(lhs, g, case)


def _other_device(lhs: jax.Array, g: jax.Array, case: Case) -> tuple[Any, Any]:
    lhs, g = (jax.device_put(x, jax.devices()[3]) for x in (lhs, g))
    out = jax.jit(lambda x, y: wgrad(x, y, case))(lhs, g)
    assert out.devices() == {jax.devices()[3]}
    return out, lax_wgrad(lhs, g, case)


INSIDE = (_jit, _eager, _grad, _checkpoint, _vmap, _scan, _cond, _shard_map, _twice, _other_device)


@pytest.mark.parametrize(
    ("inside", "mode"),
    [*((inside, "update") for inside in INSIDE), (_twice, "read"), (_cond, "read"), (_twice, "off")],
    ids=lambda value: value if isinstance(value, str) else value.__name__[1:],
)
def test_a_miss_is_measured_once_inside(
    inside: Callable[..., tuple[Any, Any]], mode: str, tuned: list[ConvWgradProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the decision cannot be stored: a problem is measured once by a process in any case."""
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    salt = 100 + INSIDE.index(inside) + 20 * disk.MODES.index(mode)
    with seeded(salt) as rng:
        case = random_tiny(rng)
        lhs, g, _ = operands(rng, case)
        out, expected = inside(lhs, g, case)
        np.testing.assert_array_equal(out, expected)
    assert len(tuned) == 1
    assert tuned[0].batch == case.batch
    found = store.lookup(key_for(tuned[0], CPU))
    assert (found is not None) is (mode == "update")


@pytest.mark.parametrize(("name", "value"), [("jax_disable_jit", True), ("jax_transfer_guard", "disallow")])
def test_the_programs_configuration_does_not_reach_the_bench(name: str, value: Any, cache: pathlib.Path) -> None:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        result = jax_splitk.tune_problems([CASE.problem()], seconds=0.1)
    finally:
        jax.config.update(name, before)
    ((key, found),) = result
    assert (cache / key.file).exists()
    assert not [m.error for m in found.measurements if m.error]


def test_what_could_not_be_stored_is_explained_as_it_was_lowered(
    tuned: list[ConvWgradProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "read")
    with seeded(33) as rng:
        case = random_tiny(rng)
        lhs, g, _ = operands(rng, case)
        wgrad(lhs, g, case)
        assert tuned == [case.problem()]
        (decision,) = jax_splitk.explain(lambda lhs, g: wgrad(lhs, g, case), lhs, g).decisions
        assert decision.why.startswith("measured now")


def test_tune_finds_the_problems_of_a_train_step(tuned: list[ConvWgradProblem]) -> None:
    with seeded(14) as rng:
        case = random_tiny(rng, kernel=(3, 3), in_channels=6, out_channels=6)
        lhs, g, _ = operands(rng, case)
    weights = [jnp.ones(case.rhs_shape)] * 3

    def loss(weights: list[jax.Array]) -> jax.Array:
        x = lhs
        for w in weights:
            x = jnp.tanh(conv(x, w, case))
        return jnp.sum(x * g)

    result = jax_splitk.tune(jax.grad(loss), weights)
    assert tuned == [case.problem()]
    assert [key.problem for key, _ in result] == tuned
    step = jax.jit(jax.grad(loss))
    with result:
        ours = step(weights)
    assert len(tuned) == 1
    for one, other in zip(ours, jax.grad(loss_by_lax(loss, lhs, g, case))(weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max()))
    assert [len(jax_splitk.tune(jax.grad(loss), weights, again=again)) for again in (False, True)] == [1, 1]
    assert len(tuned) == 2


def loss_by_lax(loss: Any, lhs: jax.Array, g: jax.Array, case: Case) -> Callable[[list[jax.Array]], jax.Array]:
    def by_lax(weights: list[jax.Array]) -> jax.Array:
        x = lhs
        for w in weights:
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, **case.lax_arguments()))
        return jnp.sum(x * g)

    return by_lax


def test_what_is_never_tuned(tuned: list[ConvWgradProblem]) -> None:
    with seeded(15) as rng:
        case = random_tiny(rng)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (case.lhs_shape, case.g_shape)]
    run = lambda x, y: wgrad(x, y, case)  # noqa: E731
    jax.eval_shape(run, *shapes)
    jax_splitk.explain(run, *shapes)
    allowed = {"disabled_checks": [export.DisabledSafetyCheck.custom_call(HOST_WGRAD_TARGET)]}
    export.export(jax.jit(run), **allowed)(*shapes)
    export.export(jax.jit(run), platforms=["cpu", "tpu"], **allowed)(*shapes)
    (batch,) = export.symbolic_shape("b")
    export.export(jax.jit(run), **allowed)(*(jax.ShapeDtypeStruct((batch, *s.shape[1:]), s.dtype) for s in shapes))
    jax.jit(run).trace(*shapes).lower(lowering_platforms=("tpu",))
    jax.jit(lambda x, y: wgrad(x, y, case, implementation="xla")).lower(*shapes)
    jax.jit(lambda x, y: wgrad(x, y, case, config=wgrad_host.Config(1, 64))).lower(*shapes)
    # Automatic partitioning is XLA's.
    mesh = jax.make_mesh((4,), ("c",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P())
    jax.jit(run, in_shardings=sharding).lower(*shapes)
    assert tuned == []
    jax.jit(run).lower(*shapes)
    assert tuned == [case.problem()]


def test_other_platforms_are_not_tuned(tuned: list[ConvWgradProblem]) -> None:
    """Code for a GPU that is not here, ahead of time."""
    case = Case("aligned", 2, 9, 9, 64, 64, (3, 3), dtype="bfloat16")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (case.lhs_shape, case.g_shape)]
    with jax_splitk.options(implementation="xla"):
        jax.jit(lambda x, y: wgrad(x, y, case)).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert select.select(case.problem(), target_for("cuda"), Options(), measure=False).why.startswith(
        ("the cost model", "wgrad_im2col")
    )
    assert tuned == []


def test_tuning_is_off_on_the_cpu_unless_asked(tuned: list[ConvWgradProblem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_SPLITK_AUTOTUNE")
    with seeded(16) as rng:
        case = random_tiny(rng)
        lhs, g, expected = operands(rng, case)
    np.testing.assert_array_equal(jax.jit(lambda x, y: wgrad(x, y, case))(lhs, g), expected)
    assert tuned == []
    assert tune.tune_problems([case.problem()], seconds=0.05).entries
    assert tuned == [case.problem()]


# ---- what a hit costs ----------------------------------------------------------------------------------------------


def test_a_hit_takes_less_than_a_millisecond(cache: pathlib.Path) -> None:
    """The whole selection of a problem that the process has not seen: key, file, validation, choice."""
    cases = []
    with seeded(17) as rng:
        while len(cases) < 150:
            problem = random_tiny(rng, batch=len(cases) + 2).problem()
            key = key_for(problem, CPU)
            ranked = search.ranked(key)
            if wgrad_host.FAMILY.unmeasured_refusal(problem) is None and ranked:
                times = [Measurement(XLA, 50.0)]
                times += [Measurement(ranked[i % len(ranked)], 40.0 + i) for i in range(40)]
                assert store.save(Entry.of(key, ranked[-1], tuple(times), ranked[0], {"seconds": 1.0}))
                cases.append((problem, ranked[-1].config))
    medians = []
    for attempt in range(3):
        seconds = []
        for problem, config in cases[50 * attempt : 50 * (attempt + 1)]:
            began = time.perf_counter()
            choice = select.select(problem, CPU, Options(), measure=True)
            seconds.append(time.perf_counter() - began)
            assert choice.config == config
            assert choice.why.startswith("user cache: ")
        medians.append(statistics.median(seconds))
        if medians[-1] < 1e-3:
            break
    print(f"selection on a hit: {min(medians) * 1e6:.0f} us (seed {SEED})")
    assert min(medians) < 1e-3


# ---- device times ---------------------------------------------------------------------------------------------------


def test_only_the_measured_devices_streams_count(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def event(name: str, start: float, end: float) -> Any:
        return types.SimpleNamespace(name=name, start_ns=start, end_ns=end)

    def plane(name: str, **lines: list[Any]) -> Any:
        found = [types.SimpleNamespace(name=line, events=events) for line, events in lines.items()]
        return types.SimpleNamespace(name=name, lines=found)

    kernels = [event("wgrad", 1.0, 2.0), event("MemcpyH2D", 2.0, 3.0)]
    planes = [
        plane("/device:GPU:0", Stream1=[event("of another user", 0.0, 9.0)]),
        plane("/device:GPU:1", Stream1=kernels, Stream2=[event("reduce", 1.5, 2.5)], Steps=[event("0", 0.0, 9.0)]),
        plane("/device:GPU:11", Stream1=[event("of a third", 0.0, 9.0)]),
        plane("/host:CPU", Stream1=[event("python", 0.0, 9.0)]),
    ]
    data = types.SimpleNamespace(from_file=lambda path: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    assert profile.device_events(tmp_path, 1) == [("wgrad", 1.0, 2.0), ("reduce", 1.5, 2.5)]


def test_pauses_part_what_ran() -> None:
    a, b, c, d = ("main", 3.0, 90.0), ("reduce", 5.0, 7.0), ("main", 99.0, 100.0), ("main", 111.0, 112.0)
    assert profile.bursts([d, b, c, a], 10.0) == [[a, b, c], [d]]
    assert profile.bursts([d, b, c, a], 11.0) == [[a, b, c, d]]
    assert profile.bursts([], 1.0) == []


class FakeDevice:
    """A GPU's profile of what contestants say they ran: each of their calls takes the next of their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, float]] = []
        self.profiles = 0
        monkeypatch.setattr(profile, "trace", self.trace)
        monkeypatch.setattr(measure, "PAUSE_SECONDS", 1e-6)

    def contestant(self, name: str, us: float, pause_us: float = 0.0) -> Contestant:
        def run() -> None:
            self.ran.append((name, us))
            if pause_us:
                self.ran.append(("", pause_us))

        return Contestant(Candidate(name), run, [us])

    def trace(self, work: Callable[[], None]) -> list[profile.Event]:
        self.profiles += 1
        self.ran.clear()
        work()
        events: list[profile.Event] = []
        now, last = 0.0, ""
        for name, us in self.ran:
            now += 1e3 * us if not name else 1e6 if name != last else 0.0
            if name:
                events.append((name, now, now := now + 1e3 * us))
            last = name or last
        return events

    def bench(self) -> Bench:
        bench = Bench.__new__(Bench)
        bench.problem, bench.platform, bench.sets = CASE.problem(), "cuda", 1
        return bench


def test_one_profile_times_all_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    times = {"a": 7.0, "b": 290.0, "c": 12000.0}
    contestants = [device.contestant(name, us) for name, us in times.items()]
    assert device.bench().screen_on_device(contestants)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] for us in times.values()]
    assert device.profiles == 1
    assert device.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] * 3 for us in times.values()]
    assert device.profiles == 1 + 3
    # Short ones are called more often, none less than twice, and a profile stays readable.
    calls = [[name for name, _ in device.ran].count(name) for name in times]
    assert calls == [429, 11, 2]


def test_contestants_that_a_profile_does_not_tell_apart_have_no_device_times(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    contestants = [device.contestant("a", 7.0), device.contestant("b", 9.0, pause_us=20.0)]
    assert not device.bench().screen_on_device(contestants)
    assert not device.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[], []]
    bench = device.bench()
    bench.platform = "cpu"
    assert not bench.time_on_device(contestants[:1])


# ---- the decision ---------------------------------------------------------------------------------------------------


def contestant(name: str, *device_times: float) -> measure.Contestant:
    return measure.Contestant(Candidate(name), lambda: None, [1.0], list(device_times))


def test_a_disturbed_round_does_not_hide_a_faster_candidate() -> None:
    """The model's choice had one bad round: it is no tie, and certainly no reason to take XLA."""
    best, predicted = contestant("best", 65.5, 65.6, 65.7), contestant("predicted", 74.9, 90.1, 74.8)
    assert search.decide([best, predicted], contestant("xla", 72.8, 72.9, 72.7), predicted.candidate) is best


def test_the_models_choice_is_kept_within_the_noise_unless_xla_beats_it() -> None:
    best, predicted = contestant("best", 99.0, 99.2, 99.1), contestant("predicted", 100.0, 100.1, 100.2)
    assert search.decide([best, predicted], contestant("xla", 130.0, 130.0, 130.0), predicted.candidate) is predicted
    xla = contestant("xla", 97.0, 97.1, 97.2)
    assert search.decide([best, predicted], xla, predicted.candidate) is xla
