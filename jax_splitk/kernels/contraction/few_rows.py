"""Kernel family: matrix products of at most 64 rows on Hopper, bound by the bytes of the other operand (device code:
contraction/few_rows.cu).

The columns of the large operand are the rows of WGMMA's tile. The operand is read where it lies, with k or n
contiguous, also as a slice of a larger array. A cluster of thread blocks divides k, and adds its sums through
distributed shared memory in a fixed order: the result is deterministic, bit for bit. It is one launch, without a
workspace.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.contraction import products
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.epilogue import epilogue_macros, epilogue_params
from jax_splitk.kernels.device.split_tile import (
    MAX_CLUSTER,
    MAX_FLOAT32_CHAIN,
    is_whole,
    operand_map,
)
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import BARRIER_BYTES, MIN_STAGES, ROW_BYTES, SHARED_BYTES, WgmmaTile
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target, resident_blocks

TILES_M = (64, 128, 256)
TILES_N = (8, 16, 32, 64)
MAX_STAGES = 16
MAX_ROWS = TILES_N[-1]
DTYPES = ("bfloat16", "float16", E4M3)
MAX_BLOCKS = 4  # that share a multiprocessor


@dataclasses.dataclass(frozen=True)
class Config(WgmmaTile):
    """How a product is computed.

    Attributes:
      tile_m: columns of the large operand in a thread block.
      tile_n: rows of the small operand in a thread block: 8, 16, 32 or 64, at least the problem's m.
      stages: depth of the shared-memory pipeline, in blocks of 128 bytes of k.
      splits: thread blocks of a cluster, which divide k.
    """

    splits: int = 1

    @property
    def landing_bytes(self) -> int:
        """Shared memory in which the cluster's sums arrive, in units of 512 bytes."""
        units = self.tile_m // 16 * self.tile_n // 8
        return -(-units // self.splits) * self.splits * 512 if self.splits > 1 else 0

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + self.landing_bytes

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that share a multiprocessor."""
        return max(1, min(self._most_blocks, SHARED_BYTES // self.shared_bytes))

    @property
    def _most_blocks(self) -> int:
        """How many have enough registers for their sums, which a thread may hold twice (`chained_stages`)."""
        if self.consumers > 1:
            return 1 if self.thread_sums > 32 else 2
        return MAX_BLOCKS if self.thread_sums <= 16 else 3

    def deepest(self, blocks: int) -> "Config":
        """The config with as many stages as `blocks` thread blocks of a multiprocessor can have."""
        fixed = dataclasses.replace(self, stages=0).shared_bytes
        stages = (SHARED_BYTES // blocks - fixed) // self.stage_bytes
        return dataclasses.replace(self, stages=min(stages, MAX_STAGES))


def chained_stages(problem: DotProblem, config: Config) -> int:
    """Stages that the tensor cores add before fp32 additions continue (macro CHAIN); 0 for all stages of a split."""
    if problem.dtype == E4M3:
        return 1
    blocks = -(-products.k_blocks(problem) // config.splits)
    return products.FLOAT32_CHAIN if problem.out_dtype == "float32" and blocks > MAX_FLOAT32_CHAIN else 0


class FewRows(ModelledFamily[DotProblem, Config]):
    """For loops over stacked weights, of which XLA copies a slice before each of its own products. Elsewhere XLA's
    product may be as fast."""

    name = "dot_few_rows"
    ABI = 1
    few_rows = True
    file = "contraction/few_rows.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: DotProblem) -> str | None:
        p = problem
        if p.m > MAX_ROWS:
            return f"m={p.m}; accepted: at most {MAX_ROWS}"
        if p.dtype not in DTYPES:
            return f"dtype {p.dtype}; accepted: {', '.join(DTYPES)}"
        if (reason := products.result_refusal(p)) is not None:
            return reason
        if p.lhs_order[-1] != "k":
            return f"lhs with {p.lhs_order[-1]} contiguous; accepted: k"
        if p.dtype == E4M3 and p.rhs_order[-1] != "k":
            return f"{E4M3} with {p.rhs_order[-1]} contiguous in rhs; accepted: k"
        return products.alignment_refusal(p) or products.size_refusal(p)

    def config_refusal(self, problem: DotProblem, config: Config) -> str | None:
        reason = field_refusal(
            config,
            tile_m=TILES_M,
            tile_n=TILES_N,
            stages=range(MIN_STAGES, MAX_STAGES + 1),
            splits=range(1, MAX_CLUSTER + 1),
        )
        if reason is not None:
            return reason
        if config.tile_n < problem.m:
            return f"tile_n {config.tile_n}; accepted for m={problem.m}: at least {problem.m}"
        if config.shared_bytes > SHARED_BYTES:
            return f"{config.shared_bytes} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        return split_k.splits_refusal(config.splits, products.k_blocks(problem), "blocks of k", uneven=True)

    def why_xla_untuned(self, problem: DotProblem) -> str | None:
        return f"{problem} was not measured, and XLA's product of a few rows may be as fast"

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: DotProblem, config: Config) -> int:
        return config.blocks_per_sm

    def _shapes(self, problem: DotProblem) -> Iterator[Config]:
        """All tiles and splits, each with the deepest pipeline for each number of thread blocks on a multiprocessor."""
        tile_n = next(n for n in TILES_N if n >= problem.m)
        tiles_m = [tile for tile in TILES_M if tile == TILES_M[0] or tile < 2 * problem.n]
        for tile_m, splits in itertools.product(tiles_m, range(1, MAX_CLUSTER + 1)):
            config = Config(tile_m, tile_n, 0, splits)
            deep = {blocks: config.deepest(blocks) for blocks in range(1, MAX_BLOCKS + 1)}
            yield from (c for blocks, c in deep.items() if c.stages >= MIN_STAGES and c.blocks_per_sm >= blocks)

    def candidates(self, problem: DotProblem, target: Target) -> list[Config]:
        """The best three numbers of splits of each tile and number of thread blocks a multiprocessor."""
        legal = (config for config in self._shapes(problem) if self.config_refusal(problem, config) is None)
        kind = lambda config: (config.tile_m, config.blocks_per_sm)  # noqa: E731
        return self.fastest_of_kinds(problem, legal, kind, 3, target)

    def neighbours(self, problem: DotProblem, config: Config, target: Target) -> list[Config]:
        """Fewer stages, a split more or less, and the other tiles."""
        found = [dataclasses.replace(config, stages=config.stages - 1)]
        near = [dataclasses.replace(config, splits=config.splits + step) for step in (-1, 1)]
        near += [dataclasses.replace(config, tile_m=tile) for tile in TILES_M if tile != config.tile_m]
        return found + [c.deepest(config.blocks_per_sm) for c in near if 1 <= c.splits <= MAX_CLUSTER]

    def work(self, problem: DotProblem, config: Config, target: Target) -> Work:
        blocks = self._tiles(problem, config) * problem.batch * config.splits
        resident = resident_blocks(target, config.splits, config.blocks_per_sm)
        waves = -(-blocks // resident)
        chain = -(-products.k_blocks(problem) // config.splits)
        together = min(config.blocks_per_sm, -(-blocks // target.cores))
        stages = chain * waves * together
        return Work(
            **config.stage_work(stages, chain, together),
            rows=stages * config.stage_bytes / ROW_BYTES,
            memory_bytes=problem.bytes_moved,
            memory_share=min(1.0, blocks / target.cores),
            waves=waves,
            stored_bytes=config.tile_m * config.tile_n * 4 * waves,
            cluster=config.splits,
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def _tiles(self, problem: DotProblem, config: Config) -> int:
        return -(-problem.n // config.tile_m)

    def macros(self, problem: DotProblem, config: Config) -> dict[str, int]:
        return {
            "ELEMENT": products.ELEMENT_CODES[problem.dtype],
            "OUT": split_k.OUT_CODES[problem.out_dtype],
            "W_MN": int(problem.rhs_order[-1] == "n"),
            "W_WHOLE": int(is_whole(problem.n)),
            "CHAIN": chained_stages(problem, config),
            "CTAS_PER_SM": config.blocks_per_sm,
            **field_macros(config, "tile_m", "tile_n", "stages", "splits"),
            **epilogue_macros(problem),
        }

    def maps(self, problem: DotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        p = problem
        weight = operand_map(1, p.dtype, p.rhs_shape, p.rhs_order, config.tile_m)
        return weight, operand_map(0, p.dtype, p.lhs_shape, p.lhs_order, config.tile_n)

    def launches(self, problem: DotProblem, config: Config) -> tuple[plan.Launch, ...]:
        args = Struct("Args", {"m": problem.m, "n": problem.n, "k_blocks": products.k_blocks(problem)})
        launch = plan.Launch(
            kernel=self.kernel_name(problem),
            grid=(self._tiles(problem, config) * config.splits, problem.batch, 1),
            block=(config.threads, 1, 1),
            params=(
                plan.MapParam(0),
                plan.MapParam(1),
                args,
                plan.Pointer(len(problem.operand_types)),
                *epilogue_params(problem),
            ),
            shared_bytes=config.shared_bytes - BARRIER_BYTES,
            cluster=(config.splits, 1, 1),
        )
        return (launch,)


FAMILY = FewRows(Config)
