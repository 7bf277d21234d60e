"""Brings convolutions to a kernel's number of spatial dimensions."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeVar

from jax import numpy as jnp

from jax_splitk.problems.conv_wgrad import ConvProblem


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A problem with `rank` spatial dimensions: missing ones come first, with size 1.

    Attributes:
      size, out: pixels of the input and the output.
      pad: padding of the low sides.
    """

    batch: int
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from a window's first pixel to its last."""
        return tuple((size - 1) * dilation for size, dilation in zip(self.kernel, self.dilation, strict=True))


@functools.lru_cache(maxsize=4096)
def geometry(p: ConvProblem, rank: int) -> Geometry:
    def full(values: tuple[int, ...], missing: int = 1) -> tuple[int, ...]:
        return (*(missing,) * (rank - p.rank), *values)

    return Geometry(
        p.batch,
        full(p.input_spatial),
        full(p.output_spatial),
        full(p.kernel_spatial),
        full(p.window_strides),
        full(tuple(low for low, _ in p.padding), 0),
        full(p.lhs_dilation),
        full(p.rhs_dilation),
    )


def moved(g: Geometry, order: Sequence[int]) -> Geometry:
    """The geometry with its axes in another order."""
    given = {name: value for name, value in vars(g).items() if isinstance(value, tuple)}
    return dataclasses.replace(g, **{name: tuple(values[axis] for axis in order) for name, values in given.items()})


@functools.lru_cache(maxsize=4096)
def bytes_touched(p: ConvProblem) -> float:
    """The fewest bytes that must be moved, without input pixels that no window reads (for example with strides larger
    than the filter)."""
    axes = zip(p.input_spatial, p.output_spatial, p.kernel_spatial, p.window_strides, strict=True)
    share = math.prod(min(1.0, out * kernel / size) if kernel < stride else 1.0 for size, out, kernel, stride in axes)
    lhs_bytes = math.prod(p.lhs_shape) * jnp.dtype(p.dtype).itemsize
    return p.bytes_moved - (1 - share) * lhs_bytes


def axis_macros(**sizes: tuple[int, ...]) -> dict[str, int]:
    """A macro for each dimension, whose name ends in D, H or W."""
    axes = {name: zip("DHW"[-len(values) :], values, strict=True) for name, values in sizes.items()}
    return {f"{name}_{axis}": value for name, values in axes.items() for axis, value in values}


def equal_parts(size: int, most: int) -> list[int]:
    """For each number of parts, the smallest size of parts that make up `size`, if it is at most `most`; largest
    first."""
    return list(dict.fromkeys(-(-size // -(-size // m)) for m in range(min(size, most), 0, -1)))


def is_plain(p: ConvProblem, axis: int) -> bool:
    """Whether the convolution does nothing along a spatial dimension."""
    return (p.kernel_spatial[axis], p.window_strides[axis], p.padding[axis]) == (1, 1, (0, 0))


def is_matrix_product(p: ConvProblem) -> bool:
    """A 1x1 filter with unit strides and no padding or dilation of the input: X is a plain matrix."""
    return set(p.lhs_dilation) <= {1} and all(is_plain(p, axis) for axis in range(p.rank))


_Conv = TypeVar("_Conv", bound=ConvProblem)


@functools.lru_cache(maxsize=1024)
def folded(p: _Conv, least: int = 2) -> _Conv:
    """The same sums with at least `least` spatial dimensions. A plain dimension becomes a part of the dimension (or the
    batch) before it in memory; leading dimensions of size 1 fill up the rank."""
    names = ("input_spatial", "output_spatial", "kernel_spatial", "window_strides", "padding", "lhs_dilation")
    names = (*names, "rhs_dilation")
    batch, kept, after_plain = p.batch, [], True
    for axis, fields in enumerate(zip(*(getattr(p, name) for name in names), strict=True)):
        plain, size = is_plain(p, axis) and p.lhs_dilation[axis] == 1, p.input_spatial[axis]
        if not (plain and after_plain):
            kept.append(fields)
        elif kept:
            kept[-1] = (kept[-1][0] * size, kept[-1][1] * size, *kept[-1][2:])
        else:
            batch *= size
        after_plain = plain
    kept = [(1, 1, 1, 1, (0, 0), 1, 1)] * (least - len(kept)) + kept
    return dataclasses.replace(p, batch=batch, **dict(zip(names, zip(*kept, strict=True), strict=True)))
