"""The grouped family of forward passes and input gradients, without a GPU: its device code, emulated and compiled."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_splitk.kernels.conv import grouped
from jax_splitk.kernels.conv.grouped import Config
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import cubin, emulator, float64
from tests.exhaustive import thinned
from tests.kernels.conv import emulated
from tests.problems import conv, seeded

FAMILIES = {"conv_fprop": grouped.FPROP, "conv_dgrad": grouped.DGRAD}
BOTH = (ConvFpropProblem, ConvDgradProblem)
EQUAL = ((n, n) for n in (2, 4, 8, 16, 24, 32, 64))
CHANNELS = (*EQUAL, (48, 16), (4, 12), (8, 2), (16, 48), (1, 4), (3, 1))


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> Any:
    """Channels: of the input, of the output, groups."""
    *both, groups = channels
    return kind(**vars(conv(size, kernel, (both[0], both[1]), groups=groups, **{"out_dtype": "bfloat16", **more})))


def operands(p: ConvProblem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Integers, whose sums are exact."""
    x, w = (rng.integers(-2, 3, shape).astype(_dtype(p.dtype)) for shape in p.operand_shapes)
    return x, w


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def result(p: ConvProblem, config: Config, x: np.ndarray, w: np.ndarray, seed: int = 0) -> np.ndarray:
    """The result; what nobody writes is NaN."""
    assert FAMILIES[p.op].refusal(p, config) is None, f"{p} {config}"
    out = np.empty(p.out_shape, _dtype(p.out_dtype))
    emulator.run(FAMILIES[p.op].plan(p, config), [x, w], [out], seed)
    return out


HALF = {"dtype": "float16", "out_dtype": "float32"}
CASES = [
    (problem(kind, size, kernel, *channels, **more), Config(*config))
    for size, kernel, channels, more, config in (
        ((9, 10), (3, 3), (32, 32, 8), {"padding": 1}, (32, 2, 4, 5, 1, 1, False, 3, 2)),
        ((40,), (5,), (64, 64, 16), {"padding": ((4, 0),), **HALF}, (64, 1, 1, 18, 2, 1, True, 2, 3)),
        ((8, 6), (3, 2), (128, 128, 2), {"out_dtype": "float32"}, (64, 1, 2, 4, 1, 1, False, 2, 4)),
        ((12, 13), (3, 3), (40, 40, 20), {"padding": ((2, 0), (-1, 3)), "rhs_dilation": (2, 3)},
         (16, 2, 5, 6, 1, 1, True, 4, 4)),
        ((6, 7), (2, 2), (96, 96, 4), {"padding": ((0, 0), (1, 0)), "stride": (3, 2)},
         (64, 1, 2, 3, 1, 1, False, 2, 1)),
        ((5, 9), (3, 3), (64, 64, 8), {"padding": ((2, 3), (1, 2)), "lhs_dilation": (2, 1)},
         (64, 1, 3, 9, 2, 1, False, 2, 2)),
        ((5, 4, 6), (3, 3, 2), (32, 32, 4), {"padding": 1, "stride": (2, 1, 2)}, (16, 2, 2, 3, 1, 1, True, 3, 3)),
    )
    for kind in BOTH
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 3))
def test_device_code_is_exact_on_integers(p: ConvProblem, config: Config) -> None:
    with seeded(1) as rng:
        emulated.check(FAMILIES[p.op], p, config, int(rng.integers(2**31)))


