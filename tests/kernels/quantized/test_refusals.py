"""The refusals of each family of quantized products on Hopper: the last value that it serves, and the next."""

import dataclasses
from typing import Any

import pytest

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests.problems import of_families
from tests.products import E4M3, HALF, valid_problem

FAMILIES = kernels.families("quantized_matmul", "cuda")
Fields = dict[str, Any]
BASES: dict[Family, Fields] = {
    stream.FAMILY: {"rows": 8, "k": 4096, "features": 4096},
    fp8.FAMILY: {"rows": 256, "k": 1024, "features": 1024, "x_dtype": E4M3},
    tiled.FAMILY: {"rows": 64, "k": 1024, "features": 1024},
}


def product(family: Family, **changes: Any) -> QuantizedMatmulProblem:
    return valid_problem(**{**BASES[family], **changes})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_hopper(family: Family) -> None:
    p = product(family)
    refused = family.refusal(p, None, Target("cuda", "NVIDIA A100", "8.0", 108))
    assert refused == "needs a GPU of compute capability 9.0 (Hopper), not NVIDIA A100 (8.0)"
    assert family.refusal(p, None, DEFAULT_CUDA) is None
    assert family.why_xla_untuned(p) is None


# ---- limits of problems --------------------------------------------------------------------------------------------

