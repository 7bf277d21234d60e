"""The gradient of a quantized product's x: an operation that reads the forward product's weight, and its own
transformations, lowering and fallbacks. No GPU: a lowering for CUDA shows which kernel was chosen."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import dequantize, prepack, quantize, quantized_matmul, unpack
from jax_splitk.kernels.base import xla
from jax_splitk.kernels.quantized import tiled, transposed
from jax_splitk.ops.decision import Decision
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.quantized import PackedWeight
from jax_splitk.runtime.plan import LAUNCH_TARGET as LAUNCH
from tests.formats import every_code
from tests.problems import on_device

OP = "quantized_matmul_transposed"


def weight(k: int = 256, features: int = 384, qtype: str = "int4", dtype: Any = jnp.bfloat16, seed: int = 0) -> Any:
    return prepack(quantize(normal(k, features, dtype=dtype, seed=seed), qtype, group_size=64))


def normal(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 1) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def values(w: PackedWeight) -> jax.Array:
    return dequantize(unpack(w), jnp.float32)


def dx(x: jax.Array, w: Any, g: jax.Array, **options: Any) -> jax.Array:
    return jax.vjp(lambda x: quantized_matmul(x, w, **options), x)[1](g)[0]


def lowered(fn: Callable[..., Any], *args: Any, platform: str = "cuda") -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def gradients(fn: Callable[..., Any], *args: Any) -> list[Decision]:
    """The decisions for gradients of x. The trace of a gradient has the product, too."""
    return [d for d in jax_splitk.explain(fn, *args, platform="cuda").decisions if d.problem.op == OP]


def close(found: Any, expected: Any, tolerance: float = 0.01) -> None:
    a, b = (np.asarray(each, np.float64) for each in (found, expected))
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def big(rows: int = 1024, **changes: Any) -> tuple[Any, Any, Any]:
    """Types of x, a weight of 4096 by 4096 and the result's cotangent."""
    w = jax.eval_shape(lambda: weight(4096, 4096, **changes))
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    return x, w, x


# ---- lowering ------------------------------------------------------------------------------------------------------


def test_a_qlora_step_leaves_no_product_of_its_frozen_weights_to_xla() -> None:
    """Also each layer of a scan, whose weights are a stack."""
    _, w, x = big()
    adapters = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 4096, 16), (2, 16, 4096))]
    stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), w)

    def loss(adapters: Any, x: jax.Array, stack: Any) -> jax.Array:
        def layer(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
            w, a, b = given
            return quantized_matmul(x, w) + x @ a @ b, None

        return jnp.sum(jnp.square(jax.lax.scan(layer, x, (stack, *adapters))[0].astype(jnp.float32)))

    found = jax_splitk.explain(jax.grad(loss), adapters, x, stack, platform="cuda")
    kernels = {d.problem.op: (d.implementation, d.family) for d in found.decisions}
    assert kernels["quantized_matmul"] == ("cutlass", "quantized_tiled")
    assert kernels[OP] == ("cutlass", "quantized_transposed")
    assert found.unrouted == ()
    text = lowered(jax.grad(loss), adapters, x, stack)
    assert text.count(f"custom_call @{LAUNCH}") == 2


def test_a_lowering_for_cuda_calls_the_kernel_and_for_others_it_multiplies() -> None:
    x, w, g = big()
    assert lowered(dx, x, w, g).count(f"custom_call @{LAUNCH}") == 1
    for platform in ("cpu", "tpu"):
        text = lowered(dx, x, w, g, platform=platform)
        assert "custom_call" not in text
        assert text.count("dot_general") == 1
    with_xla = functools.partial(dx, implementation="xla")
    assert LAUNCH not in lowered(with_xla, x, w, g)
    with jax_splitk.options(implementation="xla"):
        assert LAUNCH not in lowered(dx, x, w, g)


def test_the_name_in_hlo_is_the_gradients() -> None:
    x, w, g = big()
    text = jax.jit(dx).trace(x, w, g).lower(lowering_platforms=("cuda",)).as_text("hlo", debug_info=True)
    assert f"x_gradient/jax_splitk.{OP}/quantized_transposed_int4" in text


def test_a_gradient_for_which_xla_is_faster_is_left_to_it_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "estimate", lambda problem, target: xla.Estimate(1e-6, 0.05))
    x, w = normal(16, 256), weight()
    g = normal(16, 384)
    (decision,) = gradients(dx, x, w, g)
    assert decision.implementation == "xla"
    assert "XLA is faster" in decision.why
    asked = functools.partial(dx, implementation="cutlass")
    (decision,) = gradients(asked, x, w, g)
    assert decision.family == "quantized_transposed"
    assert LAUNCH in lowered(asked, x, w, g)


