"""Small Llama-, Qwen- and Gemma-shaped models, in Flax nnx and in linen with `nn.scan`, as their users write them."""

import jax
from flax import linen, nnx
from jax import numpy as jnp

LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCABULARY = 4, 64, 4, 2, 32, 96, 80
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


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
    def __init__(self, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, **DTYPES, rngs=rngs)

        self.q, self.o = linear(WIDTH, HEADS * HEAD), linear(HEADS * HEAD, WIDTH)
        self.k, self.v = linear(WIDTH, GROUPS * HEAD), linear(WIDTH, GROUPS * HEAD)
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, **DTYPES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        q, k, v = (y.reshape(*x.shape[:2], -1, HEAD) for y in (self.q(h), self.k(h), self.v(h)))
        x = x + self.o(attention(q, k, v).reshape(*x.shape[:2], -1))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class QwenLayer(nnx.Module):
    """Biases on q, k and v; norms on q and k; kernels of three dimensions."""

    def __init__(self, rngs):
        def projection(heads):
            return nnx.LinearGeneral(WIDTH, (heads, HEAD), bias_init=nnx.initializers.normal(), **DTYPES, rngs=rngs)

        self.q, self.k, self.v = projection(HEADS), projection(GROUPS), projection(GROUPS)
        self.o = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), use_bias=False, **DTYPES, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, **DTYPES, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, **DTYPES, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, **DTYPES, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, **DTYPES, rngs=rngs) for _ in range(2))
        self.q_norm, self.k_norm = (nnx.RMSNorm(HEAD, **DTYPES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        x = x + self.o(attention(self.q_norm(self.q(h)), self.k_norm(self.k(h)), self.v(h)))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class GemmaLayer(nnx.Module):
    """Einsums: heads first in the kernels of attention, gate and up in one kernel."""

    def __init__(self, rngs):
        def einsum(subscripts, *shape):
            return nnx.Einsum(subscripts, shape, **DTYPES, rngs=rngs)

        self.q = einsum("btd,ndh->btnh", HEADS, WIDTH, HEAD)
        self.kv = einsum("bsd,ckdh->cbskh", 2, GROUPS, WIDTH, HEAD)
        self.o = einsum("btnh,nhd->btd", HEADS, HEAD, WIDTH)
        self.gate_up = einsum("btd,cdf->cbtf", 2, WIDTH, HIDDEN)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, **DTYPES, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, **DTYPES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm1(x)
        k, v = self.kv(h)
        x = x + self.o(attention(self.q(h), k, v))
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down(jax.nn.gelu(gate) * up)


class Model(nnx.Module):
    def __init__(self, layer, tied, layers, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, **DTYPES, rngs=rngs)
        self.layers = nnx.List([layer(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, **DTYPES, rngs=rngs)
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, use_bias=False, **DTYPES, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class ScannedModel(nnx.Module):
    """The layers are one module whose parameters have a leading axis, as `nnx.scan` takes it."""

    def __init__(self, layer, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, **DTYPES, rngs=rngs)
        self.layers = nnx.vmap(layer, in_axes=0, out_axes=0)(rngs.split(LAYERS))

    def __call__(self, tokens):
        def body(x, layer):
            return layer(x)

        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.layers)
        return self.embed.attend(x)


# ---- linen ---------------------------------------------------------------------------------------------------------


class LinenLlamaLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        def dense(features, name):
            return linen.Dense(features, use_bias=False, **DTYPES, name=name)

        h = linen.RMSNorm(**DTYPES)(x)
        q, k, v = (dense(heads * HEAD, name)(h) for heads, name in ((HEADS, "q"), (GROUPS, "k"), (GROUPS, "v")))
        q, k, v = (y.reshape(*x.shape[:2], -1, HEAD) for y in (q, k, v))
        x = x + dense(WIDTH, "o")(attention(q, k, v).reshape(*x.shape[:2], -1))
        h = linen.RMSNorm(**DTYPES)(x)
        return x + dense(WIDTH, "down")(jax.nn.silu(dense(HIDDEN, "gate")(h)) * dense(HIDDEN, "up")(h)), None


class LinenQwenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        def projection(heads, name):
            return linen.DenseGeneral((heads, HEAD), bias_init=linen.initializers.normal(), **DTYPES, name=name)

        h = linen.RMSNorm(**DTYPES)(x)
        q = linen.RMSNorm(**DTYPES)(projection(HEADS, "q")(h))
        k = linen.RMSNorm(**DTYPES)(projection(GROUPS, "k")(h))
        x = x + linen.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, **DTYPES, name="o")(
            attention(q, k, projection(GROUPS, "v")(h))
        )
        h = linen.RMSNorm(**DTYPES)(x)
        gate = linen.Dense(HIDDEN, use_bias=False, **DTYPES, name="gate")(h)
        up = linen.Dense(HIDDEN, use_bias=False, **DTYPES, name="up")(h)
        return x + linen.Dense(WIDTH, use_bias=False, **DTYPES, name="down")(jax.nn.silu(gate) * up), None


class LinenGemmaLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        def einsum(subscripts, shape, name):
            return linen.Einsum(shape, subscripts, use_bias=False, **DTYPES, name=name)

        h = linen.RMSNorm(**DTYPES)(x)
        k, v = einsum("bsd,ckdh->cbskh", (2, GROUPS, WIDTH, HEAD), "kv")(h)
        q = einsum("btd,ndh->btnh", (HEADS, WIDTH, HEAD), "q")(h)
        x = x + einsum("btnh,nhd->btd", (HEADS, HEAD, WIDTH), "o")(attention(q, k, v))
        h = linen.RMSNorm(**DTYPES)(x)
        gate, up = einsum("btd,cdf->cbtf", (2, WIDTH, HIDDEN), "gate_up")(h)
        return x + linen.Dense(WIDTH, use_bias=False, **DTYPES, name="down")(jax.nn.gelu(gate) * up), None


class LinenModel(linen.Module):
    layer: type[linen.Module]
    tied: bool
    remat: bool = False

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH, **DTYPES, name="embed")
        layer = linen.remat(self.layer) if self.remat else self.layer
        scanned = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = scanned(name="layers")(embed(tokens), None)
        x = linen.RMSNorm(**DTYPES)(x)
        return embed.attend(x) if self.tied else linen.Dense(VOCABULARY, use_bias=False, **DTYPES, name="head")(x)


# Name: the layers of nnx and linen, whether embeddings are tied, and the number of products with a weight in a layer.
MODELS = {
    "llama": (LlamaLayer, LinenLlamaLayer, False, 7),
    "qwen": (QwenLayer, LinenQwenLayer, False, 7),
    "gemma": (GemmaLayer, LinenGemmaLayer, True, 5),
}
