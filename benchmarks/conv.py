"""The three passes of convolutions, each by itself: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.conv [--cases GROUP_PASS_OR_NAME ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

import jax_splitk
from benchmarks import against_xla, conv_cases
from benchmarks.against_xla import Benchmark, Result
from benchmarks.conv_cases import GROUPS, Case
from benchmarks.report import distance
from jax_splitk.tuning.options import Implementation

QUICK_CPU_FLOPS = 2e7


def functions(
    case: Case, implementation: Implementation | None
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Our function, and lax's convolution or its derivative."""
    p, arguments = case.as_given(), case.arguments()
    ours: Callable[..., jax.Array] = getattr(jax_splitk, p.op)
    shapes = {"conv_dgrad": (p.lhs_shape,), "conv_wgrad": (p.rhs_shape,)}.get(p.op, ())
    ours = functools.partial(ours, implementation=implementation, **arguments)

    def forward(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **arguments)

    def xla(x: jax.Array, y: jax.Array) -> jax.Array:
        if p.op == "conv_fprop":
            return forward(x, y)
        lhs, rhs = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (p.lhs_shape, p.rhs_shape))
        if p.op == "conv_dgrad":
            return jax.linear_transpose(lambda lhs: forward(lhs, y), lhs)(x)[0]
        return jax.linear_transpose(lambda rhs: forward(x, rhs), rhs)(y)[0]

    return lambda x, y: ours(x, y, *shapes), xla


def run(case: Case, implementation: Implementation | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    shapes = case.as_given().operand_shapes
    return Result.measured(case, shapes, *functions(case, implementation), difference, quick)


def difference(compiled: Iterable[Callable[..., Any]], *operands: jax.Array) -> tuple[float, None]:
    """The difference of our result from XLA's; tests compare with float64."""
    ours, xla = (np.asarray(function(*operands), np.float32) for function in compiled)
    return distance(ours, xla), None


def summary(results: Sequence[Result]) -> tuple[dict[str, Any], list[str]]:
    """For each group, the geometric mean and the least of XLA's time over ours, with the goals."""
    found = {}
    for group, (mean, least) in GROUPS.items():
        if speedups := [r.speedup for r in results if r.case.group == group]:
            figures = {"mean": statistics.geometric_mean(speedups), "least": min(speedups)}
            found[group] = {**figures, "goal": mean, "least_goal": least}
    line = "{}: XLA/ours {mean:.2f} (goal {goal}), least {least:.2f}"
    return {"summary": found}, [line.format(group, **figures) for group, figures in found.items()]


BENCHMARK = Benchmark(
    name="conv",
    about="The three passes of convolutions",
    ops=tuple(kind.op for kind in conv_cases.PASSES.values()),
    cases=conv_cases.CONV_CASES,
    groups=lambda case: (case.group, case.which),
    cut="smaller cases (at most 20 MFLOP)",
    shrunk=lambda case: case.shrunk(QUICK_CPU_FLOPS),
    run=run,
    columns={
        "group": lambda r: r.case.group,
        "case": lambda r: r.name,
        "family": lambda r: r.decision.family or "xla",
        **against_xla.TIMES,
        "difference": lambda r: against_xla.error(r.ours_error),
        "config": lambda r: r.config,
    },
    summary=summary,
)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
