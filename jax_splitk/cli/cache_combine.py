"""`cache merge`, `import` and `export`: entries from one place to another."""

import argparse
import os
import pathlib
from typing import Any

from jax_splitk.cli import merging, output, stored
from jax_splitk.cli.stored import Unusable
from jax_splitk.cli.usage import UsageError, cache_folder, require_writable
from jax_splitk.runtime import disk
from jax_splitk.tuning.result import TuningResult


def merge_folders(arguments: argparse.Namespace) -> int:
    sources = [cache_folder("SRC", text) for text in arguments.sources]
    destination = pathlib.Path(arguments.destination)
    if os.path.exists(destination) and not os.path.isdir(destination):
        raise UsageError(f"DST={arguments.destination!r}; accepted: a cache folder, or a new one's name")
    if any(os.path.exists(destination) and source.samefile(destination) for source in sources):
        raise UsageError(f"DST={arguments.destination!r} is also a SRC; accepted: another folder")
    usable, unusable = stored.read_folders(sources)
    return _absorb_all([(item.key, item.entry) for item in usable], unusable, destination, arguments.json)


def import_entries(arguments: argparse.Namespace) -> int:
    require_writable()
    data = disk.read(pathlib.Path(arguments.file))
    if data is None:
        raise UsageError(f"FILE={arguments.file!r} cannot be read; accepted: a file made by `cache export`")
    try:
        result = TuningResult.loads(data)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        output.note(f"nothing imported: FILE={arguments.file!r}: {error}; accepted: a file made by `cache export`")
        return 1
    return _absorb_all(list(result), [], disk.cache_dir(), arguments.json)


def _absorb_all(pairs: list[Any], unusable: list[Unusable], folder: pathlib.Path, as_json: bool) -> int:
    outcomes: dict[str, list[dict[str, Any]]] = {
        name: [] for name in (merging.ADDED, merging.UPDATED, merging.UNCHANGED, merging.FAILED)
    }
    for key, entry in pairs:
        outcome, why = merging.absorb(key, entry, folder)
        outcomes[outcome].append({"file": str(folder / key.file), "problem": str(key.problem), "why": why})
    value = {"into": str(folder), **outcomes, "unusable": [item.as_dict() for item in unusable]}
    counts = ", ".join(f"{name} {len(items)}" for name, items in outcomes.items())
    output.emit(value, f"into {folder}: {counts}, skipped {len(unusable)}", as_json=as_json)
    for item in outcomes[merging.FAILED]:
        output.note(f"failed: {item['problem']}: {item['why']}")
    return max(stored.report(unusable), 1 if outcomes[merging.FAILED] else 0)


def export_entries(arguments: argparse.Namespace) -> int:
    usable, unusable = stored.read_all(disk.cache_dir())
    path = pathlib.Path(arguments.file)
    if os.path.isdir(path):
        raise UsageError(f"FILE={arguments.file!r} is a folder; accepted: a file's name")
    text = TuningResult(tuple((item.key, item.entry) for item in usable)).dumps()
    written = disk.write(path, text.encode())
    value = {
        "file": str(path),
        "written": written,
        "entries": len(usable),
        "unusable": [item.as_dict() for item in unusable],
    }
    outcome = f"{len(usable)} entries in {path}" if written else f"{path} cannot be written"
    output.emit(value, outcome, as_json=arguments.json)
    stored.report(unusable)
    return 0 if written else 1
