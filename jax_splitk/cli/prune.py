"""Which files of a cache to delete: only what was asked for."""

import datetime
import pathlib
import time

from jax_splitk.cli.stored import UNDATED, Stored, Unusable, date, read_all
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import target_for
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
      environment: "other" for entries that this machine does not use, and machine code of other kernels, compilers or
        headers than this installation's; "all" for all; None for no such condition.
      older_than_days: a condition on the entry's own date; what has none is not old. For machine code on the file's.
        Both conditions must be met.
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
        for path in sorted([*(folder / "tuning").glob("*/.tmp-*"), *(folder / "cubin").glob(".tmp-*")]):
            if (_file_age_seconds(path) or 0.0) > ABANDONED_SECONDS:
                chosen.append((path, "left by a process that died while writing"))
    return chosen + _machine_code(folder, environment, older_than_days, damaged)


def _machine_code(
    folder: pathlib.Path, environment: str | None, older_than_days: float | None, damaged: bool
) -> list[tuple[pathlib.Path, str]]:
    """`selected` of the compiled kernels, which name no machine: they are another environment's if their source text,
    compiler or headers are not those of now. Without a compiler here that cannot be told of any."""
    chosen: list[tuple[pathlib.Path, str]] = []
    current = _current_origins() if environment == "other" else None
    for path, origin in compiler.stored(folder):
        if origin is None:
            if damaged:
                chosen.append((path, "damaged, or another version's machine code"))
            continue
        if environment is None and older_than_days is None:
            continue
        if environment == "other" and (current is None or origin in current):
            continue
        age = (_file_age_seconds(path) or 0.0) / 86400
        if older_than_days is not None and age <= older_than_days:
            continue
        reasons = {"other": "no current kernel's machine code", "all": "machine code"}
        why = [reasons[environment]] if environment else []
        why += [f"{age:.1f} days old"] if older_than_days is not None else []
        chosen.append((path, ", ".join(why)))
    return chosen


def _current_origins() -> set[str] | None:
    if compiler.unavailable() is not None:
        return None
    return {compiler.origin(file) for file in compiler.source_files()}


def _age_days(item: Stored | Unusable) -> float | None:
    if isinstance(item, Unusable):
        return None
    when = date(item.entry)
    if when == UNDATED:
        return None
    return (datetime.datetime.now(datetime.UTC) - when) / datetime.timedelta(days=1)


def _file_age_seconds(path: pathlib.Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None
