"""Properties of every family of products with packed weights on Hopper, on a GPU: exactness, decoding, accuracy,
repeatability, and NaN only where it belongs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.quantized import fp8, stream, tiled, tiles
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS
from jax_splitk.problems.quantized_matmul import X_DTYPES
from jax_splitk.quantized import PackedWeight, QuantizedArray, prepack, unpack
from jax_splitk.quantized.packing import pack_groups
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import formats, on_gpu, poison
from tests.float64 import rounded
from tests.formats import E8M0
from tests.problems import on_device
from tests.products import (
    E4M3,
    HALF,
    TYPES,
    Case,
    as_float32_product,
    e4m3_bound,
    elements,
    error,
    exact_weight,
    few_and_single_ranges,
    in_e4m3,
    integers,
    normal,
    operands,
    parts_bound,
    random,
)

pytestmark = pytest.mark.gpu

FAMILIES = kernels.families("quantized_matmul", "cuda")
FLOAT16_SCALES = ((65504.0,), (2.0**-24,), (2.0**-24, 1.0, 65504.0))  # its largest, and the least above 0
FEW, SEVERAL = 2, 6  # configs of a case


# ---- configs -------------------------------------------------------------------------------------------------------


def cut_tiles(family: Family, case: Case) -> Iterator[Any]:
    """Small tiles of quantized_tiled and quantized_fp8 with k blocks in few ranges, in single ranges, and in splits,
    also with warpgroups that share features."""
    p = case.problem
    if family is fp8.FAMILY:
        whole, shared = ((128, 64, 1), (128, 64, 2), (256, 64, 1), (256, 32, 2)), ((128, 64, 2, 3), (128, 32, 2, 4))
        plain = [fp8.Config(m, n, 2, 0, multicast=multicast) for m, n, multicast in whole]
        apart = [fp8.Config(m, n, stages, 0, k_warpgroups=groups)
                 for m, n, groups, stages in ((128, 64, 1, 3), (256, 32, 1, 4), *shared)]  # fmt: skip
    else:
        shared = ((64, 64, 8), (128, 64, 5), (64, 32, 4), (128, 32, 3))
        plain = [tiled.Config(128, 32 if p.rows <= 32 else 64, 2, 0)]
        apart = [tiled.Config(*tile, 0, k_warpgroups=2) for tile in shared]
    yield from itertools.chain.from_iterable(few_and_single_ranges(family, p, config) for config in plain)
    for config, splits in itertools.product((*plain, *apart), (2, 3, 8)):
        yield tiles.split_tiles(p, config, splits)


def streamed(case: Case) -> Iterator[stream.Config]:
    """Configs with the fewest stages and one cluster for all features, with few clusters, with a wider tile, and with
    each value of each field."""
    found = stream.FAMILY.candidates(case.problem, DEFAULT_CUDA)
    yield dataclasses.replace(found[-1], stages=2, clusters=1)
    yield dataclasses.replace(found[0], clusters=-(-found[0].clusters // 3))
    yield dataclasses.replace(found[0], stages=2, tile_n=2 * found[0].tile_n)
    fields = [field.name for field in dataclasses.fields(stream.Config) if field.name not in ("stages", "clusters")]
    yield from {(name, getattr(config, name)): config for config in reversed(found) for name in fields}.values()


def configs(family: Family, case: Case, count: int, turn: int = 0) -> list[Any]:
    """`count` of the best candidates of each code and of special ones, starting at another one in each turn."""
    candidates: dict[Any, Any] = {}
    for config in family.candidates(case.problem, DEFAULT_CUDA):
        candidates.setdefault(family.source(case.problem, config), config)
    special = streamed(case) if family is stream.FAMILY else cut_tiles(family, case)
    legal = [config for config in special if family.refusal(case.problem, config) is None]
    found = list(dict.fromkeys([*list(candidates.values())[:4], *legal]))
    start = turn * count % len(found)
    return [*found[start:], *found[:start]][:count]


def serving(found: Iterable[Case]) -> list[Any]:
    """Test parameters (family, turn, case) for each family that serves a case."""
    served = [(f, turn, case) for turn, case in enumerate(found) for f in FAMILIES if f.refusal(case.problem) is None]
    return [pytest.param(*each, id=f"{each[0].name} {each[2].problem}") for each in served]


by_case = lambda found: pytest.mark.parametrize(("family", "turn", "case"), serving(found))  # noqa: E731


def product(family: Family, case: Case, config: Any, packed: PackedWeight) -> Callable[[Any], np.ndarray]:
    """A function from x to the family's result, with poisoned buffers."""
    call = poison.function(on_gpu.plan(family, case.problem, config), case.problem)
    return lambda x: np.asarray(call(*operands(packed, x, case.x_dtype)))


