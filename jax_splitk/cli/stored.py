"""Entries in cache folders, tables and TuningResults' files: read with every check, and described."""

import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from jax_splitk.cli.output import UsageError, number
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import key as keys
from jax_splitk.tuning import store, table
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.result import TuningResult

HEADER = ("digest", "us", "XLA us", "ratio", "problem", "choice")
NARROW = ("choice", "problem")
# What reading a damaged file raises.
_DAMAGE = (ValueError, TypeError, ArithmeticError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file, or a row of a table.

    Attributes:
      entry: its entry; None if it cannot be used, for this `reason`.
      foreign: whether it lies where only other machines or versions look.
    """

    path: pathlib.Path
    entry: Entry | None
    reason: str = ""
    foreign: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data on a file that cannot be used."""
        return {"path": self.path, "reason": self.reason, "foreign": self.foreign}


def local_environments() -> set[str]:
    """The folders of a cache in which this machine, with this version, looks for entries."""
    targets = [target_for(platform) for platform in ("cpu", "cuda")]
    return {folder for op in OPERATIONS for target in targets for folder in keys.folders(op, target)}


def _read(path: pathlib.Path, parse: Callable[[bytes], Iterable[Entry]]) -> list[Stored]:
    """The entries in a file, or the one reason why none can be used."""
    data = disk.read(path)
    try:
        if data is None:
            raise ValueError("it cannot be read")
        return [Stored(path, entry) for entry in parse(data)]
    except _DAMAGE as error:
        return [Stored(path, None, str(error))]


def read(path: pathlib.Path, folder: pathlib.Path | None = None) -> Stored:
    """The entry in a file. With `folder`, a cache, the file must lie where lookups in the cache would find it."""
    (item,) = _read(path, lambda data: [entries.whole(json.loads(data))])
    if folder is None or item.entry is None or path == folder / item.entry.key.file:
        return item
    return Stored(path, None, f"it is not where lookups expect it, {folder / item.entry.key.file}")


def read_folder(folder: pathlib.Path) -> list[Stored]:
    """Every entry file of a cache folder."""
    local = local_environments()
    found = [read(path, folder) for path in store.files(folder)]
    return [dataclasses.replace(item, foreign=item.path.parent.name not in local) for item in found]


def read_table(path: pathlib.Path) -> list[Stored]:
    """Every row of a table that ships with the package."""
    try:
        found = table.read(path)
    except _DAMAGE as error:
        return [Stored(path, None, str(error))]
    rows: list[Stored] = []
    for text in found.rows:
        try:
            problem = keys.problem_from_dict(path.stem, json.loads(text))
            key = keys.key_for(problem, found.target)
            entry = found.entry(key)
            rows.append(Stored(path, entry, f"for another version of CUDA: {problem}", foreign=entry is None))
        except _DAMAGE as error:
            rows.append(Stored(path, None, str(error)))
    return rows


def read_layer(folder: pathlib.Path) -> list[Stored]:
    """Every entry in a layer of the cache."""
    if folder != table.FOLDER:
        return read_folder(folder)
    return [item for path in sorted(folder.glob("*/*.json")) for item in read_table(path)]


def read_file(path: pathlib.Path) -> list[Stored]:
    """Every entry of a TuningResult's file, which is used as a whole or not at all."""
    return _read(path, lambda data: [entry for _, entry in TuningResult.loads(data)])


def read_source(argument: str, text: str) -> list[Stored]:
    """Every entry of a cache folder or of a TuningResult's file. Raises UsageError if there is neither."""
    path = pathlib.Path(text)
    if any(os.path.isdir(path / name) for name in ("tuning", "cubin")):
        return read_folder(path)
    if os.path.isfile(path):
        return read_file(path)
    raise UsageError(f"{argument}={text!r}; accepted: a cache folder, which contains tuning/, or a TuningResult's file")


def date(entry: Entry) -> datetime.datetime:
    """When the entry was made. The earliest date where the entry has none, or one in the future."""
    undated = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    text = entry.metadata.get("date")
    try:
        when = datetime.datetime.fromisoformat(text) if isinstance(text, str) else undated
        # An offset may lead out of the calendar.
        when = when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return undated
    # Clocks of two machines may differ.
    return when if when <= datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1) else undated


def times(entry: Entry) -> tuple[float | None, float | None, float | None]:
    """(microseconds of the choice, microseconds of XLA, how many times as fast the choice is)."""
    us, xla_us = entry.us(entry.choice), entry.us(XLA)
    return us, xla_us, xla_us / us if us and xla_us else None


def describe(entry: Entry) -> dict[str, Any]:
    """The decision as plain data, without its measurements."""
    us, xla_us, ratio = times(entry)
    return {
        "digest": entry.key.digest[:40],
        "problem": keys.problem_as_dict(entry.key.problem),
        "environment": dataclasses.asdict(entry.key.environment),
        "workspace_limit_bytes": entry.workspace_limit_bytes,
        "choice": entry.choice.as_dict(),
        "predicted": None if entry.predicted is None else entry.predicted.as_dict(),
        **{"us": us, "xla_us": xla_us, "ratio": ratio, "regret": entry.regret},
        "metadata": entry.metadata,
    }


def row(entry: Entry) -> list[str]:
    """The decision as cells of a table with `HEADER`. The problem is without its operation, which the choice tells."""
    us, xla_us, ratio = times(entry)
    about = ""
    if xla_us is None and us is not None and (xla_us := entry.estimated_xla_us) is not None:
        about, ratio = "~", xla_us / us
    problem = entry.key.problem
    brief = str(problem).removeprefix(f"{problem.op} ").replace("bfloat", "bf").replace("float", "f")
    choice = str(entry.choice) if us is not None else f"not measured: {entry.choice}"
    of_xla = f"{about}{number(xla_us)}", f"{about}{number(ratio, '.2f')}"
    return [entry.key.digest[:10], number(us), *of_xla, brief, choice]
