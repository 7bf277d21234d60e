"""How good choices are on problems that no fit has seen: untuned, tuned, and against XLA. See README.md of benchmarks.

python -m benchmarks.cost_model.evaluate OUT.jsonl [--earlier FILE ...] [--problems 300] [--seconds 540]
python -m benchmarks.cost_model.evaluate OUT.jsonl [--kinds DRAWS | --again FILE ...] [--part 0/2]
python -m benchmarks.cost_model.evaluate OUT.jsonl [MORE.jsonl ...] --report TABLE.md PLOT.svg

For each problem the cost model makes a choice, tuning makes another, and for every few problems a second tuning makes a
third. Then these choices, the fastest candidates of the tuning and XLA are timed against each other. This last
measurement gives the figures. Each problem adds a line to OUT; a later run continues after the last line. The problems
are random ones, with --kinds those of `benchmarks.kinds`, or with --again those of earlier records.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import kinds, report
from benchmarks.cost_model import problems, records
from benchmarks.cost_model.problems import Drawn
from benchmarks.cost_model.records import Record, Timed
from benchmarks.cost_model.sweep import CPU_FLOPS, measured
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import key_for, problem_as_dict
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options
from jax_splitk.tuning.select import select

SEED = 14  # no fit has it: 1 is a sweep's, 3 to 13 are in data/
OPS = ("conv_wgrad", "quantized_matmul")
AGAIN = 5  # one problem in so many is tuned twice
BEHIND = 2  # whose last measurement the next ones do not wait for
FASTEST = 4  # fastest candidates of the tuning that are timed once more
ROUNDS = 9  # rounds of the last measurement
TIE = 0.02  # a candidate that wins by less is not faster
CHOICES = ("first", "untuned", "tuned", "again")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One problem's figures from the last measurement, in microseconds.

    Attributes:
      us: the time of each of `CHOICES` that was made: the cost model's first choice among our kernels, the choice
        without tuning, after tuning, and after a second tuning. Any but the first may be XLA.
      best_us: the time of the fastest candidate.
    """

    problem: str
    op: str
    kind: str
    us: dict[str, float]
    xla_us: float
    best_us: float
    tuning_seconds: float

    def regret(self, choice: str) -> float:
        return self.us[choice] / self.best_us - 1

    def over_xla(self, choice: str) -> float:
        """How much slower than XLA the choice is."""
        return self.us[choice] / self.xla_us - 1

    @property
    def flipped(self) -> bool:
        """Whether the second tuning chose a slower candidate."""
        fast, slow = sorted((self.us["tuned"], self.us["again"]))
        return slow > fast * (1 + TIE)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The choices for a problem, by the names of `CHOICES`, and the measurements of tuning."""

    drawn: Drawn
    choices: dict[str, Candidate]
    entries: tuple[Entry, ...]


def chosen(drawn: Drawn, target: Target, again: bool, seconds: float | None) -> Chosen:
    """Chooses and tunes. Makes all choices for a problem. Raises RuntimeError if XLA cannot compute it."""
    problem, key = drawn.problem, key_for(drawn.problem, target)
    entries = tuple(tuner.tune(key, seconds=seconds) for _ in range(1 + again))
    choices = {"untuned": untuned(problem, target), "tuned": entries[0].choice}
    if entries[0].predicted is not None:
        choices["first"] = entries[0].predicted
    if again:
        choices["again"] = entries[1].choice
    return Chosen(drawn, choices, entries)


def evaluated(of: Chosen, target: Target) -> tuple[Outcome, tuple[Timed, ...]]:
    """The figures of the last measurement, and its times. Tuning's own times are left out: they have the pauses between
    kernels.

    Raises:
      RuntimeError: one of the choices cannot be timed.
    """
    problem, choices = of.drawn.problem, of.choices
    others = [c for c in dict.fromkeys([*choices.values(), *fastest(of.entries)]) if c != XLA]
    found = measured(problem, target, others, threading.Event(), ROUNDS)
    us = {t.candidate: t.us for t in found if t.us is not None}
    missing = [str(c) for c in choices.values() if c not in us]
    if missing:
        raise RuntimeError(f"not timed: {', '.join(missing)}")
    spent = sum(float(entry.metadata["seconds"]) for entry in of.entries) / len(of.entries)
    text, by_choice = json.dumps(problem_as_dict(problem)), {name: us[c] for name, c in choices.items()}
    outcome = Outcome(text, problem.op, of.drawn.kind, by_choice, us[XLA], min(us.values()), spent)
    return outcome, found


def untuned(problem: Problem, target: Target) -> Candidate:
    """The choice that is lowered if no cache or table has a decision."""
    return select(problem, target, Options()).candidate


def fastest(entries: Iterable[Entry]) -> list[Candidate]:
    """Our candidates that tuning measured to be the fastest."""
    us: dict[Candidate, float] = {}
    for entry in entries:
        for m in entry.measurements:
            if m.us is not None and m.candidate != XLA:
                us[m.candidate] = min(m.us, us.get(m.candidate, m.us))
    return sorted(us, key=lambda c: us[c])[:FASTEST]


def numbered(options: argparse.Namespace, target: Target) -> Iterator[tuple[int, Drawn]]:
    """The problems of this part, with their numbers among all."""
    found: Iterable[tuple[int, Drawn]]
    if options.again:
        found = enumerate({r.problem: Drawn(r.kind, r.problem) for r in records.read(options.again)}.values())
    elif options.kinds:
        passes: list[Any] = [(case.group, case.problem()) for case in kinds.drawn(options.seed, options.kinds)]
        found = enumerate({p: Drawn(kind, p) for kind, p in passes}.values())
    else:
        found = problems.stream(options.seed, target, OPS, options.max_flops)
    number, parts = options.part
    return ((index, drawn) for index, drawn in found if index % parts == number)


def run(options: argparse.Namespace) -> int:
    """The number of problems that were evaluated.

    As in `tune`, searches for the next problems run, and compile their kernels, while one problem is awaited. Its last
    measurement waits until then, too.
    """
    target, deadline = target_for(local_platform()), time.monotonic() + options.seconds
    known = [line for path in (*options.earlier, *options.out) for line in records.lines(path)]
    begun = {line["index"] for line in known if "index" in line}
    wanted = max(0, options.problems - sum("us" in line for line in known))
    new = ((index, drawn) for index, drawn in numbered(options, target) if index not in begun)
    waiting = list(itertools.islice(new, wanted))
    keys = [(key_for(drawn.problem, target), DEFAULT_WORKSPACE_LIMIT) for _, drawn in waiting]
    last: collections.deque[tuple[int, Future[str]]] = collections.deque()
    count = 0
    options.out[0].parent.mkdir(parents=True, exist_ok=True)
    with options.out[0].open("a") as out, ThreadPoolExecutor(1) as pool:

        def write(line: str) -> None:
            print(line, file=out, flush=True)

        def finish(most: int) -> int:
            """Waits until at most `most` last measurements are under way, and writes the outcomes of the others.
            Returns their number."""
            done = 0
            while len(last) > most:
                index, text = last.popleft()
                try:
                    write(text.result())
                except RuntimeError as error:
                    report.say(f"{index}: {error}")
                else:
                    done += 1
            return done

        write(json.dumps({"environment": report.environment()}))
        with tuner.queued(keys, options.budget):
            for index, drawn in waiting:
                if time.monotonic() > deadline:
                    break
                write(json.dumps({"index": index}))
                try:
                    of = chosen(drawn, target, index % AGAIN == 0, options.budget)
                except RuntimeError as error:
                    report.say(f"{index}: {drawn.problem}: {error}")
                    continue
                last.append((index, pool.submit(lines_of, index, of, target, options.seed)))
                count += finish(BEHIND)
        return count + finish(0)


def lines_of(index: int, of: Chosen, target: Target, seed: int) -> str:
    """The lines of a problem: its outcome, and its times as a record that later fits may use."""
    outcome, timed = evaluated(of, target)
    report.say(f"{index}: {of.drawn.problem}: {outcome.us}, XLA {outcome.xla_us}, best {outcome.best_us}")
    record = Record(of.drawn.problem, target, timed, index, of.drawn.kind)
    return f"{json.dumps(dataclasses.asdict(outcome))}\n{record.dumps(seed)}"


# ---- the report ------------------------------------------------------------------------------------------------------


def read(paths: Iterable[pathlib.Path]) -> list[Outcome]:
    return [Outcome(**line) for path in paths for line in records.lines(path) if "us" in line]


def table(found: Sequence[Outcome]) -> list[list[str]]:
    """Rows of figures, the first of which is the header."""
    rows = [["problems", "figure", "by the cost model", "untuned, XLA too", "tuned"]]
    names = ("first", "untuned", "tuned")
    for op in ("all", *dict.fromkeys(o.op for o in found)):
        some = [o for o in found if op in ("all", o.op)]
        label = f"{op}, {len(some)}"
        of = {n: [o for o in some if n in o.us] for n in names}
        regrets = {n: [o.regret(n) for o in of[n]] for n in names}
        over = {n: np.array([o.over_xla(n) for o in of[n]]) for n in names}
        rows.append([label, "regret, mean", *(f"{np.mean(regrets[n]):.1%}" for n in names)])
        rows.append(["", "regret, 99th percentile", *(f"{np.percentile(regrets[n], 99):.1%}" for n in names)])
        rows.append(["", "over 2% slower than XLA", *(f"{np.mean(over[n] > 0.02):.1%}" for n in names)])
        rows.append(["", "over 5% slower than XLA", *(f"{np.mean(over[n] > 0.05):.1%}" for n in names)])
        rows.append(["", "XLA / ours, geometric mean", *(f"{np.exp(-np.mean(np.log1p(over[n]))):.2f}" for n in names)])
        twice = [o for o in some if "again" in o.us]
        if twice:
            flips = f"{np.mean([o.flipped for o in twice]):.1%} of {len(twice)}"
            rows.append(["", f"winners that flip by over {TIE:.0%}", "", "", flips])
    return rows


def plot(found: Sequence[Outcome]) -> Any:
    """Plots the share of problems by regret, and by how much slower than XLA they are."""
    # The device machine may lack matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    from benchmarks.timeline import TEXT_POINTS, WIDTH_INCHES  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH_INCHES, 6.2), layout="constrained", facecolor="white")
    labels = {"first": "the cost model's first choice", "untuned": "untuned", "tuned": "tuned"}
    figures = ("regret against the best known", Outcome.regret), ("slower than XLA by", Outcome.over_xla)
    for axes, (what, value) in zip(figure.subplots(2), figures, strict=True):
        for name, label in labels.items():
            values = np.sort([100 * value(o, name) for o in found if name in o.us])
            axes.plot(values, 100 * np.arange(1, len(values) + 1) / len(values), label=label)
        axes.set_xlabel(f"{what}, %", fontsize=TEXT_POINTS)
        axes.set_ylabel("problems with at most so much, %", fontsize=TEXT_POINTS)
        axes.tick_params(labelsize=TEXT_POINTS)
        axes.set_xlim(-1 if value is Outcome.regret else -80, 20)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=TEXT_POINTS)
    figure.suptitle(f"{len(found)} random problems that no fit has seen", fontsize=TEXT_POINTS + 1)
    return figure


def write_report(found: Sequence[Outcome], paths: Iterable[pathlib.Path]) -> None:
    """Writes the table to paths that end in .md, the plot to others."""
    for path in paths:
        if path.suffix == ".md":
            path.write_text(report.markdown(table(found)) + "\n")
        else:
            from benchmarks.plot import save  # noqa: PLC0415

            save(plot(found), path)


def part(text: str) -> tuple[int, int]:
    """The numbers of "I/N"."""
    number, _, parts = text.partition("/")
    found = int(number), int(parts)
    if not 0 <= found[0] < found[1]:
        raise ValueError(f"part {text!r}; accepted: I/N with I from 0 to N - 1")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path, nargs="+", metavar="OUT.jsonl", help="the first is written")
    parser.add_argument("--earlier", type=pathlib.Path, nargs="+", default=[], metavar="FILE", help="of earlier runs")
    parser.add_argument("--problems", type=int, default=300, metavar="N", help="with those of earlier runs; 300")
    parser.add_argument("--seconds", type=float, default=540, help="after which no problem is begun; 540")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of tuning a problem")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="every N-th problem from the I-th on")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--kinds", type=int, metavar="DRAWS", help="so many convolutions of each kind, in all passes")
    other.add_argument("--again", type=pathlib.Path, nargs="+", metavar="FILE", help="the problems of these records")
    parser.add_argument("--max-flops", type=float, default=problems.MAX_FLOPS if report.on_gpu() else CPU_FLOPS)
    parser.add_argument(
        "--report", type=pathlib.Path, nargs="+", metavar="FILE", help="made of what there is: .md, .svg"
    )
    options = parser.parse_args(argv)
    if not options.report:
        return 0 if run(options) else 1
    found = read([*options.earlier, *options.out])
    print(report.markdown(table(found)))
    write_report(found, options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
