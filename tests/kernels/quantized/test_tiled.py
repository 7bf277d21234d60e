"""The WGMMA family of quantized products: what is legal, which configs, plans. Needs no GPU."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import tiled, tiles
from jax_splitk.kernels.quantized.schedule import Schedule
from jax_splitk.kernels.quantized.tiled import FAMILY, Config
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import products

SHARED_PER_SM = 228 * 1024
RESERVED_SHARED = 1024  # of each block, by CUDA


def product(rows: int = 64, k: int = 1024, features: int = 1024, **changes: Any) -> QuantizedMatmulProblem:
    return products.valid_problem(rows, k, features, **changes)


PLAIN = Config(128, 64, 4, 8, 1, scaling="weight")
SIZES = (
    *((1, 64, 1), (20, 1, 40), (17, 8192, 3584), (64, 8192, 28672), (100, 333, 77), (256, 8192, 8192)),
    (4096, 8192, 3584),
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"qtype": "uint4", "zero_dtype": "bfloat16"},
    {"qtype": "nf4", "x_dtype": "float16", "out_dtype": "float16", "scale_dtype": "float16"},
    {"qtype": "int8", "out_dtype": "float32", "scale_dtype": "float32"},
    {"qtype": "float8_e4m3fn", "group_size": 32},
    {"qtype": "int8", "group_size": 0},
    {"group_size": 128, "scale_dtype": "float32"},
    {"x_dtype": "float8_e4m3fn"},
)
PROBLEMS = products.problems(SIZES, KINDS)


# ---- what is legal -------------------------------------------------------------------------------------------------

LARGEST = 2**31 - 1 - 256
EDGES = [
    (
        product(x_dtype="float8_e4m3fn"),
        dataclasses.replace(product(), x_dtype="float32"),
        "x of dtype float32; accepted: bfloat16, float16, float8_e4m3fn",
    ),
    (
        product(2**30 - 512, 256, 1, x_dtype="float8_e4m3fn"),
        product(2**30 - 256, 256, 1, x_dtype="float8_e4m3fn"),
        f"{2**31} blocks of 128 k of x with dtype float8_e4m3fn; accepted: at most {2**31 - 1}",
    ),
    (product(rows=1), product(rows=0), f"0 rows of x; accepted: 1 to {LARGEST}"),
    (
        product(1, LARGEST // 64 * 64, 1),
        product(1, (LARGEST // 64 + 1) * 64, 1),
        f"{(LARGEST // 64 + 1) * 64} k; accepted: 1 to {LARGEST}",
    ),
    (
        product(1, 64, LARGEST),
        product(1, 64, LARGEST + 1),
        f"{LARGEST + 1} features; accepted: 1 to {LARGEST}",
    ),
    (
        product(128, 2**20, 2**24 - 128),
        product(128, 2**20, 2**24),
        f"{2**30} blocks of 128 features, 128 rows and 128 k; accepted: at most {2**30 - 1}",
    ),
    (
        product(2**31 // 2 - 1024, 129, 1, group_size=129),
        product(2**31 // 2 - 128, 129, 1, group_size=129),
        f"{2**31 + 256} blocks of 128 k of x with k=129 (no multiple of 8); accepted: at most {2**31 - 1}",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), EDGES, ids=lambda v: v if isinstance(v, str) else "")
def test_limits_of_problems(good: QuantizedMatmulProblem, bad: QuantizedMatmulProblem, reason: str) -> None:
    assert FAMILY.refusal(good) is None
    assert FAMILY.refusal(bad) == reason


WEIGHT_DTYPES = "accepted: bfloat16 for x, result and scale"
SHARED: dict[str, Any] = {"tile_m": 64, "stages": 10, "blocks": 32, "whole_tiles": 0, "splits": 2, "k_warpgroups": 2}
CONFIG_EDGES = [
    ({}, {"tile_m": 192}, "tile_m 192; accepted: 64, 128, 256"),
    ({}, {"tile_n": 48}, "tile_n 48; accepted: 16, 32, 64, 96, 128, 192, 256"),
    ({}, {"scaling": "row"}, "scaling 'row'; accepted: 'weight', 'sum', 'channel'"),
    ({"scaling": "sum"}, {"scaling": "channel"}, "scaling 'channel' with groups of 64; accepted: one group of k=1024"),
    (
        {"tile_m": 256, "blocks": 4, "stages": 2},
        {"tile_m": 256, "tile_n": 96},
        "tile_n 96 with tile_m 256 and scaling 'weight'; at most 64",
    ),
    (
        {"scaling": "sum", "tile_n": 128},
        {"scaling": "sum", "tile_n": 192},
        "tile_n 192 with tile_m 128 and scaling 'sum'; at most 128",
    ),
    ({"stages": 2}, {"stages": 1}, "stages 1; accepted with this tile: 2 to 8"),
    (SHARED, {**SHARED, "stages": 11}, "stages 11; accepted with this tile: 3 to 10"),
    ({**SHARED, "stages": 3}, {**SHARED, "stages": 2}, "stages 2; accepted with this tile: 3 to 10"),
    (
        {**SHARED, "tile_m": 128, "stages": 7, "blocks": 16},
        {**SHARED, "tile_m": 128, "stages": 8, "blocks": 16},
        "stages 8; accepted with this tile: 3 to 7",
    ),
    (SHARED, {**SHARED, "k_warpgroups": 3}, "k_warpgroups 3; accepted: 1, 2"),
    (SHARED, {**SHARED, "splits": 1, "blocks": 16}, "k_warpgroups 2 without splits; accepted: 1"),
    (SHARED, {**SHARED, "tile_m": 256}, "k_warpgroups 2 of tile 256x64; accepted: 64, 128 by 32, 64"),
    (SHARED, {**SHARED, "tile_n": 96}, "k_warpgroups 2 of tile 64x96; accepted: 64, 128 by 32, 64"),
    (
        {**SHARED, "splits": 4, "blocks": 64},
        {**SHARED, "splits": 8, "blocks": 128},
        "k_warpgroups 2 of ranges down to 1 k blocks; accepted: 1",
    ),
    (
        {**SHARED, "tile_m": 128, "stages": 7, "blocks": 16},
        {**SHARED, "tile_m": 128, "stages": 7, "blocks": 16, "scaling": "sum"},
        "tile_n 64 with tile_m 128, 2 k_warpgroups and scaling 'sum'; at most 16",
    ),
    ({"stages": 8}, {"stages": 9}, "stages 9; accepted with this tile: 2 to 8"),
    ({"tile_n": 256, "stages": 3}, {"tile_n": 256, "stages": 4}, "stages 4; accepted with this tile: 2 to 3"),
    (
        {"blocks": 64, "whole_tiles": 0},
        {"blocks": 65, "whole_tiles": 0},
        "blocks 65; accepted for 8 tiles of 8 k blocks: 1 to 64",
    ),
    (
        {"blocks": 1, "whole_tiles": 0},
        {"blocks": 0, "whole_tiles": 0},
        "blocks 0; accepted for 8 tiles of 8 k blocks: 1 to 64",
    ),
    (
        {"blocks": 4, "whole_tiles": 2},
        {"blocks": 4, "whole_tiles": 3},
        "whole_tiles 3 of 4 workers; accepted for 8 tiles: 0 to 2",
    ),
    (
        {"blocks": 4, "whole_tiles": 0},
        {"blocks": 4, "whole_tiles": -1},
        "whole_tiles -1 of 4 workers; accepted for 8 tiles: 0 to 2",
    ),
    (
        {"blocks": 32, "whole_tiles": 0},
        {"blocks": 33, "whole_tiles": 0},
        "blocks 33 leaves some without any of 64 k blocks; use 32",
    ),
    (
        {"blocks": 64, "whole_tiles": 0, "splits": 8},
        {"blocks": 72, "whole_tiles": 0, "splits": 9},
        "splits 9; accepted: 1 to 8",
    ),
    ({"blocks": 16, "whole_tiles": 0, "splits": 2}, {"splits": 0}, "splits 0; accepted: 1 to 8"),
    (
        {"blocks": 32, "whole_tiles": 0, "splits": 4},
        {"blocks": 40, "whole_tiles": 0, "splits": 5},
        "splits 5 leaves some of 8 k blocks' ranges empty; use 4",
    ),
    (
        {"blocks": 24, "whole_tiles": 0, "splits": 3},
        {"blocks": 8, "whole_tiles": 1, "splits": 3},
        "blocks 8 and whole_tiles 1 with splits 3; accepted: 24 and 0",
    ),
    (
        {"tile_n": 16, "stages": 4, "blocks": 256, "whole_tiles": 0, "splits": 8},
        {"tile_n": 16, "stages": 2, "blocks": 256, "whole_tiles": 0, "splits": 8},
        "stages 2; accepted with this tile: 3 to 8",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), CONFIG_EDGES, ids=lambda v: v if isinstance(v, str) else "")
def test_limits_of_configs(good: dict[str, Any], bad: dict[str, Any], reason: str) -> None:
    assert FAMILY.refusal(product(), dataclasses.replace(PLAIN, **good)) is None
    assert FAMILY.refusal(product(), dataclasses.replace(PLAIN, **bad)) == reason


@pytest.mark.parametrize(
    ("changes", "scaling", "reason"),
    [
        ({}, "weight", None),
        ({"qtype": "uint4", "zero_dtype": "bfloat16"}, "weight", "with zero points of dtype bfloat16; accepted: none"),
        ({"scale_dtype": "float32"}, "weight", f"with dtypes bfloat16, bfloat16, float32; {WEIGHT_DTYPES}"),
        ({"out_dtype": "float32"}, "weight", f"with dtypes bfloat16, float32, bfloat16; {WEIGHT_DTYPES}"),
        ({"x_dtype": "float16"}, "weight", f"with dtypes float16, bfloat16, bfloat16; {WEIGHT_DTYPES}"),
        (
            {"x_dtype": "float8_e4m3fn"},
            "weight",
            f"with dtypes float8_e4m3fn, bfloat16, bfloat16; {WEIGHT_DTYPES}",
        ),
        ({"x_dtype": "float8_e4m3fn", "group_size": 1024}, "channel", None),
        ({"group_size": 1024}, "weight", "with one group; accepted: 'sum', 'channel'"),
        ({"group_size": 1024}, "channel", None),
        ({"group_size": 1024, "x_dtype": "float16", "out_dtype": "float16"}, "channel", None),
        ({"group_size": 1024, "out_dtype": "float32"}, "channel", "with a float32 result; accepted: bfloat16, float16"),
        (
            {"group_size": 1024, "qtype": "int8", "zero_dtype": "float32"},
            "channel",
            "with zero points of dtype float32; accepted: none",
        ),
        ({"group_size": 1024, "qtype": "int8", "zero_dtype": "float32", "out_dtype": "float32"}, "sum", None),
    ],
)
def test_where_scales_may_go(changes: dict[str, Any], scaling: str, reason: str | None) -> None:
    expected = None if reason is None else f"scaling {scaling!r} {reason}"
    assert FAMILY.refusal(product(**changes), dataclasses.replace(PLAIN, scaling=scaling)) == expected


def test_a_float32_result_and_zero_points_leave_room_for_two_sets_of_sums() -> None:
    p = product(qtype="int8", group_size=32, zero_dtype="float32", scale_dtype="float32")
    assert FAMILY.refusal(p, dataclasses.replace(PLAIN, scaling="sum", tile_n=64)) is None
    wide = dataclasses.replace(PLAIN, scaling="sum", tile_n=128)
    assert FAMILY.refusal(p, wide) == "tile_n 128 with tile_m 128 and scaling 'sum'; at most 64"
    assert FAMILY.refusal(dataclasses.replace(p, group_size=64), wide) is None


def test_only_hopper() -> None:
    products.check_only_hopper(FAMILY, product())


# ---- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_candidates_are_legal_and_ordered(p: QuantizedMatmulProblem) -> None:
    products.check_candidates(FAMILY, p)


@pytest.mark.parametrize("p", PROBLEMS[:: len(PROBLEMS) // 12], ids=str)
def test_every_scaling_that_is_legal_has_a_config(p: QuantizedMatmulProblem) -> None:
    assert "sum" in tiled.scalings(p)
    for scaling in tiled.scalings(p):
        config = Config(128, 32, 2, 0, scaling=scaling)
        assert FAMILY.refusal(p, tiles.whole_tiles(p, config)) is None


def test_the_model_prefers_full_machines() -> None:
    """64 tiles of 128 features leave half of the machine idle unless they are cut."""
    p = product(64, 8192, 8192)
    best = FAMILY.candidates(p, DEFAULT_CUDA)[0]
    assert best.splits > 1 or tiles.is_cut(p, best)


def in_splits(
    p: QuantizedMatmulProblem, tile: tuple[int, int], stages: int, splits: int, k_warpgroups: int = 1
) -> Config:
    config = Config(*tile, stages, 0, k_warpgroups=k_warpgroups, scaling=tiled.scalings(p)[0])
    return tiles.split_tiles(p, config, splits)


@pytest.mark.parametrize(
    ("p", "tile", "stages", "splits", "together"),
    [
        (product(64, 8192, 3584), (64, 64), 10, 2, 1),
        (product(64, 8192, 3584), (128, 64), 7, 4, 1),
        (product(64, 8192, 8192), (128, 64), 7, 2, 1),
        (product(32, 8192, 3584), (64, 32), 7, 4, 2),
        (product(64, 8192, 3584, qtype="int8"), (64, 64), 8, 2, 1),
    ],
    ids=str,
)
def test_two_k_warpgroups_are_tried_beside_one(
    p: QuantizedMatmulProblem, tile: tuple[int, int], stages: int, splits: int, together: int
) -> None:
    config = in_splits(p, tile, stages, splits, 2)
    assert FAMILY.blocks_per_sm(p, config) == together
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    assert config in found
    assert any((c.tile_m, c.tile_n, c.k_warpgroups) == (*tile, 1) and c.splits > 1 for c in found)
    threads = 128 * (2 * tile[0] // 64 + 1)
    assert FAMILY.plan(p, config).launches[0].block == (threads, 1, 1)


def test_the_model_ranks_what_was_measured() -> None:
    """On an H200, microseconds: the notes' figures within a tenth, splits before their absence."""
    measured = [
        (64, 3584, (128, 64), 8, 4, 1, 11.0),
        (64, 3584, (64, 64), 5, 4, 1, 11.06),
        (64, 3584, (64, 64), 10, 2, 2, 10.93),
        (64, 3584, (128, 64), 7, 4, 2, 10.89),
        (64, 8192, (128, 64), 7, 2, 2, 17.2),
        (32, 3584, (64, 32), 7, 4, 2, 9.01),
    ]
    for rows, features, tile, stages, splits, k_warpgroups, us in measured:
        p = product(rows, 8192, features)
        config = in_splits(p, tile, stages, splits, k_warpgroups)
        assert FAMILY.estimate(p, config, DEFAULT_CUDA) == pytest.approx(us * 1e-6, rel=0.1), config
    for features in (3584, 8192):
        assert FAMILY.candidates(product(64, 8192, features), DEFAULT_CUDA)[0].k_warpgroups == 2


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_every_legal_config_fits_into_shared_memory(p: QuantizedMatmulProblem) -> None:
    for tile, stages, k_warpgroups in itertools.product(((64, 32), (64, 64), (128, 64)), range(2, 11), (1, 2)):
        config = in_splits(p, tile, stages, 2, k_warpgroups)
        if FAMILY.refusal(p, config) is None:
            together = FAMILY.blocks_per_sm(p, config)
            assert together * (FAMILY.shared_bytes(p, config) + RESERVED_SHARED) <= SHARED_PER_SM


