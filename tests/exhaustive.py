"""Tests that `make test-all` runs and `make test` leaves out."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test: every `every`-th, and for `make test-all` also the others. A tuple stands for several
    arguments."""
    found = []
    for i, value in enumerate(values):
        given = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*given, id=name(value), marks=[pytest.mark.exhaustive] * (i % every > 0)))
    return found
