"""Forward-mode differentiation that operations share: the terms of a tangent, and their sum."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad


def bilinear(primals: Sequence[Any], tangents: Sequence[Any], *, call: Any) -> tuple[jax.Array, Any]:
    """The jvp rule of a primitive that is linear in each of its first two operands; the others have no tangent."""
    out = call.bind(*primals)
    return out, summed(bilinear_terms(primals, tangents, call), out)


def bilinear_terms(primals: Sequence[Any], tangents: Sequence[Any], call: Any) -> list[jax.Array]:
    """The terms of the tangent of such a primitive."""
    return [
        call.bind(*primals[:i], tangents[i], *primals[i + 1 :])
        for i in range(2)
        if not isinstance(tangents[i], ad.Zero)
    ]


def by_some(function: Callable[..., jax.Array], operands: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
    """The tangent of function(*operands), as a list of one term; an empty list if no operand has a tangent."""
    zero = ad.Zero | jax.custom_derivatives.SymbolicZero | None
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, zero)]
    if not moving:
        return []

    def of(*some: Any) -> jax.Array:
        changed = dict(zip(moving, some, strict=True))
        return function(*(changed.get(i, operand) for i, operand in enumerate(operands)))

    return [jax.jvp(of, tuple(operands[i] for i in moving), tuple(tangents[i] for i in moving))[1]]


def summed(terms: Sequence[jax.Array], out: jax.Array) -> Any:
    """The tangent of `out` that is the sum of these terms; a symbolic zero if there are none."""
    return sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())
