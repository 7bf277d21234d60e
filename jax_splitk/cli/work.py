"""What `tune` and `explain` are given: a script, which runs as `python SCRIPT` would, or problems as JSON."""

import argparse
import dataclasses
import json
import os
import pathlib
import runpy
import sys
import traceback
from typing import Any

from jax_splitk.cli.output import UsageError
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import disk
from jax_splitk.tuning.key import problem_from_dict

_NAME = "SCRIPT_OR_PROBLEMS"
_ACCEPTED = (
    "an existing .py file, an existing .json file, or JSON text: one problem, an object with 'op' and the problem's "
    "fields, or a list of them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar=_NAME, help="a .py file, a .json file, or JSON text of a problem or a list")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--workspace-limit-bytes", type=int, metavar="N", help="for another limit than 256 MiB")


def script_or_problems(arguments: argparse.Namespace) -> pathlib.Path | list[Problem]:
    """The script's path, or the problems, each once."""
    text = arguments.what
    if text.endswith(".py") and os.path.isfile(text):
        return pathlib.Path(text)
    content = text if text.lstrip()[:1] in ("{", "[") else disk.read(text) if text.endswith(".json") else None
    try:
        if content is None:
            raise ValueError("no such file")
        problems = _problems(content)
    except ValueError as error:
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise UsageError(f"{_NAME}={shown!r}: {error}; accepted: {_ACCEPTED}") from None
    if arguments.script_arguments is not None:
        raise UsageError(f"-- {' '.join(arguments.script_arguments)}; accepted only with a script, not with problems")
    return problems


def _problems(text: str | bytes) -> list[Problem]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    items = data if isinstance(data, list) else [data]
    if not items:
        raise ValueError("an empty list")
    found = {}
    for i, item in enumerate(items):
        try:
            if not isinstance(item, dict) or "op" not in item:
                raise ValueError(f"{json.dumps(item)[:200]} is not an object with 'op'")
            found[problem_from_dict(item["op"], {k: v for k, v in item.items() if k != "op"})] = None
        except (TypeError, ValueError) as error:
            raise ValueError(f"problem {i}: {error}") from None
    return list(found)


def as_dict(problem: Problem) -> dict[str, Any]:
    """Plain data, which `tune` and `explain` accept."""
    return {"op": problem.op, **dataclasses.asdict(problem)}


def run(path: pathlib.Path, arguments: list[str] | None) -> str | None:
    """Runs the script as `__main__`; None, or how it failed, its traceback being on stderr then.

    `sys.argv` and `sys.path` stay the script's: this process has nothing else to do. jax is imported already: a script
    that sets `JAX_...` variables before it imports jax must get them from outside.
    """
    sys.argv = [str(path), *(arguments or [])]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        return None if exit_.code in (None, 0) else f"{path} exited with {exit_.code}"
    except Exception as error:
        traceback.print_exc()
        return f"{path} failed: {type(error).__name__}: {error}"
    return None
