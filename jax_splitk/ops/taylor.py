"""Rules for `jax.experimental.jet`, which computes Taylor coefficients (Taylor-mode automatic differentiation)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend import core

# Of (primals, for each of them its coefficients of order 1 and above, the equation's parameters): the result and its
# coefficients.
Rule = Callable[..., tuple[jax.Array, list[jax.Array]]]


def define(primitive: core.Primitive, rule: Rule) -> None:
    """Gives a primitive its rule."""
    jet.jet_rules[primitive] = rule


def bilinear(primitive: core.Primitive) -> Rule:
    """The rule of a primitive that is linear in each of its two operands."""
    return bilinear_in(primitive.bind)


def bilinear_in(product: Callable[..., jax.Array]) -> Rule:
    """The rule of a function that is linear in each of its two operands: coefficient k of the result is the sum over j
    of the product of coefficient j of one operand and coefficient k - j of the other."""

    def rule(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> tuple[jax.Array, list[jax.Array]]:
        one, other = ([primal, *terms] for primal, terms in zip(primals, series, strict=True))
        out = []
        for k in range(len(one)):
            terms = [product(one[j], other[k - j], **params) for j in range(k + 1)]
            out.append(sum(terms[1:], start=terms[0]))
        return out[0], out[1:]

    return rule


def composed(function: Callable[..., jax.Array]) -> Rule:
    """The rule of a function of the same operands and parameters that is made of other operations."""

    def rule(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        # Rules are given coefficients, and jet's callers derivatives, which are factorials larger.
        of_operands = functools.partial(function, **params)
        return jet.jet(of_operands, tuple(primals), tuple(series), factorial_scaled=False)

    return rule
