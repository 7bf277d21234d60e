"""The three passes of convolutions, each by itself: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.conv [--cases GROUP_PASS_OR_NAME ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

import jax_splitk
from benchmarks import against_xla, conv_cases, report
from benchmarks.conv_cases import GROUPS, Case
from benchmarks.report import on_gpu, percent, say
from jax_splitk import kernels

QUICK_CPU_FLOPS = 2e7


@dataclasses.dataclass(frozen=True)
class Result(against_xla.Result):
    """One case's figures. `ours_error` is our difference from XLA, relative; the tests compare with float64.

    Attributes:
      family: whose kernel it is; None for XLA's.
    """

    family: str | None

    @property
    def group(self) -> str:
        return self.case.group

    @property
    def name(self) -> str:
        return self.case.name


def functions(case: Case, implementation: str | None) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Ours, and what a user of JAX has: lax's convolution, or its derivative."""
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


def run(case: Case, implementation: str | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    ours, xla = functions(case, implementation)
    shapes = case.as_given().operand_shapes
    fields, decision, _ = against_xla.measure(case, shapes, ours, xla, _difference, quick)
    return Result(**fields, family=decision.family)


def _difference(compiled: Iterable[Callable[..., Any]], *operands: jax.Array) -> tuple[float, None]:
    ours, xla = (np.asarray(function(*operands), np.float32) for function in compiled)
    return float(np.linalg.norm(ours - xla) / np.linalg.norm(xla)), None


def table(results: Sequence[Result]) -> str:
    rows = [["group", "case", "family", "ours us", "XLA us", "XLA/ours", "of floor", "difference", "config"]]
    for r in results:
        figures = (f"{r.ours.us:.1f}", f"{r.xla.us:.1f}", f"{r.speedup:.2f}", percent(r.share_of_floor))
        rows.append([r.group, r.name, r.family or "xla", *figures, f"{r.ours_error:.1e}", r.config])
    return report.markdown(rows)


def summary(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Of each group XLA's time over ours, in geometric mean and at least, and the goals."""
    found = {}
    for group, (mean, least) in GROUPS.items():
        if speedups := [r.speedup for r in results if r.group == group]:
            figures = {"mean": statistics.geometric_mean(speedups), "least": min(speedups)}
            found[group] = {**figures, "goal": mean, "least_goal": least}
    return found


def write_report(options: argparse.Namespace, results: Sequence[Result], failures: dict[str, str]) -> None:
    if options.json:
        found = {
            "benchmark": "conv",
            **against_xla.header(options),
            "abi": {f.name: f.ABI for kind in conv_cases.PASSES.values() for f in kernels.families(kind.op)},
            "summary": summary(results),
            "results": [result.as_json("group", "name") for result in results],
            "failures": failures,
        }
        report.write(options.json, found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = against_xla.parser(
        "conv", "The three passes of convolutions", "groups, passes or names; all", "smaller cases (at most 20 MFLOP)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and their groups, and end")
    options = parser.parse_args(argv)
    selected = against_xla.selected(conv_cases.find, options.cases)
    if options.list:
        print("\n".join(f"{case.name}: {case.group}" for case in selected))
        return 0
    if options.quick and not on_gpu():
        selected = [case.shrunk(QUICK_CPU_FLOPS) for case in selected]
    results, failures = against_xla.run_all(
        selected,
        lambda case: run(case, against_xla.implementation(options), options.quick),
        functools.partial(write_report, options),
    )
    if results:
        say("\n" + table(results) + "\n")
    for group, figures in summary(results).items():
        say("{}: XLA/ours {mean:.2f} (goal {goal}), least {least:.2f}".format(group, **figures))
    return against_xla.concluded(results, failures)


if __name__ == "__main__":
    sys.exit(main())
