"""The rates that a GPU reaches in a run: for a matrix product of random data, and for a copy.

python -m benchmarks.ceilings

prints the rates of the cost model (`jax_splitk/kernels/cost_models/DEVICE.json`) that follow from them.
"""

import dataclasses
import functools
import json
import sys

import jax
from jax import numpy as jnp

from benchmarks import timing
from jax_splitk.runtime.target import target_for

SIDE = 8192
COPIED_BYTES = 2**30
CLOCK_FLOPS = 4096  # 16-bit operations a clock of a multiprocessor's tensor cores, by the data sheet


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured rates: operations of a bfloat16 product [8192, 8192] x [8192, 8192], and bytes read and written by a
    copy of 1 GiB, both for each second.
    """

    flops: float
    bytes: float

    def share(self, flops: float, bytes_moved: float, us: float) -> float:
        """The time that the measured rates allow for these operations and bytes, over the time `us` in microseconds."""
        return max(flops / self.flops, bytes_moved / self.bytes) / us * 1e6

    def rates(self, cores: int) -> dict[str, float]:
        """Rates of the cost model, for a device with `cores` multiprocessors."""
        return {"tensor_clock": self.flops / (CLOCK_FLOPS * cores), "memory_bytes": self.bytes}


@functools.cache
def measured() -> Ceilings | None:
    """Measures the rates; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    square = (SIDE, SIDE)
    product = _seconds(jnp.matmul, timing.random_input_sets([square, square], jnp.bfloat16, maximum_sets=2))
    copied = _seconds(jnp.copy, timing.random_input_sets([(COPIED_BYTES // 2,)], jnp.bfloat16, maximum_sets=2))
    return Ceilings(2 * SIDE**3 / product, 2 * COPIED_BYTES / copied)


def _seconds(function: timing.Function, input_sets: timing.InputSets) -> float:
    compiled = jax.jit(function).lower(*input_sets[0]).compile()
    return timing.compare({"": compiled}, input_sets, rounds=3)[""].us * 1e-6


def main() -> int:
    found, target = measured(), target_for("cuda")
    if found is None:
        print("no GPU", file=sys.stderr)
        return 1
    print(json.dumps({target.device_kind: found.rates(target.cores)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
