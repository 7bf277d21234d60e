"""Automatic partitioning on simulated devices: what each device computes, what they exchange, and equal results."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import JoinedWeight, prepack, quantize, quantized_matmul, shardings, unpack
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.quantized import PackedWeight
from jax_splitk.runtime import compiler, toolchain
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET, TARGETS
from jax_splitk.tuning import certainty, watch
from tests.convolutions import Conv
from tests.exhaustive import crossed
from tests.problems import generator, on_device

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices"),
]

AXES = {"data": 2, "model": 4}
KINDS = ("shardy", "explicit", "gspmd")
CONV = Conv((6, 5), (3, 2), 8, (8, 16))
NHWC = ("NHWC", "HWIO", "NHWC")
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
ONE_SUM = {"all-reduce": 1}


@contextlib.contextmanager
def partitioned(kind: str = "shardy") -> Iterator[Callable[..., Any]]:
    """How to put an array (or a tree of them) on a mesh of 2 x 4 devices: by Shardy, explicit axes or GSPMD."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(axis_type,) * 2)
    jax.config.update("jax_use_shardy_partitioner", kind != "gspmd")
    try:
        with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
            # From the host: XLA would compile a program that cuts an array of a device.
            yield lambda x, *spec: jax.device_put(jax.tree.map(np.asarray, x), NamedSharding(mesh, P(*spec)))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, dict[str, int], list[str]]:
    """(result, collectives by kind, problems of our custom calls as they were lowered)."""
    with watch.state.watching() as watched:
        function: Any = jax.jit(fn, **options)
        text = function.lower(*args).compile().as_text()
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    ours = [str(choice.problem) for choice in watched.choices if choice.implementation == "host"]
    assert bool(ours) == any(target in text for target in TARGETS)
    return function(*args), {kind: count for kind, count in counts.items() if count}, ours


