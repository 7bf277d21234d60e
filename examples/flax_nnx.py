"""Flax nnx: float32 weight gradients from bfloat16 convolutions, through an argument of `nnx.Conv`.

python examples/flax_nnx.py
"""

import functools

import jax
import two_steps
from flax import nnx
from jax import lax
from jax import numpy as jnp

import jax_splitk

# The parameters stay float32, as does the layer's dtype: a layer of dtype bfloat16 would round them, and their
# gradients, before jax_splitk sees them.
conv = functools.partial(jax_splitk.conv_general_dilated, compute_dtype=jnp.bfloat16)


class Net(nnx.Module):
    def __init__(self, rngs, conv):
        self.first = nnx.Conv(3, 16, (3, 3), conv_general_dilated=conv, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, conv_general_dilated=conv, rngs=rngs)
        self.dense = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.second(nnx.relu(self.first(images))))
        return self.dense(x.mean((1, 2)))


def split(conv):
    """(function of the parameters and images, parameters)"""
    graph, params = nnx.split(Net(nnx.Rngs(0), conv), nnx.Param)
    return lambda params, images: nnx.merge(graph, params)(images), params


if __name__ == "__main__":
    (logits, params), (stock, _) = split(conv), split(lax.conv_general_dilated)
    two_steps.compare(logits, stock, jax.tree.map(jnp.asarray, params))
