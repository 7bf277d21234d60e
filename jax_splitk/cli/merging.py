"""Bringing entries together in one cache folder, without losing any."""

import pathlib

from jax_splitk.cli.stored import Stored, Unusable, date, read
from jax_splitk.runtime import disk
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key

ADDED, UPDATED, UNCHANGED, FAILED = "added", "updated", "unchanged", "failed"


def combined(held: Entry, other: Entry) -> Entry:
    """The newer decision of the two (`held` where they are equally old), and both's measurements."""
    return entries.merge(held, other) if date(other) > date(held) else entries.merge(other, held)


def absorb(key: Key, entry: Entry, folder: pathlib.Path) -> tuple[str, str | None]:
    """Puts an entry into a cache folder; (what happened, why it failed).

    A damaged file in its place is replaced; one of another version of jax_splitk is not.
    """
    path = folder / key.file
    held = read(path, folder)
    if isinstance(held, Unusable) and held.foreign:
        return FAILED, f"{path} is another version's: {held.reason}"
    merged = combined(held.entry, entry) if isinstance(held, Stored) else entry
    if isinstance(held, Stored) and merged == held.entry:
        return UNCHANGED, None
    if not disk.write(path, merged.dumps().encode()):
        return FAILED, f"{path} cannot be written"
    return (UPDATED if isinstance(held, Stored) else ADDED), None
