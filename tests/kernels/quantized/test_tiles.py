"""How quantized_fp8 and quantized_tiled, whose thread blocks compute tiles, divide their work."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.quantized import fp8, tiled, tiles
from jax_splitk.kernels.quantized.schedule import Schedule
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from tests.products import E4M3, valid_problem, without_idle
from tests.structs import arguments

Piece = tuple[int, int, int, int]  # a tile, its first k block, end, slot


def schedules(family: Any, p: QuantizedMatmulProblem) -> list[Any]:
    """Whole tiles, ranges, both, and splits."""
    if family is fp8.FAMILY:
        shapes = itertools.product(fp8.TILES_M, (1, 2))
        kinds = [fp8.Config(m, 64, 2, 0, multicast=multicast) for m, multicast in shapes]
    else:
        kinds = [tiled.Config(128, 32, 2, 0)]
    found = []
    for tile in kinds:
        count = math.prod(tiles.tile_counts(p, tile))
        units = count * tiles.k_blocks(p)
        wanted = {(count, 1), (1, count), (1, 0), (min(7, units), 0), (units, 0), (max(1, count // 2 - 1), 2)}
        for workers, whole in sorted(wanted):
            config = dataclasses.replace(tile, blocks=workers * tile.worker_blocks, whole_tiles=whole)
            found.append(without_idle(p, config))
        each = dataclasses.replace(tile, stages=4)
        found += [tiles.split_tiles(p, each, splits) for splits in (2, 3, 4, 8)]
    return [config for config in found if family.refusal(p, config) is None]


def pieces(g: dict[str, int], splits: int, worker: int, workers: int) -> list[Piece]:
    """The pieces of work of a cluster or a thread block, as `piece_of` of the device code computes them."""
    length, k_blocks = g["range_blocks"], g["k_blocks"]
    if splits > 1:
        tile, split = divmod(worker, splits)
        return [(tile, split * length, min((split + 1) * length, k_blocks), -1)]
    found = [(worker + wave * workers, 0, k_blocks, -1) for wave in range(g["whole_tiles"])]
    first_tile = g["whole_tiles"] * workers
    rest = g["tiles_m"] * g["tiles_n"] - first_tile
    first, unit, end = worker * length, worker * length, min((worker + 1) * length, rest * k_blocks)
    while unit < end:
        tile, begin = divmod(unit, k_blocks)
        stop = min(k_blocks, begin + end - unit)
        slot = -1 if (begin, stop) == (0, k_blocks) else 2 * worker + (unit != first)
        found.append((first_tile + tile, begin, stop, slot))
        unit += stop - begin
    return found


@pytest.mark.parametrize(
    ("family", "p"),
    [
        (fp8.FAMILY, valid_problem(100, 640, 700, x_dtype=E4M3)),
        (fp8.FAMILY, valid_problem(200, 1008, 1300, group_size=1008, x_dtype=E4M3)),
        (tiled.FAMILY, valid_problem(40, 640, 700)),
        (tiled.FAMILY, valid_problem(200, 1000, 1300, group_size=1000)),
    ],
    ids=str,
)
def test_every_k_block_of_every_tile_is_computed_once(family: Any, p: QuantizedMatmulProblem) -> None:
    """Also, the second kernel adds the parts of cut tiles."""
    assert schedules(family, p)
    for config in schedules(family, p):
        given, made = tiles.schedule(p, config), family.plan(p, config)
        launches = {launch.kernel: launch for launch in made.launches}
        name, reduce = family.kernel_name(p), family.kernel_name(p, "_reduce")
        main = launches[name]
        g = arguments(made, launch=list(launches).index(name))
        done = np.zeros((given.tiles, given.k_blocks), int)
        slots: dict[int, list[int]] = {}
        for worker in range(given.workers):
            for tile, begin, end, slot in pieces(g, config.splits, worker, given.workers):
                done[tile, begin:end] += 1
                if slot >= 0:
                    slots.setdefault(tile, []).append(slot)
        assert (done == 1).all(), config
        assert bool(slots) == (reduce in launches) == tiles.is_cut(p, config)
        size = config.worker_blocks * config.splits
        assert (main.grid[0], main.cluster) == (config.blocks, (size, 1, 1))
        assert main.grid[0] % size == 0
        flat = list(itertools.chain(*slots.values()))
        assert len(set(flat)) == len(flat)
        slot_bytes = config.worker_blocks * tiles.tile_bytes(config)
        assert all((slot + 1) * slot_bytes <= family.workspace_bytes(p, config) for slot in flat)
        if not slots:
            continue
        # The parts that the second kernel adds, in the order of the ranges.
        before, length = config.whole_tiles * given.workers, g["range_blocks"]
        assert launches[reduce].grid[0] // (given.tiles - before) * tiles.CHUNK_BYTES == slot_bytes
        for tile in range(given.tiles - before):
            first_unit = tile * given.k_blocks
            first, last = first_unit // length, (first_unit + given.k_blocks - 1) // length
            added = [2 * r + (r * length < first_unit) for r in range(first, last + 1)] if first < last else []
            assert added == slots.get(before + tile, [])


def test_the_sums_of_a_cluster_land_behind_the_last_stage() -> None:
    """The sums arrive behind each block's last k block, where the device code expects them."""
    for k_blocks, splits, stages in itertools.product(range(1, 40), range(2, 9), (2, 3, 7)):
        given = Schedule(3, k_blocks, 3 * splits, 0)
        if given.refusal(splits, 1, 1) is None:
            first, last = given.range_blocks, given.last_range(splits)
            for rank, blocks in ((0, first), (splits - 2, first), (splits - 1, last)):
                begin = rank * given.range_blocks
                count = min(begin + given.range_blocks, k_blocks) - begin
                assert (blocks % stages, blocks // stages % 2) == (count % stages, count // stages % 2)


def test_what_a_cluster_sends_to_a_block_fits_into_the_stages() -> None:
    shapes = itertools.product(((64, 16), (128, 32), (128, 64), (256, 16)), (2, 3, 4), (2, 3, 5, 8))
    for p, (tile, stages, splits) in itertools.product(
        (valid_problem(64, 8192, 3584, qtype=qtype) for qtype in ("int4", "int8")), shapes
    ):
        config = tiles.split_tiles(p, tiled.Config(*tile, stages, 0), splits)
        if tiled.FAMILY.refusal(p, config) is None:
            chunks = config.tile_m // 64 * config.tile_n // 16
            slots = max(len(range(rank, chunks, splits)) for rank in range(splits))
            assert slots * splits * 4096 <= stages * (config.tile_n * 256 + config.tile_m * 16 * p.bits)


@pytest.mark.parametrize("k_warpgroups", [1, 2])
def test_the_fewest_stages_do_not_stop(k_warpgroups: int) -> None:
    """As in `consume`, a warpgroup waits for its next block before it gives back the stage of its current one."""
    blocks = 20

    def finished(stages: int) -> bool:
        filled, having, released = 0, [-1] * k_warpgroups, set[int]()
        while True:
            before = (filled, tuple(having), len(released))
            if filled < blocks and (filled < stages or filled - stages in released):
                filled += 1
            for part in range(k_warpgroups):
                wanted = part if having[part] < 0 else having[part] + k_warpgroups
                if wanted < min(filled, blocks):
                    released |= {having[part]}
                    having[part] = wanted
                elif wanted >= blocks:
                    released |= {having[part]}
            if (filled, tuple(having), len(released)) == before:
                return released >= set(range(blocks))

    least = tiles.MIN_STAGES[k_warpgroups]
    assert finished(least)
    assert not finished(least - k_warpgroups)
