"""Which files of a cache to delete: only what was asked for."""

import datetime
import pathlib
import time

from jax_splitk.cli.stored import UNDATED, Stored, Unusable, date, read_all
from jax_splitk.operations import OPERATIONS
from jax_splitk.target import target_for
from jax_splitk.tuning import key as keys

# A write takes milliseconds: a temporary file this old was left by a process that died.
ABANDONED_SECONDS = 3600
PLATFORMS = ("cpu", "cuda")


def local_environments() -> set[str]:
    """Digests of the environments in which this machine, with this version, looks entries up."""
    return {
        environment.digest()
        for op in OPERATIONS
        for platform in PLATFORMS
        for environment in keys.environments(op, target_for(platform))
    }


def selected(
    folder: pathlib.Path, *, environment: str | None, older_than_days: float | None, damaged: bool
) -> list[tuple[pathlib.Path, str]]:
    """(file, why) of what to delete.

    Args:
      environment: "other" for entries that this machine does not use, "all" for all, None for no such condition.
      older_than_days: a condition on the entry's own date; what has none is not old. Entries must meet both conditions.
      damaged: also files that no version can use, and what dead writers left.
    """
    stored, unusable = read_all(folder)
    chosen: list[tuple[pathlib.Path, str]] = []
    if environment is not None or older_than_days is not None:
        local = local_environments() if environment == "other" else set()
        for item in [*stored, *(u for u in unusable if u.foreign)]:
            elsewhere = item.path.parent.name not in local
            if environment is not None and not elsewhere:
                continue
            age = _age_days(item)
            if older_than_days is not None and (age is None or age <= older_than_days):
                continue
            reasons = {"other": "another environment's", "all": "an entry"}
            why = [reasons[environment]] if environment else []
            why += [f"{age:.1f} days old"] if older_than_days is not None else []
            chosen.append((item.path, ", ".join(why)))
    if damaged:
        chosen += [(item.path, item.reason) for item in unusable if not item.foreign]
        for path in sorted((folder / "tuning").glob("*/.tmp-*")):
            if _abandoned(path):
                chosen.append((path, "left by a process that died while writing"))
    return chosen


def _age_days(item: Stored | Unusable) -> float | None:
    if isinstance(item, Unusable):
        return None
    when = date(item.entry)
    if when == UNDATED:
        return None
    return (datetime.datetime.now(datetime.UTC) - when) / datetime.timedelta(days=1)


def _abandoned(path: pathlib.Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
    except OSError:
        return False
