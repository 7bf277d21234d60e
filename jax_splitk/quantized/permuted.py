"""Weights whose rows are in another order than the features of the activations."""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.quantized.array import brief
from jax_splitk.quantized.wrapping import WrappingWeight, register
from jax_splitk.runtime.arguments import require

# The key of `weight` in a tree's paths, and so in files. No other node has it and "order".
KEY = "permuted"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PermutedWeight(WrappingWeight):
    """A weight whose rows are in another order than the features of x: GPTQ's act-order (`desc_act`).

    Its groups are not contiguous in x's order. So the rows are sorted by group, and a product takes x's features in the
    same order: `x @ w` and `quantized_matmul(x, w)` are `quantized_matmul(x[..., w.order], w.weight)`. It is a pytree.

    Attributes:
      weight: a QuantizedArray or PackedWeight [k, features] with sorted rows.
      order: int32 [k]: row i of `weight` belongs to feature order[i] of x. A stack of weights has leading dimensions in
        both.

    Examples:
      >>> q = jax_splitk.QuantizedArray(jnp.eye(64, dtype=jnp.int8), jnp.ones((2, 64)))
      >>> w = jax_splitk.PermutedWeight(q, jnp.arange(64)[::-1])
      >>> (jnp.arange(64.0)[None] @ w)[0, 0]
      Array(63., dtype=float32)
    """

    key = KEY
    weight: Any
    order: Any

    def __repr__(self) -> str:
        return f"PermutedWeight({self.weight!r}, order={brief(self.order)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.weight.nbytes + self.order.nbytes

    def activations(self, x: Any) -> jax.Array:
        """Activations [*stack, ..., k] with their features in the order of the rows."""
        x, (*stack, k) = jnp.asarray(x), self.order.shape
        fits = x.ndim > len(stack) and x.shape[: len(stack)] == tuple(stack) and x.shape[-1] == k
        expected = ", ".join(map(str, (*stack, "...", k)))
        require(fits, f"x of shape {x.shape} and w of shape {self.shape}", f"x of [{expected}]")
        take = functools.partial(jnp.take, axis=-1)
        for _ in stack:
            take = jax.vmap(take)
        return take(x, self.order)


register(PermutedWeight)
