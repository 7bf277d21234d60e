"""Forward convolutions whose kernels compute an epilogue, in the emulator."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.gather import fprop as gather
from jax_splitk.kernels.grouped import passes as grouped
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem, decisive, with_epilogue
from tests import conv_epilogues, emulator, every_kernel
from tests.every_kernel import Run
from tests.exhaustive import thinned
from tests.kernels import emulated

RUNS = list(every_kernel.conv_epilogue_runs())
FIRST = {run.family: run for run in reversed(RUNS)}
PARTS = [
    {"bias_dtype": "bfloat16"},
    {"residual_dtype": "bfloat16"},
    {"activation": "gelu", "bias_dtype": "float32", "residual_dtype": "float16"},
    {"activation": "gelu_exact", "residual_dtype": "bfloat16", "activation_last": True},
    {"activation": "silu", "bias_dtype": "float16", "residual_dtype": "bfloat16", "activation_last": True},
]


@pytest.mark.parametrize("run", thinned(RUNS, 3))
def test_exact_on_integers_in_any_order_of_threads(run: Run) -> None:
    assert isinstance(run.problem, ConvEpilogueProblem)
    assert run.family.finishes(run.problem, run.config)
    for seed in range(3):
        emulated.check(run.family, run.problem, run.config, seed)


@pytest.mark.parametrize("family", thinned(FIRST, 2))
def test_every_activation_is_accurate(family: Any) -> None:
    """Results of 16 bits are as far from the exact ones as rounding, and each part may come alone."""
    p, config = FIRST[family].problem.convolution, FIRST[family].config
    adds_residual = FIRST[family].problem.residual_dtype != "none"
    for number, parts in enumerate(PARTS):
        whole: Any = with_epilogue(p, **parts | ({} if adds_residual else {"residual_dtype": "none"}))
        rng = np.random.default_rng(number)
        operands = [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape, dtype in whole.operand_types]
        operands[1] = (operands[1] / np.sqrt(p.taps * p.group_channels[0])).astype(operands[1].dtype)
        out = np.empty(p.out_shape, jnp.dtype(p.out_dtype))
        emulator.run(family.plan(whole, config), operands, (out,))
        want = conv_epilogues.exactly(whole, *operands)
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=2**-8, atol=2**-12, err_msg=str(whole))


def test_a_group_that_is_not_finite_leaves_the_others_of_its_bundle_exact() -> None:
    """The zeros between groups make NaNs of it, which are computed anew with the epilogue."""
    run = FIRST[grouped.FPROP]
    whole: Any = dataclasses.replace(run.problem, activation="relu", activation_last=False)
    x, *rest = conv_epilogues.integers(whole, np.random.default_rng(2))
    x[0, 4, 5, 1] = 0
    want = conv_epilogues.exactly(whole, x, *rest)
    x[0, 4, 5, 1] = np.nan
    out = np.empty(whole.out_shape, jnp.dtype(whole.out_dtype))
    emulator.run(run.family.plan(whole, run.config), (x, *rest), (out,))
    reached = np.zeros(out.shape, bool)
    reached[0, 3:6, 4:7, :4] = True  # the first group's windows
    assert np.isnan(out.astype(np.float64)[reached]).all()
    np.testing.assert_array_equal(out.astype(np.float64)[~reached], want[~reached])


def test_which_epilogues_a_config_computes() -> None:
    """Some kernels load a residual of 16 bits only, to where the results will be, and those of the family grouped add
    none. A tile of the family gather may have too many sums."""
    persistent, other = RUNS[0], next(run for run in RUNS if run.problem.dtype == "float32")
    stem, groups = FIRST[gather.FPROP], FIRST[grouped.FPROP]
    wide = dataclasses.replace(stem, config=gather.Config(3, 1, 192, 1, 8, 16, 3))
    assert stem.family.refusal(stem.problem, wide.config) is None
    for run, changes, finishes in (
        (persistent, {"residual_dtype": "float16"}, True),
        (persistent, {"residual_dtype": "float32"}, False),
        (stem, {"residual_dtype": "float16"}, True),
        (stem, {"residual_dtype": "float32"}, False),
        (stem, {"residual_dtype": "float32", "out_dtype": "float32"}, True),
        (stem, {"bias_dtype": "float64"}, False),
        (wide, {}, False),
        (groups, {}, True),
        (groups, {"residual_dtype": "float16"}, False),
        (groups, {"out_dtype": "float32"}, True),
        (other, {"residual_dtype": "float32"}, True),
        (other, {"residual_dtype": "float64"}, False),
        (other, {"bias_dtype": "float64"}, False),
    ):
        p: Any = dataclasses.replace(run.problem, **changes)
        assert run.family.finishes(p, run.config) == finishes, (p, run.config)
    assert not other.family.finishes(decisive(other.problem), other.config)
