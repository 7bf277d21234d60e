"""The matrix product's kernel on a GPU: exactness, accuracy, determinism, on every way to split and every major."""

import concurrent.futures
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction.products import FAMILY, Config
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.wgmma_tile import TILES, max_stages
from jax_splitk.problems import dot_reference
from jax_splitk.problems.dot_general import E4M3, LHS_ORDERS, RHS_ORDERS, DotProblem
from jax_splitk.problems.random_operands import normals
from jax_splitk.runtime import compiler, execute
from tests import dots, few_kernels, on_gpu, poison, tf32
from tests.kernels.dot.test_dot_tma import random_problem
from tests.problems import SEED, seeded
from tests.random_problems import device_plan

pytestmark = pytest.mark.gpu

RANDOM, PARTS = 300, 12
SOURCES = 64  # kernels of the random problems
REDUCTIONS = (("none", 1), ("cluster", 2), ("cluster", 3), ("cluster", 8), ("workspace", 2), ("workspace", 11))


def exact_runs() -> list[tuple[DotProblem, Config]]:
    """Every tile, reduction and major on sizes that no tile divides, but not all combinations."""
    runs = []
    majors = itertools.cycle(itertools.product(LHS_ORDERS, RHS_ORDERS))
    dtypes = itertools.cycle((("bfloat16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")))
    for (tile_m, tile_n), (reduction, splits) in itertools.product(TILES, REDUCTIONS[::2]):
        (lhs, rhs), (dtype, out) = next(majors), next(dtypes)
        problem = DotProblem(2, 264, 328, 1096, lhs, rhs, dtype, out)
        runs.append((problem, Config(tile_m, tile_n, max_stages(tile_m, tile_n), splits, reduction)))
    for (lhs, rhs), (reduction, splits) in itertools.product(
        itertools.product(LHS_ORDERS, RHS_ORDERS), REDUCTIONS[1::2]
    ):
        runs.append(
            (DotProblem(3, 136, 72, 2000, lhs, rhs, "bfloat16", "float32"), Config(64, 128, 4, splits, reduction))
        )
    for reduction, splits in REDUCTIONS:
        problem = DotProblem(2, 131, 268, 1000, "bmk", "nbk", "float32", "float32")
        runs.append((problem, Config(128, 128, 6, splits, reduction)))
    narrow = ((64, 64, 8), (64, 128, 8), (128, 64, 8), (128, 128, 7), (192, 64, 7), (192, 128, 5), (256, 64, 5))
    for tile, (reduction, splits) in itertools.product(narrow, REDUCTIONS[::2]):
        problem = DotProblem(2, 264, 328, 1104, "bmk", "nbk", E4M3, "float16")
        runs.append((problem, Config(*tile, splits, reduction)))
    # Every epilogue whose values are exact, on every reduction.
    exact = [after for after in dots.epilogues() if after.get("activation", "none") in ("none", "relu")]
    for after, (reduction, splits) in itertools.product(exact, REDUCTIONS[::2]):
        problem = DotProblem(2, 136, 268, 1000, "bmk", "bnk", "bfloat16", "float32", **after)
        runs.append((problem, Config(64, 128, 6, splits, reduction)))
    return [(p, c) for p, c in runs if FAMILY.refusal(p, c) is None]


EXACT = exact_runs()


def epilogue_runs() -> list[tuple[DotProblem, Config]]:
    """Every epilogue, by several reductions, to every result type."""
    kinds = itertools.cycle(itertools.product(("float32", "bfloat16", "float16"), REDUCTIONS))
    return [
        (DotProblem(2, 200, 136, 1000, "bmk", "bkn", "bfloat16", out, **after), Config(64, 64, 6, splits, reduction))
        for after, (out, (reduction, splits)) in zip((*dots.epilogues(),) * 3, kinds, strict=False)
    ]


def device_code() -> set[compiler.Source]:
    ours = {FAMILY.source(p, c) for p, c in (*EXACT, *epilogue_runs())}
    return ours | {few_kernels.source(*run) for run in random_runs()}


@pytest.mark.parametrize(("problem", "config"), EXACT, ids=str)
def test_exact_on_integers(problem: DotProblem, config: Config) -> None:
    check_exact(FAMILY, problem, config)


def check_exact(family: Family, problem: DotProblem, config: Any) -> None:
    operands = dots.integers(problem, np.random.default_rng([SEED, 1]))
    out = poison.run(device_plan(family, problem, config), problem, *map(jnp.asarray, dots.as_given(problem, operands)))
    expected = np.asarray(jnp.asarray(dots.exactly(problem, *operands), jnp.float32).astype(problem.out_dtype))
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@functools.cache
def random_runs() -> list[tuple[Family, DotProblem, Any]]:
    """Random problems, other ones in each run of the tests, with at most `SOURCES` kernels. One in ten is for the tf32
    family that takes neither operand with k contiguous."""

    def drawn(rng: np.random.Generator) -> Iterator[tuple[Family, DotProblem]]:
        while True:
            yield FAMILY, random_problem(rng)

    with seeded(73) as rng:
        return few_kernels.runs(drawn(rng), rng, RANDOM, SOURCES)


