"""Division by multiplication, as the device code does it."""

import math

import numpy as np

from jax_splitk.kernels.device.divisor import divisor
from tests.problems import seeded


def test_divisors_divide_all_that_they_may_meet() -> None:
    """n * multiplier >> shift, in 64 bits without sign, for n of 31 bits."""
    most = 2**31 - 1
    with seeded(7) as rng:
        drawn = [int(v) for v in np.exp(rng.uniform(0, math.log(most), 2000))]
        for value in (*range(1, 300), *(2**bits + more for bits in range(2, 31) for more in (-1, 0, 1)), *drawn, most):
            word, multiplier, shift = divisor(value)
            assert (word, -(2**31) <= multiplier < 0) == (value, True)
            edges = [k * value + more for k in (1, 2, most // value // 2, most // value) for more in (-1, 0, 1)]
            for n in (0, 1, most, *edges, *(int(v) for v in rng.integers(0, most, 8))):
                if 0 <= n <= most:
                    product = n * (multiplier % 2**32)
                    assert product < 2**64
                    assert product >> shift == n // value, (n, value)


def test_zero_divides_nothing_but_is_kept() -> None:
    assert divisor(0) == (0, *divisor(1)[1:])
