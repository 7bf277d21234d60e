"""The encoder of Conformer-L for speech, without relative positions: attention and depthwise 1D convolutions between
dense layers."""

import jax
import numpy as np

from benchmarks.models.layers import (
    Data,
    Layers,
    Model,
    Params,
    Weights,
    attention,
    attention_weights,
    batch_norm,
    cross_entropy,
    layer_norm,
    normals,
)

TAPS = 31


def initial(width: int, blocks: int, mels: int, classes: int) -> Params:
    w = Weights()

    def feed_forward() -> Params:
        return w.norm(width), w.biased(w.dense(width, 4 * width)), w.biased(w.dense(4 * width, width))

    def block() -> Params:
        return {
            "before": feed_forward(),
            "attention": (w.norm(width), attention_weights(w, width)),
            "convolution": {
                "norm": w.norm(width),
                "expand": w.biased(w.dense(width, 2 * width)),
                "depthwise": w.biased(w.conv((TAPS,), 1, width)),
                "batch_norm": w.norm(width),
                "project": w.biased(w.dense(width, width)),
            },
            "after": feed_forward(),
            "norm": w.norm(width),
        }

    return {
        "subsampling": [w.biased(w.conv((3, 3), channels, width)) for channels in (1, width)],
        "dense": w.biased(w.dense(mels // 4 * width, width)),
        "blocks": [block() for _ in range(blocks)],
        "head": w.biased(w.dense(width, classes)),
    }


def logits(layers: Layers, heads: int, params: Params, x: jax.Array) -> jax.Array:
    def feed_forward(x: jax.Array, p: Params) -> jax.Array:
        norm, up, down = p
        return 0.5 * layers.biased_dense(jax.nn.silu(layers.biased_dense(layer_norm(x, norm), up)), down)

    def convolution(x: jax.Array, p: Params) -> jax.Array:
        y = jax.nn.glu(layers.biased_dense(layer_norm(x, p["norm"]), p["expand"]))
        y = layers.biased_conv(y, p["depthwise"], groups=y.shape[-1])
        return layers.biased_dense(jax.nn.silu(batch_norm(y, p["batch_norm"])), p["project"])

    x = x[..., None]
    for p in params["subsampling"]:
        x = jax.nn.relu(layers.biased_conv(x, p, 2))
    x = layers.biased_dense(x.reshape(*x.shape[:2], -1), params["dense"])
    for p in params["blocks"]:
        x = x + feed_forward(x, p["before"])
        norm, projections = p["attention"]
        x = x + attention(layers, layer_norm(x, norm), projections, heads)
        x = x + convolution(x, p["convolution"])
        x = layer_norm(x + feed_forward(x, p["after"]), p["norm"])
    return layers.biased_dense(x, params["head"])


def model(tiny: bool = False) -> Model:
    width, blocks, heads, mels, classes = (8, 1, 2, 8, 5) if tiny else (512, 17, 8, 80, 1024)
    frames, batch = (32, 2) if tiny else (1000, 32)

    def data(rng: np.random.Generator) -> Data:
        return normals(rng, batch, frames, mels), rng.integers(0, classes, (batch, frames // 4), np.int32)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, heads, params, x), labels)

    title = f"Conformer-L, {frames} frames, batch {batch}"
    made = lambda: initial(width, blocks, mels, classes)  # noqa: E731
    return Model("conformer_l", title, "arXiv:2005.08100", made, data, loss, rate=0.001)
