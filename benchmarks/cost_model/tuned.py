"""Makes records for a fit from tuned entries.

python -m benchmarks.cost_model.tuned SOURCE OUT.jsonl

SOURCE is a cache folder, or a file with the text of TuningResult.dumps. Each entry becomes a record, with the times of
all its candidates.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.cost_model.records import Record, Timed
from jax_splitk.cli import stored
from jax_splitk.cli.output import UsageError
from jax_splitk.tuning.entry import Entry


def record(entry: Entry) -> Record:
    """The record of one problem."""
    timed = tuple(Timed(m.candidate, m.us, error=m.error) for m in entry.measurements)
    return Record(entry.key.problem, entry.key.target, timed, kind="tuned")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.tuned", description=__doc__)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.jsonl")
    options = parser.parse_args(argv)
    try:
        entries = [item.entry for item in stored.read_source("SOURCE", options.source) if item.entry]
    except UsageError as error:
        parser.error(str(error))
    lines = sorted(record(entry).dumps() for entry in entries)
    options.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} problems: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
