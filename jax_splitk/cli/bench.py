"""`bench matmul`: a product's time against the number of splits, as a table, a file and a plot."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jax import numpy as jnp

from jax_splitk.cli import output, sweep_chart
from jax_splitk.cli.defaults import with_defaults
from jax_splitk.cli.output import UsageError, number
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import streams
from jax_splitk.runtime.arguments import require
from jax_splitk.tuning.key import problem_from_dict
from jax_splitk.tuning.sweep import Point, Sweep, sweep

_FIELDS = ("batch", "m", "n", "k", "lhs_order", "rhs_order", "dtype", "out_dtype", "precision")
MOST_SPLITS = 4096


def matmul(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the files that were asked for."""
    given = {name: getattr(arguments, name) for name in _FIELDS if getattr(arguments, name) is not None}
    with output.usage():
        problem = problem_from_dict("dot_general", with_defaults("dot_general", given))
        splits = splits_of(arguments.sweep_splits)
        require(arguments.configs >= 1, f"--configs={arguments.configs}", "an integer of at least 1")
        only = dict(_field(text) for text in arguments.only)
        if arguments.plot is not None and (reason := sweep_chart.refusal(arguments.plot)) is not None:
            raise ValueError(f"--plot={str(arguments.plot)!r}: {reason}")
        for path in (arguments.out, arguments.plot):
            require(path is None or path.absolute().parent.is_dir(), f"{path}", "a file in a folder that exists")
    try:
        found = sweep(problem, splits, arguments.configs, only, _progress(problem))
    except ValueError as error:
        raise UsageError(str(error)) from None
    except RuntimeError as error:
        output.note(str(error))
        return 1
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found.as_dict(), indent=1) + "\n")
    if arguments.plot is not None:
        sweep_chart.write(found, arguments.plot)
    output.emit(found.as_dict(), _text(found), arguments.json)
    failed = [point for point in found.points if point.error is not None]
    for point in failed:
        output.note(f"failed: {point.candidate}: {point.error}")
    return 1 if failed else 0


def splits_of(text: str) -> list[int]:
    """Ascending numbers of splits from "1:128", "1,2,4" or both: ranges have their last number. Raises ValueError."""
    found: set[int] = set()
    with contextlib.suppress(ValueError):
        for part in text.split(","):
            first, colon, last = part.partition(":")
            low, high = int(first), int(last if colon else first)
            if not 1 <= low <= high <= MOST_SPLITS:
                break
            found.update(range(low, high + 1))
        else:
            return sorted(found)
    raise ValueError(f"--sweep-splits={text!r}; accepted: FIRST:LAST or numbers, with commas, from 1 to {MOST_SPLITS}")


def _field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    require(bool(name and equals and value), f"--only {text}", "FIELD=VALUE, e.g. tile_m=128")
    return name, value


def _progress(problem: Problem) -> Callable[[int, int], None]:
    def show(done: int, of: int) -> None:
        if streams.is_terminal(sys.stderr):
            end = "\n" if done == of else ""
            print(f"\r\x1b[K{problem}: {done} of {of} configs", end=end, file=sys.stderr, flush=True)

    return show


# ---- the table -------------------------------------------------------------------------------------------------------


def alignment(problem: DotProblem) -> str:
    """Of each operand: which dimension is contiguous, and the largest power of two up to 128 that divides its bytes."""
    said = []
    item = jnp.dtype(problem.dtype).itemsize
    for name, order, shape in (
        ("lhs", problem.lhs_order, problem.lhs_shape),
        ("rhs", problem.rhs_order, problem.rhs_shape),
    ):
        size = shape[-1] * item
        said.append(f"{name} {order}: {order[-1]} contiguous, rows aligned to {min(128, size & -size)} bytes")
    return "; ".join(said)


def _text(found: Sweep) -> str:
    """The fastest config for each number of splits, and what stands out."""
    rows = [_row(found, splits, point) for splits, point in found.best.items()]
    header = ["splits", "us", "XLA/ours", "predicted us", "workspace MiB", "config", ""]
    lines = [str(found.problem), f"{found.target.device_kind}, times by {_SOURCES[found.source]}"]
    lines += [alignment(found.problem)] if isinstance(found.problem, DotProblem) else []
    lines += ["", output.table(header, rows, narrow=("config",)), "", f"XLA: {found.xla_us:.1f} us"]
    lines += [_summary("the cost model's first choice", found, found.model)]
    lines += [] if found.fastest is None else [_summary("fastest", found, found.fastest)]
    return "\n".join(lines)


_SOURCES = {"device": "the profiler (device)", "wall": "the wall clock"}


def _row(found: Sweep, splits: int, point: Point) -> Sequence[str]:
    ratio = found.xla_us / point.us if point.us else None
    marks = [name for name, marked in (("fastest", found.fastest), ("model", found.model)) if marked == point]
    us, predicted = number(point.us), number(point.predicted_us)
    workspace = number(point.workspace_bytes / 2**20)
    return [str(splits), us, number(ratio, ".2f"), predicted, workspace, point.variant, ", ".join(marks)]


def _summary(what: str, found: Sweep, point: Point) -> str:
    ratio: Any = found.xla_us / point.us if point.us else None
    times = f"{number(point.us)} us, {number(ratio, '.2f')} times XLA's speed"
    return f"{what}: splits {point.splits}, {times}: {point.variant}"
