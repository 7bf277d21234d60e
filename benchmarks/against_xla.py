"""Shared by `benchmarks.wgrad`, `conv` and `dot`: a case's figures, the run over all cases, and the report."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax

import jax_splitk
from benchmarks import ceilings, report, timing
from benchmarks.cases import find
from benchmarks.measured import Measured
from benchmarks.report import on_gpu, say
from jax_splitk import kernels
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning import measurement
from jax_splitk.tuning.options import Implementation


@dataclasses.dataclass(frozen=True)
class Result(Measured):
    """The figures of a case. Errors are relative, against float64 unless a benchmark says otherwise."""

    xla: timing.Timing
    ours_temp_bytes: int
    xla_temp_bytes: int
    ours_error: float | None
    xla_error: float | None

    FIGURES: ClassVar[tuple[str, ...]] = (*Measured.FIGURES, "speedup")

    @classmethod
    def measured(
        cls,
        case: Any,
        shapes: Sequence[tuple[int, ...]],
        ours: Callable[..., jax.Array],
        xla: Callable[..., jax.Array],
        errors: Callable[..., Sequence[float | None]],
        quick: bool,
    ) -> Self:
        """Compiles, times and checks one case.

        Args:
          case: both functions take arrays of `shapes` and compute its `problem()`.
          errors: takes the compiled functions and their arguments; returns the error of each.
          quick: fewer rounds.
        """
        given = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes]
        compiled = {"ours": jax.jit(ours).lower(*given).compile(), "xla": jax.jit(xla).lower(*given).compile()}
        # After the compilation, which tunes problems that no cache has, if tuning is on.
        (decision,) = jax_splitk.explain(ours, *given).decisions
        limits = {} if on_gpu() else {"minimum_bytes": 32 * 2**20, "maximum_sets": 4}
        input_sets = timing.random_input_sets(shapes, case.dtype, **limits)
        times = timing.compare(compiled, input_sets, rounds=3 if quick else 7)
        temp_ours, temp_xla = (report.temp_bytes(compiled[name]) for name in ("ours", "xla"))
        ours_error, xla_error = errors(compiled.values(), *input_sets[-1])
        entry = report.tuning_entry(case.problem())
        return cls(case, decision, entry, times["ours"], times["xla"], temp_ours, temp_xla, ours_error, xla_error)

    @property
    def speedup(self) -> float:
        """XLA's time over ours: above 1 where we are faster."""
        return self.xla.us / self.ours.us

    @property
    def wrong(self) -> str | None:
        """Why the case failed although it was measured."""
        return None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark against XLA.

    Attributes:
      name: the name of its module.
      ops: the operations of its problems.
      cases: all cases.
      groups: maps a case to its groups.
      cut: how `shrunk` makes cases smaller for the CPU.
      run: maps (case, implementation, quick) to a result.
      columns: the table's columns: a name, and a function of a result that returns the cell.
      summary: maps the results to further entries of the report, and lines to print.
    """

    name: str
    about: str
    ops: tuple[str, ...]
    cases: Sequence[Any]
    groups: Callable[[Any], Iterable[str]]
    cut: str
    shrunk: Callable[[Any], Any]
    run: Callable[[Any, Implementation | None, bool], Any]
    columns: Mapping[str, Callable[[Any], str]]
    summary: Callable[[Sequence[Any]], tuple[dict[str, Any], Iterable[str]]]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command; its exit status."""
        options = self._arguments(argv)
        try:
            selected = find(options.cases, self.cases, self.groups)
        except ValueError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
        if options.list:
            print("\n".join(f"{case.name}: {', '.join(self.groups(case))}" for case in selected))
            return 0
        if options.quick and not on_gpu():
            selected = [self.shrunk(case) for case in selected]
        if options.implementation == "auto" and measurement.autotune(target_for(local_platform())):
            _tune_together(selected)
        results, failures = self._run_all(selected, options)
        if results:
            say("\n" + self.table(results) + "\n")
        for line in self.summary(results)[1]:
            say(line)
        if (found := ceilings.measured()) is not None:
            rates = f"matrix product {found.flops * 1e-12:.0f} TFLOP/s, copy {found.bytes * 1e-12:.2f} TB/s"
            say(f"in the same run: {rates}")
        say(report.regret_line(results))
        return report.say_failures(failures)

    def _arguments(self, argv: Sequence[str] | None) -> argparse.Namespace:
        about = f"{self.about}: jax_splitk and XLA."
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=about)
        parser.add_argument("--cases", nargs="*", default=[], help="names or groups (also separated by commas); all")
        parser.add_argument("--list", action="store_true", help="print the cases and their groups, and end")
        report.add_quick_and_json(parser, f"fewer rounds, and on the CPU {self.cut}")
        choices = ("auto", "cutlass", "host", "xla")
        parser.add_argument("--implementation", choices=choices, default="auto", help="ours; auto")
        return parser.parse_args(argv)

    def _run_all(self, cases: Sequence[Any], options: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
        """Runs all cases. Returns the results, and the errors by case."""
        implementation = None if options.implementation == "auto" else options.implementation

        def save(results: Sequence[Any], failures: Mapping[str, str]) -> None:
            if options.json:
                report.write(options.json, self._report(options, results, failures))

        return report.run_all(
            cases,
            lambda case: self.run(case, implementation, options.quick),
            lambda result: f"{result.line()} | XLA {result.xla.us:.1f} us | {result.speedup:.2f}x XLA",
            save,
            lambda result: result.wrong,
        )

    def _report(
        self, options: argparse.Namespace, results: Sequence[Any], failures: Mapping[str, str]
    ) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "environment": report.environment(),
            "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
            "quick": options.quick,
            "implementation": options.implementation,
            "abi": {family.name: family.ABI for op in self.ops for family in kernels.families(op)},
            **self.summary(results)[0],
            "results": [result.as_json() for result in results],
            "failures": failures,
        }

    def table(self, results: Sequence[Any]) -> str:
        """The results as a Markdown table."""
        return report.markdown([[*self.columns], *([cell(r) for cell in self.columns.values()] for r in results)])


def _tune_together(cases: Sequence[Any]) -> None:
    """Tunes the cases' problems that no cache has. While one is measured, the next ones' kernels are compiled, which is
    several times as fast as case by case."""
    try:
        jax_splitk.tune_problems([case.problem() for case in cases])
    except (RuntimeError, ValueError) as failed:
        say(f"tuning: {failed}; what is left is tuned case by case")


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


# Columns of several tables.
WORKSPACE: Mapping[str, Callable[[Result], str]] = {
    "workspace MiB": lambda r: f"{r.decision.workspace_bytes / 2**20:.1f}"
}
ERRORS: Mapping[str, Callable[[Result], str]] = {
    "error": lambda r: error(r.ours_error),
    "XLA error": lambda r: error(r.xla_error),
}
TIMES: Mapping[str, Callable[[Result], str]] = {
    "ours us": lambda r: f"{r.ours.us:.1f}",
    "XLA us": lambda r: f"{r.xla.us:.1f}",
    "XLA/ours": lambda r: f"{r.speedup:.2f}",
    "of floor": lambda r: report.percent(r.share_of_floor),
}


def geometric_means(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The geometric mean of each group of ratios that is not empty."""
    return {name: statistics.geometric_mean(group) for name, group in groups.items() if group}


def mean_lines(means: Mapping[str, float]) -> list[str]:
    return [f"geometric mean of XLA/ours, {group}: {mean:.3f}" for group, mean in means.items()]
