"""Grouped forward passes and input gradients on a GPU."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from tests.kernels.conv import on_gpu
from tests.kernels.conv.test_grouped import BOTH, CASES, FAMILIES, NETWORKS, problem, random_config, random_problem
from tests.problems import seeded

pytestmark = pytest.mark.gpu

SMALL = [
    *(dataclasses.replace(p, batch=2) for p in NETWORKS),
    *(problem(kind, (1000,), (5,), 256, 256, 16, batch=2, padding=2) for kind in BOTH),
]
SIBLINGS = 5  # problems of the same device code, which leaves the number of images and of workers open
PROBLEMS = 500  # of a pass
PARTS = 20


def configs(p: ConvProblem, count: int) -> list[Any]:
    return on_gpu.best_of_kinds(FAMILIES[p.op], p, lambda c: (c.in_block, c.units, c.strips, c.resident), count)


@functools.cache
def drawn(kind: type[Any]) -> list[tuple[ConvProblem, Any]]:
    """Random problems with configs: the same in every process of a run of the tests."""
    found = []
    with seeded(61) as rng:
        while len(found) < PROBLEMS:
            p = random_problem(rng, kind)
            config = random_config(rng, p)
            for images in (p.batch, *(int(n) for n in rng.integers(p.batch, 20, SIBLINGS - 1))):
                workers = int(rng.integers(1, 7)) if images > p.batch else config.workers
                other = dataclasses.replace(p, batch=images), dataclasses.replace(config, workers=workers)
                found.append(other if FAMILIES[p.op].refusal(*other) is None else (p, config))
    return found


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in SMALL for config in configs(p, 3))]
    pairs += [pair for kind in BOTH for pair in drawn(kind)]
    return {FAMILIES[p.op].source(p, config) for p, config in pairs}


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in SMALL)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    on_gpu.check_integers(FAMILIES[p.op], p, [given] if given else configs(p, 3))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", BOTH)
def test_random_problems_are_exact(kind: type[Any], part: int) -> None:
    for number, (p, config) in enumerate(drawn(kind)[part::PARTS]):
        on_gpu.check_integers(FAMILIES[p.op], p, [config], seed=number)


@pytest.mark.parametrize("p", SMALL, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    on_gpu.check_error_and_repeats(FAMILIES[p.op], p, configs(p, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), CASES, ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_not_finite(FAMILIES[p.op], p, config, value)


def test_a_measurement_chooses_between_it_and_xla() -> None:
    on_gpu.check_measured(dataclasses.replace(NETWORKS[0], batch=16))
