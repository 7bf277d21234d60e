"""The `host` product with a packed quantized weight: split-k over XLA's CPU threads (see ffi/host_quantized.cc).

A thread decodes a tile of 64 features by 64 k to float32, multiplies it with its rows of the activation, and goes on
along its part of k. Where one part is not all of k, a second pass adds the parts' float32 partial sums in order, as
in CUTLASS's parallel split-k.
"""

import dataclasses

import numpy as np

from jax_splitk.kernels.host import ceil_div, threads
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.packing import TILE
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET, CustomCall
from jax_splitk.runtime.target import Target

name = "quantized_host"
implementation = "host"
platform = "cpu"
ABI = 1


_LARGEST = 2**31 - 1

# The constants of the workspace formula; ffi/host_quantized.cc has the same.
_CHUNK = 24
_MAX_SLOTS = 64
_ALIGN = 64
_MAX_SPLITS = 256
_MAX_ROW_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut: `splits` parts of k's tiles, `row_block` activation rows for each decoding of a tile.

    The result is bitwise determined by `splits`, whatever the number of threads.
    """

    splits: int
    row_block: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Twin of `Layout` in ffi/host_quantized.cc, which explains the fields and refuses any other size."""

    tasks: int
    slots: int
    partial_bytes: int
    slot_bytes: int
    total_bytes: int


def _layout(problem: QuantizedMatmulProblem, config: Config) -> _Layout:
    tasks = config.splits * ceil_div(problem.rows, config.row_block) * problem.feature_tiles
    slots = min(tasks, _MAX_SLOTS)
    partial_bytes = ceil_div(4 * problem.rows * problem.features, _ALIGN) * _ALIGN if config.splits > 1 else 0
    slot_bytes = 4 * TILE * (TILE + _CHUNK + min(config.row_block, problem.rows))
    total_bytes = _ALIGN + config.splits * partial_bytes + slots * slot_bytes
    return _Layout(tasks, slots, partial_bytes, slot_bytes, total_bytes)


def supports(problem: QuantizedMatmulProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None if `problem` (with `config`) can run here, else one sentence that names the value and the range.

    Every valid problem can, of a size that an int32 holds. Nor is `target` looked at: any CPU will do.
    """
    del target
    for argument in ("rows", "k", "features"):
        if getattr(problem, argument) > _LARGEST:
            return f"{argument}={getattr(problem, argument)}; at most {_LARGEST} is supported."
    if config is None:
        return None
    most = min(problem.k_tiles, _MAX_SPLITS)
    if not 1 <= config.splits <= most:
        return f"splits={config.splits} is outside 1..{most} (k / {TILE} rounded up, at most {_MAX_SPLITS})."
    if not 1 <= config.row_block <= _MAX_ROW_BLOCK:
        return f"row_block={config.row_block} is outside 1..{_MAX_ROW_BLOCK}."
    return None


def workspace_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Bytes of workspace: the splits' partial sums, each thread's tile, activation and sums, alignment slack."""
    return _layout(problem, config).total_bytes


def make_plan(problem: QuantizedMatmulProblem, config: Config) -> CustomCall:
    """The custom call for a legal (problem, config): x, words, scale, zero points if any; out, workspace."""
    attributes = {
        "qtype": problem.qtype,
        "group_size": np.int64(problem.group_size),
        "splits": np.int64(config.splits),
        "row_block": np.int64(config.row_block),
    }
    return CustomCall(HOST_QUANTIZED_TARGET, attributes, workspace_bytes(problem, config))


def candidates(problem: QuantizedMatmulProblem, target: Target | None = None) -> list[Config]:
    """The legal configs worth trying: few splits where features and rows make tasks enough, and three row blocks."""
    count = threads(target)
    blocks = sorted({min(block, ceil_div(max(problem.rows, 1), _CHUNK) * _CHUNK) for block in (_CHUNK, 96, 384)})
    splits = sorted({1, 2, 4, 8, count, 2 * count})
    configs = [Config(s, b) for b in blocks for s in splits]
    return [config for config in configs if supports(problem, config) is None]


def neighbours(problem: QuantizedMatmulProblem, config: Config, target: Target | None = None) -> list[Config]:
    """Splits and rows doubled and halved."""
    del target
    splits = {min(problem.k_tiles, _MAX_SPLITS, config.splits * 2), max(1, config.splits // 2)} - {config.splits}
    blocks = {min(_MAX_ROW_BLOCK, config.row_block * 2), max(1, config.row_block // 2)} - {config.row_block}
    found = [dataclasses.replace(config, splits=s) for s in sorted(splits)]
    return found + [dataclasses.replace(config, row_block=b) for b in sorted(blocks)]


# What one core of an AMD EPYC (Zen 4, 2.6 GHz base) did, per second. Only the proportions matter: they rank the
# configs of one problem.
_DECODE_RATE = 2e9  # weights
_CONVERT_RATE = 4e9  # elements of the activation
_PRODUCT_RATE = 6e10  # flops
_PARTIAL_RATE = 2e10  # bytes
_TASK_SECONDS = 1e-6
_CALL_SECONDS = 1e-5


def estimate(problem: QuantizedMatmulProblem, config: Config, target: Target | None = None) -> float:
    """Seconds that `config` should take on the target's hardware threads (default: this machine's).

    The largest task (all but the last have its size), as often as one thread has its turn, then the partials' sum.
    """
    count = threads(target)
    layout = _layout(problem, config)
    rows, depth = min(config.row_block, problem.rows), ceil_div(problem.k_tiles, config.splits) * TILE
    task = TILE * depth / _DECODE_RATE + rows * depth / _CONVERT_RATE + 2 * TILE * rows * depth / _PRODUCT_RATE
    rounds = ceil_div(layout.tasks, max(1, min(count, layout.slots)))
    seconds = _CALL_SECONDS + rounds * (_TASK_SECONDS + task)
    if layout.partial_bytes:
        moved = (2 * config.splits + 1) * layout.partial_bytes
        seconds += _TASK_SECONDS + moved / (_PARTIAL_RATE * min(count, 4))
    return seconds


def preferred(problem: QuantizedMatmulProblem, target: Target | None = None) -> str | None:
    """None if this should beat XLA:CPU, else why it should not.

    Measured on 2 cores over weights of 1e3 to 4e6 elements: XLA decodes the whole weight in memory at about a tenth
    of our speed, which its wider vectors make good where many rows share that work.
    """
    del target
    if problem.rows > 128:
        return f"rows={problem.rows} are faster on XLA:CPU, whose product has wider vectors; preferred up to 128"
    if problem.flops < 512:
        return "the problem is so small that the call itself is what takes time"
    return None