def explained(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [str(d.problem) for d in jax_splitk.explain(fn, *args).decisions if d.implementation == "host"]


# ---- weight gradients ----------------------------------------------------------------------------------------------

CHANNELS_LAST = (None, None, None, "model")
GROUPED = dataclasses.replace(CONV, groups=4)
NCHW = dataclasses.replace(CONV, dimension_numbers=("NCHW", "OIHW", "NCHW"))
TALL = dataclasses.replace(CONV, spatial=(8, 5))
POINTWISE = dataclasses.replace(CONV, spatial=(8, 5), kernel=(1, 1))
BOTH = ("data", "model")


# lhs and g: batch, rows and channels of each device's part.
@pytest.mark.parametrize(("kind", "conv", "lhs_spec", "g_spec", "out_spec", "lhs", "g", "exchanged"), crossed(KINDS, [
    (CONV, ("data",), ("data",), (), "4x6x5x8", "4x6x5x16", ONE_SUM),
    (CONV, (BOTH,), (BOTH,), (), "1x6x5x8", "1x6x5x16", ONE_SUM),
    (CONV, ("data",), (), (), "4x6x5x8", "4x6x5x16", ONE_SUM),
    (CONV, CHANNELS_LAST, (), (None, None, "model"), "8x6x5x2", "8x6x5x16", {}),
    (CONV, (), CHANNELS_LAST, CHANNELS_LAST, "8x6x5x8", "8x6x5x4", {}),
    (CONV, ("data",), ("data", None, None, "model"), CHANNELS_LAST, "4x6x5x8", "4x6x5x4", ONE_SUM),
    (GROUPED, CHANNELS_LAST, CHANNELS_LAST, CHANNELS_LAST, "8x6x5x2", "8x6x5x4", {}),
    (GROUPED, ("data", None, None, "model"), ("data", None, None, "model"), CHANNELS_LAST, "4x6x5x2", "4x6x5x4",
     ONE_SUM),
    (NCHW, ("data",), ("data", "model"), ("model",), "4x6x5x8", "4x6x5x4", ONE_SUM),
    (POINTWISE, ("data", "model"), ("data", "model"), (), "4x2x5x8", "4x2x5x16", ONE_SUM),
    (dataclasses.replace(CONV, strides=(2, 1)), ("data",), ("data",), (), "4x6x5x8", "4x3x5x16", ONE_SUM),
]))  # fmt: skip
def test_weight_gradient(
    kind: str, conv: Conv, lhs_spec: Any, g_spec: Any, out_spec: Any, lhs: str, g: str, exchanged: dict[str, int]
) -> None:
    x, _, y = conv.integers(generator(70))
    with partitioned(kind) as put:
        args = (put(x, *lhs_spec), put(y, *g_spec))
        out, found, problems = compiled(conv.wgrad, *args)
        np.testing.assert_array_equal(out, conv.lax_wgrad(x, y))
        assert found == exchanged
        (problem,) = problems
        assert f"lhs {lhs} g {g} " in problem
        wanted = NamedSharding(args[0].sharding.mesh, P(*out_spec))
        assert out.sharding.is_equivalent_to(wanted, out.ndim)
        if kind != "gspmd":
            assert explained(conv.wgrad, *args) == problems


# specs: of lhs and the weight, or of g and the weight. lhs and g: each device's part.
@pytest.mark.parametrize(("kind", "op", "conv", "specs", "out_spec", "lhs", "g", "exchanged"), crossed(KINDS, [
    ("fprop", CONV, (("data",), ()), ("data",), "4x6x5x8", "4x6x5x16", {}),
    ("fprop", CONV, (("data",), CHANNELS_LAST), ("data", None, None, "model"), "4x6x5x8", "4x6x5x4", {}),
    ("fprop", GROUPED, (CHANNELS_LAST, CHANNELS_LAST), CHANNELS_LAST, "8x6x5x2", "8x6x5x4", {}),
    ("fprop", POINTWISE, (("data", "model"), ()), ("data", "model"), "4x2x5x8", "4x2x5x16", {}),
    ("dgrad", CONV, (("data",), ()), ("data",), "4x6x5x8", "4x6x5x16", {}),
    ("dgrad", CONV, (("data", None, None, "model"), CHANNELS_LAST), ("data",), "4x6x5x8", "4x6x5x4", ONE_SUM),
    ("dgrad", CONV, ((), (None, None, "model")), CHANNELS_LAST, "8x6x5x2", "8x6x5x16", {}),
    ("dgrad", dataclasses.replace(NCHW, strides=(2, 1)), (("data",), ()), ("data",), "4x6x5x8", "4x3x5x16", {}),
]))  # fmt: skip
def test_other_passes(
    kind: str, op: str, conv: Conv, specs: Any, out_spec: Any, lhs: str, g: str, exchanged: dict[str, int]
) -> None:
    x, w, y = conv.integers(generator(88))
    dgrad = lambda y, w: jax.vjp(lambda x: conv.lax(x, w), x)[1](y)[0]  # noqa: E731
    if op == "fprop":
        given, expected, arguments = x, conv.lax(x, w), conv.arguments
    else:
        given, expected, arguments = y, dgrad(y, w), conv.arguments | {"lhs_shape": conv.lhs_shape}
    run = functools.partial(getattr(jax_splitk, f"conv_{op}"), **arguments, implementation="host")
    with partitioned(kind) as put:
        args = (put(given, *specs[0]), put(w, *specs[1]))
        out, found, (problem,) = compiled(run, *args)
        np.testing.assert_array_equal(out, expected)
        assert found == exchanged
        assert f"conv_{op} float32->float32 lhs {lhs} g {g} " in problem
        assert out.sharding.is_equivalent_to(NamedSharding(args[0].sharding.mesh, P(*out_spec)), out.ndim)
        if kind != "gspmd":
            assert explained(run, *args) == [problem]


def test_forward_passes_that_are_xlas_are_partitioned_by_xla() -> None:
    """Rows of an image stay divided, which no rule of ours allows; and a step's forward pass is not looked into."""
    x, w, _ = TALL.integers(generator(89))
    with partitioned() as put:
        args = (put(x, "data", "model"), put(w))
        text = jax.jit(TALL.ours).lower(*args).as_text()
        _, found, _ = compiled(TALL.ours, *args)
    assert "CustomSPMDPartitioning" not in text
    assert "all-gather" not in found


@pytest.mark.parametrize("kind", ["shardy", "explicit"])
@pytest.mark.parametrize(("conv", "lhs_spec", "g_spec", "gathered", "exchanged"), [
    (TALL, ("data", "model"), ("data", "model"), "input_spatial0, output_spatial0", {"all-gather": 2} | ONE_SUM),
    (dataclasses.replace(GROUPED, groups=2), CHANNELS_LAST, CHANNELS_LAST, "groups", {"all-gather": 2}),
], ids=str)  # fmt: skip
def test_what_cannot_stay_divided_is_gathered_and_said(
    kind: str, conv: Conv, lhs_spec: Any, g_spec: Any, gathered: str, exchanged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, _, y = conv.integers(generator(71))
    with partitioned(kind) as put, caplog.at_level(logging.WARNING, "jax_splitk"):
        out, found, problems = compiled(conv.wgrad, put(x, *lhs_spec), put(y, *g_spec))
    np.testing.assert_array_equal(out, conv.lax_wgrad(x, y))
    assert (found, len(problems)) == (exchanged, 1)
    (line,) = [record.message for record in caplog.records if "is gathered" in record.message]
    assert f"sharded along {gathered}" in line


def test_a_sharding_by_a_part_of_an_axis_is_gathered() -> None:
    """A reshape splits a mesh axis of 4 in 2 x 2, which no PartitionSpec says."""
    x, _, y = CONV.integers(generator(72))
    with partitioned() as put:
        held = put(x.reshape(2, 4, *x.shape[1:]).swapaxes(0, 1).reshape(8, *x.shape[1:]), "model")

        def split(x: jax.Array, y: jax.Array) -> jax.Array:
            return CONV.wgrad(x.reshape(4, 2, *x.shape[1:]).swapaxes(0, 1).reshape(8, *x.shape[1:]), y)

        out, _, problems = compiled(split, held, put(y))
    np.testing.assert_array_equal(out, CONV.lax_wgrad(x, y))
    assert len(problems) == 1


def test_the_result_may_be_sharded_like_the_batch() -> None:
    """Fully sharded data parallelism: the gradient is summed, and each device keeps its part."""
    x, _, y = CONV.integers(generator(73))
    with partitioned() as put:
        lhs, g = put(x, "data"), put(y, "data")
        wanted = NamedSharding(lhs.sharding.mesh, P(None, None, None, "data"))
        out, found, (problem,) = compiled(CONV.wgrad, lhs, g, out_shardings=wanted)
    np.testing.assert_array_equal(out, CONV.lax_wgrad(x, y))
    assert out.sharding == wanted
    assert set(found) <= {"all-reduce", "reduce-scatter"}
    assert "lhs 4x6x5x8" in problem


@pytest.mark.parametrize("kind", KINDS)
def test_batch_groups_are_xlas(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    conv = dataclasses.replace(CONV, batch_groups=2)
    x, _, y = conv.integers(generator(74))
    with partitioned(kind) as put, caplog.at_level(logging.INFO, "jax_splitk"):
        out, _, problems = compiled(conv.wgrad, put(x), put(y, None, None, None, "model"))
    np.testing.assert_array_equal(out, conv.lax_wgrad(x, y))
    assert problems == []
    assert any("automatic partitioning over several devices: batch_group_count above 1" in m for m in caplog.messages)


def test_an_explicit_choice_is_for_each_device() -> None:
    x, _, y = CONV.integers(generator(75))
    config = wgrad_host.Config(2, 64)
    with partitioned() as put:
        args = (put(x, "data"), put(y, "data"))
        for options in ({"implementation": "host"}, {"config": config}):
            out, _, problems = compiled(functools.partial(CONV.wgrad, **options), *args)
            assert len(problems) == 1
            np.testing.assert_array_equal(out, CONV.lax_wgrad(x, y))
        _, found, problems = compiled(functools.partial(CONV.wgrad, implementation="xla"), *args)
        assert (found, problems) == (ONE_SUM, [])


def step(layer: Callable[..., jax.Array], ws: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """A training step of four convolutions, two of which are in a scan, one of them rematerialized."""

    def loss(ws: list[jax.Array]) -> jax.Array:
        y = jax.nn.relu(layer(x, ws[0]))
        y = jax.checkpoint(lambda y, w: jax.nn.relu(layer(y, w)))(y, ws[1])
        y = lax.scan(lambda y, w: (jax.nn.relu(layer(y, w)), None), y, ws[2])[0]
        return jnp.square(y).mean()

    value, gradients = jax.value_and_grad(loss)(ws)
    return [w - 0.1 * d for w, d in zip(ws, gradients, strict=True)], value


def weights() -> list[jax.Array]:
    rng = generator(76)
    return [on_device(rng.standard_normal(shape), jnp.float32) / 8 for shape in [(3, 2, 8, 8)] * 2 + [(2, 3, 2, 8, 8)]]


@pytest.mark.parametrize(("kind", "x_spec", "w_specs", "local"), crossed(KINDS, [
    (("data",), [(), (), ()], ["lhs 4x6x5x8 g 4x6x5x8"]),
    ((BOTH,), [(), (), ()], ["lhs 1x6x5x8 g 1x6x5x8"]),
    # Column parallel, then row parallel, then replicated.
    (("data",), [CHANNELS_LAST, (None, None, "model"), ()],
     ["lhs 4x6x5x8 g 4x6x5x2", "lhs 4x6x5x2 g 4x6x5x8", "lhs 4x6x5x8 g 4x6x5x8"]),
]))  # fmt: skip
def test_training_steps_equal_those_of_one_device(kind: str, x_spec: Any, w_specs: Any, local: list[str]) -> None:
    if kind == "explicit" and any(w_specs):
        pytest.skip("explicit axes want an out_sharding of each convolution: the next test")
    conv = Conv((6, 5), (3, 2), 8, (8, 8))
    ws, x = weights(), on_device(generator(77).standard_normal(conv.lhs_shape), jnp.float32)
    expected, value = jax.jit(functools.partial(step, conv.lax))(ws, x)
    with partitioned(kind) as put:
        args = ([put(w, *spec) for w, spec in zip(ws, w_specs, strict=True)], put(x, *x_spec))
        run = functools.partial(step, conv.ours)
        (updated, found_value), found, problems = compiled(run, *args)
        for one, other in zip([*updated, found_value], [*expected, value], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        if kind == "gspmd" and any(w_specs):
            return  # it shards the replicated weight's activations too
        assert {re.search("lhs .* (?=kernel)", problem)[0].strip() for problem in problems} == set(local)
        assert "all-gather" not in found
        assert found["all-reduce"] >= 1
        if kind != "gspmd":
            assert sorted(set(explained(run, *args))) == sorted(problems)


def test_tensor_parallel_layers_with_explicit_axes() -> None:
    """Column parallel, then row parallel."""
    conv = Conv((6, 5), (3, 2), 8, (8, 8))
    (first, second, _), x = weights(), on_device(generator(77).standard_normal(conv.lhs_shape), jnp.float32)
    wide, narrow = P("data", None, None, "model"), P("data")

    def loss(layer: Callable[..., jax.Array], specs: Any, ws: Any, x: jax.Array) -> jax.Array:
        for w, spec in zip(ws, specs, strict=True):
            x = jax.nn.relu(layer(x, w, out_sharding=spec))
        return jnp.square(x).mean()

    expected = jax.grad(functools.partial(loss, conv.lax, (None, None)))((first, second), x)
    with partitioned("explicit") as put:
        args = ((put(first, *CHANNELS_LAST), put(second, None, None, "model")), put(x, "data"))
        gradient = jax.grad(functools.partial(loss, conv.ours, (wide, narrow)))
        found, exchanged, problems = compiled(gradient, *args)
        assert explained(gradient, *args) == problems
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert {problem.split(" kernel")[0][-21:] for problem in problems} == {
        "lhs 4x6x5x2 g 4x6x5x8",
        "lhs 4x6x5x8 g 4x6x5x2",
    }
    assert set(exchanged) == {"all-reduce"}


def test_the_code_of_each_equation_is_told_apart_by_jaxs_compilation_cache() -> None:
    """This holds even if the cache is told to leave out the callbacks' addresses."""
    x, _, y = CONV.integers(generator(87))

    def label(**changes: Any) -> str:
        conv = dataclasses.replace(CONV, **changes)
        with partitioned() as put:
            text = jax.jit(functools.partial(conv.wgrad)).lower(put(x, "data"), put(y, "data")).as_text()
        return re.findall(r'frontend_attributes = {jax_splitk = "(\w+)"}', text)[0]

    pads = {"padding": ((0, 2), (0, 1))}
    assert label() == label() != label(**pads)
    with jax_splitk.options(workspace_limit_bytes=2**20):
        limited = label()
    assert limited != label()


def test_a_vmapped_model_is_divided_like_a_batch() -> None:
    x, rhs, _ = CONV.integers(generator(78))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda image: CONV.ours(image[None], w)[0])(x) ** 2)

    with partitioned() as put:
        args = (put(rhs), put(x, "data"))
        out, found, (problem,) = compiled(jax.grad(loss), *args)
    np.testing.assert_array_equal(out, jax.grad(lambda w: jnp.sum(CONV.lax(x, w) ** 2))(rhs))
    assert "lhs 4x6x5x8 g 4x6x5x16" in problem
    assert found == ONE_SUM


# ---- where the shardings come from, and where rules do not apply ---------------------------------------------------


def test_shardings_of_jit_and_of_constraints() -> None:
    x, _, y = CONV.integers(generator(79))
    with partitioned() as put:
        split = put(x, "data").sharding
    whole = NamedSharding(split.mesh, P())

    def constrained(x: jax.Array, y: jax.Array) -> jax.Array:
        return CONV.wgrad(*(lax.with_sharding_constraint(array, split) for array in (x, y)))

    for fn, options in ((CONV.wgrad, {"in_shardings": (split, split)}), (constrained, {})):
        out, found, (problem,) = compiled(fn, x, y, **options)
        np.testing.assert_array_equal(out, CONV.lax_wgrad(x, y))
        assert found == ONE_SUM
        assert "lhs 4x6x5x8 g 4x6x5x16" in problem
        assert explained(jax.jit(fn, **options), x, y) == [problem]
    _, found, (problem,) = compiled(CONV.wgrad, x, y, in_shardings=(whole, whole))
    assert found == {}
    assert "lhs 8x6x5x8 g 8x6x5x16" in problem


def test_eager_calls_on_sharded_arrays() -> None:
    x, _, y = CONV.integers(generator(80))
    with partitioned() as put, watch.state.watching() as watched:
        np.testing.assert_array_equal(CONV.wgrad(put(x, "data"), put(y, "data")), CONV.lax_wgrad(x, y))
    assert [str(choice.problem).split()[3] for choice in watched.choices] == ["4x6x5x8"]


def test_one_device_has_the_custom_call_alone() -> None:
    """Nothing is added to a program for one device."""
    x, _, y = CONV.integers(generator(81))
    text = jax.jit(CONV.wgrad).lower(x, y).as_text()
    assert text.count("stablehlo.custom_call") == 1
    assert "CustomSPMDPartitioning" not in text


def test_exported_code_is_divided_by_explicit_axes_alone() -> None:
    x, _, y = CONV.integers(generator(82))
    allowed = {"disabled_checks": [export.DisabledSafetyCheck.custom_call(HOST_WGRAD_TARGET)]}
    for kind, ours in (("explicit", True), ("shardy", False)):
        with partitioned(kind) as put:
            args = (put(x, "data"), put(y, "data"))
            exported = export.export(jax.jit(CONV.wgrad), **allowed)(*args)
            assert (HOST_WGRAD_TARGET in exported.mlir_module()) is ours
            np.testing.assert_array_equal(jax.jit(exported.call)(*args), CONV.lax_wgrad(x, y))


def test_more_devices_than_there_are_can_be_lowered_for_and_explained() -> None:
    mesh = jax.sharding.AbstractMesh((1024,), ("data",), axis_types=(AxisType.Auto,))
    conv = dataclasses.replace(CONV, batch=4096)
    lhs, g = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))
        for shape in (conv.lhs_shape, conv.g_shape)
    )
    assert "CustomSPMDPartitioning" in jax.jit(conv.wgrad).trace(lhs, g).lower(lowering_platforms=("cpu",)).as_text()


