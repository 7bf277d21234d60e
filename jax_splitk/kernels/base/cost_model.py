"""Turns a kernel's work into a time, by rates of the device that all kernels share, and a learned residual.

    seconds = (the longest time of a multiprocessor's units and the memory, and a part of the other times
               + times that nothing hides) * residual

`python -m benchmarks.cost_model.fit` makes both as data of the package. `cost_models/DEVICE.json` has a device's rates,
`cost_models/residual.npz` trees for all devices. The trees see each unit's share of the time, and numbers of the config
and the problem.
"""

import dataclasses
import functools
import json
import math
import operator
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels.base import forest
from jax_splitk.kernels.base.work import Work
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "cost_models"
RESIDUAL = "residual.npz"
# The devices whose rates serve devices without rates of their own.
_DEFAULTS = {"cuda": "NVIDIA H200", "cpu": "cpu"}
# Memory rates relative to that of the device whose rates are used, by the data sheets (an H200: 4.8 TB/s).
_MEMORY_SHARES = {
    "NVIDIA H100 NVL": 3.94 / 4.8,
    "NVIDIA H100 PCIe": 2.04 / 4.8,
    "NVIDIA H800": 3.35 / 4.8,
}
# The uncertainty of a family without measurements.
UNKNOWN = 0.3
CONFIG_NUMBERS, PROBLEM_NUMBERS = 11, 10  # fields that the residual sees
ALIGNMENTS, MOST_ALIGNED = 4, 64  # see `alignments`


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a GPU: amounts in a second, or durations in seconds.

    Attributes:
      tensor_clock: clocks of a multiprocessor's tensor cores (4,096 operations of 16 bits each).
      shared_bytes: bytes of a multiprocessor's shared memory.
      l2_bytes: bytes that a multiprocessor loads from the L2.
      instructions: instructions that a multiprocessor issues.
      row_seconds: duration of a line that TMA loads.
      wait_seconds: duration of a load that nothing hides.
      turn_seconds: duration of a barrier, or of a product that waits for another.
      memory_bytes: bytes of device memory, read or written.
      wave_seconds: duration of filling a pipeline.
      store_bytes: bytes of fp32 sums that a multiprocessor stores.
      partial_bytes: bytes of partial sums, most of which stay in the L2.
      launch_seconds: duration of the first kernel's launch.
      reduce_seconds: duration of each further launch.
      cluster_seconds: duration for each thread block of a cluster but the first.
      shadow: part of the other units' times that the longest one does not hide.
      memory_shadow: the same for device memory and the units.
    """

    tensor_clock: float
    shared_bytes: float
    l2_bytes: float
    instructions: float
    row_seconds: float
    wait_seconds: float
    turn_seconds: float
    memory_bytes: float
    wave_seconds: float
    store_bytes: float
    partial_bytes: float
    launch_seconds: float
    reduce_seconds: float
    cluster_seconds: float
    shadow: float
    memory_shadow: float


@dataclasses.dataclass(frozen=True)
class HostRates:
    """Rates of a CPU core: amounts in a second, or durations in seconds.

    Attributes:
      row_rate, column_rate: loaded elements of the two operands; see `kernels.host`.
      flops: operations.
      sum_bytes: bytes of partial sums that are added.
      task_seconds, call_seconds: least durations of a task and of a call.
    """

    row_rate: float
    column_rate: float
    flops: float
    sum_bytes: float
    task_seconds: float
    call_seconds: float


def path_for(device_kind: str) -> pathlib.Path:
    """The name of a device's file, such as nvidia_h200.json."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) + ".json")


def _owner(platform: str, device_kind: str) -> str:
    """The device whose rates are used: the device itself or, if it has none, its platform's usual one."""
    return device_kind if path_for(device_kind).is_file() else _DEFAULTS.get(platform, _DEFAULTS["cuda"])


def has_rates(target: Target) -> bool:
    """Whether a target is a GPU whose own rates were measured."""
    return target.platform == "cuda" and path_for(target.device_kind).is_file()


@functools.cache
def rates(platform: str, device_kind: str) -> Any:
    """A GPU's `Rates`, or a CPU's `HostRates`. Raises ValueError for a damaged file of the package."""
    owner = _owner(platform, device_kind)
    path = path_for(owner)
    try:
        found = rates_from(HostRates if platform == "cpu" else Rates, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); install jax_splitk again") from None
    share = 1.0 if owner == device_kind else _MEMORY_SHARES.get(device_kind, 1.0)
    return dataclasses.replace(found, memory_bytes=found.memory_bytes * share) if share != 1 else found


