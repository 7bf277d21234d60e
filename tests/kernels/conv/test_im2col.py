"""The dense family of forward passes and input gradients, without a GPU: its device code, emulated."""

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_splitk.kernels.conv import im2col
from jax_splitk.kernels.conv.im2col import Config
from jax_splitk.kernels.device.wgmma_tile import max_stages
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import Im2colMap, TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import emulator, float64
from tests.exhaustive import thinned
from tests.problems import conv, seeded

FAMILIES = {"conv_fprop": im2col.FPROP, "conv_dgrad": im2col.DGRAD}
BOTH = (ConvFpropProblem, ConvDgradProblem)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> Any:
    return kind(**vars(conv(size, kernel, (channels[0], channels[1]), **{"out_dtype": "bfloat16", **more})))


def check(p: ConvProblem, config: Config, rng: np.random.Generator) -> None:
    """On integers, whose sums are exact in every dtype."""
    family = FAMILIES[p.op]
    assert family.refusal(p, config) is None, f"{p} {config}"
    x, w = (rng.integers(-2, 3, shape).astype(DTYPES[p.dtype]) for shape in p.operand_shapes)
    out = np.empty(p.out_shape, DTYPES[p.out_dtype])
    emulator.run(family.plan(p, config), [x, w], [out], seed=int(rng.integers(2**31)))
    want = float64.ON_HOST[p.op](p, x, w).astype(out.dtype)
    np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32), err_msg=f"{p} {config}")


def tile(tile_m: int, tile_n: int, splits: int = 1, reduction: str = "none") -> Config:
    return Config(tile_m, tile_n, max_stages(tile_m, tile_n), splits, reduction)


FPROP, DGRAD = BOTH
CASES = [
    (problem(DGRAD, (9, 11), (3, 3), 40, 72, padding=1, stride=2), tile(64, 64, 3, "workspace")),
    (problem(FPROP, (9, 11), (3, 4), 72, 136, stride=(2, 3), padding=((2, 0), (-1, 3)), rhs_dilation=(2, 1)), tile(64, 128, 3, "cluster")),
    (problem(FPROP, (5, 6, 7), (3, 2, 3), 16, 64, padding=1, stride=(1, 2, 1), out_dtype="float32"), tile(128, 64, 2, "workspace")),
    (problem(DGRAD, (600,), (4,), 20, 16, rhs_dilation=130, padding=((390, 0),), dtype="float32"), tile(256, 64)),
    # Strides larger than the filter: what no tap meets is zero.
    (problem(DGRAD, (8, 7), (2, 1), 68, 24, stride=(3, 2), dtype="float16", out_dtype="float32"), tile(64, 64)),
    (problem(FPROP, (8, 9), (3, 3), 72, 40, padding=1), Config(64, 64, 3)),
    (problem(FPROP, (13, 9), (1, 1), 136, 72, batch=3, dtype="float16", out_dtype="float16"), tile(192, 128, 2, "cluster")),
    (problem(FPROP, (9, 10), (3, 3), 64, 200, padding=((2, 3), (1, 1)), stride=(1, 2), lhs_dilation=(2, 1)), tile(128, 256)),
    (problem(DGRAD, (4, 5, 6), (3, 3, 3), 64, 40, padding=1, stride=2), tile(64, 64, 4, "cluster")),
    (problem(DGRAD, (9, 8), (3, 3), 100, 136, padding=2, rhs_dilation=2, dtype="float32", out_dtype="float32"), tile(64, 128, 5, "workspace")),
    (problem(DGRAD, (17, 16), (3, 4), 16, 24, padding=((3, 4), (0, 5)), stride=(2, 4), rhs_dilation=(3, 2)), tile(192, 64, 2, "cluster")),
    (problem(DGRAD, (12, 9), (4, 4), 264, 72, stride=(4, 3), padding=((1, -1), (2, 2)), batch=5), tile(256, 128)),
    (problem(DGRAD, (31,), (7,), 72, 64, stride=3, padding=3, out_dtype="float16", dtype="float16"), tile(128, 192)),
    (problem(DGRAD, (9, 9), (1, 1), 24, 64, stride=2), tile(64, 64)),
    (problem(FPROP, (3, 10, 3, 4), (1, 3, 1)[:3], 24, 16)if False else problem(FPROP, (6, 10, 3), (1, 3, 1), 24, 16, padding=((0, 0), (1, 1), (0, 0))), tile(64, 64, 3, "workspace")),
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 5))
def test_exact_on_integers(p: ConvProblem, config: Config) -> None:
    with seeded(81) as rng:
        check(p, config, rng)


MAX_WINDOWS, MAX_FLOPS = 2_000_000, 2e8  # what NumPy and the emulator compute in a moment


def random_problem(rng: np.random.Generator, kind: type[Any], scale: int = 1) -> Any:
    """One that the family takes; `scale`: of its sizes."""
    while True:
        rank = int(rng.choice([1, 2, 2, 3]))
        some = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731, B023
        most = (60, 14, 6)[rank - 1] * scale
        more: dict[str, Any] = {"padding": tuple(zip(some(-2, 6), some(-2, 6), strict=True))}
        if rng.random() < 0.2:
            more["padding"] = 0
        if rng.random() < 0.6:
            more[str(rng.choice(["stride", "stride", "lhs_dilation"]))] = some(1, 5)
        if rng.random() < 0.4:
            more["rhs_dilation"] = some(1, 4)
        dtype = str(rng.choice(["bfloat16", "float16", "float32"][: 2 + (kind is ConvDgradProblem)]))
        channels = [8 * int(rng.integers(1, 8 * scale)) for _ in range(2)]
        if kind is ConvDgradProblem:
            channels[0] -= 4 * int(rng.integers(2))
        if rng.random() < 0.2:
            channels = [64 * max(1, c // 64) for c in channels]
        more |= {"dtype": dtype, "out_dtype": str(rng.choice(list(DTYPES))), "batch": int(rng.integers(1, 4))}
        p = problem(kind, some(1, most), some(1, (8, 5, 4)[rank - 1]), *channels, **more)
        windows = math.prod(p.g_shape[:-1]) * p.taps * p.in_channels
        small = windows <= MAX_WINDOWS * scale and p.flops <= MAX_FLOPS * scale**2
        if small and FAMILIES[p.op].refusal(p) is None:
            return p


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_random_problems_are_exact_on_integers(seed: int) -> None:
    with seeded(8200 + seed) as rng:
        p = random_problem(rng, BOTH[seed % 2])
        configs = FAMILIES[p.op].candidates(p, DEFAULT_CUDA)
        check(p, configs[int(rng.integers(len(configs)))], rng)
