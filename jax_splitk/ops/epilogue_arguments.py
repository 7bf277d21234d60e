"""The arguments `bias`, `activation` and `residual`: what all operations check, and those of products with quantized
weights."""

import dataclasses
import math
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.problems.dot_general import ACTIVATIONS
from jax_splitk.problems.epilogue import GATED
from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.quantized.array import unwrapped
from jax_splitk.quantized.joined import JoinedWeight
from jax_splitk.runtime.arguments import RefusedType, quoted, require


def floating_operand(name: str, value: Any) -> jax.Array:
    """A bias or a residual; TypeError for other dtypes than real floating ones."""
    given = jnp.asarray(value)
    require(given.dtype.name in DTYPES, f"{name} of dtype {given.dtype}", ", ".join(DTYPES), RefusedType)
    return given


def known_activation(activation: Any) -> str:
    """The activation, or "none" for None; ValueError for an unknown one."""
    known = activation is None or activation in tuple(ACTIVATIONS)
    require(known, f"activation={activation!r}", f"None, {quoted(ACTIVATIONS)}")
    return activation or "none"


# ---- quantized weights -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WeightAxes:
    """The sizes of a weight's axes: those that count weights, that the product contracts, and that it keeps."""

    stack: tuple[int, ...]
    contracted: tuple[int, ...]
    kept: tuple[int, ...]
    shape: tuple[int, ...]


def unjoined(name: str, w: Any, activation: Any) -> Any:
    """The packed weight of a JoinedWeight; another weight as it is. Raises ValueError, which names the argument, if the
    activation is unknown, if it is gated and the weight is not joined, or if the weight is joined and it is not gated.
    """
    accepted = (*ACTIVATIONS, *GATED)
    require(activation is None or activation in accepted, f"activation={activation!r}", f"None, {quoted(accepted)}")
    w, joined = unwrapped(w), None
    if isinstance(w, JoinedWeight):
        w, joined = w.weight, w
    given = f"activation={activation!r} and {name} of type {type(w if joined is None else joined).__name__}"
    gated = "a gated activation with a jax_splitk.JoinedWeight"
    other = "jax_splitk.join_gate_up makes one" if joined is None else quoted(GATED)
    require((joined is not None) == (activation in GATED), given, f"{gated}: {other}")
    return w


def epilogue_operands(
    bias: Any, residual: Any, of_w: WeightAxes, shape: tuple[int, ...], activation: Any
) -> list[jax.Array]:
    """The bias [*stack, features], or [*stack, 2, features] for a gated activation, and the residual [*stack, rows,
    features], as far as they are given. `shape`: that of the result."""
    found, stack, features = [], of_w.stack, math.prod(of_w.kept)
    if bias is not None:
        given = jnp.asarray(bias)
        kept = (2, features // 2) if activation in GATED else of_w.kept
        whole = (*stack, *kept)
        if given.shape not in (kept, whole):
            raise ValueError(f"bias of shape {given.shape}; accepted: {' or '.join(map(str, {kept: 0, whole: 0}))}")
        of_one = kept if activation in GATED else (features,)
        found.append(jnp.broadcast_to(in_kernels(given), whole).reshape(*stack, *of_one))
    if residual is not None:
        given = jnp.asarray(residual)
        require(given.shape == shape, f"residual of shape {given.shape}", str(shape))
        columns = features // 2 if activation in GATED else features
        rows = math.prod(shape[len(stack) : len(shape) - (1 if activation in GATED else len(of_w.kept))])
        found.append(in_kernels(given).reshape(*stack, rows, columns))
    return found


def in_kernels(x: jax.Array) -> jax.Array:
    """A bias, a residual or a scale in a dtype that kernels take."""
    return x if x.dtype.name in OUT_DTYPES else x.astype(jnp.float32)
