"""Finding jax_splitk's operations in a traced function."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from jax_splitk import lowering
from jax_splitk.kernels import Problem


def operations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Our equations in the order of the trace, also those inside other equations' functions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in lowering.PROBLEMS:
            yield eqn
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=_is_jaxpr):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from operations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from operations(inner)


def problem_of(eqn: core.JaxprEqn) -> Problem:
    """What one of our equations computes."""
    return lowering.PROBLEMS[eqn.primitive]([var.aval for var in eqn.invars], eqn.params)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
