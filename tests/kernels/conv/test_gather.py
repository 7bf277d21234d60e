"""Special properties of forward passes with few input channels: refused configs, and tiles that take turns."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.base.passes import forward
from jax_splitk.kernels.gather import fprop as gather
from jax_splitk.kernels.gather.fprop import FPROP
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import emulator
from tests.exhaustive import thinned
from tests.kernels import emulated
from tests.kernels.conv.tried import FLOAT, GATHER
from tests.problems import conv_of


def few_blocks(plan: DevicePlan) -> DevicePlan:
    """The plan with few thread blocks, so that each has several tiles, as in large problems."""
    (launch,) = plan.launches
    x, y, z = launch.grid
    return dataclasses.replace(plan, launches=(dataclasses.replace(launch, grid=(min(x, 2), y, z)),))


@pytest.mark.parametrize(("p", "config"), thinned(GATHER.runs, 10))
def test_tiles_that_take_turns_are_exact(p: Any, config: gather.Config) -> None:
    emulated.check(GATHER.of(p), p, config, change=few_blocks)


@pytest.mark.parametrize(("change", "reason"), [
    ({"consumers": 1}, "consumers 1; accepted: 2 to 4"),
    ({"tile_n": 48}, "tile_n 48; accepted: 16, 32"),
    ({"tile_p": 9}, "tile_p 9 and tile_q 16; accepted: products of 1 to 128"),
    ({"consumers": 4, "tile_n": 256}, "tile_n 256 with 4 consumers; accepted: tiles that fit in their registers"),
    ({"stages": 4, "blocks": 8, "images": 16, "tile_p": 4}, "of shared memory; accepted: at most"),
    ({"blocks": 8, "consumers": 3}, "1536 rows"),
])  # fmt: skip
def test_config_refusals(change: dict[str, Any], reason: str) -> None:
    p, config = GATHER.runs[0]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(FPROP.config_refusal(p, dataclasses.replace(config, **change)))


def test_coordinates_of_the_pass_itself_are_checked() -> None:
    """Not those of its transposed pass, whose strides are 1."""
    p = conv_of(ConvFpropProblem, (40, 40), (7, 7), (3, 64), stride=(2**21, 1), padding=3)
    assert str(FPROP.refusal(p)).startswith("padded input of up to")


@pytest.mark.parametrize("channels", [16, 20])
def test_loads_of_float32_windows_meet_no_bank_conflicts(channels: int) -> None:
    """A pixel's pitch is a multiple of 32 bytes, and no power of two."""
    p = conv_of(ConvFpropProblem, (9, 16), (3, 3), (channels, 16), padding=1, **FLOAT)
    operands, accesses = [np.ones(shape, np.float32) for shape in p.operand_shapes], list[emulator.Access]()
    plan = FPROP.plan(p, gather.Config(4, 1, 16, 1, 9, 16, 3))
    emulator.run(plan, operands, [np.zeros(p.out_shape, np.float32)], accesses=accesses)
    loads = [access for access in accesses if access.function == "load_two"]
    assert loads and all(access.paid == access.ideal for access in loads), loads


def test_candidates_cover_the_output() -> None:
    for p, _ in GATHER.runs:
        for config in GATHER.of(p).candidates(p, DEFAULT_CUDA):
            counts = config.block_counts(gather._volume(p))
            assert np.prod(counts) * config.pixels >= p.batch * np.prod(forward(p).output_spatial)
