"""Decisions that hold for several problems: for products with somewhat fewer rows or with an epilogue, and for
convolutions with a dilated filter.

A problem names its representatives. The time of a product's config depends on how many tiles the rows fill: problems
whose rows fill the same tiles, or nearly so, have one representative (`QuantizedMatmulProblem.representatives`). That
of a convolution has no dilation (`ConvProblem.representatives`). The first representative decides whose config is legal
for the problem, and loses little there according to the cost model.
"""

import dataclasses
from collections.abc import Iterator

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import model
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key, key_for

# How much slower than a problem's best config a representative's may be, by the cost model.
MAX_LOSS = 0.03

# Key in an entry's metadata: how the representative that decided differs from the problem.
REPRESENTATIVE = "decision of"


def representatives(key: Key) -> list[Key]:
    """The keys of the problem's representatives, without its own."""
    problems = OPERATIONS[key.problem.op].representatives(key.problem)
    return [key_for(problem, key.target) for problem in problems if problem != key.problem]


def derived(key: Key, found: Found, workspace_limit: int, stored: Entry | None = None) -> Found | None:
    """A representative's decision as one for `key`, without times; None if it does not hold for `key`.

    Args:
      stored: an earlier answer. If it is of the same decision, the cost model need not be asked again.
    """
    entry, differing = found.entry, _differing(found.entry.key, key)
    where = f"{found.where}, {REPRESENTATIVE} {differing}"
    choice = entry.best(workspace_limit)
    if stored is not None and (stored.metadata[REPRESENTATIVE], stored.best(workspace_limit)) == (differing, choice):
        return Found(dataclasses.replace(stored, workspace_limit_bytes=entry.workspace_limit_bytes), where)
    candidate = choice_for(key, entry, workspace_limit)
    if candidate is None:
        return None
    limit, metadata = entry.workspace_limit_bytes, {REPRESENTATIVE: differing}
    return Found(Entry.of(key, candidate, metadata=metadata, workspace_limit_bytes=limit), where)


def is_derived(entry: Entry) -> bool:
    """Whether an entry is an answer of `derived`. It decides nothing without the representative's."""
    return REPRESENTATIVE in entry.metadata


def to_store(entry: Entry) -> Entry:
    """An answer of `derived` as an entry of a cache."""
    differing = entry.metadata[REPRESENTATIVE]
    return Entry.unmeasured(entry.key, entry.choice, f"{REPRESENTATIVE} {differing}", {REPRESENTATIVE: differing})


def to_tune(key: Key, workspace_limit: int) -> list[Key]:
    """The keys to measure for `key`, until the decision of one holds for it: the representatives whose best config by
    the cost model holds for it, then itself."""
    found = []
    for other in representatives(key):
        best = model.best(other, workspace_limit)
        if best is not None and _loss(key, other, best[1], workspace_limit) <= MAX_LOSS:
            found.append(other)
    return [*found, key]


def needed(entry: Entry) -> Iterator[tuple[Candidate, Problem]]:
    """What may be lowered because of an entry: its choice, for its own problem and for those that it represents."""
    yield entry.choice, entry.key.problem
    for problem in OPERATIONS[entry.key.problem.op].represented(entry.key.problem):
        candidate = choice_for(key_for(problem, entry.key.target), entry, entry.workspace_limit_bytes)
        if candidate is not None:
            yield candidate, problem


def choice_for(key: Key, entry: Entry, workspace_limit: int) -> Candidate | None:
    """What an entry, a representative's or its own, decides for `key`; None if it does not hold for `key`."""
    candidate = entry.best(workspace_limit)
    if candidate is None or key == entry.key:
        return candidate
    loss = _loss(key, entry.key, candidate, workspace_limit, entry)
    return candidate if loss <= MAX_LOSS else None


def _loss(key: Key, other: Key, candidate: Candidate, workspace_limit: int, entry: Entry | None = None) -> float:
    """How much slower than the best for `key` a candidate is that was chosen for `other`: 0.05 for 5%. Infinite where
    the candidate is not legal, or the loss is not known. `entry` is the entry of `other`."""
    here, there = model.best(key, workspace_limit), model.best(other, workspace_limit)
    legal = candidate.refusal(key.problem, key.target) is None
    if here is None or there is None or min(here[0], there[0]) <= 0:
        return float("inf")
    if not legal or candidate.workspace_bytes(key.problem) > workspace_limit:
        return float("inf")
    if candidate.family is None:
        if not OPERATIONS[key.problem.op].xla_is_bounded:
            return float("inf")
        # XLA takes no longer, and ours is faster by as much as the model says.
        ours = min((m.us for m in entry.measurements if m.us and m.candidate != XLA), default=None) if entry else None
        xla = entry.us(XLA) if entry else None
        ours = None if ours is None else ours * here[0] / there[0]
        # An entry's time may be the smallest of all floats, and become zero.
        return xla / ours - 1 if ours and xla else float("inf")
    losses = [
        candidate.family.estimate(k.problem, candidate.config, key.target) / best[0]
        for k, best in ((key, here), (other, there))
    ]
    # A loss that the model predicts where the config was measured to be the fastest is the model's error.
    return losses[0] / max(1.0, losses[1]) - 1


def _differing(key: Key, other: Key) -> str:
    """How the problem of `key` differs from that of `other`: "32 rows", or "quantized_matmul" if another operation has
    it."""
    values, others = map(dataclasses.asdict, (key.problem, other.problem))
    differing = [f"{value} {name}" for name, value in values.items() if value != others[name]]
    return ", ".join([key.problem.op] * (key.problem.op != other.problem.op) + differing)
