"""XLA's passes of a convolution whose padding crops one side of the input and extends the other."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.operations import OPERATIONS
from tests import float64
from tests.problems import conv, seeded, together

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU is what is wrong by itself")


def random_problem(rng: np.random.Generator, plain: bool, other: bool = False) -> ConvWgradProblem:
    """A small problem. Its padding crops the low side of a dimension and extends the high side, or the reverse
    (`other`)."""
    rank, groups = (2, 1) if plain else (int(rng.integers(1, 4)), int(rng.integers(1, 3)))

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers(low, high, rank))

    while True:
        steps = {} if plain else {"stride": some(1, 3), "lhs_dilation": some(1, 3), "rhs_dilation": some(1, 3)}
        padding = tuple(zip(some(-5, 2), some(-1, 5), strict=True))
        padding = tuple(pair[::-1] for pair in padding) if other else padding
        problem = conv(
            some(3, 9), some(1, 3 if other else 4), (4, 6), padding=padding, groups=groups, dtype="float32", **steps
        )
        if problem.reduction_size > 0 and any(min(pair) < 0 < max(pair) for pair in padding):
            batch_groups = 1 if plain or groups > 1 else 2
            return dataclasses.replace(problem, batch_group_count=batch_groups)


def in_float64(problem: ConvWgradProblem, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The result for each batch group by itself: a part of the batch with a part of g's channels."""
    count = problem.batch_group_count
    sizes = {"batch": problem.batch // count, "out_channels": problem.out_channels // count}
    one = dataclasses.replace(problem, batch_group_count=1, **sizes)
    parts = zip(np.split(lhs, count), np.split(g, count, axis=-1), strict=True)
    return np.concatenate([float64.conv_wgrad_on_host(one, *part) for part in parts], axis=-1)


@pytest.mark.parametrize("plain", [True, False])
def test_wgrad_is_exact_on_integers(plain: bool) -> None:
    """XLA:CPU of jaxlib 0.10 and 0.11 computes most of the plain convolutions wrongly."""
    with seeded(31 + plain) as rng:
        for _ in range(12):
            problem = random_problem(rng, plain)
            lhs, g = (rng.integers(-2, 3, shape).astype(np.float32) for shape in (problem.lhs_shape, problem.g_shape))
            out = jax.jit(conv_reference.conv_wgrad, static_argnums=2)(lhs, g, problem)
            np.testing.assert_array_equal(out, in_float64(problem, lhs, g), err_msg=str(problem))


def arguments(problem: ConvWgradProblem) -> dict[str, Any]:
    """Arguments of the public operations."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    found = {name: getattr(problem, name) for name in names}
    spatial = "DHW"[3 - problem.rank :]
    return found | {"dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), "implementation": "xla"}


@pytest.mark.parametrize("plain", [True, False])
def test_fprop_and_dgrad_are_exact_on_integers(plain: bool) -> None:
    """If the forward pass extends the low side by more than a window, the input gradient crops it."""
    with seeded(33 + plain) as rng:
        for i in range(20):
            p = dataclasses.replace(random_problem(rng, plain, other=i % 2 > 0), batch_group_count=1)
            shapes = (p.lhs_shape, p.rhs_shape, p.g_shape)
            lhs, rhs, g = (rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)
            forward, back = (kind(**vars(p)) for kind in (ConvFpropProblem, ConvDgradProblem))
            found = together((
                lambda x, w, g, p=p: jax_splitk.conv_fprop(x, w, **arguments(p)),
                lambda x, w, g, forward=forward: OPERATIONS[forward.op].reference(forward, x, w),
                lambda x, w, g, p=p: jax_splitk.conv_dgrad(g, w, p.lhs_shape, **arguments(p)),
                lambda x, w, g, back=back: OPERATIONS[back.op].reference(back, g, w),
            ), lhs, rhs, g)  # fmt: skip
            expected = float64.conv_fprop_on_host(p, lhs, rhs), float64.conv_dgrad_on_host(p, g, rhs)
            for out, of_pass in zip(found, (expected[0], expected[0], expected[1], expected[1]), strict=True):
                np.testing.assert_array_equal(out, of_pass, err_msg=str(p))


@pytest.mark.parametrize(("size", "window", "stride", "padding"), [(96, 2, 8, 2), (64, 3, 4, 3), (64, 1, 2, 1)])
def test_input_gradients_take_no_more_memory_than_laxs_and_the_cotangent(
    size: int, window: int, stride: int, padding: int
) -> None:
    """With padding of a window or more, the cotangent is sliced before XLA dilates it."""
    geometry: dict[str, Any] = {
        "window_strides": (stride, stride),
        "padding": ((padding, padding),) * 2,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    lhs, rhs = jnp.ones((2, size, size, 8)), jnp.ones((window, window, 8, 8))
    taken, found = [], []
    for function in (jax_splitk.conv_general_dilated, lax.conv_general_dilated):
        forward = functools.partial(function, **geometry)
        g = jnp.ones(jax.eval_shape(forward, lhs, rhs).shape)
        back = jax.jit(lambda g, rhs, f=forward: jax.vjp(lambda x: f(x, rhs), lhs)[1](g)[0])
        compiled = back.lower(g, rhs).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        taken.append(memory.temp_size_in_bytes)
        found.append(compiled(g, rhs))
    assert taken[0] <= taken[1] + g.nbytes + 1024
    np.testing.assert_array_equal(*found)
