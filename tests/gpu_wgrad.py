"""What a family of weight gradients must hold to on a GPU: exactness, accuracy, determinism, NaN where it belongs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
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
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests import float64, poison, random_problems
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


def best_configs(family: Family, p: ConvWgradProblem, count: int) -> list[Any]:
    """Candidates whose device code differs, from the best on, with splits that are enough for their accuracy."""
    found: dict[Any, Any] = {}
    for config in family.candidates(p, DEFAULT_CUDA):
        if family.workspace_bytes(p, config) <= DEFAULT_WORKSPACE_LIMIT:
            found.setdefault(plan(family, p, config).source, config)
    return list(found.values())[:: max(1, len(found) // count)][:count]


def some_configs(family: Family, p: ConvWgradProblem, count: int) -> list[Any]:
    """The best, each with its own splits and with one, a few or many."""
    spread = best_configs(family, p, count)
    others = (with_splits(family, p, config, wanted) for config, wanted in zip(spread, itertools.cycle((1, 3, 16))))
    return list(dict.fromkeys([*spread, *others]))


def with_splits(family: Family, p: ConvWgradProblem, config: Any, wanted: int) -> Any:
    """The config with that many splits, or the next number that is legal: above, else below."""
    others = (dataclasses.replace(config, splits=splits) for splits in (*range(wanted, 64), *range(wanted, 0, -1)))
    return next(other for other in others if family.refusal(p, other, DEFAULT_CUDA) is None)


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


def check_not_finite(family: Family, p: ConvWgradProblem, configs: Sequence[Any]) -> None:
    """One NaN, then one infinity, in each operand: others' weights are as exact as ever."""
    rng = np.random.default_rng([SEED, 2])
    for value, _ in itertools.product((np.nan, np.inf), range(2)):
        lhs, g = random_problems.integers(rng, p)
        in_lhs, in_g = (random_problems.place(rng, shape) for shape in (p.lhs_shape, p.g_shape))
        lhs[in_lhs] = g[in_g] = 0
        exact = rounded(float64.conv_wgrad_on_host(p, lhs, g), p.out_dtype)
        certain, possible = random_problems.reached(p, in_lhs, in_g)
        lhs[in_lhs] = g[in_g] = value
        for config in configs:
            out = poison.run(plan(family, p, config), p, jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype))
            where = f"{config}, {value} at {in_lhs} and {in_g}"
            assert not np.isfinite(out[certain].astype(np.float32)).any(), where
            np.testing.assert_array_equal(out[~possible], exact[~possible], err_msg=where)
