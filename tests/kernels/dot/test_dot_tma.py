"""The matrix product's kernel family without a GPU: what it takes, its candidates, its plans."""

import dataclasses
import math

import numpy as np
import pytest

from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.dot import tma
from jax_splitk.kernels.dot.tma import FAMILY, Config
from jax_splitk.problems.dot_general import LHS_ORDERS, RHS_ORDERS, DotProblem
from jax_splitk.runtime.plan import TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import seeded

LONG = DotProblem(1, 128, 256, 65536, "bkm", "bkn", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64; accepted: bfloat16, float16, float32"),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted"),
        ({"dtype": "float32"}, "float32 with m and n contiguous; accepted: k in both"),
        ({"dtype": "float32", "lhs_order": "bmk", "rhs_order": "bnk", "precision": "highest"}, "precision 'highest'"),
        ({"m": 100}, "m=100, which is contiguous; accepted: multiples of 8"),
        ({"rhs_order": "bnk", "n": 6}, "n=6; accepted: multiples of 4"),
        ({"rhs_order": "bnk", "k": 65532}, "k=65532, which is contiguous; accepted: multiples of 8"),
        ({"batch": 70000, "k": 8, "m": 8, "n": 8}, "batch 70000; accepted: at most 65535"),
    ],
)
def test_refuses_what_it_cannot_compute(changes: dict[str, object], reason: str) -> None:
    refusal = FAMILY.problem_refusal(dataclasses.replace(LONG, **changes))  # pyright: ignore[reportArgumentType]
    assert refusal is not None and refusal.startswith(reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(96, 64, 4), "tile 96x64; accepted"),
        (Config(64, 64, 1), "stages 1; accepted: 2 to 8"),
        (Config(64, 64, 8, 2, "none"), "reduction 'none' of 2 splits"),
        (Config(64, 64, 8, 1, "cluster"), "reduction 'cluster' of 1 splits"),
        (Config(64, 64, 8, 9, "cluster"), "splits 9 in a cluster; accepted: at most 8"),
        (Config(64, 64, 8, 2000, "workspace"), "splits 2000; accepted for 1024 blocks of k"),
        (Config(64, 64, 8, 2, "turns"), "reduction turns; accepted: none, workspace, cluster"),
    ],
)
def test_refuses_configs(config: Config, reason: str) -> None:
    refusal = FAMILY.config_refusal(LONG, config)
    assert refusal is not None and refusal.startswith(reason)


MAX_FLOPS = 2e9  # what NumPy multiplies in a moment


def random_problem(rng: np.random.Generator) -> DotProblem:
    """Any sizes but for those of the contiguous dimensions, which TMA wants in 16 bytes, and n, stored by fours."""
    dtype, out = str(rng.choice(("bfloat16", "float16", "float32"))), str(rng.choice(tuple(split_k.OUT_CODES)))
    lhs, rhs = ("bmk", "bnk") if dtype == "float32" else (str(rng.choice(LHS_ORDERS)), str(rng.choice(RHS_ORDERS)))
    contiguous = 4 if dtype == "float32" else 8

    def size(letter: str, most: int) -> int:
        multiple = contiguous if letter in (lhs[-1], rhs[-1]) else 4 if letter == "n" else 1
        multiple = 64 if rng.random() < 0.25 else multiple  # such operands are loaded in another way
        return multiple * max(1, int(2 ** rng.uniform(0, math.log2(most))) // multiple)

    while True:
        batch = int(rng.integers(1, 4))
        problem = DotProblem(batch, size("m", 2048), size("n", 2048), size("k", 65536), lhs, rhs, dtype, out)
        if problem.flops <= MAX_FLOPS:
            return problem


def test_candidates_are_legal_and_stay_within_the_workspace() -> None:
    with seeded(71) as rng:
        for problem in (random_problem(rng) for _ in range(40)):
            assert FAMILY.refusal(problem, None, DEFAULT_CUDA) is None
            candidates = FAMILY.candidates(problem, DEFAULT_CUDA)
            assert candidates
            assert len(set(candidates)) == len(candidates)
            for config in candidates:
                assert FAMILY.config_refusal(problem, config) is None
                assert FAMILY.estimate(problem, config, DEFAULT_CUDA) > 0
                splits = config.splits if config.reduction == "workspace" else 0
                tiles = math.prod(tma.tile_counts(problem, config)) * problem.batch
                assert FAMILY.workspace_bytes(problem, config) == splits * tiles * config.tile_m * config.tile_n * 4


def test_a_plan_covers_the_product() -> None:
    """Its maps describe the operands where they lie, and its grid every block of k once."""
    with seeded(72) as rng:
        for problem in (random_problem(rng) for _ in range(40)):
            config = FAMILY.candidates(problem, DEFAULT_CUDA)[int(rng.integers(3))]
            plan = FAMILY.plan(problem, config)
            for tensor_map, shape in zip(plan.maps, (problem.lhs_shape, problem.rhs_shape), strict=True):
                assert isinstance(tensor_map, TiledMap)
                assert math.prod(tensor_map.dims) == math.prod(shape)
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
                assert len(tensor_map.dims) == len(tensor_map.box) == len(tensor_map.strides) + 1
            main = plan.launches[0]
            rows, columns = tma.tile_counts(problem, config)
            assert main.grid == (rows, columns, config.splits * problem.batch)
            each, longer = divmod(tma.k_blocks(problem), config.splits)
            assert each >= 1 and each * config.splits + longer == tma.k_blocks(problem)
            assert (len(plan.launches) == 2) == (config.reduction == "workspace")


def test_without_a_measurement_xla_is_preferred_where_it_is_not_known_to_lose() -> None:
    assert FAMILY.unmeasured_refusal(dataclasses.replace(LONG, k=16384)) is None
    for problem in (dataclasses.replace(LONG, m=8192, n=8192), dataclasses.replace(LONG, m=1024, n=2048, k=50304)):
        assert "was not measured" in str(FAMILY.unmeasured_refusal(problem))
