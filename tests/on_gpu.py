"""Checks of a family of convolutions on a GPU: exactness, accuracy, determinism, and NaN only where it belongs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels import Family
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests import float64, poison, random_problems, tf32
from tests.problems import SEED
from tests.random_problems import device_plan as plan

Run = Callable[[jax.Array, jax.Array], jax.Array]

ON_HOST_FLOPS = 1e10


def integers(p: ConvProblem, seed: int = 0, limit: int = 2) -> tuple[jax.Array, jax.Array]:
    """Operands so small that every sum is exact."""
    rng = np.random.default_rng([SEED, seed])
    x, y = (rng.integers(-limit, limit + 1, shape, dtype=np.int8) for shape in p.operand_shapes)
    return jnp.asarray(x.astype(jnp.dtype(p.dtype))), jnp.asarray(y.astype(jnp.dtype(p.dtype)))


def normals(p: ConvProblem, seed: int = 0, draw: Any = jax.random.normal) -> tuple[jax.Array, jax.Array]:
    """Operands as `draw` draws them."""
    x, y = _drawn(jax.random.key((SEED + seed) % 2**31), draw, p.operand_shapes, p.dtype)
    return x, y


@functools.partial(jax.jit, static_argnums=(1, 2, 3))  # one program for XLA to compile, not one for each function
def _drawn(key: jax.Array, draw: Any, shapes: tuple[tuple[int, ...], ...], dtype: str) -> list[jax.Array]:
    return [draw(each, shape, dtype) for each, shape in zip(jax.random.split(key), shapes, strict=True)]


def exactly(p: ConvProblem, x: jax.Array, y: jax.Array) -> np.ndarray:
    """The result in float64. A large weight gradient is computed on the device, which compiles each tap of each
    shape."""
    if isinstance(p, ConvWgradProblem) and p.flops > ON_HOST_FLOPS:
        return float64.conv_wgrad(p, x, y)
    return float64.ON_HOST[p.op](p, np.asarray(x, np.float64), np.asarray(y, np.float64))


def error(out: Any, exact: np.ndarray) -> float:
    """The error relative to the norm of the result."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))


def xla(p: ConvProblem) -> Run:
    return jax.jit(lambda x, y: OPERATIONS[p.op].reference(p, x, y))


def ours(family: Family, p: ConvProblem, config: Any) -> Run:
    call = plan(family, p, config).custom_call()
    return jax.jit(lambda x, y: execute.call(call, p, x, y))