def test_explain_says_of_what_it_is_a_part() -> None:
    x, _, y = CONV.integers(generator(83))
    with partitioned() as put:
        args = (put(x, "data"), put(y, "data"))
        (decision,) = jax_splitk.explain(CONV.wgrad, *args).decisions
        assert decision.why.endswith(
            f"; a device's part of {jax_splitk.explain(CONV.wgrad, x, y).decisions[0].problem}"
        )
        (decision,) = jax_splitk.explain(functools.partial(CONV.wgrad, implementation="xla"), *args).decisions
        assert decision.implementation == "xla"
    with partitioned("gspmd"):
        (decision,) = jax_splitk.explain(CONV.wgrad, *args).decisions
        assert "GSPMD" in decision.why


def test_the_local_problem_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """It is tuned ahead of time, and while XLA compiles."""
    x, _, y = CONV.integers(generator(84))
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    with partitioned() as put:
        for axis, batch in (("data", 4), ("model", 2)):
            args = (put(x, axis), put(y, axis))
            if batch == 4:
                ((key, _),) = jax_splitk.tune(CONV.wgrad, *args, seconds=0.05).entries
                assert key.problem.batch == batch
            with watch.state.watching() as watched:
                np.testing.assert_array_equal(jax.jit(CONV.wgrad)(*args), CONV.lax_wgrad(x, y))
            assert [choice.problem.batch for choice in watched.choices] == [batch]
            assert [key.problem.batch for key in watched.measured] == ([] if batch == 4 else [batch])


