"""The product with a quantized weight: exact on one-hot activations, its cotangents, transformations and errors."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_splitk import quantized_matmul
from jax_splitk.kernels.cpu import quantized as quantized_host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.quantized import QuantizedArray, dequantize, prepack, quantize, unpack
from tests.exhaustive import crossed, thinned
from tests.formats import CASES, GROUPS, Foreign, every_code
from tests.problems import on_device, ones

FORMS: dict[str, Callable[[QuantizedArray], Any]] = {"plain": lambda q: q, "packed": prepack}
FORMATS = [(*case, *group) for case in CASES for group in GROUPS]
FLOATS = ("bfloat16", "float16", "float32")


def normals(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def relative(out: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "zero", "group", "scale_dtype"), thinned(FORMATS, 5))
def test_one_hot_activations_decode_every_code(name: str, zero: str | None, group: int, scale_dtype: str) -> None:
    q, expected = every_code(name, 384, 5, group, zero, scale_dtype)
    one_hot = jnp.eye(384, dtype=jnp.bfloat16)
    products = jax.jit(
        lambda weights: [
            (quantized_matmul(one_hot, w, preferred_element_type=jnp.float32), quantized_matmul(one_hot, w))
            for w in weights
        ]
    )
    for out, rounded in products((q, prepack(q))):
        np.testing.assert_array_equal(out, expected.astype(np.float32))
        np.testing.assert_array_equal(rounded, expected.astype(np.float32).astype(jnp.bfloat16))


DTYPES = itertools.product(FORMS, (*FLOATS, "float8_e4m3fn"), (None, *FLOATS))


@pytest.mark.parametrize(("form", "x_dtype", "out_dtype"), thinned(DTYPES, 3))
def test_dtypes(form: str, x_dtype: str, out_dtype: str | None) -> None:
    q, values = every_code("int4", 192, 37, 64, "own")
    x = normals(1, 6, 192, dtype=x_dtype)
    out = quantized_matmul(x, FORMS[form](q), preferred_element_type=out_dtype)
    natural = "bfloat16" if x_dtype == "float8_e4m3fn" else x_dtype
    assert (out.shape, out.dtype) == ((6, 37), out_dtype or natural)
    exact = np.asarray(x, np.float64) @ values
    # The rounding of the result, and the same again for a weight rounded to that dtype.
    assert relative(out, exact) < float(jnp.finfo(out.dtype).eps) * (4 if out.dtype == jnp.float32 else 1)


@pytest.mark.parametrize("form", FORMS)
def test_errors_are_those_of_a_float32_product(form: str) -> None:
    q, values = every_code("float8_e4m3fn", 1024, 33, 128)
    x = normals(2, 17, 1024)
    exact = np.asarray(x, np.float64) @ values
    float32 = jnp.dot(x, dequantize(q, jnp.float32), precision="highest")
    assert relative(quantized_matmul(x, FORMS[form](q)), exact) <= 2 * relative(float32, exact)


@pytest.mark.parametrize("scale_dtype, scale", [
    *(("float16", scale) for scale in (2.0**-24, 2.0**-14, 65504.0)),
    *(("bfloat16", scale) for scale in (2.0**-126, 2.0**-40, 2.0**40, 2.0**100)),
    *(("float32", scale) for scale in (2.0**-126, 2.0**100)),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_extreme_scales(form: str, scale_dtype: str, scale: float) -> None:
    """Also with float16 activations: as float16, the weight would overflow or vanish."""
    q, _ = every_code("int4", 64, 3, 32)
    q = dataclasses.replace(q, scale=jnp.full((2, 3), scale, scale_dtype))
    exact = np.asarray(q.qvalue, np.float64) * scale
    for x_dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        out = quantized_matmul(jnp.eye(64, dtype=x_dtype), FORMS[form](q), preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(out, exact.astype(np.float32))
    size = float(2.0 ** np.clip(-np.round(np.log2(scale)), -24, 12))
    out = quantized_matmul(jnp.eye(64, dtype=jnp.float16) * size, FORMS[form](q))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, (exact * size).astype(np.float16))


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_bad_numbers_stay_where_they_belong(form: str, x_dtype: str) -> None:
    q, _ = every_code("int8", 128, 5, 64)
    x = normals(3, 4, 128, dtype=x_dtype)
    clean = quantized_matmul(x, FORMS[form](q))
    for bad in (jnp.nan, jnp.inf):
        out = quantized_matmul(x, FORMS[form](dataclasses.replace(q, scale=q.scale.at[1, 2].set(bad))))
        assert not np.isfinite(out[:, 2]).any()
        np.testing.assert_array_equal(np.delete(out, 2, axis=1), np.delete(clean, 2, axis=1))
        out = quantized_matmul(x.at[1, 7].set(bad), FORMS[form](q))
        assert not np.isfinite(out[1]).any()
        np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    q, values = every_code("int8", 96, 7, 32)
    x = normals(4, *leading, 96)
    out = quantized_matmul(x, prepack(q))
    assert out.shape == (*leading, 7)
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ values, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("form", "k", "features"), crossed(list(FORMS), [(1, 1), (33, 65), (100, 3), (129, 200)]))
def test_odd_shapes(form: str, k: int, features: int) -> None:
    q, values = every_code("int4", k, features, k)
    x = on_device(np.random.default_rng(5).integers(-4, 5, (3, k)), jnp.bfloat16)
    out = quantized_matmul(x, FORMS[form](q), preferred_element_type=jnp.float32)
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ values, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(("form", "x_dtype", "rows", "features"), crossed(
    list(FORMS), ["float16", "float8_e4m3fn"], [(3, 0), (0, 5), (0, 0)]
))  # fmt: skip
def test_empty_products_and_their_cotangents(form: str, x_dtype: str, rows: int, features: int) -> None:
    q = quantize(jnp.ones((128, features)), "int4", group_size=64, symmetric=False)
    w = FORMS[form](dataclasses.replace(q, zero_point=q.zero_point.astype(jnp.float32)))
    x = jnp.ones((rows, 128), x_dtype)
    product = lambda x, scale, zeros: quantized_matmul(x, dataclasses.replace(w, scale=scale, zero_point=zeros))  # noqa: E731
    out, vjp = jax.vjp(product, x, w.scale, w.zero_point)
    assert out.shape == (rows, features)
    for gradient, leaf in zip(vjp(out), (x, w.scale, w.zero_point), strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
        assert not np.any(np.asarray(gradient, np.float32))


def test_foreign_tensors() -> None:
    q, values = every_code("uint4", 128, 6, 64, "own", "float32")
    x = normals(6, 5, 128)
    exact = np.asarray(x, np.float64) @ values
    assert relative(quantized_matmul(x, Foreign(q.qvalue, q.scale, q.zero_point, jnp.uint4)), exact) < 1e-6
    q, values = every_code("int8", 128, 6, 128, None, "float32")
    exact = np.asarray(x, np.float64) @ values
    assert relative(quantized_matmul(x, Foreign(q.qvalue, [q.scale])), exact) < 1e-6
    per_tensor = Foreign(q.qvalue, jnp.full((1, 1), 0.5))
    exact = np.asarray(x, np.float64) @ np.asarray(q.qvalue, np.float64) * 0.5
    assert relative(quantized_matmul(x, per_tensor), exact) < 1e-6
    d_scale = jax.grad(lambda s: quantized_matmul(x, Foreign(q.qvalue, s)).sum())(per_tensor.scale)
    np.testing.assert_allclose(d_scale, [[exact.sum() * 2]], rtol=1e-4)


def test_numpy_activations() -> None:
    q, values = every_code("int8", 64, 6, 64)
    x = np.asarray(normals(7, 5, 64))
    assert relative(quantized_matmul(x, q), x @ values) < 1e-6


# ---- differentiation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "name", "zero", "group", "x_dtype", "tolerance"), crossed(list(FORMS), [
    ("int4", None, 32, "float32", 2e-6),
    ("uint4", "float32", 64, "float32", 2e-6),
    ("int8", "bfloat16", 128, "float32", 1e-2),
    ("nf4", None, 64, "float32", 2e-6),
    ("float8_e4m3fn", None, 384, "float32", 2e-6),
    ("float4_e2m1fn", None, 32, "bfloat16", 1e-2),
    ("uint4", "float32", 384, "bfloat16", 1e-2),
    ("int4", "float32", 64, "float16", 2e-3),
]))  # fmt: skip
def test_cotangents(form: str, name: str, zero: str | None, group: int, x_dtype: str, tolerance: float) -> None:
    """The reference is the dequantized product, differentiated by jax in float32."""
    q, _ = every_code(name, 384, 37, group, zero, "float32", channel=group != 64)
    x, g = normals(8, 9, 384, dtype=x_dtype), normals(9, 9, 37, dtype=x_dtype)

    def ours(x: jax.Array, *parts: Any) -> jax.Array:
        scale, zero_point, channel_scale = parts
        leaves = {"scale": scale, "zero_point": zero_point, "channel_scale": channel_scale}
        return quantized_matmul(x, FORMS[form](dataclasses.replace(q, **leaves)))

    def reference(x: jax.Array, *parts: Any) -> jax.Array:
        scale, zero_point, channel_scale = parts
        leaves = {"scale": scale, "zero_point": zero_point, "channel_scale": channel_scale}
        return jnp.dot(x, dequantize(dataclasses.replace(q, **leaves), jnp.float32), precision="highest")

    operands = (x, q.scale, q.zero_point, q.channel_scale)
    out, pullback = jax.vjp(jax.jit(ours), *operands)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), operands)
    exact, exact_pullback = jax.vjp(reference, *wide)
    assert relative(out, np.asarray(exact)) < tolerance
    for operand, cotangent, expected in zip(operands, pullback(g), exact_pullback(g.astype(jnp.float32)), strict=True):
        if operand is None:
            assert cotangent is None
            continue
        assert (cotangent.shape, cotangent.dtype) == (operand.shape, operand.dtype)
        assert relative(cotangent, np.asarray(expected)) < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_integer_leaves_have_float0_cotangents(form: str) -> None:
    q, _ = every_code("uint4", 64, 70, 32, "own")
    weight = FORMS[form](q)
    x = normals(10, 3, 64, dtype="bfloat16")
    grads = jax.grad(lambda w: quantized_matmul(x, w).astype(jnp.float32).sum(), allow_int=True)(weight)
    assert jax.tree.structure(grads) == jax.tree.structure(weight)
    for grad, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(weight), strict=True):
        assert grad.shape == leaf.shape
        assert grad.dtype == (leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jax.dtypes.float0)
    assert np.any(np.asarray(grads.scale))
    assert grads.zero_point.dtype == jax.dtypes.float0 or not np.any(np.asarray(grads.zero_point))


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float8_e4m3fn"])
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_a_byte_are_constants(form: str, scale_dtype: str) -> None:
    """The gradients of x and of the channel scales are those of the dequantized product."""
    q, values = every_code("float4_e2m1fn", 128, 37, 32, None, scale_dtype, channel=True)
    x, weight = normals(12, 5, 128), FORMS[form](q)
    assert relative(jax.jit(quantized_matmul)(x, weight), np.asarray(x, np.float64) @ values) < 1e-6
    (d_x,) = jax.vjp(lambda x: quantized_matmul(x, weight), x)[1](jnp.ones((5, 37)))
    assert relative(d_x, np.broadcast_to(values.sum(1), (5, 128))) < 1e-5
    grads = jax.grad(lambda w: quantized_matmul(x, w).sum(), allow_int=True)(weight)
    d_channel = unpack(dataclasses.replace(weight, channel_scale=grads.channel_scale)) if form == "packed" else grads
    expected = (np.asarray(x, np.float64).sum(0) @ values) / np.asarray(q.channel_scale, np.float64)
    assert relative(d_channel.channel_scale, expected) < 1e-5
    if scale_dtype == "float8_e4m3fn":  # E8M0 has no 0
        assert not np.any(np.asarray(grads.scale, np.float32))


def test_padding_gets_no_cotangent() -> None:
    q, _ = every_code("int4", 96, 5, 32)
    packed = prepack(q)
    x = normals(11, 4, 96)
    grads = jax.grad(lambda w: quantized_matmul(x, w).sum(), allow_int=True)(packed)
    padding = np.asarray(packed.scale) == 0
    assert padding.sum() == packed.scale.size - q.scale.size
    assert not np.asarray(grads.scale)[padding].any()
    assert np.asarray(grads.scale)[~padding].all()


def test_only_what_is_asked_for_is_computed() -> None:
    q, _ = every_code("int8", 64, 8, 32, "bfloat16")
    x = normals(12, 4, 64)

    def count(text: str) -> int:
        return sum(
            text.count(f"{name}[") for name in ("dot_general", "quantized_matmul", "quantized_matmul_transposed")
        )

    def products(wrt: str) -> int:
        def loss(operand: jax.Array) -> jax.Array:
            parts = {"x": x, "scale": q.scale, "zero_point": q.zero_point, wrt: operand}
            return quantized_matmul(parts.pop("x"), dataclasses.replace(q, **parts)).sum()

        operand = x if wrt == "x" else getattr(q, wrt)
        return count(str(jax.make_jaxpr(jax.grad(loss))(operand)))

    assert [products(wrt) for wrt in ("x", "scale", "zero_point")] == [2, 2, 2]
    everything = jax.make_jaxpr(jax.grad(lambda x, q: quantized_matmul(x, q).sum(), (0, 1), allow_int=True))(x, q)
    assert count(str(everything)) == 4


# For one product: whether under jax.checkpoint, and the differentiated operand.
DERIVATIVES = ((True, (0, 1)), (True, 1), (False, (0, 1)), (False, 1), (True, 0), (False, 0), (False, (0, 1)))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_one_product_one_after_the_other(form: str) -> None:
    """JAX keeps one residual tree of a traced call for all derivatives."""
    q, _ = every_code("int4", 128, 128, 64, None, "float32")
    x, packed = normals(15, 5, 128), FORMS[form](q)

    def ours(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sin(quantized_matmul(x, dataclasses.replace(packed, scale=scale)) / 64).sum()

    def dense(x: jax.Array, scale: jax.Array) -> jax.Array:
        weight = dataclasses.replace(packed, scale=scale)
        weight = dequantize(unpack(weight) if form == "packed" else weight)
        return jnp.sin(jnp.dot(x, weight, precision="highest") / 64).sum()

    for rematerialised, argnums in DERIVATIVES:
        found = jax.grad(jax.checkpoint(ours) if rematerialised else ours, argnums)(x, packed.scale)
        expected = jax.grad(dense, argnums)(x, packed.scale)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert relative(a, np.asarray(b, np.float64)) < 1e-4


@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_scales_of_some_of_several_equal_layers(trained: tuple[int, ...]) -> None:
    layers = [quantize(normals(16 + i, 128, 128) / 12, "int4", group_size=64) for i in range(3)]
    x = normals(19, 5, 128)

    def network(scales: dict[int, jax.Array], product: Callable[..., jax.Array]) -> jax.Array:
        h = x
        for i, q in enumerate(layers):
            h = jnp.tanh(product(h, dataclasses.replace(q, scale=scales.get(i, q.scale))))
        return h.sum()

    scales = {i: layers[i].scale for i in trained}
    found = jax.jit(jax.grad(lambda s: network(s, quantized_matmul)))(scales)
    expected = jax.grad(lambda s: network(s, lambda h, q: jnp.dot(h, dequantize(q), precision="highest")))(scales)
    for i in trained:
        assert relative(found[i], np.asarray(expected[i], np.float64)) < 1e-4


def test_second_derivatives() -> None:
    q, values = every_code("int4", 64, 8, 32)
    x = normals(14, 4, 64)
    loss = lambda x: jnp.sum(jnp.sin(quantized_matmul(x, q) * 0.1))  # noqa: E731
    dense = lambda x: jnp.sum(jnp.sin(jnp.dot(x, values.astype(np.float32), precision="highest") * 0.1))  # noqa: E731
    twice = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x)  # noqa: E731
    np.testing.assert_allclose(twice(loss), twice(dense), rtol=1e-3, atol=1e-3)


def test_cotangent_of_e4m3_saturates() -> None:
    q = quantize(jnp.full((32, 4), 1000.0), "int8", group_size=32)
    x = jnp.ones((2, 32), jnp.float8_e4m3fn)
    dx = jax.grad(lambda x: quantized_matmul(x, q).astype(jnp.float32).sum())(x)
    assert dx.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(dx.astype(jnp.float32), 448)


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_vmap(form: str) -> None:
    w = normals(15, 3, 96, 10)
    weights = jax.vmap(lambda w: FORMS[form](quantize(w, "uint4", group_size=32, symmetric=False)))(w)
    x = normals(16, 3, 5, 96)
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], weights)  # noqa: E731
    both = jax.jit(jax.vmap(quantized_matmul))(x, weights)
    shared = jax.vmap(quantized_matmul, (None, 0))(x[0], weights)
    columns = jax.vmap(quantized_matmul, (1, None), 1)(x[1].T, one(1))
    grads = jax.vmap(jax.grad(lambda x, w: quantized_matmul(x, w).sum()))(x, weights)
    for i in range(3):
        np.testing.assert_allclose(both[i], quantized_matmul(x[i], one(i)), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(shared[i], quantized_matmul(x[0], one(i)), rtol=1e-5, atol=1e-5)
        expected = jax.grad(lambda x, i=i: quantized_matmul(x, one(i)).sum())(x[i])
        np.testing.assert_allclose(grads[i], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(columns, both[1].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_scan_over_layers_with_remat(form: str) -> None:
    w = normals(17, 4, 64, 64) * 0.2
    weights = jax.vmap(lambda w: FORMS[form](quantize(w, "int4", group_size=32)))(w)
    x = normals(18, 5, 64)

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(quantized_matmul(x, w)), None))
        return jnp.sum(jax.lax.scan(layer, x, dataclasses.replace(weights, scale=scale))[0])

    def unrolled(x: jax.Array, scale: jax.Array) -> jax.Array:
        for i in range(4):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], dataclasses.replace(weights, scale=scale))
            x = jnp.tanh(quantized_matmul(x, layer))
        return jnp.sum(x)

    ours = jax.jit(jax.grad(run, (0, 1)))(x, weights.scale)
    expected = jax.grad(unrolled, (0, 1))(x, weights.scale)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
@pytest.mark.parametrize("form", FORMS)
def test_shard_map(form: str) -> None:
    """Data parallelism: cotangents of the replicated weight are summed over the mesh."""
    q, _ = every_code("int4", 64, 10, 32, "float32", "float32")
    weight, x = FORMS[form](q), normals(19, 8, 64)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x: jax.Array, weight: Any) -> jax.Array:
        product = jax.shard_map(quantized_matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        return jnp.sum(jnp.sin(product(x, weight)))

    ours = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, weight)
    alone = lambda x, w: jnp.sum(jnp.sin(quantized_matmul(x, w)))  # noqa: E731
    expected = jax.grad(alone, (0, 1), allow_int=True)(x, weight)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(ours[1].scale, expected[1].scale, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(ours[1].zero_point, expected[1].zero_point, rtol=1e-4, atol=1e-3)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"x": ones((3, 64), jnp.int8)}, TypeError, "x of dtype int8; accepted: bfloat16, float16, float8_e4m3fn, fl"),
    ({"x": ones((3, 63))}, ValueError, "x of shape (3, 63) and w of shape (64, 5); accepted: x of [..., 64]"),
    ({"x": ones(())}, ValueError, "x of shape () and w of shape (64, 5)"),
    ({"w": ones((64, 5))}, TypeError, "w of type ArrayImpl; accepted: QuantizedArray, PackedWeight, a qwix QArray"),
    ({"w": QuantizedArray(ones((0, 5), jnp.int4), ones((1, 5)))}, ValueError, "accepted: k of at least 1"),
    ({"w": QuantizedArray(ones((2, 64, 5), jnp.int4), ones((2, 1, 5)))}, ValueError, "a weight of shape (2, "),
    ({"preferred_element_type": jnp.int32}, TypeError, "accepted: bfloat16, float16, float32"),
    ({"preferred_element_type": "foo"}, TypeError, "preferred_element_type='foo'; accepted: bfloat16, float16, float3"),
    ({"implementation": "cutlass"}, NotImplementedError, "implementation='cutlass': kernels take packed weights; use "),
    ({"implementation": "host"}, NotImplementedError, "use jax_splitk.prepack, once. Or use implementation=None or"),
    ({"config": quantized_host.Config(1, 24)}, NotImplementedError, "config=Config(splits=1, row_block=24): kernels"),
    ({"implementation": "triton"}, ValueError, "implementation='triton'; accepted: None, 'cutlass', 'host', 'xla'"),
    ({"config": object()}, TypeError, "of type object; accepted: None (leave it out"),
    ({"config": wgrad_host.Config(1, 64)}, TypeError,
     "of type jax_splitk.kernels.cpu.wgrad.Config; accepted: None (leave it out: the fastest is chosen), or the "
     "Config of a family that computes quantized_matmul, e.g. jax_splitk.kernels.cpu.quantized."),
])  # fmt: skip
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, _ = every_code("int4", 64, 5, 32)
    arguments = {"x": ones((3, 64)), "w": q, **change}
    with pytest.raises(error, match=re.escape(message)):
        quantized_matmul(arguments.pop("x"), arguments.pop("w"), **arguments)
