"""Random problems: layers of networks, and log-uniform sizes. A seed and an index always give the same problem."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_splitk import kernels
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem, canonical
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, conv_output_spatial
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_matmul import OUT_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime.target import Target

MAX_FLOPS, MIN_FLOPS = 1.5e12, 1e5
MAX_BYTES = 3e9

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem and the kind from which it was drawn."""

    kind: str
    problem: Problem


def _one(rng: Rng, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _log_uniform(rng: Rng, low: float, high: float, multiple: int = 1) -> int:
    return max(multiple, round(math.exp(rng.uniform(math.log(low), math.log(high))) / multiple) * multiple)


# ---- convolutions ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A convolution without batch and dtypes. `causal`: the last dimension has padding at its beginning only."""

    image: tuple[int, ...]
    channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    groups: int = 1
    dilation: int = 1
    padded: bool = True
    causal: bool = False

    def problem(self, batch: int, dtype: str, out_dtype: str, precision: str) -> ConvWgradProblem:
        rank = len(self.image)
        reach = [(k - 1) * self.dilation if self.padded else 0 for k in self.kernel]
        padding = tuple((r, 0) if self.causal else (r // 2, r - r // 2) for r in reach)
        stride, ones, dilation = self.stride or (1,) * rank, (1,) * rank, (self.dilation,) * rank
        out = conv_output_spatial(self.image, self.kernel, stride, padding, ones, dilation)
        return ConvWgradProblem(
            batch=batch,
            input_spatial=self.image,
            output_spatial=out,
            kernel_spatial=self.kernel,
            in_channels=self.channels,
            out_channels=self.out_channels,
            window_strides=stride,
            padding=padding,
            lhs_dilation=ones,
            rhs_dilation=dilation,
            feature_group_count=self.groups,
            dtype=dtype,
            out_dtype=out_dtype,
            precision=precision,
        )


def _resnet(rng: Rng) -> _Layer:
    stage, resolution = int(rng.integers(4)), _one(rng, 160, 192, 224, 256, 288, 320)
    size, width = resolution // 4 >> stage, _one(rng, 32, 48, 64, 64, 96, 128) << stage
    image = (size, size)
    what = _one(rng, "3x3", "3x3", "stride", "expand", "reduce", "shortcut", "stem", "groups", "groups")
    if what == "stem":
        return _Layer((resolution,) * 2, 3, _one(rng, 32, 64, 64, 96), _one(rng, (7, 7), (3, 3), (5, 5)), (2, 2))
    if what == "expand":
        return _Layer(image, width, 4 * width, (1, 1))
    if what == "reduce":
        return _Layer(image, 4 * width, width, (1, 1))
    if what == "shortcut":
        return _Layer(image, 4 * width, 8 * width, (1, 1), (2, 2))
    stride = (2, 2) if what == "stride" else (1, 1)
    groups = _one(rng, 8, 16, 32) if what == "groups" else 1
    return _Layer(image, width, width, (3, 3), stride, groups, dilation=_one(rng, 1, 1, 1, 1, 2))


def _convnext(rng: Rng) -> _Layer:
    stage, resolution = int(rng.integers(4)), _one(rng, 192, 224, 256, 384)
    width, size = _one(rng, 40, 64, 80, 96, 128, 192) << stage, resolution // 4 >> stage
    what = _one(rng, "depthwise", "depthwise", "depthwise", "down", "patchify")
    if what == "patchify":
        return _Layer((resolution,) * 2, 3, width, (4, 4), (4, 4), padded=False)
    if what == "down":
        return _Layer((size, size), width, 2 * width, (2, 2), (2, 2), padded=False)
    return _Layer((size, size), width, width, _one(rng, (7, 7), (7, 7), (5, 5), (9, 9)), groups=width)


def _mobile(rng: Rng) -> _Layer:
    """EfficientNet, MobileNet: depthwise and 1x1."""
    stage, resolution = int(rng.integers(5)), _one(rng, 128, 192, 224, 240, 300)
    size, width = resolution // 2 >> stage, 8 * _log_uniform(rng, 2, 8) << stage
    if rng.random() < 0.3:
        few = max(8, width // 6 // 8 * 8)
        inputs, outputs = _one(rng, (width, few), (few, width))
        return _Layer((size, size), inputs, outputs, (1, 1))
    kernel = _one(rng, 3, 3, 5, 5, 7)
    return _Layer((size, size), width, width, (kernel, kernel), _one(rng, (1, 1), (1, 1), (2, 2)), groups=width)


def _unet(rng: Rng) -> _Layer:
    level = int(rng.integers(4))
    size, base = _one(rng, 32, 48, 64, 96, 128) >> level, _one(rng, 128, 192, 256, 320)
    width = base * (1, 2, 4, 4)[level]
    what = _one(rng, "3x3", "3x3", "skip", "down", "1x1", "in", "out")
    if what == "in":
        return _Layer((size << level,) * 2, 4, base, (3, 3))
    if what == "out":
        return _Layer((size << level,) * 2, base, 4, (3, 3))
    if what == "skip":
        return _Layer((size, size), 2 * width, width, _one(rng, (3, 3), (1, 1)))
    return _Layer((size, size), width, width, (1, 1) if what == "1x1" else (3, 3), (2, 2) if what == "down" else ())


def _video(rng: Rng) -> _Layer:
    """R3D, R(2+1)D, 3D patches, 3D depthwise."""
    stage, size, frames = int(rng.integers(4)), _one(rng, 112, 128, 160), _one(rng, 8, 16, 32)
    image = (max(1, frames >> stage), size // 2 >> stage, size // 2 >> stage)
    width = _one(rng, 32, 64, 64) << stage
    what = _one(rng, "3x3x3", "3x3x3", "space", "time", "stem", "stride", "patch", "depthwise")
    if what == "stem":
        return _Layer((frames, size, size), 3, width >> stage, (3, 7, 7), (1, 2, 2))
    if what == "patch":
        return _Layer((frames, size, size), 3, _one(rng, 384, 768), (2, 16, 16), (2, 16, 16), padded=False)
    kernel = {"space": (1, 3, 3), "time": (3, 1, 1)}.get(what, (3, 3, 3))
    groups = width if what == "depthwise" else 1
    return _Layer(image, width, width, kernel, (2, 2, 2) if what == "stride" else (), groups)


def _audio(rng: Rng) -> _Layer:
    length, width = _log_uniform(rng, 64, 32768, 8), 8 * _log_uniform(rng, 4, 128)
    what = _one(rng, "conv", "conv", "down", "stem", "causal", "depthwise", "groups", "1x1")
    if what == "stem":
        return _Layer((8 * length,), _one(rng, 1, 1, 2, 80), width, (_one(rng, 7, 10, 15),), (_one(rng, 1, 2, 5),))
    if what == "causal":
        return _Layer((length,), width, width, (_one(rng, 3, 4, 4),), groups=width, causal=True)
    if what == "depthwise":
        return _Layer((length,), width, width, (_one(rng, 5, 7, 9, 15, 31),), groups=width)
    if what == "groups":
        return _Layer((length,), width, width, (_one(rng, 3, 5, 9),), groups=math.gcd(width, _one(rng, 4, 8, 16)))
    stride = (_one(rng, 2, 4),) if what == "down" else ()
    kernel = 1 if what == "1x1" else _one(rng, 3, 5, 7, 11)
    return _Layer((length,), width, width, (kernel,), stride, dilation=_one(rng, 1, 1, 1, 2, 4))


def _patches(rng: Rng) -> _Layer:
    patch, width = _one(rng, 4, 8, 14, 16, 32), _one(rng, 192, 384, 768, 1024, 1280)
    size = _one(rng, 8, 14, 16, 24) * patch
    return _Layer((size, size), _one(rng, 1, 3, 3, 4), width, (patch, patch), (patch, patch), padded=False)


def _any_layer(rng: Rng) -> _Layer:
    """A convolution with log-uniform sizes."""
    rank = _one(rng, 1, 2, 2, 2, 3)
    image = tuple(_log_uniform(rng, *{1: (32, 65536), 2: (4, 512), 3: (2, 64)}[rank]) for _ in range(rank))
    kernel = tuple(_one(rng, 1, 2, 3, 3, 4, 5, 7) for _ in range(rank))
    kernel = (1,) * rank if rng.random() < 0.15 else kernel
    stride = tuple(_one(rng, 1, 2, 2, 3, 4) for _ in range(rank)) if rng.random() < 0.3 else ()
    multiple = _one(rng, 1, 4, 8, 8, 16, 64)
    channels, out_channels = (_log_uniform(rng, 2, 2048, multiple) for _ in range(2))
    what = _one(rng, "dense", "dense", "dense", "depthwise", "groups")
    groups = 1
    if what == "depthwise":
        groups = channels = _log_uniform(rng, 8, 2048, 8)
        out_channels = channels * _one(rng, 1, 1, 1, 2)
    elif what == "groups":
        groups, each, of_out = _log_uniform(rng, 2, 64), _one(rng, 2, 4, 8, 16, 32, 64), _one(rng, 2, 4, 8, 16, 32, 64)
        channels, out_channels = groups * each, groups * of_out
    return _Layer(image, channels, out_channels, kernel, stride, groups, _one(rng, 1, 1, 1, 1, 2), rng.random() < 0.8)


def _odd(rng: Rng) -> _Layer:
    """Channels, or groups of channels, that TMA cannot load; and groups, which some dtypes have no kernel for."""
    image = _one(rng, (28, 28), (56, 56), (64, 64), (2000,), (8, 28, 28))
    kernel, groups = (_one(rng, 1, 3, 3, 5),) * len(image), _one(rng, 1, 1, 3, 4, 8, 16)
    widths = (20, 33, 37, 53, 61, 100) if groups == 1 else (4, 5, 7, 9, 10, 20)
    return _Layer(image, groups * _one(rng, *widths), groups * _one(rng, *widths), kernel, groups=groups)


_LAYERS: dict[str, Callable[[Rng], _Layer]] = {
    "resnet": _resnet,
    "convnext": _convnext,
    "mobile": _mobile,
    "unet": _unet,
    "video": _video,
    "audio": _audio,
    "patches": _patches,
    "log-uniform": _any_layer,
    "odd": _odd,
}
_LAYER_SHARES = (0.2, 0.1, 0.12, 0.13, 0.08, 0.12, 0.05, 0.15, 0.05)


def _convolution(rng: Rng) -> tuple[str, ConvWgradProblem]:
    name = str(rng.choice(list(_LAYERS), p=_LAYER_SHARES))
    dtype, precision = _one(
        rng,
        *[("bfloat16", "default")] * 12,
        *[("float16", "default")] * 2,
        *[("float32", "default")] * 4,
        *[("float32", "high"), ("float32", "highest")],
    )
    out_dtype = "float32" if dtype == "float32" or rng.random() < 0.3 else dtype
    layer, batch = _LAYERS[name](rng), _log_uniform(rng, 1, 256)
    return name, layer.problem(batch, dtype, out_dtype, precision)


# ---- products --------------------------------------------------------------------------------------------------------


def _dense_layer(rng: Rng) -> tuple[str, int, int]:
    """(kind, outputs, inputs) of a transformer's layer, whole or one device's part, or of log-uniform sizes."""
    if rng.random() < 0.3:
        multiple = _one(rng, 8, 64, 128)
        return "log-uniform", _log_uniform(rng, 64, 32768, multiple), _log_uniform(rng, 256, 16384, 128)
    hidden = _one(rng, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
    inner = round(hidden * _one(rng, 2.6875, 3.5, 4, 4) / 128) * 128
    outputs, inputs = _one(rng, (hidden, hidden), (3 * hidden, hidden), (inner, hidden), (hidden, inner))
    devices = _one(rng, 1, 1, 2, 4, 8)
    if rng.random() < 0.5:
        return "transformer", max(64, outputs // devices // 64 * 64), inputs
    return "transformer", outputs, max(128, inputs // devices // 128 * 128)


def _quantized(rng: Rng) -> tuple[str, Problem]:
    kind, features, k = _dense_layer(rng)
    rows = 1 << int(rng.integers(13)) if rng.random() < 0.5 else _log_uniform(rng, 1, 8192)
    qtype = _one(rng, "int4", "int4", "int4", *FORMATS)
    x_dtype = _one(rng, "bfloat16", "bfloat16", "bfloat16", "float16", *["float8_e4m3fn"] * 2)
    out_dtype = x_dtype if x_dtype in OUT_DTYPES and rng.random() < 0.8 else _one(rng, "bfloat16", "float32")
    has_zero = FORMATS[qtype].integer and rng.random() < 0.2
    group = _one(rng, 32, 64, 64, 128, 128, k)
    # As checkpoints have them: GPTQ's and AWQ's in float16, MXFP4's powers of two.
    scale = _one(rng, "bfloat16", "bfloat16", "float8_e8m0fnu" if qtype == "float4_e2m1fn" else "float16")
    types = (x_dtype, out_dtype, qtype, group, scale, scale if has_zero else "none")
    return kind, QuantizedMatmulProblem(rows, k, features, *types)


def _dot(rng: Rng) -> tuple[str, Problem]:
    """Mostly weight gradients of dense layers, whose reduction over tokens is long; and products of few rows."""
    kind, m, n = _dense_layer(rng)
    if rng.random() < 0.5:
        m, n = (_log_uniform(rng, 64, 2048, 8) for _ in range(2))
    k = _log_uniform(rng, 512, 262144, 8)
    orders = ("bkm", "bkn") if rng.random() < 0.7 else (_one(rng, "bmk", "bkm"), _one(rng, "bkn", "bnk"))
    dtype = _one(rng, "bfloat16", "bfloat16", "bfloat16", "float16", "float32")
    problem = DotProblem(1, m, n, k, *orders, dtype, _one(rng, dtype, "float32"))
    return (kind, problem) if rng.random() < 0.6 else _few_rows(rng)


def _few_rows(rng: Rng) -> tuple[str, Problem]:
    """A dense layer of a decode step."""
    _, n, k = _dense_layer(rng)
    dtype = _one(rng, "bfloat16", "bfloat16", "float16")
    orders = "bmk", _one(rng, "bkn", "bkn", "bnk")
    return "few rows", DotProblem(1, _log_uniform(rng, 1, 64), n, k, *orders, dtype, dtype)


def _weight_gradient(rng: Rng) -> tuple[str, Problem]:
    kind, problem = _convolution(rng)
    return kind, canonical(problem)


def _other_pass(rng: Rng, pass_: type[ConvFpropProblem | ConvDgradProblem]) -> tuple[str, Problem]:
    """The other pass of a convolution that `_wgrad` could draw."""
    kind, wgrad = _convolution(rng)
    return kind, canonical(pass_(**{**vars(wgrad), "out_dtype": wgrad.dtype}))


_OPERATIONS: dict[str, Callable[[Rng], tuple[str, Problem]]] = {
    "conv_wgrad": _weight_gradient,
    "quantized_matmul": _quantized,
    "dot_general": _dot,
    "conv_fprop": functools.partial(_other_pass, pass_=ConvFpropProblem),
    "conv_dgrad": functools.partial(_other_pass, pass_=ConvDgradProblem),
}
OPERATIONS = tuple(_OPERATIONS)
# Twelve kinds of problems in turns.
_TURNS = (0, 1, 3, 0, 4, 2, 0, 1, 3, 0, 4, 1)


def draw(seed: int, index: int, target: Target, ops: Sequence[str] = OPERATIONS, max_flops: float = MAX_FLOPS) -> Drawn:
    """Problem number `index` of a seed. Some kernel on the target serves it."""
    rng = np.random.default_rng([seed, index])
    turns = [OPERATIONS[turn] for turn in _TURNS if OPERATIONS[turn] in ops]
    op = turns[index % len(turns)]
    while True:
        kind, problem = _OPERATIONS[op](rng)
        problem = _cut(problem, max_flops)
        sized = MIN_FLOPS <= problem.flops <= max_flops and problem.bytes_moved <= MAX_BYTES
        if sized and problem.refusal is None and _is_served(problem, target):
            return Drawn(kind, problem)


def _is_served(problem: Problem, target: Target) -> bool:
    return any(f.refusal(problem, None, target) is None for f in kernels.families(problem.op, target.platform))


def _cut(problem: Any, max_flops: float) -> Any:
    """The problem with batch, rows or k cut so that its work is at most `max_flops`."""
    name = {"quantized_matmul": "rows", "dot_general": "k"}.get(problem.op, "batch")
    excess = max(problem.flops / max_flops, problem.bytes_moved / MAX_BYTES)
    if excess <= 1:
        return problem
    multiple = 8 if name == "k" else 1
    size = max(multiple, int(getattr(problem, name) / excess) // multiple * multiple)
    return dataclasses.replace(problem, **{name: size})


def stream(seed: int, target: Target, ops: Sequence[str], max_flops: float) -> Iterator[tuple[int, Drawn]]:
    """The problems of a seed with their indices, without repetitions."""
    seen: set[Problem] = set()
    for index in itertools.count():
        drawn = draw(seed, index, target, ops, max_flops)
        if drawn.problem not in seen:
            seen.add(drawn.problem)
            yield index, drawn
