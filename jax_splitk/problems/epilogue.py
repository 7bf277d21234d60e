"""What may follow a product with quantized weights: activation(sum + bias) + residual, in float32, rounded once."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import numpy as jnp

from jax_splitk.problems.dot_general import ACTIVATIONS
from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.quantized.packing import GATE_BLOCK
from jax_splitk.runtime.arguments import quoted, require

GatedActivation = Literal["swiglu", "geglu", "swigluoai"]
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0  # of gpt-oss


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@jax.jit
def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


@jax.jit
def _swigluoai(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, OAI_LIMIT), jnp.clip(up, -OAI_LIMIT, OAI_LIMIT)
    return gate * jax.nn.sigmoid(OAI_ALPHA * gate) * (up + 1)


# Functions of gate and up. NaN stays NaN. "swigluoai" is gpt-oss's: both are clipped, and up is raised by 1.
GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "swigluoai": _swigluoai,
}


def parted(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(gate, up) of the sums of a joined weight, along the last axis."""
    *leading, features = sums.shape
    blocks = sums.reshape(*leading, features // (2 * GATE_BLOCK), 2, GATE_BLOCK)
    gate, up = blocks[..., 0, :], blocks[..., 1, :]
    return gate.reshape(*leading, features // 2), up.reshape(*leading, features // 2)


def finished(
    sums: jax.Array, bias: jax.Array | None, activation: str, residual: jax.Array | None, dtype: str
) -> jax.Array:
    """activation(sums + bias) + residual of sums [..., features], computed in float32 and rounded to `dtype`.

    The bias is [features]; with a gated activation it is [2, features / 2], that of gate and that of up. Or it has the
    leading dimensions of the sums in front: then each row has its own.
    """
    sums = sums.astype(jnp.float32)
    if activation in GATED:
        gate, up = parted(sums)
        if bias is not None:
            gate, up = gate + _widened(bias[..., 0, :], gate), up + _widened(bias[..., 1, :], up)
        sums = GATED[activation](gate, up)
    else:
        if bias is not None:
            sums = sums + _widened(bias, sums)
        if activation != "none":
            sums = ACTIVATIONS[activation](sums)
    out = sums if residual is None else sums + residual.astype(jnp.float32)
    return out.astype(dtype)


def named(after: Any, bias: bool, residual: bool) -> tuple[Any, Any]:
    """(bias, residual) of the operands of an epilogue; None for one that is not there."""
    return after[0] if bias else None, after[-1] if residual else None


def _widened(bias: jax.Array, sums: jax.Array) -> jax.Array:
    """The bias in float32, in a shape that broadcasts without a new dimension."""
    return bias.astype(jnp.float32).reshape(*[1] * (sums.ndim - bias.ndim), *bias.shape)


# ---- fields of problems ----------------------------------------------------------------------------------------------


def check_fields(problem: Any, features: str) -> None:
    """Raises ValueError unless the fields of a problem's epilogue, "bias_dtype", "activation" and "residual_dtype", are
    valid. `features` is the name of the field with the product's columns."""
    dtypes = ("none", *OUT_DTYPES)
    accepted = {"bias_dtype": dtypes, "activation": ("none", *ACTIVATIONS, *GATED), "residual_dtype": dtypes}
    for name, values in accepted.items():
        value = getattr(problem, name)
        require(isinstance(value, str) and value in values, f"{name}={value!r}", quoted(values))
    columns, pair = getattr(problem, features), 2 * GATE_BLOCK
    valid = problem.activation not in GATED or columns % pair == 0
    require(valid, f"{features}={columns} with {problem.activation}", f"multiples of {pair}")


def bias_shape(activation: str, features: int) -> tuple[int, ...]:
    """The shape of the bias of one weight with so many features."""
    return (2, features // 2) if activation in GATED else (features,)


def in_words(bias_dtype: str, activation: str, residual_dtype: str = "none") -> str:
    """An epilogue in words."""
    parts = (
        f"bias in {bias_dtype}" if bias_dtype != "none" else "",
        activation if activation != "none" else "",
        f"residual in {residual_dtype}" if residual_dtype != "none" else "",
    )
    return ", ".join(filter(None, parts))
