"""Random problems for every CUDA family, and configs for them that share device code where they can.

Each family has kinds of problems that it supports, so that every family gets its share. A problem then goes to every
family that supports it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_splitk import kernels
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.kernels.contraction import halo, patch
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise import wgrad_any as depthwise_any
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, conv_output_spatial
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests import float64

# The patch families have random problems of their own, and so have those that use another family's kernels.
FAMILIES = tuple(
    f for f in kernels.families("conv_wgrad", "cuda") if f is not patch.WGRAD and not isinstance(f, Adapted)
)
TARGET = DEFAULT_CUDA
OUT_DTYPES = ("float32", "bfloat16", "float16")
HALVES = (("bfloat16", "default"), ("float16", "default"))
FLOATS = (("float32", "default"), ("float32", "highest"))
TF32 = (("float32", "default"), ("float32", "high"))
MAX_WINDOWS = 2_000_000  # most elements of all windows, which the reference multiplies
MAX_FLOPS = 2e8
SIBLINGS = 0.7  # of the problems have the window, channels and dtypes of an earlier one
REUSE = 0.85  # of the configs come with device code that there is already, where there is any
SINGLE_SPLITS = 0.3  # of the other split counts that are drawn
MATRIX_PRODUCTS = 0.1


@dataclasses.dataclass(frozen=True)
class Kind:
    """Problems that a family supports.

    Attributes:
      channels: draws (input channels, output channels, groups).
      kernels: the filter's largest size by the number of dimensions.
    """

    family: kernels.Family
    channels: Callable[[np.random.Generator], tuple[int, int, int]]
    ranks: tuple[int, ...]
    dtypes: Sequence[tuple[str, str]] = HALVES
    strides: int = 4  # the largest
    lhs_dilation: bool = False
    kernels: Mapping[int, int] = dataclasses.field(default_factory=lambda: {1: 9, 2: 7, 3: 3})


def _eights(rng: np.random.Generator) -> tuple[int, int, int]:
    return 8 * int(rng.integers(1, 20)), 8 * int(rng.integers(1, 20)), 1


def _fours(rng: np.random.Generator) -> tuple[int, int, int]:
    return 4 * int(rng.integers(1, 40)), 4 * int(rng.integers(1, 40)), 1


def _any(rng: np.random.Generator) -> tuple[int, int, int]:
    few = int(rng.choice([1, 2, 3, 4, 5, 7, 12])), int(rng.choice([1, 3, 8, 10, 64, 100]))
    many = int(rng.integers(1, 140)), int(rng.integers(1, 140))
    return (*(few if rng.random() < 0.5 else many), 1)


def _wide_groups(rng: np.random.Generator) -> tuple[int, int, int]:
    groups = int(rng.integers(2, 4))
    each = (64 * rng.integers(1, 3, 2)) if rng.random() < 0.5 else (8 * rng.integers(5, 17, 2))
    return groups * int(each[0]), groups * int(each[1]), groups


def _small_groups(rng: np.random.Generator) -> tuple[int, int, int]:
    if rng.random() < 0.4:  # groups that are padded
        of_in, of_out = (int(n) for n in rng.choice([2, 3, 5, 6, 8, 12, 20, 24, 40, 48, 56, 72, 112], 2))
        groups = math.lcm(8 // math.gcd(8, of_in), 8 // math.gcd(8, of_out)) * int(rng.integers(1, 3))
        return max(2, groups) * of_in, max(2, groups) * of_out, max(2, groups)
    each = [int(n) for n in rng.choice(grouped.GROUP_CHANNELS, 2, p=(0.15, 0.25, 0.25, 0.15, 0.15, 0.05))]
    step = max(1, 8 // min(each))  # for channels in multiples of eight
    groups = step * int(rng.integers(1, max(2, 128 // (step * max(each)) + 1)))
    return groups * each[0], groups * each[1], groups


def _depthwise(rng: np.random.Generator) -> tuple[int, int, int]:
    channels = 8 * int(rng.integers(1, 8))
    return channels, channels * int(rng.choice([1, 1, 2, 3])), channels


def _any_depthwise(rng: np.random.Generator) -> tuple[int, int, int]:
    channels = int(rng.choice([2, 3, 4, 6, 16, 33, 40]))
    return channels, channels * int(rng.choice([1, 1, 2, 3])), channels


KINDS = {
    "unit_stride": Kind(halo.FAMILY, _eights, (2,), strides=1),
    "dense": Kind(im2col.FAMILY, _eights, (1, 2, 2, 3), strides=8),
    "wide_groups": Kind(im2col.FAMILY, _wide_groups, (1, 2, 2, 3)),
    "small_groups": Kind(grouped.FAMILY, _small_groups, (1, 2, 2), kernels={1: 40, 2: 7}),
    "depthwise": Kind(depthwise.FAMILY, _depthwise, (1, 2, 2), strides=8),
    "depthwise_any": Kind(depthwise_any.FAMILY, _any_depthwise, (1, 2, 3, 3), (*HALVES, *FLOATS)),
    "large_filters": Kind(
        depthwise_any.FAMILY, _any_depthwise, (1, 2, 3), (*HALVES, *FLOATS), kernels={1: 65, 2: 16, 3: 6}
    ),
    "any_channels": Kind(gather.FAMILY, _any, (1, 2, 2, 3), lhs_dilation=True),
    "float32": Kind(gather.FAMILY, _any, (1, 2, 2, 3), FLOATS, lhs_dilation=True),
    "tf32": Kind(tf32.FAMILY, _fours, (1, 2, 2), TF32),
}
# How many of 25 problems each kind gets.
MIXTURE = {
    "unit_stride": 3,
    "dense": 2,
    "wide_groups": 2,
    "small_groups": 4,
    "depthwise": 3,
    "depthwise_any": 2,
    "large_filters": 1,
    "any_channels": 3,
    "float32": 2,
    "tf32": 3,
}


def problems(rng: np.random.Generator, mixtures: int) -> list[ConvWgradProblem]:
    """Random problems of all kinds: `mixtures` times as many of each kind as `MIXTURE` says."""
    earlier: dict[str, list[ConvWgradProblem]] = {name: [] for name in KINDS}
    found = []
    for _ in range(mixtures):
        for name, count in MIXTURE.items():
            for _ in range(count):
                known = earlier[name]
                if known and rng.random() < SIBLINGS:
                    found.append(_problem(rng, KINDS[name], sibling=known[rng.integers(len(known))]))
                else:
                    found.append(_problem(rng, KINDS[name], number=len(known)))
                    known.append(found[-1])
    return found


def draws(rng: np.random.Generator, *kinds: str) -> Iterator[ConvWgradProblem]:
    """Problems of these kinds in turns, without end."""
    for number in itertools.count():
        yield _problem(rng, KINDS[kinds[number % len(kinds)]], number=number // len(kinds))


def _problem(
    rng: np.random.Generator, kind: Kind, sibling: ConvWgradProblem | None = None, number: int = 0
) -> ConvWgradProblem:
    """Draws a problem of a kind. It has the window, channels and dtypes of `sibling`; without one, `number` selects the
    dtypes."""
    while True:
        p = resized(rng, _drawn(rng, kind, number) if sibling is None else sibling)
        windows = p.reduction_size * p.taps * p.in_channels
        if 0 < windows <= MAX_WINDOWS and p.flops <= MAX_FLOPS and kind.family.refusal(p, None, TARGET) is None:
            return p


def _drawn(rng: np.random.Generator, kind: Kind, number: int) -> ConvWgradProblem:
    """A problem without batch, sizes and padding; the combinations of dtypes come in turns."""
    rank = int(rng.choice(kind.ranks))
    ones = (1,) * rank
    in_channels, out_channels, groups = kind.channels(rng)
    dtypes = list(itertools.product(kind.dtypes, OUT_DTYPES))
    (dtype, precision), out_dtype = dtypes[number % len(dtypes)]

    def draw(most: int, part: float) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers(1, most + 1, rank)) if rng.random() < part else ones

    matrix = rng.random() < MATRIX_PRODUCTS
    return ConvWgradProblem(
        batch=1,
        input_spatial=ones,
        output_spatial=ones,
        kernel_spatial=ones if matrix else draw(kind.kernels[rank], 0.95),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=ones if matrix else draw(kind.strides if rng.random() < 0.5 else min(2, kind.strides), 0.6),
        padding=((0, 0),) * rank,
        lhs_dilation=draw(3, 0.35) if kind.lhs_dilation and not matrix else ones,
        rhs_dilation=ones if matrix else draw(3, 0.35),
        feature_group_count=groups,
        dtype=dtype,
        out_dtype=out_dtype,
        precision=precision,
    )


def resized(rng: np.random.Generator, p: ConvProblem) -> Any:
    """The problem with another batch, and other sizes and padding."""
    size = tuple(int(n) for n in rng.integers(1, {1: 400, 2: 32, 3: 11}[p.rank], p.rank))
    reach = [(k - 1) * d for k, d in zip(p.kernel_spatial, p.rhs_dilation, strict=True)]
    mode = rng.random()
    if p.taps == 1 and set(p.window_strides) == {1}:
        mode *= 2  # mostly plain matrix products
    if mode < 0.45:
        padding = tuple((int(low), int(high)) for low, high in rng.integers(-2, 6, (p.rank, 2)))
    elif mode < 0.75:
        padding = tuple((n // 2, n - n // 2) for n in reach)
    else:
        padding = ((0, 0),) * p.rank
    out = conv_output_spatial(size, p.kernel_spatial, p.window_strides, padding, p.lhs_dilation, p.rhs_dilation)
    batch = int(rng.integers(1, 7))
    return dataclasses.replace(p, batch=batch, input_spatial=size, output_spatial=out, padding=padding)


def device_plan(family: kernels.Family, p: Any, config: Any) -> DevicePlan:
    found = family.plan(p, config)
    assert isinstance(found, DevicePlan)
    return found


class Configs:
    """Draws legal configs, mostly with device code that was drawn before, since compiling takes most of the time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.known: dict[str, dict[Any, None]] = {family.name: {} for family in FAMILIES}
        self.sources: set[Any] = set()

    def draw(self, family: kernels.Family, p: ConvWgradProblem) -> Any:
        """A candidate, or a config that an earlier problem had, mostly with other splits."""
        known = self.known[family.name]
        pool = [c for c in known if self._serves(family, p, c)] if self.rng.random() < REUSE else []
        if pool:
            config = self._with_other_splits(family, p, pool[self.rng.integers(len(pool))])
        else:
            configs = family.candidates(p, TARGET)
            pool = [c for c in configs if family.workspace_bytes(p, c) <= DEFAULT_WORKSPACE_LIMIT]
            config = pool[self.rng.integers(len(pool))]
            # With few splits, which most problems allow.
            single = dataclasses.replace(config, splits=1)
            legal = family.refusal(p, single, TARGET) is None
            known[single if legal else dataclasses.replace(config, splits=2)] = None
            if self.rng.random() < 0.5:
                config = self._with_other_splits(family, p, config)
        self.sources.add(device_plan(family, p, config).source)
        return config

    def _serves(self, family: kernels.Family, p: ConvWgradProblem, config: Any) -> bool:
        return family.refusal(p, config, TARGET) is None and device_plan(family, p, config).source in self.sources

    def _with_other_splits(self, family: kernels.Family, p: ConvWgradProblem, config: Any) -> Any:
        wanted = 1 + self.rng.permutation(16)
        for splits in [1, *wanted] if self.rng.random() < SINGLE_SPLITS else wanted:
            other = dataclasses.replace(config, splits=int(splits))
            if family.refusal(p, other, TARGET) is None:
                return other
        return config


def integers(rng: np.random.Generator, p: ConvWgradProblem) -> tuple[np.ndarray, np.ndarray]:
    """lhs and g, small enough that every product and sum is exact in every dtype."""
    lhs, g = (rng.integers(-2, 3, shape).astype(np.float32) for shape in (p.lhs_shape, p.g_shape))
    return lhs, g


def place(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of an element, in each dimension often the first or the last one."""
    return tuple(int((0, n - 1, rng.integers(n))[rng.integers(3)]) for n in shape)


def reached(p: ConvWgradProblem, lhs_place: tuple[int, ...], g_place: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The weights that depend on these two elements, and the weights that may depend on them. An element of g meets
    padding at some filter taps; a kernel may multiply it by zero there, or skip it."""
    lhs, g = np.zeros(p.lhs_shape), np.zeros(p.g_shape)
    lhs[lhs_place] = g[g_place] = 1
    found = float64.conv_wgrad_on_host(p, lhs, np.ones(p.g_shape)) != 0
    found |= float64.conv_wgrad_on_host(p, np.ones(p.lhs_shape), g) != 0
    possible = found.copy()
    possible[..., g_place[-1]] = True
    return found, possible
