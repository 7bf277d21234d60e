"""group_sizes and group_offset as the primitives of grouped products take them."""

import jax
from jax import numpy as jnp
from jax.typing import ArrayLike

from jax_splitk.runtime.arguments import require


def int32_sizes(sizes: jax.Array) -> jax.Array:
    """group_sizes of any integer dtype in int32. Sizes that int32 does not hold are cut at its largest number."""
    if sizes.dtype == jnp.int32:
        return sizes
    return jnp.clip(sizes, 0, min(jnp.iinfo(sizes.dtype).max, 2**31 - 1)).astype(jnp.int32)


def int32_offset(group_offset: ArrayLike) -> jax.Array:
    """A group_offset in int32 [1]. Raises TypeError or ValueError for another dtype or shape."""
    offset = jnp.asarray(group_offset)
    integer = jnp.issubdtype(offset.dtype, jnp.integer)
    require(integer, f"group_offset of dtype {offset.dtype}", "an integer dtype", TypeError)
    require(offset.shape in ((), (1,)), f"group_offset of shape {offset.shape}", "(1,)")
    return offset.astype(jnp.int32).reshape(1)
