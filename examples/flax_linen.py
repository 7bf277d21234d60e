"""Flax linen: float32 weight gradients from bfloat16 convolutions, through an argument of `nn.Conv`. `nn.ConvTranspose`
has no such argument: in a model with transposed convolutions, decorate the loss with `jax_splitk.intercept`, as
haiku_net.py does.

    python examples/flax_linen.py
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import two_steps
from flax import linen as nn
from jax import numpy as jnp

import jax_splitk

# The parameters stay float32, as does the layer's dtype: a layer of dtype bfloat16 would round them, and their
# gradients, before jax_splitk sees them.
conv = functools.partial(jax_splitk.conv_general_dilated, compute_dtype=jnp.bfloat16)


class Net(nn.Module):
    conv: Callable[..., Any] | None = None  # None: lax.conv_general_dilated

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3), conv_general_dilated=self.conv)(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2, conv_general_dilated=self.conv)(x))
        return nn.Dense(10)(x.mean((1, 2)))


if __name__ == "__main__":
    two_steps.compare(Net(conv).apply, Net().apply, Net().init(jax.random.key(0), two_steps.IMAGES))
