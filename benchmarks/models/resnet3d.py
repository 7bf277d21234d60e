"""R3D-18: a ResNet-18 of 3x3x3 convolutions for video."""

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, batch_norm, cross_entropy, normals

BLOCKS = 2  # of a stage


def initial(widths: tuple[int, ...], classes: int) -> Params:
    w = Weights()

    def conv(kernel: tuple[int, ...], channels: int, features: int) -> Params:
        return {"w": w.conv(kernel, channels, features), "norm": w.norm(features)}

    stages, x = [], widths[0]
    for width in widths:
        blocks = []
        for _ in range(BLOCKS):
            shortcut = conv((1, 1, 1), x, width) if x != width else None
            blocks.append((conv((3, 3, 3), x, width), conv((3, 3, 3), width, width), shortcut))
            x = width
        stages.append(blocks)
    head = {"w": w.dense(x, classes), "b": np.zeros(classes, np.float32)}
    return {"stem": conv((3, 7, 7), 3, widths[0]), "stages": stages, "head": head}


def logits(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, p: Params, stride: int | tuple[int, ...] = 1) -> jax.Array:
        return batch_norm(layers.conv(x, p["w"], stride), p["norm"])

    x = jax.nn.relu(conv(x, params["stem"], (1, 2, 2)))
    for blocks in params["stages"]:
        for first, second, shortcut in blocks:
            stride = 1 if shortcut is None else 2
            y = conv(jax.nn.relu(conv(x, first, stride)), second)
            x = jax.nn.relu(y + (x if shortcut is None else conv(x, shortcut, stride)))
    return x.astype(jnp.float32).mean((1, 2, 3)) @ params["head"]["w"] + params["head"]["b"]


def model(tiny: bool = False) -> Model:
    widths, classes = ((8, 16), 10) if tiny else ((64, 128, 256, 512), 400)
    frames, size, batch = (4, 12, 2) if tiny else (16, 112, 8)

    def data(rng: np.random.Generator) -> Data:
        return normals(rng, batch, frames, size, size, 3), rng.integers(0, classes, batch, np.int32)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, params, x), labels)

    title = f"R3D-18, {frames} x {size} x {size}, batch {batch}"
    return Model("r3d_18", title, "arXiv:1711.11248", lambda: initial(widths, classes), data, loss)
