"""`explain` says what computes a script's operations, or given problems, and why. `tune` measures them first."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from jax_splitk.cli import output, stored
from jax_splitk.cli.defaults import with_defaults
from jax_splitk.cli.schema import FIELDS
from jax_splitk.ops.decision import Decision, Gain, decision
from jax_splitk.ops.explain import about_silent, expected, explanation, left_to_lax, routed
from jax_splitk.ops.explanation import Explanation
from jax_splitk.ops.routing import only_xla
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, disk, settings
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import measurement, searches, store, tuner, watch
from jax_splitk.tuning.decide import measured_first
from jax_splitk.tuning.key import key_for, problem_as_dict, problem_from_dict
from jax_splitk.tuning.options import Options, current, options
from jax_splitk.tuning.search import is_served
from jax_splitk.tuning.select import select
from jax_splitk.tuning.watch import Watched

_logger = logging.getLogger("jax_splitk")


def explain(arguments: argparse.Namespace) -> int:
    """Shows what computes each operation. Given problems are not measured."""
    with output.usage():
        disk.mode()
    explained, _, failures = _decided(arguments, measure=False)
    output.emit(_as_dict(explained), str(explained), arguments.json)
    return _told(failures)


def _as_dict(explained: Explanation) -> dict[str, Any]:
    """The explanation as plain data."""
    found = {name: getattr(explained, name) for name in ("platform", "device", "assumed", "notes")}
    for name, decisions in (("decisions", explained.decisions), ("unrouted", explained.unrouted)):
        found[name] = [
            {**dataclasses.asdict(d), "problem": problem_as_dict(d.problem), "saved_us": d.saved_us} for d in decisions
        ]
    gains: dict[str, Gain] = {"gain": explained.gain, "gain_if_routed": explained.gain_if_routed}
    return found | {name: dataclasses.asdict(gain) for name, gain in gains.items()}


def tune(arguments: argparse.Namespace) -> int:
    """Measures and stores the problems that no cache has, then shows what `explain` shows."""
    with output.usage():
        given = arguments.seconds
        seconds = tuner.budget_seconds() if given is None else settings.positive("--seconds", given, "seconds")
    if arguments.dry_run:
        return _dry_run(arguments, seconds)
    output.users_cache(writable=True)
    # For what the script starts, too; nothing else comes after it in this process.
    os.environ.update(JAX_SPLITK_AUTOTUNE="on_miss", JAX_SPLITK_TUNE_BUDGET_S=repr(seconds), JAX_SPLITK_TUNE_LOSS="0")
    with _log_on_stderr():
        explained, watched, failures = _decided(arguments, measure=True)
    for key, entry in watched.entries.items():
        if entry is None or (arguments.again and key not in watched.measured):
            failures.append(f"{key.problem}: tuning failed, see the log")
        elif key in watched.measured and store.lookup(key) is None:
            failures.append(f"{key.problem}: measured, but not stored")
    decided = {key.problem: stored.describe(entry) for key, entry in watched.entries.items() if entry is not None}
    measured = {key.problem for key in watched.measured}
    decisions = [
        {"problem": problem_as_dict(d.problem), "why": d.why, "measured": decisive(d.problem) in measured}
        | decided.get(decisive(d.problem), {})
        for d in explained.decisions
    ]
    output.emit({"decisions": decisions, "failures": failures}, str(explained), arguments.json)
    return _told(failures)


def _dry_run(arguments: argparse.Namespace, seconds: float) -> int:
    """Shows what `explain` shows, and what `tune` would measure. Measures and stores nothing."""
    with output.usage():
        disk.mode()
    os.environ["JAX_SPLITK_AUTOTUNE"] = "off"
    explained, watched, failures = _decided(arguments, measure=False)
    what = _script_or_problems(arguments)
    asked = list(watched.asked)
    if isinstance(what, list):
        asked = [(problem, Options(workspace_limit_bytes=arguments.workspace_limit_bytes)) for problem in what]
    problems = _to_measure(asked, again=arguments.again, exact=isinstance(what, list))
    title = f"{len(problems)} problem{'s' * (len(problems) != 1)} would be measured, {seconds:g} s each at most"
    text = "\n".join([f"{title}{':' * bool(problems)}", *(f"  {p.brief}" for p in problems), "", str(explained)])
    value = {**_as_dict(explained), "to_measure": list(map(problem_as_dict, problems)), "seconds": seconds}
    output.emit(value, text, arguments.json)
    return _told(failures)


def _to_measure(asked: Iterable[tuple[Problem, Options]], *, again: bool, exact: bool) -> list[Problem]:
    """The problems that `tune` would measure on this machine."""
    found: dict[Problem, None] = {}
    os.environ["JAX_SPLITK_AUTOTUNE"] = "on_miss"
    with watch.state.watching(again=again, exact=exact, forward_only=True):
        for problem, given in asked:
            key = key_for(problem, target_for(local_platform()))
            ours = given.implementation != "xla" and only_xla(problem) is None and is_served(key, given.workspace_limit)
            if ours and (measured := measured_first(key, given)) is not None:
                found[measured.problem] = None
    return list(found)


def _told(failures: list[str]) -> int:
    for failure in failures:
        output.note(failure)
    return 1 if failures else 0


def _decided(arguments: argparse.Namespace, *, measure: bool) -> tuple[Explanation, Watched, list[str]]:
    """The decisions, what was watched while they were made, and how the script failed."""
    platform = getattr(arguments, "platform", None) or local_platform()
    what = _script_or_problems(arguments)
    with contextlib.ExitStack() as stack:
        with output.usage():
            stack.enter_context(options(workspace_limit_bytes=arguments.workspace_limit_bytes))
        if arguments.json:
            stack.enter_context(_stdout_on_stderr())
        exact = measure and isinstance(what, list)  # problems that are named are measured themselves
        again = measure and arguments.again
        watched = stack.enter_context(watch.state.watching(again=again, exact=exact, forward_only=measure))
        target = target_for(platform)
        if isinstance(what, list):
            decisions = _of_problems(what, target, arguments, measure)
            return explanation(target, decisions, verbose=arguments.verbose), watched, []
        left: collections.Counter[Problem] = collections.Counter()
        with _compat.watching_programs(functools.partial(_take_note, left)):
            failures = _run(what, arguments.script_arguments)
        decisions, notes = _of_script(watched, target)
        return explanation(target, decisions, routed(left, target), notes, arguments.verbose), watched, failures


def _of_problems(
    problems: list[Problem], target: Target, arguments: argparse.Namespace, measure: bool
) -> list[Decision]:
    """The decision for each problem; with `measure`, problems that no cache has are measured first."""
    with contextlib.ExitStack() as stack:
        if measure:
            asked = [(key_for(problem, target), current().workspace_limit) for problem in problems]
            served = [each for each in asked if is_served(*each)]
            missing = measurement.missing(served, arguments.again)
            stack.enter_context(searches.state.progress.run(len(missing), len(served) - len(missing)))
        choices = [select(problem, target, current(), measure=measure) for problem in problems]
        return [decision(choice, target) for choice in choices]


def _take_note(left: collections.Counter[Problem], program: core.Jaxpr) -> None:
    """Counts lax's operations that could be ours, in a program that is about to be lowered."""
    if not watch.state.traces_only:
        left.update(left_to_lax(program))


