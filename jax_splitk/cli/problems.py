"""The argument SCRIPT_OR_PROBLEMS: a Python file, or problems as JSON."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from jax_splitk.cli.usage import UsageError
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.key import problem_from_dict

NAME = "SCRIPT_OR_PROBLEMS"
ACCEPTED = (
    "an existing .py file, an existing .json file, or JSON text: one problem, an object with 'op' and the problem's "
    "fields, or a list of them"
)


def script_or_problems(text: str) -> pathlib.Path | list[Problem]:
    """The script's path, or the problems, each once."""
    if text.lstrip()[:1] in ("{", "["):
        return problems(text, text)
    if os.path.isfile(text) and text.endswith(".py"):
        return pathlib.Path(text)
    if os.path.isfile(text) and text.endswith(".json"):
        try:
            return problems(pathlib.Path(text).read_bytes(), text)
        except OSError as error:
            raise UsageError(f"{NAME}={text!r}: {error}; accepted: {ACCEPTED}") from None
    raise UsageError(f"{NAME}={text!r}; accepted: {ACCEPTED}")


def problems(text: str | bytes, shown: str) -> list[Problem]:
    """The problems in JSON text; `shown` is what messages call it."""
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{NAME}={shown!r}: not JSON ({error}); accepted: {ACCEPTED}") from None
    items = data if isinstance(data, list) else [data]
    if not items:
        raise UsageError(f"{NAME}={shown!r}: an empty list; accepted: {ACCEPTED}")
    found = {}
    for i, item in enumerate(items):
        where = f"{NAME}={shown!r}: " + (f"problem {i}: " if isinstance(data, list) else "")
        if not isinstance(item, dict) or "op" not in item:
            raise UsageError(f"{where}{json.dumps(item)[:200]} is not an object with 'op'; accepted: {ACCEPTED}")
        try:
            found[problem_from_dict(item["op"], {k: v for k, v in item.items() if k != "op"})] = None
        except (TypeError, ValueError) as error:
            raise UsageError(f"{where}{error}") from None
    return list(found)


def as_dict(problem: Problem) -> dict[str, Any]:
    """Plain data, which `tune` and `explain` accept."""
    return {"op": problem.op, **dataclasses.asdict(problem)}
