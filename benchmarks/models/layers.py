"""The models' layers: convolutions and products by lax or by jax_splitk, normalizations, random weights.

Arithmetic is in `Layers.dtype`, weights are float32. Activations have the features last.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

import jax_splitk

Params = Any
Data = tuple[Any, ...]

# Dimension numbers by the number of spatial dimensions.
DIMENSION_NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
Steps = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layers:
    """Convolutions and products with a float32 weight, computed in `dtype`: by jax_splitk if `ours`, else by lax."""

    ours: bool
    dtype: DTypeLike = jnp.bfloat16

    def conv(
        self,
        x: jax.Array,
        w: jax.Array,
        stride: Steps = 1,
        padding: Any = "SAME",
        groups: int = 1,
        lhs_dilation: int = 1,
        rhs_dilation: int = 1,
    ) -> jax.Array:
        """A convolution; a transposed one has an `lhs_dilation`."""
        rank = x.ndim - 2
        strides = (stride,) * rank if isinstance(stride, int) else stride
        given = {
            "lhs_dilation": (lhs_dilation,) * rank,
            "rhs_dilation": (rhs_dilation,) * rank,
            "dimension_numbers": DIMENSION_NUMBERS[rank],
            "feature_group_count": groups,
        }
        x = x.astype(self.dtype)
        if self.ours:
            return jax_splitk.conv_general_dilated(x, w, strides, padding, **given, compute_dtype=self.dtype)
        return lax.conv_general_dilated(x, w.astype(self.dtype), strides, padding, **given)

    def dense(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """[..., k] by [k, features]."""
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        x = x.astype(self.dtype)
        if self.ours:
            return jax_splitk.dot_general(x, w, dimensions, preferred_element_type=self.dtype, compute_dtype=self.dtype)
        return lax.dot_general(x, w.astype(self.dtype), dimensions, preferred_element_type=jnp.dtype(self.dtype))

    def biased_conv(self, x: jax.Array, p: Params, *args: Any, **kwargs: Any) -> jax.Array:
        """`conv` with the weight of `p`, and its bias added."""
        y = self.conv(x, p["w"], *args, **kwargs)
        return y + p["b"].astype(y.dtype)

    def biased_dense(self, x: jax.Array, p: Params) -> jax.Array:
        y = self.dense(x, p["w"])
        return y + p["b"].astype(y.dtype)


STOCK, OURS = Layers(ours=False), Layers(ours=True)


@dataclasses.dataclass(frozen=True)
class Model:
    """A network with its loss, and random data for it.

    Attributes:
      title: the name in tables.
      paper: where the model is described.
      initial: makes the float32 weights.
      data: makes the data for `loss` from a random generator.
      loss: maps (layers, weights, *data) to a float32 scalar.
      rate: learning rate of SGD.
      dtype: the dtype of arithmetic in a training step.
    """

    name: str
    title: str
    paper: str
    initial: Callable[[], Params]
    data: Callable[[np.random.Generator], Data]
    loss: Callable[..., jax.Array]
    rate: float = 0.01
    dtype: DTypeLike = jnp.bfloat16


# ---- weights ---------------------------------------------------------------------------------------------------------


class Weights:
    """Draws float32 weights."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def conv(self, kernel: Sequence[int], channels: int, features: int) -> np.ndarray:
        """A random weight with He's deviation. `channels` are the input channels of a group."""
        return self._normal((*kernel, channels, features), 2 / (math.prod(kernel) * channels))

    def dense(self, channels: int, features: int) -> np.ndarray:
        return self._normal((channels, features), 1 / channels)

    def biased(self, weight: np.ndarray) -> Params:
        return {"w": weight, "b": np.zeros(weight.shape[-1], np.float32)}

    def norm(self, features: int, scale: float = 1.0) -> Params:
        return {"scale": np.full(features, scale, np.float32), "bias": np.zeros(features, np.float32)}

    def _normal(self, shape: tuple[int, ...], variance: float) -> np.ndarray:
        return self._rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(variance))


# ---- normalizations, in float32 --------------------------------------------------------------------------------------


def batch_norm(x: jax.Array, p: Params) -> jax.Array:
    return normalized(x, p, _mean(tuple(range(x.ndim - 1))))


def layer_norm(x: jax.Array, p: Params) -> jax.Array:
    return normalized(x, p, _mean((x.ndim - 1,)))


def group_norm(x: jax.Array, p: Params, groups: int) -> jax.Array:
    """Normalizes over all positions of an example, and the features of a group."""
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    axes = (*range(1, x.ndim - 1), x.ndim)
    parts = {name: value.reshape(groups, -1) for name, value in p.items()}
    return normalized(grouped, parts, _mean(axes)).reshape(x.shape)


def _mean(axes: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda y: y.mean(axes, keepdims=True)


def normalized(x: jax.Array, p: Params, mean: Callable[[jax.Array], jax.Array]) -> jax.Array:
    y = x.astype(jnp.float32)
    center = mean(y)
    factor = p["scale"] * lax.rsqrt(mean(jnp.square(y)) - jnp.square(center) + 1e-5)
    return (y * factor + (p["bias"] - center * factor)).astype(x.dtype)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_weights(w: Weights, width: int) -> Params:
    """The four projections of `attention`."""
    return [w.biased(w.dense(width, width)) for _ in range(4)]


def attention(layers: Layers, x: jax.Array, p: Params, heads: int) -> jax.Array:
    """Self-attention of [batch, positions, features]."""
    *inputs, output = p
    q, k, v = (layers.biased_dense(x, each).reshape(*x.shape[:-1], heads, -1) for each in inputs)
    return layers.biased_dense(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), output)


# ---- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions; labels have the logits' shape without the last dimension."""
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(found, labels[..., None], -1).mean()


def squared_error(x: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32) - target.astype(jnp.float32)).mean()


def normals(rng: np.random.Generator, *shape: int, dtype: DTypeLike = jnp.bfloat16) -> np.ndarray:
    """Random data."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def images(batch: int, size: int, classes: int) -> Callable[[np.random.Generator], Data]:
    """A function that draws square images of three channels, and the class of each."""
    return lambda rng: (normals(rng, batch, size, size, 3), rng.integers(0, classes, batch, np.int32))
