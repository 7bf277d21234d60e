"""3D U-Net: segmentation of volumes, with transposed convolutions on the way up."""

import jax
import numpy as np
from jax import lax

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, cross_entropy, group_norm, normals

CHANNELS, CLASSES = 4, 3


def initial(widths: tuple[int, ...]) -> Params:
    w = Weights()

    def conv(channels: int, features: int) -> Params:
        return {"w": w.conv((3, 3, 3), channels, features), "norm": w.norm(features)}

    down, x = [], CHANNELS
    for width in widths:
        down.append((conv(x, width), conv(width, width)))
        x = width
    up = []
    for width in reversed(widths[:-1]):
        up.append((w.conv((2, 2, 2), x, width), conv(2 * width, width), conv(width, width)))
        x = width
    return {"down": down, "up": up, "head": w.conv((1, 1, 1), x, CLASSES)}


def logits(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, p: Params) -> jax.Array:
        y = layers.conv(x, p["w"])
        return jax.nn.relu(group_norm(y, p["norm"], y.shape[-1] // 8))

    skips: list[jax.Array] = []
    for first, second in params["down"]:
        if skips:
            x = lax.reduce_window(x, -float("inf"), lax.max, (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "VALID")
        x = conv(conv(x, first), second)
        skips.append(x)
    skips.pop()
    for transposed, first, second in params["up"]:
        x = layers.conv(x, transposed, padding=((1, 1),) * 3, lhs_dilation=2)  # twice the size
        x = lax.concatenate([x, skips.pop()], 4)
        x = conv(conv(x, first), second)
    return layers.conv(x, params["head"])


def model(tiny: bool = False) -> Model:
    widths, size, batch = ((8, 16), 6, 1) if tiny else ((32, 64, 128, 256), 96, 2)

    def data(rng: np.random.Generator) -> Data:
        labels = rng.integers(0, CLASSES, (batch, size, size, size), np.int32)
        return normals(rng, batch, size, size, size, CHANNELS), labels

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, params, x), labels)

    title = f"3D U-Net, {size}, batch {batch}"
    return Model("unet_3d", title, "arXiv:1606.06650", lambda: initial(widths), data, loss)
