"""Rules for `jax.experimental.jet`, which computes Taylor coefficients (Taylor-mode automatic differentiation)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend import core

# Takes the primals, for each of them its coefficients of order 1 and above, and the equation's call; returns the result
# and its coefficients.
Rule = Callable[..., tuple[jax.Array, list[jax.Array]]]


def define(primitive: core.Primitive, rule: Rule) -> None:
    """Gives a primitive its rule."""
    jet.jet_rules[primitive] = rule


def bilinear(primals: Sequence[Any], series: Sequence[Any], *, call: Any) -> tuple[jax.Array, list[jax.Array]]:
    """The rule of a primitive that is linear in each of its first two operands: coefficient k of the result is the sum
    over j of the product of coefficient j of one operand and coefficient k - j of the other."""
    one, other = ([primal, *terms] for primal, terms in zip(primals[:2], series[:2], strict=True))
    out = []
    for k in range(len(one)):
        terms = [call.bind(one[j], other[k - j], *primals[2:]) for j in range(k + 1)]
        out.append(sum(terms[1:], start=terms[0]))
    return out[0], out[1:]


def composed(function: Callable[..., jax.Array]) -> Rule:
    """The rule of a function of the same operands and call that is made of other operations."""

    def rule(primals: Sequence[Any], series: Sequence[Any], *, call: Any) -> Any:
        # Rules are given coefficients, and jet's callers derivatives, which are factorials larger.
        of_operands = functools.partial(function, call=call)
        return jet.jet(of_operands, tuple(primals), tuple(series), factorial_scaled=False)

    return rule
