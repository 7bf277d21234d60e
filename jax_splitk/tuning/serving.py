"""Which kernel families can compute a problem, and their preferences without measurements."""

import functools

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Candidate


def serving(problem: Problem, target: Target) -> tuple[Family, ...]:
    """The families that can compute the problem on the target."""
    return _serving(kernels.families(problem.op), decisive(problem), target)


@functools.lru_cache(maxsize=4096)
def _serving(families: tuple[Family, ...], problem: Problem, target: Target) -> tuple[Family, ...]:
    return tuple(family for family in families if Candidate(family).refusal(problem, target) is None)


def would_serve(problem: Problem, target: Target) -> bool:
    """Whether a kernel for Hopper can compute the problem, and is likely to be faster than XLA's."""
    alone = decisive(problem)
    return target.is_hopper and any(f.why_xla_untuned(alone) is None for f in serving(alone, target))


def why_not_tuned(problem: Problem, target: Target) -> str | None:
    """Why lowering does not measure a problem that a kernel can compute: XLA is known to be as fast. None if it
    does."""
    alone = decisive(problem)
    reasons = [family.why_not_tuned(alone) for family in serving(alone, target)]
    return reasons[0] if reasons and None not in reasons else None
