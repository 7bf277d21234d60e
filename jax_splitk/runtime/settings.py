"""Environment variables, read when they are needed and checked as arguments are."""

import math
import os
from collections.abc import Sequence


def word(name: str, accepted: Sequence[str], default: str) -> str:
    """The variable's value, `default` where it is unset or empty; ValueError unless it is one of `accepted`."""
    chosen = os.environ.get(name) or default
    if chosen not in accepted:
        raise ValueError(f"{name}={chosen!r}; accepted: {', '.join(map(repr, accepted))}")
    return chosen


def seconds(name: str, default: float) -> float:
    """The variable's value as a number of seconds; ValueError unless it is above 0."""
    return positive(name, os.environ.get(name) or str(default), "seconds")


def positive(name: str, text: str, unit: str) -> float:
    """The number that `text` is; ValueError unless it is above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={text!r}; accepted: a number of {unit} above 0")
    return value
