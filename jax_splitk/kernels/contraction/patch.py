"""Kernel families: convolutions whose filter is as large as its stride, forward passes and weight gradients, as matrix
products by dot_tma's kernels (device code: contraction/products.cu with contraction/patch.cuh).

A patch is a window that no other window overlaps. Along columns the input [N, H, columns * kw, C] is the array [N, H,
columns, kw * C] in memory; along rows and planes TMA's im2col mode steps over the windows. So the products read and
write the images without transposes.
"""

import dataclasses
import math
from typing import Any

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import Translated, call_buffers
from jax_splitk.kernels.base.geometry import Geometry, geometry
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.kernels.contraction.products import Config
from jax_splitk.kernels.device.epilogue import conv_finishes, order_macros
from jax_splitk.kernels.device.split_tile import operand_map
from jax_splitk.kernels.device.structs import Divisor, Struct
from jax_splitk.kernels.device.wgmma_tile import BOX
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime.plan import Buffer, Im2colMap, TiledMap

_CHUNK = 64  # elements of a box, along a filter row
_MULTIPLE = 8  # of elements that TMA's strides are
# TMA's im2col mode in three dimensions: the largest stride, and how far windows end before the array does.
_MAX_STRIDE, _MAX_BEYOND = 8, 16


def _row(p: ConvProblem) -> int:
    """Elements of a row of the filter."""
    return p.kernel_spatial[-1] * p.in_channels


def _filter_rows(p: ConvProblem) -> int:
    return math.prod(p.kernel_spatial[:-1])


