"""What the families of forward passes and input gradients are held to on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels import Family
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, gpu_wgrad, poison
from tests.problems import SEED
from tests.random_problems import device_plan


def operands(p: ConvProblem, integers: bool, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng([SEED, seed])
    draw: Callable[..., Any] = (lambda shape: rng.integers(-2, 3, shape)) if integers else rng.standard_normal
    x, w = (jnp.asarray(draw(shape), p.dtype) for shape in p.operand_shapes)
    return x, w


def exact(p: ConvProblem, x: jax.Array, w: jax.Array) -> np.ndarray:
    return float64.ON_HOST[p.op](p, np.asarray(x, np.float64), np.asarray(w, np.float64))


def best_of_kinds(family: Family, p: ConvProblem, kind: Callable[[Any], Any], count: int) -> list[Any]:
    """The best configs by the model, of other kinds each."""
    found: dict[Any, Any] = {}
    for config in sorted(family.candidates(p, DEFAULT_CUDA), key=lambda c: family.estimate(p, c, DEFAULT_CUDA)):
        found.setdefault(kind(config), config)
    return list(found.values())[:count]


def check_integers(family: Family, p: ConvProblem, configs: Sequence[Any], seed: int = 0) -> None:
    """That they are exact, whatever the result's memory held."""
    x, w = operands(p, integers=True, seed=seed)
    want = gpu_wgrad.rounded(exact(p, x, w), p.out_dtype)
    for config in configs:
        out = poison.run(device_plan(family, p, config), p, x, w)
        np.testing.assert_array_equal(out, want, err_msg=f"{p} {config}")


def check_error_and_repeats(family: Family, p: ConvProblem, configs: Sequence[Any]) -> None:
    """That the error is at most twice XLA's, and that runs repeat."""
    x, w = operands(p, integers=False, seed=1)
    want = exact(p, x, w)
    theirs = gpu_wgrad.error(jax.jit(lambda x, w: OPERATIONS[p.op].reference(p, x, w))(x, w), want)
    for config in configs:
        call = device_plan(family, p, config).custom_call()
        run = jax.jit(lambda x, w, call=call: execute.call(call, p, x, w))
        assert gpu_wgrad.error(gpu_wgrad.check_repeats(run, x, w, times=20), want) <= 2 * theirs, config


def check_not_finite(family: Family, p: ConvProblem, config: Any, value: float) -> None:
    """That it reaches what depends on it and nothing else."""
    x, w = (np.array(a, np.float64) for a in operands(p, integers=True, seed=2))
    w[w == 0] = 1
    place = tuple(size // 2 for size in x.shape)
    x[place] = 0
    want = gpu_wgrad.rounded(exact(p, x, w), p.out_dtype)
    one = np.zeros_like(x)
    one[place] = 1
    reached = exact(p, one, np.ones_like(w)) != 0
    x[place] = value
    out = poison.run(device_plan(family, p, config), p, *(jnp.asarray(a, p.dtype) for a in (x, w)))
    assert not np.isfinite(out[reached].astype(np.float32)).any()
    np.testing.assert_array_equal(out[~reached], want[~reached])


def check_measured(p: ConvProblem) -> None:
    """That measurements choose between kernels and XLA in both passes, and no candidate fails."""
    tuned = jax_splitk.tune_problems(
        [kind(**vars(p)) for kind in (ConvFpropProblem, ConvDgradProblem)], seconds=5, again=True
    )
    for _, entry in tuned.entries:
        print(entry.choice, entry.us(entry.choice), entry.key.problem)
        assert not [m for m in entry.measurements if m.error], "candidates that failed"
    assert len(tuned) == 2
