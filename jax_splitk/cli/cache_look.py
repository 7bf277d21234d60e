"""`cache ls`, `show`, `verify` and `diff`: nothing is changed."""

import argparse
import os
import pathlib

from jax_splitk.cli import output, stored
from jax_splitk.cli.stored import Unusable
from jax_splitk.cli.usage import UsageError, cache_folder
from jax_splitk.tuning import store


def list_entries(arguments: argparse.Namespace) -> int:
    layers = list(enumerate(store.layers()))
    if arguments.layer is not None:
        if not 0 <= arguments.layer < len(layers):
            raise UsageError(f"--layer={arguments.layer}; accepted: 0 to {len(layers) - 1}")
        layers = [layers[arguments.layer]]
    found, unusable = [], []
    for i, (name, folder) in layers:
        usable, bad = stored.read_all(folder)
        found += [(i, name, item) for item in usable]
        unusable += bad
    listed = [
        {"layer": i, "layer_name": name, "file": str(item.path), **stored.describe(item.key, item.entry)}
        for i, name, item in found
    ]
    value = {
        "layers": [{"layer": i, "name": name, "folder": str(folder)} for i, (name, folder) in layers],
        "entries": listed,
        "unusable": [item.as_dict() for item in unusable],
    }
    rows = [[str(i), *stored.row(item.key, item.entry)] for i, _, item in found]
    lines = [f"layer {i}: {name}, {folder}" for i, (name, folder) in layers]
    lines.append(output.table(["layer", *stored.HEADER], rows) if rows else "no entries")
    output.emit(value, "\n".join(lines), as_json=arguments.json)
    if unusable:
        output.note(f"files that cannot be used: {len(unusable)}; `cache verify` says why")
    return 0


def show_entry(arguments: argparse.Namespace) -> int:
    path = _entry_file(arguments.what)
    item = stored.read(path)
    if isinstance(item, Unusable):
        output.emit(item.as_dict(), output.printable(str(item)), as_json=arguments.json)
        return 1
    key, entry = item.key, item.entry
    measurements = sorted(entry.measurements, key=lambda m: (m.us is None, m.us or 0.0))
    value = {
        "file": str(path),
        **stored.describe(key, entry),
        "predicted": None if entry.predicted is None else entry.predicted.as_dict(),
        "measurements": [m.as_dict() for m in measurements],
        "metadata": entry.metadata,
    }
    ours, xla, speedup = stored.times(entry)
    roles = {entry.choice: "choice", entry.predicted: "predicted"}
    if entry.choice == entry.predicted:
        roles = {entry.choice: "choice, predicted"}
    rows = [[output.number(m.us), str(m.candidate), roles.get(m.candidate, ""), m.error or ""] for m in measurements]
    environment = key.environment
    lines = [
        str(key.problem),
        f"file {path}",
        f"for {environment.device_kind} ({environment.platform}, {environment.cores} cores, CUDA "
        f"{environment.cuda_major}, {', '.join(environment.abi)})",
        f"searched within {entry.workspace_limit_bytes} bytes of workspace",
        f"choice {entry.choice}: {output.number(ours)} us, XLA {output.number(xla)} us, speedup "
        f"{output.number(speedup, '.2f')}, regret of the cost model {output.number(entry.regret, '.1%')}",
        *(f"{name} {value}" for name, value in sorted(entry.metadata.items())),
    ]
    text = "\n".join(map(output.printable, lines)) + "\n" + output.table(["us", "candidate", "", ""], rows)
    output.emit(value, text, as_json=arguments.json)
    return 0


def _entry_file(what: str) -> pathlib.Path:
    """A file as such, or the one entry, in the first layer that has it, whose digest begins so."""
    argument = f"DIGEST_PREFIX_OR_FILE={what!r}"
    if os.path.isfile(what):
        return pathlib.Path(what)
    found: dict[str, pathlib.Path] = {}
    for _, folder in store.layers():
        for path in store.files(folder):
            if what and path.stem.startswith(what):
                found.setdefault(path.stem, path)
    if not found:
        raise UsageError(f"{argument}: there is none; accepted: a file, or how a digest shown by `cache ls` begins")
    if len(found) > 1:
        raise UsageError(f"{argument} is how {len(found)} digests begin; accepted: more of one of {', '.join(found)}")
    return next(iter(found.values()))


def verify_files(arguments: argparse.Namespace) -> int:
    if arguments.folder is None:
        folders = [folder for _, folder in store.layers()]
    else:
        folders = [cache_folder("DIR", arguments.folder)]
    usable, unusable = stored.read_folders(folders)
    value = {
        "folders": list(map(str, folders)),
        "usable": len(usable),
        "unusable": [item.as_dict() for item in unusable],
    }
    lines = [output.printable(str(item)) for item in unusable]
    lines.append(f"{len(usable)} entries can be used, {len(unusable)} files cannot")
    output.emit(value, "\n".join(lines), as_json=arguments.json)
    return 1 if unusable else 0


def diff_folders(arguments: argparse.Namespace) -> int:
    folders = [cache_folder("A", arguments.a), cache_folder("B", arguments.b)]
    (a, bad_a), (b, bad_b) = (stored.read_all(folder) for folder in folders)
    unusable = [*bad_a, *bad_b]
    by_key = {item.key: item for item in b}
    keys_of_a = {item.key for item in a}
    only_a = [item for item in a if item.key not in by_key]
    only_b = [item for item in b if item.key not in keys_of_a]
    shared = [(item, by_key[item.key]) for item in a if item.key in by_key]
    other = [(x, y) for x, y in shared if x.entry.choice != y.entry.choice]
    value = {
        "only_in_a": [stored.describe(item.key, item.entry) for item in only_a],
        "only_in_b": [stored.describe(item.key, item.entry) for item in only_b],
        "different": [{"a": stored.describe(x.key, x.entry), "b": stored.describe(y.key, y.entry)} for x, y in other],
        "same": len(shared) - len(other),
        "unusable": [item.as_dict() for item in unusable],
    }
    rows = [
        [where, *stored.row(item.key, item.entry)]
        for where, items in (("only A", only_a), ("only B", only_b))
        for item in items
    ]
    for x, y in other:
        rows += [["A", *stored.row(x.key, x.entry)], ["B", *stored.row(y.key, y.entry)]]
    text = output.table(["", *stored.HEADER], rows) + "\n" if rows else ""
    text += f"only in A {len(only_a)}, only in B {len(only_b)}, different {len(other)}, same {value['same']}"
    output.emit(value, text, as_json=arguments.json)
    return stored.report(unusable)
