"""Decisions that depend on how sure the cost models are."""

import math
from collections.abc import Sequence

from jax_splitk.kernels.base import xla
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Candidate

# Share of a family's uncertainty that counts between two of its configs: most of their errors are the same.
_WITHIN_FAMILY = 0.5
# Share of both models' uncertainty by which XLA must be faster. Of 202 random quantized products 0.5% were over 5%
# slower than XLA with this share, 1.5% with a share of 1. With 0, 266 random weight gradients lost 5.6% in the mean
# instead of 5.3%.
DOUBT = 0.15


def close(ranking: Sequence[tuple[float, Candidate]], problem: Problem, target: Target) -> list[Candidate]:
    """The candidates that may well be the fastest: few where the models are sure.

    Args:
      ranking: our candidates with their predicted seconds, the fastest first.
    """
    if not ranking:
        return []
    best_seconds, best = ranking[0]
    families = {c.name: c.family for _, c in ranking if c.family is not None}
    of = {name: family.uncertainty(problem, target) for name, family in families.items()}

    def may_win(seconds: float, candidate: Candidate) -> bool:
        own = of[candidate.name]
        apart = own * _WITHIN_FAMILY if candidate.name == best.name else math.hypot(own, of[best.name])
        return math.log(seconds / best_seconds) <= apart

    return [candidate for seconds, candidate in ranking if may_win(seconds, candidate)]


def faster_xla(
    candidate: Candidate, seconds: float, problem: Problem, target: Target, *, doubted: bool = True
) -> float | None:
    """XLA's predicted seconds, where our candidate is predicted to be slower by more than `DOUBT` times the uncertainty
    of both models, or by any amount unless `doubted`. None otherwise."""
    of_xla = xla.estimate(problem, target)
    if of_xla is None or candidate.family is None:
        return None
    doubt = math.hypot(of_xla.uncertainty, candidate.family.uncertainty(problem, target)) if doubted else 0.0
    return of_xla.seconds if math.log(seconds / of_xla.seconds) > DOUBT * doubt else None
