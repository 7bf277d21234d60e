"""Fits the package's estimates to recorded times: the devices' rates, the trees that correct them, and XLA's times. See
README.md of benchmarks.

python -m benchmarks.cost_model.fit [SWEEP.jsonl ...] [--write] [--rates]

The data are all of `cost_model/data` and the rows of the shipped tables. Problems are divided into ten folds. The table
shows how good first choices are if the fit has not seen the problem; the fit that is written has seen all problems.

The rates of `MEASURED` stay as they are in a device's file: `python -m benchmarks.ceilings` measures two of them, and
the rate of shared memory is 128 bytes a clock by the data sheet.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from benchmarks.cost_model import learn, records
from benchmarks.cost_model.learn import FOLDS, Data, Shape
from benchmarks.cost_model.records import Record
from benchmarks.cost_model.regret import MAX_SPREAD, Row, merged, regret
from benchmarks.report import markdown
from jax_splitk.kernels.base import cost_model, xla
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.kernels.base.cost_model import Rates, Spent
from jax_splitk.kernels.base.family import ModelledFamily, Translated
from jax_splitk.kernels.base.work import Work
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.key import problem_as_dict

MEASURED = ("tensor_clock", "memory_bytes", "shared_bytes")
DIGITS = 4  # of a fitted rate
NOISE = 0.06  # of logarithms of times within a problem; what is farther off counts less and less
COMMON_NOISE = 0.3  # of what a problem's candidates have in common
EVALUATIONS = 15
MOST_COPIES = 0.5  # of the time of an adapted family, for the rest to be the time of its kernels
OURS, XLAS = Shape(rounds=551, leaves=64, rate=0.129, least=8), Shape(rounds=300, leaves=16, least=5, common=1.0)


def fold(problem: Problem) -> int:
    """The fold of a problem, always the same."""
    digest = hashlib.sha256(json.dumps(problem_as_dict(problem), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big") % FOLDS


def fitted(found: Iterable[Record]) -> list[Row]:
    """The times to fit."""
    return merged(each for record in found for each in _of_kernels(record))


def _of_kernels(record: Record) -> Iterator[Record]:
    """The record without adapted families, and a record of each adapted family's equivalent problem. The latter has the
    times of the kernels alone: without XLA's copies, by their estimate. Times that are mostly copies are left out."""
    problem: Any = record.problem
    timed = [(t, t.candidate.family) for t in record.timed]
    yield dataclasses.replace(record, timed=tuple(t for t, family in timed if not isinstance(family, Adapted)))
    for adapted in dict.fromkeys(family for _, family in timed if isinstance(family, Adapted)):
        copies = 1e6 * adapted.copy_seconds(problem, record.target)
        kernels = tuple(
            dataclasses.replace(t, candidate=Candidate(adapted.inner, t.candidate.config), us=t.us - copies)
            for t, family in timed
            if family is adapted and t.us is not None and copies < MOST_COPIES * t.us
        )
        yield dataclasses.replace(record, problem=adapted.translated(problem), timed=kernels)


def work_of(row: Row) -> Work:
    family, problem = row.candidate.family, row.problem
    while isinstance(family, Translated):
        family, problem = family.inner, family.translated(problem)
    assert isinstance(family, ModelledFamily)
    return family.work(problem, row.candidate.config, row.target)


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Weights of the rows: fast candidates weigh more, since only they must be told apart."""
    return np.array([row.best_us / row.us if row.spread <= MAX_SPREAD else 0.01 for row in rows])


def _kinds(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The indices of each device's rows."""
    names = np.array([row.target.device_kind for row in rows])
    return {str(name): np.flatnonzero(names == name) for name in np.unique(names)}


