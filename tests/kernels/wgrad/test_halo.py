"""How the halo family divides its work."""

import itertools
import math

from jax_splitk.kernels.contraction import halo
from jax_splitk.kernels.contraction.halo import FAMILY
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import random_problems
from tests.problems import seeded
from tests.structs import arguments


def test_every_unit_is_one_splits_and_every_split_is_added() -> None:
    with seeded(61) as rng:
        for p in itertools.islice(random_problems.draws(rng, "unit_stride"), 40):
            configs = FAMILY.candidates(p, DEFAULT_CUDA)
            for config in (configs[int(i)] for i in rng.integers(0, len(configs), 4)):
                plan = FAMILY.plan(p, config)
                g, (main, *reductions) = arguments(plan), plan.launches
                count, units, each = halo.FAMILY.thread_blocks(p, config), g["units_per_tile"], g["units_per_split"]
                assert main.grid == (count, config.splits, 1)
                splits = [range(i * each, min((i + 1) * each, units)) for i in range(config.splits)]
                assert [unit for split in splits for unit in split] == list(range(units))
                assert all(splits)
                assert plan.workspace_bytes == (config.splits > 1) * count * config.splits * halo.tile_bytes(p)
                assert len(reductions) == (config.splits > 1)
                for reduce in reductions:
                    assert reduce.grid[0] * reduce.block[0] == halo.tile_bytes(p) // 16 * g["lanes"]
                    assert reduce.grid[1] == count
                    assert reduce.programmatic


def test_tiles_cover_the_output_and_strips_the_pixels() -> None:
    with seeded(62) as rng:
        for p in itertools.islice(random_problems.draws(rng, "unit_stride"), 60):
            for config in FAMILY.candidates(p, DEFAULT_CUDA)[:5]:
                plan = FAMILY.plan(p, config)
                g = arguments(plan)
                rows = g["in_image"] // g["tiles_q"]
                groups = halo.FAMILY.thread_blocks(p, config) // (g["slots"] * g["k_blocks"])
                assert groups * math.prod(halo.taps(p)) >= p.taps
                assert g["slots"] * 64 >= p.in_channels > (g["slots"] - 1) * 64
                assert g["k_blocks"] * 64 >= p.out_channels > (g["k_blocks"] - 1) * 64
                assert rows * config.tile_p >= p.output_spatial[0] > (rows - 1) * config.tile_p
                assert g["tiles_q"] * config.tile_q == p.output_spatial[1]
                assert g["units_per_tile"] == p.batch * g["in_image"]
                assert all(math.prod(m.box) * 2 % 128 == 0 and max(m.box) <= 256 for m in plan.maps)
                # A block of 16 pixels lies in one row, or in two rows of a pair.
                assert config.tile_q % 16 == 0 or (config.tile_p % 2 == 0 and p.output_spatial[0] % 2 == 0)
