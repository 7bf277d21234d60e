"""The `host` grouped product with a stack of packed weights, on XLA's CPU threads (see ffi/host_experts.cc).

A task is a block of one group's rows and 64 features: it decodes a tile of 64 features by 64 k of the group's weight to
float32, multiplies it with its rows, and goes on along its part of k. Weights of groups without rows are not read.
"""

import dataclasses
from typing import Any

import numpy as np

from jax_splitk.kernels.base import host
from jax_splitk.kernels.base.family import field_refusal
from jax_splitk.kernels.base.host import HostFamily, Product
from jax_splitk.kernels.base.named import NamedByFormat
from jax_splitk.kernels.cpu.quantized import DECODING, MAX_ROW_BLOCK, MOST_ROWS
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.quantized import formats
from jax_splitk.runtime.plan import HOST_EXPERTS_TARGET
from jax_splitk.runtime.target import Target


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the work: `splits` parts of k's tiles, `row_block` rows for each decoding of a tile. `splits`
    alone determines the bits of the result.
    """

    splits: int
    row_block: int


class ExpertsHost(NamedByFormat, HostFamily[QuantizedRaggedDotProblem, Config]):
    """Serves every valid problem whose sizes an int32 holds."""

    name = "quantized_experts_host"
    ABI = 1
    handler = HOST_EXPERTS_TARGET

    def problem_refusal(self, problem: QuantizedRaggedDotProblem) -> str | None:
        for name in ("groups", "m", "k", "n", "total_groups"):
            if getattr(problem, name) > host.INT32_MAX:
                return f"{name}={getattr(problem, name)}; accepted: at most {host.INT32_MAX}"
        return None

    def config_refusal(self, problem: QuantizedRaggedDotProblem, config: Config) -> str | None:
        splits = range(1, min(problem.product.k_tiles, host.MAX_SPLITS) + 1)
        return field_refusal(config, splits=splits, row_block=range(1, MAX_ROW_BLOCK + 1))

    def why_xla_untuned(self, problem: QuantizedRaggedDotProblem) -> str | None:
        """Why XLA:CPU, which decodes all weights once for all rows, is as fast."""
        if problem.rows > MOST_ROWS * problem.groups:
            return f"more than {MOST_ROWS} rows for each weight; preferred up to that"
        if problem.flops < 512:
            return "the problem is so small that the call itself takes most of the time"
        return None

    def candidates(self, problem: QuantizedRaggedDotProblem, target: Target) -> list[Config]:
        """Splits if a result has few tiles, and three row blocks."""
        configs = [Config(s, b) for b in (24, 96, 384) for s in sorted({1, target.cores, 2 * target.cores})]
        return [config for config in configs if self.config_refusal(problem, config) is None]

    def _product(self, p: QuantizedRaggedDotProblem, config: Config, rows: int, groups: int, more: int) -> Product:
        sizes, division = (rows, p.k, p.n, groups), {"splits": config.splits, "row_block": config.row_block}
        return Product(*sizes, **division, **DECODING, more_blocks=more)

    def product(self, problem: QuantizedRaggedDotProblem, config: Config) -> Product:
        """The product of all rows, with a last block for each group."""
        return self._product(problem, config, problem.m, 1, problem.groups)

    def estimate(self, problem: QuantizedRaggedDotProblem, config: Config, target: Target) -> float:
        """The estimate for groups of equal size."""
        active = max(1, min(problem.active, problem.rows))
        return self._product(problem, config, -(-problem.rows // active), active, 0).seconds(target)

    def attributes(self, problem: QuantizedRaggedDotProblem, config: Config) -> dict[str, Any]:
        return {
            "values": formats.table(formats.FORMATS[problem.qtype]),
            "has_zero": np.bool_(problem.zero_dtype != "none"),
            "has_channel": np.bool_(problem.channel_dtype != "none"),
            "group_size": np.int64(problem.group_size),
            "splits": np.int64(config.splits),
            "row_block": np.int64(config.row_block),
        }


FAMILY = ExpertsHost(Config)
