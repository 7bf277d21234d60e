"""Families that use another family's kernels on an equivalent convolution, on a GPU."""

from typing import Any

import numpy as np
import pytest

from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import on_gpu
from tests.kernels.conv.test_adapted import ADAPTED, FLOATS, HALF, PASSES, PROBLEMS, layer

pytestmark = pytest.mark.gpu

LAYERS = {
    "fprop_grouped_padded": layer(PASSES[0], 32, 14, (144, 144), 16, **HALF),
    "fprop_im2col_padded": layer(PASSES[0], 32, 28, (61, 53), 1, **HALF),
    "dgrad_grouped_padded": layer(PASSES[1], 16, 28, (80, 80), 8, **HALF),
    "dgrad_im2col_padded": layer(PASSES[1], 32, 28, (53, 61), 1, **HALF),
    "wgrad_grouped_padded": layer(PASSES[2], 32, 28, (27, 45), 3, **HALF),
    "wgrad_im2col_padded": layer(PASSES[2], 32, 28, (61, 53), 1, **HALF),
    "wgrad_tf32_merged": layer(PASSES[2], 64, 28, (16, 16), 4, **FLOATS),
    "wgrad_gather_merged": layer(PASSES[2], 32, 28, (18, 30), 6, **FLOATS),
}


def configs(name: str, p: ConvProblem) -> list[Any]:
    """Two candidates, with as much between them as there is."""
    found = ADAPTED[name].candidates(p, DEFAULT_CUDA)
    return list(dict.fromkeys((found[0], found[-1])))


RUNS = [(name, p) for name, p in (*PROBLEMS, *LAYERS.items())]


def device_code() -> set[compiler.Source]:
    return {ADAPTED[name].plan(p, config).source for name, p in RUNS for config in configs(name, p)}


@pytest.mark.parametrize("name", ADAPTED)
def test_integers_are_exact_whatever_the_results_memory_held(name: str) -> None:
    for number, (_, p) in enumerate(run for run in RUNS if run[0] == name):
        on_gpu.check_exact(ADAPTED[name], p, configs(name, p), seed=number)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ADAPTED)
def test_what_is_not_finite_reaches_only_what_depends_on_it(name: str, value: float) -> None:
    for _, p in [run for run in RUNS if run[0] == name][:4]:
        if isinstance(p, ConvWgradProblem):
            on_gpu.check_not_finite(ADAPTED[name], p, configs(name, p)[:1])
        else:
            on_gpu.check_one_not_finite(ADAPTED[name], p, configs(name, p)[0], value)


@pytest.mark.parametrize("name", LAYERS)
def test_error_is_at_most_twice_xlas_and_runs_repeat(name: str) -> None:
    p = LAYERS[name]
    in_tf32 = name.endswith("_merged")  # XLA computes these passes in float32
    given = on_gpu.normals(p)
    on_gpu.check_accuracy_and_repeats(ADAPTED[name], p, configs(name, p)[:1], *given, times=20, in_tf32=in_tf32)


def test_a_measurement_chooses_between_them_and_others() -> None:
    on_gpu.check_measured(list(LAYERS.values()))
