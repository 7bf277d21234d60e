"""Every CUDA family on 500 random problems, other ones in each run: exactness, and the spread of what is not finite."""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import kernels
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from tests import float64, poison, random_problems
from tests.problems import seeded

pytestmark = pytest.mark.gpu

MIXTURES = 20
LEAST = 60  # problems of each family
THREADS = 8  # XLA compiles what surrounds the kernels


@dataclasses.dataclass(frozen=True)
class Run:
    """One problem by one family."""

    problem: ConvWgradProblem
    family: kernels.Family
    config: Any
    seed: int

    def __str__(self) -> str:
        return f"{self.problem!r}\n  {self.family.name} {self.config} inputs of seed {self.seed}"

    def __call__(self, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
        plan = random_problems.device_plan(self.family, self.problem, self.config)
        inputs = (jnp.asarray(a.astype(jnp.dtype(self.problem.dtype))) for a in (lhs, g))
        return poison.run(plan, self.problem, *inputs)


@functools.cache
def drawn() -> tuple[set[compiler.Source], list[list[Run]]]:
    """Device code, and the runs in groups of 25 problems: the same in every process of a run of the tests."""
    with seeded(51) as rng:
        configs = random_problems.Configs(rng)
        problems = random_problems.problems(rng, MIXTURES)
        runs = [
            Run(p, family, configs.draw(family, p), seed=number)
            for number, p in enumerate(problems)
            for family in random_problems.FAMILIES
            if family.refusal(p, None, random_problems.TARGET) is None
        ]
    served = collections.Counter(run.family.name for run in runs)
    print(f"{len(problems)} problems, {len(configs.sources)} sources, {dict(served)}")
    assert len(problems) == 500
    assert all(served[family.name] >= LEAST for family in random_problems.FAMILIES), served
    size = len(problems) // MIXTURES
    return configs.sources, [[run for run in runs if run.seed // size == number] for number in range(MIXTURES)]


def device_code() -> set[compiler.Source]:
    return drawn()[0]


def check(runs: Iterable[Run], failure: Callable[[Run], str | None]) -> None:
    """Runs side by side; reports all that fail."""

    def guarded(run: Run) -> str | None:
        try:
            found = failure(run)
        except Exception as error:  # one failure must not hide the others
            found = f"{type(error).__name__}: {error}"
        return found and f"{run}\n  {found}"

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        failures = [text for text in pool.map(guarded, runs) if text]
    assert not failures, f"{len(failures)} failed\n" + "\n".join(failures[:8])


def difference(out: np.ndarray, expected: np.ndarray) -> str | None:
    """Where `out` differs from `expected` (float64) rounded to its dtype."""
    rounded = expected.astype(np.float32).astype(out.dtype).astype(np.float32)
    found = out.astype(np.float32)
    wrong = (found != rounded) & ~(np.isnan(found) & np.isnan(rounded))
    if not wrong.any():
        return None
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size} wrong ({np.isnan(found[wrong]).sum()} NaN), "
        f"at {first} {found[first]} instead of {rounded[first]}"
    )


def exactness(run: Run) -> str | None:
    lhs, g = random_problems.integers(np.random.default_rng(run.seed), run.problem)
    return difference(run(lhs, g), float64.conv_wgrad_on_host(run.problem, lhs, g))


def locality(run: Run) -> str | None:
    """What is wrong with a run that has one NaN in each input, or one infinity."""
    rng, p, value = np.random.default_rng(run.seed), run.problem, (np.nan, np.inf)[run.seed % 2]
    lhs, g = random_problems.integers(rng, p)
    in_lhs, in_g = (random_problems.place(rng, shape) for shape in (p.lhs_shape, p.g_shape))
    expected = float64.conv_wgrad_on_host(p, lhs, g)
    certain, possible = random_problems.reached(p, in_lhs, in_g)
    expected[certain] = np.nan
    lhs[in_lhs] = g[in_g] = value
    out = run(lhs, g)
    out = np.where(np.isfinite(out.astype(np.float32)), out, np.full_like(out, np.nan))
    expected[possible & np.isnan(out.astype(np.float32))] = np.nan
    found = difference(out, expected)
    return found and f"{value} in lhs at {in_lhs}, in g at {in_g}: {found}"


@pytest.mark.parametrize("number", range(MIXTURES))
def test_random_problems_are_exact(number: int) -> None:
    with seeded(51):
        check(drawn()[1][number], exactness)


def test_what_is_not_finite_reaches_what_depends_on_it_and_nothing_else() -> None:
    """Runs every ninth problem; all kinds take their turns."""
    with seeded(51):
        check((run for runs in drawn()[1] for run in runs if run.seed % 9 == 0), locality)
