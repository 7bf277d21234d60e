"""Haiku: float32 weight gradients from bfloat16 convolutions.

`hk.Conv2D` calls lax by itself; `jax_splitk.intercept` routes these calls to jax_splitk. The same works for
hk.Conv2DTranspose, and for Flax's ConvTranspose.

    python examples/haiku_net.py
"""

import haiku as hk
import jax
import two_steps
from jax import numpy as jnp

import jax_splitk


def logits(images):
    x = jax.nn.relu(hk.Conv2D(16, 3)(images))
    x = jax.nn.relu(hk.Conv2D(32, 3, stride=2)(x))
    return hk.Linear(10)(x.mean((1, 2)))


if __name__ == "__main__":
    net = hk.without_apply_rng(hk.transform(logits))
    ours = jax_splitk.intercept(compute_dtype=jnp.bfloat16)(net.apply)
    two_steps.compare(ours, net.apply, net.init(jax.random.key(0), two_steps.IMAGES))