def largest(family: Family, case: Case) -> int:
    """The largest integer in x: the tensor cores' sums of e4m3 products keep 13 bits at least."""
    return 2 if family is not fp8.FAMILY else 1 if case.qtype == E4M3 else 4


# ---- cases ---------------------------------------------------------------------------------------------------------

ODD = [
    Case(1, 64, 1), Case(8, 320, 136), Case(3, 192, 72, group_size=32), Case(16, 1024, 700, group_size=128),
    Case(11, 333, 77, group_size=333), Case(32, 1000, 300, "int8", 1000), Case(5, 256, 203, "uint4", 64, "bfloat16"),
    Case(17, 190, 100, "uint4", 190, "own"), Case(31, 384, 130, "int8", 32, "own", "float32"),
    Case(9, 640, 520, "float8_e4m3fn", 128, None, "float16"), Case(24, 448, 129, "nf4", 64, None),
    Case(32, 96, 65, "float4_e2m1fn", 32, None), Case(7, 2432, 1347, "uint4", 128, "float32"),
    Case(2, 4104, 66, "int8", 4104, "own"), Case(33, 576, 330), Case(64, 1001, 70, "uint4", 1001, "bfloat16"),
    Case(50, 768, 257, "float8_e4m3fn", 32), Case(12, 2048, 330), Case(6, 1024, 68, "uint4", 32, "own"),
    Case(100, 333, 77, group_size=333), Case(130, 1000, 300, "int8", 1000), Case(70, 190, 100, "uint4", 190, "own"),
    Case(257, 448, 129, "nf4", 64, None), Case(300, 512, 640), Case(33, 1100, 130, "int8", 1100),
    Case(100, 1280, 70, "uint4", 64, "bfloat16"), Case(64, 2048, 200), Case(1000, 1088, 640),
]  # fmt: skip
EIGHT_BITS = [
    Case(17, 320, 136), Case(20, 64, 1), Case(96, 192, 72, group_size=32), Case(100, 336, 77, group_size=336),
    Case(64, 1024, 700, group_size=128, out_dtype="float16", scale_dtype="float16"), Case(50, 256, 203, "uint4", 64),
    Case(130, 1008, 300, E4M3, 1008, scale_dtype="float32"), Case(31, 384, 130, E4M3, 32, None, "float32"),
    Case(257, 448, 129, "float4_e2m1fn", 64, None, "float16", out_dtype="float16"), Case(1000, 1088, 640),
    Case(40, 96, 65, "float4_e2m1fn", 32), Case(64, 1152, 700, group_size=128), Case(100, 1392, 77, group_size=1392),
    Case(50, 2048, 203, "uint4", 64), Case(31, 1088, 130, E4M3, 32, None, "float32"),
]  # fmt: skip
EIGHT_BITS = [dataclasses.replace(case, x_dtype=E4M3) for case in EIGHT_BITS]
BYTES = [  # scales of a byte, and channel scales
    Case(3, 320, 72, "float4_e2m1fn", 32, None, E8M0), Case(9, 208, 130, "float4_e2m1fn", 16, None, E4M3, channel=True),
    Case(40, 512, 136, "uint4", 128, "own", E8M0, "float16", "float16", True),
    Case(64, 1000, 300, "int8", 1000, None, E8M0, channel=True), Case(130, 448, 129, "nf4", 64, None, E4M3),
    Case(257, 1088, 640, "float4_e2m1fn", 32, None, E8M0),
    Case(300, 1088, 640, "float4_e2m1fn", 16, None, E4M3, channel=True),
    Case(100, 320, 77, E4M3, 32, None, E8M0, out_dtype="float32", channel=True),
    Case(20, 448, 136, "float4_e2m1fn", 32, None, E8M0, E4M3),
    Case(70, 320, 300, E4M3, 64, None, E4M3, E4M3, "float16", True),
    Case(200, 1008, 130, "int4", 1008, None, E8M0, E4M3, channel=True), Case(16, 2048, 330, "int4", 128, None, E8M0),
]  # fmt: skip
IN_E4M3 = [  # of which quantized_fp8 rounds x and the weight
    Case(100, 1088, 200, x_dtype=E4M3), Case(257, 448, 129, "nf4", 64), Case(130, 1008, 300, "int8", 1008, "own"),
    Case(70, 320, 300, "uint4", 32, "bfloat16", **HALF), Case(300, 2048, 640, "uint4", 128, "own", "float16"),
    Case(96, 512, 136, "float4_e2m1fn", 16, None, E4M3, E4M3, channel=True), Case(20, 1280, 330, E4M3, 128, None, E8M0),
    Case(33, 576, 330, group_size=576, out_dtype="float16"), Case(1000, 640, 77, "int4", 64, "float32", "float32"),
    Case(200, 1024, 520, "int8", 16, x_dtype=E4M3),
]  # fmt: skip
IN_E4M3 = [dataclasses.replace(case, compute=E4M3) for case in IN_E4M3]
ALL_TYPES = (*TYPES, {"x_dtype": E4M3}, {"x_dtype": E4M3, "out_dtype": "float32", "scale_dtype": "float32"})
EXACT = [
    dataclasses.replace(case, **ALL_TYPES[(index + step) % len(ALL_TYPES)])
    for index, case in enumerate(ODD)
    for step in (0, 3)
]
EXACT += [*EIGHT_BITS, *BYTES, *IN_E4M3]
SUITE = [Case(n, 8192, features) for n, features in ((1, 3584), (8, 28672), (32, 3584), (64, 8192), (256, 3584),
         (4096, 3584))]  # fmt: skip
