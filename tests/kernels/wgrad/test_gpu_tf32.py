"""The tf32 family on a GPU: exactness, accuracy, determinism, and NaN that stays where it belongs."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import tf32
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import gpu_wgrad, poison

pytestmark = pytest.mark.gpu

SUITE = [case for case in cases.WGRAD_CASES if case.dtype == "float32"]
ODD = (
    Case("few_channels", 2, 3, 8, 4, 4, (1, 1), padding=((1, 1), (1, 1))),
    Case("two_images", 5, 28, 28, 72, 128, (3, 3)),
    Case("14_wide", 6, 14, 14, 68, 64, (3, 3)),
    Case("7_wide_stride_2", 9, 14, 14, 64, 100, (3, 3), stride=(2, 2)),
    Case("ragged", 3, 13, 21, 68, 100, (3, 3)),
    Case("ragged_stride_2", 3, 17, 27, 68, 36, (3, 3), stride=(2, 2)),
    Case("dilated", 2, 20, 24, 12, 40, (5, 5), dilation=(2, 3)),
    Case("stride_3", 2, 40, 44, 8, 32, (7, 7), stride=(3, 3)),
    Case("stride_4", 2, 9, 50, 16, 200, (1, 3), stride=(1, 4)),
    Case("1x1", 7, 14, 14, 260, 132, (1, 1)),
    Case("1x1_stride_2", 4, 28, 28, 128, 256, (1, 1), stride=(2, 2)),
    Case("cropped", 4, 12, 12, 192, 96, (2, 3), padding=((0, 1), (3, -1))),
    Case("small_images", 9, 7, 7, 128, 128, (2, 2)),
)
ODD = tuple(dataclasses.replace(case, dtype="float32") for case in ODD)


def some_configs(problem, count=4):
    """Candidates that differ in what the device code is specialised by, the model's best first."""
    found = {}
    for config in tf32.FAMILY.candidates(problem, DEFAULT_CUDA):
        if tf32.FAMILY.workspace_bytes(problem, config) <= 2**28:
            found.setdefault(tf32.FAMILY.source(problem, config), config)
    return list(found.values())[:count]


def device_code():
    problems = [case.problem(out) for case in (*SUITE, *ODD) for out in (None, "bfloat16")]
    return {tf32.FAMILY.source(p, c) for p in problems for c in some_configs(p)}


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case):
    problem = case.problem()
    gpu_wgrad.check_exact(tf32.FAMILY, problem, some_configs(problem, 2))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_shapes_are_exact(case, out_dtype):
    problem = case.problem(out_dtype)
    gpu_wgrad.check_exact(tf32.FAMILY, problem, some_configs(problem), seed=1)


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.uniform])
@pytest.mark.parametrize("case", [dataclasses.replace(case, batch=64) for case in SUITE], ids=lambda case: case.name)
def test_is_as_accurate_as_xla_and_the_same_every_time(case, draw):
    """Also where all products have one sign, so that a rounding of one sign would show."""
    problem = case.problem()
    gpu_wgrad.check_accuracy_and_repeats(
        tf32.FAMILY, problem, some_configs(problem, 2), *gpu_wgrad.normals(problem, draw=draw)
    )


@pytest.mark.parametrize("case", ODD[1:8], ids=lambda case: case.name)
def test_nan_reaches_what_depends_on_it_and_nothing_else(case):
    problem = case.problem()
    gpu_wgrad.check_nan_in_corners(tf32.FAMILY, problem, some_configs(problem))


def test_the_largest_floats_stay_finite():
    """Rounded to nearest they would be infinite in tf32."""
    problem = Case("large", 1, 4, 8, 8, 8, (1, 1), dtype="float32").problem()
    largest = np.finfo(np.float32).max
    lhs, g = np.zeros(problem.lhs_shape, np.float32), np.zeros(problem.g_shape, np.float32)
    lhs[0, 1, 2], g[0, 1, 2] = largest, 0.5
    config = tf32.FAMILY.candidates(problem, DEFAULT_CUDA)[0]
    out = poison.run(tf32.FAMILY.plan(problem, config), problem, jnp.asarray(lhs), jnp.asarray(g))
    np.testing.assert_allclose(out, largest / 2, rtol=1e-3)
