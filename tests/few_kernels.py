"""Random problems that few kernels compute: compiling is what takes time."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jax_splitk.kernels import Family
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.random_problems import device_plan

Run = tuple[Family, Any, Any]


def source(family: Family, problem: Any, config: Any) -> Source:
    return device_plan(family, problem, config).source


def runs(
    drawn: Iterable[tuple[Family, Any]],
    rng: np.random.Generator,
    count: int,
    most: int,
    wanted: Callable[[Any], bool] = lambda config: True,
) -> list[Run]:
    """So many of the problems, each with a candidate that is `wanted`, by at most so many kernels: what takes another
    one is left out then."""
    found: list[Run] = []
    known: set[Source] = set()
    for family, problem in drawn:
        candidates = [config for config in family.candidates(problem, DEFAULT_CUDA) if wanted(config)]
        configs = [candidates[i] for i in rng.permutation(len(candidates))[:24]]
        shared = (c for c in configs if source(family, problem, c) in known)
        config = next(shared, configs[0] if configs and len(known) < most else None)
        if config is not None:
            known.add(source(family, problem, config))
            found.append((family, problem, config))
        if len(found) == count:
            break
    return found