SUITE += [Case(n, 8192, features, x_dtype=E4M3) for n, features in ((8, 3584), (64, 8192), (128, 3584), (1024, 8192))]
DECODED = [
    Case(rows, 384, 200, qtype, group_size, zero, scale_dtype, **types)
    for ((qtype, zero), (group_size, scale_dtype), types), rows in zip(
        itertools.product(formats.CASES, formats.FLOAT_GROUPS, ({}, HALF, {"out_dtype": "float32"}, {"x_dtype": E4M3})),
        itertools.cycle((32, 384, 64, 48, 384)),
        strict=False,
    )
]
DECODED += [
    Case(rows, 384, 200, qtype, group_size, None, scale, channel=channel, **types)
    for (qtype, group_size, scale, channel), types, rows in zip(
        itertools.product(("float4_e2m1fn", "int4"), (16, 32, 384), (E8M0, E4M3), (False, True)),
        itertools.cycle(({}, HALF, {"out_dtype": "float32"}, {"x_dtype": E4M3}, {})),
        itertools.cycle((32, 384, 64)),
        strict=False,
    )
]
DECODED += [Case(384, 512, 200), Case(384, 600, 77, "int8", 600), Case(384, 512, 136, "uint4", 32, "bfloat16")]
EXTREMES = [
    Case(20, 256, 64, qtype, 64, None, scale_dtype, x_dtype, out_dtype)
    for qtype, scale_dtype, x_dtype, out_dtype in itertools.product(
        ("int4", "int8", "nf4", E4M3), ("bfloat16", "float32"), ("bfloat16", E4M3), ("bfloat16", "float32")
    )
]
FLOAT16 = [
    Case(20, 256, 64, qtype, 64, zero, "float16", **types)
    for qtype, zero in (*((name, None) for name in formats.BITS), ("uint4", "bfloat16"), ("int8", "own"))
    for types in (HALF, {"out_dtype": "float32"}, {"x_dtype": E4M3})
]
LONG = [
    Case(16, 8192, 512, out_dtype="float32"), Case(8, 8192, 512, "int8", 8192, out_dtype="float32"),
    Case(32, 8192, 512, "uint4", 128, "bfloat16", out_dtype="float32"), Case(16, 8192, 512), Case(256, 8192, 512),
    Case(64, 8192, 512, "uint4", 8192, "bfloat16", "float32", out_dtype="float32"),
    Case(16, 8192, 512, "float8_e4m3fn", 32, None, "float32", "float16", "float32"),
    Case(16, 8192, 512, "int4", 64, None, "float32", E4M3, "float32"), Case(256, 8192, 512, "int8", 8192),
    Case(8, 8192, 512, "nf4", 64, None, "float16", "float16", "float16"), Case(64, 8192, 512, x_dtype=E4M3),
    Case(64, 8192, 512, "int4", 128, x_dtype=E4M3, out_dtype="float16"),
    Case(8, 8192, 512, "uint4", 8192, x_dtype=E4M3), Case(256, 8192, 512, group_size=8192, x_dtype=E4M3),
    Case(32, 8192, 512, "float4_e2m1fn", 32, None, "float32", E4M3), Case(256, 8192, 512, E4M3, 128, x_dtype=E4M3),
]  # fmt: skip
REPEATED = [
    Case(16, 8192, 8192), Case(9, 1111, 300, "int8", 1111, "bfloat16"), Case(64, 8192, 8192, x_dtype=E4M3),
    Case(300, 8192, 1000, x_dtype=E4M3), Case(64, 2048, 200), Case(130, 1008, 300, E4M3, 1008, x_dtype=E4M3),
    Case(300, 8192, 1000, compute=E4M3),
]  # fmt: skip
SPOILED = [
    *(dataclasses.replace(ODD[index], out_dtype="float32") for index in (1, 4, 6, 8, 9, 19, 21)), ODD[1], ODD[19],
    *(dataclasses.replace(ODD[index], x_dtype=E4M3) for index in (1, 4, 9)), *EIGHT_BITS[:4], EIGHT_BITS[7],
    *(IN_E4M3[index] for index in (0, 3, 4)),
]  # fmt: skip
NAN_WEIGHTS = [
    ODD[6], ODD[12], ODD[9], ODD[16], dataclasses.replace(ODD[16], x_dtype=E4M3),
    Case(70, 190, 100, "uint4", 190, "float32"), Case(33, 300, 72, E4M3, 300),
    Case(33, 256, 72, E4M3, 32, out_dtype="float32"), *EIGHT_BITS[6:8], Case(31, 384, 130, E4M3, 128, x_dtype=E4M3),
    *(IN_E4M3[index] for index in (3, 6, 8)),
]  # fmt: skip


