"""The gathering family on a GPU: exactness, accuracy of each precision, determinism, infinities and NaN."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk.kernels.wgrad import gather
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import target_for
from tests import float64, gpu_wgrad, poison
from tests.gpu_wgrad import error, normals, rounded, xla
from tests.kernels.wgrad.test_gather import BLOCKS, CHAINED, STEM, conv, random_problem
from tests.problems import SEED

pytestmark = pytest.mark.gpu

SUITE = [case.problem() for case in cases.WGRAD_CASES if {"stem", "float32"} & set(case.tags)]

ODD = [
    conv((28, 28), (5, 5), (1, 32), batch=16),
    conv((32, 32), (3, 3), (3, 64), batch=4),
    conv((37, 29), (7, 7), (3, 64), strides=(2, 2), padding=((3, 3), (3, 3))),
    conv((40, 40), (7, 7), (3, 64), strides=(2, 2), padding=((2, 3), (2, 3))),
    conv((47, 47), (11, 11), (3, 96), strides=(4, 4), padding=((2, 2), (2, 2))),
    conv((17, 19), (3, 3), (12, 10)),
    conv((15, 13), (3, 3), (65, 100)),
    conv((9, 9), (3, 3), (100, 65)),
    conv((11, 11), (1, 1), (7, 9)),
    conv((12, 12), (3, 3), (200, 24), strides=(2, 2)),
    conv((16, 16), (3, 3), (30, 33), rhs_dilation=(2, 3)),
    conv((9, 10), (3, 2), (5, 8), lhs_dilation=(2, 3), strides=(2, 1)),
    conv((12, 12), (3, 3), (10, 16), padding=((-1, 2), (4, -3))),
    conv((300,), (9,), (2, 40), strides=(2,)),
    conv((200,), (2,), (16, 8), rhs_dilation=(64,)),
    conv((6, 7, 8), (3, 3, 3), (5, 12)),
    conv((8, 8, 8), (2, 3, 2), (3, 192), strides=(2, 1, 2)),
    conv((1, 1), (1, 1), (48, 72), batch=333),
    conv((2, 3), (2, 2), (9, 256), batch=70),
    conv((5, 5), (3, 3), (24, 320), batch=3),
]


def integers(p, seed=0, limit=2):
    rng = np.random.default_rng([SEED, seed])
    return tuple(rng.integers(-limit, limit + 1, shape).astype(np.float32) for shape in (p.lhs_shape, p.g_shape))


def run(p, config, lhs, g):
    plan = gather.FAMILY.plan(p, config)
    return poison.run(plan, p, jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype))


def varied(p, count):
    """Candidates that differ in what the device code is specialised by."""
    configs = gather.FAMILY.candidates(p, target_for("cuda"))
    found = {}
    for config in configs:
        found.setdefault((config.consumers, config.blocks, config.tile_n, config.slice, config.pixels), config)
    chosen = list(found.values())
    return chosen[:: max(1, len(chosen) // count)][:count]


DTYPES = (("bfloat16", "default"), ("float16", "default"), ("float32", "default"), ("float32", "highest"))
VARIANTS = [
    (dataclasses.replace(p, dtype=dtype, precision=precision), index)
    for (index, p), (dtype, precision) in itertools.product(enumerate(ODD), DTYPES)
]


def device_code():
    problems = [p for p, _ in VARIANTS] + SUITE
    sources = {gather.FAMILY.source(p, config) for p in problems for config in varied(p, 3)}
    return sources | {gather.FAMILY.source(CHAINED, config) for config in BLOCKS.values()}


@pytest.mark.parametrize(("p", "index"), VARIANTS, ids=str)
def test_odd_shapes_are_exact(p, index):
    for seed, config in enumerate(varied(p, 3)):
        lhs, g = integers(p, 100 * index + seed)
        exact = float64.conv_wgrad_on_host(p, lhs.astype(np.float64), g.astype(np.float64))
        np.testing.assert_array_equal(run(p, config, lhs, g), rounded(exact, p.out_dtype), err_msg=str(config))


@pytest.mark.parametrize("config", BLOCKS.values(), ids=str)
def test_chains_of_several_blocks_are_exact_and_accurate(config):
    lhs, g = integers(CHAINED)
    exact = float64.conv_wgrad_on_host(CHAINED, lhs.astype(np.float64), g.astype(np.float64))
    np.testing.assert_array_equal(run(CHAINED, config, lhs, g), exact.astype(np.float32))
    lhs, g = normals(CHAINED)
    exact = float64.conv_wgrad_on_host(CHAINED, np.asarray(lhs, np.float64), np.asarray(g, np.float64))
    assert error(run(CHAINED, config, lhs, g), exact) < 3e-7


def test_random_problems_are_exact():
    rng = np.random.default_rng([SEED, 1])
    problems = [random_problem(rng) for _ in range(30)]
    chosen = [(p, varied(p, 1)[0]) for p in problems]
    compiler.compile_sources({gather.FAMILY.source(p, config) for p, config in chosen})
    for seed, (p, config) in enumerate(chosen):
        lhs, g = integers(p, seed)
        exact = float64.conv_wgrad_on_host(p, lhs.astype(np.float64), g.astype(np.float64))
        np.testing.assert_array_equal(run(p, config, lhs, g), rounded(exact, p.out_dtype), err_msg=f"{p} {config}")


@pytest.mark.parametrize("p", SUITE, ids=str)
def test_suite_is_exact_on_integers(p):
    p = dataclasses.replace(p, out_dtype="float32")
    lhs, g = integers(p)
    # Sums of at most 2^24 in float32 are exact, XLA's too.
    expected = np.asarray(xla(p)(jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype)))
    for config in varied(p, 3):
        np.testing.assert_array_equal(run(p, config, lhs, g), expected, err_msg=str(config))


ACCURACY = [
    conv((56, 56), (7, 7), (3, 64), batch=32, strides=(2, 2)),
    *(
        dataclasses.replace(conv((28, 28), (3, 3), (64, 64), batch=32), dtype="float32", precision=precision)
        for precision in ("default", "high", "highest")
    ),
]


@pytest.mark.parametrize("p", ACCURACY, ids=lambda p: f"{p.dtype}_{p.precision}")
def test_as_accurate_as_xla(p):
    lhs, g = normals(p)
    exact = float64.conv_wgrad_on_host(p, np.asarray(lhs, np.float64), np.asarray(g, np.float64))
    theirs = error(xla(p)(lhs, g), exact)
    for config in varied(p, 4):
        mine = error(run(p, config, lhs, g), exact)
        print(p.dtype, p.precision, config, f"{mine:.2e} XLA {theirs:.2e}")
        assert mine <= 2 * theirs, config


@pytest.mark.parametrize("p", [SUITE[0], SUITE[1]], ids=str)
def test_bitwise_the_same_over_100_runs(p):
    call = jax.jit(lambda lhs, g: run_config(p, varied(p, 1)[0], lhs, g))
    gpu_wgrad.check_repeats(call, *normals(p, 1))


def run_config(p, config, lhs, g):
    return jax_splitk.conv_wgrad(
        lhs, g, p.out_shape, p.window_strides, p.padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), config=config
    )


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("dtype", "precision"), DTYPES)
@pytest.mark.parametrize("index", [0, 3, 6, 9])
def test_infinities_and_nan_reach_what_depends_on_them(index, dtype, precision, value):
    """Whole numbers of one sign, so that an infinity stays one."""
    p = dataclasses.replace(ODD[index], dtype=dtype, precision=precision)
    rng = np.random.default_rng([SEED, index])
    draw = lambda shape: rng.integers(1, 3, shape).astype(np.float32)  # noqa: E731
    middle = tuple(size // 2 for size in p.input_spatial)
    for config in varied(p, 2):
        lhs, g = draw(p.lhs_shape), draw(p.g_shape)
        lhs[(0, *middle, 0)] = value
        with np.errstate(invalid="ignore"):
            expected = dependent(p, lhs, g)
        np.testing.assert_array_equal(run(p, config, lhs, g), expected.astype(np.float32), err_msg=str(config))
        lhs, g = draw(p.lhs_shape), draw(p.g_shape)
        g[(0, *(size // 2 for size in p.output_spatial), 0)] = value
        out = run(p, config, lhs, g)
        # Where padding meets the gradient 0 * inf may be NaN; other output channels are whole numbers.
        exact = float64.conv_wgrad_on_host(p, lhs.astype(np.float64), np.where(np.isfinite(g), g, 0).astype(np.float64))
        np.testing.assert_array_equal(out[..., 1:], exact[..., 1:].astype(np.float32), err_msg=str(config))
        assert not np.isfinite(out[..., 0]).all()


def dependent(p, lhs, g):
    """The exact result, in which only the products with the special value are not finite."""
    special = ~np.isfinite(lhs)
    finite = float64.conv_wgrad_on_host(p, np.where(special, 0, lhs).astype(np.float64), g.astype(np.float64))
    reached = float64.conv_wgrad_on_host(p, special.astype(np.float64), g.astype(np.float64)) != 0
    return np.where(reached, lhs[special][0], finite)


def test_finite_numbers_that_bfloat16_cannot_hold():
    """The largest floats round to infinity in bfloat16; their parts must not."""
    p = conv((4, 4), (1, 1), (8, 8), batch=1, dtype="float32")
    big = np.finfo(np.float32).max
    lhs, g = np.zeros(p.lhs_shape, np.float32), np.zeros(p.g_shape, np.float32)
    lhs[0, 1, 2], g[0, 1, 2] = big, 0.5
    out = run(p, gather.FAMILY.candidates(p, target_for("cuda"))[0], lhs, g)
    np.testing.assert_allclose(out, big / 2, rtol=1e-4)


def test_stem_is_chosen_and_explicit_configs_run():
    p = dataclasses.replace(STEM, batch=8)
    lhs, g = normals(p)
    expected = np.asarray(xla(p)(lhs, g))
    for config in varied(p, 4):
        out = jax.jit(lambda lhs, g, config=config: run_config(p, config, lhs, g))(lhs, g)
        assert np.linalg.norm(np.asarray(out, np.float32) - expected) < 5e-3 * np.linalg.norm(expected)
