"""Conversions of 4-bit weights, fused with what a program does next. XLA:GPU's own gave wrong numbers in some of these
programs."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import QuantizedArray, dequantize
from tests.problems import on_device, seeded

pytestmark = pytest.mark.gpu

# What a program does with a weight [k, features].
USES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda w: w,
    "transposed": lambda w: w.T,
    "by head": lambda w: w.reshape(w.shape[0], 8, -1).transpose(1, 0, 2),
    "head last": lambda w: w.reshape(w.shape[0], 8, -1).transpose(1, 2, 0),
    "summed over k": lambda w: w.sum(0),
    "summed over features": lambda w: w.sum(1),
    "every other feature": lambda w: w[:, 1::2],
}


@pytest.mark.parametrize("shape", [(64, 64, 32), (256, 64, 128), (512, 192, 32), (4096, 1024, 128)], ids=str)
@pytest.mark.parametrize("zero_dtype", ["int4", "uint4", "int8", None])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_dequantized_weights_are_exact_in_every_use(
    dtype: str, zero_dtype: str | None, shape: tuple[int, int, int]
) -> None:
    k, features, group = shape
    tiles = (k // group, features)
    spread = lambda x: np.repeat(x, group, axis=0)  # noqa: E731
    with seeded(k + features) as draw:
        values, zeros = draw.integers(0, 16, (k, features)), draw.integers(0, 16, tiles)
        values -= 0 if dtype == "uint4" else 8
        zeros -= 0 if zero_dtype == "uint4" else 8
        scale = 2.0 ** draw.integers(-2, 3, tiles)
        zero_point = None if zero_dtype is None else on_device(zeros, zero_dtype)
        q = QuantizedArray(on_device(values, dtype), on_device(scale, "bfloat16"), zero_point, dtype)
        expected = (values - (0 if zero_dtype is None else spread(zeros))) * spread(scale)
        for name, use in USES.items():
            found = jax.jit(lambda q, use=use: use(dequantize(q, jnp.float32)))(q)
            np.testing.assert_array_equal(np.asarray(found), use(expected), err_msg=name)