def device_code() -> set[compiler.Source]:
    counts = [(cases, FEW) for cases in (DECODED, EXTREMES, FLOAT16, LONG, REPEATED, SPOILED, NAN_WEIGHTS)]
    counts += [(EXACT, SEVERAL), (SUITE, SEVERAL), (IN_E4M3, FEW)]
    found = set()
    for cases, count in counts:
        for family, turn, case in (param.values for param in serving(cases)):
            found |= {family.source(case.problem, config) for config in configs(family, case, count, turn)}
    return found


# ---- tests ---------------------------------------------------------------------------------------------------------


@by_case(EXACT)
def test_exact_on_integers(family: Family, turn: int, case: Case) -> None:
    check_exact(family, case, configs(family, case, SEVERAL, turn), largest(family, case))


@by_case(SUITE)
def test_the_suites_shapes_are_exact(family: Family, turn: int, case: Case) -> None:
    check_exact(family, case, configs(family, case, SEVERAL, turn), 1, np.float32)


def check_exact(family: Family, case: Case, tried: list[Any], most: int, dtype: type = np.float64) -> None:
    """Results are exact on x of small integers; `dtype` is the dtype of the reference."""
    q, weight = exact_weight(case, 2, case.operand)
    x = integers(case, most, 3)
    expected, packed = rounded(x.astype(dtype) @ weight.astype(dtype), case.out_dtype), prepack(q)
    for config in tried:
        out = product(family, case, config, packed)(x)
        np.testing.assert_array_equal(out, expected, err_msg=str(config))


