"""The forward pass and the input gradient of a convolution: lax's to the letter where no kernel competes, and ours."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels.cpu import passes as host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering, trace
from jax_splitk.ops.call import call_of
from jax_splitk.ops.decision import Decision
from jax_splitk.ops.equations import walk
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem, transposed
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime.plan import HOST_CONV_TARGET as HOST
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from tests.convolutions import GEOMETRIES, PLAIN, Conv
from tests.exhaustive import crossed, thinned
from tests.problems import generator, together

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

Function = Callable[..., jax.Array]
TRANSPOSED = Conv((5, 6), (3, 2), padding=((2, 1), (1, 1)), lhs_dilation=(2, 3), rhs_dilation=(1, 2))


def fprop(conv: Conv, **more: Any) -> Function:
    return functools.partial(jax_splitk.conv_fprop, **conv.arguments, **more)


def dgrad(conv: Conv, **more: Any) -> Function:
    return lambda g, rhs: jax_splitk.conv_dgrad(g, rhs, conv.lhs_shape, **conv.arguments, **more)


def lax_dgrad(conv: Conv) -> Function:
    """lax's gradient of the lhs, with g's dtype."""

    def run(g: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda lhs: conv.lax(lhs, rhs), jax.ShapeDtypeStruct(conv.lhs_shape, g.dtype))(g)[0]

    return run


def wgrad(conv: Conv, **more: Any) -> Function:
    return lambda lhs, g: conv.wgrad(lhs, g, **more)


def lax_wgrad(conv: Conv) -> Function:
    return conv.lax_wgrad


@dataclasses.dataclass(frozen=True)
class Pass:
    """One of the three passes, ours and lax's. `which`: its operands among (lhs, rhs, g)."""

    ours: Callable[..., Function]
    lax: Callable[[Conv], Function]
    which: tuple[int, int]
    target: str

    def of(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [arrays[i] for i in self.which]


PASSES = (
    Pass(fprop, lambda conv: conv.lax, (0, 1), HOST),
    Pass(dgrad, lax_dgrad, (2, 1), HOST),
    Pass(wgrad, lax_wgrad, (0, 2), HOST_WGRAD_TARGET),
)


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- lax's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["rocm", "cpu"])
@pytest.mark.parametrize("name", thinned(GEOMETRIES, 4))
def test_what_is_lowered_is_laxs_text(name: str, platform: str) -> None:
    conv = GEOMETRIES[name]
    operands = conv.integers(generator(1), jnp.bfloat16)

    def text(layer: Function, count: int) -> str:
        def forward(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return layer(lhs, rhs)

        def backward(lhs: jax.Array, rhs: jax.Array, g: jax.Array) -> jax.Array:
            return jax.vjp(lambda lhs: layer(lhs, rhs), lhs)[1](g)[0]

        function = jax.jit(forward if count == 2 else backward)
        return function.trace(*operands[:count]).lower(lowering_platforms=(platform,)).as_text()

    # An input gradient whose padding crops one side and extends the other is ours: tests/ops/test_cropping.py.
    for count in (2,) if name == "explicit_padding" else (2, 3):
        assert text(conv.ours, count) == text(conv.lax, count)


def test_what_is_laxs_is_not_announced_nor_explained_nor_tuned(caplog: pytest.LogCaptureFixture) -> None:
    lhs, rhs, g = PLAIN.integers(generator(2))
    input_gradient = jax.grad(lambda x: (PLAIN.ours(x, rhs, precision="highest") * g).sum())
    with caplog.at_level(logging.DEBUG, "jax_splitk"):
        jax.jit(input_gradient).lower(lhs)
    assert caplog.text == ""
    assert jax_splitk.explain(input_gradient, lhs, platform="cuda").decisions == ()
    assert len(jax_splitk.tune(input_gradient, lhs, seconds=0.05)) == 0
    named = jax_splitk.explain(fprop(PLAIN), lhs, rhs).decisions
    assert [(d.problem.op, d.implementation, d.why) for d in named] == [
        ("conv_fprop", "xla", "fprop_host: XLA:CPU is faster")
    ]


def test_an_implementation_is_for_the_weight_gradient() -> None:
    lhs, rhs, g = PLAIN.integers(generator(3))
    loss = lambda x, w, **options: (PLAIN.ours(x, w, **options) * g).sum()  # noqa: E731
    for implementation in ("host", "xla"):
        gradient = jax.grad(functools.partial(loss, implementation=implementation), (0, 1))
        assert HOST not in jax.jit(gradient).lower(lhs, rhs).as_text()


# ---- ours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned([*GEOMETRIES, "transposed"], 3))
def test_passes_are_laxs_on_integers(name: str) -> None:
    conv = {**GEOMETRIES, "transposed": TRANSPOSED}[name]
    arrays = conv.integers(generator(4))
    for each in PASSES:
        operands = each.of(arrays)
        ours = [each.ours(conv, implementation=implementation) for implementation in ("host", "xla")]
        assert [each.target in jax.jit(run).lower(*operands).as_text() for run in ours] == [True, False]
        *found, expected = together((*ours, each.lax(conv)), *operands)
        for one in found:
            assert_same(one, expected)


DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "implementation"), crossed([*itertools.product(DTYPES, DTYPES)], ["host", "xla"])
)
def test_dtypes_are_exact_on_integers(dtype: str, out_dtype: str, implementation: str) -> None:
    conv = Conv((6, 5), (3, 3), 2, groups=2)
    arrays = conv.integers(generator(5), dtype)
    for each in PASSES:
        if (each.ours, dtype) == (fprop, "float32") and out_dtype != dtype:
            continue  # to which lax does not narrow
        operands = each.of(arrays)
        ours = each.ours(conv, preferred_element_type=out_dtype, implementation=implementation)
        laxs = lambda *operands, f=each.lax(conv): f(*(x.astype("float32") for x in operands))  # noqa: B008, E731
        out, wide = together((ours, laxs), *operands)
        assert out.dtype == out_dtype
        # bfloat16 holds integers up to 256 exactly.
        np.testing.assert_array_equal(out, np.asarray(wide).astype(out.dtype))
        assert each.ours(conv)(*operands).dtype == dtype