@pytest.mark.usefixtures("competing")
def test_a_pass_in_doubt_is_measured_as_a_devices_part(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Without a measurement it would be XLA's, which divides it by itself."""
    x, w, y = CONV.integers(generator(90))
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    monkeypatch.setattr(certainty, "faster_xla", lambda *_, **__: 0.0)
    loss = lambda w, x, y: (CONV.ours(x, w) * y).sum()  # noqa: E731
    for autotune, measured in (("off", set()), ("on_miss", {("conv_fprop", 1), ("conv_wgrad", 1)})):
        monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", autotune)
        with partitioned() as put, watch.state.watching() as watched:
            args = (put(w), put(x, BOTH), put(y, BOTH))
            _, dw = jax.jit(jax.value_and_grad(loss))(*args)
            np.testing.assert_array_equal(dw, CONV.lax_wgrad(x, y))
        assert {(key.problem.op, key.problem.batch) for key in watched.measured} == measured
        jax.clear_caches()


# ---- quantized products --------------------------------------------------------------------------------------------


def packed(k: int = 512, features: int = 512, group: int | None = 64, **options: Any) -> PackedWeight:
    values = on_device(generator(85).integers(-7, 8, (k, features)), jnp.float32)
    return prepack(quantize(values, "int4", group_size=group, **options))


def rows(n: int = 8, k: int = 512) -> jax.Array:
    return on_device(generator(86).integers(-3, 4, (n, k)), jnp.bfloat16)


wide = functools.partial(quantized_matmul, preferred_element_type="float32")
BY_COLUMN, BY_ROW = P("model"), P(None, "model")


def placed(put: Callable[..., Any], w: PackedWeight, spec: P, group_spec: P | None = None) -> PackedWeight:
    of_groups = spec if group_spec is None else group_spec
    zero_point = None if w.zero_point is None else put(w.zero_point, *of_groups)
    return dataclasses.replace(w, words=put(w.words, *spec), scale=put(w.scale, *of_groups), zero_point=zero_point)


def close(one: Any, other: Any) -> None:
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * np.abs(other).max())


