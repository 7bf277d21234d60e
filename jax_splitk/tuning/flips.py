"""Choices that change when a problem is measured again. Within the noise such a change is a tie; beyond it, one of the
two searches was wrong."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax_splitk.tuning.entry import Entry

# The tie band: candidates whose times differ by less count as equal. A challenger must be faster by more.
NOISE = 0.02


def noted(old: Entry | None, new: Entry) -> Entry:
    """The new entry. If the old entry of its key was searched as far, the metadata say whether the choice changed."""
    if old is None or old.key != new.key or not old.is_searched(new.workspace_limit_bytes):
        return new
    found: dict[str, Any] = {"changed": new.choice != old.choice}
    if found["changed"]:
        us, was_us = new.us(new.choice), new.us(old.choice)
        slower = was_us / us - 1 if us and was_us else None
        found |= {"was": str(old.choice), "slower_by": slower, "tie": slower is not None and slower <= NOISE}
    metadata = {**new.metadata, "again": found}
    return dataclasses.replace(new, evidence={**new.evidence, "metadata": metadata})


def _of(entry: Entry) -> dict[str, Any] | None:
    """The note that `noted` put into an entry. None if there is none, or if it is not valid, since an entry may come
    from a file."""
    found = entry.metadata.get("again")
    return found if isinstance(found, dict) and isinstance(found.get("changed"), bool) else None


def describe(entry: Entry) -> str:
    """One line on the second measurement; empty for a problem that was measured once."""
    if (found := _of(entry)) is None:
        return ""
    if not found["changed"]:
        return "measured again: the same choice"
    slower = found.get("slower_by")
    by = f"now slower by {slower:.1%}" if isinstance(slower, float) else "not timed again"
    where = "within" if found.get("tie") is True else "outside"
    return f"measured again: the choice was {found.get('was')}, {by}, {where} the tie band of {NOISE:.0%}"


def summary(entries: Iterable[Entry]) -> list[str]:
    """One line on all problems that were measured again; none if there are none."""
    again = [found for entry in entries if (found := _of(entry)) is not None]
    changed = [found for found in again if found["changed"]]
    outside = sum(found.get("tie") is not True for found in changed)
    text = f"{len(again)} measured again, {len(changed)} choices changed, {outside} outside the tie band of {NOISE:.0%}"
    return [text] if again else []
