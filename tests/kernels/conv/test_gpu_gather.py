"""Forward passes with few input channels on a GPU."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import jax_splitk
from jax_splitk.kernels.conv.gather import FAMILY
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.kernels.conv import on_gpu
from tests.kernels.conv.test_gather import BF16, CASES, HALF, problem, random_problem
from tests.problems import seeded

pytestmark = pytest.mark.gpu

NETWORKS = [
    problem((224, 224), (7, 7), 3, 64, batch=8, stride=2, padding=3, **BF16),
    problem((224, 224), (3, 3), 3, 32, batch=8, stride=2, padding=((0, 1), (0, 1)), **BF16),
    problem((112, 112), (3, 3), 3, 64, batch=8, padding=1, **HALF),
    problem((224, 224), (4, 4), 3, 96, batch=8, stride=4, **BF16),
    problem((64, 64), (3, 3), 4, 320, batch=8, padding=1, **HALF),
    problem((64, 64), (3, 3), 16, 64, batch=4, padding=1),
    problem((8, 112, 112), (3, 7, 7), 3, 64, batch=1, stride=(1, 2, 2), padding=((1, 1), (3, 3), (3, 3)), **BF16),
    problem((8000,), (10,), 1, 512, batch=4, stride=5, **BF16),
]  # fmt: skip
SIBLINGS = 5  # problems of the same device code, which leaves the numbers of images and output channels open
PROBLEMS = 500
PARTS = 20


@functools.cache
def drawn() -> list[tuple[ConvProblem, Any]]:
    """Random problems with configs: the same in every process of a run of the tests."""
    found = []
    with seeded(63) as rng:
        while len(found) < PROBLEMS:
            p = random_problem(rng, 1e8)
            configs = FAMILY.candidates(p, DEFAULT_CUDA)
            config = configs[int(rng.integers(len(configs)))]
            found.append((p, config))
            for _ in range(SIBLINGS - 1):
                batch, channels = int(rng.integers(1, 40)), 8 * int(rng.integers(1, 40))
                other = dataclasses.replace(p, batch=batch, out_channels=channels)
                found.append((other, config) if FAMILY.refusal(other, config) is None else (p, config))
    return found


def configs(p: ConvProblem, count: int) -> list[Any]:
    return on_gpu.best_of_kinds(FAMILY, p, lambda c: (c.tile_n, c.consumers), count)


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in NETWORKS for config in configs(p, 3)), *drawn()]
    return {FAMILY.source(p, config) for p, config in pairs}


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in NETWORKS)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    on_gpu.check_integers(FAMILY, p, [given] if given else configs(p, 3))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_are_exact(part: int) -> None:
    for number, (p, config) in enumerate(drawn()[part::PARTS]):
        on_gpu.check_integers(FAMILY, p, [config], seed=number)


@pytest.mark.parametrize("p", NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    on_gpu.check_error_and_repeats(FAMILY, p, configs(p, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), CASES, ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_not_finite(FAMILY, p, config, value)


def test_a_measurement_chooses_between_it_and_xla() -> None:
    p = dataclasses.replace(NETWORKS[0], batch=64)
    ((_, entry),) = jax_splitk.tune_problems([p], seconds=5, again=True).entries
    print(entry.choice, entry.us(entry.choice))
    assert not [m for m in entry.measurements if m.error], "candidates that failed"
