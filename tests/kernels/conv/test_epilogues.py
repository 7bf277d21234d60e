"""Forward convolutions whose kernels compute an epilogue, in the emulator."""

import dataclasses

import pytest

from jax_splitk.kernels.contraction import im2col
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from tests import every_kernel
from tests.every_kernel import Run
from tests.exhaustive import thinned
from tests.kernels import emulated

RUNS = list(every_kernel.conv_epilogue_runs())


@pytest.mark.parametrize("run", thinned(RUNS, 3, lambda run: f"{run.problem.epilogue}-{run.config}"))
def test_exact_on_integers_in_any_order_of_threads(run: Run) -> None:
    assert isinstance(run.problem, ConvEpilogueProblem)
    assert im2col.FPROP.finishes(run.problem, run.config)
    for seed in range(3):
        emulated.check(im2col.FPROP, run.problem, run.config, seed)


def test_which_epilogues_a_config_computes() -> None:
    """TMA adds a residual only where it stores the result, and both have 16 bits."""
    stored_by_tma, stored_by_threads = RUNS[0], RUNS[4]
    for run, residual, finishes in (
        (stored_by_tma, "float16", True),
        (stored_by_tma, "float32", False),
        (stored_by_threads, "bfloat16", False),
        (RUNS[7], "float32", True),
        (RUNS[7], "float64", False),
    ):
        p = dataclasses.replace(run.problem, residual_dtype=residual)
        assert im2col.FPROP.finishes(p, run.config) == finishes, (p, run.config)
    assert not im2col.FPROP.finishes(dataclasses.replace(RUNS[7].problem, bias_dtype="float64"), RUNS[7].config)
    plain = RUNS[7].problem.convolution
    assert not im2col.FPROP.finishes(plain, RUNS[7].config)
