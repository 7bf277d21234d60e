"""Convolutions whose filter is as large as its stride, without a GPU: refusals, candidates, and their kernels in the
emulator."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.conv import patch
from jax_splitk.kernels.dot.tma import Config
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.exhaustive import thinned
from tests.kernels.conv import emulated
from tests.problems import conv, seeded

OF = {"conv_fprop": patch.FPROP, "conv_dgrad": patch.DGRAD, "conv_wgrad": patch.WGRAD}
KINDS: tuple[type[Any], ...] = (ConvFpropProblem, ConvDgradProblem, ConvWgradProblem)


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> Any:
    more.setdefault("stride", kernel)
    return kind(**vars(conv(size, kernel, (channels[0], channels[1]), **more)))


HALF = {"dtype": "float16", "out_dtype": "float16"}
SHAPES = (
    ((12, 20), (4, 4), (4, 24), {}, Config(64, 64, 4)),
    ((32, 48), (16, 16), (3, 72), HALF, Config(128, 64, 4, 3, "workspace")),
    ((10, 14), (2, 2), (40, 64), {"out_dtype": "bfloat16"}, Config(64, 128, 4, 2, "cluster")),
    ((4, 6, 8), (2, 3, 2), (4, 16), {"batch": 3}, Config(192, 64, 4, 2, "workspace")),
    ((24,), (4,), (32, 136), {"batch": 5}, Config(64, 64, 4, 2, "cluster")),
    ((5, 18, 4), (1, 9, 2), (8, 8), {"out_dtype": "bfloat16"}, Config(256, 64, 5)),
)


def fitting(p: ConvProblem, config: Config) -> Config:
    """With one split where the reduction has too few blocks."""
    one = dataclasses.replace(config, splits=1, reduction="none")
    return one if OF[p.op].config_refusal(p, config) else config


PROBLEMS = [
    (problem(kind, size, kernel, *channels, **more), config)
    for (size, kernel, channels, more, config), kind in itertools.product(SHAPES, KINDS)
]
CASES = [(p, fitting(p, config)) for p, config in PROBLEMS]


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 4))
def test_exact_on_integers(p: ConvProblem, config: Config) -> None:
    emulated.check(OF[p.op], p, config)


def random_problem(rng: np.random.Generator, kind: type[Any], most: float) -> ConvProblem:
    """One that the family serves, of at most so many products."""
    while True:
        rank = int(rng.integers(1, 4))
        kernel = tuple(int(k) for k in rng.choice([1, 2, 3, 4, 5, 8, 14, 16], rank))
        rest = [0 if rng.random() < 0.7 else int(rng.integers(k)) for k in kernel]
        windows = rng.integers(1, (200, 24, 8)[rank - 1], rank)
        size = tuple(int(n) * k + more for n, k, more in zip(windows, kernel, rest, strict=True))
        channels = int(rng.integers(1, 40)), 8 * int(rng.integers(1, 20))
        types = {"dtype": str(rng.choice(["bfloat16", "float16"]))}
        types["out_dtype"] = str(rng.choice(["float32", types["dtype"]]))
        p = problem(kind, size, kernel, *channels, batch=int(rng.integers(1, 5)), **types)
        if OF[p.op].refusal(p) is None and p.flops <= most:
            return p


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_random_problems(kind: type[Any], seed: int) -> None:
    with seeded(2000 + seed) as rng:
        p = random_problem(rng, kind, 3e7)
        configs = OF[p.op].candidates(p, DEFAULT_CUDA)
        emulated.check(OF[p.op], p, configs[int(rng.integers(len(configs)))], seed)


REFUSALS = [
    ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
    ({"feature_group_count": 2}, "feature_group_count 2, batch_group_count 1; accepted: 1"),
    ({"window_strides": (2, 2)}, r"a filter of \(4, 4\) with strides \(2, 2\); accepted: strides of its size"),
    ({"lhs_dilation": (2, 1)}, r"lhs_dilation \(2, 1\); accepted: 1"),
    ({"rhs_dilation": (1, 2)}, r"rhs_dilation \(1, 2\); accepted: 1"),
    ({"batch": 0}, "accepted: no empty dimension"),
    ({"padding": ((1, 0), (0, 0))}, "accepted: (windows|one)"),
    ({"input_spatial": (12, 19), "padding": ((0, 0), (0, 1))}, "accepted: (windows|one)"),
    ({"in_channels": 3}, "4 columns of 3 channels in a filter row; accepted: a multiple of 8"),
    ({"out_channels": 12}, "12 output channels; accepted: a multiple of 8"),
    ({"kernel_spatial": (18, 4), "window_strides": (18, 4), "input_spatial": (54, 20)}, "of 1 planes and 18 rows"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "reason"), REFUSALS)
def test_refusals(kind: type[Any], change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(problem(kind, (12, 20), (4, 4), 4, 24), **change)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(OF[p.op].refusal(p))


def test_what_only_some_passes_refuse() -> None:
    rest = [problem(kind, (13, 20), (4, 4), 4, 24) for kind in KINDS]
    assert [OF[p.op].refusal(p) is None for p in rest] == [True, False, True]
    one = [problem(kind, (13, 20), (1, 1), 8, 24) for kind in KINDS]
    assert all("a filter of one tap" in str(OF[p.op].refusal(p)) for p in one)
    odd = problem(ConvFpropProblem, (13, 21), (4, 4), 2, 24)
    assert str(patch.FPROP.refusal(odd)).startswith("21 columns of 2 channels in a row of the input")


def test_candidates_are_legal() -> None:
    for p, _ in CASES:
        family = OF[p.op]
        found = family.candidates(p, DEFAULT_CUDA)
        assert all(family.refusal(p, c) is None and family.estimate(p, c, DEFAULT_CUDA) > 0 for c in found)
        assert found[0] in family.swept(found[0], found[0].splits)
        assert family.neighbours(p, found[0], DEFAULT_CUDA)
