"""Entries on disk: one JSON file for each key, in layers.

The writable layer is `JAX_SPLITK_CACHE_DIR` (disk.cache_dir()). Then come the read-only layers of
`JAX_SPLITK_CACHE_PATH` (separated by colons), then the tables that ship with the package. Writes are atomic and hold no
lock, so any number of processes may share a layer. The last writer of a key merges its entry with the one that it
finds. A file that is damaged, foreign or newer is a miss with one warning.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterator

from jax_splitk.runtime import disk
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import once, table
from jax_splitk.tuning.entry import Entry, Found, InvalidEntry
from jax_splitk.tuning.key import FOLDER_PREFIX, Environment, Key

# A cache's name, by whether it is the writable one.
_NAMES = {True: "user cache", False: "read-only cache"}


def layers() -> list[tuple[str, pathlib.Path]]:
    """(name, folder) of the layers, in the order of their precedence."""
    own = disk.cache_dir()
    return [*((_NAMES[folder == own], folder) for folder in disk.folders()), ("shipped table", table.FOLDER)]


def cached(key: Key) -> Iterator[Found]:
    """The caches' entries for `key`, in the order of their precedence."""
    own = disk.cache_dir()
    for folder in () if disk.mode() == "off" else disk.folders():
        entry = read(os.path.join(folder, key.file), key)  # building a pathlib.Path takes longer than finding no file
        if entry is not None:
            yield Found(entry, _NAMES[folder == own])
        once.state.result(("old entries", folder), functools.partial(_look_for_old_entries, folder))


def shipped(key: Key) -> Iterator[Found]:
    """The shipped table's entry for `key`."""
    if disk.mode() != "off" and (entry := table.lookup(key)) is not None:
        yield Found(entry, "shipped table")


def found(key: Key) -> Iterator[Found]:
    """The entries of all layers for `key`, in the order of their precedence."""
    return itertools.chain(cached(key), shipped(key))


def lookup(key: Key) -> Found | None:
    """The entry of the first layer that has `key`; None if no layer has it."""
    return next(found(key), None)


def _look_for_old_entries(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        if any(not inner.startswith(FOLDER_PREFIX) for inner in os.listdir(os.path.join(folder, "tuning"))):
            prune = "`python -m jax_splitk cache prune --environment other` deletes a user cache's"
            disk.warn_once(f"{folder} has entries of another version of jax_splitk, which are not used; {prune}")


def elsewhere(key: Key) -> list[Environment]:
    """The other machines for which the caches have the key's problem. It reads every entry: only an error's message
    needs it."""
    found: dict[Environment, None] = {}
    for path in (path for folder in disk.folders() for path in files(folder)):
        with contextlib.suppress(ValueError, RecursionError):
            other = entries.whole(json.loads(disk.read(path) or b"")).key
            if other.problem == key.problem and other.environment != key.environment:
                found[other.environment] = None
    return list(found)


def read(path: str | pathlib.Path, key: Key) -> Entry | None:
    """The entry in a file; None if there is no file, or, with a warning, if the file cannot be used."""
    data = disk.read(path)
    if data is None:
        return None
    try:
        return entries.loads(data, key)
    except InvalidEntry as error:
        disk.warn_once(f"{path} is ignored: {error}")
        return None


def save(entry: Entry) -> bool:
    """Merges an entry into the writable layer. Returns False if nothing was written."""
    folder = disk.cache_dir()
    if disk.mode() != "update":
        return False
    if folder is None:
        disk.warn_once(disk.no_place())
        return False
    path = folder / entry.key.file
    return disk.write(path, entries.merge(read(path, entry.key), entry).dumps().encode())


def files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The entry files of a layer; none if the folder cannot be read."""
    return disk.files(folder, "tuning/*/*.json")
