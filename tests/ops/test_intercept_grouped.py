"""Grouped products of unchanged code: `jax_splitk.intercept` routes them, and `explain` lists what is left to lax."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk import explain, intercept
from tests.problems import generator, on_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's kernel is named")

SIZES = on_device([100, 0, 60, 40], jnp.int32)
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
BATCH = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])


def _operands(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = generator(450)
    return [on_device(rng.integers(-2, 3, shape), jnp.float32) for shape in shapes]


X, W = _operands((256, 16), (4, 16, 32))


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.ragged_dot(x, w, SIZES) ** 2)


def general(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.ragged_dot_general(x, w.swapaxes(1, 2), SIZES, TRANSPOSED) ** 2)


@pytest.mark.parametrize("function", [loss, general])
def test_values_and_gradients_are_laxs(function: Any) -> None:
    expected = jax.value_and_grad(function, (0, 1))(X, W)
    with intercept():
        found = jax.value_and_grad(function, (0, 1))(X, W)
        decisions = explain(jax.grad(function, (0, 1)), X, W).decisions
    assert [d.family for d in decisions] == ["ragged_host"] * 3
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_compute_dtype_is_the_blocks() -> None:
    with intercept(compute_dtype=jnp.bfloat16):
        explained = explain(jax.grad(loss, 1), X, W)
        kept = jax.eval_shape(lambda: lax.ragged_dot(X, W, SIZES))
        mixed = jax.eval_shape(
            lambda: lax.ragged_dot(X.astype(jnp.bfloat16), W, SIZES, preferred_element_type="float16")
        )
    assert [(d.problem.dtype, d.problem.out_dtype) for d in explained.decisions] == [("bfloat16", "float32")] * 2  # pyright: ignore
    assert (kept.dtype, mixed.dtype) == (jnp.float32, jnp.float16)


def test_what_kernels_do_not_take_stays_laxs(caplog: pytest.LogCaptureFixture) -> None:
    x, w = X.astype(jnp.int8), W.astype(jnp.int8)
    with intercept(implementation="host", compute_dtype=jnp.bfloat16), caplog.at_level("INFO", "jax_splitk"):
        out = lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(out, lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.int32))
    assert "left to lax.ragged_dot: ragged_dot: operands of dtypes int8 and int8" in caplog.text
    with intercept(), pytest.raises(TypeError, match="contracting dimensions"):
        lax.ragged_dot(X, W[:, :2], SIZES)


def test_explain_lists_what_is_left_to_lax() -> None:
    """It lists all three passes, and each product of a batch."""
    explained = explain(jax.grad(loss, (0, 1)), X, W)
    assert explained.decisions == ()
    problems = [d.problem for d in explained.unrouted]
    assert [(p.mode, p.rhs_order, p.m, p.k, p.n, p.groups) for p in problems] == [  # pyright: ignore
        ("forward", "gkn", 256, 16, 32, 4), ("rhs_gradient", "gkn", 256, 16, 32, 4), ("forward", "gnk", 256, 32, 16, 4),
    ]  # fmt: skip
    assert all(d.family == "ragged_host" for d in explained.unrouted)
    assert "jax_splitk.ragged_dot in place of lax.ragged_dot" in str(explained)
    batched = explain(lambda x, w: lax.ragged_dot_general(x, w, SIZES, BATCH), *_operands((3, 256, 16), (3, 4, 16, 32)))
    assert [(d.count, d.problem.brief) for d in batched.unrouted] == [
        (3, "ragged_dot forward 256 x 16 x 32, 4 groups, f32")
    ]
    with intercept():
        routed = explain(jax.grad(loss, (0, 1)), X, W)
    assert [d.problem for d in routed.decisions] == problems
    assert routed.unrouted == ()


def test_cost_counts_each_row_once() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_splitk.ragged_dot(x, w, SIZES)

    assert jax_splitk.cost(product, X, W).flops == 2 * 256 * 16 * 32
    many = _operands((3, 256, 16), (3, 4, 16, 32))
    assert jax_splitk.cost(jax.vmap(product), *many).flops == 3 * 2 * 256 * 16 * 32
