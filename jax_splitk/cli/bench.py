"""`bench matmul`: the time of a product against the number of splits, as a table, a file and a plot. `bench conv`: the
three passes of a convolution against XLA."""

import argparse
import contextlib
import json
import pathlib
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
from jax_splitk.tuning.sweep import Point, Sweep, race, sweep

PASSES = ("conv_fprop", "conv_dgrad", "conv_wgrad")
_CONV_FIELDS = (
    *("batch", "input_spatial", "in_channels", "out_channels", "kernel_spatial", "window_strides", "padding"),
    *("rhs_dilation", "feature_group_count", "dtype", "out_dtype", "precision"),
)
_FIELDS = ("batch", "m", "n", "k", "lhs_order", "rhs_order", "dtype", "out_dtype", "precision")
MOST_SPLITS = 4096


def matmul(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the files that were asked for."""
    with output.usage():
        problem = _problem("dot_general", arguments, _FIELDS)
        splits = splits_of(arguments.sweep_splits)
        _check_configs(arguments)
        only = dict(_field(text) for text in arguments.only)
        if arguments.plot is not None and (reason := sweep_chart.refusal(arguments.plot)) is not None:
            raise ValueError(f"--plot={str(arguments.plot)!r}: {reason}")
        _check_files(arguments.out, arguments.plot)
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


def conv(arguments: argparse.Namespace) -> int:
    """Measures each pass, prints the table, and writes the file that was asked for."""
    with output.usage():
        problems = [_problem(op, arguments, _CONV_FIELDS) for op in PASSES]
        _check_configs(arguments)
        _check_files(arguments.out)
    found: list[Sweep] = []
    told: list[str] = []
    for problem in problems:
        try:
            found.append(race(problem, arguments.configs, _progress(problem)))
        except ValueError as error:  # no kernel: XLA computes this pass
            told.append(f"XLA's alone: {error}")
        except RuntimeError as error:
            told.append(f"failed: {error}")
    failed = [f"failed: {point.candidate}: {point.error}" for each in found for point in each.points if point.error]
    value = {"passes": [each.as_dict() for each in found]}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(value, indent=1) + "\n")
    output.emit(value, _conv_text(found), arguments.json)
    for line in (*told, *failed):
        output.note(line)
    return 1 if failed or len(found) + sum(line.startswith("XLA's") for line in told) < len(PASSES) else 0


def _problem(op: str, arguments: argparse.Namespace, names: Sequence[str]) -> Any:
    """The problem that the arguments of these names describe. Raises ValueError if they describe none."""
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return problem_from_dict(op, with_defaults(op, given))


def _check_configs(arguments: argparse.Namespace) -> None:
    require(arguments.configs >= 1, f"--configs={arguments.configs}", "an integer of at least 1")


def _check_files(*paths: pathlib.Path | None) -> None:
    for path in paths:
        require(path is None or path.absolute().parent.is_dir(), f"{path}", "a file in a folder that exists")


def splits_of(text: str) -> list[int]:
    """Ascending numbers of splits from "1:128", "1,2,4" or both; a range includes its last number."""
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
    """For each operand the contiguous dimension, and the largest power of two up to 128 that divides the bytes of a
    row."""
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
    """The fastest config for each number of splits, XLA's time, the cost model's choice and the fastest of all."""
    rows = [_row(found, splits, point) for splits, point in found.best.items()]
    header = ["splits", "us", "XLA/ours", "predicted us", "workspace MiB", "config", ""]
    lines = [str(found.problem), f"{found.target.device_kind}, times by {_SOURCES[found.source]}"]
    lines += [alignment(found.problem)] if isinstance(found.problem, DotProblem) else []
    lines += ["", output.table(header, rows, narrow=("config",)), "", f"XLA: {found.xla_us:.1f} us"]
    lines += [_summary("the cost model's first choice", found, found.model)]
    lines += [] if found.fastest is None else [_summary("fastest", found, found.fastest)]
    return "\n".join(lines)


def _conv_text(found: Sequence[Sweep]) -> str:
    """A row for each pass: XLA's time, and our fastest config."""
    header = ["pass", "XLA us", "ours us", "XLA/ours", "predicted us", "workspace MiB", "config"]
    rows, xla_us, least_us = [], 0.0, 0.0
    for each in found:
        point = each.fastest or each.model
        ratio = each.xla_us / point.us if point.us else None
        figures = [number(each.xla_us), number(point.us), number(ratio, ".2f"), number(point.predicted_us)]
        rows.append([each.problem.op, *figures, number(point.workspace_bytes / 2**20), str(point.candidate)])
        xla_us, least_us = xla_us + each.xla_us, least_us + min(each.xla_us, point.us or each.xla_us)
    if not found:
        return "no kernel of ours computes a pass"
    described = str(found[0].problem).removeprefix(f"{found[0].problem.op} ")
    lines = [f"convolution {described}", f"{found[0].target.device_kind}, times by {_SOURCES[found[0].source]}", ""]
    lines += [output.table(header, rows, narrow=("config",)), ""]
    return "\n".join(
        [*lines, f"sum: {xla_us:.1f} us by XLA, {least_us:.1f} us if the faster of both computes each pass"]
    )


_SOURCES = {"device": "CUDA events (device)", "wall": "the wall clock"}


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