def best_configs(family: Family, p: ConvWgradProblem, count: int) -> list[Any]:
    """The best candidates with different device code, with enough splits for their accuracy."""
    found: dict[Any, Any] = {}
    for config in family.candidates(p, DEFAULT_CUDA):
        if family.workspace_bytes(p, config) <= DEFAULT_WORKSPACE_LIMIT:
            found.setdefault(plan(family, p, config).source, config)
    return list(found.values())[:: max(1, len(found) // count)][:count]


def some_configs(family: Family, p: ConvWgradProblem, count: int) -> list[Any]:
    """The best candidates, each with its own splits and with one, few or many."""
    spread = best_configs(family, p, count)
    others = (with_splits(family, p, config, wanted) for config, wanted in zip(spread, itertools.cycle((1, 3, 16))))
    return list(dict.fromkeys([*spread, *others]))


def with_splits(family: Family, p: ConvWgradProblem, config: Any, wanted: int) -> Any:
    """The config with that many splits, or the next legal number above; if there is none, below."""
    others = (dataclasses.replace(config, splits=splits) for splits in (*range(wanted, 64), *range(wanted, 0, -1)))
    return next(other for other in others if family.refusal(p, other, DEFAULT_CUDA) is None)


def check_exact(family: Family, p: ConvProblem, configs: Iterable[Any], seed: int = 0, limit: int = 2) -> None:
    """Results are exact on integers, whatever the results' memory held before."""
    operands = integers(p, seed, limit)
    want = float64.rounded(exactly(p, *operands), p.out_dtype)
    for config in configs:
        out = poison.run(plan(family, p, config), p, *operands)
        np.testing.assert_array_equal(out, want, err_msg=f"{p} {config}")


def check_repeats(run: Callable[..., jax.Array], *operands: jax.Array, times: int = 100) -> np.ndarray:
    """All runs give the same bits, which this returns."""
    first = run(*operands)
    same = jnp.stack([_same_bits(run(*operands), first) for _ in range(times - 1)])
    assert jnp.all(same), f"runs {np.flatnonzero(~np.asarray(same)) + 2} of {times} differ from the first"
    return np.asarray(first)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = f"uint{8 * a.dtype.itemsize}"
    return jnp.array_equal(lax.bitcast_convert_type(a, bits), lax.bitcast_convert_type(b, bits))


def check_accuracy_and_repeats(
    family: Family,
    p: ConvProblem,
    configs: Iterable[Any],
    *operands: jax.Array,
    times: int = 100,
    in_tf32: bool = False,
) -> None:
    """The accuracy is that of XLA, and `times` runs give the same bits. `in_tf32`: the family multiplies float32 in
    tf32. XLA may, but computes some passes with more bits."""
    exact = exactly(p, operands[0], operands[1])
    theirs = error(xla(p)(operands[0], operands[1]), exact)
    if in_tf32 and p.dtype == "float32":
        rounded_operands = (jnp.asarray(tf32.nearest(np.asarray(a)), jnp.float32) for a in operands[:2])
        theirs = max(theirs, error(exactly(p, *rounded_operands), exact))
    for config in configs:
        mine = error(check_repeats(ours(family, p, config), *operands, times=times), exact)
        assert mine <= 2 * theirs, (config, mine, theirs)


def check_not_finite(family: Family, p: ConvWgradProblem, configs: Sequence[Any]) -> None:
    """With one NaN, then one infinity, in each operand, weights that do not depend on it are exact."""
    rng = np.random.default_rng([SEED, 2])
    for value, _ in itertools.product((np.nan, np.inf), range(2)):
        lhs, g = random_problems.integers(rng, p)
        in_lhs, in_g = (random_problems.place(rng, shape) for shape in (p.lhs_shape, p.g_shape))
        lhs[in_lhs] = g[in_g] = 0
        exact = float64.rounded(float64.conv_wgrad_on_host(p, lhs, g), p.out_dtype)
        certain, possible = random_problems.reached(p, in_lhs, in_g)
        lhs[in_lhs] = g[in_g] = value
        for config in configs:
            out = poison.run(plan(family, p, config), p, jnp.asarray(lhs, p.dtype), jnp.asarray(g, p.dtype))
            where = f"{config}, {value} at {in_lhs} and {in_g}"
            assert not np.isfinite(out[certain].astype(np.float32)).any(), where
            np.testing.assert_array_equal(out[~possible], exact[~possible], err_msg=where)


def check_one_not_finite(family: Family, p: ConvProblem, config: Any, value: float) -> None:
    """One NaN or infinity in the first operand reaches the results that depend on it and nothing else."""
    x, w = (np.array(a, np.float64) for a in integers(p, seed=2))
    w[w == 0] = 1
    place = tuple(size // 2 for size in x.shape)
    x[place] = 0
    want = float64.rounded(float64.ON_HOST[p.op](p, x, w), p.out_dtype)
    one = np.zeros_like(x)
    one[place] = 1
    reached = float64.ON_HOST[p.op](p, one, np.ones_like(w)) != 0
    x[place] = value
    out = poison.run(plan(family, p, config), p, *(jnp.asarray(a, p.dtype) for a in (x, w)))
    assert not np.isfinite(out[reached].astype(np.float32)).any()
    np.testing.assert_array_equal(out[~reached], want[~reached])


def check_measured(problems: Sequence[Any]) -> None:
    """Measurements choose between kernels and XLA, and no candidate fails."""
    tuned = jax_splitk.tune_problems(problems, seconds=5 * len(problems), again=True)
    for _, entry in tuned.entries:
        print(entry.choice, entry.us(entry.choice), entry.key.problem)
        assert not [m for m in entry.measurements if m.error], "candidates that failed"
    assert len(tuned) == len(problems)
