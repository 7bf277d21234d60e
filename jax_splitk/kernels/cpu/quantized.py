"""The `host` product with packed quantized weights: split-k over XLA's CPU threads (see ffi/host_quantized.cc).

A thread decodes a tile of 64 features by 64 k to float32, multiplies it with its rows of the activation, and goes on
along its part of k. If there are several parts, a second pass adds their partial sums in order, as in CUTLASS's
parallel split-k.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from jax_splitk.kernels.base import host
from jax_splitk.kernels.base.family import field_refusal
from jax_splitk.kernels.base.host import HostFamily, Product
from jax_splitk.kernels.base.named import NamedByFormat
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized import formats
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET
from jax_splitk.runtime.target import Target

MAX_ROW_BLOCK = 1024  # ffi/host_quantized.cc has the same
MOST_ROWS = 128  # of a weight: with more, XLA is faster, which decodes all of it once for all rows
# A task decodes tiles. Rows of x are plain; a column's values are decoded.
DECODING: dict[str, Any] = {"depth": TILE, "row_cost": 0.02, "column_cost": 4.0}


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the work: `splits` parts of k's tiles, `row_block` activation rows for each decoding of a tile.
    `splits` alone determines the bits of the result.
    """

    splits: int
    row_block: int


class PackedHost(NamedByFormat, HostFamily[Any, Config]):
    """Serves every valid problem whose sizes an int32 holds.

    Attributes:
      sizes: the names of a problem's sizes.
    """

    handler = HOST_QUANTIZED_TARGET
    sizes: ClassVar[tuple[str, ...]]

    def weights(self, problem: Any) -> int:
        """The number of weights."""
        return 1

    def problem_refusal(self, problem: Any) -> str | None:
        return host.too_large(problem, *self.sizes)

    def config_refusal(self, problem: Any, config: Config) -> str | None:
        splits = range(1, min(host.ceil_div(problem.k, TILE), host.MAX_SPLITS) + 1)
        return field_refusal(config, splits=splits, row_block=range(1, MAX_ROW_BLOCK + 1))

    def why_xla_untuned(self, problem: Any) -> str | None:
        """XLA:CPU is faster with many rows: it decodes each weight once for all rows."""
        if problem.rows > MOST_ROWS * self.weights(problem):
            return f"rows={problem.rows} are faster on XLA:CPU; preferred up to {MOST_ROWS} for each weight"
        return host.too_small(problem)

    def attributes(self, problem: Any) -> dict[str, Any]:
        return {
            "values": formats.table(formats.FORMATS[problem.qtype]),
            "has_zero": np.bool_(problem.zero_dtype != "none"),
            "has_channel": np.bool_(problem.channel_dtype != "none"),
            "group_size": np.int64(problem.group_size),
        }


class QuantizedHost(PackedHost):
    name = "quantized_host"
    ABI = 3
    sizes = ("rows", "k", "features")

    def divisions(self, problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
        """Few splits if features and rows give enough tasks, and three row blocks."""
        splits = sorted({1, 2, 4, 8, target.cores, 2 * target.cores})
        return [Config(s, b) for b in (24, 96, 384) if b < problem.rows + 96 for s in splits]

    def product(self, problem: QuantizedMatmulProblem, config: Config) -> Product:
        sizes = (problem.rows, problem.k, problem.features)
        return Product(*sizes, 1, config.splits, row_block=config.row_block, **DECODING)


FAMILY = QuantizedHost(Config)
