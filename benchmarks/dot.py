"""Matrix products with a long reduction: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.dot [--cases NAME ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import ceilings, dot_cases, report, timing
from benchmarks.dot_cases import Case
from benchmarks.report import on_gpu, percent, rate, say
from jax_splitk import kernels
from jax_splitk.ops.explanation import Decision
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.result import TuningResult

QUICK_CPU_FLOPS = 1e8
DIMENSIONS = (((0,), (0,)), ((), ()))
SHORT_US = 20.0  # of XLA's: products that launches and reductions dominate
SAMPLES = 16  # rows and columns of the result that are computed in float64


@dataclasses.dataclass(frozen=True)
class Result(report.Figures):
    """One case's figures; see `benchmarks.wgrad.Result`.

    Attributes:
      launches: what is wrong with the kernels of our calls; None where they are those of the plan, each once.
      entry: what the caches have; None where nothing was tuned.
    """

    case: Case
    implementation: str
    family: str | None
    config: str
    why: str
    ours: timing.Timing
    xla: timing.Timing
    floor_us: float | None
    workspace_bytes: int
    ours_temp_bytes: int
    xla_temp_bytes: int
    ours_error: float
    xla_error: float
    launches: str | None
    regret: float | None
    tuning_seconds: float | None
    entry: Entry | None

    def as_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "entry"}
        for name in ("case", "ours", "xla"):
            fields[name] = dataclasses.asdict(fields[name])
        fields["case"]["name"] = self.case.name
        return fields | {name: getattr(self, name) for name in ("speedup", "tflops", "gbytes", "share_of_floor")}


def run(case: Case, implementation: str | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    given = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    out = jnp.dtype(case.out_dtype)

    def ours(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, g, DIMENSIONS, None, out, implementation=implementation)

    def xla(x: jax.Array, g: jax.Array) -> jax.Array:
        return lax.dot_general(x, g, DIMENSIONS, preferred_element_type=out)

    compiled = {"ours": jax.jit(ours).lower(*given).compile(), "xla": jax.jit(xla).lower(*given).compile()}
    # After the compilation, which tunes what no cache has, if tuning is on.
    (decision,) = jax_splitk.explain(ours, *given).decisions
    entry = report.tuning_entry(case.problem())
    limits = {} if on_gpu() else {"minimum_bytes": 2**20, "maximum_sets": 2}
    input_sets = timing.random_input_sets(case.shapes, case.dtype, **limits)
    times = timing.compare(compiled, input_sets, rounds=3 if quick else 7)
    ours_error, xla_error = errors(compiled.values(), *input_sets[-1])
    return Result(
        case=case,
        implementation=decision.implementation,
        family=decision.family,
        config="" if decision.config is None else str(decision.config),
        why=decision.why,
        ours=times["ours"],
        xla=times["xla"],
        floor_us=report.floor_us(case.problem()),
        workspace_bytes=decision.workspace_bytes,
        ours_temp_bytes=report.temp_bytes(compiled["ours"]),
        xla_temp_bytes=report.temp_bytes(compiled["xla"]),
        ours_error=ours_error,
        xla_error=xla_error,
        launches=wrong_launches(planned_kernels(decision), times["ours"]),
        regret=None if entry is None else entry.regret,
        tuning_seconds=None if entry is None else entry.metadata.get("seconds"),
        entry=entry,
    )


def errors(functions: Iterable[Callable[..., Any]], lhs: jax.Array, rhs: jax.Array) -> list[float]:
    """||out - reference|| / ||reference|| of each function, in float64 over random rows and columns."""
    rng = np.random.default_rng(0)
    rows, columns = (np.sort(rng.permutation(x.shape[1])[:SAMPLES]) for x in (lhs, rhs))
    left, right = (np.asarray(x[:, at], np.float64) for x, at in ((lhs, rows), (rhs, columns)))
    reference = left.T @ right
    found = [np.asarray(function(lhs, rhs), np.float64)[np.ix_(rows, columns)] for function in functions]
    return [float(np.linalg.norm(out - reference) / np.linalg.norm(reference)) for out in found]


# ---- launches --------------------------------------------------------------------------------------------------------


def planned_kernels(decision: Decision) -> list[str] | None:
    """The kernels of the plan; None where none of ours for a GPU was chosen."""
    family = next((f for f in kernels.families(decision.problem.op, "cuda") if f.name == decision.family), None)
    if family is None:
        return None
    plan = family.plan(decision.problem, decision.config)
    return [launch.kernel for launch in plan.launches] if isinstance(plan, DevicePlan) else None


def wrong_launches(planned: Sequence[str] | None, timed: timing.Timing) -> str | None:
    """What is wrong with the kernels of a call in a trace: each of the plan's once, and nothing else (no memset)."""
    if planned is None or timed.source != "device":
        return None
    expected = {name: float(planned.count(name)) for name in planned}
    if timed.launches == expected:
        return None
    shown = ", ".join(f"{name} {count:g} times" for name, count in timed.launches.items())
    return f"launched a call: {shown}; planned: {', '.join(planned)}"


