"""Matrix products with a long reduction: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.dot [--cases NAME ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import against_xla, dot_cases, timing
from benchmarks.against_xla import Benchmark
from benchmarks.dot_cases import Case
from benchmarks.report import distance
from jax_splitk import kernels
from jax_splitk.ops.decision import Decision
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.options import Implementation
from jax_splitk.tuning.result import TuningResult

QUICK_CPU_FLOPS = 1e8
DIMENSIONS = (((0,), (0,)), ((), ()))
SHORT_US = 20.0  # XLA's time: below it, launches and reductions dominate a product
SAMPLES = 16  # rows and columns of the result that are computed in float64


class Result(against_xla.Result):
    """One case's figures."""

    @property
    def wrong(self) -> str | None:
        """What is wrong with the kernels of our calls; None if each kernel of the plan ran once, and no other."""
        return wrong_launches(planned_kernels(self.decision), self.ours)


def run(case: Case, implementation: Implementation | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    out = jnp.dtype(case.problem().out_dtype)

    def ours(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, g, DIMENSIONS, None, out, implementation=implementation)

    def xla(x: jax.Array, g: jax.Array) -> jax.Array:
        return lax.dot_general(x, g, DIMENSIONS, preferred_element_type=out)

    return Result.measured(case, case.shapes, ours, xla, errors, quick)


def errors(functions: Iterable[Callable[..., Any]], lhs: jax.Array, rhs: jax.Array) -> list[float]:
    """||out - reference|| / ||reference|| of each function, in float64 over random rows and columns."""
    rng = np.random.default_rng(0)
    rows, columns = (np.sort(rng.permutation(x.shape[1])[:SAMPLES]) for x in (lhs, rhs))
    left, right = (np.asarray(x[:, at], np.float64) for x, at in ((lhs, rows), (rhs, columns)))
    found = (np.asarray(function(lhs, rhs), np.float64)[np.ix_(rows, columns)] for function in functions)
    return [distance(out, left.T @ right) for out in found]


# ---- launches --------------------------------------------------------------------------------------------------------


def planned_kernels(decision: Decision) -> list[str] | None:
    """The kernels of the plan; None if no GPU kernel of ours was chosen."""
    family = next((f for f in kernels.families(decision.problem.op, "cuda") if f.name == decision.family), None)
    if family is None:
        return None
    plan = family.plan(decision.problem, decision.config)
    return [launch.kernel for launch in plan.launches] if isinstance(plan, DevicePlan) else None


def wrong_launches(planned: Sequence[str] | None, timed: timing.Timing) -> str | None:
    """What is wrong with the kernels of a call in a trace. Each kernel of the plan must run once, and nothing else (no
    memset)."""
    if planned is None or timed.source != "device":
        return None
    expected = {name: float(planned.count(name)) for name in planned}
    if timed.launches == expected:
        return None
    shown = ", ".join(f"{name} {count:g} times" for name, count in timed.launches.items())
    return f"launched a call: {shown}; planned: {', '.join(planned)}"


# ---- reports ---------------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> tuple[dict[str, Any], list[str]]:
    """Geometric means of XLA's time over ours: over all cases, and over those that take XLA less than `SHORT_US`."""
    short = f"XLA below {SHORT_US:.0f} us"
    groups = {"all": [r.speedup for r in results], short: [r.speedup for r in results if r.xla.us < SHORT_US]}
    means = against_xla.geometric_means(groups)
    least = [f"least XLA/ours: {min(r.speedup for r in results):.2f}"] if results else []
    return {"geometric_means": means, "tuning": tuning(results)}, [*against_xla.mean_lines(means), *least]


def tuning(results: Sequence[Result]) -> list[Any]:
    """The decisions of the tuned cases, with the times of the choice, of the cost model's choice and of XLA: the text
    of a TuningResult, from which `benchmarks.tables` makes a table."""
    entries = [r.entry for r in results if r.entry is not None]
    kept = [dataclasses.replace(e, evidence=_evidence(e, (e.choice, e.predicted, XLA))) for e in entries]
    return json.loads(TuningResult(tuple((entry.key, entry) for entry in kept)).dumps())


def _evidence(entry: Entry, candidates: Sequence[Candidate | None]) -> dict[str, Any]:
    measurements = [m.as_dict() for m in entry.measurements if m.candidate in candidates]
    return {**entry.evidence, "measurements": measurements}


def _launches(timed: timing.Timing) -> str:
    return f"{sum(timed.launches.values()):g}" if timed.launches else ""


BENCHMARK = Benchmark(
    name="dot",
    about="Products with a long reduction",
    ops=("dot_general",),
    cases=dot_cases.DOT_CASES,
    groups=lambda case: (),
    cut="shorter reductions (at most 0.1 GFLOP)",
    shrunk=lambda case: case.shrunk(QUICK_CPU_FLOPS),
    run=run,
    columns={
        "m x n x k": lambda r: r.name,
        "implementation": lambda r: r.decision.implementation,
        **against_xla.TIMES,
        "kernels": lambda r: _launches(r.ours),
        "XLA kernels": lambda r: _launches(r.xla),
        **against_xla.WORKSPACE,
        **against_xla.ERRORS,
        "config": lambda r: " ".join(filter(None, (r.decision.family, r.config))),
    },
    summary=summary,
)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
