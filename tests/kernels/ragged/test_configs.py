"""The refusals, candidates, estimates and plans of the kernels of grouped products."""

import dataclasses
import math
from typing import Any

import pytest
from jax import numpy as jnp

from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.ragged.tiles import Config, RaggedFamily
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime.target import DEFAULT_CUDA

FORWARD, RHS_GRADIENT = ragged_m.FAMILY, ragged_k.FAMILY
H100 = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
LAYER = RaggedDotProblem("forward", 8, 8192, 4096, 14336, "bfloat16", "bfloat16")
WEIGHTS = dataclasses.replace(LAYER, mode="rhs_gradient")

# Tokens, k, n and experts of layers that people train, and of two that decode.
TRAINING = (
    *((393216, 2048, 768, 128), (131072, 4096, 1536, 128), (65536, 2880, 2880, 32), (32768, 6144, 2048, 32)),
    *((16384, 2048, 1408, 64), (8192, 4096, 14336, 8), (65536, 7168, 2048, 256)),
)
DECODING = ((64, 4096, 14336, 8), (128, 2048, 1408, 64))
OTHERS = ((1, 8, 8, 1), (1, 4096, 14336, 8), (512, 2048, 1408, 64), (70, 136, 200, 300), (10**6, 64, 64, 4096))


def passes(sizes: tuple[int, int, int, int], **changes: Any) -> list[RaggedDotProblem]:
    """The forward product, the gradient of lhs, and that of rhs in 16 bits and in float32."""
    m, k, n, groups = sizes
    forward = RaggedDotProblem("forward", groups, m, k, n, "bfloat16", "bfloat16")
    forward = dataclasses.replace(forward, **changes)
    weights = dataclasses.replace(forward, mode="rhs_gradient")
    back = dataclasses.replace(forward, k=n, n=k, rhs_order="gnk")
    return [forward, back, weights, dataclasses.replace(weights, out_dtype="float32")]


def family_of(p: RaggedDotProblem) -> RaggedFamily:
    return FORWARD if p.mode == "forward" else RHS_GRADIENT


PROBLEMS = [p for sizes in (*TRAINING, *DECODING, *OTHERS) for p in passes(sizes)]
PROBLEMS += [p for sizes in OTHERS for p in passes(sizes, dtype="float16", out_dtype="float32", total_groups=4096)]


