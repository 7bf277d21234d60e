"""The halo family on a GPU: exactness, accuracy, determinism, and NaN that stays where it belongs."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk import compiler, execute, reference
from jax_splitk.kernels import wgrad_halo
from jax_splitk.target import DEFAULT_CUDA
from tests import float64, poison

pytestmark = pytest.mark.gpu

SUITE = [case for case in cases.WGRAD_CASES if wgrad_halo.supports(case.problem()) is None]
ODD = (
    Case("pairs_of_rows", 3, 10, 24, 72, 136, (3, 3)),
    Case("odd_height", 2, 7, 16, 64, 64, (3, 3)),
    Case("5x5", 2, 12, 40, 128, 64, (5, 5)),
    Case("7x7_narrow", 1, 20, 16, 64, 72, (7, 7)),
    Case("even_filter", 2, 9, 48, 64, 64, (2, 4), padding=((0, 1), (2, 1))),
    Case("dilated", 2, 20, 32, 64, 64, (3, 3), dilation=(2, 3)),
    Case("1x2", 1, 16, 16, 200, 72, (1, 2), padding=((0, 0), (1, 0))),
    Case("no_padding", 2, 30, 130, 64, 64, (3, 3), padding=((0, 0), (0, 0))),
    Case("wide_padding", 2, 8, 16, 16, 24, (3, 3), padding=((3, 4), (9, 9))),
    Case("cropped", 2, 20, 34, 64, 64, (3, 3), padding=((-2, 0), (1, -1))),
)
SEED = np.random.SeedSequence().entropy


@pytest.fixture(scope="module", autouse=True)
def compile_everything_first():
    problems = [case.problem(out) for case in (*SUITE, *ODD) for out in ("float32", None)]
    problems += [dataclasses.replace(case, dtype="float16").problem() for case in ODD]
    compiler.compile_sources({wgrad_halo.source(p, c) for p in problems for c in some_configs(p)})


def some_configs(problem, count=6):
    """Of every strip and schedule some, the model's best first."""
    found = sorted(
        wgrad_halo.candidates(problem, DEFAULT_CUDA), key=lambda c: wgrad_halo.estimate(problem, c, DEFAULT_CUDA)
    )
    found = [c for c in found if wgrad_halo.workspace_bytes(problem, c) <= 2**28]
    return [*found[: count // 2], *found[-(count // 2) :]]


def integers(case, seed=0):
    rng = np.random.default_rng([SEED, seed])
    draw = lambda shape: jnp.asarray(rng.integers(-2, 3, shape, dtype=np.int8)).astype(case.dtype)  # noqa: E731
    return draw(case.lhs_shape), draw(case.g_shape)


def expected(problem, lhs, g):
    exact = float64.conv_wgrad(problem, lhs, g)
    return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(problem.out_dtype))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    lhs, g = integers(case)
    problem = case.problem(out_dtype)
    config = some_configs(problem)[0]
    out = poison.run(wgrad_halo.make_plan(problem, config), problem, lhs, g)
    np.testing.assert_array_equal(out, expected(problem, lhs, g))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_shapes_are_exact(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    lhs, g = integers(case, seed=1)
    problem = case.problem("float32" if dtype == "bfloat16" else None)
    want = expected(problem, lhs, g)
    for config in some_configs(problem):
        out = poison.run(wgrad_halo.make_plan(problem, config), problem, lhs, g)
        np.testing.assert_array_equal(out, want, err_msg=str(config))


@pytest.mark.parametrize("case", SUITE[:4], ids=lambda case: case.name)
def test_is_as_accurate_as_xla_and_the_same_every_time(case):
    keys = jax.random.split(jax.random.key(SEED % 2**31))
    lhs, g = (jax.random.normal(k, s, case.dtype) for k, s in zip(keys, (case.lhs_shape, case.g_shape), strict=True))
    problem = case.problem("float32")
    exact = float64.conv_wgrad(problem, lhs, g)
    error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)  # noqa: E731
    theirs = error(jax.jit(lambda x, y: reference.conv_wgrad(x, y, problem))(lhs, g))
    for config in some_configs(problem, 4):
        call = wgrad_halo.make_plan(problem, config).custom_call()
        run = jax.jit(lambda x, y, call=call: execute.call(call, problem, x, y))
        first = np.asarray(run(lhs, g))
        assert error(first) <= 2 * theirs
        for _ in range(10):
            np.testing.assert_array_equal(np.asarray(run(lhs, g)), first)


@pytest.mark.parametrize("case", ODD[:6], ids=lambda case: case.name)
def test_nan_reaches_what_depends_on_it_and_nothing_else(case):
    """One NaN in each input, at corners and edges. A NaN in g meets every tap: padding is a product with zero."""
    problem = case.problem("float32")
    (height, width), (p, q) = problem.input_spatial, problem.output_spatial
    for (h, w), (i, j) in (((0, 0), (p - 1, q - 1)), ((height - 1, width - 1), (0, 0)), ((2, width - 1), (1, q - 1))):
        lhs, g = (np.ones(shape, np.float32) for shape in (case.lhs_shape, case.g_shape))
        one = np.zeros_like(lhs)
        one[0, h, w, 5] = 1
        touched = float64.conv_wgrad(problem, jnp.asarray(one), jnp.asarray(g)) != 0
        touched[..., 3] = True
        lhs[0, h, w, 5] = g[0, i, j, 3] = np.nan
        for config in some_configs(problem, 4):
            out = poison.run(
                wgrad_halo.make_plan(problem, config), problem, *(jnp.asarray(a).astype(case.dtype) for a in (lhs, g))
            )
            np.testing.assert_array_equal(np.isnan(out), touched, err_msg=str(config))
