"""ResNet-50 (He et al., arXiv:1512.03385), with the stride in the 3x3 convolutions."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, cross_entropy, normalized, normals

Conv = Callable[[jax.Array, jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True)
class Net:
    """A ResNet of bottleneck blocks: blocks in each stage, width of the stem, side of the images, classes."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    image: int = 224
    classes: int = 1000


TINY = Net((1, 1), 8, 32, 10)


def initial(net: Net) -> Params:
    """Random float32 weights, the last scale of each block 0."""
    w = Weights()

    def conv(size: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return {"w": w.conv((size, size), channels, features), **w.norm(features, scale)}

    params: Params = {"stem": conv(7, 3, net.width)}
    channels = net.width
    for stage, blocks in enumerate(net.stages):
        inner = net.width * 2**stage
        for block in range(blocks):
            parts = {
                "first": conv(1, channels, inner),
                "second": conv(3, inner, inner),
                "third": conv(1, inner, 4 * inner, 0.0),
            }
            if block == 0:
                parts["shortcut"] = conv(1, channels, 4 * inner)
            params[f"stage{stage}.{block}"] = parts
            channels = 4 * inner
    return params | {"head": {"w": w.dense(channels, net.classes), "bias": np.zeros(net.classes, np.float32)}}


def logits(conv: Conv, mean: Callable[[jax.Array], jax.Array], net: Net, params: Params, x: jax.Array) -> jax.Array:
    """The network's output. `mean` averages over all axes but the last, for the whole batch."""

    def layer(x: jax.Array, p: Params, stride: int = 1) -> jax.Array:
        return normalized(conv(x, p["w"], stride), p, mean)

    x = jax.nn.relu(layer(x, params["stem"], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(net.stages):
        for block in range(blocks):
            p, stride = params[f"stage{stage}.{block}"], 2 if stage > 0 and block == 0 else 1
            y = jax.nn.relu(layer(x, p["first"]))
            y = jax.nn.relu(layer(y, p["second"], stride))
            y = layer(y, p["third"])
            x = jax.nn.relu(y + (layer(x, p["shortcut"], stride) if "shortcut" in p else x))
    pooled = x.astype(jnp.float32).mean((1, 2))
    return pooled @ params["head"]["w"] + params["head"]["bias"]


def model(batch: int, tiny: bool = False) -> Model:
    net, count = (TINY, 4) if tiny else (Net(), batch)

    def data(rng: np.random.Generator) -> Data:
        return normals(rng, count, net.image, net.image, 3), rng.integers(0, net.classes, count, np.int32)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers.conv, lambda y: y.mean((0, 1, 2)), net, params, x), labels)

    title = f"ResNet-50, {net.image}, batch {count}"
    return Model(f"resnet50_b{batch}", title, "arXiv:1512.03385", lambda: initial(net), data, loss)