def _chunks(p: ConvProblem) -> int:
    return -(-_row(p) // _CHUNK)


def _pixels(p: ConvProblem) -> int:
    return p.batch * math.prod(p.output_spatial)


def _is_strided(g: Geometry) -> bool:
    """Whether TMA strides along rows and planes. If not, the rows of a window are a dimension of their own, and the
    next dimension has the windows down a column, of one plane of the input after the other."""
    return max(g.kernel[:2]) <= _MAX_STRIDE


def _plane(g: Geometry) -> int:
    """Steps along the view's planes from a plane of a window to its next one: where TMA does not stride, the windows
    down a column."""
    return 1 if _is_strided(g) else g.size[1] // g.kernel[1]


def _windows(p: ConvProblem, pixels: int) -> Im2colMap:
    """A map with boxes of `pixels` windows, and `_CHUNK` elements of a filter row."""
    g, row, item = geometry(p, 3), _row(p), 2
    line = g.size[2] * p.in_channels * item
    plane = g.size[1] * line
    (depth, height, _), (planes, rows, columns) = g.kernel, g.out
    if _is_strided(g):
        dims = (row, columns, rows * height, planes * depth, g.batch)
        strides, steps = (line, plane, g.size[0] * plane), (height, depth)
    else:
        dims = (row, columns, height, (depth - 1) * _plane(g) + rows, g.batch * planes)
        strides, steps = (line, height * line, depth * plane), (1, 1)
    return Im2colMap(
        buffer=0,
        dtype=p.dtype,
        dims=dims,
        strides=(row * item, *strides),
        element_strides=(1, 1, *steps, 1),
        lower=(0, 0, 0),
        upper=(0, 1 - height, (1 - depth) * _plane(g)),
        channels=_CHUNK,
        pixels=pixels,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product(DotProblem):
    """A pass as a matrix product.

    Attributes:
      conv: its convolution.
      patch: which pass it is (macro PATCH).
    """

    conv: ConvProblem
    patch: int


class _Products(tma.Tma):
    """The family `dot_tma` with windows as an operand. Filter rows are padded to whole chunks of the reduction, or of
    the result's rows. Its problems are `_Product`s."""

    def args(self, problem: Any, config: Config) -> Struct:
        p: ConvProblem = problem.conv
        g = geometry(p, 3)
        view = g.out if _is_strided(g) else (g.out[1], 1, g.out[2])  # of `_windows`
        return Struct(
            "Args",
            {
                **super().args(problem, config).fields,
                "row": Divisor.of(_row(p)),
                "chunks": Divisor.of(_chunks(p)),
                "filter_rows": _filter_rows(p),
                "kernel_h": Divisor.of(g.kernel[1]),
                "out": tuple(map(Divisor.of, view)),
                "step": (*g.kernel[:2], 1) if _is_strided(g) else (1, 1, 1),
                "plane": _plane(g),
            },
        )

    def macros(self, problem: Any, config: Config) -> dict[str, int]:
        return super().macros(problem, config) | {"PATCH": problem.patch} | order_macros(problem.conv)

    def buffers(self, problem: Any, config: Config) -> tuple[Buffer, ...]:
        return call_buffers(problem.conv, self.workspace_bytes(problem, config))

    def maps(self, problem: Any, config: Config) -> tuple[TiledMap | Im2colMap, ...]:
        p: ConvProblem = problem.conv
        if problem.patch == 1:
            # The weight's dimensions are (output channels, elements of a filter row, filter rows).
            weight = (_filter_rows(p), _row(p), p.out_channels)
            return _windows(p, config.tile_m), operand_map(1, p.dtype, weight, "bkn", config.tile_n)
        return _windows(p, BOX), super().maps(problem, config)[1]


class Patch(Translated[ConvProblem, Config]):
    """Computes one of the passes: 1 the forward pass, 2 the weight gradient."""

    def __init__(self, name: str, patch: int) -> None:
        super().__init__(_Products(Config), name)
        self._patch = patch

    def translated(self, problem: ConvProblem) -> _Product:
        p, pixels, chunk = problem, _pixels(problem), _filter_rows(problem) * _chunks(problem) * _CHUNK
        m, n, k, orders = {
            1: (pixels, p.out_channels, chunk, ("bmk", "bkn")),
            2: (chunk, p.out_channels, pixels, ("bkm", "bkn")),
        }[self._patch]
        product = _Product(1, m, n, k, *orders, p.dtype, p.out_dtype, conv=p, patch=self._patch)
        if not isinstance(p, ConvEpilogueProblem):
            return product
        epilogue = {name: getattr(p, name) for name in ("bias", "bias_dtype", "activation", "residual_dtype")}
        return dataclasses.replace(product, **epilogue)

    def finishes(self, problem: ConvProblem, config: Config) -> bool:
        return conv_finishes(problem)

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p = problem
        reason = refusals.dtypes(p, refusals.HALVES) or refusals.groups(p) or refusals.lhs_dilation(p)
        if (reason := reason or refusals.empty_dimensions(p)) is not None:
            return reason
        if p.taps == 1:
            return "a filter of one tap; accepted: more"  # as fast by im2col
        if p.window_strides != p.kernel_spatial:
            return f"a filter of {p.kernel_spatial} with strides {p.window_strides}; accepted: strides of its size"
        if any(d != 1 and k != 1 for d, k in zip(p.rhs_dilation, p.kernel_spatial, strict=True)):
            return f"rhs_dilation {p.rhs_dilation}; accepted: 1"
        return self._covered_refusal(p) or self._tma_refusal(p) or super().problem_refusal(p)

    def _covered_refusal(self, p: ConvProblem) -> str | None:
        sizes = zip(p.input_spatial, p.output_spatial, p.kernel_spatial, p.padding, strict=True)
        if all(low == 0 and out * kernel <= size for size, out, kernel, (low, _) in sizes):
            return None
        return f"padding {p.padding} of an input of {p.input_spatial}; accepted: windows that lie within it"

    def _tma_refusal(self, p: ConvProblem) -> str | None:
        g = geometry(p, 3)
        depth, height, width = g.kernel
        line = g.size[2] * p.in_channels
        for what, count in (
            (f"{width} columns of {p.in_channels} channels in a filter row", _row(p)),
            (f"{g.size[2]} columns of {p.in_channels} channels in a row of the input", line),
            (f"{p.out_channels} output channels", p.out_channels),
        ):
            if count % _MULTIPLE:
                return f"{what}; accepted: a multiple of {_MULTIPLE}"
        if _is_strided(g):
            return None
        if height - 1 > _MAX_BEYOND or (depth - 1) * _plane(g) > _MAX_BEYOND:
            given = f"a filter of {depth} planes and {height} rows in {g.size[1]} rows of the input"
            rows = f"{_MAX_BEYOND + 1} rows, with {_MAX_BEYOND} windows of a column in all planes but one"
            return f"{given}; accepted: up to {_MAX_STRIDE} planes and rows, or {rows}"
        if depth > 1 and (g.size[1] % height or (g.size[0] > depth * g.out[0] and g.batch > 1)):
            given = f"a filter of {depth} planes and {height} rows in an input of {g.size[0]} and {g.size[1]}"
            return f"{given}; accepted: windows that cover it, or up to {_MAX_STRIDE} planes and rows"
        return None


FPROP, WGRAD = (Patch(f"{of}_patch", patch) for patch, of in enumerate(("fprop", "wgrad"), 1))
