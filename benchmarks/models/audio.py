"""A SEANet encoder of audio, as EnCodec has it, without its LSTM: 1D convolutions, most of them strided."""

import math

import jax
import numpy as np

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, normals, squared_error

RATIOS = (2, 4, 5, 8)


def initial(width: int, ratios: tuple[int, ...], features: int) -> Params:
    w, levels, x = Weights(), [], width
    stem = w.conv((7,), 1, x)
    for ratio in ratios:
        residual = (w.conv((3,), x, x // 2), w.conv((1,), x // 2, x))
        levels.append({"residual": residual, "down": w.conv((2 * ratio,), x, 2 * x)})
        x *= 2
    return {"stem": stem, "levels": levels, "head": w.conv((7,), x, features)}


def encoded(layers: Layers, ratios: tuple[int, ...], params: Params, x: jax.Array) -> jax.Array:
    x = layers.conv(x, params["stem"])
    for ratio, level in zip(ratios, params["levels"], strict=True):
        first, second = level["residual"]
        y = layers.conv(jax.nn.elu(x), first)
        x = x + layers.conv(jax.nn.elu(y), second)
        x = layers.conv(jax.nn.elu(x), level["down"], ratio)
    return layers.conv(jax.nn.elu(x), params["head"])


def model(tiny: bool = False) -> Model:
    width, ratios, features = (4, (2, 4), 8) if tiny else (32, RATIOS, 128)
    samples, batch = (64, 2) if tiny else (24000, 128)

    def data(rng: np.random.Generator) -> Data:
        return normals(rng, batch, samples, 1), normals(rng, batch, samples // math.prod(ratios), features)

    def loss(layers: Layers, params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        return squared_error(encoded(layers, ratios, params, x), target)

    title = f"1D audio encoder, {samples}, batch {batch}"
    return Model(
        "audio_encoder", title, "arXiv:2210.13438", lambda: initial(width, ratios, features), data, loss, 0.001
    )
