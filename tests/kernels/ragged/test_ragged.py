"""The kernels of grouped products on the CPU, in the emulator: exact on integers for every kind of group sizes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.ragged.tiles import Config, RaggedFamily
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from tests import emulator, ragged_dots
from tests.every_kernel import ragged_config
from tests.exhaustive import thinned
from tests.problems import seeded

FORWARD, RHS_GRADIENT = ragged_m.FAMILY, ragged_k.FAMILY
BF16, HALF, FLOAT = "bfloat16", "float16", "float32"


def forward(groups: int, m: int, k: int = 72, n: int = 136, out: str = BF16, **changes: Any) -> RaggedDotProblem:
    return dataclasses.replace(RaggedDotProblem("forward", groups, m, k, n, BF16, out), **changes)


def rhs_gradient(groups: int, m: int, k: int = 72, n: int = 136, out: str = BF16, **changes: Any) -> RaggedDotProblem:
    return dataclasses.replace(RaggedDotProblem("rhs_gradient", groups, m, k, n, BF16, out), **changes)


def family_of(p: RaggedDotProblem) -> RaggedFamily:
    return FORWARD if p.mode == "forward" else RHS_GRADIENT


def computed(p: RaggedDotProblem, config: Config, operands: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """The kernels' result. Its memory and the workspace held NaN, and the order of threads and copies is random."""
    assert family_of(p).refusal(p, config) is None
    out = np.zeros(p.out_shape, jnp.dtype(p.out_dtype))
    emulator.run(family_of(p).plan(p, config), operands, [out], seed=int(rng.integers(2**31)))
    return out


def check(p: RaggedDotProblem, config: Config, sizes: Iterable[int], rng: np.random.Generator, offset: int = 0) -> None:
    """Results are exact on integers, with NaN in rows and matrices of no group."""
    operands = ragged_dots.integers(p, rng, np.array(sizes, np.int64).astype(np.int32))
    if p.has_offset:
        operands[3][0] = offset
    exact = ragged_dots.exactly(p, *operands).astype(np.float32).astype(jnp.dtype(p.out_dtype))
    out = computed(p, config, ragged_dots.poisoned(p, operands), rng)
    np.testing.assert_array_equal(out, exact, err_msg=f"{p} {config} sizes {operands[2]} offset {offset}")


# ---- group sizes -----------------------------------------------------------------------------------------------------

# Sizes of four groups, with 200 rows.
SIZES = {
    "even": (50, 50, 50, 50),
    "empty groups": (0, 120, 0, 80),
    "edges of a block": (1, 63, 64, 65),
    "sum below m": (40, 0, 7, 1),
    "sum above m": (100, 60, 90, 30),
    "negative": (70, -5, -(2**31), 100),
    "huge": (2**31 - 1, 2**31 - 1, 1, 2**31 - 1),
    "all in the first": (200, 0, 0, 0),
    "all in the last": (0, 0, 0, 200),
    "no rows": (0, 0, 0, 0),
}
SMALL = {
    "forward": (forward(4, 200), ragged_config(64, 128, 3)),
    "forward gnk": (forward(4, 200, rhs_order="gnk"), ragged_config(64, 128, 3)),
    "forward, swapped": (forward(4, 200), ragged_config(64, 16, 3, swap=True)),
    "rhs gradient": (rhs_gradient(4, 200), ragged_config(64, 128, 5)),
}


@pytest.mark.parametrize("kind", [*thinned(SMALL, 3)])
def test_every_kind_of_group_sizes(kind: str) -> None:
    p, config = SMALL[kind]
    with seeded(81) as rng:
        for sizes in SIZES.values():
            check(p, config, sizes, rng)


@pytest.mark.parametrize("groups", thinned((300, 33, 65, 1030), 4))
@pytest.mark.parametrize("problem", [forward, rhs_gradient])
def test_many_groups(problem: Any, groups: int) -> None:
    """There are more groups than a warp has lanes, and more than the kernels sort. Most have a few rows or none."""
    with seeded(82) as rng:
        p = problem(groups, 700, 64, 8)
        config = ragged_config(64, 128, 5)
        check(p, config, rng.multinomial(690, rng.dirichlet(np.full(groups, 0.3))), rng)