_QUANTIZED = [
    ({}, ("data",), P(), None, ("data",), "x 4x512 w 512x512 int4 group 64", {}),
    ({}, ("data",), BY_COLUMN, None, BOTH, "x 4x512 w 512x128 int4 group 64", {}),
    ({"symmetric": False}, ("data",), BY_COLUMN, None, BOTH, "x 4x512 w 512x128 int4 group 64", {}),
    ({}, BOTH, BY_ROW, None, ("data",), "x 4x128 w 128x512 int4 group 64", ONE_SUM),
    ({"group": 128}, BOTH, BY_ROW, None, ("data",), "x 4x128 w 128x512 int4 group 128", ONE_SUM),
    ({"group": None}, BOTH, BY_ROW, P(), ("data",), "x 4x128 w 128x512 int4 group 128", ONE_SUM),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "w", "x_spec", "w_spec", "group_spec", "out_spec", "local", "exchanged"), crossed(KINDS, _QUANTIZED)
)
def test_quantized_product(
    kind: str, w: Any, x_spec: Any, w_spec: P, group_spec: P | None, out_spec: Any, local: str, exchanged: Any
) -> None:
    weight, x = packed(**w), rows()
    expected = wide(x, weight)
    with partitioned(kind) as put:
        args = (put(x, *x_spec), placed(put, weight, w_spec, group_spec))
        out, found, (problem,) = compiled(wide, *args)
        close(out, expected)
        assert local in problem
        assert found == exchanged
        assert out.sharding.is_equivalent_to(NamedSharding(args[0].sharding.mesh, P(*out_spec)), 2)
        if kind != "gspmd":
            assert explained(wide, *args) == [problem]


