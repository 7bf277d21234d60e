"""The `host` product with a packed quantized weight: split-k over XLA's CPU threads (see ffi/host_quantized.cc).

A thread decodes a tile of 64 features by 64 k to float32, multiplies it with its rows of the activation, and goes on
along its part of k. Where one part is not all of k, a second pass adds the parts' float32 partial sums in order, as
in CUTLASS's parallel split-k.
"""

import dataclasses
from typing import Any

import numpy as np

from jax_splitk.kernels import host
from jax_splitk.kernels.host import HostFamily, aligned, ceil_div
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET
from jax_splitk.runtime.target import Target

# The constants of the workspace formula; ffi/host_quantized.cc has the same.
_CHUNK = 24
_MAX_ROW_BLOCK = 1024

# Per second and core, as in kernels/host.py.
_DECODE_RATE = 2e9  # weights
_CONVERT_RATE = 4e9  # elements of the activation
_PRODUCT_RATE = 6e10  # flops


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut: `splits` parts of k's tiles, `row_block` activation rows for each decoding of a tile.

    The result is bitwise determined by `splits`, whatever the number of threads.
    """

    splits: int
    row_block: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Twin of `SetLayout` in ffi/host_quantized.cc, which explains the fields and refuses any other size."""

    tasks: int
    slots: int
    partial_bytes: int
    slot_bytes: int
    total_bytes: int


def _layout(problem: QuantizedMatmulProblem, config: Config) -> _Layout:
    tasks = config.splits * ceil_div(problem.rows, config.row_block) * problem.feature_tiles
    slots = min(tasks, host.MAX_SLOTS)
    partial_bytes = aligned(4 * problem.rows * problem.features) if config.splits > 1 else 0
    slot_bytes = 4 * TILE * (TILE + _CHUNK + min(config.row_block, problem.rows))
    total_bytes = host.ALIGN + config.splits * partial_bytes + slots * slot_bytes
    return _Layout(tasks, slots, partial_bytes, slot_bytes, total_bytes)


def _most_splits(problem: QuantizedMatmulProblem) -> int:
    return min(problem.k_tiles, host.MAX_SPLITS)


class QuantizedHost(HostFamily[QuantizedMatmulProblem, Config]):
    """Every valid problem, of a size that an int32 holds."""

    name = "quantized_host"
    ABI = 1
    handler = HOST_QUANTIZED_TARGET

    def problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        for argument in ("rows", "k", "features"):
            if getattr(problem, argument) > host.INT32_MAX:
                return f"{argument}={getattr(problem, argument)}; at most {host.INT32_MAX} is supported"
        return None

    def config_refusal(self, problem: QuantizedMatmulProblem, config: Config) -> str | None:
        most = _most_splits(problem)
        if not 1 <= config.splits <= most:
            return f"splits={config.splits} is outside 1..{most} (k / {TILE} rounded up, at most {host.MAX_SPLITS})."
        if not 1 <= config.row_block <= _MAX_ROW_BLOCK:
            return f"row_block={config.row_block} is outside 1..{_MAX_ROW_BLOCK}."
        return None

    def unmeasured_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        """Where XLA:CPU is faster.

        Measured on 2 cores over weights of 1e3 to 4e6 elements: XLA decodes the whole weight in memory at about a tenth
        of our speed, which its wider vectors make good where many rows share that work.
        """
        if problem.rows > 128:
            return f"rows={problem.rows} are faster on XLA:CPU, whose product has wider vectors; preferred up to 128"
        if problem.flops < 512:
            return "the problem is so small that the call itself is what takes time"
        return None

    def candidates(self, problem: QuantizedMatmulProblem, target: Target) -> list[Config]:
        """Few splits where features and rows make tasks enough, and three row blocks."""
        blocks = sorted({min(block, ceil_div(max(problem.rows, 1), _CHUNK) * _CHUNK) for block in (_CHUNK, 96, 384)})
        splits = sorted({1, 2, 4, 8, target.cores, 2 * target.cores})
        configs = [Config(s, b) for b in blocks for s in splits]
        return [config for config in configs if self.config_refusal(problem, config) is None]

    def neighbours(self, problem: QuantizedMatmulProblem, config: Config, target: Target) -> list[Config]:
        """Splits and rows doubled and halved."""
        splits = host.halved_and_doubled(config.splits, _most_splits(problem))
        blocks = host.halved_and_doubled(config.row_block, _MAX_ROW_BLOCK)
        found = [dataclasses.replace(config, splits=s) for s in splits]
        return found + [dataclasses.replace(config, row_block=b) for b in blocks]

    def estimate(self, problem: QuantizedMatmulProblem, config: Config, target: Target) -> float:
        """The largest task (all but the last have its size), as often as one thread has its turn, then the partials'
        sum."""
        layout = _layout(problem, config)
        rows, depth = min(config.row_block, problem.rows), ceil_div(problem.k_tiles, config.splits) * TILE
        task = TILE * depth / _DECODE_RATE + rows * depth / _CONVERT_RATE + 2 * TILE * rows * depth / _PRODUCT_RATE
        rounds = ceil_div(layout.tasks, max(1, min(target.cores, layout.slots)))
        seconds = host.CALL_SECONDS + rounds * (host.TASK_SECONDS + task)
        return seconds + host.sum_seconds((2 * config.splits + 1) * layout.partial_bytes, target)

    def workspace_bytes(self, problem: QuantizedMatmulProblem, config: Config) -> int:
        """The splits' partial sums, each thread's tile, activation and sums, alignment slack."""
        return _layout(problem, config).total_bytes

    def attributes(self, problem: QuantizedMatmulProblem, config: Config) -> dict[str, Any]:
        return {
            "qtype": problem.qtype,
            "group_size": np.int64(problem.group_size),
            "splits": np.int64(config.splits),
            "row_block": np.int64(config.row_block),
        }


FAMILY = QuantizedHost(Config)
