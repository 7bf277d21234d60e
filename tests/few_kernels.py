"""Random problems that share few kernels, since compiling takes most of the time."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_splitk.kernels import CudaFamily, Family
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.random_problems import device_plan

Run = tuple[Family, Any, Any]


Sibling = Callable[[np.random.Generator, Any], Any]


def source(family: Family, problem: Any, config: Any) -> Source:
    if isinstance(family, CudaFamily):
        return family.source(problem, config)
    return device_plan(family, problem, config).source


def runs(
    drawn: Iterator[tuple[Family, Any]],
    rng: np.random.Generator,
    count: int,
    most: int,
    wanted: Callable[[Any], bool] = lambda config: True,
    sibling: Sibling | None = None,
) -> list[Run]:
    """`count` of the problems, each with a candidate that is `wanted`, by at most `most` kernels; problems that need
    another kernel are left out. `sibling` draws another problem that is likely to share a problem's kernel: then only
    enough problems are drawn to have all these kernels."""
    found: list[Run] = []
    known: set[Source] = set()
    while len(found) < count:
        if sibling is None or len(known) < most:
            family, problem = next(drawn)
        else:
            family, other, config = found[int(rng.integers(len(found)))]
            problem = sibling(rng, other)
            if family.refusal(problem, config) is None and source(family, problem, config) in known:
                found.append((family, problem, config))
                continue
        candidates = [config for config in family.candidates(problem, DEFAULT_CUDA) if wanted(config)]
        configs = [candidates[i] for i in rng.permutation(len(candidates))[:24]]
        shared = (c for c in configs if source(family, problem, c) in known)
        config = next(shared, configs[0] if configs and len(known) < most else None)
        if config is not None:
            known.add(source(family, problem, config))
            found.append((family, problem, config))
    return found
