"""Sweeps: the time of a problem against the number of splits, for a few configs of the kernels that serve it, with
XLA's time and the cost model's first choice in the same run.

People find a number of splits by hand in this way. The tuner finds it with fewer measurements; a sweep shows why.
"""

import dataclasses
import math
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_splitk import kernels
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import searches
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Measurement
from jax_splitk.tuning.key import key_for, problem_as_dict
from jax_splitk.tuning.measure import Bench, Contestant, usual_settings
from jax_splitk.tuning.options import current
from jax_splitk.tuning.search import ranked

BATCH = 16  # candidates that are loaded, and timed in turns, at a time
ROUNDS = 5

# Called with the number of candidates that were timed, and the number of all.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Point:
    """The time of one candidate: microseconds of a call; None if it failed (`error`).

    Attributes:
      spread: how far apart the rounds are, relative to the time.
      predicted_us: the cost model's prediction.
    """

    candidate: Candidate
    us: float | None
    spread: float
    predicted_us: float
    workspace_bytes: int
    error: str | None = None

    @property
    def splits(self) -> int:
        """The number of splits; 1 for a config that has no such field."""
        return getattr(self.candidate.config, "splits", 1)

    @property
    def variant(self) -> str:
        """The config without its number of splits: the points of one variant form a line."""
        fields = dataclasses.asdict(self.candidate.config)
        return " ".join([self.candidate.name, *(f"{name}={v}" for name, v in fields.items() if name != "splits")])

    def as_dict(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("us", "spread", "predicted_us", "workspace_bytes", "error")}
        return {"splits": self.splits, **self.candidate.as_dict(), **named}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The measurements of a sweep or a race.

    Attributes:
      points: ascending by splits in a sweep; in the order of the cost model in a race.
      model: the cost model's first choice, whatever its number of splits.
      source: "device" (CUDA events) or "wall".
    """

    problem: Problem
    target: Target
    points: tuple[Point, ...]
    model: Point
    xla_us: float
    source: str

    @property
    def best(self) -> dict[int, Point]:
        """The fastest point for each number of splits; none if all of a number failed."""
        timed = [point for point in self.points if point.us is not None]
        return {p.splits: p for p in sorted(timed, key=lambda p: (p.splits, -(p.us or 0.0)))}

    @property
    def fastest(self) -> Point | None:
        return min(self.best.values(), key=lambda point: point.us or math.inf, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "problem": problem_as_dict(self.problem),
            "target": dataclasses.asdict(self.target),
            **{"source": self.source, "xla_us": self.xla_us, "model": self.model.as_dict()},
            "points": [point.as_dict() for point in self.points],
        }


def candidates(
    problem: Problem, target: Target, splits: Sequence[int], variants: int, only: Mapping[str, str] | None = None
) -> list[Candidate]:
    """The legal candidates of a sweep, ascending by splits.

    They are all numbers of splits of `variants` configs: those that the cost model predicts to be the fastest with any
    of the numbers.

    Args:
      only: fields of configs, and the text of the value that they must have.

    Raises:
      ValueError: there is none; the message says why.
    """
    legal: dict[Any, list[tuple[float, Candidate]]] = {}
    refusals = []
    for family in kernels.families(problem.op, target.platform):
        if (reason := family.refusal(problem, None, target)) is not None:
            refusals.append(f"{family.name}: {reason}")
            continue
        known = family.candidates(problem, target)
        found = dict.fromkeys(c for config in known for s in splits for c in family.swept(config, s))
        for config in found:
            fields = dataclasses.asdict(config)
            if any(str(fields.get(name)) != value for name, value in (only or {}).items()):
                continue
            candidate = Candidate(family, config)
            fits = candidate.refusal(problem, target) is None and (
                candidate.workspace_bytes(problem) <= current().workspace_limit
            )
            if fits:
                # `reduction` makes no variant: a single split needs another one than several splits.
                kept = tuple(fields[name] for name in fields if name not in ("splits", "reduction"))
                legal.setdefault((family, kept), []).append((family.estimate(problem, config, target), candidate))
    if not legal:
        asked = " with " + ", ".join(f"{name}={value}" for name, value in only.items()) if only else ""
        reason = "; ".join(refusals) or f"no config{asked} is legal for splits {min(splits)} to {max(splits)}"
        raise ValueError(f"{problem}: {reason}")
    best = sorted(legal.values(), key=lambda those: min(seconds for seconds, _ in those))[:variants]
    return sorted((candidate for those in best for _, candidate in those), key=lambda c: c.config.splits)


def sweep(
    problem: Problem,
    splits: Sequence[int],
    variants: int = 3,
    only: Mapping[str, str] | None = None,
    progress: Progress = lambda done, of: None,
) -> Sweep:
    """Times the candidates on the local device, in turns with XLA and with the cost model's first choice.

    Args:
      splits: numbers of splits; those that no config can have are left out.
      variants, only: see `candidates`.

    Raises:
      ValueError: no kernel serves the problem with any of them.
      RuntimeError: XLA itself, or the cost model's first choice, fails.
    """
    target = target_for(local_platform())
    wanted = candidates(problem, target, splits, variants, only)
    (first, *_) = ranked(key_for(problem, target), current().workspace_limit) or wanted
    found = _measured(problem, target, wanted, first, progress)
    return dataclasses.replace(found, points=tuple(sorted(found.points, key=lambda point: point.splits)))


def race(problem: Problem, configs: int, progress: Progress = lambda done, of: None) -> Sweep:
    """Times the `configs` that the cost model puts first on the local device, in turns with XLA.

    Raises:
      ValueError: no kernel serves the problem; says why.
      RuntimeError: XLA itself, or the cost model's first choice, fails.
    """
    target = target_for(local_platform())
    wanted = ranked(key_for(problem, target), current().workspace_limit)[:configs]
    if not wanted:
        refusals = ((f.name, f.refusal(problem, None, target)) for f in kernels.families(problem.op, target.platform))
        why = "; ".join(f"{name}: {reason}" for name, reason in refusals if reason is not None)
        raise ValueError(f"{problem}: {why or f'there is no kernel for {target.platform}'}")
    return _measured(problem, target, wanted, wanted[0], progress)


def _measured(
    problem: Problem, target: Target, wanted: Sequence[Candidate], first: Candidate, progress: Progress
) -> Sweep:
    """The times of `wanted`, of XLA and of `first`, the cost model's choice, which need not be in `wanted`."""
    with searches.state.turn, usual_settings(), jax.default_device(jax.local_devices()[0]):
        bench = Bench(problem, target.platform, threading.Event())
        held, failures = bench.prepare([XLA, first])
        _require_working(problem, failures)
        points: list[Point] = []
        always: list[tuple[float, ...]] = []
        on_device = True
        for start in range(0, len(wanted), BATCH):
            batch = [candidate for candidate in wanted[start : start + BATCH] if candidate != first]
            joined, failed = bench.prepare(batch)
            on_device = _time(bench, [*held, *joined]) and on_device
            _require_working(problem, held)
            always.append(tuple(contestant.us for contestant in held))
            points += [_point(problem, target, c.candidate, c) for c in joined]
            points += [_point(problem, target, m.candidate, None, m.error) for m in failed]
            progress(min(start + BATCH, len(wanted)), len(wanted))
    xla_us, model_us = (statistics.median(times) for times in zip(*always, strict=True))
    model = dataclasses.replace(_point(problem, target, first, held[1]), us=model_us)
    points[:0] = [model] if first in wanted else []
    return Sweep(problem, target, tuple(points), model, xla_us, "device" if on_device else "wall")


def _time(bench: Bench, contestants: Sequence[Contestant]) -> bool:
    """Times the contestants; returns whether the device did."""
    for contestant in contestants:
        contestant.times, contestant.device_times = [], []
    bench.time(contestants, ROUNDS, math.inf)
    working = [contestant for contestant in contestants if contestant.error is None]
    return bench.time_on_device(working)


def _require_working(problem: Problem, those: Sequence[Contestant | Measurement]) -> None:
    """Raises RuntimeError if a measurement that all others are compared with has failed."""
    for failed in (one for one in those if one.error is not None):
        raise RuntimeError(f"{problem}: {failed.candidate} failed: {failed.error}")


def _point(
    problem: Problem, target: Target, candidate: Candidate, timed: Contestant | None, error: str | None = None
) -> Point:
    if candidate.family is None:
        raise TypeError("XLA's operation has no splits")
    predicted = candidate.family.estimate(problem, candidate.config, target) * 1e6
    workspace = candidate.workspace_bytes(problem)
    if timed is None or timed.error is not None:
        return Point(candidate, None, 0.0, predicted, workspace, error if timed is None else timed.error)
    return Point(candidate, timed.us, timed.spread, predicted, workspace)
