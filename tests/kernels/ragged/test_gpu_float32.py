"""Float32 grouped products on a GPU: exact on integers, errors against float64 and XLA, infinities, repeats."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from tests import ragged_dots
from tests.on_gpu import check_repeats
from tests.problems import seeded

pytestmark = pytest.mark.gpu

# Rows, k, n and experts: sizes that are no multiples of tiles, one piece of k and several, few and many rows a group.
LAYERS = ((300, 136, 200, 5), (2000, 72, 520, 33), (8192, 2048, 512, 16))
PRECISIONS = ("default", "highest")


def problems(layer: tuple[int, int, int, int]) -> list[RaggedDotProblem]:
    """The forward product and the gradients of lhs and rhs."""
    m, k, n, groups = layer
    forward = RaggedDotProblem("forward", groups, m, k, n, "float32", "float32")
    back = dataclasses.replace(forward, k=n, n=k, rhs_order="gnk")
    return [forward, back, dataclasses.replace(forward, mode="rhs_gradient")]


def draw(rng: np.random.Generator, layer: tuple[int, int, int, int], integers: bool) -> list[np.ndarray]:
    """Tokens, weights, cotangents and group sizes, whose sum is less than m."""
    m, k, n, groups = layer
    shapes = (m, k), (groups, k, n), (m, n)
    if integers:  # tokens of two parts, with sums that float32 holds
        found = [rng.integers(-limit, limit + 1, shape) for limit, shape in zip((300, 2, 2), shapes, strict=True)]
    else:
        found = [rng.standard_normal(shape) for shape in shapes]
    sizes = rng.multinomial(m - 7, rng.dirichlet(np.ones(groups)))
    return [*(x.astype(np.float32) for x in found), sizes.astype(np.int32)]


def exactly(layer: tuple[int, int, int, int], x: Any, w: Any, ct: Any, sizes: Any) -> list[np.ndarray]:
    """All three passes in float64."""
    operands = (x, w), (ct, w), (x, ct)
    return [ragged_dots.exactly(p, *two, sizes) for p, two in zip(problems(layer), operands, strict=True)]


def passes(x: jax.Array, w: jax.Array, ct: jax.Array, sizes: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """The result and the gradients of lhs and of rhs."""
    out, back = jax.vjp(lambda x, w: jax_splitk.ragged_dot(x, w, sizes, **options), x, w)
    return out, *back(ct)


def run(operands: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    function = jax.jit(functools.partial(passes, **options))
    return [np.asarray(x, np.float64) for x in function(*map(jnp.asarray, operands))]


def run_apart(operands: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    """Each pass in a program of its own: XLA's take gigabytes of temporary memory each."""
    given = [jnp.asarray(x) for x in operands]
    each = [jax.jit(lambda *given, i=i: passes(*given, **options)[i]) for i in range(3)]
    return [np.asarray(function(*given), np.float64) for function in each]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_exact_on_integers(layer: tuple[int, int, int, int], precision: str) -> None:
    with seeded(520) as rng:
        operands = draw(rng, layer, integers=True)
        for found, exact in zip(run(operands, precision=precision), exactly(layer, *operands), strict=True):
            np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_errors(layer: tuple[int, int, int, int], precision: str) -> None:
    """HIGHEST has at most twice the error of XLA's float32 product, or that of 512 products added one by one in
    float32; DEFAULT has a tenth of that of tf32."""
    with seeded(521) as rng:
        operands = draw(rng, layer, integers=False)
    exact = exactly(layer, *operands)
    distances = lambda found: [np.linalg.norm(a - b) for a, b in zip(found, exact, strict=True)]  # noqa: E731
    ours, norms = distances(run(operands, precision=precision)), [np.linalg.norm(x) for x in exact]
    xlas = distances(run_apart(operands, precision="highest", implementation="xla"))
    for mine, xla, norm in zip(ours, xlas, norms, strict=True):
        most = 3e-5 * norm if precision == "default" else max(2 * xla, 2**-21 * norm)
        assert mine <= most, (mine / norm, xla / norm)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_infinities_reach_what_they_reach_in_float64(precision: str) -> None:
    """An infinite token reaches its row of the result, and its group's gradient; NaN is where it meets zeros."""
    layer = LAYERS[0]
    with seeded(522) as rng:
        operands = draw(rng, layer, integers=True)
        operands[0][rng.integers(250), rng.integers(layer[1])] = np.inf
        operands[0][-7:], operands[2][-7:] = np.nan, np.nan  # rows of no group
        with np.errstate(invalid="ignore"):
            exact = exactly(layer, *operands)
        for found, expected in zip(run(operands, precision=precision), exact, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hundred_runs_are_the_same(precision: str) -> None:
    with seeded(523) as rng:
        operands = draw(rng, LAYERS[2], integers=False)
    for i in range(3):
        one = jax.jit(lambda *given, i=i: passes(*given, precision=precision)[i])
        check_repeats(one, *map(jnp.asarray, operands))


def test_kernels_compute_it() -> None:
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(np.random.default_rng(0), LAYERS[2], integers=True)]
    for precision in PRECISIONS:
        decisions = jax_splitk.explain(functools.partial(passes, precision=precision), *types).decisions
        assert {d.family for d in decisions} == {"ragged_m", "ragged_k"}
