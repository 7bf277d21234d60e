"""Matrix products with epilogues, in NumPy's float64."""

from collections.abc import Callable

import numpy as np
import scipy.special
from jax import numpy as jnp

from jax_splitk.problems.dot_general import DotProblem

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: x * 0.5 * scipy.special.erfc(-x / np.sqrt(2)),
    "silu": lambda x: x * scipy.special.expit(x),
}


def exactly(p: DotProblem, lhs: np.ndarray, rhs: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    """The exact result [batch, m, n] for a problem's operands."""
    operands = iter(rest)
    out = np.einsum(f"{p.lhs_order},{p.rhs_order}->bmn", lhs, rhs, optimize=True)
    if p.bias != "none":
        bias = next(operands)
        out = out + (bias[:, None] if p.bias == "m" else bias)
    out = ACTIVATIONS[p.activation](out)
    return out + next(operands) if p.residual_dtype != "none" else out


def integers(p: DotProblem, rng: np.random.Generator) -> list[np.ndarray]:
    """Operands, small enough that sums are exact; float64."""
    shapes = (p.lhs_shape, p.rhs_shape, *(shape for shape, _ in p.epilogue_operands))
    return [rng.integers(-2, 3, shape).astype(np.float64) for shape in shapes]


def as_given(p: DotProblem, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The operands in the problem's dtypes."""
    dtypes = (p.dtype, p.dtype, *(dtype for _, dtype in p.epilogue_operands))
    return [x.astype(jnp.dtype(dtype)) for x, dtype in zip(operands, dtypes, strict=True)]


def epilogues() -> list[dict[str, str]]:
    """Every bias, activation and dtype, and each part alone."""
    found = [{"bias": "m", "bias_dtype": "bfloat16"}, {"residual_dtype": "float32"}]
    for i, activation in enumerate(ACTIVATIONS):
        dtypes = [("float32", "bfloat16", "float16")[(i + j) % 3] for j in range(2)]
        for bias in ("m", "n"):
            with_all = {"bias": bias, "bias_dtype": dtypes[0], "activation": activation, "residual_dtype": dtypes[1]}
            found.append(with_all)
        if activation != "none":
            found.append({"activation": activation})
    return found
