"""An estimate of XLA's time, for choices without measurements: a roofline times a learned factor. A problem has a
class, kinds and sizes; trees (`cost_models/xla.npz`) give XLA's time over the roofline from these. There is no estimate
for classes and kinds that the fit has not seen, and for sizes beyond those of the fit.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_splitk.kernels.base import cost_model, forest
from jax_splitk.kernels.base.geometry import bytes_touched
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

# An H200's. For other devices only the number of cores, the memory rate and their fitted rates matter.
_FLOPS = {"float32": 395e12, "exact": 50e12, "float8_e4m3fn": 790e12}
_HALF_FLOPS = 790e12
_BYTES = 4.3e12
_LAUNCH_SECONDS = 5e-6
_FEW_CHANNELS = 8
_WIDE = 256  # channels of a group: a larger number makes no difference
_FEW_ROWS = 16
_MARGIN = 1.9  # factor by which sizes may exceed those of the fit
_LEAST_UNCERTAINTY = 0.05
# XLA computes grouped products at about the rate of dense products, but multiplies every row with every group's matrix.
_GROUPED_FACTOR, _GROUPED_UNCERTAINTY = 1.1, 0.3
FILE = "xla.npz"
SIZES = 6  # of a problem, at most


@dataclasses.dataclass(frozen=True)
class Features:
    """The estimate's view of a problem.

    Attributes:
      name: the name of the class.
      floor: seconds by the rates of arithmetic and memory.
      kinds: properties of the problem.
      sizes: its sizes by name, the same names for all problems of an operation.
    """

    name: str
    floor: float
    kinds: tuple[str, ...]
    sizes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted seconds, and the standard deviation of their logarithm."""

    seconds: float
    uncertainty: float


def features(problem: Problem, target: Target) -> Features:
    """The features of a problem that is not empty."""
    cores = target.cores / DEFAULT_CUDA.cores
    return _FEATURES[problem.op](problem, _Share(cores, cost_model.memory_share(target)))


@dataclasses.dataclass(frozen=True)
class Learned:
    """The result of a fit to XLA's times.

    Attributes:
      trees: trees over `rows`.
      kinds: kinds that the fit has seen.
      classes: for each "operation: name" the standard deviation of the logarithms of held-out estimates over times, and
        the least and the largest of each size.
    """

    trees: forest.Forest
    kinds: tuple[str, ...]
    classes: Mapping[str, tuple[float, np.ndarray]]


@functools.cache
def learned(folder: pathlib.Path) -> Learned:
    """The package's fit. Raises ValueError for a damaged file."""
    trees, others = forest.read(folder / FILE)
    try:
        names, spreads, ranges = (others[name] for name in ("classes", "spreads", "ranges"))
        classes = {str(n): (float(s), r) for n, s, r in zip(names, spreads, ranges, strict=True)}
        return Learned(trees, tuple(map(str, others["kinds"])), classes)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / FILE} is damaged ({error}); install jax_splitk again") from None


def rows(problems: Sequence[tuple[Problem, Features]], kinds: Sequence[str]) -> np.ndarray:
    """The trees' input for each problem: the operation's number, the roofline, the sizes, a flag for each of these
    kinds, and alignments."""
    found = []
    for problem, of in problems:
        sizes = [*of.sizes.values(), *[0.0] * SIZES][:SIZES]
        flags = (kind in of.kinds for kind in kinds)
        operation = float(_OPERATIONS.index(problem.op))
        found.append([operation, of.floor * 1e6, *sizes, *flags, *cost_model.alignments(problem)])
    return np.array(found, dtype=np.float32)


@functools.lru_cache(maxsize=4096)
def estimate(problem: Problem, target: Target) -> Estimate | None:
    """XLA's time on a GPU; None if nothing is known."""
    return None if target.platform != "cuda" else estimate_by(learned(cost_model.FOLDER), problem, target)


