"""Grouped products on a GPU: 500 random problems, exact on integers and against float64, NaN, repeats."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.ragged.tiles import Config, RaggedFamily
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import poison, ragged_dots
from tests.kernels.test_gpu_random import check, difference
from tests.on_gpu import check_repeats
from tests.problems import seeded

pytestmark = pytest.mark.gpu

FORWARD, RHS_GRADIENT = ragged_m.FAMILY, ragged_k.FAMILY
BATCHES, EACH = 20, 25
REUSE = 0.9  # of the configs come with device code that there is already, where there is any
DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"))
MAX_FLOPS = 4e9  # of the matrices of all groups, with which the reference multiplies
# Largest error, relative to the whole result. Results in 16 bits are rounded once; the tensor cores truncate sums, of
# 512 stages at most.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-13}


def family_of(p: RaggedDotProblem) -> RaggedFamily:
    return FORWARD if p.mode == "forward" else RHS_GRADIENT


def device_plan(p: RaggedDotProblem, config: Config) -> DevicePlan:
    return family_of(p).plan(p, config)


# ---- random problems -------------------------------------------------------------------------------------------------


def random_problem(rng: np.random.Generator) -> RaggedDotProblem:
    """Small to medium; a few of them long, a few with many groups."""
    while True:
        groups = int(rng.choice([1, 2, 3, 8, 33, 50, 300]))
        m = int(2 ** rng.uniform(0, 13 if rng.random() < 0.9 else 17))
        k, n = (8 * int(2 ** rng.uniform(0, 7)) for _ in range(2))
        dtype, out = (str(name) for name in rng.choice(DTYPES))
        total = groups + int(rng.integers(0, 9)) if groups < 64 and rng.random() < 0.2 else 0
        forward = rng.random() < 0.6
        order = str(rng.choice(["gkn", "gnk"])) if forward else "gkn"
        mode = "forward" if forward else "rhs_gradient"
        p = RaggedDotProblem(mode, groups, m, k, n, dtype, out, rhs_order=order, total_groups=total)
        if p.flops < MAX_FLOPS and groups * k * n < 2**24:
            return p


def random_sizes(rng: np.random.Generator, p: RaggedDotProblem) -> np.ndarray:
    """Group sizes of many kinds: even, uneven, a single group, multiples of a block and their neighbours, sums below
    and above m, negative."""
    count = p.size_count
    kind = int(rng.integers(6))
    if kind == 0:
        return rng.choice([0, 1, 63, 64, 65, 127, 128, 129], count)
    if kind == 1:
        return p.m * (np.arange(count) == rng.integers(count))
    sizes = rng.multinomial(p.m, rng.dirichlet(np.full(count, rng.choice([0.05, 0.5, 10.0]))))
    if kind == 2:
        sizes = (sizes * rng.uniform(0, 1.5)).astype(int)
    if kind == 3:
        sizes = sizes - rng.integers(0, 4, count)
    return sizes


@dataclasses.dataclass(frozen=True)
class Run:
    """One problem with one config; its operands are drawn by the seed."""

    problem: RaggedDotProblem
    config: Config
    seed: int

    def __str__(self) -> str:
        return f"{self.problem!r}\n  {self.config} operands of seed {self.seed}"

    def integers(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return ragged_dots.integers(self.problem, rng, random_sizes(rng, self.problem))

    def normals(self) -> list[np.ndarray]:
        rng, operands = np.random.default_rng(self.seed), self.integers()
        return [rng.normal(size=x.shape).astype(x.dtype) for x in operands[:2]] + operands[2:]

    def __call__(self, *operands: np.ndarray) -> np.ndarray:
        return poison.run(device_plan(self.problem, self.config), self.problem, *map(jnp.asarray, operands))


@functools.cache
def drawn() -> list[Run]:
    """Random runs, the same in every process of a run of the tests."""
    with seeded(94) as rng:
        problems = [random_problem(rng) for _ in range(BATCHES * EACH)]
        runs: list[Run] = []
        known: dict[str, dict[Config, None]] = {"forward": {}, "rhs_gradient": {}}
        sources = set()
        for number, p in enumerate(problems):
            legal = [c for c in known[p.mode] if family_of(p).refusal(p, c) is None]
            pool = [c for c in legal if device_plan(p, c).source in sources] if rng.random() < REUSE else []
            if not pool:
                pool = family_of(p).candidates(p, DEFAULT_CUDA)
                if rng.random() < 0.4:
                    pool = [dataclasses.replace(config, workers=int(rng.choice([1, 7, 256]))) for config in pool]
            config = pool[rng.integers(len(pool))]
            known[p.mode][config] = None
            sources.add(device_plan(p, config).source)
            runs.append(Run(p, config, number))
    print(collections.Counter((run.problem.mode, run.config.swap, run.problem.out_dtype) for run in runs))
    return runs


def device_code() -> set[compiler.Source]:
    candidates = [(p, c) for p in PASSES.values() for c in family_of(p).candidates(p, DEFAULT_CUDA)]
    return {device_plan(p, c).source for p, c in [*candidates, *((run.problem, run.config) for run in drawn())]}


def batch(number: int) -> list[Run]:
    return drawn()[number * EACH : (number + 1) * EACH]


def exactness(run: Run) -> str | None:
    """Why a result on integers is not exact; None if it is. NaN lies in rows of no group, in matrices of groups without
    rows, and in results and workspace."""
    operands = run.integers()
    exact = ragged_dots.exactly(run.problem, *operands)
    return difference(run(*ragged_dots.poisoned(run.problem, operands)), exact)


def accuracy(run: Run) -> str | None:
    operands = run.normals()
    exact = ragged_dots.exactly(run.problem, *operands)
    found = run(*operands).astype(np.float64)
    distance, most = np.linalg.norm(found - exact), TOLERANCE[run.problem.out_dtype] * np.linalg.norm(exact)
    return None if distance <= most else f"{distance} from float64; accepted: at most {most}"


@pytest.mark.parametrize("number", range(BATCHES))
def test_random_problems_are_exact(number: int) -> None:
    with seeded(94):
        check(batch(number), exactness)


@pytest.mark.parametrize("number", range(BATCHES))
def test_random_problems_are_accurate(number: int) -> None:
    with seeded(94):
        check(batch(number), accuracy)


def locality(run: Run) -> str | None:
    """What is wrong; None if NaN in the rows and the matrix of one group reaches only that group's results."""
    p, operands = run.problem, run.integers()
    exact = ragged_dots.exactly(p, *operands)
    first = int(operands[3][0]) if p.has_offset else 0
    group = run.seed % p.groups
    rows = ragged_dots.group_rows(p.m, operands[2], first, p.groups)[group]
    operands[0][rows] = np.nan
    operands[1][rows if p.mode == "rhs_gradient" else group] = np.nan
    if rows.start < rows.stop:
        exact[rows if p.mode == "forward" else group] = np.nan
    return difference(run(*operands), exact)


