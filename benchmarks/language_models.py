"""Llama-, Qwen- and Gemma-shaped models, in Flax nnx and in linen with `nn.scan`, as their users write them."""

import dataclasses
from typing import Any

import jax
from flax import linen, nnx
from jax import numpy as jnp


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model with grouped attention: `groups` heads of keys and values, each for heads / groups queries."""

    layers: int
    width: int
    heads: int
    groups: int
    head: int
    hidden: int
    vocabulary: int
    dtype: Any = jnp.bfloat16  # in which the model computes

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": jnp.bfloat16}


SMALL = Size(layers=4, width=64, heads=4, groups=2, head=32, hidden=96, vocabulary=80)


def rotated(x):
    """Rotary embeddings of [batch, time, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = (of(angles)[:, None].astype(x.dtype) for of in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q, k, v):
    """Causal attention of q [batch, time, heads, size] and k, v with fewer heads."""
    q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    weights = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    time = jnp.arange(q.shape[1])
    weights = jax.nn.softmax(jnp.where(time[:, None] >= time, weights, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


# ---- nnx -----------------------------------------------------------------------------------------------------------


class LlamaLayer(nnx.Module):
    def __init__(self, size, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, **size.dtypes, rngs=rngs)

        self.head = size.head
        self.q, self.o = linear(size.width, size.heads * size.head), linear(size.heads * size.head, size.width)
        self.k, self.v = linear(size.width, size.groups * size.head), linear(size.width, size.groups * size.head)
        self.gate, self.up, self.down = (
            linear(size.width, size.hidden),
            linear(size.width, size.hidden),
            linear(size.hidden, size.width),
        )
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, **size.dtypes, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head) for y in (self.q(h), self.k(h), self.v(h)))
        x = x + self.o(attention(q, k, v).reshape(*x.shape[:2], -1))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class QwenLayer(nnx.Module):
    """Biases on q, k and v; norms on q and k; kernels of three dimensions."""

    def __init__(self, size, rngs):
        def projection(heads):
            return nnx.LinearGeneral(
                size.width, (heads, size.head), bias_init=nnx.initializers.normal(), **size.dtypes, rngs=rngs
            )

        self.q, self.k, self.v = projection(size.heads), projection(size.groups), projection(size.groups)
        self.o = nnx.LinearGeneral(
            (size.heads, size.head), size.width, axis=(-2, -1), use_bias=False, **size.dtypes, rngs=rngs
        )
        self.gate = nnx.Linear(size.width, size.hidden, use_bias=False, **size.dtypes, rngs=rngs)
        self.up = nnx.Linear(size.width, size.hidden, use_bias=False, **size.dtypes, rngs=rngs)
        self.down = nnx.Linear(size.hidden, size.width, use_bias=False, **size.dtypes, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, **size.dtypes, rngs=rngs) for _ in range(2))
        self.q_norm, self.k_norm = (nnx.RMSNorm(size.head, **size.dtypes, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        x = x + self.o(attention(self.q_norm(self.q(h)), self.k_norm(self.k(h)), self.v(h)))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class GemmaLayer(nnx.Module):
    """Einsums: heads first in the kernels of attention, gate and up in one kernel."""

    def __init__(self, size, rngs):
        def einsum(subscripts, *shape):
            return nnx.Einsum(subscripts, shape, **size.dtypes, rngs=rngs)

        self.q = einsum("btd,ndh->btnh", size.heads, size.width, size.head)
        self.kv = einsum("bsd,ckdh->cbskh", 2, size.groups, size.width, size.head)
        self.o = einsum("btnh,nhd->btd", size.heads, size.head, size.width)
        self.gate_up = einsum("btd,cdf->cbtf", 2, size.width, size.hidden)
        self.down = nnx.Linear(size.hidden, size.width, use_bias=False, **size.dtypes, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, **size.dtypes, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        k, v = self.kv(h)
        x = x + self.o(attention(self.q(h), k, v))
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down(jax.nn.gelu(gate) * up)


class Model(nnx.Module):
    def __init__(self, layer, tied, size, rngs):
        self.embed = nnx.Embed(size.vocabulary, size.width, **size.dtypes, rngs=rngs)
        self.layers = nnx.List([layer(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, **size.dtypes, rngs=rngs)
        self.head = None if tied else nnx.Linear(size.width, size.vocabulary, use_bias=False, **size.dtypes, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class ScannedModel(nnx.Module):
    """The layers are one module whose parameters have a leading axis, as `nnx.scan` takes it."""

    def __init__(self, layer, size, rngs):
        self.embed = nnx.Embed(size.vocabulary, size.width, **size.dtypes, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: layer(size, rngs), in_axes=0, out_axes=0)(rngs.split(size.layers))

    def __call__(self, tokens):
        def body(x, layer):
            return layer(x)

        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.layers)
        return self.embed.attend(x)


# ---- linen ---------------------------------------------------------------------------------------------------------


class LinenLlamaLayer(linen.Module):
    size: Size

    @linen.compact
    def __call__(self, x, _):
        size = self.size

        def dense(features, name):
            return linen.Dense(features, use_bias=False, **size.dtypes, name=name)

        h = linen.RMSNorm(**size.dtypes)(x)
        q, k, v = (
            dense(heads * size.head, name)(h)
            for heads, name in ((size.heads, "q"), (size.groups, "k"), (size.groups, "v"))
        )
        q, k, v = (y.reshape(*x.shape[:2], -1, size.head) for y in (q, k, v))
        x = x + dense(size.width, "o")(attention(q, k, v).reshape(*x.shape[:2], -1))
        h = linen.RMSNorm(**size.dtypes)(x)
        return x + dense(size.width, "down")(
            jax.nn.silu(dense(size.hidden, "gate")(h)) * dense(size.hidden, "up")(h)
        ), None


class LinenQwenLayer(linen.Module):
    size: Size

    @linen.compact
    def __call__(self, x, _):
        size = self.size

        def projection(heads, name):
            return linen.DenseGeneral(
                (heads, size.head), bias_init=linen.initializers.normal(), **size.dtypes, name=name
            )

        h = linen.RMSNorm(**size.dtypes)(x)
        q = linen.RMSNorm(**size.dtypes)(projection(size.heads, "q")(h))
        k = linen.RMSNorm(**size.dtypes)(projection(size.groups, "k")(h))
        x = x + linen.DenseGeneral(size.width, axis=(-2, -1), use_bias=False, **size.dtypes, name="o")(
            attention(q, k, projection(size.groups, "v")(h))
        )
        h = linen.RMSNorm(**size.dtypes)(x)
        gate = linen.Dense(size.hidden, use_bias=False, **size.dtypes, name="gate")(h)
        up = linen.Dense(size.hidden, use_bias=False, **size.dtypes, name="up")(h)
        return x + linen.Dense(size.width, use_bias=False, **size.dtypes, name="down")(jax.nn.silu(gate) * up), None


class LinenGemmaLayer(linen.Module):
    size: Size

    @linen.compact
    def __call__(self, x, _):
        size = self.size

        def einsum(subscripts, shape, name):
            return linen.Einsum(shape, subscripts, use_bias=False, **size.dtypes, name=name)

        h = linen.RMSNorm(**size.dtypes)(x)
        k, v = einsum("bsd,ckdh->cbskh", (2, size.groups, size.width, size.head), "kv")(h)
        q = einsum("btd,ndh->btnh", (size.heads, size.width, size.head), "q")(h)
        x = x + einsum("btnh,nhd->btd", (size.heads, size.head, size.width), "o")(attention(q, k, v))
        h = linen.RMSNorm(**size.dtypes)(x)
        gate, up = einsum("btd,cdf->cbtf", (2, size.width, size.hidden), "gate_up")(h)
        return x + linen.Dense(size.width, use_bias=False, **size.dtypes, name="down")(jax.nn.gelu(gate) * up), None


class LinenModel(linen.Module):
    layer: type[linen.Module]
    tied: bool
    size: Size
    remat: bool = False

    @linen.compact
    def __call__(self, tokens):
        size = self.size
        embed = linen.Embed(size.vocabulary, size.width, **size.dtypes, name="embed")
        layer = linen.remat(self.layer) if self.remat else self.layer
        scanned = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=size.layers)
        x, _ = scanned(size, name="layers")(embed(tokens), None)
        x = linen.RMSNorm(**size.dtypes)(x)
        return (
            embed.attend(x)
            if self.tied
            else linen.Dense(size.vocabulary, use_bias=False, **size.dtypes, name="head")(x)
        )


# Name: the layers of nnx and linen, whether embeddings are tied, and the number of products with a weight in a layer.
MODELS = {
    "llama": (LlamaLayer, LinenLlamaLayer, False, 7),
    "qwen": (QwenLayer, LinenQwenLayer, False, 7),
    "gemma": (GemmaLayer, LinenGemmaLayer, True, 5),
}
