"""Shared by tests that train what `partition` calls trained."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def fallen(loss: Callable[[Any], jax.Array], optimizer: optax.GradientTransformation, trained: Any, steps: int) -> Any:
    """The tree after some compiled steps on `loss(trained)`, which has fallen."""

    @jax.jit
    def step(trained: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return value, optax.apply_updates(trained, updates), state

    state, losses = optimizer.init(trained), []
    for _ in range(steps):
        value, trained, state = step(trained, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    return trained
