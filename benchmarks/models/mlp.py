"""MLP blocks of a transformer: normalization, two dense layers, and the residual."""

import jax
import numpy as np

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, layer_norm, normals, squared_error


def initial(width: int, hidden: int, blocks: int) -> Params:
    w = Weights()
    return [(w.norm(width), w.dense(width, hidden), w.dense(hidden, width)) for _ in range(blocks)]


def outputs(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    for norm, up, down in params:
        x = x + layers.dense(jax.nn.gelu(layers.dense(layer_norm(x, norm), up)), down)
    return x


def model(width: int, hidden: int, tokens: int, blocks: int, tiny: bool = False) -> Model:
    name = f"mlp_{width}"
    if tiny:
        width, hidden, tokens, blocks = 16, 32, 128, 2

    def data(rng: np.random.Generator) -> Data:
        return normals(rng, tokens, width), normals(rng, tokens, width)

    def loss(layers: Layers, params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        return squared_error(outputs(layers, params, x), target)

    count = f"{blocks} MLP blocks" if blocks > 1 else "MLP block"
    title = f"{count}, {width} -> {hidden}, {tokens} tokens"
    return Model(name, title, "arXiv:1706.03762", lambda: initial(width, hidden, blocks), data, loss)
