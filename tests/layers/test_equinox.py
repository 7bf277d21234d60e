"""Packed weights in Equinox's layers, which compute `weight @ x` of one sample."""

from typing import Any

import equinox as eqx
import jax
import optax
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.quantized_models import dequantized
from jax_splitk.quantized import PackedWeight
from tests.layers.compared import check_products, relative
from tests.problems import seeded
from tests.training import fallen


def packed(w: Any) -> PackedWeight:
    """A Linear's weight is [features, k]."""
    return jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=32, axis=1), axis=1)


def weights(model: Any) -> list[Any]:
    layers = jax.tree.leaves(model, is_leaf=lambda layer: isinstance(layer, eqx.nn.Linear))
    return [layer.weight for layer in layers if isinstance(layer, eqx.nn.Linear)]


def test_a_model_runs_on_packed_weights() -> None:
    with seeded(0) as rng:
        mlp = eqx.nn.MLP(64, 32, 96, 3, activation=jax.nn.relu, key=jax.random.key(int(rng.integers(2**31))))
        x = jnp.asarray(rng.standard_normal((5, 64)), jnp.float32)
        model = eqx.tree_at(weights, mlp, replace_fn=packed)
        batched = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
        assert relative(batched(model, x), batched(dequantized(model), x)) < 1e-5
        assert relative(model(x[0]), dequantized(model)(x[0])) < 1e-5
        arrays, static = eqx.partition(model, eqx.is_array)
        bf16 = x.astype(jnp.bfloat16)
        check_products(lambda arrays, x: jax.vmap(eqx.combine(arrays, static).layers[0])(x), arrays, bf16, products=1)


def test_biases_are_trained_over_packed_weights() -> None:
    with seeded(1) as rng:
        mlp = eqx.nn.MLP(64, 32, 64, 2, key=jax.random.key(0))
        x, y = (jnp.asarray(rng.standard_normal((8, n)), jnp.float32) for n in (64, 32))
        arrays, static = eqx.partition(eqx.tree_at(weights, mlp, replace_fn=packed), eqx.is_array)
        trained, frozen = jax_splitk.partition(arrays)
        assert len(jax.tree.leaves(trained)) == 3

        def loss(trained: Any) -> Any:
            model = eqx.combine(jax_splitk.combine(trained, frozen), static)
            return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

        fallen(loss, optax.adamw(1e-2), trained, 4)


@pytest.mark.parametrize("shape", [(64,), (64, 3)])
def test_w_at_x_is_the_product_of_a_weight_that_contracts_its_last_axis(shape: tuple[int, ...]) -> None:
    with seeded(2) as rng:
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        w = packed(jnp.asarray(rng.standard_normal((48, 64)), jnp.float32))
        expected = dequantized(w) @ x
        assert relative(w @ x, expected) < 1e-6
        assert relative(jax.jit(lambda w, x: w @ x)(w, x), expected) < 1e-6
        three = w.reshape(6, 8, 64)
        assert (three @ x).shape == (
            dequantized(three) @ x[..., None] if x.ndim == 1 else dequantized(three) @ x
        ).shape[: 2 + (x.ndim - 1)]