@pytest.mark.parametrize(("problem", "changes", "reason"), [
    (LAYER, {"mode": "rhs_gradient"}, "mode 'rhs_gradient'; accepted: 'forward'"),
    (WEIGHTS, {"mode": "forward"}, "mode 'forward'; accepted: 'rhs_gradient'"),
    *((p, {"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16") for p in (LAYER, WEIGHTS)),
    *((p, {"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn; accepted") for p in (LAYER, WEIGHTS)),
    *((p, {"out_dtype": "float64"}, "preferred_element_type float64; accepted: float32, ") for p in (LAYER, WEIGHTS)),
    *((p, {"k": 4100}, "k=4100, which is contiguous; accepted: multiples of 8") for p in (LAYER, WEIGHTS)),
    *((p, {"n": 4}, "n=4, which is contiguous; accepted: multiples of 8") for p in (LAYER, WEIGHTS)),
    *((p, {"m": 2**30 + 1}, "m=1073741825; accepted: at most 1073741824") for p in (LAYER, WEIGHTS)),
    *((p, {"groups": 4097}, "4097 groups; accepted: at most 4096") for p in (LAYER, WEIGHTS)),
    *((p, {"total_groups": 5000}, "5000 groups; accepted: at most 4096") for p in (LAYER, WEIGHTS)),
    (WEIGHTS, {"k": 2**24, "m": 8, "n": 8}, "k=16777216 in 131072 tiles; accepted: at most 32768"),
    (WEIGHTS, {"m": 2**29, "k": 8192, "n": 8192}, "17179951104 stages of all tiles; accepted: at most 1073741824"),
    (LAYER, {"k": 32776, "out_dtype": "float32"}, "k=32776 with a float32 result; accepted: at most 32768"),
])  # fmt: skip
def test_refuses_what_it_cannot_compute(problem: RaggedDotProblem, changes: dict[str, Any], reason: str) -> None:
    family = family_of(problem)
    assert family.refusal(problem) is None
    refusal = family.refusal(dataclasses.replace(problem, **changes))
    assert refusal is not None and refusal.startswith(reason), refusal


LONG = RaggedDotProblem("rhs_gradient", 1, 8, 8, 8, "bfloat16", "bfloat16")


@pytest.mark.parametrize(("problem", "config", "reason"), [
    *((p, Config(96, 64, 4, 132), "tile 96x64; accepted: 128x256, ") for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 256, 1, 132), "stages 1; accepted: 2 to 8") for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 256, 3, 0), "workers 0; accepted: 1 to 256") for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 256, 3, 257), "workers 257; accepted: 1 to 256") for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 256, 3, 132, 3), "parts 3; accepted: 1, 2, 4") for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 192, 3, 132, 2), "parts 2 of 192 columns; accepted: parts of whole 128 bytes, without swap")
      for p in (LAYER, WEIGHTS)),
    *((p, Config(128, 256, 4, 132), "264448 bytes of shared memory; accepted: at most 232448")
      for p in (LAYER, WEIGHTS)),
    (LAYER, Config(128, 16, 3, 132, 2, True), "parts 2 of 16 columns; accepted: parts of whole 128 bytes, "),
    (LAYER, Config(128, 256, 3, 132, 1, True), "tile 128x256; accepted: 64x8, "),
    (WEIGHTS, Config(128, 256, 3, 132, 1, True), "swap True; accepted: False"),
    (WEIGHTS, Config(128, 256, 3, 132, cut=True), "cut True; accepted: False"),
    (LAYER, Config(128, 16, 3, 132, 1, True, True), "cut with k=4096; accepted: from 961 on, without swap"),
    (dataclasses.replace(LAYER, k=960), Config(128, 256, 3, 132, cut=True), "cut with k=960; accepted: from 961 on"),
    # A place of a tile has 15 bits for its row and 16 for its column.
    (dataclasses.replace(LONG, k=64 * 2**15 + 8), Config(64, 128, 3, 4),
     "k=2097160 in 32769 tiles; accepted: at most 32768"),
    (dataclasses.replace(LONG, n=128 * 2**16 + 8), Config(64, 128, 3, 4),
     "n=8388616 in 65537 tiles; accepted: at most 65536"),
    (dataclasses.replace(LONG, m=2**26, k=4096, n=4096), Config(64, 128, 3, 4),
     "2147493888 stages of all tiles; accepted: at most 1073741824"),
])  # fmt: skip
def test_refuses_configs(problem: RaggedDotProblem, config: Config, reason: str) -> None:
    refusal = family_of(problem).refusal(problem, config)
    assert refusal is not None and refusal.startswith(reason), refusal


def test_the_longest_and_widest_matrices_are_served() -> None:
    """The matrices have as many tiles as are accepted."""
    for changes in ({"k": 64 * 2**15}, {"n": 128 * 2**16}):
        assert RHS_GRADIENT.refusal(dataclasses.replace(LONG, **changes), Config(64, 128, 3, 4)) is None


def test_candidates_are_legal_unique_and_few() -> None:
    for p in PROBLEMS:
        family = family_of(p)
        found = family.candidates(p, DEFAULT_CUDA)
        assert 4 <= len(set(found)) == len(found) <= 12, p
        for config in found:
            assert family.refusal(p, config, DEFAULT_CUDA) is None, (p, config)
            assert config.stages >= 3 and config.workers == DEFAULT_CUDA.cores
        seconds = family.estimates(p, found, DEFAULT_CUDA)
        assert seconds == sorted(seconds)
        # No faster than the memory and the tensor cores allow, and not absurd.
        floor = max(p.bytes_moved / 4.8e12, p.flops / 990e12)
        assert floor < seconds[0] < 2 * floor + 2e-3, p
        assert all(config not in family.neighbours(p, config, DEFAULT_CUDA) for config in found)


