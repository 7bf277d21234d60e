"""The regret of first choices on recorded times, by the package's estimates or by others."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.cost_model.records import Record
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Candidate

MAX_SPREAD = 0.25  # largest spread of the rounds of a time that counts in a fit


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate's time. `group`: the number of its problem and device; `best_us`: the fastest
    time of the group."""

    group: int
    problem: Problem
    target: Target
    candidate: Candidate
    us: float
    spread: float
    best_us: float


@dataclasses.dataclass(frozen=True)
class Regret:
    """How much slower first choices are than the fastest known candidate, relative."""

    mean: float
    percentile_99: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2%} / {self.percentile_99:.1%} / {self.worst:.1%} of {self.count}"


def merged(found: Iterable[Record]) -> list[Row]:
    """Times of our candidates. Records of one problem on one device are joined, with the lowest time of each
    candidate."""
    times: dict[tuple[Problem, Target], dict[Candidate, tuple[float, float]]] = {}
    for record in found:
        own = times.setdefault((record.problem, record.target), {})
        for timed in record.timed:
            if timed.us is not None and timed.candidate.family is not None:
                given = (timed.us, timed.spread)
                own[timed.candidate] = min(given, own.get(timed.candidate, given))
    rows = []
    for group, ((problem, target), own) in enumerate(times.items()):
        best = min((us for us, _ in own.values()), default=0.0)
        rows += [Row(group, problem, target, c, us, spread, best) for c, (us, spread) in own.items()]
    return rows


def estimated(rows: Sequence[Row]) -> np.ndarray:
    """Seconds that the package predicts for each row."""
    found = np.zeros(len(rows))
    of_family: dict[tuple[int, str], list[int]] = {}
    for i, row in enumerate(rows):
        of_family.setdefault((row.group, row.candidate.name), []).append(i)
    for numbers in of_family.values():
        first = rows[numbers[0]]
        assert first.candidate.family is not None
        configs = [rows[i].candidate.config for i in numbers]
        found[numbers] = first.candidate.family.estimates(first.problem, configs, first.target)
    return found


def regret(rows: Sequence[Row], seconds: np.ndarray) -> Regret:
    """The regret of the choices that have the least `seconds`, over problems with several candidates. Among choices
    with equal seconds the first one counts."""
    choices: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        choices.setdefault(row.group, []).append(i)
    several = [numbers for numbers in choices.values() if len(numbers) > 1]
    first = [rows[min(numbers, key=lambda i: seconds[i])] for numbers in several]
    lost = np.array([row.us / row.best_us - 1 for row in first])
    return Regret(float(lost.mean()), float(np.percentile(lost, 99)), float(lost.max()), len(lost))