def fit_rates(rows: Sequence[Row], works: Sequence[Work], old: dict[str, Rates]) -> dict[str, Rates]:
    """By device. Fits all rates that are not measured to the times of all devices together."""
    kinds, logs, weights = _kinds(rows), np.log([row.us * 1e-6 for row in rows]), _weights(rows)
    groups = np.array([row.group for row in rows])
    total = np.maximum(np.bincount(groups, weights), 1e-9)
    names = [field.name for field in dataclasses.fields(Rates) if field.name not in MEASURED]
    start = np.log([getattr(next(iter(old.values())), name) for name in names])

    def at(x: np.ndarray) -> dict[str, Rates]:
        values = {name: float(f"{math.exp(each):.{DIGITS}g}") for name, each in zip(names, x, strict=True)}
        return {kind: dataclasses.replace(of, **values) for kind, of in old.items()}

    def residuals(x: np.ndarray) -> np.ndarray:
        changes, errors = dict(zip(names, map(float, np.exp(x)), strict=True)), np.zeros(len(rows))
        for kind, own in kinds.items():
            of = dataclasses.replace(old[kind], **changes)
            errors[own] = np.log(cost_model.spent([works[i] for i in own], of).seconds) - logs[own]
        mean = (np.bincount(groups, errors * weights) / total)[groups]
        each = np.sqrt(weights) * (errors - mean) / NOISE, np.sqrt(weights) * mean / COMMON_NOISE
        soft = [np.sign(e) * np.sqrt(2 * (np.sqrt(1 + e**2) - 1)) for e in each]
        return np.concatenate([*soft, x - start])  # a rate on which no time depends stays as it is

    return at(optimize.least_squares(residuals, start, max_nfev=EVALUATIONS, diff_step=1e-3).x)


def data_of(rows: Sequence[Row], works: Sequence[Work], rates: dict[str, Rates]) -> tuple[Data, np.ndarray, list[str]]:
    """(the data of the trees, seconds by the rates, the families)."""
    families = sorted({row.candidate.name for row in rows})
    seconds, features = np.zeros(len(rows)), list[np.ndarray](np.zeros(0) for _ in rows)
    for kind, own in _kinds(rows).items():
        of = cost_model.spent([works[i] for i in own], rates[kind])
        seconds[own] = of.seconds
        for at, i in enumerate(own):
            row, alone = rows[i], Spent(of.seconds[at : at + 1], of.parts[:, at : at + 1], of.work[:, at : at + 1])
            number = families.index(row.candidate.name)
            found = cost_model.features(number, row.problem, [row.candidate.config], alone, row.target)
            features[i] = found[0]
    logs = np.log([row.us * 1e-6 for row in rows]) - np.log(seconds)
    groups, folds = (np.array(of) for of in ([row.group for row in rows], [fold(row.problem) for row in rows]))
    return Data(np.array(features), logs, _weights(rows), groups, folds), seconds, families


def spreads(names: Sequence[str], of: Sequence[str], errors: np.ndarray, weights: np.ndarray) -> list[float]:
    """The standard deviation of each name's errors. For names with few errors it is mostly that of all errors."""
    prior, found = 3.0, []
    everybody = float(np.sum(weights * errors**2) / np.sum(weights))
    for name in names:
        own = np.array([each == name for each in of])
        squares = float(np.sum(weights[own] * errors[own] ** 2)) + prior * everybody
        found.append(math.sqrt(squares / (float(np.sum(weights[own])) + prior)))
    return found