def estimate_by(of: Learned, problem: Problem, target: Target) -> Estimate | None:
    """`estimate` by the data of a given fit."""
    if problem.flops == 0:
        return None
    if isinstance(problem, RaggedDotProblem | QuantizedRaggedDotProblem):
        return Estimate(features(problem, target).floor * _GROUPED_FACTOR, _GROUPED_UNCERTAINTY)
    if isinstance(problem, QuantizedEpilogueProblem):
        return estimate_by(of, problem.product, target)  # XLA fuses the epilogue
    if isinstance(problem, ConvEpilogueProblem):
        return estimate_by(of, problem.convolution, target)  # likewise
    found = _by_trees(of, problem, target)
    if found is None and isinstance(problem, QuantizedTransposedProblem):
        return estimate_by(of, problem.forward, target)  # the same weight is dequantized, and multiplied as often
    return found


def is_fitted(problem: Problem) -> bool:
    """Whether the problem's estimate is a fit to times of XLA's operation, with or without an epilogue. That of a
    grouped product is not, and that of a transposed product not always."""
    return not isinstance(problem, RaggedDotProblem | QuantizedRaggedDotProblem | QuantizedTransposedProblem)


def _by_trees(of: Learned, problem: Problem, target: Target) -> Estimate | None:
    """None for a problem that is unlike all that the fit has seen."""
    # The trees see the problem as on the default device; the estimate then follows the device's own rates.
    floor, found = features(problem, target).floor, features(problem, DEFAULT_CUDA)
    spread, ranges = of.classes.get(f"{problem.op}: {found.name}", (math.inf, np.zeros((0, 2))))
    if math.isinf(spread) or not set(found.kinds) <= set(of.kinds):
        return None
    if any(
        not low / _MARGIN <= size <= high * _MARGIN
        for size, (low, high) in zip(found.sizes.values(), ranges, strict=False)
    ):
        return None
    factor = float(of.trees.factors(rows([(problem, found)], of.kinds))[0])
    return Estimate(floor * factor, max(_LEAST_UNCERTAINTY, spread))


def _has_odd_groups(p: ConvProblem) -> bool:
    """Whether there are groups of several channels whose number is no power of two. XLA pads or divides them."""
    several = p.feature_group_count > 1 and min(p.group_channels) > 1
    return several and any(channels & (channels - 1) for channels in p.group_channels)


class _Share(NamedTuple):
    """A device's rates of arithmetic and memory relative to an H200's."""

    cores: float
    memory: float


def _floor(problem: Problem | ConvProblem, dtype: str, share: _Share, moved: float) -> float:
    """Seconds at these shares of an H200's rates of arithmetic and memory."""
    arithmetic = problem.flops / (_FLOPS.get(dtype, _HALF_FLOPS) * share.cores)
    return max(arithmetic, moved / (_BYTES * share.memory)) + _LAUNCH_SECONDS


def _arithmetic(problem: ConvProblem | DotProblem | RaggedDotProblem) -> str:
    if problem.dtype != "float32":
        return "half" if problem.dtype in ("bfloat16", "float16") else problem.dtype
    return "exact" if "highest" in problem.precision else "float32"


def _of_conv(p: ConvProblem, share: _Share) -> Features:
    arithmetic, (channels, out_channels) = _arithmetic(p), p.group_channels
    if p.feature_group_count > 1:
        kind = "depthwise" if channels == 1 else "grouped"
    elif p.taps == 1:
        kind = "pointwise"
    else:
        kind = "few channels" if p.in_channels <= _FEW_CHANNELS else "dense"
    floor = _floor(p, arithmetic, share, bytes_touched(p))
    sizes = {
        "microseconds": floor * 1e6,
        "channels": float(min(channels, _WIDE)),
        "out_channels": float(min(out_channels, _WIDE)),
        "taps": float(p.taps),
        "strides": float(math.prod(p.window_strides)),
        "image": float(math.prod(p.output_spatial)),
    }
    more = ["dilated"] if {*p.lhs_dilation, *p.rhs_dilation} != {1} else []
    more += ["batch groups"] if p.batch_group_count > 1 else []
    more += ["widened"] if p.out_dtype != p.dtype else []  # XLA converts the operands
    more += ["odd groups"] if _has_odd_groups(p) else []
    plain = set(p.window_strides) == {1} and not more
    more += ["winograd"] if plain and (kind, arithmetic, p.kernel_spatial) == ("dense", "exact", (3, 3)) else []
    kinds = (kind, arithmetic, f"{p.rank}d")
    return Features(" ".join(kinds), floor, (*kinds, *more), sizes)


