"""Makes records for a fit from tuned entries, or from XLA's times in a report.

python -m benchmarks.cost_model.tuned SOURCE OUT.jsonl

SOURCE is a cache folder, a file with the text of TuningResult.dumps, or a report of benchmarks.conv or
benchmarks.kinds. Each entry becomes a record, with the times of all its candidates, unless they are times by CUDA
events: those have the pauses between kernels, which no other record has. Each case of a report becomes a record with
XLA's time.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.conv_cases import Case
from benchmarks.cost_model.records import Record, Timed
from jax_splitk.cli import stored
from jax_splitk.cli.output import UsageError
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import as_tuple
from jax_splitk.tuning.search import BY_EVENTS


def record(entry: Entry) -> Record:
    """The record of one problem."""
    timed = tuple(Timed(m.candidate, m.us, error=m.error) for m in entry.measurements)
    return Record(entry.key.problem, entry.key.target, timed, kind="tuned")


def of_report(report: dict[str, Any]) -> list[Record]:
    """A report's records."""
    target, found = dataclasses.replace(DEFAULT_CUDA, device_kind=report["environment"]["device_kind"]), []
    for result in report["results"]:
        fields = {name: as_tuple(value) for name, value in result["case"].items()}
        problem: Any = Case(**fields).problem()
        found.append(Record(problem, target, (Timed(XLA, result["xla"]["us"]),), kind=report["benchmark"]))
    return found


def _records(source: str) -> list[Record]:
    path = pathlib.Path(source)
    if path.is_file() and (data := json.loads(path.read_text())).get("benchmark") in ("conv", "kinds"):
        return of_report(data)
    entries = [item.entry for item in stored.read_source("SOURCE", source) if item.entry]
    return [record(entry) for entry in entries if entry.metadata.get("times") != BY_EVENTS]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.tuned", description=__doc__)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.jsonl")
    options = parser.parse_args(argv)
    try:
        lines = sorted(each.dumps() for each in _records(options.source))
    except UsageError as error:
        parser.error(str(error))
    options.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} problems: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
