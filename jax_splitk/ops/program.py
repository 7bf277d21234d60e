"""The program that JAX lowers. A lowering rule sees one equation; with the first one of a program it prepares for the
others."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

from jax.extend import core

from jax_splitk.ops import equations, routing
from jax_splitk.ops.call import Primitive, call_of
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import ahead, searches
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.worth import Operation


def lowered(problem: Problem, options: Options, target: Target, *, measure: bool, devices: int = 1) -> None:
    """Notes that an operation is lowered.

    Args:
      measure: whether a problem that has no decision may be measured now.
      devices: over how many devices XLA's partitioner will divide the operations. It asks for their parts one after the
        other, some while XLA compiles. Most programs divide the batch.
    """
    ahead.speak()
    function = _compat.lowered_function() if target.platform == "cuda" else None
    if function is None or not searches.state.program.is_new(function):
        return
    searches.state.program.is_divided = devices > 1
    with contextlib.suppress(Exception):  # what is wrong is said when the operation itself is lowered
        operations = list(_operations(function, devices))
        own = (problem, options) if devices == 1 else None
        ahead.begin(operations, target, measure=measure, under_way=own)


def _operations(function: core.Jaxpr, devices: int) -> Iterator[Operation]:
    """The operations that a kernel may compute, as each of the devices computes them."""
    found: collections.Counter[tuple[Problem, Options]] = collections.Counter()
    for eqn, times in equations.counted(function):
        if isinstance(eqn.primitive, Primitive):
            call = call_of(eqn)
            problem = routing.routed(call, [var.aval for var in eqn.invars], "cuda")
            if problem is not None and routing.only_xla(problem) is None and call.options.implementation != "xla":
                found[routing.served(problem, "cuda")[0], call.options] += times
    for (problem, options), times in found.items():
        if (part := part_of(problem, devices)) is not None:
            yield Operation(part, options, times)


def part_of(problem: Problem, devices: int) -> Problem | None:
    """What each of the devices computes if they divide the batch; None if they cannot."""
    if devices == 1:
        return problem
    if not isinstance(problem, ConvProblem) or problem.batch % devices:
        return None
    return dataclasses.replace(problem, batch=problem.batch // devices)
