"""Decisions as values and contexts, and the order in which layers, modes and variables decide."""

import copy
import dataclasses
import fractions
import functools
import itertools
import json
import logging
import os
import pathlib
import pickle
import pwd
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.quantized import host as quantized_host
from jax_splitk.kernels.wgrad import host as wgrad_host
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import agreement, decide, search, select, session, store, table, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for, problem_from_dict
from jax_splitk.tuning.options import Options, check_options, current, merged
from jax_splitk.tuning.result import TuningResult
from tests.problems import generator
from tests.tuning_cache import CASE, CPU, entry_of, lowered_config, operands, put, ship, wgrad

pytestmark = pytest.mark.usefixtures("cache")


# ---- results as values and contexts --------------------------------------------------------------------------------


def product(rows: int) -> tuple[jax.Array, jax_splitk.PackedWeight]:
    """Operands of `quantized_matmul` that the host kernel takes."""
    w = jax_splitk.quantize(jnp.ones((64, 64)), "int4", group_size=64)
    return jnp.ones((rows, 64), jnp.bfloat16), jax_splitk.prepack(w)


def result_of(config: Any, case: Case = CASE) -> TuningResult:
    key = key_for(case.problem(), CPU)
    return TuningResult(((key, entry_of(key, config)),))


ONE, TWO, THREE, FOUR, FIVE, SIX = (wgrad_host.Config(s, b) for s, b in itertools.product((3, 5, 7), (64, 96)))


def test_or_has_both_and_the_right_one_where_they_meet() -> None:
    other = dataclasses.replace(CASE, batch=5)
    left = result_of(ONE) | result_of(ONE, other)
    right = result_of(TWO)
    assert (len(left), len(right), len(left | right)) == (2, 1, 2)
    key, other_key = (key_for(case.problem(), CPU) for case in (CASE, other))
    configs = [(left | right).get(key).choice.config, (left | right).get(other_key).choice.config]
    assert configs == [TWO, ONE]
    assert (right | left).get(key).choice.config == ONE
    assert left | TuningResult() == left == TuningResult() | left
    assert left.get(key_for(CASE.problem("bfloat16"), CPU)) is None
    assert list(left) == list(left.entries)


def test_a_result_can_be_copied_and_sent() -> None:
    held = result_of(ONE) | result_of(TWO, dataclasses.replace(CASE, batch=5))
    read = TuningResult.loads(held.dumps())
    for result in (TuningResult(), held, read):
        with result:
            again = [pickle.loads(pickle.dumps(result)), copy.deepcopy(result), copy.copy(result)]
        for other in again:
            assert (other, hash(other), other.dumps()) == (result, hash(result), result.dumps())
            assert other.entries == result.entries
    with pickle.loads(pickle.dumps(read)) as sent:
        assert current().tuning is sent
        assert lowered_config(wgrad, *operands(generator(6))[:2]) == ONE
    assert held != result_of(ONE)
    assert held != held.entries
    # What differs in a measurement alone differs.
    ((key, entry),) = result_of(ONE)
    slower = Entry.of(key, entry.choice, (*entry.measurements, Measurement(XLA, 1e6)))
    assert TuningResult(((key, slower),)) != result_of(ONE)


