"""Special properties of some families of forward passes and input gradients: refusals, and registers."""

from typing import Any

import pytest

from jax_splitk.kernels.conv import depthwise, grouped, patch, toeplitz
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import cubin
from tests.kernels.conv.tried import DEPTHWISE, GROUPED, TOEPLITZ, Tried
from tests.problems import conv_of


@pytest.mark.parametrize(("tried", "run", "config", "reason"), [
    (TOEPLITZ, 1, toeplitz.Config(24, 1, 1, 1, 1, 2), "channels 24; accepted: 8, 16, 32"),
    (TOEPLITZ, 1, toeplitz.Config(8, 1, 1, 1, 1, 2, 3), "ahead 3; accepted: 1, 2, 4"),
    (TOEPLITZ, 1, toeplitz.Config(8, 1, 1, 1, 2, 2), "planes 2; accepted: 1"),
    (TOEPLITZ, 1, toeplitz.Config(32, 1, 4, 12, 1, 8), "registers of a thread block; accepted: up to 65536"),
    (TOEPLITZ, 1, toeplitz.Config(8, 1, 1, 1, 1, 1), "step 1, each 1; accepted: each 2"),
    (TOEPLITZ, 1, toeplitz.Config(8, 2, 1, 1, 1, 2, turns=2), "turns 2 of 4 warps; accepted: multiples of 8"),
    (TOEPLITZ, 1, toeplitz.Config(8, 1, 1, 46, 1, 2, tall=True), "rows 46; accepted: 1 to 45"),
    (TOEPLITZ, 2, toeplitz.Config(8, 1, 1, 1, 1, 2, tall=True), "tall lines of 5 blocks of planes; accepted: 1"),
    (TOEPLITZ, 9, toeplitz.Config(8, 1, 1, 1, 1, 8, 1, tall=True), "step 8 of tall lines; accepted: up to an"),
    (DEPTHWISE, 2, depthwise.Config(32, 1), "registers; accepted: up to 212"),
    (DEPTHWISE, 8, depthwise.Config(5, 1), "columns 5; accepted: 1, 2, 3"),
    (DEPTHWISE, 9, depthwise.Config(3, 1), "accepted: multiples of 2"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_refused_configs(tried: Tried, run: int, config: Any, reason: str) -> None:
    p, _ = tried.runs[run]
    assert reason in str(tried.of(p).refusal(p, config))


def test_what_only_some_passes_of_patches_refuse() -> None:
    families = {ConvFpropProblem: patch.FPROP, ConvDgradProblem: patch.DGRAD, ConvWgradProblem: patch.WGRAD}

    def refusals(size: tuple[int, int], kernel: tuple[int, int], channels: int) -> list[str | None]:
        layers = (conv_of(kind, size, kernel, (channels, 24), stride=kernel) for kind in families)
        return [families[type(p)].refusal(p) for p in layers]

    assert [refusal is None for refusal in refusals((13, 20), (4, 4), 4)] == [True, False, True]
    assert all("a filter of one tap" in str(refusal) for refusal in refusals((13, 20), (1, 1), 8))
    assert str(refusals((13, 21), (4, 4), 2)[0]).startswith("21 columns of 2 channels in a row of the input")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", GROUPED.families)
def test_grouped_passes_with_the_fewest_registers_do_not_spill(kind: Any) -> None:
    """On layers of networks."""
    pairs = [(p, c) for p in GROUPED.networks if isinstance(p, kind) for c in GROUPED.of(p).candidates(p, DEFAULT_CUDA)]
    tight = sorted(pairs, key=lambda pair: -grouped.tiling(*pair).registers * GROUPED.of(pair[0]).blocks_per_sm(*pair))
    sources = dict.fromkeys(GROUPED.of(p).source(p, config) for p, config in tight)
    for compiled in compiler.compile_sources(list(sources)[:4]):
        (report,), (kernel,) = cubin.reports(compiled.log).values(), cubin.kernels(compiled.image).values()
        assert (report.stack_bytes, report.spill_bytes) == (0, 0)
        assert kernel.opcodes[cubin.HMMA] > 0
