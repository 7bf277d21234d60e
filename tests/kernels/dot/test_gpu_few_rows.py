"""The kernel of products of few rows on a GPU: exactness, accuracy, determinism, and a stack that is read in place."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction.few_rows import FAMILY, MAX_BLOCKS, TILES_M, TILES_N, Config
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import dots, few_kernels
from tests.kernels.dot.test_few_rows import runs
from tests.kernels.dot.test_gpu_dot import assert_none_is_wrong, check_exact, check_repeats
from tests.problems import SEED, seeded

pytestmark = pytest.mark.gpu

RANDOM, SOURCES = 96, 32
LAYERS = 6


def exact_runs() -> list[tuple[DotProblem, Config]]:
    """Every tile with every number of thread blocks a multiprocessor, in every size of cluster, on sizes that no tile
    divides, and shapes of a decode step."""
    found = list(runs())
    splits = itertools.cycle((8, 1, 2, 3, 4, 5, 6, 7))
    kinds = itertools.cycle(
        itertools.product(
            (("bmk", "bkn"), ("mbk", "kbn"), ("bmk", "bnk"), ("mbk", "nbk")),
            (("bfloat16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")),
        )
    )
    for tile_m, tile_n, blocks in itertools.product(TILES_M, TILES_N, range(1, MAX_BLOCKS + 1)):
        (lhs, rhs), dtypes = next(kinds)
        config = Config(tile_m, tile_n, 0, next(splits)).deepest(blocks)
        found.append((DotProblem(2, tile_n - 1, 712, 2056, lhs, rhs, *dtypes), config))
        narrow = DotProblem(2, tile_n, 328, 2064, "bmk", "nbk", E4M3, "float16")
        found.append((narrow, config))
    for m, (k, n) in itertools.product((1, 16, 64), ((4096, 14336), (14336, 4096), (4096, 1024))):
        problem = DotProblem(1, m, n, k, "bmk", "bkn", "bfloat16", "bfloat16")
        found.append((problem, FAMILY.candidates(problem, DEFAULT_CUDA)[0]))
    exact = [after for after in dots.epilogues() if after.get("activation", "none") in ("none", "relu")]
    for after in exact:
        problem = DotProblem(2, 20, 268, 1000, "bmk", "bnk", "bfloat16", "float32", **after)
        found.append((problem, Config(64, 32, 6, next(splits))))
    return [(p, c) for p, c in found if FAMILY.refusal(p, c) is None]


EXACT = exact_runs()


def device_code() -> set[compiler.Source]:
    return {FAMILY.source(p, c) for p, c in EXACT} | {few_kernels.source(*run) for run in random_runs()}


@pytest.mark.parametrize(("problem", "config"), EXACT, ids=str)
def test_exact_on_integers(problem: DotProblem, config: Config) -> None:
    check_exact(FAMILY, problem, config)


def random_problem(rng: np.random.Generator) -> DotProblem:
    dtype, out = str(rng.choice(("bfloat16", "float16", E4M3))), str(rng.choice(("bfloat16", "float16", "float32")))
    order, multiple = str(rng.choice(("bkn", "kbn", "bnk", "nbk"))), 8
    if dtype == E4M3:
        out, order, multiple = "bfloat16", "bnk", 16
    n, k = (multiple * int(2 ** rng.uniform(0, 9)) for _ in "nk")
    return DotProblem(int(rng.integers(1, 4)), int(rng.integers(1, 65)), n, k, "bmk", order, dtype, out)


def random_runs() -> list[tuple[Family, DotProblem, Any]]:
    def drawn(rng: np.random.Generator) -> Iterator[tuple[Family, DotProblem]]:
        while True:
            yield FAMILY, random_problem(rng)

    with seeded(74) as rng:
        return few_kernels.runs(drawn(rng), rng, RANDOM, SOURCES)


def test_random_problems_against_float64() -> None:
    assert_none_is_wrong(random_runs())


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_the_same_bits_in_a_hundred_runs(splits: int) -> None:
    problem = DotProblem(1, 16, 1024, 8192, "bmk", "bkn", "bfloat16", "float32")
    check_repeats(FAMILY, problem, Config(64, 16, 5, splits))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_scan_reads_the_stack_in_place(transposed: bool) -> None:
    """Temporary memory has no copy of a layer. The results are those of separate layers, bit for bit."""
    width, hidden, rows = 1024, 2048, 16
    shapes = ((width, hidden), (hidden, width))
    keys = jax.random.split(jax.random.key(SEED), 3)
    up, down = (
        jax.random.normal(key, (LAYERS, *(shape[::-1] if transposed else shape)), jnp.bfloat16) * shape[0] ** -0.5
        for key, shape in zip(keys[:2], shapes, strict=True)
    )
    x = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)
    up, down = up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for n, w in zip((hidden, width), weights, strict=True):
            problem = DotProblem(1, *(rows, n, x.shape[1]), "bmk", "bnk" if transposed else "bkn", *("bfloat16",) * 2)
            config = FAMILY.candidates(problem, DEFAULT_CUDA)[0]
            x = jax_splitk.dot_general(x, w, numbers, implementation="cutlass", config=config)
        return x, None

    scanned = jax.jit(lambda x, up, down: lax.scan(layer, x, (up, down))[0]).lower(x, up, down).compile()

    def unrolled(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x, _ = layer(x, (up[i], down[i]))
        return x

    found, wanted = (np.asarray(f(x, up, down), np.float32) for f in (scanned, jax.jit(unrolled)))
    np.testing.assert_array_equal(found, wanted)
    analysis = scanned.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < width * hidden * 2
