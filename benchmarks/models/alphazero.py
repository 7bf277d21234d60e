"""The policy and value network of AlphaGo Zero and AlphaZero for boards of 19 x 19: residual blocks of 3x3
convolutions."""

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.models.layers import (
    Data,
    Layers,
    Model,
    Params,
    Weights,
    batch_norm,
    cross_entropy,
    normals,
    squared_error,
)

PLANES = 17  # of an input: eight positions of each player, and the player to move


def initial(size: int, width: int, blocks: int, hidden: int) -> Params:
    w, places = Weights(), size * size

    def conv(kernel: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return {"w": w.conv((kernel, kernel), channels, features), "norm": w.norm(features, scale)}

    return {
        "stem": conv(3, PLANES, width),
        "blocks": [(conv(3, width, width), conv(3, width, width, 0.0)) for _ in range(blocks)],
        "policy": (conv(1, width, 2), w.biased(w.dense(2 * places, places + 1))),
        "value": (conv(1, width, 1), w.biased(w.dense(places, hidden)), w.biased(w.dense(hidden, 1))),
    }


def policy_and_value(layers: Layers, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def conv(x: jax.Array, p: Params) -> jax.Array:
        return batch_norm(layers.conv(x, p["w"]), p["norm"])

    x = jax.nn.relu(conv(x, params["stem"]))
    for first, second in params["blocks"]:
        x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, first)), second))
    convolution, dense = params["policy"]
    policy = layers.biased_dense(jax.nn.relu(conv(x, convolution)).reshape(len(x), -1), dense)
    convolution, dense, last = params["value"]
    value = layers.biased_dense(jax.nn.relu(conv(x, convolution)).reshape(len(x), -1), dense)
    return policy, jnp.tanh(layers.biased_dense(jax.nn.relu(value), last)[:, 0])


def model(tiny: bool = False) -> Model:
    size, width, blocks, hidden, batch = (5, 8, 1, 8, 4) if tiny else (19, 256, 19, 256, 256)

    def data(rng: np.random.Generator) -> Data:
        moves = rng.integers(0, size * size + 1, batch, np.int32)
        return normals(rng, batch, size, size, PLANES), moves, rng.choice([-1.0, 1.0], batch).astype(np.float32)

    def loss(layers: Layers, params: Params, x: jax.Array, moves: jax.Array, winner: jax.Array) -> jax.Array:
        policy, value = policy_and_value(layers, params, x)
        return cross_entropy(policy, moves) + squared_error(value, winner)

    title = f"AlphaZero, {size} x {size}, batch {batch}"
    made = lambda: initial(size, width, blocks, hidden)  # noqa: E731
    return Model("alphazero", title, "arXiv:1712.01815", made, data, loss)
