"""Chains of products on a GPU: the results of the products by themselves, bit for bit, however the kernels overlap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk import chained, join_gate_up, prepack, quantize, quantized_matmul
from tests.problems import generator, on_device

pytestmark = pytest.mark.gpu

RUNS = 100
SIZES = {"small": (256, 768), "uneven": (1056, 2720), "odd": (1001, 1001), "wide": (4096, 14336)}
FORMATS = {"int4": 64, "uint4": 32, "nf4": 64, "int8": None, "float4_e2m1fn": 32, "float8_e4m3fn": None}


def normal(*shape: int, seed: int, dtype: str = "bfloat16") -> jax.Array:
    return on_device(generator(seed).standard_normal(shape), dtype)


def weight(k: int, features: int, qtype: str, seed: int) -> Any:
    """A packed weight; per channel where groups do not divide k."""
    group = FORMATS[qtype]
    options = {"group_size": group if group and k % group == 0 else k, "symmetric": qtype != "uint4"}
    return quantize(normal(k, features, seed=seed) / k**0.5, qtype, **options)


@functools.lru_cache(maxsize=2)
def layer(size: str, qtype: str) -> dict[str, Any]:
    k, hidden = SIZES[size]
    gate_up = join_gate_up(*(weight(k, hidden // 8 * 8, qtype, seed) for seed in (1, 2)))
    return {
        "o": prepack(weight(k, k, qtype, 0)),
        "gate_up": gate_up,
        "down": prepack(weight(hidden // 8 * 8, k, qtype, 3)),
        "qkv": prepack(weight(k, 2 * k, qtype, 4)),
    }


def block(w: dict[str, Any], attention: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    x = quantized_matmul(attention, w["o"], residual=x)
    y = quantized_matmul(x, w["gate_up"], norm_epsilon=1e-5, activation="swiglu")
    z = quantized_matmul(y, w["down"], residual=x)
    return x, y, z, quantized_matmul(z, w["qkv"], norm_epsilon=1e-5)


def same(one: Any, other: Any) -> None:
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def in_one_call(function: Callable[..., Any], *operands: Any) -> Any:
    """The compiled function, which has one custom call of four kernels."""
    compiled = jax.jit(chained(function)).lower(*operands)
    text = compiled.as_text()
    (names,) = [part.split('"', 1)[0] for part in text.split('kernels = "')[1:]]
    assert len(names.split(";")) == 4
    return compiled.compile()


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_chains_results_are_those_of_its_products(size: str, qtype: str, rows: int) -> None:
    """k that ends within a stage, and x that TMA cannot load (odd), too. XLA computes products that kernels of chains
    do not take; these divide the chain."""
    k, w = SIZES[size][0], layer(size, qtype)
    attention, x = normal(rows, k, seed=5), normal(rows, k, seed=6)
    expected = jax.jit(block)(w, attention, x)
    found = jax.jit(chained(block))(w, attention, x)
    kernels = [
        [(d.family, d.config) for d in jax_splitk.explain(each, w, attention, x).decisions]
        for each in (block, chained(block))
    ]
    if kernels[0] == kernels[1]:
        same(found, expected)
    else:  # in a chain another kernel serves, whose sums have another order
        assert rows > 7
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.1, atol=0.25)


@pytest.mark.parametrize("size", ["small", "wide"])
def test_a_hundred_runs_in_a_loop(size: str) -> None:
    """Kernels of one program follow each other closely, and each chain's input is the result of the one before."""
    k, w = SIZES[size][0], layer(size, "int4")
    x = normal(1, k, seed=7)

    def loop(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(h: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
            *_, z, qkv = function(w, x, h)
            return (x + z * jnp.bfloat16(2**-6)).astype(jnp.bfloat16), qkv

        return jax.jit(lambda h: lax.scan(step, h, length=RUNS))

    expected = loop(block)(x)
    run = loop(chained(block))
    for _ in range(3):
        same(run(x), expected)


def test_e4m3_activations_and_a_chain_of_independent_products() -> None:
    w = [prepack(weight(512, 520, "int4", seed)) for seed in range(4)]
    x = normal(5, 512, seed=9, dtype="float8_e4m3fn")
    function = lambda w, x: [quantized_matmul(x, each) for each in w]  # noqa: E731
    same(in_one_call(function, w, x)(w, x), jax.jit(function)(w, x))


def test_a_chain_under_scan_reads_the_stack_in_place() -> None:
    """No copy of a layer's weights in temporary memory."""
    layers = [layer("wide", "int4")] * 3
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x = normal(1, 4096, seed=10)

    def model(stack: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (chained(block)(w, x, h)[2], None), x, stack)[0]

    compiled = jax.jit(model).lower(stack, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    expected = x
    for each in layers:
        expected = jax.jit(block)(each, x, expected)[2]
    same(compiled(stack, x), expected)
