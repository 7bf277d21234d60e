"""`cache prune`: deletes what was asked for, and lists it."""

import argparse
import datetime
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax_splitk.cli import output, stored
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import compiler, disk, settings
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import key as keys

# A write takes milliseconds: a temporary file this old was left by a process that died.
_ABANDONED_DAYS = 1 / 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--environment", choices=("other", "all"), help="what other machines or versions made, or all")
    parser.add_argument("--older-than", metavar="DAYS", help="only what was measured or compiled longer ago")
    parser.add_argument("--damaged", action="store_true", help="also files that no version of jax_splitk can use")
    parser.add_argument("--dry-run", action="store_true", help="list, but do not delete")
    parser.set_defaults(run=_command)


def _command(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        output.require_writable()
    if arguments.environment is None and arguments.older_than is None and not arguments.damaged:
        raise output.UsageError("nothing to prune was named; accepted: --environment, --older-than, --damaged")
    with output.usage():
        older = arguments.older_than
        days = None if older is None else settings.positive("--older-than", older, "days")
    deleted, failed = [], []
    for path, why in _selected(disk.cache_dir(), arguments.environment, days, arguments.damaged):
        try:
            if not arguments.dry_run:
                path.unlink(missing_ok=True)
            deleted.append({"path": path, "why": why})
        except OSError as error:
            failed.append({"path": path, "why": str(error)})
    value: dict[str, Any] = {"dry_run": arguments.dry_run, "deleted": deleted, "failed": failed}
    verb = "would delete" if arguments.dry_run else "deleted"
    lines = [f"{verb} {item['path']}: {item['why']}" for item in deleted]
    output.emit(value, "\n".join([*lines, f"{verb} {len(deleted)} files"]), arguments.json)
    for item in failed:
        output.note(f"cannot delete {item['path']}: {item['why']}")
    return 1 if failed else 0


class _File(NamedTuple):
    """A file of a cache: what it is, whether this installation has no use for it, its age in days (None where it does
    not say), and why no version can use it."""

    path: pathlib.Path
    what: str
    is_others: bool = False
    days: float | None = None
    damage: str | None = None


def _selected(
    folder: pathlib.Path, environment: str | None, older_than_days: float | None, damaged: bool
) -> Iterator[tuple[pathlib.Path, str]]:
    """(file, why) of what to delete.

    Args:
      environment: "other" for entries that this machine does not use, and machine code of other kernels, compilers or
        headers than this installation's; "all" for all; None for no such condition.
      older_than_days: a condition on the entry's own date; what has none is not old. For machine code on the file's.
        Both conditions must be met.
      damaged: also files that no version can use, and what dead writers left.
    """
    for file in (*_entries(folder), *_machine_code(folder)):
        if file.damage is not None:
            if damaged:
                yield file.path, file.damage
        elif (
            (environment is not None or older_than_days is not None)
            and (environment != "other" or file.is_others)
            and (older_than_days is None or (file.days is not None and file.days > older_than_days))
        ):
            whose = " that this installation does not use" if file.is_others else ""
            yield file.path, file.what + whose + ("" if file.days is None else f", {file.days:.1f} days old")
    if damaged:
        for path in sorted([*(folder / "tuning").glob("*/.tmp-*"), *(folder / "cubin").glob(".tmp-*")]):
            if _file_days(path) > _ABANDONED_DAYS:
                yield path, "left by a process that died while writing"


def _entries(folder: pathlib.Path) -> Iterator[_File]:
    targets = [target_for(platform) for platform in ("cpu", "cuda")]
    local = {e.digest() for op in OPERATIONS for target in targets for e in keys.environments(op, target)}
    usable, unusable = stored.read_folder(folder)
    for item in usable:
        when = stored.date(item.entry)
        age = datetime.datetime.now(datetime.UTC) - when
        days = None if when == stored.UNDATED else age / datetime.timedelta(days=1)
        yield _File(item.path, "an entry", item.path.parent.name not in local, days)
    for item in unusable:
        damage = None if item.foreign else item.reason
        yield _File(item.path, "an entry", item.path.parent.name not in local, damage=damage)


def _machine_code(folder: pathlib.Path) -> Iterator[_File]:
    """Compiled kernels name no machine. They are another installation's if their source text, compiler or headers are
    not those of now; without a compiler here that cannot be told of any."""
    current = None
    if compiler.unavailable() is None:
        current = {compiler.origin(file) for file in compiler.source_files()}
    for path, origin in compiler.stored(folder):
        damage = "damaged, or another version's machine code" if origin is None else None
        is_others = current is not None and origin not in current
        yield _File(path, "machine code", is_others, _file_days(path), damage)


def _file_days(path: pathlib.Path) -> float:
    try:
        return (time.time() - path.stat().st_mtime) / 86400
    except OSError:
        return 0.0