@pytest.mark.parametrize("name", ["groups", "strides", "rhs_dilation", "lhs_dilation", "unread_input", "transposed"])
def test_problems_are_valid_in_both_directions(name: str) -> None:
    conv = {**GEOMETRIES, "transposed": TRANSPOSED}[name]
    lhs, rhs, g = conv.integers(generator(6))
    for run, x in ((fprop(conv), lhs), (dgrad(conv), g)):
        (decision,) = jax_splitk.explain(run, x, rhs).decisions
        there = transposed(decision.problem)
        for problem in (decision.problem, there, transposed(there)):
            problem.validate()
        assert there.out_shape == transposed(there).out_shape == run(x, rhs).shape


def test_a_single_tap_is_not_dilated() -> None:
    """So 1x1 filters are matrix products with any dilation."""
    conv = Conv((9, 8), (1, 3), rhs_dilation=(3, 2), padding=((1, 0), (2, 1)))
    arrays = conv.integers(generator(12))
    for each in PASSES:
        run, operands = each.ours(conv, implementation="host"), each.of(arrays)
        (decision,) = jax_splitk.explain(run, *operands).decisions
        assert decision.problem.rhs_dilation == (1, 2)
        np.testing.assert_array_equal(jax.jit(run)(*operands), each.lax(conv)(*operands))


