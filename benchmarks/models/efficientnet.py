"""EfficientNet-B0 without squeeze and excitation: depthwise 3x3 and 5x5 convolutions between 1x1 ones."""

import dataclasses

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.models.layers import Layers, Model, Params, Weights, batch_norm, cross_entropy, images


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks of one width: expansion factor, stride of the first block, size of the filter."""

    expansion: int
    width: int
    blocks: int
    stride: int
    size: int


B0 = (
    Stage(1, 16, 1, 1, 3),
    Stage(6, 24, 2, 2, 3),
    Stage(6, 40, 2, 2, 5),
    Stage(6, 80, 3, 2, 3),
    Stage(6, 112, 3, 1, 5),
    Stage(6, 192, 4, 2, 5),
    Stage(6, 320, 1, 1, 3),
)
TINY = (Stage(1, 8, 1, 1, 3), Stage(2, 16, 2, 2, 5))


def initial(stages: tuple[Stage, ...], stem: int, head: int, classes: int) -> Params:
    w = Weights()

    def conv(size: int, channels: int, features: int) -> Params:
        return {"w": w.conv((size, size), channels, features), "norm": w.norm(features)}

    blocks, x = [], stem
    for stage in stages:
        for _ in range(stage.blocks):
            inner = stage.expansion * x
            expand = conv(1, x, inner) if stage.expansion > 1 else None
            blocks.append((expand, conv(stage.size, 1, inner), conv(1, inner, stage.width)))
            x = stage.width
    dense = {"w": w.dense(head, classes), "b": np.zeros(classes, np.float32)}
    return {"stem": conv(3, 3, stem), "blocks": blocks, "head": conv(1, x, head), "dense": dense}


def logits(layers: Layers, stages: tuple[Stage, ...], params: Params, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, p: Params, stride: int = 1, groups: int = 1) -> jax.Array:
        return batch_norm(layers.conv(x, p["w"], stride, groups=groups), p["norm"])

    x = jax.nn.silu(conv(x, params["stem"], 2))
    strides = [stage.stride if block == 0 else 1 for stage in stages for block in range(stage.blocks)]
    for stride, (expand, depthwise, project) in zip(strides, params["blocks"], strict=True):
        y = x if expand is None else jax.nn.silu(conv(x, expand))
        y = conv(jax.nn.silu(conv(y, depthwise, stride, groups=y.shape[-1])), project)
        x = x + y if x.shape == y.shape else y
    x = jax.nn.silu(conv(x, params["head"]))
    return x.astype(jnp.float32).mean((1, 2)) @ params["dense"]["w"] + params["dense"]["b"]


def model(tiny: bool = False) -> Model:
    stages, stem, head, classes = (TINY, 8, 32, 10) if tiny else (B0, 32, 1280, 1000)
    image, batch = (16, 2) if tiny else (224, 128)
    data = images(batch, image, classes)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, stages, params, x), labels)

    title = f"EfficientNet-B0 without SE, {image}, batch {batch}"
    made = lambda: initial(stages, stem, head, classes)  # noqa: E731
    return Model("efficientnet_b0", title, "arXiv:1905.11946", made, data, loss)
