"""Decisions that depend on how sure the cost models are."""

import functools
import math
from collections.abc import Sequence

from jax_splitk.kernels.base import cost_model, xla
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.requirements import installed, numbers
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Candidate

# Share of a family's uncertainty that counts between two of its configs: most of their errors are the same.
_WITHIN_FAMILY = 0.5
# Share of both models' uncertainty by which XLA must be faster. Of 202 random quantized products 0.5% were over 5%
# slower than XLA with this share, 1.5% with a share of 1. With 0, 266 random weight gradients lost 5.6% in the mean
# instead of 5.3%.
DOUBT = 0.15
# What the best of our configs by the model is expected to lose against the fastest one, relative to the family's
# uncertainty, which is 13% in the mean. Problems of networks that no fit has seen lose 5 to 11%, those of a fit's folds
# that it has not seen 3%.
_LOSS_WITHIN = 0.4
_LOSS_TO_UNKNOWN_XLA = 0.03
_LOSS_OF_RULE = 0.2  # where XLA is chosen without measurement, whatever the models say
# XLA is surely far slower if it would take `_FAR` times our time were its estimate `_FAR_DEVIATIONS` standard
# deviations too high. That holds for 1,688 of 3,328 recorded problems, most of which the fit has seen, and XLA took at
# least 1.4 times our time for each; of 117 others it holds for 72, and XLA took at least 1.5 times our time.
_FAR_DEVIATIONS, _FAR = 2.5, 1.3
_USUAL_TIMES_FLOOR = 2.5  # of our kernels, by the rates of arithmetic and memory
_FITTED_JAXLIB = (0, 11)  # the latest release whose XLA the estimates were compared with


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


def far_slower_xla(seconds: float, problem: Problem, target: Target) -> float | None:
    """XLA's predicted seconds, where XLA is far slower than a kernel that takes `seconds`. None otherwise, and for GPUs
    and releases of XLA whose times no estimate was compared with."""
    if not cost_model.has_rates(target) or _jaxlib() > _FITTED_JAXLIB:
        return None
    of_xla = xla.estimate(problem, target)
    if of_xla is None or not xla.is_fitted(problem):
        return None
    return of_xla.seconds if of_xla.seconds >= _FAR * math.exp(_FAR_DEVIATIONS * of_xla.uncertainty) * seconds else None


def may_be_near_xla(problem: Problem, target: Target) -> bool:
    """Whether XLA may turn out not to be far slower than ours, whose times are not known yet."""
    seconds = _USUAL_TIMES_FLOOR * xla.features(problem, target).floor if problem.flops else math.inf
    return far_slower_xla(seconds, problem, target) is None


@functools.cache
def _jaxlib() -> tuple[float, ...]:
    """The major and minor version of jaxlib; infinite if it has no metadata."""
    version = installed("jaxlib")
    return (math.inf,) if version is None else numbers(version)[:2]


def expected_loss(candidate: Candidate, seconds: float, problem: Problem, target: Target) -> float:
    """How much slower than the fastest a decision without measurement is expected to be: 0.05 for 5%.

    Args:
      candidate: the best of our candidates by the model, with its predicted seconds.
    """
    if candidate.family is None:
        return 0.0
    if candidate.family.why_xla_untuned(problem) is not None:
        return _LOSS_OF_RULE
    own = candidate.family.uncertainty(problem, target)
    of_xla = xla.estimate(problem, target)
    if of_xla is None:
        return _LOSS_WITHIN * own + _LOSS_TO_UNKNOWN_XLA
    # The logarithm of the ratio is normally distributed: this is the mean of its part below zero.
    spread, apart = math.hypot(own, of_xla.uncertainty), abs(math.log(of_xla.seconds / seconds))
    deviations = apart / spread
    density = math.exp(-(deviations**2) / 2) / math.sqrt(2 * math.pi)
    return _LOSS_WITHIN * own + spread * density - apart * math.erfc(deviations / math.sqrt(2)) / 2
