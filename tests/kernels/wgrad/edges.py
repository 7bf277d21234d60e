"""The last values that families of weight gradients serve, and the first ones that they refuse."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction import halo
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests.problems import conv

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Edge:
    """`problem(last)` is legal; one more is refused, for `reason`."""

    family: Family
    config: Any
    problem: Callable[[int], ConvWgradProblem]
    last: int
    reason: str


TILED = {
    # Boxes of 256 columns, strips of 64 rows.
    "halo_columns": Edge(
        halo.FAMILY,
        halo.Config(1, 16, 2),
        lambda d: conv((5, 16), (1, 3), (72, 72), padding=((0, 0), (d, d)), rhs_dilation=(1, d)),
        120,
        "rows of 258 pixels; accepted: at most 256",
    ),
    "halo_rows": Edge(
        halo.FAMILY,
        halo.Config(2, 16, 1),
        lambda d: conv((8, 17), (3, 2), (72, 72), padding=((d, d), (0, 0)), rhs_dilation=(d, 1)),
        31,
        "66 rows; accepted: at most 64",
    ),
    # Filter columns that one thread block reads from one box, and columns of other blocks.
    "tf32_columns": Edge(
        tf32.FAMILY,
        tf32.Config(1, 3, 1, 32, 1, 1, 16, 2, 2),
        lambda d: conv((5, 16), (1, 3), (36, 40), padding=((0, 0), (d, d)), rhs_dilation=(1, d), dtype="float32"),
        120,
        "tile_q 16 needs 258 input columns; accepted: at most 256",
    ),
    "tf32_coordinates": Edge(
        tf32.FAMILY,
        tf32.Config(1, 1, 1, 32, 1, 1, 16, 2, 1),
        lambda d: conv((16,), (3,), (36, 40), batch=1, padding=((d, d),), rhs_dilation=d, dtype="float32"),
        (INT32_MAX - 16 - tf32.MAX_PIXELS) // 4,
        "padded input of up to ",
    ),
    "grouped_columns": Edge(
        grouped.FAMILY,
        grouped.Config(32, 32, 1, 1, 8, 1, 2, 2),
        lambda s: conv((3, 300), (3, 3), (32, 32), padding=((1, 1), (0, 0)), stride=(1, s), groups=8),
        36,
        "rows 1, columns 8: 3x264 pixels of input; accepted: at most 256 a side",
    ),
}
