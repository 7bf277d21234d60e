"""Depthwise weight gradients on a GPU: exactness, accuracy, determinism, and where what is not finite goes."""

import dataclasses
import functools

import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import depthwise
from jax_splitk.kernels.wgrad.depthwise import Config
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, gpu_wgrad, poison
from tests.depthwise import ODD, SEQUENCES, SUITE, folded
from tests.gpu_wgrad import error, integers, normals, xla
from tests.problems import SEED

pytestmark = pytest.mark.gpu

SMALL_SUITE = tuple(dataclasses.replace(case, batch=6) for case in SUITE)


def variants(problem):
    """The best config of every tile and of a single split, and the same with many splits."""
    found = {}
    for channels in depthwise.CHANNELS:
        for segments in depthwise.SEGMENTS:
            for stages, splits in ((1, 1), (2, 3), (3, 1000)):
                config = Config(channels, segments, stages, 1)
                config = depthwise.FAMILY.with_splits(problem, config, splits)
                if depthwise.FAMILY.refusal(problem, config) is None:
                    found[config] = None
    return list(found)


def best(problem):
    return depthwise.FAMILY.candidates(problem, DEFAULT_CUDA)[0]


def odd_problems():
    for i, case in enumerate(ODD):
        typed = dataclasses.replace(case, dtype=("bfloat16", "float16")[i % 2])
        yield case.name, typed.problem(("float32", "bfloat16", "float16")[i % 3])
    for i, problem in enumerate(SEQUENCES):
        yield f"sequence{i}", problem


def leaves_out_zeros(problem):
    """Whether zeros beside a row are not in shared memory, where it is one segment."""
    t = depthwise.tiling(problem, Config(8, 1, 1, 1))
    return t.x_columns < t.used + depthwise.geometry(problem).width.reach


def short_rows():
    """Such problems, and configs."""
    for name, problem in (*((case.name, case.problem()) for case in SMALL_SUITE[2:4]), *odd_problems()):
        if leaves_out_zeros(problem):
            configs = [config for config in variants(problem) if config.segments == 1 and config.stages == 2]
            yield pytest.param(problem, configs, id=name)


def filling(segments):
    """A problem without any zeros, and configs for it whose planes fill the shared memory of every multiprocessor."""
    case = Case("", 64 * (4 // segments), 96, 16 * segments, 48, 48, (1, 1), groups=48)
    problem = case.problem()
    deepest = depthwise.tiling(problem, Config(16, segments, 1, 1)).max_stages
    configs = [Config(16, segments, stages, 64) for stages in (deepest, deepest - 1)]
    for config in configs:
        (launch, *_) = depthwise.FAMILY.plan(problem, config).launches
        assert launch.shared_bytes > 150 * 1024
        assert launch.grid[0] * launch.grid[1] > DEFAULT_CUDA.cores, "only one fits a multiprocessor"
    return problem, configs


@functools.cache
def fill_with_nan():
    """Functions that leave NaN nearly everywhere in shared memory, each with other gaps."""
    found = []
    for segments in depthwise.SEGMENTS:
        problem, configs = filling(segments)
        operands = [jnp.full(shape, jnp.nan, problem.dtype) for shape in (problem.lhs_shape, problem.g_shape)]
        for config in configs:
            run = gpu_wgrad.ours(depthwise.FAMILY, problem, config)
            assert jnp.isnan(run(*operands)).all()
            found.append(functools.partial(run, *operands))
    return found


def device_code():
    sources = {depthwise.FAMILY.source(p, config) for _, p in odd_problems() for config in variants(p)}
    for case in (*SUITE, *SMALL_SUITE):
        for out in ("bfloat16", "float32"):
            sources.add(depthwise.FAMILY.source(case.problem(out), best(case.problem(out))))
    for problem, configs in map(filling, depthwise.SEGMENTS):
        sources.add(depthwise.FAMILY.source(problem, configs[0]))
    for rows in short_rows():
        problem, configs = rows.values
        sources |= {depthwise.FAMILY.source(problem, config) for config in (*configs, Config(8, 1, 1, 1))}
    return sources


def ours(problem):
    return gpu_wgrad.ours(depthwise.FAMILY, problem, best(problem))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    problem = case.problem(out_dtype)
    gpu_wgrad.check_exact(depthwise.FAMILY, problem, [best(problem)], limit=1)


@pytest.mark.parametrize(("name", "problem"), list(odd_problems()), ids=lambda v: v if isinstance(v, str) else "")
def test_odd_shapes_are_exact_in_every_variant(name, problem):
    gpu_wgrad.check_exact(depthwise.FAMILY, problem, variants(problem), seed=len(name))


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_as_accurate_as_xla(case):
    for out_dtype in ("bfloat16", "float32"):
        problem = case.problem(out_dtype)
        lhs, g = normals(problem)
        exact = float64.conv_wgrad(problem, lhs, g)
        mine, theirs = error(ours(problem)(lhs, g), exact), error(xla(problem)(lhs, g), exact)
        assert mine <= 2 * theirs, (out_dtype, mine, theirs)


@pytest.mark.parametrize("case", SUITE[::3], ids=lambda case: case.name)
def test_bitwise_the_same_over_100_runs(case):
    problem = case.problem("float32")
    gpu_wgrad.check_repeats(ours(problem), *normals(problem, seed=1))


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
    configs = {dataclasses.replace(best(problem), splits=1)}
    if leaves_out_zeros(problem):
        configs.add(Config(8, 1, 1, 1))
    corners = [(0, 0, 0, 0), (n - 1, h - 1, w - 1, c - 1), (0, h - 1, w - 1, 1), (n - 1, 0, w - 1, 2)]
    for position in [*corners, tuple(int(v) for v in rng.integers(0, problem.lhs_shape))]:
        bad = lhs.copy()
        bad[position] = value
        arrays = [jnp.asarray(a).astype(problem.dtype) for a in (bad, g)]
        reached = depends_on(problem, position)
        for config in configs:
            out = poison.run(depthwise.FAMILY.plan(problem, config), problem, *arrays)
            where = f"{position} {config}"
            assert not np.isfinite(out[reached]).any(), where
            np.testing.assert_array_equal(out[~reached], clean.astype(np.float32)[~reached], err_msg=where)


@pytest.mark.parametrize(("problem", "configs"), list(short_rows()))
def test_what_was_in_shared_memory_enters_no_product(problem, configs):
    lhs, g = integers(problem, seed=5)
    want = gpu_wgrad.rounded(float64.conv_wgrad(problem, lhs, g), problem.out_dtype)
    for config in configs:
        run = gpu_wgrad.ours(depthwise.FAMILY, problem, config)
        run(lhs, g).block_until_ready()  # compiled, so that nothing runs in between
        for i, fill in enumerate(fill_with_nan()):
            fill().block_until_ready()
            np.testing.assert_array_equal(np.asarray(run(lhs, g)), want, err_msg=f"{config} after {i}")


def test_a_sequence_is_an_image_of_one_row():
    for problem in SEQUENCES:
        lhs, g = integers(problem)
        flat = np.asarray(ours(problem)(lhs, g))
        image = folded(problem)
        deep = np.asarray(ours(image)(lhs[:, None], g[:, None]))
        np.testing.assert_array_equal(flat, deep[0])
