"""Finds families and options of configs that were never the best, and times them beside the best.

python -m benchmarks.cost_model.options OUT.jsonl [--also NAME[.FIELD[=VALUE]] ...] [--seconds 220]

An option is a value of a config's field. The program takes the options that are the best of no recorded (data/) or
shipped (jax_splitk/tables) problem. It forces them on problems that their family serves, and times them in turns with
the best known candidates. OUT gets a line for each problem, which `benchmarks.cost_model.fit` reads. A table then shows
on how many problems each option was timed, and its largest gain over all other candidates. An option whose gain is
always below 1.02 can be deleted.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.cost_model import problems, records
from benchmarks.cost_model.records import Record
from benchmarks.cost_model.sweep import measured
from jax_splitk import kernels
from jax_splitk.kernels import Family, catalogue
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import DEFAULT_CUDA, Target, local_platform, target_for
from jax_splitk.tuning import table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import candidate_from
from jax_splitk.tuning.key import problem_from_dict
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

# If a config's field has at most so many values in use, each value is an option and must be the best somewhere. If a
# field has more values, such as a number of splits, two of them must be.
FEW = 4
SERVED = 8  # problems of a family whose candidates tell which values are in use
PROBLEMS = 4  # that each option is timed on: half of them are those where its estimate is the nearest to the best
FORCED = 2  # configs with an option, of a problem
OTHERS = 2  # candidates by their estimates, beside the best that is known
AHEAD = 8  # problems whose kernels compile while the device is busy
TIE = 1.02
SEED, DRAWN = 9, 400  # seed of random problems, for families without a recorded problem


class Option(NamedTuple):
    """A value of a field. Without a field: a whole family. Without a value: a field that was the best with one value
    only.

    Attributes:
      families: all families that share a type of config, joined by "/"; or one family.
    """

    families: str
    field: str = ""
    value: Any = None

    def __str__(self) -> str:
        given = "" if self.value is None else f"={self.value}"
        return f"{self.families}.{self.field}{given}" if self.field else self.families


# ---- what is the best somewhere --------------------------------------------------------------------------------------


def families() -> list[Family[Any, Any]]:
    return list(dict.fromkeys(f for op in catalogue.FAMILIES for f in kernels.families(op, "cuda")))


@functools.cache
def groups() -> dict[str, str]:
    """Maps a family's name to the names of all families that compute passes of one kind with the same configs."""
    alike: dict[tuple[Any, str], list[str]] = collections.defaultdict(list)
    for family in families():
        alike[family.Config, family.name.partition("_")[2]].append(family.name)
    return {name: "/".join(sorted(names)) for names in alike.values() for name in names}


def shipped() -> Iterator[tuple[Problem, Candidate]]:
    """The tables' decisions for a kernel."""
    for path in sorted(table.FOLDER.glob("*/*.json")):
        for text, row in table.read(path).rows.items():
            candidate = candidate_from(path.stem, {name: row[name] for name in ("family", "config")})
            if candidate != XLA:
                yield problem_from_dict(path.stem, json.loads(text)), candidate


def best(record: Record) -> Candidate | None:
    """The fastest timed candidate, if it is a kernel and was timed against another candidate."""
    us = {t.candidate: t.us for t in record.timed if t.us is not None}
    fastest = min(us, key=lambda c: us[c], default=XLA)
    return fastest if fastest != XLA and len(us) > 1 else None


def decided(found: Iterable[Record]) -> dict[Problem, Candidate]:
    """The best known candidate of each problem, with random problems for families that have none."""
    known = {**{record.problem: best(record) or XLA for record in found}, **dict(shipped())}
    stream = problems.stream(SEED, DEFAULT_CUDA, problems.OPERATIONS, problems.MAX_FLOPS)
    drawn = [drawn.problem for _, drawn in itertools.islice(stream, DRAWN)]
    for family in families():
        if not any(served(family, known)):
            known |= dict.fromkeys(itertools.islice(served(family, drawn), SERVED), XLA)
    return known


def usual(option: Option, known: Mapping[Problem, Candidate]) -> Any:
    """The only value with which the option's field was the best."""
    of_group = (c.config for c in known.values() if c.name in option.families.split("/"))
    return next((getattr(config, option.field) for config in of_group), None) if option.field else None


def options(name: str, config: Any) -> Iterator[Option]:
    return (Option(groups()[name], field, value) for field, value in dataclasses.asdict(config).items())


def near(family: Family[Any, Any], problem: Problem) -> list[Any]:
    """The family's candidates, and the legal neighbours of the first candidate."""
    configs = list(family.candidates(problem, DEFAULT_CUDA))
    steps = family.neighbours(problem, configs[0], DEFAULT_CUDA) if configs else ()
    return [*configs, *(config for config in steps if family.refusal(problem, config) is None)]


def served(family: Family[Any, Any], some: Iterable[Problem]) -> Iterator[Problem]:
    return (p for p in some if family in kernels.families(p.op, "cuda") and family.refusal(p) is None)


