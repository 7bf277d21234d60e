"""The tables that ship with the package: a JSON file for each device and operation, with a line for each problem.

    {"machine": {...}, "abi": {family: ABI, ...}, "versions": {...}, "defaults": {...}, "rows": [
     {"problem": {...}, "family": ..., "config": {...}, "us": ..., "xla_us": ...},

`machine` is the environment of the keys, `defaults` are fields of problems, for rows that do not name them. A row holds
as long as each family that can compute its problem has the table's ABI. `python -m benchmarks.tables` makes them.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jax_splitk.problems.problem import stored_fields
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import once
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry, InvalidEntry, legal_candidate
from jax_splitk.tuning.key import Environment, Key, environment_from_dict
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

# The text of a problem's fields, which is the key of its row.
_text = functools.partial(json.dumps, sort_keys=True)

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tables"


def path_for(op: str, device_kind: str) -> pathlib.Path:
    """The table's file, e.g. nvidia_h200/conv_wgrad.json."""
    return FOLDER / re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) / f"{op}.json"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table's file as plain data; `rows` is keyed by the text of the problems."""

    machine: Environment | None = None
    abi: frozenset[str] = frozenset()
    rows: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> Target:
        """The machine of a table that has rows."""
        machine = self.machine
        if machine is None:
            raise InvalidEntry("the table is empty")
        return Target(machine.platform, machine.device_kind, machine.compute_capability, machine.cores)

    def entry(self, key: Key) -> Entry | None:
        """The entry for a key; None if the table has none. Raises InvalidEntry for a row that cannot be used."""
        row = self.rows.get(_text(stored_fields(key.problem)))
        if row is None or self.machine != dataclasses.replace(key.environment, abi=()):
            return None
        changed = set(key.environment.abi) - self.abi
        if changed:
            raise InvalidEntry(f"it was measured with other versions than {', '.join(sorted(changed))}")
        times = [{**row, "error": None}]
        if "xla_us" in row:  # missing where XLA could not compute it, or was not timed
            times.append({"family": XLA.name, "config": None, "us": row["xla_us"], "error": None})
        evidence = {"predicted": None, "metadata": {}, "measurements": times}
        return Entry(key, legal_candidate(row, key), DEFAULT_WORKSPACE_LIMIT, evidence)


def lookup(key: Key) -> Entry | None:
    """The shipped entry for a key. None if there is none, or, with one warning, if it cannot be used."""
    op, device_kind = key.problem.op, key.environment.device_kind
    table = once.state.result((FOLDER, op, device_kind), lambda: _read_or_warn(path_for(op, device_kind)))
    try:
        return table.entry(key)
    except InvalidEntry as error:
        disk.warn_once(f"{path_for(op, device_kind)}: the row of {key.problem} is ignored: {error}")
        return None


def _read_or_warn(path: pathlib.Path) -> Table:
    try:
        return read(path)
    except InvalidEntry as error:
        disk.warn_once(f"{path} is ignored: {error}")
        return Table()


def read(path: pathlib.Path) -> Table:
    """The table in a file; empty if there is no file. Raises InvalidEntry for a file that is no table."""
    text = disk.read(path)
    if text is None:
        return Table()
    try:
        data = json.loads(text)
        abi = frozenset(f"{name}:{version}" for name, version in data["abi"].items())
        rows = {_text({**data["defaults"], **row["problem"]}): row for row in data["rows"]}
        return Table(environment_from_dict(dict(**data["machine"], abi=[])), abi, rows)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidEntry(f"it is not a table ({type(error).__name__}: {error})") from None
