"""Activations over the root of their mean square, as products take them: RMSNorm (Zhang and Sennrich,
arXiv:1910.07467)."""

import math

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.runtime.arguments import quoted, require


def normalized(x: jax.Array, epsilon: float, scale: jax.Array | None = None) -> jax.Array:
    """x / sqrt(mean of x**2 + epsilon) * scale, over the last axis of x [*stack, rows, k], computed in float32 and
    rounded to x's dtype. The scale is [*stack, k]; None for 1."""
    wide = x.astype(jnp.float32)
    out = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (out if scale is None else out * scale.astype(jnp.float32)[..., None, :]).astype(x.dtype)


def check_fields(epsilon: str, scale_dtype: str) -> None:
    """Raises ValueError unless these fields of a problem are valid and fit together."""
    dtypes = ("none", *OUT_DTYPES)
    valid = isinstance(scale_dtype, str) and scale_dtype in dtypes
    require(valid, f"norm_scale_dtype={scale_dtype!r}", quoted(dtypes))
    try:
        valid = isinstance(epsilon, str) and (epsilon == "none" or 0 <= float(epsilon) < math.inf)
    except ValueError:
        valid = False
    require(valid, f"norm_epsilon={epsilon!r}", "'none', or the text of a finite number of at least 0")
    valid = epsilon != "none" or scale_dtype == "none"
    require(valid, f"norm_scale_dtype={scale_dtype!r} without norm_epsilon", "'none'")


def in_words(epsilon: str, scale_dtype: str) -> str:
    """A normalization in words; empty for none."""
    if epsilon == "none":
        return ""
    scale = "" if scale_dtype == "none" else f" with a scale in {scale_dtype}"
    return f"x normalized (epsilon {epsilon}){scale}"
