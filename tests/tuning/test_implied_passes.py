"""Forward passes and input gradients of `conv_general_dilated`, which the caller did not name: the effects of a
miss."""

import dataclasses
import logging
import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels.cpu import passes as conv_host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import HOST_CONV_TARGET
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import decide
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from tests.convolutions import PLAIN
from tests.problems import generator

pytestmark = [
    pytest.mark.usefixtures("competing"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's kernels play"),
]


CONV = dataclasses.replace(PLAIN, channels=(4, 4), padding="SAME")


def forward(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return CONV.ours(CONV.ours(lhs, rhs), rhs)


def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.square(forward(lhs, rhs)).sum()


def operands() -> tuple[jax.Array, jax.Array]:
    lhs, rhs, _ = CONV.integers(generator(31))
    return lhs, rhs


def passes(problems: list[ConvWgradProblem]) -> list[str]:
    return sorted({problem.op for problem in problems})


def test_a_model_that_is_initialised_or_evaluated_is_not_tuned(
    tuned: list[ConvWgradProblem], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jax_splitk"):
        forward(*operands())
        jax.jit(jax.vmap(forward, (0, None)))(jnp.stack([operands()[0]] * 2), operands()[1])
    assert passes(tuned) == []
    assert "not tuned; to tune it ahead of time: python -m jax_splitk tune" in caplog.text


@pytest.mark.parametrize("how", ["grad", "grad of jit", "checkpoint", "scan", "jvp", "vjp"])
def test_a_step_that_is_differentiated_is(how: str, tuned: list[ConvWgradProblem]) -> None:
    lhs, rhs = operands()
    looped = lambda lhs, rhs: jax.lax.scan(lambda x, _: (x + loss(lhs, rhs) * rhs.sum(), None), 0.0, length=2)[0]  # noqa: E731
    run = {
        "grad": lambda: jax.jit(jax.grad(loss, 1))(lhs, rhs),
        "grad of jit": lambda: jax.grad(jax.jit(loss), 1)(lhs, rhs),
        "checkpoint": lambda: jax.jit(jax.grad(jax.checkpoint(loss), 1))(lhs, rhs),
        "scan": lambda: jax.jit(jax.grad(looped, 1))(lhs, rhs),
        "jvp": lambda: jax.jvp(loss, (lhs, rhs), (lhs, rhs)),
        "vjp": lambda: jax.vjp(loss, lhs, rhs)[1](jnp.float32(1)),
    }[how]
    run()
    wanted = ["conv_fprop"] if how == "jvp" else ["conv_dgrad", "conv_fprop", "conv_wgrad"]
    assert passes(tuned) == wanted
    count = len(tuned)
    jax.clear_caches()
    jax.jit(forward)(lhs, rhs)
    assert len(tuned) == count


def test_what_is_named_and_what_tune_traces_is(tuned: list[ConvWgradProblem]) -> None:
    lhs, rhs = operands()
    assert len(jax_splitk.tune(forward, lhs, rhs, seconds=0.05)) == 1
    assert passes(tuned) == ["conv_fprop"]
    tuned.clear()
    jax.jit(lambda lhs, rhs: jax_splitk.conv_fprop(lhs[1:], rhs, **CONV.arguments))(lhs, rhs)
    assert passes(tuned) == ["conv_fprop"]


def test_frozen_caches_without_them_leave_them_to_xla_with_a_warning(
    cache: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that was made of weight gradients alone goes on to serve."""
    lhs, rhs = operands()
    step = jax.grad(loss, 1)
    wgrads = [d.problem for d in jax_splitk.explain(step, lhs, rhs).decisions if d.problem.op == "conv_wgrad"]
    jax_splitk.tune_problems(wgrads, seconds=0.05)
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")
    for module in (decide, lowering):
        monkeypatch.setattr(module, "would_serve", lambda problem, target: True)  # as on an H200
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        text = jax.jit(step).lower(lhs, rhs).as_text()
    assert "stablehlo.convolution" in text
    assert HOST_CONV_TARGET not in text
    (said,) = (record.getMessage() for record in caplog.records)
    assert "XLA where a kernel would serve: no entry, and JAX_SPLITK_CACHE_MODE=frozen" in said
    with pytest.raises(jax_splitk.FrozenCacheMiss, match=r"conv_fprop.*no entry, and JAX_SPLITK_CACHE_MODE=frozen; to"):
        jax.jit(lambda lhs, rhs: jax_splitk.conv_fprop(lhs, rhs, **CONV.arguments))(lhs, rhs)


def test_what_xla_is_known_to_compute_as_fast_is_not_measured_unless_it_is_named(
    tuned: list[ConvWgradProblem], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgrad_host.WgradHost, "why_not_tuned", lambda self, problem: "XLA is as fast here")
    lhs, rhs = operands()
    step = jax.grad(loss, 1)
    with caplog.at_level(logging.INFO, "jax_splitk"):
        jax.jit(step)(lhs, rhs)
    assert passes(tuned) == ["conv_dgrad", "conv_fprop"]
    assert (
        "conv_wgrad float32->float32 lhs 4x9x8x4 g 4x9x8x4 kernel 3x2 stride 1x1: not tuned; XLA is as" in caplog.text
    )
    wgrads = [d.problem for d in jax_splitk.explain(step, lhs, rhs).decisions if d.problem.op == "conv_wgrad"]
    assert len(wgrads) == 1
    assert {key.problem.op for key, _ in jax_splitk.tune(step, lhs, rhs)} == {"conv_dgrad", "conv_fprop"}
    assert len(jax_splitk.tune_problems(wgrads)) == 1


# ---- several devices -----------------------------------------------------------------------------------------------


def sharded() -> tuple[jax.Array, jax.Array]:
    """The batch of 4 over 4 devices."""
    lhs, rhs = operands()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.device_put(lhs, NamedSharding(mesh, P("data"))), jax.device_put(rhs, NamedSharding(mesh, P()))


def test_tune_measures_a_devices_part_of_every_pass(tuned: list[ConvWgradProblem]) -> None:
    lhs, rhs = sharded()
    found = jax_splitk.tune(jax.grad(loss, 1), lhs, rhs, seconds=0.05)
    assert len(found) == 3
    assert passes(tuned) == ["conv_dgrad", "conv_fprop", "conv_wgrad"]
    assert {problem.batch for problem in tuned} == {1}


@pytest.mark.parametrize("ours", ["the whole", "a device's part", "neither"])
def test_a_pass_is_divided_where_a_kernel_is_chosen_for_the_whole_or_a_part(ours: str) -> None:
    lhs, rhs = sharded()
    run = jax.jit(CONV.ours)
    (whole,) = (d.problem for d in jax_splitk.explain(CONV.ours, *operands()).decisions)
    part = dataclasses.replace(whole, batch=1)
    kernel = Candidate(conv_host.FPROP, conv_host.Config(1, 64))
    chosen = {whole: kernel if ours == "the whole" else XLA, part: kernel if ours == "a device's part" else XLA}
    keys = {key_for(problem, target_for("cpu")): candidate for problem, candidate in chosen.items()}
    with jax_splitk.TuningResult(tuple((key, Entry.of(key, c, [Measurement(c, 5.0)])) for key, c in keys.items())):
        lowered = run.lower(lhs, rhs)
        assert ("CustomSPMDPartitioning" in lowered.as_text()) is (ours != "neither")
        code = lowered.compile().as_text() or ""
    assert (HOST_CONV_TARGET in code) is (ours == "a device's part")
    np.testing.assert_array_equal(run(lhs, rhs), CONV.lax(*operands()))
