"""Fits the constants of the cost models to what sweeps measured, and writes them as the package's data. See README.md
of benchmarks.

python -m benchmarks.cost_model.fit SWEEP.jsonl [MORE.jsonl ...] [--write]

Times are compared by their logarithms, robustly, and so is what the family's first choice of each problem loses, as if
candidates of nearly equal estimates were chosen by lot. Constants keep near what they were where no time depends on
them. Least squares end in the nearest minimum, so the search begins at several places.
A fifth of the problems is held out: by these the models are judged, before and after.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from benchmarks.cost_model import constants, records, xla_fit
from benchmarks.cost_model.records import Record
from benchmarks.report import markdown
from jax_splitk import kernels
from jax_splitk.kernels import Family, catalogue, cost_model, xla
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target

HELD_OUT = 0.2
NOISE = 0.05  # of logarithms of times; what is farther off counts less and less
WIDTH = 0.4  # by which the logarithm of a constant usually changes
MEMORY_WIDTH = 0.05  # of the rate of device memory, which copies tell
LEAST_RECORDS = 8  # problems of a family; with fewer its constants stay
MAX_TIMES = 4000  # of a family, the rest is passed over
EVALUATIONS = 25
STARTS = 6  # the first one is what the constants were
CHOICE_WEIGHT = 3.0  # of a problem's lost time, against the logarithms of its times
CHOICE_WIDTH = 0.04  # by which the logarithms of equal candidates' estimates may differ
MOST_LOST = 1.0  # what a choice loses counts up to this, relative: beyond are times that something disturbed
UNTESTED = 0.15  # the least uncertainty where nothing was held out
MAX_SPREAD = 0.25  # of the rounds of a time that counts


@dataclasses.dataclass(frozen=True)
class Time:
    """A family's candidate for a problem; `best_us`: of all candidates."""

    problem: Problem
    target: Target
    config: Any
    us: float
    best_us: float

    @property
    def weight(self) -> float:
        """Only the fast ones need be told apart."""
        return self.best_us / self.us


def times_of(found: Iterable[Record], family: Family) -> list[Time]:
    """What was measured of a family."""
    every = []
    for record in found:
        us = record.times()
        steady = {t.candidate for t in record.timed if t.spread <= MAX_SPREAD}
        own = [c for c in us if c.family is family and c in steady]
        best = min(us.values(), default=0.0)
        every += [Time(record.problem, record.target, c.config, us[c], best) for c in own]
    return every


def _owner(target: Target) -> Target:
    """The device whose file a target takes its constants from."""
    return target if cost_model.memory_share(target.platform, target.device_kind) is None else DEFAULT_CUDA


def errors(family: Family, times: Sequence[Time]) -> np.ndarray:
    """Logarithms of estimates over times."""
    return np.array([math.log(family.estimate(t.problem, t.config, t.target) * 1e6 / t.us) for t in times])


def uncertainties(family: Family, times: Sequence[Time], least: float) -> dict[str, float]:
    """By class of problems: the root mean square of the errors, the fast candidates' for the most part."""
    names = [xla.class_of(t.problem) for t in times]
    found = xla_fit.uncertainties(names, errors(family, times), np.array([t.weight for t in times]))
    return {name: max(least, value) for name, value in found.items()}