def rates_from(record: type[Any], values: Any) -> Any:
    """A record of rates from plain data. Raises ValueError for wrong fields and for values that are not numbers above
    0, TypeError for data that is not an object."""
    fields = [field.name for field in dataclasses.fields(record)]
    if set(dict(values)) != set(fields):
        raise ValueError(f"fields {', '.join(sorted(set(values) ^ set(fields)))} are missing or unknown")
    for name in fields:
        if type(values[name]) not in (int, float) or not 0 < values[name] < math.inf:
            raise ValueError(f"{name}={values[name]!r}; accepted: numbers above 0")
    return record(**{name: float(values[name]) for name in fields})


# ---- by the rates ----------------------------------------------------------------------------------------------------

_FIELDS = tuple(field.name for field in dataclasses.fields(Work))
_numbers = operator.attrgetter(*_FIELDS)


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds of some candidates by the rates alone. Each field is an array with one number for each candidate.

    Attributes:
      seconds: total time.
      parts: times of each unit, of the memory, and of work that nothing hides; one row each.
      work: the numbers of their `Work`s, one row for each field.
    """

    seconds: np.ndarray
    parts: np.ndarray
    work: np.ndarray


def spent(works: Sequence[Work], of: Rates) -> Spent:
    """The times of works by a device's rates."""
    work = np.array([_numbers(each) for each in works], dtype=np.float64).reshape(len(works), len(_FIELDS)).T
    w = dict(zip(_FIELDS, work, strict=True))
    units = [
        w["tensor_clocks"] / of.tensor_clock,
        w["shared_bytes"] / of.shared_bytes,
        w["l2_bytes"] / of.l2_bytes,
        w["instructions"] / of.instructions,
        w["rows"] * of.row_seconds,
        w["waits"] * of.wait_seconds,
        w["turns"] * of.turn_seconds,
    ]
    memory = w["memory_bytes"] / (of.memory_bytes * w["memory_share"])
    longest = functools.reduce(np.maximum, units)
    busy = longest + of.shadow * (functools.reduce(np.add, units) - longest)
    ends = [
        w["waves"] * of.wave_seconds,
        w["stored_bytes"] / of.store_bytes,
        w["partial_bytes"] / of.partial_bytes,
        of.launch_seconds + (w["launches"] - 1) * of.reduce_seconds,
        (w["cluster"] - 1) * of.cluster_seconds,
    ]
    hidden = np.maximum(busy, memory) + of.memory_shadow * np.minimum(busy, memory)
    return Spent(functools.reduce(np.add, [hidden, *ends]), np.array([*units, memory, *ends]), work)


def by_rates(works: Sequence[Work], target: Target) -> list[int]:
    """The indices of the works, fastest first by the rates alone; equal ones in their given order."""
    if not works:
        return []
    seconds = spent(works, rates(target.platform, target.device_kind)).seconds
    return np.argsort(seconds, kind="stable").tolist()


# ---- the residual ----------------------------------------------------------------------------------------------------

_CODES = {"none": 0.0, "workspace": 1.0, "cluster": 2.0}  # codes of a config's words
_QTYPES = tuple(FORMATS)


def features(family: int, problem: Problem, configs: Sequence[Any], of: Spent, target: Target) -> np.ndarray:
    """The residual's input, float32 [candidates, features].

    Args:
      family: the number of the candidates' family.
    """
    w, count = dict(zip(_FIELDS, of.work, strict=True)), len(configs)
    flops, moved = float(problem.flops), float(max(1, problem.bytes_moved))
    rows = [
        *(of.parts / of.seconds),
        of.seconds * 1e6,
        *(w[name] for name in ("waves", "launches", "cluster", "memory_share")),
        # The padding of tiles, how often operands are loaded, and other memory traffic.
        flops / (w["tensor_clocks"] * (4096.0 * target.cores) + 1),
        w["l2_bytes"] * target.cores / w["memory_bytes"],
        w["partial_bytes"] / w["memory_bytes"],
        w["memory_bytes"] / moved,
        w["tensor_clocks"] / w["waves"],
        w["rows"] / np.maximum(w["l2_bytes"], 1),
        np.full(count, moved),
        np.full(count, float(family)),
        *np.broadcast_to(np.array(_problem_numbers(problem))[:, None], (PROBLEM_NUMBERS + ALIGNMENTS, count)),
        *np.array([_config_numbers(config) for config in configs]).reshape(count, CONFIG_NUMBERS).T,
    ]
    return np.array(rows, dtype=np.float32).T


def _config_numbers(config: Any) -> list[float]:
    values = [_CODES.get(v, 0.0) if isinstance(v, str) else float(v) for v in vars(config).values()]
    return (values + [-1.0] * CONFIG_NUMBERS)[:CONFIG_NUMBERS]


