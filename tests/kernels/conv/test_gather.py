"""Forward passes with few input channels, without a GPU: refusals, candidates, and their kernel in the emulator."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.conv import gather
from jax_splitk.kernels.conv.gather import FAMILY, Config
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.exhaustive import thinned
from tests.kernels.conv import emulated
from tests.problems import conv, seeded


def problem(size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> ConvFpropProblem:
    return ConvFpropProblem(**vars(conv(size, kernel, (channels[0], channels[1]), **more)))


HALF = {"dtype": "float16", "out_dtype": "float16"}
BF16 = {"out_dtype": "bfloat16"}
CASES = [
    (problem((33, 40), (7, 7), 3, 64, stride=2, padding=3, **BF16), Config(2, 1, 64, 1, 8, 16, 2)),
    (problem((20, 24), (4, 4), 3, 96, stride=4, **HALF), Config(1, 1, 96, 2, 5, 6, 3)),
    (problem((16, 16), (3, 3), 3, 40, padding=1, batch=3), Config(1, 2, 32, 1, 8, 16, 4)),
    (problem((9, 13), (5, 3), 1, 8, padding=((2, 1), (0, 2)), **BF16), Config(1, 1, 16, 1, 4, 13, 2)),
    (problem((12, 12), (3, 3), 16, 136, padding=1, stride=2, **HALF), Config(2, 2, 256, 2, 6, 6, 2)),
    (problem((14, 15), (2, 3), 5, 24, rhs_dilation=(1, 2), **BF16), Config(1, 1, 32, 1, 8, 8, 2)),
    (problem((3, 8, 10), (3, 5, 5), 2, 72, stride=(1, 2, 2), padding=2, batch=1), Config(3, 1, 128, 1, 4, 5, 2)),
    (problem((90,), (10,), 1, 192, stride=5, **BF16), Config(1, 4, 192, 3, 1, 18, 3)),
    (problem((6, 7), (3, 3), 4, 16, padding=2, lhs_dilation=(2, 3), **HALF), Config(4, 1, 16, 1, 13, 16, 2)),
    (problem((30, 64), (16, 16), 3, 64, stride=16, padding=((1, 1), (0, 0)), **BF16), Config(1, 1, 64, 2, 2, 4, 2)),
    (problem((40, 21), (1, 1), 6, 56, **BF16), Config(2, 2, 64, 1, 1, 256, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("p", "config"), thinned(CASES, 3))
def test_exact_on_integers(p: ConvProblem, config: Config) -> None:
    emulated.check(FAMILY, p, config, change=few_blocks)


def few_blocks(plan: DevicePlan) -> DevicePlan:
    """So that a thread block has several tiles, as in large problems."""
    (launch,) = plan.launches
    x, y, z = launch.grid
    return dataclasses.replace(plan, launches=(dataclasses.replace(launch, grid=(min(x, 2), y, z)),))


def random_problem(rng: np.random.Generator, most: float) -> ConvProblem:
    """One that the family serves, of at most so many products."""
    while True:
        rank = int(rng.integers(1, 4))
        some = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731, B023
        pads = tuple(zip(some(-2, 6), some(-2, 6), strict=True))
        dilations = {"rhs_dilation": some(1, 4) if rng.random() < 0.3 else 1}
        dilations["lhs_dilation"] = some(1, 3) if rng.random() < 0.1 else 1
        types = {"dtype": str(rng.choice(["bfloat16", "float16"]))}
        types["out_dtype"] = str(rng.choice(["float32", types["dtype"]]))
        channels, batch = (int(rng.integers(1, 17)), 8 * int(rng.integers(1, 40))), int(rng.integers(1, 6))
        sizes = some(2, (300, 40, 12)[rank - 1]), some(1, (17, 9, 5)[rank - 1])
        p = problem(*sizes, *channels, batch=batch, padding=pads, stride=some(1, 5), **dilations, **types)
        if p.flops <= most and FAMILY.refusal(p) is None:
            return p


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_random_problems(seed: int) -> None:
    with seeded(3000 + seed) as rng:
        p = random_problem(rng, 3e7)
        configs = FAMILY.candidates(p, DEFAULT_CUDA)
        emulated.check(FAMILY, p, configs[int(rng.integers(len(configs)))], seed, few_blocks)


def test_a_window_does_not_see_its_neighbours() -> None:
    """Not by the fillings of its segments either: a NaN times a weight of zero would show."""
    for p, config in CASES[:3]:
        emulated.check_not_finite(FAMILY, p, config)


@pytest.mark.parametrize(("change", "reason"), [
    ({"dtype": "float32"}, "dtype float32; accepted: bfloat16, float16"),
    ({"out_dtype": "float64"}, "preferred_element_type float64; accepted"),
    ({"feature_group_count": 3}, "feature_group_count 3, batch_group_count 1; accepted: 1"),
    ({"in_channels": 17}, "17 input channels; accepted: 1 to 16"),
    ({"out_channels": 60}, "60 output channels; accepted: multiples of 8"),
    ({"batch": 0}, "0 output pixels; accepted: 1 to"),
    ({"kernel_spatial": (32, 32), "in_channels": 8}, "take too much shared memory"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(problem((40, 40), (7, 7), 3, 64, stride=2, padding=3), **change)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILY.refusal(p))


@pytest.mark.parametrize(("change", "reason"), [
    ({"consumers": 5}, "consumers 5; accepted: 1 to 4"),
    ({"tile_n": 48}, "tile_n 48; accepted: 16, 32"),
    ({"tile_p": 9}, "tile_p 9 and tile_q 16; accepted: products of 1 to 128"),
    ({"consumers": 4, "tile_n": 256}, "tile_n 256 with 4 consumers; accepted: what their registers hold"),
    ({"stages": 4, "blocks": 8, "images": 16, "tile_p": 4}, "of shared memory; accepted: at most"),
    ({"blocks": 8, "consumers": 3}, "1536 rows"),
])  # fmt: skip
def test_config_refusals(change: dict[str, Any], reason: str) -> None:
    p, config = CASES[0]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILY.config_refusal(p, dataclasses.replace(config, **change)))


def test_candidates_are_legal_and_cover_the_output() -> None:
    for p, _ in CASES:
        found = FAMILY.candidates(p, DEFAULT_CUDA)
        assert found
        assert len(set(found)) == len(found)
        for config in found:
            assert FAMILY.config_refusal(p, config) is None
            counts = gather._block_counts(gather._volume(p), config)
            assert np.prod(counts) * config.pixels >= p.batch * np.prod(p.output_spatial)
        assert any(FAMILY.config_refusal(p, c) is None for c in FAMILY.neighbours(p, found[0], DEFAULT_CUDA))
