"""Checks of a family of convolutions in the emulator."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_splitk.kernels import Family
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import DevicePlan
from tests import conv_epilogues, emulator, float64


def check(
    family: Family[Any, Any],
    p: ConvProblem,
    config: Any,
    seed: int = 0,
    change: Callable[[DevicePlan], DevicePlan] = lambda plan: plan,
) -> None:
    """Results are exact on integers whose sums every dtype holds, in any order of threads and copies."""
    assert family.refusal(p, config) is None, f"{family.refusal(p, config)}: {p} {config}"
    operands = conv_epilogues.integers(p, np.random.default_rng(seed))
    want = float64.rounded(conv_epilogues.exactly(p, *operands), p.out_dtype)
    out = np.empty(p.out_shape, want.dtype)
    emulator.run(change(family.plan(p, config)), operands, (out,), seed)
    np.testing.assert_array_equal(out, want, err_msg=f"{p} {config}")


def check_not_finite(family: Family[Any, Any], p: ConvProblem, config: Any, value: float) -> None:
    """One NaN or infinity in the first operand reaches the results that depend on it; all others are exact."""
    rng = np.random.default_rng(1)
    x, y = conv_epilogues.integers(p, rng)
    y[y == 0] = 1
    place = tuple(size // 2 for size in x.shape)
    x[place] = 0
    one = np.zeros(x.shape)
    one[place] = 1
    reached = float64.ON_HOST[p.op](p, one, np.ones(y.shape)) != 0
    want = float64.rounded(conv_epilogues.exactly(p, x, y), p.out_dtype)
    x[place] = value
    out = np.empty(p.out_shape, want.dtype)
    emulator.run(family.plan(p, config), (x, y), (out,))
    assert not np.isfinite(out[reached].astype(np.float32)).any(), f"{p} {config}"
    np.testing.assert_array_equal(out[~reached], want[~reached], err_msg=f"{p} {config}")
