"""The `host` grouped product with a stack of packed weights, on XLA's CPU threads (see ffi/host_quantized.cc).

A task is a block of one group's rows and 64 features. Weights of groups without rows are not read.
"""

from jax_splitk.kernels.base.host import Product
from jax_splitk.kernels.cpu.quantized import DECODING, Config, PackedHost
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.runtime.target import Target


class ExpertsHost(PackedHost):
    name = "quantized_experts_host"
    ABI = 1
    sizes = ("groups", "m", "k", "n", "total_groups")

    def weights(self, problem: QuantizedRaggedDotProblem) -> int:
        return problem.groups

    def divisions(self, problem: QuantizedRaggedDotProblem, target: Target) -> list[Config]:
        """Configs with each of three row blocks, without splits and with splits for each core, or two."""
        return [Config(s, b) for b in (24, 96, 384) for s in sorted({1, target.cores, 2 * target.cores})]

    def _product(self, p: QuantizedRaggedDotProblem, config: Config, rows: int, groups: int, more: int) -> Product:
        sizes, division = (rows, p.k, p.n, groups), {"splits": config.splits, "row_block": config.row_block}
        return Product(*sizes, **division, **DECODING, more_blocks=more)

    def product(self, problem: QuantizedRaggedDotProblem, config: Config) -> Product:
        """The product of all rows. Each group may end with a block of fewer rows."""
        return self._product(problem, config, problem.m, 1, problem.groups)

    def estimate(self, problem: QuantizedRaggedDotProblem, config: Config, target: Target) -> float:
        """The estimate for groups of equal size."""
        active = max(1, min(problem.active, problem.rows))
        return self._product(problem, config, -(-problem.rows // active), active, 0).seconds(target)


FAMILY = ExpertsHost(Config)
