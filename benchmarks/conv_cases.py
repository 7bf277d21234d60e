"""Convolutions of one to three dimensions for `benchmarks.conv`, in groups that have goals."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jax import numpy as jnp

from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem, canonical
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, conv_output_spatial

PASSES: dict[str, type[ConvProblem]] = {"fprop": ConvFpropProblem, "dgrad": ConvDgradProblem, "wgrad": ConvWgradProblem}
NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
ALL, INPUTS = ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad")

# Goals: The goals of each group: geometric mean and least of XLA's time over ours.
GROUPS = {
    "depthwise": (4.0, 1.0),
    "depthwise-any": (8.0, 1.0),
    "grouped": (2.5, 1.0),
    "stem-fprop": (5.0, 1.0),
    "stem-wgrad": (4.0, 1.0),
    "conv3d": (1.5, 1.0),
    "strided": (1.4, 1.0),
    "batch8": (1.4, 1.0),
    "dense": (1.05, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass of a convolution: lhs N..C, weight ..IO, output N..C.

    Attributes:
      which: "fprop", "dgrad" or "wgrad".
      size, channels: of the input, (in, out).
      padding: of each side of every dimension, or pairs.
      steps: strides of every dimension; of an input that is dilated (`transposed`) its dilation.
      dilation: of the filter, in every dimension.
    """

    group: str
    which: str
    batch: int
    size: tuple[int, ...]
    channels: tuple[int, int]
    kernel: tuple[int, ...]
    padding: int | tuple[tuple[int, int], ...] = 0
    steps: int = 1
    groups: int = 1
    dtype: str = "bfloat16"
    transposed: bool = False
    dilation: int = 1

    @property
    def name(self) -> str:
        kernel, size = "x".join(map(str, self.kernel)), "x".join(map(str, self.size))
        steps = "" if self.steps == 1 else f"{'t' if self.transposed else 's'}{self.steps}"
        steps += "" if self.dilation == 1 else f"d{self.dilation}"
        groups = "" if self.groups == 1 else f"g{self.groups}"
        channels = f"c{self.channels[0]}k{self.channels[1]}{groups}"
        dtype = "" if self.dtype == "bfloat16" else f"_{self.dtype}"
        return f"{self.which}_{channels}_{kernel}{steps}_{size}_b{self.batch}{dtype}"

    def problem(self) -> ConvProblem:
        """The problem that runs: a transposed convolution is an input gradient of a strided one, and the other way
        round."""
        return canonical(self.as_given())

    def as_given(self) -> ConvProblem:
        """The problem that the user's call states."""
        rank, ones = len(self.size), (1,) * len(self.size)
        pads = self.padding if isinstance(self.padding, tuple) else ((self.padding, self.padding),) * rank
        steps = (self.steps,) * rank
        strides, dilation = (ones, steps) if self.transposed else (steps, ones)
        taps = (self.dilation,) * rank
        return PASSES[self.which](
            batch=self.batch,
            input_spatial=self.size,
            output_spatial=conv_output_spatial(self.size, self.kernel, strides, pads, dilation, taps),
            kernel_spatial=self.kernel,
            in_channels=self.channels[0],
            out_channels=self.channels[1],
            window_strides=strides,
            padding=pads,
            lhs_dilation=dilation,
            rhs_dilation=taps,
            feature_group_count=self.groups,
            dtype=self.dtype,
            out_dtype=jnp.dtype(self.dtype).name,
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of `jax_splitk`'s functions, except arrays and shapes."""
        p = self.as_given()
        names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count")
        return {"dimension_numbers": NUMBERS[p.rank], **{name: getattr(p, name) for name in names}}

    def shrunk(self, flops: float) -> "Case":
        """At most `flops` of work, if halving the batch, then the pixels, can reach that."""
        case = self
        while case.problem().flops > flops and case.batch > 1:
            case = dataclasses.replace(case, batch=max(1, case.batch // 4))
        while case.problem().flops > flops and min(case.size) >= 2 * max(case.kernel):
            case = dataclasses.replace(case, size=tuple(size // 2 for size in case.size))
        return case


def _passes(group: str, passes: Iterable[str], *given: Any, **more: Any) -> Iterator[Case]:
    for which in passes:
        yield Case(f"{group}-{which}" if group == "stem" else group, which, *given, **more)


def _cases() -> Iterator[Case]:
    for batch, size, channels, kernel, steps in (
        (64, 56, 96, 7, 1), (64, 14, 384, 7, 1), (64, 112, 96, 3, 2), (64, 56, 144, 3, 1), (64, 56, 144, 5, 2),
        (64, 28, 240, 5, 1), (64, 28, 192, 7, 2),
    ):  # fmt: skip
        given = (batch, (size, size), (channels, channels), (kernel, kernel), kernel // 2, steps, channels)
        yield from _passes("depthwise", INPUTS, *given)
    causal = functools.partial(_passes, "depthwise-any", ALL)
    yield from causal(8, (4096,), (2048, 2048), (4,), ((3, 0),), 1, 2048)
    yield from causal(8, (4096,), (2048, 2048), (4,), ((3, 0),), 1, 2048, "float32")
    yield from causal(8, (16, 56, 56), (64, 64), (3, 3, 3), 1, 1, 64)
    yield from causal(8, (16, 28, 28), (128, 128), (3, 3, 3), 1, 1, 128, "float32")
    yield from causal(64, (56, 56), (96, 96), (7, 7), 3, 1, 96, "float32")
    for batch, size, channels, groups, steps in (
        (64, 56, 128, 32, 1), (64, 14, 512, 32, 1), (64, 56, 256, 32, 2), (64, 28, 256, 16, 1), (64, 28, 192, 3, 1),
    ):  # fmt: skip
        given = (batch, (size, size), (channels, channels), (3, 3), 1, steps, groups)
        yield from _passes("grouped", ALL, *given)
    for batch, channels, kernel, padding, steps in (
        (256, 64, 7, 3, 2), (256, 32, 3, 1, 2), (256, 96, 4, 0, 4), (256, 768, 16, 0, 16),
    ):  # fmt: skip
        given = (batch, (224, 224), (3, channels), (kernel, kernel), padding, steps)
        yield from _passes("stem", ("fprop", "wgrad"), *given)
    for batch, size, channels in (
        (8, (32, 64, 64), 32), (8, (16, 56, 56), 64), (8, (8, 28, 28), 128), (8, (4, 14, 14), 256),
    ):  # fmt: skip
        yield from _passes("conv3d", ALL, batch, size, (channels, channels), (3, 3, 3), 1)
    for batch, size, channels, kernel, padding in (
        (256, (56, 56), (128, 128), 3, 1), (256, (28, 28), (256, 256), 3, 1), (16, (64, 64), (320, 320), 3, 1),
        (256, (56, 56), (256, 512), 1, 0), (64, (57, 57), (96, 192), 2, 0),
    ):  # fmt: skip
        yield from _passes("strided", ("dgrad",), batch, size, channels, (kernel, kernel), padding, 2)
    for batch, size, channels in ((64, (16, 16), (256, 128)), (2, (32, 32, 32), (64, 64))):
        given = (batch, size, channels, (4,) * len(size), 2, 2)
        yield from _passes("strided", INPUTS, *given, transposed=True)
    for size, channels in ((56, (64, 64)), (28, (128, 128)), (14, (256, 256)), (7, (512, 512))):
        yield from _passes("batch8", INPUTS, 8, (size, size), channels, (3, 3), 1)
    yield from _passes("batch8", INPUTS, 8, (56, 56), (64, 256), (1, 1))
    for batch, size, channels in (
        (256, 56, 64), (256, 28, 128), (256, 14, 256), (256, 7, 512), (16, 64, 320), (16, 32, 640), (16, 16, 1280),
        (4, 128, 256), (2, 512, 128),
    ):  # fmt: skip
        yield from _passes("dense", INPUTS, batch, (size, size), (channels, channels), (3, 3), 1)


CONV_CASES = tuple(_cases())