@pytest.mark.exhaustive
def test_one_long_group_among_very_many() -> None:
    """There are more groups than the schedule sorts. The one that is cut is not the first that the second kernel
    reads."""
    with seeded(83) as rng:
        sizes = np.zeros(1030, int)
        sizes[777], sizes[3] = 2900, 70
        check(rhs_gradient(1030, 3000, 64, 8), ragged_config(64, 128, 24), sizes, rng)


@pytest.mark.parametrize("offset", thinned((4, -1, 2**31 - 1, 0, 2, -(2**31)), 3))
@pytest.mark.parametrize("problem", [forward, rhs_gradient])
def test_offsets(problem: Any, offset: int) -> None:
    """The operands have two groups of five; for some offsets one or both of them do not exist."""
    with seeded(84) as rng:
        p = problem(2, 130, total_groups=5)
        check(p, ragged_config(64, 128, 5), (30, 0, 65, 20, 10), rng, offset)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", thinned((1, 2, 40), 3))
@pytest.mark.parametrize("problem", [forward, rhs_gradient])
def test_workers_fewer_and_more_than_tiles(problem: Any, workers: int) -> None:
    with seeded(85) as rng:
        check(problem(3, 150, 200, 136), ragged_config(64, 128, workers), (70, 9, 71), rng)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [FORWARD, RHS_GRADIENT], ids=str)
@pytest.mark.parametrize("out", [BF16, FLOAT])
def test_every_tile(family: RaggedFamily, out: str) -> None:
    """k and n are no multiples of the tiles; matrices have one tile or several."""
    problem = forward if family is FORWARD else rhs_gradient
    with seeded(86) as rng:
        for number, (tile_m, tile_n) in enumerate(family.TILES):
            for parts in (1, 2, 4):
                config = dataclasses.replace(ragged_config(tile_m, tile_n, 3), stages=2, parts=parts)
                p = problem(3, 330, *((136, 328), (264, 200), (8, 64))[number % 3], out=out)
                if family.refusal(p, config) is None:
                    check(p, config, rng.permutation((65, 0, 250)), rng)


@pytest.mark.exhaustive
@pytest.mark.parametrize("out", [HALF, FLOAT])
@pytest.mark.parametrize("order", ["gkn", "gnk"])
def test_every_swapped_tile(out: str, order: str) -> None:
    with seeded(87) as rng:
        for tile_m, tile_n in FORWARD.tiles(ragged_config(64, 8, 3, swap=True)):
            p = forward(4, 150, 136, 200, out=out, dtype=HALF, rhs_order=order)
            check(p, ragged_config(tile_m, tile_n, 3, swap=True, stages=2), rng.permutation((0, 1, 130, 12)), rng)


@pytest.mark.parametrize("sizes", thinned(map(list, ((2200, 0, 0), (0, 0, 0), (0, 1, 700))), 3))
def test_empty_groups_matrices_are_zeros(sizes: list[int]) -> None:
    """All groups but one are empty, or all of them; tiles leave in one part or in two."""
    with seeded(95) as rng:
        check(rhs_gradient(3, 2400, 72, 264), ragged_config(64, 128, 4), sizes, rng)
        check(rhs_gradient(3, 2400, 136, 72, FLOAT), ragged_config(128, 128, 3, parts=2), sizes, rng)


# ---- tiles that are cut, and long sums -------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [BF16, FLOAT])
@pytest.mark.parametrize("sizes", thinned(map(list, ((1100, 1200), (1500, 0), (64, 2000))), 3))
def test_cut_tiles(sizes: list[int], out: str) -> None:
    """Tiles of one or two groups are cut, and some workers have more to do than others."""
    with seeded(88) as rng:
        p = rhs_gradient(len(sizes), 2400, 72, 136, out=out)
        check(p, ragged_config(64, 128, 5), sizes, rng)


@pytest.mark.parametrize("workers", thinned((7, 3, 4, 5, 40, 200), 3))
def test_the_last_round_is_cut(workers: int) -> None:
    """A forward product's last round has fewer tiles than there are workers: few, most of them, or none at all."""
    with seeded(96) as rng:
        config = ragged_config(64, 128, workers, cut=True)
        check(forward(3, 330, 1096, 264), config, rng.multinomial(300, (0.5, 0.2, 0.3)), rng)
        check(forward(2, 200, 1032, 136, FLOAT, rhs_order="gnk", total_groups=4), config, (70, 0, 65, 20), rng, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 7, 33])
