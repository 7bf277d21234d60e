"""Puts new records into `data`, in place of all earlier ones of the same problems on the same devices.

python -m benchmarks.cost_model.renew NEW.jsonl ... --into NAME.jsonl
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cost_model import records


def _identity(line: Mapping[str, Any]) -> str:
    """The problem and device of a record."""
    return json.dumps([line["problem"], line["target"]["device_kind"]], sort_keys=True)


def renew(sources: Sequence[pathlib.Path], into: pathlib.Path) -> tuple[int, int]:
    """The numbers of new records, and of earlier ones that are gone. `into` keeps its other lines."""
    new = {_identity(line): line for path in sources for line in records.lines(path) if "timed" in line}
    gone = 0
    for path in sorted(into.parent.glob("*.jsonl")):
        old = list(records.lines(path))
        kept = [line for line in old if "timed" not in line or _identity(line) not in new]
        if len(kept) < len(old):
            gone += len(old) - len(kept)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    with into.open("a") as out:
        out.writelines(f"{json.dumps(line)}\n" for line in new.values())
    return len(new), gone


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.renew", description=__doc__)
    parser.add_argument("new", type=pathlib.Path, nargs="+", metavar="NEW.jsonl")
    parser.add_argument("--into", required=True, metavar="NAME.jsonl", help="a file in data, new or not")
    options = parser.parse_args(argv)
    count, gone = renew(options.new, records.DATA / options.into)
    print(f"{count} records in {options.into}; {gone} earlier ones are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