def _by_problem(times: Sequence[Time]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each problem with several times: their numbers, and what each loses against the fastest, relative."""
    found: dict[Problem, list[int]] = {}
    for i, time in enumerate(times):
        found.setdefault(time.problem, []).append(i)
    us = np.array([time.us for time in times])
    several = [np.array(of) for of in found.values() if len(of) > 1]
    return [(of, np.minimum(us[of] / us[of].min() - 1, MOST_LOST)) for of in several]


def _lost(estimates: np.ndarray, lost: np.ndarray) -> float:
    """By a choice among candidates of such logarithms of estimates, those within `CHOICE_WIDTH` by lot."""
    chance = np.exp((estimates.min() - estimates) / CHOICE_WIDTH)
    return float(chance @ lost / chance.sum())


def fit(family: Family, times: Sequence[Time], seed: int = 0) -> Any:
    """The family's constants."""
    costs = family.costs(_owner(times[0].target))
    names = list(constants.fitted(costs))
    rng = np.random.default_rng(seed)
    some = [times[i] for i in sorted(rng.permutation(len(times))[:MAX_TIMES])]
    scale = np.sqrt([t.weight for t in some]) / NOISE
    logs, problems = np.log([t.us for t in some]), _by_problem(some)
    widths = np.array([MEMORY_WIDTH if name.startswith(cost_model.MEMORY_RATE) else WIDTH for name in names])
    weight = CHOICE_WEIGHT * math.sqrt(len(some) / max(1, len(problems)))

    def residuals(x: np.ndarray) -> np.ndarray:
        found = errors(family.with_costs(constants.scaled(costs, names, x)), some)
        # A robust loss of the errors, of the constants' changes the square.
        off = found * scale
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        lost = [math.sqrt(_lost((found + logs)[of], loss)) for of, loss in problems]
        return np.concatenate([soft, x / widths, weight * np.array(lost)])

    middle = np.zeros(len(names))
    begins = [middle, *(rng.normal(0, 0.5, len(names)).clip(-1.9, 1.9) for _ in range(STARTS - 1))]
    found = min(
        (
            optimize.least_squares(
                residuals, begin, bounds=(middle - 2, middle + 2), max_nfev=EVALUATIONS, diff_step=1e-2
            )
            for begin in begins
        ),
        key=lambda result: result.cost,
    )
    old = constants.fitted(costs)
    new = {name: constants.rounded(old[name] * math.exp(x)) for name, x in zip(names, found.x, strict=True)}
    return constants.replaced(costs, {n: v if abs(v / old[n] - 1) > 1e-3 else old[n] for n, v in new.items()})


# ---- what the models are judged by -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Of first choices among what was measured: how much slower they are than the fastest."""

    mean: float
    percentile_99: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1%} / {self.percentile_99:.1%} / {self.worst:.1%}"


def judged(found: Iterable[Record], fitted: Mapping[str, Family]) -> Judgement | None:
    """By the families' estimates; None without problems of several candidates."""
    regrets = []
    for record in found:
        us = record.times()
        if len(us) < 2:
            continue
        estimates = {
            c: fitted.get(c.name, c.family).estimate(record.problem, c.config, record.target)
            for c in us
            if c.family is not None
        }
        regrets.append(us[min(estimates, key=lambda c: estimates[c])] / min(us.values()) - 1)
    if not regrets:
        return None
    return Judgement(statistics.fmean(regrets), float(np.percentile(regrets, 99)), max(regrets), len(regrets))


def fit_families(
    seen: Sequence[Record], held: Sequence[Record], names: Sequence[str] = (), least: int = LEAST_RECORDS
) -> tuple[dict[str, Family], list[list[str]]]:
    """The families (of these names, or all; with at least so many problems) with new constants, and rows of a table of
    what it gave."""
    found, rows = {}, [["family", "problems", "times", "mean error", "held out, before", "after"]]
    for family in dict.fromkeys(f for op in catalogue.FAMILIES for f in kernels.families(op)):
        times = times_of(seen, family) if not names or family.name in names else []
        if family.Costs is None or len({t.problem for t in times}) < least:
            continue
        found[family.name] = family.with_costs(fit(family, times))
        others = times_of(held, family)
        cells = [
            f"{np.mean(np.abs(errors(f, some))):.1%}" if some else ""
            for f, some in ((found[family.name], times), (family, others), (found[family.name], others))
        ]
        rows.append([family.name, str(len({t.problem for t in times})), str(len(times)), *cells])
    return found, rows


def fit_xla(seen: Sequence[Record]) -> dict[str, Any]:
    """Of every operation."""
    with_xla = [record for record in seen if record.xla_us is not None]
    by_op = {op: [record for record in with_xla if record.problem.op == op] for op in catalogue.FAMILIES}
    return {op: xla_fit.fit(found) for op, found in by_op.items() if len(found) >= LEAST_RECORDS}


def xla_rows(before: Mapping[str, Any], after: Mapping[str, Any], found: Sequence[Record]) -> list[list[str]]:
    """A table of how far estimates of XLA's time are off, of those problems whose time is said to be known; "far off":
    by more than two uncertainties."""
    rows = [
        ["XLA, held out", "problems", "known before", "mean error", "known after", "mean error", "over 2 uncertainties"]
    ]
    for op in after:
        some = [record for record in found if record.problem.op == op and record.xla_us is not None]
        row = [op, str(len(some))]
        beyond: list[bool] = []
        for models in (before, after):
            given = [(xla.estimate_by(models[op], r.problem, r.target), r) for r in some if op in models]
            off = [(abs(math.log(e.seconds * 1e6 / (r.xla_us or 1))), e.uncertainty) for e, r in given if e is not None]
            beyond = [error > 2 * doubt for error, doubt in off]
            row += [str(len(off)), f"{statistics.fmean(error for error, _ in off):.1%}" if off else ""]
        rows.append([*row, f"{statistics.fmean(beyond):.0%}" if beyond else ""])
    return rows


