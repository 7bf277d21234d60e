"""Compares the times of the same problems in two files of records, such as those of two versions of the package.

python -m benchmarks.cost_model.against OLD.jsonl NEW.jsonl

Prints for each problem the new over the old time of our fastest candidate, and XLA's time over the new one; then
the geometric means by kind. See README.md of benchmarks for how to run two versions in one call.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks import report
from benchmarks.cost_model import records
from benchmarks.cost_model.records import Record


class Pair(NamedTuple):
    """One problem's times in microseconds: of our fastest candidates, and of XLA in the new file."""

    kind: str
    problem: str
    old_us: float
    new_us: float
    xla_us: float

    @property
    def ratio(self) -> float:
        return self.new_us / self.old_us

    @property
    def over_xla(self) -> float:
        return self.xla_us / self.new_us


def pairs(old: Iterable[Record], new: Iterable[Record]) -> list[Pair]:
    """The problems that both have, on the same device, in the order of the new ones."""
    before = {(r.problem, r.target): min(times.values()) for r in old if (times := r.times())}
    found = []
    for r in new:
        times, earlier = r.times(), before.get((r.problem, r.target))
        if times and earlier is not None and r.xla_us is not None:
            found.append(Pair(r.kind, str(r.problem), earlier, min(times.values()), r.xla_us))
    return found


def table(found: Sequence[Pair]) -> list[list[str]]:
    """Figures by kind, and of all; the first row is the header."""
    rows = [["kind", "problems", "new/old, mean", "least", "most", "XLA/new, mean", "least"]]
    for kind in ("all", *dict.fromkeys(p.kind for p in found)):
        some = [p for p in found if kind in ("all", p.kind)]
        ratios, over = [p.ratio for p in some], [p.over_xla for p in some]
        figures = geometric_mean(ratios), min(ratios), max(ratios), geometric_mean(over), min(over)
        rows.append([kind, str(len(some)), *(f"{figure:.2f}" for figure in figures)])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.against", description=__doc__)
    parser.add_argument("old", type=pathlib.Path, metavar="OLD.jsonl")
    parser.add_argument("new", type=pathlib.Path, metavar="NEW.jsonl")
    options = parser.parse_args(argv)
    found = pairs(records.read([options.old]), records.read([options.new]))
    for p in found:
        print(f"{p.ratio:.3f} ({p.old_us:.1f} -> {p.new_us:.1f} us, XLA {p.xla_us:.1f}): {p.problem}")
    if not found:
        print("no problem is in both files", file=sys.stderr)
        return 1
    print("\n" + report.markdown(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
