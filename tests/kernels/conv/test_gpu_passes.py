"""Properties of every family of forward passes and input gradients, on a GPU."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import on_gpu
from tests.kernels.conv.tried import FAMILIES, KINDS, Tried
from tests.problems import seeded

pytestmark = pytest.mark.gpu

PROBLEMS, SIBLINGS, PARTS = 500, 5, 20  # of a pass: random ones, as many of them of one device code, in as many tests
OTHERS = [(name, kind) for name, kind in KINDS if name != "im2col"]  # test_gpu_im2col.py has its random problems


def configs(tried: Tried, p: ConvProblem) -> list[Any]:
    """The best config of each kind by the model; if thread blocks take tiles in turns, also one with more tiles for
    each."""
    family, found = tried.of(p), {}
    for config in sorted(family.candidates(p, DEFAULT_CUDA), key=lambda c: family.estimate(p, c, DEFAULT_CUDA)):
        found.setdefault(tried.kind(config), config)
    best = list(found.values())[: tried.best]
    fewer = [dataclasses.replace(c, workers=-(-c.workers // 3)) for c in best if getattr(c, "workers", 0) > 1]
    return [*best, *(config for config in fewer if family.refusal(p, config) is None)]


@functools.cache
def drawn(name: str, kind: type[Any]) -> list[tuple[ConvProblem, Any]]:
    """Random problems with configs: the same in every process of a run of the tests."""
    tried, found = FAMILIES[name], []
    with seeded(61) as rng:
        while len(found) < PROBLEMS:
            p = tried.random(rng, kind, most=3e8)
            family = tried.of(p)
            config = tried.config(rng, family, p)
            siblings = (tried.sibling(rng, p, config) for _ in range(SIBLINGS - 1))
            found += [(p, config), *(other for other in siblings if family.refusal(*other) is None)]
    return found


RUNS = [(tried, *run) for tried in FAMILIES.values() for run in tried.runs]
NETWORKS = [(tried, p) for tried in FAMILIES.values() for p in tried.networks]


def device_code() -> set[compiler.Source]:
    pairs = [*RUNS, *((tried, p, config) for tried, p in NETWORKS for config in configs(tried, p))]
    pairs += [(FAMILIES[name], p, config) for name, kind in OTHERS for p, config in drawn(name, kind)]
    return {tried.of(p).plan(p, config).source for tried, p, config in pairs}


@pytest.mark.parametrize(("tried", "p", "config"), RUNS, ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(tried: Tried, p: ConvProblem, config: Any) -> None:
    on_gpu.check_exact(tried.of(p), p, [config])


@pytest.mark.parametrize(("tried", "p"), NETWORKS, ids=str)
def test_networks_layers_are_exact_on_integers(tried: Tried, p: ConvProblem) -> None:
    on_gpu.check_exact(tried.of(p), p, configs(tried, p))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_random_problems_are_exact(name: str, kind: type[Any], part: int) -> None:
    for number, (p, config) in enumerate(drawn(name, kind)[part::PARTS]):
        on_gpu.check_exact(FAMILIES[name].of(p), p, [config], seed=number)


@pytest.mark.parametrize(("tried", "p"), NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(tried: Tried, p: ConvProblem) -> None:
    operands = on_gpu.normals(p, seed=1)
    found = configs(tried, p)
    on_gpu.check_accuracy_and_repeats(tried.of(p), p, found, *operands, times=20, in_tf32=tried.in_tf32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("tried", "p", "config"), RUNS, ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(tried: Tried, p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_one_not_finite(tried.of(p), p, config, value)


@pytest.mark.parametrize("tried", FAMILIES.values(), ids=FAMILIES)
def test_a_measurement_chooses_between_it_and_xla(tried: Tried) -> None:
    on_gpu.check_measured(tried.measured)
