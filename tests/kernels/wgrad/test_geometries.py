"""Windows, strides, padding and channels of every kind, in the emulator. No GPU."""

import dataclasses
import itertools
from typing import Any

import pytest

from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import random_problems
from tests.every_kernel import Run
from tests.exhaustive import thinned
from tests.grouped import DEPTHWISE, GROUPED, LONG_SEQUENCES, NETWORKS
from tests.kernels import emulated
from tests.problems import conv, seeded

MOST_FLOPS = 4e6  # of random problems


def of_tf32() -> list[Run]:
    """Rows shorter than, equal to and longer than a tile, one to eight images in a tile, strides, ragged ends."""
    make = lambda size, channels, kernel=(3, 3), **changes: conv(  # noqa: E731
        size, kernel, channels, dtype="float32", **{"padding": None, **changes}
    )
    return [Run(tf32.FAMILY, p, tf32.Config(*config)) for p, config in (
        (make((5, 8), (4, 36)), (3, 3, 1, 64, 1, 5, 8, 3, 2)),
        (make((4, 12), (8, 8), batch=3), (3, 3, 1, 32, 2, 4, 12, 2, 2)),
        (make((9, 15), (68, 8), stride=2), (3, 3, 1, 32, 2, 3, 8, 2, 2)),
        (make((9, 23), (8, 8), (3, 2), stride=3), (3, 2, 1, 32, 1, 3, 8, 3, 1)),
        (make((9, 50), (16, 200), (1, 3), stride=(1, 4)), (1, 3, 1, 192, 2, 3, 16, 2, 2)),
        (make((4, 14), (68, 8), batch=6), (3, 3, 1, 32, 4, 4, 14, 3, 2)),
        (make((5, 7), (8, 36), batch=9), (3, 3, 1, 64, 8, 5, 7, 3, 2)),
        (make((5, 14), (8, 8), batch=9, stride=2), (3, 3, 1, 32, 8, 3, 7, 2, 2)),
        (make((5, 17), (8, 36), batch=3, rhs_dilation=(1, 2)), (3, 3, 1, 64, 8, 5, 9, 2, 2)),
        (make((7, 13), (12, 20)), (3, 3, 1, 64, 1, 4, 16, 3, 2)),
        (make((6, 9), (4, 8), (5, 5), batch=1, padding=((4, 4), (2, 2)), rhs_dilation=(2, 1)),
         (3, 3, 1, 32, 1, 6, 16, 3, 1)),
        (make((8, 9), (132, 132), (1, 1)), (1, 1, 2, 128, 1, 1, 48, 3, 2)),
        (make((9, 9), (132, 8), (1, 1), stride=2), (1, 1, 3, 32, 2, 5, 8, 3, 1)),
        (make((12, 12), (72, 96), (2, 3), batch=3, padding=((0, 1), (3, -1))), (1, 3, 1, 96, 2, 12, 12, 4, 2)),
    )]  # fmt: skip


def of_depthwise() -> list[Run]:
    few = {"batch": 1, "in_channels": 8, "out_channels": 8, "groups": 8}
    cases = [*DEPTHWISE[::3], *(dataclasses.replace(case, **few) for case in NETWORKS[:2])]
    problems = [*(case.problem() for case in cases), *LONG_SEQUENCES]
    shapes = itertools.cycle(((8, 4), (16, 2), (8, 1), (32, 1), (16, 1), (32, 4)))
    found = []
    for p in problems:
        family = depthwise.FAMILY
        legal = (
            family.with_splits(p, depthwise.Config(channels, segments, 2, 1), 2)
            for channels, segments in itertools.islice(shapes, 6)
            if channels < 32 or p.out_channels > 16
        )
        found.append(Run(family, p, next(config for config in legal if family.refusal(p, config) is None)))
    return found


def of_grouped() -> list[Run]:
    found = []
    for i, case in enumerate(list(GROUPED.values())[::4]):
        configs = grouped.FAMILY.candidates(case.problem(), DEFAULT_CUDA)
        found.append(Run(grouped.FAMILY, case.problem(), configs[7 * i % len(configs)]))
    return found


def of_gather() -> list[Run]:
    """Rows of the 7x7x3 window are runs of 21 elements, which begin at even or odd places."""
    problems = [conv((32, 32), (7, 7), (3, 64), batch=1, stride=2, padding=((pad, 3), (pad, 3))) for pad in (2, 3)]
    return [Run(gather.FAMILY, p, gather.FAMILY.candidates(p, DEFAULT_CUDA)[6 * i]) for i, p in enumerate(problems)]


@pytest.mark.parametrize("run", thinned(of_gather() + of_tf32() + of_depthwise() + of_grouped(), 12))
def test_exact_on_integers(run: Run) -> None:
    emulated.check(run.family, run.problem, run.config, seed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", random_problems.KINDS)
def test_random_problems_are_exact(kind: str) -> None:
    family: Any = random_problems.KINDS[kind].family
    with seeded(31) as rng:
        p = next(p for p in random_problems.draws(rng, kind) if p.flops < MOST_FLOPS)
        configs = family.candidates(p, DEFAULT_CUDA)
        emulated.check(family, p, configs[int(rng.integers(len(configs)))], int(rng.integers(2**31)))
