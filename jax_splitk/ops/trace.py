"""Finds jax_splitk's operations in a traced function, and tells whether the function runs on several devices."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jax_splitk.ops import propagation, routing
from jax_splitk.ops.call import Primitive, call_of
from jax_splitk.ops.equations import walk
from jax_splitk.ops.propagation import Operation
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import watch


def traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> core.Jaxpr:
    with watch.state.tracing_only():
        return jax.make_jaxpr(fn)(*args, **kwargs).jaxpr


def operations(
    jaxpr: core.Jaxpr, fn: Callable[..., Any], args: Any, kwargs: Any, platform: str, *, every: bool = False
) -> list[Operation]:
    """The operations of ours in `jaxpr`, the trace of `fn(*args, **kwargs)`, in its order.

    Those of a program for several devices are as each device computes them. `every`: also implied passes for which no
    kernel is chosen (`propagation.operations`).
    """
    if _spans_devices(jaxpr, (args, kwargs)):
        found = propagation.operations(fn, args, kwargs, platform, every=every)
    else:
        found = [Operation(problem, call_of(eqn).options) for eqn, problem in ours(jaxpr, platform)]
    return [_served(each, platform) for each in found]


def _served(operation: Operation, platform: str) -> Operation:
    problem, said = routing.served(operation.problem, platform)
    return dataclasses.replace(operation, problem=problem, note="; ".join(filter(None, (operation.note, said))))


def ours(jaxpr: core.Jaxpr, platform: str) -> Iterator[tuple[core.JaxprEqn, Problem]]:
    """The equations of ours, also those inside other equations' functions, and their problems. Equations that are lax's
    on that platform are left out."""
    for eqn in walk(jaxpr):
        if isinstance(eqn.primitive, Primitive):
            problem = routing.routed(call_of(eqn), [var.aval for var in eqn.invars], platform)
            if problem is not None:
                yield eqn, problem


def _spans_devices(jaxpr: core.Jaxpr, arguments: Any) -> bool:
    """Whether the function, under jit, is one program for several devices: by the shardings of its arguments, or by
    shardings and meshes that it names itself. Arrays that it closes over do not count."""
    if any(_several(getattr(array, "sharding", None)) for array in jax.tree.leaves(arguments)):
        return True
    return any(_several(placement) for eqn in walk(jaxpr) for placement in _placements(eqn))


def _placements(eqn: core.JaxprEqn) -> Iterator[Any]:
    """Shardings, meshes and whatever else the parameters of an equation hold."""
    for value in jax.tree.leaves(list(eqn.params.values())):
        yield getattr(value, "out_sharding", value)


def _several(placement: Any) -> bool:
    """Whether a placement names several devices. Abstract meshes are parts of types and place nothing."""
    if isinstance(placement, jax.sharding.Mesh):
        return placement.size > 1
    abstract = isinstance(getattr(placement, "mesh", None), jax.sharding.AbstractMesh)
    return isinstance(placement, jax.sharding.Sharding) and not abstract and placement.num_devices > 1
