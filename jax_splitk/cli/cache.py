"""`cache`: the decisions that tuning stored, listed, shown, combined and deleted."""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from jax_splitk.cli import output, prune, stored
from jax_splitk.cli.output import UsageError
from jax_splitk.cli.stored import Stored, Unusable
from jax_splitk.runtime import disk
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import store, table
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.result import TuningResult


def add_parser(commands: Any) -> None:
    cache = commands.add_parser("cache", help="list, show, combine and delete what tuning decided")
    parsers = cache.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int] | None, about: str, more: str = "") -> argparse.ArgumentParser:
        parser = parsers.add_parser(name, help=about, description=about, epilog=more)
        parser.add_argument("--json", action="store_true", help="machine-readable output")
        parser.set_defaults(run=run, parser=parser)
        return parser

    source = "a cache folder, or a file with the text of TuningResult.dumps"
    ls = add("ls", _ls, "one line for each entry", "Ratio: XLA's time to the choice's. Exit code 1: a file is damaged.")
    ls.add_argument("paths", nargs="*", metavar="PATH", help=f"{source}; the user's cache by default")
    ls.add_argument("--all", action="store_true", help="the user's cache, the read-only caches and the shipped tables")
    show = add("show", _show, "one entry with all its measurements")
    show.add_argument("what", metavar="DIGEST_PREFIX_OR_FILE", help="how a digest of `cache ls` begins, or its file")
    merge = add(
        "merge",
        _merge,
        "put entries into a cache folder or a file; the newer decision wins, all measurements are kept",
        "TuningResult.loads puts a file's entries in force. Exit code 1: not everything was merged.",
    )
    merge.add_argument("sources", nargs="+", metavar="SOURCE", help=source)
    merge.add_argument("destination", metavar="DEST", help="the same, made if need be: NAME.json is a file")
    prune.add_arguments(add("prune", None, "delete entries and compiled kernels of the user's cache, and list them"))


def _ls(arguments: argparse.Namespace) -> int:
    if arguments.all and arguments.paths:
        raise UsageError(f"--all with PATH={arguments.paths[0]!r}; accepted: one of them")
    if arguments.paths:
        sources = [(text, *stored.read_source("PATH", text)) for text in arguments.paths]
    else:
        layers = store.layers() if arguments.all else store.layers()[:1]
        sources = [(f"{name} {folder}", *stored.read_layer(folder)) for name, folder in layers]
    lines, listed = [], []
    for name, usable, unusable in sources:
        machines: dict[str, list[Stored]] = {}
        for item in sorted(usable, key=lambda item: str(item.entry.key.problem)):
            machines.setdefault(_machine(item.entry.key), []).append(item)
        for machine, items in machines.items():
            rows = [stored.row(item.entry) for item in items]
            lines += [f"{name}, {machine}:", output.table(stored.HEADER, rows, stored.NARROW)]
        lines += [] if usable else [f"{name}: no entries"]
        lines += [f"damaged: {item.path}: {item.reason}" for item in unusable if not item.foreign]
        others = sum(item.foreign for item in unusable)
        lines += [f"{others} entries of other machines or versions cannot be read here"] if others else []
        entries = [{"path": item.path, **stored.describe(item.entry)} for item in usable]
        listed.append({"source": name, "entries": entries, "unusable": list(map(dataclasses.asdict, unusable))})
    output.emit(listed, "\n".join(lines), arguments.json)
    return 0 if all(item.foreign for _, _, unusable in sources for item in unusable) else 1


def _machine(key: Key) -> str:
    e = key.environment
    return f"{e.device_kind}, {e.cores} cores" + (f", CUDA {e.cuda_major}" if e.cuda_major else "")