def test_an_implementation_that_cannot_serve_the_gradient_is_asked_for_the_product_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No host kernel computes it, and no kernel takes its float32 cotangent."""
    x, w = normal(16, 256), weight(features=40)
    expected = normal(16, 40).astype(jnp.float32) @ values(w).T
    with caplog.at_level(logging.INFO, "jax_splitk"):
        close(jax.jit(functools.partial(dx, implementation="host"))(x, w, normal(16, 40)), expected)
    assert any(
        OP in (line := record.getMessage()) and "no kernel for platform cpu" in line for record in caplog.records
    )
    wide = functools.partial(dx, implementation="cutlass", preferred_element_type="float32")
    g = normal(16, 40, dtype=jnp.float32)
    (decision,) = gradients(wide, x, w, g)
    assert decision.why == "x of dtype float32; kernels take bfloat16, float16, float8_e4m3fn"
    close(dx(x, w, g, preferred_element_type="float32"), g @ values(w).T)


def test_the_forward_config_is_not_the_gradients() -> None:
    x, w, g = big()
    config = tiled.Config(128, 256, 3, 128, 1)  # a thread block for each tile
    (decision,) = gradients(functools.partial(dx, config=config), x, w, g)
    assert type(decision.config) is transposed.Config


def test_export_contains_the_kernel() -> None:
    x, w, g = big()
    exported = jax.export.export(
        jax.jit(dx), platforms=("cuda",), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(LAUNCH)]
    )(x, w, g)
    assert exported.mlir_module().count(f"custom_call @{LAUNCH}") == 1
    rows = jax.export.symbolic_shape("n")[0]
    x, g = (jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16) for _ in range(2))
    assert LAUNCH not in jax.export.export(jax.jit(dx), platforms=("cuda",))(x, w, g).mlir_module()


# ---- values, by XLA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_is_the_product_with_the_forward_weight(dtype: str, packed: bool) -> None:
    q, exact = every_code("uint4", 192, 40, 64, "bfloat16")
    w = prepack(q) if packed else q
    x = normal(6, 192).astype(dtype)
    out = jnp.dtype("bfloat16" if dtype == "float8_e4m3fn" else dtype)
    g = (normal(6, 40, dtype=jnp.float32) / 64).astype(out)
    found = dx(x, w, g)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    close(found.astype(jnp.float32), np.asarray(g.astype(jnp.float32), np.float64) @ exact.T,
          0.04 if dtype == "float8_e4m3fn" else 0.01)  # fmt: skip


def test_a_large_gradient_of_8_bits_saturates() -> None:
    w = weight()
    found = dx(normal(4, 256).astype("float8_e4m3fn"), w, jnp.full((4, 384), 1e4, jnp.bfloat16))
    assert np.abs(np.asarray(found, np.float32)).max() == 448


def test_it_is_linear_and_its_transpose_is_the_product() -> None:
    x, w, g = normal(6, 256), weight(), normal(6, 384)
    jaxpr = str(jax.make_jaxpr(lambda g: jax.vjp(lambda g: dx(x, w, g), g)[1](x)[0])(g))
    assert f"{OP}[" in jaxpr
    assert "quantized_matmul[" in jaxpr
    back = jax.vjp(lambda g: dx(x, w, g), g)[1](x)[0]
    close(back, x.astype(jnp.float32) @ values(w))
    tangent = jax.jvp(lambda g: dx(x, w, g), (g,), (2 * g,))[1]
    np.testing.assert_array_equal(tangent, dx(x, w, 2 * g))


@pytest.mark.parametrize("zero", [None, "bfloat16"])
def test_second_derivatives(zero: str | None) -> None:
    """Derivatives of a penalty on the gradient of x: by x, by the scales and by the zero points."""
    q, _ = every_code("uint4" if zero else "int4", 128, 40, 64, zero, "float32")
    packed, x = prepack(q), normal(5, 128, dtype=jnp.float32) / 8

    def penalty(product: Callable[..., jax.Array], x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(jax.grad(lambda x: jnp.sin(product(x, parts) / 32).sum())(x)).sum()

    def ours(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
        return quantized_matmul(x, dataclasses.replace(packed, **parts))

    def dense(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
        return jnp.dot(x, values(dataclasses.replace(packed, **parts)), precision="highest")

    parts = {"scale": packed.scale} | ({} if zero is None else {"zero_point": packed.zero_point})
    found, expected = (jax.jit(jax.grad(functools.partial(penalty, f), (0, 1)))(x, parts) for f in (ours, dense))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(one, other, 0.02)
    of_x = [jax.grad(lambda x, f=f: jnp.sin(f(x, parts) / 32).sum()) for f in (ours, dense)]
    forward, expected = (jax.jvp(gradient, (x,), (x,))[1] for gradient in of_x)
    close(forward, expected, 0.02)


# ---- transformations -----------------------------------------------------------------------------------------------


def problems(fn: Callable[..., Any], *args: Any) -> list[QuantizedTransposedProblem]:
    return [d.problem for d in gradients(fn, *args)]


def test_a_batch_of_cotangents_is_one_product() -> None:
    x, w, g = normal(3, 6, 256), weight(), normal(3, 6, 384)
    batched = jax.vmap(dx, (0, None, 0))
    assert [(p.rows, p.x_shape, p.out_shape) for p in problems(batched, x, w, g)] == [(18, (18, 384), (18, 256))]
    close(batched(x, w, g), g.astype(jnp.float32) @ values(w).T)


def test_a_batch_of_weights_is_a_product_for_each() -> None:
    each = [weight(seed=seed) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    x, g = normal(3, 6, 256), normal(3, 6, 384)
    batched = jax.vmap(functools.partial(dx, implementation="cutlass"))
    assert [p.rows for p in problems(batched, x, stack, g)] == [6]
    text = lowered(batched, x, stack, g)
    assert (text.count(f"custom_call @{LAUNCH}"), text.count("while")) == (1, 1)
    expected = jnp.stack([g.astype(jnp.float32)[i] @ values(w).T for i, w in enumerate(each)])
    close(jax.vmap(dx)(x, stack, g), expected)


def test_checkpoint_policies_see_a_dot_general() -> None:
    x, w = normal(6, 256), weight()

    def loss(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(jnp.sin(quantized_matmul(x, w).astype(jnp.float32))))(x)

        saved = jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)
        return jnp.sum(jnp.cos(saved(x).astype(jnp.float32)))

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    # The product, its gradient, and the two products of their derivatives: none is computed again.
    assert (text.count("quantized_matmul["), text.count(f"{OP}[")) == (2, 2)


MESH = ("tp",)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    return jax.make_mesh((2,), MESH, axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("axis", ["features", "k"])
def test_a_sharded_weight_is_not_gathered(axis: str, mesh: jax.sharding.Mesh) -> None:
    """Features: each device has a partial sum of dx. k: each has its part of dx."""
    x, w, g = normal(8, 256), weight(), normal(8, 384)
    words, of_x, of_g = {
        "features": (P("tp"), P(), P(None, "tp")),
        "k": (P(None, "tp"), P(None, "tp"), P()),
    }[axis]
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    sharded = jax.tree.map(lambda leaf: place(leaf, words) if jnp.ndim(leaf) else leaf, w)
    given = place(x, of_x), sharded, place(g, of_g)
    text = jax.jit(dx).lower(*given).compile().as_text()
    assert "all-gather" not in text
    assert ("all-reduce" in text) == (axis == "features")
    out = jax.jit(dx)(*given)
    close(out, g.astype(jnp.float32) @ values(w).T)
    parts = problems(dx, *given)
    assert [p.x_shape for p in parts] == [(8, 192) if axis == "features" else (8, 384)]
    assert [p.out_shape for p in parts] == [(8, 256) if axis == "features" else (8, 128)]


def test_inside_shard_map(mesh: jax.sharding.Mesh) -> None:
    x, w, g = normal(8, 256), weight(), normal(8, 384)
    rows = jax.shard_map(dx, mesh=mesh, in_specs=(P("tp"), P(), P("tp")), out_specs=P("tp"))
    close(jax.jit(rows)(x, w, g), g.astype(jnp.float32) @ values(w).T)