def random_problem(rng: np.random.Generator, kind: type[Any]) -> Any:
    """Small, of any geometry that the family serves."""
    while True:
        rank = int(rng.integers(1, 4))
        some = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731, B023
        each_in, each_out = CHANNELS[int(rng.integers(len(CHANNELS)))]
        multiple = 8 // math.gcd(8, each_in, each_out)
        groups = max(2, multiple * int(rng.integers(1, max(2, 80 // (multiple * max(each_in, each_out))))))
        more: dict[str, Any] = {str(rng.choice(["stride", "lhs_dilation"])): some(1, 4)} if rng.random() < 0.5 else {}
        more |= {"rhs_dilation": some(1, 4) if rng.random() < 0.3 else 1, "batch": int(rng.integers(1, 6))}
        pads = tuple(zip(some(-2, 6), some(-2, 6), strict=True))
        more |= {"dtype": str(rng.choice(["bfloat16", "float16"])), "padding": pads}
        out_dtype = str(rng.choice(["bfloat16", "float16", "float32"]))
        channels = (each_in * groups, each_out * groups, groups)
        p = problem(
            kind, some(2, (40, 14, 8)[rank - 1]), some(1, (6, 6, 4)[rank - 1]), *channels, out_dtype=out_dtype, **more
        )
        if FAMILIES[p.op].refusal(p) is None:
            return p


def random_config(rng: np.random.Generator, p: ConvProblem) -> Config:
    """Any that is legal; a candidate after 200 that were not."""
    family, draw = FAMILIES[p.op], lambda high: int(rng.integers(1, high + 1))
    for _ in range(200):
        size = 16 * max(p.window_strides)
        block, strips = int(rng.choice(grouped.BLOCKS)), int(rng.choice([1, 2, 4]))
        pixels = draw(p.batch), draw(size), draw(2 * size)
        config = Config(block, *pixels, draw(4), strips, bool(rng.integers(2)), stages=draw(4) + 1, workers=draw(6))
        if family.refusal(p, config) is None:
            return config
    found = family.candidates(p, DEFAULT_CUDA)
    return found[int(rng.integers(len(found)))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", range(8))
def test_random_problems_are_exact(kind: type[Any], seed: int) -> None:
    with seeded(2000 + seed) as rng:
        p = random_problem(rng, kind)
        emulated.check(FAMILIES[p.op], p, random_config(rng, p), int(rng.integers(2**31)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), thinned([CASES[0], CASES[7], CASES[2], CASES[11]], 3))
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Config, value: float) -> None:
    """Not other groups of the bundle, nor pixels that a tap does not meet."""
    with seeded(3) as rng:
        x, w = operands(p, rng)
    w[w == 0] = 1
    place = tuple(size // 2 for size in x.shape)
    x[place] = 0
    want = float64.ON_HOST[p.op](p, x, w)
    one = np.zeros_like(x)
    one[place] = 1
    reached = float64.ON_HOST[p.op](p, one, np.ones_like(w)) != 0
    x[place] = value
    out = result(p, config, x, w).astype(np.float64)
    assert reached.any()
    assert not np.isfinite(out[reached]).any()
    np.testing.assert_array_equal(out[~reached], want[~reached])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("change", "reason"), [
    ({"feature_group_count": 1}, "feature_group_count 1, batch_group_count 1; accepted: at least 2 feature groups"),
    ({"feature_group_count": 32}, "1 of the input and 1 of the output channels of .*; accepted: not 1 of each"),
    ({"in_channels": 320, "out_channels": 320, "feature_group_count": 2}, "160 of the output channels of a group"),
    ({"in_channels": 36, "out_channels": 36, "feature_group_count": 9}, "36 output channels; accepted: multiples of 8"),
    ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
    ({"out_dtype": "float64"}, "out_dtype float64; accepted: float32, bfloat16, float16"),
    ({"window_strides": (5, 1)}, "; accepted: one of them 1, 1 to 4"),
    ({"batch": 0}, "accepted: sizes of 1 to"),
    ({"rhs_dilation": (120, 1)}, "registers of a thread; accepted: up to 240"),
    ({"rhs_dilation": (1, 200)}, "columns of the input; accepted: up to 256"),
])  # fmt: skip
def test_refusals(kind: type[Any], change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(problem(kind, (9, 10), (3, 3), 32, 32, 8, padding=1), **change)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILIES[p.op].refusal(p))


NETWORKS = [
    problem(kind, size, (3, 3), *channels, batch=64, padding=1, stride=stride)
    for kind in BOTH
    for size, channels, stride in (
        ((56, 56), (128, 128, 32), 1),
        ((56, 56), (256, 256, 32), 2),
        ((7, 7), (1024, 1024, 32), 1),
        ((28, 28), (256, 256, 4), 2),
        ((112, 112), (48, 48, 2), 2),
    )
]


def test_candidates_are_legal_and_of_several_kinds() -> None:
    for p in [*NETWORKS, *(p for p, _ in CASES)]:
        family = FAMILIES[p.op]
        found = family.candidates(p, DEFAULT_CUDA)
        assert all(family.refusal(p, c) is None and family.estimate(p, c, DEFAULT_CUDA) > 0 for c in found), str(p)
        assert p not in NETWORKS or len({(c.in_block, c.units, c.strips, c.resident) for c in found}) >= 3, str(p)
        assert any(family.refusal(p, c) is None for c in family.neighbours(p, found[0], DEFAULT_CUDA))


@pytest.mark.parametrize("p", thinned(NETWORKS, 10))
def test_device_code_does_not_spill(p: ConvProblem) -> None:
    """Of the best by the model, and of those with the fewest registers for what they have."""
    family = FAMILIES[p.op]
    found = family.candidates(p, DEFAULT_CUDA)
    tight = sorted(found, key=lambda c: -grouped.tiling(p, c).registers * family.blocks_per_sm(p, c))
    sources = [family.source(p, config) for config in (found[0], tight[0])]
    for compiled in compiler.compile_sources(sources):
        report = cubin.reports(compiled.log)["grouped"]
        assert (report.stack_bytes, report.spill_bytes) == (0, 0)
        assert cubin.kernels(compiled.image)["grouped"].opcodes[cubin.HMMA] > 0
