"""How the halo family cuts its work. No GPU."""

import itertools
import math

from jax_splitk.kernels.wgrad import halo
from jax_splitk.kernels.wgrad.halo import FAMILY
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import random_problems
from tests.problems import seeded
from tests.structs import arguments


def stream_begin(g: dict[str, int], part: int) -> int:
    return part * g["units_per_part"] + min(part, g["longer_parts"])


def work_of_block(g: dict[str, int], x: int, y: int, blocks: int) -> list[tuple[int, int, int]]:
    """(tile, begin, end) one after the other: the device code's `Work`."""
    units = g["units_per_tile"]
    if g["splits"]:
        begin = y * g["units_per_part"]
        return [(x, begin, min(begin + g["units_per_part"], units))]
    work = [(i * blocks + x, 0, units) for i in range(g["whole_tiles"])]
    at, end = stream_begin(g, x), stream_begin(g, x + 1)
    while at < end:
        rest = at // units
        stop = min(end, (rest + 1) * units)
        work.append((g["whole_tiles"] * blocks + rest, at - rest * units, stop - rest * units))
        at = stop
    return work


def partial_slot(g: dict[str, int], part: int, rest: int) -> int:
    return rest * g["splits"] + part if g["splits"] else part + rest


def stream_part_of(g: dict[str, int], unit: int) -> int:
    longer = g["longer_parts"] * (g["units_per_part"] + 1)
    if unit < longer:
        return unit // (g["units_per_part"] + 1)
    return g["longer_parts"] + (unit - longer) // g["units_per_part"]


def test_every_unit_is_done_once_and_every_part_is_added() -> None:
    with seeded(61) as rng:
        for p in itertools.islice(random_problems.draws(rng, "unit_stride"), 40):
            configs = FAMILY.candidates(p, DEFAULT_CUDA)
            for config in (configs[int(i)] for i in rng.integers(0, len(configs), 4)):
                plan = FAMILY.plan(p, config)
                g, main = arguments(plan), plan.launches[0]
                count, units = halo.tiles(p, config), g["units_per_tile"]
                seen: list[tuple[int, int]] = []
                written: dict[int, set[int]] = {}  # the slots of a tile's parts
                first_rest = g["whole_tiles"] * main.grid[0] if config.splits == 0 else 0
                for y in range(main.grid[1]):
                    for x in range(main.grid[0]):
                        work = work_of_block(g, x, y, main.grid[0])
                        assert work
                        for tile, begin, end in work:
                            assert begin < end
                            seen += [(tile, unit) for unit in range(begin, end)]
                            if end - begin < units:
                                slot = partial_slot(g, y if config.splits else x, tile - first_rest)
                                assert slot not in written.setdefault(tile, set())
                                written[tile].add(slot)
                assert sorted(seen) == [(tile, unit) for tile in range(count) for unit in range(units)]
                slots = [slot for of_tile in written.values() for slot in of_tile]
                assert len(set(slots)) == len(slots)
                assert (max(slots, default=-1) + 1) * config.tile_bytes <= plan.workspace_bytes
                assert (len(plan.launches) == 2) == (plan.workspace_bytes > 0) == bool(slots)
                for tile in range(first_rest, count):
                    first, parts, rest = 0, config.splits, tile - first_rest
                    if config.splits == 0:
                        first = stream_part_of(g, rest * units)
                        parts = stream_part_of(g, (rest + 1) * units - 1) - first + 1
                    added = {partial_slot(g, first + i, rest) for i in range(parts)} if parts > 1 else set()
                    assert added == written.get(tile, set())
                if len(plan.launches) == 2:
                    reduce = plan.launches[1]
                    r = arguments(plan, "TileReduceArgs", launch=1)
                    assert r["first_tile"] == first_rest
                    assert reduce.grid[0] * reduce.block[0] == config.tile_bytes // 16 * r["lanes"]
                    assert reduce.grid[1] == count - first_rest
                    assert reduce.programmatic


def test_tiles_cover_the_output_and_strips_the_pixels() -> None:
    with seeded(62) as rng:
        for p in itertools.islice(random_problems.draws(rng, "unit_stride"), 200):
            for config in FAMILY.candidates(p, DEFAULT_CUDA)[:5]:
                plan = FAMILY.plan(p, config)
                g = arguments(plan)
                rows = g["in_image"] // g["tiles_q"]
                groups = halo.tiles(p, config) // (g["slots"] * g["k_blocks"])
                assert groups * config.taps_h * config.taps_w >= p.taps
                assert g["slots"] * 64 >= p.in_channels > (g["slots"] - 1) * 64
                assert g["k_blocks"] * 64 >= p.out_channels > (g["k_blocks"] - 1) * 64
                assert rows * config.tile_p >= p.output_spatial[0] > (rows - 1) * config.tile_p
                assert g["tiles_q"] * config.tile_q == p.output_spatial[1]
                assert g["units_per_tile"] == p.batch * g["in_image"]
                assert all(math.prod(m.box) * 2 % 128 == 0 and max(m.box) <= 256 for m in plan.maps)
                # A block of 16 pixels lies in one row, or in two rows of a pair.
                assert config.tile_q % 16 == 0 or (config.tile_p % 2 == 0 and p.output_spatial[0] % 2 == 0)