def test_a_block_that_was_not_entered_does_not_end() -> None:
    result = result_of(ONE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a thread that has not entered it"):
            result.__exit__(None, None, None)
        with result, result:
            pass


def test_calls_inside_a_block_do_not_compare_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is part of jit's key, of every function."""
    text = result_of(ONE).dumps()
    add = jax.jit(lambda x: x + 1)
    looked = []
    same, dumped = Entry.__eq__, Entry.dumps
    monkeypatch.setattr(Entry, "__eq__", lambda a, b: looked.append("==") or same(a, b))
    monkeypatch.setattr(Entry, "dumps", lambda entry: looked.append("dumps") or dumped(entry))
    first, second = TuningResult.loads(text), TuningResult.loads(text)
    for _ in range(20):
        with first:
            add(1)
        with second:
            add(1)
    assert looked.count("==") == 0
    assert looked.count("dumps") <= 2


def test_a_result_rules_inside_its_block() -> None:
    lhs, g, expected = operands(generator(6))
    predicted = lowered_config(wgrad, lhs, g)
    assert predicted not in (ONE, TWO, None)
    outer, inner = result_of(ONE), result_of(TWO)
    with outer as entered:
        assert entered is outer
        assert lowered_config(wgrad, lhs, g) == ONE
        with inner:
            assert lowered_config(wgrad, lhs, g) == TWO
            with outer, outer:
                assert lowered_config(wgrad, lhs, g) == ONE
            assert lowered_config(wgrad, lhs, g) == TWO
            np.testing.assert_array_equal(wgrad(lhs, g), expected)
            with TuningResult():  # an inner block replaces the outer one
                assert lowered_config(wgrad, lhs, g) == predicted
        assert lowered_config(wgrad, lhs, g) == ONE
        np.testing.assert_array_equal(wgrad(lhs, g), expected)
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert current().tuning == outer
    assert lowered_config(wgrad, lhs, g) == predicted
    assert current() == Options()


def test_a_result_for_other_circumstances_is_passed_over_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, _ = operands(generator(18))
    key = key_for(CASE.problem(), CPU)
    elsewhere = dataclasses.replace(key, environment=dataclasses.replace(key.environment, device_kind="z80", cores=1))
    predicted = lowered_config(wgrad, lhs, g)
    with TuningResult(((elsewhere, entry_of(elsewhere, ONE)),)):
        assert [lowered_config(wgrad, lhs, g) for _ in range(2)] == [predicted] * 2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    said = f"{key.problem}: the TuningResult in force is passed over: it decides for z80"
    assert record.getMessage().startswith(said)
    assert f"and this is {CPU.device_kind} (cpu, {CPU.cores} cores" in record.getMessage()
    caplog.clear()
    with result_of(ONE), result_of(ONE, dataclasses.replace(CASE, batch=5)):  # without a word of this problem
        lowered_config(wgrad, lhs, g)
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []


def test_a_result_reaches_the_gradient_of_a_convolution() -> None:
    lhs, g, expected = operands(generator(7))

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jax_splitk.conv_general_dilated(lhs, w, **CASE.lax_arguments()) * g)

    w = jnp.zeros(CASE.rhs_shape, lhs.dtype)
    with result_of(FOUR):
        assert lowered_config(jax.grad(loss), w) == FOUR
        np.testing.assert_array_equal(jax.grad(loss)(w), expected)
    assert lowered_config(jax.grad(loss), w) != FOUR


def test_jit_traces_again_where_the_context_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, expected = operands(generator(8))
    traces, plans = [], []
    make_plan = wgrad_host.FAMILY.plan

    def planned(problem: ConvWgradProblem, config: Any) -> Any:
        plans.append(config)
        return make_plan(problem, config)

    monkeypatch.setattr(wgrad_host.FAMILY, "plan", planned)

    @jax.jit
    def run(lhs: jax.Array, g: jax.Array) -> jax.Array:
        traces.append(current())
        return wgrad(lhs, g)

    def check(count: int, config: wgrad_host.Config | None) -> None:
        plans.clear()
        np.testing.assert_array_equal(run(lhs, g), expected)
        assert len(traces) == count
        assert plans == ([] if config is None else [config])

    one, two = result_of(ONE), result_of(TWO)
    predicted = lowered_config(wgrad, lhs, g)
    assert predicted is not None
    check(1, predicted)
    check(1, None)
    with one:
        check(2, ONE)
        check(2, None)
        with two:
            check(3, TWO)
        check(3, None)
    check(3, None)
    with TuningResult.loads(two.dumps()):  # equal to one that has been
        check(3, None)
    with jax_splitk.options(workspace_limit_bytes=10**6):
        check(4, predicted)
        with one:
            check(5, ONE)
    with jax_splitk.options(implementation="xla"):
        plans.clear()
        np.testing.assert_array_equal(run(lhs, g), expected)
        assert (len(traces), plans) == (6, [])