def _of_quantized_matmul(p: QuantizedMatmulProblem, share: _Share) -> Features:
    kind = "one row" if p.rows == 1 else "few rows" if p.rows <= _FEW_ROWS else "many rows"
    dequantized = 2 * p.k * p.features  # bytes, written and read again
    widened = p.out_dtype == "float32"  # XLA multiplies in it
    floor = _floor(p, "exact" if widened else "half", share, p.bytes_moved + 2 * dequantized)
    sizes = {
        "microseconds": floor * 1e6,
        "rows": float(p.rows),
        "k": float(p.k),
        "features": float(p.features),
    }
    more = ["zero points"] if p.zero_dtype != "none" else []
    more += ["widened"] if widened else []
    kinds = (kind, p.qtype, p.x_dtype, *more)
    return Features(f"{kind} {p.bits} bits", floor, kinds, sizes)


def _of_dot_general(p: DotProblem, share: _Share) -> Features:
    arithmetic, majors = _arithmetic(p), p.lhs_order[-1] + p.rhs_order[-1]
    floor, tiles = _floor(p, arithmetic, share, p.bytes_moved), -(-p.m // 128) * -(-p.n // 128) * p.batch
    sizes = {"microseconds": floor * 1e6, "tiles": float(tiles), "k": float(p.k)}
    kinds = (majors, arithmetic)
    return Features(" ".join(kinds), floor, kinds, sizes)


def _of_ragged_dot(p: RaggedDotProblem, share: _Share) -> Features:
    """XLA multiplies every row with the matrix of every group."""
    arithmetic, dense = _arithmetic(p), dataclasses.replace(p, m=p.m * p.groups)
    floor = _floor(dense, arithmetic, share, p.bytes_moved)
    sizes = {"microseconds": floor * 1e6, "groups": float(p.groups), "rows": p.m / p.groups}
    kinds = (p.mode.replace("_", " "), arithmetic)
    return Features(" ".join(kinds), floor, kinds, sizes)


def _of_quantized_ragged_dot(p: QuantizedRaggedDotProblem, share: _Share) -> Features:
    """XLA dequantizes all weights and multiplies every row with each of them."""
    widened = p.out_dtype == "float32"
    dequantized = 2 * p.groups * p.k * p.n  # bytes, written and read again
    dense = dataclasses.replace(p, m=p.m * p.groups)
    floor = _floor(dense, "exact" if widened else "half", share, p.bytes_moved + 2 * dequantized)
    sizes = {"microseconds": floor * 1e6, "groups": float(p.groups), "rows": p.m / p.groups}
    kinds = (p.qtype, p.dtype, *(["widened"] if widened else []))
    return Features(f"grouped {p.product.bits} bits", floor, kinds, sizes)


_FEATURES: dict[str, Callable[[Any, _Share], Features]] = {
    "conv_fprop": _of_conv,
    "conv_dgrad": _of_conv,
    "conv_wgrad": _of_conv,
    "dot_general": _of_dot_general,
    "quantized_matmul": _of_quantized_matmul,
    "ragged_dot": _of_ragged_dot,
    "quantized_ragged_dot": _of_quantized_ragged_dot,
    "quantized_matmul_transposed": _of_quantized_matmul,
    "quantized_matmul_epilogue": _of_quantized_matmul,
    "quantized_ragged_dot_epilogue": _of_quantized_ragged_dot,
}
_OPERATIONS = tuple(_FEATURES)
