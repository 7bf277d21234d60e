"""The convolution under JAX's transformations: what the weight gradient becomes, and that nothing is computed twice."""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops.equations import walk
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET as HOST
from tests.convolutions import GEOMETRIES, PLAIN, Conv
from tests.exhaustive import thinned
from tests.problems import generator, on_device, together

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

# Which of (input, weight) are mapped.
MAPPED = ((True, False), (False, True), (True, True))
SIZE = 3


def integers(*shapes: tuple[int, ...], seed: int = 1) -> list[jax.Array]:
    rng = generator(seed)
    return [on_device(rng.integers(-2, 3, shape), "float32") for shape in shapes]


def equations(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    return walk(jax.make_jaxpr(function)(*args).jaxpr)


def squared(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda lhs, rhs: (layer(lhs, rhs) ** 2).sum()


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_transformation_in_the_docs_has_its_test() -> None:
    tests = Path(__file__).parent
    table = (tests.parents[1] / "docs" / "transformations.md").read_text(encoding="utf-8")
    source = "".join(file.read_text(encoding="utf-8") for file in tests.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in source] == []


# ---- vmap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mapped"), thinned([(n, m) for n in GEOMETRIES for m in MAPPED], 7))
def test_gradient_of_a_vmapped_convolution_is_one_weight_gradient(name: str, mapped: tuple[bool, bool]) -> None:
    conv = GEOMETRIES[name]
    shapes = [(SIZE, *shape) if m else shape for shape, m in zip((conv.lhs_shape, conv.rhs_shape), mapped, strict=True)]
    lhs, rhs = integers(*shapes)
    axes = tuple(0 if m else None for m in mapped)
    ours, theirs = (jax.grad(squared(jax.vmap(f, axes)), (0, 1)) for f in (conv.ours, conv.lax))
    found = list(equations(ours, lhs, rhs))
    assert [eqn.primitive.name for eqn in found].count("conv_wgrad") == 1
    assert not {eqn.primitive.name for eqn in found} & {"scan", "while"}
    assert_same(*together((ours, theirs), lhs, rhs))


IMAGES, CHANNELS = 32, (32, 48)
LAYER = Conv((6, 5), (3, 3), IMAGES, CHANNELS)


def per_example(lhs: jax.Array, rhs: jax.Array, conv: Conv = LAYER) -> jax.Array:
    """Equinox's idiom: a layer takes one example."""
    return jax.vmap(lambda image: conv.ours(image[None], rhs)[0])(lhs)


def nested(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    rows = lhs.reshape(4, IMAGES // 4, *lhs.shape[1:])
    return jax.vmap(lambda images: per_example(images, rhs))(rows)


@pytest.mark.parametrize("model", [per_example, nested])
def test_a_model_of_one_example_has_the_batchs_problem(model: Callable[..., jax.Array]) -> None:
    lhs, rhs = integers(LAYER.lhs_shape, LAYER.rhs_shape)
    gradient = jax.grad(squared(model), 1)
    (mine,), (batch,) = (
        jax_splitk.explain(f, lhs, rhs).decisions for f in (gradient, jax.grad(squared(LAYER.ours), 1))
    )
    assert mine == batch
    # Nothing is as large as a weight gradient for each image.
    limit = IMAGES * math.prod(LAYER.rhs_shape)
    assert all(math.prod(out.aval.shape) < limit / 4 for eqn in equations(gradient, lhs, rhs) for out in eqn.outvars)
    assert_same(*together((gradient, jax.grad(squared(LAYER.lax), 1)), lhs, rhs))


def test_gradients_of_each_example_are_groups() -> None:
    conv = dataclasses.replace(PLAIN, batch=1)
    lhs, rhs = integers((SIZE, *conv.lhs_shape), conv.rhs_shape)
    ours, theirs = (jax.vmap(jax.grad(squared(f), 1), (0, None)) for f in (conv.ours, conv.lax))
    (decision,) = jax_splitk.explain(ours, lhs, rhs).decisions
    assert (decision.problem.batch, decision.problem.feature_group_count) == (1, SIZE)
    assert_same(*together((ours, theirs), lhs, rhs))


def test_an_ensemble_of_models_with_a_batch_of_images() -> None:
    lhs, rhs = integers(PLAIN.lhs_shape, (SIZE, *PLAIN.rhs_shape))
    ours, theirs = (
        jax.grad(lambda w, f=f: (jax.vmap(lambda x: jax.vmap(lambda w: f(x[None], w))(w))(lhs) ** 2).sum())
        for f in (PLAIN.ours, PLAIN.lax)
    )
    (decision,) = jax_splitk.explain(ours, rhs).decisions
    assert (decision.count, decision.problem.batch) == (1, PLAIN.batch)
    assert decision.problem.out_channels == SIZE * PLAIN.channels[1]
    assert_same(*together((ours, theirs), rhs))


def test_a_config_is_for_the_one_weight_gradient() -> None:
    lhs, rhs = integers(LAYER.lhs_shape, LAYER.rhs_shape)
    layer = functools.partial(LAYER.ours, config=wgrad_host.Config(3, 64))
    gradient = jax.jit(jax.grad(squared(lambda x, w: jax.vmap(lambda a: layer(a[None], w))(x)), 1))
    text = gradient.lower(lhs, rhs).as_text()
    assert (text.count(f"@{HOST}"), "splits = 3 : i64" in text, "stablehlo.while" in text) == (1, True, False)
    assert_same(gradient(lhs, rhs), jax.grad(squared(LAYER.lax), 1)(lhs, rhs))


# ---- forward mode, transposition, higher orders ----------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned(GEOMETRIES, 6))
def test_forward_mode_and_transposes_are_laxs(name: str) -> None:
    conv = GEOMETRIES[name]
    lhs, rhs, lhs_dot, rhs_dot, g = integers(*(conv.lhs_shape, conv.rhs_shape) * 2, conv.g_shape)

    def all_of(f: Callable[..., jax.Array]) -> Any:
        out, linear = jax.linearize(f, lhs, rhs)
        return (
            jax.jvp(f, (lhs, rhs), (lhs_dot, rhs_dot)),
            jax.jvp(lambda w: f(lhs, w), (rhs,), (rhs_dot,)),
            (out, linear(lhs_dot, rhs_dot)),
            jax.linear_transpose(lambda x: f(x, rhs), lhs)(g),
            jax.linear_transpose(lambda w: f(lhs, w), rhs)(g),
        )

    assert_same(*together([functools.partial(all_of, f) for f in (conv.ours, conv.lax)]))


def test_the_transpose_in_the_weight_is_ours() -> None:
    lhs, rhs, g = PLAIN.integers(generator(2))
    (decision,) = jax_splitk.explain(jax.linear_transpose(lambda w: PLAIN.ours(lhs, w), rhs), g).decisions
    assert decision.problem.out_shape == PLAIN.rhs_shape


def test_weight_gradients_of_higher_orders_are_ours() -> None:
    conv = dataclasses.replace(PLAIN, channels=(4, 4))
    lhs, rhs, _ = conv.integers(generator(3))
    penalty = lambda f: lambda w: (jax.grad(squared(f), 1)(lhs, w) ** 2).sum()  # noqa: E731
    counts = [d.count for d in jax_splitk.explain(jax.grad(penalty(conv.ours)), rhs).decisions]
    assert sum(counts) == 2
    hessian = [jax.jit(jax.grad(penalty(f)))(rhs) for f in (conv.ours, conv.lax)]
    np.testing.assert_allclose(hessian[0], hessian[1], rtol=1e-5)
    along = [lambda f=f: jax.jvp(jax.grad(squared(f), 1), (lhs, rhs), (lhs, rhs))[1] for f in (conv.ours, conv.lax)]
    np.testing.assert_array_equal(*together(along))
    again = [jax.grad(lambda w, f=f: jax.jvp(squared(f), (lhs, w), (lhs, w))[1]) for f in (conv.ours, conv.lax)]
    np.testing.assert_array_equal(*together(again, rhs))


def test_master_weights_in_forward_mode() -> None:
    lhs, rhs, _ = PLAIN.integers(generator(4))
    layer = functools.partial(PLAIN.ours, compute_dtype="bfloat16", preferred_element_type="float32")
    out, dot = jax.jvp(layer, (lhs, rhs), (lhs, rhs))
    np.testing.assert_array_equal(dot, 2 * out)
    (d_rhs,) = jax.linear_transpose(functools.partial(layer, lhs), rhs)(out)
    assert d_rhs.dtype == jnp.float32
    images = lhs.astype(jnp.uint8)  # as they come from a file
    np.testing.assert_array_equal(*(jax.grad(squared(layer), 1)(x, rhs) for x in (images, images.astype(jnp.float32))))


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disabled", [False, True])
def test_shard_map_outside_jit(disabled: bool) -> None:
    conv = dataclasses.replace(PLAIN, batch=4)
    lhs, rhs, g = conv.integers(generator(6))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    loss = lambda w, x: lax.psum((conv.ours(x, w) ** 2).sum(), "data")  # noqa: E731
    with jax.disable_jit(disabled):
        forward = jax.shard_map(conv.ours, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        out, vjp = jax.vjp(forward, lhs, rhs)
        step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        found = out, vjp(g), step(rhs, lhs)
    as_one = lambda x, w: (*jax.vjp(conv.lax, x, w), jax.grad(squared(conv.lax), 1)(x, w))  # noqa: E731
    expected, back, gradient = jax.jit(as_one)(lhs, rhs)
    assert_same(found, (expected, back(g), gradient))


def test_out_sharding() -> None:
    lhs, rhs = integers((8, 6, 6, 4), (3, 3, 4, 8))
    expected, vjp = jax.vjp(Conv((6, 6), (3, 3), 8, (4, 8)).lax, lhs, rhs)
    layer = functools.partial(
        jax_splitk.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    np.testing.assert_array_equal(layer(lhs, rhs, out_sharding=None), expected)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(lhs, P("data")), jax.device_put(rhs, P(None, None, None, "model"))
        for sharding in (P("data", None, None, "model"), jax.NamedSharding(mesh, P("data", None, None, "model"))):
            out, back = jax.vjp(functools.partial(layer, out_sharding=sharding), *placed)
            assert out.sharding.spec == P("data", None, None, "model")
            np.testing.assert_array_equal(out, expected)
            for ours, theirs, operand in zip(back(out), vjp(expected), placed, strict=True):
                assert jax.typeof(ours).sharding == jax.typeof(operand).sharding
                np.testing.assert_array_equal(ours, theirs)
    automatic, refused = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), r"out_sharding=.*'data'.*: Partit"
    with jax.set_mesh(automatic), pytest.raises(ValueError, match=refused):
        layer(lhs, rhs, out_sharding=P("data"))


# ---- what the kernels have another form of, and what is lax's --------------------------------------------------------


@pytest.mark.parametrize("conv", [
    Conv((), (), 6, (4, 5), ("NC", "IO", "NC")),
    Conv((), (), 6, (4, 6), ("CN", "OI", "NC"), groups=2),
    Conv((), (), 6, (4, 6), ("NC", "OI", "CN"), batch_groups=2),
    GEOMETRIES["batch_groups"],
    GEOMETRIES["batch_groups_default"],
    Conv((5,), (3,), 4, (3, 8), ("WCN", "OWI", "CNW"), batch_groups=4),
])  # fmt: skip
def test_an_explicit_kernel_takes_no_spatial_dimensions_and_batch_groups(conv: Conv) -> None:
    lhs, rhs, g = conv.integers(generator(8))
    layer = functools.partial(conv.ours, implementation="host")
    assert HOST in jax.jit(functools.partial(conv.wgrad, implementation="host")).lower(lhs, g).as_text()
    assert_same(*together([lambda *operands, f=f: jax.vjp(f, *operands)[1](g) for f in (layer, conv.lax)], lhs, rhs))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_laxs_and_the_log_says_so(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    lhs, rhs, _ = (x.astype(dtype) for x in PLAIN.integers(generator(9)))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        out = PLAIN.ours(lhs, rhs)
    np.testing.assert_array_equal(out, PLAIN.lax(lhs, rhs))
    said = f"conv_general_dilated: lax's, with lax's gradients (operands of {dtype}; accepted: bfloat16, float16, "
    assert said in caplog.text
    if dtype == "complex64":
        ours, theirs = (jax.vjp(f, lhs, rhs)[1](out) for f in (PLAIN.ours, PLAIN.lax))
        assert_same(ours, theirs)
