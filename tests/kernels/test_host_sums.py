"""Long sums of the CPU's kernels: exact if float32 holds the result, else with an error of at most XLA's."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.cpu.passes import Config as ConvConfig
from jax_splitk.kernels.cpu.quantized import Config as QuantizedConfig
from jax_splitk.kernels.cpu.wgrad import Config
from tests.problems import generator, on_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host handlers run on the CPU")

NUMBERS = ("NWC", "WIO", "NWC")
# More than a float32 can count in steps of one.
LONG = 2**24 + 3 * 2**10


def wgrad(x: Any, g: Any, groups: int = 1, **more: Any) -> np.ndarray:
    shape = (1, x.shape[-1] // groups, g.shape[-1])
    arguments = {"feature_group_count": groups, "preferred_element_type": jnp.float32, **more}
    call = lambda x, g: jax_splitk.conv_wgrad(x, g, shape, (1,), "VALID", dimension_numbers=NUMBERS, **arguments)  # noqa: E731
    return np.asarray(jax.jit(call)(x, g), np.float64)


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(got.reshape(exact.shape) / exact - 1).max())


def test_ones_are_counted() -> None:
    ones = jnp.ones((1, LONG, 1), jnp.bfloat16)
    assert wgrad(ones, ones, config=Config(1, 64)) == LONG


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2], ids=["dense", "depthwise"])
@pytest.mark.parametrize("config", [Config(1, 64), Config(1, 4096), Config(3, 24)], ids=str)
def test_integers_are_exact_where_their_sum_is(config: Config, groups: int, dtype: str) -> None:
    """The terms are 2^24, zeros, and an even number of ones: in a single float32 the ones would be rounded away."""
    ones = 3072
    column = np.concatenate([[4096.0], np.zeros(6000), np.ones(ones)])
    x = np.tile(column[None, :, None], (1, 1, groups))
    first = np.ones_like(x)
    first[:, 0] = 4096
    operands = (on_device(each, dtype) for each in (x, first))
    np.testing.assert_array_equal(wgrad(*operands, groups, config=config), 2.0**24 + ones)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 8], ids=["dense", "depthwise"])
def test_a_long_sum_of_one_sign_is_as_good_as_xlas(groups: int, dtype: str) -> None:
    rng = generator(370)
    x, g = (jnp.asarray(rng.random((4, 100_000, 8)), dtype) for _ in range(2))
    flat_x, flat_g = (np.asarray(array, np.float64).reshape(-1, 8) for array in (x, g))
    exact = flat_x.T @ flat_g if groups == 1 else np.sum(flat_x * flat_g, axis=0)
    # Compare both with XLA's matrix product: XLA sums a depthwise gradient differently from release to release.
    of_xla = error(wgrad(x, g, implementation="xla"), flat_x.T @ flat_g)
    for config in (Config(1, 64), Config(1, 4096), Config(7, 200)):
        assert error(wgrad(x, g, groups, config=config), exact) <= max(of_xla, 2e-7)


def test_a_long_forward_pass_is_as_good_as_xlas() -> None:
    rng, channels = generator(371), 500_000
    x, w = (jnp.asarray(rng.random(shape), jnp.float32) for shape in ((1, 3, channels), (1, channels, 4)))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)[0]

    def forward(**arguments: Any) -> np.ndarray:
        call = lambda x, w: jax_splitk.conv_fprop(x, w, (1,), "VALID", dimension_numbers=NUMBERS, **arguments)  # noqa: E731
        return np.asarray(jax.jit(call)(x, w), np.float64)

    of_xla = error(forward(implementation="xla"), exact)
    assert error(forward(config=ConvConfig(1, 64)), exact) <= max(of_xla, 2e-7)


def test_a_long_quantized_product_is_as_good_as_xlas() -> None:
    rng, k = generator(372), 2**17
    q = jax_splitk.QuantizedArray(
        jnp.asarray(rng.integers(1, 128, (k, 3)), jnp.int8), jnp.asarray(rng.random((k // 64, 3)), jnp.float32)
    )
    x, weight = jnp.asarray(rng.random((2, k)), jnp.bfloat16), jax_splitk.prepack(q)
    exact = np.asarray(x, np.float64) @ np.asarray(jax_splitk.dequantize(q), np.float64)
    product = functools.partial(jax_splitk.quantized_matmul, preferred_element_type=jnp.float32)
    ours, of_xla = (
        error(np.asarray(product(x, weight, **each), np.float64), exact)
        for each in ({"config": QuantizedConfig(1, 8)}, {"implementation": "xla"})
    )
    assert ours <= max(of_xla, 2e-7)


@pytest.mark.parametrize("config", [Config(1, 64), Config(4, 64)], ids=str)
def test_what_is_not_finite_goes_through_a_long_sum(config: Config) -> None:
    x = np.ones((1, 5000, 5), np.float32)
    x[0, 700, 1], x[0, 3000, 2] = np.inf, np.nan
    x[0, 100, 3], x[0, 4000, 3] = np.inf, -np.inf
    x[0, ::2, 4] = 3e38
    got = wgrad(jnp.asarray(x), jnp.ones((1, 5000, 1)), config=config)
    np.testing.assert_array_equal(got.reshape(-1), [5000, np.inf, np.nan, np.nan, np.inf])


def test_a_long_sum_has_the_same_bits_whatever_the_block() -> None:
    rng = generator(373)
    x, g = (jnp.asarray(rng.standard_normal((1, 6000, 3)), jnp.float32) for _ in range(2))
    first = wgrad(x, g, config=Config(3, 64))
    for block in (8, 100, 512, 2000):
        np.testing.assert_array_equal(wgrad(x, g, config=Config(3, block)), first)
