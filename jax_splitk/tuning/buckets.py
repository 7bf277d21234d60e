"""Decisions that serve more problems than their own: of products with a few rows more.

What a config's time depends on of the rows is how many tiles they fill. A problem names its representatives, whose rows
fill the same tiles, or nearly so (`QuantizedMatmulProblem.representatives`). The first of them decides whose config is
legal for the problem, and loses little there by the cost model.
"""

import dataclasses
from collections.abc import Callable, Iterator

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import model
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key, key_for

# How much slower than the best for a problem another one's config may be, by the cost model.
MAX_LOSS = 0.03

# In an entry's metadata: what the problem has that decided for it.
REPRESENTATIVE = "decision of"

# An entry and where it comes from.
Found = tuple[Entry, str]


def representatives(key: Key) -> list[Key]:
    """The keys of the problem's representatives but itself."""
    problems = OPERATIONS[key.problem.op].representatives(key.problem)
    return [key_for(problem, key.target) for problem in problems if problem != key.problem]


def served(key: Key, workspace_limit: int, find: Callable[[Key], Found | None]) -> Found | None:
    """The first representative's decision that holds for `key` as well, as an entry of `key` without times.

    Args:
      find: the representative's entry, and where that comes from.
    """
    for other in representatives(key):
        found = find(other)
        candidate = None if found is None else held_by(key, found[0], workspace_limit)
        if found is not None and candidate is not None:
            metadata, limit = {REPRESENTATIVE: _differing(other, key)}, found[0].workspace_limit_bytes
            entry = Entry.of(key, candidate, metadata=metadata, workspace_limit_bytes=limit)
            return entry, f"{found[1]}, decision of {metadata[REPRESENTATIVE]}"
    return None


def to_tune(key: Key, workspace_limit: int) -> list[Key]:
    """What is measured for `key`, until one's decision holds for it: representatives whose best config by the model
    does, then itself."""
    found = []
    for other in representatives(key):
        best = model.best(other.problem, key.target, workspace_limit)
        if best is not None and _loss(key, other, Candidate(*best[1:]), workspace_limit) <= MAX_LOSS:
            found.append(other)
    return [*found, key]


def needed(entry: Entry) -> Iterator[tuple[Candidate, Problem]]:
    """What may be lowered because of an entry: its choice, for its own problem and for others that it decides for."""
    yield entry.choice, entry.key.problem
    for problem in OPERATIONS[entry.key.problem.op].represented(entry.key.problem):
        candidate = held_by(key_for(problem, entry.key.target), entry, entry.workspace_limit_bytes)
        if candidate is not None:
            yield candidate, problem


def held_by(key: Key, entry: Entry, workspace_limit: int) -> Candidate | None:
    """What the entry of a representative decides for `key`; None where it does not hold there."""
    candidate = entry.best(workspace_limit)
    if candidate is None:
        return None
    loss = _loss(key, entry.key, candidate, workspace_limit, entry)
    return candidate if loss <= MAX_LOSS else None


def _loss(key: Key, other: Key, candidate: Candidate, workspace_limit: int, entry: Entry | None = None) -> float:
    """How much slower than the best for `key` the candidate is that was chosen for `other`: 0.05 for 5%; infinite where
    it is not legal, or where that is not known. `entry`: `other`'s."""
    here, there = (model.best(k.problem, key.target, workspace_limit) for k in (key, other))
    legal = candidate.refusal(key.problem, key.target) is None
    if here is None or there is None or min(here[0], there[0]) <= 0:
        return float("inf")
    if not legal or candidate.workspace_bytes(key.problem) > workspace_limit:
        return float("inf")
    if candidate.family is None:
        # XLA's time is not larger for fewer rows, and ours as much smaller as the model says.
        ours = min((m.us for m in entry.measurements if m.us and m.candidate != XLA), default=None) if entry else None
        xla = entry.us(XLA) if entry else None
        ours = None if ours is None else ours * here[0] / there[0]
        # A time of an entry may be as small as a number can be.
        return xla / ours - 1 if ours and xla else float("inf")
    losses = [
        candidate.family.estimate(k.problem, candidate.config, key.target) / best[0]
        for k, best in ((key, here), (other, there))
    ]
    # What the model holds against the config where it was measured to be the fastest is the model's error.
    return losses[0] / max(1.0, losses[1]) - 1


def _differing(key: Key, other: Key) -> str:
    """What the problem of `key` has otherwise: 32 rows."""
    values, others = map(dataclasses.asdict, (key.problem, other.problem))
    return ", ".join(f"{value} {name}" for name, value in values.items() if value != others[name])