def test_device_code_depends_on_splits_and_on_few_tiles_along_the_rows() -> None:
    def defines(rows: int, tile_n: int, splits: int) -> dict[str, int | str]:
        p = product(rows, 1024, 1024)
        return dict(FAMILY.source(p, in_splits(p, (128, tile_n), 4, splits)).defines)

    found = [defines(*each) for each in ((64, 64, 2), (100, 64, 3), (256, 64, 1), (257, 64, 1), (4096, 128, 1))]
    assert [(each["SPLITS"], each["N_TILES"]) for each in found] == [(2, 1), (3, 2), (1, 4), (1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("k", "splits", "expected"), [(1024, 1, (0, 0)), (2048, 1, (0, 0)), (1024, 4, (2, 2)), (1024, 3, (3, 2))]
)
def test_device_code_knows_the_ranges_of_splits_only(k: int, splits: int, expected: tuple[int, int]) -> None:
    p = product(40, k, 200)
    macros = dict(FAMILY.source(p, in_splits(p, (128, 64), 4, splits)).defines)
    assert (macros["RANGE"], macros["LAST_RANGE"]) == expected


def test_device_code_leaves_out_what_the_sizes_do_not_need() -> None:
    def defines(k: int, features: int, **changes: Any) -> tuple[int | str, ...]:
        p = product(40, k, features, **changes)
        macros = dict(FAMILY.source(p, in_splits(p, (128, 64), 4, 1)).defines)
        return tuple(macros[name] for name in ("EIGHTS", "WHOLE", "PREPARED"))

    assert defines(1024, 200) == (1, 1, 0)
    assert defines(1024, 202) == (0, 1, 0)
    assert defines(1088, 200) == (1, 0, 0)
    assert defines(1020, 200, group_size=1020) == (1, 1, 1)
    assert defines(1024, 200, x_dtype="float8_e4m3fn") == (1, 1, 1)
    assert defines(1024, 200, qtype="uint4", zero_dtype="bfloat16") == (1, 1, 1)


# ---- plans ---------------------------------------------------------------------------------------------------------


def schedules(p: QuantizedMatmulProblem) -> list[Config]:
    """Whole tiles, ranges, and both."""
    tile = Config(128, 32, 2, 0, scaling=tiled.scalings(p)[0])
    count = math.prod(tiles.tile_counts(p, tile))
    wanted = {(count, 1), (1, count), (1, 0), (7, 0), (count * tiles.k_blocks(p), 0), (max(1, count // 2 - 1), 2)}
    found = [dataclasses.replace(tile, blocks=blocks, whole_tiles=whole) for blocks, whole in sorted(wanted)]
    found = [products.without_idle(p, config) for config in found]
    found += [tiles.split_tiles(p, tile, splits) for splits in (2, 3, 4, 8)]
    return [config for config in found if FAMILY.refusal(p, config) is None]


def pieces(splits: int, args: plan.Int32Struct, block: int, blocks: int) -> list[products.Piece]:
    """(tile, first k block, end, slot) of a thread block: `Work` of the device code."""
    k_blocks, tiles_m, tiles_n, waves, length = args.values[5:10]
    if splits > 1:
        tile, split = divmod(block, splits)
        return [(tile, split * length, min((split + 1) * length, k_blocks), -1)]
    found = [(block + wave * blocks, 0, k_blocks, -1) for wave in range(waves)]
    rest = tiles_m * tiles_n - waves * blocks
    first, unit, end = block * length, block * length, min((block + 1) * length, rest * k_blocks)
    while unit < end:
        tile, begin = divmod(unit, k_blocks)
        stop = min(k_blocks, begin + end - unit)
        slot = -1 if (begin, stop) == (0, k_blocks) else 2 * block + (unit != first)
        found.append((waves * blocks + tile, begin, stop, slot))
        unit += stop - begin
    return found


@pytest.mark.parametrize("p", [product(40, 640, 700), product(200, 1000, 1300, group_size=1000)], ids=str)
def test_every_k_block_of_every_tile_is_computed_once(p: QuantizedMatmulProblem) -> None:
    assert schedules(p)
    for config in schedules(p):
        products.check_schedule(FAMILY, p, config, functools.partial(pieces, config.splits))


def test_plan_of_a_plain_problem() -> None:
    p = product()
    made = FAMILY.plan(p, PLAIN)
    assert [buffer.bytes for buffer in made.buffers] == [64 * 1024 * 2, 1024 * 512, 16 * 1024 * 2, 64 * 1024 * 2, 0]
    assert made.maps[0].dims == (1024, 64)
    assert made.maps[0].strides == (2048,)
    (main,) = made.launches
    assert (main.kernel, main.grid, main.block, main.programmatic) == ("quantized_tiled", (8, 1, 1), (384, 1, 1), False)
    assert main.shared_bytes < FAMILY.shared_bytes(p, PLAIN) <= tiles.SHARED_BYTES


@pytest.mark.parametrize("p", PROBLEMS[::5], ids=str)
def test_what_a_cluster_sends_to_a_block_fits_into_the_ring(p: QuantizedMatmulProblem) -> None:
    for tile, stages, splits in itertools.product(((64, 16), (128, 32), (128, 64), (256, 16)), (2, 3, 4), (2, 3, 5, 8)):
        config = in_splits(p, tile, stages, splits)
        if FAMILY.refusal(p, config) is None:
            chunks = config.tile_m // 64 * config.tile_n // 16
            slots = max(len(range(rank, chunks, splits)) for rank in range(splits))
            assert slots * splits * 4096 <= stages * (config.tile_n * 256 + config.tile_m * 16 * p.bits)


@pytest.mark.parametrize(("consumers", "tile_n", "parts"), [(1, 64, 2), (1, 32, 2), (2, 32, 2), (2, 64, 2), (2, 64, 1)])
@pytest.mark.parametrize("splits", range(2, 9))
def test_sums_of_a_cluster_meet_at_their_owner(consumers: int, tile_n: int, parts: int, splits: int) -> None:
    """`add_parts` and `store_together` of the device code: who has which chunk, where it goes, who reads it there."""
    each = tile_n // 16 // parts
    landed: dict[tuple[int, int], tuple[int, int, int]] = {}  # (owner, place) -> (warpgroup, chunk, sender)
    for rank, warpgroup, part in itertools.product(range(splits), range(consumers), range(parts)):
        number = (warpgroup * parts + part) * each
        slot, owner = divmod(number, splits)
        place = slot * splits + rank
        for chunk in range(part * each, (part + 1) * each):
            assert landed.setdefault((owner, place), (warpgroup, chunk, rank)) == (warpgroup, chunk, rank)
            owner += 1
            if owner == splits:
                owner, place = 0, place + splits
    chunks = consumers * tile_n // 16
    assert len(landed) == chunks * splits
    stored = set()
    for rank, warpgroup in itertools.product(range(splits), range(consumers * parts)):
        for slot in range(warpgroup, chunks, consumers * parts):
            number = slot * splits + rank
            if number < chunks:
                of, chunk = divmod(number, tile_n // 16)
                assert [landed[rank, slot * splits + sender] for sender in range(splits)] == [
                    (of, chunk, sender) for sender in range(splits)
                ]
                stored.add((of, chunk))
    assert len(stored) == chunks


@pytest.mark.parametrize(("stages", "parts"), [(10, 2), (7, 2), (4, 2), (3, 2), (3, 1), (2, 1)])
def test_parts_take_turns_in_the_ring(stages: int, parts: int) -> None:
    """`Reader::advance` of the device code: block after block of the producer's."""
    for part in range(parts):
        stage, phase = part, 0
        for block in range(part, 50, parts):
            assert (stage, phase) == (block % stages, block // stages % 2)
            stage += parts
            if stage >= stages:
                stage, phase = stage - stages, phase ^ 1


def test_the_sums_of_a_cluster_land_behind_the_last_stage() -> None:
    """The ring after each block's last k block: what `offer_room` and `landing` of the device code take it for."""
    for k_blocks, splits, stages in itertools.product(range(1, 40), range(2, 9), (2, 3, 7)):
        given = Schedule(3, k_blocks, 3 * splits, 0)
        if given.refusal(splits, 1, 1) is None:
            first, last = given.range_blocks, given.last_range(splits)
            for rank, blocks in ((0, first), (splits - 2, first), (splits - 1, last)):
                begin = rank * given.range_blocks
                stage, phase = 0, 0
                for _ in range(begin, min(begin + given.range_blocks, k_blocks)):
                    stage += 1
                    if stage == stages:
                        stage, phase = 0, phase ^ 1
                assert (blocks % stages, blocks // stages % 2) == (stage, phase)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_smallest_ring_does_not_stop(parts: int) -> None:
    """A warpgroup waits for its next block before it gives back the stage of the one it has, as `consume` does."""
    blocks = 20

    def finished(stages: int) -> bool:
        filled, having, released = 0, [-1] * parts, set[int]()
        while True:
            before = (filled, tuple(having), len(released))
            if filled < blocks and (filled < stages or filled - stages in released):
                filled += 1
            for part in range(parts):
                wanted = part if having[part] < 0 else having[part] + parts
                if wanted < min(filled, blocks):
                    released |= {having[part]}
                    having[part] = wanted
                elif wanted >= blocks:
                    released |= {having[part]}
            if (filled, tuple(having), len(released)) == before:
                return released >= set(range(blocks))

    least = tiles.MIN_STAGES[parts]
    assert finished(least)
    assert not finished(least - 1)


def test_plan_with_everything() -> None:
    """x in rows that TMA cannot load, zero points, and tiles that are cut."""
    p = product(70, 333, 200, qtype="uint4", group_size=333, zero_dtype="float32", scale_dtype="float32")
    config = Config(128, 32, 2, 4, 1)
    assert FAMILY.refusal(p, config) is None
    made = FAMILY.plan(p, config)
    assert [launch.kernel for launch in made.launches] == ["prepare_x", "quantized_tiled", "reduce_ranges"]
    assert [launch.programmatic for launch in made.launches] == [False, True, True]
    x_map, workspace = made.maps[0], len(made.buffers) - 1
    assert (x_map.buffer, x_map.dims, x_map.strides) == (workspace, (333, 70), (336 * 2,))
    copy, sums, slots = -(-70 * 336 * 2 // 256) * 256, 3 * 96 * 4, 2 * 4 * 128 * 32 * 4
    assert made.workspace_bytes == copy + -(-sums // 256) * 256 + slots
    prepare, main, _ = made.launches
    assert prepare.grid[0] * 4 >= 96 * 3
    offsets = [param.offset for param in main.params if isinstance(param, plan.Pointer) and param.buffer == workspace]
    assert offsets == [copy, made.workspace_bytes - slots]
    made.words()


def test_plan_of_an_activation_of_8_bits() -> None:
    """It is copied to fp16."""
    p = product(x_dtype="float8_e4m3fn")
    made = FAMILY.plan(p, dataclasses.replace(PLAIN, scaling="sum"))
    assert [launch.kernel for launch in made.launches] == ["prepare_x", "quantized_tiled"]
    assert [buffer.bytes for buffer in made.buffers[:1]] == [64 * 1024]
    assert made.workspace_bytes == 64 * 1024 * 2
    x_map = made.maps[0]
    assert (x_map.buffer, x_map.dtype, x_map.strides) == (len(made.buffers) - 1, "float16", (2048,))
    assert {("HALF", 1), ("X_E4M3", 1)} <= set(made.source.defines)


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_buffers_are_those_of_the_custom_call(p: QuantizedMatmulProblem) -> None:
    config = FAMILY.candidates(p, DEFAULT_CUDA)[0]
    made = FAMILY.plan(p, config)
    products.check_buffers(p, made)
    assert made.buffers[-1].bytes == FAMILY.workspace_bytes(p, config)
    # TMA's limits: strides of 16 bytes, boxes within 256.
    x_map = made.maps[0]
    assert isinstance(x_map, plan.TiledMap)
    assert x_map.strides[0] % 16 == 0
    assert max(x_map.box) <= 256
    for launch in made.launches:
        assert launch.shared_bytes <= tiles.SHARED_BYTES


# ---- scales that are folded into the decoding ------------------------------------------------------------------------

FOLDED = {"int4": (8, 0xBE00, ((0, 0x7F00), (4, 0x7D00))), "int8": (128, 0xC000, ((0, 0x7F00),))}


@pytest.mark.parametrize("qtype", FOLDED)
def test_folded_scales_round_once(qtype: str) -> None:
    """Every code times every scale from 2^-123 to below 2: `fold` and `dequantize_scaled` of the device code."""
    bias, minus_bits, fields = FOLDED[qtype]

    def value(bits: int) -> float:
        return float(np.array([bits], np.uint16).view(jnp.bfloat16)[0])

    def rounded(exact: np.ndarray) -> np.ndarray:
        single = exact.astype(np.float32)
        np.testing.assert_array_equal(single, exact)
        return single.astype(jnp.bfloat16).astype(np.float64)

    bits = np.arange(0x0200, 0x4000, dtype=np.uint16)  # 2^-123 to below 2
    scale = np.concatenate([bits, bits | 0x8000]).astype(np.uint16).view(jnp.bfloat16).astype(np.float64)
    minus = scale * value(minus_bits)
    np.testing.assert_array_equal(rounded(minus), minus)
    for shift, factor_bits in fields:
        factor = scale * value(factor_bits)
        np.testing.assert_array_equal(rounded(factor), factor)
        for code in range(2 * bias):
            fused = rounded((code << shift) * 2.0**-133 * factor + minus)
            np.testing.assert_array_equal(fused, rounded((code - bias) / 64 * scale))
