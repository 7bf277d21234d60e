"""The depthwise family of forward passes and input gradients, without a GPU: its device code is emulated."""

import dataclasses
from typing import Any

import pytest

from jax_splitk.kernels.conv import depthwise
from jax_splitk.kernels.conv.depthwise import Config
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.exhaustive import thinned
from tests.kernels.conv import emulated
from tests.problems import conv, seeded

FAMILIES = {"conv_fprop": depthwise.FPROP, "conv_dgrad": depthwise.DGRAD}


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], channels: int = 4, **more: Any) -> Any:
    more.setdefault("out_dtype", more.setdefault("dtype", "float32"))
    return kind(**vars(conv(size, kernel, (channels, channels), groups=channels, **more)))


BOTH = (ConvFpropProblem, ConvDgradProblem)
CASES = [
    (problem(kind, size, kernel, **more), config)
    for size, kernel, more, config in (
        ((9, 10), (3, 3), {"padding": 1}, Config(4, 4)),
        ((9, 11), (3, 5), {"padding": ((1, 2), (0, 3)), "stride": (2, 2), "dtype": "bfloat16"}, Config(2, 2)),
        ((8, 9), (7, 7), {"padding": 3, "dtype": "float16", "out_dtype": "float32"}, Config(6, 64)),
        ((17,), (4,), {"padding": ((3, 0),)}, Config(16, 1)),
        ((5, 6, 7), (3, 3, 3), {"padding": 1, "stride": (2, 1, 3), "dtype": "bfloat16"}, Config(6, 2)),
        ((12, 9), (3, 4), {"padding": ((-1, 4), (5, -2)), "stride": (1, 2), "rhs_dilation": (2, 3)}, Config(4, 7)),
        ((6, 7), (2, 2), {"padding": ((0, 0), (1, 0)), "stride": (4, 3)}, Config(12, 1)),
        ((4, 9), (3, 3), {"padding": ((2, 3), (1, 2)), "lhs_dilation": (3, 2), "out_dtype": "bfloat16"}, Config(4, 1)),
    )
    for kind in BOTH
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 3))
def test_device_code_is_exact_on_integers(p: ConvProblem, config: Config) -> None:
    with seeded(1) as rng:
        emulated.check(FAMILIES[p.op], p, config, int(rng.integers(2**31)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_random_problems(seed: int) -> None:
    with seeded(1000 + seed) as rng:
        while True:
            rank = int(rng.integers(1, 4))
            some = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731, B023
            steps = {str(rng.choice(["stride", "lhs_dilation"])): some(1, 5)}
            pads = tuple(zip(some(-2, 8), some(-2, 8), strict=True))
            kind, dtype = BOTH[int(rng.integers(2))], str(rng.choice(["float32", "bfloat16", "float16"]))
            sizes = some(2, (40, 14, 8)[rank - 1]), some(1, 6), 2 * int(rng.integers(1, 5))
            more = {"rhs_dilation": some(1, 4) if rng.random() < 0.4 else 1, "batch": int(rng.integers(1, 3))}
            p = problem(kind, *sizes, padding=pads, dtype=dtype, **more, **steps)
            if FAMILIES[p.op].refusal(p) is None:
                break
        configs = FAMILIES[p.op].candidates(p, DEFAULT_CUDA)
        config = configs[int(rng.integers(len(configs)))]
        emulated.check(FAMILIES[p.op], p, config, int(rng.integers(2**31)))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("change", "reason"), [
    ({"out_channels": 8}, "4 input and 8 output channels in 4 groups; accepted: as many groups as"),
    ({"dtype": "float64"}, "dtype float64; accepted: float32, bfloat16, float16"),
    ({"kernel_spatial": (8, 1)}, r"a filter of \(8, 1\); accepted: sides up to 7 and 49 taps"),
    ({"window_strides": (5, 1)}, "; accepted: one of them 1, 1 to 4"),
    ({"window_strides": (2, 1), "lhs_dilation": (2, 1)}, "stride 2 of an input dilated by 2; accepted: one"),
    ({"batch": 0}, "accepted: sizes of 1 to"),
    ({"rhs_dilation": (120, 1)}, "the sums of a thread fit in no registers"),
])  # fmt: skip
def test_refusals(kind: type[Any], change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(problem(kind, (9, 10), (3, 3), padding=1), **change)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILIES[p.op].refusal(p))


def test_candidates_are_legal_and_their_neighbours_among_them() -> None:
    for p, config in CASES:
        family = FAMILIES[p.op]
        found = family.candidates(p, DEFAULT_CUDA)
        assert config in found or config.rows > 4
        assert all(family.refusal(p, c) is None and family.estimate(p, c, DEFAULT_CUDA) > 0 for c in found)
        assert all(n.columns <= 32 for n in family.neighbours(p, found[0], DEFAULT_CUDA))
    one = CASES[1][0]
    assert "accepted: multiples of 2" in str(depthwise.DGRAD.refusal(CASES[3][0], Config(3, 1)))
    assert "columns 5; accepted: 1, 2, 3" in str(depthwise.DGRAD.refusal(one, Config(5, 1)))
    assert "registers; accepted: up to 212" in str(depthwise.FPROP.refusal(CASES[4][0], Config(32, 1)))
