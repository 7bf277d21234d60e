"""The family of quantized products with few rows: what is legal, which configs, plans. Needs no GPU."""

import dataclasses
from typing import Any

import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import stream
from jax_splitk.kernels.quantized.stream import FAMILY, Config
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import products

SHARED_BYTES = 227 * 1024  # that a thread block may have
LARGEST = 2**31 - 1


def product(rows: int = 8, k: int = 4096, features: int = 4096, **changes: Any) -> QuantizedMatmulProblem:
    return products.valid_problem(rows, k, features, **changes)


def best(p: QuantizedMatmulProblem, **changes: Any) -> Config:
    first = min(FAMILY.candidates(p, DEFAULT_CUDA), key=lambda c: FAMILY.estimate(p, c, DEFAULT_CUDA))
    return dataclasses.replace(first, **changes)


E4M3: dict[str, Any] = {"x_dtype": "float8_e4m3fn"}
HALF: dict[str, Any] = {"x_dtype": "float16", "out_dtype": "float16", "scale_dtype": "float16"}
SIZES = (
    *((1, 64, 1), (8, 8192, 3584), (9, 333, 77), (16, 8192, 28672), (17, 8192, 8192), (32, 14336, 4096)),
    *((64, 1000, 200), (1, 28672, 8192), (20, 128, 100_000), (49, 4096, 640)),
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"qtype": "uint4", "zero_dtype": "bfloat16"},
    {"qtype": "nf4", **HALF},
    {"qtype": "int8", "out_dtype": "float32", "scale_dtype": "float32"},
    {"qtype": "float8_e4m3fn", "group_size": 32, "x_dtype": "float8_e4m3fn"},
    {"qtype": "int8", "group_size": 0, "zero_dtype": "float32"},
    {"qtype": "float4_e2m1fn", "group_size": 128, "scale_dtype": "float32"},
    {**E4M3},
    {**E4M3, "qtype": "uint4", "group_size": 128, "out_dtype": "float16"},
)
PROBLEMS = products.problems(SIZES, KINDS)


# ---- what is legal -------------------------------------------------------------------------------------------------

EDGES = [
    (product(1), product(0), "0 rows of x; accepted: 1 to 64"),
    (product(64), product(65), "65 rows of x; accepted: 1 to 64"),
    (
        product(k=32, group_size=32),
        product(k=31, group_size=31),
        "groups of 31, k itself; accepted: k of at least 32 per channel",
    ),
    (
        product(1, 64, 2**31 - 64),
        product(1, 64, 2**31 - 63),
        f"arrays of {2**31} elements; accepted: at most {LARGEST}",
    ),
    (
        product(64, 64, 2**25 - 1),
        product(64, 64, 2**25),
        f"arrays of {2**31} elements; accepted: at most {LARGEST}",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), EDGES, ids=lambda v: v if isinstance(v, str) else "")
def test_limits_of_problems(good: QuantizedMatmulProblem, bad: QuantizedMatmulProblem, reason: str) -> None:
    assert FAMILY.refusal(good) is None
    assert FAMILY.candidates(good, DEFAULT_CUDA)
    assert FAMILY.refusal(bad) == reason


@pytest.mark.parametrize(
    "changes", [{"rows": 64}, {"rows": 16, "qtype": "int8", **{**HALF, "group_size": 32}}], ids=str
)
def test_x_has_to_fit_in_a_clusters_shared_memory(changes: dict[str, Any]) -> None:
    good, bad = 64, 2**20
    while bad - good > 64:
        middle = (good + bad) // 128 * 64
        good, bad = (middle, bad) if FAMILY.refusal(product(k=middle, **changes)) is None else (good, middle)
    rows = changes["rows"]
    assert 8192 <= good < 8 * SHARED_BYTES // (2 * rows)
    assert FAMILY.candidates(product(k=good, **changes), DEFAULT_CUDA)
    expected = f"k {bad}: {rows} rows of x of a cluster's thread block do not fit in {SHARED_BYTES} bytes"
    assert FAMILY.refusal(product(k=bad, **changes)) == expected


