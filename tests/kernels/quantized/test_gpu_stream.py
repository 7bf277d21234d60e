"""The family of quantized products with few rows on a GPU: exactness, decoding, accuracy, determinism, infinities."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import stream
from jax_splitk.kernels.quantized.stream import Config
from jax_splitk.quantized import prepack
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from tests import formats, products
from tests.products import HALF, Case

pytestmark = pytest.mark.gpu

E4M3: dict[str, Any] = {"x_dtype": "float8_e4m3fn"}
TYPES = (*products.TYPES, E4M3, {**E4M3, "out_dtype": "float32", "scale_dtype": "float32"})


def candidates(case: Case) -> list[Config]:
    """Legal configs, those predicted to be the fastest first."""
    p, target = case.problem, target_for("cuda")
    found = [
        config for config in stream.FAMILY.candidates(p, target) if stream.FAMILY.refusal(p, config, target) is None
    ]
    return sorted(found, key=lambda config: stream.FAMILY.estimate(p, config, target))


def configs(case: Case, most: int | None = None) -> list[Config]:
    """At most `most` of: the best candidate; the shallowest ring with all features in one cluster; few clusters; a
    wider tile; the best candidate with each value of each field."""
    p, found = case.problem, candidates(case)
    best = found[0]
    others = [
        dataclasses.replace(found[-1], stages=2, clusters=1),
        dataclasses.replace(best, clusters=-(-best.clusters // 3)),
        dataclasses.replace(best, stages=2, tile_n=2 * best.tile_n),
    ]
    fields = [field.name for field in dataclasses.fields(Config) if field.name not in ("stages", "clusters")]
    firsts = {(name, getattr(config, name)): config for config in reversed(found) for name in fields}
    others = [config for config in others if stream.FAMILY.refusal(p, config) is None]
    return list(dict.fromkeys([best, *others, *firsts.values()]))[:most]


def first(case: Case, index: int) -> Config:
    """One of a case's best few, another for each index."""
    found = candidates(case)[:6]
    return found[index % len(found)]


