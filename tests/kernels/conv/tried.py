"""The families of forward passes and input gradients, with problems for their tests: test_passes.py uses the emulator
and the host, test_gpu_passes.py a GPU."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction import im2col, patch
from jax_splitk.kernels.contraction.products import Config
from jax_splitk.kernels.depthwise import passes as depthwise
from jax_splitk.kernels.depthwise import toeplitz
from jax_splitk.kernels.gather import fprop as gather
from jax_splitk.kernels.grouped import passes as grouped
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import every_kernel
from tests.problems import conv_of

BOTH: tuple[type[Any], ...] = (ConvFpropProblem, ConvDgradProblem)
HALF: dict[str, Any] = {"dtype": "float16", "out_dtype": "float16"}
BF16: dict[str, Any] = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
FLOAT: dict[str, Any] = {"dtype": "float32", "out_dtype": "float32"}
Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Tried:
    """Families with the same device code, and their test cases.

    Attributes:
      families: by the problems that they serve.
      kind: maps a config to its kind; a problem is tried with different kinds.
      best: how many kinds are tried.
      in_tf32: whether float32 is multiplied in tf32.
      draw: a random problem of a class, served or not.
      config: a random legal config.
      sibling: another problem and config of the same device code, legal or not.
      networks: layers of networks, with few images.
      measured: layers whose tuning is tried.
      base: the problem that `refused` changes.
      refused: (changes, words of the refusal).
    """

    families: Mapping[type[Any], Any]
    kind: Callable[[Any], Any]
    draw: Callable[[Rng, type[Any]], Any]
    networks: Sequence[ConvProblem]
    measured: Sequence[ConvProblem]
    base: Callable[[type[Any]], Any]
    refused: Sequence[tuple[dict[str, Any], str]]
    config: Callable[[Rng, Family, Any], Any] = lambda rng, family, p: chosen(rng, family.candidates(p, DEFAULT_CUDA))
    sibling: Callable[[Rng, Any, Any], tuple[Any, Any]] = lambda rng, p, config: (
        dataclasses.replace(p, batch=int(rng.integers(p.batch, 40))), config
    )  # fmt: skip
    best: int = 3
    in_tf32: bool = False

    def __str__(self) -> str:
        return "-".join(family.name for family in self.families.values())

    def of(self, p: ConvProblem) -> Any:
        return self.families[type(p)]

    @functools.cached_property
    def runs(self) -> list[tuple[ConvProblem, Any]]:
        """The problems and configs of tests/every_kernel.py, without those with epilogues."""
        found = [run for run in every_kernel.RUNS if run.family in self.families.values()]
        return [(run.problem, run.config) for run in found if type(run.problem) in self.families]

    def random(self, rng: Rng, kind: type[Any], most: float = 3e7) -> Any:
        """A problem that the family serves, with at most `most` operations."""
        while True:
            p = self.draw(rng, kind)
            if p.flops <= most and self.of(p).refusal(p) is None:
                return p


def chosen(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def geometry(rng: Rng, sizes: tuple[int, ...], kernels: tuple[int, ...], *steps: tuple[str, int]) -> dict[str, Any]:
    """A random geometry of any rank. Sizes of image and filter are below the limits of that rank; half of the problems
    have strides or dilations."""
    rank = int(rng.integers(1, 4))

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high, rank))

    found = {"size": some(2, sizes[rank - 1]), "kernel": some(1, kernels[rank - 1]), "batch": int(rng.integers(1, 6))}
    found["padding"] = tuple(zip(some(-2, 6), some(-2, 6), strict=True))
    if steps and rng.random() < 0.5:
        name, limit = chosen(rng, steps)
        found[name] = some(1, limit)
    return found


def dtypes(rng: Rng, *given: str) -> dict[str, Any]:
    """Random dtypes of the operands and of the result."""
    return {"dtype": chosen(rng, given), "out_dtype": chosen(rng, ("bfloat16", "float16", "float32"))}


# ---- depthwise -----------------------------------------------------------------------------------------------------


def _depthwise(kind: type[Any], channels: int, **more: Any) -> Any:
    return conv_of(kind, channels=(channels, channels), groups=channels, **more)


def _draw_depthwise(rng: Rng, kind: type[Any]) -> Any:
    """With small filters, or with filters that are read in blocks of taps."""
    steps = ("stride", 5), ("lhs_dilation", 5), ("rhs_dilation", 4)
    sizes, kernels = ((40, 14, 8), (6, 6, 6)) if rng.random() < 0.5 else ((200, 30, 9), (65, 16, 9))
    more = geometry(rng, sizes, kernels, *steps)
    channels, each = int(rng.choice([1, 2, 3, 4, 6, 8, 37])), int(rng.choice([1, 1, 1, 2, 3]))
    more |= dtypes(rng, "float32", "bfloat16", "float16")
    return conv_of(kind, channels=(channels, channels * each), groups=channels, **more)


DEPTHWISE = Tried(
    {ConvFpropProblem: depthwise.FPROP, ConvDgradProblem: depthwise.DGRAD},
    lambda c: c.columns,
    _draw_depthwise,
    networks=[
        _depthwise(kind, channels, size=size, kernel=kernel, **more)
        for kind in BOTH
        for size, kernel, channels, more in (
            ((56, 56), (7, 7), 96, {"padding": 3, **BF16}),
            ((14, 14), (7, 7), 384, {"padding": 3, **HALF}),
            ((56, 57), (3, 3), 144, {"padding": 1, "stride": 2, **BF16}),
            ((28, 28), (5, 5), 240, {"padding": 2, "stride": 2, "dtype": "bfloat16", "out_dtype": "float32"}),
            ((1000,), (4,), 512, {"padding": ((3, 0),), **BF16}),
            ((8, 28, 28), (3, 3, 3), 64, {"padding": 1, **FLOAT}),
            ((1000,), (31,), 144, {"padding": 15, **FLOAT}),
            ((1000,), (64,), 37, {"padding": ((63, 0),), **BF16}),
            ((28, 28), (15, 15), 64, {"padding": 7, **FLOAT}),
        )
    ],
    measured=[_depthwise(kind, 96, size=(56, 56), kernel=(3, 3), batch=16, padding=1, **BF16) for kind in BOTH],
    base=lambda kind: _depthwise(kind, 4, size=(9, 10), kernel=(3, 3), padding=1, **FLOAT),
    refused=[
        ({"out_channels": 8, "feature_group_count": 2},
         "4 input and 8 output channels in 2 groups; accepted: as many groups as input channels"),
        ({"dtype": "float64"}, "dtype float64; accepted: float32, bfloat16, float16"),
        ({"in_channels": 16, "out_channels": 16, "feature_group_count": 16, "kernel_spatial": (8, 1),
          "dtype": "bfloat16"},
         r"a filter of \(8, 1\); accepted: sides up to 7 and 49 taps, or a problem that the family toeplitz refuses"),
        ({"window_strides": (17, 1)}, "; accepted: one of them 1, 1 to 16"),
        ({"window_strides": (2, 1), "lhs_dilation": (2, 1)}, "stride 2 of an input dilated by 2; accepted: one"),
        ({"batch": 0}, "accepted: sizes of 1 to"),
    ],
    best=2,
)  # fmt: skip

# ---- Toeplitz ------------------------------------------------------------------------------------------------------


def _toeplitz(kind: type[Any], channels: int, stride: Any = 1, **more: Any) -> Any:
    """The stride is that of the forward pass that runs: for an input gradient, the dilation of its input."""
    return _depthwise(kind, channels, **{"stride" if kind is ConvFpropProblem else "lhs_dilation": stride, **more})


def _draw_toeplitz(rng: Rng, kind: type[Any]) -> Any:
    sides = (12, 8, 4) if rng.integers(4) else (12, 40, 4)  # taps of tall filters slide
    more = geometry(rng, (90, 24, 10), sides, ("stride", 3))
    return _toeplitz(kind, 8 * int(rng.integers(1, 8)), **more, **dtypes(rng, "bfloat16", "float16"))


def _toeplitz_config(rng: Rng, family: Family, p: ConvProblem) -> toeplitz.Config:
    """A legal config; a candidate after 100 illegal draws."""
    for _ in range(100):
        tiles, rows, turns = (int(rng.integers(1, most + 1)) for most in (16, 24, 2))
        sizes = tiles, rows, chosen(rng, (1, 2)), chosen(rng, (1, 2, 4)), chosen(rng, (1, 2, 4))
        config = toeplitz.Config(chosen(rng, (8, 16, 32)), *sizes, bool(rng.integers(2)), turns)
        if family.refusal(p, config) is None:
            return config
    return chosen(rng, family.candidates(p, DEFAULT_CUDA))


TOEPLITZ = Tried(
    {ConvFpropProblem: toeplitz.FPROP, ConvDgradProblem: toeplitz.DGRAD},
    lambda c: (c.channels, c.step),
    _draw_toeplitz,
    networks=[
        _toeplitz(kind, channels, size=size, kernel=kernel, padding=None, **more)
        for kind in BOTH
        for size, kernel, channels, more in (
            ((56, 56), (7, 7), 96, BF16),
            ((14, 14), (7, 7), 384, HALF),
            ((28, 28), (5, 5), 240, {"dtype": "bfloat16", "out_dtype": "float32"}),
            ((28, 28), (7, 7), 192, {"stride": 2, **BF16}),
            ((56, 56), (31, 31), 128, BF16),
            ((16, 56, 56), (3, 3, 3), 64, BF16),
            ((4096,), (4,), 2048, BF16),
        )
    ],
    measured=[_toeplitz(kind, 96, size=(56, 56), kernel=(7, 7), batch=16, padding=None, **BF16) for kind in BOTH],
    base=lambda kind: _toeplitz(kind, 16, size=(50, 50), kernel=(3, 3), padding=1, **BF16),
    refused=[
        ({"out_channels": 32}, "16 input and 32 output channels in 16 groups; accepted: as many groups as"),
        ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted: float32, bfloat16, float16"),
        ({"in_channels": 12, "out_channels": 12, "feature_group_count": 12}, "12 channels; accepted: multiples of 8"),
        ({"rhs_dilation": (2, 1)}, r"a filter by \(1, 2, 1\); accepted: by 1"),
        ({"window_strides": (3, 1)}, "accepted: "),
        ({"batch": 0}, "accepted: sizes of 1 to"),
        ({"kernel_spatial": (40, 200)}, "registers of a thread; accepted: up to 240"),
    ],
    config=_toeplitz_config,
)  # fmt: skip

# ---- grouped -------------------------------------------------------------------------------------------------------

EQUAL = ((n, n) for n in (2, 4, 8, 16, 24, 32, 64))
GROUP_CHANNELS = (*EQUAL, (48, 16), (4, 12), (8, 2), (16, 48), (1, 4), (3, 1))


def _draw_grouped(rng: Rng, kind: type[Any]) -> Any:
    each_in, each_out = chosen(rng, GROUP_CHANNELS)
    multiple = 8 // math.gcd(8, each_in, each_out)
    groups = max(2, multiple * int(rng.integers(1, max(2, 80 // (multiple * max(each_in, each_out))))))
    more = geometry(rng, (40, 14, 8), (6, 6, 4), ("stride", 4), ("lhs_dilation", 4), ("rhs_dilation", 4))
    more |= dtypes(rng, "bfloat16", "float16")
    return conv_of(kind, channels=(each_in * groups, each_out * groups), groups=groups, **more)


def _grouped_config(rng: Rng, family: Family, p: ConvProblem) -> grouped.Config:
    """A legal config; a candidate after 200 illegal draws."""
    for _ in range(200):
        size = 16 * max(p.window_strides)
        tile = (int(rng.integers(1, most + 1)) for most in (p.batch, size, 2 * size, 4))
        config = grouped.Config(
            chosen(rng, grouped.BLOCKS), *tile, chosen(rng, (1, 2)),
            stages=int(rng.integers(2, 6)), workers=int(rng.integers(1, 7)),
        )  # fmt: skip
        if family.refusal(p, config) is None:
            return config
    return chosen(rng, family.candidates(p, DEFAULT_CUDA))


def _grouped_sibling(rng: Rng, p: ConvProblem, config: grouped.Config) -> tuple[ConvProblem, grouped.Config]:
    """Another problem; the number of workers may differ, too."""
    more = int(rng.integers(p.batch, 20)), int(rng.integers(1, 7))
    return dataclasses.replace(p, batch=more[0]), dataclasses.replace(config, workers=more[1])


GROUPED = Tried(
    {ConvFpropProblem: grouped.FPROP, ConvDgradProblem: grouped.DGRAD},
    lambda c: (c.in_block, c.units, c.strips),
    _draw_grouped,
    networks=[
        conv_of(kind, size, kernel, (channels, channels), groups=groups, padding=None, stride=stride, **BF16)
        for kind in BOTH
        for size, kernel, channels, groups, stride in (
            ((56, 56), (3, 3), 128, 32, 1),
            ((56, 56), (3, 3), 256, 32, 2),
            ((7, 7), (3, 3), 1024, 32, 1),
            ((28, 28), (3, 3), 256, 4, 2),
            ((112, 112), (3, 3), 48, 2, 2),
            ((1000,), (5,), 256, 16, 1),
        )
    ],
    measured=[conv_of(kind, (56, 56), (3, 3), (128, 128), groups=32, batch=16, padding=1, **BF16) for kind in BOTH],
    base=lambda kind: conv_of(kind, (9, 10), (3, 3), (32, 32), groups=8, padding=1, **BF16),
    refused=[
        ({"feature_group_count": 1}, "feature_group_count 1, batch_group_count 1; accepted: at least 2 feature groups"),
        ({"feature_group_count": 32}, "1 of the input and 1 of the output channels of .*; accepted: not 1 of each"),
        ({"in_channels": 320, "out_channels": 320, "feature_group_count": 2}, "160 of the output channels of a group"),
        ({"in_channels": 36, "out_channels": 36, "feature_group_count": 9},
         "36 output channels; accepted: multiples of 8"),
        ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted: float32, bfloat16, float16"),
        ({"window_strides": (5, 1)}, "; accepted: one of them 1, 1 to 4"),
        ({"batch": 0}, "accepted: sizes of 1 to"),
        ({"rhs_dilation": (120, 1)}, "registers of a thread; accepted: up to 240"),
        ({"rhs_dilation": (1, 200)}, "columns of the input; accepted: up to 256"),
    ],
    config=_grouped_config,
    sibling=_grouped_sibling,
)  # fmt: skip

# ---- few input channels --------------------------------------------------------------------------------------------


def _draw_gather(rng: Rng, kind: type[Any]) -> Any:
    steps = ("stride", 5), ("lhs_dilation", 3), ("rhs_dilation", 4)
    more = geometry(rng, (300, 40, 12), (17, 9, 5), *steps)
    more |= dtypes(rng, "bfloat16", "float16", "float32")
    if rng.random() < 0.3:
        groups, each = int(rng.integers(2, 6)), rng.choice([3, 5, 7, 9, 10, 13, 16, 20, 22], 2)
        return conv_of(kind, channels=(groups * int(each[0]), groups * int(each[1])), groups=groups, **more)
    if rng.random() < 0.5 and kind is ConvFpropProblem:
        return conv_of(kind, channels=(int(rng.integers(1, 17)), 8 * int(rng.integers(1, 40))), **more)
    return conv_of(kind, channels=(int(rng.integers(1, 70)), int(rng.integers(1, 70))), **more)


def _gather_sibling(rng: Rng, p: ConvProblem, config: gather.Config) -> tuple[ConvProblem, gather.Config]:
    """Another problem; the number of output channels may differ, too."""
    p = dataclasses.replace(p, batch=int(rng.integers(1, 40)))
    if isinstance(p, ConvFpropProblem) and p.out_channels % 8 == 0 and p.feature_group_count == 1:
        p = dataclasses.replace(p, out_channels=8 * int(rng.integers(1, 40)))
    return p, config


GATHER = Tried(
    {ConvFpropProblem: gather.FPROP, ConvDgradProblem: gather.DGRAD},
    lambda c: (c.tile_n, c.consumers),
    _draw_gather,
    networks=[
        conv_of(ConvFpropProblem, size, kernel, channels, **more)
        for size, kernel, channels, more in (
            ((224, 224), (7, 7), (3, 64), {"batch": 8, "stride": 2, "padding": 3, **BF16}),
            ((224, 224), (3, 3), (3, 32), {"batch": 8, "stride": 2, "padding": ((0, 1), (0, 1)), **BF16}),
            ((112, 112), (3, 3), (3, 64), {"batch": 8, "padding": 1, **HALF}),
            ((224, 224), (4, 4), (3, 96), {"batch": 8, "stride": 4, **BF16}),
            ((64, 64), (3, 3), (4, 320), {"batch": 8, "padding": 1, **HALF}),
            ((64, 64), (3, 3), (16, 64), {"batch": 4, "padding": 1}),
            ((8, 112, 112), (3, 7, 7), (3, 64),
             {"batch": 1, "stride": (1, 2, 2), "padding": ((1, 1), (3, 3), (3, 3)), **BF16}),
            ((8000,), (10,), (1, 512), {"batch": 4, "stride": 5, **BF16}),
            ((224, 224), (7, 7), (3, 64), {"batch": 4, "stride": 2, "padding": 3, **FLOAT}),
            ((84, 84), (8, 8), (4, 32), {"batch": 16, "stride": 4, **FLOAT}),
            ((32, 32), (3, 3), (16, 16), {"batch": 16, "padding": 1, **FLOAT}),
            ((32, 32), (3, 3), (32, 32), {"batch": 8, "padding": 1, **FLOAT}),
        )
    ]
    + [
        conv_of(kind, size, kernel, channels, batch=4, **more)
        for kind in BOTH
        for size, kernel, channels, more in (
            ((32, 32), (3, 3), (37, 53), {"padding": 1, **BF16}),
            ((28, 28), (3, 3), (3, 5), {"padding": 1, **HALF}),
            ((28, 28), (3, 3), (37, 5), {"padding": 1, **FLOAT}),
            ((32, 32), (3, 3), (16, 32), {"padding": 1, **FLOAT}),
            ((28, 28), (3, 3), (80, 80), {"padding": 1, "groups": 8, **BF16}),
            ((28, 28), (3, 3), (80, 80), {"padding": 1, "groups": 4, **BF16}),
            ((28, 28), (3, 3), (64, 64), {"padding": 1, "groups": 8, **FLOAT}),
        )
    ],
    measured=[conv_of(ConvFpropProblem, (224, 224), (7, 7), (3, 64), batch=64, stride=2, padding=3, **BF16)],
    base=lambda kind: conv_of(kind, (40, 40), (7, 7), (3, 64), stride=2, padding=3),
    refused=[
        ({"dtype": "float64"}, "dtype float64; accepted: bfloat16, float16, float32"),
        ({"dtype": "float32", "precision": "highest"}, "precision 'highest'; accepted: 'default', 'high'"),
        ({"dtype": "float32", "in_channels": 68, "out_channels": 68}, "68 channels of the input; accepted: 1 to 64"),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted"),
        ({"batch_group_count": 2}, "batch_group_count 2; accepted: 1"),
        ({"feature_group_count": 3, "out_channels": 66}, "3 groups of (1|22) channels to (22|1); accepted: 2 to 64"),
        ({"feature_group_count": 4, "in_channels": 32}, "4 groups of (8|16) channels to (16|8); accepted: 2 to 64"),
        ({"feature_group_count": 2, "in_channels": 80, "out_channels": 80, "dtype": "float32"},
         "2 groups of 40 channels to 40; accepted: 2 to 64 channels each that the families grouped and im2col refuse"),
        ({"in_channels": 24, "out_channels": 24},
         "24 (channels of the input; accepted: 1 to 16|output channels; accepted: numbers that TMA cannot load)"),
        ({"in_channels": 257, "out_channels": 257}, "257 channels of the input; accepted: 1 to 256"),
        ({"batch": 0}, "0 output pixels; accepted: 1 to"),
        ({"kernel_spatial": (32, 32), "in_channels": 5, "out_channels": 7}, "take too much shared memory"),
    ],
    sibling=_gather_sibling,
    in_tf32=True,
)  # fmt: skip

# ---- filters as large as their stride ------------------------------------------------------------------------------


def _patch(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> Any:
    return conv_of(kind, size, kernel, (channels[0], channels[1]), stride=kernel, **more)


def _draw_patch(rng: Rng, kind: type[Any]) -> Any:
    rank = int(rng.integers(1, 4))
    kernel = tuple(int(k) for k in rng.choice([1, 2, 3, 4, 5, 8, 14, 16], rank))
    rest = [0 if rng.random() < 0.7 else int(rng.integers(k)) for k in kernel]
    windows = rng.integers(1, (200, 24, 8)[rank - 1], rank)
    size = tuple(int(n) * k + more for n, k, more in zip(windows, kernel, rest, strict=True))
    types = {"dtype": chosen(rng, ("bfloat16", "float16"))}
    types["out_dtype"] = chosen(rng, ("float32", types["dtype"]))
    channels = int(rng.integers(1, 40)), 8 * int(rng.integers(1, 20))
    return _patch(kind, size, kernel, *channels, batch=int(rng.integers(1, 5)), **types)


PATCH_KINDS: tuple[type[Any], ...] = (ConvFpropProblem, ConvWgradProblem)
# Device code depends on the config, the dtypes, and whether output channels are a multiple of 64.
PATCH_CONFIGS = (
    Config(64, 64, 6),
    Config(128, 256, 4),
    Config(64, 128, 6, 2, "cluster"),
    Config(192, 64, 5, 5, "cluster"),
    Config(192, 128, 4, 3, "workspace"),
    Config(128, 128, 5, 11, "workspace"),
)


def _patch_config(rng: Rng, family: Family, p: ConvProblem) -> Config:
    """A random config, with one split if the reduction has too few blocks."""
    config = chosen(rng, PATCH_CONFIGS)
    return dataclasses.replace(config, splits=1, reduction="none") if family.refusal(p, config) else config


PATCH = Tried(
    {ConvFpropProblem: patch.FPROP, ConvWgradProblem: patch.WGRAD},
    lambda c: (c.tile_m, c.tile_n, c.reduction),
    _draw_patch,
    networks=[
        _patch(kind, size, kernel, *channels, batch=batch, **types)
        for kind in PATCH_KINDS
        for size, kernel, channels, batch, types in (
            ((224, 224), (16, 16), (3, 768), 4, BF16),
            ((224, 224), (4, 4), (4, 96), 2, BF16),
            ((56, 56), (2, 2), (96, 192), 8, HALF),
            ((14, 14), (2, 2), (384, 768), 8, {}),
            ((8, 32, 32), (2, 4, 4), (16, 128), 2, BF16),
            ((16, 224, 224), (2, 16, 16), (3, 768), 1, BF16),
            ((8, 160, 160), (2, 16, 16), (3, 384), 2, BF16),
        )
    ],
    measured=[_patch(kind, (56, 56), (2, 2), 96, 192, batch=64, **HALF) for kind in PATCH_KINDS[:1]],
    base=lambda kind: _patch(kind, (12, 20), (4, 4), 4, 24),
    refused=[
        ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
        ({"feature_group_count": 2}, "feature_group_count 2, batch_group_count 1; accepted: 1"),
        ({"window_strides": (2, 2)}, r"a filter of \(4, 4\) with strides \(2, 2\); accepted: strides of its size"),
        ({"lhs_dilation": (2, 1)}, r"lhs_dilation \(2, 1\); accepted: 1"),
        ({"rhs_dilation": (1, 2)}, r"rhs_dilation \(1, 2\); accepted: 1"),
        ({"batch": 0}, "accepted: no empty dimension"),
        ({"padding": ((1, 0), (0, 0))}, "accepted: windows"),
        ({"input_spatial": (12, 19), "padding": ((0, 0), (0, 1))}, "accepted: windows"),
        ({"in_channels": 3}, "4 columns of 3 channels in a filter row; accepted: a multiple of 8"),
        ({"out_channels": 12}, "12 output channels; accepted: a multiple of 8"),
        ({"kernel_spatial": (18, 4), "window_strides": (18, 4), "input_spatial": (54, 20)}, "of 1 planes and 18 rows"),
    ],
    config=_patch_config,
)  # fmt: skip

# ---- dense ---------------------------------------------------------------------------------------------------------


def draw_im2col(rng: Rng, kind: type[Any], scale: int = 1) -> Any:
    """A random problem; `scale` multiplies its sizes."""
    steps = ("stride", 5), ("stride", 5), ("lhs_dilation", 5), ("rhs_dilation", 4)
    more = geometry(rng, (60 * scale, 14 * scale, 6 * scale), (8, 5, 4), *steps)
    if rng.random() < 0.2:
        more["padding"] = 0
    if rng.random() < 0.3:
        more["rhs_dilation"] = int(rng.integers(1, 4))
    if rng.random() < 0.15:  # rows with more taps than a stage
        row = int(rng.integers(10, 50))
        more["kernel"] = (*more["kernel"][:-1], row)
        more["padding"] = (*(((0, 0),) * (len(more["kernel"]) - 1)), (row // 2, int(rng.integers(row))))
    channels = [8 * int(rng.integers(1, 8 * scale)) for _ in range(2)]
    columns = int(kind is ConvFpropProblem)  # which channels the result has
    channels[columns] -= int(rng.choice([0, 0, 0, 4, 4, int(rng.integers(8))]))
    if rng.random() < 0.2:
        channels = [64 * max(1, c // 64) for c in channels]
    elif rng.random() < 0.3:
        channels = [8 * int(rng.integers(1, 5)) for _ in range(2)]
    elif rng.random() < 0.3:
        more["groups"] = int(rng.integers(2, 4))
        whole = int(rng.choice([32, 64, 96, *range(24, 128, 8)]))
        other = 4 * int(rng.integers(1, 24)) - int(rng.choice([0, 0, 1, 2]))
        channels = [c * more["groups"] for c in ((whole, other) if kind is ConvFpropProblem else (other, whole))]
    types = dtypes(rng, "bfloat16", "float16", "float32")
    if types["dtype"] == "float32" and "groups" not in more and rng.random() < 0.2:  # pixels that may be joined
        more |= {name: tuple(4 * -(-n // 4) for n in more[name]) for name in ("size", "kernel")}
        more |= {"stride": 4, "padding": 0, "lhs_dilation": 1, "rhs_dilation": 1}
        channels[1 - columns] = int(rng.integers(1, 9))
    return conv_of(kind, channels=(channels[0], channels[1]), **more, **types)


def _im2col_config(rng: Rng, family: Family, p: ConvProblem) -> im2col.Config:
    """A candidate with fewer workers, each with several tiles."""
    config = chosen(rng, family.candidates(p, DEFAULT_CUDA))
    workers = int(rng.integers(1, config.workers + 1)) if config.workers else 0
    return dataclasses.replace(config, workers=workers)


DENSE: list[ConvProblem] = [
    conv_of(kind, size, kernel, channels, batch=batch, **{**BF16, **more})
    for kind in BOTH
    for batch, size, kernel, channels, more in (
        (8, (28, 28), (3, 3), (128, 128), {"padding": 1}),
        (2, (14, 14), (3, 3), (512, 256), {"padding": 1, "out_dtype": "float32"}),
        (4, (56, 56), (3, 3), (64, 128), {"padding": 1, "stride": 2, **HALF}),
        (4, (28, 28), (1, 1), (256, 128), {"stride": 2}),
        (8, (28, 28), (1, 1), (512, 128), {}),
        (2, (16, 16, 16), (3, 3, 3), (64, 64), {"padding": 1}),
        (2, (16, 16, 16), (4, 4, 4), (64, 64), {"padding": 1, "stride": 2}),
        (4, (2000,), (7,), (64, 128), {"padding": 9, "rhs_dilation": 3}),
        (2, (16, 32, 32), (3, 3, 3), (32, 32), {"padding": 1}),
        (4, (64, 64), (3, 3), (16, 32), {"padding": 1, "stride": 2}),
        (4, (64, 64), (5, 5), (16, 16), {"padding": 2, **HALF}),
        (8, (28, 28), (3, 3), (192, 192), {"padding": 1, "groups": 3}),
        (8, (28, 28), (3, 3), (128, 192), {"padding": 1, "groups": 2, "stride": 2}),
        (8, (28, 28), (3, 3), (160, 160), {"padding": 1, "groups": 4}),
        (4, (200,), (64,), (96, 96), {"padding": ((32, 31),), "groups": 2}),
        (4, (150,), (95,), (192, 192), {"padding": 47, "groups": 4}),
        (4, (40, 50), (1, 11), (64, 64), {"padding": ((0, 0), (5, 5))}),
        (4, (56, 56), (3, 3), (64, 64), {"padding": 1, **FLOAT}),
        (16, (32, 32), (3, 3), (16, 16), {"padding": 1, **FLOAT}),
        (4, (64, 64), (3, 3), (128, 2) if kind is ConvFpropProblem else (2, 128), {"padding": 1}),
    )
] + [conv_of(ConvFpropProblem, (84, 84), (8, 8), (4, 32), batch=16, stride=4, **FLOAT)]  # fmt: skip
IM2COL = Tried(
    {ConvFpropProblem: im2col.FPROP, ConvDgradProblem: im2col.DGRAD},
    lambda c: (c.reduction, c.taps, c.swap, c.workers > 0),
    draw_im2col,
    networks=DENSE,
    measured=DENSE[::2],
    base=lambda kind: conv_of(kind, (9, 10), (3, 3), padding=1, **BF16),
    refused=[
        ({"feature_group_count": 4}, "feature_group_count 4 of 16 channels to 16 each; accepted: multiples of 8 from"),
        ({"batch_group_count": 2}, "batch_group_count 2; accepted: 1"),
        ({"dtype": "float64"}, "dtype float64; accepted: bfloat16, float16, float32"),
        ({"dtype": "float32", "precision": "highest"}, "precision 'highest'; accepted: 'default', 'high'"),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted: float32, bfloat16, float16"),
        ({"in_channels": 30, "out_channels": 30}, "30 (input|output) channels; accepted: multiples of 8"),
        ({"in_channels": 30, "out_channels": 30, "dtype": "float32"}, "channels; accepted: multiples of 4"),
        ({"batch": 0}, "batch 0, input .* accepted: no empty dimension"),
        ({"window_strides": (2, 1), "lhs_dilation": (2, 1)},
         "window stride 2 of an input dilated by 2; accepted: one of"),
        ({"window_strides": (17, 1)}, "; accepted: one of them 1, up to 8 and 16"),
        ({"padding": ((300, 300), (1, 1))}, "windows that begin .* of 2 spatial dimensions; accepted: -128 to 127"),
        ({"rhs_dilation": (128, 128), "padding": ((128, 128),) * 2}, "reach 256 of 2 spatial .* at most 255"),
        ({"batch": 2**22}, "more than 2146435071 elements"),
    ],
    config=_im2col_config,
    best=99,
    in_tf32=True,
)  # fmt: skip
FAMILIES = {
    "depthwise": DEPTHWISE, "toeplitz": TOEPLITZ, "grouped": GROUPED, "gather": GATHER, "patch": PATCH, "im2col": IM2COL
}  # fmt: skip
KINDS = [(name, kind) for name, tried in FAMILIES.items() for kind in tried.families]
