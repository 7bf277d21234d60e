"""Forward convolutions whose kernels compute an epilogue, in the emulator."""

import dataclasses
from typing import Any

import pytest

from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem, decisive
from tests import every_kernel
from tests.every_kernel import Run
from tests.exhaustive import thinned
from tests.kernels import emulated

RUNS = list(every_kernel.conv_epilogue_runs())


@pytest.mark.parametrize("run", thinned(RUNS, 3))
def test_exact_on_integers_in_any_order_of_threads(run: Run) -> None:
    assert isinstance(run.problem, ConvEpilogueProblem)
    assert run.family.finishes(run.problem, run.config)
    for seed in range(3):
        emulated.check(run.family, run.problem, run.config, seed)


def test_which_epilogues_a_config_computes() -> None:
    """A persistent thread block loads a residual of 16 bits only."""
    persistent, other = RUNS[0], next(run for run in RUNS if run.problem.dtype == "float32")
    for run, changes, finishes in (
        (persistent, {"residual_dtype": "float16"}, True),
        (persistent, {"residual_dtype": "float32"}, False),
        (other, {"residual_dtype": "float32"}, True),
        (other, {"residual_dtype": "float64"}, False),
        (other, {"bias_dtype": "float64"}, False),
    ):
        p: Any = dataclasses.replace(run.problem, **changes)
        assert run.family.finishes(p, run.config) == finishes, (p, run.config)
    assert not other.family.finishes(decisive(other.problem), other.config)
