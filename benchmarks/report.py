"""Shared by the benchmarks' reports: the environment, limits of an H200, Markdown tables and JSON files."""

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

import jax_splitk
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import E4M3
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import plan, toolchain
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning import store
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import key_for

try:
    from tqdm import tqdm
except ImportError:  # pragma: no cover
    tqdm = None

_T = TypeVar("_T")

# Measured: operations a second of bf16 matrix products on random data, and bytes a second of device-to-device copies.
PRODUCT_FLOPS = 790e12
COPY_BYTES = {"H200": 4.3e12, "H100": 3.0e12}
# By the data sheet, the tensor cores' rate for other dtypes as a multiple of that for bf16, and float32 operations a
# second of the CUDA cores (132 multiprocessors, 128 FMAs a clock, 1.755 GHz).
RATES = {"float32": 0.5, E4M3: 2.0}
CUDA_CORE_FLOPS = 59.3e12


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def copy_rate(device_kind: str) -> float | None:
    """Bytes a second of copies on a device; None if it is neither an H200 nor an H100."""
    return next((rate for name, rate in COPY_BYTES.items() if name in device_kind), None)


def floor_us(problem: Problem) -> float | None:
    """Microseconds of a problem at the rates of large products and copies on this device; None if they are unknown.

    Depthwise convolutions in float32 are computed on the CUDA cores, by XLA too: they have the accuracy of float32.
    """
    copied = copy_rate(jax.devices()[0].device_kind)
    if copied is None:
        return None
    dtype = getattr(problem, "x_dtype", "") or getattr(problem, "dtype", "")
    flops = PRODUCT_FLOPS * RATES.get(dtype, 1.0)
    if (
        dtype == "float32"
        and isinstance(problem, ConvProblem)
        and 1 < problem.feature_group_count == problem.in_channels
    ):
        flops = CUDA_CORE_FLOPS
    return max(problem.flops / flops, problem.bytes_moved / copied) * 1e6


def tuning_entry(problem: Problem) -> Entry | None:
    """The caches' entry for the problem."""
    found = store.lookup(key_for(problem, target_for(local_platform())))
    return None if found is None else found[0]


def distance(found: np.ndarray, reference: np.ndarray) -> float:
    """||found - reference|| / ||reference||."""
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


def temp_bytes(compiled: Any) -> int:
    """Scratch memory that XLA plans for a compiled function."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def add_quick_and_json(parser: argparse.ArgumentParser, quick: str) -> None:
    """Two arguments; Adds --quick and --json. `quick` is the help text of --quick."""
    default, about = not on_gpu(), f"{quick}; the default on the CPU"
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, default=default, help=about)
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")


# ---- text ------------------------------------------------------------------------------------------------------------


def rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of the rows, the first of which is its header, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |" for row in lines)


def say(text: str) -> None:
    """Prints above the progress bar, if there is one."""
    with contextlib.nullcontext() if tqdm is None else tqdm.external_write_mode():
        print(text, flush=True)


def regret_line(results: Sequence[Any]) -> str:
    """How far the cost model's first choices were from the fastest, over the tuned cases."""
    regrets = [r.regret for r in results if r.regret is not None]
    seconds = [r.tuning_seconds for r in results if r.tuning_seconds is not None]
    if not regrets:
        return "regret of the cost model's first choice: no case was tuned"
    return (
        f"regret of the cost model's first choice ({len(regrets)} tuned cases): mean {statistics.fmean(regrets):.1%}, "
        f"worst {max(regrets):.1%}; tuning {statistics.fmean(seconds):.1f} s a problem, at most {max(seconds):.1f}"
    )


def failed_line(name: str, error: Exception) -> str:
    """The line of a case that raised an error."""
    return f" > {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def run_all(
    cases: Sequence[Any],
    run: Callable[[Any], _T],
    line: Callable[[_T], str],
    save: Callable[[Sequence[_T], Mapping[str, str]], None],
    wrong: Callable[[_T], str | None] = lambda result: None,
) -> tuple[list[_T], dict[str, str]]:
    """Runs all cases, and prints a line for each. Returns the results, and by case the errors and what is wrong with
    its result. `save` is called after every case, so that a run that is cut short loses nothing."""
    results: list[_T] = []
    failures: dict[str, str] = {}
    for case in progress(cases):
        try:
            results.append(run(case))
            say(line(results[-1]))
            if (reason := wrong(results[-1])) is not None:
                failures[case.name] = reason
        except Exception as error:  # continue with the other cases
            failures[case.name] = traceback.format_exc()
            say(failed_line(case.name, error))
        save(results, failures)
    return results, failures


def say_failures(failures: Mapping[str, str]) -> int:
    """Prints the cases that failed. Returns the command's exit status."""
    for name, what in failures.items():
        say(f"failed: {name}: {what.splitlines()[-1]}")
    return 1 if failures else 0


def progress(selected: Sequence[_T]) -> Iterator[_T]:
    """The cases, with a progress bar on a terminal."""
    if tqdm is None or not sys.stderr.isatty():
        yield from selected
    else:
        yield from tqdm(selected, unit="case")


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path: pathlib.Path, report: Mapping[str, Any]) -> None:
    """Writes a report as JSON, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


@functools.cache
def environment() -> dict[str, Any]:
    """The machine and the versions on which the figures depend."""
    device = jax.devices()[0]
    wanted = ("jax", "jaxlib", "nvidia-", "numpy", "scipy")
    packages = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}
    kernels = pathlib.Path(jax_splitk.__file__).parent / "kernels"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "driver": _driver(),
        "jax": jax.__version__,
        "jaxlib": packages.get("jaxlib"),
        "jax_splitk": jax_splitk.__version__,
        "packages": {name: packages[name] for name in sorted(packages) if name.startswith(wanted)},
        "nvrtc": None if toolchain.unavailable() else ".".join(map(str, toolchain.find_nvrtc().version)),
        "plan_version": plan.PLAN_VERSION,
        "kernel_sources": {
            path.relative_to(kernels).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(kernels.rglob("*.cu*"))
        },
    }


def _driver() -> str | None:
    """The NVIDIA driver's version, None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() or None