ODD = [
    Case(1, 64, 1),
    Case(8, 320, 136),
    Case(3, 192, 72, group_size=32),
    Case(16, 1024, 700, group_size=128),
    Case(11, 333, 77, group_size=333),
    Case(32, 1000, 300, "int8", 1000),
    Case(5, 256, 203, "uint4", 64, "bfloat16"),
    Case(17, 190, 100, "uint4", 190, "own"),
    Case(31, 384, 130, "int8", 32, "own", "float32"),
    Case(9, 640, 520, "float8_e4m3fn", 128, None, "float16"),
    Case(24, 448, 129, "nf4", 64, None),
    Case(32, 96, 65, "float4_e2m1fn", 32, None),
    Case(7, 2432, 1347, "uint4", 128, "float32"),
    Case(2, 4104, 66, "int8", 4104, "own"),
    Case(33, 576, 330),
    Case(64, 1001, 70, "uint4", 1001, "bfloat16"),
    Case(50, 768, 257, "float8_e4m3fn", 32),
    Case(12, 2048, 330),
    Case(6, 1024, 68, "uint4", 32, "own"),
]
# Each with three kinds of types, among which its configs are divided.
CASES = [
    (typed, config)
    for index, case in enumerate(ODD)
    for turn, step in enumerate((0, 2, 5))
    for typed in (dataclasses.replace(case, **TYPES[(index + step) % len(TYPES)]),)
    for config in configs(typed)[turn::3]
]
DECODED = [
    Case(rows, 384, 200, qtype, group_size, zero, scale_dtype, **types)
    for ((qtype, zero), (group_size, scale_dtype), types), rows in zip(
        itertools.product(formats.CASES, formats.GROUPS, ({}, HALF, {"out_dtype": "float32"}, E4M3)),
        itertools.cycle((32, 8, 64, 16, 48)),
        strict=False,
    )
]
SUITE = [Case(n, 8192, features) for n, features in ((1, 3584), (8, 28672), (16, 8192), (32, 28672), (64, 3584))]
SUITE += [Case(n, 8192, features, **E4M3) for n, features in ((8, 3584), (16, 28672), (64, 8192))]
EXTREMES = [
    Case(20, 256, 64, qtype, 64, None, scale_dtype, out_dtype=out_dtype)
    for qtype, scale_dtype, out_dtype in itertools.product(
        ("int4", "int8", "nf4"), ("bfloat16", "float32"), ("bfloat16", "float32")
    )
]
LONG = [
    Case(16, 8192, 512, out_dtype="float32"),
    Case(8, 8192, 512, "int8", 8192, out_dtype="float32"),
    Case(32, 8192, 512, "uint4", 128, "bfloat16", out_dtype="float32"),
    Case(4, 8192, 512, "uint4", 8192, "bfloat16", "float32", out_dtype="float32"),
    Case(16, 8192, 512, "float8_e4m3fn", 32, None, "float32", "float16", "float32"),
    Case(16, 8192, 512, "int4", 64, None, "float32", "float8_e4m3fn", "float32"),
    Case(16, 8192, 512),
    Case(8, 8192, 512, "nf4", 64, None, "float16", "float16", "float16"),
    Case(32, 8192, 512, "int8", 8192),
    Case(64, 8192, 512, out_dtype="float32"),
    Case(16, 8192, 512, **E4M3),
    Case(64, 8192, 512, "int4", 128, **{**E4M3, "out_dtype": "float16"}),
    Case(8, 8192, 512, "uint4", 8192, **E4M3),
    Case(32, 8192, 512, "float4_e2m1fn", 32, None, "float32", **E4M3),
    Case(16, 8192, 512, "float8_e4m3fn", 64, **E4M3),
]
SPOILED = [ODD[1], ODD[4], ODD[6], ODD[8], dataclasses.replace(ODD[9], out_dtype="float32")]
SPOILED += [dataclasses.replace(ODD[index], **E4M3) for index in (1, 4, 9)]
REPEATED = [Case(16, 8192, 8192), Case(16, 8192, 8192, **E4M3), Case(9, 1111, 300, "int8", 1111, "bfloat16")]
E4M3_SCALES = [Case(20, 256, 64, qtype, 64, None, "float16", **E4M3) for qtype in ("int4", "int8", "float4_e2m1fn")]
NAN_WEIGHTS = [ODD[6], ODD[12], ODD[9], ODD[16], dataclasses.replace(ODD[16], **E4M3)]
# With how many configs of each.
FEW, SEVERAL = 2, 4
OTHERS = [(case, FEW) for case in (*EXTREMES, *SPOILED, *products.FLOAT16_CASES, *E4M3_SCALES, *NAN_WEIGHTS)] + [
    (case, SEVERAL) for case in (*SUITE, *LONG, *REPEATED)
]


def device_code() -> set[compiler.Source]:
    wanted = [*CASES, *((case, config) for case, most in OTHERS for config in configs(case, most))]
    wanted += [(case, first(case, index)) for index, case in enumerate(DECODED)]
    return {stream.FAMILY.source(case.problem, config) for case, config in wanted}


@pytest.mark.parametrize(("case", "config"), CASES, ids=str)
def test_exact_on_integers(case: Case, config: Config) -> None:
    products.check_exact(stream.FAMILY, case, [config], 2)


@pytest.mark.parametrize("case", SUITE, ids=str)
def test_the_suites_shapes_are_exact(case: Case) -> None:
    products.check_exact(stream.FAMILY, case, configs(case, SEVERAL), 1, 2, np.float32)


@pytest.mark.parametrize(("index", "case"), list(enumerate(DECODED)), ids=str)
def test_one_hot_activations_decode_every_weight(index: int, case: Case) -> None:
    q, weight = case.every_code()
    # As it is defined: in float32, then rounded to the result's dtype.
    expected = products.rounded(weight, case.out_dtype)
    call = products.product(stream.FAMILY, case, first(case, index), prepack(q))
    one_hot = np.eye(case.k)
    for k in range(0, case.k, case.rows):
        np.testing.assert_array_equal(call(one_hot[k : k + case.rows]), expected[k : k + case.rows])


