"""Entries of cache folders and of a `TuningResult`'s files: read with every check, and described."""

import dataclasses
import datetime
import json
import os
import pathlib
from typing import Any

from jax_splitk.cli import work
from jax_splitk.cli.output import UsageError, number
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import disk
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import key as keys
from jax_splitk.tuning import store
from jax_splitk.tuning.entry import XLA, Candidate, Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.result import TuningResult

HEADER = ("digest", "us", "XLA us", "ratio", "problem", "choice")
NARROW = ("choice", "problem")
UNDATED = datetime.datetime.min.replace(tzinfo=datetime.UTC)
_UNREADABLE = "it cannot be read"
# What reading a damaged entry raises.
_DAMAGE = (ValueError, TypeError, ArithmeticError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Stored:
    """An entry that can be used, and its file."""

    path: pathlib.Path
    key: Key
    entry: Entry


@dataclasses.dataclass(frozen=True)
class Unusable:
    """A file that is never used. `foreign`: another version of jax_splitk may use it."""

    path: pathlib.Path
    reason: str
    foreign: bool = False


def read(path: pathlib.Path, folder: pathlib.Path | None = None) -> Stored | Unusable:
    """The entry in a file, which must lie where lookups in the cache `folder` would find it; None: anywhere."""
    data = disk.read(path)
    if data is None:
        return Unusable(path, _UNREADABLE)
    foreign = False
    try:
        fields = _object(data)
        schema, key = fields.get("schema"), fields.get("key")
        op = key.get("op") if isinstance(key, dict) else None
        foreign = (schema != keys.SCHEMA and type(schema) is int) or (isinstance(op, str) and op not in OPERATIONS)
        if schema != keys.SCHEMA:
            raise ValueError(f"schema {schema!r}; accepted: {keys.SCHEMA}")
        key = keys.key_from_dict(key)
        foreign = key.environment.abi != keys.environment(key.problem, key.target).abi
        entry = entries.loads(data, key)
    except _DAMAGE as error:
        return Unusable(path, str(error), foreign)
    if folder is not None and path != folder / key.file:
        return Unusable(path, f"it is not where it would be looked for, {folder / key.file}")
    return Stored(path, key, entry)


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a {type(fields).__name__}; accepted: an object")
    return fields


def read_folder(folder: pathlib.Path) -> tuple[list[Stored], list[Unusable]]:
    """Every entry file of a cache folder."""
    found = [read(path, folder) for path in store.files(folder)]
    return [f for f in found if isinstance(f, Stored)], [f for f in found if isinstance(f, Unusable)]


def read_file(path: pathlib.Path) -> tuple[list[Stored], list[Unusable]]:
    """Every entry of a file with a TuningResult's text, which is used as a whole or not at all."""
    data = disk.read(path)
    if data is None:
        return [], [Unusable(path, _UNREADABLE)]
    try:
        return [Stored(path, key, entry) for key, entry in TuningResult.loads(data)], []
    except _DAMAGE as error:
        return [], [Unusable(path, str(error))]


def read_source(argument: str, text: str) -> tuple[list[Stored], list[Unusable]]:
    """Every entry of a cache folder or of a TuningResult's file, which must be there."""
    path = pathlib.Path(text)
    if os.path.isdir(path / "tuning"):
        return read_folder(path)
    if os.path.isfile(path):
        return read_file(path)
    raise UsageError(f"{argument}={text!r}; accepted: a cache folder, which contains tuning/, or a TuningResult's file")


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
    """The decision as plain data, without its measurements."""
    us, xla_us, ratio = times(entry)
    return {
        "digest": key.digest[:40],
        "problem": work.as_dict(key.problem),
        "environment": dataclasses.asdict(key.environment),
        "workspace_limit_bytes": entry.workspace_limit_bytes,
        "choice": entry.choice.as_dict(),
        "predicted": None if entry.predicted is None else entry.predicted.as_dict(),
        **{"us": us, "xla_us": xla_us, "ratio": ratio, "regret": entry.regret},
        "metadata": entry.metadata,
    }


def row(key: Key, entry: Entry) -> list[str]:
    """The decision as the cells of a table with `HEADER`; the problem without its operation, which the choice tells."""
    us, xla_us, ratio = times(entry)
    problem = str(key.problem).removeprefix(f"{key.problem.op} ").replace("bfloat", "bf").replace("float", "f")
    return [key.digest[:10], number(us), number(xla_us), number(ratio, ".2f"), problem, str(entry.choice)]