def test_one_result_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one result that overlap in two threads end where they began."""
    result = result_of(ONE)
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def first() -> None:
        with result:
            first_in.set()
            assert second_in.wait(10)
        seen["first"].append(current())
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with jax_splitk.options(implementation="xla"):
            with result:
                second_in.set()
                assert first_out.wait(10)
                seen["second"].append(current())
            seen["second"].append(current())

    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert seen == {
        "first": [Options()],
        "second": [Options(implementation="xla", tuning=result), Options(implementation="xla")],
    }


def test_options_hold_inside_their_block() -> None:
    lhs, g, expected = operands(generator(9))
    predicted = lowered_config(wgrad, lhs, g)
    with jax_splitk.options(implementation="xla"):
        assert lowered_config(wgrad, lhs, g) is None
        np.testing.assert_array_equal(wgrad(lhs, g), expected)
        assert lowered_config(lambda x, y: wgrad(x, y, implementation="host"), lhs, g) == predicted
        with jax_splitk.options(implementation="host", workspace_limit_bytes=123_456):
            assert current() == Options(None, "host", 123_456)
            with result_of(ONE):
                assert lowered_config(wgrad, lhs, g) == ONE
                with jax_splitk.options(implementation="xla"):
                    assert lowered_config(wgrad, lhs, g) is None
        assert current() == Options(None, "xla")
    assert current() == Options()
    with jax_splitk.options(workspace_limit_bytes=0):
        assert lowered_config(wgrad, lhs, g) is None
        assert lowered_config(lambda x, y: wgrad(x, y, workspace_limit_bytes=2**28), lhs, g) == predicted


@pytest.mark.parametrize("outer", [None, 5, 7])
@pytest.mark.parametrize("call", [None, 0, 6])
def test_a_calls_limit_comes_before_its_blocks(outer: int | None, call: int | None) -> None:
    with jax_splitk.options(workspace_limit_bytes=outer):
        limit = merged(Options(workspace_limit_bytes=call)).workspace_limit
    assert limit == (call if call is not None else outer if outer is not None else 256 * 2**20)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"implementation": "nvcc"}, "implementation='nvcc'; accepted: None, 'cutlass', 'host', 'xla'"),
        ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1; accepted: None or an integer of at least 0"),
        ({"workspace_limit_bytes": True}, "workspace_limit_bytes=True; accepted"),
    ],
)
def test_options_are_checked_on_entry(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(error)), jax_splitk.options(**arguments):
        pytest.fail("the block was entered")
    assert current() == Options()
    with pytest.raises((ValueError, TypeError), match=re.escape(error)):
        check_options("conv_wgrad", Options(**arguments))


@pytest.mark.parametrize("splits", ["a", 2.5, 2.0, True, None])
def test_a_config_of_wrong_types_is_refused_on_entry(splits: Any) -> None:
    lhs, g, _ = operands(generator(18))
    error = re.escape(f"has splits={splits!r} of type {type(splits).__name__}; accepted: int")
    with pytest.raises(TypeError, match=error):
        wgrad(lhs, g, config=wgrad_host.Config(splits, 64))
    with pytest.raises(TypeError, match=error):
        jax_splitk.conv_general_dilated(
            lhs, jnp.zeros(CASE.rhs_shape), **CASE.lax_arguments(), config=wgrad_host.Config(splits, 64)
        )
    x, w = product(2)
    with pytest.raises(TypeError, match=error):
        jax_splitk.quantized_matmul(x, w, config=quantized_host.Config(splits, 24))


# ---- layers and modes ----------------------------------------------------------------------------------------------


def test_precedence(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """config argument, TuningResult, user's cache, read-only layers in order, shipped table, cost model."""
    lhs, g, expected = operands(generator(10))
    problem = CASE.problem()
    key = key_for(problem, CPU)
    near, far = tmp_path / "near", tmp_path / "far"
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{near}{os.pathsep}{os.pathsep}{far}{os.pathsep}")
    layers = [(cache, TWO), (near, THREE), (far, FOUR)]
    for folder, config in layers:
        put(folder, key, entry_of(key, config).dumps())
    shipped = ship(key, Candidate(wgrad_host.FAMILY, FIVE))
    folders = [("user cache", cache), ("read-only cache", near), ("read-only cache", far)]
    assert store.layers() == [*folders, ("shipped table", table.FOLDER)]

    def found(**options: Any) -> tuple[Any, str]:
        config = lowered_config(lambda x, y: wgrad(x, y, **options), lhs, g)
        choice = select.select(problem, CPU, dataclasses.replace(current(), **options))
        assert choice.config == config
        np.testing.assert_array_equal(wgrad(lhs, g, **options), expected)
        return config, choice.why

    with result_of(ONE):
        assert found(config=SIX) == (SIX, "the config was given explicitly")
        assert found() == (ONE, "the TuningResult in force")
    assert found(config=SIX) == (SIX, "the config was given explicitly")
    for (folder, config), (name, _) in zip(layers, folders, strict=True):
        assert found() == (config, name)
        # Without a time for the host family the decision stands; XLA's would not do for an explicit "host".
        assert found(implementation="host") == (config, name)
        (folder / key.file).unlink()
    assert found() == found(implementation="host") == (FIVE, "shipped table: 5.0 us, XLA 9.0 us")
    shipped.unlink()
    monkeypatch.setattr(session, "_session", session.Session())  # a process reads a table once
    config, why = found()
    assert config not in (ONE, TWO, THREE, FOUR, FIVE, SIX)
    assert why.startswith("the cost model's best of ")


