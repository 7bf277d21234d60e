"""Depthwise forward passes and input gradients on a GPU."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, gpu_wgrad, poison
from tests.kernels.conv.test_depthwise import BOTH, CASES, FAMILIES, problem
from tests.problems import SEED

pytestmark = pytest.mark.gpu

HALF = {"dtype": "bfloat16"}
NETWORKS = [
    problem(kind, size, kernel, channels, batch=2, **more)
    for kind in BOTH
    for size, kernel, channels, more in (
        ((56, 56), (7, 7), 96, {"padding": 3, **HALF}),
        ((14, 14), (7, 7), 384, {"padding": 3, "dtype": "float16"}),
        ((56, 57), (3, 3), 144, {"padding": 1, "stride": 2, **HALF}),
        ((28, 28), (5, 5), 240, {"padding": 2, "stride": 2, "dtype": "bfloat16", "out_dtype": "float32"}),
        ((1000,), (4,), 512, {"padding": ((3, 0),), **HALF}),
        ((8, 28, 28), (3, 3, 3), 64, {"padding": 1, "dtype": "float32"}),
    )
]  # fmt: skip


def configs(p: ConvProblem, count: int) -> list[Any]:
    """The best by the model, of other columns each."""
    family, found = FAMILIES[p.op], {}
    for config in sorted(family.candidates(p, DEFAULT_CUDA), key=lambda c: family.estimate(p, c, DEFAULT_CUDA)):
        found.setdefault(config.columns, config)
    return list(found.values())[:count]


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in NETWORKS for config in configs(p, 2))]
    return {FAMILIES[p.op].source(p, config) for p, config in pairs}


def operands(p: ConvProblem, integers: bool, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng([SEED, seed])
    draw: Callable[..., Any] = (lambda shape: rng.integers(-2, 3, shape)) if integers else rng.standard_normal
    x, w = (jnp.asarray(draw(shape), p.dtype) for shape in p.operand_shapes)
    return x, w


def exact(p: ConvProblem, x: jax.Array, w: jax.Array) -> np.ndarray:
    return float64.ON_HOST[p.op](p, np.asarray(x, np.float64), np.asarray(w, np.float64))


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in NETWORKS)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    x, w = operands(p, integers=True)
    want = gpu_wgrad.rounded(exact(p, x, w), p.out_dtype)
    for config in [given] if given else configs(p, 2):
        out = poison.run(FAMILIES[p.op].plan(p, config), p, x, w)
        np.testing.assert_array_equal(out, want, err_msg=str(config))


@pytest.mark.parametrize("p", NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    x, w = operands(p, integers=False, seed=1)
    want = exact(p, x, w)
    theirs = gpu_wgrad.error(jax.jit(lambda x, w: OPERATIONS[p.op].reference(p, x, w))(x, w), want)
    for config in configs(p, 2):
        call = FAMILIES[p.op].plan(p, config).custom_call()
        run = jax.jit(lambda x, w, call=call: execute.call(call, p, x, w))
        assert gpu_wgrad.error(gpu_wgrad.check_repeats(run, x, w, times=20), want) <= 2 * theirs, config


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), CASES[:4], ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    x, w = (np.array(a, np.float64) for a in operands(p, integers=True, seed=2))
    w[w == 0] = 1
    place = tuple(size // 2 for size in x.shape)
    x[place] = 0
    want = gpu_wgrad.rounded(exact(p, x, w), p.out_dtype)
    one = np.zeros_like(x)
    one[place] = 1
    reached = exact(p, one, np.ones_like(w)) != 0
    x[place] = value
    out = poison.run(FAMILIES[p.op].plan(p, config), p, *(jnp.asarray(a, p.dtype) for a in (x, w)))
    assert not np.isfinite(out[reached].astype(np.float32)).any()
    np.testing.assert_array_equal(out[~reached], want[~reached])


def test_a_measurement_chooses_between_it_and_xla() -> None:
    p = problem(ConvFpropProblem, (56, 56), (3, 3), 96, batch=16, padding=1, **HALF)
    tuned = jax_splitk.tune_problems([p, ConvDgradProblem(**vars(p))], seconds=5, again=True)
    for _, entry in tuned.entries:
        print(entry.choice, entry.us(entry.choice), entry.key.problem)
        assert not [m for m in entry.measurements if m.error], "candidates that failed"
    assert len(tuned) == 2