def test_nan_stays_in_its_group() -> None:
    """Runs every fifth problem."""
    with seeded(94):
        check(drawn()[::5], locality)


# ---- large ones ------------------------------------------------------------------------------------------------------

LAYER = RaggedDotProblem("forward", 16, 8192, 1024, 1536, "bfloat16", "bfloat16")
PASSES = {
    "forward": LAYER,
    "lhs gradient": dataclasses.replace(LAYER, k=1536, n=1024, rhs_order="gnk"),
    "rhs gradient": dataclasses.replace(LAYER, mode="rhs_gradient"),
    "float32 rhs gradient": dataclasses.replace(LAYER, mode="rhs_gradient", out_dtype="float32"),
}
KINDS = ("even", "random", "zipf", "one hot")


def sizes_of(kind: str, groups: int, m: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "one hot":
        return (m * (np.arange(groups) == rng.integers(groups))).astype(np.int32)
    weights = {"even": np.ones(groups), "random": rng.uniform(size=groups), "zipf": 1 / np.arange(1, groups + 1)}[kind]
    return rng.multinomial(m, weights / weights.sum()).astype(np.int32)


def on_device(p: RaggedDotProblem, config: Config) -> Any:
    call = device_plan(p, config).custom_call()
    return jax.jit(lambda *operands: execute.call(call, p, *operands))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", PASSES)
def test_every_candidate_is_exact(which: str, kind: str) -> None:
    p = PASSES[which]
    with seeded(95) as rng:
        operands = ragged_dots.integers(p, rng, sizes_of(kind, p.groups, p.m - 5, rng))
        exact = ragged_dots.exactly(p, *operands)
        runs = [Run(p, config, 0) for config in family_of(p).candidates(p, DEFAULT_CUDA)]
        check(runs, lambda run: difference(run(*ragged_dots.poisoned(p, operands)), exact))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", PASSES)
def test_a_hundred_runs_are_the_same(which: str, kind: str) -> None:
    """Results are the same, bit for bit, and as accurate as one product of float32 sums."""
    p = PASSES[which]
    with seeded(96) as rng:
        operands = [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape, dtype in p.operand_types[:2]]
        operands.append(sizes_of(kind, p.groups, p.m, rng))
        exact = ragged_dots.exactly(p, *operands)
        given = [jnp.asarray(x) for x in operands]
        for config in family_of(p).candidates(p, DEFAULT_CUDA)[:3]:
            found = check_repeats(on_device(p, config), *given).astype(np.float64)
            assert np.linalg.norm(found - exact) <= TOLERANCE[p.out_dtype] * np.linalg.norm(exact), config


def test_one_long_group_among_more_than_are_sorted() -> None:
    """The tiles of groups in the middle of 2,000 are cut."""
    p = dataclasses.replace(LAYER, mode="rhs_gradient", groups=2000, m=60_000, k=72, n=136)
    with seeded(97) as rng:
        sizes = rng.integers(0, 3, p.groups)
        sizes[1234], sizes[55] = 40_000, 15_000
        operands = ragged_dots.integers(p, rng, sizes)
        exact = ragged_dots.exactly(p, *operands)
        for config in family_of(p).candidates(p, DEFAULT_CUDA)[:4]:
            assert difference(Run(p, config, 0)(*operands), exact) is None, config


@pytest.mark.parametrize("sizes", [(33_000 * 4, 20), (70_000, 62_000)])
def test_long_float32_sums_are_accurate(sizes: tuple[int, int]) -> None:
    """Sums leave the tensor cores, which truncate, every 512 stages."""
    p = RaggedDotProblem("rhs_gradient", 2, sum(sizes), 256, 512, "bfloat16", "float32")
    with seeded(98) as rng:
        operands = [rng.uniform(0, 1, shape).astype(jnp.dtype(dtype)) for shape, dtype in p.operand_types[:2]]
        operands.append(np.array(sizes, np.int32))
        exact = ragged_dots.exactly(p, *operands)
        for config in family_of(p).candidates(p, DEFAULT_CUDA)[:3]:
            found = Run(p, config, 0)(*operands).astype(np.float64)
            assert np.linalg.norm(found - exact) <= 2e-4 * np.linalg.norm(exact), config
