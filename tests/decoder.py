"""A small quantized decoder, with its products fused with what follows them and without. Its head is trained so that it
continues the first token with a given text, by a wide margin."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from tests.problems import SEED

CHOSEN = 2  # experts of a token
EPSILON = 1e-5
Layer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer with an MLP, then one with a mixture of experts. The head needs `width` above `steps`."""

    width: int
    hidden: int
    heads: int
    head: int
    experts: int
    vocabulary: int
    steps: int


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    """It keeps the size of what it multiplies along the last axis but one."""
    return jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5


@functools.partial(jax.jit, static_argnums=0)
def weights(sizes: Sizes) -> Layer:
    """Random weights, int4 in groups of 32, and biases."""
    s, keys = sizes, iter(jax.random.split(jax.random.key(SEED % 2**31), 20))

    def packed(*shape: int) -> Any:
        stack = len(shape) - 2
        q = jax_splitk.quantize(_normal(next(keys), *shape), "int4", group_size=32, axis=stack)
        return jax_splitk.prepack(q, axis=stack, stack=stack) if stack else jax_splitk.prepack(q)

    def bias(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) / 4).astype(jnp.bfloat16)

    def attention() -> Layer:
        inner = s.heads * s.head
        return {"qkv": packed(s.width, 3 * inner), "qkv_bias": bias(3 * inner), "o": packed(inner, s.width)}

    def both(*stack: int) -> Any:
        return jax_splitk.join_gate_up(*(packed(*stack, s.width, s.hidden) for _ in range(2)))

    return {
        "embedding": jax.random.normal(next(keys), (s.vocabulary, s.width), jnp.bfloat16),
        "position": jax.random.normal(next(keys), (s.steps, s.width), jnp.bfloat16),
        "dense": {**attention(), "scale": 1 + bias(s.width), "gate_up": both(), "down": packed(s.hidden, s.width)},
        "mixture": {
            **attention(), "gate_up": both(s.experts), "gate_up_bias": bias(s.experts, 2, s.hidden),
            "down": packed(s.experts, s.hidden, s.width), "down_bias": bias(s.experts, s.width),
        },
    }  # fmt: skip


@jax.jit
def _apart(all_weights: Layer) -> Layer:
    """The same weights, with gate and up as two."""
    layers = {name: all_weights[name] for name in ("dense", "mixture")}
    return {**all_weights, **{name: {**w, "gate_up": w["gate_up"].split()} for name, w in layers.items()}}


def _normalized(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)
    return (wide * scale).astype(x.dtype)


