"""Tuning entries on disk: one JSON file for each key, in layers.

The writable layer is `JAX_SPLITK_CACHE_DIR` (storage.cache_dir()), then come the read-only layers of
`JAX_SPLITK_CACHE_PATH` (separated by colons), then the tables that ship with the package. Writes are atomic and hold no
lock, so any number of processes may share a layer; the last writer of a key wins, having merged what it found. A file
that is damaged, foreign or newer is a miss with one warning, and so is a read-only layer that is no folder.
"""

import logging
import os
import pathlib
from collections.abc import Iterator

from jax_splitk.runtime import disk
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning.entry import Entry, InvalidEntry
from jax_splitk.tuning.key import Key

logger = logging.getLogger("jax_splitk")

SHIPPED = pathlib.Path(__file__).resolve().parent.parent / "tables"
READ_ONLY = "read-only cache"


class FrozenCacheMiss(RuntimeError):
    """A problem has no tuning decision, and `JAX_SPLITK_CACHE_MODE=frozen` forbids lowering it without one.

    Raised where an operation is lowered: when a call of it, or of a jitted function around it, compiles, or when it is
    exported. The message is the problem and the command that tunes it. An explicit config, `implementation="xla"`, a
    `TuningResult` in force that has the problem, and what only XLA can compute need no decision.
    """


def layers() -> list[tuple[str, pathlib.Path]]:
    """(name, folder) of the layers in the order of their precedence; the first is the writable one."""
    read_only = [p for p in os.environ.get("JAX_SPLITK_CACHE_PATH", "").split(os.pathsep) if p]
    folders = [("user cache", disk.cache_dir())]
    folders += [(READ_ONLY, disk.expanded(p)) for p in read_only]
    return [*folders, ("shipped table", SHIPPED)]


def lookup(key: Key, target: Target | None = None) -> tuple[Entry, str] | None:
    """The first layer's entry for `key`, and the layer's name; None for a miss in all of them."""
    if disk.mode() == "off":
        return None
    for name, folder in layers():
        found = read(os.path.join(folder, key.file), key, target)  # a pathlib.Path takes longer than a missing file
        if found is not None:
            return found, name
        if name == READ_ONLY:
            _warn_unless_folder(str(folder))
    return None


def shipped(key: Key, target: Target | None = None) -> Entry | None:
    """The entry that came with the package: the same for every process of a job."""
    return read(SHIPPED / key.file, key, target)


_warned: set[str] = set()
_looked_at: set[str] = set()


def _warn_unless_folder(folder: str) -> None:
    """One warning for a read-only layer that cannot hold anything; it is looked at once, since each miss comes here."""
    if folder in _looked_at:
        return
    _looked_at.add(folder)
    if not os.path.isdir(folder):
        logger.warning("JAX_SPLITK_CACHE_PATH: %s is not a folder; nothing is read from it", folder)


def read(path: str | pathlib.Path, key: Key, target: Target | None = None) -> Entry | None:
    """The entry in a file; None when there is none that can be used, with a warning if there is one that cannot."""
    data = disk.read(path)
    if data is None:
        return None
    try:
        return entries.loads(data, key, target)
    except InvalidEntry as error:
        if str(path) not in _warned:
            _warned.add(str(path))
            logger.warning("%s is ignored: %s", path, error)
        return None


def save(key: Key, entry: Entry) -> bool:
    """Stores an entry in the writable layer, merged with the one that is there; False where nothing was written."""
    if disk.mode() != "update":
        return False
    path = disk.cache_dir() / key.file
    return disk.write(path, entries.merge(read(path, key), entry).dumps().encode())


def files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The entry files of a layer; none where it may not be entered."""
    if os.path.isdir(folder / "tuning"):  # a pathlib.Path raises what os.path takes for no
        yield from sorted((folder / "tuning").glob("*/*.json"))
