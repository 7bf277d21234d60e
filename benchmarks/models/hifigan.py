"""The generator of HiFi-GAN V1 in float32: transposed 1D convolutions from mel spectrograms to samples, and dilated
ones between them. Its loss compares samples, in place of the discriminators."""

import dataclasses
import functools
import math
import operator

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, normals

TAPS, DILATIONS = (3, 7, 11), (1, 3, 5)  # of residual blocks
SLOPE = 0.1


@dataclasses.dataclass(frozen=True)
class Net:
    """Features after the first convolution, mel bands, and stride and taps of each transposed convolution."""

    width: int
    mels: int
    upsampling: tuple[tuple[int, int], ...]


V1 = Net(512, 80, ((8, 16), (8, 16), (2, 4), (2, 4)))
TINY = Net(16, 8, ((4, 8),))


def initial(net: Net) -> Params:
    w, stages, x = Weights(), [], net.width

    def conv(taps: int, channels: int, features: int, scale: float = 1.0) -> Params:
        return w.biased(scale * w.conv((taps,), channels, features))

    stem = conv(7, net.mels, x)
    for _, taps in net.upsampling:
        up, x = conv(taps, x, x // 2), x // 2
        blocks = [[(conv(size, x, x), conv(size, x, x, 0.1)) for _ in DILATIONS] for size in TAPS]
        stages.append((up, blocks))
    return {"stem": stem, "stages": stages, "head": conv(7, x, 1, 0.1)}


def samples(layers: Layers, net: Net, params: Params, x: jax.Array) -> jax.Array:
    """[batch, frames * product of strides, 1] from [batch, frames, mels]."""

    def activated(x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x, SLOPE)

    def residual(x: jax.Array, block: Params) -> jax.Array:
        for dilation, (first, second) in zip(DILATIONS, block, strict=True):
            y = layers.biased_conv(activated(x), first, rhs_dilation=dilation)
            x = x + layers.biased_conv(activated(y), second)
        return x

    x = layers.biased_conv(x, params["stem"])
    for (stride, taps), (up, blocks) in zip(net.upsampling, params["stages"], strict=True):
        around = taps - 1 - (taps - stride) // 2
        x = layers.biased_conv(activated(x), up, padding=((around, around),), lhs_dilation=stride)
        x = functools.reduce(operator.add, (residual(x, block) for block in blocks)) / len(blocks)
    return jnp.tanh(layers.biased_conv(jax.nn.leaky_relu(x), params["head"]))


def model(tiny: bool = False) -> Model:
    net, frames, batch = (TINY, 8, 2) if tiny else (V1, 32, 16)
    count = frames * math.prod(stride for stride, _ in net.upsampling)

    def data(rng: np.random.Generator) -> Data:
        target = np.tanh(rng.standard_normal((batch, count, 1), np.float32))
        return normals(rng, batch, frames, net.mels, dtype=jnp.float32), target

    def loss(layers: Layers, params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.abs(samples(layers, net, params, x) - target).mean()

    title = f"HiFi-GAN generator, {count}, batch {batch}, f32"
    return Model("hifigan", title, "arXiv:2010.05646", lambda: initial(net), data, loss, rate=0.001, dtype=jnp.float32)