def in_use(found: Sequence[Record]) -> set[Option]:
    """All options in use: timed, shipped, or of a candidate or its neighbour for some problems of each family. Adapted
    families have the options of those that they adapt."""
    candidates = [*(c for record in found for c in record.times()), *(candidate for _, candidate in shipped())]
    timed = [(c.name, c.config) for c in candidates if not isinstance(c.family, Adapted)]
    known = dict.fromkeys([*(problem for problem, _ in shipped()), *(record.problem for record in found)])
    for family in (family for family in families() if not isinstance(family, Adapted)):
        for problem in itertools.islice(served(family, known), SERVED):
            timed += [(family.name, config) for config in near(family, problem)]
    return {option for name, config in timed for option in options(name, config)}


def lost_values(values: set[Any], wins: set[Any]) -> set[Any]:
    """The values of a field that are never the best; None stands for all but one value of a field with many numbers."""
    if 1 < len(values) <= FEW:
        return values - wins
    return set() if len(wins) > 1 else {None}


def never_best(found: Sequence[Record]) -> set[Option]:
    winners = {(c.name, c.config) for _, c in shipped()}
    winners |= {(c.name, c.config) for record in found if (c := best(record)) is not None}
    won = {option for winner in winners for option in options(*winner)}
    names = {name for name, _ in winners}
    lost = {Option(family.name) for family in families() if family.name not in names}
    fields: dict[tuple[str, str], set[Any]] = collections.defaultdict(set)
    for option in in_use(found):
        fields[option.families, option.field].add(option.value)
    for (group, field), values in fields.items():
        if not names.isdisjoint(group.split("/")):
            wins = {value for value in values if Option(group, field, value) in won}
            lost |= {Option(group, field, value) for value in lost_values(values, wins)}
    return lost


# ---- what is timed ---------------------------------------------------------------------------------------------------


def has(option: Option, name: str, config: Any, but: Any = None) -> bool:
    """Whether a family's config has the option; for an option without a value, any value other than `but`."""
    if name not in option.families.split("/"):
        return False
    if not option.field:
        return True
    value = getattr(config, option.field)
    return value != but if option.value is None else value == option.value


def forced(option: Option, family: Family[Any, Any], problem: Problem, but: Any) -> list[Candidate]:
    """The configs with the option whose estimates are the fastest."""
    found = dict.fromkeys(near(family, problem))
    if option.field:
        values = [option.value] if option.value is not None else [v for v in (1, 2, 4, 8) if v != but]
        changed = (dataclasses.replace(c, **{option.field: value}) for c in found for value in values)
        found = dict.fromkeys([*(c for c in found if has(option, family.name, c, but)), *changed])
    return _fastest(problem, [Candidate(family, config) for config in found])[:FORCED]


def _fastest(problem: Problem, candidates: Iterable[Candidate]) -> list[Candidate]:
    legal = [
        c
        for c in candidates
        if c.refusal(problem, DEFAULT_CUDA) is None and c.workspace_bytes(problem) <= DEFAULT_WORKSPACE_LIMIT
    ]
    return sorted(legal, key=lambda c: _seconds(problem, c))


def _seconds(problem: Problem, candidate: Candidate) -> float:
    assert candidate.family is not None
    return candidate.family.estimate(problem, candidate.config, DEFAULT_CUDA)


@dataclasses.dataclass
class Wanted:
    """A problem, the candidates to time, and the options that they have."""

    problem: Problem
    candidates: dict[Candidate, None]
    options: list[Option]


def wanted(lost: Iterable[Option], known: Mapping[Problem, Candidate]) -> tuple[list[Wanted], list[Option]]:
    """The problems to time, with each option's first problem before all second ones; and the options that no problem
    takes."""
    rng, found, idle = np.random.default_rng(SEED), dict[Problem, Wanted](), list[Option]()
    chosen = {option: _chosen(option, known, rng) for option in lost}
    for place in range(PROBLEMS):
        for option, given in chosen.items():
            for problem, candidates in given[place : place + 1]:
                if problem not in found:
                    others = [Candidate(f, c) for f in kernels.families(problem.op, "cuda") for c in _of(f, problem)]
                    best_known = [*{known[problem]} - {XLA}, *_fastest(problem, others)[:OTHERS]]
                    found[problem] = Wanted(problem, dict.fromkeys(best_known), [])
                found[problem].candidates.update(dict.fromkeys(candidates))
                found[problem].options.append(option)
    idle = [option for option, given in chosen.items() if not given]
    return list(found.values()), idle


def _of(family: Family[Any, Any], problem: Problem) -> Sequence[Any]:
    legal = family.refusal(problem, None, DEFAULT_CUDA) is None
    return family.candidates(problem, DEFAULT_CUDA) if legal else ()


