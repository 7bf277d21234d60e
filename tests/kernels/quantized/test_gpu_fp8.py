"""The e4m3 tensor cores' family of quantized products on a GPU: exactness, decoding, accuracy, determinism, NaN."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import fp8, tiles
from jax_splitk.kernels.quantized.fp8 import FAMILY, Config
from jax_splitk.quantized import PackedWeight, prepack
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import target_for
from tests import formats
from tests.products import (
    FLOAT16_SCALES,
    Case,
    check_accuracy,
    check_decoding,
    check_exact,
    check_float16_scales,
    check_nan_in_weight,
    check_repeats,
    exact_weight,
    integers,
    product,
    rounded,
    without_idle,
)

pytestmark = pytest.mark.gpu


def run(case: Case, config: Config, packed: PackedWeight, x: np.ndarray) -> np.ndarray:
    return product(FAMILY, case, config, packed)(x)


def in_splits(case: Case) -> list[Config]:
    """Short pipelines, where ranges of a tile are a cluster: of 2, 3 and 8, the last one with as few k blocks as can
    be."""
    p, found = case.problem, []
    for tile_n, tile_m, k_warpgroups, stages in ((64, 128, 1, 3), (64, 128, 2, 3), (32, 128, 2, 4), (32, 256, 1, 4)):
        config = Config(tile_m, tile_n, stages, 0, k_warpgroups=k_warpgroups, chunk=tile_n)
        found += [tiles.split_tiles(p, config, splits) for splits in (2, 3, 8)]
    return [config for config in found if FAMILY.refusal(p, config) is None]


def plain(case: Case) -> list[Config]:
    """Small tiles with and without multicast, their k blocks in a few ranges, and each in its own."""
    p, found = case.problem, []
    for tile_n, multicast, tile_m in ((64, 1, 128), (64, 2, 128), (64, 1, 256), (32, 2, 256)):
        config = Config(tile_m, tile_n, 2, 0, multicast=multicast, chunk=tile_n)
        units = math.prod(tiles.tile_counts(p, config)) * tiles.k_blocks(p)
        for workers in sorted({min(7, units), units}):
            found.append(without_idle(p, dataclasses.replace(config, blocks=workers * multicast)))
    return list(dict.fromkeys([*found, *in_splits(case)[:1]]))


def configs(case: Case, count: int) -> list[Config]:
    """Plain ones, and `count` candidates of different tiles."""
    kinds: dict[Config, Config] = {}
    for config in FAMILY.candidates(case.problem, target_for("cuda")):
        kinds.setdefault(dataclasses.replace(config, blocks=0, whole_tiles=0, stages=0), config)
    return list(dict.fromkeys([*list(kinds.values())[:count], *plain(case)]))


def largest(case: Case) -> int:
    """Of the integers in x: the tensor cores' sums of e4m3 products keep 13 bits at least."""
    return 1 if case.qtype == "float8_e4m3fn" else 4


E4M3 = "float8_e4m3fn"
CASES = [
    Case(17, 320, 136, x_dtype=E4M3),
    Case(20, 64, 1, x_dtype=E4M3),
    Case(96, 192, 72, group_size=32, x_dtype=E4M3),
    Case(64, 1024, 700, group_size=128, x_dtype=E4M3, out_dtype="float16", scale_dtype="float16"),
    Case(100, 336, 77, group_size=336, x_dtype=E4M3),
    Case(130, 1008, 300, E4M3, 1008, x_dtype=E4M3, scale_dtype="float32"),
    Case(50, 256, 203, "uint4", 64, x_dtype=E4M3),
    Case(31, 384, 130, E4M3, 32, None, "float32", E4M3),
    Case(257, 448, 129, "float4_e2m1fn", 64, None, "float16", E4M3, "float16"),
    Case(40, 96, 65, "float4_e2m1fn", 32, x_dtype=E4M3),
    Case(1000, 1088, 640, x_dtype=E4M3),
]
DECODED = [
    Case(384, 384, 200, qtype, group_size, None, scale_dtype, E4M3, out_dtype)
    for qtype, (group_size, scale_dtype) in itertools.product(fp8.QTYPES, formats.GROUPS)
    for out_dtype in FAMILY.out_dtypes
]
FLOAT16 = [
    Case(256, 256, 64, qtype, 64, None, "float16", E4M3, out_dtype)
    for qtype, out_dtype in itertools.product(fp8.QTYPES, FAMILY.out_dtypes)
]
NAN_WEIGHTS = [CASES[5], CASES[7], Case(31, 384, 130, E4M3, 128, x_dtype=E4M3)]


IN_SPLITS = [
    Case(17, 768, 136, x_dtype=E4M3),
    Case(64, 1152, 700, group_size=128, x_dtype=E4M3, out_dtype="float16", scale_dtype="float16"),
    Case(100, 1392, 77, group_size=1392, x_dtype=E4M3),
    Case(50, 2048, 203, "uint4", 64, x_dtype=E4M3),
    Case(31, 1088, 130, E4M3, 32, None, "float32", E4M3),
]


def device_code() -> set[compiler.Source]:
    wanted = [(case, config) for case in CASES for config in configs(case, 4)]
    wanted += [(case, config) for case in (*FLOAT16, *NAN_WEIGHTS) for config in configs(case, 1)[:2]]
    wanted += [(case, config) for case in DECODED for config in plain(case)]
    wanted += [(case, config) for case in IN_SPLITS for config in in_splits(case)]
    return {FAMILY.source(case.problem, config) for case, config in wanted}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_on_integers(case: Case) -> None:
    check_exact(FAMILY, case, configs(case, 4), largest(case))