def fit_xla(found: Sequence[Record]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the arrays of xla.npz, logarithms of held-out estimates over times)."""
    known = [(r.problem, xla.features(r.problem, r.target).floor, r.xla_us) for r in found if r.xla_us]
    problems = [(problem, xla.features(problem, DEFAULT_CUDA)) for problem, _, _ in known]
    kinds = sorted({kind for _, of in problems for kind in of.kinds})
    names = [f"{problem.op}: {of.name}" for problem, of in problems]
    logs = np.array([math.log(us * 1e-6 / floor) for _, floor, us in known])
    ones, numbers = np.ones(len(logs)), np.arange(len(logs))
    data = Data(xla.rows(problems, kinds), logs, ones, numbers, np.array([fold(p) for p, _ in problems]))
    errors = learn.held_out(data, XLAS) - logs
    classes = sorted(set(names))
    ranges = np.ones((len(classes), xla.SIZES, 2), np.float32)
    for i, name in enumerate(classes):
        sizes = np.array([list(of.sizes.values()) for n, (_, of) in zip(names, problems, strict=True) if n == name])
        ranges[i, : sizes.shape[1]] = np.stack([sizes.min(0), sizes.max(0)], axis=1)
    # Disturbed times count little.
    bounded = np.clip(errors, -1.0, 1.0)
    arrays = {
        **learn.fit(data, XLAS).arrays(),
        "kinds": np.array(kinds),
        "classes": np.array(classes),
        "spreads": np.array(spreads(classes, names, bounded, ones), np.float32),
        "ranges": ranges,
    }
    return arrays, errors


def text_of(rates: Any) -> str:
    """The text of a device's file."""
    return json.dumps(dataclasses.asdict(rates), indent=1) + "\n"


def report(rows: Sequence[Row], seconds: np.ndarray, corrected: np.ndarray) -> list[list[str]]:
    """A table of the regret of first choices and of errors: for all rows and for each family."""
    us = np.array([row.us * 1e-6 for row in rows])
    table = [
        ["", "times", "mean error by the rates", "held out", "regret by the rates (mean / 99% / worst)", "held out"]
    ]
    names = np.array([row.candidate.name for row in rows])
    for name in ("all", *np.unique(names)):
        own = np.flatnonzero((names == name) | (name == "all"))
        off = [f"{np.mean(np.abs(np.log(of[own] / us[own]))):.1%}" for of in (seconds, corrected)]
        some = [rows[i] for i in own.tolist()]
        lost = [str(regret(some, of[own])) if name == "all" else "" for of in (seconds, corrected)]
        table.append([str(name), str(len(own)), *off, *lost])
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.fit", description=__doc__)
    parser.add_argument("sweeps", nargs="*", type=pathlib.Path, metavar="SWEEP.jsonl", help="beside data/")
    parser.add_argument("--rates", action="store_true", help="fit them, too; else they stay as they are")
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=cost_model.FOLDER, metavar="FOLDER")
    options = parser.parse_args(argv)
    found = records.read(
        dict.fromkeys(path.resolve() for path in (*sorted(records.DATA.glob("*.jsonl")), *options.sweeps))
    )
    known = {record.problem for record in found}
    found += [r for r in records.shipped(DEFAULT_CUDA) if r.problem not in known]
    rows = fitted(r for r in found if r.target.platform == "cuda")
    works = [work_of(row) for row in rows]
    rates = {kind: cost_model.rates("cuda", kind) for kind in _kinds(rows)}
    if options.rates:
        rates = fit_rates(rows, works, rates)
    data, seconds, families = data_of(rows, works, rates)
    corrections = learn.held_out(data, OURS)
    print(markdown(report(rows, seconds, seconds * np.exp(corrections))))
    of_xla, errors = fit_xla(found)
    print(
        f"XLA, held out: {len(errors)} times, mean error {np.mean(np.abs(errors)):.1%}, "
        f"median {np.median(np.abs(errors)):.1%}"
    )
    if options.write is not None:
        names = [row.candidate.name for row in rows]
        spread = spreads(families, names, corrections - data.logs, data.weights)
        learned = {"families": np.array(families), "spreads": np.array(spread, np.float32)}
        arrays = {**learn.fit(data, OURS).arrays(), **learned}
        np.savez_compressed(options.write / cost_model.RESIDUAL, allow_pickle=False, **arrays)
        np.savez_compressed(options.write / xla.FILE, allow_pickle=False, **of_xla)
        for kind, of in rates.items():
            (options.write / cost_model.path_for(kind).name).write_text(text_of(of))
        print(options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
