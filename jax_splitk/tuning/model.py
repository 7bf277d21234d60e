"""The choices of the cost model."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

from jax_splitk.kernels import Family
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.serving import serving


def best(
    key: Key, workspace_limit: int, families: Iterable[Family] | None = None
) -> tuple[float, Candidate, int] | None:
    """(predicted seconds, candidate, number of compared configs) of the fastest config that fits in the workspace; None
    if none fits. `families`: those that can compute the problem, by default all."""
    found: list[tuple[float, Candidate]] = []
    total = 0
    for family in serving(key.problem, key.target) if families is None else families:
        seconds, config, count = _best_of(family, key.problem, key.target, workspace_limit)
        total += count
        if count:
            found.append((seconds, Candidate(family, config)))
    if not found:
        return None
    return *min(found, key=operator.itemgetter(0)), total


def _best_of(family: Family, problem: Problem, target: Target, workspace_limit: int) -> tuple[float, Any, int]:
    """(predicted seconds, config, number of configs that fit in the workspace)."""
    found = estimated(family, problem, target, workspace_limit)
    seconds, config = min(found, key=operator.itemgetter(0), default=(0.0, None))
    return seconds, config, len(found)


# The choice without measurements and the search ask for the same.
@functools.lru_cache(maxsize=4096)
def estimated(family: Family, problem: Problem, target: Target, workspace_limit: int) -> tuple[tuple[float, Any], ...]:
    """(predicted seconds, config) of each of `fitting`."""
    configs = fitting(family, problem, target, workspace_limit)
    return tuple(zip(family.estimates(problem, configs, target), configs, strict=True))


@functools.lru_cache(maxsize=4096)
def fitting(family: Family, problem: Problem, target: Target, workspace_limit: int) -> tuple[Any, ...]:
    """A family's candidates that fit in the workspace."""
    return tuple(c for c in family.candidates(problem, target) if family.workspace_bytes(problem, c) <= workspace_limit)