@pytest.mark.parametrize("case", IN_SPLITS, ids=str)
def test_ranges_that_are_clusters_are_exact_and_deterministic(case: Case) -> None:
    found = in_splits(case)
    assert {config.k_warpgroups for config in found} == {1, 2}
    assert {config.splits for config in found} >= {2, 3}
    check_exact(FAMILY, case, found, largest(case))
    check_repeats(FAMILY, case, found[:3])


@pytest.mark.parametrize(
    ("rows", "k", "features"), [(64, 8192, 3584), (128, 8192, 3584), (1024, 8192, 8192), (4096, 8192, 3584)]
)
def test_the_suites_shapes_are_exact(rows: int, k: int, features: int) -> None:
    case = Case(rows, k, features, x_dtype=E4M3)
    found = FAMILY.candidates(case.problem, target_for("cuda"))[:6]
    check_exact(FAMILY, case, found, 1, 2, np.float32)


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_one_hot_activations_decode_every_weight(case: Case) -> None:
    check_decoding(FAMILY, case, plain(case))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", ["int4", E4M3])
def test_extreme_scales(scale: float, scale_dtype: str, qtype: str) -> None:
    case = Case(256, 256, 64, qtype, 64, None, scale_dtype, E4M3)
    q, weight = case.every_code()
    factor = np.asarray(q.scale.astype(jnp.float32), np.float64)
    q = dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * scale).astype(scale_dtype))
    weight *= np.repeat(np.asarray(q.scale.astype(jnp.float32), np.float64) / factor, 64, axis=0)
    packed = prepack(q)
    for config in configs(case, 2):
        np.testing.assert_allclose(
            run(case, config, packed, np.eye(256)).astype(np.float64),
            rounded(weight, "bfloat16").astype(np.float64),
            rtol=2**-8,
            err_msg=str(config),
        )


@pytest.mark.parametrize("sizes", FLOAT16_SCALES, ids=str)
@pytest.mark.parametrize("case", FLOAT16, ids=str)
def test_the_largest_and_the_least_float16_scales(case: Case, sizes: tuple[float, ...]) -> None:
    check_float16_scales(FAMILY, case, configs(case, 1)[:2], sizes)


@pytest.mark.parametrize("case", NAN_WEIGHTS, ids=str)
def test_nan_in_the_weight_reaches_its_feature(case: Case) -> None:
    check_nan_in_weight(FAMILY, case, configs(case, 1)[:2])


def test_a_scale_of_a_channel_may_be_near_the_largest() -> None:
    """The factor between a code and its e4m3 value, 512, must not meet the scale alone."""
    case = Case(256, 256, 64, "int4", 256, None, "float32", E4M3)
    q, weight = case.every_code()
    weight *= 1e36 / np.asarray(q.scale, np.float64)
    packed = prepack(dataclasses.replace(q, scale=jnp.full_like(q.scale, 1e36)))
    x = np.eye(256) * 2.0**-9
    x[0] = 0
    for config in configs(case, 2):
        expected = rounded(x @ weight, "bfloat16").astype(np.float64)
        np.testing.assert_allclose(
            run(case, config, packed, x).astype(np.float64), expected, rtol=2**-8, err_msg=str(config)
        )


@pytest.mark.parametrize(
    "case",
    [
        Case(256, 8192, 512, x_dtype=E4M3),
        Case(256, 8192, 512, group_size=8192, x_dtype=E4M3),
        Case(256, 8192, 512, E4M3, 128, x_dtype=E4M3),
        Case(256, 8192, 512, "float4_e2m1fn", 32, None, "float16", E4M3),
    ],
    ids=str,
)
def test_as_accurate_as_a_float32_product(case: Case) -> None:
    check_accuracy(FAMILY, case, configs(case, 3))


@pytest.mark.parametrize("case", [Case(300, 8192, 1000, x_dtype=E4M3), CASES[5]], ids=str)
def test_bitwise_the_same_over_100_runs(case: Case) -> None:
    check_repeats(FAMILY, case, configs(case, 3))


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[7], CASES[10]], ids=str)
def test_nan_reaches_what_depends_on_it(case: Case) -> None:
    q, weight = exact_weight(case, 4)
    x = integers(case, largest(case), 5)
    expected = rounded(x @ weight, case.out_dtype)
    x[3, case.k // 2] = np.nan
    packed = prepack(q)
    others = np.arange(case.rows) != 3
    for config in configs(case, 2):
        out = run(case, config, packed, x)
        np.testing.assert_array_equal(out[others], expected[others], err_msg=str(config))
        assert np.isnan(out[3].astype(np.float32)).all(), config
    # A scale that is not finite: its feature only.
    x[3, case.k // 2] = 1
    expected = rounded(x @ weight, case.out_dtype)
    others = np.arange(case.features) != case.features // 3
    for value in (np.inf, np.nan):
        spoiled = prepack(dataclasses.replace(q, scale=q.scale.at[0, case.features // 3].set(value)))
        for config in configs(case, 2):
            out = run(case, config, spoiled, x)
            np.testing.assert_array_equal(out[:, others], expected[:, others], err_msg=str(config))