LARGEST = 2**31 - 1 - 256
EDGES: dict[Family, list[tuple[Fields, Fields, str]]] = {
    stream.FAMILY: [
        ({"rows": 1}, {"rows": 0}, "0 rows of x; accepted: 1 to 64"),
        ({"rows": 64}, {"rows": 65}, "65 rows of x; accepted: 1 to 64"),
        ({"k": 32, "group_size": 32}, {"k": 31, "group_size": 31},
         "groups of 31, k itself; accepted: k of at least 32 per channel"),
        ({"rows": 1, "k": 64, "features": 2**31 - 64}, {"rows": 1, "k": 64, "features": 2**31 - 63},
         f"arrays of {2**31} elements; accepted: at most {2**31 - 1}"),
        ({"rows": 64, "k": 64, "features": 2**25 - 1}, {"rows": 64, "k": 64, "features": 2**25},
         f"arrays of {2**31} elements; accepted: at most {2**31 - 1}"),
    ],
    fp8.FAMILY: [
        ({"x_dtype": "bfloat16", "compute_dtype": E4M3}, {"x_dtype": "bfloat16"},
         "x of dtype bfloat16; accepted: float8_e4m3fn, and with that as compute_dtype also others"),
        ({"qtype": "int8", "zero_dtype": "bfloat16", "group_size": 16, "compute_dtype": E4M3},
         {"qtype": "int4", "group_size": 16},
         "groups of 16; accepted: at least 32, the k of an instruction"),
        ({}, {"out_dtype": "float32"}, "preferred_element_type float32; accepted: bfloat16, float16"),
        ({"qtype": E4M3}, {"qtype": "int8"},
         "a weight of int8, whose values e4m3 does not hold; accepted: int4, uint4, float4_e2m1fn, float8_e4m3fn"),
        ({"qtype": "uint4"}, {"qtype": "uint4", "zero_dtype": "bfloat16"},
         "zero points of dtype bfloat16; accepted: none"),
        ({"k": 1040, "group_size": 1040}, {"k": 1000, "group_size": 1000}, "k=1000; accepted: multiples of 16"),
        ({"rows": 1}, {"rows": 0}, f"0 rows of x; accepted: 1 to {2**31 - 257}"),
        ({"k": 2**20, "features": 2**24 - 128}, {"k": 2**20, "features": 2**24},
         f"{2**30} blocks of 128 features, 256 rows and 128 k; accepted: at most {2**30 - 1}"),
    ],
    tiled.FAMILY: [
        ({"x_dtype": E4M3, "rows": 2**30 - 512, "k": 256, "features": 1},
         {"x_dtype": E4M3, "rows": 2**30 - 256, "k": 256, "features": 1},
         f"{2**31} blocks of 128 k of x with dtype float8_e4m3fn; accepted: at most {2**31 - 1}"),
        ({"rows": 1}, {"rows": 0}, f"0 rows of x; accepted: 1 to {LARGEST}"),
        ({"rows": 1, "features": 1, "k": LARGEST // 64 * 64},
         {"rows": 1, "features": 1, "k": (LARGEST // 64 + 1) * 64},
         f"{(LARGEST // 64 + 1) * 64} k; accepted: 1 to {LARGEST}"),
        ({"rows": 1, "k": 64, "features": LARGEST}, {"rows": 1, "k": 64, "features": LARGEST + 1},
         f"{LARGEST + 1} features; accepted: 1 to {LARGEST}"),
        ({"rows": 128, "k": 2**20, "features": 2**24 - 128}, {"rows": 128, "k": 2**20, "features": 2**24},
         f"{2**30} blocks of 128 features, 128 rows and 128 k; accepted: at most {2**30 - 1}"),
        ({"rows": 2**30 - 1024, "k": 129, "features": 1, "group_size": 129},
         {"rows": 2**30 - 128, "k": 129, "features": 1, "group_size": 129},
         f"{2**31 + 256} blocks of 128 k of x with k=129 (no multiple of 8); accepted: at most {2**31 - 1}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "last", "beyond", "reason"), of_families(EDGES))
def test_limit_is_where_it_is_said_to_be(family: Family, last: Fields, beyond: Fields, reason: str) -> None:
    assert family.refusal(product(family, **last)) is None
    assert family.refusal(product(family, **beyond)) == reason


def test_float32_activations_are_refused() -> None:
    p = dataclasses.replace(product(tiled.FAMILY), x_dtype="float32")
    assert tiled.FAMILY.refusal(p) == "x of dtype float32; accepted: bfloat16, float16, float8_e4m3fn"


@pytest.mark.parametrize("changes", [
    {"rows": 64, "group_size": 32},
    {"rows": 16, "qtype": "int8", "scale_dtype": "float16", "group_size": 32, **HALF},
], ids=str)  # fmt: skip
def test_x_has_to_fit_in_a_clusters_shared_memory_where_k_ends_within_a_stage(changes: Fields) -> None:
    """Otherwise it is loaded again for each row tile."""
    good, bad = 64 + 32, 2**20 + 32
    assert stream.FAMILY.refusal(product(stream.FAMILY, **{**changes, "k": bad - 32})) is None
    while bad - good > 64:
        middle = (good + bad) // 128 * 64 + 32
        served = stream.FAMILY.refusal(product(stream.FAMILY, **{**changes, "k": middle})) is None
        good, bad = (middle, bad) if served else (good, middle)
    rows, size = changes["rows"], 227 * 1024
    assert 8192 <= good < 8 * size // (2 * rows)
    assert stream.FAMILY.candidates(product(stream.FAMILY, **{**changes, "k": good}), DEFAULT_CUDA)
    expected = f"k {bad}: {rows} rows of x of a cluster's thread block do not fit in {size} bytes"
    assert stream.FAMILY.refusal(product(stream.FAMILY, **{**changes, "k": bad})) == expected


# ---- limits of configs ---------------------------------------------------------------------------------------------

STREAM = stream.Config(8, 2, 2, 4, 2, 64)
WIDE = {"warpgroups": 4, "tiles": 1, "stages": 2}
# 4 tiles of a cluster along features by 2 along rows, of 8 k blocks; 32 tiles.
FP8 = fp8.Config(128, 128, 4, 16, 1, multicast=2)
FP8_SPLIT = {"tile_n": 64, "multicast": 1, "blocks": 64, "whole_tiles": 0, "splits": 2}
FP8_SHARED = {**FP8_SPLIT, "k_warpgroups": 2}
TILED = tiled.Config(128, 64, 4, 8, 1)
SHARED = {"tile_m": 64, "stages": 10, "blocks": 32, "whole_tiles": 0, "splits": 2, "k_warpgroups": 2}
SHARED_128 = {**SHARED, "tile_m": 128, "stages": 6, "blocks": 16}
CUT = {"whole_tiles": 0}


def shared(given: Fields, blocks: int, wide: Fields, tile: str, accepted: str) -> list[tuple[Fields, Fields, str]]:
    """Cases with two k_warpgroups. `blocks` equals the number of tiles; `wide` makes a `tile` that is too wide."""
    return [
        (given, {**given, "k_warpgroups": 3}, "k_warpgroups 3; accepted: 1, 2"),
        (given, {**given, "splits": 1, "blocks": blocks}, "k_warpgroups 2 without splits; accepted: 1"),
        (given, {**given, "tile_m": 256}, f"k_warpgroups 2 of tile 256x64; accepted: {accepted}"),
        (given, {**given, **wide}, f"k_warpgroups 2 of tile {tile}; accepted: {accepted}"),
        ({**given, "splits": 4, "blocks": 4 * blocks}, {**given, "splits": 8, "blocks": 8 * blocks},
         "k_warpgroups 2 of ranges down to 1 k blocks; accepted: 1"),
    ]  # fmt: skip


# A config, changes of the problem, legal changes of the config, illegal ones, and the reason.
CONFIGS: list[tuple[Family, Any, Fields, Fields, Fields, str]] = [
    *((stream.FAMILY, STREAM, *edge) for edge in (
        ({}, {}, {"tile_n": 12}, "tile_n 12; accepted: 8, 16, 32, 64"),
        ({"rows": 9}, {"tile_n": 16}, {}, "tile_n 8; accepted for 9 rows: at least 9"),
        ({"rows": 64, "k": 1024}, {"tile_n": 64}, {"tile_n": 32}, "tile_n 32; accepted for 64 rows: at least 64"),
        ({}, {"warpgroups": 4}, {"warpgroups": 3}, "warpgroups 3; accepted: 1, 2, 4"),
        ({}, {"tiles": 1}, {"tiles": 3}, "tiles 3; accepted: 1, 2, 4"),
        ({"k": 1024}, {**WIDE, "tile_n": 16}, {**WIDE, "tile_n": 32},
         "tile_n 32 with 4 warpgroups; accepted: at most 16"),
        ({"k": 1024, "x_dtype": E4M3}, {**WIDE, "tile_n": 32}, {**WIDE, "tile_n": 64},
         "tile_n 64 with 4 warpgroups; accepted: at most 32"),
        ({"k": 1024, "x_dtype": E4M3, "out_dtype": "float32"}, {**WIDE, "tile_n": 16}, {**WIDE, "tile_n": 32},
         "tile_n 32 with 4 warpgroups; accepted: at most 16"),
        ({"k": 1024, "qtype": "uint4", "zero_dtype": "float32"}, {**WIDE, "tile_n": 8}, {**WIDE, "tile_n": 16},
         "tile_n 16 with 4 warpgroups; accepted: at most 8"),
        ({"k": 512, "qtype": "uint4", "zero_dtype": "float32"}, {"tile_n": 64, "stages": 2},
         {"tile_n": 64, "stages": 2, "tiles": 4}, "tiles 4 with tile_n 64 and zero points; accepted: at most 2"),
        ({"k": 512, "qtype": "uint4", "zero_dtype": "float32", "x_dtype": "float16", "group_size": 32},
         {"tile_n": 64, "stages": 2, "tiles": 1}, {"tile_n": 64, "stages": 2},
         "tiles 2 with tile_n 64 and zero points; accepted: at most 1"),
        ({"group_size": 128}, {}, {"tiles": 1}, "tiles 1; accepted with groups of 128: multiples of 2"),
        ({"group_size": 4096}, {"tiles": 1}, {"tiles": 0}, "tiles 0; accepted: 1, 2, 4"),
        ({}, {"cluster": 8}, {"cluster": 3}, "cluster 3; accepted: 1, 2, 4, 8"),
        ({}, {"cluster": 8}, {"cluster": 16}, "cluster 16; accepted: 1, 2, 4, 8"),
        ({"k": 64 * 4 * 7 + 1, "group_size": 64 * 4 * 7 + 1}, {"cluster": 8}, {"cluster": 8, "warpgroups": 4},
         "cluster 8; accepted for 4 stages of k: at most as many"),
        ({}, {"stages": 2}, {"stages": 1}, "stages 1; accepted: 2 to 14"),
        ({}, {"stages": 14, "tiles": 1}, {"stages": 15, "tiles": 1}, "stages 15; accepted: 2 to 14"),
        ({}, {"clusters": 64}, {"clusters": 65}, "clusters 65; accepted: 1 to 64, the tiles of 64 features"),
        ({}, {"clusters": 1}, {"clusters": 0}, "clusters 0; accepted: 1 to 64, the tiles of 64 features"),
    )),
    *((fp8.FAMILY, FP8, {}, *edge) for edge in (
        ({}, {"tile_n": 160}, "tile_n 160; accepted: 32, 64, 96, 128, 192, 256"),
        ({"multicast": 1, "blocks": 16}, {"multicast": 4}, "multicast 4; accepted: 1, 2"),
        ({}, {"tile_m": 192}, "tile_m 192; accepted: 128, 256"),
        ({"tile_n": 64, "tile_m": 256}, {"tile_n": 128, "tile_m": 256},
         "tile_n 128 with tile_m 256; accepted: at most 64"),
        ({"stages": 2}, {"stages": 1}, "stages 1; accepted with this tile: 2 to 8"),
        ({"tile_n": 256, "stages": 5, "blocks": 8}, {"tile_n": 256, "stages": 6},
         "stages 6; accepted with this tile: 2 to 5"),
        ({"blocks": 128, **CUT}, {"blocks": 130, **CUT}, "blocks 130; accepted for 8 tiles of 8 k blocks: 2 to 128"),
        ({"blocks": 2, **CUT}, {"blocks": 3, **CUT}, "blocks 3 with multicast 2; accepted: multiples of it"),
        ({"blocks": 8, "whole_tiles": 2}, {"blocks": 8, "whole_tiles": 3},
         "whole_tiles 3 of 4 workers; accepted for 8 tiles: 0 to 2"),
        ({"blocks": 64, **CUT}, {"blocks": 66, **CUT}, "blocks 66 leaves some without any of 64 k blocks; use 64"),
        (FP8_SPLIT, {**FP8_SPLIT, "splits": 9, "blocks": 288}, "splits 9; accepted: 1 to 8"),
        (FP8_SPLIT, {**FP8_SPLIT, "splits": 0}, "splits 0; accepted: 1 to 8"),
        (FP8_SPLIT, {**FP8_SPLIT, "splits": -1}, "splits -1; accepted: 1 to 8"),
        ({**FP8_SPLIT, "splits": 4, "blocks": 128}, {**FP8_SPLIT, "splits": 5, "blocks": 160},
         "splits 5 leaves some of 8 k blocks' ranges empty; use 4"),
        (FP8_SPLIT, {**FP8_SPLIT, "blocks": 32}, "blocks 32 and whole_tiles 0 with splits 2; accepted: 64 and 0"),
        (FP8_SPLIT, {**FP8_SPLIT, "multicast": 2}, "splits 2 with multicast 2; accepted: 1"),
        ({**FP8_SPLIT, "tile_m": 256, "blocks": 32, "stages": 3},
         {**FP8_SPLIT, "tile_m": 256, "blocks": 32, "stages": 2},
         "stages 2; accepted with this tile: 3 to 8"),
        *shared(FP8_SHARED, 32, {"tile_n": 128}, "128x128", "128 by 32, 64"),
        ({**FP8_SHARED, "stages": 4}, {**FP8_SHARED, "stages": 2}, "stages 2; accepted with this tile: 4 to 8"),
    )),
    *((tiled.FAMILY, TILED, {}, *edge) for edge in (
        ({}, {"tile_m": 192}, "tile_m 192; accepted: 64, 128, 256"),
        ({}, {"tile_n": 48}, "tile_n 48; accepted: 16, 32, 64, 96, 128, 192, 256"),
        ({"tile_m": 256, "blocks": 4, "stages": 2}, {"tile_m": 256, "tile_n": 96},
         "tile_n 96 with tile_m 256 and scaling 'weight'; at most 64"),
        ({"stages": 2}, {"stages": 1}, "stages 1; accepted with this tile: 2 to 8"),
        (SHARED, {**SHARED, "stages": 11}, "stages 11; accepted with this tile: 4 to 10"),
        ({**SHARED, "stages": 4}, {**SHARED, "stages": 2}, "stages 2; accepted with this tile: 4 to 10"),
        (SHARED, {**SHARED, "stages": 9}, "stages 9 with k_warpgroups 2; accepted: multiples of it"),
        (SHARED_128, {**SHARED_128, "stages": 8}, "stages 8; accepted with this tile: 4 to 6"),
        *shared(SHARED, 16, {"tile_n": 96}, "64x96", "64, 128 by 32, 64"),
        ({"stages": 8}, {"stages": 9}, "stages 9; accepted with this tile: 2 to 8"),
        ({"tile_n": 256, "stages": 3}, {"tile_n": 256, "stages": 4}, "stages 4; accepted with this tile: 2 to 3"),
        ({"blocks": 64, **CUT}, {"blocks": 65, **CUT}, "blocks 65; accepted for 8 tiles of 8 k blocks: 1 to 64"),
        ({"blocks": 1, **CUT}, {"blocks": 0, **CUT}, "blocks 0; accepted for 8 tiles of 8 k blocks: 1 to 64"),
        ({"blocks": 4, "whole_tiles": 2}, {"blocks": 4, "whole_tiles": 3},
         "whole_tiles 3 of 4 workers; accepted for 8 tiles: 0 to 2"),
        ({"blocks": 4, **CUT}, {"blocks": 4, "whole_tiles": -1},
         "whole_tiles -1 of 4 workers; accepted for 8 tiles: 0 to 2"),
        ({"blocks": 32, **CUT}, {"blocks": 33, **CUT}, "blocks 33 leaves some without any of 64 k blocks; use 32"),
        ({"blocks": 64, "splits": 8, **CUT}, {"blocks": 72, "splits": 9, **CUT}, "splits 9; accepted: 1 to 8"),
        ({"blocks": 16, "splits": 2, **CUT}, {"splits": 0}, "splits 0; accepted: 1 to 8"),
        ({"blocks": 32, "splits": 4, **CUT}, {"blocks": 40, "splits": 5, **CUT},
         "splits 5 leaves some of 8 k blocks' ranges empty; use 4"),
        ({"blocks": 24, "splits": 3, **CUT}, {"blocks": 8, "splits": 3, "whole_tiles": 1},
         "blocks 8 and whole_tiles 1 with splits 3; accepted: 24 and 0"),
        ({"tile_n": 16, "stages": 4, "blocks": 256, "splits": 8, **CUT},
         {"tile_n": 16, "stages": 2, "blocks": 256, "splits": 8, **CUT}, "stages 2; accepted with this tile: 3 to 8"),
    )),
    # A float32 result and zero points leave room for two sets of sums.
    (tiled.FAMILY, TILED, {"qtype": "int8", "group_size": 32, "zero_dtype": "float32", "scale_dtype": "float32",
                           "out_dtype": "float32"},
     {"tile_n": 64}, {"tile_n": 128},
     "tile_n 128 with tile_m 128 and scaling 'sum'; at most 64"),
    (tiled.FAMILY, TILED, {"qtype": "int8", "zero_dtype": "float32", "scale_dtype": "float32", "out_dtype": "float32"},
     {"tile_n": 128}, {"tile_n": 192}, "tile_n 192 with tile_m 128 and scaling 'sum'; at most 128"),
    (tiled.FAMILY, TILED, {"scale_dtype": "float32"}, {**SHARED, "stages": 8},
     SHARED_128, "tile_n 64 with tile_m 128, 2 k_warpgroups and scaling 'sum'; at most 16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "fields", "good", "bad", "reason"), CONFIGS, ids=[f"{c[0].name}-{c[-1]}" for c in CONFIGS]
)
def test_limits_of_configs(family: Family, config: Any, fields: Fields, good: Fields, bad: Fields, reason: str) -> None:
    p = product(family, **fields)
    assert family.refusal(p, dataclasses.replace(config, **good)) is None
    assert family.refusal(p, dataclasses.replace(config, **bad)) == reason


def test_shared_memory_is_a_limit() -> None:
    zeros = {"qtype": "int8", "group_size": 32, "scale_dtype": "float32", "zero_dtype": "float32"}
    p, config = product(stream.FAMILY, rows=32, **zeros), stream.Config(32, 2, 2, 2, 8, 1)
    while stream.FAMILY.refusal(p, config) is None:
        config = dataclasses.replace(config, stages=config.stages + 1)
    size = stream.memory(p, config).bytes
    assert 2 < config.stages <= 14
    assert stream.FAMILY.refusal(p, config) == f"{size} bytes of shared memory; accepted: at most {227 * 1024}"


ONE_GROUP, ZERO = {"group_size": 1024}, {"qtype": "int8", "zero_dtype": "float32"}


@pytest.mark.parametrize(("changes", "narrow", "wide"), [
    ({}, "weight", "weight"),
    ({"qtype": "nf4"}, "weight", "weight"),
    ({"qtype": "uint4", "zero_dtype": "bfloat16"}, "sum", "weight"),
    ({"scale_dtype": "float32"}, "sum", "weight"),
    ({"out_dtype": "float32"}, "sum", "sum"),
    ({"qtype": "uint4", "zero_dtype": "bfloat16", "out_dtype": "float32"}, "sum", "sum"),
    ({"x_dtype": "float16"}, "sum", "sum"),
    ({"x_dtype": E4M3}, "sum", "sum"),
    ({"x_dtype": E4M3, **ONE_GROUP}, "channel", "channel"),
    (ONE_GROUP, "channel", "channel"),
    ({**ONE_GROUP, **HALF}, "channel", "channel"),
    ({**ONE_GROUP, "out_dtype": "float32"}, "sum", "sum"),
    ({**ONE_GROUP, **ZERO}, "sum", "sum"),
    ({**ONE_GROUP, **ZERO, "out_dtype": "float32"}, "sum", "sum"),
])  # fmt: skip
def test_where_scales_go(changes: Fields, narrow: str, wide: str) -> None:
    """Scales go into the weight, or over long chains of sums, only if rounding the result hides the error; zero points,
    and scales that bfloat16 does not hold, in wide tiles only."""
    p = product(tiled.FAMILY, **changes)
    assert [tiled.scaling(p, tile_n) for tile_n in (16, 64, 96, 256)] == [narrow, narrow, wide, wide]
