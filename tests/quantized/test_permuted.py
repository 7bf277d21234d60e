"""Weights with rows in another order than the features of x."""

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp

import jax_splitk
from tests.problems import seeded


def permuted(rng: np.random.Generator, k: int, features: int) -> tuple[jax_splitk.PermutedWeight, np.ndarray]:
    """A packed weight of small integers, and its values in the order of x."""
    rows, order = rng.integers(-8, 8, (k, features)), rng.permutation(k)
    q = jax_splitk.QuantizedArray(jnp.asarray(rows, jnp.int4), jnp.ones((k // 32, features)))
    values = np.empty((k, features))
    values[order] = rows
    return jax_splitk.PermutedWeight(jax_splitk.prepack(q), jnp.asarray(order)), values


def test_products_and_gradients() -> None:
    with seeded(1) as rng:
        w, values = permuted(rng, 64, 72)
        x, bias = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((2, 3, 64), (72,)))
        for given in (x, jnp.asarray(x)):
            np.testing.assert_array_equal(given @ w, x @ values)
        np.testing.assert_array_equal(jax_splitk.quantized_matmul(x, w, bias=bias), x @ values + bias)
        narrow = w.astype(jnp.bfloat16)
        assert (w.dtype, narrow.dtype, narrow.ndim) == (jnp.float32, jnp.bfloat16, 2)
        np.testing.assert_array_equal(x @ narrow, x @ values)
        assert w[...] is w
        dx = jax.jit(jax.grad(lambda x, w: jnp.sum(x @ w)))(x, w)
        np.testing.assert_array_equal(dx, np.broadcast_to(values.sum(1), x.shape))


def test_stacks() -> None:
    with seeded(2) as rng:
        each, values = zip(*(permuted(rng, 64, 64) for _ in range(3)), strict=True)
        w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        assert w.shape == (3, 64, 64)
        x = rng.integers(-4, 5, (3, 5, 64)).astype(np.float32)
        np.testing.assert_array_equal(x @ w, x @ np.stack(values))
        np.testing.assert_array_equal(jax.vmap(lambda x, w: x @ w)(x, w), x @ np.stack(values))


def test_an_exported_function_takes_one() -> None:
    with seeded(4) as rng:
        w, values = permuted(rng, 64, 64)
        x = rng.integers(-4, 5, (2, 64)).astype(np.float32)
        function = jax.jit(lambda x, w: (x @ w, w))
        data = export.export(function, disabled_checks=jax_splitk.EXPORT_CHECKS)(x, w).serialize()
        y, again = export.deserialize(data).call(x, w)
        np.testing.assert_array_equal(y, x @ values)
        assert jax.tree.structure(again) == jax.tree.structure(w)


def test_wrong_activations_are_refused() -> None:
    """jnp.take would clip, fill or ignore what is too much."""
    with seeded(3) as rng:
        w, _ = permuted(rng, 64, 64)
        for size in (63, 65, 128):
            with pytest.raises(ValueError, match=rf"x of shape \(2, {size}\).*accepted: x of \[\.\.\., 64\]"):
                jnp.ones((2, size)) @ w
        stack = jax.tree.map(lambda leaf: leaf[None], w)
        with pytest.raises(ValueError, match=r"accepted: x of \[1, \.\.\., 64\]"):
            jnp.ones((2, 64)) @ stack
        with pytest.raises(TypeError, match="the activations x first"):
            w @ jnp.ones((64, 2))
        with pytest.raises(TypeError, match="the activations x first"):
            jax_splitk.quantized_matmul(w, jnp.ones((64, 2)))
