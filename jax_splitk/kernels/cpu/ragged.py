"""The `host` grouped product: each group's rows by its own matrix, on XLA's CPU threads (see ffi/host_ragged.cc).

A task is a block of one group's rows and a tile of columns; for a rhs gradient, a block of lhs's columns, summed over
the group's rows. The kernel reads only rows of groups, and only matrices of groups that have rows.
"""

import dataclasses
from typing import Any

import numpy as np

from jax_splitk.kernels.base import host
from jax_splitk.kernels.base.family import field_refusal
from jax_splitk.kernels.base.host import HostFamily, Product
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime.plan import HOST_RAGGED_TARGET
from jax_splitk.runtime.target import Target

# ffi/host_ragged.cc has the same.
_MAX_ROW_BLOCK = 1024
_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the work: `splits` parts of the reduction, `row_block` rows for each load of a tile of the other
    operand. `splits` alone determines the bits of the result.
    """

    splits: int
    row_block: int


class RaggedHost(HostFamily[RaggedDotProblem, Config]):
    """Products and sums are always float32, whatever `problem.precision` says."""

    name = "ragged_host"
    ABI = 1
    handler = HOST_RAGGED_TARGET

    def problem_refusal(self, problem: RaggedDotProblem) -> str | None:
        for name in ("dtype", "out_dtype"):
            if getattr(problem, name) not in DTYPES[:3]:
                return f"{name}={getattr(problem, name)}; accepted: {', '.join(DTYPES[:3])}"
        return host.too_large(problem, "groups", "m", "k", "n", "total_groups")

    def config_refusal(self, problem: RaggedDotProblem, config: Config) -> str | None:
        k = self.product(problem, config).k
        splits = range(1, max(1, min(k, host.MAX_SPLITS)) + 1)
        return field_refusal(config, splits=splits, row_block=range(1, _MAX_ROW_BLOCK + 1))

    def why_xla_untuned(self, problem: RaggedDotProblem) -> str | None:
        """Why XLA:CPU is as fast, although it multiplies every row with every group's matrix."""
        if problem.groups == 1 and not problem.has_offset:
            return "a product of one group is a dense one; preferred from two groups on"
        return host.too_small(problem)

    def divisions(self, problem: RaggedDotProblem, target: Target) -> list[Config]:
        """Splits if a result has few tiles, and three row blocks."""
        return [Config(s, b) for b in (24, 96, 384) for s in sorted({1, target.cores, 2 * target.cores})]

    def estimate(self, problem: RaggedDotProblem, config: Config, target: Target) -> float:
        """The estimate for groups of equal size."""
        each = -(-problem.rows // problem.groups)
        product = self.product(problem, config)
        if problem.mode == "forward":
            even = dataclasses.replace(product, rows=each, groups=problem.groups, more_blocks=0)
        else:
            even = dataclasses.replace(product, k=each)
        return even.seconds(target)

    def attributes(self, problem: RaggedDotProblem) -> dict[str, Any]:
        return {
            "forward": np.bool_(problem.mode == "forward"),
            "transposed": np.bool_(problem.rhs_order == "gnk"),
        }

    def product(self, problem: RaggedDotProblem, config: Config) -> Product:
        """For a forward product, all rows, with a last block for each group. For a rhs gradient, the longest possible
        reduction of a group."""
        p = problem
        if p.mode == "forward":
            return Product(p.m, p.k, p.n, 1, config.splits, _DEPTH, config.row_block, more_blocks=p.groups)
        return Product(p.k, p.m, p.n, p.groups, config.splits, _DEPTH, config.row_block)


FAMILY = RaggedHost(Config)
