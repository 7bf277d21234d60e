"""Depthwise weight gradients on a GPU: exactness, accuracy, determinism, and where what is not finite goes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import compiler, execute, reference
from jax_splitk.kernels import wgrad_depthwise
from jax_splitk.kernels.wgrad_depthwise import Config
from jax_splitk.target import DEFAULT_CUDA
from tests import float64, poison
from tests.depthwise import ODD, SEQUENCES, SUITE, folded

pytestmark = pytest.mark.gpu

SEED = np.random.SeedSequence().entropy
SMALL_SUITE = tuple(dataclasses.replace(case, batch=6) for case in SUITE)


def variants(problem):
    """The best config of every tile and of a single split, and the same with many splits."""
    found = {}
    for channels in wgrad_depthwise.CHANNELS:
        for segments in wgrad_depthwise.SEGMENTS:
            for stages, splits in ((1, 1), (2, 3), (3, 1000)):
                config = Config(channels, segments, stages, 1)
                config = dataclasses.replace(config, splits=wgrad_depthwise.whole_splits(problem, config, splits))
                if wgrad_depthwise.supports(problem, config) is None:
                    found[config] = None
    return list(found)


def best(problem):
    return wgrad_depthwise.candidates(problem, DEFAULT_CUDA)[0]


def odd_problems():
    for i, case in enumerate(ODD):
        typed = dataclasses.replace(case, dtype=("bfloat16", "float16")[i % 2])
        yield case.name, typed.problem(("float32", "bfloat16", "float16")[i % 3])
    for i, problem in enumerate(SEQUENCES):
        yield f"sequence{i}", problem


@pytest.fixture(scope="module", autouse=True)
def compile_everything_first():
    """In parallel, since the tests would compile one by one."""
    sources = {wgrad_depthwise.source(p, config) for _, p in odd_problems() for config in variants(p)}
    for case in (*SUITE, *SMALL_SUITE):
        for out in ("bfloat16", "float32"):
            sources.add(wgrad_depthwise.source(case.problem(out), best(case.problem(out))))
    compiler.compile_sources(sources)


def integers(problem, seed=0, limit=2):
    rng = np.random.default_rng([SEED, seed])
    draw = lambda shape: jnp.asarray(rng.integers(-limit, limit + 1, shape, dtype=np.int8)).astype(problem.dtype)  # noqa: E731
    return draw(problem.lhs_shape), draw(problem.g_shape)


def normals(problem, seed=0):
    keys = jax.random.split(jax.random.key((SEED + seed) % 2**31))
    shapes = (problem.lhs_shape, problem.g_shape)
    return tuple(jax.random.normal(key, shape, problem.dtype) for key, shape in zip(keys, shapes, strict=True))


def rounded(exact, dtype):
    return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype))


def ours(problem, config=None):
    call = wgrad_depthwise.make_plan(problem, config or best(problem)).custom_call()
    return jax.jit(lambda lhs, g: execute.call(call, problem, lhs, g))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    problem = case.problem(out_dtype)
    lhs, g = integers(problem, limit=1)
    out = poison.run(wgrad_depthwise.make_plan(problem, best(problem)), problem, lhs, g)
    np.testing.assert_array_equal(out, rounded(float64.conv_wgrad(problem, lhs, g), out_dtype))


@pytest.mark.parametrize(("name", "problem"), list(odd_problems()), ids=lambda v: v if isinstance(v, str) else "")
def test_odd_shapes_are_exact_in_every_variant(name, problem):
    lhs, g = integers(problem, seed=len(name))
    exact = rounded(float64.conv_wgrad(problem, lhs, g), problem.out_dtype)
    for config in variants(problem):
        out = poison.run(wgrad_depthwise.make_plan(problem, config), problem, lhs, g)
        np.testing.assert_array_equal(out, exact, err_msg=str(config))


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_as_accurate_as_xla(case):
    for out_dtype in ("bfloat16", "float32"):
        problem = case.problem(out_dtype)
        lhs, g = normals(problem)
        exact = float64.conv_wgrad(problem, lhs, g)
        error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)  # noqa: B023, E731
        mine = error(ours(problem)(lhs, g))
        theirs = error(jax.jit(lambda lhs, g: reference.conv_wgrad(lhs, g, problem))(lhs, g))  # noqa: B023
        assert mine <= 2 * theirs, (out_dtype, mine, theirs)


@pytest.mark.parametrize("case", SUITE[::3], ids=lambda case: case.name)
def test_bitwise_the_same_over_20_runs(case):
    problem = case.problem("float32")
    lhs, g = normals(problem, seed=1)
    run = ours(problem)
    first = np.asarray(run(lhs, g))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(run(lhs, g)), first)


def depends_on(problem, position):
    """Which of dW's elements the input pixel's value enters, by a weight gradient of an indicator."""
    one = np.zeros(problem.lhs_shape)
    one[position] = 1
    return float64.conv_wgrad(problem, one, np.ones(problem.g_shape)) != 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("case", [*SMALL_SUITE[:4], SMALL_SUITE[7], *ODD], ids=lambda case: case.name)
def test_what_is_not_finite_reaches_only_what_depends_on_it(case, value):
    problem = case.problem("float32")
    lhs, g = (np.array(a.astype(jnp.float32)) for a in integers(problem, seed=3))
    g[g == 0] = 1  # else Inf times zero
    clean = float64.conv_wgrad(problem, lhs, g)
    rng = np.random.default_rng([SEED, 4])
    n, h, w, c = problem.lhs_shape
    corners = [(0, 0, 0, 0), (n - 1, h - 1, w - 1, c - 1), (0, h - 1, w - 1, 1), (n - 1, 0, w - 1, 2)]
    for position in [*corners, tuple(int(v) for v in rng.integers(0, problem.lhs_shape))]:
        bad = lhs.copy()
        bad[position] = value
        config = dataclasses.replace(best(problem), splits=1)
        arrays = (jnp.asarray(a).astype(problem.dtype) for a in (bad, g))
        out = poison.run(wgrad_depthwise.make_plan(problem, config), problem, *arrays)
        reached = depends_on(problem, position)
        assert not np.isfinite(out[reached]).any(), position
        np.testing.assert_array_equal(out[~reached], clean.astype(np.float32)[~reached], err_msg=str(position))


def test_a_sequence_is_an_image_of_one_row():
    for problem in SEQUENCES:
        lhs, g = integers(problem)
        flat = np.asarray(ours(problem)(lhs, g))
        image = folded(problem)
        deep = np.asarray(ours(image)(lhs[:, None], g[:, None]))
        np.testing.assert_array_equal(flat, deep[0])
