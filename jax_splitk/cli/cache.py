"""`cache ls`, `show`, `merge`, `export` and `prune`, for stored decisions and the compiled kernels beside them."""

import argparse
import contextlib
import os
import pathlib
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from jax_splitk.cli import kernels, output, stored
from jax_splitk.cli.output import UsageError
from jax_splitk.cli.stored import Stored
from jax_splitk.runtime import compiler, disk, settings, source, toolchain
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import flips, store, table
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.result import TuningResult


def ls(arguments: argparse.Namespace) -> int:
    """Lists a line for each entry, and the number of compiled kernels. Every file is read."""
    if arguments.all and arguments.paths:
        raise UsageError(f"--all with PATH={arguments.paths[0]!r}; accepted: one of them")
    if arguments.paths:
        sources = [(text, pathlib.Path(text), stored.read_source("PATH", text)) for text in arguments.paths]
    else:
        layers = store.layers() if arguments.all else [("user cache", output.users_cache())]
        sources = [(f"{name} {folder}", folder, stored.read_layer(folder)) for name, folder in layers]
    lines, listed, damaged = [], [], 0
    for name, folder, items in sources:
        machines: dict[str, list[list[str]]] = {}
        for entry in sorted((item.entry for item in items if item.entry), key=lambda entry: str(entry.key.problem)):
            machines.setdefault(_machine(entry.key), []).append(stored.row(entry))
        for machine, rows in machines.items():
            lines += [f"{name}, {machine}:", output.table(stored.HEADER, rows, stored.NARROW)]
        lines += [] if machines else [f"{name}: no entries"]
        code = list(compiler.cached(folder))
        lines += [f"{len(code)} compiled kernels"] if code else []
        unusable = [item for item in items if item.entry is None]
        unusable += kernels.unusable(folder, code)
        lines += [f"damaged: {item.path}: {item.reason}" for item in unusable if not item.foreign]
        others = sum(item.foreign for item in unusable)
        lines += [f"{others} entries of other machines or versions cannot be read here"] if others else []
        damaged += len(unusable) - others
        described = [{"path": item.path, **stored.describe(item.entry)} for item in items if item.entry]
        found = {"entries": described, "kernels": len(code), "unusable": [item.as_dict() for item in unusable]}
        listed.append({"source": name, **found})
    output.emit(listed, "\n".join(lines), arguments.json)
    return 1 if damaged else 0


def _machine(key: Key) -> str:
    e = key.environment
    return f"{e.device_kind}, {e.cores} cores" + (f", CUDA {e.cuda_major}" if e.cuda_major else "")


def show(arguments: argparse.Namespace) -> int:
    """Shows one entry with all its measurements."""
    item = _found(arguments.what)
    if item.entry is None:
        output.emit(item.as_dict(), f"{item.path}: {item.reason}", arguments.json)
        return 1
    entry, key = item.entry, item.entry.key
    value = {"path": item.path, **stored.describe(entry)}
    measurements = sorted(entry.measurements, key=lambda m: (m.us is None, m.us or 0.0))
    value["measurements"] = [m.as_dict() for m in measurements]
    roles = {entry.predicted: "predicted"}
    roles[entry.choice] = "choice, predicted" if entry.predicted == entry.choice else "choice"
    rows = [[output.number(m.us), str(m.candidate), roles.get(m.candidate, ""), m.error or ""] for m in measurements]
    us, xla, ratio = stored.times(entry)
    lines = [
        str(key.problem),
        f"file {item.path}",
        f"for {_machine(key)} ({', '.join(key.environment.abi)})",
        *([] if entry.is_unmeasured else [f"searched within {entry.workspace_limit_bytes} bytes of workspace"]),
        f"choice {entry.choice}: {output.number(us)} us, XLA {output.number(xla)} us, ratio "
        f"{output.number(ratio, '.2f')}, regret of the cost model {output.number(entry.regret, '.1%')}",
        *filter(None, [flips.describe(entry)]),
        *(f"{name} {value}" for name, value in sorted(entry.metadata.items()) if name != "again"),
        output.table(["us", "candidate", "", ""], rows),
    ]
    output.emit(value, "\n".join(lines), arguments.json)
    return 0


def _found(what: str) -> Stored:
    """The entry in a file, or the one whose digest begins with `what`, from the first layer that has it."""
    argument = f"DIGEST_PREFIX_OR_FILE={what!r}"
    if os.path.isfile(what):
        return stored.read(pathlib.Path(what))
    found: dict[str, Stored | pathlib.Path] = {
        item.entry.key.digest[:40]: item for item in stored.read_layer(table.FOLDER) if item.entry
    }
    found |= {path.stem: path for _, folder in reversed(store.layers()) for path in store.files(folder)}
    found = {digest: item for digest, item in found.items() if what and digest.startswith(what)}
    if not found:
        raise UsageError(f"{argument}: not found; accepted: a file, or the beginning of a digest shown by `cache ls`")
    if len(found) > 1:
        raise UsageError(
            f"{argument}: {len(found)} digests begin so; accepted: more characters of one of {', '.join(found)}"
        )
    (item,) = found.values()
    return item if isinstance(item, Stored) else stored.read(item)


def merge(arguments: argparse.Namespace) -> int:
    """Merges the sources' entries into a folder or a file: the newer decision wins, and all measurements are kept. Into
    a folder kernels are copied, too."""
    destination = _destination(arguments)
    if os.path.abspath(destination) == os.path.abspath(disk.cache_dir() or ""):
        output.users_cache(writable=True)
    items = [item for text in arguments.sources for item in stored.read_source("SOURCE", text)]
    folders = [pathlib.Path(text) for text in arguments.sources if os.path.isdir(text)]
    return _merged(items, folders, destination, arguments)


