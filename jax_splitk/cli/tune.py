"""`tune`: decides by measurement, ahead of time, for problems or for what a script lowers."""

import argparse
import contextlib
import logging
import pathlib
import sys
from typing import Any

from jax_splitk.cli import constraints, output, stored
from jax_splitk.cli.problems import NAME, as_dict, script_or_problems
from jax_splitk.cli.script import environment, run
from jax_splitk.cli.usage import UsageError, positive, require_writable
from jax_splitk.ops import tune
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import store, tuner
from jax_splitk.tuning.watch import Watched, watching

logger = logging.getLogger("jax_splitk")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure what a script lowers, or problems, and remember the fastest")
    parser.add_argument("what", metavar=NAME, help="a .py file, a .json file, or JSON text of a problem or a list")
    parser.add_argument("--seconds", type=positive, help="budget for one problem (JAX_SPLITK_TUNE_BUDGET_S, else 10)")
    parser.add_argument("--again", action="store_true", help="also measure what a cache already has")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    constraints.add_arguments(parser)
    parser.epilog = "Arguments after -- are the script's. Exit code 1: not everything was tuned and stored."
    parser.set_defaults(run=command, parser=parser)


def command(arguments: argparse.Namespace) -> int:
    require_writable()
    what = script_or_problems(arguments.what)
    try:
        seconds = tuner.budget_seconds() if arguments.seconds is None else arguments.seconds
    except ValueError as error:
        raise UsageError(str(error)) from None
    if isinstance(what, list) and arguments.script_arguments is not None:
        raise UsageError(f"-- {' '.join(arguments.script_arguments)}; accepted only with a script, not with problems")
    failures: list[tuple[str, dict[str, Any] | None]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(constraints.in_force(arguments))
        if arguments.json:
            stack.enter_context(output.stdout_to_stderr())
        stack.enter_context(_logging_to_stderr())
        if isinstance(what, pathlib.Path):
            stack.enter_context(environment(JAX_SPLITK_AUTOTUNE="on_miss", JAX_SPLITK_TUNE_BUDGET_S=repr(seconds)))
            watched = stack.enter_context(watching(again=arguments.again))
            failed = run(what, arguments.script_arguments or [])
            failures += [] if failed is None else [(failed, None)]
        else:
            watched = stack.enter_context(watching())
            failures += _tune_each(what, seconds, arguments.again, watched)
    undecided = _undecided(what, watched, failures)
    for key, entry in watched.entries.items():
        if entry is None and not any(problem == as_dict(key.problem) for _, problem in failures):
            failures.append((f"{key.problem}: tuning failed, see the log", as_dict(key.problem)))
        if key in watched.measured and store.lookup(key) is None:
            failures.append((f"{key.problem}: measured, but not stored", as_dict(key.problem)))
    nothing = "nothing was tuned" if isinstance(what, list) else "no jax_splitk operations were lowered"
    _show(watched, undecided, failures, nothing, arguments.json)
    for message, _ in failures:
        output.note(message)
    return 1 if failures else 0


def _tune_each(
    problems: list[Problem], seconds: float, again: bool, watched: Watched
) -> list[tuple[str, dict[str, Any] | None]]:
    """One by one, so that a problem which fails does not keep the others from being tuned."""
    failures = []
    for i, problem in enumerate(problems):
        if sys.stderr.isatty() and len(problems) > 1:
            output.note(f"problem {i + 1} of {len(problems)}")
        try:
            tune.tune_problems([problem], seconds=seconds, again=again)
        except Exception as error:
            failures.append((f"{problem}: tuning failed: {type(error).__name__}: {error}", as_dict(problem)))
    return failures


def _undecided(
    what: pathlib.Path | list[Problem], watched: Watched, failures: list[tuple[str, dict[str, Any] | None]]
) -> list[tuple[Problem, str]]:
    """What was not up for a measurement, and why."""
    seen = {key.problem for key in watched.entries}
    if isinstance(what, pathlib.Path):
        return [(choice.problem, choice.why) for choice in watched.choices if choice.problem not in seen]
    failed = [problem for _, problem in failures]
    return [(p, "only XLA can compute it") for p in what if p not in seen and as_dict(p) not in failed]


def _show(
    watched: Watched,
    undecided: list[tuple[Problem, str]],
    failures: list[tuple[str, dict[str, Any] | None]],
    nothing: str,
    as_json: bool,
) -> None:
    decided = {key: entry for key, entry in watched.entries.items() if entry is not None}
    value = {
        "decided": [
            {**stored.describe(key, entry), "measured": key in watched.measured} for key, entry in decided.items()
        ],
        "undecided": [{"problem": as_dict(problem), "why": why} for problem, why in undecided],
        "failed": [{"problem": problem, "why": message} for message, problem in failures],
    }
    rows = [
        [*stored.row(key, entry), "measured now" if key in watched.measured else "from a cache"]
        for key, entry in decided.items()
    ]
    lines = [output.table([*stored.HEADER, "how"], rows)] if rows else []
    lines += [output.printable(f"not tuned: {problem}: {why}") for problem, why in undecided]
    output.emit(value, "\n".join(lines) or nothing, as_json=as_json)


@contextlib.contextmanager
def _logging_to_stderr() -> Any:
    """One line for each tuned problem."""
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