def test_no_candidate_has_parts_for_nothing() -> None:
    """More parts must leave room for more stages."""
    for p in PROBLEMS:
        tiles = [(c.tile_m, c.tile_n, c.swap, c.cut, c.stages) for c in family_of(p).candidates(p, DEFAULT_CUDA)]
        assert len(set(tiles)) == len(tiles)


@pytest.mark.parametrize("target", [DEFAULT_CUDA, H100], ids=lambda target: target.device_kind)
@pytest.mark.parametrize("sizes", TRAINING, ids=str)
def test_large_tiles_are_for_training(sizes: tuple[int, int, int, int], target: Any) -> None:
    """The candidates include 128x256 with 3 and 4 stages, the fastest tile that was measured. The first candidate has a
    tile of this size, or of 192 columns if these need less padding."""
    for p in passes(sizes):
        found = family_of(p).candidates(p, target)
        assert {3, 4} <= {c.stages for c in found if (c.tile_m, c.tile_n, c.swap) == (128, 256, False)}, p
        assert found[0].tile_m * found[0].tile_n >= 128 * 192 and not found[0].swap, p


@pytest.mark.parametrize("sizes", DECODING, ids=str)
def test_few_rows_of_lhs_are_columns_of_the_product(sizes: tuple[int, int, int, int]) -> None:
    forward, back, *_ = passes(sizes)
    for p in (forward, back):
        best = FORWARD.candidates(p, H100)[0]
        assert best.swap and best.tile_n <= 16, p


# Microseconds on an H100, three passes of each size, and float32 weights: 128x256 tiles of 3 or 4 stages.
MEASURED = dict(zip(TRAINING, (
    (1984, 1859, 1731, 1860), (2604, 2501, 2636, 3072), (1636, 1743, 1804, 1844), (1271, 1238, 1226, 1508),
    (257, 237, 257, 396), (1483, 1422, 1559, 1791), (3759, 3864, 4242, 8049),
), strict=True))  # fmt: skip


@pytest.mark.parametrize("sizes", TRAINING, ids=str)
def test_estimates_are_near_what_was_measured(sizes: tuple[int, int, int, int]) -> None:
    for p, us in zip(passes(sizes), MEASURED[sizes], strict=True):
        large = [c for c in family_of(p).candidates(p, H100) if (c.tile_m, c.tile_n) == (128, 256)]
        estimate = min(family_of(p).estimates(p, large, H100)) * 1e6
        assert 0.75 < estimate / us < 1.3, (p, estimate)


def test_plans_are_those_of_the_custom_call() -> None:
    for p in PROBLEMS:
        family = family_of(p)
        for config in family.candidates(p, DEFAULT_CUDA)[::4]:
            made = family.plan(p, config)
            sizes = [jnp.dtype(dtype).itemsize * math.prod(shape) for shape, dtype in p.operand_types]
            sizes.append(jnp.dtype(p.out_dtype).itemsize * math.prod(p.out_shape))
            assert [b.bytes for b in made.buffers] == [*sizes, family.workspace_bytes(p, config)]
            # Bounded whatever the problem, for the sums of at most three tiles a worker.
            assert made.workspace_bytes <= 3 * 132 * 128 * 256 * 4
            # The second kernel adds what is in the slots of pieces.
            cuts = config.cut if p.mode == "forward" else ragged_k.may_cut(p, config)
            assert len(made.launches) == 1 + cuts
            assert made.workspace_bytes > 0 or not cuts
            assert made.workspace_bytes == 0 or p.mode == "rhs_gradient" or config.cut
            for tensor_map in made.maps:
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
                assert max(tensor_map.box) <= 256
