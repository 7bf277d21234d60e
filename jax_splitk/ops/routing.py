"""From an equation of ours to the problem that kernels of a platform compute."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jax_splitk import kernels
from jax_splitk.ops.call import MEMORY, Call
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_parts import in_parts
from jax_splitk.runtime import _compat
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning.serving import serving


def routed(call: Call, avals: Sequence[Any], platform: str) -> Problem | None:
    """The problem of an equation; None if it is lax's: an implied one for which no family of `platform` competes."""
    if not call.options.implied:
        return call.problem(avals)
    if call.options.implementation == "xla" or not has_elements(avals):
        return None
    problem = call.problem(avals)
    return problem if competes(problem, target_for(platform)) else None


def competes(problem: Problem, target: Target) -> bool:
    """Whether a pass that the caller did not name may be a kernel's."""
    return any(family.competes for family in serving(problem, target))


def has_elements(avals: Sequence[Any]) -> bool:
    """Whether the sizes are known, and none is 0."""
    sizes = [size for aval in avals for size in aval.shape]
    return _compat.is_known(*sizes) and 0 not in sizes


def _is_static(problem: Problem) -> bool:
    """Whether all of a problem's sizes are known: none is a symbolic dimension of jax.export."""
    values = [getattr(problem, field.name) for field in dataclasses.fields(problem)]
    return all(isinstance(leaf, int | str) for leaf in jax.tree.leaves(values))


@functools.lru_cache(maxsize=MEMORY)
def only_xla(problem: Problem) -> str | None:
    """Why no kernel on any platform takes the problem; None if one may."""
    return problem.refusal or (None if _is_static(problem) else "symbolic shapes")


def served(problem: Problem, platform: str) -> tuple[Problem, str]:
    """The problem that kernels of the platform compute, and what XLA computes around them, in words. It is the problem
    itself, unless no kernel takes it and a kernel takes a simpler one."""
    given, said = problem, []
    while only_xla(given) is None and (simpler := _simpler(given)) is not None and not _taken(given, platform):
        given, around = simpler
        said.append(around)
    return (given, ", ".join(said)) if said and _taken(given, platform) else (problem, "")


def _taken(problem: Problem, platform: str) -> bool:
    """Whether a kernel of the platform takes the problem."""
    return any(family.problem_refusal(problem) is None for family in kernels.families(problem.op, platform))


@functools.lru_cache(maxsize=MEMORY)
def _simpler(problem: Problem) -> tuple[Problem, str] | None:
    """A problem whose kernel computes this one with operations of XLA's around it, and these operations in words: a
    product without its epilogue, a grouped product of the parts of float32 numbers. None if there is none."""
    if isinstance(problem, DotProblem) and problem.epilogue:
        return problem.product, f"XLA computes the epilogue ({problem.epilogue})"
    if isinstance(problem, QuantizedEpilogueProblem) and problem.normalized:
        other = problem.with_x_as_it_is
        return other if other.epilogue else other.product, "XLA normalizes x"
    if isinstance(problem, QuantizedEpilogueProblem | QuantizedRaggedEpilogueProblem):
        return problem.sums, f"XLA computes the epilogue ({problem.epilogue})"
    if isinstance(problem, RaggedDotProblem) and (parts := in_parts(problem)) is not None:
        return parts.problem, parts.note
    return None