@pytest.mark.parametrize("kind", ["shardy", "explicit"])
@pytest.mark.parametrize(("w", "x_spec", "w_spec", "group_spec", "name"), [
    ({"features": 480}, ("data",), BY_COLUMN, None, "features"),  # the last tile is padded
    ({"k": 256, "group": 128}, BOTH, BY_ROW, P(), "k"),  # two groups, four devices
    ({"k": 480, "group": 32}, BOTH, BY_ROW, P(), "k"),
], ids=str)  # fmt: skip
def test_what_packing_does_not_let_be_cut_is_gathered(
    kind: str, w: Any, x_spec: Any, w_spec: P, group_spec: P | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = packed(**w), rows(k=w.get("k", 512))
    expected = wide(x, weight)
    with partitioned(kind) as put, caplog.at_level(logging.WARNING, "jax_splitk"):
        out, found, _ = compiled(wide, put(x, *x_spec), placed(put, weight, w_spec, group_spec))
    close(out, expected)
    assert "all-gather" in found
    assert any(f"sharded along {name}, which is gathered" in message for message in caplog.messages)


@pytest.mark.parametrize(("kind", "by_row"), crossed(KINDS, [False, True]))
def test_quantized_product_of_normalized_activations(kind: str, by_row: bool) -> None:
    """The mean square is that of all k, also where devices have parts of it."""
    weight, x, scale = packed(), rows() / 32, on_device(generator(89).integers(1, 4, 512), jnp.float32)

    def f(x: jax.Array, w: PackedWeight, scale: jax.Array) -> jax.Array:
        return wide(x, w, norm_epsilon=1e-5, norm_scale=scale)

    expected = f(x, weight, scale)
    with partitioned(kind) as put:
        given = (put(x, *(BOTH if by_row else ("data",))), placed(put, weight, BY_ROW if by_row else BY_COLUMN))
        out, _, _ = compiled(f, *given, put(scale))
    close(out, expected)


@pytest.mark.parametrize(("kind", "gated", "by_row"), crossed(KINDS, [False, True], [False, True]))
def test_quantized_product_with_an_epilogue(kind: str, gated: bool, by_row: bool) -> None:
    """By columns each device computes its part of the epilogue, and a gated one has gate and up. By rows the epilogue
    is computed once, from the sum."""
    name: Any = "swiglu" if gated else "gelu"
    weight, x, features = packed(), rows() / 32, 256 if gated else 512
    bias = on_device(generator(87).integers(-3, 4, (2, 256) if gated else (512,)), jnp.float32)
    residual = on_device(generator(88).integers(-3, 4, (8, features)), jnp.bfloat16)

    def f(x: jax.Array, w: PackedWeight, bias: jax.Array, residual: jax.Array) -> jax.Array:
        given: Any = JoinedWeight(w) if gated else w
        return wide(x, given, bias=bias, activation=name, residual=residual)

    expected = f(x, weight, bias, residual)
    with partitioned(kind) as put:
        spec, axis = (BY_ROW, None) if by_row else (BY_COLUMN, "model")
        of_bias = (None, axis) if gated else (axis,)
        args = (put(x, *(BOTH if by_row else ("data",))), placed(put, weight, spec))
        out, found, (problem,) = compiled(f, *args, put(bias, *of_bias), put(residual, "data", axis))
        close(out, expected)
        assert found == (ONE_SUM if by_row else {})
        assert ("x 4x128 w 128x512" if by_row else "x 4x512 w 512x128") in problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_spec", "w_spec"), [(("data",), BY_COLUMN), (BOTH, BY_ROW)], ids=["column", "row"])
def test_gradients_of_a_sharded_quantized_product(kind: str, x_spec: Any, w_spec: P) -> None:
    weight, x = packed(), rows()

    def loss(x: jax.Array, scale: jax.Array, weight: PackedWeight) -> jax.Array:
        y = quantized_matmul(x, dataclasses.replace(weight, scale=scale))
        return jnp.square(y.astype(jnp.float32)).mean()

    gradients = jax.grad(loss, (0, 1))
    expected = gradients(x, weight.scale, weight)
    with partitioned(kind) as put:
        w = placed(put, weight, w_spec)
        found, _, problems = compiled(gradients, put(x, *x_spec), w.scale, w)
    assert len(problems) == 1  # XLA computes the cotangent of x on a CPU
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.02 * float(jnp.abs(other).max())
        )


