"""Reinforcement learning from 84 x 84 x 4 frames in float32: the network of Nature DQN (Mnih et al.,
doi:10.1038/nature14236), and the residual network of IMPALA (Espeholt et al., arXiv:1802.01561) without its LSTM."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.models.layers import Data, Layers, Model, Params, Weights

STACKED, ACTIONS = 4, 18


def frames(rng: np.random.Generator, batch: int, size: int) -> np.ndarray:
    return rng.integers(0, 256, (batch, size, size, STACKED), np.uint8)


def actions(rng: np.random.Generator, batch: int) -> np.ndarray:
    return rng.integers(0, ACTIONS, batch, np.int32)


def at(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """The value of the chosen action in each row."""
    return jnp.take_along_axis(x, chosen[:, None], 1)[:, 0]


# ---- DQN -------------------------------------------------------------------------------------------------------------

DQN = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, filter and stride of each convolution


def initial_dqn(size: int, hidden: int) -> Params:
    w, convs, channels = Weights(), [], STACKED
    for features, kernel, stride in DQN:
        convs.append(w.biased(w.conv((kernel, kernel), channels, features)))
        channels, size = features, (size - kernel) // stride + 1
    return {
        "convs": convs,
        "hidden": w.biased(w.dense(size * size * channels, hidden)),
        "head": w.biased(w.dense(hidden, ACTIONS)),
    }


def action_values(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32) / 255
    for (_, _, stride), p in zip(DQN, params["convs"], strict=True):
        x = jax.nn.relu(layers.biased_conv(x, p, stride, "VALID"))
    x = jax.nn.relu(layers.biased_dense(x.reshape(len(x), -1), params["hidden"]))
    return layers.biased_dense(x, params["head"])


def dqn(tiny: bool = False) -> Model:
    size, batch, hidden = (36, 2, 8) if tiny else (84, 256, 512)

    def data(rng: np.random.Generator) -> Data:
        return frames(rng, batch, size), actions(rng, batch), rng.standard_normal(batch, np.float32)

    def loss(layers: Layers, params: Params, x: jax.Array, chosen: jax.Array, target: jax.Array) -> jax.Array:
        error = at(action_values(layers, params, x), chosen) - target
        return jnp.where(jnp.abs(error) < 1, 0.5 * jnp.square(error), jnp.abs(error) - 0.5).mean()

    title, paper = f"Nature DQN, {size}, batch {batch}, f32", "doi:10.1038/nature14236"
    return Model("nature_dqn", title, paper, lambda: initial_dqn(size, hidden), data, loss, dtype=jnp.float32)


# ---- IMPALA ----------------------------------------------------------------------------------------------------------


def initial_impala(widths: tuple[int, ...], size: int, hidden: int) -> Params:
    w, stages, channels = Weights(), [], STACKED
    for width in widths:
        blocks = [[w.biased(scale * w.conv((3, 3), width, width)) for scale in (1, 0.1)] for _ in range(2)]
        stages.append((w.biased(w.conv((3, 3), channels, width)), blocks))
        channels, size = width, -(-size // 2)
    return {
        "stages": stages,
        "hidden": w.biased(w.dense(size * size * channels, hidden)),
        "policy": w.biased(w.dense(hidden, ACTIONS)),
        "value": w.biased(w.dense(hidden, 1)),
    }


def policy_and_value(layers: Layers, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32) / 255
    for conv, blocks in params["stages"]:
        x = layers.biased_conv(x, conv)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for first, second in blocks:
            y = layers.biased_conv(jax.nn.relu(x), first)
            x = x + layers.biased_conv(jax.nn.relu(y), second)
    x = jax.nn.relu(layers.biased_dense(jax.nn.relu(x).reshape(len(x), -1), params["hidden"]))
    return layers.biased_dense(x, params["policy"]), layers.biased_dense(x, params["value"])[:, 0]


def impala(tiny: bool = False) -> Model:
    widths, size, hidden = ((4,), 16, 16) if tiny else ((16, 32, 32), 84, 256)
    batch = 2 if tiny else 32 * 20  # environments, and the steps of each

    def data(rng: np.random.Generator) -> Data:
        advantage, target = rng.standard_normal((2, batch), np.float32)
        return frames(rng, batch, size), actions(rng, batch), advantage, target

    def loss(
        layers: Layers, params: Params, x: jax.Array, chosen: jax.Array, advantage: jax.Array, target: jax.Array
    ) -> jax.Array:
        policy, value = policy_and_value(layers, params, x)
        chances = jax.nn.log_softmax(policy)
        entropy = -(jnp.exp(chances) * chances).sum(-1)
        return (0.5 * jnp.square(value - target) - advantage * at(chances, chosen) - 0.01 * entropy).mean()

    title = f"IMPALA, {size}, batch {batch}, f32"
    made = lambda: initial_impala(widths, size, hidden)  # noqa: E731
    return Model("impala", title, "arXiv:1802.01561", made, data, loss, rate=0.001, dtype=jnp.float32)
