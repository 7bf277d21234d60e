"""The smallest problems that together run every kernel of the CUDA families in every specialisation, for tests that are
too slow on larger problems."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels import Family, catalogue
from jax_splitk.kernels.contraction import few_rows, halo, patch
from jax_splitk.kernels.contraction import im2col as conv_im2col
from jax_splitk.kernels.contraction import products as dot_tma
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.depthwise import passes as conv_depthwise
from jax_splitk.kernels.depthwise import toeplitz
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise import wgrad_any as depthwise_any
from jax_splitk.kernels.device import wgmma_tile
from jax_splitk.kernels.gather import fprop as conv_gather
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import passes as conv_grouped
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.quantized import experts as experts_family
from jax_splitk.kernels.quantized import fp8, stream, tiled, transposed
from jax_splitk.kernels.quantized.tiles import split_tiles
from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.ragged import tiles as ragged_tiles
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_epilogue import with_epilogue
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.quantized import prepack
from jax_splitk.runtime import execute, joined_plan
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import conv_epilogues, dots, experts, float64, products, ragged_dots
from tests.on_gpu import with_splits
from tests.problems import conv, conv_of
from tests.random_problems import device_plan

SEED = 7
HALF, E4M3, E8M0 = "float16", "float8_e4m3fn", "float8_e8m0fnu"
HALVES = {"x_dtype": HALF, "out_dtype": HALF, "scale_dtype": HALF}


@dataclasses.dataclass(frozen=True)
class Run:
    """One problem with one config; `product` is set for products with quantized weights. `chained`: whether the kernel
    is that of a chain (`runtime/joined_plan.py`)."""

    family: Family
    problem: Problem
    config: Any
    product: products.Case | None = None
    chained: bool = False

    def __str__(self) -> str:
        return f"{self.family.name}-{self.product or ''}{self.config}{'-chained' * self.chained}"

    @property
    def plan(self) -> DevicePlan:
        plan = device_plan(self.family, self.problem, self.config)
        return dataclasses.replace(plan, source=joined_plan.chained(plan.source)) if self.chained else plan

    def function(self) -> Callable[..., jax.Array]:
        """The family's kernels on the operands, with nothing else on the device."""
        call = self.plan.custom_call()
        return jax.jit(lambda *operands: execute.call(call, self.problem, *operands))

    def operands(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Operands of small integers, whose sums are exact, and the result; computed on the host."""
        if self.product is not None:
            return _product(self.product)
        if isinstance(self.problem, DotProblem):
            return _dot_operands(self.problem)
        if isinstance(self.problem, RaggedDotProblem):
            return _ragged_operands(self.problem)
        if isinstance(self.problem, QuantizedRaggedDotProblem):
            return _expert_operands(self.problem)
        assert isinstance(self.problem, ConvProblem)
        return _convolution(self.problem)


@functools.cache
def _convolution(p: ConvProblem) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    operands = conv_epilogues.integers(p, np.random.default_rng(SEED))
    return tuple(operands), float64.rounded(conv_epilogues.exactly(p, *operands), p.out_dtype)


@functools.cache
def _dot_operands(p: DotProblem) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    operands = dots.integers(p, np.random.default_rng(SEED))
    exact = dots.exactly(p, *operands).astype(np.float32).astype(jnp.dtype(p.out_dtype))
    return tuple(dots.as_given(p, operands)), exact


@functools.cache
def _ragged_operands(p: RaggedDotProblem) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    operands = ragged_dots.integers(p, np.random.default_rng(SEED))
    exact = ragged_dots.exactly(p, *operands).astype(np.float32).astype(jnp.dtype(p.out_dtype))
    return tuple(ragged_dots.poisoned(p, operands)), exact


@functools.cache
def _expert_operands(p: QuantizedRaggedDotProblem) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    with jax.default_device(jax.devices("cpu")[0]):
        operands, exact = experts.exact(p, SEED)
    return tuple(operands), exact


@functools.cache
def _product(case: products.Case) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    with jax.default_device(jax.devices("cpu")[0]):
        q, weight = products.exact_weight(case, SEED, case.operand)
        # The tensor cores' sums of e4m3 products keep 13 bits at least.
        x, scale, multiplied = products.exact_norm(case, SEED)
        operands = tuple(np.asarray(array) for array in products.operands(prepack(q), x, case.x_dtype))
    more, exact = products.exact_epilogue(case, multiplied @ case.multiplied(weight), SEED)
    return (*operands, *more, *scale), exact.astype(np.float32).astype(jnp.dtype(case.out_dtype))


# ---- weight gradients ----------------------------------------------------------------------------------------------


def _splits(family: Family, p: ConvWgradProblem, config: Any, counts: tuple[int, ...]) -> Iterator[Run]:
    """The config with the nearest legal numbers of splits, each once."""
    found = dict.fromkeys(with_splits(family, p, config, count) for count in counts)
    return (Run(family, p, other) for other in found)


def _best(family: Family, p: ConvWgradProblem) -> Iterator[Run]:
    """The first candidate, with one split and with three."""
    return _splits(family, p, family.candidates(p, DEFAULT_CUDA)[0], (1, 3))


def _im2col() -> Iterator[Run]:
    image = conv((9, 11), (2, 2), (72, 136))
    half = dataclasses.replace(image, dtype=HALF, out_dtype=HALF)
    pads = ((1, 0), (0, 2), (2, 1))
    volume = conv((4, 5, 6), (2, 2, 2), (24, 40), padding=pads, stride=2, out_dtype="bfloat16")
    matrix = conv((200,), (1,), (72, 64))
    long = conv((1090,), (1,), (64, 136), out_dtype=HALF, dtype=HALF)
    groups = conv((9, 11), (2, 1), (128, 128), groups=2)
    # Groups whose boxes have channels of the next group.
    padded = conv((70,), (7,), (96, 144), padding=3, groups=2)
    parts = conv((9, 11), (2, 1), (144, 120), groups=3, dtype=HALF, out_dtype=HALF)
    deep = conv((4, 5, 6), (2, 2, 1), (176, 80), padding=1, groups=2)
    # More than 128 blocks of pixels, which the tensor cores do not add by themselves.
    chains, tails = conv((8300,), (1,), (72, 64)), conv((92, 92), (1, 2), (64, 136))

    def config(tile_m: int, tile_n: int, swap: bool, splits: int, **changes: Any) -> Any:
        return im2col.Config(tile_m, tile_n, wgmma_tile.max_stages(tile_m, tile_n), swap, splits, **changes)

    for p, *given in (
        (image, config(64, 64, False, 1)),
        (image, im2col.Config(64, 128, wgmma_tile.max_stages(64, 128, 2), False, 1)),
        (image, config(64, 192, True, 3)),
        (half, config(192, 64, True, 2)),
        (image, config(128, 128, False, 2)),
        (half, config(256, 128, True, 1)),
        (image, config(64, 64, False, 2, whole_tiles=3)),
        (volume, config(64, 64, True, 1)),
        (volume, config(128, 64, False, 1)),
        (matrix, config(64, 128, False, 2)),
        # Splits that take turns: operands that one tile reads and that several read, and a ring that is filled again.
        (matrix, config(128, 64, False, 3)),
        (long, im2col.Config(64, 64, 8, True, 2)),
        (groups, config(128, 192, False, 3)),
        (padded, config(256, 64, False, 2), config(64, 192, True, 1)),
        (parts, config(128, 64, False, 1), config(64, 64, True, 2)),
        (deep, config(192, 64, False, 1)),
        (chains, config(128, 64, True, 1)),
        (tails, config(64, 64, False, 2, whole_tiles=5)),
    ):
        yield from (Run(im2col.FAMILY, p, each) for each in given)


def _halo() -> Iterator[Run]:
    plain = conv((4, 16), (3, 3), (72, 72), padding=1)
    pairs = conv((4, 8), (3, 3), (8, 72), padding=1, dtype=HALF, out_dtype=HALF)
    wide = conv((6, 20), (5, 5), (64, 8), out_dtype="bfloat16")
    for p, counts in ((plain, (1, 2)), (pairs, (1, 2)), (wide, (1,))):
        yield from _splits(halo.FAMILY, p, halo.FAMILY.candidates(p, DEFAULT_CUDA)[-1], counts)
    # Buffers that are filled again, with lines that no product reads.
    many = conv((5, 17), (2, 2), (72, 72), batch=9)
    yield Run(halo.FAMILY, many, halo.Config(3, 16, 2))


def _tf32() -> Iterator[Run]:
    for p in (
        conv((8, 8), (3, 3), (68, 36), padding=1, dtype="float32"),
        conv((9, 13), (2, 3), (4, 100), stride=2, dtype="float32", out_dtype="bfloat16"),
        conv((6, 11), (1, 1), (36, 32), dtype="float32"),
    ):
        yield from _best(tf32.FAMILY, p)
    tall = conv((10, 16), (3, 1), (72, 40), dtype="float32", out_dtype=HALF)
    yield Run(tf32.FAMILY, tall, tf32.Config(3, 1, 2, 64, 1, 4, 16, 2, 2))


def _gather() -> Iterator[Run]:
    for p in (
        conv((12, 12), (3, 3), (3, 16), padding=1),
        conv((13, 11), (3, 3), (12, 10), padding=1, stride=2, dtype=HALF, out_dtype=HALF),
        conv((9, 9), (2, 2), (5, 8), lhs_dilation=2),
        conv((4, 4, 5), (2, 2, 2), (3, 24), out_dtype="bfloat16"),
        conv((10, 10), (3, 3), (20, 12), dtype="float32"),
        conv((10, 10), (3, 3), (4, 9), rhs_dilation=2, dtype="float32", precision="highest"),
        conv((7, 9), (3, 3), (8, 11), batch=3),
    ):
        yield from _best(gather.FAMILY, p)
    wide = conv((8, 8), (3, 3), (24, 136), padding=1)
    yield Run(gather.FAMILY, wide, gather.Config(2, 2, 64, 2, 4, 8, 8, 2, 2))


def _grouped() -> Iterator[Run]:
    for p, *tile in (
        (conv((6, 9), (3, 3), (32, 32), padding=1, groups=8), 32, 32, 2, 3, 9, 2, 2),
        (conv((6, 9), (3, 3), (64, 64), stride=2, groups=4, dtype=HALF, out_dtype=HALF), 16, 16, 1, 1, 4, 1, 3),
        (conv((40,), (3,), (16, 32), groups=2), 16, 32, 1, 1, 16, 1, 2),
        (conv((5, 8), (2, 2), (128, 128), groups=2, out_dtype="bfloat16"), 32, 32, 2, 2, 7, 1, 2),
        # Groups that are padded, and a filter in parts.
        (conv((6, 9), (3, 3), (72, 144), padding=1, groups=3), 32, 32, 2, 3, 9, 2, 2),
        (conv((7, 8), (2, 3), (40, 48), groups=8, dtype=HALF, out_dtype=HALF), 8, 16, 2, 3, 6, 1, 2),
        (conv((70,), (37,), (80, 24), padding=18, groups=2, out_dtype="bfloat16"), 16, 16, 1, 1, 32, 1, 2),
    ):
        yield from _splits(grouped.FAMILY, p, grouped.Config(*tile, splits=1), (1, 3))


def _depthwise() -> Iterator[Run]:
    for p, channels, segments in (
        (conv((12, 12), (3, 3), (32, 32), batch=3, padding=1, groups=32), 32, 1),
        (conv((12, 40), (7, 7), (16, 16), batch=3, padding=3, groups=16, out_dtype="bfloat16"), 16, 2),
        (conv((12, 12), (3, 3), (8, 16), batch=3, padding=1, stride=2, groups=8, dtype=HALF, out_dtype=HALF), 8, 4),
    ):
        yield from _splits(depthwise.FAMILY, p, depthwise.Config(channels, segments, 1, 1), (1, 3))


def _depthwise_any() -> Iterator[Run]:
    for size, kernel, channels, changes, config in (
        ((9, 10), (3, 3), (4, 4), {"padding": 1, "out_dtype": "bfloat16"}, (4, 4, 2, 4)),
        ((5, 6, 7), (3, 3, 3), (6, 6), {"padding": 1, "dtype": "float32"}, (2, 2, 8, 4)),
        ((37,), (4,), (5, 10), {"batch": 9, "dtype": HALF, "out_dtype": HALF}, (7, 1, 8, 8)),
        ((12, 9), (3, 2), (36, 36), {"stride": 2, "rhs_dilation": (4, 1)}, (2, 4, 16, 12)),
        # ptxas 13.0 got it wrong while the window of rows began without values.
        (
            (12, 11),
            (5, 3),
            (3, 9),
            {"padding": ((4, 1), (3, 2)), "stride": (2, 3), "rhs_dilation": (3, 2)},
            (1, 1, 16, 8),
        ),
        # Blocks of taps, some of which reach beyond the filter.
        ((50,), (31,), (6, 6), {"padding": ((30, 0),), "out_dtype": "bfloat16"}, (8, 2, 2, 4)),
        ((14, 15), (9, 11), (5, 10), {"padding": ((4, 3), (7, -1)), "dtype": "float32"}, (4, 4, 8, 4)),
        ((57, 1, 1), (18, 1, 1), (9, 9), {"stride": (2, 1, 1), "rhs_dilation": (2, 1, 1), "dtype": HALF}, (2, 1, 8, 4)),
    ):
        p = conv(size, kernel, channels, groups=channels[0], **changes)
        yield from _splits(depthwise_any.FAMILY, p, depthwise_any.Config(*config, splits=1), (1, 3))


# ---- other passes --------------------------------------------------------------------------------------------------


def _passes(module: Any) -> tuple[tuple[Family, type[Any]], ...]:
    """The module's families and their problems."""
    return (module.FPROP, ConvFpropProblem), (module.DGRAD, ConvDgradProblem)


def _depthwise_passes() -> Iterator[Run]:
    for (family, kind), (size, kernel, changes, config) in itertools.product(
        _passes(conv_depthwise),
        (
            ((9, 10), (3, 3), {"padding": 1, "out_dtype": "bfloat16"}, (4, 4)),
            ((9, 11), (3, 5), {"padding": ((1, 2), (0, 3)), "stride": 2, "dtype": HALF, "out_dtype": HALF}, (2, 2)),
            ((8, 9), (7, 7), {"padding": 3}, (6, 64)),
            ((17,), (4,), {"padding": ((3, 0),), "dtype": "float32"}, (16, 1)),
            ((5, 6, 7), (3, 3, 3), {"padding": 1, "stride": (2, 1, 3), "out_dtype": "bfloat16"}, (6, 2)),
            ((12, 9), (3, 4), {"padding": ((-1, 4), (5, -2)), "stride": (1, 2), "rhs_dilation": (2, 3),
                               "dtype": "float32", "out_dtype": HALF}, (4, 7)),
            ((6, 7), (2, 2), {"padding": ((0, 0), (1, 0)), "stride": (4, 3), "dtype": "float32"}, (12, 1)),
            ((4, 9), (3, 3), {"padding": ((2, 3), (1, 2)), "lhs_dilation": (3, 2), "dtype": "float32"}, (4, 1)),
        ),
    ):  # fmt: skip
        yield Run(family, conv_of(kind, size, kernel, (20, 20), groups=20, **changes), conv_depthwise.Config(*config))
    # Odd channels, several output channels of an input channel, and filters that are read in blocks of taps.
    for (family, kind), (size, kernel, channels, changes, config) in itertools.product(
        _passes(conv_depthwise),
        (
            ((9, 10), (3, 3), (7, 7), {"padding": 1, "out_dtype": "bfloat16"}, (4, 4)),
            ((40,), (31,), (20, 20), {"padding": ((30, 0),), "dtype": "float32"}, (8, 1)),
            ((12, 13), (9, 11), (6, 6), {"padding": ((4, 3), (7, -1)), "out_dtype": "bfloat16"}, (6, 1)),
            ((90,), (18,), (5, 5), {"stride": 3, "padding": ((9, 7),), "rhs_dilation": 2, "dtype": HALF}, (3, 1)),
            ((31, 6), (11, 2), (40, 40), {"stride": (2, 1), "padding": 4, "rhs_dilation": (3, 2), "dtype": "float32"},
             (4, 1)),
            ((9, 5, 4), (8, 1, 3), (33, 33), {"padding": ((5, 2), (0, 0), (1, 1)), "dtype": "float32"}, (16, 1)),
        ),
    ):  # fmt: skip
        p = conv_of(kind, size, kernel, channels, groups=channels[0], **changes)
        yield Run(family, p, conv_depthwise.Config(*config))
    few = {"padding": 1, "stride": 2, "dtype": HALF, "out_dtype": HALF}
    for (family, kind), rows in zip(_passes(conv_depthwise), (2, 1), strict=True):
        yield Run(family, conv_of(kind, (9, 8), (3, 3), (3, 15), groups=3, **few), conv_depthwise.Config(4, rows))


def _toeplitz_passes() -> Iterator[Run]:
    """The steps are the strides of the forward pass that runs: for an input gradient, the dilation of its input."""
    for (family, kind), (size, kernel, steps, given, config) in itertools.product(
        _passes(toeplitz),
        (
            ((9, 18), (3, 3), 1, {"padding": 1, "out_dtype": "bfloat16"}, (16, 3, 9, 1, 2, 4)),
            ((12, 30), (7, 7), 1, {"padding": 3, "batch": 3, "dtype": HALF, "out_dtype": HALF}, (16, 4, 6, 1, 4, 1)),
            ((5, 6, 17), (3, 3, 3), 1, {"padding": 1}, (16, 2, 6, 2, 2, 1)),
            ((40,), (4,), 1, {"padding": ((3, 0),), "batch": 5, "dtype": HALF}, (32, 5, 3, 1, 2, 4)),
            ((15, 37), (7, 5), 2, {"padding": ((3, 2), (1, 4))}, (16, 2, 4, 1, 2, 1)),
            ((12, 9), (5, 3), (2, 1), {"padding": ((-1, 4), (5, -2)), "out_dtype": "bfloat16"}, (16, 2, 6, 1, 4)),
            (
                (11, 40),
                (2, 10),
                1,
                {"padding": ((0, 1), (7, 0)), "dtype": HALF, "out_dtype": HALF},
                (16, 5, 11, 1, 4),
            ),
            (
                (7, 5, 18),
                (2, 1, 7),
                (2, 1, 2),
                {"padding": ((2, 0), (0, 0), (3, 3)), "out_dtype": HALF},
                (16, 1, 3, 2, 1, 1),
            ),
            ((16, 130), (1, 3), (2, 1), {"out_dtype": "bfloat16"}, (16, 16, 8, 1, 2)),
            ((4, 30), (3, 17), 1, {"padding": ((1, 1), (8, 8)), "out_dtype": HALF}, (16, 4, 2, 1, 2)),
            ((9, 18), (5, 5), 1, {"padding": 2, "batch": 7, "out_dtype": "bfloat16"}, (16, 3, 5, 1, 2, 2, True, 2)),
            ((11, 12), (7, 3), 2, {"padding": 3, "batch": 5, "out_dtype": "bfloat16"}, (16, 1, 7, 1, 1, 2, True, 2)),
            ((2, 9, 20), (3, 3, 3), 1, {"padding": 1, "batch": 3, "dtype": HALF}, (16, 2, 4, 2, 2, 1, True, 2)),
            (
                (26, 9),
                (25, 1),
                1,
                {"padding": ((12, 12), (0, 0)), "batch": 3, "out_dtype": "bfloat16"},
                (8, 2, 13, 1, 2, 1),
            ),
            # Taps that slide.
            ((20, 18), (31, 17), 1, {"padding": ((15, 15), (8, 8)), "batch": 3, "dtype": HALF}, (8, 3, 8, 1, 8, 1)),
            (
                (9, 40),
                (40, 12),
                1,
                {"padding": ((30, 20), (5, 5)), "out_dtype": "bfloat16"},
                (16, 5, 8, 1, 8, 1, False, 2),
            ),
        ),
    ):
        changes = {**given, "stride" if kind is ConvFpropProblem else "lhs_dilation": steps}
        yield Run(family, conv_of(kind, size, kernel, (24, 24), groups=24, **changes), toeplitz.Config(*config))
    causal = conv_of(ConvDgradProblem, (40,), (4,), (16, 16), groups=16, padding=3, batch=5)
    yield Run(toeplitz.DGRAD, causal, toeplitz.Config(16, 2, 5, 1, 2))


def _grouped_passes() -> Iterator[Run]:
    for (family, kind), (size, kernel, channels, groups, changes, config) in itertools.product(
        _passes(conv_grouped),
        (
            ((9, 10), (3, 3), 32, 8, {"padding": 1, "out_dtype": "bfloat16"}, (32, 2, 4, 5, 1, 1, 3, 2)),
            ((9, 11), (3, 3), 64, 4, {"padding": 1, "stride": 2, "dtype": HALF}, (32, 1, 3, 5, 1, 1, 2, 3)),
            ((40,), (5,), 64, 16, {"dtype": HALF, "out_dtype": HALF}, (64, 1, 1, 18, 2, 1, 2, 3)),
            ((7, 7), (3, 3), 64, 2, {"padding": 1, "batch": 5}, (64, 4, 7, 7, 1, 2, 2, 2)),
            ((12, 13), (3, 3), 40, 20, {"padding": ((2, 0), (-1, 3)), "rhs_dilation": (2, 3)},
             (32, 2, 5, 6, 1, 1, 4, 4)),
            ((6, 7), (2, 2), 96, 4, {"padding": ((0, 0), (1, 0)), "stride": (3, 2)}, (64, 1, 2, 3, 1, 1, 2, 1)),
            # Weights that do not fit in registers.
            ((7, 7), (5, 5), 64, 2, {"padding": 2, "batch": 3}, (64, 2, 7, 7, 1, 2, 2, 2)),
            ((5, 9), (3, 3), 64, 8, {"padding": ((2, 3), (1, 2)), "lhs_dilation": (2, 1), "out_dtype": "bfloat16"},
             (64, 1, 3, 9, 2, 1, 2, 2)),
            ((5, 4, 6), (3, 3, 2), 32, 4, {"padding": 1, "stride": (2, 1, 2)}, (32, 2, 2, 3, 1, 1, 3, 3)),
        ),
    ):  # fmt: skip
        p = conv_of(kind, size, kernel, (channels, channels), groups=groups, **changes)
        yield Run(family, p, conv_grouped.Config(*config))


def _adapted() -> Iterator[Run]:
    """Families without kernels of their own: one run each."""
    floats = {"dtype": "float32", "out_dtype": "float32"}
    half: dict[str, Any] = {"dtype": HALF, "out_dtype": HALF}
    for op, problems in {
        "conv_fprop": (((27, 45), {"groups": 3}), ((37, 53), half)),
        "conv_dgrad": (((45, 27), {"groups": 3}), ((53, 37), half)),
        "conv_wgrad": (((27, 45), {"groups": 3}), ((37, 53), half), ((16, 8), floats | {"groups": 4}),
                       ((9, 15), floats | {"groups": 3})),
    }.items():  # fmt: skip
        for family, (channels, changes) in zip(catalogue.ADAPTED[op], problems, strict=True):
            p = conv_of(OPERATIONS[op].problem, (7, 9), (3, 3), channels, padding=1, **changes)
            yield Run(family, p, family.candidates(p, DEFAULT_CUDA)[0])


def _dense_passes() -> Iterator[Run]:
    def tile(tile_m: int, tile_n: int, splits: int = 1, reduction: str = "none") -> Any:
        return conv_im2col.Config(tile_m, tile_n, wgmma_tile.max_stages(tile_m, tile_n), splits, reduction)

    def persistent(tile_m: int, tile_n: int, swap: bool, workers: int, taps: int = 1) -> Any:
        config = conv_im2col.Config(tile_m, tile_n, 2, taps=taps, swap=swap, workers=workers)
        return dataclasses.replace(config, stages=config.most_stages)

    fprop, dgrad = _passes(conv_im2col)
    shared, floats, half = "workspace", {"dtype": "float32"}, {"dtype": HALF, "out_dtype": HALF}
    for (family, kind), size, kernel, channels, config, changes in (
        (dgrad, (9, 11), (3, 3), (40, 72), tile(64, 64, 3, shared), {"padding": 1, "stride": 2}),
        (fprop, (9, 11), (3, 4), (72, 136), tile(64, 128, 3, shared),
         {"padding": ((2, 0), (-1, 3)), "stride": (2, 3), "rhs_dilation": (2, 1)}),
        (fprop, (5, 6, 7), (3, 2, 3), (16, 64), tile(128, 64, 2, shared),
         {"padding": 1, "stride": (1, 2, 1), "out_dtype": "float32"}),
        (dgrad, (600,), (4,), (20, 16), tile(256, 32), {"padding": ((390, 0),), "rhs_dilation": 130, **floats}),
        # Strides larger than the filter: pixels that no tap reads are zero.
        (dgrad, (8, 7), (2, 1), (68, 24), tile(64, 64), {"stride": (3, 2), "dtype": HALF, "out_dtype": "float32"}),
        (fprop, (13, 9), (1, 1), (136, 72), tile(192, 128, 2, shared), {"batch": 3, **half}),
        (fprop, (8, 9), (3, 3), (72, 40), conv_im2col.Config(64, 64, 3), {"padding": 1}),
        (fprop, (9, 10), (3, 3), (64, 200), tile(128, 256),
         {"padding": ((2, 3), (1, 1)), "stride": (1, 2), "lhs_dilation": (2, 1)}),
        (fprop, (6, 10, 3), (1, 3, 1), (24, 16), conv_im2col.Config(128, 16, 5, 2, shared),
         {"padding": ((0, 0), (1, 1), (0, 0))}),
        (fprop, (70,), (3,), (24, 64), tile(64, 64), {"rhs_dilation": 150, "padding": 150}),
        (dgrad, (4, 5, 6), (3, 3, 3), (64, 40), tile(64, 64, 4, shared), {"padding": 1, "stride": 2}),
        (dgrad, (9, 8), (3, 3), (100, 136), tile(64, 128, 5, shared),
         {"padding": 2, "rhs_dilation": 2, "out_dtype": "float32", **floats}),
        (dgrad, (17, 16), (3, 4), (16, 24), tile(192, 16, 2, shared),
         {"padding": ((3, 4), (0, 5)), "stride": (2, 4), "rhs_dilation": (3, 2)}),
        (dgrad, (12, 9), (4, 4), (264, 72), tile(256, 128),
         {"padding": ((1, -1), (2, 2)), "stride": (4, 3), "batch": 5}),
        (dgrad, (31,), (7,), (72, 64), tile(128, 192), {"padding": 3, "stride": 3, **half}),
        (dgrad, (9, 9), (1, 1), (24, 64), tile(64, 32), {"stride": 2}),
        (dgrad, (150,), (1,), (68, 136), tile(64, 64, 2, shared), floats),
        # A stationary weight in parts of 32 and of 64 bytes, along k and along the columns, with parts of a filter row.
        (dgrad, (9, 10), (3, 3), (144, 144), persistent(128, 80, False, 2, 3), {"padding": 1, "groups": 2, "batch": 5}),
        (dgrad, (8, 9), (3, 3), (64, 96), persistent(64, 64, False, 2), {"padding": 1, "batch": 3}),
        (fprop, (7, 12), (2, 5), (40, 48), persistent(64, 128, True, 1, 3), {"padding": 2, "batch": 4, **half}),
        # Persistent thread blocks: fewer than tiles, one tile and several, with phases and without.
        (fprop, (9, 11), (3, 4), (72, 136), persistent(64, 256, True, 2), {"padding": 1, "batch": 8}),
        (fprop, (9, 11), (3, 3), (64, 128), persistent(256, 128, False, 2), {"padding": 1, "batch": 9, **half}),
        (fprop, (5, 6, 7), (3, 2, 3), (16, 320), persistent(128, 192, True, 3), {"padding": 1, "stride": (1, 2, 1)}),
        (dgrad, (70,), (5,), (72, 24), persistent(64, 64, True, 2), {"stride": 4, "padding": 2, "batch": 3}),
        (dgrad, (9, 9), (2, 2), (24, 64), persistent(64, 128, False, 1), {"stride": 2, "batch": 7}),
        (dgrad, (9, 11), (3, 3), (136, 72), persistent(128, 128, True, 1), {"padding": 1, "stride": 2, "batch": 5}),
        (dgrad, (4, 5, 6), (3, 2, 3), (200, 40), persistent(192, 192, True, 1),
         {"padding": ((1, 1), (0, 0), (1, 1)), "stride": 2, "batch": 7, **half}),
        (fprop, (13, 9), (1, 1), (136, 72), persistent(256, 64, True, 2), {"batch": 9}),
        (fprop, (9, 10), (3, 3), (32, 48), persistent(64, 128, True, 2), {"padding": 1, "batch": 5}),
        (dgrad, (9, 10), (3, 3), (144, 192), persistent(128, 64, True, 2),
         {"padding": 1, "stride": 2, "groups": 2, "batch": 5}),
        (fprop, (9, 10), (3, 3), (72, 80), persistent(64, 256, True, 2, 3), {"padding": ((2, 0), (-1, 3)), "batch": 5}),
        (fprop, (9, 10), (3, 3), (64, 72), persistent(64, 128, True, 2, 3), {"padding": 1, "batch": 5}),
        (dgrad, (9, 10), (3, 3), (64, 72), persistent(256, 64, False, 2, 3), {"padding": 1, "batch": 5, **half}),
        (dgrad, (9, 17), (2, 5), (136, 16), persistent(64, 128, True, 3, 5), {"padding": 3, "rhs_dilation": (1, 2)}),
        (fprop, (4, 5, 6), (3, 3, 3), (32, 32), persistent(128, 128, True, 1, 3), {"padding": 1, "batch": 3}),
        # Splits that meet in a cluster.
        (fprop, (9, 10), (3, 3), (64, 72), tile(64, 64, 3, "cluster"), {"padding": 1}),
        (dgrad, (9, 10), (3, 3), (144, 192), tile(64, 64, 2, "cluster"), {"padding": 1, "stride": 2, "groups": 2}),
        (fprop, (9, 10), (3, 3), (36, 40), tile(64, 48, 4, "cluster"), {"padding": 1, **floats}),
        (fprop, (9, 10), (3, 3), (64, 136), conv_im2col.Config(64, 64, 4, 2, "cluster", 3),
         {"padding": 1, "out_dtype": "float32"}),
        (dgrad, (9, 10), (3, 3), (1, 72), tile(64, 16, 2, "cluster"), {"padding": 1, "stride": 2}),
        # Tiles with as many columns as there are.
        (fprop, (9, 10), (3, 3), (144, 144), persistent(128, 80, False, 2, 3), {"padding": 1, "groups": 2, "batch": 5}),
        (fprop, (9, 10), (3, 3), (64, 48), tile(128, 48), {"padding": 1}),
        (fprop, (13, 9), (1, 1), (136, 144), tile(64, 144, 2, shared), {"batch": 3, **half}),
        (dgrad, (9, 10), (3, 3), (80, 72), persistent(64, 80, False, 2), {"padding": 1, "batch": 5}),
        (dgrad, (9, 10), (3, 3), (112, 64), tile(192, 112), {"padding": 1, "stride": 2}),
        (fprop, (9, 10), (3, 3), (36, 40), tile(128, 48, 2, shared), {"padding": 1, **floats}),
        (fprop, (9, 10), (3, 3), (64, 240), persistent(128, 240, False, 2), {"padding": 1, "batch": 3}),
        (fprop, (9, 10), (3, 3), (32, 160), conv_im2col.Config(128, 160, 2, taps=3), {"padding": 1, **half}),
        # Taps that share pixels.
        (fprop, (9, 10), (3, 3), (72, 136), conv_im2col.Config(128, 64, 2, taps=3), {"padding": ((2, 0), (-1, 3))}),
        (dgrad, (9, 10), (3, 3), (64, 72), conv_im2col.Config(64, 128, 3, 2, shared, 3), {"padding": 1, **half}),
        (fprop, (4, 5, 6), (3, 3, 3), (32, 32), conv_im2col.Config(256, 32, 2, 3, shared, 3), {"padding": 1}),
        (dgrad, (9, 17), (2, 5), (12, 16), conv_im2col.Config(256, 16, 4, taps=5),
         {"padding": 3, "rhs_dilation": (1, 2)}),
        (fprop, (90,), (3,), (192, 144), conv_im2col.Config(192, 64, 3, taps=3),
         {"padding": 1, "groups": 3, "out_dtype": "float32"}),
        (dgrad, (9, 10), (3, 3), (32, 40), conv_im2col.Config(128, 32, 3, taps=3), {"padding": 1, **floats}),
        (dgrad, (40,), (47,), (96, 96), persistent(64, 256, True, 2, 4), {"padding": 23, "groups": 2, "batch": 3}),
        (fprop, (40,), (25,), (96, 96), conv_im2col.Config(256, 64, 3, taps=5), {"padding": 12, "groups": 2}),
        (fprop, (9, 17), (2, 11), (36, 40), conv_im2col.Config(128, 64, 3, taps=3),
         {"padding": 5, "rhs_dilation": (1, 2), **floats}),
        # Few channels, and groups: stages of several taps, of which the last one's may be missing.
        (fprop, (4, 5, 6), (3, 3, 3), (32, 32), tile(256, 32), {"padding": 1}),
        (dgrad, (9, 10), (3, 3), (32, 24), conv_im2col.Config(256, 32, 3), {"padding": 1, "stride": 2}),
        (fprop, (9, 10), (3, 3), (8, 24), tile(192, 32, 2, shared), {"padding": 1, **half}),
        (dgrad, (9, 10), (3, 2), (12, 16), conv_im2col.Config(128, 16, 5, 2, shared), {"padding": 1}),
        (fprop, (60,), (5,), (16, 16), tile(64, 16, 2, shared), {"padding": 2, "out_dtype": "float32"}),
        (dgrad, (9, 10), (3, 3), (32, 16), tile(128, 32), {"padding": 1, **floats}),
        (fprop, (9, 10), (3, 3), (192, 192), tile(128, 64), {"padding": 1, "groups": 3}),
        (dgrad, (9, 10), (3, 3), (144, 192), tile(64, 64, 2, shared), {"padding": 1, "stride": 2, "groups": 2}),
        (fprop, (9, 10), (3, 3), (96, 120), tile(64, 64, 3, shared), {"padding": 1, "groups": 3, **half}),
        (dgrad, (9, 10), (1, 1), (72, 96), tile(128, 32), {"groups": 3}),
        (dgrad, (9, 10), (3, 1), (72, 64), tile(192, 64), {"groups": 2, **floats}),
        # Groups that are padded to whole blocks of channels.
        (fprop, (9, 10), (3, 3), (80, 48), tile(128, 32), {"padding": 1, "groups": 2, **half}),
        (dgrad, (9, 10), (3, 3), (80, 144), persistent(64, 64, True, 2), {"padding": 1, "stride": 2, "groups": 2}),
        (fprop, (60,), (5,), (112, 80), conv_im2col.Config(64, 64, 3, taps=5), {"padding": 2, "groups": 2}),
        (dgrad, (60,), (9,), (96, 48), tile(64, 64, 2, shared), {"padding": 4, "groups": 2, "out_dtype": "float32"}),
        (fprop, (9, 10), (1, 1), (168, 72), persistent(128, 64, False, 2), {"groups": 3, "batch": 3}),
        (dgrad, (9, 10), (1, 1), (72, 120), tile(128, 32), {"groups": 3}),
        (fprop, (5, 6, 5), (3, 2, 2), (96, 48), tile(128, 32), {"groups": 2}),
        (dgrad, (9, 10), (3, 3), (48, 56), tile(64, 32), {"padding": 1, "groups": 2, **floats}),
        # Weights that are transposed first: float32, pixels that are joined, columns that TMA cannot load.
        (fprop, (9, 10), (3, 3), (36, 40), tile(64, 64, 2, shared), {"padding": 1, "out_dtype": "float32", **floats}),
        (fprop, (20, 24), (8, 8), (4, 32), conv_im2col.Config(128, 32, 4, taps=2),
         {"stride": 4, "out_dtype": "float32", **floats}),
        (fprop, (72,), (4,), (3, 20), tile(64, 32), {"stride": 4, "padding": ((0, 2),), **floats}),
        (fprop, (4, 5, 6), (3, 2, 3), (20, 6), tile(128, 16), {"padding": 1, "stride": (1, 2, 1), **floats}),
        (fprop, (9, 10), (3, 3), (96, 144), tile(64, 64), {"padding": 1, "groups": 2, "rhs_dilation": 2, **floats}),
        (fprop, (9, 10), (3, 3), (48, 40), tile(64, 32), {"padding": 1, "groups": 2, "lhs_dilation": 2, **floats}),
        (fprop, (9, 10), (3, 3), (72, 2), conv_im2col.Config(64, 16, 3, 2, shared, 3), {"padding": 1}),
        (fprop, (9, 10), (1, 1), (136, 53), tile(64, 64, 2, shared), half),
        (fprop, (9, 10), (2, 3), (64, 136), tile(64, 64), {"groups": 2}),
        (dgrad, (9, 10), (3, 3), (1, 72), tile(64, 16), {"padding": 1, "stride": 2}),
        (dgrad, (9, 10), (3, 3), (54, 96), tile(64, 32, 2, shared), {"padding": 1, "groups": 2, **floats}),
    ):  # fmt: skip
        p = conv_of(kind, size, kernel, channels, **{"out_dtype": "bfloat16", **changes})
        yield Run(family, p, config)


def conv_epilogue_runs() -> Iterator[Run]:
    """Forward passes with every part of an epilogue, by every way to store results."""

    def persistent(tile_m: int, tile_n: int, swap: bool, workers: int, taps: int = 1) -> Any:
        config = conv_im2col.Config(tile_m, tile_n, 2, taps=taps, swap=swap, workers=workers)
        return dataclasses.replace(config, stages=config.most_stages)

    last, floats = {"activation_last": True}, {"dtype": "float32", "out_dtype": "float32"}
    half = {"dtype": HALF, "out_dtype": HALF}
    for size, kernel, channels, config, changes, (bias, activation, residual), more in (
        ((9, 11), (3, 3), (64, 128), persistent(256, 128, False, 2), {"padding": 1, "batch": 9},
         ("float32", "relu", "bfloat16"), last),
        ((9, 10), (1, 1), (168, 72), persistent(128, 64, False, 2), {"groups": 3, "batch": 3, **half},
         ("bfloat16", "relu", "bfloat16"), {}),
        ((9, 11), (3, 4), (72, 136), persistent(64, 256, True, 2), {"padding": 1, "batch": 8},
         (HALF, "relu", HALF), {}),
        ((5, 6, 7), (3, 2, 3), (16, 320), persistent(128, 192, True, 3), {"padding": 1, "stride": (1, 2, 1)},
         ("none", "none", "bfloat16"), {}),
        # Rows of phases: stored by the team itself, or by other warps.
        ((9, 10), (2, 2), (64, 72), persistent(64, 128, True, 2), {"padding": 1, "batch": 5, "lhs_dilation": (2, 1)},
         ("float32", "relu", "bfloat16"), last),
        ((9, 10), (3, 3), (72, 80), persistent(128, 128, True, 1), {"padding": 1, "batch": 5, "lhs_dilation": (1, 2)},
         ("none", "relu", HALF), {}),
        # Tiles with rows between the lines of images.
        ((9, 10), (3, 3), (64, 72), persistent(64, 128, True, 2, 3), {"padding": 1, "batch": 5},
         ("float32", "relu", "bfloat16"), last),
        ((9, 10), (3, 3), (72, 80), persistent(64, 256, True, 2, 3), {"padding": ((2, 0), (-1, 3)), "batch": 5},
         ("none", "relu", HALF), {}),
        ((4, 5, 6), (3, 3, 3), (32, 96), persistent(128, 128, True, 1, 3), {"padding": 1, "batch": 3},
         ("bfloat16", "none", "bfloat16"), {}),
        ((9, 10), (3, 3), (64, 72), persistent(256, 64, False, 2, 3), {"padding": 1, "batch": 5, **half},
         (HALF, "relu", "none"), {}),
        ((4, 5, 6), (3, 3, 3), (32, 32), conv_im2col.Config(256, 32, 2, 3, "workspace", 3), {"padding": 1},
         ("bfloat16", "relu", "float32"), last),
        ((9, 10), (3, 3), (96, 120), conv_im2col.Config(64, 64, 4), {"padding": 1, "groups": 3},
         ("float32", "relu", "float32"), {}),
        ((9, 10), (3, 3), (72, 2), conv_im2col.Config(64, 16, 3, 2, "workspace", 3), {"padding": 1},
         ("bfloat16", "none", "bfloat16"), {}),
        ((9, 10), (3, 3), (36, 40), conv_im2col.Config(64, 64, 4), {"padding": 1, **floats},
         ("float32", "relu", "none"), {}),
        ((9, 10), (3, 3), (144, 144), persistent(128, 80, False, 2), {"padding": 1, "groups": 2, "batch": 3},
         ("bfloat16", "relu", "bfloat16"), {}),
        ((9, 10), (3, 3), (96, 120), conv_im2col.Config(64, 64, 4, 2, "cluster"), {"padding": 1, "groups": 3, **half},
         ("float32", "relu", HALF), {}),
        ((9, 10), (3, 3), (64, 112), persistent(64, 112, False, 2, 3), {"padding": 1, "batch": 3},
         ("float32", "relu", "bfloat16"), last),
    ):  # fmt: skip
        p = conv_of(ConvFpropProblem, size, kernel, channels, **{"out_dtype": "bfloat16", **changes})
        given = {"bias_dtype": bias, "activation": activation, "residual_dtype": residual}
        yield Run(conv_im2col.FPROP, with_epilogue(p, **given, **more), config)
    for size, kernel, channels, config, changes, (bias, activation, residual), more in (
        ((33, 40), (7, 7), (3, 64), (2, 1, 64, 1, 8, 16, 3), {"stride": 2, "padding": 3},
         ("bfloat16", "relu", "bfloat16"), last),
        ((12, 12), (3, 3), (16, 136), (2, 2, 256, 2, 6, 6, 3), {"padding": 1, "stride": 2, **half},
         ("float32", "relu", HALF), {}),
        ((20, 24), (4, 4), (3, 96), (2, 1, 96, 2, 5, 6, 3), {"stride": 4}, ("none", "relu", "none"), {}),
        ((9, 10), (3, 3), (37, 53), (2, 1, 64, 1, 8, 16, 2), {"padding": 1}, (HALF, "relu", HALF), {}),
        ((9, 10), (3, 3), (40, 40), (4, 1, 16, 1, 9, 16, 3), {"padding": 1, "groups": 4, **half},
         ("bfloat16", "relu", "bfloat16"), last),
        ((3, 8, 10), (3, 5, 5), (2, 72), (3, 1, 128, 1, 4, 5, 3), {"padding": 2, "stride": (1, 2, 2), "batch": 1},
         ("float32", "none", "none"), {}),
        ((30,), (5,), (21, 15), (2, 1, 16, 2, 1, 64, 3), {"padding": 2, "groups": 3, "out_dtype": "float32"},
         ("bfloat16", "relu", "float32"), last),
        ((9, 10), (3, 3), (32, 72), (4, 1, 32, 1, 8, 16, 3), {"padding": 1, "groups": 4, **floats},
         ("float32", "none", "bfloat16"), {}),
        ((9, 10), (3, 3), (5, 7), (2, 2, 16, 1, 9, 16, 3), {"padding": ((1, 0), (0, 2)), "dtype": "float32"},
         ("none", "relu", "bfloat16"), {}),
    ):  # fmt: skip
        p = conv_of(ConvFpropProblem, size, kernel, channels, **{"out_dtype": "bfloat16", **changes})
        given = {"bias_dtype": bias, "activation": activation, "residual_dtype": residual}
        yield Run(conv_gather.FPROP, with_epilogue(p, **given, **more), conv_gather.Config(*config))
    for size, kernel, channels, groups, config, changes, (bias, activation) in (
        ((9, 10), (3, 3), 32, 8, (32, 2, 4, 5, 1, 1, 3, 2), {"padding": 1}, ("bfloat16", "relu")),
        ((40,), (5,), 64, 16, (64, 1, 1, 18, 2, 1, 2, 3), half, ("float32", "relu")),
        ((7, 7), (3, 3), 64, 2, (64, 4, 7, 7, 1, 2, 2, 2), {"padding": 1, "batch": 5},
         ("float32", "none")),
        ((12, 13), (3, 3), 40, 20, (32, 2, 5, 6, 1, 1, 4, 4),
         {"padding": ((2, 0), (-1, 3)), "rhs_dilation": (2, 3), "out_dtype": "float32"}, (HALF, "relu")),
        ((7, 7), (5, 5), 64, 2, (64, 2, 7, 7, 1, 2, 2, 2), {"padding": 2, "batch": 3}, ("none", "relu")),
        ((5, 9), (3, 3), 64, 8, (64, 1, 3, 9, 2, 1, 2, 2), {"padding": ((2, 3), (1, 2)), "lhs_dilation": (2, 1)},
         ("bfloat16", "relu")),
        ((5, 4, 6), (3, 3, 2), 32, 4, (32, 2, 2, 3, 1, 1, 3, 3), {"padding": 1, "stride": (2, 1, 2)},
         ("float32", "relu")),
    ):  # fmt: skip
        p = conv_of(ConvFpropProblem, size, kernel, (channels, channels), groups=groups,
                    **{"out_dtype": "bfloat16", **changes})  # fmt: skip
        given = {"bias_dtype": bias, "activation": activation}
        yield Run(conv_grouped.FPROP, with_epilogue(p, **given), conv_grouped.Config(*config))
    for size, kernel, channels, config, epilogue in (
        ((12, 20), (4, 4), (4, 136), (64, 64, 5), {"bias_dtype": "float32", "activation": "relu"}),
        ((20, 28), (2, 2), (40, 136), (64, 128, 4, 2, "workspace"),
         {"bias_dtype": "bfloat16", "activation": "relu", "residual_dtype": "bfloat16", **last}),
    ):  # fmt: skip
        p = conv_of(ConvFpropProblem, size, kernel, channels, stride=kernel, out_dtype="bfloat16")
        yield Run(patch.FPROP, with_epilogue(p, **epilogue), dot_tma.Config(*config))


def _patches() -> Iterator[Run]:
    tall = (128, 64, 4, 2, "workspace")
    pairs = ((patch.FPROP, ConvFpropProblem), (patch.WGRAD, ConvWgradProblem))
    for (family, kind), (size, kernel, channels, changes, config) in itertools.product(
        pairs,
        (
            ((12, 20), (4, 4), (4, 136), {}, (64, 64, 5)),
            ((64, 96), (16, 16), (3, 128), {"batch": 3, "dtype": HALF, "out_dtype": HALF}, tall),
            ((20, 28), (2, 2), (40, 136), {"out_dtype": "bfloat16"}, (64, 128, 4, 2, "cluster")),
            ((4, 6, 8), (2, 3, 2), (4, 136), {"batch": 6}, (192, 64, 4, 2, "workspace")),
            ((2, 18, 4), (1, 9, 2), (8, 64), {"out_dtype": "bfloat16"}, (192, 64, 5)),
            ((6, 32, 48), (2, 16, 16), (3, 72), {"batch": 5, "out_dtype": "bfloat16"}, (128, 64, 4, 2, "workspace")),
            ((24,), (4,), (32, 136), {"batch": 22}, (64, 64, 4, 2, "cluster")),
        ),
    ):
        p = conv_of(kind, size, kernel, channels, stride=kernel, **changes)
        yield Run(family, p, dot_tma.Config(*config))


def _stems() -> Iterator[Run]:
    half, narrow = {"dtype": HALF, "out_dtype": HALF}, {"out_dtype": "bfloat16"}
    for size, kernel, channels, changes, config in (
        ((33, 40), (7, 7), (3, 64), {"stride": 2, "padding": 3, **narrow}, (2, 1, 64, 1, 8, 16, 3)),
        ((15, 17), (3, 3), (3, 40), {"padding": 1, "dtype": HALF, "batch": 3}, (2, 2, 32, 1, 8, 16, 4)),
        ((12, 12), (3, 3), (16, 136), {"padding": 1, "stride": 2, **half}, (2, 2, 256, 2, 6, 6, 3)),
        ((90,), (10,), (1, 192), {"stride": 5, **narrow}, (2, 4, 192, 3, 1, 18, 3)),
        ((14, 15), (2, 3), (5, 24), {"rhs_dilation": (1, 2), **narrow}, (2, 1, 32, 1, 8, 8, 3)),
        ((20, 24), (4, 4), (3, 96), {"stride": 4, **half}, (2, 1, 96, 2, 5, 6, 3)),
        ((9, 13), (5, 3), (1, 8), {"padding": ((2, 1), (0, 2)), **narrow}, (2, 1, 16, 1, 4, 13, 3)),
        ((3, 8, 10), (3, 5, 5), (2, 72), {"padding": 2, "stride": (1, 2, 2), "batch": 1}, (3, 1, 128, 1, 4, 5, 3)),
        ((6, 7), (3, 3), (4, 16), {"padding": 2, "lhs_dilation": (2, 3), **half}, (4, 1, 16, 1, 13, 16, 3)),
        ((30, 64), (16, 16), (3, 64), {"padding": ((1, 1), (0, 0)), "stride": 16, **narrow}, (2, 1, 64, 2, 2, 4, 3)),
        ((40, 21), (1, 1), (6, 56), narrow, (2, 2, 64, 1, 1, 256, 3)),
    ):
        yield Run(conv_gather.FPROP, conv_of(ConvFpropProblem, size, kernel, channels, **changes),
                  conv_gather.Config(*config))  # fmt: skip
    # Odd channels, and the gradients of inputs.
    for (family, kind), (size, kernel, channels, changes, config) in itertools.product(
        _passes(conv_gather),
        (
            ((9, 10), (3, 3), (37, 53), {"padding": 1, **narrow}, (2, 1, 64, 1, 8, 16, 2)),
            ((9, 10), (3, 3), (20, 36), {"padding": 1, **narrow}, (2, 1, 64, 1, 8, 16, 2)),
            ((9, 10), (3, 3), (22, 30), {"padding": 1, **half}, (2, 1, 32, 1, 8, 16, 2)),
            ((5, 40), (3, 1), (3, 100), {"padding": 1, **narrow}, (2, 1, 128, 1, 4, 32, 3)),
            ((6, 21), (3, 1), (6, 70), {"padding": 1, **half}, (2, 1, 128, 1, 4, 32, 3)),
            ((7, 43), (3, 3), (1, 3), {"padding": 1, "batch": 3, **narrow}, (4, 1, 16, 1, 8, 32, 3)),
            ((9, 11), (3, 2), (3, 5), {"padding": 1, "stride": 2, "batch": 3, "dtype": HALF}, (2, 1, 16, 2, 8, 8, 3)),
            ((40,), (5,), (1, 20), {"padding": 2, "rhs_dilation": 2, **half}, (2, 1, 32, 1, 1, 128, 3)),
            ((4, 5, 6), (2, 3, 3), (22, 9), {"padding": 1}, (2, 2, 32, 1, 8, 8, 3)),
            ((11, 6), (2, 3), (7, 11), {"padding": ((1, 0), (2, 1)), "rhs_dilation": (2, 1)}, (2, 1, 16, 1, 8, 8, 3)),
        ),
    ):  # fmt: skip
        yield Run(family, conv_of(kind, size, kernel, channels, **changes), conv_gather.Config(*config))
    few = {"dtype": HALF, "out_dtype": HALF}
    yield Run(conv_gather.FPROP, conv_of(ConvFpropProblem, (9, 10), (1, 1), (200, 2), **few),
              conv_gather.Config(2, 1, 16, 1, 1, 64, 2))  # fmt: skip
    floats = {"dtype": "float32", "out_dtype": "float32"}
    for fields, size, kernel, channels, config, changes in (
        (floats, (20, 22), (7, 7), (3, 64), (3, 1, 64, 1, 8, 16, 4), {"padding": 3, "stride": 2}),
        (floats, (9, 10), (3, 3), (16, 16), (4, 1, 16, 1, 8, 16, 3), {"padding": 1}),
        (floats, (20, 24), (8, 8), (4, 32), (2, 1, 32, 2, 4, 8, 4), {"stride": 4}),
        ({**floats, "out_dtype": "bfloat16"}, (9, 10), (3, 3), (5, 7), (2, 2, 16, 1, 9, 16, 3),
         {"padding": ((1, 0), (0, 2))}),
        ({**floats, "out_dtype": HALF}, (4, 5, 6), (2, 3, 3), (20, 24), (2, 1, 32, 1, 5, 8, 3), {"padding": 1}),
        (floats, (60,), (5,), (1, 24), (2, 1, 32, 1, 1, 64, 3), {"padding": 2, "lhs_dilation": 2}),
    ):  # fmt: skip
        p = conv_of(ConvFpropProblem, size, kernel, channels, **{**fields, **changes})
        yield Run(conv_gather.FPROP, p, conv_gather.Config(*config))
    for (family, kind), (size, kernel, channels, config, changes) in itertools.product(
        _passes(conv_gather),
        (
            ((9, 10), (3, 3), (40, 40), (4, 1, 16, 1, 9, 16, 3), {"padding": 1, "groups": 4, **half}),
            ((30,), (5,), (21, 15), (2, 1, 16, 2, 1, 64, 3), {"padding": 2, "groups": 3, "stride": 2}),
            ((9, 10), (3, 3), (32, 72), (4, 1, 32, 1, 8, 16, 3), {"padding": 1, "groups": 4, **floats}),
        ),
    ):
        yield Run(family, conv_of(kind, size, kernel, channels, **changes), conv_gather.Config(*config))
    p = conv_of(ConvDgradProblem, (9, 10), (3, 3), (37, 13), padding=1, **floats)
    yield Run(conv_gather.DGRAD, p, conv_gather.Config(2, 1, 64, 1, 8, 16, 3))
    p = conv_of(ConvDgradProblem, (9, 11), (3, 2), (4, 5), padding=1, stride=2, **{**floats, "out_dtype": HALF})
    yield Run(conv_gather.DGRAD, p, conv_gather.Config(2, 1, 16, 2, 8, 8, 3))


# ---- matrix products -----------------------------------------------------------------------------------------------


def _dot() -> Iterator[Run]:
    ragged, whole = (72, 136, 1032), (128, 192, 640)
    for (m, n, k), orders, dtypes, config in (
        (ragged, ("bkm", "bkn"), ("bfloat16", "float32"), dot_tma.Config(64, 64, 8)),
        (ragged, ("mbk", "kbn"), (HALF, HALF), dot_tma.Config(128, 128, 5, 3, "cluster")),
        (whole, ("kbm", "nbk"), ("bfloat16", "bfloat16"), dot_tma.Config(64, 192, 4, 4, "workspace")),
        (whole, ("bmk", "bnk"), ("float32", "float32"), dot_tma.Config(192, 64, 4, 2, "cluster")),
        (ragged, ("bmk", "bnk"), ("float32", HALF), dot_tma.Config(192, 64, 5, 5, "workspace")),
    ):
        yield Run(dot_tma.FAMILY, DotProblem(2, m, n, k, *orders, *dtypes), config)
    # Chains of 256, 256 and 17 stages.
    long = DotProblem(1, 8, 24, 64 * 528 + 8, "bkm", "bkn", "bfloat16", "float32")
    yield Run(dot_tma.FAMILY, long, dot_tma.Config(64, 64, 8))
    narrow = DotProblem(2, 72, 136, 1040, "bmk", "nbk", E4M3, HALF)
    yield Run(dot_tma.FAMILY, narrow, dot_tma.Config(128, 64, 6, 2, "cluster"))
    m, n, k = ragged
    configs = {"m": dot_tma.Config(64, 128, 6, 2, "cluster"), "n": dot_tma.Config(64, 64, 6, 3, "workspace")}
    for bias, config in configs.items():
        after = {"bias": bias, "bias_dtype": "float32", "activation": "relu", "residual_dtype": HALF}
        yield Run(dot_tma.FAMILY, DotProblem(2, m, n, k, "bmk", "bkn", HALF, HALF, **after), config)


def _few_rows() -> Iterator[Run]:
    """1 to 64 rows, both orders of the weight, and sizes that no tile divides."""
    after = {"bias": "n", "bias_dtype": "float32", "activation": "relu", "residual_dtype": HALF}
    for sizes, dtypes, config, changes in (
        ((1, 1, 136, 520), ("bmk", "bkn", "bfloat16", "bfloat16"), (64, 8, 3, 2), {}),
        ((1, 7, 200, 1032), ("bmk", "bnk", HALF, "float32"), (128, 8, 4, 8), {}),
        ((2, 16, 256, 640), ("mbk", "kbn", "bfloat16", "float32"), (256, 16, 2, 3), {}),
        ((1, 33, 72, 200), ("bmk", "nbk", "bfloat16", HALF), (64, 64, 4), {}),
        ((1, 64, 320, 456), ("bmk", "bkn", HALF, HALF), (128, 64, 4, 5), after),
        ((3, 20, 130, 1040), ("bmk", "bnk", E4M3, "bfloat16"), (128, 32, 3, 4), {}),
    ):
        yield Run(few_rows.FAMILY, DotProblem(*sizes, *dtypes, **changes), few_rows.Config(*config))
    # Sums of 256, 256 and 17 stages.
    long = DotProblem(1, 3, 24, 64 * 528 + 8, "bmk", "bkn", "bfloat16", "float32")
    yield Run(few_rows.FAMILY, long, few_rows.Config(64, 8, 16))


# ---- products with quantized weights -------------------------------------------------------------------------------


def _stream() -> Iterator[Run]:
    gated = products.Case(5, 192, 144, bias="bfloat16", activation="swiglu", residual="bfloat16")
    for case, tile_n, warpgroups, tiles, cluster, clusters in (
        (products.Case(3, 320, 136), 8, 1, 1, 1, 2),
        (products.Case(16, 512, 72, "uint4", 128, "bfloat16", out_dtype="float32"), 16, 2, 2, 2, 1),
        (products.Case(5, 1024, 130, "int8", 1024, None, HALF, HALF, HALF), 8, 4, 2, 2, 1),
        (products.Case(2, 1001, 65, "nf4", 1001, scale_dtype="float32"), 8, 1, 4, 4, 2),
        (products.Case(20, 2560, 72, "nf4", 64, None, HALF, E4M3), 32, 2, 2, 1, 1),  # without a table
        (products.Case(20, 512, 72, "float4_e2m1fn", 32), 32, 1, 1, 8, 1),
        (products.Case(40, 256, 136, E4M3, 64, x_dtype=E4M3), 64, 2, 1, 2, 3),
        (products.Case(9, 250, 70, "int8", 250, "own", x_dtype=E4M3), 16, 1, 1, 1, 1),
        (products.Case(6, 208, 72, "float4_e2m1fn", 16), 8, 2, 1, 1, 2),
        (products.Case(12, 256, 130, "float4_e2m1fn", 16, x_dtype=E4M3), 16, 1, 2, 2, 1),
        (products.Case(3, 144, 70, "uint4", 16, "bfloat16", HALF, HALF, HALF), 8, 1, 1, 1, 1),
        # Scales of a byte, and channel scales.
        (products.Case(6, 320, 72, "float4_e2m1fn", 32, None, E8M0), 8, 2, 1, 2, 1),
        (products.Case(3, 208, 130, "float4_e2m1fn", 16, None, E4M3, channel=True), 8, 1, 2, 1, 2),
        (products.Case(12, 256, 70, "uint4", 128, "own", E8M0, HALF, HALF, channel=True), 16, 1, 2, 2, 1),
        (products.Case(5, 250, 70, E4M3, 250, None, E8M0, out_dtype="float32", channel=True), 8, 1, 1, 1, 1),
        (products.Case(20, 256, 136, "float4_e2m1fn", 64, None, E4M3, E4M3), 32, 1, 1, 2, 2),
        # Normalized activations: each width of a tile, clusters that divide k and none, k that ends within a stage.
        (dataclasses.replace(gated, k=256, norm="bfloat16"), 8, 1, 1, 1, 2),
        (products.Case(2, 64, 40, norm="one"), 8, 1, 1, 1, 1),
        (products.Case(3, 448, 136, norm="bfloat16"), 8, 4, 1, 2, 1),
        (products.Case(9, 512, 72, "uint4", 64, "own", norm="bfloat16", residual="float32"), 16, 1, 1, 2, 1),
        (products.Case(16, 320, 72, norm="bfloat16"), 16, 2, 4, 1, 1),
        (products.Case(30, 512, 70, "int8", 512, norm="bfloat16"), 32, 2, 1, 4, 2),
    ):
        yield Run(stream.FAMILY, case.problem, stream.Config(tile_n, warpgroups, tiles, 3, cluster, clusters), case)
    for case, tile_n, cluster, clusters in (
        (gated, 8, 1, 2),
        (dataclasses.replace(gated, activation="swigluoai", residual="none", **HALVES), 8, 2, 2),
        (dataclasses.replace(gated, rows=20, activation="geglu", bias="float32", out_dtype="float32"), 32, 2, 1),
        (products.Case(3, 256, 70, bias=HALF, activation="relu", residual="float32"), 8, 2, 1),
        (products.Case(9, 256, 72, "uint4", 64, "own", E8M0, channel=True, residual="bfloat16"), 16, 1, 2),
    ):
        yield Run(stream.FAMILY, case.problem, stream.Config(tile_n, 1, 1, 3, cluster, clusters), case)
    # x is loaded again for each row tile. Its places are more than stages of k, and fewer.
    for case, tile_n, warpgroups, tiles, cluster, clusters in (
        (products.Case(40, 2048, 136), 64, 1, 2, 1, 1),
        (products.Case(33, 3840, 72, E4M3, 64, x_dtype=E4M3), 64, 1, 1, 1, 1),
        (products.Case(50, 4096, 136, "uint4", 64, "own", residual="bfloat16"), 64, 2, 1, 2, 1),
        (products.Case(17, 4096, 72, "nf4", 64), 32, 1, 4, 1, 2),
    ):
        config = stream.Config(tile_n, warpgroups, tiles, 3, cluster, clusters)
        assert stream.memory(case.problem, config).x_slots
        yield Run(stream.FAMILY, case.problem, config, case)
    # Chained: k that ends within a stage, x that TMA does not load, x that is reordered, and fewer stages of k than
    # those that are loaded early.
    for case, tile_n, warpgroups, cluster, clusters in (
        (dataclasses.replace(gated, k=256, norm="bfloat16"), 8, 1, 2, 2),
        (products.Case(9, 448, 72, "uint4", 64, "own", residual="float32"), 16, 2, 2, 1),
        (products.Case(2, 1001, 65, "nf4", 1001, scale_dtype="float32"), 8, 2, 2, 2),
        (products.Case(20, 512, 72, E4M3, 64, x_dtype=E4M3), 32, 2, 1, 1),
        (products.Case(2, 64, 40, norm="one", bias="bfloat16"), 8, 1, 1, 1),
        (products.Case(40, 4096, 136, residual="bfloat16"), 64, 1, 2, 1),
    ):
        yield Run(stream.FAMILY, case.problem, stream.Config(tile_n, warpgroups, 1, 3, cluster, clusters), case, True)


def _fp8() -> Iterator[Run]:
    plain, wide = products.Case(20, 384, 136, x_dtype=E4M3), products.Case(70, 320, 300, "uint4", 64, x_dtype=E4M3)
    exact = products.Case(130, 256, 140, E4M3, 128, None, "float32", E4M3)
    channel = products.Case(9, 336, 130, "float4_e2m1fn", 336, None, HALF, E4M3, HALF)
    for case, config in (
        (plain, fp8.Config(128, 32, 2, 2)),
        (plain, fp8.Config(128, 32, 2, 5)),
        (dataclasses.replace(plain, rows=150), fp8.Config(128, 32, 2, 4)),
        (wide, fp8.Config(256, 64, 2, 6, multicast=2)),
        (exact, fp8.Config(128, 192, 2, 2, multicast=2)),
        (channel, fp8.Config(128, 64, 2, 3)),
        (products.Case(20, 448, 136, "float4_e2m1fn", 32, None, E8M0, E4M3), fp8.Config(128, 32, 2, 3)),
        (products.Case(70, 320, 300, E4M3, 64, None, E4M3, E4M3, HALF, True), fp8.Config(256, 64, 2, 4)),
        (products.Case(9, 336, 130, "int4", 336, None, E8M0, E4M3, channel=True), fp8.Config(128, 64, 2, 2)),
    ):
        yield Run(fp8.FAMILY, case.problem, products.without_idle(case.problem, config), case)
    # Ranges of a tile that are a cluster: the pipeline is filled again, sums land across its end, two k_warpgroups.
    deep = products.Case(40, 1088, 136, x_dtype=E4M3)
    for case, config in (
        (dataclasses.replace(plain, k=768), fp8.Config(128, 32, 3, 4, splits=2)),
        (deep, fp8.Config(128, 64, 4, 4, splits=2, k_warpgroups=2)),
        (dataclasses.replace(plain, k=1024, features=203), fp8.Config(128, 32, 4, 6, splits=3, k_warpgroups=2)),
    ):
        yield Run(fp8.FAMILY, case.problem, config, case)
    gated = products.Case(20, 384, 144, x_dtype=E4M3, bias="bfloat16", activation="swiglu", residual="bfloat16")
    yield Run(fp8.FAMILY, gated.problem, products.without_idle(gated.problem, fp8.Config(128, 32, 2, 3)), gated)


def _rounded() -> Iterator[Run]:
    """Weights that are rounded to e4m3: formats, groups, zero points, and x of 16 bits, which another kernel rounds."""
    plain = products.Case(20, 384, 136, x_dtype=E4M3, compute=E4M3)
    narrow = dataclasses.replace(plain, rows=70, features=300, qtype="nf4", k=320, scale_dtype=HALF, out_dtype=HALF)
    channel = products.Case(130, 208, 140, "float4_e2m1fn", 16, None, E4M3, E4M3, channel=True, compute=E4M3)
    whole = products.Case(9, 336, 130, "int8", 336, "float32", "float32", E4M3, HALF, compute=E4M3)
    prepared = products.Case(130, 2064, 140, "uint4", 16, "own", HALF, HALF, HALF, residual=HALF, compute=E4M3)
    for case, config in (
        (plain, fp8.Config(128, 32, 2, 5)),
        (dataclasses.replace(plain, rows=150, qtype="uint4", zero="own", group_size=32), fp8.Config(128, 32, 2, 4)),
        (dataclasses.replace(plain, rows=130, qtype="int8", group_size=384), fp8.Config(128, 192, 2, 2, multicast=2)),
        (narrow, fp8.Config(256, 64, 2, 4)),
        (channel, fp8.Config(128, 256, 2, 2)),
        (whole, fp8.Config(128, 64, 2, 2)),
        (dataclasses.replace(plain, qtype=E4M3, group_size=128, scale_dtype=E8M0), fp8.Config(128, 64, 3, 3)),
        (dataclasses.replace(plain, x_dtype="bfloat16"), fp8.Config(128, 32, 2, 5)),
        (prepared, fp8.Config(128, 64, 2, 4, multicast=2)),
        (products.Case(70, 256, 300, "int4", 256, compute=E4M3, bias="bfloat16"), fp8.Config(128, 64, 2, 4)),
    ):
        yield Run(fp8.FAMILY, case.problem, products.without_idle(case.problem, config), case)
    deep = dataclasses.replace(plain, rows=200, k=1024)
    yield Run(fp8.FAMILY, deep.problem, fp8.Config(128, 256, 4, 4, splits=2), deep)
    shared = dataclasses.replace(plain, rows=40, k=1088, group_size=32)
    yield Run(fp8.FAMILY, shared.problem, fp8.Config(128, 64, 4, 4, splits=2, k_warpgroups=2), shared)


def _tiled() -> Iterator[Run]:
    plain = products.Case(17, 384, 136)
    zero = products.Case(20, 256, 100, "uint4", 64, "bfloat16", HALF, HALF, HALF)
    channel = products.Case(33, 300, 72, "int8", 300)
    for case, tile_m, tile_n, blocks in (
        (plain, 128, 32, 2),
        (dataclasses.replace(plain, scale_dtype="float32"), 64, 32, 7),
        (dataclasses.replace(plain, rows=150), 128, 32, 4),
        (zero, 128, 32, 2),
        (products.Case(33, 1024, 100, "uint4", 128, "bfloat16"), 64, 32, 3),  # stages are filled again
        (channel, 64, 64, 5),
        (dataclasses.replace(plain, out_dtype="float32", features=260), 256, 16, 3),
        (products.Case(9, 320, 70, E4M3, 32, None, "float32", E4M3), 64, 16, 3),
        (products.Case(9, 256, 70, "nf4", 128), 64, 16, 2),
        (products.Case(40, 256, 130, "float4_e2m1fn", 32, None, HALF, HALF, "float32"), 128, 64, 2),
        (products.Case(33, 336, 130, "float4_e2m1fn", 16), 128, 64, 2),
        (products.Case(20, 208, 72, "float4_e2m1fn", 16, None, HALF, HALF, HALF), 64, 32, 3),
        (products.Case(9, 256, 70, "int4", 16, "own", "float32"), 64, 16, 2),
        (products.Case(17, 448, 136, "float4_e2m1fn", 32, None, E8M0), 128, 32, 3),
        (products.Case(33, 336, 130, "float4_e2m1fn", 16, None, E4M3, channel=True), 128, 64, 2),
        (products.Case(20, 320, 72, E4M3, 64, None, E8M0, HALF, HALF, True), 64, 32, 3),
        (products.Case(17, 384, 136, "int4", 128, None, E8M0, channel=True), 128, 32, 2),
        (products.Case(9, 256, 70, "uint4", 32, "own", E4M3, out_dtype="float32"), 64, 16, 2),
        (products.Case(9, 200, 70, "int8", 200, None, E4M3, channel=True), 64, 16, 2),
        # Zero points and scales of 16 and 32 bits that go into the weight.
        (products.Case(70, 352, 130, "uint4", 32, "bfloat16"), 64, 96, 2),
        (products.Case(130, 256, 136, "int4", 128, HALF, HALF), 128, 192, 2),
        (products.Case(100, 320, 72, "int8", 16, "float32", "float32"), 64, 128, 2),
        (products.Case(70, 208, 72, "nf4", 16, None, "float32"), 64, 96, 2),
        (products.Case(70, 192, 136, "int4", 64, None, HALF), 128, 256, 2),
    ):
        config = tiled.Config(tile_m, tile_n, 2, blocks)
        yield Run(tiled.FAMILY, case.problem, products.without_idle(case.problem, config), case)
    deep = dataclasses.replace(plain, k=768)
    scaled = products.Case(17, 512, 136, "float4_e2m1fn", 16, None, E4M3, channel=True)
    for case, tile, splits in (
        (scaled, tiled.Config(128, 32, 4, 0, k_warpgroups=2), 2),
        (plain, tiled.Config(128, 32, 2, 0), 3),
        (deep, tiled.Config(64, 64, 8, 0, k_warpgroups=2), 2),
        (deep, tiled.Config(128, 32, 4, 0, k_warpgroups=2), 3),
    ):
        yield Run(tiled.FAMILY, case.problem, split_tiles(case.problem, tile, splits), case)
    # Epilogues: of whole tiles, of slots, and of clusters.
    gated = products.Case(37, 384, 144, bias="bfloat16", activation="swiglu", residual="bfloat16")
    for case, config in (
        (gated, tiled.Config(128, 32, 2, 3)),
        (dataclasses.replace(gated, activation="swigluoai", residual="none", **HALVES), tiled.Config(64, 16, 2, 9)),
        (
            dataclasses.replace(gated, activation="geglu", out_dtype="float32", bias="float32"),
            tiled.Config(64, 64, 2, 3),
        ),
        (products.Case(20, 256, 70, bias=HALF, activation="relu", residual="float32"), tiled.Config(64, 32, 2, 3)),
        (products.Case(20, 256, 72, channel=True, scale_dtype=E8M0, residual="bfloat16"), tiled.Config(64, 32, 2, 2)),
    ):
        yield Run(tiled.FAMILY, case.problem, products.without_idle(case.problem, config), case)
    for case, tile, splits in (
        (gated, tiled.Config(128, 32, 2, 0), 3),
        (
            products.Case(20, 768, 136, bias="bfloat16", residual="bfloat16"),
            tiled.Config(64, 64, 8, 0, k_warpgroups=2),
            2,
        ),
    ):
        yield Run(tiled.FAMILY, case.problem, split_tiles(case.problem, tile, splits), case)


def _transposed() -> Iterator[Run]:
    """Sizes that end within a tile and within a block, every format, group and way to scale, and every way to cut."""

    def case(rows: int, k: int, features: int, *weight: Any, **types: Any) -> products.Case:
        return products.Case(rows, k, features, *weight, **types, transposed=True)

    half: dict[str, Any] = {"x_dtype": HALF, "out_dtype": HALF}
    plain = case(17, 384, 136)
    for given, tile_m, tile_n, blocks in (
        (plain, 128, 32, 2),
        (dataclasses.replace(plain, scale_dtype="float32"), 64, 32, 7),
        (dataclasses.replace(plain, rows=150), 128, 32, 4),
        (case(300, 320, 200), 128, 256, 2),
        (case(33, 300, 72, "int8", 300), 64, 64, 5),
        (case(70, 203, 100, "int4", 203), 256, 64, 2),
        (case(9, 320, 72, E4M3, 32), 64, 16, 3),
        (case(9, 256, 70, "nf4", 128), 256, 16, 2),
        (case(33, 336, 136, "float4_e2m1fn", 16), 128, 96, 2),
        (case(20, 256, 100, "uint4", 64, "bfloat16"), 128, 32, 2),
        (case(9, 256, 72, "int8", 16, "own", "float32"), 64, 16, 2),
        (case(20, 256, 136, "float4_e2m1fn", 32, None, E4M3), 128, 32, 2),
        (case(20, 256, 136, "float4_e2m1fn", 16, None, E4M3, channel=True), 128, 32, 2),
        # Weights over factors of their groups, with a copy of x and without.
        (case(20, 256, 100, "uint4", 64, "bfloat16", HALF, **half), 128, 32, 3),
        (case(40, 256, 136, E4M3, 32, None, "float32", HALF), 128, 64, 2),
        (case(9, 300, 200, "int4", 300, None, HALF, **half), 64, 16, 4),
        (case(20, 256, 136, "float4_e2m1fn", 16, None, E4M3, **half, channel=True), 64, 32, 2),
    ):
        config = transposed.Config(tile_m, tile_n, 2, blocks)
        yield Run(transposed.FAMILY, given.problem, products.without_idle(given.problem, config), given)
    deep = dataclasses.replace(plain, k=192, features=768)
    for given, tile, splits in (
        (dataclasses.replace(plain, features=328), transposed.Config(128, 32, 2, 0), 3),
        (deep, transposed.Config(64, 64, 8, 0, k_warpgroups=2), 2),
        (dataclasses.replace(deep, scale_dtype=HALF, **half), transposed.Config(128, 32, 4, 0, k_warpgroups=2), 3),
    ):
        yield Run(transposed.FAMILY, given.problem, split_tiles(given.problem, tile, splits), given)


# ---- grouped products ----------------------------------------------------------------------------------------------


def ragged_config(tile_m: int, tile_n: int, workers: int, **changes: Any) -> ragged_tiles.Config:
    """With three stages."""
    return dataclasses.replace(ragged_tiles.Config(tile_m, tile_n, 3, workers), **changes)


def _ragged() -> Iterator[Run]:
    bf16, wide, half = ("bfloat16", "bfloat16"), ("bfloat16", "float32"), (HALF, HALF)
    offset, gnk, swap = {"total_groups": 5}, {"rhs_order": "gnk"}, {"swap": True}
    for (groups, m, k, n), dtypes, changes, config in (
        ((4, 200, 72, 136), bf16, {}, ragged_config(64, 128, 3)),
        ((5, 300, 136, 200), bf16, {}, ragged_config(128, 256, 3)),
        ((5, 300, 136, 192), bf16, gnk, ragged_config(128, 256, 3, stages=4, parts=2)),
        ((2, 300, 136, 320), (HALF, "float32"), offset, ragged_config(128, 256, 2, parts=4)),
        ((70, 400, 72, 200), (HALF, "float32"), gnk, ragged_config(256, 128, 2, parts=4)),
        ((4, 300, 136, 200), half, offset | gnk, ragged_config(128, 192, 2)),
        ((4, 300, 136, 192), wide, {}, ragged_config(128, 128, 2, stages=4, parts=2)),
        ((4, 300, 72, 264), half, {}, ragged_config(64, 256, 4)),
        ((3, 300, 1096, 136), bf16, {}, ragged_config(64, 128, 7, cut=True)),
        ((2, 300, 1160, 200), wide, offset | gnk, ragged_config(128, 128, 3, parts=2, cut=True)),
        ((2, 400, 1032, 72), half, {}, ragged_config(256, 128, 40, cut=True)),
        ((2, 100, 136, 192), (HALF, "float32"), offset, ragged_config(128, 64, 2, stages=4, **swap)),
        ((4, 70, 136, 200), bf16, {}, ragged_config(64, 16, 5, stages=4, **swap)),
        ((4, 170, 136, 192), bf16, gnk, ragged_config(128, 32, 5, stages=4, **swap)),
        ((4, 70, 136, 328), half, gnk, ragged_config(256, 8, 2, **swap)),
        ((70, 90, 72, 320), wide, {}, ragged_config(256, 64, 2, stages=2, **swap)),
    ):
        yield Run(ragged_m.FAMILY, RaggedDotProblem("forward", groups, m, k, n, *dtypes, **changes), config)
    for (groups, m, k, n), dtypes, changes, config in (
        ((4, 200, 72, 136), bf16, {}, ragged_config(64, 128, 5)),
        ((5, 300, 136, 200), bf16, {}, ragged_config(128, 256, 3)),
        ((3, 3000, 136, 200), wide, {}, ragged_config(128, 256, 5, parts=4)),
        ((4, 1500, 136, 328), half, offset, ragged_config(128, 256, 3, stages=4, parts=2)),
        ((3, 3000, 136, 200), wide, offset, ragged_config(128, 128, 5, stages=4, parts=2)),
        ((2, 1500, 264, 72), (HALF, "float32"), {}, ragged_config(256, 128, 7, parts=2)),
        ((3, 4000, 200, 136), half, {}, ragged_config(128, 192, 5, stages=2)),
        ((70, 900, 72, 264), (HALF, "bfloat16"), {}, ragged_config(64, 256, 5)),
    ):
        yield Run(ragged_k.FAMILY, RaggedDotProblem("rhs_gradient", groups, m, k, n, *dtypes, **changes), config)


def _experts() -> Iterator[Run]:
    """One config with two columns of tiles for each way to scale, and for each way to divide the work."""
    config = experts_family.Config
    plain = products.Case(40, 384, 136)
    zero = products.Case(33, 336, 100, "uint4", 16, "bfloat16", HALF, HALF, HALF)
    for groups, case, total, given in (
        (4, plain, 0, config(64, 16, 2, 5)),
        (3, plain, 7, config(128, 32, 3, 4, cut=True)),
        (70, dataclasses.replace(plain, rows=90, scale_dtype="float32"), 0, config(64, 32, 2, 7, cut=True)),
        (4, zero, 0, config(128, 16, 2, 3, cut=True)),
        (5, products.Case(70, 1088, 200, "uint4", 64, "float32", out_dtype="float32"), 0,
         config(64, 64, 3, 4, cut=True)),
        (2, products.Case(50, 300, 72, "int8", 300), 5, config(256, 64, 2, 2)),
        (3, products.Case(50, 1001, 65, "nf4", 1001, None, "float32"), 0, config(64, 64, 2, 5, cut=True)),
        (3, products.Case(21, 320, 70, E4M3, 32, None, "float32", E4M3), 0, config(64, 16, 3, 3)),
        (4, products.Case(150, 256, 264, "float4_e2m1fn", 32), 0, config(128, 128, 2, 3, cut=True)),
        (4, products.Case(150, 256, 264, "uint4", 32, HALF, HALF), 0, config(128, 128, 2, 3, cut=True)),
        (4, products.Case(20, 208, 72, "float4_e2m1fn", 16, None, HALF, HALF, HALF), 0, config(64, 32, 3, 3)),
        (4, products.Case(40, 320, 136, "float4_e2m1fn", 32, None, "float8_e8m0fnu"), 0,
         config(128, 32, 3, 5, cut=True)),
        (3, products.Case(30, 256, 72, "float4_e2m1fn", 16, None, E4M3, channel=True), 6, config(64, 16, 3, 3)),
        (4, dataclasses.replace(plain, bias="bfloat16"), 0, config(64, 16, 2, 4, cut=True)),
        (3, products.Case(40, 256, 80, "float4_e2m1fn", 32, None, "float8_e8m0fnu", bias="bfloat16",
                          activation="swigluoai"), 7, config(64, 16, 2, 6)),
        (4, products.Case(30, 384, 144, "uint4", 64, "float32", out_dtype="float32", bias="float32",
                          activation="swiglu"), 0, config(128, 32, 2, 3, cut=True)),
        (3, products.Case(21, 256, 75, "int8", 64, **HALVES, activation="relu"), 0, config(64, 32, 2, 3)),
    ):  # fmt: skip
        yield Run(experts_family.FAMILY, experts.problem(groups, case, total), given)
    deep = dataclasses.replace(plain, k=768)
    for groups, case, total, given, splits in (
        (4, plain, 0, config(128, 32, 2, 0), 3),
        (3, deep, 6, config(64, 64, 8, 0, k_warpgroups=2), 2),
        (70, dataclasses.replace(deep, rows=90), 0, config(128, 32, 4, 0, k_warpgroups=2), 3),
        (3, dataclasses.replace(zero, k=1024), 0, config(64, 16, 4, 0), 4),
        (4, dataclasses.replace(deep, features=144, bias="float32", activation="geglu"), 0,
         config(64, 32, 4, 0, k_warpgroups=2), 2),
    ):  # fmt: skip
        p = experts.problem(groups, case, total)
        yield Run(experts_family.FAMILY, p, experts_family.split_tiles(p, given, splits))


RUNS = list(
    itertools.chain(
        *(_im2col(), _halo(), _tf32(), _gather(), _grouped(), _depthwise(), _depthwise_any()),
        *(_depthwise_passes(), _toeplitz_passes(), _grouped_passes(), _dense_passes(), conv_epilogue_runs()),
        *(_patches(), _stems()),
        _adapted(),
        *(_dot(), _few_rows(), _stream(), _fp8(), _rounded(), _tiled(), _transposed(), _ragged(), _experts()),
    )
)


def kernel_names() -> list[str]:
    """The names of all kernels that the runs launch."""
    return sorted({launch.kernel for run in RUNS for launch in run.plan.launches})
