"""The tf32 family on a GPU: exactness, accuracy, determinism, and NaN that stays where it belongs."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk import compiler, execute, reference
from jax_splitk.kernels import wgrad_tf32
from jax_splitk.target import DEFAULT_CUDA
from tests import float64, poison

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
SEED = np.random.SeedSequence().entropy


def some_configs(problem, count=4):
    """Candidates that differ in what the device code is specialised by, the model's best first."""
    found = {}
    for config in wgrad_tf32.candidates(problem, DEFAULT_CUDA):
        if wgrad_tf32.workspace_bytes(problem, config) <= 2**28:
            found.setdefault(wgrad_tf32.source(problem, config), config)
    return list(found.values())[:count]


@pytest.fixture(scope="module", autouse=True)
def compile_everything_first():
    problems = [case.problem(out) for case in (*SUITE, *ODD) for out in (None, "bfloat16")]
    compiler.compile_sources({wgrad_tf32.source(p, c) for p in problems for c in some_configs(p)})


def integers(case, seed=0):
    rng = np.random.default_rng([SEED, seed])
    draw = lambda shape: jnp.asarray(rng.integers(-2, 3, shape, dtype=np.int8)).astype(case.dtype)  # noqa: E731
    return draw(case.lhs_shape), draw(case.g_shape)


def expected(problem, lhs, g):
    exact = float64.conv_wgrad(problem, lhs, g)
    return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(problem.out_dtype))


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case):
    lhs, g = integers(case)
    problem = case.problem()
    want = expected(problem, lhs, g)
    for config in some_configs(problem, 2):
        out = poison.run(wgrad_tf32.make_plan(problem, config), problem, lhs, g)
        np.testing.assert_array_equal(out, want, err_msg=str(config))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_shapes_are_exact(case, out_dtype):
    lhs, g = integers(case, seed=1)
    problem = case.problem(out_dtype)
    want = expected(problem, lhs, g)
    for config in some_configs(problem):
        out = poison.run(wgrad_tf32.make_plan(problem, config), problem, lhs, g)
        np.testing.assert_array_equal(out, want, err_msg=str(config))


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.uniform])
@pytest.mark.parametrize("case", [dataclasses.replace(case, batch=64) for case in SUITE], ids=lambda case: case.name)
def test_is_as_accurate_as_xla_and_the_same_every_time(case, draw):
    """Also where all products have one sign, so that a rounding of one sign would show."""
    keys = jax.random.split(jax.random.key(SEED % 2**31))
    lhs, g = (draw(k, s, jnp.float32) for k, s in zip(keys, (case.lhs_shape, case.g_shape), strict=True))
    problem = case.problem()
    exact = float64.conv_wgrad(problem, lhs, g)
    error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)  # noqa: E731
    theirs = error(jax.jit(lambda x, y: reference.conv_wgrad(x, y, problem))(lhs, g))
    for config in some_configs(problem, 2):
        call = wgrad_tf32.make_plan(problem, config).custom_call()
        run = jax.jit(lambda x, y, call=call: execute.call(call, problem, x, y))
        first = np.asarray(run(lhs, g))
        assert error(first) <= 2 * theirs
        for _ in range(10):
            np.testing.assert_array_equal(np.asarray(run(lhs, g)), first)


@pytest.mark.parametrize("case", ODD[1:8], ids=lambda case: case.name)
def test_nan_reaches_what_depends_on_it_and_nothing_else(case):
    """One NaN in each input, at corners and edges. A NaN in g meets every tap: padding is a product with zero."""
    problem = case.problem()
    (height, width), (p, q) = problem.input_spatial, problem.output_spatial
    for (h, w), (i, j) in (((0, 0), (p - 1, q - 1)), ((height - 1, width - 1), (0, 0)), ((2, width - 1), (1, q - 1))):
        lhs, g = (np.ones(shape, np.float32) for shape in (case.lhs_shape, case.g_shape))
        one = np.zeros_like(lhs)
        one[0, h, w, 5] = 1
        touched = float64.conv_wgrad(problem, jnp.asarray(one), jnp.asarray(g)) != 0
        touched[..., 3] = True
        lhs[0, h, w, 5] = g[0, i, j, 3] = np.nan
        for config in some_configs(problem):
            out = poison.run(wgrad_tf32.make_plan(problem, config), problem, jnp.asarray(lhs), jnp.asarray(g))
            np.testing.assert_array_equal(np.isnan(out), touched, err_msg=str(config))


def test_the_largest_floats_stay_finite():
    """Rounded to nearest they would be infinite in tf32."""
    problem = Case("large", 1, 4, 8, 8, 8, (1, 1), dtype="float32").problem()
    largest = np.finfo(np.float32).max
    lhs, g = np.zeros(problem.lhs_shape, np.float32), np.zeros(problem.g_shape, np.float32)
    lhs[0, 1, 2], g[0, 1, 2] = largest, 0.5
    config = wgrad_tf32.candidates(problem, DEFAULT_CUDA)[0]
    out = poison.run(wgrad_tf32.make_plan(problem, config), problem, jnp.asarray(lhs), jnp.asarray(g))
    np.testing.assert_allclose(out, largest / 2, rtol=1e-3)
