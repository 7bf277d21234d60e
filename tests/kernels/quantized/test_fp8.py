"""The e4m3 tensor cores' family of quantized products: what is legal, which configs, plans. No GPU."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import fp8, tiles
from jax_splitk.kernels.quantized.fp8 import FAMILY, Config
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized import prepack
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import formats, products


def product(rows: int = 256, k: int = 1024, features: int = 1024, **changes: Any) -> QuantizedMatmulProblem:
    return products.valid_problem(rows, k, features, **{"x_dtype": "float8_e4m3fn", **changes})


# 4 tiles of a cluster along features by 2 along rows, of 8 k blocks.
PLAIN = Config(128, 128, 4, 16, 1, multicast=2, chunk=64)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"qtype": "uint4", "out_dtype": "float16", "scale_dtype": "float16"},
    {"qtype": "float4_e2m1fn", "scale_dtype": "float32", "group_size": 128},
    {"qtype": "float8_e4m3fn", "group_size": 32},
    {"qtype": "float8_e4m3fn", "group_size": 0},
)
SIZES = ((1, 64, 1), (65, 1088, 200), (256, 8192, 8192), (1000, 4160, 333), (4096, 8192, 3584))
PROBLEMS = products.problems(SIZES, KINDS, x_dtype="float8_e4m3fn")


# ---- what is legal -------------------------------------------------------------------------------------------------

EDGES = [
    (product(), product(x_dtype="bfloat16"), "x of dtype bfloat16; accepted: float8_e4m3fn"),
    (product(), product(out_dtype="float32"), "preferred_element_type float32; accepted: bfloat16, float16"),
    (
        product(qtype="float8_e4m3fn"),
        product(qtype="int8"),
        "a weight of int8, whose values e4m3 does not hold; accepted: int4, uint4, float4_e2m1fn, float8_e4m3fn",
    ),
    (
        product(qtype="uint4"),
        product(qtype="uint4", zero_dtype="bfloat16"),
        "zero points of dtype bfloat16; accepted: none",
    ),
    (product(k=1040, group_size=1040), product(k=1000, group_size=1000), "k=1000; accepted: multiples of 16"),
    (product(rows=1), product(rows=0), f"0 rows of x; accepted: 1 to {2**31 - 257}"),
    (
        product(256, 2**20, 2**24 - 128),
        product(256, 2**20, 2**24),
        f"{2**30} blocks of 128 features, 256 rows and 128 k; accepted: at most {2**30 - 1}",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), EDGES, ids=lambda v: v if isinstance(v, str) else "")
def test_limits_of_problems(good: QuantizedMatmulProblem, bad: QuantizedMatmulProblem, reason: str) -> None:
    assert FAMILY.refusal(good) is None
    assert FAMILY.refusal(bad) == reason


def in_splits(splits: int, k_warpgroups: int = 1, tile_n: int = 64, tile_m: int = 128, stages: int = 8) -> Config:
    """For 3584 features and up to `tile_n` rows."""
    blocks, chunk = 3584 // tile_m * splits, 64 if tile_n % 64 == 0 else 32
    return Config(tile_m, tile_n, stages, blocks, splits=splits, k_warpgroups=k_warpgroups, chunk=chunk)


SPLIT: dict[str, Any] = {"tile_n": 64, "multicast": 1, "blocks": 64, "whole_tiles": 0, "splits": 2}  # 32 tiles
SHARED = {**SPLIT, "k_warpgroups": 2}
CONFIG_EDGES = [
    ({}, {"tile_n": 160}, "tile_n 160; accepted: 32, 64, 96, 128, 192, 256"),
    ({"chunk": 32}, {"chunk": 16}, "chunk 16; accepted: 32, 64, 128"),
    ({"tile_n": 96, "chunk": 32}, {"tile_n": 96}, "chunk 64 of tile_n 96; accepted: a divisor"),
    ({"multicast": 1, "blocks": 16}, {"multicast": 4}, "multicast 4; accepted: 1, 2"),
    ({}, {"tile_m": 192}, "tile_m 192; accepted: 128, 256"),
    (
        {"tile_n": 64, "tile_m": 256},
        {"tile_n": 128, "tile_m": 256},
        "tile_n 128 with tile_m 256; accepted: at most 64",
    ),
    ({"stages": 2}, {"stages": 1}, "stages 1; accepted with this tile: 2 to 8"),
    (
        {"tile_n": 256, "stages": 5, "blocks": 8},
        {"tile_n": 256, "stages": 6},
        "stages 6; accepted with this tile: 2 to 5",
    ),
    (
        {"blocks": 128, "whole_tiles": 0},
        {"blocks": 130, "whole_tiles": 0},
        "blocks 130; accepted for 8 tiles of 8 k blocks: 2 to 128",
    ),
    (
        {"blocks": 2, "whole_tiles": 0},
        {"blocks": 3, "whole_tiles": 0},
        "blocks 3 with multicast 2; accepted: multiples of it",
    ),
    (
        {"blocks": 8, "whole_tiles": 2},
        {"blocks": 8, "whole_tiles": 3},
        "whole_tiles 3 of 4 workers; accepted for 8 tiles: 0 to 2",
    ),
    (
        {"blocks": 64, "whole_tiles": 0},
        {"blocks": 66, "whole_tiles": 0},
        "blocks 66 leaves some without any of 64 k blocks; use 64",
    ),
    (SPLIT, {**SPLIT, "splits": 9, "blocks": 288}, "splits 9; accepted: 1 to 8"),
    (SPLIT, {**SPLIT, "splits": 0}, "splits 0; accepted: 1 to 8"),
    (SPLIT, {**SPLIT, "splits": -1}, "splits -1; accepted: 1 to 8"),
    (
        {**SPLIT, "splits": 4, "blocks": 128},
        {**SPLIT, "splits": 5, "blocks": 160},
        "splits 5 leaves some of 8 k blocks' ranges empty; use 4",
    ),
    (SPLIT, {**SPLIT, "blocks": 32}, "blocks 32 and whole_tiles 0 with splits 2; accepted: 64 and 0"),
    (SPLIT, {**SPLIT, "multicast": 2}, "splits 2 with multicast 2; accepted: 1"),
    (
        {**SPLIT, "tile_n": 128, "blocks": 32},
        {**SPLIT, "tile_n": 192, "blocks": 32},
        "splits 2 of tile_n 192; accepted: 1",
    ),
    (
        {**SPLIT, "tile_m": 256, "blocks": 32, "stages": 3},
        {**SPLIT, "tile_n": 64, "tile_m": 256, "blocks": 32, "stages": 2},
        "stages 2; accepted with this tile: 3 to 8",
    ),
    (SHARED, {**SHARED, "k_warpgroups": 3}, "k_warpgroups 3; accepted: 1, 2"),
    (SHARED, {**SHARED, "splits": 1, "blocks": 32}, "k_warpgroups 2 without splits; accepted: 1"),
    (SHARED, {**SHARED, "tile_m": 256}, "k_warpgroups 2 of tile 256x64; accepted: 128 by 32, 64"),
    (SHARED, {**SHARED, "tile_n": 128}, "k_warpgroups 2 of tile 128x128; accepted: 128 by 32, 64"),
    (
        {**SHARED, "splits": 4, "blocks": 128},
        {**SHARED, "splits": 8, "blocks": 256},
        "k_warpgroups 2 of ranges down to 1 k blocks; accepted: 1",
    ),
    ({**SHARED, "stages": 3}, {**SHARED, "stages": 2}, "stages 2; accepted with this tile: 3 to 8"),
]


@pytest.mark.parametrize(("good", "bad", "reason"), CONFIG_EDGES, ids=lambda v: v if isinstance(v, str) else "")
def test_limits_of_configs(good: dict[str, Any], bad: dict[str, Any], reason: str) -> None:
    assert FAMILY.refusal(product(), dataclasses.replace(PLAIN, **good)) is None
    assert FAMILY.refusal(product(), dataclasses.replace(PLAIN, **bad)) == reason


def test_wide_chunks_need_registers() -> None:
    config = dataclasses.replace(PLAIN, tile_n=256, chunk=128, blocks=8)
    assert FAMILY.refusal(product(group_size=128), config) is None
    for p in (product(group_size=128, qtype="float8_e4m3fn"), product(group_size=128, scale_dtype="float32")):
        assert FAMILY.refusal(p, config) == ("chunk 128 of tile_n 256; accepted with this weight: at most 64")


def test_only_hopper() -> None:
    products.check_only_hopper(FAMILY, product())


# ---- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_candidates_are_legal_and_ordered(p: QuantizedMatmulProblem) -> None:
    products.check_candidates(FAMILY, p)


def test_the_model_prefers_full_machines() -> None:
    """448 tiles of 128x256 fill 3.4 rounds of 132 multiprocessors: the last ones are cut."""
    p = product(4096, 8192, 3584)
    assert tiles.is_cut(p, FAMILY.candidates(p, DEFAULT_CUDA)[0])


def test_few_rows_cut_k() -> None:
    """28 or 14 tiles along 3584 features: k is cut, and taller tiles, which read less of x, are tried, too."""
    p = product(64, 8192, 3584)
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    assert (found[0].tile_m, found[0].splits, found[0].k_warpgroups) == (128, 4, 2)
    assert {config.tile_m for config in found} == {128, 256}
    assert {config.k_warpgroups for config in found if config.splits > 1} == {1, 2}
    near = FAMILY.neighbours(p, found[0], DEFAULT_CUDA)
    assert {config.k_warpgroups for config in near if config.splits > 1} == {1, 2}
    assert any(tiles.is_cut(p, config) for config in near)


@pytest.mark.parametrize(("config", "us"), [(in_splits(4, 1), 10.97), (in_splits(4, 2), 10.34)], ids=str)
def test_the_model_of_splits_is_close_to_measured_times(config: Config, us: float) -> None:
    """64 rows, 3584 features and 8192 k of int4 on an H200."""
    p = product(64, 8192, 3584)
    assert FAMILY.refusal(p, config) is None
    assert FAMILY.estimate(p, config, DEFAULT_CUDA) == pytest.approx(us * 1e-6, rel=0.03)


def test_the_tensor_cores_add_up_128_k_where_they_have_one_scale() -> None:
    wide, narrow = Config(128, 256, 4, 1, chunk=64), Config(128, 64, 4, 1, chunk=64)
    for group, expected in ((32, 32), (64, 64), (128, 128), (1024, 128)):
        assert fp8.period(product(group_size=group), wide) == expected
        assert fp8.period(product(group_size=group), narrow) == min(expected, 64)
    # Half as many promotions; float16 results would show the bits that are lost.
    assert fp8.period(product(group_size=128, out_dtype="float16"), wide) == 64
    assert fp8.sums(product(), wide) == 2
    assert fp8.sums(product(group_size=128), wide) == 1
    times = [FAMILY.estimate(product(group_size=group), wide, DEFAULT_CUDA) for group in (64, 128)]
    assert times[1] < times[0]


# ---- plans ---------------------------------------------------------------------------------------------------------


def schedules(p: QuantizedMatmulProblem) -> list[Config]:
    """Whole tiles, ranges, and both."""
    found = []
    for multicast, tile_m in itertools.product((1, 2), fp8.TILES_M):
        tile = Config(tile_m, 64, 2, 0, multicast=multicast, chunk=64)
        count = math.prod(tiles.tile_counts(p, tile))
        units = count * tiles.k_blocks(p)
        wanted = {(count, 1), (1, count), (1, 0), (min(7, units), 0), (units, 0), (max(1, count // 2 - 1), 2)}
        for workers, whole in sorted(wanted):
            config = dataclasses.replace(tile, blocks=workers * multicast, whole_tiles=whole)
            found.append(products.without_idle(p, config))
        if multicast == 1:
            each = dataclasses.replace(tile, stages=4)
            found += [tiles.split_tiles(p, each, splits) for splits in (2, 3, 4, 8)]
    return [config for config in found if FAMILY.refusal(p, config) is None]


def pieces(splits: int, args: plan.Int32Struct, cluster: int, clusters: int) -> list[products.Piece]:
    """(tile, first k block, end, slot) of a cluster, or of a thread block: `piece_of` of the device code."""
    k_blocks, tiles_m, tiles_n, waves, length = args.values[5:10]
    if splits > 1:
        tile, split = divmod(cluster, splits)
        return [(tile, split * length, min((split + 1) * length, k_blocks), -1)]
    found = []
    for index in itertools.count():
        if index < waves:
            found.append((cluster + index * clusters, 0, k_blocks, -1))
            continue
        rest = tiles_m * tiles_n - waves * clusters
        first = cluster * length
        last = min(first + length, rest * k_blocks)
        tile = first // k_blocks + index - waves
        begin, end = max(first - tile * k_blocks, 0), min(last - tile * k_blocks, k_blocks)
        if begin >= end:
            return found
        slot = -1 if (begin, end) == (0, k_blocks) else 2 * cluster + (index > waves)
        found.append((waves * clusters + tile, begin, end, slot))
    raise AssertionError


@pytest.mark.parametrize("p", [product(100, 640, 700), product(200, 1008, 1300, group_size=1008)], ids=str)
def test_every_k_block_of_every_tile_is_computed_once(p: QuantizedMatmulProblem) -> None:
    assert schedules(p)
    for config in schedules(p):
        products.check_schedule(FAMILY, p, config, functools.partial(pieces, config.splits))


def test_plan_of_a_plain_problem() -> None:
    p = product()
    made = FAMILY.plan(p, PLAIN)
    assert [buffer.bytes for buffer in made.buffers] == [256 * 1024, 1024 * 512, 16 * 1024 * 2, 256 * 1024 * 2, 0]
    x_map = made.maps[0]
    assert isinstance(x_map, plan.TiledMap)
    # Pairs of e4m3; each block of a cluster loads half of a tile's rows.
    assert (x_map.dims, x_map.strides, x_map.box) == ((512, 256), (1024,), (64, 64))
    (main,) = made.launches
    assert (main.kernel, main.grid, main.block, main.programmatic) == ("quantized_fp8", (16, 1, 1), (384, 1, 1), False)
    assert main.shared_bytes < FAMILY.shared_bytes(p, PLAIN) <= tiles.SHARED_BYTES
    made.words()


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_buffers_are_those_of_the_custom_call(p: QuantizedMatmulProblem) -> None:
    for config in FAMILY.candidates(p, DEFAULT_CUDA)[::6]:
        made = FAMILY.plan(p, config)
        products.check_buffers(p, made)
        assert made.buffers[-1].bytes == FAMILY.workspace_bytes(p, config)
        # TMA's limits: strides of 16 bytes, boxes within 256; whole groups of 8 rows of the swizzle.
        x_map = made.maps[0]
        assert isinstance(x_map, plan.TiledMap)
        assert x_map.strides[0] % 16 == 0
        assert max(x_map.box) <= 256
        assert x_map.box[1] % 8 == 0
        for launch in made.launches:
            assert launch.shared_bytes <= tiles.SHARED_BYTES


# ---- the order of k ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", fp8.QTYPES)
def test_two_lanes_words_hold_a_lanes_fragment(qtype: str) -> None:
    """`Words` of the device code: which bytes of which words are row g (+ 8), k 4t to 4t + 3 of each 16."""
    q, _ = formats.every_code(qtype, 128, 64, 64)
    values = np.asarray(q.qvalue.astype(jnp.float32), np.float64)
    memory = np.asarray(prepack(q).words)[0].reshape(-1).view(np.uint8)
    eight = qtype == "float8_e4m3fn"
    tile_bytes, table = 64 * 64 // (1 if eight else 2), formats.table(qtype)
    codes = np.roll(table, 8) if qtype == "int4" else table  # int4's are q + 8
    for warp, lane, step in itertools.product(range(4), range(32), range(4)):
        g, t = divmod(lane, 4)
        start = warp * (tile_bytes // 4) + (4 * g + t % 2 * 2) * 16 + step // 2 * tile_bytes + eight * step % 2 * 512
        words = memory[start : start + 32].reshape(2, 4, 4)
        for register in range(4):
            word = register if eight else step % 2 * 2 + register // 2
            picked = words[:, word, [0, 2] if t < 2 else [1, 3]].reshape(-1)
            if not eight:
                picked = picked >> 4 if register % 2 else picked & 15
            k = step * 32 + register // 2 * 16 + 4 * t
            np.testing.assert_array_equal(codes[picked], values[k : k + 4, warp * 16 + g + register % 2 * 8])