def test_a_batch_of_weights_is_divided() -> None:
    """The weights are experts, each on devices of its own."""
    weight, x = packed(128, 128), jnp.stack([rows(8, 128)] * 4)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), weight)
    with partitioned() as put:
        args = (put(x, "model"), jax.tree.map(lambda leaf: put(leaf, "model"), stacked))
        out, found, _ = compiled(jax.vmap(wide), *args)
    close(out, jax.vmap(wide)(x, stacked))
    assert found == {}


@pytest.mark.parametrize(("x_spec", "w_spec", "group_spec", "over"), [
    (("data",), BY_COLUMN, BY_COLUMN, None), (BOTH, BY_ROW, BY_ROW, "model"), (BOTH, BY_ROW, P(), "model"),
], ids=["column", "row", "row, per channel"])  # fmt: skip
def test_a_packed_weight_in_shard_map_has_its_devices_shape(
    x_spec: Any, w_spec: P, group_spec: P, over: str | None
) -> None:
    weight, x = packed(group=None if group_spec == P() else 64), rows()
    specs = dataclasses.replace(weight, words=w_spec, scale=group_spec, zero_point=None, guard=P())

    def each(x: jax.Array, w: PackedWeight) -> jax.Array:
        assert unpack(w).shape == ((512, 128) if over is None else (128, 512))
        out = wide(x, w)
        return out if over is None else lax.psum(out, over)

    with partitioned() as put:
        mesh = put(x).sharding.mesh
        out_spec = P(*BOTH) if over is None else P("data")
        inside = jax.shard_map(each, mesh=mesh, in_specs=(P(*x_spec), specs), out_specs=out_spec)
        out, _, problems = compiled(inside, x, weight)
    assert len(problems) == 1
    close(out, wide(x, weight))


