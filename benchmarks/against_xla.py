"""What `benchmarks.wgrad` and `benchmarks.dot` share: a case's figures, the run over all cases, and its arguments."""

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

import jax_splitk
from benchmarks import ceilings, report, timing
from benchmarks.report import on_gpu, rate, say
from jax_splitk.ops.explanation import Decision
from jax_splitk.tuning.entry import Entry


@dataclasses.dataclass(frozen=True)
class Result:
    """One case's figures. Times in microseconds; `ours_error` and `xla_error` are relative, against float64.

    Where the problem was tuned, `regret` is how much slower the cost model's first choice was than our fastest
    candidate (0.05 for 5%), and `tuning_seconds` what that took.
    """

    case: Any
    implementation: str
    config: str
    why: str
    ours: timing.Timing
    xla: timing.Timing
    floor_us: float | None
    workspace_bytes: int
    ours_temp_bytes: int
    xla_temp_bytes: int
    ours_error: float | None
    xla_error: float | None
    regret: float | None
    tuning_seconds: float | None

    @property
    def speedup(self) -> float:
        """XLA's time over ours: above 1 where we are faster."""
        return self.xla.us / self.ours.us

    @property
    def tflops(self) -> float:
        return self.case.problem().flops / self.ours.us * 1e-6

    @property
    def gbytes(self) -> float:
        return self.case.problem().bytes_moved / self.ours.us * 1e-3

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor_us is None else self.floor_us / self.ours.us

    def as_json(self, *more: str) -> dict[str, Any]:
        """Fields and figures, with the properties `more`."""
        figures = ("speedup", "tflops", "gbytes", "share_of_floor", *more)
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in figures}


_Result = TypeVar("_Result", bound=Result)


def measure(
    case: Any,
    shapes: Sequence[tuple[int, ...]],
    ours: Callable[..., jax.Array],
    xla: Callable[..., jax.Array],
    errors: Callable[..., Sequence[float | None]],
    quick: bool,
) -> tuple[dict[str, Any], Decision, Entry | None]:
    """Compiles, times and checks one case.

    Args:
      case: its `problem()` is what both functions, of arrays of `shapes`, compute.
      errors: of the compiled functions and their arguments, each one's error.
      quick: fewer rounds.

    Returns:
      The fields of a `Result`; which kernel it is; what the caches have, None where nothing was tuned.
    """
    given = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes]
    compiled = {"ours": jax.jit(ours).lower(*given).compile(), "xla": jax.jit(xla).lower(*given).compile()}
    # After the compilation, which tunes what no cache has, if tuning is on.
    (decision,) = jax_splitk.explain(ours, *given).decisions
    entry = report.tuning_entry(case.problem())
    limits = {} if on_gpu() else {"minimum_bytes": 32 * 2**20, "maximum_sets": 4}
    input_sets = timing.random_input_sets(shapes, case.dtype, **limits)
    times = timing.compare(compiled, input_sets, rounds=3 if quick else 7)
    ours_error, xla_error = errors(compiled.values(), *input_sets[-1])
    fields = {
        "case": case,
        "implementation": decision.implementation,
        "config": "" if decision.config is None else str(decision.config),
        "why": decision.why,
        **times,
        "floor_us": report.floor_us(case.problem()),
        "workspace_bytes": decision.workspace_bytes,
        **{f"{name}_temp_bytes": report.temp_bytes(function) for name, function in compiled.items()},
        "ours_error": ours_error,
        "xla_error": xla_error,
        "regret": None if entry is None else entry.regret,
        "tuning_seconds": None if entry is None else entry.metadata.get("seconds"),
    }
    return fields, decision, entry


def run_all(
    cases: Sequence[Any], run: Callable[[Any], _Result], save: Callable[[Sequence[_Result], dict[str, str]], None]
) -> tuple[list[_Result], dict[str, str]]:
    """The results, and what went wrong, by case. `save` gets both after every case, so that a run that is cut short
    loses nothing."""
    results: list[_Result] = []
    failures: dict[str, str] = {}
    for case in report.progress(cases):
        try:
            results.append(run(case))
            say(_perf_line(results[-1]))
        except Exception as error:  # one case must not cost the others
            failures[case.name] = traceback.format_exc()
            say(f" > {case.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        save(results, failures)
    return results, failures


def _perf_line(result: Result) -> str:
    spread = f"{result.ours.low_us:.1f}..{result.ours.high_us:.1f}"
    return (
        f" > {result.case.name} ({result.implementation}): {result.ours.us:.1f} us ({spread}) | "
        f"{rate(result.tflops)} TFLOP/s | {rate(result.gbytes)} GB/s | XLA {result.xla.us:.1f} us | "
        f"{result.speedup:.2f}x XLA"
    )


def parser(module: str, about: str, cases: str, cut: str) -> argparse.ArgumentParser:
    """The arguments of both. `cases`: how they are named; `cut`: what is less of them on the CPU."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=f"{about}: jax_splitk and XLA.")
    found.add_argument("--cases", nargs="*", default=[], help=cases)
    report.add_quick_and_json(found, f"fewer rounds, and on the CPU {cut}")
    found.add_argument(
        "--implementation", choices=("auto", "cutlass", "host", "xla"), default="auto", help="ours; auto"
    )
    return found


def concluded(results: Sequence[Result], failures: dict[str, str]) -> int:
    """Says how good the cost model's choices were and what failed; the exit status."""
    say(report.regret_line(results))
    for name, what in failures.items():
        say(f"failed: {name}: {what.splitlines()[-1]}")
    return 1 if failures else 0


def implementation(options: argparse.Namespace) -> str | None:
    return None if options.implementation == "auto" else options.implementation


def selected(find: Callable[[Iterable[str]], list[Any]], names: Iterable[str]) -> list[Any]:
    """The cases of these names. An unknown one ends the process."""
    try:
        return find(names)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def header(options: argparse.Namespace) -> dict[str, Any]:
    """What a report begins with."""
    return {
        "environment": report.environment(),
        "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
        "quick": options.quick,
        "implementation": options.implementation,
    }
