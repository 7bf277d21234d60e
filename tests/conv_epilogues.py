"""Passes of convolutions with and without epilogues, in float64, and their operands."""

from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from tests import float64
from tests.dots import ACTIVATIONS


def exactly(p: ConvProblem, x: Any, y: Any, *rest: Any) -> np.ndarray:
    """The exact result for a problem's operands."""
    x, y, *rest = (np.asarray(array, np.float64) for array in (x, y, *rest))
    sums = float64.ON_HOST[p.op](p, x, y)
    return finished(p, sums, *rest) if isinstance(p, ConvEpilogueProblem) else sums


def finished(p: ConvEpilogueProblem, sums: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    """The epilogue of exact sums."""
    sums = sums if p.bias_dtype == "none" else sums + rest[0]
    activated = ACTIVATIONS[p.activation]
    if p.residual_dtype == "none":
        return activated(sums)
    return activated(sums + rest[-1]) if p.activation_last else activated(sums) + rest[-1]


def integers(p: ConvProblem, rng: np.random.Generator, limit: int = 2) -> list[np.ndarray]:
    """Operands so small that every sum is exact."""
    return [rng.integers(-limit, limit + 1, shape).astype(jnp.dtype(dtype)) for shape, dtype in p.operand_types]
