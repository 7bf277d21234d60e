"""The matrix product's kernel on a GPU: exactness, accuracy, determinism, on every way to split and every major."""

import concurrent.futures
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels import Family
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.dot import as_wgrad, tma
from jax_splitk.kernels.dot.tma import FAMILY, Config
from jax_splitk.problems import dot_reference
from jax_splitk.problems.dot_general import LHS_ORDERS, RHS_ORDERS, DotProblem
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import poison
from tests.kernels.dot.test_dot_tma import random_problem
from tests.problems import SEED, seeded

pytestmark = pytest.mark.gpu

RANDOM = 300
SOURCES = 64  # kernels of the random problems
REDUCTIONS = (("none", 1), ("cluster", 2), ("cluster", 3), ("cluster", 8), ("workspace", 2), ("workspace", 11))


def stages(tile_m: int, tile_n: int) -> int:
    return tma.most_stages(tile_m, tile_n)


def exact_runs() -> list[tuple[DotProblem, Config]]:
    """Every tile, reduction and major, none with all others, on sizes that no tile divides."""
    runs = []
    majors = itertools.cycle(itertools.product(LHS_ORDERS, RHS_ORDERS))
    dtypes = itertools.cycle((("bfloat16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")))
    for (tile_m, tile_n), (reduction, splits) in itertools.product(tma.TILES, REDUCTIONS[::2]):
        (lhs, rhs), (dtype, out) = next(majors), next(dtypes)
        problem = DotProblem(2, 264, 328, 1096, lhs, rhs, dtype, out)
        runs.append((problem, Config(tile_m, tile_n, stages(tile_m, tile_n), splits, reduction)))
    for (lhs, rhs), (reduction, splits) in itertools.product(
        itertools.product(LHS_ORDERS, RHS_ORDERS), REDUCTIONS[1::2]
    ):
        runs.append(
            (DotProblem(3, 136, 72, 2000, lhs, rhs, "bfloat16", "float32"), Config(64, 128, 4, splits, reduction))
        )
    for reduction, splits in REDUCTIONS:
        problem = DotProblem(2, 131, 268, 1000, "bmk", "nbk", "float32", "float32")
        runs.append((problem, Config(128, 128, 6, splits, reduction)))
    return [(p, c) for p, c in runs if FAMILY.refusal(p, c) is None]


EXACT = exact_runs()


def device_code() -> set[compiler.Source]:
    return {FAMILY.source(p, c) for p, c in EXACT} | {source(*run) for run in random_runs()}