def _chosen(
    option: Option, known: Mapping[Problem, Candidate], rng: np.random.Generator
) -> list[tuple[Problem, list[Candidate]]]:
    """The problems on which an option is timed, with its configs."""
    found = []
    for family in families():
        if family.name not in option.families.split("/"):
            continue
        own = list(served(family, known))
        for i in rng.permutation(len(own))[: 4 * PROBLEMS]:
            if candidates := forced(option, family, own[i], usual(option, known)):
                found.append((_seconds(own[i], candidates[0]) / own[i].flops, own[i], candidates))
    nearest = [(problem, candidates) for _, problem, candidates in sorted(found, key=lambda row: row[0])]
    drawn = [nearest[i] for i in rng.permutation(len(nearest))]
    rows = [*nearest[: PROBLEMS // 2], *drawn]
    return list({problem: (problem, candidates) for problem, candidates in rows}.values())[:PROBLEMS]


def _compiled(given: Wanted, given_up: threading.Event) -> None:
    # The measurement of the candidate raises the error again.
    with contextlib.suppress(Exception):
        plans = [candidate.plan(given.problem) for candidate in given.candidates]
        compiler.compile_sources({plan.source for plan in plans if isinstance(plan, DevicePlan)}, given_up)


def run(suite: Sequence[Wanted], target: Target, out: pathlib.Path, deadline: float) -> list[Record]:
    """Times the problems until the deadline; writes a line after each problem."""
    found, given_up = list[Record](), threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(3)
    out.parent.mkdir(parents=True, exist_ok=True)
    with pool, out.open("a") as file:
        try:
            waiting = [pool.submit(_compiled, given, given_up) for given in suite[:AHEAD]]
            for number, given in enumerate(suite):
                concurrent.futures.wait(waiting[number : number + 1], max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    break
                waiting += [pool.submit(_compiled, each, given_up) for each in suite[number + AHEAD :][:1]]
                try:
                    timed = measured(given.problem, target, list(given.candidates), threading.Event())
                except Exception as error:  # continue with the other problems
                    report.say(f"{given.problem}: {type(error).__name__}: {str(error)[:300]}")
                    continue
                found.append(Record(given.problem, target, timed, number, "options"))
                print(found[-1].dumps(), file=file, flush=True)
                report.say(f"{number + 1} of {len(suite)}: {given.problem}: {', '.join(map(str, given.options))}")
        finally:
            given_up.set()
            pool.shutdown(cancel_futures=True)
    return found


def rows(lost: Iterable[Option], found: Sequence[Record], known: Mapping[Problem, Candidate]) -> list[list[str]]:
    """A table with the largest gain of each option: the time of the fastest candidate without it over the fastest with
    it."""
    table_rows = [["option", "problems", "best ratio winner/option", "where", ""]]
    for option in lost:
        ratios: dict[Problem, float] = {}
        for record in found:
            with_it = {c for c in record.times() if has(option, c.name, c.config, usual(option, known))}
            us = {t.candidate: t.us for t in record.timed if t.us is not None}
            rest = [value for candidate, value in us.items() if candidate not in with_it]
            if with_it and rest:
                ratios[record.problem] = min(rest) / min(us[candidate] for candidate in with_it)
        most = max(ratios, key=lambda p: ratios[p], default=None)
        if most is None:
            table_rows.append([str(option), "0", "", "", "not timed"])
            continue
        verdict = "keep" if ratios[most] >= TIE else "delete"
        table_rows.append([str(option), str(len(ratios)), f"{ratios[most]:.3f}", str(most), verdict])
    return table_rows


def _option(text: str) -> Option:
    """Parses the text of an option; the inverse of `str`."""
    name, _, rest = text.partition(".")
    field, _, value = rest.partition("=")
    if not set(name.split("/")) <= set(groups()):
        raise argparse.ArgumentTypeError(f"{name!r}; accepted: {', '.join(dict.fromkeys(groups().values()))}")
    named = {"True": True, "False": False}
    of = named[value] if value in named else int(value) if value.isdigit() else value or None
    return Option(groups()[name] if field and "/" not in name else name, field, of)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.options", description=__doc__)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.jsonl")
    parser.add_argument("--also", type=_option, nargs="*", default=[], metavar="OPTION", help="e.g. im2col.swap=True")
    parser.add_argument("--seconds", type=float, default=220, help="after which no problem is begun; 220")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    recorded = records.read(sorted(records.DATA.glob("*.jsonl")))
    known = decided(recorded)
    lost = list(dict.fromkeys([*sorted(never_best(recorded), key=str), *arguments.also]))
    suite, idle = wanted(lost, known)
    report.say(f"{len(lost)} options, {len(suite)} problems, {deadline - time.monotonic():.0f} s left")
    found = run(suite, target_for(local_platform()), arguments.out, deadline)
    print(report.markdown(rows(lost, found, known)))
    print(f"no legal config on any problem, so that they can be deleted: {', '.join(map(str, idle)) or 'none'}")
    return 0 if len(found) == len(suite) else 1


if __name__ == "__main__":
    sys.exit(main())
