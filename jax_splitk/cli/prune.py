"""`cache prune`: deletes what was asked for, and lists it."""

import argparse
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from jax_splitk.cli import output, stored
from jax_splitk.runtime import compiler, disk, settings, source, toolchain
from jax_splitk.tuning import store

# A write takes milliseconds: a temporary file this old was left by a process that died.
_ABANDONED_DAYS = 1 / 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--environment", choices=("other", "all"), help="what other machines or versions made, or all")
    parser.add_argument("--older-than", metavar="DAYS", help="only files that were written longer ago")
    parser.add_argument("--damaged", action="store_true", help="also damaged files, and what dead processes left")
    parser.add_argument("--dry-run", action="store_true", help="list, but do not delete")
    parser.set_defaults(run=_command)


def _command(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        output.require_writable()
    environment, older_than, damaged = arguments.environment, arguments.older_than, arguments.damaged
    if environment is None and older_than is None and not damaged:
        raise output.UsageError("nothing to prune was named; accepted: --environment, --older-than, --damaged")
    with output.usage():
        days = None if older_than is None else settings.positive("--older-than", older_than, "days")
    deleted, failed = [], []
    for file in _files(disk.cache_dir()):
        if file.damage is not None:
            chosen = damaged
        else:
            chosen = environment is not None or days is not None
            chosen = chosen and (environment != "other" or file.is_others)
            chosen = chosen and (days is None or _days(file.path) > days)
        if not chosen:
            continue
        try:
            if not arguments.dry_run:
                file.path.unlink(missing_ok=True)
            deleted.append({"path": file.path, "why": file.damage or file.what})
        except OSError as error:
            failed.append({"path": file.path, "why": str(error)})
    verb = "would delete" if arguments.dry_run else "deleted"
    lines = [f"{verb} {item['path']}: {item['why']}" for item in deleted]
    value = {"dry_run": arguments.dry_run, "deleted": deleted, "failed": failed}
    output.emit(value, "\n".join([*lines, f"{verb} {len(deleted)} files"]), arguments.json)
    for item in failed:
        output.note(f"cannot delete {item['path']}: {item['why']}")
    return 1 if failed else 0


class _File(NamedTuple):
    """A file of a cache: what it is, whether only other machines or versions use it, and why nobody can."""

    path: pathlib.Path
    what: str
    is_others: bool
    damage: str | None = None


def _files(folder: pathlib.Path) -> Iterator[_File]:
    local = stored.local_environments()
    for path in store.files(folder):
        is_others = path.parent.name not in local
        item = None if is_others else stored.read(path, folder)
        yield _File(path, "an entry", is_others, item.reason if isinstance(item, stored.Unusable) else None)
    # Machine code names no machine: it is another installation's if its source text, compiler or headers are not those
    # of now. Without a compiler here that cannot be told of any.
    compiles = toolchain.unavailable() is None
    current = {compiler.origin(file) for file in source.source_files()} if compiles else set()
    for path, origin in compiler.cached(folder):
        damage = "damaged, or another version's machine code" if origin is None else None
        yield _File(path, "machine code", compiles and origin not in current, damage)
    for path in sorted([*(folder / "tuning").glob("*/.tmp-*"), *(folder / "cubin").glob(".tmp-*")]):
        if _days(path) > _ABANDONED_DAYS:
            yield _File(path, "a temporary file", False, "left by a process that died while writing")


def _days(path: pathlib.Path) -> float:
    """How long ago a file was written; 0 for one that is gone."""
    try:
        return (time.time() - path.stat().st_mtime) / 86400
    except OSError:
        return 0.0
