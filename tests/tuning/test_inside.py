"""When a search runs: once for a miss, in any context of JAX, and never for code that will not run on this machine."""

import pathlib
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
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import tune
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import settings
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import measure, select, store
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options
from tests.problems import seeded
from tests.tuning_cache import CPU, TINY, TUNES_THE_CPU, lax_wgrad, operands, random_tiny, wgrad

pytestmark = TUNES_THE_CPU


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
    """Two operations with the same problem, also in two programs."""
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
    """Even if the decision cannot be stored, a process measures a problem once."""
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    salt = 100 + INSIDE.index(inside) + 20 * settings.WORDS["JAX_SPLITK_CACHE_MODE"].index(mode)
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
        result = jax_splitk.tune_problems([TINY.problem()], seconds=0.1)
    finally:
        jax.config.update(name, before)
    ((key, found),) = result
    assert (cache / key.file).exists()
    assert not [m.error for m in found.measurements if m.error]


def test_results_are_not_searched_for_nan_while_they_are_timed(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To search them JAX waits for each call, so that the host would be timed."""
    found, queue = set(), measure._queue

    def watched(*args: Any) -> Any:
        found.add((jax.config.jax_debug_nans, jax.config.jax_debug_infs))
        return queue(*args)

    monkeypatch.setattr(measure, "_queue", watched)
    with jax.debug_nans(True), jax.debug_infs(True):
        jax_splitk.tune_problems([TINY.problem()], seconds=0.1)
    jax.config.update("jax_debug_nans", True)  # of all threads
    try:
        jax_splitk.tune_problems([TINY.problem()], seconds=0.1, again=True)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert found == {(False, False)}


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
    # Each device's part is lowered, and tuned, when XLA partitions the program.
    mesh = jax.make_mesh((4,), ("c",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P())
    jax.jit(run, in_shardings=sharding).lower(*shapes)
    assert tuned == []
    jax.jit(run).lower(*shapes)
    assert tuned == [case.problem()]


def test_other_platforms_are_not_tuned(tuned: list[ConvWgradProblem]) -> None:
    """The code is lowered ahead of time for a GPU that is not here."""
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
