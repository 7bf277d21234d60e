"""What a family of weight gradients must hold to on a GPU: exactness, accuracy, determinism, NaN where it belongs."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.cases import Case
from jax_splitk.kernels import Family
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import execute
from jax_splitk.runtime.plan import DevicePlan
from tests import float64, poison
from tests.problems import SEED

Run = Callable[[jax.Array, jax.Array], jax.Array]


def integers(p: ConvWgradProblem | Case, seed: int = 0, limit: int = 2) -> tuple[jax.Array, jax.Array]:
    """lhs and g, so small that every sum is exact."""
    rng = np.random.default_rng([SEED, seed])
    lhs, g = (rng.integers(-limit, limit + 1, shape, dtype=np.int8) for shape in (p.lhs_shape, p.g_shape))
    return jnp.asarray(lhs).astype(p.dtype), jnp.asarray(g).astype(p.dtype)


def normals(p: ConvWgradProblem | Case, seed: int = 0, draw: Any = jax.random.normal) -> tuple[jax.Array, jax.Array]:
    """lhs and g as `draw` draws them."""
    first, second = jax.random.split(jax.random.key((SEED + seed) % 2**31))
    return draw(first, p.lhs_shape, p.dtype), draw(second, p.g_shape, p.dtype)


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype))


def error(out: Any, exact: np.ndarray) -> float:
    """Relative to the whole result."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))


def xla(p: ConvWgradProblem) -> Run:
    return jax.jit(lambda lhs, g: conv_reference.conv_wgrad(lhs, g, p))


def plan(family: Family, p: ConvWgradProblem, config: Any) -> DevicePlan:
    made = family.plan(p, config)
    assert isinstance(made, DevicePlan)
    return made


def ours(family: Family, p: ConvWgradProblem, config: Any) -> Run:
    call = plan(family, p, config).custom_call()
    return jax.jit(lambda lhs, g: execute.call(call, p, lhs, g))


def check_exact(family: Family, p: ConvWgradProblem, configs: Iterable[Any], seed: int = 0, limit: int = 2) -> None:
    """On integers, whatever the results' memory held before."""
    lhs, g = integers(p, seed, limit)
    want = rounded(float64.conv_wgrad(p, lhs, g), p.out_dtype)
    for config in configs:
        out = poison.run(plan(family, p, config), p, lhs, g)
        np.testing.assert_array_equal(out, want, err_msg=str(config))


def check_repeats(run: Callable[..., jax.Array], *operands: jax.Array, times: int = 100) -> np.ndarray:
    """That all runs give the same, bit for bit, and what they give. Compared on the device."""
    first = run(*operands)
    same = jnp.stack([_same_bits(run(*operands), first) for _ in range(times - 1)])
    assert jnp.all(same), f"runs {np.flatnonzero(~np.asarray(same)) + 2} of {times} differ from the first"
    return np.asarray(first)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = f"uint{8 * a.dtype.itemsize}"
    return jnp.array_equal(lax.bitcast_convert_type(a, bits), lax.bitcast_convert_type(b, bits))


def check_accuracy_and_repeats(
    family: Family, p: ConvWgradProblem, configs: Iterable[Any], lhs: jax.Array, g: jax.Array
) -> None:
    """Against XLA's accuracy, and 100 runs against each other."""
    exact = float64.conv_wgrad(p, lhs, g)
    theirs = error(xla(p)(lhs, g), exact)
    for config in configs:
        out = check_repeats(ours(family, p, config), lhs, g)
        mine = error(out, exact)
        assert mine <= 2 * theirs, (config, mine, theirs)


def check_nan_in_corners(family: Family, problem: ConvWgradProblem, configs: Iterable[Any]) -> None:
    """One NaN in each input of two dimensions. A NaN in g meets every tap: padding is a product with zero."""
    (height, width), (p, q), configs = problem.input_spatial, problem.output_spatial, list(configs)
    for (h, w), (i, j) in (((0, 0), (p - 1, q - 1)), ((height - 1, width - 1), (0, 0)), ((2, width - 1), (1, q - 1))):
        lhs, g = (np.ones(shape, np.float32) for shape in (problem.lhs_shape, problem.g_shape))
        one = np.zeros_like(lhs)
        one[0, h, w, 5] = 1
        touched = float64.conv_wgrad(problem, jnp.asarray(one), jnp.asarray(g)) != 0
        touched[..., 3] = True
        lhs[0, h, w, 5] = g[0, i, j, 3] = np.nan
        operands = [jnp.asarray(a).astype(problem.dtype) for a in (lhs, g)]
        for config in configs:
            out = poison.run(plan(family, problem, config), problem, *operands)
            np.testing.assert_array_equal(np.isnan(out), touched, err_msg=str(config))
