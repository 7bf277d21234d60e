"""Entries as they lie in cache folders: read with every check, described, and the files that cannot be used."""

import dataclasses
import datetime
import json
import pathlib
from typing import Any

from jax_splitk.cli.output import note, number
from jax_splitk.cli.problems import as_dict
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import disk
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import key as keys
from jax_splitk.tuning import store
from jax_splitk.tuning.entry import XLA, Candidate, Entry
from jax_splitk.tuning.key import Key

HEADER = ("digest", "device", "problem", "choice", "us", "XLA us", "speedup", "regret", "date")
UNDATED = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Stored:
    """An entry that can be used, and its file."""

    path: pathlib.Path
    key: Key
    entry: Entry


@dataclasses.dataclass(frozen=True)
class Unusable:
    """A file that is never used. `foreign`: another version of jax_splitk may well use it."""

    path: pathlib.Path
    reason: str
    foreign: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"file": str(self.path), "reason": self.reason, "foreign": self.foreign}

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read(path: pathlib.Path, folder: pathlib.Path | None = None) -> Stored | Unusable:
    """The entry in a file, which must lie where lookups in the cache `folder` would find it; None: anywhere."""
    data = disk.read(path)
    if data is None:
        return Unusable(path, "it cannot be read")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Unusable(path, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return Unusable(path, f"a {type(fields).__name__}; accepted: an object")
    schema = fields.get("schema")
    if schema != keys.SCHEMA:
        return Unusable(path, f"schema {schema!r}; accepted: {keys.SCHEMA}", foreign=type(schema) is int)
    op = fields["key"].get("op") if isinstance(fields.get("key"), dict) else None
    if isinstance(op, str) and op not in OPERATIONS:
        return Unusable(path, f"op={op!r}; accepted: {', '.join(map(repr, OPERATIONS))}", foreign=True)
    foreign = False
    try:
        key = keys.key_from_dict(fields.get("key"))
        foreign = key.environment.abi != keys.environment(key.problem, key.target).abi
        entry = entries.loads(data, key)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        return Unusable(path, str(error), foreign)
    if folder is not None and path != folder / key.file:
        return Unusable(path, f"it is not where it would be looked for, {folder / key.file}")
    return Stored(path, key, entry)


def read_all(folder: pathlib.Path) -> tuple[list[Stored], list[Unusable]]:
    """Every entry file of a cache folder."""
    found = [read(path, folder) for path in store.files(folder)]
    return [f for f in found if isinstance(f, Stored)], [f for f in found if isinstance(f, Unusable)]


def read_folders(folders: list[pathlib.Path]) -> tuple[list[Stored], list[Unusable]]:
    """Every entry file of several cache folders."""
    usable: list[Stored] = []
    unusable: list[Unusable] = []
    for folder in folders:
        good, bad = read_all(folder)
        usable += good
        unusable += bad
    return usable, unusable


def report(unusable: list[Unusable]) -> int:
    """Says on stderr which files were skipped; the exit code."""
    for item in unusable:
        note(f"skipped {item}")
    return 1 if unusable else 0


def date(entry: Entry) -> datetime.datetime:
    """When the entry was made; `UNDATED` where it does not say."""
    text = entry.metadata.get("date")
    try:
        when = datetime.datetime.fromisoformat(text) if isinstance(text, str) else UNDATED
        # An offset may lead out of the calendar.
        return when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return UNDATED


def times(entry: Entry) -> tuple[float | None, float | None, float | None]:
    """(us of the choice, us of XLA, how many times faster the choice is)."""
    ours, xla = entry.us(entry.choice), entry.us(Candidate(XLA))
    return ours, xla, xla / ours if ours and xla else None


def describe(key: Key, entry: Entry) -> dict[str, Any]:
    """The decision as plain data."""
    ours, xla, speedup = times(entry)
    when = date(entry)
    return {
        "digest": key.digest[:40],
        "environment": key.as_dict()["environment"],
        "problem": as_dict(key.problem),
        "workspace_limit_bytes": entry.workspace_limit_bytes,
        "choice": entry.choice.as_dict(),
        "us": ours,
        "xla_us": xla,
        "speedup": speedup,
        "regret": entry.regret,
        "date": None if when == UNDATED else when.isoformat(timespec="seconds"),
    }


def row(key: Key, entry: Entry) -> list[str]:
    """The decision as the cells of a table with `HEADER`."""
    ours, xla, speedup = times(entry)
    when = date(entry)
    return [
        key.digest[:10],
        key.environment.device_kind,
        str(key.problem),
        str(entry.choice),
        number(ours),
        number(xla),
        number(speedup, ".2f"),
        number(entry.regret, ".1%"),
        "-" if when == UNDATED else when.isoformat(sep=" ", timespec="minutes")[:16],
    ]