@pytest.mark.parametrize("scales", [(1e-30,), (1e30,), (1e-30, 1.0, 1e30)], ids=str)
@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_extreme_scales(case: Case, scales: tuple[float, ...]) -> None:
    """One size for all, or a different one for each neighbouring group and feature."""
    q, _ = case.every_code()
    sizes = np.asarray(scales, np.float32)[np.indices(q.scale.shape).sum(0) % len(scales)]
    q = dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * sizes).astype(case.scale_dtype))
    scale = np.asarray(q.scale.astype(jnp.float32), np.float64)
    weight = products.elements(q) * np.repeat(scale, case.group_size, axis=0)
    one_hot = np.zeros((case.rows, case.k))
    one_hot[np.arange(case.rows), np.arange(case.rows) * 12 + 3] = 1
    dense = products.integers(case, 2, 6)
    sums = dense @ weight
    step = 2.0**-8 if case.out_dtype == "bfloat16" else 2.0**-20
    allowed = step * np.abs(sums) + 2.0**-20 * (np.abs(dense) @ np.abs(weight))
    packed = prepack(q)
    for config in configs(case, FEW):
        call = products.product(stream.FAMILY, case, config, packed)
        expected = products.rounded(one_hot @ weight, case.out_dtype)
        np.testing.assert_array_equal(call(one_hot), expected, err_msg=str(config))
        assert (np.abs(call(dense).astype(np.float64) - sums) <= allowed).all(), config


@pytest.mark.parametrize("sizes", products.FLOAT16_SCALES, ids=str)
@pytest.mark.parametrize("case", [*products.FLOAT16_CASES, *E4M3_SCALES], ids=str)
def test_the_largest_and_the_least_float16_scales(case: Case, sizes: tuple[float, ...]) -> None:
    products.check_float16_scales(stream.FAMILY, case, configs(case, FEW), sizes)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_as_accurate_as_a_float32_product(case: Case) -> None:
    products.check_accuracy(stream.FAMILY, case, configs(case, SEVERAL))


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_bitwise_the_same_over_100_runs(case: Case) -> None:
    products.check_repeats(stream.FAMILY, case, configs(case, SEVERAL))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("case", SPOILED, ids=str)
def test_infinities_and_nan_reach_what_depends_on_them(case: Case, value: float) -> None:
    q, weight = products.exact_weight(case, 4)
    x = products.integers(case, 2, 5)
    expected = products.rounded(x @ weight, case.out_dtype)
    spoiled = x.copy()
    spoiled[3, case.k // 2] = value  # e4m3 has NaN only
    packed = prepack(q)
    rows = np.arange(case.rows) != 3
    # A scale that is not finite: its feature only.
    feature = case.features // 3
    spoiled_weight = prepack(dataclasses.replace(q, scale=q.scale.at[0, feature].set(value)))
    features = np.arange(case.features) != feature
    for config in configs(case, FEW):
        call = products.product(stream.FAMILY, case, config, packed)
        out = call(spoiled)
        np.testing.assert_array_equal(out[rows], expected[rows], err_msg=str(config))
        touched = weight[case.k // 2] != 0
        assert not np.isfinite(out[3].astype(np.float32)[touched]).any(), config
        # The same buffers of shared memory, now without it.
        np.testing.assert_array_equal(call(x), expected, err_msg=str(config))
        out = products.product(stream.FAMILY, case, config, spoiled_weight)(x)
        np.testing.assert_array_equal(out[:, features], expected[:, features], err_msg=str(config))
        assert not np.isfinite(out[:, feature].astype(np.float32)).any(), config


@pytest.mark.parametrize("case", NAN_WEIGHTS, ids=str)
def test_nan_in_the_weight_reaches_its_feature(case: Case) -> None:
    products.check_nan_in_weight(stream.FAMILY, case, configs(case, FEW))


def test_every_kind_of_product_is_tried() -> None:
    problems = [case.problem for case in (*(case for case, _ in CASES), *DECODED)]
    assert all(stream.FAMILY.refusal(p, None, DEFAULT_CUDA) is None for p in problems)
    assert {(p.qtype, p.x_dtype) for p in problems} == set(
        itertools.product(formats.BITS, ("bfloat16", "float16", "float8_e4m3fn"))
    )
    assert {p.zero_dtype for p in problems} == {"none", *formats.SCALE_DTYPES}
    configs_of = [config for _, config in CASES]
    for field, values in (("tile_n", (8, 16, 32, 64)), ("warpgroups", (1, 2, 4)), ("tiles", (1, 2, 4))):
        assert {getattr(config, field) for config in configs_of} == set(values)
    assert {config.cluster for config in configs_of} == {1, 2, 4, 8}