def integers(problem: DotProblem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([SEED, seed])
    lhs, rhs = (rng.integers(-2, 3, shape).astype(np.float64) for shape in (problem.lhs_shape, problem.rhs_shape))
    return lhs, rhs


def exactly(problem: DotProblem, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    letters = f"{problem.lhs_order},{problem.rhs_order}->bmn"
    return np.einsum(letters, lhs, rhs, optimize=True)


def test_covers_every_tile_and_reduction() -> None:
    assert {(c.tile_m, c.tile_n) for _, c in EXACT} == set(tma.TILES)
    assert {(c.reduction, c.splits) for _, c in EXACT} == set(REDUCTIONS)


@pytest.mark.parametrize(("problem", "config"), EXACT, ids=str)
def test_exact_on_integers(problem: DotProblem, config: Config) -> None:
    lhs, rhs = integers(problem, 1)
    out = poison.run(FAMILY.plan(problem, config), problem, *(jnp.asarray(x, problem.dtype) for x in (lhs, rhs)))
    expected = np.asarray(jnp.asarray(exactly(problem, lhs, rhs), jnp.float32).astype(problem.out_dtype))
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@functools.cache
def random_runs() -> list[tuple[Family, DotProblem, Any]]:
    """Other ones in each run of the tests, by at most `SOURCES` kernels; one in ten is of the tf32 family that takes
    neither operand with k contiguous."""
    with seeded(73) as rng:
        runs: list[tuple[Family, DotProblem, Any]] = []
        known: set[compiler.Source] = set()
        while len(runs) < RANDOM:
            problem, family = random_problem(rng), FAMILY
            if len(runs) % 10 == 9:
                m, n = (int(size) // 4 * 4 + 4 for size in (problem.m, problem.n))
                problem, family = DotProblem(1, m, n, problem.k, "bkm", "bkn", "float32", "float32"), as_wgrad.TF32
            candidates = family.candidates(problem, DEFAULT_CUDA)
            configs = [candidates[i] for i in rng.permutation(len(candidates))]
            shared = (c for c in configs if source(family, problem, c) in known)
            config = next(shared, configs[0] if len(known) < SOURCES else None)
            if config is not None:
                known.add(source(family, problem, config))
                runs.append((family, problem, config))
        return runs


def source(family: Family, problem: DotProblem, config: Any) -> compiler.Source:
    plan = family.plan(problem, config)
    assert isinstance(plan, DevicePlan)
    return plan.source


def wrong(number: int, family: Family, problem: DotProblem, config: Any) -> str | None:
    """The errors, unless ours is at most twice XLA's."""
    lhs, rhs = dot_reference.random_operands(problem, jax.random.key(SEED % 2**31 + number))
    plan = family.plan(problem, config)
    assert isinstance(plan, DevicePlan)
    out = poison.run(plan, problem, lhs, rhs)
    xla = np.asarray(jax.jit(lambda x, y: dot_reference.dot_general(problem, x, y))(lhs, rhs))
    exact = exactly(problem, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    ours, theirs = (float(np.linalg.norm(np.asarray(y, np.float64) - exact)) for y in (out, xla))
    least = 1e-6 * float(np.linalg.norm(exact))
    fine = ours <= 2 * max(theirs, least)
    return None if fine else f"{problem} {family} {config}: error {ours:.3e}, XLA's {theirs:.3e}"


def test_random_problems_are_of_every_kind_and_few_kernels() -> None:
    runs = random_runs()
    assert len(runs) == RANDOM and len({source(*run) for run in runs}) <= SOURCES
    assert {p.dtype for _, p, _ in runs} == {"bfloat16", "float16", "float32"}
    assert {p.lhs_order for _, p, _ in runs} == set(LHS_ORDERS) and {p.rhs_order for _, p, _ in runs} == set(RHS_ORDERS)
    assert {p.out_dtype for _, p, _ in runs} == set(split_k.OUT_CODES) and {p.batch for _, p, _ in runs} == {1, 2, 3}
    assert all(any(getattr(p, size) % 2 for _, p, _ in runs) for size in "mk")
    assert all(any(p.n % 8 == rest for _, p, _ in runs) for rest in (0, 4))


def test_random_problems_against_float64() -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # XLA compiles a product for each
        found = list(pool.map(lambda numbered: wrong(numbered[0], *numbered[1]), enumerate(random_runs())))
    failures = [text for text in found if text]
    assert not failures, f"{len(failures)} of {RANDOM}\n" + "\n".join(failures)


@pytest.mark.parametrize(("reduction", "splits"), REDUCTIONS)
def test_the_same_bits_in_a_hundred_runs(reduction: str, splits: int) -> None:
    problem = DotProblem(1, 256, 192, 8192, "bkm", "bkn", "bfloat16", "float32")
    call = FAMILY.plan(problem, Config(64, 64, 8, splits, reduction)).custom_call()
    run = jax.jit(lambda x, y: execute.call(call, problem, x, y))
    operands = dot_reference.random_operands(problem, jax.random.key(SEED % 2**31))
    first = np.asarray(run(*operands))
    assert all(np.array_equal(first, np.asarray(run(*operands))) for _ in range(100))


def test_nan_and_infinity_reach_what_depends_on_them() -> None:
    problem = DotProblem(1, 128, 128, 1024, "bkm", "bkn", "bfloat16", "float32")
    lhs, rhs = integers(problem, 2)
    lhs[0, 700, 5], rhs[0, 30, 77] = math.nan, math.inf
    rhs[0, 30] = np.where(rhs[0, 30] == 0, 1, rhs[0, 30])
    lhs[0, 30] = np.where(lhs[0, 30] == 0, 1, lhs[0, 30])
    for reduction, splits in REDUCTIONS:
        plan = FAMILY.plan(problem, Config(64, 64, 8, splits, reduction))
        out = poison.run(plan, problem, *(jnp.asarray(x, problem.dtype) for x in (lhs, rhs)))
        finite = np.isfinite(out[0])
        expected = np.ones((128, 128), bool)
        expected[5], expected[:, 77] = False, False
        np.testing.assert_array_equal(finite, expected)
