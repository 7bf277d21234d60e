"""`TuningResult` as a value and as a context, and options for a block of code."""

import copy
import dataclasses
import logging
import pickle
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.cpu import quantized as quantized_host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options, check_options, current
from jax_splitk.tuning.result import TuningResult
from tests.problems import generator
from tests.tuning_cache import CASE, CPU, FOUR, ONE, TWO, entry_of, lowered_config, operands, product, result_of, wgrad

pytestmark = pytest.mark.usefixtures("cache")


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
    # Results that differ in one measurement are not equal.
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
    """jit uses the context as part of the key of every function."""
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


def test_a_result_for_other_circumstances_is_passed_over_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
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
    make_plan = Candidate.plan

    def planned(candidate: Candidate, problem: ConvWgradProblem) -> Any:
        plans.append(candidate.config)
        return make_plan(candidate, problem)

    monkeypatch.setattr(Candidate, "plan", planned)

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
    """Blocks of one result that overlap in two threads restore their own contexts."""
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


@pytest.mark.parametrize(("arguments", "error"), [
    ({"implementation": "nvcc"}, "implementation='nvcc'; accepted: None, 'cutlass', 'host', 'xla'"),
    ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1; accepted: None or an integer of at least 0"),
    ({"workspace_limit_bytes": True}, "workspace_limit_bytes=True; accepted"),
])  # fmt: skip
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
