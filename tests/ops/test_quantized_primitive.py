"""The quantized_matmul primitive: its transformations, what it lowers to, and the second weight for x's cotangent."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import prepack, quantized_matmul
from jax_splitk.kernels.cpu import quantized as quantized_host
from jax_splitk.ops import quantized_primitive
from jax_splitk.ops.equations import walk
from jax_splitk.problems import quantized_reference
from jax_splitk.quantized import PackedWeight, dequantize, unpack
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET
from jax_splitk.tuning.options import Options
from tests.formats import every_code
from tests.problems import on_device, ones

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's kernel")

HOST = functools.partial(quantized_matmul, implementation="host")
BY_XLA = functools.partial(quantized_matmul, implementation="xla")
EXPORTED = {"disabled_checks": [jax.export.DisabledSafetyCheck.custom_call(HOST_QUANTIZED_TARGET)]}


def integers(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return on_device(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def weight(features: int = 37, k: int = 192, zero: str | None = None, seed: int = 0) -> PackedWeight:
    """A weight with scales of powers of two and integer zero points, so that sums of integers are exact."""
    q, _ = every_code("int4", k, features, 64, zero, seed=seed)
    scale = np.exp2(np.round(np.log2(np.abs(np.asarray(q.scale, np.float32)))))
    q = dataclasses.replace(q, scale=jnp.asarray(scale, q.scale.dtype))
    if zero is not None:
        q = dataclasses.replace(q, zero_point=jnp.round(q.zero_point))
    return prepack(q)


def stacked(*weights: PackedWeight) -> PackedWeight:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    return jax.jit(functools.partial(fn)).lower(*args).as_text()


def calls(fn: Callable[..., Any], *args: Any) -> int:
    """How often the kernel is called in the lowered program."""
    return lowered(fn, *args).count(f"custom_call @{HOST_QUANTIZED_TARGET}")


def float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def product(x: jax.Array, w: PackedWeight) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(dequantize(unpack(w), jnp.float32), np.float64)


# ---- lowering --------------------------------------------------------------------------------------------------------


def test_packed_weights_and_small_activations_go_to_the_kernel() -> None:
    w = weight()
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        assert calls(quantized_matmul, integers(0, 6, 192, dtype=dtype), w) == 1
    x = integers(0, 2, 3, 192)
    np.testing.assert_array_equal(HOST(x, w, preferred_element_type="float32"), product(x, w))
    assert calls(quantized_matmul, x.astype(jnp.float32), w) == 0
    assert calls(quantized_matmul, x, unpack(w)) == 0
    assert calls(BY_XLA, x, w) == 0
    assert calls(quantized_matmul, jnp.zeros((0, 192), jnp.bfloat16), w) == 0


FALLBACKS = [
    ("float32", True, "x of dtype float32; kernels take bfloat16, float16, float8_e4m3fn"),
    ("bfloat16", False, "kernels take packed weights; use jax_splitk.prepack, once"),
    ("float32", False, "kernels take packed weights; use jax_splitk.prepack, once"),
]


@pytest.mark.parametrize("dtype, packed, why", FALLBACKS)
def test_what_no_kernel_takes_is_explained_and_logged(
    dtype: str, packed: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    w = weight(41) if packed else unpack(weight(41))  # features of no other test: a line is logged once
    x = integers(0, 3, 2, 192, dtype=dtype)
    transforms = (
        (6, quantized_matmul),
        (6, jax.jit(jax.grad(lambda x, w: quantized_matmul(x, w).astype(jnp.float32).sum()))),
        (6, jax.vmap(quantized_matmul, (0, None))),
        (2, lambda x, w: jax.lax.map(jax.checkpoint(lambda x: quantized_matmul(x, w)), x)),
        (2, lambda x, w: jax.vmap(quantized_matmul, (None, 0))(x[0], stacked(w, w))),
    )
    for rows, fn in transforms:
        with caplog.at_level("INFO", "jax_splitk"):
            assert calls(fn, x, w) == 0
        decision, *of_x = jax_splitk.explain(fn, x, w).decisions
        assert [d.problem.op for d in of_x] == ["quantized_matmul_transposed"] * (fn is transforms[1][1])
        assert (decision.problem.rows, decision.problem.features, decision.problem.x_dtype) == (rows, 41, dtype)
        assert (decision.implementation, decision.config, decision.why) == ("xla", None, why)
        assert jax_splitk.tune(fn, x, w).entries == ()
    lines = [f"quantized_matmul {dtype}->{dtype} x {rows}x192 w 192x41 " for rows in (6, 2)]
    messages = [record.getMessage() for record in caplog.records]
    for line in lines:
        (message,) = (message for message in messages if message.startswith(line))
        assert message.endswith(f": XLA ({why})")
        assert ("unpacked" in message) != packed


@pytest.mark.parametrize("packed", [True, False])
def test_works_with_jit_disabled(packed: bool) -> None:
    x, w = integers(1, 3, 192), weight()
    given = w if packed else unpack(w)
    with jax.disable_jit():
        out = quantized_matmul(x, given, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(out, product(x, w).astype(np.float32))


def test_an_empty_product_is_xlas() -> None:
    w = weight()
    for x in (jnp.zeros((0, 192), jnp.bfloat16), jnp.zeros((0, 2, 192), jnp.bfloat16)):
        fn = quantized_matmul if x.ndim == 2 else jax.vmap(quantized_matmul, (0, None))
        (decision,) = jax_splitk.explain(fn, x, w).decisions
        assert (decision.implementation, decision.why[:16]) == ("xla", "an empty product")
        assert fn(x, w).shape == (*x.shape[:-1], 37)


@pytest.mark.parametrize("arguments, error, message", [
    ({"implementation": "cutlass"}, NotImplementedError, "quantized_stream, quantized_fp8, quantized_tiled: runs on"),
    ({"config": quantized_host.Config(1000, 24)}, ValueError, "splits 1000; accepted: 1 to 3"),
    ({"config": quantized_host.Config(1, 24), "implementation": "cutlass"}, ValueError, "belongs to implementation='h"),
    ({"x": ones((3, 192)), "implementation": "host"}, NotImplementedError, "x of dtype float32; kernels take bf"),
    ({"x": ones((0, 192), "bfloat16"), "implementation": "host"}, NotImplementedError, "an empty product, x of sh"),
])  # fmt: skip
def test_what_cannot_serve_is_an_error(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"x": integers(0, 3, 192), **arguments}
    with pytest.raises(error, match=message):
        quantized_matmul(arguments.pop("x"), weight(), **arguments)


def test_leaves_of_other_dtypes_are_refused() -> None:
    w = jax.tree.map(lambda leaf: leaf.astype("float32"), weight())
    with pytest.raises(TypeError, match="a PackedWeight with words of dtype float32; accepted: uint32"):
        quantized_matmul(integers(0, 3, 192), w)


def test_options_apply() -> None:
    x, w = integers(1, 5, 192), weight()
    with jax_splitk.options(implementation="xla"):
        assert calls(quantized_matmul, x, w) == 0
    with jax_splitk.options(workspace_limit_bytes=0):
        assert calls(quantized_matmul, x, w) == 0
        with pytest.raises(NotImplementedError, match="no config fits in workspace_limit_bytes=0"):
            lowered(HOST, x, w)
    with jax_splitk.options(implementation="host"), pytest.raises(NotImplementedError, match="use jax_splitk"):
        lowered(quantized_matmul, x, unpack(w))
    config = quantized_host.Config(3, 7)
    text = lowered(functools.partial(quantized_matmul, config=config), x, w)
    assert re.search(r"row_block = 7 : i64.*splits = 3 : i64", text)


def test_export() -> None:
    w = weight()
    run = jax.jit(lambda x: quantized_matmul(x, w))
    shape = lambda text: jax.ShapeDtypeStruct(jax.export.symbolic_shape(text), jnp.bfloat16)  # noqa: E731
    x = integers(2, 7, 192)
    fixed = jax.export.export(run, **EXPORTED)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert fixed.mlir_module().count(HOST_QUANTIZED_TARGET) == 1
    open_ = jax.export.export(run)(shape("n, 192"))
    assert HOST_QUANTIZED_TARGET not in open_.mlir_module()
    (decision,) = jax_splitk.explain(run, shape("n, 192")).decisions
    assert (decision.implementation, decision.why) == ("xla", "symbolic shapes")
    assert jax_splitk.tune(run, shape("n, 192")).entries == ()
    for exported in (fixed, open_):
        np.testing.assert_array_equal(exported.call(x), run(x))


def test_export_with_a_symbolic_batch_of_weights() -> None:
    x, w = integers(2, 7, 192), weight()
    (b,) = jax.export.symbolic_shape("b")
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape), leaf.dtype), w)
    exported = jax.export.export(jax.jit(jax.vmap(HOST, (None, 0))), **EXPORTED)(x, batch)
    assert exported.mlir_module().count(HOST_QUANTIZED_TARGET) == 1
    np.testing.assert_array_equal(exported.call(x, stacked(w, w, w)), jnp.stack([HOST(x, w)] * 3))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs several devices")
def test_explicit_sharding_of_rows() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    w = weight()
    exact = product(integers(4, 8, 192), w)
    with jax.set_mesh(mesh):
        x = jax.device_put(integers(4, 8, 192), jax.sharding.NamedSharding(mesh, P(("a", "b"))))
        w = jax.device_put(w, jax.sharding.NamedSharding(mesh, P()))
        run = lambda x: quantized_matmul(x, w, preferred_element_type="float32")  # noqa: E731
        out = jax.jit(run)(x)
        assert jax.typeof(out).sharding.spec == P(("a", "b"), None)
        np.testing.assert_array_equal(out, exact)
        dx = jax.jit(jax.grad(lambda x: run(x).sum()))(x)
        assert jax.typeof(dx).sharding.spec == P(("a", "b"), None)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 cannot split sharded dimensions")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs several devices")
def test_explicit_sharding_of_features_that_are_not_packed() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
        x, w = put(integers(4, 8, 192), "a"), put(unpack(weight(38)), None, "b")
        out = jax.jit(functools.partial(quantized_matmul, preferred_element_type="float32"))(x, w)
        assert jax.typeof(out).sharding.spec == P("a", "b")
    np.testing.assert_array_equal(out, product(integers(4, 8, 192), weight(38)))


# ---- vmap ------------------------------------------------------------------------------------------------------------


def problems(fn: Callable[..., Any], *args: Any) -> list[tuple[int, int]]:
    """(rows, count) of the products in a trace."""
    return [(d.problem.rows, d.count) for d in jax_splitk.explain(fn, *args).decisions]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_of_activations_is_one_product(axis: int) -> None:
    x, w = integers(6, 3, 5, 192), weight()
    fn = jax.vmap(HOST, (axis, None), axis)
    assert problems(fn, x, w) == [(15, 1)]
    assert "while" not in lowered(fn, x, w)
    np.testing.assert_array_equal(jax.jit(fn)(x, w), HOST(x, w))


def test_with_a_config_it_is_a_product_for_each() -> None:
    x, w = integers(7, 3, 5, 192), weight()
    fn = jax.vmap(functools.partial(quantized_matmul, config=quantized_host.Config(1, 5)), (0, None))
    assert problems(fn, x, w) == [(5, 1)]
    assert "while" in lowered(fn, x, w)
    np.testing.assert_array_equal(fn(x, w), HOST(x, w))


@pytest.mark.parametrize("zero", [None, "bfloat16"])
def test_a_batch_of_weights_is_chosen_for_one_of_them(zero: str | None) -> None:
    x, ws = integers(8, 2, 5, 192), [weight(zero=zero, seed=seed) for seed in range(2)]
    w = stacked(*ws)
    both, shared = jax.vmap(HOST), jax.vmap(HOST, (None, 0))
    for fn, x_of in ((both, x), (shared, x[0])):
        assert problems(fn, x_of, w) == [(5, 1)]
        text = lowered(fn, x_of, w)
        assert (text.count("while"), text.count(f"@{HOST_QUANTIZED_TARGET}")) == (1, 1)
        plain = lowered(jax.vmap(BY_XLA, (0 if x_of is x else None, 0)), x_of, w)
        assert ("while" in plain, plain.count("dot_general")) == (False, 1)
    expected = np.stack([HOST(x[i], ws[i]) for i in range(2)])
    np.testing.assert_array_equal(both(x, w), expected)
    np.testing.assert_array_equal(shared(x[0], w)[0], expected[0])


def test_batches_of_batches() -> None:
    ws = [[weight(seed=3 * i + j) for j in range(3)] for i in range(2)]
    w = stacked(*(stacked(*row) for row in ws))
    x = integers(9, 2, 4, 3, 5, 192)
    # Weights [i, j]; activations [i, n, j, rows]: n has no weights of its own.
    fn = jax.vmap(lambda x, w: jax.vmap(lambda x: jax.vmap(HOST)(x, w))(x))
    assert problems(fn, x, w) == [(20, 1)]
    out = jax.jit(fn)(x, w)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(out[i, :, j], HOST(x[i, :, j], ws[i][j]))
    assert out.shape == (2, 4, 3, 5, 37)


# ---- differentiation -------------------------------------------------------------------------------------------------


def test_the_primitive_is_linear_in_x_and_differentiable_in_scale_and_zero_point() -> None:
    """Runs forward mode and transposition of the primitive itself, which higher derivatives of the product use."""
    x, w = integers(10, 2, 5, 64), stacked(weight(9, 64, "bfloat16"), weight(9, 64, "bfloat16", seed=1))
    layout = quantized_reference.Layout(w.matrix, w.qtype, w.group_size, w.layout)

    def ours(x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        options = Options(implementation="host")
        call = quantized_primitive.QuantizedCall(layout=layout, out_dtype="float32", options=options)
        return call.bind(x, words, scale, zero)

    def theirs(x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        return quantized_reference.product(layout, x, (words, scale, zero, None), "float32")

    primals = (x, w.scale, w.zero_point)
    tangents = tuple(integers(seed, *p.shape) for seed, p in enumerate(primals))
    ct = integers(11, 2, 5, 9, dtype="float32")
    assert calls(jax.vmap(ours), x, w.words, *primals[1:]) == 1

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(product: Callable[..., jax.Array]) -> Any:
        of = lambda *primals: jax.vmap(product)(primals[0], w.words, *primals[1:])  # noqa: E731
        forward = [
            jax.jvp(of, primals, tuple(t if i in moved else jnp.zeros_like(t) for i, t in enumerate(tangents)))
            for moved in ((0,), (1, 2))
        ]
        return forward, jax.vjp(of, *primals)[1](ct)

    for one, other in zip(*(jax.tree.leaves(derivatives(product)) for product in (ours, theirs)), strict=True):
        np.testing.assert_allclose(float32(one), float32(other), rtol=1e-5, atol=1e-3)


def test_second_derivatives_in_both_modes() -> None:
    x, w = integers(13, 2, 64).astype(jnp.float32) / 4, weight(8, 64)

    def loss(product: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(product(x.astype(jnp.bfloat16), w, preferred_element_type="float32") * 0.01))

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times_x(product: Callable[..., jax.Array]) -> Any:
        grad = jax.grad(functools.partial(loss, product))
        return jax.jvp(grad, (x,), (x,))[1], jax.grad(lambda y: jnp.vdot(grad(y), x))(x)

    for ours, theirs in zip(hessian_times_x(HOST), hessian_times_x(BY_XLA), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=0.01 * np.abs(theirs).max())


def test_gradients_through_scan_vmap_and_remat() -> None:
    x, w = integers(14, 3, 5, 64), stacked(*(weight(64, 64, "bfloat16", seed) for seed in range(2)))

    def loss(product: Callable[..., jax.Array], x: jax.Array, scale: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(jax.vmap(product, (0, None))(x, w) / 64), None))
        return jnp.sum(jax.lax.scan(layer, x, dataclasses.replace(w, scale=scale))[0].astype(jnp.float32))

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, product), (0, 1)))(x, w.scale) for product in (HOST, BY_XLA)
    )
    assert calls(jax.grad(functools.partial(loss, HOST), (0, 1)), x, w.scale) > 0
    for one, other in zip(ours, theirs, strict=True):
        size = np.abs(float32(other)).max()
        np.testing.assert_allclose(float32(one), float32(other), atol=0.03 * size)


def test_forward_mode_and_transposition() -> None:
    w = weight(64, zero="bfloat16")
    x, x_dot, g = integers(20, 4, 192), integers(21, 4, 192), integers(22, 4, 64)
    run = functools.partial(HOST, w=w)
    out, linear = jax.linearize(run, x)
    for found, exact in ((out, x), (linear(x_dot), x_dot), (jax.jvp(run, (x,), (x_dot,))[1], x_dot)):
        np.testing.assert_array_equal(float32(found), float32(HOST(exact, w)))
    pull = jax.linear_transpose(run, x)
    assert calls(pull, g) == 0  # XLA's, on a CPU
    np.testing.assert_array_equal(float32(pull(g)[0]), float32(jax.vjp(run, x)[1](g)[0]))

    def of_parts(scale: jax.Array, zero: jax.Array) -> jax.Array:
        return HOST(x, dataclasses.replace(w, scale=scale, zero_point=zero), preferred_element_type="float32")

    parts = (w.scale, w.zero_point)
    ct = integers(23, 4, 64, dtype="float32")
    dots = tuple(integers(seed, *part.shape, dtype="bfloat16") for seed, part in enumerate(parts))
    along, pulled = jax.jvp(of_parts, parts, dots)[1], jax.vjp(of_parts, *parts)[1](ct)
    both = sum(float32(dot).ravel() @ float32(d).ravel() for dot, d in zip(dots, pulled, strict=True))
    np.testing.assert_allclose(float32(along).ravel() @ float32(ct).ravel(), both, rtol=2e-2)


def test_gradients_of_a_vmapped_model_are_those_of_its_batch() -> None:
    """No example gets a cotangent of the weight of its own."""
    x, w = integers(24, 16, 3, 192), weight(64, zero="bfloat16")

    def loss(scale: jax.Array, zero: jax.Array, product: Callable[..., jax.Array]) -> jax.Array:
        return jnp.sum(product(x, dataclasses.replace(w, scale=scale, zero_point=zero)).astype(jnp.float32) ** 2)

    mapped = jax.grad(functools.partial(loss, product=jax.vmap(HOST, (0, None))), (0, 1))
    whole = jax.grad(functools.partial(loss, product=HOST), (0, 1))
    for ours, theirs in zip(mapped(w.scale, w.zero_point), whole(w.scale, w.zero_point), strict=True):
        np.testing.assert_array_equal(float32(ours), float32(theirs))
    sizes = [out.aval.size for eqn in walk(jax.make_jaxpr(mapped)(w.scale, w.zero_point).jaxpr)
             for out in eqn.outvars]  # fmt: skip
    assert max(sizes) < 16 * 192 * 64 / 4


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
@pytest.mark.parametrize("disabled", [False, True])
def test_shard_map_outside_jit(disabled: bool) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    x, w, g = integers(25, 8, 192), weight(64), integers(26, 8, 64)
    each = lambda x, scale: quantized_matmul(x, dataclasses.replace(w, scale=scale))  # noqa: E731
    parts = jax.shard_map(each, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert calls(lambda *xs: jax.vjp(parts, *xs)[0], x, w.scale) == 1
    with jax.disable_jit(disabled):
        ours = jax.vjp(parts, x, w.scale)[1](g)
    alone = jax.jit(lambda *xs: jax.vjp(each, *xs)[1](g))(x, w.scale)
    for one, other in zip(ours, alone, strict=True):
        np.testing.assert_allclose(float32(one), float32(other), atol=0.01 * np.abs(float32(other)).max())