def _of_script(watched: Watched, target: Target) -> tuple[list[Decision], tuple[str, ...]]:
    """The decisions for what a script lowered here, or would lower elsewhere, and notes for the reader."""
    if target.is_local:
        decisions = [decision(choice, target, count) for choice, count in watched.choices.items()]
        return decisions, about_silent(watched.silent)
    found = [expected(*asked, target, count) for asked, count in watched.asked.items()]
    return [d for d in found if d is not None], ()


def _script_or_problems(arguments: argparse.Namespace) -> pathlib.Path | list[Problem]:
    """The path of the script, or the problems without repetitions."""
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
        accepted = (
            "an existing .py file, an existing .json file, or JSON text: one problem, an object with 'op' and the "
            "problem's fields, or a list of them"
        )
        raise output.UsageError(f"SCRIPT_OR_PROBLEMS={shown!r}: {error}; accepted: {accepted}") from None
    if arguments.script_arguments is not None:
        given = " ".join(arguments.script_arguments)
        raise output.UsageError(f"-- {given}; accepted only with a script, not with problems")
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
            found[_problem(**item)] = None
        except (TypeError, ValueError) as error:
            raise ValueError(f"problem {i}: {error}") from None
    return list(found)


def _problem(op: Any, **fields: Any) -> Problem:
    known = isinstance(op, str) and op in FIELDS
    return problem_from_dict(op, with_defaults(op, fields) if known else fields)


def _run(path: pathlib.Path, arguments: list[str] | None) -> list[str]:
    """Runs the script as `python SCRIPT` would. Returns how it failed; the traceback is on stderr then.

    `sys.argv` and `sys.path` stay the script's, since this process does nothing else afterwards. jax is imported
    already: a script that sets `JAX_...` variables before it imports jax must get them from outside.
    """
    sys.argv = [str(path), *(arguments or [])]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        return [] if exit_.code in (None, 0) else [f"{path} exited with {exit_.code}"]
    except Exception as error:
        traceback.print_exc()
        return [f"{path} failed: {type(error).__name__}: {error}"]
    return []


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """In the block the log, with a line for each tuned problem, goes to stderr."""
    handler, level = logging.StreamHandler(sys.stderr), _logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """In the block, output to stdout goes to stderr, also that of subprocesses and native code."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