def test_a_damaged_layer_is_passed_over(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    key = key_for(CASE.problem(), CPU)
    put(cache, key, entry_of(key, TWO).dumps()[:-20])
    ship(key, Candidate(wgrad_host.FAMILY, FIVE))
    assert select.select(CASE.problem(), CPU, Options()).config == FIVE


def test_an_entry_where_xla_won(cache: pathlib.Path) -> None:
    lhs, g, expected = operands(generator(11))
    key = key_for(CASE.problem(), CPU)
    times = (
        Measurement(XLA, 1.0),
        *(Measurement(Candidate(wgrad_host.FAMILY, c), us) for c, us in ((ONE, 3.0), (TWO, 2.0))),
    )
    assert store.save(Entry.of(key, XLA, times, None, {}))
    assert lowered_config(wgrad, lhs, g) is None
    assert select.select(CASE.problem(), CPU, Options()).why == "user cache: XLA 1.0 us, ours 2.0 us"
    np.testing.assert_array_equal(wgrad(lhs, g), expected)
    choice = select.select(CASE.problem(), CPU, Options(implementation="host"))
    assert (choice.config, choice.why) == (TWO, "user cache: 2.0 us, XLA 1.0 us")


@pytest.mark.parametrize("mode", disk.MODES)
def test_modes(mode: str, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    lhs, g, _ = operands(generator(12))
    key = key_for(CASE.problem(), CPU)
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    assert disk.mode() == mode
    if mode == "frozen":
        told = r"no entry, and JAX_SPLITK_CACHE_MODE=frozen; .*python -m jax_"
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            lowered_config(wgrad, lhs, g)
        with pytest.raises(jax_splitk.FrozenCacheMiss):  # also where nothing could be measured
            export.export(jax.jit(wgrad))(lhs, g)
        other = dataclasses.replace(CASE, batch=31)  # which no test has compiled before
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            wgrad(*operands(generator(12), other)[:2], other)
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            jax_splitk.quantized_matmul(*product(31))
        select.select(CASE.problem(), CPU, Options())  # only looked at
        # What needs no decision is no miss.
        assert lowered_config(lambda x, y: wgrad(x, y, config=THREE), lhs, g) == THREE
        assert lowered_config(lambda x, y: wgrad(x, y, implementation="xla"), lhs, g) is None
        with result_of(FOUR):
            assert lowered_config(wgrad, lhs, g) == FOUR
    assert store.save(entry_of(key, TWO)) is (mode == "update")
    assert list(store.files(cache)) == ([cache / key.file] if mode == "update" else [])
    put(cache, key, entry_of(key, ONE).dumps())
    assert (lowered_config(wgrad, lhs, g) == ONE) is (mode != "off")
    assert (store.lookup(key) is None) is (mode == "off")


def test_update_is_the_default_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.mode() == "update"
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "")
    assert disk.mode() == "update"


def test_a_miss_says_how_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    lhs, g, _ = operands(generator(13))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        lowered_config(wgrad, lhs, g)
    (line,) = [r.getMessage() for r in caplog.records if "not tuned" in r.getMessage()]
    found = re.search(r"python -m jax_splitk tune '(.*)'$", line)
    assert found is not None
    fields = json.loads(found[1])
    assert problem_from_dict(fields.pop("op"), fields) == CASE.problem()


WRONG = {
    "CACHE_MODE": ("readonly", ["'off'", "'read'", "'update'", "'frozen'"], disk.mode),
    "AUTOTUNE": ("always", ["'off'", "'on_miss'"], lambda: decide.autotune(CPU)),
    "TUNE_BUDGET_S": ("-3", ["seconds above 0"], tuner.budget_seconds),
    "AGREEMENT_TIMEOUT_S": ("soon", ["seconds above 0"], agreement.timeout_seconds),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_an_error_that_says_what_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, accepted, read = WRONG[name]
    read()
    values = {value}
    if name in ("TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S"):
        values |= {"0", "nan", "ten", "-inf"}
    for wrong in values:
        monkeypatch.setenv(f"JAX_SPLITK_{name}", wrong)
        with pytest.raises(ValueError, match=rf"^JAX_SPLITK_{name}='{wrong}'; accepted: ") as caught:
            read()
        assert all(word in str(caught.value) for word in accepted)


@pytest.mark.parametrize(
    "seconds", [0, -1, float("nan"), float("inf"), "10", True, np.True_, 1j, pytest.param(10**400, id="huge")]
)
def test_a_wrong_budget_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds=.*; accepted: None or a number above 0"):
        jax_splitk.tune_problems([CASE.problem()], seconds=seconds)
    with pytest.raises(ValueError, match=r"seconds=.*; accepted: None or a number above 0"):
        jax_splitk.tune(lambda: None, seconds=seconds)


@pytest.mark.parametrize("seconds", [np.float32(0.25), np.float64(0.25), fractions.Fraction(1, 4), 1, np.int32(1)])
def test_any_real_number_is_a_budget(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def tune(key: Any, limit: Any, old: Any, budget: Any) -> Entry:
        budgets.append(budget)
        return entry_of(key, ONE)

    monkeypatch.setattr(tuner, "tune", tune)
    jax_splitk.tune_problems([CASE.problem()], seconds=seconds)
    assert budgets == [float(seconds)]
    assert type(budgets[0]) is float


def test_wrong_problems_are_refused_before_anything_is_tuned(cache: pathlib.Path) -> None:
    good = CASE.problem()
    for wrong in (3, "conv_wgrad", None, {"op": "conv_wgrad"}, CASE):
        with pytest.raises(TypeError, match=r"problems\[1\]=.*; accepted: ConvWgradProblem, QuantizedMatmulProblem"):
            jax_splitk.tune_problems([good, wrong])
    wrong = dataclasses.replace(good, output_spatial=(3, 3))
    with pytest.raises(ValueError, match=r"problems\[1\]: output_spatial=\(3, 3\); the convolution gives"):
        jax_splitk.tune_problems([good, wrong])
    assert not cache.exists()


@pytest.mark.parametrize("mode", disk.MODES)
def test_tune_says_what_it_did_not_store(
    mode: str, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    monkeypatch.setattr(search, "FIRST_ROUND", 2)
    ((key, entry),) = jax_splitk.tune_problems([CASE.problem()], seconds=0.01)
    assert entry.measurements
    assert list(store.files(cache)) == ([cache / key.file] if mode == "update" else [])
    said = [r.getMessage() for r in caplog.records if "measured, but not stored" in r.getMessage()]
    assert len(said) == (mode != "update")
    assert all(f"JAX_SPLITK_CACHE_MODE={mode}" in line for line in said)


@pytest.mark.parametrize("name", ["CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S"])
def test_a_wrong_variable_is_an_error_of_the_users_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, _ = operands(generator(14))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv(f"JAX_SPLITK_{name}", WRONG[name][0])
    with pytest.raises(ValueError, match=f"JAX_SPLITK_{name}="):
        lowered_config(wgrad, lhs, g)


def test_on_miss_is_the_default_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (decide.autotune(CPU), decide.autotune(DEFAULT_CUDA)) == (False, True)
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    assert decide.autotune(DEFAULT_CUDA) is False
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    assert decide.autotune(CPU) is True
    assert tuner.budget_seconds() == 10
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "2.5")
    assert tuner.budget_seconds() == 2.5


@pytest.mark.parametrize("obstacle", ["a file in its place", "a file for a folder", "a folder for the entry"])
def test_a_cache_that_cannot_be_written_is_no_error(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, expected = operands(generator(15))
    key = key_for(CASE.problem(), CPU)
    folder = tmp_path / "there"
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(folder))
    if obstacle == "a file in its place":
        folder.write_text("")
    elif obstacle == "a file for a folder":
        folder.mkdir()
        (folder / "tuning").write_text("")
    else:
        (folder / key.file).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert store.save(entry_of(key, ONE)) is False
    assert "cannot write" in caplog.text
    assert store.lookup(key) is None
    np.testing.assert_array_equal(wgrad(lhs, g), expected)


def test_without_a_home_there_is_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number that is no user's."""

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    lhs, g, expected = operands(generator(16))
    monkeypatch.delenv("JAX_SPLITK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    np.testing.assert_array_equal(jax.jit(functools.partial(wgrad)).lower(lhs, g).compile()(lhs, g), expected)


def test_a_layer_of_an_unknown_user_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, expected = operands(generator(17))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", "~no_such_user_here/cache")
    np.testing.assert_array_equal(jax.jit(functools.partial(wgrad)).lower(lhs, g).compile()(lhs, g), expected)


def test_a_layer_that_is_no_folder_is_told_once(
    monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, expected = operands(generator(19))
    typo, file, empty, good = (tmp_path / name for name in ("typo", "file", "empty", "good"))
    file.touch(), empty.mkdir(), good.mkdir()

    def told() -> list[str]:
        lines = [(r.levelno, r.getMessage()) for r in caplog.records if "CACHE_PATH" in r.getMessage()]
        assert all(level == logging.WARNING for level, _ in lines)
        return [line for _, line in lines]

    layers = map(str, (empty, typo, f"{file}/", "/dev/null", typo, good))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", os.pathsep.join(layers))
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "off")
    lowered_config(wgrad, lhs, g)
    assert told() == []  # nothing was to be read
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    wrong = [f"JAX_SPLITK_CACHE_PATH: {f} is not a folder; nothing is read from it" for f in (typo, file, "/dev/null")]
    np.testing.assert_array_equal(jax.jit(functools.partial(wgrad)).lower(lhs, g).compile()(lhs, g), expected)
    assert told() == wrong
    key = key_for(CASE.problem(), CPU)
    put(good, key, entry_of(key, THREE).dumps())
    assert lowered_config(wgrad, lhs, g) == THREE  # behind the wrong ones
    put(typo, key, entry_of(key, TWO).dumps())
    assert lowered_config(wgrad, lhs, g) == TWO  # made meanwhile
    assert told() == wrong


def test_what_comes_after_a_hit_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, _ = operands(generator(20))
    key = key_for(CASE.problem(), CPU)
    near = tmp_path / "near"
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{near}{os.pathsep}{tmp_path / 'far'}")
    put(cache, key, entry_of(key, TWO).dumps())
    assert lowered_config(wgrad, lhs, g) == TWO
    (cache / key.file).unlink()
    put(near, key, entry_of(key, THREE).dumps())
    assert lowered_config(wgrad, lhs, g) == THREE
    looked_at = [session.session().is_first("layer", str(folder)) for folder in (cache, near, tmp_path / "far")]
    assert looked_at == [False, True, True]
    assert "CACHE_PATH" not in caplog.text
