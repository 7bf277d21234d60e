"""The kernel of docs/add-a-kernel.md: short, exact in the emulator, and compiled without a spill."""

import re
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import example
from jax_splitk.kernels.device.wgmma_tile import WgmmaTile
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime import compiler
from tests import cubin, dots, emulator

MOST_LINES = 90  # most lines of device code, and of Python


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return example.family(tmp_path_factory.mktemp("example"))


def problem(m: int, n: int, k: int) -> DotProblem:
    return DotProblem(1, m, n, k, "bmk", "bkn", "bfloat16", "bfloat16")


def test_it_is_short() -> None:
    text = example.text()
    device = re.findall(r'write_text\("""\n(.*?)"""\)', text, re.DOTALL)
    assert len(device) == 1
    lines = device[0].count("\n"), text.count("\n") - device[0].count("\n")
    assert max(lines) <= MOST_LINES, lines


@pytest.mark.parametrize(
    ("size", "config"),
    [((136, 192, 328), WgmmaTile(128, 256, 4)), ((72, 128, 520), WgmmaTile(64, 128, 4))],
)
def test_it_is_exact(family: Any, size: tuple[int, int, int], config: WgmmaTile) -> None:
    """The cases include partial tiles, and a ring that is filled again."""
    p = problem(*size)
    assert family.refusal(p, config) is None
    operands = dots.integers(p, np.random.default_rng(7))
    exact = dots.exactly(p, *operands).astype(np.float32).astype(jnp.bfloat16)
    out = np.zeros(exact.shape, exact.dtype)
    emulator.run(family.plan(p, config), dots.as_given(p, operands), [out], seed=7)
    np.testing.assert_array_equal(out, exact)


def test_it_compiles_without_a_spill(family: Any) -> None:
    p = problem(4096, 4096, 4096)
    for config in family.candidates(p, None):
        compiled = compiler.compile_source(family.plan(p, config).source)
        assert not cubin.warnings(compiled.log, "product.cu"), compiled.log
        report = cubin.reports(compiled.log)["product"]
        assert (report.stack_bytes, report.spill_bytes) == (0, 0)
        assert cubin.kernels(compiled.image)["product"].opcodes[cubin.HGMMA] == 4 * (
            config.tile_m // 64 // config.consumers
        )


def test_its_refusals(family: Any) -> None:
    assert "multiples of 8" in family.refusal(problem(64, 64, 36))
    assert "accepted" in family.refusal(DotProblem(2, 64, 64, 64, "bmk", "bkn", "bfloat16", "bfloat16"))
