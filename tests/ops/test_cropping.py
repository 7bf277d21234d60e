"""XLA's weight gradients where padding crops one side of the input and extends the other."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests import float64
from tests.problems import conv, seeded

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU is what is wrong by itself")


def random_problem(rng: np.random.Generator, plain: bool) -> ConvWgradProblem:
    """Small, with a padding that crops the low side of a dimension and extends the high one."""
    rank, groups = (2, 1) if plain else (int(rng.integers(1, 4)), int(rng.integers(1, 3)))

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers(low, high, rank))

    while True:
        steps = {} if plain else {"stride": some(1, 3), "lhs_dilation": some(1, 3), "rhs_dilation": some(1, 3)}
        padding = tuple(zip(some(-5, 2), some(-1, 5), strict=True))
        problem = conv(some(3, 9), some(1, 4), (4, 6), padding=padding, groups=groups, dtype="float32", **steps)
        if problem.reduction_size > 0 and any(low < 0 < high for low, high in padding):
            batch_groups = 1 if plain or groups > 1 else 2
            return dataclasses.replace(problem, batch_group_count=batch_groups)


def in_float64(problem: ConvWgradProblem, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Of each batch group by itself: a part of the batch with a part of g's channels."""
    count = problem.batch_group_count
    sizes = {"batch": problem.batch // count, "out_channels": problem.out_channels // count}
    one = dataclasses.replace(problem, batch_group_count=1, **sizes)
    parts = zip(np.split(lhs, count), np.split(g, count, axis=-1), strict=True)
    return np.concatenate([float64.conv_wgrad_on_host(one, *part) for part in parts], axis=-1)


@pytest.mark.parametrize("plain", [True, False])
def test_wgrad_is_exact_on_integers(plain: bool) -> None:
    """The plain ones are those that XLA:CPU of jaxlib 0.10 and 0.11 computes wrongly, mostly."""
    with seeded(31 + plain) as rng:
        for _ in range(12):
            problem = random_problem(rng, plain)
            lhs, g = (rng.integers(-2, 3, shape).astype(np.float32) for shape in (problem.lhs_shape, problem.g_shape))
            out = jax.jit(conv_reference.conv_wgrad, static_argnums=2)(lhs, g, problem)
            np.testing.assert_array_equal(out, in_float64(problem, lhs, g), err_msg=str(problem))
