"""What the forward pass of a `jax.custom_vjp` leaves for its backward pass, if somebody asks for it.

A call that is traced once (under jit, in a remat) is differentiated with respect to these operands here and those
there, but JAX has one pytree for the residuals of all of them. So what nobody asks for is not left out of the tree: it
is an array without elements.
"""

import jax
from jax import numpy as jnp


def kept(x: jax.Array, wanted: bool) -> jax.Array:
    """`x`, of rank 2 at least, or what stands for nothing."""
    return x if wanted else jnp.zeros(0, x.dtype)


def is_kept(x: jax.Array) -> bool:
    return x.ndim > 1


def flag(value: bool) -> jax.Array:
    """Something static among the residuals, as a shape."""
    return jnp.zeros(int(value), jnp.int8)


def is_set(flag: jax.Array) -> bool:
    return flag.shape[0] > 0