def model(
    old: Mapping[str, Any],
    seen: Sequence[Record],
    held: Sequence[Record],
    fitted: Mapping[str, Family],
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
) -> Any:
    """A device's file: constants of what was fitted, uncertainties by what was held out, or by all, of every family
    (of these names, or all) that was measured, and XLA's time (of these operations, or all)."""
    families = {name: dict(value) for name, value in old["families"].items()}
    for family in dict.fromkeys(f for op in catalogue.FAMILIES for f in kernels.families(op)):
        if names and family.name not in names:
            continue
        new, held_times = fitted.get(family.name, family), times_of(held, family)
        tested = len({t.problem for t in held_times}) >= LEAST_RECORDS
        times = held_times if tested else times_of([*seen, *held], family)
        if times:
            entry = families.get(family.name, {"constants": {}})
            owner = _owner(times[0].target)
            given = dataclasses.asdict(new.costs(owner)) if family.name in fitted else entry["constants"]
            of_class = uncertainties(new, times, 0.0 if tested else UNTESTED)
            families[family.name] = {"uncertainty": of_class, "constants": given}
    of_xla = {op: found for op, found in fit_xla(seen).items() if not ops or op in ops}
    return {"families": families, "xla": {**old["xla"], **of_xla}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.fit", description=__doc__)
    parser.add_argument("sweeps", nargs="*", type=pathlib.Path, metavar="SWEEP.jsonl")
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=True, help="the package's file, or another")
    parser.add_argument("--held-out", type=float, default=HELD_OUT, metavar="SHARE", help="of the problems; 0.2")
    parser.add_argument("--keep", action="store_true", help="constants: fit uncertainties and XLA only")
    parser.add_argument("--families", nargs="*", default=[], metavar="NAME", help="that are fitted; all")
    parser.add_argument("--xla", nargs="*", default=[], metavar="OP", help="operations whose XLA time is fitted; all")
    least = f"problems of a family that is fitted; {LEAST_RECORDS}"
    parser.add_argument("--least", type=int, default=LEAST_RECORDS, metavar="N", help=least)
    parser.add_argument("--shipped", action="store_true", help="also the rows of an H200's tables and of data/")
    options = parser.parse_args(argv)
    paths = [*options.sweeps, *(sorted(records.DATA.glob("*.jsonl")) if options.shipped else ())]
    found = records.read(dict.fromkeys(path.resolve() for path in paths))
    known = {record.problem for record in found}  # twice fitted is trusted too much
    found += [r for r in records.shipped(DEFAULT_CUDA) if r.problem not in known] if options.shipped else []
    owners = {(owner.platform, owner.device_kind) for owner in (_owner(record.target) for record in found)}
    if len(owners) != 1:
        kinds = ", ".join(sorted({record.target.device_kind for record in found}))
        parser.error(f"records of {kinds or 'nothing'}; accepted: of devices that take their constants from one file")
    ((platform, kind),) = owners
    old = cost_model.model_of(platform, kind)
    held = [record for record in found if records.is_held_out(record.problem, options.held_out)]
    seen = [record for record in found if not records.is_held_out(record.problem, options.held_out)]
    fitted, rows = ({}, []) if options.keep else fit_families(seen, held, options.families, options.least)
    print(markdown(rows) if rows else "")
    for name, some in (("fitted", seen), ("held out", held)):
        before, after = judged(some, {}), judged(some, fitted)
        count = 0 if before is None else before.count
        print(f"regret of the first choice (mean / 99% / worst), {count} problems {name}: {before}, then {after}")
    new = model(old, seen, held, fitted, options.families, options.xla)
    print(markdown(xla_rows(old["xla"], new["xla"], held)))
    if options.write is not None:
        path = cost_model.path_for(kind) if options.write is True else options.write
        constants.write(path, new)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
