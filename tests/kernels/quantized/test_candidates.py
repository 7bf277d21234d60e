"""The candidates of each family of quantized products on Hopper, their estimates, and their plans."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from jax import numpy as jnp

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.quantized import fp8, stream, tiled, tiles
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.products import E4M3, HALF, problems, valid_problem

FAMILIES = kernels.families("quantized_matmul", "cuda")
BLOCK_SHARED, SM_SHARED = 227 * 1024, 228 * 1024  # shared memory of a thread block and of a multiprocessor
SIZES = (
    *((1, 64, 1), (8, 8192, 3584), (9, 333, 77), (17, 8192, 8192), (64, 8192, 28672), (20, 1, 40), (65, 1088, 200)),
    *((64, 1000, 200), (20, 128, 100_000), (49, 4096, 640), (256, 8192, 8192), (1000, 4160, 333), (4096, 8192, 3584)),
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"qtype": "uint4", "zero_dtype": "bfloat16"},
    {"qtype": "nf4", "scale_dtype": "float16", **HALF},
    {"qtype": "int8", "out_dtype": "float32", "scale_dtype": "float32"},
    {"qtype": "int8", "group_size": 0},
    {"qtype": E4M3, "group_size": 32, "x_dtype": E4M3},
    {"qtype": "float4_e2m1fn", "group_size": 128, "scale_dtype": "float32", "x_dtype": E4M3},
    {"qtype": "uint4", "group_size": 128, "out_dtype": "float16", "x_dtype": E4M3},
    {"qtype": E4M3, "group_size": 0, "x_dtype": E4M3},
    {"x_dtype": E4M3},
)
PROBLEMS = problems(SIZES, KINDS)
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def served(family: Family) -> list[QuantizedMatmulProblem]:
    found = [p for p in PROBLEMS if family.refusal(p) is None]
    few_rows = [p for p in PROBLEMS if p.rows <= 64]
    least = {stream.FAMILY: 0.8 * len(few_rows), fp8.FAMILY: 0.35 * len(PROBLEMS), tiled.FAMILY: len(PROBLEMS)}
    assert len(found) >= least[family]  # type: ignore[index]
    return found


@by_family
def test_candidates_are_legal_unique_and_few(family: Family) -> None:
    for p in served(family):
        found = family.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(set(found)) == len(found) <= 60, p
        for config in found:
            assert family.refusal(p, config, DEFAULT_CUDA) is None, (p, config)
        seconds = [family.estimate(p, config, DEFAULT_CUDA) for config in found]
        if family is not stream.FAMILY:
            assert seconds == sorted(seconds)
        # No faster than the memory allows, and not absurd.
        assert p.bytes_moved / 4.8e12 < min(seconds) < 1, p
        best = found[seconds.index(min(seconds))]
        near = family.neighbours(p, best, DEFAULT_CUDA)
        assert best not in near
        assert len(set(near)) == len(near)


@by_family
def test_plans_are_those_of_the_custom_call(family: Family) -> None:
    for p in served(family):
        for config in family.candidates(p, DEFAULT_CUDA)[::6]:
            made = family.plan(p, config)
            shapes = [(p.x_shape, p.x_dtype), (p.words_shape, "uint32"), (p.scale_shape, p.scale_dtype)]
            shapes += [(p.scale_shape, p.zero_dtype)] * (p.zero_dtype != "none") + [(p.out_shape, p.out_dtype)]
            sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes]
            assert [b.bytes for b in made.buffers] == [*sizes, family.workspace_bytes(p, config)]
            for tensor_map in made.maps:
                # TMA's limits: strides of 16 bytes, boxes within 256; whole groups of 8 rows of the swizzle.
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
                assert max(tensor_map.box) <= 256
                assert tensor_map.box[1] % 8 == 0
            for launch in made.launches:
                assert launch.shared_bytes <= BLOCK_SHARED
                assert launch.block[0] % 32 == 0
            main = next(launch for launch in made.launches if launch.kernel == family.kernel_name(p))
            together = family.blocks_per_sm(p, config)
            assert together * (main.shared_bytes + 1024) <= SM_SHARED, "a KiB of each block is CUDA's"
            made.words()


def test_a_streams_plan_is_one_launch_of_what_runs_at_once() -> None:
    for p in served(stream.FAMILY)[::3]:
        for config in stream.FAMILY.candidates(p, DEFAULT_CUDA):
            made = stream.FAMILY.plan(p, config)
            (launch,) = made.launches
            assert (launch.grid, launch.cluster) == ((config.clusters * config.cluster, 1, 1), (config.cluster, 1, 1))
            assert launch.shared_bytes == stream.memory(p, config).bytes
            assert config.clusters * config.cluster <= DEFAULT_CUDA.cores, "one on each multiprocessor"
            used = {param.buffer for param in launch.params if isinstance(param, plan.Pointer)}
            used |= {tensor_map.buffer for tensor_map in made.maps}
            assert used == set(range(len(made.buffers) - 1)), "the kernel gets every buffer but the workspace"
            assert made.workspace_bytes == 0


def test_every_problem_may_have_small_tiles() -> None:
    for p in PROBLEMS:
        assert tiled.FAMILY.refusal(p, tiles.whole_tiles(p, tiled.Config(128, 32, 2, 0))) is None


def test_every_legal_split_fits_into_shared_memory() -> None:
    for p, tile, stages, groups in itertools.product(
        PROBLEMS[::4], ((64, 32), (64, 64), (128, 64)), range(2, 11), (1, 2)
    ):
        config = in_splits(p, tile, stages, 2, groups)
        if tiled.FAMILY.refusal(p, config) is None:
            together = tiled.FAMILY.blocks_per_sm(p, config)
            assert together * (tiled.FAMILY.shared_bytes(p, config) + 1024) <= SM_SHARED


# ---- what is tried -------------------------------------------------------------------------------------------------


def in_splits(p: QuantizedMatmulProblem, tile: tuple[int, int], stages: int, splits: int, groups: int = 1) -> Any:
    config = tiled.Config(*tile, stages, 0, k_warpgroups=groups)
    return tiles.split_tiles(p, config, splits)


Stream = stream.Config
ROWS_64 = valid_problem(64, 8192, 3584)


def test_few_rows_of_e4m3_cut_k() -> None:
    """There are 28 or 14 tiles along 3584 features, so candidates cut k. Taller tiles, which read less of x, are tried,
    too."""
    p = valid_problem(64, 8192, 3584, x_dtype=E4M3)
    found = fp8.FAMILY.candidates(p, DEFAULT_CUDA)
    assert {config.tile_m for config in found} == {128, 256}
    near = fp8.FAMILY.neighbours(p, found[0], DEFAULT_CUDA)
    for configs in (found, near):
        assert {config.k_warpgroups for config in configs if config.splits > 1} == {1, 2}
    assert any(tiles.is_cut(p, config) for config in near)


@pytest.mark.parametrize(("p", "tile", "stages", "splits", "together"), [
    (ROWS_64, (64, 64), 10, 2, 1),
    (ROWS_64, (128, 64), 6, 4, 1),
    (valid_problem(64, 8192, 8192), (128, 64), 6, 2, 1),
    (valid_problem(32, 8192, 3584), (64, 32), 6, 4, 2),
    (valid_problem(64, 8192, 3584, qtype="int8"), (64, 64), 8, 2, 1),
], ids=str)  # fmt: skip
def test_two_k_warpgroups_are_tried_beside_one(
    p: QuantizedMatmulProblem, tile: tuple[int, int], stages: int, splits: int, together: int
) -> None:
    config = in_splits(p, tile, stages, splits, 2)
    assert tiled.FAMILY.blocks_per_sm(p, config) == together
    found = tiled.FAMILY.candidates(p, DEFAULT_CUDA)
    assert config in found
    assert any((c.tile_m, c.tile_n, c.k_warpgroups) == (*tile, 1) and c.splits > 1 for c in found)
    assert tiled.FAMILY.plan(p, config).launches[0].block == (128 * (2 * tile[0] // 64 + 1), 1, 1)


def test_the_tensor_cores_add_up_128_k_where_they_have_one_scale() -> None:
    def product(**changes: Any) -> QuantizedMatmulProblem:
        return valid_problem(256, 1024, 1024, x_dtype=E4M3, **changes)

    wide, narrow = fp8.Config(128, 256, 4, 1), fp8.Config(128, 64, 4, 1)
    for group, expected in ((32, 32), (64, 64), (128, 128), (1024, 128)):
        assert fp8.period(product(group_size=group), wide) == expected
        assert fp8.period(product(group_size=group), narrow) == min(expected, 64)
    # Half as many promotions to float32 lose bits that float16 results would show.
    assert fp8.period(product(group_size=128, out_dtype="float16"), wide) == 64
    assert (fp8.sums(product(), wide), fp8.sums(product(group_size=128), wide)) == (2, 1)
    times = [fp8.FAMILY.estimate(product(group_size=group), wide, DEFAULT_CUDA) for group in (64, 128)]
    assert times[1] < times[0]


def test_columns_are_as_many_as_registers_hold() -> None:
    """Up to 128 columns, if the registers hold no fewer sets of sums than with 64."""
    for tile, changes, expected in (
        ((128, 32), {}, 32), ((128, 96), {}, 32), ((128, 192), {}, 64), ((256, 64), {}, 64), ((128, 128), {}, 128),
        ((128, 256), {}, 64), ((128, 256), {"group_size": 128}, 128),
        ((128, 256), {"group_size": 128, "scale_dtype": "float32"}, 64),
        ((128, 256), {"group_size": 128, "qtype": E4M3}, 64),
    ):  # fmt: skip
        p = valid_problem(256, 1024, 1024, x_dtype=E4M3, **changes)
        assert fp8.chunk(p, fp8.Config(*tile, 4, 1)) == expected, (tile, changes)


# ---- what the device code is specialised to ------------------------------------------------------------------------


def macros(family: Family, p: QuantizedMatmulProblem, config: Any, *names: str) -> tuple[int | str, ...]:
    found = dict(family.source(p, config).defines)
    return tuple(found[name] for name in names)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "bfloat16"), (HALF, "float16"), ({"x_dtype": E4M3}, E4M3), ({"x_dtype": E4M3, "qtype": "uint4"}, E4M3),
    ({"x_dtype": E4M3, "qtype": "float4_e2m1fn", "out_dtype": "float16"}, E4M3),
    ({"x_dtype": E4M3, "qtype": E4M3, "group_size": 4096}, E4M3), ({"x_dtype": E4M3, "qtype": "nf4"}, "float16"),
    ({"x_dtype": E4M3, "qtype": "int8"}, "float16"), ({"x_dtype": E4M3, "out_dtype": "float32"}, "float16"),
    ({"x_dtype": E4M3, "qtype": "uint4", "zero_dtype": "bfloat16"}, "float16"),
])  # fmt: skip
def test_what_the_tensor_cores_multiply(changes: dict[str, Any], expected: str) -> None:
    p, config = valid_problem(8, 4096, 4096, **changes), Stream(8, 2, 2, 4, 2, 64)
    assert stream.products(p) == expected
    found = macros(stream.FAMILY, p, config, "E4M3_PRODUCTS", "X_E4M3")
    assert found == (expected == E4M3, p.x_dtype == E4M3)
    # e4m3 activations take half the space.
    assert stream.x_bytes(p, config) == 8 * 4096 // 2 * jnp.dtype(expected).itemsize


def test_a_streams_code_depends_on_types_config_and_divisors_alone() -> None:
    p = valid_problem(8, 4096, 4096)
    source, config = stream.FAMILY.source, Stream(8, 4, 4, 3, 4, 28)
    other, fewer = dataclasses.replace(p, rows=3, k=8192, features=500), dataclasses.replace(config, clusters=1)
    assert source(other, fewer) == source(p, config) == stream.FAMILY.plan(p, config).source
    types = [
        *({"x_dtype": "float16"}, {"x_dtype": E4M3}, {"out_dtype": "float32"}, {"scale_dtype": "float32"}),
        *({"zero_dtype": "float32"}, {"group_size": 32}, {"group_size": 4096}, {"qtype": "uint4"}),
        *({"features": 4094}, {"k": 4160}, {"k": 1004, "group_size": 1004}),
    ]
    changed = [dataclasses.replace(p, **change) for change in types]
    assert len({source(q, config) for q in (p, *changed)}) == 1 + len(changed)
