"""Finding jax_splitk's operations in a traced function, and what its trace says of where they will run."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jax_splitk.ops import lowering, propagation
from jax_splitk.ops.propagation import Operation


def operations(fn: Callable[..., Any], args: Any, kwargs: Any, platform: str) -> list[Operation]:
    """Our operations in a trace of `fn(*args, **kwargs)`, also those inside other equations' functions, in its order;
    of a program for several devices, as each device computes them."""
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr
    if _spans_devices(jaxpr, (args, kwargs)):
        return propagation.operations(fn, args, kwargs, platform)
    equations = [eqn for eqn in _equations(jaxpr) if eqn.primitive in lowering.PROBLEMS]
    problems = [lowering.PROBLEMS[eqn.primitive]([var.aval for var in eqn.invars], eqn.params) for eqn in equations]
    return [Operation(p, eqn.params["options"]) for p, eqn in zip(problems, equations, strict=True)]


def _spans_devices(jaxpr: core.Jaxpr, arguments: Any) -> bool:
    """Whether the function, under jit, is one program for several devices: by the shardings of its arguments, or by
    shardings and meshes that it names itself. Arrays that it closes over have no say."""
    if any(_several(getattr(array, "sharding", None)) for array in jax.tree.leaves(arguments)):
        return True
    return any(_several(leaf) for eqn in _equations(jaxpr) for leaf in jax.tree.leaves(list(eqn.params.values())))


def _several(placement: Any) -> bool:
    """Abstract meshes are parts of types and place nothing."""
    if isinstance(placement, jax.sharding.Mesh):
        return placement.size > 1
    abstract = isinstance(getattr(placement, "mesh", None), jax.sharding.AbstractMesh)
    return isinstance(placement, jax.sharding.Sharding) and not abstract and placement.num_devices > 1


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=_is_jaxpr):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from _equations(inner)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
