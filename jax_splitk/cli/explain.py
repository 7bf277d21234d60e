"""`explain`: what computes the operations that a script lowers, or given problems, and why."""

import argparse
import contextlib
import dataclasses
from typing import Any

from jax_splitk.cli import constraints, output
from jax_splitk.cli.problems import NAME, as_dict, script_or_problems
from jax_splitk.cli.script import run
from jax_splitk.cli.usage import UsageError
from jax_splitk.ops.explain import Decision, Explanation, decision
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning.options import current
from jax_splitk.tuning.select import select
from jax_splitk.tuning.watch import watching


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("explain", help="what computes a script's operations, or problems, and why")
    parser.add_argument("what", metavar=NAME, help="a .py file, a .json file, or JSON text of a problem or a list")
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="for problems: of another than the default backend")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    constraints.add_arguments(parser)
    parser.epilog = (
        "Arguments after -- are the script's. A script runs as it always does, so that on a GPU what no cache has is "
        "tuned unless JAX_SPLITK_AUTOTUNE=off; for problems nothing is measured. For a script x counts lowerings; JAX "
        "lowers equal operations of one function once."
    )
    parser.set_defaults(run=command, parser=parser)


def command(arguments: argparse.Namespace) -> int:
    try:
        disk.mode()
    except ValueError as error:
        raise UsageError(str(error)) from None
    what = script_or_problems(arguments.what)
    failed = None
    if isinstance(what, list):
        if arguments.script_arguments is not None:
            shown = " ".join(arguments.script_arguments)
            raise UsageError(f"-- {shown}; accepted only with a script, not with problems")
        platform = arguments.platform or local_platform()
        target = target_for(platform)
        with constraints.in_force(arguments):
            choices = [select(problem, target, current()) for problem in what]
        explanation = Explanation(platform, tuple(map(decision, choices)))
    else:
        if arguments.platform is not None:
            raise UsageError(
                f"--platform={arguments.platform}; accepted only with problems, a script runs where it does"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(constraints.in_force(arguments))
            if arguments.json:
                stack.enter_context(output.stdout_to_stderr())
            watched = stack.enter_context(watching())
            failed = run(what, arguments.script_arguments or [])
        explanation = Explanation(local_platform(), tuple(decision(c, n) for c, n in watched.choices.items()))
    value = {"platform": explanation.platform, "decisions": [_as_dict(d) for d in explanation.decisions]}
    output.emit(value, output.printable(str(explanation)), as_json=arguments.json)
    if failed is not None:
        output.note(failed)
    return 0 if failed is None else 1


def _as_dict(decision: Decision) -> dict[str, Any]:
    fields = {field.name: getattr(decision, field.name) for field in dataclasses.fields(decision)}
    config = None if decision.config is None else dataclasses.asdict(decision.config)
    return {**fields, "problem": as_dict(decision.problem), "config": config}
