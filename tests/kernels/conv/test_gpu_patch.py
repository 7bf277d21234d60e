"""Convolutions whose filter is as large as its stride on a GPU."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.dot.tma import Config
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from tests.kernels.conv import on_gpu
from tests.kernels.conv.test_patch import CASES, HALF, KINDS, OF, fitting, problem, random_problem
from tests.problems import seeded

pytestmark = pytest.mark.gpu

BF16 = {"out_dtype": "bfloat16"}
NETWORKS = [
    problem(kind, size, kernel, *channels, batch=batch, **types)
    for kind in KINDS
    for size, kernel, channels, batch, types in (
        ((224, 224), (16, 16), (3, 768), 4, BF16),
        ((224, 224), (4, 4), (4, 96), 2, BF16),
        ((56, 56), (2, 2), (96, 192), 8, HALF),
        ((14, 14), (2, 2), (384, 768), 8, {}),
        ((8, 32, 32), (2, 4, 4), (16, 128), 2, BF16),
    )
]  # fmt: skip
PROBLEMS = 500  # of a pass
PARTS = 20
# Device code is of a config and dtypes, and of whether there are whole 64s of output channels.
CONFIGS = (
    Config(64, 64, 6),
    Config(128, 256, 4),
    Config(64, 128, 6, 2, "cluster"),
    Config(192, 64, 5, 5, "cluster"),
    Config(256, 128, 4, 3, "workspace"),
    Config(128, 128, 5, 11, "workspace"),
)


@functools.cache
def drawn(kind: type[Any]) -> list[tuple[ConvProblem, Config]]:
    """The same in every process of a run of the tests."""
    with seeded(62) as rng:
        problems = [random_problem(rng, kind, 3e8) for _ in range(PROBLEMS)]
        return [(p, fitting(p, CONFIGS[int(rng.integers(len(CONFIGS)))])) for p in problems]


def configs(p: ConvProblem, count: int) -> list[Any]:
    return on_gpu.best_of_kinds(OF[p.op], p, lambda c: (c.tile_m, c.tile_n, c.reduction), count)


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in NETWORKS for config in configs(p, 3))]
    pairs += [pair for kind in KINDS for pair in drawn(kind)]
    return {OF[p.op].source(p, config) for p, config in pairs}


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in NETWORKS)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    on_gpu.check_integers(OF[p.op], p, [given] if given else configs(p, 3))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_random_problems_are_exact(kind: type[Any], part: int) -> None:
    for number, (p, config) in enumerate(drawn(kind)[part::PARTS]):
        on_gpu.check_integers(OF[p.op], p, [config], seed=number)


@pytest.mark.parametrize("p", NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    on_gpu.check_error_and_repeats(OF[p.op], p, configs(p, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), CASES, ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_not_finite(OF[p.op], p, config, value)


def test_a_measurement_chooses_between_it_and_xla() -> None:
    on_gpu.check_measured(dataclasses.replace(NETWORKS[2], batch=64))
