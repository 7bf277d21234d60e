"""Shared by the frameworks' examples: two steps of gradient descent, with jax_splitk and without."""

import sys

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk

# Relative tolerance of a loss. Stock arithmetic rounds each weight gradient, and other values, to bfloat16's 8 bits.
TOLERANCE = 1e-2
LEARNING_RATE = 0.1

_KEYS = jax.random.split(jax.random.key(1), 2)
IMAGES = jax.random.normal(_KEYS[0], (32, 12, 12, 3))
LABELS = jax.random.randint(_KEYS[1], (32,), 0, 10)


def cross_entropy(logits):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), LABELS[:, None], axis=1)
    return -jnp.mean(chosen)


def to_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def train(loss, params):
    """(the losses of three batches with a step after each of the first two, the first gradients)."""
    step = jax.jit(jax.value_and_grad(loss))
    losses, grads = [], []
    for _ in range(3):
        value, grad = step(params)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grad)
        losses.append(float(value))
        grads.append(grad)
    return np.array(losses), grads[0]


def filters_are_rounded(grads):
    """Whether bfloat16 holds every gradient of a convolution's weight exactly."""
    filters = [x for x in jax.tree.leaves(grads) if x.ndim == 4]
    return all(bool((x == x.astype(jnp.bfloat16)).all()) for x in filters)


def compare(logits, stock, params):
    """Trains both functions of (params, images), from the same float32 params; exits with an error if their losses
    differ. `stock` is the framework's usual bfloat16 network, and gets parameters and images in bfloat16.
    """

    def loss(params):
        return cross_entropy(logits(params, IMAGES))

    print(jax_splitk.explain(jax.grad(loss), params))
    losses, grads = train(loss, params)
    stock_losses, _ = train(lambda params: cross_entropy(stock(*to_bfloat16((params, IMAGES)))), params)
    difference = np.max(np.abs(losses / stock_losses - 1))
    print(f"losses {losses.round(4)}, stock {stock_losses.round(4)}, apart by {difference:.1e}")
    if not difference < TOLERANCE or losses[-1] > losses[0]:
        sys.exit(f"FAILED: losses that are apart by more than {TOLERANCE}, or that do not fall")
    if filters_are_rounded(grads):
        sys.exit("FAILED: weight gradients that went through bfloat16")