@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_a_transposed_convolution_is_an_input_gradient(strides: tuple[int, int]) -> None:
    x, w = jnp.ones((2, 5, 6, 4)), jnp.ones((4, 4, 8, 4))

    def upsample(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax_splitk.intercept():
            return jax.lax.conv_transpose(x, w, strides, "SAME", transpose_kernel=True)

    forward = trace.traced(upsample, (x, w), {})
    (eqn,) = [eqn for eqn in walk(forward) if eqn.primitive.name == "conv_fprop"]
    (problem,) = [d.problem for d in jax_splitk.explain(fprop(Conv(
        (5, 6), (4, 4), 2, (4, 8), strides=(1, 1), lhs_dilation=strides, padding=call_of(eqn).convolution.padding
    )), x, jnp.ones((4, 4, 4, 8))).decisions]  # fmt: skip
    assert (problem.op, problem.window_strides, problem.lhs_dilation) == ("conv_dgrad", strides, (1, 1))
    assert problem.out_shape == upsample(x, w).shape


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_a_transposed_convolutions_weight_gradient_has_strides(strides: tuple[int, int], groups: int) -> None:
    """It is the weight gradient of a strided convolution of g, with lhs in its place. A kernel computes it (here the
    host's), not XLA."""
    conv = Conv((5, 6), (3, 4), 4, (4, 8), padding=((2, 1), (1, 4)), lhs_dilation=strides, groups=groups)
    conv = dataclasses.replace(conv, rhs_dilation=(1, 2))
    lhs, _, g = conv.integers(generator(11))
    (decision,) = jax_splitk.explain(functools.partial(conv.wgrad, implementation="host"), lhs, g).decisions
    problem = decision.problem
    assert (problem.op, problem.window_strides, problem.lhs_dilation) == ("conv_wgrad", strides, (1, 1))
    assert (problem.lhs_shape, problem.g_shape) == (g.shape, lhs.shape)
    out = jax.jit(functools.partial(conv.wgrad, implementation="host"))(lhs, g)
    np.testing.assert_array_equal(out, conv.lax_wgrad(lhs, g))


# ---- transformations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "groups", "depthwise", "batch_groups", "nhwc_oihw_nchw", "transposed"])
def test_own_derivatives_are_laxs(name: str) -> None:
    """Derivatives are compared in both modes, to second order."""
    conv = {**GEOMETRIES, "transposed": TRANSPOSED}[name]
    arrays = conv.integers(generator(7))

    def everything(f: Function, *operands: jax.Array) -> Any:
        out, vjp = jax.vjp(f, *operands)
        gradients = lambda *xs: jax.vjp(f, *xs)[1](out)  # noqa: E731
        again = jax.vjp(gradients, *operands)[1](operands)
        x, y = operands
        transposes = jax.linear_transpose(lambda x: f(x, y), x)(out), jax.linear_transpose(lambda y: f(x, y), y)(out)
        return vjp(out), jax.jvp(f, operands, operands), again, transposes

    for each in PASSES:
        functions = each.ours(conv, implementation="host"), each.lax(conv)
        assert_same(*together([functools.partial(everything, f) for f in functions], *each.of(arrays)))


AXES = ((0, None), (None, 0), (0, 0), (1, 3), (-1, None), (None, 2))
MAPPED = ("plain", "groups", "depthwise", "depthwise_multiplied", "batch_groups", "default_numbers", "one_dimension")


@pytest.mark.parametrize(("name", "axes"), thinned(itertools.product(MAPPED, AXES), 5))
def test_vmap_is_one_pass(name: str, axes: tuple[int | None, int | None]) -> None:
    conv = GEOMETRIES[name]
    axes = tuple(axis and min(axis, len(conv.lhs_shape)) for axis in axes)
    draws = [conv.integers(generator(salt)) for salt in range(3)]
    for each in PASSES:
        operands = [
            draws[0][i] if axis is None else np.stack([draw[i] for draw in draws], axis)
            for i, axis in zip(each.which, axes, strict=True)
        ]
        ours = jax.vmap(each.ours(conv), axes, 1)
        names = [eqn.primitive.name for eqn in walk(jax.make_jaxpr(ours)(*operands).jaxpr)]
        assert sum(name.startswith("conv_") for name in names) == 1
        assert not {"scan", "while"} & set(names)
        assert_same(*together((ours, jax.vmap(each.lax(conv), axes, 1)), *operands))


def test_a_config_is_for_the_pass_that_the_caller_sees() -> None:
    lhs, rhs, g = PLAIN.integers(generator(8))
    runs = ((fprop(PLAIN, config=host.Config(2, 64)), lhs), (dgrad(PLAIN, config=host.Config(2, 64)), g))
    for run, x in runs:
        (decision,) = jax_splitk.explain(run, x, rhs).decisions
        assert decision.splits == 2
        assert_same(jax.jit(jax.vmap(run, (0, None)))(x[None], rhs)[0], run(x, rhs))
        d_x, d_rhs = jax.vjp(run, x, rhs)[1](run(x, rhs))
        assert (d_x.shape, d_rhs.shape) == (x.shape, rhs.shape)
    with pytest.raises(TypeError, match=r"accepted: .*jax_splitk\.kernels\.cpu\.passes\.Config"):
        fprop(PLAIN, config=wgrad_host.Config(2, 64))(lhs, rhs)
    with pytest.raises(ValueError, match=r"splits 99; accepted: 1 to 36"):
        fprop(PLAIN, config=host.Config(99, 64))(lhs, rhs)


@pytest.mark.parametrize(("change", "message"), [
    ({"lhs_shape": (4, 9, 8, 7)}, "rhs_shape=.* has 6 input channels a group and lhs"),
    ({"lhs_shape": (4, 9, 9, 6)}, r"g has shape \(4, 9, 8, 10\); the convolution's output has \(4, 9, 9, 10\)"),
    ({"lhs_shape": (4, 9, 8)}, "lhs_shape=.*; accepted: 4 integers of at least 0"),
])  # fmt: skip
def test_shapes_that_do_not_belong_together_are_refused(change: dict[str, Any], message: str) -> None:
    _, rhs, g = PLAIN.integers(generator(9))
    with pytest.raises(ValueError, match=message):
        jax_splitk.conv_dgrad(g, rhs, **({"lhs_shape": PLAIN.lhs_shape} | PLAIN.arguments | change))
    with pytest.raises(TypeError, match="g is float32 and rhs is bfloat16; accepted: one of bfloat16"):
        dgrad(PLAIN)(g, rhs.astype(jnp.bfloat16))


# ---- where a kernel competes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("competing")
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_a_step_whose_three_passes_are_kernels(compute_dtype: str | None) -> None:
    conv = dataclasses.replace(PLAIN, channels=(4, 4), padding="SAME")
    lhs, rhs, _ = conv.integers(generator(10))

    def loss(layer: Function, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.square(jax.checkpoint(layer)(layer(x, w), w)).astype(jnp.float32).sum()

    ours = functools.partial(loss, functools.partial(conv.ours, compute_dtype=compute_dtype))
    step = jax.jit(jax.value_and_grad(ours, (0, 1)))
    text = step.lower(lhs, rhs).as_text()
    assert "stablehlo.convolution" not in text
    found = jax_splitk.explain(step, lhs, rhs).decisions
    assert {d.problem.op for d in found} == {"conv_fprop", "conv_dgrad", "conv_wgrad"}
    assert {d.implementation for d in found} == {"host"}
    assert jax_splitk.cost(step, lhs, rhs).rest_flops < 1e5
    assert len(jax_splitk.tune(step, lhs, rhs, seconds=0.05)) == len({d.problem for d in found})
    if compute_dtype is None:
        for a, b in zip(jax.tree.leaves(step(lhs, rhs)),
                        jax.tree.leaves(jax.value_and_grad(functools.partial(loss, conv.lax), (0, 1))(lhs, rhs)),
                        strict=True):  # fmt: skip
            np.testing.assert_allclose(a, b, rtol=1e-5)


def decided_for_xla(passes: Sequence[Decision]) -> jax_splitk.TuningResult:
    """What tuning would say of these passes, and of their parts on 4 devices, if XLA were faster."""
    problems: list[Any] = [d.problem for d in passes]
    problems += [dataclasses.replace(p, batch=p.batch // 4) for p in problems]
    keys = [key_for(problem, target_for("cpu")) for problem in problems]
    return jax_splitk.TuningResult(tuple((key, Entry.of(key, XLA, [Measurement(XLA, 5.0)])) for key in keys))


def placed(devices: str, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """lhs and rhs on one device, or with the batch over several devices."""
    if devices == "one":
        return lhs, rhs
    axis_type = AxisType.Auto if devices == "automatic axes" else AxisType.Explicit
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    return jax.device_put(lhs, NamedSharding(mesh, P("data"))), jax.device_put(rhs, NamedSharding(mesh, P()))


@pytest.mark.usefixtures("competing")
@pytest.mark.parametrize("devices", ["one", "automatic axes", "explicit axes"])
def test_passes_that_xla_computes_faster_are_laxs_text_and_silent(
    devices: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = dataclasses.replace(PLAIN, channels=(4, 4), strides=(2, 1))
    lhs, rhs, _ = conv.integers(generator(13))
    monkeypatch.setattr(lowering, "would_serve", lambda problem, target: True)  # as on an H200

    def step(layer: Function, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.square(layer(x, w)).sum())(x)

    ours, theirs = (functools.partial(step, layer) for layer in (conv.ours, conv.lax))
    decisions = jax_splitk.explain(ours, lhs, rhs).decisions
    assert [(d.problem.op, d.implementation) for d in decisions] == [("conv_fprop", "host"), ("conv_dgrad", "host")]
    lhs, rhs = placed(devices, lhs, rhs)
    with decided_for_xla(decisions), caplog.at_level(logging.DEBUG, "jax_splitk"):
        found = jax_splitk.explain(ours, lhs, rhs)
        text = jax.jit(ours).lower(lhs, rhs).as_text()
    assert text == jax.jit(theirs).lower(lhs, rhs).as_text()
    assert caplog.text == ""
    assert found.decisions == ()
    assert found.notes[0].startswith("2 more passes of convolutions (forward or input gradient): lax's, as XLA is")


@pytest.mark.parametrize("kind", [ConvFpropProblem, ConvDgradProblem])
def test_references_compute_in_float32_for_what_checks_results(kind: type[Any]) -> None:
    (conv,) = (GEOMETRIES["groups"],)
    _, rhs, g = conv.integers(generator(12))
    (decision,) = jax_splitk.explain(dgrad(conv), g, rhs).decisions
    fields = {field.name: getattr(decision.problem, field.name) for field in dataclasses.fields(kind)}
    problem = kind(**fields | {"dtype": "bfloat16", "out_dtype": "float32"})
    operation = OPERATIONS[problem.op]
    out = operation.reference(problem, *operation.random_operands(problem, 0))
    assert (out.shape, out.dtype) == (problem.out_shape, jnp.float32)
