"""Tests that `make test-all` runs and `make test` leaves out."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.problems import generator


def drawn(values: Iterable[Any], every: int, salt: int) -> list[Any]:
    """One of `every` values, for tests of so many cases that share their code that each run needs only some of them.
    Each run draws others."""
    found = list(values)
    chosen = generator(salt).permutation(len(found))[: -(-len(found) // every)]
    return [found[i] for i in sorted(chosen)]


def thinned(values: Iterable[Any], every: int, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test: every `every`-th, and for `make test-all` also the others. A tuple stands for several
    arguments."""
    found = []
    for i, value in enumerate(values):
        given = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*given, id=name(value), marks=[pytest.mark.exhaustive] * (i % every > 0)))
    return found


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test: all combinations of the axes' values, for `make test-all`. `make test` runs as many of them
    as the longest axis has values, which have each value of each axis. A tuple stands for several arguments."""
    turns = range(max(map(len, axes)))
    quick = [tuple((turn + j * (turn // len(axis))) % len(axis) for j, axis in enumerate(axes)) for turn in turns]
    found = []
    for at in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, at, strict=True)]
        given = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        marks = [pytest.mark.exhaustive] * (at not in quick)
        found.append(pytest.param(*given, id="-".join(map(str, values)), marks=marks))
    return found
