"""Special properties of the gathering family on a GPU: chains of several blocks, and infinities."""

import dataclasses
import itertools

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.gather.wgrad import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from tests import float64, on_gpu, poison
from tests.kernels.wgrad.test_gather import BLOCKS, CHAINED
from tests.problems import SEED, conv
from tests.random_problems import FLOATS, HALVES

pytestmark = pytest.mark.gpu

SPECIAL = [
    dataclasses.replace(p, dtype=dtype, precision=precision)
    for p, (dtype, precision) in itertools.product(
        (
            conv((28, 28), (5, 5), (1, 32), batch=16, padding=2),
            conv((40, 40), (7, 7), (3, 64), stride=2, padding=((2, 3), (2, 3))),
            conv((15, 13), (3, 3), (65, 100), padding=1),
            conv((12, 12), (3, 3), (200, 24), padding=1, stride=2),
        ),
        (*HALVES, *FLOATS),
    )
]


def device_code() -> set[compiler.Source]:
    sources = {FAMILY.source(CHAINED, config) for config in BLOCKS.values()}
    return sources | {FAMILY.source(p, config) for p in SPECIAL for config in on_gpu.some_configs(FAMILY, p, 2)}


@pytest.mark.parametrize("config", BLOCKS.values(), ids=str)
def test_chains_of_several_blocks_are_exact_and_accurate(config: Config) -> None:
    on_gpu.check_exact(FAMILY, CHAINED, [config])
    lhs, g = on_gpu.normals(CHAINED)
    exact = float64.conv_wgrad(CHAINED, lhs, g)
    assert on_gpu.error(on_gpu.ours(FAMILY, CHAINED, config)(lhs, g), exact) < 3e-7


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("p", SPECIAL, ids=lambda p: f"{p} {p.precision}")
def test_an_infinity_stays_one(p: ConvWgradProblem, value: float) -> None:
    """The infinity is one element of lhs, and so in all its bf16 parts. The other elements are whole numbers of one
    sign."""
    rng = np.random.default_rng([SEED, 8])
    lhs, g = (rng.integers(1, 3, shape).astype(np.float32) for shape in (p.lhs_shape, p.g_shape))
    place = (0, *(size // 2 for size in p.input_spatial), 0)
    one = np.zeros(p.lhs_shape)
    lhs[place], one[place] = 0, 1
    expected = float64.conv_wgrad_on_host(p, lhs, g)
    expected[float64.conv_wgrad_on_host(p, one, g) != 0] = value
    lhs[place] = value
    for config in on_gpu.some_configs(FAMILY, p, 2):
        out = poison.run(on_gpu.plan(FAMILY, p, config), p, jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype))
        np.testing.assert_array_equal(out, expected.astype(np.float32), err_msg=str(config))