@functools.lru_cache(maxsize=1024)
def _problem_numbers(problem: Problem) -> list[float]:
    def item(dtype: str) -> int:
        return jnp.dtype(dtype).itemsize

    if isinstance(problem, QuantizedMatmulProblem):
        p = problem
        of = [p.rows, p.k, p.features, p.bits, _QTYPES.index(p.qtype), p.group_size, item(p.x_dtype)]
        of += [item(p.out_dtype), p.zero_dtype != "none"]
    elif isinstance(problem, DotProblem):
        p = problem
        of = [p.m, p.n, p.k, p.batch, "kmn".index(p.lhs_order[-1]), "kmn".index(p.rhs_order[-1])]
        of += [item(p.dtype), item(p.out_dtype)]
    elif isinstance(problem, RaggedDotProblem):
        p = problem
        of = [p.m, p.n, p.k, p.groups, p.mode == "forward", "kn".index(p.rhs_order[-1])]
        of += [item(p.dtype), item(p.out_dtype), p.m / p.groups]
    elif isinstance(problem, QuantizedRaggedDotProblem):
        p = problem
        of = [p.m, p.k, p.n, p.product.bits, _QTYPES.index(p.qtype), p.group_size, item(p.dtype)]
        of += [item(p.out_dtype), p.zero_dtype != "none", p.groups]
    elif isinstance(problem, ConvProblem):
        p = problem
        of = [*p.group_channels, p.taps, math.prod(p.output_spatial), math.prod(p.window_strides), p.rank]
        of += [item(p.dtype), item(p.out_dtype), p.batch, math.prod(p.lhs_dilation) * math.prod(p.rhs_dilation)]
    else:
        of = []
    return [float(value) for value in of] + [0.0] * (PROBLEM_NUMBERS - len(of)) + alignments(problem)


def alignments(problem: Problem) -> list[float]:
    """The largest power of two, 64 at most, that divides each of a problem's inner sizes. Kernels, XLA's too, pad other
    sizes, and load them by smaller pieces."""
    if isinstance(problem, ConvProblem):
        sizes = (problem.in_channels, problem.out_channels, *problem.group_channels)
    elif isinstance(problem, QuantizedMatmulProblem):
        sizes = (problem.features, problem.k)
    elif isinstance(problem, DotProblem | RaggedDotProblem | QuantizedRaggedDotProblem):
        sizes = (problem.n, problem.k)
    else:
        sizes = ()
    return [float(min(size & -size, MOST_ALIGNED)) for size in sizes] + [0.0] * (ALIGNMENTS - len(sizes))


@dataclasses.dataclass(frozen=True)
class Residual:
    """The trees, the families on which they were fitted, and the uncertainty of each of these families: the standard
    deviation of the logarithms of held-out estimates over times."""

    trees: forest.Forest
    families: tuple[str, ...]
    spreads: tuple[float, ...]


@functools.cache
def residual(folder: pathlib.Path) -> Residual:
    """The package's residual. Raises ValueError for a damaged file."""
    trees, others = forest.read(folder / RESIDUAL)
    try:
        return Residual(trees, tuple(map(str, others["families"])), tuple(map(float, others["spreads"])))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / RESIDUAL} is damaged ({error}); install jax_splitk again") from None


def estimates(
    family: str, problem: Problem, configs: Sequence[Any], works: Sequence[Work], target: Target
) -> list[float]:
    """Predicted seconds of a family's configs with these works. For a family that the residual has not seen, by the
    rates alone."""
    if not configs:
        return []
    by_rates, learned = spent(works, rates(target.platform, target.device_kind)), residual(FOLDER)
    if family not in learned.families:
        return by_rates.seconds.tolist()
    seen = features(learned.families.index(family), problem, configs, by_rates, target)
    return (by_rates.seconds * learned.trees.factors(seen)).tolist()


def uncertainty(family: str, target: Target) -> float:
    """The standard deviation of the logarithms of a family's estimates over times. `UNKNOWN` on a CPU; infinite for a
    family of another package, whose estimates may give only an order."""
    if target.platform != "cuda":
        return UNKNOWN
    learned = residual(FOLDER)
    if family not in learned.families:
        return math.inf
    return learned.spreads[learned.families.index(family)]


def memory_share(target: Target) -> float:
    """The rate of a GPU's memory relative to that of an H200."""
    of, usual = (rates("cuda", kind) for kind in (target.device_kind, DEFAULT_CUDA.device_kind))
    return of.memory_bytes / usual.memory_bytes
