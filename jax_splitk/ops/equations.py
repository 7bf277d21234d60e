"""The equations of a traced function."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

_TURNS = "length"  # the parameter of lax's scan


def walk(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations of a function, also those inside other equations' functions."""
    return (eqn for eqn, _ in counted(jaxpr))


def counted(jaxpr: core.Jaxpr, times: int = 1) -> Iterator[tuple[core.JaxprEqn, int]]:
    """As `walk`, each with how many times it runs if the function runs `times` times. A branch, and the body of a
    loop whose end only its data tell, count once."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        turns = eqn.params[_TURNS] if eqn.primitive.name == "scan" else 1
        for body in inner(eqn):
            yield from counted(body, times * turns)


def inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The functions that an equation holds."""
    for value in functions(eqn):
        yield value.jaxpr if isinstance(value, core.ClosedJaxpr) else value


def functions(eqn: core.JaxprEqn) -> Iterator[Any]:
    """The functions that an equation holds; those that have constants with them."""
    return filter(_is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
