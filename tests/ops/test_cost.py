"""`jax_splitk.cost` counts what XLA cannot see in custom calls, and nothing twice."""

import functools
from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import cost, intercept

X = jax.ShapeDtypeStruct((8, 10, 10, 16), jnp.float32)
W = jax.ShapeDtypeStruct((3, 3, 16, 32), jnp.float32)
PIXELS = 8 * 8 * 8
FLOPS = 2 * PIXELS * 9 * 16 * 32


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()


ours = intercept()(plain)


def xlas(fn: Any, *args: Any) -> dict[str, float]:
    return jax.jit(fn).lower(*args).cost_analysis()


def test_the_total_is_what_xla_counts_of_its_own() -> None:
    expected = xlas(jax.grad(plain), W, X)["flops"]
    found = cost(jax.grad(ours), W, X)
    (operation,) = found.operations
    assert (operation.count, operation.flops, found.flops) == (1, FLOPS, FLOPS)
    moved = 4 * (8 * 10 * 10 * 16 + PIXELS * 32 + 9 * 16 * 32)
    assert (operation.bytes_accessed, found.bytes_accessed) == (moved, moved)
    assert found.total_flops == expected == found.flops + found.rest_flops
    assert found.total_bytes_accessed == found.bytes_accessed + found.rest_bytes_accessed > moved
    nothing = cost(plain, W, X)
    assert (nothing.operations, nothing.flops, nothing.total_flops) == ((), 0, xlas(plain, W, X)["flops"])


def test_what_computes_an_operation_does_not_matter() -> None:
    found = {}
    for implementation in ("xla", "host", "cutlass"):
        with jax_splitk.options(implementation=implementation):
            found[implementation] = cost(jax.grad(ours, (0, 1)), W, X)
    assert found["xla"] == found["host"] == found["cutlass"]


def test_equal_operations_are_summed() -> None:
    grad = jax.grad(ours)
    found = cost(lambda w, x: (grad(w, x), grad(w, x + 1), grad(w, x[:4])), W, X)
    assert [(o.problem.batch, o.count) for o in found.operations] == [(8, 2), (4, 1)]
    assert found.flops == 2.5 * FLOPS
    body = lambda w, x: lax.scan(lambda w, _: (w - grad(w, x), None), w, None, 7)[0]  # noqa: E731
    assert cost(body, W, X).flops == FLOPS
    lines = str(found).splitlines()
    assert lines[0].split() == ["operation", "x", "GFLOP", "MB"]
    assert lines[1].endswith(f"  2  {FLOPS / 1e9:12.4f}  {found.operations[0].bytes_accessed / 1e6:12.4f}")
    assert [line.split("  ")[0] for line in lines[3:]] == ["jax_splitk", "the rest", "total"]


def test_products_with_quantized_weights() -> None:
    pack = lambda w: jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=32))  # noqa: E731
    w, x = jnp.ones((3, 64, 32)), jax.ShapeDtypeStruct((3, 5, 64), jnp.bfloat16)
    found = cost(lambda x: jax_splitk.quantized_matmul(x[0], pack(w[0])), x)
    assert found.flops == 2 * 5 * 64 * 32
    many = cost(jax.vmap(jax_splitk.quantized_matmul), x, jax.vmap(pack)(w))
    assert [(o.count, o.flops) for o in many.operations] == [(3, 2 * 5 * 64 * 32)]


def test_nothing_is_run_or_tuned_and_traces_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    ran = []

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return jax.grad(ours)(w, x)

    cost(step, W, X)
    assert ran == []
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    w, x = jnp.ones(W.shape), jnp.ones(X.shape)
    assert float(step(w, x).min()) == PIXELS
    cost(step, w, x)
    assert float(step(w, x).min()) == PIXELS


def test_a_devices_part() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(jax.grad(ours), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert cost(functools.partial(jax.jit(fn)), W, X).flops == FLOPS // 4