@by_case(DECODED)
def test_one_hot_activations_decode_every_weight(family: Family, turn: int, case: Case) -> None:
    """Weights equal their definition: in float32, then rounded to the result's dtype. Those that are computed from
    parts of their scale and zero point are within `parts_bound` of it."""
    q, weight = case.every_code(case.operand)
    expected, packed, one_hot = rounded(weight, case.out_dtype), prepack(q), np.eye(case.k)
    bound = parts_bound(case, q, weight)
    for config in configs(family, case, FEW, turn):
        call = product(family, case, config, packed)
        for k in range(0, case.k, case.rows):
            rows = min(case.rows, case.k - k)
            x = np.zeros((case.rows, case.k))
            x[:rows] = one_hot[k : k + rows]
            found, those = call(x)[:rows], slice(k, k + rows)
            if family is tiled.FAMILY and tiled.in_parts(case.problem, config.tile_n):
                assert (np.abs(np.asarray(found, np.float64) - weight[those]) <= bound[those]).all(), config
            else:
                np.testing.assert_array_equal(found, expected[those], err_msg=str(config))


def check_scales(family: Family, turn: int, case: Case, sizes: Iterable[float]) -> None:
    """Each weight equals its definition, with one scale for all, or with different scales for neighbouring groups and
    features."""
    sizes = np.asarray(list(sizes))
    q, _ = case.every_code()
    at = np.indices(q.scale.shape).sum(0) % len(sizes)
    sign = np.sign(np.asarray(q.scale.astype(jnp.float32)))
    size = sizes[at] if case.scale_dtype == "float16" else sizes[at] * np.abs(np.asarray(q.scale.astype(jnp.float32)))
    q = dataclasses.replace(q, scale=jnp.asarray(sign * size, case.scale_dtype))
    scale = np.asarray(q.scale.astype(jnp.float32), np.float64)
    weight = value_of(q, case) * np.repeat(scale, case.group_size, axis=0)
    x = np.zeros((case.rows, case.k))
    rows = np.arange(case.rows)
    x[rows, (rows * (case.k // case.rows) + 3) % case.k] = 1
    expected, packed = rounded(x @ weight, case.out_dtype), prepack(q)
    for config in configs(family, case, FEW, turn):
        out = product(family, case, config, packed)(x)
        if family is fp8.FAMILY and case.scale_dtype != "float16":
            # A power of 2 moves into the scale and back.
            out, wanted = out.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(out, wanted, rtol=2**-8, err_msg=str(config))
        else:
            np.testing.assert_array_equal(out, expected, err_msg=str(config))


def value_of(q: QuantizedArray, case: Case) -> np.ndarray:
    """Elements minus their zero points."""
    if q.zero_point is None:
        return elements(q, case.operand)
    zero = np.asarray(q.zero_point.astype(jnp.float32), np.float64)
    return (elements(q, case.operand) - np.repeat(zero, case.group_size, axis=0)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("scales", [(1e-30,), (1e30,), (1e-30, 1.0, 1e30)], ids=str)
@by_case(EXTREMES)
def test_extreme_scales(family: Family, turn: int, case: Case, scales: tuple[float, ...]) -> None:
    check_scales(family, turn, case, scales)


@pytest.mark.parametrize("sizes", FLOAT16_SCALES, ids=str)
@by_case(FLOAT16)
def test_the_largest_and_the_least_float16_scales(
    family: Family, turn: int, case: Case, sizes: tuple[float, ...]
) -> None:
    check_scales(family, turn, case, sizes)


@pytest.mark.parametrize("case", [case for case in EXTREMES if case.x_dtype != E4M3], ids=str)
def test_sums_of_extreme_scales(case: Case) -> None:
    """Runs the family that multiplies sums of groups in float32. Sums of e4m3 products have fewer bits."""
    q, _ = case.every_code()
    sizes = np.asarray((1e-30, 1.0, 1e30), np.float32)[np.indices(q.scale.shape).sum(0) % 3]
    q = dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * sizes).astype(case.scale_dtype))
    weight = elements(q, case.operand) * np.repeat(
        np.asarray(q.scale.astype(jnp.float32), np.float64), case.group_size, axis=0
    )
    x, packed = integers(case, 2, 6), prepack(q)
    sums = x @ weight
    step = 2.0**-8 if case.out_dtype == "bfloat16" else 2.0**-20
    allowed = step * np.abs(sums) + 2.0**-20 * (np.abs(x) @ np.abs(weight))
    for config in configs(stream.FAMILY, case, FEW):
        out = product(stream.FAMILY, case, config, packed)(x).astype(np.float64)
        assert (np.abs(out - sums) <= allowed).all(), config


def test_a_scale_of_a_channel_may_be_near_the_largest() -> None:
    """The factor 512 between a code and its e4m3 value must not multiply the scale alone."""
    case = Case(256, 256, 64, "int4", 256, None, "float32", E4M3)
    q, weight = case.every_code()
    weight *= 1e36 / np.asarray(q.scale, np.float64)
    packed = prepack(dataclasses.replace(q, scale=jnp.full_like(q.scale, 1e36)))
    x = np.eye(256) * 2.0**-9
    x[0] = 0
    expected = rounded(x @ weight, "bfloat16").astype(np.float64)
    for config in configs(fp8.FAMILY, case, FEW):
        out = product(fp8.FAMILY, case, config, packed)(x).astype(np.float64)
        np.testing.assert_allclose(out, expected, rtol=2**-8, err_msg=str(config))


@by_case(LONG)
def test_as_accurate_as_a_float32_product(family: Family, turn: int, case: Case) -> None:
    """The error is at most twice that of a float32 product."""
    q, weight = case.every_code()
    x = normal(case)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ weight
    theirs = error(as_float32_product(case, x, weight), exact)
    assert np.isfinite(theirs), "the result's dtype holds every sum"
    for config in configs(family, case, FEW, turn):
        mine = error(product(family, case, config, prepack(q))(x), exact)
        assert mine <= 2 * theirs, (config, mine, theirs)


@pytest.mark.parametrize(("turn", "case"), list(enumerate(IN_E4M3)), ids=str)
def test_weights_are_rounded_to_e4m3_once(turn: int, case: Case) -> None:
    """One-hot activations decode each weight, to within `e4m3_bound`."""
    q, weight = case.every_code("float16")
    bound = e4m3_bound(case, q, weight)
    for config in configs(fp8.FAMILY, case, FEW, turn):
        call = product(fp8.FAMILY, case, config, prepack(q))
        x = np.zeros((case.rows, case.k))
        rows = np.arange(case.rows)
        ks = (rows * max(1, case.k // case.rows) + 3) % case.k
        x[rows, ks] = 1
        found = call(x).astype(np.float64)
        assert (np.abs(found - weight[ks]) <= bound[ks]).all(), config


@pytest.mark.parametrize(("turn", "case"), list(enumerate(IN_E4M3)), ids=str)
def test_as_accurate_as_operands_in_e4m3(turn: int, case: Case) -> None:
    """The error is at most 1.25 times that of the exact product of operands that are rounded to e4m3."""
    q, weight = case.every_code("float16")
    x = normal(case)
    exact_x = np.asarray(x.astype(jnp.float32), np.float64)
    exact = exact_x @ weight
    theirs = error(in_e4m3(exact_x, 1) @ in_e4m3(weight, 0), exact)
    for config in configs(fp8.FAMILY, case, FEW, turn):
        mine = error(product(fp8.FAMILY, case, config, prepack(q))(x), exact)
        assert mine <= 1.25 * theirs, (config, mine, theirs)


@by_case(REPEATED)
def test_bitwise_the_same_over_100_runs(family: Family, turn: int, case: Case) -> None:
    arguments = operands(prepack(case.every_code()[0]), normal(case), case.x_dtype)
    for config in configs(family, case, FEW, turn):
        custom_call = on_gpu.plan(family, case.problem, config).custom_call()
        call = jax.jit(lambda *args, c=custom_call: execute.call(c, case.problem, *args))
        on_gpu.check_repeats(call, *arguments)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@by_case(SPOILED)
def test_infinities_and_nan_reach_what_depends_on_them(family: Family, turn: int, case: Case, value: float) -> None:
    """In x they reach their row, where the weight is not zero; in a scale they reach only its feature."""
    q, weight = exact_weight(case, 4)
    x = integers(case, largest(family, case), 5)
    expected = rounded(x @ weight, case.out_dtype)
    row, feature = min(3, case.rows - 1), case.features // 3
    spoiled_x = x.copy()
    spoiled_x[row, case.k // 2] = value  # e4m3 has NaN only
    rows, features = np.arange(case.rows) != row, np.arange(case.features) != feature
    packed, spoiled = prepack(q), prepack(dataclasses.replace(q, scale=q.scale.at[0, feature].set(value)))
    for config in configs(family, case, FEW, turn):
        call = product(family, case, config, packed)
        out = call(spoiled_x)
        np.testing.assert_array_equal(out[rows], expected[rows], err_msg=str(config))
        assert not np.isfinite(out[row].astype(np.float32)[weight[case.k // 2] != 0]).any(), config
        # The same buffers of shared memory, now without NaN.
        np.testing.assert_array_equal(call(x), expected, err_msg=str(config))
        out = product(family, case, config, spoiled)(x)
        np.testing.assert_array_equal(out[:, features], expected[:, features], err_msg=str(config))
        assert not np.isfinite(out[:, feature].astype(np.float32)).any(), config


@by_case(NAN_WEIGHTS)
def test_nan_in_the_weight_reaches_its_feature(family: Family, turn: int, case: Case) -> None:
    """A NaN zero point, or an e4m3 code that is NaN, reaches every row of its feature and nothing else."""
    q, weight = exact_weight(case, 4)
    x = integers(case, largest(family, case), 5)
    expected = rounded(x @ weight, case.out_dtype)
    feature = case.features // 3
    others = np.arange(case.features) != feature
    if q.zero_point is None:
        q = dataclasses.replace(q, qvalue=q.qvalue.at[case.k // 2, feature].set(jnp.nan))
    else:
        q = dataclasses.replace(q, zero_point=q.zero_point.at[0, feature].set(jnp.nan))
    for config in configs(family, case, FEW, turn):
        out = product(family, case, config, prepack(q))(x)
        np.testing.assert_array_equal(out[:, others], expected[:, others], err_msg=str(config))
        assert np.isnan(out[:, feature].astype(np.float32)).all(), config


@pytest.mark.parametrize("shape", [(2, 64), (2, 128), (4, 64), (8, 1024), (6, 200)], ids=str)
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8"])
def test_integer_zero_points_are_packed_exactly(dtype: str, shape: tuple[int, int]) -> None:
    """XLA's own conversion of int4, fused with the packing, lost every other one."""
    groups, features = shape
    drawn = random(*shape).integers(0, 8, shape) - (0 if dtype == "uint4" else 4)
    qvalue, scale = on_device(np.zeros((128 * groups, features)), "int4"), on_device(np.ones(shape), "bfloat16")
    packed = prepack(QuantizedArray(qvalue, scale, on_device(drawn, dtype), "int4"))
    expected = pack_groups(drawn.astype(jnp.bfloat16), 128 * groups, 128)
    np.testing.assert_array_equal(np.asarray(packed.zero_point), expected)
    np.testing.assert_array_equal(np.asarray(unpack(packed).zero_point).astype(int), drawn)


def test_every_kind_of_product_is_tried() -> None:
    for family in FAMILIES:
        exact = [param.values[1:] for param in serving(EXACT) if param.values[0] is family]
        served = [case for case in DECODED if family.refusal(case.problem) is None]
        x_dtypes, qtypes = ((E4M3,), E4M3_FORMATS) if family is fp8.FAMILY else (X_DTYPES, formats.BITS)
        assert {(case.qtype, case.x_dtype) for case in served} == set(itertools.product(qtypes, x_dtypes))
        tried = [config for turn, case in exact for config in configs(family, case, SEVERAL, turn)]
        fields = {"k_warpgroups": {1, 2}, "splits": {1, 2, 3, 8}}
        if family is stream.FAMILY:
            fields = {"tile_n": {8, 16, 32, 64}, "warpgroups": {1, 2, 4}, "cluster": {1, 2, 4, 8}}
        for field, values in fields.items():
            assert {getattr(config, field) for config in tried} >= values, (family.name, field)
