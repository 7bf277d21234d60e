"""The WGMMA family of quantized products on a GPU: exactness, decoding, accuracy, determinism, infinities and NaN."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.quantized import tiled, tiles
from jax_splitk.kernels.quantized.tiled import FAMILY, Config
from jax_splitk.quantized import PackedWeight, prepack
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import target_for
from tests import formats
from tests.products import (
    FLOAT16_CASES,
    FLOAT16_SCALES,
    HALF,
    TYPES,
    Case,
    check_accuracy,
    check_decoding,
    check_exact,
    check_float16_scales,
    check_nan_in_weight,
    check_repeats,
    elements,
    exact_weight,
    integers,
    product,
    rounded,
    without_idle,
)

pytestmark = pytest.mark.gpu


def run(case: Case, config: Config, packed: PackedWeight, x: np.ndarray) -> np.ndarray:
    return product(FAMILY, case, config, packed)(x)


def plain(case: Case, sizes: Iterable[int] = (2, 3, 8)) -> list[Config]:
    """A small tile with each scaling that is legal, its k blocks in a few ranges, each in its own, and in splits of
    these numbers where there are so many."""
    p, found = case.problem, []
    for scaling in tiled.scalings(p):
        config = Config(128, 32 if p.rows <= 32 else 64, 2, 0, scaling=scaling)
        units = math.prod(tiles.tile_counts(p, config)) * tiles.k_blocks(p)
        for blocks in sorted({min(7, units), units}):
            found.append(without_idle(p, dataclasses.replace(config, blocks=blocks)))
        found += [tiles.split_tiles(p, config, splits) for splits in whole_splits(case, sizes)]
        found += in_k_warpgroups(case, scaling)[:2]
    return list(dict.fromkeys(found))


def whole_splits(case: Case, sizes: Iterable[int]) -> set[int]:
    return {split_k.whole_splits(tiles.k_blocks(case.problem), wanted) for wanted in sizes} - {1}


def in_k_warpgroups(case: Case, scaling: str) -> list[Config]:
    """Splits whose warpgroups share features, where the case has enough k for them; of some tiles two thread blocks
    have a multiprocessor."""
    p, found = case.problem, []
    for tile_m, tile_n, stages in ((64, 64, 8), (128, 64, 5), (64, 32, 4), (128, 32, 3)):
        config = Config(tile_m, tile_n, stages, 0, k_warpgroups=2, scaling=scaling)
        found += [tiles.split_tiles(p, config, splits) for splits in whole_splits(case, (2, 3))]
    return [config for config in found if FAMILY.refusal(p, config) is None]


def in_each_scaling(case: Case) -> list[Config]:
    found = [config for scaling in tiled.scalings(case.problem) for config in in_k_warpgroups(case, scaling)]
    assert found
    return found


def configs(case: Case, count: int) -> list[Config]:
    """Plain ones, and `count` candidates of different tiles."""
    kinds: dict[Any, Config] = {}
    for config in FAMILY.candidates(case.problem, target_for("cuda")):
        kinds.setdefault((config.tile_m, config.tile_n, config.stages, config.k_warpgroups), config)
    return list(dict.fromkeys([*list(kinds.values())[:count], *plain(case)]))


ODD = [
    Case(17, 320, 136),
    Case(20, 64, 1),
    Case(33, 192, 72, group_size=32),
    Case(64, 1024, 700, group_size=128),
    Case(100, 333, 77, group_size=333),
    Case(130, 1000, 300, "int8", 1000),
    Case(50, 256, 203, "uint4", 64, "bfloat16"),
    Case(70, 190, 100, "uint4", 190, "own"),
    Case(31, 384, 130, "int8", 32, "own", "float32"),
    Case(19, 640, 520, "float8_e4m3fn", 128, None, "float16"),
    Case(257, 448, 129, "nf4", 64, None),
    Case(40, 96, 65, "float4_e2m1fn", 32, None),
    Case(300, 512, 640),
]
CASES = [
    dataclasses.replace(case, **TYPES[(index + step) % len(TYPES)]) for index, case in enumerate(ODD) for step in (0, 2)
]
DECODED = [
    Case(384, 384, 200, qtype, group_size, zero, scale_dtype, **types)
    for (qtype, zero), (group_size, scale_dtype) in itertools.product(formats.CASES, formats.GROUPS)
    for types in ({}, HALF, {"out_dtype": "float32"})
]
DECODED += [
    Case(384, 384, 200, qtype, 64, zero, "float32", "float8_e4m3fn", out_dtype)
    for qtype, zero in formats.CASES
    for out_dtype in ("bfloat16", "float32")
]
NAN_WEIGHTS = [
    ODD[6],
    Case(70, 190, 100, "uint4", 190, "float32"),
    ODD[9],
    Case(33, 256, 72, "float8_e4m3fn", 32, out_dtype="float32"),
    Case(33, 300, 72, "float8_e4m3fn", 300),
]


def device_code() -> set[compiler.Source]:
    wanted = [(case, config) for case in CASES for config in configs(case, 2)]
    wanted += [(case, config) for case in (*FLOAT16_CASES, *NAN_WEIGHTS) for config in configs(case, 1)[:2]]
    wanted += [(case, config) for case in DECODED for config in plain(case, [3])]
    wanted += [(case, config) for case in (*PARTED, *DECODED_IN_PARTS) for config in in_each_scaling(case)]
    return {FAMILY.source(case.problem, config) for case, config in wanted}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_on_integers(case: Case) -> None:
    check_exact(FAMILY, case, configs(case, 2), 2)


@pytest.mark.parametrize(
    ("rows", "k", "features"), [(32, 8192, 3584), (64, 8192, 8192), (256, 8192, 3584), (4096, 8192, 3584)]
)
def test_the_suites_shapes_are_exact(rows: int, k: int, features: int) -> None:
    case = Case(rows, k, features)
    found = FAMILY.candidates(case.problem, target_for("cuda"))[:6]
    check_exact(FAMILY, case, found, 1, 2, np.float32)


PARTED = [
    Case(64, 2048, 200),
    Case(33, 1100, 130, "int8", 1100, out_dtype="float32"),
    Case(100, 1280, 70, "uint4", 64, "bfloat16"),
    Case(64, 896, 136, "nf4", 128, None, "float16", "float16", "float16"),
]


DECODED_IN_PARTS = [
    Case(512, 512, 200),
    Case(600, 600, 77, "int8", 600),
    Case(512, 512, 136, "uint4", 32, "bfloat16", out_dtype="float32"),
]


@pytest.mark.parametrize("case", PARTED, ids=str)
def test_warpgroups_that_share_features_are_exact(case: Case) -> None:
    check_exact(FAMILY, case, in_each_scaling(case), 2)


@pytest.mark.parametrize("case", PARTED[:2], ids=str)
def test_warpgroups_that_share_features_give_the_same_bits(case: Case) -> None:
    check_repeats(FAMILY, case, in_each_scaling(case))


@pytest.mark.parametrize("case", DECODED_IN_PARTS, ids=str)
def test_warpgroups_that_share_features_decode_every_weight(case: Case) -> None:
    check_decoding(FAMILY, case, in_each_scaling(case))


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_one_hot_activations_decode_every_weight(case: Case) -> None:
    check_decoding(FAMILY, case, plain(case, [3]))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4"])
def test_extreme_scales(scale: float, scale_dtype: str, out_dtype: str, qtype: str) -> None:
    case = Case(20, 256, 64, qtype, 64, None, scale_dtype, out_dtype=out_dtype)
    q, _ = formats.every_code(qtype, 256, 64, 64, None, scale_dtype)
    q = dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * scale).astype(scale_dtype))
    factor = np.asarray(q.scale.astype(jnp.float32), np.float64)
    weight = elements(q) * np.repeat(factor, 64, axis=0)
    x = np.zeros((20, 256))
    x[np.arange(20), np.arange(20) * 12 + 3] = 1
    packed = prepack(q)
    for config in configs(case, 2):
        np.testing.assert_array_equal(run(case, config, packed, x), rounded(x @ weight, out_dtype), err_msg=str(config))


@pytest.mark.parametrize("sizes", FLOAT16_SCALES, ids=str)
@pytest.mark.parametrize("case", FLOAT16_CASES, ids=str)
def test_the_largest_and_the_least_float16_scales(case: Case, sizes: tuple[float, ...]) -> None:
    check_float16_scales(FAMILY, case, configs(case, 1)[:2], sizes)


@pytest.mark.parametrize("case", NAN_WEIGHTS, ids=str)
def test_nan_in_the_weight_reaches_its_feature(case: Case) -> None:
    check_nan_in_weight(FAMILY, case, configs(case, 1)[:2])


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 8192, 512, out_dtype="float32"),
        Case(64, 8192, 512, "int8", 8192, out_dtype="float32"),
        Case(64, 8192, 512, "uint4", 128, "bfloat16", out_dtype="float32"),
        Case(64, 8192, 512, "uint4", 8192, "bfloat16", "float32", out_dtype="float32"),
        Case(64, 8192, 512, "float8_e4m3fn", 32, None, "float32", "float16", "float32"),
        Case(64, 8192, 512),
        Case(64, 8192, 512, "nf4", 64, None, "float16", "float16", "float16"),
        Case(256, 8192, 512, "int8", 8192),
        Case(64, 8192, 512, "int4", 64, None, "bfloat16", "float8_e4m3fn"),
    ],
    ids=str,
)
def test_as_accurate_as_a_float32_product(case: Case) -> None:
    check_accuracy(FAMILY, case, configs(case, 3))


@pytest.mark.parametrize("case", [Case(64, 8192, 8192), Case(50, 1111, 300, "int8", 1111, "bfloat16")], ids=str)
def test_bitwise_the_same_over_100_runs(case: Case) -> None:
    check_repeats(FAMILY, case, configs(case, 2))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "case", [ODD[0], ODD[4], ODD[6], ODD[8], dataclasses.replace(ODD[9], out_dtype="float32")], ids=str
)
def test_infinities_and_nan_reach_what_depends_on_them(case: Case, value: float) -> None:
    q, weight = exact_weight(case, 4)
    x = integers(case, 2, 5)
    expected = rounded(x @ weight, case.out_dtype)
    x[3, case.k // 2] = value
    packed = prepack(q)
    others = np.arange(case.rows) != 3
    for config in configs(case, 1):
        out = run(case, config, packed, x)
        np.testing.assert_array_equal(out[others], expected[others], err_msg=str(config))
        touched = weight[case.k // 2] != 0
        assert not np.isfinite(out[3].astype(np.float32)[touched]).any(), config
    # A scale that is not finite: its feature only.
    x[3, case.k // 2] = 1
    expected = rounded(x @ weight, case.out_dtype)
    spoiled = prepack(dataclasses.replace(q, scale=q.scale.at[0, case.features // 3].set(value)))
    others = np.arange(case.features) != case.features // 3
    for config in configs(case, 1):
        out = run(case, config, spoiled, x)
        np.testing.assert_array_equal(out[:, others], expected[:, others], err_msg=str(config))