# ---- reports ---------------------------------------------------------------------------------------------------------


def perf_line(result: Result) -> str:
    spread = f"{result.ours.low_us:.1f}..{result.ours.high_us:.1f}"
    return (
        f" > {result.case.name} ({result.implementation}): {result.ours.us:.1f} us ({spread}) | "
        f"{rate(result.tflops)} TFLOP/s | {rate(result.gbytes)} GB/s | XLA {result.xla.us:.1f} us | "
        f"{result.speedup:.2f}x XLA"
    )


def table(results: Sequence[Result]) -> str:
    header = ["m x n x k", "implementation", "ours us", "XLA us", "XLA/ours", "of floor", "kernels", "XLA kernels"]
    header += ["workspace MiB", "error", "XLA error", "config"]
    rows = [header]
    for r in results:
        counts = [f"{sum(t.launches.values()):g}" if t.launches else "" for t in (r.ours, r.xla)]
        rows.append(
            [
                *(r.case.name, r.implementation, f"{r.ours.us:.1f}", f"{r.xla.us:.1f}", f"{r.speedup:.2f}"),
                *(percent(r.share_of_floor), *counts, f"{r.workspace_bytes / 2**20:.1f}"),
                *(f"{e:.1e}" for e in (r.ours_error, r.xla_error)),
                " ".join(filter(None, (r.family, r.config))),
            ]
        )
    return report.markdown(rows)


def geometric_means(results: Sequence[Result]) -> dict[str, float]:
    """Of XLA's time over ours: over all cases, and over those that take XLA less than `SHORT_US`."""
    short = f"XLA below {SHORT_US:.0f} us"
    groups = {"all": [r.speedup for r in results], short: [r.speedup for r in results if r.xla.us < SHORT_US]}
    return {name: statistics.geometric_mean(group) for name, group in groups.items() if group}


def tuning(results: Sequence[Result]) -> list[Any]:
    """The decisions of the tuned cases, with the times of the choice, of the cost model's and of XLA alone: the text of
    a TuningResult, of which `benchmarks.tables` makes a table."""
    entries = [r.entry for r in results if r.entry is not None]
    kept = [dataclasses.replace(e, evidence=_evidence(e, (e.choice, e.predicted, XLA))) for e in entries]
    return json.loads(TuningResult(tuple((entry.key, entry) for entry in kept)).dumps())


def _evidence(entry: Entry, candidates: Sequence[Candidate | None]) -> dict[str, Any]:
    measurements = [m.as_dict() for m in entry.measurements if m.candidate in candidates]
    return {**entry.evidence, "measurements": measurements}


# ---- command line ----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dot", description="Products with a long reduction: jax_splitk against XLA."
    )
    parser.add_argument("--cases", nargs="*", default=[], metavar="MxNxK", help="of dot_cases.py; all")
    parser.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        default=not on_gpu(),
        help="fewer rounds, and on the CPU shorter reductions (at most 0.1 GFLOP); the default on the CPU",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument(
        "--implementation", choices=("auto", "cutlass", "host", "xla"), default="auto", help="ours; auto"
    )
    return parser.parse_args(argv)


def write_report(options: argparse.Namespace, results: Sequence[Result], failures: dict[str, str]) -> None:
    found = {
        "benchmark": "dot",
        "environment": report.environment(),
        "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
        "abi": {family.name: family.ABI for family in kernels.families("dot_general")},
        "quick": options.quick,
        "implementation": options.implementation,
        "geometric_means": geometric_means(results),
        "results": [result.as_json() for result in results],
        "tuning": tuning(results),
        "failures": failures,
    }
    report.write(options.json, found)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        selected = dot_cases.find(options.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.quick and not on_gpu():
        selected = [case.shrunk(QUICK_CPU_FLOPS) for case in selected]
    implementation = None if options.implementation == "auto" else options.implementation
    results: list[Result] = []
    failures: dict[str, str] = {}
    for case in report.progress(selected):
        try:
            results.append(run(case, implementation, options.quick))
            say(perf_line(results[-1]))
            if results[-1].launches is not None:
                failures[case.name] = results[-1].launches
        except Exception as error:  # one case must not cost the others
            failures[case.name] = traceback.format_exc()
            say(f" > {case.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if options.json:  # after every case, so that a run that is cut short loses nothing
            write_report(options, results, failures)
    if results:
        say("\n" + table(results) + "\n")
    for group, mean in geometric_means(results).items():
        say(f"geometric mean of XLA/ours, {group}: {mean:.3f}; least {min(r.speedup for r in results):.2f}")
    say(report.regret_line(results))
    for name, what in failures.items():
        say(f"failed: {name}: {what.splitlines()[-1]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
