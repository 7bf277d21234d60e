"""ResNet-50 (He et al., arXiv:1512.03385) and ResNeXt-50 32x4d (Xie et al., arXiv:1611.05431), with the stride in the
3x3 convolutions."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.models.layers import Layers, Model, Params, Weights, cross_entropy, images, normalized

Conv = Callable[[jax.Array, jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True)
class Net:
    """A ResNet of bottleneck blocks: blocks in each stage, width of the stem, side of the images, classes, groups and
    width of the 3x3 convolutions of the first stage (0 for the stem's width)."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    image: int = 224
    classes: int = 1000
    groups: int = 1
    inner: int = 0


TINY = Net((1, 1), 8, 32, 10)
RESNEXT, TINY_RESNEXT = Net(groups=32, inner=128), Net((1, 1), 8, 32, 10, 4, 16)


def initial(net: Net) -> Params:
    """Random float32 weights, the last scale of each block 0."""
    w = Weights()

    def conv(size: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return {"w": w.conv((size, size), channels, features), **w.norm(features, scale)}

    params: Params = {"stem": conv(7, 3, net.width)}
    channels = net.width
    for stage, blocks in enumerate(net.stages):
        inner, outer = (net.inner or net.width) * 2**stage, 4 * net.width * 2**stage
        for block in range(blocks):
            parts = {
                "first": conv(1, channels, inner),
                "second": conv(3, inner // net.groups, inner),
                "third": conv(1, inner, outer, 0.0),
            }
            if block == 0:
                parts["shortcut"] = conv(1, channels, outer)
            params[f"stage{stage}.{block}"] = parts
            channels = outer
    return params | {"head": {"w": w.dense(channels, net.classes), "bias": np.zeros(net.classes, np.float32)}}


def bottleneck(layer: Callable[..., jax.Array], p: Params, x: jax.Array, stride: int) -> jax.Array:
    """A block of convolutions with normalization, `layer(x, weights, stride)`."""
    y = jax.nn.relu(layer(x, p["first"]))
    y = jax.nn.relu(layer(y, p["second"], stride))
    y = layer(y, p["third"])
    return jax.nn.relu(y + (layer(x, p["shortcut"], stride) if "shortcut" in p else x))


def logits(conv: Conv, mean: Callable[[jax.Array], jax.Array], net: Net, params: Params, x: jax.Array) -> jax.Array:
    """The network's output. `mean` averages over all axes but the last, for the whole batch."""

    def layer(x: jax.Array, p: Params, stride: int = 1) -> jax.Array:
        return normalized(conv(x, p["w"], stride), p, mean)

    x = jax.nn.relu(layer(x, params["stem"], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(net.stages):
        for block in range(blocks):
            p, stride = params[f"stage{stage}.{block}"], 2 if stage > 0 and block == 0 else 1
            x = bottleneck(layer, p, x, stride)
    pooled = x.astype(jnp.float32).mean((1, 2))
    return pooled @ params["head"]["w"] + params["head"]["bias"]


def model(batch: int, tiny: bool = False, resnext: bool = False) -> Model:
    full, small = (RESNEXT, TINY_RESNEXT) if resnext else (Net(), TINY)
    net, count = (small, 4) if tiny else (full, batch)
    data = images(count, net.image, net.classes)

    def loss(layers: Layers, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
            return layers.conv(x, w, stride, groups=x.shape[-1] // w.shape[-2])

        return cross_entropy(logits(conv, lambda y: y.mean((0, 1, 2)), net, params, x), labels)

    name, title, paper = ("resnet50", "ResNet-50", "arXiv:1512.03385")
    if resnext:
        name, title, paper = ("resnext50", "ResNeXt-50 32x4d", "arXiv:1611.05431")
    return Model(f"{name}_b{batch}", f"{title}, {net.image}, batch {count}", paper, lambda: initial(net), data, loss)
