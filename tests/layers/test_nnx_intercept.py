"""`flax_nnx.make_interceptable`: what `intercept` then routes of a model's layers."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import language_models as models
from jax_splitk.layers import flax_nnx


class Net(nnx.Module):
    def __init__(self, own: Any = lax.conv_general_dilated) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 16, (3, 3), conv_general_dilated=own, rngs=rngs)
        self.third = nnx.ConvTranspose(16, 4, (2, 2), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss(graph: Any, state: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(nnx.merge(graph, state)(x)))


X = np.random.default_rng(0).standard_normal((2, 8, 8, 8)).astype(np.float32)


def routed(model: nnx.Module) -> int:
    """How many weight gradients are routed inside a block."""
    graph, state = nnx.split(model)
    with jax_splitk.intercept():
        found = jax_splitk.explain(jax.grad(loss, 1), graph, state, X).decisions
    return sum(decision.count for decision in found if decision.problem.op == "conv_wgrad")


def test_convolutions_of_a_model() -> None:
    model = Net()
    assert routed(model) == 1  # ConvTranspose calls lax by its name
    gradients = jax.grad(loss, 1)(*nnx.split(model), X)
    flax_nnx.make_interceptable(model)
    assert routed(model) == 3
    again = jax.grad(loss, 1)(*nnx.split(model), X)
    jax.tree.map(np.testing.assert_array_equal, again, gradients)


def test_functions_of_the_user_stay() -> None:
    def own(*args: Any, **kwargs: Any) -> jax.Array:
        return lax.conv_general_dilated(*args, **kwargs) + 1

    model = Net(own)
    flax_nnx.make_interceptable(model)
    assert model.second.conv_general_dilated is own


def test_models_that_are_made_in_a_block() -> None:
    with jax_splitk.intercept():
        model = Net(lax.conv_general_dilated)  # the block's function
        flax_nnx.make_interceptable(model)
    assert routed(model) == 3
    assert model.first.conv_general_dilated is model.second.conv_general_dilated


@pytest.mark.parametrize(("layer", "before"), [(models.LlamaLayer, 0), (models.QwenLayer, 4)])
def test_products_of_few_rows_in_scanned_layers(layer: Any, before: int) -> None:
    """LinearGeneral calls lax by its name."""
    size = dataclasses.replace(models.SMALL, layers=2, width=1024, heads=8, groups=8, head=128, hidden=1024)
    model = nnx.eval_shape(lambda: models.ScannedModel(layer, size, nnx.Rngs(0)))

    def few_rows() -> int:
        graph, state = nnx.split(model)
        with jax_splitk.intercept(few_rows=True):
            run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
            found = jax_splitk.explain(run, state, jnp.zeros((1, 1), jnp.int32), platform="cuda").decisions
        return sum(decision.count for decision in found)

    assert few_rows() == before
    flax_nnx.make_interceptable(model)
    assert few_rows() == 7


def test_only_models_are_taken() -> None:
    with pytest.raises(TypeError, match=r"model of type dict; accepted: nnx\.Module"):
        flax_nnx.make_interceptable({})  # pyright: ignore[reportArgumentType]