def export(arguments: argparse.Namespace) -> int:
    """Copies everything in the caches in force into a folder, and compiles the kernels that are missing there."""
    destination, folders = _destination(arguments), [f for f in disk.folders() if os.path.isdir(f)]
    if destination.suffix == ".json" or any(os.path.abspath(f) == os.path.abspath(destination) for f in folders):
        raise UsageError(f"DEST={str(destination)!r}; accepted: a folder that is none of the caches in force")
    if not folders:
        raise UsageError(f"no cache is there: {', '.join(map(str, disk.folders()))}")
    items = [item for folder in folders for item in stored.read_folder(folder)]
    return _merged(items, folders, destination, arguments, complete=True)


def _destination(arguments: argparse.Namespace) -> pathlib.Path:
    found = settings.local_path("DEST", arguments.destination)
    return pathlib.Path(arguments.destination) if found is None else found


def _merged(
    items: list[Stored],
    folders: list[pathlib.Path],
    destination: pathlib.Path,
    arguments: argparse.Namespace,
    *,
    complete: bool = False,
) -> int:
    read = list(map(_measured, items))
    found: dict[Key, Entry] = {}
    for entry in (item.entry for item in read if item.entry):
        found[entry.key] = _newer(found.get(entry.key), entry)
    is_file = destination.suffix == ".json"
    held = _held(destination) if is_file else {key: stored.read(destination / key.file, destination) for key in found}
    before = {key: item.entry for key, item in held.items() if item.entry}
    merged = {key: _newer(before.get(key), entry) for key, entry in found.items()}
    changed = {key: entry for key, entry in merged.items() if entry != before.get(key)}
    if is_file:
        text = TuningResult(tuple((before | merged).items())).dumps()
        failed = len(changed) if changed and not disk.write(destination, text.encode()) else 0
    else:
        failed = sum(not disk.write(destination / key.file, e.dumps().encode()) for key, e in changed.items())
    carried = kernels.Carried()
    if not is_file:
        carried = kernels.carry(folders, destination, list(merged.values()), complete=complete)
    added = len(changed.keys() - before.keys())
    counts = {"added": added, "updated": len(changed) - added, "unchanged": len(merged) - len(changed)}
    unusable = [*(item for item in read if item.entry is None), *carried.unusable]
    failed += carried.failed
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    said += f", not written {failed}, not used {len(unusable)}; kernels {carried.kernels}, compiled {carried.compiled}"
    value = {"into": destination, **counts, "kernels": carried.kernels, "compiled": carried.compiled}
    value |= {"failed": failed, "unusable": [item.as_dict() for item in unusable]}
    output.emit(value, f"into {destination}: {said}", arguments.json)
    for item in unusable:
        output.note(f"not used: {item.path}: {item.reason}")
    return 1 if unusable or failed else 0


def _measured(item: Stored) -> Stored:
    """The item; without its entry if the choice is a kernel that a search never measured."""
    entry = item.entry
    if entry is None or entry.choice == XLA or entry.is_unmeasured or entry.us(entry.choice) is not None:
        return item
    return Stored(item.path, None, f"its choice {entry.choice} was not measured", item.foreign)


def _held(file: pathlib.Path) -> dict[Key, Stored]:
    """The entries of the TuningResult's file that is about to be replaced, if there is one."""
    if not os.path.lexists(file):
        return {}
    regular = stat.S_ISREG(file.lstat().st_mode)
    items = stored.read_file(file) if regular else [Stored(file, None, "it is not a regular file")]
    if wrong := next((item.reason for item in items if item.entry is None), None):
        raise UsageError(f"DEST={str(file)!r}: {wrong}; accepted: a TuningResult's file")
    return {item.entry.key: item for item in items if item.entry}


def _newer(held: Entry | None, other: Entry) -> Entry:
    """The newer of two decisions (`held` where they are equally old), with the measurements of both."""
    if held is None:
        return other
    return entries.merge(held, other) if stored.date(other) > stored.date(held) else entries.merge(other, held)


class _File(NamedTuple):
    """A file of a cache.

    Attributes:
      what: its kind, in words.
      is_others: whether only other machines or versions use it.
      damage: why nobody can use it; None otherwise.
    """

    path: pathlib.Path
    what: str
    is_others: bool
    damage: str | None


def prune(arguments: argparse.Namespace) -> int:
    """Deletes the files that the arguments name, and lists them."""
    dry_run, environment, older_than = arguments.dry_run, arguments.environment, arguments.older_than
    folder = output.users_cache(writable=not dry_run)
    if environment is None and older_than is None and not arguments.damaged:
        raise UsageError("nothing to prune was named; accepted: --environment, --older-than, --damaged")
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
    # of now. Without a compiler here any is as good as another.
    current = {compiler.origin(file) for file in source.source_files()}
    here = None if toolchain.unavailable() else toolchain.identity()
    for path, kernel in compiler.cached(folder):
        damage = "damaged, not to be trusted, or another version's machine code" if kernel is None else None
        is_others = kernel is not None and (kernel.origin not in current or here not in (None, kernel.compiler))
        yield _File(path, "machine code", is_others, damage)
    for pattern in ("tuning/*/", "cubin/"):
        for path in disk.abandoned(folder, pattern):
            yield _File(path, "a temporary file", False, "left by a process that died while writing")


def _days(path: pathlib.Path) -> float:
    """The days since a file was written; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return (time.time() - path.lstat().st_mtime) / 86400
    return 0.0