def _show(arguments: argparse.Namespace) -> int:
    item = _entry(arguments.what)
    if isinstance(item, Unusable):
        output.emit(dataclasses.asdict(item), f"{item.path}: {item.reason}", arguments.json)
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
        f"searched within {entry.workspace_limit_bytes} bytes of workspace",
        f"choice {entry.choice}: {output.number(us)} us, XLA {output.number(xla)} us, ratio "
        f"{output.number(ratio, '.2f')}, regret of the cost model {output.number(entry.regret, '.1%')}",
        *(f"{name} {value}" for name, value in sorted(entry.metadata.items())),
        output.table(["us", "candidate", "", ""], rows),
    ]
    output.emit(value, "\n".join(lines), arguments.json)
    return 0


def _entry(what: str) -> Stored | Unusable:
    """A file's, or the one entry, in the first layer that has it, whose digest begins so."""
    argument = f"DIGEST_PREFIX_OR_FILE={what!r}"
    if os.path.isfile(what):
        return stored.read(pathlib.Path(what))
    found: dict[str, Any] = {item.entry.key.digest[:40]: item for item in stored.read_layer(table.FOLDER)[0]}
    found |= {path.stem: path for _, folder in reversed(store.layers()) for path in store.files(folder)}
    found = {digest: item for digest, item in found.items() if what and digest.startswith(what)}
    if not found:
        raise UsageError(f"{argument}: there is none; accepted: a file, or how a digest shown by `cache ls` begins")
    if len(found) > 1:
        raise UsageError(f"{argument} is how {len(found)} digests begin; accepted: more of one of {', '.join(found)}")
    (item,) = found.values()
    return item if isinstance(item, Stored) else stored.read(item)


def _merge(arguments: argparse.Namespace) -> int:
    destination = pathlib.Path(arguments.destination)
    if os.path.abspath(destination) == os.path.abspath(disk.cache_dir()):
        output.require_writable()
    found: dict[Key, Entry] = {}
    unusable: list[Unusable] = []
    for text in arguments.sources:
        usable, bad = stored.read_source("SOURCE", text)
        unusable += bad
        for item in usable:
            found[item.entry.key] = _newer(found.get(item.entry.key), item.entry)
    held = _held(destination, found)
    merged = {key: _newer(held.get(key), entry) for key, entry in found.items()}
    changed = {key: entry for key, entry in merged.items() if entry != held.get(key)}
    failed: list[Key] = []
    if destination.suffix != ".json":
        failed = [key for key, entry in changed.items() if not disk.write(destination / key.file, _data(entry))]
    elif changed and not disk.write(destination, _data(TuningResult(tuple((held | merged).items())))):
        failed = list(changed)
    added = len(changed.keys() - held.keys())
    counts = {"added": added, "updated": len(changed) - added, "unchanged": len(merged) - len(changed)}
    value = {"into": destination, **counts, "failed": len(failed), "unusable": list(map(dataclasses.asdict, unusable))}
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    said += f", not written {len(failed)}, not used {len(unusable)}"
    output.emit(value, f"into {destination}: {said}", arguments.json)
    for item in unusable:
        output.note(f"not used: {item.path}: {item.reason}")
    return 1 if unusable or failed else 0


def _held(destination: pathlib.Path, wanted: Iterable[Key]) -> dict[Key, Entry]:
    """The destination's entries: all of a file's, a folder's of the wanted keys."""
    found: list[Stored | Unusable] = []
    if destination.suffix != ".json":
        found += [stored.read(destination / key.file, destination) for key in wanted]
    elif os.path.exists(destination):
        usable, unusable = stored.read_file(destination)
        if unusable:
            raise UsageError(f"DEST={str(destination)!r}: {unusable[0].reason}; accepted: a TuningResult's file")
        found += usable
    return {item.entry.key: item.entry for item in found if isinstance(item, Stored)}


def _newer(held: Entry | None, other: Entry) -> Entry:
    """The newer decision of the two (`held` where they are equally old), with both's measurements."""
    if held is None:
        return other
    return entries.merge(held, other) if stored.date(other) > stored.date(held) else entries.merge(other, held)


def _data(value: Entry | TuningResult) -> bytes:
    return value.dumps().encode()
