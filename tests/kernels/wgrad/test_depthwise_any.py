"""Depthwise weight gradients on the CUDA cores, without a GPU: the device code is emulated."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_splitk.kernels.depthwise.wgrad_any import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import emulator, float64, random_problems
from tests.exhaustive import thinned
from tests.kernels import emulated
from tests.problems import conv, seeded


def problem(size: tuple[int, ...], kernel: tuple[int, ...], channels: int = 4, **changes: Any) -> ConvWgradProblem:
    outputs = channels * changes.pop("multiplier", 1)
    return conv(size, kernel, (channels, outputs), groups=channels, **{"dtype": "float32", **changes})


def result(p: ConvWgradProblem, config: Config, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    assert FAMILY.refusal(p, config) is None, f"{p} {config}"
    dtype = {"bfloat16": ml_dtypes.bfloat16}
    out = np.zeros(p.out_shape, dtype.get(p.out_dtype, p.out_dtype))
    operands = [array.astype(dtype.get(p.dtype, p.dtype)) for array in (lhs, g)]
    emulator.run(FAMILY.plan(p, config), operands, [out])
    return out


HALF = {"dtype": "bfloat16"}
CASES = [
    (problem((5, 6, 7), (3, 3, 3), 6, padding=1, **HALF), Config(2, 2, 2, 4, 2)),
    (problem((37,), (4,), 5, batch=3, padding=((3, 0),), **HALF), Config(7, 1, 8, 4, 1)),
    (problem((12, 11), (5, 3), 3, multiplier=3, stride=(2, 3), padding=((4, 1), (3, 2)), rhs_dilation=(3, 2)),
     Config(2, 1, 2, 8, 1)),
    # Strips that are moved back, with columns of x that only other strips may multiply.
    (problem((9, 11), (3, 3), 66, batch=1, dtype="float16", out_dtype="bfloat16"), Config(4, 4, 32, 4, 2)),
    (problem((7, 8, 9), (3, 2, 3), 2, padding=((0, 2), (1, 1), (2, 0)), stride=(3, 2, 1), out_dtype="float16"),
     Config(3, 1, 2, 4, 1)),
    (problem((9, 10), (7, 7), 4, padding=3), Config(4, 8, 2, 4, 1)),
    # Rows so far apart that each row of taps loads its own.
    (problem((30, 9), (3, 3), 4, padding=((9, 10), (1, 1)), rhs_dilation=(9, 1)), Config(3, 2, 2, 12, 1)),
    (problem((12, 9), (3, 4), 4, padding=((-1, 4), (5, -2)), stride=(1, 2), rhs_dilation=(2, 1), **HALF),
     Config(1, 7, 2, 4, 1)),
    (problem((40,), (3,), 8, padding=((26, 0),), rhs_dilation=13, batch=9), Config(16, 2, 8, 4, 1)),
    (problem((6, 8, 7), (3, 1, 1), 8, padding=((1, 1), (0, 0), (0, 0)), **HALF), Config(7, 4, 2, 4, 1)),
    (problem((6, 7), (2, 2), 2, multiplier=5, stride=(4, 3)), Config(2, 1, 1, 4, 1)),
    # Blocks of taps, some of which reach beyond the filter.
    (problem((90,), (64,), 6, batch=9, padding=((63, 0),), **HALF), Config(8, 1, 2, 4, 2)),
    (problem((70,), (37,), 3, padding=((18, 18),), out_dtype="bfloat16"), Config(7, 4, 2, 8, 1)),
    (problem((15, 14), (15, 15), 5, batch=1, padding=7), Config(6, 1, 8, 4, 3)),
    (problem((21, 24), (3, 10), 4, padding=((4, 4), (9, 12)), stride=(1, 3), rhs_dilation=(4, 2)),
     Config(2, 1, 2, 4, 2)),
    (problem((6, 9, 8), (5, 5, 5), 3, padding=2, multiplier=2, **HALF), Config(3, 4, 2, 4, 1)),
    (problem((60, 1), (17, 1), 7, padding=((16, 0), (0, 0)), rhs_dilation=(3, 1)), Config(4, 1, 8, 4, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 4))
def test_device_code_is_exact_on_integers(p: ConvWgradProblem, config: Config) -> None:
    with seeded(1) as rng:
        emulated.check(FAMILY, p, config, int(rng.integers(2**31)))


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 4))
def test_what_is_not_finite_reaches_only_what_depends_on_it(p: ConvWgradProblem, config: Config) -> None:
    with seeded(2) as rng:
        for value in (np.nan, np.inf, np.nan):
            lhs, g = random_problems.integers(rng, p)
            in_lhs, in_g = (random_problems.place(rng, shape) for shape in (p.lhs_shape, p.g_shape))
            lhs[in_lhs] = g[in_g] = 0
            exact = float64.conv_wgrad_on_host(p, lhs, g)
            certain, possible = random_problems.reached(p, in_lhs, in_g)
            lhs[in_lhs] = g[in_g] = value
            out = result(p, config, lhs, g).astype(np.float64)
            assert not np.isfinite(out[certain]).any(), f"{value} at {in_lhs} and {in_g}"
            np.testing.assert_array_equal(out[~possible], exact[~possible], err_msg=f"{value} at {in_lhs} and {in_g}")


def test_a_thread_slides_where_the_image_is_long() -> None:
    for p, macros in (
        (problem((100,), (4,)), {"ALONG_W": 1, "OUTPUT_W": 97, "KERNEL_W": 4}),
        (problem((20, 30), (3, 3)), {"ALONG_W": 0, "OUTPUT_H": 18, "KERNEL_H": 3}),
        (
            problem((40, 30), (3, 3), rhs_dilation=(8, 1)),
            {"ALONG_W": 1, "OUTPUT_D": 24, "KERNEL_D": 3, "DILATION_D": 8},
        ),
        (problem((100,), (64,)), {"ALONG_W": 1, "OUTPUT_W": 37, "KERNEL_W": 16, "FILTER_W": 64}),
        (problem((20, 30), (15, 15)), {"ALONG_W": 0, "KERNEL_H": 3, "KERNEL_W": 15, "FILTER_H": 15}),
    ):
        made = FAMILY.macros(p, FAMILY.candidates(p, DEFAULT_CUDA)[0])
        assert macros.items() <= made.items()


def test_candidates_fill_the_machine_where_they_can() -> None:
    large = problem((16, 28, 28), (3, 3, 3), 64, batch=8, padding=1)
    for config in FAMILY.candidates(large, DEFAULT_CUDA)[:20]:
        slots = DEFAULT_CUDA.cores * FAMILY.blocks_per_sm(large, config)
        assert FAMILY.thread_blocks(large, config) * config.splits > 0.6 * slots, config
