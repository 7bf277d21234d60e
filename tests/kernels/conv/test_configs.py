"""Special properties of some families of forward passes and input gradients: refusals, and registers."""

import dataclasses
from typing import Any

import pytest

from jax_splitk.kernels.contraction import patch
from jax_splitk.kernels.depthwise import passes as depthwise
from jax_splitk.kernels.depthwise import toeplitz
from jax_splitk.kernels.grouped import passes as grouped
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import cubin
from tests.kernels.conv.tried import DEPTHWISE, GROUPED, TOEPLITZ, Tried
from tests.problems import conv_of


@pytest.mark.parametrize(("tried", "run", "config", "reason"), [
    (TOEPLITZ, 1, toeplitz.Config(24, 1, 1, 1, 2), "channels 24; accepted: 16, 32"),
    (TOEPLITZ, 1, toeplitz.Config(16, 1, 1, 1, 2, 3), "ahead 3; accepted: 1, 2, 4"),
    (TOEPLITZ, 1, toeplitz.Config(16, 1, 1, 2, 2), "planes 2; accepted: 1"),
    (TOEPLITZ, 1, toeplitz.Config(32, 4, 12, 1, 4), "bytes of shared memory; accepted: up to 232448"),
    (TOEPLITZ, 13, toeplitz.Config(8, 1, 1, 1, 1), "step 1; accepted for filters of this height: 2, 4"),
    (TOEPLITZ, 13, toeplitz.Config(16, 1, 1, 1, 2), "channels 16; accepted: 8"),
    (TOEPLITZ, 1, toeplitz.Config(16, 1, 46, 1, 2, tall=True), "rows 46; accepted: 1 to 45"),
    (TOEPLITZ, 2, toeplitz.Config(16, 1, 1, 1, 2, tall=True), "tall lines of 5 blocks of planes; accepted: 1"),
    (DEPTHWISE, 2, depthwise.Config(32, 1), "registers; accepted: up to 212"),
    (DEPTHWISE, 8, depthwise.Config(5, 1), "columns 5; accepted: 1, 2, 3"),
    (DEPTHWISE, 9, depthwise.Config(3, 1), "accepted: multiples of 2"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_refused_configs(tried: Tried, run: int, config: Any, reason: str) -> None:
    p, _ = tried.runs[run]
    assert reason in str(tried.of(p).refusal(p, config))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"rows": 7}, "rows 7; accepted: 8"), ({"step": 4}, "step 4; accepted: 8"), ({"channels": 32}, "accepted: 8, 16"),
    ({"tall": True}, "tall lines for a filter of 31 rows; accepted: no"), ({"planes": 2}, "planes 2; accepted: 1"),
])  # fmt: skip
def test_refused_configs_of_filters_that_slide(changes: dict[str, Any], reason: str) -> None:
    p = conv_of(ConvFpropProblem, (30, 20), (31, 31), (16, 16), groups=16, padding=15)
    config = toeplitz.Config(8, 3, 8, 1, 8, 1)
    assert toeplitz.FPROP.refusal(p, config) is None
    assert reason in str(toeplitz.FPROP.refusal(p, dataclasses.replace(config, **changes)))


@pytest.mark.parametrize("kind", [ConvFpropProblem, ConvDgradProblem])
def test_no_filter_slides_over_several_planes(kind: type[Any]) -> None:
    p = conv_of(kind, (2, 20, 18), (1, 31, 17), (16, 16), groups=16, padding=((0, 0), (15, 15), (8, 8)))
    assert "registers of a thread; accepted: up to 240" in str(TOEPLITZ.of(p).refusal(p))
    assert DEPTHWISE.of(p).refusal(p) is None
    flat = conv_of(kind, (1, 20, 18), (1, 31, 17), (16, 16), groups=16, padding=((0, 0), (15, 15), (8, 8)))
    assert toeplitz.is_sliding(flat)


def test_steps_of_tall_lines_are_within_an_image() -> None:
    p = conv_of(ConvFpropProblem, (2, 30), (1, 3), (16, 16), groups=16, padding=((0, 0), (1, 1)))
    refusal = str(toeplitz.FPROP.refusal(p, toeplitz.Config(16, 1, 1, 1, 4, 1, tall=True)))
    assert refusal.startswith("step 4 of tall lines; accepted: up to an image's 2 rows")


def test_what_only_some_passes_of_patches_refuse() -> None:
    families = {ConvFpropProblem: patch.FPROP, ConvWgradProblem: patch.WGRAD}

    def refusals(size: tuple[int, int], kernel: tuple[int, int], channels: int) -> list[str | None]:
        layers = (conv_of(kind, size, kernel, (channels, 24), stride=kernel) for kind in families)
        return [families[type(p)].refusal(p) for p in layers]

    assert [refusal is None for refusal in refusals((13, 20), (4, 4), 4)] == [True, True]
    assert all("a filter of one tap" in str(refusal) for refusal in refusals((13, 20), (1, 1), 8))
    assert str(refusals((13, 21), (4, 4), 2)[0]).startswith("21 columns of 2 channels in a row of the input")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", GROUPED.families)
def test_grouped_passes_with_the_fewest_registers_do_not_spill(kind: Any) -> None:
    """Compiles layers of networks."""
    pairs = [(p, c) for p in GROUPED.networks if isinstance(p, kind) for c in GROUPED.of(p).candidates(p, DEFAULT_CUDA)]
    tight = sorted(pairs, key=lambda pair: -grouped.tiling(*pair).registers * GROUPED.of(pair[0]).blocks_per_sm(*pair))
    sources = dict.fromkeys(GROUPED.of(p).source(p, config) for p, config in tight)
    for compiled in compiler.compile_sources(list(sources)[:4]):
        (report,), (kernel,) = cubin.reports(compiled.log).values(), cubin.kernels(compiled.image).values()
        assert (report.stack_bytes, report.spill_bytes) == (0, 0)
        assert kernel.opcodes[cubin.HMMA] > 0
