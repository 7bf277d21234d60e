"""A mixture-of-experts transformer block in Flax nnx: each token goes through two of eight experts.

python examples/mixture_of_experts.py

The experts' products are `jax.lax.ragged_dot`, which multiplies every token with every expert. The training step runs
twice: as it is, and inside of `jax_splitk.intercept()`, where each token is multiplied with its own experts only.
Losses are the same.
"""

import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax import numpy as jnp

import jax_splitk

BATCH, LENGTH, WIDTH, HIDDEN = 8, 32, 64, 128
EXPERTS, CHOSEN = 8, 2  # experts, and how many of them a token goes through
HEADS, WORDS, STEPS = 4, 16, 30
TOLERANCE = 1e-3  # of losses, relative: the order of sums differs


class Experts(nnx.Module):
    """SwiGLU layers of which a router chooses some for each token."""

    def __init__(self, rngs):
        weight = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.gate = nnx.Param(weight(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.up = nnx.Param(weight(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(weight(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores, experts = lax.top_k(jax.nn.softmax(self.router(tokens)), CHOSEN)
        # Rows sorted by expert: row i is a copy of token order[i] // CHOSEN.
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
        rows = tokens[order // CHOSEN]
        hidden = jax.nn.silu(lax.ragged_dot(rows, self.gate[...], sizes)) * lax.ragged_dot(rows, self.up[...], sizes)
        rows = lax.ragged_dot(hidden, self.down[...], sizes)
        # Back in the tokens' order: a gather, whose sum is the same on every run.
        results = rows[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH)
        return jnp.einsum("tc,tcw->tw", scores, results).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.experts = Experts(rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.experts(self.norms[1](x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, words):
        return self.embed.attend(self.block(self.embed(words)))


def batch(step):
    """Sequences in which each word is the sum of the two before it."""
    words = list(jax.random.randint(jax.random.key(step), (2, BATCH), 0, WORDS))
    while len(words) < LENGTH + 1:
        words.append((words[-1] + words[-2]) % WORDS)
    return jnp.stack(words, 1)


def model():
    """(loss of the parameters and a batch, parameters)"""
    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, words):
        logits = nnx.merge(graph, params)(words[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    return loss, params


def train(loss, params):
    """(losses, seconds of all steps but the first)"""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state, words):
        value, gradient = jax.value_and_grad(loss)(params, words)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state, losses, started = optimizer.init(params), [], 0.0
    for i in range(STEPS):
        params, state, value = step(params, state, batch(i))
        losses.append(float(value))
        started = started or time.perf_counter()
    return np.array(losses), time.perf_counter() - started


if __name__ == "__main__":
    loss, params = model()
    of_lax, seconds_of_lax = train(loss, params)
    with jax_splitk.intercept():
        print(jax_splitk.explain(jax.grad(loss), params, batch(0)))
        losses, seconds = train(loss, params)
    apart = np.max(np.abs(losses / of_lax - 1))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, apart from lax's by {apart:.1e}")
    print(f"{STEPS - 1} steps: {seconds_of_lax:.2f} s with lax, {seconds:.2f} s with jax_splitk")
    if not apart < TOLERANCE or not losses[-1] < 0.9 * losses[0]:
        sys.exit(f"FAILED: losses that are apart by more than {TOLERANCE}, or that do not fall")
