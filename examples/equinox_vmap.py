"""Equinox: float32 weight gradients from bfloat16 convolutions, for a model that is written for one image.

`eqx.nn.Conv2d` calls lax by itself; `jax_splitk.intercept` routes these calls to jax_splitk, also under vmap.

    python examples/equinox_vmap.py
"""

import equinox as eqx
import jax
import two_steps
from jax import numpy as jnp

import jax_splitk


def net(key):
    keys = jax.random.split(key, 3)
    layers = [
        eqx.nn.Lambda(lambda image: image.transpose(2, 0, 1)),  # Equinox puts channels first
        eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Lambda(lambda x: x.mean((1, 2))),
        eqx.nn.Linear(32, 10, key=keys[2]),
    ]
    return eqx.partition(eqx.nn.Sequential(layers), eqx.is_inexact_array)


def logits(params, static, images):
    return jax.vmap(eqx.combine(params, static))(images)


if __name__ == "__main__":
    params, static = net(jax.random.key(0))
    ours = jax_splitk.intercept(compute_dtype=jnp.bfloat16)(logits)
    two_steps.compare(lambda p, x: ours(p, static, x), lambda p, x: logits(p, static, x), params)
