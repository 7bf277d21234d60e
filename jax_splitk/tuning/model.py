"""What the cost model puts first."""

import functools
from typing import Any

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target


@functools.lru_cache(maxsize=4096)
def best_of_family(family: Family, problem: Problem, target: Target, workspace_limit: int) -> tuple[float, Any, int]:
    """(predicted seconds, config or None, number of configs that fit in the workspace)."""
    fitting = [c for c in family.candidates(problem, target) if family.workspace_bytes(problem, c) <= workspace_limit]
    seconds_of = family.estimates(problem, fitting, target)
    timed = [(seconds, i, config) for i, (seconds, config) in enumerate(zip(seconds_of, fitting, strict=True))]
    seconds, _, best = min(timed, default=(0.0, 0, None))
    return seconds, best, len(fitting)


def best(problem: Problem, target: Target, workspace_limit: int) -> tuple[float, Family, Any] | None:
    """(predicted seconds, family, config) of the fastest that fits; None where no family serves."""
    found: list[tuple[float, int, Family, Any]] = []
    for family in kernels.families(problem.op, target.platform):
        if family.refusal(problem, None, target) is None:
            seconds, config, _ = best_of_family(family, problem, target, workspace_limit)
            if config is not None:
                found.append((seconds, len(found), family, config))
    if not found:
        return None
    seconds, _, family, config = min(found)
    return seconds, family, config
