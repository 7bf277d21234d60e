"""The arguments `norm_epsilon` and `norm_scale` of products whose activations are normalized first."""

import math
import numbers
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.ops.epilogue_arguments import WeightAxes, floating_operand, in_kernels
from jax_splitk.runtime.arguments import RefusedType, require


def check_norm(epsilon: Any, scale: Any) -> None:
    """Raises TypeError or ValueError for an epsilon that is no number of at least 0, and for a scale without one."""
    if epsilon is None:
        require(scale is None, "norm_scale without norm_epsilon", "norm_scale=None, or both")
        return
    accepted = "None, a finite number of at least 0"
    require(isinstance(epsilon, numbers.Real), f"norm_epsilon={epsilon!r}", accepted, RefusedType)
    require(math.isfinite(float(epsilon)) and float(epsilon) >= 0, f"norm_epsilon={epsilon!r}", accepted)


def norm_scale_operand(scale: Any, of_w: WeightAxes) -> jax.Array:
    """The scale [*stack, k] of a weight's normalized activations."""
    given = floating_operand("norm_scale", scale)
    axes, whole = of_w.contracted, (*of_w.stack, *of_w.contracted)
    accepted = " or ".join(map(str, dict.fromkeys((axes, whole))))
    require(given.shape in (axes, whole), f"norm_scale of shape {given.shape}", accepted)
    return jnp.broadcast_to(in_kernels(given), whole).reshape(*of_w.stack, math.prod(axes))
