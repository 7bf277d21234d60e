"""Depthwise forward passes and input gradients on a GPU."""

from typing import Any

import numpy as np
import pytest

from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from tests.kernels.conv import on_gpu
from tests.kernels.conv.test_depthwise import BOTH, CASES, FAMILIES, problem

pytestmark = pytest.mark.gpu

HALF = {"dtype": "bfloat16"}
NETWORKS = [
    problem(kind, size, kernel, channels, batch=2, **more)
    for kind in BOTH
    for size, kernel, channels, more in (
        ((56, 56), (7, 7), 96, {"padding": 3, **HALF}),
        ((14, 14), (7, 7), 384, {"padding": 3, "dtype": "float16"}),
        ((56, 57), (3, 3), 144, {"padding": 1, "stride": 2, **HALF}),
        ((28, 28), (5, 5), 240, {"padding": 2, "stride": 2, "dtype": "bfloat16", "out_dtype": "float32"}),
        ((1000,), (4,), 512, {"padding": ((3, 0),), **HALF}),
        ((8, 28, 28), (3, 3, 3), 64, {"padding": 1, "dtype": "float32"}),
    )
]  # fmt: skip


def configs(p: ConvProblem, count: int) -> list[Any]:
    return on_gpu.best_of_kinds(FAMILIES[p.op], p, lambda c: c.columns, count)


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in NETWORKS for config in configs(p, 2))]
    return {FAMILIES[p.op].source(p, config) for p, config in pairs}


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in NETWORKS)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    on_gpu.check_integers(FAMILIES[p.op], p, [given] if given else configs(p, 2))


@pytest.mark.parametrize("p", NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    on_gpu.check_error_and_repeats(FAMILIES[p.op], p, configs(p, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), CASES[:4], ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_not_finite(FAMILIES[p.op], p, config, value)


def test_a_measurement_chooses_between_it_and_xla() -> None:
    on_gpu.check_measured(problem(ConvFpropProblem, (56, 56), (3, 3), 96, batch=16, padding=1, **HALF))