def _attention(sizes: Sizes, qkv: jax.Array, cache: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention of a token by its q, k and v [1, 3 * heads * head], and the cache [steps, 2, heads, head] with its
    key and value."""
    q, key, value = qkv.reshape(3, sizes.heads, sizes.head)
    cache = lax.dynamic_update_index_in_dim(cache, jnp.stack([key, value]), t, 0)
    scores = jnp.einsum("hd,thd->ht", q, cache[:, 0], preferred_element_type=jnp.float32) * sizes.head**-0.5
    seen = jnp.arange(cache.shape[0]) <= t
    share = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(cache.dtype)
    return jnp.einsum("ht,thd->hd", share, cache[:, 1]).reshape(1, -1), cache


def _dense(fused: bool, w: Layer, x: jax.Array) -> jax.Array:
    if fused:
        norm = {"norm_epsilon": EPSILON, "norm_scale": w["scale"]}
        inner = jax_splitk.quantized_matmul(x, w["gate_up"], activation="swiglu", **norm)
        return jax_splitk.quantized_matmul(inner, w["down"], residual=x)
    y, (gate, up) = _normalized(x, w["scale"]), w["gate_up"]
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ w["down"]


def _mixture(fused: bool, w: Layer, x: jax.Array, chosen: jax.Array) -> jax.Array:
    """`chosen` [CHOSEN]: the token's experts, by which its rows are sorted."""
    count = w["down_bias"].shape[0]
    rows, sizes = jnp.repeat(_normalized(x), CHOSEN, axis=0), jnp.bincount(chosen, length=count)
    if fused:
        inner = jax_splitk.ragged_dot(rows, w["gate_up"], sizes, bias=w["gate_up_bias"], activation="swigluoai")
        out = jax_splitk.ragged_dot(inner, w["down"], sizes, bias=w["down_bias"])
    else:
        gate, up = (
            jax_splitk.ragged_dot(rows, part, sizes) + w["gate_up_bias"][chosen, i]
            for i, part in enumerate(w["gate_up"])
        )
        gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
        inner = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        out = jax_splitk.ragged_dot(inner, w["down"], sizes) + w["down_bias"][chosen]
    return x + jnp.sum(out, axis=0, keepdims=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    sizes: Sizes, fused: bool, w: Layer, head: jax.Array, text: jax.Array, forced: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens, logits, hidden states) of `sizes.steps` steps. Each step continues the last step's token, or that of the
    text if `forced`."""

    def step(carry: Any, given: Any) -> Any:
        (token, caches), (t, of_text) = carry, given
        token = jnp.where(forced, of_text, token)
        x, kept = (w["embedding"][token] + w["position"][t])[None], []
        for name, before in zip(("dense", "mixture"), caches, strict=True):
            layer = w[name]
            if fused:
                qkv = jax_splitk.quantized_matmul(x, layer["qkv"], bias=layer["qkv_bias"], norm_epsilon=EPSILON)
            else:
                qkv = _normalized(x) @ layer["qkv"] + layer["qkv_bias"]
            y, cache = _attention(sizes, qkv, before, t)
            x = jax_splitk.quantized_matmul(y, layer["o"], residual=x) if fused else x + y @ layer["o"]
            # By the token alone: no rounding can lead to another expert.
            chosen = jnp.sort((token * jnp.array([1, 3]) + jnp.array([0, 1])) % sizes.experts)
            x = _dense(fused, layer, x) if name == "dense" else _mixture(fused, layer, x, chosen)
            kept.append(cache)
        hidden = _normalized(x)[0].astype(jnp.float32)
        logits = jnp.dot(hidden, head, precision="highest")
        found = jnp.argmax(logits).astype(jnp.int32)
        return (found, tuple(kept)), (found, logits, hidden)

    empty = jnp.zeros((sizes.steps, 2, sizes.heads, sizes.head), jnp.bfloat16)
    begin, times = (text[0], (empty, empty)), jnp.arange(sizes.steps)
    return lax.scan(step, begin, (times, text[:-1]))[1]


def greedy(sizes: Sizes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(tokens, logits) of greedy decoding, "fused" and "apart", and the text that the head is trained on, with the
    logits that it shall give."""
    w, no_head = weights(sizes), jnp.zeros((sizes.width, sizes.vocabulary))
    text = np.random.default_rng([SEED, 500]).integers(sizes.vocabulary, size=sizes.steps + 1).astype(np.int32)
    wanted = np.eye(sizes.vocabulary)[text[1:]]
    programs = {"apart": (sizes, False, _apart(w)), "fused": (sizes, True, w)}
    hidden = np.asarray(_run(*programs["apart"], no_head, text, jnp.array(True))[2], np.float64)
    # The smallest head that gives 1 for the next token and 0 for the others, nearly.
    gram = hidden @ hidden.T
    head = hidden.T @ np.linalg.solve(gram + 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram)), wanted)
    found = {"text": (text[1:], wanted)}
    for name, program in programs.items():
        tokens, logits, _ = _run(*program, jnp.asarray(head, jnp.float32), text, jnp.array(False))
        found[name] = (np.asarray(tokens), np.asarray(logits))
    return found


def implementations(sizes: Sizes) -> set[str]:
    """What computes the products of the fused decoder."""
    text, forced = jax.ShapeDtypeStruct((sizes.steps + 1,), jnp.int32), jax.ShapeDtypeStruct((), bool)
    head = jax.ShapeDtypeStruct((sizes.width, sizes.vocabulary), jnp.float32)
    w = jax.eval_shape(functools.partial(weights, sizes))
    decisions = jax_splitk.explain(functools.partial(_run, sizes, True), w, head, text, forced).decisions
    return {decision.implementation for decision in decisions}