PLAIN = Config(8, 2, 2, 4, 2, 64)
WIDE = {"warpgroups": 4, "tiles": 1, "stages": 2}
CONFIG_EDGES = [
    ({}, {}, {"tile_n": 12}, "tile_n 12; accepted: 8, 16, 32, 64"),
    ({"rows": 9}, {"tile_n": 16}, {}, "tile_n 8; accepted for 9 rows: at least 9"),
    ({"rows": 64, "k": 1024}, {"tile_n": 64}, {"tile_n": 32}, "tile_n 32; accepted for 64 rows: at least 64"),
    ({}, {"warpgroups": 4}, {"warpgroups": 3}, "warpgroups 3; accepted: 1, 2, 4"),
    ({}, {"tiles": 1}, {"tiles": 3}, "tiles 3; accepted: 1, 2, 4"),
    (
        {"k": 1024},
        {**WIDE, "tile_n": 16},
        {**WIDE, "tile_n": 32},
        "tile_n 32 with 4 warpgroups; accepted: at most 16",
    ),
    (
        {"k": 1024, **E4M3},
        {**WIDE, "tile_n": 32},
        {**WIDE, "tile_n": 64},
        "tile_n 64 with 4 warpgroups; accepted: at most 32",
    ),
    (
        {"k": 1024, "out_dtype": "float32", **E4M3},
        {**WIDE, "tile_n": 16},
        {**WIDE, "tile_n": 32},
        "tile_n 32 with 4 warpgroups; accepted: at most 16",
    ),
    (
        {"k": 1024, "qtype": "uint4", "zero_dtype": "float32"},
        {**WIDE, "tile_n": 8},
        {**WIDE, "tile_n": 16},
        "tile_n 16 with 4 warpgroups; accepted: at most 8",
    ),
    ({"group_size": 128}, {}, {"tiles": 1}, "tiles 1; accepted with groups of 128: multiples of 2"),
    ({"group_size": 4096}, {"tiles": 1}, {"tiles": 0}, "tiles 0; accepted: 1, 2, 4"),
    ({}, {"cluster": 8}, {"cluster": 3}, "cluster 3; accepted: 1, 2, 4, 8"),
    ({}, {"cluster": 8}, {"cluster": 16}, "cluster 16; accepted: 1, 2, 4, 8"),
    (
        {"k": 64 * 4 * 7 + 1, "group_size": 64 * 4 * 7 + 1},
        {"cluster": 8},
        {"cluster": 8, "warpgroups": 4},
        "cluster 8; accepted for 4 stages of k: at most as many",
    ),
    ({}, {"stages": 2}, {"stages": 1}, "stages 1; accepted: 2 to 14"),
    ({}, {"stages": 14, "tiles": 1}, {"stages": 15, "tiles": 1}, "stages 15; accepted: 2 to 14"),
    ({}, {"clusters": 64}, {"clusters": 65}, "clusters 65; accepted: 1 to 64, the tiles of 64 features"),
    ({}, {"clusters": 1}, {"clusters": 0}, "clusters 0; accepted: 1 to 64, the tiles of 64 features"),
]


@pytest.mark.parametrize(("problem", "good", "bad", "reason"), CONFIG_EDGES, ids=str)
def test_limits_of_configs(problem: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], reason: str) -> None:
    p = product(**problem)
    assert FAMILY.refusal(p, dataclasses.replace(PLAIN, **good)) is None
    assert FAMILY.refusal(p, dataclasses.replace(PLAIN, **bad)) == reason


def test_shared_memory_is_a_limit() -> None:
    p = product(32, qtype="int8", group_size=32, scale_dtype="float32", zero_dtype="float32")
    config = Config(32, 2, 2, 2, 8, 1)
    while FAMILY.refusal(p, config) is None:
        assert stream.shared_bytes(p, config) <= SHARED_BYTES
        config = dataclasses.replace(config, stages=config.stages + 1)
    assert 2 < config.stages <= 14
    size = stream.shared_bytes(p, config)
    assert size > SHARED_BYTES
    assert FAMILY.refusal(p, config) == f"{size} bytes of shared memory; accepted: at most {SHARED_BYTES}"


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "bfloat16"), (HALF, "float16"), (E4M3, "float8_e4m3fn"), ({**E4M3, "qtype": "uint4"}, "float8_e4m3fn"),
    ({**E4M3, "qtype": "float4_e2m1fn", "out_dtype": "float16"}, "float8_e4m3fn"),
    ({**E4M3, "qtype": "float8_e4m3fn", "group_size": 4096}, "float8_e4m3fn"),
    ({**E4M3, "qtype": "nf4"}, "float16"), ({**E4M3, "qtype": "int8"}, "float16"),
    ({**E4M3, "out_dtype": "float32"}, "float16"), ({**E4M3, "qtype": "uint4", "zero_dtype": "bfloat16"}, "float16"),
])  # fmt: skip
def test_what_the_tensor_cores_multiply(changes: dict[str, Any], expected: str) -> None:
    p = product(8, **changes)
    assert stream.products(p) == expected
    macros = dict(FAMILY.source(p, PLAIN).defines)
    assert macros["E4M3_PRODUCTS"] == (expected == "float8_e4m3fn")
    assert macros["X_E4M3"] == (p.x_dtype == "float8_e4m3fn")
    # Activations of e4m3 take half the room.
    assert stream.x_bytes(p, PLAIN) == 8 * 4096 // 2 * jnp.dtype(expected).itemsize


