"""RepLKNet-31B: depthwise convolutions with filters of 31 x 31 to 13 x 13, each beside one of 5 x 5."""

import dataclasses

import jax
from jax import numpy as jnp

from benchmarks.models.layers import Layers, Model, Params, Weights, batch_norm, cross_entropy, images

SMALL = 5  # side of the filter beside a large one


@dataclasses.dataclass(frozen=True)
class Net:
    """Blocks, width and side of the large filters of each stage."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    sizes: tuple[int, ...]
    classes: int


NET_31B = Net((2, 2, 18, 2), (128, 256, 512, 1024), (31, 29, 27, 13), 1000)
TINY = Net((1, 1), (8, 16), (9, 7), 10)


def initial(net: Net) -> Params:
    w = Weights()

    def conv(size: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return {"w": w.conv((size, size), channels, features), "norm": w.norm(features, scale)}

    def block(width: int, size: int) -> Params:
        return {
            "norm": w.norm(width),
            "expand": conv(1, width, width),
            "large": conv(size, 1, width),
            "small": conv(SMALL, 1, width),
            "project": conv(1, width, width, 0.0),
            "dense_norm": w.norm(width),
            "up": conv(1, width, 4 * width),
            "down": conv(1, 4 * width, width, 0.0),
        }

    first = net.widths[0]
    stages = []
    for i, (depth, width, size) in enumerate(zip(net.depths, net.widths, net.sizes, strict=True)):
        before = (conv(1, net.widths[i - 1], width), conv(3, 1, width)) if i else None
        stages.append({"downsample": before, "blocks": [block(width, size) for _ in range(depth)]})
    return {
        "stem": (conv(3, 3, first), conv(3, 1, first), conv(1, first, first), conv(3, 1, first)),
        "stages": stages,
        "norm": w.norm(net.widths[-1]),
        "head": w.biased(w.dense(net.widths[-1], net.classes)),
    }


def logits(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, p: Params, stride: int = 1) -> jax.Array:
        return batch_norm(layers.conv(x, p["w"], stride, groups=x.shape[-1] // p["w"].shape[-2]), p["norm"])

    def block(x: jax.Array, p: Params) -> jax.Array:
        y = jax.nn.relu(conv(batch_norm(x, p["norm"]), p["expand"]))
        y = jax.nn.relu(conv(y, p["large"]) + conv(y, p["small"]))
        x = x + conv(y, p["project"])
        y = jax.nn.gelu(conv(batch_norm(x, p["dense_norm"]), p["up"]))
        return x + conv(y, p["down"])

    for stride, p in zip((2, 1, 1, 2), params["stem"], strict=True):
        x = jax.nn.relu(conv(x, p, stride))
    for stage in params["stages"]:
        if stage["downsample"] is not None:
            dense, depthwise = stage["downsample"]
            x = jax.nn.relu(conv(jax.nn.relu(conv(x, dense)), depthwise, 2))
        for p in stage["blocks"]:
            x = block(x, p)
    x = batch_norm(x, params["norm"]).astype(jnp.float32).mean((1, 2))
    return x @ params["head"]["w"] + params["head"]["b"]


def model(tiny: bool = False) -> Model:
    net, image, batch = (TINY, 32, 2) if tiny else (NET_31B, 224, 32)
    data = images(batch, image, net.classes)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, params, x), labels)

    title = f"RepLKNet-31B, {image}, batch {batch}"
    return Model("replknet_31b", title, "arXiv:2203.06717", lambda: initial(net), data, loss)
