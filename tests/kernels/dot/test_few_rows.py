"""The kernel family of products of few rows without a GPU: refusals, candidates, plans, and results in the emulator."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.contraction.few_rows import FAMILY, TILES_M, TILES_N, Config, chained_stages
from jax_splitk.kernels.contraction.products import FLOAT32_CHAIN
from jax_splitk.kernels.device.wgmma_tile import BARRIER_BYTES, SHARED_BYTES
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.runtime.plan import TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import dots, emulator

DECODE = DotProblem(1, 16, 14336, 4096, "bmk", "bkn", "bfloat16", "bfloat16")
FP8 = {"dtype": E4M3, "rhs_order": "bnk"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": 65}, "m=65; accepted: at most 64"),
        ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16, float8_e4m3fn"),
        ({"lhs_order": "bkm"}, "lhs with m contiguous; accepted: k"),
        ({"n": 4100}, "n=4100, which is contiguous; accepted: multiples of 8"),
        ({"k": 4100}, "k=4100, which is contiguous; accepted: multiples of 8"),
        ({"dtype": E4M3}, "float8_e4m3fn with n contiguous in rhs; accepted: k"),
        ({**FP8, "k": 4104}, "k=4104, which is contiguous; accepted: multiples of 16"),
        ({**FP8, "out_dtype": "float32"}, "preferred_element_type float32; accepted: bfloat16, float16"),
        ({"residual_dtype": "float64"}, "residual_dtype float64; accepted"),
        ({"batch": 70000, "n": 8, "k": 8}, "batch 70000; accepted: at most 65535"),
        ({"n": 2**20, "k": 4096}, "operands or a result of more than"),
    ],
)
def test_refuses_what_it_cannot_compute(changes: dict[str, object], reason: str) -> None:
    refusal = FAMILY.problem_refusal(dataclasses.replace(DECODE, **changes))  # pyright: ignore[reportArgumentType]
    assert refusal is not None and refusal.startswith(reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(192, 16, 4), "tile_m 192; accepted: 64, 128, 256"),
        (Config(64, 24, 4), "tile_n 24; accepted: 8, 16, 32, 64"),
        (Config(64, 8, 4), "tile_n 8; accepted for m=16: at least 16"),
        (Config(64, 16, 1), "stages 1; accepted: 2 to 16"),
        (Config(64, 16, 4, 9), "splits 9; accepted: 1 to 8"),
        (Config(256, 64, 6), f"{6 * 320 * 128 + 2048} bytes of shared memory; accepted: at most {SHARED_BYTES}"),
    ],
)
def test_refuses_configs(config: Config, reason: str) -> None:
    refusal = FAMILY.config_refusal(DECODE, config)
    assert refusal is not None and refusal.startswith(reason)


def test_a_part_of_k_is_not_empty() -> None:
    short = dataclasses.replace(DECODE, k=192)
    assert FAMILY.config_refusal(short, Config(64, 16, 4, 3)) is None
    assert str(FAMILY.config_refusal(short, Config(64, 16, 4, 4))).startswith("splits 4; accepted for 3 blocks of k")


@pytest.mark.parametrize("m", [1, 7, 16, 33, 64])
@pytest.mark.parametrize(("k", "n"), [(4096, 14336), (14336, 4096), (4096, 1024), (520, 136), (64, 8)])
def test_candidates_are_legal_and_have_most_of_the_shared_memory_under_way(m: int, k: int, n: int) -> None:
    problem = dataclasses.replace(DECODE, m=m, k=k, n=n)
    found = FAMILY.candidates(problem, DEFAULT_CUDA)
    assert found and len(set(found)) == len(found)
    for config in found:
        assert FAMILY.config_refusal(problem, config) is None
        assert config.blocks_per_sm * config.shared_bytes <= SHARED_BYTES
        dynamic = max(launch.shared_bytes for launch in FAMILY.launches(problem, config))
        assert dynamic + BARRIER_BYTES <= SHARED_BYTES
        assert config.tile_m == TILES_M[0] or config.tile_m < 2 * n
        assert config.stages == 16 or config.blocks_per_sm * config.stages * config.stage_bytes > 100 * 1024
        assert FAMILY.estimate(problem, config, DEFAULT_CUDA) > 0
    if k * n > 2**24:  # as many bytes as make all multiprocessors worth their start
        first = found[0]
        assert -(-n // first.tile_m) * first.splits >= DEFAULT_CUDA.cores * 0.7
    near = [c for config in found[:3] for c in FAMILY.neighbours(problem, config, DEFAULT_CUDA)]
    assert not set(near) <= set(found)


def test_a_plan_reads_the_weight_where_it_lies() -> None:
    for order, dims, strides in (
        ("bkn", (64, 4096, 224, 1), (28672, 128, 4096 * 28672)),
        ("bnk", (4096, 14336, 1), (8192, 14336 * 8192)),
    ):
        plan = FAMILY.plan(dataclasses.replace(DECODE, rhs_order=order), Config(128, 16, 5, 2))
        weight, x = plan.maps
        assert isinstance(weight, TiledMap) and isinstance(x, TiledMap)
        assert (weight.buffer, weight.dims, weight.strides) == (1, dims, strides)
        assert (x.buffer, x.dims, x.box) == (0, (4096, 16, 1), (64, 16, 1))
        assert plan.workspace_bytes == 0
        (launch,) = plan.launches
        assert (launch.grid, launch.cluster, launch.block) == ((224, 1, 1), (2, 1, 1), (384, 1, 1))


def test_long_float32_sums_leave_the_tensor_cores() -> None:
    long = dataclasses.replace(DECODE, k=65536, out_dtype="float32")
    assert chained_stages(long, Config(64, 16, 8)) == FLOAT32_CHAIN
    assert chained_stages(long, Config(64, 16, 8, 2)) == 0
    assert chained_stages(dataclasses.replace(long, out_dtype="bfloat16"), Config(64, 16, 8)) == 0
    assert chained_stages(dataclasses.replace(DECODE, **FP8), Config(64, 16, 8)) == 1  # pyright: ignore[reportArgumentType]


def runs() -> Iterator[tuple[DotProblem, Config]]:
    """1 to 64 rows, every tile and cluster, both orders of the weight, remainders of n and k."""
    configs = itertools.cycle((m, splits) for splits in (2, 8, 1, 3, 5) for m in TILES_M)
    kinds = itertools.cycle(
        itertools.product(("bkn", "bnk"), (("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16")))
    )
    for m, (n, k) in itertools.product((1, 7, 16, 33, 64), ((136, 520), (320, 968))):
        (tile_m, splits), (order, dtypes) = next(configs), next(kinds)
        tile_n = next(tile for tile in TILES_N if tile >= m)
        yield DotProblem(1, m, n, k, "bmk", order, *dtypes), Config(tile_m, tile_n, 2 + m % 3, splits)


@pytest.mark.parametrize(("problem", "config"), [*runs()], ids=str)
def test_exact_on_integers(problem: DotProblem, config: Config) -> None:
    assert FAMILY.refusal(problem, config) is None
    operands = dots.integers(problem, np.random.default_rng(problem.m))
    expected = dots.exactly(problem, *operands).astype(np.float32).astype(jnp.dtype(problem.out_dtype))
    out = np.empty(expected.shape, expected.dtype)
    for seed in (1, 2):
        emulator.run(FAMILY.plan(problem, config), dots.as_given(problem, operands), [out], seed=seed)
        np.testing.assert_array_equal(out, expected)
