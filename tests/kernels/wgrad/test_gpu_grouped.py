"""The grouped family on a GPU: exactness, accuracy, determinism, and where NaN may go."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk.kernels.wgrad import grouped
from jax_splitk.runtime.target import target_for
from tests import float64, gpu_wgrad, poison
from tests.gpu_wgrad import error, integers, normals, xla
from tests.kernels.wgrad.test_grouped import ODD, grouped_case, line, spread
from tests.problems import SEED

pytestmark = pytest.mark.gpu

SUITE = [case for case in cases.WGRAD_CASES if "grouped" in case.tags]
OUT_DTYPES = ("bfloat16", "float32")
# Rows, columns, images and slices of every kind, on one problem.
TILED = grouped_case((20, 20), (4, 4), 8, batch=3)
TILINGS = [
    grouped.Config(block, block, images, rows, columns, slices, stages, splits)
    for block, images, rows, columns, slices, stages, splits in [
        (32, 1, 20, 20, 1, 2, 1),
        (32, 2, 20, 16, 2, 2, 3),
        (32, 3, 7, 20, 4, 2, 5),
        (32, 2, 3, 20, 3, 3, 14),
        (16, 1, 5, 16, 1, 6, 2),
        (16, 3, 6, 8, 1, 4, 1),
        (64, 1, 4, 20, 2, 2, 7),
        (8, 2, 1, 20, 3, 6, 39),
    ]
]


def configs(case, out_dtype="float32"):
    """Some with one split, which writes the result itself, and some with several."""
    p = case.problem(out_dtype)
    found = spread(p, 3)
    return [dataclasses.replace(c, splits=min(grouped.tiles(p, c), n)) for c, n in zip(found, (1, 3, 7))]  # noqa: B905


def best(p):
    return grouped.FAMILY.candidates(p, target_for("cuda"))[0]


def device_code():
    sources = {grouped.FAMILY.source(case.problem("float32"), c) for case in ODD.values() for c in configs(case)}
    sources |= {grouped.FAMILY.source(TILED.problem("float32"), c) for c in TILINGS}
    sources |= {grouped.FAMILY.source(p, best(p)) for case in SUITE for p in map(case.problem, OUT_DTYPES)}
    return sources


def check_exact(p, config, seed=0):
    config = dataclasses.replace(config, splits=min(config.splits, grouped.tiles(p, config)))
    assert grouped.FAMILY.refusal(p, config) is None
    gpu_wgrad.check_exact(grouped.FAMILY, p, [config], seed)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    p = case.problem(out_dtype)
    check_exact(p, best(p))


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_odd_shapes_are_exact(case):
    for seed, config in enumerate(configs(case)):
        check_exact(case.problem("float32"), config, seed)


@pytest.mark.parametrize("config", TILINGS, ids=str)
def test_every_tiling_is_exact(config):
    check_exact(TILED.problem("float32"), config)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("splits", [1, 4])
def test_dtypes(dtype, out_dtype, splits):
    p = dataclasses.replace(TILED, dtype=dtype).problem(out_dtype)
    check_exact(p, dataclasses.replace(TILINGS[1], splits=splits))


def test_one_dimension():
    for taps in (1, 5):
        p = line(200, taps)
        for config in grouped.FAMILY.candidates(p, target_for("cuda"))[:2]:
            check_exact(p, config)


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_as_accurate_as_xla(case):
    p = case.problem()
    lhs, g = normals(p)
    exact = float64.conv_wgrad(p, lhs, g)

    def through_lax(lhs, g):
        forward = lambda rhs: lax.conv_general_dilated(lhs, rhs, **case.lax_arguments())  # noqa: E731
        return jax.linear_transpose(forward, jax.ShapeDtypeStruct(case.rhs_shape, lhs.dtype))(g)[0]

    mine = error(poison.run(grouped.FAMILY.plan(p, best(p)), p, lhs, g), exact)
    theirs = error(jax.jit(through_lax)(lhs, g), exact)
    assert mine <= 2 * theirs, (mine, theirs)
    unrounded = case.problem("float32")
    mine = error(poison.run(grouped.FAMILY.plan(unrounded, best(unrounded)), unrounded, lhs, g), exact)
    theirs = error(xla(unrounded)(lhs, g), exact)
    assert mine <= 2 * theirs, (mine, theirs)


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_bitwise_the_same_over_100_runs(case):
    p = case.problem("float32")
    run = jax.jit(
        lambda lhs, g: jax_splitk.conv_wgrad(
            lhs, g, case.rhs_shape, **case.lax_arguments(), preferred_element_type="float32", config=best(p)
        )
    )
    gpu_wgrad.check_repeats(run, *normals(p, seed=1))


@pytest.mark.parametrize("name", ["g4x4", "g16x16", "stride2", "dilation2", "asymmetric", "7x7", "wide", "g2x8"])
def test_nan_reaches_only_what_depends_on_it(name):
    """Also where a window meets the last rows and columns, whose neighbours lie in the same tile."""
    p = ODD[name].problem("float32")
    for seed, config in enumerate(configs(ODD[name])):
        rng = np.random.default_rng([SEED, seed])
        for corner in (False, True):
            lhs, g = (np.array(v.astype(jnp.float32)) for v in integers(p, seed))
            pixel = (-1, -1, -1) if corner else tuple(int(rng.integers(n)) for n in p.lhs_shape[:3])
            lhs[(*pixel, int(rng.integers(p.in_channels)))] = np.nan
            pixel = tuple(int(rng.integers(n)) for n in p.g_shape[:3])
            g[(*pixel, int(rng.integers(p.out_channels)))] = np.inf
            lhs, g = jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype)
            out = poison.run(grouped.FAMILY.plan(p, config), p, lhs, g)
            exact = float64.conv_wgrad(p, lhs, g)
            finite = np.isfinite(exact)
            assert finite.any()
            np.testing.assert_array_equal(out[finite], exact[finite].astype(np.float32))
            assert not np.isfinite(out[~finite]).any()
