"""The encoder of wav2vec 2.0 Base: strided 1D convolutions over samples, a grouped convolution of 128 taps that encodes
positions, and transformer layers. Its loss is HuBERT's: the class of each frame (Hsu et al., arXiv:2106.07447)."""

import dataclasses

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
    cross_entropy,
    group_norm,
    layer_norm,
    normals,
)

TAPS, GROUPS = 128, 16  # of the convolution that encodes positions


@dataclasses.dataclass(frozen=True)
class Net:
    """Features of convolutions, their taps and strides, features of transformer layers, their number and heads."""

    features: int
    convs: tuple[tuple[int, int], ...]
    width: int
    layers: int
    heads: int
    classes: int


BASE = Net(512, ((10, 5), *((3, 2),) * 4, *((2, 2),) * 2), 768, 12, 12, 504)
TINY = Net(8, ((10, 5), (3, 2)), 32, 1, 2, 5)


def frames(net: Net, samples: int) -> int:
    for taps, stride in net.convs:
        samples = (samples - taps) // stride + 1
    return samples


def initial(net: Net) -> Params:
    w, width = Weights(), net.width
    convs = [w.conv((taps,), net.features if i else 1, net.features) for i, (taps, _) in enumerate(net.convs)]
    layers = [
        {
            "attention": attention_weights(w, width),
            "norms": (w.norm(width), w.norm(width)),
            "up": w.biased(w.dense(width, 4 * width)),
            "down": w.biased(w.dense(4 * width, width)),
        }
        for _ in range(net.layers)
    ]
    return {
        "convs": convs,
        "group_norm": w.norm(net.features),
        "norm": w.norm(net.features),
        "dense": w.biased(w.dense(net.features, width)),
        "positions": w.biased(w.conv((TAPS,), width // GROUPS, width)),
        "encoder_norm": w.norm(width),
        "layers": layers,
        "head": w.biased(w.dense(width, net.classes)),
    }


def logits(layers: Layers, net: Net, params: Params, x: jax.Array) -> jax.Array:
    for index, ((_, stride), w) in enumerate(zip(net.convs, params["convs"], strict=True)):
        x = layers.conv(x, w, stride, "VALID")
        x = jax.nn.gelu(x if index else group_norm(x, params["group_norm"], net.features))
    x = layers.biased_dense(layer_norm(x, params["norm"]), params["dense"])
    x = x + jax.nn.gelu(layers.biased_conv(x, params["positions"], groups=GROUPS))
    x = layer_norm(x, params["encoder_norm"])
    for p in params["layers"]:
        x = layer_norm(x + attention(layers, x, p["attention"], net.heads), p["norms"][0])
        y = layers.biased_dense(jax.nn.gelu(layers.biased_dense(x, p["up"])), p["down"])
        x = layer_norm(x + y, p["norms"][1])
    return layers.biased_dense(x, params["head"])


def model(tiny: bool = False) -> Model:
    net, samples, batch = (TINY, 200, 2) if tiny else (BASE, 160_000, 8)

    def data(rng: np.random.Generator) -> Data:
        labels = rng.integers(0, net.classes, (batch, frames(net, samples)), np.int32)
        return normals(rng, batch, samples, 1), labels

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(layers, net, params, x), labels)

    title = f"wav2vec 2.0 Base, {samples}, batch {batch}"
    return Model("wav2vec2_base", title, "arXiv:2006.11477", lambda: initial(net), data, loss, rate=0.001)
