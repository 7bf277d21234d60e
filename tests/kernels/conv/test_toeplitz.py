"""The Toeplitz family of depthwise forward passes and input gradients, without a GPU: its device code is emulated."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.conv import toeplitz
from jax_splitk.kernels.conv.toeplitz import Config
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.exhaustive import thinned
from tests.kernels.conv import emulated
from tests.problems import conv, seeded

FAMILIES = {"conv_fprop": toeplitz.FPROP, "conv_dgrad": toeplitz.DGRAD}
BOTH = (ConvFpropProblem, ConvDgradProblem)


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], channels: int = 8, **more: Any) -> Any:
    """The stride is the forward pass's that is computed: an input gradient's input is dilated by it."""
    more.setdefault("out_dtype", more.setdefault("dtype", "bfloat16"))
    if kind is ConvDgradProblem and "stride" in more:
        more["lhs_dilation"] = more.pop("stride")
    return kind(**vars(conv(size, kernel, (channels, channels), groups=channels, **more)))


HALF, FLOAT = {"dtype": "float16", "out_dtype": "float16"}, {"out_dtype": "float32"}
CASES = [
    (problem(kind, size, kernel, channels, **more), Config(*config))
    for size, kernel, channels, more, config in (
        ((13, 30), (7, 7), 24, {"padding": 3, "batch": 3}, (16, 2, 4, 5, 1, 4)),
        ((9, 10), (3, 3), 8, {"padding": 1, "batch": 5, **HALF}, (8, 1, 1, 9, 1, 2)),
        ((15, 37), (7, 5), 16, {"padding": ((3, 2), (1, 4)), "stride": 2, **FLOAT}, (16, 1, 2, 4, 1, 2)),
        ((6, 7, 20), (3, 3, 3), 40, {"padding": 1, **FLOAT}, (16, 1, 3, 4, 2, 2)),
        ((70,), (5,), 24, {"padding": ((4, 0),), "batch": 5, **HALF}, (32, 2, 9, 3, 1, 2)),
        ((12, 9), (5, 3), 96, {"padding": ((-1, 4), (5, -2)), "stride": (2, 1)}, (16, 2, 2, 6, 1, 4)),
        ((11, 40), (2, 10), 8, {"padding": ((0, 1), (7, 0)), "dtype": "float16"}, (8, 2, 5, 11, 1, 4)),
        ((7, 5, 18), (2, 1, 7), 16, {"padding": ((2, 0), (0, 0), (3, 3)), "stride": (2, 1, 2)}, (8, 1, 1, 3, 2, 2)),
        ((16, 130), (1, 3), 8, {"stride": (2, 1)}, (8, 1, 16, 8, 1, 2)),
        ((4, 30), (3, 17), 8, {"padding": ((1, 1), (8, 8))}, (8, 1, 4, 2, 1, 2)),
    )
    for kind in BOTH
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 4))
def test_device_code_is_exact_on_integers(p: ConvProblem, config: Config) -> None:
    with seeded(1) as rng:
        emulated.check(FAMILIES[p.op], p, config, int(rng.integers(2**31)))


def random_problem(rng: np.random.Generator, kind: type[Any]) -> Any:
    """Small, of any geometry that the family serves."""
    while True:
        rank = int(rng.integers(1, 4))
        some = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731, B023
        size, kernel = some(2, (90, 24, 10)[rank - 1]), some(1, (12, 8, 4)[rank - 1])
        more: dict[str, Any] = {"stride": some(1, 3)} if rng.random() < 0.5 else {}
        more["padding"] = tuple(zip(some(-2, 6), some(-2, 6), strict=True))
        more["dtype"] = str(rng.choice(["bfloat16", "float16"]))
        more["out_dtype"] = str(rng.choice(["bfloat16", "float16", "float32"]))
        batch, channels = int(rng.integers(1, 6)), 8 * int(rng.integers(1, 8))
        p = problem(kind, size, kernel, channels, batch=batch, **more)
        if FAMILIES[p.op].refusal(p) is None:
            return p


def random_config(rng: np.random.Generator, p: ConvProblem) -> Config:
    """Any that is legal; a candidate after 100 that were not."""
    family, draw = FAMILIES[p.op], lambda high: int(rng.integers(1, high + 1))
    for _ in range(100):
        channels, step = int(rng.choice([8, 16, 32])), int(rng.choice([2, 4, 8]))
        config = Config(channels, draw(2), draw(16), draw(24), int(rng.choice([1, 2, 4])), step)
        if family.refusal(p, config) is None:
            return config
    found = family.candidates(p, DEFAULT_CUDA)
    return found[int(rng.integers(len(found)))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", range(8))
def test_random_problems_are_exact(kind: type[Any], seed: int) -> None:
    with seeded(3000 + seed) as rng:
        p = random_problem(rng, kind)
        emulated.check(FAMILIES[p.op], p, random_config(rng, p), int(rng.integers(2**31)))


@pytest.mark.parametrize(("p", "config"), thinned(CASES[:6], 3))
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Config) -> None:
    """Not the others of its window, whose products are with zeros."""
    emulated.check_not_finite(FAMILIES[p.op], p, config)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("change", "reason"), [
    ({"out_channels": 32}, "16 input and 32 output channels in 16 groups; accepted: as many groups as"),
    ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
    ({"out_dtype": "float64"}, "out_dtype float64; accepted: float32, bfloat16, float16"),
    ({"in_channels": 12, "out_channels": 12, "feature_group_count": 12}, "12 channels; accepted: multiples of 8"),
    ({"rhs_dilation": (2, 1)}, r"a filter by \(1, 2, 1\); accepted: by 1"),
    ({"window_strides": (3, 1)}, "accepted: "),
    ({"batch": 0}, "accepted: sizes of 1 to"),
    ({"kernel_spatial": (40, 40)}, "registers of a thread; accepted: up to 240"),
])  # fmt: skip
def test_refusals(kind: type[Any], change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(problem(kind, (50, 50), (3, 3), 16, padding=1), **change)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILIES[p.op].refusal(p))


NETWORKS = [
    problem(kind, size, kernel, channels, padding=None, **more)
    for kind in BOTH
    for size, kernel, channels, more in (
        ((56, 56), (7, 7), 96, {"batch": 64}),
        ((14, 14), (7, 7), 384, {"batch": 64, **HALF}),
        ((28, 28), (5, 5), 240, {"batch": 64, **FLOAT}),
        ((28, 28), (7, 7), 192, {"batch": 64, "stride": 2}),
        ((16, 56, 56), (3, 3, 3), 64, {"batch": 8}),
        ((4096,), (4,), 2048, {"batch": 8}),
    )
]


def test_candidates_are_legal_and_their_neighbours_near() -> None:
    for p in [*NETWORKS, *(p for p, _ in CASES)]:
        family = FAMILIES[p.op]
        found = family.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(found) <= 40, str(p)
        assert len(found) >= 10 or p not in NETWORKS, str(p)
        assert all(family.refusal(p, c) is None and family.estimate(p, c, DEFAULT_CUDA) > 0 for c in found), str(p)
        near = family.neighbours(p, found[0], DEFAULT_CUDA)
        assert found[0] not in near
        assert p not in NETWORKS or any(family.refusal(p, c) is None for c in near)


def test_configs_that_no_kernel_has_are_refused() -> None:
    p = CASES[0][0]
    assert "channels 24; accepted: 8, 16, 32" in str(toeplitz.FPROP.refusal(p, Config(24, 1, 1, 1, 1, 2)))
    assert "planes 2; accepted: 1" in str(toeplitz.FPROP.refusal(p, Config(8, 1, 1, 1, 2, 2)))
    many = "registers of a thread block; accepted: up to 65536"
    assert many in str(toeplitz.FPROP.refusal(p, Config(32, 1, 4, 13, 1, 8)))
