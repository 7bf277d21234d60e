"""Matrix products with a long reduction: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.dot [--cases NAME ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import against_xla, dot_cases, report, timing
from benchmarks.dot_cases import Case
from benchmarks.report import on_gpu, percent, say
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
class Result(against_xla.Result):
    """One case's figures.

    Attributes:
      launches: what is wrong with the kernels of our calls; None where they are those of the plan, each once.
      entry: what the caches have; None where nothing was tuned.
    """

    family: str | None
    launches: str | None
    entry: Entry | None

    def as_json(self, *more: str) -> dict[str, Any]:
        found = dataclasses.replace(self, entry=None)
        fields = super(Result, found).as_json(*more)
        del fields["entry"]
        fields["case"]["name"] = self.case.name
        return fields


def run(case: Case, implementation: str | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    out = jnp.dtype(case.out_dtype)

    def ours(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, g, DIMENSIONS, None, out, implementation=implementation)

    def xla(x: jax.Array, g: jax.Array) -> jax.Array:
        return lax.dot_general(x, g, DIMENSIONS, preferred_element_type=out)

    fields, decision, entry = against_xla.measure(case, case.shapes, ours, xla, errors, quick)
    wrong = wrong_launches(planned_kernels(decision), fields["ours"])
    return Result(**fields, family=decision.family, launches=wrong, entry=entry)


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
    cut = "shorter reductions (at most 0.1 GFLOP)"
    parser = against_xla.parser("dot", "Products with a long reduction", "MxNxK of dot_cases.py; all", cut)
    return parser.parse_args(argv)


def write_report(options: argparse.Namespace, results: Sequence[Result], failures: dict[str, str]) -> None:
    if options.json:
        found = {
            "benchmark": "dot",
            **against_xla.header(options),
            "abi": {family.name: family.ABI for family in kernels.families("dot_general")},
            "geometric_means": geometric_means(results),
            "results": [result.as_json() for result in results],
            "tuning": tuning(results),
            "failures": failures | unplanned(results),
        }
        report.write(options.json, found)


def unplanned(results: Sequence[Result]) -> dict[str, str]:
    """By case, what is wrong with the kernels of our calls."""
    return {result.case.name: result.launches for result in results if result.launches is not None}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    selected = against_xla.selected(dot_cases.find, options.cases)
    if options.quick and not on_gpu():
        selected = [case.shrunk(QUICK_CPU_FLOPS) for case in selected]
    implementation = against_xla.implementation(options)
    results, failures = against_xla.run_all(
        selected, lambda case: run(case, implementation, options.quick), functools.partial(write_report, options)
    )
    failures |= unplanned(results)
    if results:
        say("\n" + table(results) + "\n")
    for group, mean in geometric_means(results).items():
        say(f"geometric mean of XLA/ours, {group}: {mean:.3f}; least {min(r.speedup for r in results):.2f}")
    return against_xla.concluded(results, failures)


if __name__ == "__main__":
    sys.exit(main())
