"""Looks up decisions that were made before, in all places that have them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from jax_splitk.kernels import Family
from jax_splitk.tuning import buckets, searches, siblings, store
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.options import Options


@dataclasses.dataclass
class Query:
    """A request to the sources of decisions.

    Attributes:
      key: the problem, and the machine for which it is lowered.
      options: the caller's options.
      limit: bytes of workspace that the choice may have.
      families: the families that can serve, among those that the caller allows.
      here: whether the choice is for this process's devices. Then a miss may be measured, and all processes of a job
        must choose the same.
      final: whether the choice will be lowered, not only shown.
      again: whether the command line wants a measurement although there is a decision.
      exact: whether representatives must not decide for the problem.
      held: an earlier source's decision, which a measurement may replace.
    """

    key: Key
    options: Options
    limit: int
    families: tuple[Family, ...] = ()
    here: bool = False
    final: bool = False
    again: bool = False
    exact: bool = False
    held: Found | None = None

    def is_settled(self) -> bool:
        """Whether no measurement may replace `held`."""
        return self.held is not None and not self.again and self.held.entry.is_searched(self.limit)


class Decisions:
    """Looks up entries in some places. All places are asked for the problem first, in their order. Then all are asked
    for each representative, whose decision must hold for the problem, too."""

    def __init__(self, *places: Callable[[Key], Iterable[Found]]) -> None:
        self._places = places

    def __call__(self, query: Query) -> Found | None:
        own, stored = self._entries(query.key, query.limit)
        if own is not None or query.exact:
            return own
        for other in buckets.representatives(query.key):
            found = self.own(other, query.limit)
            if found is not None and (derived := buckets.derived(query.key, found, query.limit, stored)) is not None:
                return derived
        return None

    def own(self, key: Key, workspace_limit: int) -> Found | None:
        """The first decision for exactly this key, not derived from another's, that has an answer within the workspace
        limit."""
        return self._entries(key, workspace_limit)[0]

    def _entries(self, key: Key, workspace_limit: int) -> tuple[Found | None, Entry | None]:
        """(`own`, an answer of `buckets.derived` that was found on the way)"""
        stored = None
        for found in itertools.chain.from_iterable(place(key) for place in self._places):
            if buckets.is_derived(found.entry):
                stored = stored or found.entry
            elif found.entry.best(workspace_limit) is not None:
                return found, stored
        return None, stored


LOCAL = Decisions(searches.unsaved, store.cached, store.shipped)
SHIPPED_TABLE = Decisions(store.shipped)
SIBLING_TABLES = Decisions(siblings.tables)
