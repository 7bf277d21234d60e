"""What a GPU reaches in the same run: a matrix product of random data, and a copy."""

import dataclasses
import functools

import jax
from jax import numpy as jnp

from benchmarks import timing

SIDE = 8192
COPIED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured rates: operations of a bfloat16 product [8192, 8192] x [8192, 8192], and bytes read and written by a
    copy of 1 GiB, both for each second.
    """

    flops: float
    bytes: float

    def share(self, flops: float, bytes_moved: float, us: float) -> float:
        """Of the rate that bounds so many operations and bytes, what a time in microseconds reaches."""
        return max(flops / self.flops, bytes_moved / self.bytes) / us * 1e6


@functools.cache
def measured() -> Ceilings | None:
    """The default device's; None where it is not a GPU."""
    if jax.default_backend() != "gpu":
        return None
    square = (SIDE, SIDE)
    product = _seconds(jnp.matmul, timing.random_input_sets([square, square], jnp.bfloat16, maximum_sets=2))
    copied = _seconds(jnp.copy, timing.random_input_sets([(COPIED_BYTES // 2,)], jnp.bfloat16, maximum_sets=2))
    return Ceilings(2 * SIDE**3 / product, 2 * COPIED_BYTES / copied)


def _seconds(function: timing.Function, input_sets: timing.InputSets) -> float:
    compiled = jax.jit(function).lower(*input_sets[0]).compile()
    return timing.compare({"": compiled}, input_sets, rounds=3)[""].us * 1e-6
