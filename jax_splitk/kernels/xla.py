"""An estimate of XLA's time, for choices that nobody measured: a roofline times a product of fitted powers.

A problem belongs to a class and has features: some say what it is, and are 1, others are logarithms of its sizes. The
logarithm of XLA's time over the roofline is a sum of weights times features. Of a class or a kind that the fit has not
seen, or of sizes beyond those that it has, nothing is known.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax_splitk.kernels import cost_model
from jax_splitk.kernels.wgrad.geometry import bytes_touched
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

# An H200's. Of other devices the number of cores and the rate of memory count, and what is fitted to their times.
_FLOPS = {"float32": 395e12, "exact": 50e12, "float8_e4m3fn": 790e12}
_HALF_FLOPS = 790e12
_BYTES = 4.3e12
_LAUNCH_SECONDS = 5e-6
_FEW_CHANNELS = 8
_WIDE = 256  # channels of a group: more make no difference
_FEW_ROWS = 16
_MARGIN = 0.7  # beyond the logarithms of sizes that were seen
_LEAST_UNCERTAINTY = 0.05


@dataclasses.dataclass(frozen=True)
class Features:
    """What the estimate sees of a problem.

    Attributes:
      name: of the class.
      floor: seconds, by the rates of arithmetic and memory.
      kinds: what the problem is.
      sizes: logarithms of its sizes, by name; their weights differ by the first kind.
    """

    name: str
    floor: float
    kinds: tuple[str, ...]
    sizes: Mapping[str, float]

    def all(self) -> dict[str, float]:
        """Each feature's value."""
        own = {f"{name} {self.kinds[0]}": value for name, value in self.sizes.items()}
        return {"one": 1.0, **dict.fromkeys(self.kinds, 1.0), **self.sizes, **own}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds, and the standard deviation of their logarithm."""

    seconds: float
    uncertainty: float


def features(problem: Problem, target: Target) -> Features:
    """What the estimate sees of a problem that is not empty."""
    cores = target.cores / DEFAULT_CUDA.cores
    memory = cost_model.memory_share(target.platform, target.device_kind)
    return _FEATURES[problem.op](problem, _Share(cores, cores if memory is None else memory))


def class_of(problem: Problem) -> str:
    """Its name; "empty" of a problem that has nothing to compute."""
    return features(problem, DEFAULT_CUDA).name if problem.flops else "empty"


@functools.lru_cache(maxsize=4096)
def estimate(problem: Problem, target: Target) -> Estimate | None:
    """Of XLA's time on a device; None where nothing is known."""
    model = cost_model.model_of(target.platform, target.device_kind)["xla"].get(problem.op)
    return None if model is None else estimate_by(model, problem, target)


def estimate_by(model: Mapping[str, Any], problem: Problem, target: Target) -> Estimate | None:
    """`estimate` by an operation's data."""
    if problem.flops == 0:
        return None
    found = features(problem, target)
    of_class = model["classes"].get(found.name)
    if of_class is None or not set(found.kinds) <= model["weights"].keys():
        return None
    if any(_is_beyond(found.sizes[name], *of_class["ranges"][name]) for name in found.sizes):
        return None
    factor = sum(model["weights"][name] * value for name, value in found.all().items())
    return Estimate(found.floor * math.exp(factor), max(_LEAST_UNCERTAINTY, of_class["uncertainty"]))


def _is_beyond(value: float, low: float, high: float) -> bool:
    return not low - _MARGIN <= value <= high + _MARGIN


class _Share(NamedTuple):
    """What a device has of an H200's rates of arithmetic and memory."""

    cores: float
    memory: float


def _floor(problem: Problem | ConvProblem, dtype: str, share: _Share, moved: float) -> float:
    """Seconds at the rates of arithmetic and memory of such a share of an H200."""
    arithmetic = problem.flops / (_FLOPS.get(dtype, _HALF_FLOPS) * share.cores)
    return max(arithmetic, moved / (_BYTES * share.memory)) + _LAUNCH_SECONDS


def _arithmetic(problem: ConvProblem | DotProblem) -> str:
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
        "seconds": math.log(floor / 1e-5),
        "channels": math.log(min(channels, _WIDE)),
        "out_channels": math.log(min(out_channels, _WIDE)),
        "taps": math.log(p.taps),
        "strides": math.log(math.prod(p.window_strides)),
        "image": math.log(math.prod(p.output_spatial)),
    }
    more = ["dilated"] if {*p.lhs_dilation, *p.rhs_dilation} != {1} else []
    more += ["batch groups"] if p.batch_group_count > 1 else []
    more += ["widened"] if p.out_dtype != p.dtype else []  # XLA converts the operands
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
        "seconds": math.log(floor / 1e-5),
        "rows": math.log(p.rows),
        "k": math.log(p.k),
        "features": math.log(p.features),
    }
    more = ["zero points"] if p.zero_dtype != "none" else []
    more += ["widened"] if widened else []
    kinds = (kind, p.qtype, p.x_dtype, *more)
    return Features(f"{kind} {p.bits} bits", floor, kinds, sizes)


def _of_dot_general(p: DotProblem, share: _Share) -> Features:
    arithmetic, majors = _arithmetic(p), p.lhs_order[-1] + p.rhs_order[-1]
    floor, tiles = _floor(p, arithmetic, share, p.bytes_moved), -(-p.m // 128) * -(-p.n // 128) * p.batch
    sizes = {"seconds": math.log(floor / 1e-5), "tiles": math.log(tiles), "k": math.log(p.k)}
    kinds = (majors, arithmetic)
    return Features(" ".join(kinds), floor, kinds, sizes)


_FEATURES: dict[str, Callable[[Any, _Share], Features]] = {
    "conv_fprop": _of_conv,
    "conv_dgrad": _of_conv,
    "conv_wgrad": _of_conv,
    "dot_general": _of_dot_general,
    "quantized_matmul": _of_quantized_matmul,
}