def wrong(number: int, family: Family, problem: DotProblem, config: Any) -> str | None:
    """The errors, if ours is more than twice XLA's. XLA may cut k into other splits: the tensor cores truncate each sum
    of 16 products, by half a unit in the mean, and sums of e4m3 products to 13 bits. XLA may also multiply float32
    without the tensor cores. Then ours is as near to the product of operands in tf32."""
    operands = normals(problem.operand_types, SEED + number)
    out = poison.run(device_plan(family, problem, config), problem, *operands)
    xla = np.asarray(jax.jit(lambda *operands: dot_reference.dot_general(problem, *operands))(*operands))
    wide = [np.asarray(x, np.float64) for x in operands]
    exact = dots.exactly(problem, *wide)
    ours, theirs = (float(np.linalg.norm(np.asarray(y, np.float64) - exact)) for y in (out, xla))
    of = float(np.linalg.norm(exact))
    truncated = 2.0**-13 * of if problem.dtype == E4M3 else 2.0**-25 * of * problem.k / (16 * config.splits)
    least = max(2e-6 * of, truncated)
    fine = ours <= max(2 * theirs, least)
    if not fine and problem.dtype == "float32":
        in_tf32 = dots.exactly(problem, *map(tf32.nearest, wide[:2]), *wide[2:])
        fine = float(np.linalg.norm(np.asarray(out, np.float64) - in_tf32)) <= least
    return None if fine else f"{problem} {family} {config}: error {ours:.3e}, XLA's {theirs:.3e}"


def test_random_problems_are_of_every_kind_and_few_kernels() -> None:
    runs = random_runs()
    assert len(runs) == RANDOM and len({few_kernels.source(*run) for run in runs}) <= SOURCES
    assert {p.dtype for _, p, _ in runs} == {"bfloat16", "float16", "float32", E4M3}
    assert {p.lhs_order for _, p, _ in runs} == set(LHS_ORDERS) and {p.rhs_order for _, p, _ in runs} == set(RHS_ORDERS)
    assert {p.out_dtype for _, p, _ in runs} == set(split_k.OUT_CODES) and {p.batch for _, p, _ in runs} == {1, 2, 3}
    assert all(any(getattr(p, size) % 2 for _, p, _ in runs) for size in "mk")
    assert all(any(p.n % 8 == rest for _, p, _ in runs) for rest in (0, 4))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_against_float64(part: int) -> None:
    assert_none_is_wrong(random_runs()[part::PARTS])


def test_epilogues_against_float64() -> None:
    assert_none_is_wrong([(FAMILY, problem, config) for problem, config in epilogue_runs()])


def assert_none_is_wrong(runs: list[tuple[Family, DotProblem, Any]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # XLA compiles a product for each
        found = list(pool.map(lambda numbered: wrong(numbered[0], *numbered[1]), enumerate(runs)))
    failures = [text for text in found if text]
    assert not failures, f"{len(failures)} of {len(runs)}\n" + "\n".join(failures)


@pytest.mark.parametrize(("reduction", "splits"), REDUCTIONS)
def test_the_same_bits_in_a_hundred_runs(reduction: str, splits: int) -> None:
    problem = DotProblem(1, 256, 192, 8192, "bkm", "bkn", "bfloat16", "float32")
    check_repeats(FAMILY, problem, Config(64, 64, 8, splits, reduction))


def check_repeats(family: Family, problem: DotProblem, config: Any) -> None:
    call = device_plan(family, problem, config).custom_call()
    run = jax.jit(lambda x, y: execute.call(call, problem, x, y))
    on_gpu.check_repeats(run, *map(jnp.asarray, normals(problem.operand_types, SEED)))


def test_nan_and_infinity_reach_what_depends_on_them() -> None:
    problem = DotProblem(1, 128, 128, 1024, "bkm", "bkn", "bfloat16", "float32")
    lhs, rhs = dots.integers(problem, np.random.default_rng([SEED, 2]))
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


@pytest.mark.parametrize("activation", dots.ACTIVATIONS)
def test_nan_and_infinity_after_an_activation_are_xlas(activation: str) -> None:
    after = {"bias": "n", "bias_dtype": "float32", "activation": activation}
    problem = DotProblem(1, 64, 64, 64, "bmk", "bkn", "bfloat16", "float32", **after)
    bias = np.resize(np.float32([math.nan, math.inf, -math.inf, -100, 100, -1e30, 1e30, -1e-30, 0, 1]), 64)
    zeros = jnp.zeros((1, 64, 64), jnp.bfloat16)
    out = poison.run(FAMILY.plan(problem, Config(64, 64, 6)), problem, zeros, zeros, jnp.asarray(bias))
    expected = np.asarray(jax.jit(lambda *operands: dot_reference.dot_general(problem, *operands))(zeros, zeros, bias))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-30)


def test_a_layer_and_its_gradient_are_plain_jaxs() -> None:
    """The layer calls the public function. The forward pass is one launch of ours, and the gradients equal plain
    JAX's."""
    rng = np.random.default_rng(SEED)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2048, 64), (64, 2048)))
    b, r = jnp.linspace(-1, 1, 64), jnp.ones((64, 64), jnp.bfloat16)

    def ours(x: jax.Array, w: jax.Array, b: jax.Array, r: jax.Array) -> jax.Array:
        return jax_splitk.matmul(x, w, bias=b, activation="gelu", residual=r, implementation="cutlass")

    def theirs(x: jax.Array, w: jax.Array, b: jax.Array, r: jax.Array) -> jax.Array:
        sums = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return (jax.nn.gelu(sums + b) + r).astype(jnp.bfloat16)

    assert jax.jit(ours).lower(x, w, b, r).as_text().count("jax_splitk_launch") == 1
    np.testing.assert_allclose(*(np.asarray(jax.jit(f)(x, w, b, r), np.float32) for f in (ours, theirs)), rtol=1e-2)
    gradients = [
        jax.jit(jax.grad(lambda *operands, f=f: f(*operands).astype(jnp.float32).sum(), range(4)))(x, w, b, r)
        for f in (ours, theirs)
    ]
    for got, wanted in zip(*gradients, strict=True):
        difference = np.asarray(got, np.float64) - np.asarray(wanted, np.float64)
        assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(np.asarray(wanted, np.float64))