def test_a_part_of_a_padded_tile_is_refused_in_shard_map() -> None:
    weight, x = packed(features=480), rows()
    with partitioned() as put:
        mesh = put(x).sharding.mesh
    specs = shardings(weight, P(None, "model"))
    inside = jax.shard_map(wide, mesh=mesh, in_specs=(P(), specs), out_specs=P(None, "model"))
    with pytest.raises(ValueError, match=r"features of a PackedWeight of shape \(512, 480\).* in 4 parts; accepted: 1"):
        inside(x, weight)


def test_a_part_of_a_weight_outside_of_shard_map_is_refused() -> None:
    weight = packed()
    with pytest.raises(ValueError, match=r"words \(2, 8, 512\)"):
        wide(rows(), dataclasses.replace(weight, words=weight.words[:2]))


# ---- the rules themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operands", "result", "axes", "gathered"), [
    # A reduction keeps its axes, whatever the result's user wants.
    (((("data",), ("model",)), (("data",), ())), ((), ("data",)), {"k": ("data",), "m": ("model",)}, ()),
    # But not those that divide another operand otherwise.
    ((((), ("data",)), (("data",), ())), None, {"m": ("data",)}, ("k",)),
    ((((), ("model",)), ((), ("model",))), ((), ("model",)), {"n": ("model",)}, ("m",)),
    ((((), ("model",)), ((), ("model",))), None, {"m": ("model",)}, ("n",)),
    # What operands agree on is extended by one of them, within 6 parts.
    ((((), ("data",)), ((), ())), (("data", "model"), ()), {"m": ("data", "model")}, ()),
    (((("data",), ()), (("data", "model"), ())), None, {"k": ("data",)}, ("k",)),
    ((((), ()), ((), ())), (("model",), ("data",)), {"m": ("model",), "n": ("data",)}, ()),
])  # fmt: skip
def test_division(operands: Any, result: Any, axes: dict[str, Any], gathered: tuple[str, ...]) -> None:
    units = {"k": 6, "m": 8, "n": 8}
    rule = Rule((("k", "m"), ("k", "n")), ("m", "n"), units, lambda _: None)
    assert partitioning.division(rule, AXES, operands, result) == partitioning.Division(axes, gathered)


def test_without_a_compiler_a_pass_that_nobody_named_is_laxs_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would be chosen, but lowering it needs its machine code."""

    def lowered() -> str:
        fn = lambda x, w: jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)  # noqa: E731
        with partitioned() as put:
            x = put(jnp.zeros((8, 14, 14, 64), jnp.bfloat16), "data")
            w = put(jnp.zeros((3, 3, 64, 64), jnp.bfloat16))
            (decision,) = jax_splitk.explain(fn, x, w, platform="cuda").decisions
            assert decision.implementation == "cutlass"
            return jax.jit(fn).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()

    with_compiler = lowered()
    assert ("stablehlo.convolution" in with_compiler, "custom_call" in with_compiler) == (False, True)
    monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
    monkeypatch.setattr(compiler, "held", lambda source: None)
    without = lowered()
    assert ("stablehlo.convolution" in without, "custom_call" in without) == (True, False)