def test_only_hopper() -> None:
    products.check_only_hopper(FAMILY, product())


# ---- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_candidates_are_legal_and_fit(p: QuantizedMatmulProblem) -> None:
    if FAMILY.refusal(p) is not None:
        assert FAMILY.candidates(p, DEFAULT_CUDA) == []
        return
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    assert found
    assert len(set(found)) == len(found) <= 60
    seconds = []
    for config in found:
        assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None, config
        (launch,) = FAMILY.plan(p, config).launches
        assert launch.shared_bytes == stream.shared_bytes(p, config) <= SHARED_BYTES, config
        seconds.append(FAMILY.estimate(p, config, DEFAULT_CUDA))
    # No faster than the memory allows, and not absurd.
    assert p.bytes_moved / 4.8e12 < min(seconds) < 20 * p.bytes_moved / 4e12 + 20e-6
    config = found[seconds.index(min(seconds))]
    near = FAMILY.neighbours(p, config, DEFAULT_CUDA)
    assert config not in near
    assert len(set(near)) == len(near)


def test_most_problems_are_served() -> None:
    served = [FAMILY.refusal(p) is None for p in PROBLEMS]
    assert sum(served) > len(served) * 0.8


def test_the_model_prefers_full_machines() -> None:
    """56 tiles of 64 features leave half of the machine idle unless k is divided."""
    assert best(product(8, 8192, 3584)).cluster > 1


# Device times of int4 weights in groups of 64 by 8192 k on one H200, us: the fastest config of each, and slow ones.
MEASURED = [
    *((8, 28672, E4M3, Config(8, 2, 4, 7, 2, 64), 34.2), (8, 8192, E4M3, Config(8, 4, 4, 3, 2, 64), 12.1)),
    *((8, 3584, E4M3, Config(8, 2, 4, 9, 8, 14), 7.6), (16, 28672, E4M3, Config(16, 4, 4, 4, 2, 64), 35.0)),
    *((16, 8192, E4M3, Config(16, 2, 4, 7, 2, 64), 13.2), (16, 3584, E4M3, Config(16, 2, 4, 6, 4, 28), 8.1)),
    *((32, 28672, E4M3, Config(32, 4, 4, 3, 4, 30), 40.2), (32, 8192, E4M3, Config(32, 2, 4, 3, 2, 64), 15.3)),
    *((32, 8192, E4M3, Config(32, 2, 4, 2, 2, 64), 17.7), (32, 28672, E4M3, Config(32, 4, 2, 2, 2, 64), 50.6)),
    *((64, 28672, E4M3, Config(64, 2, 4, 4, 8, 15), 65.1), (64, 8192, E4M3, Config(64, 2, 4, 4, 8, 15), 21.9)),
    *((64, 8192, E4M3, Config(64, 1, 4, 12, 8, 15), 23.6), (64, 3584, E4M3, Config(64, 2, 4, 5, 8, 14), 12.2)),
    *((8, 28672, {}, Config(8, 4, 4, 3, 2, 64), 34.3), (8, 3584, {}, Config(8, 4, 4, 3, 4, 28), 7.7)),
    *((16, 8192, {}, Config(16, 2, 4, 4, 2, 64), 12.2), (32, 8192, {}, Config(32, 2, 4, 6, 8, 15), 17.4)),
    *((16, 3584, {}, Config(16, 2, 4, 6, 4, 28), 7.88), (16, 3584, {}, Config(16, 2, 4, 4, 2, 56), 7.49)),
    *((16, 8192, {}, Config(16, 4, 4, 2, 2, 64), 13.4), (8, 8192, {}, Config(8, 4, 2, 4, 2, 64), 11.5)),
]


@pytest.mark.parametrize(("rows", "features", "types", "config", "us"), MEASURED, ids=str)
def test_the_model_is_close_to_measured_times(
    rows: int, features: int, types: dict[str, Any], config: Config, us: float
) -> None:
    p = product(rows, 8192, features, **types)
    assert FAMILY.estimate(p, config, DEFAULT_CUDA) == pytest.approx(us * 1e-6, rel=0.08)


@pytest.mark.parametrize(("rows", "features", "clusters"), [(16, 3584, 56), (16, 8192, 64), (16, 28672, 64)])
def test_pairs_that_hold_half_of_x_are_among_the_first(rows: int, features: int, clusters: int) -> None:
    """The slice of x is loaded while the first words are."""
    p = product(rows, 8192, features)
    found = sorted(FAMILY.candidates(p, DEFAULT_CUDA), key=lambda c: FAMILY.estimate(p, c, DEFAULT_CUDA))
    assert Config(16, 2, 4, 4, 2, clusters) in found[:4]


