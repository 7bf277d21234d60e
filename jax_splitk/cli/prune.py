"""`cache prune`: deletes what was asked for, and lists it."""

import argparse
import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from jax_splitk.cli import output, stored
from jax_splitk.runtime import compiler, disk, settings, source, toolchain


class _File(NamedTuple):
    """A file of a cache: what it is, whether only other machines or versions use it, and why nobody can."""

    path: pathlib.Path
    what: str
    is_others: bool
    damage: str | None


def prune(arguments: argparse.Namespace) -> int:
    """The command."""
    dry_run, environment, older_than = arguments.dry_run, arguments.environment, arguments.older_than
    folder = output.users_cache(writable=not dry_run)
    if environment is None and older_than is None and not arguments.damaged:
        raise output.UsageError("nothing to prune was named; accepted: --environment, --older-than, --damaged")
    with output.usage():
        days = 0.0 if older_than is None else settings.positive("--older-than", older_than, "days")

    def is_chosen(file: _File) -> bool:
        if file.damage is not None:
            return arguments.damaged
        asked = environment is not None or older_than is not None
        return asked and (environment != "other" or file.is_others) and _days(file.path) >= days

    deleted, failed = [], []
    for file in filter(is_chosen, _files(folder)):
        try:
            if not dry_run:
                file.path.unlink(missing_ok=True)
            deleted.append({"path": file.path, "why": file.damage or file.what})
        except OSError as error:
            failed.append({"path": file.path, "why": str(error)})
    verb = "would delete" if dry_run else "deleted"
    lines = [f"{verb} {item['path']}: {item['why']}" for item in deleted]
    value = {"dry_run": dry_run, "deleted": deleted, "failed": failed}
    output.emit(value, "\n".join([*lines, f"{verb} {len(deleted)} files"]), arguments.json)
    for item in failed:
        output.note(f"cannot delete {item['path']}: {item['why']}")
    return 1 if failed else 0


def _files(folder: pathlib.Path) -> Iterator[_File]:
    for item in stored.read_folder(folder):
        yield _File(item.path, "an entry", item.foreign, None if item.foreign else item.reason or None)
    # Machine code names no machine: it is another installation's if its source text, compiler or headers are not those
    # of now. Without a compiler here that cannot be told of any.
    compiles = toolchain.unavailable() is None
    current = {compiler.origin(file) for file in source.source_files()} if compiles else set()
    for path, origin in compiler.cached(folder):
        damage = "damaged, not to be trusted, or another version's machine code" if origin is None else None
        yield _File(path, "machine code", compiles and origin not in current, damage)
    for pattern in ("tuning/*/", "cubin/"):
        for path in disk.abandoned(folder, pattern):
            yield _File(path, "a temporary file", False, "left by a process that died while writing")


def _days(path: pathlib.Path) -> float:
    """How long ago a file was written; 0 for one that is gone."""
    with contextlib.suppress(OSError):
        return (time.time() - path.lstat().st_mtime) / 86400
    return 0.0
