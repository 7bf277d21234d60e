"""Named 2D convolutions: the shapes that the benchmarks report, and small odd ones for tests."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import numpy as jnp

from jax_splitk.problems.conv_wgrad import ConvWgradProblem, Pairs, conv_output_spatial

DIMENSION_NUMBERS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution whose weight gradient is wanted: lhs NHWC, weight HWIO, output NHWC.

    Attributes:
      kernel, stride, dilation: per spatial dimension, (height, width).
      padding: (low, high) per spatial dimension; None for padding that keeps the size at stride 1 (kernel // 2 on both
        sides of an odd kernel).
      tags: groups that the case belongs to, for selection by name.
      xla_us: XLA's device time on one H200 (jax 0.11.2, cuDNN 9), microseconds; a record only, since the benchmark
        measures XLA again.
      floor_us: on one H200, the larger of flops / 790 TFLOP/s and least bytes / 4.3 TB/s, microseconds.
    """

    name: str
    batch: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "bfloat16"
    xla_us: float | None = None
    floor_us: float | None = None
    padding: Pairs | None = None
    dilation: tuple[int, int] = (1, 1)
    tags: tuple[str, ...] = ()

    @property
    def pads(self) -> Pairs:
        """The explicit padding."""
        if self.padding is not None:
            return self.padding
        reaches = [(k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        return tuple((reach // 2, reach - reach // 2) for reach in reaches)

    @property
    def output_spatial(self) -> tuple[int, ...]:
        spatial = (self.height, self.width)
        return conv_output_spatial(spatial, self.kernel, self.stride, self.pads, (1, 1), self.dilation)

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        return (self.batch, self.height, self.width, self.in_channels)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        return (*self.kernel, self.in_channels // self.groups, self.out_channels)

    @property
    def g_shape(self) -> tuple[int, ...]:
        return (self.batch, *self.output_spatial, self.out_channels)

    def problem(self, out_dtype: str | None = None) -> ConvWgradProblem:
        """The weight gradient; its dtype is `out_dtype`, None for the inputs'."""
        fields = {name: value for name, value in self.lax_arguments().items() if name != "dimension_numbers"}
        for name in ("batch", "output_spatial", "in_channels", "out_channels", "dtype"):
            fields[name] = getattr(self, name)
        return ConvWgradProblem(
            **fields,
            input_spatial=(self.height, self.width),
            kernel_spatial=self.kernel,
            lhs_dilation=(1, 1),
            out_dtype=jnp.dtype(out_dtype or self.dtype).name,
        )

    def lax_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `lax.conv_general_dilated` and of `jax_splitk`'s functions."""
        return {
            "window_strides": self.stride,
            "padding": self.pads,
            "rhs_dilation": self.dilation,
            "dimension_numbers": DIMENSION_NUMBERS,
            "feature_group_count": self.groups,
        }

    def shrunk(self, flops: float) -> "Case":
        """At most `flops` of work, by a smaller batch and, where one image is too much, a smaller image.

        Drops `xla_us` and `floor_us`, which hold for the full size only.
        """
        if self.problem().flops <= flops:
            return self
        batch = max(1, int(flops * self.batch // self.problem().flops))
        case = dataclasses.replace(self, batch=batch, xla_us=None, floor_us=None)
        while case.problem().flops > flops and min(case.height, case.width) >= 2 * max(case.kernel):
            case = dataclasses.replace(case, height=case.height // 2, width=case.width // 2)
        return case


def _case(
    batch: int,
    size: int,
    in_channels: int,
    out_channels: int,
    kernel: int,
    xla_us: float,
    floor_us: float,
    tags: str,
    *,
    stride: int = 1,
    groups: int = 1,
    dtype: str = "bfloat16",
) -> Case:
    name = f"c{in_channels}k{out_channels}" + (f"g{groups}" if groups > 1 else "")
    name += f"_r{kernel}" + (f"s{stride}" if stride > 1 else "") + f"_{size}x{size}_b{batch}"
    name += f"_{dtype}" if dtype != "bfloat16" else ""
    geometry = (batch, size, size, in_channels, out_channels, (kernel, kernel), (stride, stride), groups, dtype)
    return Case(name, *geometry, xla_us, floor_us, tags=tuple(tags.split()))


# ResNet-50 at batch 256 and 8, a diffusion UNet, large images, depthwise (ConvNeXt), grouped (ResNeXt).
WGRAD_CASES: tuple[Case, ...] = (
    _case(256, 56, 64, 256, 1, 127.1, 119.5, "resnet 1x1"),
    _case(256, 56, 256, 128, 1, 150.7, 143.4, "resnet 1x1"),
    _case(256, 56, 64, 64, 3, 150.0, 74.9, "resnet large3x3"),
    _case(256, 56, 128, 128, 3, 104.7, 74.9, "resnet large3x3 strided", stride=2),
    _case(256, 28, 128, 128, 3, 96.7, 74.9, "resnet large3x3"),
    _case(256, 28, 128, 512, 1, 74.0, 59.8, "resnet 1x1"),
    _case(256, 28, 512, 256, 1, 83.5, 71.8, "resnet 1x1"),
    _case(256, 14, 256, 256, 3, 99.5, 74.9, "resnet large3x3"),
    _case(256, 14, 256, 1024, 1, 44.2, 33.3, "resnet 1x1"),
    _case(256, 7, 512, 512, 3, 97.6, 74.9, "resnet large3x3"),
    _case(256, 7, 512, 2048, 1, 43.2, 33.3, "resnet 1x1"),
    _case(256, 224, 3, 64, 7, 1120.0, 113.5, "resnet stem strided", stride=2),
    _case(8, 56, 64, 64, 3, 19.3, 2.3, "batch8 small3x3"),
    _case(8, 28, 128, 128, 3, 16.3, 2.3, "batch8 small3x3"),
    _case(8, 14, 256, 256, 3, 10.7, 2.3, "batch8 small3x3"),
    _case(8, 7, 512, 512, 3, 16.1, 2.3, "batch8 small3x3"),
    _case(8, 56, 64, 256, 1, 10.5, 3.7, "batch8 1x1"),
    _case(16, 64, 320, 320, 3, 345.8, 152.9, "unet large3x3"),
    _case(16, 32, 640, 640, 3, 248.3, 152.9, "unet large3x3"),
    _case(16, 16, 1280, 1280, 3, 194.2, 152.9, "unet large3x3"),
    _case(4, 128, 256, 256, 3, 123.0, 97.9, "image large3x3"),
    _case(2, 512, 128, 128, 3, 218.6, 195.7, "image large3x3"),
    _case(64, 56, 96, 96, 7, 124.3, 17.9, "depthwise", groups=96),
    _case(64, 14, 384, 384, 7, 43.5, 4.5, "depthwise", groups=384),
    _case(64, 56, 128, 128, 3, 132.4, 23.9, "grouped", groups=32),
    _case(64, 14, 512, 512, 3, 28.5, 6.0, "grouped", groups=32),
    _case(256, 56, 64, 64, 3, 578.8, 95.6, "float32", dtype="float32"),
    _case(256, 56, 128, 128, 3, 308.5, 119.6, "float32 strided", stride=2, dtype="float32"),
)


def _small(
    name: str, *, size: tuple[int, int] = (12, 12), channels: tuple[int, int] = (64, 64), **changes: Any
) -> Case:
    """A 3x3 convolution of two images, with changes."""
    return dataclasses.replace(Case(name, 2, *size, *channels, (3, 3), tags=("small",)), **changes)


VALID: Pairs = ((0, 0), (0, 0))

# Each is odd in its own way, cheap on any machine, and within the limits of the Hopper family (wgrad_im2col).
SMALL_CASES: tuple[Case, ...] = (
    _small("plain"),
    _small("one_image", batch=1, size=(16, 16)),
    _small("short_reduction", batch=1, size=(4, 4)),
    _small("ragged_reduction", batch=3, size=(7, 7)),
    _small("one_output_pixel", batch=5, size=(5, 5), kernel=(5, 5), padding=VALID),
    _small("long_reduction", batch=24, size=(16, 16), channels=(16, 16)),
    _small("wide_rows", batch=1, size=(3, 150), channels=(16, 32)),
    _small("tall_image", batch=1, size=(130, 5), channels=(32, 16)),
    _small("non_square", size=(9, 21)),
    _small("valid_padding", padding=VALID),
    _small("asymmetric_padding", padding=((0, 2), (2, 1))),
    _small("wide_padding", size=(6, 6), padding=((4, 3), (5, 6))),
    _small("negative_padding", padding=((-1, 1), (1, -2))),
    _small("dilation2", dilation=(2, 2)),
    _small("dilation_3x2", size=(14, 11), dilation=(3, 2)),
    _small("dilation_stride", size=(15, 17), dilation=(2, 2), stride=(2, 2)),
    _small("stride2", stride=(2, 2)),
    _small("stride2_odd_size", size=(13, 15), stride=(2, 2)),
    _small("stride2_unread_input", size=(12, 12), stride=(2, 2), padding=VALID),
    _small("stride_2x1", stride=(2, 1)),
    _small("stride3", size=(17, 14), stride=(3, 3)),
    _small("stride8", batch=4, size=(33, 40), channels=(16, 16), stride=(8, 8)),
    _small("stride_beyond_kernel", size=(16, 16), kernel=(2, 2), stride=(4, 4), padding=VALID),
    _small("c8", channels=(8, 64)),
    _small("k8", channels=(64, 8)),
    _small("c8k8", channels=(8, 8)),
    _small("k24", channels=(64, 24)),
    _small("c72", channels=(72, 64)),
    _small("c136k200", size=(8, 8), channels=(136, 200)),
    _small("c320k320", batch=1, size=(8, 8), channels=(320, 320)),
    _small("1x1", kernel=(1, 1), channels=(72, 136)),
    _small("1x1_stride2", kernel=(1, 1), stride=(2, 2)),
    _small("1x1_padded", kernel=(1, 1), padding=((1, 0), (2, 1))),
    _small("1x1_dilated", kernel=(1, 1), dilation=(3, 3)),
    _small("2x2", kernel=(2, 2)),
    _small("1x7", kernel=(1, 7)),
    _small("3x1", kernel=(3, 1)),
    _small("5x3", kernel=(5, 3), channels=(24, 40)),
    _small("7x7_stride2", size=(20, 20), kernel=(7, 7), stride=(2, 2), channels=(8, 64)),
    _small("9x9", size=(16, 16), kernel=(9, 9), channels=(16, 24)),
    _small("kernel_beyond_image", size=(5, 5), kernel=(7, 7), channels=(16, 16)),
)


def find(
    selectors: Iterable[str],
    among: Sequence[Any] = WGRAD_CASES,
    groups: Callable[[Any], Iterable[str]] = lambda case: case.tags,
) -> list[Any]:
    """The cases with a name or a group among `selectors`, in the table's order; without selectors, all cases. One
    selector may be several, separated by commas.

    Raises:
      ValueError: a selector is neither a name nor a group.
    """
    wanted = {name for part in selectors for name in part.split(",") if name}
    known = dict.fromkeys(group for case in among for group in groups(case))
    if unknown := sorted(wanted - {case.name for case in among} - set(known)):
        raise ValueError(f"cases={', '.join(unknown)}; accepted: {', '.join([*known, 'the names that --list prints'])}")
    return [case for case in among if not wanted or wanted & {case.name, *groups(case)}]
