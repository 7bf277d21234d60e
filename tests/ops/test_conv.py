"""The public convolutions on the CPU: equal to lax's under every transformation, with clear errors."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering, trace
from jax_splitk.ops.call import call_of
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET as HOST
from tests import float64
from tests.convolutions import EMPTY_OUTPUT, GEOMETRIES, NHWC, PLAIN, Conv
from tests.on_gpu import error
from tests.problems import generator, seeded

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_problem_has_the_operands_shapes(name: str) -> None:
    conv = GEOMETRIES[name]
    jaxpr = jax.make_jaxpr(conv.wgrad)(np.zeros(conv.lhs_shape, np.float32), np.zeros(conv.g_shape, np.float32))
    ((eqn, problem),) = trace.ours(jaxpr.jaxpr, "cpu")
    specs: Any = call_of(eqn).convolution.dimension_numbers
    problem.validate()
    n, c, *spatial = specs.lhs_spec
    batch, channels = conv.lhs_shape[n] // conv.batch_groups, conv.lhs_shape[c] * conv.batch_groups
    # A transposed convolution's weight gradient is that of a convolution with strides, of g.
    is_transposed = conv.lhs_dilation is not None and conv.strides is None
    lhs_shape, g_shape = (problem.lhs_shape, problem.g_shape)[:: -1 if is_transposed else 1]
    assert lhs_shape == (batch, *(conv.lhs_shape[axis] for axis in spatial), channels)
    n, c, *spatial = specs.out_spec
    assert g_shape == tuple(conv.g_shape[axis] for axis in (n, *spatial, c))
    assert (problem.feature_group_count, problem.batch_group_count) == (conv.groups * conv.batch_groups, 1)
    pixels, channels = (lhs_shape, conv.channels[1]) if is_transposed else (g_shape, conv.channels[0])
    assert problem.flops == 2 * math.prod(pixels) * math.prod(conv.kernel) * channels // conv.groups


@pytest.mark.parametrize("implementation", [None, "host", "xla"])
def test_no_output_pixels_give_zeros(implementation: str | None) -> None:
    lhs, rhs, g = EMPTY_OUTPUT.integers(generator(9))
    assert 0 in g.shape
    zeros = np.zeros(EMPTY_OUTPUT.rhs_shape, np.float32)
    np.testing.assert_array_equal(EMPTY_OUTPUT.wgrad(lhs, g, implementation=implementation), zeros)
    if implementation != "host":
        d_rhs = jax.vjp(functools.partial(EMPTY_OUTPUT.ours, implementation=implementation), lhs, rhs)[1](g)[1]
        np.testing.assert_array_equal(d_rhs, EMPTY_OUTPUT.lax_wgrad(lhs, g))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_operands(dtype: Any) -> None:
    """Without x64, float64 operands become float32."""
    lhs, rhs, g = (np.asarray(x, dtype) for x in PLAIN.integers(generator(9)))
    out = PLAIN.wgrad(lhs, g)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, PLAIN.lax_wgrad(jnp.asarray(lhs), jnp.asarray(g)))
    np.testing.assert_array_equal(PLAIN.ours(lhs, rhs), PLAIN.lax(lhs, rhs))


def test_arguments_of_other_types() -> None:
    conv = dataclasses.replace(PLAIN, strides=(2, 1), groups=2)
    lhs, rhs, g = conv.integers(generator(9))
    arguments = conv.arguments | {"window_strides": np.array([2, 1]), "feature_group_count": np.int64(2)}
    arguments["dimension_numbers"] = lax.conv_dimension_numbers(conv.lhs_shape, conv.rhs_shape, NHWC)
    out = jax_splitk.conv_wgrad(lhs, g, np.array(conv.rhs_shape), **arguments)
    np.testing.assert_array_equal(out, conv.lax_wgrad(lhs, g))
    np.testing.assert_array_equal(jax_splitk.conv_general_dilated(lhs, rhs, **arguments), conv.lax(lhs, rhs))


def test_implementation_that_was_asked_for_is_the_one_lowered() -> None:
    lhs, _, g = PLAIN.integers(generator(3))
    text = {
        name: jax.jit(functools.partial(PLAIN.wgrad, implementation=name)).lower(lhs, g).as_text()
        for name in (None, "host", "xla")
    }
    assert HOST in text[None]
    assert HOST in text["host"]
    assert HOST not in text["xla"]
    assert "stablehlo.convolution" in text["xla"]
    assert "stablehlo.convolution" not in text["host"]


def test_works_with_jit_disabled() -> None:
    lhs, rhs, g = PLAIN.integers(generator(4))
    with jax.disable_jit():
        out = PLAIN.wgrad(lhs, g)
        many = jax.vmap(PLAIN.wgrad)(lhs[None], g[None])
        d_rhs = jax.grad(lambda w: (PLAIN.ours(lhs, w) * g).sum())(rhs)
    expected = PLAIN.lax_wgrad(lhs, g)
    for result in (out, many[0], d_rhs):
        np.testing.assert_array_equal(result, expected)


def test_problems_are_tuned_without_implicit_promotion() -> None:
    lhs, _, g = PLAIN.integers(generator(4), jnp.bfloat16)
    wgrad = functools.partial(PLAIN.wgrad, preferred_element_type="float32")
    jax.config.update("jax_numpy_dtype_promotion", "strict")  # for the tuner's thread too
    try:
        result = jax_splitk.tune(wgrad, lhs, g, seconds=0.2)
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "standard")
    assert "conv_wgrad bfloat16->float32" in str(result)


def test_float64_is_xlas() -> None:
    with jax.enable_x64(True), seeded(8) as rng:
        lhs, rhs, g = PLAIN.normals(rng, jnp.float64)
        np.testing.assert_allclose(PLAIN.wgrad(lhs, g), PLAIN.lax_wgrad(lhs, g), rtol=1e-12, atol=1e-12)
        d_rhs = jax.vjp(lambda w: PLAIN.ours(lhs, w), rhs)[1](g)[0]
        assert d_rhs.dtype == jnp.float64
        np.testing.assert_allclose(d_rhs, PLAIN.lax_wgrad(lhs, g), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [
    lambda lhs, rhs, g: PLAIN.wgrad(lhs, g, preferred_element_type="float64"),
    lambda lhs, rhs, g: PLAIN.wgrad(lhs, g, preferred_element_type=jnp.float64),
    lambda lhs, rhs, g: PLAIN.ours(lhs, rhs, compute_dtype=np.float64),
    lambda lhs, rhs, g: PLAIN.ours(lhs, rhs, preferred_element_type="float64"),
    lambda lhs, rhs, g: jax.vjp(functools.partial(PLAIN.ours, compute_dtype="float64"), lhs, rhs)[1](g)[1],
])  # fmt: skip
def test_float64_without_x64_is_float32_with_jaxs_warning(call: Callable[..., jax.Array]) -> None:
    operands = PLAIN.integers(generator(8))
    with pytest.warns(UserWarning, match="dtype float64 .* will be truncated to dtype float32"):
        assert call(*operands).dtype == jnp.float32
    assert PLAIN.wgrad(operands[0], operands[2], preferred_element_type=float).dtype == jnp.float32


@pytest.mark.parametrize("channels", [(0, 10), (6, 0)])
def test_no_channels(channels: tuple[int, int]) -> None:
    conv = dataclasses.replace(PLAIN, channels=channels)
    lhs, rhs, g = conv.integers(generator(8))
    out, vjp = jax.vjp(conv.ours, lhs, rhs)
    assert (out.shape, vjp(g)[1].shape) == (conv.g_shape, conv.rhs_shape)


# ---- conv_general_dilated and differentiation ----------------------------------------------------------------------


@functools.cache
def of_every_geometry() -> Any:
    """(ours, lax's) by the geometry's name: result and gradients. One program has all, since compilations take the time
    of these tests."""
    names, convs = zip(*GEOMETRIES.items(), strict=True)

    def passes(fn: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(fn, lhs, rhs)
        return out, *vjp(g)

    @jax.jit
    def run(operands: Any) -> Any:
        return [[passes(fn, *each) for fn in (conv.ours, conv.lax)] for conv, each in zip(convs, operands, strict=True)]

    return dict(zip(names, run([conv.integers(generator(10)) for conv in convs]), strict=True))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution_and_its_gradients_are_laxs(name: str) -> None:
    with seeded(10):
        for ours, theirs in zip(*of_every_geometry()[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_weight_gradient_goes_through_the_kernel_and_the_rest_through_lax() -> None:
    lhs, rhs, g = PLAIN.integers(generator(11))
    loss = lambda lhs, rhs: (PLAIN.ours(lhs, rhs, implementation="host") * g).sum()  # noqa: E731
    text = {i: jax.jit(jax.grad(loss, i)).lower(lhs, rhs).as_text() for i in (0, 1, (0, 1))}
    assert HOST not in text[0]
    assert HOST in text[1]
    assert text[(0, 1)].count(f"@{HOST}") == 1
    assert HOST not in jax.jit(loss).lower(lhs, rhs).as_text()


def residual_shapes(fn: Callable[..., jax.Array], *primals: jax.Array) -> list[tuple[int, ...]]:
    """Shapes of the arrays that a vjp keeps for the backward pass, without empty ones."""
    return [np.shape(leaf) for leaf in jax.tree.leaves(jax.vjp(fn, *primals)[1]) if np.ndim(leaf) and np.size(leaf)]


def test_an_operand_is_kept_only_for_the_others_gradient() -> None:
    lhs, rhs, _ = PLAIN.integers(generator(12))
    assert residual_shapes(lambda w: PLAIN.ours(lhs, w), rhs) == [PLAIN.lhs_shape]
    assert residual_shapes(lambda x: PLAIN.ours(x, rhs), lhs) == [PLAIN.rhs_shape]
    assert sorted(residual_shapes(PLAIN.ours, lhs, rhs)) == sorted([PLAIN.lhs_shape, PLAIN.rhs_shape])


# For one jitted function: whether under jax.checkpoint, and the differentiated operand.
DERIVATIVES = ((True, 0), (True, 1), (False, 0), (True, (0, 1)), (False, 1), (False, (0, 1)), (True, 0))


@pytest.mark.parametrize("size", [3, 8])
def test_derivatives_of_one_jitted_function_one_after_the_other(size: int) -> None:
    """JAX keeps one residual tree of a traced call for all derivatives. lhs and rhs have the same shape, so that
    exchanging them would not raise an error."""
    conv = Conv((size, size), (3, 3), 3, (3, 3), padding="SAME", dimension_numbers=NHWC)
    lhs, rhs, _ = conv.integers(generator(14))
    loss = lambda fn: lambda x, w: jnp.sum(jnp.sin(fn(x, w) / 8))  # noqa: E731
    ours, theirs = jax.jit(loss(conv.ours)), jax.jit(jax.grad(loss(conv.lax), (0, 1)))(lhs, rhs)
    for rematerialised, argnums in DERIVATIVES:
        found = jax.grad(jax.checkpoint(ours) if rematerialised else ours, argnums)(lhs, rhs)
        expected = theirs if argnums == (0, 1) else theirs[argnums : argnums + 1]
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_jitted_layer_that_a_network_uses_several_times() -> None:
    """Its first input is a constant, the others are not."""
    conv = dataclasses.replace(PLAIN, channels=(4, 4), padding="SAME")
    lhs, rhs, _ = conv.integers(generator(15))

    def network(layer: Callable[..., jax.Array], weights: list[jax.Array]) -> jax.Array:
        return functools.reduce(layer, weights, lhs).sum()

    weights = [rhs / 10, rhs / 11, rhs / 12]
    layers = (lambda x, w: jnp.sin(conv.ours(x, w)), lambda x, w: jnp.sin(conv.lax(x, w)))
    ours, theirs = (jax.grad(functools.partial(network, jax.jit(layer)))(weights) for layer in layers)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_kept_operands_are_in_the_compute_dtype() -> None:
    lhs, rhs, _ = PLAIN.integers(generator(12))
    conv = functools.partial(PLAIN.ours, compute_dtype=jnp.bfloat16)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(jax.vjp(conv, lhs, rhs)[1]) if np.ndim(leaf)}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


# ---- transformations -----------------------------------------------------------------------------------------------


def test_vmap_is_one_kernel() -> None:
    lhs, _, g = PLAIN.integers(generator(21))
    wgrad = functools.partial(PLAIN.wgrad, implementation="host")
    many = lambda x: jnp.stack([x, x + 1])  # noqa: E731
    for axes, arguments in (((None, 0), (lhs, many(g))), ((0, None), (many(lhs), g)), ((0, 0), (many(lhs), many(g)))):
        text = jax.jit(jax.vmap(wgrad, axes)).lower(*arguments).as_text()
        assert (text.count(f"@{HOST}"), "stablehlo.while" in text) == (1, False)


def test_vmap_with_a_config_keeps_the_config() -> None:
    lhs, _, g = PLAIN.integers(generator(22))
    wgrad = functools.partial(PLAIN.wgrad, config=wgrad_host.Config(3, 64))
    many = jnp.stack([g, 2 * g])
    out = jax.vmap(wgrad, (None, 0))(lhs, many)
    # The config is for the problem of one call, so this problem runs in a loop.
    text = jax.jit(jax.vmap(wgrad, (None, 0))).lower(lhs, many).as_text()
    assert "splits = 3 : i64" in text
    assert "stablehlo.while" in text
    expected = PLAIN.lax_wgrad(lhs, g)
    np.testing.assert_array_equal(out, jnp.stack([expected, 2 * expected]))


def test_tracing_selects_nothing_and_lowering_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("selected")

    monkeypatch.setattr(lowering, "select", fail)
    conv = Conv((7, 5), (2, 2), 3)
    lhs, rhs, g = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (conv.lhs_shape, conv.rhs_shape, conv.g_shape))
    wgrad = functools.partial(conv.wgrad, preferred_element_type="float32")
    out = jax.eval_shape(wgrad, lhs, g)
    assert (out.shape, out.dtype) == (conv.rhs_shape, jnp.float32)
    jax.make_jaxpr(jax.vmap(wgrad))(*(jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (lhs, g)))
    d_rhs = jax.eval_shape(jax.grad(lambda x, w: conv.ours(x, w).sum(), 1), lhs, rhs)
    assert (d_rhs.shape, d_rhs.dtype) == (conv.rhs_shape, jnp.bfloat16)
    jax.jit(wgrad).trace(lhs, g)
    with pytest.raises(AssertionError, match="selected"):
        jax.jit(wgrad).lower(lhs, g)


# ---- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_master_weights_get_a_float32_gradient_that_lax_cannot_give(compute_dtype: str) -> None:
    case = cases.Case("master", 4, 12, 12, 16, 24, (3, 3))
    conv = Conv((12, 12), (3, 3), 4, (16, 24), padding=case.pads)
    with seeded(30) as rng:
        lhs, rhs, g = conv.normals(rng)
        lhs, g = (x.astype(compute_dtype).astype(jnp.float32) for x in (lhs, g))
        problem = dataclasses.replace(case, dtype=compute_dtype).problem("float32")
        exact = float64.conv_wgrad(problem, lhs, g)
        out, vjp = jax.vjp(functools.partial(conv.ours, compute_dtype=compute_dtype), lhs, rhs)
        assert out.dtype == compute_dtype
        d_lhs, d_rhs = vjp(g.astype(compute_dtype))
        assert (d_lhs.dtype, d_rhs.dtype) == (jnp.float32, jnp.float32)
        cast = lambda x, w: conv.lax(x.astype(compute_dtype), w.astype(compute_dtype))  # noqa: E731
        d_lhs_lax, d_rhs_lax = jax.vjp(cast, lhs, rhs)[1](g.astype(compute_dtype))
        mine, theirs = error(d_rhs, exact), error(d_rhs_lax, exact)
        assert mine < 1e-6
        assert 50 * mine < theirs
        np.testing.assert_array_equal(out, cast(lhs, rhs))
        np.testing.assert_array_equal(d_lhs, d_lhs_lax)


def test_master_weights_of_8_bits() -> None:
    lhs, rhs, g = PLAIN.integers(generator(32), jnp.bfloat16)
    out, vjp = jax.vjp(functools.partial(PLAIN.ours, compute_dtype="bfloat16"), lhs, rhs.astype("float8_e4m3fn"))
    np.testing.assert_array_equal(out, PLAIN.lax(lhs, rhs))
    (d_rhs,) = vjp(g)[1:]
    assert d_rhs.dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(d_rhs, PLAIN.lax_wgrad(lhs, g).astype("float8_e4m3fn"))


def test_preferred_element_type_of_the_convolution() -> None:
    with seeded(31) as rng:
        lhs, rhs, g = PLAIN.integers(rng, jnp.bfloat16)
        out, vjp = jax.vjp(functools.partial(PLAIN.ours, preferred_element_type=jnp.float32), lhs, rhs)
        expected = PLAIN.lax(lhs, rhs, preferred_element_type=jnp.float32)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, expected)
        d_lhs, d_rhs = vjp(g.astype(jnp.float32))
        assert (d_lhs.dtype, d_rhs.dtype) == (jnp.bfloat16, jnp.bfloat16)
        np.testing.assert_array_equal(
            d_rhs, PLAIN.lax_wgrad(*(x.astype(jnp.float32) for x in (lhs, g))).astype(jnp.bfloat16)
        )


@pytest.mark.parametrize("precision", ["highest", lax.Precision.HIGH, ("default", "highest"), None])
def test_precision_is_passed_on(precision: Any) -> None:
    lhs, rhs, g = PLAIN.integers(generator(32))
    conv = functools.partial(PLAIN.ours, precision=precision, implementation="xla")
    np.testing.assert_array_equal(jax.vjp(conv, lhs, rhs)[1](g)[1], PLAIN.lax_wgrad(lhs, g))
    text = jax.jit(functools.partial(PLAIN.wgrad, precision=precision, implementation="xla")).lower(lhs, g).as_text()
    expected = {"highest": ("HIGHEST", "HIGHEST"), lax.Precision.HIGH: ("HIGH", "HIGH"), None: ("DEFAULT", "DEFAULT")}
    names = expected.get(precision, ("DEFAULT", "HIGHEST"))
    assert [*re.findall(r"precision (\w+)", text)][:2] == list(names)


@pytest.mark.parametrize("precision", [
    "BF16_BF16_F32", lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)
])  # fmt: skip
def test_algorithms_of_matrix_products_are_the_default_as_in_lax(precision: Any) -> None:
    lhs, rhs, g = PLAIN.integers(generator(33))
    conv = functools.partial(PLAIN.ours, precision=precision, implementation="xla")
    text = jax.jit(lambda x, w, g: jax.vjp(conv, x, w)[1](g)).lower(lhs, rhs, g).as_text()
    assert {*re.findall(r"precision (\w+)", text)} == {"DEFAULT"}
    np.testing.assert_array_equal(conv(lhs, rhs), PLAIN.lax(lhs, rhs, precision=precision))
