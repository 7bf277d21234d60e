"""RegNetX-1.6GF: bottleneck blocks with groups of 24 channels."""

import dataclasses

import jax
from jax import numpy as jnp

from benchmarks.models.layers import Layers, Model, Params, Weights, batch_norm, cross_entropy, images
from benchmarks.models.resnet import bottleneck


@dataclasses.dataclass(frozen=True)
class Net:
    """Blocks and width of each stage, and the channels of a group."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    group: int
    stem: int = 32
    classes: int = 1000


X_1_6GF = Net((2, 4, 10, 2), (72, 168, 408, 912), 24)
TINY = Net((1, 2), (12, 24), 6, 8, 10)


def initial(net: Net) -> Params:
    w = Weights()

    def conv(size: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return {"w": w.conv((size, size), channels, features), "norm": w.norm(features, scale)}

    blocks, channels = [], net.stem
    for depth, width in zip(net.depths, net.widths, strict=True):
        for index in range(depth):
            parts = {"first": conv(1, channels, width), "second": conv(3, net.group, width)}
            parts["third"] = conv(1, width, width, 0.0)
            if index == 0:
                parts["shortcut"] = conv(1, channels, width)
            blocks.append(parts)
            channels = width
    return {"stem": conv(3, 3, net.stem), "blocks": blocks, "head": w.biased(w.dense(channels, net.classes))}


def logits(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Params, stride: int = 1) -> jax.Array:
        return batch_norm(layers.conv(x, p["w"], stride, groups=x.shape[-1] // p["w"].shape[-2]), p["norm"])

    x = jax.nn.relu(layer(x, params["stem"], 2))
    for p in params["blocks"]:
        x = bottleneck(layer, p, x, 2 if "shortcut" in p else 1)
    return x.astype(jnp.float32).mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]


def model(tiny: bool = False) -> Model:
    net, image, batch = (TINY, 16, 2) if tiny else (X_1_6GF, 224, 128)
    data = images(batch, image, net.classes)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, params, x), labels)

    title = f"RegNetX-1.6GF, {image}, batch {batch}"
    return Model("regnetx_1_6gf", title, "arXiv:2003.13678", lambda: initial(net), data, loss)