# ---- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [p for p in PROBLEMS[::3] if FAMILY.refusal(p) is None], ids=str)
def test_plans_geometry(p: QuantizedMatmulProblem) -> None:
    for config in FAMILY.candidates(p, DEFAULT_CUDA):
        made = FAMILY.plan(p, config)
        products.check_buffers(p, made)
        assert made.buffers[-1].bytes == FAMILY.workspace_bytes(p, config) == 0
        (launch,) = made.launches
        assert launch.grid == (config.clusters * config.cluster, 1, 1)
        assert launch.cluster == (config.cluster, 1, 1)
        assert launch.block[0] % 32 == 0
        assert not launch.programmatic
        # No more blocks than SMs run at once, one on each.
        assert config.clusters * config.cluster <= DEFAULT_CUDA.cores
        used = {param.buffer for param in launch.params if isinstance(param, plan.Pointer)}
        used |= {tensor_map.buffer for tensor_map in made.maps}
        assert used == set(range(len(made.buffers) - 1)), "the kernel gets every buffer but the workspace"
        made.words()


@pytest.mark.parametrize(("k", "x_dtype", "by_tma"), [
    (4096, "bfloat16", True), (1000, "float16", True), (1004, "bfloat16", False), (999, "float16", False),
    (4096, "float8_e4m3fn", True), (1000, "float8_e4m3fn", False), (1008, "float8_e4m3fn", True),
])  # fmt: skip
def test_x_comes_by_tma_where_its_rows_are_whole_16_bytes(k: int, x_dtype: str, by_tma: bool) -> None:
    p = product(5, k, 640, group_size=k, x_dtype=x_dtype)
    config = best(p)
    made = FAMILY.plan(p, config)
    (launch,) = made.launches
    assert isinstance(launch.params[0], plan.MapParam) == by_tma
    if not by_tma:
        assert made.maps == ()
        return
    (x,) = made.maps
    assert isinstance(x, plan.TiledMap)
    pairs = x_dtype == "float8_e4m3fn"
    itemsize = 1 if pairs else 2
    assert (x.buffer, x.dtype) == (0, "bfloat16" if pairs else x_dtype)
    assert x.box[0] * 2 == 64 * itemsize, "the width of the swizzle"
    assert x.swizzle == (2 if pairs else plan.SWIZZLE_128B)
    assert x.box[1] == config.tile_n
    if k % (64 * stream.stage_tiles(config)):  # a tile of 64 k
        assert (x.dims, x.strides, x.box[2:]) == ((k * itemsize // 2, 5), (k * itemsize,), ())
    else:  # a stage's tiles
        assert (x.dims, x.strides) == ((32 * itemsize, 5, k // 64), (k * itemsize, 64 * itemsize))
        assert x.box[2:] == (stream.stage_tiles(config),)


@pytest.mark.parametrize(("k", "features", "whole", "fours"), [
    (4096, 640, 1, 1), (4096, 642, 1, 0), (4160, 640, 0, 1), (4095, 641, 0, 0),
])  # fmt: skip
def test_code_without_what_sizes_do_not_need(k: int, features: int, whole: int, fours: int) -> None:
    p = product(5, k, features, group_size=64 if k % 64 == 0 else k)
    macros = dict(FAMILY.source(p, PLAIN).defines)
    assert (macros["WHOLE"], macros["FOURS"]) == (whole, fours)


def test_code_depends_on_types_config_and_divisors_alone() -> None:
    p = product()
    config = best(p)
    other = dataclasses.replace(p, rows=3, k=8192, features=500)
    fewer = dataclasses.replace(config, clusters=1)
    assert FAMILY.source(other, fewer) == FAMILY.source(p, config) == FAMILY.plan(p, config).source
    types = [
        *({"x_dtype": "float16"}, {"x_dtype": "float8_e4m3fn"}, {"out_dtype": "float32"}, {"scale_dtype": "float32"}),
        *({"zero_dtype": "float32"}, {"group_size": 32}, {"group_size": 4096}, {"qtype": "uint4"}),
        *({"features": 4094}, {"k": 4160}, {"k": 1004}),
    ]
    changed = [dataclasses.replace(p, **change) for change in types]
    changed[-1] = dataclasses.replace(changed[-1], group_size=1004)
    assert len({FAMILY.source(q, config) for q in (p, *changed)}) == 1 + len(changed)
