"""ConvNeXt-T: depthwise 7x7 convolutions between dense layers."""

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.models.layers import Layers, Model, Params, Weights, cross_entropy, images, layer_norm


def initial(depths: tuple[int, ...], widths: tuple[int, ...], classes: int) -> Params:
    w = Weights()

    def block(width: int) -> Params:
        return {
            "depthwise": w.biased(w.conv((7, 7), 1, width)),
            "norm": w.norm(width),
            "up": w.biased(w.dense(width, 4 * width)),
            "down": w.biased(w.dense(4 * width, width)),
            "gamma": np.full(width, 1e-6, np.float32),
        }

    stages = []
    for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        before = (w.norm(widths[i - 1]), w.biased(w.conv((2, 2), widths[i - 1], width))) if i else None
        stages.append({"downsample": before, "blocks": [block(width) for _ in range(depth)]})
    stem = (w.biased(w.conv((4, 4), 3, widths[0])), w.norm(widths[0]))
    head = (w.norm(widths[-1]), w.biased(w.dense(widths[-1], classes)))
    return {"stem": stem, "stages": stages, "head": head}


def logits(layers: Layers, params: Params, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, p: Params) -> jax.Array:
        y = layer_norm(layers.biased_conv(x, p["depthwise"], groups=x.shape[-1]), p["norm"])
        y = layers.biased_dense(jax.nn.gelu(layers.biased_dense(y, p["up"])), p["down"])
        return x + y * p["gamma"].astype(y.dtype)

    convolution, norm = params["stem"]
    x = layer_norm(layers.biased_conv(x, convolution, 4), norm)
    for stage in params["stages"]:
        if stage["downsample"] is not None:
            norm, convolution = stage["downsample"]
            x = layers.biased_conv(layer_norm(x, norm), convolution, 2)
        for p in stage["blocks"]:
            x = block(x, p)
    norm, head = params["head"]
    pooled = layer_norm(x.astype(jnp.float32).mean((1, 2)), norm)
    return pooled @ head["w"] + head["b"]


def model(tiny: bool = False) -> Model:
    depths, widths = ((1, 1), (8, 16)) if tiny else ((3, 3, 9, 3), (96, 192, 384, 768))
    image, batch, classes = (16, 2, 10) if tiny else (224, 128, 1000)
    data = images(batch, image, classes)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, params, x), labels)

    title = f"ConvNeXt-T, {image}, batch {batch}"
    return Model("convnext_t", title, "arXiv:2201.03545", lambda: initial(depths, widths, classes), data, loss)
