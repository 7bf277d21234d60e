"""Properties of every family of forward passes and input gradients, without a GPU: device code in the emulator,
refusals and candidates."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_splitk.problems.conv_wgrad import conv_output_spatial
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.kernels import emulated
from tests.kernels.conv.tried import FAMILIES, KINDS, Tried
from tests.problems import seeded

SEEDS = 4  # of random problems of a pass
each_family = pytest.mark.parametrize("tried", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_random_problems_are_exact(name: str, kind: type[Any], seed: int) -> None:
    tried = FAMILIES[name]
    with seeded(3000 + seed) as rng:
        p = tried.random(rng, kind)
        config = tried.config(rng, tried.of(p), p)
        emulated.check(tried.of(p), p, config, int(rng.integers(2**31)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("number", [0, pytest.param(-1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_what_is_not_finite_reaches_what_depends_on_it(name: str, kind: type[Any], number: int, value: float) -> None:
    """It does not reach other groups, pixels that no tap reads, or padded rows and columns of a block."""
    p, config = [run for run in FAMILIES[name].runs if isinstance(run[0], kind)][number]
    emulated.check_not_finite(FAMILIES[name].of(p), p, config, value)


@pytest.mark.parametrize(
    ("name", "kind", "change", "reason"),
    [(name, kind, *refused) for name, kind in KINDS for refused in FAMILIES[name].refused],
)
def test_refusals(name: str, kind: type[Any], change: dict[str, Any], reason: str) -> None:
    p = dataclasses.replace(FAMILIES[name].base(kind), **change)
    if name == "im2col":  # its output counts there
        given = (p.window_strides, p.padding, p.lhs_dilation, p.rhs_dilation)
        p = dataclasses.replace(p, output_spatial=conv_output_spatial(p.input_spatial, p.kernel_spatial, *given))
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FAMILIES[name].of(p).refusal(p))


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@each_family
def test_candidates_are_legal_and_have_neighbours(tried: Tried, part: int) -> None:
    for p in (*tried.networks, *(p for p, _ in tried.runs))[part::2]:
        family = tried.of(p)
        found = family.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(set(found)) == len(found), str(p)
        assert all(family.refusal(p, c) is None and family.estimate(p, c, DEFAULT_CUDA) > 0 for c in found), str(p)
        near = {c: family.neighbours(p, c, DEFAULT_CUDA) for c in found}
        assert all(c not in others for c, others in near.items()), str(p)
        # A config with the fewest stages and one split may have no legal neighbour.
        legal = [any(family.refusal(p, other) is None for other in others) for others in near.values()]
        assert sum(legal) >= 0.75 * len(found), str(p)


@each_family
def test_networks_layers_have_candidates_of_several_kinds(tried: Tried) -> None:
    for p in tried.networks:
        large = dataclasses.replace(p, batch=64)
        if p.taps == 1 and tried is FAMILIES["im2col"]:  # without taps to share, some pixels without any
            continue
        assert len({tried.kind(c) for c in tried.of(p).candidates(large, DEFAULT_CUDA)}) >= 2, str(p)
