"""Makes the tables that ship with the package from tuned entries.

python -m benchmarks.tables SOURCE [SOURCE ...]

A SOURCE is a cache folder, a file with the text of TuningResult.dumps, or a report of benchmarks.dot. Its entries
replace a table's rows of the same problem; the other rows stay, except those of families whose ABI has changed.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jax_splitk import kernels
from jax_splitk.cli import stored
from jax_splitk.cli.output import UsageError
from jax_splitk.tuning import table
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Environment
from jax_splitk.tuning.result import TuningResult

VERSIONS = ("date", "jax", "jaxlib", "platform_version")


def _machine(environment: Environment) -> dict[str, Any]:
    """How a table names its machine: an environment without the families."""
    fields = dataclasses.asdict(environment)
    del fields["abi"]
    return fields


def text_of(entries: Sequence[Entry], versions: dict[str, Any]) -> str:
    """The table of entries for one operation on one machine."""
    environment, op = entries[0].key.environment, entries[0].key.problem.op
    problems = [entry.key.as_dict()["problem"] for entry in entries]
    defaults = _defaults(problems)
    rows = []
    for entry, problem in sorted(zip(entries, problems, strict=True), key=lambda pair: _order(pair[0])):
        differing = {name: value for name, value in problem.items() if defaults.get(name) != value}
        times = {"us": entry.us(entry.choice), "xla_us": entry.us(XLA)}
        times = {name: us for name, us in times.items() if us is not None}
        rows.append("  " + json.dumps({"problem": differing, **entry.choice.as_dict(), **times}))
    head = {
        "machine": _machine(environment),
        "abi": {family.name: family.ABI for family in kernels.families(op, environment.platform)},
        "versions": versions,
        "defaults": defaults,
    }
    heads = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    return "{\n" + ",\n".join([*heads, ' "rows": [\n' + ",\n".join(rows)]) + "\n ]\n}\n"


def _order(entry: Entry) -> Any:
    return dataclasses.astuple(entry.key.problem)


def _defaults(problems: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values that fields have in more than half of the problems."""
    found = {}
    for name in problems[0]:
        if not all(name in problem for problem in problems):  # left out where it has its default
            continue
        text, count = collections.Counter(json.dumps(problem[name]) for problem in problems).most_common(1)[0]
        if 2 * count > len(problems):
            found[name] = json.loads(text)
    return found


def versions_of(entries: Iterable[Entry]) -> dict[str, Any]:
    """The versions in the newest entry."""
    newest = max(entries, key=stored.date)
    return {name: newest.metadata.get(name) for name in VERSIONS}


def update(entries: Iterable[Entry]) -> list[pathlib.Path]:
    """Puts entries into the tables of their machines and operations, and returns the tables' files."""
    groups: dict[tuple[str, Environment], list[Entry]] = {}
    for entry in entries:
        machine = _machine(entry.key.environment)
        groups.setdefault((entry.key.problem.op, Environment(**machine, abi=())), []).append(entry)
    paths = []
    for (op, environment), new in groups.items():
        path = table.path_for(op, environment.device_kind)
        held = [item.entry for item in stored.read_table(path) if item.entry]
        merged = {entry.key: entry for entry in held} | {entry.key: entry for entry in new}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(list(merged.values()), versions_of(new)))
        paths.append(path)
    return paths


def _read(source: str) -> list[stored.Stored]:
    """The entries of a source, checked like those of a cache."""
    path = pathlib.Path(source)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        text = json.dumps(json.loads(path.read_text())["tuning"])
        return [stored.Stored(path, entry) for _, entry in TuningResult.loads(text)]
    return stored.read_source("SOURCE", source)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    found: list[Entry] = []
    for source in parser.parse_args(argv).sources:
        try:
            items = _read(source)
        except UsageError as error:
            parser.error(str(error))
        found += [item.entry for item in items if item.entry]
        for item in (item for item in items if item.entry is None):
            print(f"not used: {item.path}: {item.reason}", file=sys.stderr)
    for path in update(found):
        print(path)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