def test_random_cuts(workers: int) -> None:
    with seeded(89) as rng:
        for _ in range(6):
            groups = int(rng.integers(1, 6))
            m = int(rng.integers(500, 4000))
            k, n = (8 * int(x) for x in rng.integers(1, 40, 2))
            sizes = rng.multinomial(m, rng.dirichlet(np.full(groups, 0.4)))
            check(rhs_gradient(groups, m, k, n), ragged_config(64, 128, workers), sizes, rng)


@pytest.mark.parametrize("workers", thinned((1, 2), 2))
def test_long_float32_sums_leave_the_tensor_cores(workers: int) -> None:
    """A chain has 512 stages, or those that are left. One worker computes a whole tile, or two workers a piece each."""
    with seeded(90) as rng:
        m = 64 * (530 if workers == 1 else 1030)
        p = rhs_gradient(2, m, 8, 8, out=FLOAT)
        config = ragged_config(64, 128, workers)
        check(p, config, (m - 10, 3), rng)


# ---- the order of threads --------------------------------------------------------------------------------------------

ORDERED = {
    "forward": (forward(4, 200, out=FLOAT), ragged_config(64, 128, 3)),
    "forward, cut tiles": (forward(2, 300, 1096, out=FLOAT), ragged_config(64, 128, 7, cut=True)),
    "rhs gradient, cut tiles": (rhs_gradient(2, 2400, out=FLOAT), ragged_config(64, 128, 5)),
    "rhs gradient, short chains": (rhs_gradient(2, 900, 8, 8, FLOAT, precision="highest"), ragged_config(64, 128, 2)),
}


@pytest.mark.parametrize("kind", ORDERED)
def test_results_do_not_depend_on_the_order_of_threads(kind: str) -> None:
    """Runs with threads, copies and late warps in another order give the same bits, near those of float64."""
    p, config = ORDERED[kind]
    with seeded(93) as rng:
        operands = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape, dtype in p.operand_types[:2]]
        operands.append(rng.multinomial(p.m - 9, rng.dirichlet(np.ones(p.groups))).astype(np.int32))
        exact = ragged_dots.exactly(p, *operands)
        first, *others = (computed(p, config, operands, rng) for _ in range(4))
    assert np.linalg.norm(first - exact) < 1e-6 * np.linalg.norm(exact)
    for other in others:
        np.testing.assert_array_equal(other, first)


# ---- NaN -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*thinned(SMALL, 3)])
def test_nan_stays_in_its_group(kind: str) -> None:
    """All rows of one group, and its matrix, are NaN. Results of other groups are exact."""
    p, config = SMALL[kind]
    with seeded(91) as rng:
        for number, sizes in enumerate(((37, 20, 64, 70), (64, 1, 63, 65), (90, 0, 3, 99))):
            operands = ragged_dots.integers(p, rng, np.array(sizes))
            exact = ragged_dots.exactly(p, *operands).astype(np.float32)
            group = 2 if number == 2 else int(rng.integers(4))
            rows = ragged_dots.group_rows(p.m, sizes, 0, 4)[group]
            operands[0][rows] = np.nan
            operands[1][rows if p.mode == "rhs_gradient" else group] = np.nan
            exact[rows if p.mode == "forward" else group] = np.nan
            out = computed(p, config, operands, rng).astype(np.float32)
            np.testing.assert_array_equal(out, exact, err_msg=f"NaN in group {group} of {sizes}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SMALL)
def test_one_row_of_nan_reaches_only_its_results(kind: str) -> None:
    """A row of lhs reaches its own row of a forward product, and its group's matrix of a rhs gradient."""
    p, config = SMALL[kind]
    with seeded(92) as rng:
        operands = ragged_dots.integers(p, rng, np.array((37, 20, 64, 70)))
        exact = ragged_dots.exactly(p, *operands).astype(np.float32)
        row = 37 + 20 + int(rng.integers(64))
        operands[0][row] = np.nan
        exact[row if p.mode == "forward" else 2] = np.nan
        np.testing.assert_array_equal(computed(p, config, operands, rng).astype(np.float32), exact)
