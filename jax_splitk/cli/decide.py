"""`explain`: what computes a script's operations, or given problems, and why. `tune`: the same, and measures first."""

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from typing import Any

from jax_splitk.cli import output, stored, work
from jax_splitk.ops.explain import expected
from jax_splitk.ops.explanation import Explanation, decision
from jax_splitk.runtime import disk, settings
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning import store, tuner
from jax_splitk.tuning.options import current, options
from jax_splitk.tuning.select import select
from jax_splitk.tuning.session import Watched, session

_logger = logging.getLogger("jax_splitk")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure what a script lowers, or problems, and remember the fastest")
    work.add_arguments(parser, "Exit code 1: not everything was tuned and stored.")
    parser.add_argument("--seconds", help="budget for one problem (JAX_SPLITK_TUNE_BUDGET_S, else 10)")
    parser.add_argument("--again", action="store_true", help="also measure what a cache already has")
    parser.set_defaults(run=_tune, parser=parser, platform=None)
    parser = commands.add_parser("explain", help="what computes a script's operations, or problems, and why")
    work.add_arguments(
        parser,
        "A script runs as it always does, on this machine's default backend, so that on a GPU what no cache has is "
        "tuned unless JAX_SPLITK_AUTOTUNE=off; for problems nothing is measured. For a script x counts lowerings; JAX "
        "lowers equal operations of one function once. What a script leaves to lax is shown by jax_splitk.explain.",
        "With --platform cuda a machine without a GPU says what an H200 would run for the same operations.",
    )
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="what would run there (default: here)")
    parser.set_defaults(run=_explain, parser=parser, again=False)


def _explain(arguments: argparse.Namespace) -> int:
    with output.usage():
        disk.mode()
    explanation, _, failed = _decided(arguments, measure=False)
    decisions = [{**dataclasses.asdict(d), "problem": work.as_dict(d.problem)} for d in explanation.decisions]
    output.emit({"platform": explanation.platform, "decisions": decisions}, str(explanation), arguments.json)
    return _failures([] if failed is None else [failed])


def _tune(arguments: argparse.Namespace) -> int:
    output.require_writable()
    with output.usage():
        given = arguments.seconds
        seconds = tuner.budget_seconds() if given is None else settings.positive("--seconds", given, "seconds")
    # For what the script starts, too; nothing else comes after it in this process.
    os.environ.update(JAX_SPLITK_AUTOTUNE="on_miss", JAX_SPLITK_TUNE_BUDGET_S=repr(seconds))
    explanation, watched, failed = _decided(arguments, measure=True)
    failures = [] if failed is None else [failed]
    for key, entry in watched.entries.items():
        if entry is None or (arguments.again and key not in watched.measured):
            failures.append(f"{key.problem}: tuning failed, see the log")
        elif key in watched.measured and store.lookup(key) is None:
            failures.append(f"{key.problem}: measured, but not stored")
    decided = {key.problem: stored.describe(entry) for key, entry in watched.entries.items() if entry is not None}
    measured = {key.problem for key in watched.measured}
    decisions = [
        {"problem": work.as_dict(p), "why": why, "measured": p in measured} | decided.get(p, {})
        for p, why in ((d.problem, d.why) for d in explanation.decisions)
    ]
    output.emit({"decisions": decisions, "failures": failures}, str(explanation), arguments.json)
    return _failures(failures)


def _failures(failures: list[str]) -> int:
    for failure in failures:
        output.note(failure)
    return 1 if failures else 0


def _decided(arguments: argparse.Namespace, measure: bool) -> tuple[Explanation, Watched, str | None]:
    """The decisions, what was watched while they were taken, and how the script failed."""
    what = work.script_or_problems(arguments)
    failed = None
    with contextlib.ExitStack() as stack:
        with output.usage():
            stack.enter_context(options(workspace_limit_bytes=arguments.workspace_limit_bytes))
        if arguments.json:
            stack.enter_context(output.stdout_to_stderr())
        if measure:
            _log_to_stderr(stack)
        watched = stack.enter_context(session().watching(again=arguments.again))
        platform = arguments.platform or local_platform()
        target = target_for(platform)
        if isinstance(what, list):
            decisions = [decision(select(problem, target, current(), measure=measure)) for problem in what]
        else:
            failed = work.run(what, arguments.script_arguments)
            if target.is_local:
                decisions = [decision(choice, count) for choice, count in watched.choices.items()]
            else:
                decisions = [expected(*asked, target, count) for asked, count in watched.asked.items()]
    return Explanation(platform, tuple(decisions)), watched, failed


def _log_to_stderr(stack: contextlib.ExitStack) -> None:
    """One line for each tuned problem."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    stack.callback(_logger.removeHandler, handler)
    stack.callback(_logger.setLevel, _logger.level)
    _logger.setLevel(logging.INFO)
